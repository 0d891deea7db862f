//! Reads refused packets from nfnetlink_log(4), so that a refused UDP or ICMP packet can be recorded like a refused
//! connection. Optional: a kernel without it only loses those records.

use crate::{
    packet::{PacketHead, parse_packet},
    steer::LOG_GROUP,
};
use std::{io, os::fd::OwnedFd};
use trialrun_sys::netlink::{ACK, Family, Requests, Socket, split_attr, split_message};

const SUBSYSTEM: u16 = 4; // NFNL_SUBSYS_ULOG
const PACKET: u16 = SUBSYSTEM << 8;
const CONFIG: u16 = SUBSYSTEM << 8 | 1;
const CONFIG_COMMAND: u16 = 1;
const CONFIG_MODE: u16 = 2;
const CONFIG_QUEUE_THRESHOLD: u16 = 5;
const COMMAND_BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const PAYLOAD: u16 = 9;

/// Subscribes in the namespace of the calling thread; `None` where the kernel lacks nfnetlink_log.
pub(crate) fn subscribe() -> Option<OwnedFd> {
    let subscribed = (|| -> io::Result<Socket> {
        let socket = Socket::open(Family::Netfilter)?;
        let mut requests = Requests::new();
        let header = [0, 0, LOG_GROUP.to_be_bytes()[0], LOG_GROUP.to_be_bytes()[1]];
        requests.message(CONFIG, ACK, &header);
        requests.attr(CONFIG_COMMAND, &[COMMAND_BIND]);
        requests.message(CONFIG, ACK, &header);
        requests.attr(CONFIG_MODE, &[0, 0, 0, 64, COPY_PACKET, 0]); // struct nfulnl_msg_config_mode
        requests.message(CONFIG, ACK, &header);
        requests.attr_be32(CONFIG_QUEUE_THRESHOLD, 1); // tell each at once; the rules limit the rate
        socket.transact(&mut requests).map_err(|e| e.source)?;
        Ok(socket)
    })();
    match subscribed {
        Ok(socket) => Some(socket.into()),
        Err(e) => {
            tracing::debug!(error = %e, "no nfnetlink_log: refused packets are counted, not recorded");
            None
        }
    }
}

/// The packets in one datagram of the subscription.
#[must_use]
pub fn refused_packets(mut datagram: &[u8]) -> Vec<PacketHead> {
    let mut packets = Vec::new();
    while let Some((kind, _, body, rest)) = split_message(datagram) {
        datagram = rest;
        let mut attributes = if kind == PACKET { body.get(4..).unwrap_or_default() } else { &[] };
        while let Some((kind, value, rest)) = split_attr(attributes) {
            attributes = rest;
            if kind == PAYLOAD {
                packets.extend(parse_packet(value));
            }
        }
    }
    packets
}
