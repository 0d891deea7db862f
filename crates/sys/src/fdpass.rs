//! Bytes with file descriptors beside them (unix(7), `SCM_RIGHTS`).

use bytes::BytesMut;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::{
    collections::VecDeque,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

/// Most descriptors that travel beside one message. The kernel's own limit is 253.
pub const MAX_FDS: usize = 8;

/// Sends the start of `bytes` with `fds` beside its first byte; returns how many bytes went. Descriptors go whole with
/// the first successful call, so a caller that sends the rest passes none.
///
/// # Errors
/// What sendmsg(2) says; `WouldBlock` on a full non-blocking socket, in which case nothing was sent.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && (fds.len() > MAX_FDS || !ancillary.push(SendAncillaryMessage::ScmRights(fds))) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Reads into `buffer`'s end, at most `limit` bytes, and puts descriptors that came along at the end of `fds`, closed
/// on exec. Returns the number of bytes; 0 is the stream's end.
///
/// # Errors
/// What recvmsg(2) says; `WouldBlock` on an empty non-blocking socket.
pub fn recv(
    socket: BorrowedFd<'_>,
    buffer: &mut BytesMut,
    limit: usize,
    fds: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    let old = buffer.len();
    buffer.resize(old + limit, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let result = recvmsg(socket, &mut [IoSliceMut::new(&mut buffer[old..])], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let got = match result {
        Ok(message) => message.bytes,
        Err(e) => {
            buffer.truncate(old);
            return Err(e.into());
        }
    };
    buffer.truncate(old + got);
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Read,
        os::{fd::AsFd, unix::net::UnixStream},
    };

    #[test]
    fn a_descriptor_arrives_with_its_bytes() {
        let (a, b) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!(send(a.as_fd(), b"hello", &[writer.as_fd()]).unwrap(), 5);
        drop(writer);
        let (mut buffer, mut fds) = (BytesMut::new(), VecDeque::new());
        assert_eq!(recv(b.as_fd(), &mut buffer, 64, &mut fds).unwrap(), 5);
        assert_eq!(&buffer[..], b"hello");
        std::io::Write::write_all(&mut std::fs::File::from(fds.pop_front().unwrap()), b"x").unwrap();
        let mut text = String::new();
        (&reader).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }
}
