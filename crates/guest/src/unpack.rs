//! Unpacks a tar stream into a directory.
//!
//! Names stay below the destination: absolute ones and `..` are refused, and each directory on the way is opened
//! without following links. A link on the way (`/bin` of a merged `/usr`, or one that the archive made) is followed only
//! as far as the kernel keeps it beneath the destination (openat2(2), RESOLVE_BENEATH).
//!
//! What is there is replaced, except directories: those keep owner and mode. Directories that the archive makes get
//! their mode and time at the end, so that they can be written into before. A stream without its end mark was cut.
//!
//! Understood: ustar, GNU long names and sparse files, pax with its sparse files (0.0, 0.1, 1.0).

use crate::{
    agent::Machine,
    files::{self, Owner, set_owner},
    link::{Failure, text},
    tar::{self, BLOCK, Header, Segments},
    work::End,
};
use rustix::{
    fs::{
        self as rfs, AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, chownat, fchmod,
        futimens, linkat, mkdirat, mknodat, openat, openat2, statat, symlinkat, unlinkat, utimensat,
    },
    io::Errno,
};
use std::{
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    rc::Rc,
};
use trialrun_guest_proto::{Done, FailKind, TarUp};

/// Bytes read at once; a file that lies whole in the buffer is written with one call.
const BUFFER: usize = 512 * 1024;
/// Most reasons that travel; all are counted.
pub const MAX_SKIPPED: usize = 100;
/// Most segments of one sparse file.
const MAX_SEGMENTS: usize = 1 << 20;
/// Most directories whose mode and time wait for the end.
const MAX_DIRECTORIES: usize = 2_000_000;

fn broken(what: impl Into<String>) -> Failure {
    Failure::new(FailKind::BadStream, what)
}

/// The stream, buffered so that what was read can be written without another copy.
struct Stream<R> {
    source: R,
    buffer: Vec<u8>,
    at: usize,
    end: usize,
}

impl<R: Read> Stream<R> {
    fn new(source: R) -> Self {
        Self { source, buffer: vec![0; BUFFER], at: 0, end: 0 }
    }

    /// Reads more behind what is there. `false` at the end.
    fn more(&mut self) -> Result<bool, Failure> {
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(n) => {
                    self.end += n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(format!("the stream broke: {e}"))),
            }
        }
    }

    /// At least one and at most `limit` bytes.
    fn some(&mut self, limit: u64) -> Result<&[u8], Failure> {
        if self.at == self.end && !self.more()? {
            return Err(broken("the stream was cut within an entry"));
        }
        let n = (self.end - self.at).min(usize::try_from(limit).unwrap_or(usize::MAX));
        self.at += n;
        Ok(&self.buffer[self.at - n..self.at])
    }

    /// The next block; nothing at the end.
    fn block(&mut self) -> Result<Option<Header>, Failure> {
        while self.end - self.at < BLOCK {
            if !self.more()? {
                return if self.at == self.end { Ok(None) } else { Err(broken("the stream was cut within a header")) };
            }
        }
        let mut block = [0; BLOCK];
        block.copy_from_slice(&self.buffer[self.at..self.at + BLOCK]);
        self.at += BLOCK;
        Ok(Some(block))
    }

    /// So many bytes, which the caller has bounded.
    fn bytes(&mut self, size: u64) -> Result<Vec<u8>, Failure> {
        let mut out = Vec::new();
        while (out.len() as u64) < size {
            let left = size - out.len() as u64;
            out.extend_from_slice(self.some(left)?);
        }
        Ok(out)
    }

    fn skip(&mut self, mut size: u64) -> Result<(), Failure> {
        while size > 0 {
            size -= self.some(size)?.len() as u64;
        }
        Ok(())
    }

    /// Reads what follows the end mark, so that the sender is not cut off in its padding.
    fn drain(&mut self) -> Result<(), Failure> {
        loop {
            self.at = self.end;
            if !self.more()? {
                return Ok(());
            }
        }
    }
}

/// What an extended header said about the entry that follows.
#[derive(Debug, Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<(i64, u32)>,
    sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
    sparse_map: Segments,
    sparse_offset: Option<u64>,
    /// The map stands before the data (pax sparse 1.0).
    sparse_in_data: bool,
    is_sparse: bool,
}

impl Extended {
    fn read(&mut self, bytes: &[u8]) -> Option<()> {
        let decimal = |value: &[u8]| str::from_utf8(value).ok()?.parse::<u64>().ok();
        for (key, value) in tar::pax_records(bytes)? {
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(decimal(value)?),
                b"mtime" => self.mtime = Some(tar::pax_time(value)?),
                b"GNU.sparse.major" => {
                    self.is_sparse = true;
                    self.sparse_in_data = decimal(value)? == 1;
                }
                b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
                b"GNU.sparse.realsize" | b"GNU.sparse.size" => {
                    self.is_sparse = true;
                    self.sparse_size = Some(decimal(value)?);
                }
                b"GNU.sparse.offset" => self.sparse_offset = Some(decimal(value)?),
                b"GNU.sparse.numbytes" => self.sparse_map.push((self.sparse_offset.take()?, decimal(value)?)),
                b"GNU.sparse.map" => {
                    let numbers: Vec<u64> = value.split(|&b| b == b',').map(decimal).collect::<Option<_>>()?;
                    self.sparse_map.extend(numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])));
                }
                _ => {}
            }
        }
        Some(())
    }
}

/// An entry as the archive has it.
#[derive(Debug)]
struct Entry {
    name: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    mode: u32,
    mtime: Timespec,
    /// Bytes in the stream.
    size: u64,
    /// Segments and real size.
    sparse: Option<(Segments, u64)>,
}

impl<R: Read> Stream<R> {
    /// The next entry; nothing at the end mark.
    fn entry(&mut self) -> Result<Option<Entry>, Failure> {
        let mut extended = Extended::default();
        loop {
            let header = self.block()?.ok_or_else(|| broken("the stream was cut: it has no end mark"))?;
            if header.iter().all(|&b| b == 0) {
                return Ok(None);
            }
            let named = text(tar::until_nul(&header[..100]));
            if !tar::is_sound(&header) {
                return Err(broken(format!("entry {named}: the header's checksum is wrong")));
            }
            let number = |range: std::ops::Range<usize>, what: &str| {
                tar::number(&header[range]).ok_or_else(|| broken(format!("entry {named}: bad {what}")))
            };
            let size =
                u64::try_from(number(124..136, "size")?).map_err(|_| broken(format!("entry {named}: bad size")))?;
            let kind = header[156];
            match kind {
                b'x' | b'g' | b'L' | b'K' => {
                    if size > tar::MAX_EXTENDED {
                        return Err(broken(format!("entry {named}: an extended header of {size} bytes")));
                    }
                    let bytes = self.bytes(size)?;
                    self.skip(tar::padding(size))?;
                    match kind {
                        b'L' => extended.name = Some(tar::until_nul(&bytes).to_vec()),
                        b'K' => extended.link = Some(tar::until_nul(&bytes).to_vec()),
                        b'x' => extended
                            .read(&bytes)
                            .ok_or_else(|| broken(format!("entry {named}: bad extended header")))?,
                        // For the whole archive: nothing in it that we use.
                        _ => {}
                    }
                    continue;
                }
                _ => {}
            }
            let gnu = &header[257..263] == b"ustar ";
            let prefix = if &header[257..262] == b"ustar" && !gnu { tar::until_nul(&header[345..500]) } else { b"" };
            let short = tar::until_nul(&header[..100]);
            let joined = if prefix.is_empty() { short.to_vec() } else { [prefix, b"/", short].concat() };
            let mut entry = Entry {
                name: extended.sparse_name.take().or(extended.name.take()).unwrap_or(joined),
                link: extended.link.take().unwrap_or_else(|| tar::until_nul(&header[157..257]).to_vec()),
                kind,
                mode: number(100..108, "mode")? as u32 & 0o7777,
                mtime: {
                    let (seconds, nanos) = match extended.mtime {
                        Some(time) => time,
                        None => (number(136..148, "time")?, 0),
                    };
                    Timespec { tv_sec: seconds, tv_nsec: i64::from(nanos) }
                },
                size: extended.size.unwrap_or(size),
                sparse: None,
            };
            if kind == b'S' {
                entry.sparse = Some(self.gnu_sparse(&header, &entry.name)?);
            } else if extended.is_sparse {
                entry.sparse = Some(self.pax_sparse(extended, &mut entry)?);
            }
            return Ok(Some(entry));
        }
    }

    fn gnu_sparse(&mut self, header: &Header, name: &[u8]) -> Result<(Segments, u64), Failure> {
        let bad = || broken(format!("entry {}: bad sparse map", text(name)));
        let mut map = Vec::new();
        tar::segments(&header[386..482], &mut map).ok_or_else(bad)?;
        let mut more = header[482] != 0;
        while more {
            let block = self.block()?.ok_or_else(bad)?;
            tar::segments(&block[..504], &mut map).ok_or_else(bad)?;
            more = block[504] != 0;
            if map.len() > MAX_SEGMENTS {
                return Err(bad());
            }
        }
        let real = tar::number(&header[483..495]).and_then(|n| u64::try_from(n).ok()).ok_or_else(bad)?;
        Ok((map, real))
    }

    fn pax_sparse(&mut self, extended: Extended, entry: &mut Entry) -> Result<(Segments, u64), Failure> {
        let bad = || broken(format!("entry {}: bad sparse map", text(&entry.name)));
        let mut map = extended.sparse_map;
        if extended.sparse_in_data {
            let mut bytes = Vec::new();
            let mut numbers: Vec<u64> = Vec::new();
            // Lines of decimal numbers, the count first, padded to a block.
            while numbers.first().is_none_or(|&count| ((numbers.len() - 1) as u64) < count.saturating_mul(2)) {
                if entry.size < BLOCK as u64 || numbers.len() > 2 * MAX_SEGMENTS {
                    return Err(bad());
                }
                bytes.extend_from_slice(&self.block()?.ok_or_else(bad)?);
                entry.size -= BLOCK as u64;
                while let Some(line) = bytes.iter().position(|&b| b == b'\n') {
                    if numbers.first().is_some_and(|&count| (numbers.len() - 1) as u64 >= count.saturating_mul(2)) {
                        break;
                    }
                    numbers.push(str::from_utf8(&bytes[..line]).ok().and_then(|s| s.parse().ok()).ok_or_else(bad)?);
                    bytes.drain(..=line);
                }
            }
            map = numbers[1..].chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        }
        Ok((map, extended.sparse_size.ok_or_else(bad)?))
    }
}

/// Splits a name into its components; refuses what would leave the destination. Empty for the destination itself.
fn components(name: &[u8]) -> Result<Vec<&[u8]>, Failure> {
    let refuse = |why: &str| Err(broken(format!("entry {}: {why}", text(name))));
    if name.starts_with(b"/") {
        return refuse("the name is absolute");
    }
    if name.contains(&0) {
        return refuse("the name holds NUL");
    }
    let parts: Vec<&[u8]> = name.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return refuse("the name leaves the destination");
    }
    Ok(parts)
}

/// The destination, with the directories on the way to the last entry kept open: archives are in walking order.
struct Tree {
    root: Rc<OwnedFd>,
    open: Vec<(Vec<u8>, Rc<OwnedFd>)>,
    owner: Owner,
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Tree {
    /// The directory of these components; made when missing.
    fn directory(&mut self, parts: &[&[u8]]) -> Result<Rc<OwnedFd>, Errno> {
        let common = self.open.iter().zip(parts).take_while(|(open, part)| open.0 == **part).count();
        self.open.truncate(common);
        for (at, part) in parts.iter().enumerate().skip(common) {
            let above = self.open.last().map_or(&self.root, |(_, fd)| fd);
            let open = || openat(above, *part, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
            let fd = match open() {
                Err(Errno::NOENT) => {
                    mkdirat(above, *part, Mode::from_raw_mode(0o755))?;
                    self.give(above, part)?;
                    open()?
                }
                // With O_PATH a link itself would be opened, if O_DIRECTORY did not refuse it.
                Err(Errno::LOOP | Errno::NOTDIR) if is_link(above, part) => {
                    let way = parts[..=at].join(&b'/');
                    let stay = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                    openat2(&self.root, &way[..], DIRECTORY, Mode::empty(), stay)?
                }
                other => other?,
            };
            self.open.push((part.to_vec(), Rc::new(fd)));
        }
        Ok(Rc::clone(self.open.last().map_or(&self.root, |(_, fd)| fd)))
    }

    /// Gives a thing that was just made to the owner; links are not followed.
    fn give(&self, dir: impl AsFd, name: &[u8]) -> Result<(), Errno> {
        match self.owner {
            Some((uid, gid)) => {
                chownat(dir, name, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)
            }
            None => Ok(()),
        }
    }
}

fn is_link(dir: impl AsFd, name: &[u8]) -> bool {
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Symlink)
}

/// Makes something under a name; what is there is removed first (a directory only if it is empty).
fn replacing<T>(dir: &OwnedFd, name: &[u8], make: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match make() {
        Err(Errno::EXIST) => {
            match unlinkat(dir, name, AtFlags::empty()) {
                Err(Errno::ISDIR | Errno::PERM) => unlinkat(dir, name, AtFlags::REMOVEDIR)?,
                Err(Errno::NOENT) => {}
                other => other?,
            }
            make()
        }
        other => other,
    }
}

/// What an unpacked directory still has to get.
struct Pending {
    name: Vec<u8>,
    mode: u32,
    mtime: Timespec,
}

struct Unpacker {
    tree: Tree,
    pending: Vec<Pending>,
    done: Done,
    made_dest: bool,
}

/// Unpacks.
pub fn unpack(machine: &Machine, end: End, op: &TarUp) -> Result<Done, Failure> {
    let owner = machine.owner(op.owner.as_deref())?;
    let dest = files::resolve(machine, &op.dest)?;
    let source: Box<dyn Read> = match op.compression.as_str() {
        "" => Box::new(end),
        "zstd" => Box::new(zstd::stream::read::Decoder::new(end).map_err(|e| Failure::io(&e, "zstd"))?),
        "gzip" => Box::new(flate2::read::MultiGzDecoder::new(end)),
        other => return Err(Failure::new(FailKind::BadRequest, format!("unknown compression {other:?}"))),
    };
    let made_dest = files::make_dirs(&dest, 0o755, owner)?;
    let root = rfs::open(&dest[..], DIRECTORY, Mode::empty()).map_err(|e| Failure::errno(e, &dest))?;
    let mut unpacker = Unpacker {
        tree: Tree { root: Rc::new(root), open: Vec::new(), owner },
        pending: Vec::new(),
        done: Done::default(),
        made_dest,
    };
    let mut stream = Stream::new(source);
    while let Some(entry) = stream.entry()? {
        unpacker.place(&mut stream, &entry)?;
    }
    stream.drain()?;
    unpacker.finish()
}

impl Unpacker {
    fn skip(&mut self, entry: &Entry, why: &str) {
        self.done.skipped_total += 1;
        if self.done.skipped.len() < MAX_SKIPPED {
            self.done.skipped.push(format!("{}: {why}", text(&entry.name)));
        }
    }

    fn place<R: Read>(&mut self, stream: &mut Stream<R>, entry: &Entry) -> Result<(), Failure> {
        let fail = |e: Errno| {
            let failure = Failure::errno(e, [b"entry ", &entry.name[..]].concat());
            match e {
                Errno::XDEV => broken(format!("entry {}: a link on the way leaves the destination", text(&entry.name))),
                Errno::EXIST | Errno::NOTEMPTY => failure.with_kind(FailKind::WrongType),
                _ => failure,
            }
        };
        let parts = components(&entry.name)?;
        // Old archives mark directories by their name alone.
        let kind = if matches!(entry.kind, b'0' | 0) && entry.name.ends_with(b"/") { b'5' } else { entry.kind };
        let Some((name, above)) = parts.split_last() else {
            if kind != b'5' {
                return Err(broken(format!("entry {}: the name is empty", text(&entry.name))));
            }
            if self.made_dest {
                self.pending.push(Pending { name: Vec::new(), mode: entry.mode, mtime: entry.mtime });
            }
            return stream.skip(entry.size.saturating_add(tar::padding(entry.size)));
        };
        let dir = match kind {
            b'3' | b'4' | b'V' | b'M' => Rc::clone(&self.tree.root),
            _ => self.tree.directory(above).map_err(fail)?,
        };
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: rfs::UTIME_OMIT },
            last_modification: entry.mtime,
        };
        let mut unread = entry.size;
        match kind {
            b'0' | 0 | b'7' | b'S' => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mode = Mode::from_raw_mode(entry.mode & 0o777);
                let file = replacing(&dir, name, || openat(&dir, *name, flags, mode)).map_err(fail)?;
                let file = std::fs::File::from(file);
                let moved = fill(stream, &file, entry)?;
                unread -= moved;
                self.done.bytes += moved;
                set_owner(&file, self.tree.owner).map_err(fail)?;
                if entry.mode & 0o7000 != 0 {
                    // After chown(2), which takes these bits away; open(2) does not set them.
                    fchmod(&file, Mode::from_raw_mode(entry.mode)).map_err(fail)?;
                }
                futimens(&file, &times).map_err(fail)?;
                self.done.files += 1;
            }
            b'5' | b'D' => {
                match mkdirat(&dir, *name, Mode::from_raw_mode(0o700 | entry.mode & 0o777)) {
                    Ok(()) => self.made_directory(entry, &dir, name).map_err(fail)?,
                    Err(Errno::EXIST) => {
                        // A directory, or a link to one beneath the destination, stays. Anything else gives way.
                        if let Err(e) = self.tree.directory(&parts) {
                            if !matches!(e, Errno::NOTDIR | Errno::LOOP | Errno::NOENT | Errno::XDEV) {
                                return Err(fail(e));
                            }
                            unlinkat(&dir, *name, AtFlags::empty()).map_err(fail)?;
                            mkdirat(&dir, *name, Mode::from_raw_mode(0o700 | entry.mode & 0o777)).map_err(fail)?;
                            self.made_directory(entry, &dir, name).map_err(fail)?;
                        }
                    }
                    Err(e) => return Err(fail(e)),
                }
            }
            b'2' => {
                replacing(&dir, name, || symlinkat(&entry.link[..], &dir, *name)).map_err(fail)?;
                self.tree.give(&dir, name).map_err(fail)?;
                utimensat(&dir, *name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
                self.done.files += 1;
            }
            b'1' => {
                let target = components(&entry.link)
                    .map_err(|f| broken(format!("entry {}: link target: {}", text(&entry.name), f.message)))?;
                let (target_name, target_above) = target
                    .split_last()
                    .ok_or_else(|| broken(format!("entry {}: empty link target", text(&entry.name))))?;
                if target != parts {
                    let from = self.tree.directory(target_above).map_err(fail)?;
                    replacing(&dir, name, || linkat(&from, *target_name, &dir, *name, AtFlags::empty()))
                        .map_err(fail)?;
                }
                self.done.files += 1;
            }
            b'6' => {
                let mode = Mode::from_raw_mode(entry.mode & 0o777);
                replacing(&dir, name, || mknodat(&dir, *name, FileType::Fifo, mode, 0)).map_err(fail)?;
                self.tree.give(&dir, name).map_err(fail)?;
                utimensat(&dir, *name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
                self.done.files += 1;
            }
            b'3' | b'4' => self.skip(entry, "device"),
            other => self.skip(entry, &format!("unknown entry type {:?}", char::from(other))),
        }
        stream.skip(unread)?;
        stream.skip(tar::padding(entry.size))
    }

    fn made_directory(&mut self, entry: &Entry, dir: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        self.tree.give(dir, name)?;
        if self.pending.len() >= MAX_DIRECTORIES {
            return Err(Errno::NOMEM);
        }
        self.pending.push(Pending { name: entry.name.clone(), mode: entry.mode, mtime: entry.mtime });
        Ok(())
    }

    /// Modes and times of directories, the deepest first.
    fn finish(mut self) -> Result<Done, Failure> {
        for Pending { name, mode, mtime } in std::mem::take(&mut self.pending).iter().rev() {
            let parts = components(name)?;
            let set = || -> Result<(), Errno> {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fd = match parts.split_last() {
                    Some((last, above)) => openat(self.tree.directory(above)?, *last, flags, Mode::empty()),
                    None => openat(&self.tree.root, ".", flags, Mode::empty()),
                };
                let fd = match fd {
                    // A later entry has put something else there.
                    Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => return Ok(()),
                    other => other?,
                };
                fchmod(&fd, Mode::from_raw_mode(*mode))?;
                let now = Timespec { tv_sec: 0, tv_nsec: rfs::UTIME_OMIT };
                futimens(&fd, &Timestamps { last_access: now, last_modification: *mtime })
            };
            let mut set = set;
            set().map_err(|e| Failure::errno(e, [b"entry ", &name[..]].concat()))?;
        }
        Ok(self.done)
    }
}

/// Writes an entry's content; returns how many bytes of the stream it took.
fn fill<R: Read>(stream: &mut Stream<R>, file: &std::fs::File, entry: &Entry) -> Result<u64, Failure> {
    let fail = |e: io::Error| Failure::io(&e, [b"entry ", &entry.name[..]].concat());
    let whole = [(0, entry.size)];
    let (map, real) = entry.sparse.as_ref().map_or((&whole[..], entry.size), |(map, real)| (&map[..], *real));
    let mut left = entry.size;
    let mut end = 0;
    for &(offset, length) in map {
        let last = offset.checked_add(length);
        if length > left || last.is_none_or(|last| last > real) {
            return Err(broken(format!("entry {}: the sparse map exceeds the file", text(&entry.name))));
        }
        left -= length;
        let mut at = offset;
        while at < offset + length {
            let piece = stream.some(offset + length - at)?;
            file.write_all_at(piece, at).map_err(fail)?;
            at += piece.len() as u64;
        }
        end = end.max(if length > 0 { at } else { 0 });
    }
    if end != real {
        file.set_len(real).map_err(fail)?;
    }
    Ok(entry.size - left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the name, each component that gets through stays within one directory.
        #[test]
        fn accepted_names_cannot_leave(name in proptest::collection::vec(prop_oneof![Just(b'/'), Just(b'.'), Just(0), any::<u8>()], 0..40)) {
            match components(&name) {
                Ok(parts) => {
                    prop_assert!(!name.starts_with(b"/"));
                    for part in parts {
                        prop_assert!(!part.is_empty() && part != b"." && part != b"..");
                        prop_assert!(!part.contains(&b'/') && !part.contains(&0));
                    }
                }
                Err(failure) => {
                    prop_assert_eq!(failure.kind, FailKind::BadStream);
                    prop_assert!(
                        name.starts_with(b"/") || name.contains(&0) || name.split(|&b| b == b'/').any(|p| p == b"..")
                    );
                }
            }
        }

        /// No bytes make the reader panic or read without end.
        #[test]
        fn any_stream_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let mut stream = Stream::new(&bytes[..]);
            while let Ok(Some(entry)) = stream.entry() {
                if stream.skip(entry.size).is_err() {
                    break;
                }
            }
        }
    }
}
