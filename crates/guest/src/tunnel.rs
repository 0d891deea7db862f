//! A connection to a port of the machine's loopback, joined to the host's end.
//!
//! `Started` (pid 0) says that the connection stands; `Done` follows when both directions have ended.

use crate::link::{Channel, Failure};
use std::{
    fs::File,
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixStream},
};
use trialrun_guest_proto::{Done, EventKind, FailKind, Started, Tunnel};

/// Stack of the second direction's thread.
const STACK: usize = 64 * 1024;
/// Bytes moved at once, per direction.
const COPY: usize = 32 * 1024;

/// Connects and moves bytes both ways until both sides are through.
pub fn tunnel(passed: Option<OwnedFd>, channel: Channel, op: &Tunnel) -> Result<Done, Failure> {
    let port = u16::try_from(op.port)
        .ok()
        .filter(|&port| port > 0)
        .ok_or_else(|| Failure::new(FailKind::BadRequest, format!("no port {}", op.port)))?;
    // Servers listen on either; the older family first.
    let addresses = [SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((Ipv6Addr::LOCALHOST, port))];
    let stream = TcpStream::connect(&addresses[..]).map_err(|e| {
        let failure = Failure::io(&e, format!("port {port}"));
        if e.kind() == io::ErrorKind::ConnectionRefused { failure.with_kind(FailKind::NotFound) } else { failure }
    })?;
    let other = stream.try_clone().map_err(|e| Failure::io(&e, "tunnel"))?;
    // A tunnel carries interactive protocols; waiting for more bytes costs them a round trip.
    let _ = stream.set_nodelay(true);
    let (link, id) = (channel.link.clone(), channel.stream);
    link.send_event(id, EventKind::Started(Started { pid: 0 }));
    let bytes = match passed {
        Some(fd) => {
            let _ = rustix::io::ioctl_fionbio(&fd, false);
            let socket = UnixStream::from(fd);
            let host = socket.try_clone().map_err(|e| Failure::io(&e, "tunnel"))?;
            let back = host.try_clone().map_err(|e| Failure::io(&e, "tunnel"))?;
            both((File::from(OwnedFd::from(host)), stream), (other, File::from(OwnedFd::from(back))), move || {
                socket.shutdown(Shutdown::Write)
            })
        }
        None => both((channel.clone(), stream), (other, channel), || Ok(())),
    };
    Ok(Done { bytes: bytes.map_err(|e| Failure::io(&e, "tunnel"))?, ..Done::default() })
}

/// Moves `up` in a second thread and `down` in this one.
fn both<R, W>(up: (R, TcpStream), down: (TcpStream, W), end_down: impl FnOnce() -> io::Result<()>) -> io::Result<u64>
where
    R: Read + Send + 'static,
    W: Write,
{
    let upward = std::thread::Builder::new().stack_size(STACK).spawn(move || {
        let (mut from, mut to) = up;
        let moved = copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
        moved
    })?;
    let (mut from, mut to) = down;
    let moved = copy(&mut from, &mut to);
    let _ = end_down();
    Ok(moved + upward.join().unwrap_or(0))
}

/// Until either side is through; a reset ends a direction as a close does.
fn copy(from: &mut impl Read, to: &mut impl Write) -> u64 {
    let mut buffer = vec![0; COPY];
    let mut moved = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return moved,
            Ok(n) if to.write_all(&buffer[..n]).is_ok() => moved += n as u64,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return moved,
        }
    }
}
