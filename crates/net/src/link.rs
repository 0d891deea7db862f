//! Brings the cell's loopback up and gives it the cell's addresses and default routes, in one rtnetlink(7) datagram.

use crate::cell::{CELL_ADDRESS_V4, CELL_ADDRESS_V6};
use trialrun_sys::netlink::{ACK, CREATE, EXCL, Family, RefusedRequest, Requests, Socket};

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// The loopback is the first interface of every network namespace.
const LOOPBACK_INDEX: u32 = 1;

const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;
/// Without it the address would be tentative for a second and the listener's bind would fail.
const IFA_F_NODAD: u8 = 0x02;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;

/// Sets the loopback up. IPv6 is left out where the kernel runs without it, and the answer says so.
pub(crate) fn set_up() -> Result<bool, RefusedRequest> {
    let socket = Socket::open(Family::Route).map_err(|source| RefusedRequest { request: 0, source })?;
    let mut requests = Requests::new();
    let mut link = [0u8; 16]; // struct ifinfomsg
    link[4..8].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    link[8..12].copy_from_slice(&IFF_UP.to_ne_bytes());
    link[12..16].copy_from_slice(&IFF_UP.to_ne_bytes());
    requests.message(RTM_NEWLINK, ACK, &link);
    address(&mut requests, AF_INET, 32, &CELL_ADDRESS_V4.octets());
    default_route(&mut requests, AF_INET, RT_SCOPE_LINK, Some(&CELL_ADDRESS_V4.octets()));
    socket.transact(&mut requests)?;

    let mut requests = Requests::new();
    address(&mut requests, AF_INET6, 128, &CELL_ADDRESS_V6.octets());
    default_route(&mut requests, AF_INET6, RT_SCOPE_UNIVERSE, None);
    match socket.transact(&mut requests) {
        Ok(()) => Ok(true),
        Err(e) if lacks_ipv6(&e.source) => {
            tracing::debug!(error = %e.source, "the kernel runs without IPv6");
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

/// The errors of a kernel started with `ipv6.disable=1` or with IPv6 switched off for new namespaces.
fn lacks_ipv6(e: &std::io::Error) -> bool {
    use rustix::io::Errno;
    matches!(rustix::io::Errno::from_io_error(e), Some(Errno::OPNOTSUPP | Errno::AFNOSUPPORT | Errno::ACCESS))
}

fn address(requests: &mut Requests, family: u8, prefix: u8, address: &[u8]) {
    let mut body = [family, prefix, IFA_F_NODAD, RT_SCOPE_UNIVERSE, 0, 0, 0, 0]; // struct ifaddrmsg
    body[4..8].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    requests.message(RTM_NEWADDR, ACK | CREATE | EXCL, &body);
    requests.attr(IFA_LOCAL, address);
    requests.attr(IFA_ADDRESS, address);
}

fn default_route(requests: &mut Requests, family: u8, scope: u8, source: Option<&[u8]>) {
    // struct rtmsg
    let body = [family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, 0, 0, 0, 0];
    requests.message(RTM_NEWROUTE, ACK | CREATE | EXCL, &body);
    requests.attr_u32(RTA_OIF, LOOPBACK_INDEX);
    if let Some(source) = source {
        requests.attr(RTA_PREFSRC, source);
    }
}
