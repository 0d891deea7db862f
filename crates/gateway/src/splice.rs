//! Carries bytes between two sockets, each direction by itself, with half-close.

use rustix::net::{Shutdown, shutdown};
use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};
use tokio::net::TcpStream;

/// Bytes taken at once. Held only while there is something to carry, so an idle connection keeps no buffer.
const BUFFER: usize = 16 * 1024;

/// Writes everything.
pub(crate) async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads what is there at the end of `held`, at most one buffer; 0 is the stream's end.
pub(crate) async fn read_more(from: &TcpStream, held: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        from.readable().await?;
        let old = held.len();
        held.resize(old + BUFFER, 0);
        let result = from.try_read(&mut held[old..]);
        held.truncate(old + result.as_ref().map_or(0, |n| *n));
        match result {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// Carries one direction to its end and passes the end on. `look` sees every piece before it is written.
pub(crate) async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    count: &AtomicU64,
    mut look: impl FnMut(&[u8]),
) -> io::Result<()> {
    loop {
        let mut held = Vec::new();
        // The buffer is made only once there is something to read.
        from.readable().await?;
        if read_more(from, &mut held).await? == 0 {
            let _already_closed = shutdown(to, Shutdown::Write);
            return Ok(());
        }
        look(&held);
        write_all(to, &held).await?;
        count.fetch_add(held.len() as u64, Ordering::Relaxed);
    }
}

/// Carries both directions until both have ended or one has failed.
pub(crate) async fn splice(
    client: &TcpStream,
    upstream: &TcpStream,
    up: &AtomicU64,
    down: &AtomicU64,
) -> io::Result<()> {
    tokio::try_join!(pump(client, upstream, up, |_| ()), pump(upstream, client, down, |_| ()))?;
    Ok(())
}
