//! What of a project folder goes into the machine.
//!
//! `.git` goes along: versions are derived from it (setuptools-scm), and suites look at it. What any checkout grows and
//! no test needs stays behind. `.gitignore` is followed only inside a git work tree: an unpacked sdist has a
//! `.gitignore` too, and it names files that the sdist carries on purpose (a generated `_version.py`); and even in a
//! work tree a file that git tracks is never dropped, whatever the patterns say.

use serde::Serialize;
use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Folders that are never uploaded, at any depth.
pub const DROPPED_DIRS: &[&str] = &[
    "node_modules",
    "__pycache__",
    ".tox",
    ".nox",
    ".venv",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".ipynb_checkpoints",
];
/// Endings of files that are never uploaded.
pub const DROPPED_SUFFIXES: &[&str] = &[".pyc", ".pyo"];
/// A folder that holds this file is a virtual environment of the host, whatever its name, and is never uploaded: its
/// interpreter and scripts name paths that do not exist in the machine.
pub const VENV_MARK: &str = "pyvenv.cfg";

/// The rules for one folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UploadRules {
    /// Names of folders to leave out.
    pub dropped_dirs: Vec<String>,
    /// Endings of file names to leave out.
    pub dropped_suffixes: Vec<String>,
    /// Follow `.gitignore` files (the folder is inside a git work tree).
    pub use_gitignore: bool,
    /// Top of that work tree; above the folder when only a part of a repository is uploaded.
    pub work_tree: Option<PathBuf>,
    /// Paths that git tracks below the folder, relative to it; these go along whatever `.gitignore` says. `None` when
    /// the index could not be read: then `.gitignore` is not followed either.
    pub tracked: Option<BTreeSet<PathBuf>>,
    /// Facts worth telling.
    pub notes: Vec<String>,
}

impl UploadRules {
    /// Whether the fixed rules leave an entry out. `path` is relative to the project; `holds_venv_mark` is asked of
    /// folders only. Tracked files are kept.
    #[must_use]
    pub fn drops(&self, path: &Path, is_dir: bool, holds_venv_mark: bool) -> bool {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { return false };
        let matched = if is_dir {
            holds_venv_mark || self.dropped_dirs.iter().any(|d| d == name)
        } else {
            self.dropped_suffixes.iter().any(|s| name.ends_with(s.as_str()))
        };
        matched && !self.keeps(path, is_dir)
    }

    /// Whether git tracks the entry, or something below it, so that it has to go along.
    #[must_use]
    pub fn keeps(&self, path: &Path, is_dir: bool) -> bool {
        let Some(tracked) = &self.tracked else { return false };
        // `Path` compares by components, so what lies below a folder follows it directly.
        if is_dir {
            tracked.range(path.to_owned()..).next().is_some_and(|p| p.starts_with(path))
        } else {
            tracked.contains(path)
        }
    }
}

/// The rules for this folder.
#[must_use]
pub fn upload_rules(path: &Path) -> UploadRules {
    let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
    let mut rules = UploadRules {
        dropped_dirs: own(DROPPED_DIRS),
        dropped_suffixes: own(DROPPED_SUFFIXES),
        use_gitignore: false,
        work_tree: None,
        tracked: None,
        notes: Vec::new(),
    };
    let Ok(full) = fs::canonicalize(path) else { return rules };
    let Some(top) = full.ancestors().find(|a| fs::symlink_metadata(a.join(".git")).is_ok()) else { return rules };
    rules.work_tree = Some(top.to_owned());
    if top != full {
        rules.notes.push(format!("part of the git work tree {}: its .git is not uploaded", top.display()));
    }
    let Ok(prefix) = full.strip_prefix(top) else { return rules };
    match tracked(&top.join(".git")) {
        Some(all) => {
            rules.use_gitignore = true;
            rules.tracked = Some(all.iter().filter_map(|p| p.strip_prefix(prefix).ok()).map(Path::to_owned).collect());
        }
        None => rules.notes.push("git's index could not be read: .gitignore is not followed".to_owned()),
    }
    rules
}

/// The largest index that is read: about a million paths.
const MAX_INDEX: u64 = 256 << 20;

fn tracked(git: &Path) -> Option<BTreeSet<PathBuf>> {
    let dir = if git.is_dir() {
        git.to_owned()
    } else {
        // A linked work tree or submodule: the file `.git` names the folder.
        let mut text = String::new();
        fs::File::open(git).ok().filter(|_| git.is_file())?.take(4096).read_to_string(&mut text).ok()?;
        git.parent()?.join(text.strip_prefix("gitdir:")?.trim())
    };
    let index = dir.join("index");
    match fs::metadata(&index) {
        // A new repository has no index; it tracks nothing.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && dir.join("HEAD").is_file() => {
            return Some(BTreeSet::new());
        }
        Ok(meta) if meta.is_file() && meta.len() <= MAX_INDEX => {}
        _ => return None,
    }
    index_paths(&fs::read(index).ok()?)
}

/// Reads paths from git's index, versions 2 to 4 (gitformat-index(5)), with SHA-1 or SHA-256 names.
fn index_paths(index: &[u8]) -> Option<BTreeSet<PathBuf>> {
    parse_index(index, 20).or_else(|| parse_index(index, 32))
}

fn parse_index(index: &[u8], hash: usize) -> Option<BTreeSet<PathBuf>> {
    use std::os::unix::ffi::OsStrExt;
    let word = |at: usize| Some(u32::from_be_bytes(index.get(at..at + 4)?.try_into().ok()?));
    let (version, count) = (word(4)?, word(8)?);
    if index.get(..4)? != b"DIRC" || !(2..=4).contains(&version) {
        return None;
    }
    let mut paths = BTreeSet::new();
    let mut at = 12;
    let mut name: Vec<u8> = Vec::new();
    for _ in 0..count {
        let start = at;
        let mode = word(at + 24)?;
        // Regular files, links and submodules; anything else means that the hash length was guessed wrong.
        if !matches!(mode >> 12, 0o10 | 0o12 | 0o16 | 0o4) {
            return None;
        }
        at += 40 + hash;
        let flags = u16::from_be_bytes(index.get(at..at + 2)?.try_into().ok()?);
        at += 2;
        if flags & 0x4000 != 0 {
            at += 2;
        }
        if version == 4 {
            let mut strip = 0_usize;
            loop {
                let byte = *index.get(at)?;
                at += 1;
                strip = strip.checked_shl(7)? | usize::from(byte & 0x7f);
                if byte & 0x80 == 0 {
                    break;
                }
                strip = strip.checked_add(1)?;
            }
            name.truncate(name.len().checked_sub(strip)?);
        } else {
            name.clear();
        }
        let end = at + index.get(at..)?.iter().position(|b| *b == 0)?;
        name.extend_from_slice(&index[at..end]);
        if name.is_empty() {
            return None;
        }
        at = if version == 4 { end + 1 } else { start + ((end - start) / 8 + 1) * 8 };
        paths.insert(PathBuf::from(std::ffi::OsStr::from_bytes(&name)));
    }
    Some(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn git(dir: &Path, args: &[&str]) -> bool {
        Command::new("git").arg("-C").arg(dir).args(args).output().is_ok_and(|o| o.status.success())
    }

    #[test]
    fn gitignore_counts_only_in_a_work_tree_and_never_against_tracked_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".gitignore"), "_version.py\n").unwrap();
        assert!(!upload_rules(dir.path()).use_gitignore);
        if !git(dir.path(), &["init", "-q"]) {
            eprintln!("skipped: git is not installed");
            return;
        }
        assert_eq!(upload_rules(dir.path()).tracked, Some(BTreeSet::new()));
        fs::create_dir_all(dir.path().join("sub/node_modules")).unwrap();
        for name in ["_version.py", "sub/a.py", "sub/long_name_0123456789.py", "sub/node_modules/x.js"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        for version in ["2", "4"] {
            assert!(
                git(dir.path(), &["add", "-f", "."]) && git(dir.path(), &["update-index", "--index-version", version])
            );
            let rules = upload_rules(dir.path());
            assert!(rules.use_gitignore);
            assert!(rules.keeps(Path::new("_version.py"), false), "version {version}");
            assert!(!rules.drops(Path::new("sub/node_modules"), true, false));
            assert!(rules.drops(Path::new("node_modules"), true, false));
            let sub = upload_rules(&dir.path().join("sub"));
            assert!(sub.keeps(Path::new("a.py"), false) && !sub.notes.is_empty());
            assert_eq!(sub.tracked.unwrap().len(), 3);
        }
    }

    #[test]
    fn a_mangled_index_is_unreadable_and_not_a_crash() {
        assert_eq!(index_paths(b"DIRC"), None);
        assert_eq!(index_paths(b"DIRC\0\0\0\x02\xff\xff\xff\xff"), None);
        let mut index = b"DIRC\0\0\0\x04\0\0\0\x01".to_vec();
        index.extend([0xff; 200]);
        assert_eq!(index_paths(&index), None);
    }

    #[test]
    fn fixed_rules_drop_what_checkouts_grow() {
        let dir = tempfile::tempdir().unwrap();
        let rules = upload_rules(dir.path());
        for (path, is_dir, venv, want) in [
            ("a/__pycache__", true, false, true),
            ("a/x.pyc", false, false, true),
            ("myenv", true, true, true),
            ("venv", true, false, false),
            (".git", true, false, false),
            ("src", true, false, false),
        ] {
            assert_eq!(rules.drops(Path::new(path), is_dir, venv), want, "{path}");
        }
    }
}
