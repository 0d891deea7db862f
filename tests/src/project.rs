//! Small projects for `trialrun test`.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Writes a project of these files below `parent` and gives its folder.
///
/// # Panics
/// When it can't be written.
pub fn write(parent: &Path, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let dir = parent.join(name);
    for (file, content) in files {
        let path = dir.join(file);
        fs::create_dir_all(path.parent().unwrap_or(&dir)).expect("a folder");
        fs::write(path, content).expect("a file");
    }
    dir
}
