//! The cell and its listeners.

use crate::{link, log, queue::SynQueue, steer};
use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd, OwnedFd},
};
use trialrun_sys::netlink::{RefusedRequest, unshare_network};

/// The cell's own IPv4 address, the same in every cell; nothing outside ever sees it.
pub const CELL_ADDRESS_V4: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);
/// The cell's own IPv6 address.
pub const CELL_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x200, 0, 0, 0, 0, 0, 2);
/// Port of the TCP listeners: just above Linux's default ephemeral range (32768 to 60999), so that no client of the
/// sandbox gets it by chance.
pub const TCP_PORT: u16 = 61_001;
/// Port of the DNS listeners, UDP and TCP.
pub const DNS_PORT: u16 = 61_002;
/// Connections that wait to be accepted. A build opens dozens at once; the kernel caps it at `somaxconn`.
const BACKLOG: i32 = 512;

/// Whether an original destination is a listener itself. The rules refuse that already; the gateway asks again.
#[must_use]
pub fn is_listener(destination: SocketAddr) -> bool {
    let own = destination.ip() == IpAddr::V4(CELL_ADDRESS_V4) || destination.ip() == IpAddr::V6(CELL_ADDRESS_V6);
    own && matches!(destination.port(), TCP_PORT | DNS_PORT)
}

/// What the gateway serves. All sockets live in the cell's namespace and don't block.
#[derive(Debug)]
pub struct CellListeners {
    /// Steered IPv4 connections; each knows its original destination (`SO_ORIGINAL_DST`).
    pub tcp_v4: TcpListener,
    /// Steered IPv6 connections; absent where the kernel runs without IPv6.
    pub tcp_v6: Option<TcpListener>,
    /// DNS queries over UDP.
    pub dns_udp_v4: UdpSocket,
    /// DNS queries over UDP and IPv6.
    pub dns_udp_v6: Option<UdpSocket>,
    /// DNS queries over TCP.
    pub dns_tcp_v4: TcpListener,
    /// DNS queries over TCP and IPv6.
    pub dns_tcp_v6: Option<TcpListener>,
    /// Subscription to refused packets (read with [`refused_packets`](crate::refused_packets)); absent where the kernel
    /// has no nfnetlink_log.
    pub refused: Option<OwnedFd>,
    /// Connections that begin and wait to be judged; absent where the kernel has no nfnetlink_queue. While it is held
    /// and nobody answers, nothing can connect.
    pub syns: Option<SynQueue>,
}

/// A sandbox's network namespace with its listeners. It lives as long as a descriptor or process of it does.
#[derive(Debug)]
pub struct Cell {
    /// The namespace, to be entered by the machine's processes.
    pub netns: OwnedFd,
    /// What the gateway serves.
    pub listeners: CellListeners,
    /// What the machine's `resolv.conf` names.
    pub dns_address: IpAddr,
}

/// A step of making a cell that failed.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The calling thread's own namespace could not be kept for the way back.
    #[error("open the host's network namespace")]
    OpenHost(#[source] io::Error),
    /// Needs root in the host's user namespace.
    #[error("make a network namespace")]
    Unshare(#[source] io::Error),
    /// Link, address or route.
    #[error("set up the loopback")]
    Link(#[source] RefusedRequest),
    /// A setting below `/proc/sys/net`.
    #[error("set {name}")]
    Sysctl {
        /// Its path.
        name: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel may lack nf_tables or its NAT.
    #[error("load the nf_tables rules")]
    Rules(#[source] RefusedRequest),
    /// A listener inside.
    #[error("open the listener on {address}")]
    Listen {
        /// Where it should have listened.
        address: SocketAddr,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The thread is left in the cell's namespace and must not go on: what it opens next would be the sandbox's.
    #[error("return to the host's network namespace")]
    Return(#[source] io::Error),
}

impl Cell {
    /// Makes a cell. Blocks for about a millisecond; the calling thread is in another network namespace meanwhile, so
    /// nothing else may open sockets on it (other threads are not affected).
    ///
    /// # Errors
    /// The step that failed. Nothing of the cell is left, and except for [`CellError::Return`] the thread is back in
    /// its own namespace.
    pub fn create() -> Result<Self, CellError> {
        let host = open_netns().map_err(CellError::OpenHost)?;
        unshare_network().map_err(CellError::Unshare)?;
        let cell = Self::fill();
        move_into_link_name_space(host.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|e| CellError::Return(e.into()))?;
        cell
    }

    /// Everything that happens inside.
    fn fill() -> Result<Self, CellError> {
        let netns = open_netns().map_err(CellError::OpenHost)?;
        let ipv6 = link::set_up().map_err(CellError::Link)?;
        // The namespace belongs to the host's user namespace, so root in the sandbox lacks the capability to bind low
        // ports here; servers under test want 80 and 443. ping_group_range is left at the kernel's default for new
        // namespaces, which is empty.
        let name = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
        fs::write(name, "0").map_err(|source| CellError::Sysctl { name, source })?;
        let mut syns = SynQueue::bind();
        if steer::load(ipv6, syns.is_some()).map_err(CellError::Rules)?.is_none() {
            syns = None;
        }
        let v4 = |port| SocketAddr::from((CELL_ADDRESS_V4, port));
        let v6 = |port| ipv6.then(|| SocketAddr::from((CELL_ADDRESS_V6, port)));
        let listeners = CellListeners {
            tcp_v4: tcp(v4(TCP_PORT))?,
            tcp_v6: v6(TCP_PORT).map(tcp).transpose()?,
            dns_udp_v4: udp(v4(DNS_PORT))?,
            dns_udp_v6: v6(DNS_PORT).map(udp).transpose()?,
            dns_tcp_v4: tcp(v4(DNS_PORT))?,
            dns_tcp_v6: v6(DNS_PORT).map(tcp).transpose()?,
            refused: log::subscribe(),
            syns,
        };
        Ok(Self { netns, listeners, dns_address: CELL_ADDRESS_V4.into() })
    }
}

fn open_netns() -> io::Result<OwnedFd> {
    // The thread's, not the process's: tests make cells on threads of their own.
    Ok(open("/proc/thread-self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn tcp(address: SocketAddr) -> Result<TcpListener, CellError> {
    let make = || -> Result<OwnedFd, Errno> {
        let fd = bound(address, SocketType::STREAM)?;
        listen(&fd, BACKLOG)?;
        Ok(fd)
    };
    make().map(TcpListener::from).map_err(|e| CellError::Listen { address, source: e.into() })
}

fn udp(address: SocketAddr) -> Result<UdpSocket, CellError> {
    let fd = bound(address, SocketType::DGRAM);
    fd.map(UdpSocket::from).map_err(|e| CellError::Listen { address, source: e.into() })
}

/// A bound socket without `SO_REUSEADDR` and `SO_REUSEPORT`, so that the sandbox can't bind beside it.
fn bound(address: SocketAddr, kind: SocketType) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let fd = socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    bind(&fd, &address)?;
    Ok(fd)
}
