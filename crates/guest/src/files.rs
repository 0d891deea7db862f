//! Single files and directories: stat, list, read, write, rename, remove, mkdir.
//!
//! Names are bytes. Everything runs with the agent's own rights; what it makes belongs to the owner that was asked for,
//! with exactly the mode that was asked for (the agent's umask is 0).

use crate::{
    agent::Machine,
    link::{Channel, Failure, text},
    user::Database,
    work::End,
};
use rustix::{
    fs::{
        self as rfs, AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, mkdirat, openat,
        readlinkat, renameat, statat, unlinkat,
    },
    io::Errno,
};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read as _, Seek, SeekFrom, Write as _},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};
use trialrun_guest_proto::{self as proto, Done, Entries, EventKind, FailKind, FileStat};

/// Most entries of one event.
const BATCH: usize = 256;
/// Bytes of names and links above which an event is sent, well below a frame's limit: one more entry is at most 4.5 KiB.
const BATCH_BYTES: usize = 128 * 1024;
/// Bytes moved at once.
const COPY: usize = 128 * 1024;
/// As many links as the kernel follows (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// User and group that new files get; nothing where ids cannot be changed.
pub type Owner = Option<(u32, u32)>;

/// An absolute path, or why it cannot be one.
pub fn resolve(machine: &Machine, path: &[u8]) -> Result<Vec<u8>, Failure> {
    if path.contains(&0) {
        return Err(Failure::new(FailKind::BadRequest, format!("path {} holds NUL", text(path))));
    }
    Ok(machine.absolute(path))
}

fn must_name(path: &[u8]) -> Result<(), Failure> {
    if path.is_empty() { Err(Failure::new(FailKind::BadRequest, "the path is empty")) } else { Ok(()) }
}

/// Directory and last component. `/` and what ends in `.` or `..` has no last component.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    let path = &path[..end];
    let (dir, name) = match path.iter().rposition(|&b| b == b'/') {
        Some(0) => (&b"/"[..], &path[1..]),
        Some(at) => (&path[..at], &path[at + 1..]),
        None if path.is_empty() => (&b"/"[..], path),
        None => (&b"."[..], path),
    };
    (dir, if name == b"." || name == b".." { b"" } else { name })
}

/// Names of users and groups, each looked up once.
#[derive(Debug, Default)]
pub struct Names {
    database: Database,
    users: BTreeMap<u32, String>,
    groups: BTreeMap<u32, String>,
}

impl Names {
    /// From the machine's files as they are now.
    pub fn load() -> Self {
        Self { database: Database::load(), ..Self::default() }
    }

    /// What the protocol says about a file.
    pub fn describe(&mut self, name: &[u8], stat: &Stat, link: Option<Vec<u8>>) -> FileStat {
        let lossy = |name: Option<Vec<u8>>| name.map(|n| String::from_utf8_lossy(&n).into_owned()).unwrap_or_default();
        let database = &self.database;
        let user = self.users.entry(stat.st_uid).or_insert_with(|| lossy(database.user_name(stat.st_uid)));
        let group = self.groups.entry(stat.st_gid).or_insert_with(|| lossy(database.group_name(stat.st_gid)));
        FileStat {
            name: name.to_vec(),
            mode: stat.st_mode,
            size: stat.st_size as u64,
            mtime_ns: mtime_ns(stat),
            uid: stat.st_uid,
            gid: stat.st_gid,
            link,
            user: user.clone(),
            group: group.clone(),
        }
    }
}

#[allow(clippy::useless_conversion, clippy::unnecessary_cast)] // The types of `Stat` differ between architectures.
fn mtime_ns(stat: &Stat) -> i64 {
    (stat.st_mtime as i64).saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64)
}

fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// A file's metadata and, for a link, its target. Links are not followed.
pub fn look<F: AsFd>(dir: F, name: &[u8]) -> Result<(Stat, Option<Vec<u8>>), Errno> {
    let stat = statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let link = if file_type(&stat) == FileType::Symlink {
        Some(readlinkat(&dir, name, Vec::new())?.into_bytes())
    } else {
        None
    };
    Ok((stat, link))
}

/// Sends entries in events of bounded size.
pub fn send_entries(channel: &Channel, entries: impl IntoIterator<Item = FileStat>) {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let flush = |batch: &mut Vec<FileStat>| {
        let entries = std::mem::take(batch);
        channel.link.send_event(channel.stream, EventKind::Entries(Entries { entries }));
    };
    for entry in entries {
        bytes += 64 + entry.name.len() + entry.link.as_ref().map_or(0, Vec::len) + entry.user.len() + entry.group.len();
        batch.push(entry);
        if batch.len() == BATCH || bytes > BATCH_BYTES {
            flush(&mut batch);
            bytes = 0;
        }
    }
    if !batch.is_empty() {
        flush(&mut batch);
    }
}

/// Metadata of one path.
pub fn stat(machine: &Machine, channel: &Channel, op: &proto::Path) -> Result<Done, Failure> {
    let path = resolve(machine, &op.path)?;
    let (stat, link) = look(rfs::CWD, &path).map_err(|e| Failure::errno(e, &path))?;
    let found = Names::load().describe(split(&path).1, &stat, link);
    channel.link.send_event(channel.stream, EventKind::Stat(found));
    Ok(Done::default())
}

/// Names in a directory, sorted.
pub fn names_in(dir: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in rfs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Entries of a directory, sorted by name.
pub fn list(machine: &Machine, channel: &Channel, op: &proto::Path) -> Result<Done, Failure> {
    let path = resolve(machine, &op.path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rfs::open(&path[..], flags, Mode::empty()).map_err(|e| Failure::errno(e, &path))?;
    let mut names = Names::load();
    let listed = names_in(&dir).map_err(|e| Failure::errno(e, &path))?;
    // What is gone in the meantime is left out.
    let entries =
        listed.iter().filter_map(|name| look(&dir, name).ok().map(|(stat, link)| names.describe(name, &stat, link)));
    send_entries(channel, entries);
    Ok(Done::default())
}

/// Opens a regular file for reading; never blocks on a FIFO or device.
fn open_regular(path: &[u8]) -> Result<File, Failure> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rfs::open(path, flags, Mode::empty()).map_err(|e| match e {
        // A socket.
        Errno::NXIO => Failure::errno(e, path).with_kind(FailKind::WrongType),
        _ => Failure::errno(e, path),
    })?;
    let stat = fstat(&file).map_err(|e| Failure::errno(e, path))?;
    match file_type(&stat) {
        FileType::RegularFile => Ok(File::from(file)),
        FileType::Directory => Err(Failure::errno(Errno::ISDIR, path)),
        _ => Err(Failure::new(FailKind::WrongType, format!("{}: not a regular file", text(path)))),
    }
}

/// Bytes of a file.
pub fn read(machine: &Machine, mut end: End, op: &proto::Read) -> Result<Done, Failure> {
    must_name(&op.path)?;
    let path = resolve(machine, &op.path)?;
    let mut file = open_regular(&path)?;
    if op.offset > 0 {
        file.seek(SeekFrom::Start(op.offset)).map_err(|e| Failure::io(&e, &path))?;
    }
    let mut left = if op.limit == 0 { u64::MAX } else { op.limit };
    let mut buffer = vec![0; COPY];
    let mut bytes = 0;
    while left > 0 {
        let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = file.read(&mut buffer[..want]).map_err(|e| Failure::io(&e, &path))?;
        if n == 0 {
            break;
        }
        end.write_all(&buffer[..n]).map_err(|e| Failure::io(&e, "sending the bytes").with_kind(FailKind::Other))?;
        left -= n as u64;
        bytes += n as u64;
    }
    Ok(Done { bytes, files: 1, ..Done::default() })
}

/// Makes a directory and its parents. What is made belongs to `owner`; what is there stays as it is. Returns whether
/// the last one was made.
pub fn make_dirs(path: &[u8], mode: u32, owner: Owner) -> Result<bool, Failure> {
    let make = |path: &[u8], mode: u32| -> Result<(), Errno> {
        mkdirat(rfs::CWD, path, Mode::from_raw_mode(mode & 0o777))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rfs::open(path, flags, Mode::empty())?;
        set_owner(&dir, owner)?;
        fchmod(&dir, Mode::from_raw_mode(mode & 0o7777))
    };
    let mut missing: Vec<usize> = Vec::new();
    let mut end = path.len();
    // From the last component up to the first that is there, then down again.
    loop {
        match statat(rfs::CWD, &path[..end], AtFlags::empty()).map(|stat| file_type(&stat)) {
            Ok(FileType::Directory) => break,
            Ok(_) => return Err(Failure::errno(Errno::NOTDIR, &path[..end])),
            Err(Errno::NOENT) => missing.push(end),
            Err(e) => return Err(Failure::errno(e, &path[..end])),
        }
        let (dir, _) = split(&path[..end]);
        if dir.len() >= end || dir == b"." {
            break;
        }
        end = dir.len();
    }
    let made = !missing.is_empty();
    while let Some(end) = missing.pop() {
        let mode = if missing.is_empty() { mode } else { 0o755 };
        match make(&path[..end], mode) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Failure::errno(e, &path[..end])),
        }
    }
    Ok(made)
}

/// Gives an open file away.
pub fn set_owner(fd: impl AsFd, owner: Owner) -> Result<(), Errno> {
    match owner {
        Some((uid, gid)) => fchown(fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))),
        None => Ok(()),
    }
}

/// Follows links at the path's end to the place that writing would reach, as open(2) does.
fn follow(mut path: Vec<u8>) -> Result<Vec<u8>, Failure> {
    for _ in 0..MAX_LINKS {
        match readlinkat(rfs::CWD, &path[..], Vec::new()) {
            Ok(target) => {
                let target = target.into_bytes();
                path = if target.starts_with(b"/") { target } else { [split(&path).0, b"/", &target].concat() };
            }
            Err(_) => return Ok(path),
        }
    }
    Err(Failure::errno(Errno::LOOP, &path))
}

/// A new file beside its final place; removed unless it is renamed there.
struct Temporary<'a> {
    dir: BorrowedFd<'a>,
    name: String,
    done: bool,
}

impl<'a> Temporary<'a> {
    fn create(dir: BorrowedFd<'a>) -> Result<(Self, File), Errno> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!(".trialrun-{}-{number}", std::process::id());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match openat(dir, &name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => return Ok((Self { dir, name, done: false }, File::from(file))),
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.done {
            let _ = unlinkat(self.dir, &self.name, AtFlags::empty());
        }
    }
}

/// Replaces a file.
pub fn write(machine: &Machine, mut end: End, op: &proto::Write) -> Result<Done, Failure> {
    must_name(&op.path)?;
    let owner = machine.owner(op.owner.as_deref())?;
    let path = resolve(machine, &op.path)?;
    if path.ends_with(b"/") {
        return Err(Failure::errno(Errno::ISDIR, &path));
    }
    let path = follow(path)?;
    let fail = |e: Errno| Failure::errno(e, &path);
    let (parent, name) = split(&path);
    if name.is_empty() {
        return Err(fail(Errno::ISDIR));
    }
    make_dirs(parent, 0o755, owner)?;
    let dir = rfs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(fail)?;
    let existing = match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match file_type(&stat) {
            FileType::RegularFile | FileType::Symlink => Some(stat),
            FileType::Directory => return Err(fail(Errno::ISDIR)),
            _ => return Err(Failure::new(FailKind::WrongType, format!("{}: not a regular file", text(&path)))),
        },
        Err(Errno::NOENT) => None,
        Err(e) => return Err(fail(e)),
    };
    let mode = op.mode.or(existing.map(|stat| stat.st_mode)).unwrap_or(0o644) & 0o7777;

    let (mut temporary, file) = Temporary::create(dir.as_fd()).map_err(fail)?;
    let bytes = fill(&file, &mut end, op.size, &path)?;
    // The owner first: chown(2) takes the setuid bit away.
    set_owner(&file, owner).map_err(fail)?;
    fchmod(&file, Mode::from_raw_mode(mode)).map_err(fail)?;
    renameat(&dir, &temporary.name, &dir, name).map_err(fail)?;
    temporary.done = true;
    Ok(Done { bytes, files: 1, ..Done::default() })
}

/// Moves the stream into a new file; long runs of zeros become holes.
fn fill(file: &File, end: &mut End, size: Option<u64>, path: &[u8]) -> Result<u64, Failure> {
    let broken = |why: String| Failure::new(FailKind::BadStream, format!("{}: {why}", text(path)));
    let mut buffer = vec![0; COPY];
    let (mut at, mut written) = (0_u64, 0_u64);
    loop {
        // Whole pieces, so that holes are found whatever the sizes in which the bytes come.
        let mut got = 0;
        while got < buffer.len() {
            match end.read(&mut buffer[got..]) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(format!("the stream broke after {} bytes: {e}", at + got as u64))),
            }
        }
        if got == 0 {
            break;
        }
        let piece = &buffer[..got];
        if !is_zero(piece) || got < COPY {
            file.write_all_at(piece, at).map_err(|e| Failure::io(&e, path))?;
            written = at + got as u64;
        }
        at += got as u64;
        if size.is_some_and(|size| at > size) {
            return Err(broken(format!("more than the announced {} bytes came", size.unwrap_or_default())));
        }
    }
    if let Some(size) = size.filter(|&size| size != at) {
        return Err(broken(format!("the stream was cut at {at} of {size} bytes")));
    }
    if written < at {
        file.set_len(at).map_err(|e| Failure::io(&e, path))?;
    }
    Ok(at)
}

fn is_zero(bytes: &[u8]) -> bool {
    // Word by word: the compiler makes vector code of this, not of a search for the first other byte.
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |all, &b| all | b) == 0)
}

/// Renames.
pub fn rename(machine: &Machine, op: &proto::Rename) -> Result<Done, Failure> {
    must_name(&op.from)?;
    must_name(&op.to)?;
    let (from, to) = (resolve(machine, &op.from)?, resolve(machine, &op.to)?);
    renameat(rfs::CWD, &from[..], rfs::CWD, &to[..]).map_err(|e| {
        let named = if e == Errno::NOENT && look(rfs::CWD, &from).is_ok() { &to } else { &from };
        Failure::errno(e, named)
    })?;
    Ok(Done::default())
}

/// Removes.
pub fn remove(machine: &Machine, op: &proto::Remove) -> Result<Done, Failure> {
    must_name(&op.path)?;
    let path = resolve(machine, &op.path)?;
    if path.iter().all(|&b| b == b'/') {
        return Err(Failure::new(FailKind::Denied, "/: the root directory cannot be removed"));
    }
    let as_path = Path::new(std::ffi::OsStr::from_bytes(&path));
    let result = match look(rfs::CWD, &path) {
        Ok((stat, _)) if file_type(&stat) != FileType::Directory => std::fs::remove_file(as_path),
        Ok(_) if op.recursive => std::fs::remove_dir_all(as_path),
        Ok(_) => std::fs::remove_dir(as_path),
        Err(e) => Err(e.into()),
    };
    match result {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && op.missing_ok => Ok(Done::default()),
        Err(e) => Err(Failure::io(&e, &path)),
        Ok(()) => Ok(Done { files: 1, ..Done::default() }),
    }
}

/// Makes a directory and its parents.
pub fn mkdir(machine: &Machine, op: &proto::Mkdir) -> Result<Done, Failure> {
    must_name(&op.path)?;
    let owner = machine.owner(op.owner.as_deref())?;
    let path = resolve(machine, &op.path)?;
    make_dirs(&path, op.mode.unwrap_or(0o755), owner)?;
    Ok(Done::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_split_at_their_last_component() {
        let cases: [(&str, &str, &str); 8] = [
            ("/a/b", "/a", "b"),
            ("/a", "/", "a"),
            ("/", "/", ""),
            ("/a/b//", "/a", "b"),
            ("a", ".", "a"),
            ("/a/..", "/a", ""),
            ("/a/.", "/a", ""),
            ("/a/...", "/a", "..."),
        ];
        for (path, dir, name) in cases {
            assert_eq!(split(path.as_bytes()), (dir.as_bytes(), name.as_bytes()), "{path}");
        }
    }
}
