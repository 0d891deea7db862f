//! Making what a machine wrote the same whenever it is written.

use crate::python::SOURCE_DATE_EPOCH;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Directories whose content is nobody's to keep.
const PASSING: [&str; 3] = ["tmp", "var/tmp", "run"];

type Failed = (PathBuf, io::Error);

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Failed + '_ {
    |e| (path.to_owned(), e)
}

/// Removes passing content, cuts times of change after the epoch to it, and makes compiled Python files name their source's
/// new time.
pub fn normalise(tree: &Path) -> Result<(), Failed> {
    for name in PASSING {
        let dir = tree.join(name);
        if !is_dir(&dir) {
            continue;
        }
        for entry in list(&dir)? {
            if is_dir(&entry) { fs::remove_dir_all(&entry) } else { fs::remove_file(&entry) }
                .map_err(failed(&entry))?;
        }
    }
    clamp(tree)
}

fn is_dir(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

fn list(dir: &Path) -> Result<Vec<PathBuf>, Failed> {
    let entries = fs::read_dir(dir).and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect());
    entries.map_err(failed(dir))
}

/// Deepest first: nothing below changes a directory afterwards. Compiled files come after their sources.
fn clamp(path: &Path) -> Result<(), Failed> {
    let meta = path.symlink_metadata().map_err(failed(path))?;
    if meta.is_dir() {
        let mut entries = list(path)?;
        entries.sort_by_key(|e| e.file_name().is_some_and(|n| n == "__pycache__"));
        for entry in entries {
            clamp(&entry)?;
        }
    }
    if meta.is_file() && path.extension().is_some_and(|e| e == "pyc") {
        agree(path).map_err(failed(path))?;
    }
    let seconds = meta.mtime().min(SOURCE_DATE_EPOCH);
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| (path.to_owned(), e.into()))
}

/// Writes the source's time of change, which was cut before, into a compiled file that names it (PEP 552: magic number,
/// flags, time, size). Where the source lies in an image below, its time is as old as it was.
fn agree(compiled: &Path) -> io::Result<()> {
    let source = || -> Option<PathBuf> {
        let dir = compiled.parent().filter(|d| d.file_name().is_some_and(|n| n == "__pycache__"))?;
        let stem = compiled.file_stem()?.to_str()?.split(".cpython-").next()?;
        Some(dir.parent()?.join(format!("{stem}.py")))
    };
    let Some(meta) = source().and_then(|s| s.symlink_metadata().ok()).filter(fs::Metadata::is_file) else {
        return Ok(());
    };
    let mut file = File::options().read(true).write(true).open(compiled)?;
    let mut head = [0; 16];
    if file.read_exact(&mut head).is_err() || head[4..8] != [0; 4] || head[12..16] != (meta.size() as u32).to_le_bytes()
    {
        return Ok(());
    }
    file.seek(SeekFrom::Start(8))?;
    file.write_all(&(meta.mtime() as u32).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_still_takes_compiled_files_for_current() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("m.py");
        fs::write(&source, "print('loaded')\n").unwrap();
        let python = |args: &[&str]| {
            let ran = std::process::Command::new("python3").args(args).current_dir(dir.path()).output().unwrap();
            assert!(ran.status.success(), "{ran:?}");
            String::from_utf8_lossy(&ran.stderr).into_owned()
        };
        python(&["-c", "import py_compile; py_compile.compile('m.py')"]);
        fs::create_dir_all(dir.path().join("tmp/x")).unwrap();
        normalise(dir.path()).unwrap();
        assert_eq!(source.metadata().unwrap().mtime(), SOURCE_DATE_EPOCH);
        assert!(!dir.path().join("tmp/x").exists() && dir.path().join("tmp").exists());
        // "matches" is what -v says when it does.
        let said = python(&["-v", "-c", "import m"]);
        assert!(said.lines().any(|l| l.contains("m.cpython") && l.contains("matches")), "{said}");
    }
}
