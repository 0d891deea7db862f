//! Folders in and out, as one tar stream each.
//!
//! The stream's other end goes to the guest agent as a descriptor, so the bytes pass through no process of ours but
//! this one. What comes from a machine is hostile: every entry of a download is checked before anything is written, and
//! nothing is ever written through a link.

use crate::{CallError, Sandbox};
use ignore::WalkBuilder;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use std::{
    fs::File,
    io::{self, BufWriter, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
        },
    },
    path::{Component, Path, PathBuf},
};
use trialrun_keeper::wire::{Call, FileOp, Reply};

/// Buffer between the walk and the stream.
const BUFFER_BYTES: usize = 256 << 10;
/// Files below this size are not searched for holes.
const SPARSE_FROM: u64 = 64 << 10;
/// A file with more segments of data than this is sent whole.
const MAX_SEGMENTS: u32 = 100_000;
/// How many left-out entries are named.
const NAMED_SKIPS: usize = 100;

/// Says whether an entry stays behind: its path relative to the folder, whether it is a folder, and, for folders, whether
/// it holds a virtual environment's mark (`pyvenv.cfg`).
pub type DropRule = std::sync::Arc<dyn Fn(&Path, bool, bool) -> bool + Send + Sync>;

/// What is left out of an upload.
#[derive(Clone, Default)]
pub struct UploadRules {
    /// Entries that stay behind whatever else is said.
    pub drops: Option<DropRule>,
    /// `.gitignore` files count.
    pub gitignore: bool,
    /// Paths relative to the folder that travel whatever `.gitignore` says (files that git tracks).
    pub keep: Vec<PathBuf>,
}

/// What travelled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of file content.
    pub bytes: u64,
    /// Files, directories and links.
    pub files: u64,
    /// Entries that were left out because they could not travel, each with its reason; the first hundred.
    pub skipped: Vec<String>,
    /// How many in all.
    pub skipped_total: u64,
}

impl Moved {
    fn skip(&mut self, path: &Path, why: &str) {
        self.skipped_total += 1;
        if self.skipped.len() < NAMED_SKIPS {
            self.skipped.push(format!("{}: {why}", path.display()));
        }
    }
}

/// Bounds of a download.
#[derive(Debug, Clone, Copy)]
pub struct DownloadLimits {
    /// Bytes of content.
    pub bytes: u64,
    /// Entries.
    pub entries: u64,
}

impl Default for DownloadLimits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 5_000_000 }
    }
}

/// A transfer failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// Something on the host.
    #[error("{step} {}", path.display())]
    Host {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        cause: io::Error,
    },
    /// The machine's side refused.
    #[error("{0}")]
    Guest(#[from] CallError),
    /// What the machine sent is not acceptable.
    #[error("the machine's archive was refused: {0}")]
    Hostile(String),
}

fn host(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TransferError {
    let path = path.to_owned();
    move |cause| TransferError::Host { step, path, cause }
}

impl Sandbox {
    /// Uploads a file or folder to `dest`. Links are kept as links: what they point to on the host does not travel.
    ///
    /// # Errors
    /// A source that is not there, a full disk inside, a lost machine. Single unreadable entries are left out and named.
    pub async fn upload(&self, source: &Path, dest: &str, rules: UploadRules) -> Result<Moved, TransferError> {
        let meta = source.symlink_metadata().map_err(host("read", source))?;
        if !meta.is_dir() {
            return self.upload_file(source, dest).await;
        }
        let (ours, theirs) = UnixStream::pair().map_err(host("make a stream for", source))?;
        let source = source.to_owned();
        let pack = tokio::task::spawn_blocking(move || pack(&source, ours, &rules));
        let op = FileOp::TarUp { dest: dest.into(), owner: None, compression: String::new() };
        let reply = self.call_with(op, theirs.into()).await;
        let packed = pack.await.map_err(|e| TransferError::Hostile(e.to_string()))?;
        // The machine's word first: a broken pipe here is only its consequence.
        reply?;
        packed
    }

    async fn upload_file(&self, source: &Path, dest: &str) -> Result<Moved, TransferError> {
        let file = File::open(source).map_err(host("read", source))?;
        let meta = file.metadata().map_err(host("read", source))?;
        if !meta.is_file() {
            let cause = io::Error::new(io::ErrorKind::InvalidInput, "it is neither a file nor a folder");
            return Err(TransferError::Host { step: "upload", path: source.to_owned(), cause });
        }
        let op =
            FileOp::Write { path: dest.into(), mode: Some(meta.mode() & 0o777), owner: None, size: Some(meta.len()) };
        self.call_with(op, file.into()).await?;
        Ok(Moved { bytes: meta.len(), files: 1, ..Moved::default() })
    }

    /// Writes bytes to a file, atomically.
    ///
    /// # Errors
    /// The guest's refusal or a lost machine.
    pub async fn write_file(&self, path: &str, bytes: &[u8], mode: Option<u32>) -> Result<(), TransferError> {
        let place = Path::new(path);
        let memory = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = File::from(memory.map_err(|e| host("buffer", place)(e.into()))?);
        let fill = |file: &mut File| -> io::Result<()> {
            file.write_all(bytes)?;
            io::Seek::rewind(file)
        };
        fill(&mut file).map_err(host("buffer", place))?;
        let op = FileOp::Write { path: path.into(), mode, owner: None, size: Some(bytes.len() as u64) };
        self.call_with(op, file.into()).await.map(drop)
    }

    /// Reads a file of at most `limit` bytes.
    ///
    /// # Errors
    /// A file that is not there or larger, or a lost machine.
    pub async fn read_file(&self, path: &str, limit: usize) -> Result<Vec<u8>, TransferError> {
        let place = PathBuf::from(path);
        let (ours, theirs) = UnixStream::pair().map_err(host("make a stream for", &place))?;
        let mut read = tokio::task::spawn_blocking(move || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            ours.take(limit as u64 + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        let op = FileOp::Read { path: path.into(), offset: 0, limit: limit as u64 + 1 };
        let mut call = std::pin::pin!(self.call_with(op, theirs.into()));
        let too_long = || TransferError::Hostile(format!("{path} is over the limit of {limit} bytes"));
        let (bytes, reply) = tokio::select! {
            reply = &mut call => (joined(read.await)?, reply),
            done = &mut read => match joined(done)? {
                // The machine may never say anything to it.
                Ok(bytes) if bytes.len() > limit => return Err(too_long()),
                bytes => (bytes, call.await),
            },
        };
        reply?;
        let bytes = bytes.map_err(host("read", &place))?;
        if bytes.len() > limit { Err(too_long()) } else { Ok(bytes) }
    }

    /// Downloads a file or folder. A folder's content lands in the folder `dest`; a file becomes the file `dest`.
    ///
    /// # Errors
    /// A source that is not there, a hostile archive, a full disk, a lost machine.
    pub async fn download(&self, source: &str, dest: &Path, limits: DownloadLimits) -> Result<Moved, TransferError> {
        let stat = self.file(FileOp::Stat(source.into())).await?;
        let is_dir = stat.first().is_some_and(|s| s.mode & 0o170_000 == 0o040_000);
        let (ours, theirs) = UnixStream::pair().map_err(host("make a stream for", dest))?;
        let target = dest.to_owned();
        let root = source.to_owned();
        let mut work = tokio::task::spawn_blocking(move || {
            if is_dir { unpack(ours, &target, &root, limits) } else { save_file(ours, &target, limits) }
        });
        let op = if is_dir {
            FileOp::TarDown { path: source.into(), compression: String::new() }
        } else {
            FileOp::Read { path: source.into(), offset: 0, limit: 0 }
        };
        let mut call = std::pin::pin!(self.call_with(op, theirs.into()));
        let (unpacked, reply) = tokio::select! {
            reply = &mut call => (joined(work.await)?, reply),
            done = &mut work => match joined(done)? {
                // The machine may never say anything to it.
                Err(e @ TransferError::Hostile(_)) => return Err(e),
                unpacked => (unpacked, call.await),
            },
        };
        match (unpacked, reply) {
            (Ok(mut moved), Ok(there)) => {
                moved.skipped.extend(there.skipped);
                moved.skipped.truncate(NAMED_SKIPS);
                moved.skipped_total += there.skipped_total;
                Ok(moved)
            }
            // Our refusal closes the stream, which the machine then reports as broken: ours is the cause.
            (Err(e @ TransferError::Hostile(_)), _) | (Err(e), Ok(_)) => Err(e),
            (_, Err(e)) => Err(e),
        }
    }

    async fn call_with(&self, op: FileOp, fd: OwnedFd) -> Result<Moved, TransferError> {
        let reply = self.client().call(&Call::File(op), &[fd.as_fd()]).await;
        drop(fd);
        match reply? {
            Reply::Moved { bytes, files, skipped, skipped_total } => Ok(Moved { bytes, files, skipped, skipped_total }),
            _ => Ok(Moved::default()),
        }
    }
}

/// The result of work that ran beside us.
fn joined<T>(done: Result<T, tokio::task::JoinError>) -> Result<T, TransferError> {
    done.map_err(|e| TransferError::Hostile(e.to_string()))
}

fn pack(source: &Path, stream: UnixStream, rules: &UploadRules) -> Result<Moved, TransferError> {
    let mut moved = Moved::default();
    let mut tar = tar::Builder::new(BufWriter::with_capacity(BUFFER_BYTES, stream));
    tar.mode(tar::HeaderMode::Complete);
    tar.follow_symlinks(false);
    let mut sent_by_git = std::collections::HashSet::new();
    for entry in walk(source, rules) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(e) => {
                let path = source.to_owned();
                moved.skip(&path, &e.to_string());
                continue;
            }
        };
        let path = entry.path();
        let Ok(name) = path.strip_prefix(source) else { continue };
        if name.as_os_str().is_empty() {
            continue;
        }
        append(&mut tar, path, name, &mut moved)?;
        if !rules.keep.is_empty() {
            sent_by_git.insert(name.to_owned());
        }
    }
    for name in rules.keep.iter().filter(|name| !sent_by_git.contains(*name)) {
        let path = source.join(name);
        if path.symlink_metadata().is_ok() {
            append(&mut tar, &path, name, &mut moved)?;
        }
    }
    let finish =
        || -> io::Result<()> { tar.into_inner()?.into_inner().map(drop).map_err(io::IntoInnerError::into_error) };
    finish().map_err(host("send", source))?;
    Ok(moved)
}

fn walk(source: &Path, rules: &UploadRules) -> ignore::Walk {
    let (drops, root) = (rules.drops.clone(), source.to_owned());
    WalkBuilder::new(source)
        .hidden(false)
        .ignore(false)
        .parents(rules.gitignore)
        .git_global(false)
        .git_exclude(rules.gitignore)
        .git_ignore(rules.gitignore)
        .follow_links(false)
        .filter_entry(move |entry| {
            let Some(drops) = drops.as_ref().filter(|_| entry.depth() > 0) else { return true };
            let is_dir = entry.file_type().is_some_and(|t| t.is_dir());
            let marked = is_dir && entry.path().join("pyvenv.cfg").exists();
            entry.path().strip_prefix(&root).map_or(true, |name| !drops(name, is_dir, marked))
        })
        .build()
}

type Tar = tar::Builder<BufWriter<UnixStream>>;

/// Adds one entry. What can't be read is left out and named; a stream that breaks ends the upload.
fn append(tar: &mut Tar, path: &Path, name: &Path, moved: &mut Moved) -> Result<(), TransferError> {
    let meta = match path.symlink_metadata() {
        Ok(meta) => meta,
        Err(e) => {
            moved.skip(path, &e.to_string());
            return Ok(());
        }
    };
    let kind = meta.file_type();
    let mut header = tar::Header::new_gnu();
    header.set_metadata_in_mode(&meta, tar::HeaderMode::Complete);
    let result = if kind.is_dir() {
        header.set_size(0);
        tar.append_data(&mut header, name, io::empty())
    } else if kind.is_symlink() {
        match std::fs::read_link(path) {
            Ok(target) => {
                header.set_size(0);
                tar.append_link(&mut header, name, target)
            }
            Err(e) => {
                moved.skip(path, &e.to_string());
                return Ok(());
            }
        }
    } else if kind.is_file() {
        match File::open(path) {
            // Its metadata is read again, so that what is announced is what the segments were found in. One that shrinks
            // meanwhile breaks the stream, which the machine reports.
            Ok(mut file) if has_holes(&file, &meta) => {
                moved.bytes += meta.len();
                tar.append_file(name, &mut file)
            }
            Ok(file) => {
                moved.bytes += meta.len();
                // A file that shrinks or grows while it is read is padded or cut to the size that was announced.
                tar.append_data(&mut header, name, file.take(meta.len()).chain(io::repeat(0)).take(meta.len()))
            }
            Err(e) => {
                moved.skip(path, &e.to_string());
                return Ok(());
            }
        }
    } else {
        let what = if kind.is_fifo() {
            "a FIFO"
        } else if kind.is_socket() {
            "a socket"
        } else {
            "a device"
        };
        moved.skip(path, &format!("{what} does not travel"));
        return Ok(());
    };
    moved.files += 1;
    result.map_err(host("send", path))
}

/// Whether a file has holes worth leaving out, and no more segments than any reader takes.
fn has_holes(file: &File, meta: &std::fs::Metadata) -> bool {
    use rustix::fs::{SeekFrom, seek};
    if meta.len() < SPARSE_FROM || meta.blocks().saturating_mul(512) >= meta.len() {
        return false;
    }
    let (mut at, mut holes, mut segments) = (0, false, 0);
    let sparse = loop {
        if at >= meta.len() || segments > MAX_SEGMENTS {
            break holes && segments <= MAX_SEGMENTS;
        }
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) => {
                holes |= data > at;
                segments += 1;
                match seek(file, SeekFrom::Hole(data)) {
                    Ok(end) if end > data => at = end,
                    _ => break false, // it changes under our eyes, or its file system can't tell
                }
            }
            Err(Errno::NXIO) => break true,
            Err(_) => break false,
        }
    };
    seek(file, SeekFrom::Start(0)).is_ok() && sparse
}

/// Copies, leaving out what is zero: the file gets holes there.
fn copy_sparse(from: &mut impl Read, to: &File) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = 0;
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) => return to.set_len(at),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        if buffer[..n].iter().any(|b| *b != 0) {
            to.write_all_at(&buffer[..n], at)?;
        }
        at += n as u64;
    }
}

fn save_file(stream: UnixStream, dest: &Path, limits: DownloadLimits) -> Result<Moved, TransferError> {
    let write = || -> io::Result<u64> {
        // Beside the target and renamed over it, so that a cut transfer leaves the old file.
        let parent = dest.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let fresh = parent.join(format!(
            ".trialrun-{}-{}",
            std::process::id(),
            dest.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
        ));
        let copy = || -> io::Result<u64> {
            let mut file = File::create(&fresh)?;
            let copied = io::copy(&mut (&stream).take(limits.bytes + 1), &mut file)?;
            if copied > limits.bytes {
                return Err(io::Error::from(io::ErrorKind::FileTooLarge));
            }
            std::fs::rename(&fresh, dest)?;
            Ok(copied)
        };
        copy().inspect_err(|_| drop(std::fs::remove_file(&fresh)))
    };
    let bytes = write().map_err(host("write", dest))?;
    Ok(Moved { bytes, files: 1, ..Moved::default() })
}

/// A relative path made of plain names only, or why not.
fn plain(name: &Path) -> Result<PathBuf, String> {
    let mut plain = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => plain.push(part),
            Component::CurDir => {}
            _ => return Err(format!("the entry {} points out of the folder", name.display())),
        }
    }
    Ok(plain)
}

/// Whether a link's target stays inside the folder, lexically: relative ones from the link's place, absolute ones below
/// the folder's own place in the machine.
fn stays_inside(link: &Path, target: &Path, root: &Path) -> bool {
    let start = match target.strip_prefix("/") {
        Ok(_) => match target.strip_prefix(root) {
            Ok(rest) => return depth(rest, 0).is_some(),
            Err(_) => return false,
        },
        Err(_) => link.components().count().saturating_sub(1),
    };
    depth(target, start).is_some()
}

/// How deep below the folder a path leads; `None` when it leads out. A way down and up again is none that can be judged:
/// what it goes through may be a link itself.
fn depth(path: &Path, start: usize) -> Option<usize> {
    let (mut depth, mut down) = (start, false);
    for component in path.components() {
        match component {
            Component::ParentDir if down => return None,
            Component::ParentDir => depth = depth.checked_sub(1)?,
            Component::Normal(_) => {
                depth += 1;
                down = true;
            }
            _ => {}
        }
    }
    Some(depth)
}

/// Directory handles of the last path, so that neighbouring files cost one open each.
struct Folder {
    root: OwnedFd,
    last: Option<(PathBuf, OwnedFd)>,
}

impl Folder {
    fn parent(&mut self, name: &Path) -> rustix::io::Result<&OwnedFd> {
        let parent = name.parent().unwrap_or(Path::new(""));
        if parent.as_os_str().is_empty() {
            return Ok(&self.root);
        }
        if self.last.as_ref().is_none_or(|(path, _)| path != parent) {
            let fd = match self.open(parent) {
                Err(Errno::NOENT) => {
                    self.make(parent)?;
                    self.open(parent)?
                }
                other => other?,
            };
            self.last = Some((parent.to_owned(), fd));
        }
        Ok(self.last.as_ref().map_or(&self.root, |(_, fd)| fd))
    }

    /// Below the root and through no link, whatever the archive made before.
    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
    }

    fn make(&self, path: &Path) -> rustix::io::Result<()> {
        let mut made = PathBuf::new();
        for part in path.components() {
            let at = if made.as_os_str().is_empty() {
                self.root.try_clone().map_err(|_| Errno::MFILE)?
            } else {
                self.open(&made)?
            };
            match rustix::fs::mkdirat(&at, part.as_os_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
            made.push(part);
        }
        Ok(())
    }
}

fn unpack(stream: UnixStream, dest: &Path, root: &str, limits: DownloadLimits) -> Result<Moved, TransferError> {
    std::fs::create_dir_all(dest).map_err(host("make", dest))?;
    let open = rustix::fs::openat(CWD, dest, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut folder = Folder { root: open.map_err(|e| host("open", dest)(e.into()))?, last: None };
    let mut moved = Moved::default();
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(BUFFER_BYTES, stream));
    let hostile = |e: io::Error| TransferError::Hostile(e.to_string());
    let mut directories = Vec::new();
    for entry in archive.entries().map_err(hostile)? {
        let mut entry = entry.map_err(hostile)?;
        let name = plain(&entry.path().map_err(hostile)?).map_err(TransferError::Hostile)?;
        if name.as_os_str().is_empty() {
            continue;
        }
        moved.files += 1;
        moved.bytes = moved.bytes.saturating_add(entry.size());
        if moved.files > limits.entries || moved.bytes > limits.bytes {
            let message = format!("over {} entries or {} bytes at {}", limits.entries, limits.bytes, name.display());
            return Err(TransferError::Hostile(message));
        }
        let mode = entry.header().mode().map_err(hostile)? & 0o777;
        let place = dest.join(&name);
        let kind = entry.header().entry_type();
        let write = |e: Errno| host("write", &place)(e.into());
        let parent = folder.parent(&name).map_err(write)?;
        let file_name = name.file_name().unwrap_or_default();
        if kind.is_dir() {
            match rustix::fs::mkdirat(parent, file_name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => directories.push((name, mode)),
                Err(e) => return Err(write(e)),
            }
        } else if kind.is_file() || kind == tar::EntryType::GNUSparse {
            let file = create(parent, file_name, mode).map_err(write)?;
            let mut file = File::from(file);
            let copied =
                if kind.is_file() { io::copy(&mut entry, &mut file).map(drop) } else { copy_sparse(&mut entry, &file) };
            copied.map_err(host("write", &place))?;
        } else if kind.is_symlink() {
            let target = entry.link_name().map_err(hostile)?.unwrap_or_default().into_owned();
            if stays_inside(&name, &target, Path::new(root)) {
                replace(parent, file_name, || rustix::fs::symlinkat(&target, parent, file_name)).map_err(write)?;
            } else {
                moved.skip(&name, &format!("its target {} is outside of the folder", target.display()));
            }
        } else if kind.is_hard_link() {
            let target =
                plain(&entry.link_name().map_err(hostile)?.unwrap_or_default()).map_err(TransferError::Hostile)?;
            link(&folder, &target, &name, &mut moved).map_err(write)?;
        } else {
            moved.skip(&name, "neither a file, a folder nor a link");
        }
    }
    // Modes of directories last: one without write permission may have content.
    for (name, mode) in directories.iter().rev() {
        if let Ok(fd) = folder.open(name) {
            let _ = rustix::fs::fchmod(&fd, Mode::from_raw_mode(*mode | 0o700));
        }
    }
    Ok(moved)
}

fn create(parent: &OwnedFd, name: &std::ffi::OsStr, mode: u32) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // Setuid, setgid and sticky bits do not come out of a machine.
    let make = || rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(mode | 0o600));
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
            make()
        }
        other => other,
    }
}

fn replace(
    parent: &OwnedFd,
    name: &std::ffi::OsStr,
    make: impl Fn() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
            make()
        }
        other => other,
    }
}

fn link(folder: &Folder, target: &Path, name: &Path, moved: &mut Moved) -> rustix::io::Result<()> {
    let at = |path: &Path| {
        let parent = path.parent().unwrap_or(Path::new(""));
        folder.open(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
    };
    let (Ok(from), Ok(to)) = (at(target), at(name)) else {
        moved.skip(name, "its link's target is not in the archive");
        return Ok(());
    };
    let (old, new) = (target.file_name().unwrap_or_default(), name.file_name().unwrap_or_default());
    match replace(&to, new, || rustix::fs::linkat(&from, old, &to, new, AtFlags::empty())) {
        Err(Errno::NOENT) => {
            moved.skip(name, "its link's target is not in the archive");
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_do_not_travel_and_come_back_as_holes() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        std::fs::create_dir(&from).unwrap();
        // At the beginning, in the middle, at the end, nothing but a hole, none at all; more segments than one header
        // has.
        let data = |offsets: &[u64], size: u64, name: &str| {
            let file = File::create(from.join(name)).unwrap();
            offsets.iter().for_each(|at| file.write_all_at(&[7; 4096], *at).unwrap());
            file.set_len(size).unwrap();
        };
        let mib = 1 << 20;
        data(&[8 * mib], 64 * mib, "both-ends");
        data(&[0, 32 * mib], 32 * mib + 4096, "middle");
        data(&[], 64 * mib, "hole");
        data(&[0], 4096, "none");
        data(&(0..64).map(|n| n * mib).collect::<Vec<_>>(), 64 * mib, &"many-segments".repeat(15));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let to = dir.path().join("to");
        let (source, target) = (from.clone(), to.clone());
        let reader = std::thread::spawn(move || unpack(theirs, &target, "/workspace/p", DownloadLimits::default()));
        let sent = pack(&source, ours, &UploadRules::default()).unwrap();
        let got = reader.join().unwrap().unwrap();
        assert_eq!((sent.files, sent.bytes), (got.files, got.bytes));
        for entry in std::fs::read_dir(&from).unwrap() {
            let name = entry.unwrap().file_name();
            let (before, after) = (from.join(&name), to.join(&name));
            assert!(std::fs::read(&before).unwrap() == std::fs::read(&after).unwrap(), "{}", name.display());
            let blocks = |path: &Path| path.metadata().unwrap().blocks() * 512;
            assert!(blocks(&after) <= blocks(&before) + mib, "{}: {}", name.display(), blocks(&after));
        }
    }

    #[test]
    fn links_are_judged_by_where_they_lead() {
        let root = Path::new("/workspace/p");
        for (link, target, inside) in [
            ("a", "b", true),
            ("d/a", "../b", true),
            ("a", "../b", false),
            ("d/a", "../../b", false),
            ("a", "/workspace/p/b", true),
            ("a", "/workspace/p/../x", false),
            ("a", "/etc/passwd", false),
            ("a", "missing/file", true),
            ("a/b/c", "up/../../x", false),
        ] {
            assert_eq!(stays_inside(Path::new(link), Path::new(target), root), inside, "{link} -> {target}");
        }
    }

    fn unpacked(
        build: impl FnOnce(&mut tar::Builder<&mut Vec<u8>>),
    ) -> (tempfile::TempDir, Result<Moved, TransferError>) {
        let mut bytes = Vec::new();
        let mut tar = tar::Builder::new(&mut bytes);
        build(&mut tar);
        tar.finish().unwrap();
        drop(tar);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || drop(ours.write_all(&bytes)));
        let dir = tempfile::tempdir().unwrap();
        let result = unpack(theirs, &dir.path().join("out"), "/workspace/p", DownloadLimits::default());
        writer.join().unwrap();
        (dir, result)
    }

    fn entry(tar: &mut tar::Builder<&mut Vec<u8>>, name: &str, kind: tar::EntryType, link: &str, data: &[u8]) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o4755);
        header.set_size(data.len() as u64);
        // Written raw: the builder itself refuses such names.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        tar.append(&header, data).unwrap();
    }

    #[test]
    fn a_name_that_leads_out_is_refused() {
        for name in ["../x", "/etc/x", "a/../../x"] {
            let (_dir, result) = unpacked(|tar| entry(tar, name, tar::EntryType::Regular, "", b"x"));
            assert!(matches!(result, Err(TransferError::Hostile(_))), "{name}: {result:?}");
        }
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let (dir, result) = unpacked(|tar| {
            entry(tar, "d", tar::EntryType::Symlink, ".", b"");
            entry(tar, "d/x", tar::EntryType::Regular, "", b"x");
        });
        assert!(result.is_err(), "{result:?}");
        assert!(!dir.path().join("out/x").exists());
    }

    #[test]
    fn links_out_are_left_out_and_setuid_is_dropped() {
        let (dir, result) = unpacked(|tar| {
            entry(tar, "l", tar::EntryType::Symlink, "/etc/shadow", b"");
            entry(tar, "f", tar::EntryType::Regular, "", b"x");
            entry(tar, "dev", tar::EntryType::Char, "", b"");
        });
        let moved = result.unwrap();
        assert_eq!(moved.skipped_total, 2, "{:?}", moved.skipped);
        assert!(dir.path().join("out/l").symlink_metadata().is_err());
        assert_eq!(dir.path().join("out/f").metadata().unwrap().mode() & 0o7777, 0o755);
    }
}
