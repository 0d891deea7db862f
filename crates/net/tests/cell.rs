//! The cell against the real kernel.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers as well")]

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};
use trialrun_net::{Cell, DNS_PORT, TCP_PORT};

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: a cell needs root");
    }
    root
}

/// Runs `f` on a thread of its own inside the cell.
fn inside<T: Send>(cell: &Cell, f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|s| {
        s.spawn(|| {
            move_into_link_name_space(cell.netns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            f()
        })
        .join()
        .unwrap()
    })
}

/// Answers every connection that begins while `f` runs, and returns where they wanted to go.
fn answering<T>(cell: &Cell, allow: bool, f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let Some(queue) = &cell.listeners.syns else {
        eprintln!("skipped in part: no nfnetlink_queue in this kernel");
        return (f(), Vec::new());
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let answered = s.spawn(|| {
            let mut asked = Vec::new();
            while !done.load(Ordering::Relaxed) {
                match queue.receive() {
                    Ok(waiting) => {
                        for syn in waiting {
                            asked.push(syn.destination.unwrap().to_string());
                            queue.answer(syn, allow).unwrap();
                        }
                    }
                    Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            asked
        });
        let result = f();
        done.store(true, Ordering::Relaxed);
        (result, answered.join().unwrap())
    })
}

fn connect(address: &str) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&address.parse::<SocketAddr>().unwrap(), Duration::from_secs(2))
}

/// What a listener of the cell's has to say: on a busy host the kernel brings a packet over a moment after it was sent.
fn soon<T>(mut ask: impl FnMut() -> io::Result<T>) -> T {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match ask() {
            Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other.unwrap(),
        }
    }
}

/// Accepts one waiting connection and returns its original destination.
fn steered(listener: &TcpListener) -> SocketAddr {
    let (stream, _) = soon(|| listener.accept());
    if listener.local_addr().unwrap().is_ipv6() {
        rustix::net::sockopt::ipv6_original_dst(&stream).unwrap().into()
    } else {
        rustix::net::sockopt::ip_original_dst(&stream).unwrap().into()
    }
}

#[test]
fn tcp_is_steered_with_its_original_destination() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    let let_through = |address| {
        let (client, asked) = answering(&cell, true, || inside(&cell, || connect(address)));
        (client.unwrap(), asked)
    };
    for address in ["203.0.113.5:443", "198.51.100.7:22", "169.254.169.254:80"] {
        let (_client, asked) = let_through(address);
        assert_eq!(asked, [address]);
        assert_eq!(steered(&cell.listeners.tcp_v4).to_string(), address);
    }
    for address in ["[2001:db8::1]:443", "[fd00:ec2::254]:80"] {
        let (_client, asked) = let_through(address);
        assert_eq!(asked, [address]);
        assert_eq!(steered(cell.listeners.tcp_v6.as_ref().unwrap()).to_string(), address);
    }
    let _client = let_through("[::ffff:203.0.113.5]:81");
    assert_eq!(steered(&cell.listeners.tcp_v4).to_string(), "203.0.113.5:81");
}

#[test]
fn a_refused_connection_fails_in_connect_and_never_comes_to_the_listener() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    for address in ["203.0.113.5:443", "198.51.100.7:80", "[2001:db8::1]:443"] {
        let (error, asked) = answering(&cell, false, || inside(&cell, || connect(address)).unwrap_err());
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        assert_eq!(asked, [address], "one packet, one question");
    }
    for listener in [&cell.listeners.tcp_v4, cell.listeners.tcp_v6.as_ref().unwrap()] {
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

#[test]
fn a_full_queue_lets_through_rather_than_hang() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    // Nobody answers: what is beyond the queue's 1024 places goes on to the listener.
    let begun: Vec<TcpStream> = inside(&cell, || {
        (0..1100u32)
            .map(|n| {
                let socket = rustix::net::socket_with(
                    rustix::net::AddressFamily::INET,
                    rustix::net::SocketType::STREAM,
                    rustix::net::SocketFlags::NONBLOCK,
                    None,
                )
                .unwrap();
                let to = SocketAddr::from(([203, 0, 113, u8::try_from(n % 250).unwrap()], 443));
                let _in_progress = rustix::net::connect(&socket, &to);
                TcpStream::from(socket)
            })
            .collect()
    });
    soon(|| cell.listeners.tcp_v4.accept());
    drop(begun);
}

#[test]
fn dns_to_any_resolver_comes_to_the_stub() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    for (address, socket) in [
        ("203.0.113.53:53", &cell.listeners.dns_udp_v4),
        ("10.200.0.2:53", &cell.listeners.dns_udp_v4),
        ("[2001:db8::53]:53", cell.listeners.dns_udp_v6.as_ref().unwrap()),
    ] {
        let local = if address.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
        let client = inside(&cell, || {
            let client = UdpSocket::bind(local).unwrap();
            client.connect(address).unwrap();
            client.send(b"query").unwrap();
            client
        });
        let mut buffer = [0; 64];
        let (n, from) = soon(|| socket.recv_from(&mut buffer));
        assert_eq!(&buffer[..n], b"query", "{address}");
        socket.send_to(b"answer", from).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let n = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"answer", "{address}");
    }
    let _tcp = inside(&cell, || connect("203.0.113.53:53")).unwrap();
    soon(|| cell.listeners.dns_tcp_v4.accept());
}

#[test]
fn a_listener_can_not_be_reached_directly() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    for port in [TCP_PORT, DNS_PORT] {
        for address in [format!("10.200.0.2:{port}"), format!("[fd00:200::2]:{port}")] {
            let error = inside(&cell, || connect(&address)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
    }
    let error = inside(&cell, || UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"x", ("10.200.0.2", DNS_PORT)));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert_eq!(cell.listeners.tcp_v4.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let taken = inside(&cell, || TcpListener::bind(("0.0.0.0", TCP_PORT)));
    assert_eq!(taken.unwrap_err().kind(), ErrorKind::AddrInUse);
}

#[test]
fn udp_is_refused_at_once_and_told() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    for (local, address) in [("0.0.0.0:0", "203.0.113.5:443"), ("[::]:0", "[2001:db8::1]:443")] {
        let start = Instant::now();
        let error = inside(&cell, || UdpSocket::bind(local).unwrap().send_to(b"quic", address)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{address}");
        assert!(start.elapsed() < Duration::from_millis(500));
    }
    let Some(refused) = &cell.listeners.refused else {
        eprintln!("skipped: no nfnetlink_log in this kernel");
        return;
    };
    let mut told = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(3);
    while told.len() < 2 && Instant::now() < deadline {
        let mut buffer = [0u8; 8192];
        match rustix::net::recv(refused, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((n, _)) => told.extend(trialrun_net::refused_packets(&buffer[..n])),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    let told: Vec<_> = told.iter().map(|p| (SocketAddr::new(p.address, p.port).to_string(), p.protocol)).collect();
    assert_eq!(told, [("203.0.113.5:443".to_owned(), 17), ("[2001:db8::1]:443".to_owned(), 17)]);
}

/// The kernel enters an IPv6 address's route in a work queue of its own, also without duplicate detection: on a busy host
/// it can be missing for a moment after the address is there.
fn connect_once_routed(to: &str, port: u16) -> TcpStream {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpStream::connect((to, port)) {
            Err(e) if e.kind() == ErrorKind::NetworkUnreachable && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other.unwrap(),
        }
    }
}

#[test]
fn the_loopback_and_the_own_address_stay_the_sandbox_s() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    inside(&cell, || {
        for (bind, to) in [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.200.0.2"), ("::", "::1"), ("::", "fd00:200::2")]
        {
            let server = TcpListener::bind((bind, 0)).unwrap();
            let port = server.local_addr().unwrap().port();
            let client = connect_once_routed(to, port);
            let (_, peer) = server.accept().unwrap();
            assert_eq!(peer.port(), client.local_addr().unwrap().port(), "{bind} {to}");
        }
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.send_to(b"x", udp.local_addr().unwrap()).unwrap();
        assert_eq!(connect("127.0.0.1:9").unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(std::fs::read_to_string("/proc/sys/net/ipv4/ping_group_range").unwrap().trim(), "1\t0");
    });
}

#[test]
fn low_ports_can_be_bound_without_capabilities() {
    if !root() {
        return;
    }
    let cell = Cell::create().unwrap();
    inside(&cell, || {
        // This thread only: capabilities are per thread.
        let mut capabilities = rustix::thread::capabilities(None).unwrap();
        capabilities.effective = rustix::thread::CapabilitySet::empty();
        rustix::thread::set_capabilities(None, capabilities).unwrap();
        assert!(TcpListener::bind("0.0.0.0:80").is_ok());
    });
}

#[test]
fn the_host_is_not_changed_and_creation_is_fast() {
    if !root() {
        return;
    }
    let netns = || std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    let before = netns();
    let mut times: Vec<Duration> = (0..40)
        .map(|_| {
            let start = Instant::now();
            let cell = Cell::create().unwrap();
            let elapsed = start.elapsed();
            drop(cell);
            elapsed
        })
        .collect();
    assert_eq!(netns(), before);
    times.sort();
    eprintln!("Cell::create: median {:?}, max {:?} of {}", times[times.len() / 2], times[times.len() - 1], times.len());
}
