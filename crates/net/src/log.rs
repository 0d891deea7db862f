//! Reads refused packets from nfnetlink_log(4), so that a refused UDP or ICMP packet can be recorded like a refused
//! connection. Optional: a kernel without it only loses those records.

use crate::steer::LOG_GROUP;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
};
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

/// A packet that the cell's rules refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedPacket {
    /// Where it was going.
    pub address: IpAddr,
    /// Destination port, where the protocol has one.
    pub port: u16,
    /// IP protocol number: 17 is UDP, 1 and 58 are ICMP.
    pub protocol: u8,
}

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
pub fn refused_packets(mut datagram: &[u8]) -> Vec<RefusedPacket> {
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

/// Reads the destination from a packet that starts with its IP header. IPv6 extension headers are not followed.
fn parse_packet(packet: &[u8]) -> Option<RefusedPacket> {
    let (address, protocol, transport): (IpAddr, u8, &[u8]) = match packet.first()? >> 4 {
        4 => {
            let address = Ipv4Addr::from(*packet.get(16..20)?.first_chunk::<4>()?);
            (address.into(), *packet.get(9)?, packet.get(usize::from(packet.first()? & 15) * 4..)?)
        }
        6 => {
            let address = Ipv6Addr::from(*packet.get(24..40)?.first_chunk::<16>()?);
            (address.into(), *packet.get(6)?, packet.get(40..)?)
        }
        _ => return None,
    };
    let has_ports = matches!(protocol, 6 | 17 | 33 | 132 | 136);
    let port = if has_ports { u16::from_be_bytes(*transport.get(2..4)?.first_chunk::<2>()?) } else { 0 };
    Some(RefusedPacket { address, port, protocol })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_udp_packet_is_read() {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 200, 0, 2, 203, 0, 113, 5];
        packet.extend([0x30, 0x39, 0x01, 0xbb, 0, 8, 0, 0]);
        let expected = RefusedPacket { address: "203.0.113.5".parse().unwrap(), port: 443, protocol: 17 };
        assert_eq!(parse_packet(&packet), Some(expected));
        for cut in 0..24 {
            assert_eq!(parse_packet(&packet[..cut]), None);
        }
    }
}
