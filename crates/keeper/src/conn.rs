//! Frames with descriptors beside them over a unix stream, for both of the keeper's neighbours: engine and guest agent.

use bytes::BytesMut;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};
use tokio::{io::Interest, net::UnixStream, sync::Mutex};
use trialrun_guest_proto::frame::{Decoder, Frame, Kind, MAX_PAYLOAD, encode};
use trialrun_sys::fdpass;

/// Bytes asked of the kernel per read.
const READ_BYTES: usize = 64 << 10;
/// Bytes that are read before timers and other streams have their turn.
const TURN_BYTES: usize = 256 << 10;
/// Descriptors that may wait for the request they belong to; more is hostile or broken.
const MAX_WAITING_FDS: usize = 64;

/// The reading half.
#[derive(Debug)]
pub struct Receiver {
    stream: Arc<UnixStream>,
    decoder: Decoder,
    fds: VecDeque<OwnedFd>,
    /// Bytes read since others had their turn.
    turn: usize,
}

/// The writing half; clones share the stream, and a frame is never torn by another.
#[derive(Debug, Clone)]
pub struct Sender {
    stream: Arc<UnixStream>,
    turn: Arc<Mutex<()>>,
}

/// Splits a connected stream.
///
/// # Errors
/// When the stream can't be made non-blocking or registered.
pub fn split(stream: std::os::unix::net::UnixStream) -> io::Result<(Receiver, Sender)> {
    stream.set_nonblocking(true)?;
    let stream = Arc::new(UnixStream::from_std(stream)?);
    let receiver = Receiver { stream: stream.clone(), decoder: Decoder::default(), fds: VecDeque::new(), turn: 0 };
    Ok((receiver, Sender { stream, turn: Arc::new(Mutex::new(())) }))
}

impl Receiver {
    /// The next frame; `None` at the stream's end.
    ///
    /// # Errors
    /// A broken stream, or bytes that are no frame ([`io::ErrorKind::InvalidData`]). Cancel-safe.
    pub async fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))? {
                return Ok(Some(frame));
            }
            let (decoder, fds, stream) = (&mut self.decoder, &mut self.fds, &self.stream);
            // A peer that always has more to say must not keep the thread from its other work, deadlines above all: neither
            // readiness nor `try_io` counts as work by itself, and the runtime looks at timers only every 61 polls.
            tokio::task::consume_budget().await;
            if self.turn >= TURN_BYTES {
                self.turn = 0;
                tokio::task::yield_now().await;
            }
            stream.readable().await?;
            let read =
                stream.try_io(Interest::READABLE, || fdpass::recv(stream.as_fd(), decoder.buffer(), READ_BYTES, fds));
            match read {
                Ok(0) => return Ok(None),
                Ok(_) if fds.len() > MAX_WAITING_FDS => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
                }
                Ok(n) => self.turn += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The next descriptor that came along.
    pub fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop_front()
    }

    /// The next frame as a JSON message of the kind that is expected.
    ///
    /// # Errors
    /// As [`Self::frame`]; an end or another kind is [`io::ErrorKind::UnexpectedEof`] or `InvalidData`.
    pub async fn json<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let frame = self.frame().await?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        from_json(&frame)
    }
}

/// Decodes a frame's JSON payload.
///
/// # Errors
/// `InvalidData` when it is not that message.
pub fn from_json<T: DeserializeOwned>(frame: &Frame) -> io::Result<T> {
    serde_json::from_slice(&frame.payload).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

impl Sender {
    /// Sends one frame, with `fds` beside its first byte.
    ///
    /// # Errors
    /// A broken stream.
    pub async fn frame(&self, stream: u32, kind: Kind, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, stream, kind, payload);
        self.bytes(&bytes, fds).await
    }

    /// Sends data, cut into frames.
    ///
    /// # Errors
    /// A broken stream.
    pub async fn data(&self, stream: u32, kind: Kind, data: &[u8]) -> io::Result<()> {
        for piece in data.chunks(MAX_PAYLOAD) {
            self.frame(stream, kind, piece, &[]).await?;
        }
        Ok(())
    }

    /// Sends a JSON message on stream 0.
    ///
    /// # Errors
    /// A broken stream, or a message over the frame's limit.
    pub async fn json<T: Serialize>(&self, kind: Kind, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let payload = serde_json::to_vec(message).map_err(io::Error::other)?;
        if payload.len() > MAX_PAYLOAD {
            let words = format!("the request is {} bytes long; the limit is {MAX_PAYLOAD}", payload.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
        self.frame(0, kind, &payload, fds).await
    }

    async fn bytes(&self, mut bytes: &[u8], mut fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let _turn = self.turn.lock().await;
        while !bytes.is_empty() {
            let sent = self.stream.try_io(Interest::WRITABLE, || fdpass::send(self.stream.as_fd(), bytes, fds));
            match sent {
                Ok(n) => {
                    bytes = &bytes[n..];
                    fds = &[];
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
