//! Packs a directory or a file as a tar stream.
//!
//! Walks in the order of names, with every directory on the way held open, and never follows a link below the start.
//! Names are relative to the start, whose own entry is `./`; a single file is one entry with its base name. A second
//! name of a file is a hard link to the first. A file with holes is packed as GNU's sparse type. Sizes are announced
//! before the bytes are read: a file that changes meanwhile is cut or filled up with zeros.
//!
//! Times with nanoseconds, and names over 100 bytes, go into pax headers; bytes in names stay as they are.

use crate::{
    agent::Machine,
    files::{self, names_in},
    link::{Failure, text},
    tar::{self, BLOCK, Fields, Segments},
    unpack::MAX_SKIPPED,
    work::End,
};
use rustix::{
    buffer::spare_capacity,
    fs::{self as rfs, AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat, statat},
    io::Errno,
};
use std::{
    collections::HashMap,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
};
use trialrun_guest_proto::{Done, FailKind, TarDown};

/// Bytes that are collected before they are written.
const BUFFER: usize = 512 * 1024;
/// Files below this size are not searched for holes.
const SPARSE_FROM: u64 = 64 * 1024;
/// Most segments of a sparse file; with more it is packed whole.
const MAX_SEGMENTS: usize = 100_000;

/// Where the bytes go.
enum Sink {
    Plain(End),
    Zstd(zstd::stream::write::Encoder<'static, End>),
    Gzip(flate2::write::GzEncoder<End>),
}

impl Sink {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(end) => end.write_all(bytes),
            Self::Zstd(encoder) => encoder.write_all(bytes),
            Self::Gzip(encoder) => encoder.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Zstd(encoder) => encoder.finish().map(drop),
            Self::Gzip(encoder) => encoder.finish().map(drop),
        }
    }
}

struct Packer {
    sink: Sink,
    buffer: Vec<u8>,
    /// First name of each file that has several.
    first_names: HashMap<(u64, u64), Vec<u8>>,
    done: Done,
}

/// A directory on the way.
struct Level {
    dir: OwnedFd,
    names: std::vec::IntoIter<Vec<u8>>,
    /// Length of the directory's own name, slash included.
    prefix: usize,
}

/// Packs.
pub fn pack(machine: &Machine, end: End, op: &TarDown) -> Result<Done, Failure> {
    let path = files::resolve(machine, &op.path)?;
    let fail = |e: Errno| Failure::errno(e, &path);
    let stat = statat(rfs::CWD, &path[..], AtFlags::empty()).map_err(fail)?;
    let sink = match op.compression.as_str() {
        "" => Sink::Plain(end),
        "zstd" => Sink::Zstd(zstd::stream::write::Encoder::new(end, 3).map_err(|e| Failure::io(&e, "zstd"))?),
        "gzip" => Sink::Gzip(flate2::write::GzEncoder::new(end, flate2::Compression::fast())),
        other => return Err(Failure::new(FailKind::BadRequest, format!("unknown compression {other:?}"))),
    };
    let mut packer =
        Packer { sink, buffer: Vec::with_capacity(BUFFER), first_names: HashMap::new(), done: Done::default() };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rfs::open(&path[..], flags, Mode::empty()).map_err(fail)?;
            packer.directory(dir).map_err(|refused| refused.unwrap_or_else(fail))?;
        }
        FileType::RegularFile => {
            let base = files::split(&path).1.to_vec();
            packer.file(rfs::CWD, &path, &base, true)?;
        }
        _ => return Err(Failure::new(FailKind::WrongType, format!("{}: neither a file nor a directory", text(&path)))),
    }
    packer.finish()
}

/// A directory and the names in it.
type Opened = (OwnedFd, Vec<Vec<u8>>);
/// The operation fails as a whole, or the kernel refused something.
type Or<T> = Result<T, Result<Failure, Errno>>;

impl Packer {
    fn skip(&mut self, name: &[u8], why: &str) {
        self.done.skipped_total += 1;
        if self.done.skipped.len() < MAX_SKIPPED {
            self.done.skipped.push(format!("{}: {why}", text(name)));
        }
    }

    fn skip_errno(&mut self, name: &[u8], e: Errno) -> Result<(), Failure> {
        match e {
            // Ours, not the file's: leaving the rest out would not be honest.
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => Err(Failure::errno(e, name)),
            _ => {
                self.skip(name, &crate::link::describe(e.raw_os_error()));
                Ok(())
            }
        }
    }

    fn directory(&mut self, dir: OwnedFd) -> Or<()> {
        let stat = fstat(&dir).map_err(Err)?;
        self.header(b"./", b"", b'5', 0, &stat).map_err(Ok)?;
        let names = names_in(&dir).map_err(Err)?.into_iter();
        let mut levels = vec![Level { dir, names, prefix: 0 }];
        let mut path = Vec::new();
        while let Some(level) = levels.last_mut() {
            path.truncate(level.prefix);
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            path.extend_from_slice(&name);
            let below = self.entry(&level.dir, &name, &path).map_err(Ok)?;
            if let Some((dir, names)) = below {
                path.push(b'/');
                levels.push(Level { dir, names: names.into_iter(), prefix: path.len() });
            }
        }
        Ok(())
    }

    /// One entry; a directory is returned to be walked.
    fn entry(&mut self, dir: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Option<Opened>, Failure> {
        let stat = match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(e) => return self.skip_errno(path, e).map(|()| None),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file(dir, name, path, false)?,
            FileType::Symlink => match readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    self.header(path, target.as_bytes(), b'2', 0, &stat)?;
                    self.done.files += 1;
                }
                Err(e) => self.skip_errno(path, e)?,
            },
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened =
                    openat(dir, name, flags, Mode::empty()).and_then(|fd| names_in(&fd).map(|names| (fd, names)));
                match opened {
                    Ok((fd, names)) => {
                        self.header(&[path, b"/"].concat(), b"", b'5', 0, &stat)?;
                        return Ok(Some((fd, names)));
                    }
                    Err(e) => self.skip_errno(path, e)?,
                }
            }
            FileType::Fifo => self.skip(path, "FIFO"),
            FileType::Socket => self.skip(path, "socket"),
            _ => self.skip(path, "device"),
        }
        Ok(None)
    }

    fn file(&mut self, dir: impl AsFd, name: &[u8], path: &[u8], alone: bool) -> Result<(), Failure> {
        let follow = if alone { OFlags::empty() } else { OFlags::NOFOLLOW };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | follow;
        let opened = openat(dir, name, flags, Mode::empty()).and_then(|fd| fstat(&fd).map(|stat| (fd, stat)));
        let (file, stat) = match opened {
            Ok((file, stat)) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => (file, stat),
            Ok(_) => {
                self.skip(path, "changed while it was read");
                return Ok(());
            }
            Err(e) if alone => return Err(Failure::errno(e, name)),
            Err(e) => return self.skip_errno(path, e),
        };
        self.done.files += 1;
        #[allow(clippy::useless_conversion)] // The type differs between architectures.
        if u64::from(stat.st_nlink) > 1 {
            let id = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.first_names.get(&id) {
                let first = first.clone();
                return self.header(path, &first, b'1', 0, &stat);
            }
            self.first_names.insert(id, path.to_vec());
        }
        let size = stat.st_size as u64;
        match segments(&file, &stat) {
            Some(map) => {
                let stored = map.iter().map(|&(_, length)| length).sum();
                self.extended(path, b"", &stat)?;
                let header = tar::header(&fields(path, b"", b'S', stored, &stat));
                self.buffer.extend_from_slice(&tar::sparse_header(header, &map, size));
                for (offset, length) in map {
                    rfs::seek(&file, SeekFrom::Start(offset)).map_err(|e| Failure::errno(e, path))?;
                    self.content(&file, length, path)?;
                }
                self.pad(stored)
            }
            None => {
                self.header(path, b"", b'0', size, &stat)?;
                self.content(&file, size, path)?;
                self.pad(size)
            }
        }
    }

    /// Exactly `size` bytes, read straight into the buffer that is written.
    fn content(&mut self, file: &OwnedFd, size: u64, path: &[u8]) -> Result<(), Failure> {
        let mut left = size;
        while left > 0 {
            if self.buffer.len() >= BUFFER - BLOCK {
                self.flush()?;
            }
            let before = self.buffer.len();
            match rustix::io::read(file, spare_capacity(&mut self.buffer)) {
                Ok(0) => {
                    self.skip(path, "shrank while it was read; the rest is zeros");
                    self.zeros(left)?;
                    left = 0;
                }
                Ok(n) => {
                    let used = (n as u64).min(left);
                    self.buffer.truncate(before + used as usize);
                    left -= used;
                }
                Err(Errno::INTR) => {}
                Err(e) => {
                    self.skip(path, &format!("{}; the rest is zeros", crate::link::describe(e.raw_os_error())));
                    self.zeros(left)?;
                    left = 0;
                }
            }
        }
        self.done.bytes += size;
        Ok(())
    }

    fn zeros(&mut self, mut count: u64) -> Result<(), Failure> {
        while count > 0 {
            if self.buffer.len() >= BUFFER - BLOCK {
                self.flush()?;
            }
            let n = (BUFFER - self.buffer.len()).min(usize::try_from(count).unwrap_or(usize::MAX));
            self.buffer.resize(self.buffer.len() + n, 0);
            count -= n as u64;
        }
        Ok(())
    }

    fn pad(&mut self, size: u64) -> Result<(), Failure> {
        self.zeros(tar::padding(size))
    }

    /// A header, with an extended one before it where it cannot say everything.
    fn header(&mut self, path: &[u8], link: &[u8], kind: u8, size: u64, stat: &Stat) -> Result<(), Failure> {
        self.extended(path, link, stat)?;
        self.buffer.extend_from_slice(&tar::header(&fields(path, link, kind, size, stat)));
        Ok(())
    }

    fn extended(&mut self, path: &[u8], link: &[u8], stat: &Stat) -> Result<(), Failure> {
        if self.buffer.len() >= BUFFER / 2 {
            self.flush()?;
        }
        let mut records = Vec::new();
        if path.len() > 100 {
            tar::pax_record(&mut records, "path", path);
        }
        if link.len() > 100 {
            tar::pax_record(&mut records, "linkpath", link);
        }
        let nanos = stat.st_mtime_nsec as u32;
        if nanos != 0 || stat.st_mtime < 0 {
            tar::pax_record(&mut records, "mtime", tar::to_pax_time(stat.st_mtime, nanos).as_bytes());
        }
        if records.is_empty() {
            return Ok(());
        }
        let size = records.len() as u64;
        self.buffer.extend_from_slice(&tar::header(&Fields {
            name: b"PaxHeaders/entry",
            link: b"",
            kind: b'x',
            mode: 0o644,
            uid: 0,
            gid: 0,
            size,
            mtime: 0,
        }));
        self.buffer.extend_from_slice(&records);
        self.pad(size)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let written = self.sink.write_all(&self.buffer);
        self.buffer.clear();
        written.map_err(|e| Failure::io(&e, "sending the archive").with_kind(FailKind::Other))
    }

    fn finish(mut self) -> Result<Done, Failure> {
        self.zeros(2 * BLOCK as u64)?;
        self.flush()?;
        self.sink.finish().map_err(|e| Failure::io(&e, "sending the archive").with_kind(FailKind::Other))?;
        Ok(self.done)
    }
}

fn fields<'a>(name: &'a [u8], link: &'a [u8], kind: u8, size: u64, stat: &Stat) -> Fields<'a> {
    let mtime = u64::try_from(stat.st_mtime).unwrap_or(0);
    Fields { name, link, kind, mode: stat.st_mode, uid: stat.st_uid, gid: stat.st_gid, size, mtime }
}

/// Where a file has data; nothing when it has no holes worth the trouble.
fn segments(file: &OwnedFd, stat: &Stat) -> Option<Segments> {
    let size = stat.st_size as u64;
    if size < SPARSE_FROM || stat.st_blocks as u64 * 512 >= size {
        return None;
    }
    let mut map = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rfs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            // No more data.
            Err(Errno::NXIO) => size,
            Err(_) => return rewind(file),
        };
        if start == size {
            break;
        }
        let Ok(end) = rfs::seek(file, SeekFrom::Hole(start)) else { return rewind(file) };
        let end = end.min(size);
        map.push((start, end - start));
        if map.len() > MAX_SEGMENTS {
            return rewind(file);
        }
        at = end;
    }
    if map.last().is_none_or(|&(offset, length)| offset + length < size) {
        // GNU tar ends the map with an empty segment at the file's end.
        map.push((size, 0));
    }
    if map == [(0, size)] { rewind(file) } else { Some(map) }
}

fn rewind(file: &OwnedFd) -> Option<Segments> {
    let _ = rfs::seek(file, SeekFrom::Start(0));
    None
}
