//! Holds the first packet of every TCP connection until somebody has judged it (nfnetlink_queue), so that a refusal is
//! what connect(2) returns. Without it the handshake with the steering listener would succeed, and a test that only
//! connects would pass.
//!
//! It is a courtesy, not the wall: a packet that was let through still meets the listener, which is judged again. So
//! where the kernel has no nfnetlink_queue, or the queue is full (`NFQA_CFG_F_FAIL_OPEN`), packets pass.

use crate::{packet::parse_packet, steer::REFUSED_MARK};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};
use trialrun_sys::netlink::{ACK, Family, Requests, Socket, split_attr, split_message};

const SUBSYSTEM: u16 = 3; // NFNL_SUBSYS_QUEUE
const PACKET: u16 = SUBSYSTEM << 8;
const VERDICT: u16 = SUBSYSTEM << 8 | 1;
const CONFIG: u16 = SUBSYSTEM << 8 | 2;
const CONFIG_COMMAND: u16 = 1;
const CONFIG_PARAMS: u16 = 2;
const CONFIG_MASK: u16 = 4;
const CONFIG_FLAGS: u16 = 5;
const COMMAND_BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const FAIL_OPEN: u32 = 1;
const PACKET_HEADER: u16 = 1;
const VERDICT_HEADER: u16 = 2;
const MARK: u16 = 3;
const PAYLOAD: u16 = 10;
/// Queue 0, whose address in the header is two zero bytes.
const HEADER: [u8; 4] = [0; 4];
const NF_ACCEPT: u32 = 1;
/// An IP header and the ports behind it.
const COPY_BYTES: u32 = 64;

/// The queue of connections that begin. Every one that was read must be [answered](Self::answer).
#[derive(Debug)]
pub struct SynQueue(OwnedFd);

/// A connection that waits to be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingSyn {
    id: u32,
    /// Where it wants to go. `None` for a packet that could not be read, which never comes from a socket.
    pub destination: Option<SocketAddr>,
}

impl SynQueue {
    /// Binds queue 0 in the namespace of the calling thread; `None` where the kernel lacks nfnetlink_queue.
    pub(crate) fn bind() -> Option<Self> {
        let bound = (|| -> io::Result<Socket> {
            let socket = Socket::open(Family::Netfilter)?;
            let mut requests = Requests::new();
            requests.message(CONFIG, ACK, &HEADER);
            requests.attr(CONFIG_COMMAND, &[COMMAND_BIND, 0, 0, 0]); // struct nfqnl_msg_config_cmd
            requests.message(CONFIG, ACK, &HEADER);
            let [a, b, c, d] = COPY_BYTES.to_be_bytes();
            requests.attr(CONFIG_PARAMS, &[a, b, c, d, COPY_PACKET]); // struct nfqnl_msg_config_params
            requests.attr_be32(CONFIG_FLAGS, FAIL_OPEN);
            requests.attr_be32(CONFIG_MASK, FAIL_OPEN);
            socket.transact(&mut requests).map_err(|e| e.source)?;
            Ok(socket)
        })();
        match bound {
            Ok(socket) => Some(Self(socket.into())),
            Err(e) => {
                tracing::debug!(error = %e, "no nfnetlink_queue: a refused connection is reset after its handshake");
                None
            }
        }
    }

    /// Reads what waits, without waiting itself.
    ///
    /// # Errors
    /// What recv(2) says: `WouldBlock` when nothing waits, `ENOBUFS` when some were let through unread.
    pub fn receive(&self) -> io::Result<Vec<WaitingSyn>> {
        let mut buffer = [0u8; 8192];
        let (got, _) = recv(&self.0, &mut buffer[..], RecvFlags::DONTWAIT)?;
        Ok(waiting_syns(&buffer[..got.min(8192)]))
    }

    /// Lets a connection go on to the listener, or lets connect(2) fail with `ECONNREFUSED`.
    ///
    /// # Errors
    /// What send(2) says. The kernel gives no other answer: a connection given up meanwhile is no error.
    pub fn answer(&self, syn: WaitingSyn, allow: bool) -> io::Result<()> {
        let mut requests = Requests::new();
        requests.message(VERDICT, 0, &HEADER);
        let mut header = [0; 8]; // struct nfqnl_msg_verdict_hdr
        header[..4].copy_from_slice(&NF_ACCEPT.to_be_bytes());
        header[4..].copy_from_slice(&syn.id.to_be_bytes());
        requests.attr(VERDICT_HEADER, &header);
        if !allow {
            // A verdict can drop, not reject; the chain behind the queue rejects what carries this.
            requests.attr_be32(MARK, REFUSED_MARK);
        }
        send(&self.0, requests.bytes(), SendFlags::DONTWAIT)?;
        Ok(())
    }
}

impl AsFd for SynQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl std::os::fd::AsRawFd for SynQueue {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

/// The packets in one datagram of the queue.
fn waiting_syns(mut datagram: &[u8]) -> Vec<WaitingSyn> {
    let mut waiting = Vec::new();
    while let Some((kind, _, body, rest)) = split_message(datagram) {
        datagram = rest;
        let mut attributes = if kind == PACKET { body.get(4..).unwrap_or_default() } else { &[] };
        let (mut id, mut destination) = (None, None);
        while let Some((kind, value, rest)) = split_attr(attributes) {
            attributes = rest;
            match kind {
                PACKET_HEADER => id = value.first_chunk::<4>().map(|b| u32::from_be_bytes(*b)),
                PAYLOAD => destination = parse_packet(value).map(|p| SocketAddr::new(p.address, p.port)),
                _ => {}
            }
        }
        waiting.extend(id.map(|id| WaitingSyn { id, destination }));
    }
    waiting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_packet_is_read_with_its_number() {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 200, 0, 2, 203, 0, 113, 5];
        packet.extend([0x30, 0x39, 0x01, 0xbb, 0, 0, 0, 1]);
        let mut requests = Requests::new();
        requests.message(PACKET, 0, &HEADER);
        requests.attr(PACKET_HEADER, &[0, 0, 0, 7, 8, 0, 3]);
        requests.attr(PAYLOAD, &packet);
        let bytes = requests.bytes().to_vec();
        let expected = WaitingSyn { id: 7, destination: Some("203.0.113.5:443".parse().unwrap()) };
        assert_eq!(waiting_syns(&bytes), [expected]);
        for cut in 0..bytes.len() {
            assert_eq!(waiting_syns(&bytes[..cut]), []);
        }
    }

    #[test]
    fn a_packet_that_can_not_be_read_still_gets_its_answer() {
        let mut requests = Requests::new();
        requests.message(PACKET, 0, &HEADER);
        requests.attr(PACKET_HEADER, &[0, 0, 0, 9, 8, 0, 3]);
        requests.attr(PAYLOAD, &[0x45, 0]);
        assert_eq!(waiting_syns(requests.bytes()), [WaitingSyn { id: 9, destination: None }]);
    }
}
