//! One entry of a layer's archive, as the archive's formats have it: ustar, GNU and pax headers (tar(5), pax(1)).

use std::{
    ffi::OsString,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
    path::{Component, Path, PathBuf},
};

/// Longest path.
const MAX_PATH: usize = 4095;
/// Longest name, as the kernel has it.
const MAX_NAME: usize = 255;
/// Deepest folder.
const MAX_DEPTH: usize = 256;
/// Largest value of an extended attribute (XATTR_SIZE_MAX).
const MAX_XATTR: usize = 65_536;
/// Most extended attributes of one file.
const MAX_XATTRS: usize = 256;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A file's content follows.
    File,
    /// A file of this size whose content follows in pieces: offset and length.
    Sparse(u64, Vec<(u64, u64)>),
    Folder,
    /// With its target's bytes.
    Symlink(OsString),
    /// To an earlier entry.
    Hardlink(PathBuf),
    /// A device, FIFO or socket, by its word.
    Special(&'static str),
    /// Something that stands for no file.
    Nothing,
}

/// Owner, mode and the rest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    pub uid: u64,
    pub gid: u64,
    /// With setuid, setgid and sticky bits.
    pub mode: u32,
    /// Seconds and nanoseconds since 1970.
    pub mtime: (i64, u32),
    pub xattrs: Vec<(String, Vec<u8>)>,
}

/// Why an entry is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EntryError {
    #[error("it leads out of the image")]
    Outside,
    #[error("a name in it is longer than {MAX_NAME} bytes")]
    Name,
    #[error("its path is longer than {MAX_PATH} bytes")]
    Path,
    #[error("it is deeper than {MAX_DEPTH} folders")]
    Depth,
    #[error("its path holds a NUL")]
    Nul,
    #[error("its link has no target")]
    NoTarget,
    #[error("its pax header is malformed ({0})")]
    Pax(String),
    #[error("it has more than {MAX_XATTRS} extended attributes, or one over {MAX_XATTR} bytes")]
    Xattrs,
    #[error("it is of an unknown type ({0:?})")]
    Unknown(char),
}

/// A path of plain names below the image's top; empty for the top itself. Leading slashes and dots don't matter.
///
/// # Errors
/// With `..` in it, or beyond a limit.
pub fn plain(bytes: &[u8]) -> Result<PathBuf, EntryError> {
    if bytes.contains(&0) {
        return Err(EntryError::Nul);
    }
    if bytes.len() > MAX_PATH {
        return Err(EntryError::Path);
    }
    let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
    let mut plain = PathBuf::new();
    for (depth, component) in path.components().enumerate() {
        match component {
            Component::Normal(name) if name.len() > MAX_NAME => return Err(EntryError::Name),
            Component::Normal(_) if depth > MAX_DEPTH => return Err(EntryError::Depth),
            Component::Normal(name) => plain.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(EntryError::Outside),
        }
    }
    Ok(plain)
}

/// An entry's header, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub path: PathBuf,
    pub kind: Kind,
    pub meta: Meta,
}

/// What a pax header says beside what the archive's reader uses itself.
#[derive(Default)]
struct Pax {
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(String, Vec<u8>)>,
    name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
    sparse_map: Vec<(u64, u64)>,
    sparse_major: Option<u64>,
    offset: Option<u64>,
}

fn number(value: &[u8]) -> Result<u64, EntryError> {
    let text = str::from_utf8(value).unwrap_or_default();
    text.parse().map_err(|_| EntryError::Pax(format!("{text:?} is no number")))
}

fn time(value: &[u8]) -> Result<(i64, u32), EntryError> {
    let text = str::from_utf8(value).unwrap_or_default();
    let bad = || EntryError::Pax(format!("{text:?} is no time"));
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| bad())?;
    if !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let digits: String = part.chars().chain(std::iter::repeat('0')).take(9).collect();
    let nanos = digits.parse::<u32>().map_err(|_| bad())?;
    // A time before 1970 with a fraction counts it backwards.
    Ok(if text.starts_with('-') && nanos > 0 { (seconds - 1, 1_000_000_000 - nanos) } else { (seconds, nanos) })
}

impl Pax {
    fn read(entry: &mut tar::Entry<'_, impl Read>) -> Result<Self, EntryError> {
        let mut pax = Self::default();
        let bad = |e: io::Error| EntryError::Pax(e.to_string());
        let Some(records) = entry.pax_extensions().map_err(bad)? else { return Ok(pax) };
        for record in records {
            let record = record.map_err(bad)?;
            let (key, value) = (record.key_bytes(), record.value_bytes());
            match key {
                b"uid" => pax.uid = Some(number(value)?),
                b"gid" => pax.gid = Some(number(value)?),
                b"mtime" => pax.mtime = Some(time(value)?),
                b"GNU.sparse.major" => pax.sparse_major = Some(number(value)?),
                b"GNU.sparse.name" => pax.name = Some(value.to_vec()),
                b"GNU.sparse.realsize" | b"GNU.sparse.size" => pax.sparse_size = Some(number(value)?),
                b"GNU.sparse.offset" => pax.offset = Some(number(value)?),
                b"GNU.sparse.numbytes" => {
                    let offset =
                        pax.offset.take().ok_or_else(|| EntryError::Pax("a length without an offset".into()))?;
                    pax.sparse_map.push((offset, number(value)?));
                }
                b"GNU.sparse.map" => {
                    let numbers: Vec<u64> = value.split(|b| *b == b',').map(number).collect::<Result<_, _>>()?;
                    pax.sparse_map = numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
                }
                _ => {
                    let name = key.strip_prefix(b"SCHILY.xattr.").and_then(|name| str::from_utf8(name).ok());
                    if let Some(name) = name.filter(|name| !name.is_empty() && !name.contains('\0')) {
                        if pax.xattrs.len() >= MAX_XATTRS || value.len() > MAX_XATTR {
                            return Err(EntryError::Xattrs);
                        }
                        pax.xattrs.push((name.to_owned(), value.to_vec()));
                    }
                }
            }
        }
        Ok(pax)
    }
}

/// The map of GNU's sparse format 1.0 at the start of the content: lines of decimal numbers, padded to whole blocks.
fn sparse_map(content: &mut impl Read) -> Result<Vec<(u64, u64)>, EntryError> {
    let bad = || EntryError::Pax("a malformed map of a sparse file".into());
    let mut read = 0_usize;
    let mut line = |content: &mut dyn Read| -> Result<u64, EntryError> {
        let mut digits = Vec::new();
        loop {
            let mut byte = [0];
            content.read_exact(&mut byte).map_err(|_| bad())?;
            read += 1;
            match byte[0] {
                b'\n' => return number(&digits),
                _ if digits.len() > 20 => return Err(bad()),
                digit => digits.push(digit),
            }
        }
    };
    let count = line(content)?;
    let mut map = Vec::new();
    for _ in 0..count {
        map.push((line(content)?, line(content)?));
    }
    let padding = read.next_multiple_of(512) - read;
    io::copy(&mut content.take(padding as u64), &mut io::sink()).map_err(|_| bad())?;
    Ok(map)
}

impl Entry {
    /// Understands an entry's header; of a sparse file, reads the map before its content.
    ///
    /// # Errors
    /// What makes it unusable, beside its path, as far as that is known.
    pub fn read(entry: &mut tar::Entry<'_, impl Read>) -> Result<Self, (String, EntryError)> {
        let shown = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        Self::understand(entry).map_err(|e| (shown, e))
    }

    fn understand(entry: &mut tar::Entry<'_, impl Read>) -> Result<Self, EntryError> {
        let pax = Pax::read(entry)?;
        let header = entry.header().clone();
        let path = match &pax.name {
            Some(name) => plain(name)?,
            None => plain(&entry.path_bytes())?,
        };
        let field = |value: io::Result<u64>, what: &str| value.map_err(|_| EntryError::Pax(format!("no {what}")));
        let mtime = header.mtime().map(|t| (i64::try_from(t).unwrap_or(i64::MAX), 0));
        let meta = Meta {
            uid: pax.uid.map_or_else(|| field(header.uid(), "owner"), Ok)?,
            gid: pax.gid.map_or_else(|| field(header.gid(), "group"), Ok)?,
            mode: header.mode().map_err(|_| EntryError::Pax("no mode".into()))? & 0o7777,
            mtime: pax.mtime.or(mtime.ok()).unwrap_or_default(),
            xattrs: pax.xattrs,
        };
        let target = |entry: &tar::Entry<'_, _>| -> Result<Vec<u8>, EntryError> {
            let bytes = entry.link_name_bytes().map(|name| name.into_owned()).filter(|name| !name.is_empty());
            bytes.ok_or(EntryError::NoTarget)
        };
        use tar::EntryType as Type;
        let kind = match header.entry_type() {
            Type::Regular | Type::Continuous => match (pax.sparse_major, pax.sparse_size) {
                (Some(1), Some(size)) => Kind::Sparse(size, sparse_map(entry)?),
                (_, Some(size)) => Kind::Sparse(size, pax.sparse_map),
                // Old archives write a folder as a file whose name ends in a slash.
                (_, None) if entry.path_bytes().ends_with(b"/") => Kind::Folder,
                _ => Kind::File,
            },
            // Its reader fills the holes in; they are looked for when it is written.
            Type::GNUSparse => Kind::File,
            Type::Directory => Kind::Folder,
            Type::Symlink => {
                let bytes = target(entry)?;
                if bytes.contains(&0) {
                    return Err(EntryError::Nul);
                }
                if bytes.len() > MAX_PATH {
                    return Err(EntryError::Path);
                }
                Kind::Symlink(OsString::from_vec(bytes))
            }
            Type::Link => Kind::Hardlink(plain(&target(entry)?)?),
            Type::Char => Kind::Special("character device"),
            Type::Block => Kind::Special("block device"),
            Type::Fifo => Kind::Special("FIFO"),
            Type::XGlobalHeader => Kind::Nothing,
            other => return Err(EntryError::Unknown(char::from(other.as_byte()))),
        };
        if path.as_os_str().is_empty() && !matches!(kind, Kind::Folder | Kind::Nothing) {
            return Err(EntryError::Outside);
        }
        Ok(Self { path, kind, meta })
    }
}

/// Whether a path lies in the image's `/dev`, which machines don't see.
pub fn in_dev(path: &Path) -> bool {
    path.starts_with("dev")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_plain_or_refused() {
        for (text, want) in [("./a/b", "a/b"), ("/a//b/", "a/b"), ("a/./b", "a/b"), ("./", ""), ("/", "")] {
            assert_eq!(plain(text.as_bytes()).unwrap(), Path::new(want), "{text}");
        }
        for text in ["..", "a/../b", "../../etc/passwd", "/..", "a/.."] {
            assert_eq!(plain(text.as_bytes()), Err(EntryError::Outside), "{text}");
        }
        assert_eq!(plain(b"a\0b"), Err(EntryError::Nul));
        assert_eq!(plain("x".repeat(256).as_bytes()), Err(EntryError::Name));
        assert_eq!(plain("a/".repeat(300).as_bytes()), Err(EntryError::Depth));
        assert_eq!(plain("abcdefgh/".repeat(500).as_bytes()), Err(EntryError::Path));
        assert_eq!(plain(b"\xff\xfe").unwrap().as_os_str().len(), 2);
    }

    #[test]
    fn times_have_fractions_and_signs() {
        assert_eq!(time(b"12"), Ok((12, 0)));
        assert_eq!(time(b"12.5"), Ok((12, 500_000_000)));
        assert_eq!(time(b"12.1234567891"), Ok((12, 123_456_789)));
        assert_eq!(time(b"-1.25"), Ok((-2, 750_000_000)));
        for bad in [&b""[..], b"x", b"1.x", b"1e3", b"99999999999999999999"] {
            assert!(time(bad).is_err(), "{bad:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_path_stays_inside(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..60)) {
            if let Ok(path) = plain(&bytes) {
                proptest::prop_assert!(path.components().all(|c| matches!(c, Component::Normal(_))));
            }
        }
    }
}
