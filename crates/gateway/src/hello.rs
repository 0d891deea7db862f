//! Reads the server name from a TLS client hello, without answering it.
//!
//! A server may ask for a second hello (RFC 8446, 4.1.4), and some choose the site by that one, so it is read too.
//!
//! The hello may come in any number of records and segments. Anything irregular (a doubled extension, a name that is
//! none, a record of another type in between) yields no name, and a connection without a name is refused where a name
//! decides.

use trialrun_policy::Name;

/// Largest hello that is heard out. Post-quantum key shares make them 2 KiB, large tickets twice that.
pub(crate) const MAX_HELLO: usize = 16 * 1024;

const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const SERVER_HELLO: u8 = 2;
/// The random of a server hello that is a request for another client hello: SHA-256 of "HelloRetryRequest".
const RETRY_RANDOM: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2, 0xa2, 0x11,
    0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// Bytes of a server's answer by which a retry can be told: record header, message header, version, random.
pub(crate) const RETRY_PREFIX: usize = 5 + 4 + 2 + 32;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_HELLO: u16 = 0xfe0d;
const MAX_RECORD: usize = 16_384 + 256;

/// What a client hello says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) name: Option<Name>,
    /// The encrypted-hello extension is there, so that the name may be a front. Clients also send it without meaning
    /// it (GREASE), which can't be told apart.
    pub(crate) encrypted: bool,
}

/// How far the reading got.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Not yet complete.
    More,
    /// Complete.
    Hello(Hello),
    /// Not a client hello, though it began like TLS.
    Malformed,
}

/// Reads `bytes`, which begin with a TLS record.
pub(crate) fn read(bytes: &[u8]) -> Heard {
    let mut message = Vec::new();
    let mut rest = bytes;
    loop {
        if let Some(length) = handshake_length(&message) {
            if message.first() != Some(&CLIENT_HELLO) || length > MAX_HELLO {
                return Heard::Malformed;
            }
            if let Some(body) = message.get(4..4 + length) {
                return parse(body).map_or(Heard::Malformed, Heard::Hello);
            }
        }
        let Some(header) = rest.first_chunk::<5>() else { return Heard::More };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[0] != HANDSHAKE || header[1] != 3 || length == 0 || length > MAX_RECORD {
            return Heard::Malformed;
        }
        let have = &rest[5..];
        message.extend_from_slice(&have[..length.min(have.len())]);
        // A partial record may already hold the whole hello, but a stack would wait for its end, and so does this.
        let Some(after) = have.get(length..) else { return Heard::More };
        rest = after;
        if message.len() > MAX_HELLO {
            return Heard::Malformed;
        }
    }
}

/// Whether a server's answer asks for another hello; `None` while it is too short to tell.
pub(crate) fn is_retry(answer: &[u8]) -> Option<bool> {
    if answer.first().is_some_and(|kind| *kind != HANDSHAKE) {
        return Some(false);
    }
    let start = answer.get(..RETRY_PREFIX)?;
    Some(start[5] == SERVER_HELLO && start[11..] == RETRY_RANDOM)
}

/// Reads the second hello, which may come behind early data and a compatibility record.
pub(crate) fn read_second(mut bytes: &[u8]) -> Heard {
    while let Some(header) = bytes.first_chunk::<5>() {
        if !matches!(header[0], CHANGE_CIPHER_SPEC | APPLICATION_DATA) {
            return read(bytes);
        }
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        let Some(rest) = bytes.get(5 + length..) else { return Heard::More };
        bytes = rest;
    }
    Heard::More
}

fn handshake_length(message: &[u8]) -> Option<usize> {
    let header = message.first_chunk::<4>()?;
    Some(usize::from(header[1]) << 16 | usize::from(header[2]) << 8 | usize::from(header[3]))
}

/// Cuts things off the front of a hello.
struct Cut<'a>(&'a [u8]);

impl<'a> Cut<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|b| u16::from_be_bytes([b[0], b[1]]))
    }

    fn vec8(&mut self) -> Option<&'a [u8]> {
        let n = self.take(1)?[0];
        self.take(usize::from(n))
    }

    fn vec16(&mut self) -> Option<&'a [u8]> {
        let n = self.u16()?;
        self.take(usize::from(n))
    }
}

fn parse(body: &[u8]) -> Option<Hello> {
    let mut cut = Cut(body);
    cut.take(2 + 32)?; // version, random
    cut.vec8()?; // session id
    cut.vec16()?; // cipher suites
    cut.vec8()?; // compression methods
    let mut hello = Hello { name: None, encrypted: false };
    if cut.0.is_empty() {
        return Some(hello);
    }
    let mut extensions = Cut(cut.vec16()?);
    let mut named = false;
    while !extensions.0.is_empty() {
        let kind = extensions.u16()?;
        let value = extensions.vec16()?;
        match kind {
            SERVER_NAME if named => return None,
            SERVER_NAME => {
                named = true;
                hello.name = server_name(value);
            }
            ENCRYPTED_HELLO => hello.encrypted = true,
            _ => {}
        }
    }
    cut.0.is_empty().then_some(hello)
}

/// The one host name of the extension; more than one, or another type, is no name.
fn server_name(value: &[u8]) -> Option<Name> {
    let mut outer = Cut(value);
    let mut list = Cut(outer.vec16()?);
    let kind = list.take(1)?[0];
    let name = list.vec16()?;
    if kind != 0 || !list.0.is_empty() || !outer.0.is_empty() {
        return None;
    }
    std::str::from_utf8(name).ok()?.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A hello with these extensions, in records of at most `record` bytes.
    pub(crate) fn hello(extensions: &[(u16, Vec<u8>)], record: usize) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        let list: Vec<u8> = extensions
            .iter()
            .flat_map(|(kind, value)| {
                let length = u16::try_from(value.len()).unwrap();
                [&kind.to_be_bytes()[..], &length.to_be_bytes(), value].concat()
            })
            .collect();
        body.extend(u16::try_from(list.len()).unwrap().to_be_bytes());
        body.extend(list);
        let mut message = vec![1];
        message.extend(&u32::try_from(body.len()).unwrap().to_be_bytes()[1..]);
        message.extend(body);
        message
            .chunks(record)
            .flat_map(|part| [&[22, 3, 1][..], &u16::try_from(part.len()).unwrap().to_be_bytes(), part].concat())
            .collect()
    }

    pub(crate) fn sni(name: &str) -> (u16, Vec<u8>) {
        let length = u16::try_from(name.len()).unwrap();
        let mut value = (length + 3).to_be_bytes().to_vec();
        value.push(0);
        value.extend(length.to_be_bytes());
        value.extend(name.as_bytes());
        (0, value)
    }

    fn named(name: &str) -> Heard {
        Heard::Hello(Hello { name: Some(name.parse().unwrap()), encrypted: false })
    }

    #[test]
    fn the_name_is_read_however_the_hello_is_cut() {
        for record in [1, 5, 40, 16_000] {
            let bytes = hello(&[(10, vec![0; 300]), sni("Good.test")], record);
            assert_eq!(read(&bytes), named("good.test"), "{record}");
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes[..cut]), Heard::More, "{record} {cut}");
            }
        }
    }

    #[test]
    fn a_second_hello_is_found_behind_other_records() {
        let mut answer = vec![22, 3, 3, 0, 90, 2, 0, 0, 86, 3, 3];
        answer.extend(RETRY_RANDOM);
        assert_eq!(is_retry(&answer), Some(true));
        assert_eq!(is_retry(&answer[..42]), None);
        answer[20] ^= 1;
        assert_eq!(is_retry(&answer), Some(false));
        assert_eq!(is_retry(&[21]), Some(false));
        let second = [&[20, 3, 3, 0, 1, 1, 23, 3, 3, 0, 2, 9, 9][..], &hello(&[sni("b.test")], 999)].concat();
        assert_eq!(read_second(&second), named("b.test"));
        for cut in 0..second.len() {
            assert_eq!(read_second(&second[..cut]), Heard::More);
        }
    }

    #[test]
    fn irregular_hellos_have_no_name() {
        let nameless = Heard::Hello(Hello { name: None, encrypted: false });
        assert_eq!(read(&hello(&[], 999)), nameless);
        assert_eq!(read(&hello(&[sni("10.0.0.1")], 999)), nameless);
        assert_eq!(read(&hello(&[sni("a b.test")], 999)), nameless);
        assert_eq!(read(&hello(&[(0, vec![0, 0])], 999)), nameless);
        assert_eq!(read(&hello(&[sni("a.test"), sni("b.test")], 999)), Heard::Malformed);
        let encrypted = Hello { name: Some("a.test".parse().unwrap()), encrypted: true };
        assert_eq!(read(&hello(&[sni("a.test"), (0xfe0d, vec![0; 9])], 999)), Heard::Hello(encrypted));
        let mut alert_between = hello(&[sni("a.test")], 20);
        alert_between[25] = 21;
        assert_eq!(read(&alert_between), Heard::Malformed);
        assert_eq!(read(&[22, 3, 1, 0, 4, 2, 0, 0, 0]), Heard::Malformed);
        assert_eq!(read(&[22, 3, 1, 0, 4, 1, 255, 255, 255]), Heard::Malformed);
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = (read(&bytes), read_second(&bytes), is_retry(&bytes));
        }

        #[test]
        fn a_damaged_hello_is_taken(at in 0usize..120, with in any::<u8>(), cut in 0usize..200) {
            let mut bytes = hello(&[(10, vec![0; 30]), sni("good.test")], 50);
            if let Some(byte) = bytes.get_mut(at) { *byte = with; }
            bytes.truncate(bytes.len().saturating_sub(cut));
            let _ = read(&bytes);
        }
    }
}
