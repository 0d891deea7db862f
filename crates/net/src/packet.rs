//! Reads the head of an IP packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What a packet says of where it is going.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketHead {
    /// Where it was going.
    pub address: IpAddr,
    /// Destination port, where the protocol has one.
    pub port: u16,
    /// IP protocol number: 17 is UDP, 1 and 58 are ICMP.
    pub protocol: u8,
}

/// Reads the destination from a packet that starts with its IP header. IPv6 extension headers are not followed.
pub(crate) fn parse_packet(packet: &[u8]) -> Option<PacketHead> {
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
    Some(PacketHead { address, port, protocol })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_udp_packet_is_read() {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 200, 0, 2, 203, 0, 113, 5];
        packet.extend([0x30, 0x39, 0x01, 0xbb, 0, 8, 0, 0]);
        let expected = PacketHead { address: "203.0.113.5".parse().unwrap(), port: 443, protocol: 17 };
        assert_eq!(parse_packet(&packet), Some(expected));
        for cut in 0..24 {
            assert_eq!(parse_packet(&packet[..cut]), None);
        }
    }
}
