//! The tree that layers make, one over the other.

use super::{
    Limits,
    entry::{Entry, Kind, Meta, in_dev},
};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};
use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Path, PathBuf},
};

/// What marks a removed name (OCI image specification, "Whiteouts").
const WHITEOUT: &[u8] = b".wh.";
/// What marks a folder whose lower content is hidden.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Ids that a machine has.
const IDS: u64 = 65_536;

/// The tree could not take an entry.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The kernel's word.
    #[error("{step}: {source}")]
    Io {
        /// What was done.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// An image's own fault.
    #[error("{0}")]
    Refused(String),
}

impl TreeError {
    /// Whether it says nothing about the image.
    #[must_use]
    pub fn ours(&self) -> bool {
        matches!(self, Self::Io { source, .. } if !matches!(source.raw_os_error().map(Errno::from_raw_os_error),
            Some(Errno::LOOP | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::ISDIR | Errno::FBIG)))
    }
}

fn at<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> TreeError {
    move |e| TreeError::Io { step, source: e.into() }
}

fn refuse<T>(why: impl Into<String>) -> Result<T, TreeError> {
    Err(TreeError::Refused(why.into()))
}

/// A tree being made.
pub struct Tree {
    root: OwnedFd,
    limits: Limits,
    entries: u64,
    bytes: u64,
    /// Names that the current layer made: its whiteouts leave them alone.
    made: HashSet<PathBuf>,
    /// The folders above those.
    above_made: HashSet<PathBuf>,
    /// Folders' times, to be set when nothing changes in them any more.
    folders: Vec<(PathBuf, (i64, u32))>,
    last: Option<(PathBuf, OwnedFd)>,
}

impl Tree {
    /// An empty tree at `root`.
    #[must_use]
    pub fn new(root: OwnedFd, limits: Limits) -> Self {
        Self {
            root,
            limits,
            entries: 0,
            bytes: 0,
            made: HashSet::new(),
            above_made: HashSet::new(),
            folders: vec![(PathBuf::new(), (0, 0))],
            last: None,
        }
    }

    /// Bytes of archive, headers and padding included, that may still come.
    #[must_use]
    pub fn stream_limit(&self) -> u64 {
        let headers = self.limits.entries.saturating_sub(self.entries).saturating_mul(4096);
        self.limits.bytes.saturating_sub(self.bytes).saturating_add(headers).saturating_add(1 << 20)
    }

    /// So many entries and bytes were taken.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        (self.entries, self.bytes)
    }

    /// The next layer begins.
    pub fn begin_layer(&mut self) {
        self.made.clear();
        self.above_made.clear();
    }

    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        // Links are followed as a program inside would follow them: never out of the tree.
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
    }

    fn open_folder(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        self.open(path, OFlags::DIRECTORY | OFlags::RDONLY)
    }

    /// The folder `path`, made with all above it when it is missing: root's, 0755.
    fn folder(&mut self, path: &Path) -> Result<OwnedFd, TreeError> {
        match self.open_folder(path) {
            Err(Errno::NOENT) => {}
            other => return other.map_err(at("open its folder")),
        }
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return refuse("its folder can't be made");
        };
        let above = self.folder(above)?;
        self.count(0)?;
        match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
            // Of no time: the same layers make the same tree.
            Ok(()) => self.folders.push((path.to_owned(), (0, 0))),
            Err(Errno::EXIST) => return refuse("its folder is a link to nothing"),
            Err(e) => return Err(at("make its folder")(e)),
        }
        self.open_folder(path).map_err(at("open its folder"))
    }

    fn parent(&mut self, path: &Path) -> Result<OwnedFd, TreeError> {
        let parent = path.parent().unwrap_or(Path::new("")).to_owned();
        if let Some((last, fd)) = &self.last
            && *last == parent
        {
            return fd.try_clone().map_err(at("open its folder"));
        }
        let fd = self.folder(&parent)?;
        self.last = Some((parent, fd.try_clone().map_err(at("open its folder"))?));
        Ok(fd)
    }

    fn count(&mut self, bytes: u64) -> Result<(), TreeError> {
        self.entries += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.entries > self.limits.entries {
            return refuse(format!("the image has more than {} files", self.limits.entries));
        }
        if self.bytes > self.limits.bytes {
            return refuse(format!("the image is larger than {} bytes", self.limits.bytes));
        }
        Ok(())
    }

    /// Takes one entry with its content.
    ///
    /// # Errors
    /// What the image did wrong, or the kernel said.
    pub fn take(
        &mut self,
        entry: &Entry,
        size: u64,
        content: &mut impl Read,
        note: &mut impl FnMut(String),
    ) -> Result<(), TreeError> {
        let shown = entry.path.display();
        if entry.kind == Kind::Nothing {
            return Ok(());
        }
        if entry.path.as_os_str().is_empty() {
            return self.top(&entry.meta);
        }
        let name = entry.path.file_name().unwrap_or_default().to_owned();
        if name.as_bytes().starts_with(WHITEOUT) {
            return self.whiteout(&entry.path, &name);
        }
        if let Kind::Special(kind) = entry.kind {
            // Machines have their own /dev; what is in the image's is never seen.
            if in_dev(&entry.path) {
                note(format!("{shown}: a {kind}, which machines bring themselves"));
                return Ok(());
            }
            return refuse(format!("it is a {kind}"));
        }
        let real = match &entry.kind {
            Kind::File => size,
            Kind::Sparse(real, _) => *real,
            _ => 0,
        };
        self.count(real)?;
        let parent = self.parent(&entry.path)?;
        let present = rustix::fs::statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW);
        let is_folder = present.as_ref().is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
        if present.is_ok() && !(is_folder && entry.kind == Kind::Folder) {
            // A hard link to itself would remove its own target.
            if entry.kind == Kind::Hardlink(entry.path.clone()) {
                return refuse("it is a link to itself");
            }
            self.remove(parent.as_fd(), &name)?;
        }
        match &entry.kind {
            Kind::Folder => {
                if !is_folder {
                    rustix::fs::mkdirat(&parent, &name, Mode::from_raw_mode(0o700)).map_err(at("make the folder"))?;
                }
                let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fd = rustix::fs::openat(&parent, &name, flags, Mode::empty()).map_err(at("open the folder"))?;
                self.dress(fd.as_fd(), &entry.meta, &shown.to_string(), note)?;
                self.folders.push((entry.path.clone(), entry.meta.mtime));
            }
            Kind::File | Kind::Sparse(..) => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fd = rustix::fs::openat(&parent, &name, flags, Mode::from_raw_mode(0o600));
                let file = File::from(fd.map_err(at("make the file"))?);
                match &entry.kind {
                    Kind::Sparse(real, map) => fill_sparse(&file, *real, map, content)?,
                    _ => fill(&file, size, content)?,
                }
                self.dress(file.as_fd(), &entry.meta, &shown.to_string(), note)?;
                rustix::fs::futimens(&file, &times(entry.meta.mtime)).map_err(at("set its time"))?;
            }
            Kind::Symlink(target) => {
                rustix::fs::symlinkat(target.as_os_str(), &parent, &name).map_err(at("make the link"))?;
                let (uid, gid) = owner(&entry.meta)?;
                rustix::fs::chownat(&parent, &name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(at("set its owner"))?;
                rustix::fs::utimensat(&parent, &name, &times(entry.meta.mtime), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(at("set its time"))?;
            }
            Kind::Hardlink(target) => {
                let from = match self.open_folder(target.parent().unwrap_or(Path::new(""))) {
                    Ok(from) => from,
                    Err(Errno::NOENT | Errno::NOTDIR) => {
                        return refuse(format!("it is a link to {}, which is not there", target.display()));
                    }
                    Err(e) => return Err(at("open its target's folder")(e)),
                };
                let target_name = target.file_name().unwrap_or_default();
                match rustix::fs::linkat(&from, target_name, &parent, &name, AtFlags::empty()) {
                    Ok(()) => {}
                    Err(Errno::NOENT | Errno::NOTDIR) => {
                        return refuse(format!("it is a link to {}, which is not there", target.display()));
                    }
                    Err(Errno::PERM) => {
                        return refuse(format!("it is a link to {}, which is a folder", target.display()));
                    }
                    Err(e) => return Err(at("make the link")(e)),
                }
            }
            Kind::Special(_) | Kind::Nothing => {}
        }
        for above in entry.path.ancestors().skip(1) {
            if !self.above_made.insert(above.to_owned()) {
                break;
            }
        }
        self.made.insert(entry.path.clone());
        Ok(())
    }

    /// The top's own owner, mode and time.
    fn top(&mut self, meta: &Meta) -> Result<(), TreeError> {
        let (uid, gid) = owner(meta)?;
        rustix::fs::fchown(&self.root, uid, gid).map_err(at("set its owner"))?;
        rustix::fs::fchmod(&self.root, Mode::from_raw_mode(meta.mode)).map_err(at("set its mode"))?;
        self.folders.push((PathBuf::new(), meta.mtime));
        Ok(())
    }

    /// Owner, mode and attributes of an open file or folder.
    fn dress(
        &self,
        fd: BorrowedFd<'_>,
        meta: &Meta,
        shown: &str,
        note: &mut impl FnMut(String),
    ) -> Result<(), TreeError> {
        let (uid, gid) = owner(meta)?;
        rustix::fs::fchown(fd, uid, gid).map_err(at("set its owner"))?;
        // After the owner, whose change takes setuid bits and file capabilities away.
        rustix::fs::fchmod(fd, Mode::from_raw_mode(meta.mode)).map_err(at("set its mode"))?;
        for (name, value) in &meta.xattrs {
            let ours =
                name.starts_with("user.") || name == "security.capability" || name.starts_with("system.posix_acl_");
            if !ours {
                // Labels of another host's security module, and an overlay's own marks, which must not come from outside.
                note(format!("{shown}: the attribute {name} was left out"));
                continue;
            }
            match rustix::fs::fsetxattr(fd, name.as_str(), value, XattrFlags::empty()) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::PERM | Errno::INVAL) => {
                    note(format!("{shown}: the attribute {name} can't be set here"));
                }
                Err(e) => return Err(at("set an attribute")(e)),
            }
        }
        Ok(())
    }

    fn whiteout(&mut self, path: &Path, name: &OsStr) -> Result<(), TreeError> {
        self.count(0)?;
        let parent_path = path.parent().unwrap_or(Path::new("")).to_owned();
        let parent = match self.open_folder(&parent_path) {
            Ok(parent) => parent,
            // Nothing below, nothing to hide.
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(at("open its folder")(e)),
        };
        if name.as_bytes() == OPAQUE {
            for entry in rustix::fs::Dir::read_from(&parent).map_err(at("read its folder"))? {
                let entry = entry.map_err(at("read its folder"))?;
                let child = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
                if child != "." && child != ".." {
                    self.hide(&parent_path.join(&child), parent.as_fd(), &child)?;
                }
            }
            return Ok(());
        }
        // Other names of this kind are an old engine's housekeeping.
        if name.as_bytes().starts_with(b".wh..wh.") {
            return Ok(());
        }
        let hidden = OsStr::from_bytes(&name.as_bytes()[WHITEOUT.len()..]);
        if hidden.is_empty() || hidden == "." || hidden == ".." {
            return refuse("it hides nothing that has a name");
        }
        self.hide(&parent_path.join(hidden), parent.as_fd(), hidden)
    }

    /// Removes what lower layers have at `path`; what this layer made stays.
    fn hide(&mut self, path: &Path, parent: BorrowedFd<'_>, name: &OsStr) -> Result<(), TreeError> {
        let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(at("look at what it hides")(e)),
        };
        if !self.made.contains(path) && !self.above_made.contains(path) {
            return self.remove(parent, name);
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let inner = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(at("open what it hides"))?;
            for entry in rustix::fs::Dir::read_from(&inner).map_err(at("read what it hides"))? {
                let entry = entry.map_err(at("read what it hides"))?;
                let child = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
                if child != "." && child != ".." {
                    self.hide(&path.join(&child), inner.as_fd(), &child)?;
                }
            }
        }
        Ok(())
    }

    fn remove(&mut self, parent: BorrowedFd<'_>, name: &OsStr) -> Result<(), TreeError> {
        self.last = None;
        match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(e) => return Err(at("remove what was there")(e)),
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inner = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(at("remove what was there"))?;
        for entry in rustix::fs::Dir::read_from(&inner).map_err(at("remove what was there"))? {
            let entry = entry.map_err(at("remove what was there"))?;
            let child = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
            if child != "." && child != ".." {
                self.remove(inner.as_fd(), &child)?;
            }
        }
        rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR).map_err(at("remove what was there"))
    }

    /// Makes sure that `path` is a folder, as an engine does with a working directory and mount points.
    ///
    /// # Errors
    /// When it is something else, or can't be made.
    pub fn ensure_folder(&mut self, path: &Path) -> Result<(), TreeError> {
        let relative = path.strip_prefix("/").unwrap_or(path);
        if relative.as_os_str().is_empty() {
            return Ok(());
        }
        let made = self.folder(relative)?;
        drop(made);
        // A mount point that is a link would be followed where the machine's root is not the root yet.
        let first = relative.components().next().map(|c| c.as_os_str().to_owned()).unwrap_or_default();
        let stat = rustix::fs::statat(&self.root, &first, AtFlags::SYMLINK_NOFOLLOW).map_err(at("look at it"))?;
        if relative.components().count() == 1 && FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return refuse("it is not a folder in the image");
        }
        Ok(())
    }

    /// Sets what later entries would have changed.
    ///
    /// # Errors
    /// The kernel's word.
    pub fn finish(&mut self) -> Result<(), TreeError> {
        let mut done = HashSet::new();
        for (path, mtime) in std::mem::take(&mut self.folders).into_iter().rev() {
            // The last word counts, and a folder that a later layer took away has none.
            let Ok(fd) = self.open(&path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW) else { continue };
            if done.insert(path) {
                rustix::fs::futimens(&fd, &times(mtime)).map_err(at("set a folder's time"))?;
            }
        }
        Ok(())
    }
}

fn owner(meta: &Meta) -> Result<(Option<Uid>, Option<Gid>), TreeError> {
    if meta.uid >= IDS || meta.gid >= IDS {
        return refuse(format!("its owner {}:{} is beyond what a machine has (65535)", meta.uid, meta.gid));
    }
    Ok((Some(Uid::from_raw(meta.uid as u32)), Some(Gid::from_raw(meta.gid as u32))))
}

fn times(mtime: (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: mtime.0, tv_nsec: i64::from(mtime.1) };
    Timestamps { last_access: time, last_modification: time }
}

/// Writes the content, leaving holes where whole blocks are zero and the file is large.
fn fill(file: &File, size: u64, content: &mut impl Read) -> Result<(), TreeError> {
    const BLOCK: usize = 64 << 10;
    let mut buffer = vec![0; BLOCK];
    let mut offset = 0;
    let mut limited = content.take(size);
    loop {
        let mut have = 0;
        while have < BLOCK {
            match limited.read(&mut buffer[have..]).map_err(at("read its content"))? {
                0 => break,
                n => have += n,
            }
        }
        if have == 0 {
            break;
        }
        let hole = have == BLOCK && buffer.iter().all(|byte| *byte == 0);
        if !hole {
            file.write_all_at(&buffer[..have], offset).map_err(at("write it"))?;
        }
        offset += have as u64;
    }
    if offset != size {
        return refuse("the archive ends in the middle of it");
    }
    file.set_len(size).map_err(at("write it"))
}

fn fill_sparse(file: &File, size: u64, map: &[(u64, u64)], content: &mut impl Read) -> Result<(), TreeError> {
    let mut end = 0;
    for (offset, length) in map {
        let stop = offset.checked_add(*length).filter(|stop| *stop <= size && *offset >= end);
        let Some(stop) = stop else { return refuse("its map of holes is out of order") };
        let mut at_offset = *offset;
        let mut buffer = vec![0; 64 << 10];
        let mut piece = content.take(*length);
        loop {
            let n = piece.read(&mut buffer).map_err(at("read its content"))?;
            if n == 0 {
                break;
            }
            file.write_all_at(&buffer[..n], at_offset).map_err(at("write it"))?;
            at_offset += n as u64;
        }
        if at_offset != stop {
            return refuse("the archive ends in the middle of it");
        }
        end = stop;
    }
    file.set_len(size).map_err(at("write it"))
}
