//! Reads a stranger's folder without being hurt by it: regular files only, bounded sizes, a bounded walk.

use crate::ProjectError;
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Largest file that is read for its meaning. The largest lock file seen in the wild was below 8 MiB.
const MAX_FILE: u64 = 32 << 20;
/// Entries that detection looks at before it stops. Enough for every project with its tests near the top.
const MAX_ENTRIES: usize = 20_000;
/// Folder depth that detection descends to.
const MAX_DEPTH: usize = 8;

/// Bytes of a regular file below the root; `None` where there is none (a FIFO, a device, a dangling link and a folder
/// count as none: opening a FIFO would wait for a writer that never comes).
pub(crate) fn bytes(root: &Path, name: &str) -> Result<Option<Vec<u8>>, ProjectError> {
    let path = root.join(name);
    match fs::metadata(&path) {
        Ok(meta) if meta.is_file() => {}
        _ => return Ok(None),
    }
    let fail = |source| ProjectError::Unreadable { path: path.clone(), source };
    let file = fs::File::open(&path).map_err(fail)?;
    let mut content = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut content).map_err(fail)?;
    if content.len() as u64 > MAX_FILE {
        return Err(ProjectError::Broken {
            path: name.into(),
            line: None,
            column: None,
            message: format!("is larger than {} MiB", MAX_FILE >> 20),
        });
    }
    Ok(Some(content))
}

/// The same as text; bytes that are not UTF-8 become replacement characters (pip decodes by locale and is as lenient).
pub(crate) fn text(root: &Path, name: &str) -> Result<Option<String>, ProjectError> {
    Ok(bytes(root, name)?.map(|b| {
        let b = b.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&b);
        String::from_utf8_lossy(b).into_owned()
    }))
}

/// A TOML file, parsed. What is not TOML is an error that names line and column.
pub(crate) fn toml(root: &Path, name: &str) -> Result<Option<toml::Table>, ProjectError> {
    let Some(content) = bytes(root, name)? else { return Ok(None) };
    let broken = |line, column, message| ProjectError::Broken { path: name.into(), line, column, message };
    let text = match std::str::from_utf8(&content) {
        Ok(text) => text,
        Err(e) => {
            let (line, column) = line_column(&content, e.valid_up_to());
            return Err(broken(Some(line), Some(column), "is not UTF-8, which TOML asks for".to_owned()));
        }
    };
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match text.parse::<toml::Table>() {
        Ok(table) => Ok(Some(table)),
        Err(e) => {
            let at = e.span().map(|span| line_column(text.as_bytes(), span.start));
            let message = e.message().lines().next().unwrap_or("is not TOML").to_owned();
            Err(broken(at.map(|a| a.0), at.map(|a| a.1), message))
        }
    }
}

pub(crate) fn line_column(text: &[u8], offset: usize) -> (usize, usize) {
    let before = &text[..offset.min(text.len())];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let start = before.iter().rposition(|b| *b == b'\n').map_or(0, |p| p + 1);
    (line, String::from_utf8_lossy(&before[start..]).chars().count() + 1)
}

/// Whether a regular file of this name is there.
pub(crate) fn is_file(root: &Path, name: &str) -> bool {
    fs::metadata(root.join(name)).is_ok_and(|m| m.is_file())
}

/// What a walk over the folder saw. File names that are not UTF-8 are passed over: no Python test has one.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Regular files, relative to the root, sorted.
    pub files: Vec<PathBuf>,
    /// Folders, relative to the root, sorted.
    pub dirs: Vec<PathBuf>,
    /// The walk stopped at its bound.
    pub truncated: bool,
}

/// Walks breadth first, so that what is near the top is seen before the bound is reached. Symbolic links are never
/// followed, so that a loop of them ends at once.
pub(crate) fn walk(root: &Path) -> Seen {
    let mut seen = Seen::default();
    let mut level = vec![PathBuf::new()];
    let mut entries = 0_usize;
    for _ in 0..MAX_DEPTH {
        let mut next = Vec::new();
        for dir in level {
            let Ok(list) = fs::read_dir(root.join(&dir)) else { continue };
            for entry in list {
                let Ok(entry) = entry else { break };
                entries += 1;
                if entries > MAX_ENTRIES {
                    seen.truncated = true;
                    seen.files.sort();
                    seen.dirs.sort();
                    return seen;
                }
                let (Ok(kind), Ok(name)) = (entry.file_type(), entry.file_name().into_string()) else { continue };
                let path = dir.join(&name);
                if kind.is_file() {
                    seen.files.push(path);
                } else if kind.is_dir() && !never_holds_tests(root, &path, &name) {
                    seen.dirs.push(path.clone());
                    next.push(path);
                }
            }
        }
        level = next;
    }
    seen.truncated |= !level.is_empty();
    seen.files.sort();
    seen.dirs.sort();
    seen
}

/// pytest's own `norecursedirs` and what else is never the project's.
fn never_holds_tests(root: &Path, path: &Path, name: &str) -> bool {
    name.starts_with('.')
        || name.ends_with(".egg")
        || matches!(name, "node_modules" | "__pycache__" | "_darcs" | "CVS" | "dist" | "build")
        || is_file(&root.join(path), "pyvenv.cfg")
}
