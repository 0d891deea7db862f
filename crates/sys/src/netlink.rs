//! Speaks netlink(7): a builder for messages and nested attributes, a socket that sends a datagram of requests and
//! reads their acknowledgements, and unshare(2) of a network namespace.
//!
//! What the messages mean is the caller's (`trialrun-net`). Integers of netlink itself are in the host's byte order;
//! nf_tables attributes are big-endian, so both kinds have their own method.

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, netlink::SocketAddrNetlink, recv, send,
    socket_with,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// `NLM_F_REQUEST`, on every request.
pub const REQUEST: u16 = 0x1;
/// `NLM_F_ACK`: answer even on success.
pub const ACK: u16 = 0x4;
/// `NLM_F_EXCL`: refuse what exists.
pub const EXCL: u16 = 0x200;
/// `NLM_F_CREATE`: make what does not exist.
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`: put a rule at its chain's end.
pub const APPEND: u16 = 0x800;

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;

/// Which netlink family a socket speaks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// rtnetlink(7): links, addresses, routes.
    Route,
    /// nfnetlink: nf_tables, nfnetlink_log.
    Netfilter,
}

/// Requests being written, one after another, into one datagram.
#[derive(Debug, Default)]
pub struct Requests {
    bytes: Vec<u8>,
    message: Option<usize>,
    sequence: u32,
    acks: usize,
}

/// An attribute that was opened and not yet closed.
#[derive(Debug)]
#[must_use = "an attribute that is not closed has no length"]
pub struct Nest(usize);

impl Requests {
    /// An empty datagram.
    #[must_use]
    pub fn new() -> Self {
        Self { bytes: Vec::with_capacity(4096), ..Self::default() }
    }

    /// Starts a message, ending the one before. `payload` is the family's fixed header.
    pub fn message(&mut self, kind: u16, flags: u16, payload: &[u8]) {
        self.end();
        self.message = Some(self.bytes.len());
        self.sequence += 1;
        self.acks += usize::from(flags & ACK != 0);
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&(flags | REQUEST).to_ne_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(payload);
        self.pad();
    }

    /// Adds an attribute with these bytes.
    pub fn attr(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + 4).expect("attributes written here are short");
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// Adds a string attribute, ended by NUL as nf_tables wants it.
    pub fn attr_str(&mut self, kind: u16, value: &str) {
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
        self.attr(kind, &bytes);
    }

    /// Adds a 32-bit attribute in the host's byte order.
    pub fn attr_u32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_ne_bytes());
    }

    /// Adds a 32-bit attribute in network byte order.
    pub fn attr_be32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_be_bytes());
    }

    /// Opens an attribute that holds attributes.
    pub fn nest(&mut self, kind: u16) -> Nest {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(&0u16.to_ne_bytes());
        self.bytes.extend_from_slice(&(kind | NLA_F_NESTED).to_ne_bytes());
        Nest(at)
    }

    /// Closes the attribute.
    pub fn close(&mut self, nest: Nest) {
        let length = u16::try_from(self.bytes.len() - nest.0).expect("attributes written here are short");
        self.bytes[nest.0..nest.0 + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// The datagram as it will be sent.
    #[must_use]
    pub fn bytes(&mut self) -> &[u8] {
        self.end();
        &self.bytes
    }

    fn end(&mut self) {
        if let Some(start) = self.message.take() {
            let length = u32::try_from(self.bytes.len() - start).expect("a datagram written here is short");
            self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        }
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// A request that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("netlink request {request} refused")]
pub struct RefusedRequest {
    /// Number of the request in its datagram, from 1.
    pub request: u32,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// A netlink socket of the namespace in which it was opened; it stays with that namespace.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Opens one, closed on exec.
    ///
    /// # Errors
    /// What socket(2) says.
    pub fn open(family: Family) -> io::Result<Self> {
        let protocol = match family {
            Family::Route => None, // NETLINK_ROUTE is protocol 0
            Family::Netfilter => Some(netlink::NETFILTER),
        };
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self(fd))
    }

    /// Sends the requests and reads as many acknowledgements as were asked for.
    ///
    /// Netlink requests are carried out inside send(2), so the answers are there when it returns and nothing waits.
    ///
    /// # Errors
    /// The first request that was refused, or request 0 when the socket itself failed.
    pub fn transact(&self, requests: &mut Requests) -> Result<(), RefusedRequest> {
        let whole = |e: rustix::io::Errno| RefusedRequest { request: 0, source: e.into() };
        let (mut wanted, bytes) = (requests.acks, requests.bytes());
        send(&self.0, bytes, SendFlags::empty()).map_err(whole)?;
        let mut buffer = [0u8; 8192];
        while wanted > 0 {
            let (got, _) = recv(&self.0, &mut buffer[..], RecvFlags::DONTWAIT).map_err(whole)?;
            let mut rest = &buffer[..got.min(8192)];
            while let Some((kind, sequence, body, next)) = split_message(rest) {
                rest = next;
                if kind != NLMSG_ERROR {
                    continue;
                }
                let code = body.first_chunk::<4>().map_or(-libc::EPROTO, |b| i32::from_ne_bytes(*b));
                if code != 0 {
                    let source = io::Error::from_raw_os_error(-code);
                    return Err(RefusedRequest { request: sequence, source });
                }
                wanted = wanted.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Reads one datagram without waiting.
    ///
    /// # Errors
    /// What recv(2) says; `WouldBlock` when there is none.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len();
        let (got, _) = recv(&self.0, buffer, RecvFlags::DONTWAIT)?;
        Ok(got.min(length))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.0
    }
}

/// Takes the first message off a datagram: its type, sequence number and payload, and what follows it.
#[must_use]
pub fn split_message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let header = bytes.first_chunk::<HEADER>()?;
    let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let kind = u16::from_ne_bytes([header[4], header[5]]);
    let sequence = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
    let body = bytes.get(HEADER..length)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, sequence, body, rest))
}

/// Takes the first attribute off a list: its type without the nesting flag, its value, and what follows it.
#[must_use]
pub fn split_attr(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let header = bytes.first_chunk::<4>()?;
    let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
    let kind = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
    let value = bytes.get(4..length)?;
    Some((kind, value, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Puts the calling thread into a new network namespace (unshare(2), `CLONE_NEWNET`).
///
/// # Errors
/// What unshare(2) says; `EPERM` without `CAP_SYS_ADMIN`.
pub fn unshare_network() -> io::Result<()> {
    // rustix's wrapper is unsafe because of CLONE_FILES, so some unsafe call is needed.
    // SAFETY: CLONE_NEWNET changes only which namespace the thread's new sockets belong to; no memory and no descriptor
    // table is involved.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_attributes_carry_their_lengths() {
        let mut requests = Requests::new();
        requests.message(0xa00, ACK, &[1, 0, 0, 0]);
        let nest = requests.nest(4);
        requests.attr_be32(1, 3);
        requests.close(nest);
        let (kind, sequence, body, rest) = split_message(requests.bytes()).unwrap();
        assert_eq!((kind, sequence, rest.len()), (0xa00, 1, 0));
        let (kind, inner, _) = split_attr(&body[4..]).unwrap();
        assert_eq!((kind, split_attr(inner).unwrap().1), (4, &[0, 0, 0, 3][..]));
    }

    #[test]
    fn a_short_or_lying_message_is_not_read() {
        assert!(split_message(&[0; 15]).is_none());
        assert!(split_message(&[255; 40]).is_none());
        assert!(split_message(&[0; 16]).is_none());
        assert!(split_attr(&[200, 0, 1, 0, 9]).is_none());
        assert!(split_attr(&[2, 0, 1, 0, 9]).is_none());
    }
}
