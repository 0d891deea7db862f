//! What a user asks for when creating a sandbox.

use crate::Limits;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Which image a machine starts from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ImageRef {
    /// A named image of the store, such as the stock image `python`.
    Named(String),
    /// An image by its digest, `sha256:…`.
    Digest(String),
    /// An image of a registry, by its reference, after `oci:`.
    Oci(String),
    /// A safe subset of the host's own system, read-only below a writable layer.
    Host,
}

/// An image reference that could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{text:?} is not an image name (lower-case letters, digits, dots and dashes; or sha256:…; or oci:HOST/NAME:TAG; or host)"
)]
pub struct ImageRefError {
    text: String,
}

impl FromStr for ImageRef {
    type Err = ImageRefError;
    fn from_str(text: &str) -> Result<Self, ImageRefError> {
        let bad = || ImageRefError { text: text.to_owned() };
        if text == "host" {
            return Ok(Self::Host);
        }
        if let Some(hex) = text.strip_prefix("sha256:") {
            let ok = hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            return if ok { Ok(Self::Digest(text.to_owned())) } else { Err(bad()) };
        }
        if let Some(reference) = text.strip_prefix("oci:") {
            // Its grammar is the registry client's business; it becomes a file's name and part of an address.
            let ok = (1..=200).contains(&reference.len())
                && reference.bytes().all(|b| b.is_ascii_alphanumeric() || b"./:@_-[]".contains(&b));
            return if ok { Ok(Self::Oci(reference.to_owned())) } else { Err(bad()) };
        }
        let ok = !text.is_empty()
            && text.len() <= 128
            && text.as_bytes()[0].is_ascii_alphanumeric()
            && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_'));
        if ok { Ok(Self::Named(text.to_owned())) } else { Err(bad()) }
    }
}

impl TryFrom<String> for ImageRef {
    type Error = ImageRefError;
    fn try_from(text: String) -> Result<Self, ImageRefError> {
        text.parse()
    }
}

impl From<ImageRef> for String {
    fn from(image: ImageRef) -> String {
        image.to_string()
    }
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) | Self::Digest(name) => f.write_str(name),
            Self::Oci(reference) => write!(f, "oci:{reference}"),
            Self::Host => f.write_str("host"),
        }
    }
}

/// What was asked for. The egress policy travels beside it, because it changes during a sandbox's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// The image.
    pub image: ImageRef,
    /// Ceilings.
    pub limits: Limits,
    /// Environment of every exec, on top of the image's.
    pub env: Vec<(String, String)>,
    /// Host name inside.
    pub hostname: String,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            image: ImageRef::Named("python".to_owned()),
            limits: Limits::default(),
            env: Vec::new(),
            hostname: "trialrun".to_owned(),
        }
    }
}

/// The isolation layers that a machine really runs under, as its driver reported them after the start.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Isolation {
    /// `container` or `microvm`.
    pub driver: String,
    /// Layers in force, such as `user namespace`, `seccomp allow-list`, `landlock`, `cgroup hybrid`.
    pub layers: Vec<String>,
    /// What was asked for or usual but is not in force, each with its reason.
    pub missing: Vec<String>,
    /// Facts worth telling, such as "4 vCPUs asked for, 2 cores present: quota over all cores".
    pub notes: Vec<String>,
}

/// An environment entry that no process gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// There is no name.
    #[error("an environment name is empty")]
    NoName,
    /// The name holds what ends it, or what a shell on the way could take for a command.
    #[error("environment name {name:?} holds {odd:?}, which no name has")]
    Name {
        /// The name.
        name: String,
        /// The byte.
        odd: char,
    },
    /// The value holds a NUL.
    #[error("the value of environment entry {name} holds NUL")]
    Value {
        /// The entry's name.
        name: String,
    },
}

/// Refuses entries that no process can be given, and names with a blank or a character that is special to a shell. A name
/// with `.`, `-`, `:`, `/`, `%` or bytes beyond ASCII is odd, but a name (Bash exports functions as `BASH_FUNC_x%%`).
///
/// # Errors
/// The first thing that is wrong.
pub fn check_env(name: &[u8], value: &[u8]) -> Result<(), EnvError> {
    let text = || String::from_utf8_lossy(name).into_owned();
    if name.is_empty() {
        return Err(EnvError::NoName);
    }
    let special = |byte: &&u8| byte.is_ascii_control() || b" =`$;&|<>()[]{}*?!~^#'\"\\,".contains(byte);
    if let Some(odd) = name.iter().find(special) {
        return Err(EnvError::Name { name: text(), odd: char::from(*odd) });
    }
    if value.contains(&0) {
        return Err(EnvError::Value { name: text() });
    }
    Ok(())
}

/// Environment of every exec before the image's, the sandbox's and the exec's own entries.
#[must_use]
pub fn default_env() -> Vec<(String, String)> {
    [
        ("PATH", "/workspace/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("LANG", "C.UTF-8"),
        // Debian marks its Python as externally managed (PEP 668); in a machine that is thrown away there is nothing
        // to protect, and the contract is that pip works without a virtual environment.
        ("PIP_BREAK_SYSTEM_PACKAGES", "1"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
        ("PIP_ROOT_USER_ACTION", "ignore"),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_environment_names_are_named() {
        for name in ["BASH_FUNC_x%%", "odd-name.1", "npm_config_//host/:_auth", "é", "A"] {
            assert_eq!(check_env(name.as_bytes(), b"any $(value)\n"), Ok(()), "{name}: odd, but a name");
        }
        for name in ["", "B=C", "A;touch /tmp/p", "A B", "$(id)", "a\n", "a\0", "`x`"] {
            assert!(check_env(name.as_bytes(), b"").is_err_and(|e| e.to_string().contains("name")), "{name:?}");
        }
        assert_eq!(check_env(b"N", b"a\0b"), Err(EnvError::Value { name: "N".into() }));
    }

    #[test]
    fn image_references_read_and_print_alike() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let pinned = format!("oci:[::1]:5000/a/b@{digest}");
        for text in ["python", "host", "my-image_1.2", "oci:debian", "oci:localhost:5000/a/b:1.2", &pinned, &digest] {
            assert_eq!(text.parse::<ImageRef>().unwrap().to_string(), text);
        }
        for text in ["", "Python", "../x", "a/b", "sha256:12", "-x", "oci:", "oci:a b", "oci:a\n", "oci:é"] {
            assert!(text.parse::<ImageRef>().is_err(), "{text}");
        }
    }
}
