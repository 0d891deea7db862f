//! Reads the requests of an HTTP/1 connection one by one, so that each is judged by its own Host.
//!
//! Strict where parsers differ: what could be framed in two ways (length and chunks, two lengths, two Hosts) is refused
//! rather than guessed. Heads and bodies pass on byte for byte, except that an offer to go on in HTTP/2 is masked,
//! because its requests could not be judged any more.

use httparse::{EMPTY_HEADER, Request, Status};
use std::ops::Range;
use trialrun_policy::{Decision, Name};

/// Largest request head; servers allow 8 to 32 KiB.
pub(crate) const MAX_HEAD: usize = 32 * 1024;
const MAX_HEADERS: usize = 128;
const MAX_CHUNK_LINE: usize = 1024;
const MAX_TRAILERS: usize = 16 * 1024;

/// The head of one request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Its length in bytes.
    pub(crate) length: usize,
    /// Host and target agree on this name.
    pub(crate) host: Option<Name>,
    /// It asks to go on in another protocol, and has no body.
    pub(crate) upgrade: bool,
    /// Names of headers to be masked before it passes on.
    pub(crate) mask: Vec<Range<usize>>,
}

impl Head {
    /// Overwrites what must not pass. The length stays.
    pub(crate) fn apply_mask(&self, bytes: &mut [u8]) {
        for range in &self.mask {
            if let Some(name) = bytes.get_mut(range.clone()) {
                name.fill(b'x');
            }
        }
    }
}

/// What comes next in the stream of requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// More bytes are needed.
    More,
    /// A head, to be judged.
    Head(Head),
    /// This many bytes belong to the body and pass.
    Body(usize),
}

/// Why a request can't be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("HTTP request not understood: {0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Where in the stream of requests it is.
#[derive(Debug, Default)]
pub(crate) enum Requests {
    #[default]
    Head,
    Body(u64),
    ChunkLine,
    Chunk(u64),
    ChunkEnd,
    Trailers(usize),
}

impl Requests {
    /// Looks at the bytes that were not yet passed on.
    pub(crate) fn step(&mut self, bytes: &[u8]) -> Result<Step, Malformed> {
        if bytes.is_empty() {
            return Ok(Step::More);
        }
        let pass = |left: u64| usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
        match *self {
            Self::Head => self.head(bytes),
            Self::Body(left) => {
                let n = pass(left);
                *self = if n as u64 == left { Self::Head } else { Self::Body(left - n as u64) };
                Ok(Step::Body(n))
            }
            Self::ChunkLine => {
                let Some(line) = line(bytes, MAX_CHUNK_LINE, "chunk size")? else { return Ok(Step::More) };
                let size = chunk_size(&bytes[..line - 2])?;
                *self = if size == 0 { Self::Trailers(0) } else { Self::Chunk(size) };
                Ok(Step::Body(line))
            }
            Self::Chunk(left) => {
                let n = pass(left);
                *self = if n as u64 == left { Self::ChunkEnd } else { Self::Chunk(left - n as u64) };
                Ok(Step::Body(n))
            }
            Self::ChunkEnd => match bytes {
                [b'\r', b'\n', ..] => {
                    *self = Self::ChunkLine;
                    Ok(Step::Body(2))
                }
                [b'\r'] => Ok(Step::More),
                _ => Err(Malformed("chunk longer than its size")),
            },
            Self::Trailers(before) => {
                let Some(line) = line(bytes, MAX_TRAILERS - before, "trailers")? else { return Ok(Step::More) };
                *self = if line == 2 { Self::Head } else { Self::Trailers(before + line) };
                Ok(Step::Body(line))
            }
        }
    }

    fn head(&mut self, bytes: &[u8]) -> Result<Step, Malformed> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = Request::new(&mut headers);
        let length = match request.parse(bytes) {
            Ok(Status::Complete(length)) if length <= MAX_HEAD => length,
            Ok(Status::Partial) if bytes.len() <= MAX_HEAD => return Ok(Step::More),
            Ok(_) => return Err(Malformed("head too long")),
            Err(_) => return Err(Malformed("bad head")),
        };
        let body = body_framing(&request)?;
        let host = host(&request)?;
        let (upgrade, mask) = upgrade(&request, bytes)?;
        let upgrade = upgrade && matches!(body, Self::Head);
        *self = body;
        Ok(Step::Head(Head { length, host, upgrade, mask }))
    }
}

/// Length of the first line with its CRLF.
fn line(bytes: &[u8], limit: usize, what: &'static str) -> Result<Option<usize>, Malformed> {
    match bytes.iter().take(limit).position(|b| *b == b'\n') {
        Some(at) if at > 0 && bytes[at - 1] == b'\r' => Ok(Some(at + 1)),
        Some(_) => Err(Malformed("line without CR")),
        None if bytes.len() >= limit => Err(Malformed(what)),
        None => Ok(None),
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.split(|b| *b == b';').next().unwrap_or_default();
    let text = std::str::from_utf8(digits).ok().map(|t| t.trim_end_matches([' ', '\t']));
    text.filter(|t| !t.is_empty() && t.len() <= 15 && t.bytes().all(|b| b.is_ascii_hexdigit()))
        .and_then(|t| u64::from_str_radix(t, 16).ok())
        .ok_or(Malformed("chunk size"))
}

/// The values of all headers of that name.
fn values<'a>(request: &'a Request<'_, '_>, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    request.headers.iter().filter(move |h| h.name.eq_ignore_ascii_case(name)).map(|h| h.value)
}

/// The state after the head.
fn body_framing(request: &Request<'_, '_>) -> Result<Requests, Malformed> {
    let mut lengths = values(request, "content-length");
    let mut codings = values(request, "transfer-encoding");
    let (length, coding) = (lengths.next(), codings.next());
    if lengths.next().is_some() || codings.next().is_some() || (length.is_some() && coding.is_some()) {
        return Err(Malformed("ambiguous body length"));
    }
    if let Some(coding) = coding {
        let plain = request.version == Some(1) && coding.trim_ascii().eq_ignore_ascii_case(b"chunked");
        return if plain { Ok(Requests::ChunkLine) } else { Err(Malformed("transfer coding")) };
    }
    let Some(length) = length else { return Ok(Requests::Head) };
    let text = std::str::from_utf8(length.trim_ascii()).unwrap_or_default();
    let digits = !text.is_empty() && text.len() <= 18 && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        Ok(0) if digits => Ok(Requests::Head),
        Ok(n) if digits => Ok(Requests::Body(n)),
        _ => Err(Malformed("content length")),
    }
}

/// The name that Host and target agree on; none where it is an address, missing or no name.
fn host(request: &Request<'_, '_>) -> Result<Option<Name>, Malformed> {
    let mut hosts = values(request, "host");
    let header = hosts.next();
    if hosts.next().is_some() {
        return Err(Malformed("more than one Host"));
    }
    let header = header.map(|h| std::str::from_utf8(h).ok().and_then(authority_name));
    if request.method.is_some_and(|m| m.eq_ignore_ascii_case("connect")) {
        return Err(Malformed("CONNECT"));
    }
    let target = request.path.unwrap_or_default();
    if target.starts_with('/') || target == "*" {
        return Ok(header.flatten());
    }
    let absolute =
        target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://")).and_then(|_| target.get(7..));
    let Some(rest) = absolute else { return Err(Malformed("request target")) };
    let named = rest.split(['/', '?', '#', '\\']).next().and_then(authority_name);
    match header {
        Some(header) if header != named => Err(Malformed("Host and request target differ")),
        _ => Ok(named),
    }
}

fn authority_name(authority: &str) -> Option<Name> {
    let authority = authority.trim_matches([' ', '\t']);
    let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    host.parse().ok()
}

/// Whether it asks for another protocol, and the headers to mask. `h2c` is masked: browsers don't offer it, some
/// libraries do on every request, and servers may ignore it.
fn upgrade(request: &Request<'_, '_>, bytes: &[u8]) -> Result<(bool, Vec<Range<usize>>), Malformed> {
    let (mut asked, mut mask) = (false, Vec::new());
    for header in request.headers.iter().filter(|h| h.name.eq_ignore_ascii_case("upgrade")) {
        let value = String::from_utf8_lossy(header.value).to_ascii_lowercase();
        let mut protocols = value.split(',').map(str::trim);
        if !value.contains("h2c") {
            asked = true;
        } else if protocols.all(|p| p == "h2c") {
            let start = header.name.as_ptr() as usize - bytes.as_ptr() as usize;
            mask.push(start..start + header.name.len());
        } else {
            return Err(Malformed("upgrade"));
        }
    }
    Ok((asked, mask))
}

/// What the first bytes of a connection look like.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Guess {
    /// Too little to tell.
    More,
    /// A TLS record.
    Tls,
    /// A request line of HTTP/1, well-formed or not.
    Http,
    /// The preface of HTTP/2.
    HttpTwo,
    /// Something else.
    Opaque,
}

const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest method token waited for; the registered ones have at most 17 letters.
const MAX_METHOD: usize = 32;

/// Guesses the protocol. Errs towards HTTP: what a lenient server could take for a request must not pass for opaque.
pub(crate) fn guess(bytes: &[u8]) -> Guess {
    let start = bytes.iter().position(|b| !matches!(b, b'\r' | b'\n' | b' ' | b'\t'));
    let Some(line) = start.map(|at| &bytes[at..]) else {
        return if bytes.len() > 64 { Guess::Opaque } else { Guess::More };
    };
    if line[0] == 22 && start == Some(0) {
        return match line.get(1) {
            None => Guess::More,
            Some(3) => Guess::Tls,
            Some(_) => Guess::Opaque,
        };
    }
    if line.starts_with(H2_PREFACE) {
        return Guess::HttpTwo;
    }
    if H2_PREFACE.starts_with(line) {
        return Guess::More;
    }
    if let Some(end) = line.iter().position(|b| *b == b'\n') {
        let has_version = line[..end].windows(5).any(|w| w.eq_ignore_ascii_case(b"HTTP/"));
        return if has_version { Guess::Http } else { Guess::Opaque };
    }
    let word = line.iter().position(|b| !b.is_ascii_graphic()).unwrap_or(line.len());
    let text = word <= MAX_METHOD && line.iter().all(|b| !b.is_ascii_control() || matches!(b, b'\r' | b'\t'));
    if text && line.len() <= MAX_HEAD { Guess::More } else { Guess::Opaque }
}

/// The answer to a request that the policy denies.
pub(crate) fn refusal(policy: &str, decision: &Decision) -> Vec<u8> {
    // Names in rules and reasons are parsed ones, so nothing here can break the head; the filter makes that plain.
    let plain = |text: &str| text.chars().filter(|c| !c.is_control() && c.is_ascii()).collect::<String>();
    let (rule, reason) = (plain(&decision.rule), plain(&decision.reason));
    let body = format!("blocked by the egress policy {}: {reason} (rule: {rule})\n", plain(policy));
    format!(
        "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\
         x-trialrun-denied: {rule}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(text: &str) -> Result<Head, Malformed> {
        match Requests::default().step(text.as_bytes())? {
            Step::Head(head) => Ok(head),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    fn host_of(text: &str) -> Option<String> {
        head(text).unwrap().host.map(String::from)
    }

    #[test]
    fn host_and_target_have_to_agree() {
        let good = Some("good.test".to_owned());
        assert_eq!(host_of("GET / HTTP/1.1\r\nHost: Good.test\r\n\r\n"), good);
        assert_eq!(host_of("GET / HTTP/1.1\r\nhost:good.test.:80\r\n\r\n"), good);
        assert_eq!(host_of("GET http://good.test/x HTTP/1.1\r\nHost: good.test\r\n\r\n"), good);
        assert_eq!(host_of("GET HTTP://good.test:80 HTTP/1.0\r\n\r\n"), good);
        assert_eq!(host_of("GET / HTTP/1.0\r\n\r\n"), None);
        assert_eq!(host_of("GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n"), None);
        assert_eq!(host_of("GET / HTTP/1.1\r\nHost: u@good.test\r\n\r\n"), None);
        for bad in [
            "GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
            "GET http://good.test@evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n",
            "CONNECT evil.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n",
            "GET evil.test HTTP/1.1\r\nHost: good.test\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: good.test\r\n folded\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: +3\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: xchunked\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n",
        ] {
            assert!(head(bad).is_err(), "{bad}");
        }
    }

    /// Runs the whole stream in pieces and returns the hosts seen.
    fn hosts(stream: &[u8], piece: usize) -> Result<Vec<String>, Malformed> {
        let (mut requests, mut held, mut seen) = (Requests::default(), Vec::new(), Vec::new());
        for part in stream.chunks(piece) {
            held.extend_from_slice(part);
            loop {
                let n = match requests.step(&held)? {
                    Step::More => break,
                    Step::Head(head) => {
                        seen.push(head.host.map_or_else(String::new, String::from));
                        head.length
                    }
                    Step::Body(n) => n,
                };
                held.drain(..n);
            }
        }
        Ok(seen)
    }

    #[test]
    fn every_request_of_a_connection_is_seen() {
        let stream =
            b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhelloPOST / HTTP/1.1\r\nHost: b.test\r\n\
            Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\nGET / HTTP/1.1\r\nHost: c.test\r\n\r\n";
        for piece in [1, 2, 7, 1000] {
            assert_eq!(hosts(stream, piece).unwrap(), ["a.test", "b.test", "c.test"], "{piece}");
        }
    }

    #[test]
    fn a_request_does_not_hide_in_a_body() {
        let wrong = [
            &b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n"[..],
            b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n",
            b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n",
            b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc\r\n",
        ];
        for stream in wrong {
            assert!(hosts(stream, 1000).is_err(), "{}", String::from_utf8_lossy(stream));
        }
    }

    #[test]
    fn only_h2c_is_masked() {
        let mut text = b"GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: h2c\r\n\r\n".to_vec();
        let Step::Head(head) = Requests::default().step(&text).unwrap() else { panic!() };
        assert!(!head.upgrade);
        head.apply_mask(&mut text);
        assert!(String::from_utf8(text).unwrap().contains("\r\nxxxxxxx: h2c\r\n"));
        let websocket = self::head("GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket\r\n\r\n").unwrap();
        assert!(websocket.upgrade && websocket.mask.is_empty());
    }

    #[test]
    fn guesses() {
        for (bytes, guess_) in [
            (&b""[..], Guess::More),
            (b"G", Guess::More),
            (b"GET / HTTP/1.1\r\n", Guess::Http),
            (b"\r\nget / http/1.1\n", Guess::Http),
            (b"G@T\t/\tHTTP/1.1\n", Guess::Http),
            (b"EHLO x\r\n", Guess::Opaque),
            (b"SSH-2.0-x\r\n", Guess::Opaque),
            (b"\x16", Guess::More),
            (b"\x16\x03\x01", Guess::Tls),
            (b"\x16\x02", Guess::Opaque),
            (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", Guess::Opaque),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Guess::HttpTwo),
            (b"PRI * HTTP/2.0\r\n\r", Guess::More),
        ] {
            assert_eq!(guess(bytes), guess_, "{}", bytes.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_and_never_passed_beyond(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = guess(&bytes);
            let mut requests = Requests::default();
            if let Ok(Step::Head(head)) = requests.step(&bytes) { prop_assert!(head.length <= bytes.len()); }
        }

        #[test]
        fn pieces_do_not_matter(text in "(POST|GET) / HTTP/1.1\r\nHost: a.test\r\n(Content-Length: [0-3]\r\n|Transfer-Encoding: chunked\r\n)?\r\n[0-3a\r\n]{0,12}", piece in 1usize..9) {
            prop_assert_eq!(hosts(text.as_bytes(), piece).ok(), hosts(text.as_bytes(), 10_000).ok());
        }
    }
}
