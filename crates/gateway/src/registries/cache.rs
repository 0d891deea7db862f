//! Keeps a discovered set for a day, under a key of the settings it came from.

use super::{DiscoverEnv, RegistrySet};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Raised when the set's form or the way of asking changes.
const VERSION: u32 = 1;
/// A cache larger than this is not ours.
const MAX_FILE: u64 = 1 << 20;

/// Prefixes of variables that package clients read.
const VARIABLES: [&str; 12] = [
    "PIP_",
    "UV_",
    "NPM_CONFIG_",
    "npm_config_",
    "YARN_",
    "CARGO_",
    "GOPROXY",
    "GOSUMDB",
    "GOFLAGS",
    "PATH",
    "HTTPS_PROXY",
    "https_proxy",
];
/// Settings files outside the home folder, and folders of such.
const SYSTEM_FILES: [&str; 7] = [
    "/etc/pip.conf",
    "/etc/xdg/pip/pip.conf",
    "/etc/npmrc",
    "/usr/etc/npmrc",
    "/usr/local/etc/npmrc",
    "/etc/apt/sources.list",
    "/etc/gemrc",
];
const SYSTEM_FOLDERS: [&str; 2] = ["/etc/apt/sources.list.d", "/etc/apt/apt.conf.d"];
const HOME_FILES: [&str; 9] = [
    ".pip/pip.conf",
    ".config/pip/pip.conf",
    ".config/uv/uv.toml",
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".cargo/config.toml",
    ".cargo/config",
    ".config/go/env",
];

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    key: String,
    asked_at: u64,
    set: RegistrySet,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A hash of every setting that the clients read. Contents go in, so credentials must not come out.
pub(super) fn key(env: &DiscoverEnv) -> String {
    let mut hash = Sha256::new();
    let mut add = |name: &[u8], value: &[u8]| {
        for part in [name, value] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    };
    for index in &env.image_indexes {
        add(b"image index", index.as_bytes());
    }
    let mut variables: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| VARIABLES.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)))
        .collect();
    variables.sort();
    for (name, value) in &variables {
        add(name.as_encoded_bytes(), value.as_encoded_bytes());
    }
    for file in settings_files() {
        if let Ok(bytes) = fs::read(&file) {
            add(file.as_os_str().as_encoded_bytes(), &bytes);
        }
    }
    add(b"proxy", format!("{:?}", env.upstream_proxy).as_bytes());
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn settings_files() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = SYSTEM_FILES.iter().map(PathBuf::from).collect();
    for folder in SYSTEM_FOLDERS {
        let mut inside: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
        inside.sort();
        files.extend(inside);
    }
    if let Some(home) = std::env::home_dir() {
        files.extend(HOME_FILES.iter().map(|file| home.join(file)));
    }
    files
}

/// The kept set, if it is of this key and not older than a day.
pub(super) fn load(path: &Path, key: &str) -> Option<RegistrySet> {
    if fs::metadata(path).ok()?.len() > MAX_FILE {
        return None;
    }
    let stored: Stored = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let age = now().checked_sub(stored.asked_at)?;
    (stored.version == VERSION && stored.key == key && age < MAX_AGE.as_secs()).then_some(stored.set)
}

/// Keeps the set; by rename, so that a reader never sees half of it.
pub(super) fn save(path: &Path, key: &str, set: &RegistrySet) -> io::Result<()> {
    let stored = Stored { version: VERSION, key: key.to_owned(), asked_at: now(), set: set.clone() };
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&mut file, &stored)?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_settings_find_the_kept_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er.json");
        let set = RegistrySet { notes: vec!["x".into()], ..RegistrySet::default() };
        save(&path, "k", &set).unwrap();
        assert_eq!(load(&path, "k"), Some(set));
        assert_eq!(load(&path, "other"), None);
        fs::write(&path, b"{").unwrap();
        assert_eq!(load(&path, "k"), None);
    }
}
