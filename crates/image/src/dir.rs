//! Private directories, and files and trees that appear whole or not at all.

use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// A step on a file or directory of the cache failed.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The file system refused.
    #[error("failed to {step} {}", path.display())]
    Io {
        /// What was done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The directory is not ours to use.
    #[error("can't use the cache directory {}: {why}; run as its owner, or name another (--cache-dir)", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
        /// The refusal of the file system, if it was one.
        #[source]
        source: Option<io::Error>,
    },
}

pub(crate) fn at<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DirError + 'a {
    move |source| DirError::Io { step, path: path.to_owned(), source }
}

/// Makes `CACHE/<name>` with mode 0700 when it is missing, and refuses one that others could enter.
pub(crate) fn private(cache_dir: &Path, name: &str) -> Result<PathBuf, DirError> {
    let path = cache_dir.join(name);
    let found = match std::fs::metadata(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.and_then(|()| std::fs::metadata(&path))
        }
        other => other,
    };
    let found = found.map_err(|source| DirError::Unusable {
        path: cache_dir.to_owned(),
        why: format!("{name} in it can't be made or read"),
        source: Some(source),
    })?;
    let unusable = |why| Err(DirError::Unusable { path: path.clone(), why, source: None });
    if !found.is_dir() {
        return unusable("it is not a directory".into());
    }
    // Set-user-id files of an image must be out of reach for the host's users.
    let mode = found.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return unusable(format!("it is open to other users (mode {mode:o}); chmod 700 it"));
    }
    let me = rustix::process::geteuid().as_raw();
    if found.uid() != me {
        return unusable(format!("it belongs to uid {} and this is uid {me}", found.uid()));
    }
    Ok(path)
}

/// Writes a file that appears whole or not at all.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), DirError> {
    let temp = path.with_file_name(format!(".{}", unique("write")));
    let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temp).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temp, path)
    });
    written.map_err(|source| {
        let _ = std::fs::remove_file(&temp);
        DirError::Io { step: "write", path: path.to_owned(), source }
    })
}

/// Distinguishes temporary names of this and other live processes.
fn unique(what: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
    format!("tmp-{what}-{}-{nanos:08x}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Takes an exclusive lock on `path`, calling `waiting` once when another process holds it.
pub(crate) fn lock(path: &Path, waiting: impl FnOnce()) -> Result<File, DirError> {
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path).map_err(at("open", path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => waiting(),
        Err(e) => return Err(at("lock", path)(e.into())),
    }
    loop {
        match flock(&file, FlockOperation::LockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(at("lock", path)(e.into())),
        }
    }
}

/// A directory under way: `parent/.tmp-…`, with a mark in it that its maker holds locked. Dropped, it is removed; after a
/// crash, [`sweep`] removes it.
#[derive(Debug)]
pub(crate) struct Temp {
    path: PathBuf,
    _mark: File,
    kept: bool,
}

/// Names of the mark, and of the lock under which a temporary directory gets or loses its mark.
const MARK: &str = ".mark";
const LOCK: &str = ".tmp.lock";

impl Temp {
    pub fn new(parent: &Path) -> Result<Self, DirError> {
        let _lock = lock(&parent.join(LOCK), || {})?;
        let path = parent.join(format!(".{}", unique("tree")));
        DirBuilder::new().mode(0o700).create(&path).map_err(at("create", &path))?;
        let mark = lock(&path.join(MARK), || {})?;
        Ok(Self { path, _mark: mark, kept: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves it to its place. `false`: another got there first, which is as good.
    pub fn publish(mut self, place: &Path) -> Result<bool, DirError> {
        let mark = self.path.join(MARK);
        std::fs::remove_file(&mark).map_err(at("remove", &mark))?;
        match std::fs::rename(&self.path, place) {
            Ok(()) => {
                self.kept = true;
                Ok(true)
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => Ok(false),
            Err(e) => Err(at("move into place", place)(e)),
        }
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = std::fs::remove_dir_all(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "a temporary tree could not be removed");
        }
    }
}

/// Removes what dead builders left in `parent`.
pub(crate) fn sweep(parent: &Path) -> Result<(), DirError> {
    let entries = std::fs::read_dir(parent).map_err(at("list", parent))?;
    let left: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b".tmp-")))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    let _lock = lock(&parent.join(LOCK), || {})?;
    for path in left {
        let Ok(mark) = OpenOptions::new().write(true).open(path.join(MARK)) else {
            // Without its mark it is either a file being written, or a tree between its mark's removal and its rename.
            // Both last a moment; what a crash left is old.
            if age(&path).is_some_and(|s| s > 60) {
                let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
            }
            continue;
        };
        if flock(&mark, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::info!(path = %path.display(), "removing what an interrupted build left");
            match std::fs::remove_dir_all(&path) {
                // Its maker, alive after all, published or removed it between our look at its mark and now.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other.map_err(at("remove", &path))?,
            }
        }
    }
    Ok(())
}

fn age(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok()?.modified().ok()?.elapsed().ok().map(|d| d.as_secs())
}

/// Writes `root/relative` with exactly `mode`, whatever the umask, and makes its parent directories (0755).
pub(crate) fn put(root: &Path, relative: &str, mode: u32, bytes: &[u8]) -> Result<(), DirError> {
    let path = root.join(relative);
    put_dirs(root, Path::new(relative).parent().unwrap_or(Path::new("")))?;
    // A link in the way would lead out of the tree.
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(at("replace", &path)(e)),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.set_permissions(Permissions::from_mode(mode))
        })
        .map_err(at("write", &path))
}

/// Makes `root/relative` and what is missing above it, each with mode 0755.
pub(crate) fn put_dirs(root: &Path, relative: &Path) -> Result<(), DirError> {
    let mut path = root.to_owned();
    for part in relative.components() {
        path.push(part);
        put_dir(&path, 0o755)?;
    }
    Ok(())
}

/// Makes one directory with exactly `mode` when nothing is there.
pub(crate) fn put_dir(path: &Path, mode: u32) -> Result<(), DirError> {
    match std::fs::create_dir(path) {
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(at("create", path)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(at("create", path)(e)),
    }
}
