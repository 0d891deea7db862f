//! Values that a build's steps have and that neither its log nor its layers show.

use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Shorter values can't be told from ordinary text.
const SECRET_MIN: usize = 8;
/// What a secret's place in a log says.
const REDACTED: &[u8] = b"***";

/// A value that is not printed.
#[derive(Clone)]
pub struct SecretValue(pub(crate) String);

impl std::fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl SecretValue {
    /// A secret.
    ///
    /// # Errors
    /// When it is shorter than 8 bytes, or holds what no environment can.
    pub fn new(value: String) -> Result<Self, String> {
        if value.len() < SECRET_MIN {
            return Err(format!(
                "it has {} bytes; shorter than {SECRET_MIN} it could not be kept out of a log",
                value.len()
            ));
        }
        if value.contains('\0') {
            return Err("it has a NUL in it".to_owned());
        }
        Ok(Self(value))
    }
}

/// Takes secrets out of a stream, also where one lies across two pieces.
pub(crate) struct Redactor {
    secrets: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Redactor {
    pub(crate) fn new(secrets: &[(String, SecretValue)]) -> Self {
        let mut secrets: Vec<Vec<u8>> = secrets.iter().map(|(_, value)| value.0.clone().into_bytes()).collect();
        // One may hold another.
        secrets.sort_by_key(|s| std::cmp::Reverse(s.len()));
        Self { secrets, held: Vec::new() }
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        self.pass(false)
    }

    fn pass(&mut self, last: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.held.len());
        let mut at = 0;
        while at < self.held.len() {
            let rest = &self.held[at..];
            if !last && self.secrets.iter().any(|s| s.len() > rest.len() && s.starts_with(rest)) {
                // It may be the beginning of one.
                break;
            } else if let Some(secret) = self.secrets.iter().find(|s| rest.starts_with(s)) {
                out.extend_from_slice(REDACTED);
                at += secret.len();
            } else {
                out.push(rest[0]);
                at += 1;
            }
        }
        self.held.drain(..at);
        out
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.pass(true)
    }
}

/// The first file, link or name below a tree that has a secret in it.
pub(crate) fn leaked(tree: &Path, secrets: &[(String, SecretValue)]) -> io::Result<Option<(String, PathBuf)>> {
    if secrets.is_empty() {
        return Ok(None);
    }
    let has = |bytes: &[u8]| {
        secrets
            .iter()
            .find(|(_, s)| memchr::memmem::find(bytes, s.0.as_bytes()).is_some())
            .map(|(name, _)| name.clone())
    };
    let mut dirs = vec![tree.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            let meta = path.symlink_metadata()?;
            let name = path.file_name().and_then(|n| has(n.as_bytes()));
            let found = match () {
                () if name.is_some() => name,
                () if meta.is_symlink() => has(fs::read_link(&path)?.as_os_str().as_bytes()),
                () if meta.is_file() => in_file(&path, secrets)?,
                () => None,
            };
            if let Some(secret) = found {
                return Ok(Some((secret, path)));
            }
            if meta.is_dir() {
                dirs.push(path);
            }
        }
    }
    Ok(None)
}

fn in_file(path: &Path, secrets: &[(String, SecretValue)]) -> io::Result<Option<String>> {
    use std::io::Read;
    let longest = secrets.iter().map(|(_, s)| s.0.len()).max().unwrap_or(0);
    let mut file = fs::File::open(path)?;
    let (mut buffer, mut kept) = (vec![0; longest + (1 << 20)], 0);
    loop {
        let n = file.read(&mut buffer[kept..])?;
        if n == 0 {
            return Ok(None);
        }
        let end = kept + n;
        for (name, secret) in secrets {
            if memchr::memmem::find(&buffer[..end], secret.0.as_bytes()).is_some() {
                return Ok(Some(name.clone()));
            }
        }
        // A secret may lie across two pieces.
        let keep = end.min(longest - 1);
        buffer.copy_within(end - keep..end, 0);
        kept = keep;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(values: &[&str]) -> Vec<(String, SecretValue)> {
        values.iter().enumerate().map(|(n, v)| (format!("S{n}"), SecretValue::new((*v).to_owned()).unwrap())).collect()
    }

    #[test]
    fn a_secret_is_taken_out_wherever_the_stream_is_cut() {
        let text = b"begin secret-one secret-one-longer secret end secret-on";
        for cut in 0..text.len() {
            let mut redactor = Redactor::new(&secrets(&["secret-one", "secret-one-longer"]));
            let mut out = redactor.take(&text[..cut]);
            out.extend(redactor.take(&text[cut..]));
            out.extend(redactor.end());
            assert_eq!(String::from_utf8(out).unwrap(), "begin *** *** secret end secret-on", "{cut}");
        }
    }

    #[test]
    fn a_secret_is_found_in_contents_links_and_names() {
        let all = secrets(&["hunter2hunter2"]);
        let dir = tempfile::tempdir().unwrap();
        assert!(leaked(dir.path(), &all).unwrap().is_none());
        let mut long = vec![b'x'; (1 << 20) + 7];
        long.extend_from_slice(b"hunter2hunter2");
        fs::write(dir.path().join("long"), &long).unwrap();
        assert_eq!(leaked(dir.path(), &all).unwrap().unwrap().1, dir.path().join("long"));
        fs::remove_file(dir.path().join("long")).unwrap();
        std::os::unix::fs::symlink("/x/hunter2hunter2", dir.path().join("l")).unwrap();
        assert!(leaked(dir.path(), &all).unwrap().is_some());
        fs::remove_file(dir.path().join("l")).unwrap();
        fs::create_dir(dir.path().join("a-hunter2hunter2")).unwrap();
        assert_eq!(leaked(dir.path(), &all).unwrap().unwrap().0, "S0");
    }

    #[test]
    fn a_secret_does_not_print_and_is_not_too_short() {
        let secret = SecretValue::new("hunter2hunter2".to_owned()).unwrap();
        assert!(!format!("{secret:?}").contains("hunter2"));
        assert!(SecretValue::new("short".to_owned()).unwrap_err().contains('8'));
        assert!(SecretValue::new("nul\0nul\0nul".to_owned()).is_err());
    }
}
