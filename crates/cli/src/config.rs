//! The configuration's file.

use crate::failure::Failure;
use serde::Deserialize;
use std::path::Path;
use trialrun_model::ByteSize;

/// Where it is, unless `TRIALRUN_CONFIG` or `--config` says otherwise.
pub const PLACE: &str = "/etc/trialrun/config.toml";

/// What can be configured. A file that is not there configures nothing.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The cache.
    pub cache: Cache,
}

/// The cache directory.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cache {
    /// Its budget: a number of bytes, or a size such as "20G".
    pub max_bytes: Option<Size>,
}

/// A size, as people or programs write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Written")]
pub struct Size(pub ByteSize);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
}

impl TryFrom<Written> for Size {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Number(bytes) => Ok(Self(ByteSize(bytes))),
            Written::Text(text) => text.parse().map(Self).map_err(|e: trialrun_model::ByteSizeError| e.to_string()),
        }
    }
}

impl Config {
    /// Reads it.
    ///
    /// # Errors
    /// A file that can't be read or has what is not known in it.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other.map_err(|e| Failure::usage(format!("can't read {}: {e}", path.display())))?,
        };
        toml::from_str(&text).map_err(|e| Failure::usage(format!("{}: {}", path.display(), e.to_string().trim_end())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        Config::read(file.path())
    }

    #[test]
    fn sizes_read_as_people_and_programs_write_them() {
        let max = |text: &str| read(text).unwrap().cache.max_bytes.map(|s| s.0.bytes());
        assert_eq!(max("cache.max_bytes = 5"), Some(5));
        assert_eq!(max("[cache]\nmax_bytes = '2G'"), Some(2 << 30));
        assert_eq!(max(""), None);
        assert_eq!(Config::read(Path::new("/nothing/here")).unwrap(), Config::default());
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (text, word) in [
            ("[cash]", "cash"),
            ("cache.max = 5", "max"),
            ("cache.max_bytes = 'x'", "x"),
            ("cache.max_bytes = -1", "max_bytes"),
            ("=", "config"),
        ] {
            let said = read(text).unwrap_err().message;
            assert!(said.contains(word) || text == "=", "{text}: {said}");
        }
    }
}
