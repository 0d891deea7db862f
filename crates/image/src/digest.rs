//! The identity of a tree: the SHA-256 of a canonical manifest.
//!
//! ```text
//! "trialrun tree 1\n", then one entry for each file, sorted by path (bytes, relative, the root is empty):
//!   path  type (one of "dflcbps")  mode  uid  gid  size  mtime seconds  mtime nanoseconds  rdev
//!   content (SHA-256 of a file's bytes, a link's target, else empty)
//!   number of extended attributes, then for each, sorted by name: name  value
//! ```
//! Numbers are 8 bytes, least significant first; byte strings follow their length. The size of a directory, device,
//! pipe or socket counts as 0: it says how a file system stores it. Which names are hard links of one file does not
//! count either: an overlay breaks links at the first write anyway.

use rustix::fs::{lgetxattr, llistxattr};
use sha2::{Digest, Sha256};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// A tree could not be read.
#[derive(Debug, thiserror::Error)]
#[error("failed to read {} for its digest", path.display())]
pub struct DigestError {
    path: PathBuf,
    source: io::Error,
}

/// What was counted on the way.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub bytes: u64,
    pub files: u64,
}

/// The digest of the tree at `root`, as 64 hex digits.
///
/// # Errors
/// When a file can't be read.
pub fn tree_digest(root: &Path) -> Result<String, DigestError> {
    measure(root).map(|(digest, _)| digest)
}

pub(crate) fn measure(root: &Path) -> Result<(String, Totals), DigestError> {
    let mut paths = vec![PathBuf::new()];
    collect(root, Path::new(""), &mut paths)?;
    // By bytes, not by components: `a-b` comes before `a/b`.
    paths.sort_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    let mut manifest = Sha256::new_with_prefix("trialrun tree 1\n");
    let mut totals = Totals::default();
    for path in paths {
        let full = if path.as_os_str().is_empty() { root.to_owned() } else { root.join(&path) };
        entry(&mut manifest, &mut totals, &path, &full).map_err(|source| DigestError { path: full, source })?;
    }
    Ok((hex(&manifest.finalize()), totals))
}

fn collect(root: &Path, dir: &Path, paths: &mut Vec<PathBuf>) -> Result<(), DigestError> {
    let full = root.join(dir);
    let failed = |source| DigestError { path: full.clone(), source };
    for entry in std::fs::read_dir(&full).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = dir.join(entry.file_name());
        if entry.file_type().map_err(failed)?.is_dir() {
            collect(root, &path, paths)?;
        }
        paths.push(path);
    }
    Ok(())
}

fn entry(manifest: &mut Sha256, totals: &mut Totals, path: &Path, full: &Path) -> io::Result<()> {
    let meta = std::fs::symlink_metadata(full)?;
    let kind = meta.file_type();
    let (letter, content) = match () {
        () if kind.is_dir() => (b'd', Vec::new()),
        () if kind.is_file() => (b'f', hash_file(full)?),
        () if kind.is_symlink() => (b'l', std::fs::read_link(full)?.into_os_string().as_bytes().to_vec()),
        () if kind.is_char_device() => (b'c', Vec::new()),
        () if kind.is_block_device() => (b'b', Vec::new()),
        () if kind.is_fifo() => (b'p', Vec::new()),
        () => (b's', Vec::new()),
    };
    let size = if kind.is_file() || kind.is_symlink() { meta.size() } else { 0 };
    let rdev = if matches!(letter, b'c' | b'b') { meta.rdev() } else { 0 };
    bytes(manifest, path.as_os_str().as_bytes());
    manifest.update([letter]);
    let numbers = [
        u64::from(meta.mode() & 0o7777),
        u64::from(meta.uid()),
        u64::from(meta.gid()),
        size,
        meta.mtime().cast_unsigned(),
        meta.mtime_nsec().cast_unsigned(),
        rdev,
    ];
    for number in numbers {
        manifest.update(number.to_le_bytes());
    }
    bytes(manifest, &content);
    let attributes = xattrs(full)?;
    manifest.update((attributes.len() as u64).to_le_bytes());
    for (name, value) in attributes {
        bytes(manifest, name.as_bytes());
        bytes(manifest, &value);
    }
    totals.files += 1;
    totals.bytes += size;
    Ok(())
}

fn bytes(manifest: &mut Sha256, bytes: &[u8]) {
    manifest.update((bytes.len() as u64).to_le_bytes());
    manifest.update(bytes);
}

pub(crate) fn hash_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hash.finalize().to_vec()),
            Ok(n) => hash.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Sorted by name. A file system without extended attributes has none.
fn xattrs(path: &Path) -> io::Result<Vec<(OsString, Vec<u8>)>> {
    let mut list = [0_u8; 4096];
    let used = match llistxattr(path, &mut list) {
        Ok(n) => n,
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut names: Vec<&[u8]> = list[..used].split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    names.sort_unstable();
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let name = std::ffi::OsStr::from_bytes(name);
        let mut value = vec![0_u8; 64 << 10]; // XATTR_SIZE_MAX
        let n = lgetxattr(path, name, &mut value[..])?;
        value.truncate(n);
        found.push((name.to_owned(), value));
    }
    Ok(found)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{AtFlags, Timespec, Timestamps, utimensat};
    use std::os::unix::fs::PermissionsExt;

    fn stamp(path: &Path, seconds: i64, nanos: i64) {
        let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(rustix::fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }

    const NAMES: [&str; 5] = ["", "a", "a/b", "a-b", "l"];

    fn make(order: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("a")).unwrap();
        for name in order {
            match *name {
                "l" => std::os::unix::fs::symlink("a", root.join("l")).unwrap(),
                name => std::fs::write(root.join(name), "content").unwrap(),
            }
        }
        for name in NAMES {
            if name != "l" {
                let mode = if name.contains('b') { 0o644 } else { 0o755 };
                std::fs::set_permissions(root.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
            }
            stamp(&root.join(name), 1_000, 0);
        }
        dir
    }

    #[test]
    fn the_order_of_creation_does_not_count() {
        let one = tree_digest(make(&["a/b", "a-b", "l"]).path()).unwrap();
        assert_eq!(one, tree_digest(make(&["l", "a-b", "a/b"]).path()).unwrap());
        assert_eq!(one.len(), 64);
    }

    #[test]
    fn each_fact_counts() {
        type Change = (&'static str, Box<dyn Fn(&Path)>);
        let changes: Vec<Change> = vec![
            ("content", Box::new(|r| std::fs::write(r.join("a/b"), "CONTENT").unwrap())),
            ("size", Box::new(|r| std::fs::write(r.join("a/b"), "content2").unwrap())),
            (
                "mode",
                Box::new(|r| std::fs::set_permissions(r.join("a/b"), std::fs::Permissions::from_mode(0o4755)).unwrap()),
            ),
            (
                "mode of the root",
                Box::new(|r| std::fs::set_permissions(r, std::fs::Permissions::from_mode(0o700)).unwrap()),
            ),
            ("name", Box::new(|r| std::fs::rename(r.join("a-b"), r.join("a-c")).unwrap())),
            (
                "target",
                Box::new(|r| {
                    std::fs::remove_file(r.join("l")).unwrap();
                    std::os::unix::fs::symlink("b", r.join("l")).unwrap();
                }),
            ),
            ("removal", Box::new(|r| std::fs::remove_file(r.join("a-b")).unwrap())),
            (
                "type",
                Box::new(|r| {
                    std::fs::remove_file(r.join("a-b")).unwrap();
                    std::fs::create_dir(r.join("a-b")).unwrap();
                    std::fs::set_permissions(r.join("a-b"), std::fs::Permissions::from_mode(0o644)).unwrap();
                }),
            ),
        ];
        let plain = tree_digest(make(&["a/b", "a-b", "l"]).path()).unwrap();
        let mut seen = std::collections::BTreeSet::from([plain]);
        for (what, change) in changes {
            let dir = make(&["a/b", "a-b", "l"]);
            change(dir.path());
            for name in ["a", "", "l", "a/b", "a-b", "a-c"] {
                if std::fs::symlink_metadata(dir.path().join(name)).is_ok() {
                    stamp(&dir.path().join(name), 1_000, 0);
                }
            }
            assert!(seen.insert(tree_digest(dir.path()).unwrap()), "{what}");
        }
        for (what, path, seconds, nanos) in
            [("mtime", "a/b", 1_001, 0), ("nanoseconds", "a/b", 1_000, 1), ("mtime of a link", "l", 1_001, 0)]
        {
            let dir = make(&["a/b", "a-b", "l"]);
            stamp(&dir.path().join(path), seconds, nanos);
            assert!(seen.insert(tree_digest(dir.path()).unwrap()), "{what}");
        }
    }

    #[test]
    fn owners_devices_and_attributes_count() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let dir = make(&["a/b", "a-b", "l"]);
        let mut seen = std::collections::BTreeSet::from([tree_digest(dir.path()).unwrap()]);
        std::os::unix::fs::lchown(dir.path().join("l"), Some(5), None).unwrap();
        assert!(seen.insert(tree_digest(dir.path()).unwrap()), "uid");
        std::os::unix::fs::lchown(dir.path().join("l"), Some(5), Some(6)).unwrap();
        assert!(seen.insert(tree_digest(dir.path()).unwrap()), "gid");
        for value in [&b"1"[..], b"2"] {
            rustix::fs::lsetxattr(dir.path().join("a/b"), "trusted.test", value, rustix::fs::XattrFlags::empty())
                .unwrap();
            assert!(seen.insert(tree_digest(dir.path()).unwrap()), "extended attribute");
        }
        for minor in [3, 5] {
            let node = dir.path().join("null");
            let _ = std::fs::remove_file(&node);
            let made = rustix::fs::mknodat(
                rustix::fs::CWD,
                &node,
                rustix::fs::FileType::CharacterDevice,
                rustix::fs::Mode::RUSR,
                rustix::fs::makedev(1, minor),
            );
            if made.is_err() {
                eprintln!("skipped: no device nodes here");
                return;
            }
            stamp(&node, 1_000, 0);
            stamp(dir.path(), 1_000, 0);
            assert!(seen.insert(tree_digest(dir.path()).unwrap()), "device number");
        }
    }
}
