//! The tar format: headers as bytes, both ways (pax(1), GNU's `tar.h`).

/// Size of every block.
pub const BLOCK: usize = 512;
/// Largest extended header; names are at most 4 KiB, but foreign attributes may stand beside them.
pub const MAX_EXTENDED: u64 = 1 << 20;

/// A header block.
pub type Header = [u8; BLOCK];

/// Bytes up to the padding's end.
pub const fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

/// A field up to its first NUL.
pub fn until_nul(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|&b| b == 0).unwrap_or(field.len())]
}

/// A numeric field: octal digits, or base 256 when the first bit is set (GNU's and star's extension).
pub fn number(field: &[u8]) -> Option<i64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let start = if negative { -1_i64 << 6 | i64::from(first & 0x3f) } else { i64::from(first & 0x3f) };
        return rest.iter().try_fold(start, |n, &b| n.checked_mul(256)?.checked_add(i64::from(b)));
    }
    let digits: &[u8] = until_nul(field).trim_ascii();
    digits.iter().try_fold(0_i64, |n, &b| match b {
        b'0'..=b'7' => n.checked_mul(8)?.checked_add(i64::from(b - b'0')),
        _ => None,
    })
}

/// The header's checksum: the sum of its bytes with the checksum's own field as spaces.
fn sum(header: &Header) -> i64 {
    let all: u32 = header.iter().map(|&b| u32::from(b)).sum();
    let own: u32 = header[148..156].iter().map(|&b| u32::from(b)).sum();
    i64::from(all - own + 8 * u32::from(b' '))
}

/// Whether the checksum is right.
pub fn is_sound(header: &Header) -> bool {
    number(&header[148..156]) == Some(sum(header))
}

/// Writes a number: octal if it fits, else base 256.
fn put_number(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    if digits >= 21 || value < 1 << (3 * digits) {
        let mut rest = value;
        for place in field[..digits].iter_mut().rev() {
            *place = b'0' + (rest & 7) as u8;
            rest >>= 3;
        }
        field[digits] = 0;
    } else {
        let bytes = value.to_be_bytes();
        field.fill(0);
        let length = bytes.len().min(field.len());
        let start = field.len() - length;
        field[start..].copy_from_slice(&bytes[bytes.len() - length..]);
        field[0] |= 0x80;
    }
}

/// What goes into a header. Names that do not fit are cut: an extended header before it has them whole.
#[derive(Debug)]
pub struct Fields<'a> {
    /// Name.
    pub name: &'a [u8],
    /// Link target.
    pub link: &'a [u8],
    /// Type flag.
    pub kind: u8,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes that follow.
    pub size: u64,
    /// Seconds since 1970; times before are in the extended header.
    pub mtime: u64,
}

/// A POSIX header.
pub fn header(fields: &Fields<'_>) -> Header {
    let mut h = [0; BLOCK];
    let put = |to: &mut [u8], bytes: &[u8]| {
        let n = bytes.len().min(to.len());
        to[..n].copy_from_slice(&bytes[..n]);
    };
    put(&mut h[..100], fields.name);
    put_number(&mut h[100..108], u64::from(fields.mode & 0o7777));
    put_number(&mut h[108..116], u64::from(fields.uid));
    put_number(&mut h[116..124], u64::from(fields.gid));
    put_number(&mut h[124..136], fields.size);
    put_number(&mut h[136..148], fields.mtime);
    h[156] = fields.kind;
    put(&mut h[157..257], fields.link);
    h[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut h);
    h
}

/// Puts the checksum in.
fn seal(h: &mut Header) {
    let sum = sum(h);
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Segments of a sparse file: offset and length.
pub type Segments = Vec<(u64, u64)>;
/// Segments in a GNU sparse header, and in each block that continues it.
pub const SPARSE_FIRST: usize = 4;
/// See [`SPARSE_FIRST`].
pub const SPARSE_MORE: usize = 21;

fn put_segments(to: &mut [u8], segments: &[(u64, u64)]) {
    for (place, &(offset, length)) in to.chunks_mut(24).zip(segments) {
        put_number(&mut place[..12], offset);
        put_number(&mut place[12..24], length);
    }
}

/// Turns a header into GNU's header of a sparse file, followed by the blocks that it needs.
pub fn sparse_header(mut h: Header, segments: &[(u64, u64)], real_size: u64) -> Vec<u8> {
    h[156] = b'S';
    h[257..265].copy_from_slice(b"ustar  \0");
    let (first, mut rest) = segments.split_at(segments.len().min(SPARSE_FIRST));
    put_segments(&mut h[386..482], first);
    h[482] = u8::from(!rest.is_empty());
    put_number(&mut h[483..495], real_size);
    seal(&mut h);
    let mut out = h.to_vec();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(rest.len().min(SPARSE_MORE));
        let mut block = [0; BLOCK];
        put_segments(&mut block[..504], now);
        block[504] = u8::from(!later.is_empty());
        out.extend_from_slice(&block);
        rest = later;
    }
    out
}

/// Reads segments out of a sparse header's or continuation's field.
pub fn segments(field: &[u8], into: &mut Segments) -> Option<()> {
    for place in field.chunks_exact(24) {
        if place[0] == 0 {
            break;
        }
        let offset = u64::try_from(number(&place[..12])?).ok()?;
        let length = u64::try_from(number(&place[12..24])?).ok()?;
        into.push((offset, length));
    }
    Some(())
}

/// One record of an extended header: its length counts itself.
pub fn pax_record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Records of an extended header; `None` when it is none.
pub fn pax_records(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let space = bytes.iter().position(|&b| b == b' ')?;
        let length: usize = str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
        let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|&b| b == b'=')?;
        records.push((&record[..equals], &record[equals + 1..]));
        bytes = &bytes[length..];
    }
    Some(records)
}

/// A time in an extended header: seconds and nanoseconds.
pub fn pax_time(value: &[u8]) -> Option<(i64, u32)> {
    let text = str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanos = digits.into_iter().try_fold(0_u32, |n, b| b.is_ascii_digit().then(|| n * 10 + u32::from(b - b'0')))?;
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

/// As [`pax_time`] reads it.
pub fn to_pax_time(seconds: i64, nanos: u32) -> String {
    match (seconds, nanos) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanos:09}"),
        _ => format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_survive() {
        for value in [0, 7, 0o777_7777, 0o1000_0000, (1 << 33) - 1, 1 << 33, 1 << 40, u64::MAX >> 1] {
            let mut field = [0; 12];
            put_number(&mut field, value);
            assert_eq!(number(&field), i64::try_from(value).ok(), "{value}");
        }
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"9\0"), None);
        assert_eq!(number(&[0xff; 12]), Some(-1));
    }

    #[test]
    fn times_survive() {
        for (seconds, nanos) in [(0, 0), (1, 5), (-1, 500_000_000), (-7, 0), (-7, 1), (1_700_000_000, 123_456_789)] {
            assert_eq!(pax_time(to_pax_time(seconds, nanos).as_bytes()), Some((seconds, nanos)));
        }
        assert_eq!(pax_time(b"12.5"), Some((12, 500_000_000)));
        assert_eq!(pax_time(b"x"), None);
    }

    #[test]
    fn records_count_their_own_length() {
        for length in [0, 1, 85, 86, 87, 88, 89, 90, 985, 990, 995, 1000] {
            let mut out = Vec::new();
            pax_record(&mut out, "path", &vec![b'x'; length]);
            pax_record(&mut out, "mtime", b"1");
            let records = pax_records(&out).unwrap();
            assert_eq!((records.len(), records[0].1.len(), records[1].1), (2, length, &b"1"[..]), "{length}");
        }
        for bad in [&b"5 a=b"[..], b"x a=b\n", b"99 a=b\n", b"6 a=b\n\n", b"0 a=b\n", b"1 "] {
            assert!(pax_records(bad).is_none(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
