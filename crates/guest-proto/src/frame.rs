//! Frames: length, stream, kind, payload.
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | payload length, little-endian, at most [`MAX_PAYLOAD`] |
//! | 4 | 4 | stream id, little-endian; 0 belongs to the connection |
//! | 8 | 1 | kind |
//! | 9 | n | payload |

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Largest payload of one frame. A peer that announces more is cut off before anything is allocated.
pub const MAX_PAYLOAD: usize = 256 * 1024;
/// Bytes before the payload.
pub const HEADER_LEN: usize = 9;
/// Length of a resync frame's magic.
pub const MAGIC_LEN: usize = 16;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Random magic, echoed by the peer. Opens a connection, so that half a frame from before a restore is skipped.
    Resync = 0,
    /// A [`crate::Request`]; opens the stream.
    Request = 1,
    /// A [`crate::Event`].
    Event = 2,
    /// Bytes of channel 0 (towards the process or file).
    Data0 = 3,
    /// Bytes of channel 1 (stdout, or a transfer's bytes).
    Data1 = 4,
    /// Bytes of channel 2 (stderr).
    Data2 = 5,
    /// Four bytes, little-endian: so many more bytes may be sent to the frame's sender on this stream.
    Credit = 6,
    /// The sender will send no more data of channel 0.
    End0 = 7,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Resync,
            1 => Self::Request,
            2 => Self::Event,
            3 => Self::Data0,
            4 => Self::Data1,
            5 => Self::Data2,
            6 => Self::Credit,
            7 => Self::End0,
            _ => return None,
        })
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Stream id.
    pub stream: u32,
    /// Kind.
    pub kind: Kind,
    /// Payload.
    pub payload: Bytes,
}

/// Bytes that are no frame. The connection is of no more use.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    /// The announced length is over [`MAX_PAYLOAD`].
    #[error("a frame announces {0} bytes, over the limit of {MAX_PAYLOAD}")]
    TooLong(usize),
    /// A kind that this generation does not know.
    #[error("a frame has the unknown kind {0}")]
    UnknownKind(u8),
}

/// Appends a frame to `out`.
///
/// # Panics
/// When `payload` is over [`MAX_PAYLOAD`]: senders cut data into pieces.
pub fn encode(out: &mut BytesMut, stream: u32, kind: Kind, payload: &[u8]) {
    assert!(payload.len() <= MAX_PAYLOAD, "senders cut data into pieces");
    out.reserve(HEADER_LEN + payload.len());
    out.put_u32_le(payload.len() as u32);
    out.put_u32_le(stream);
    out.put_u8(kind as u8);
    out.put_slice(payload);
}

/// Cuts a byte stream into frames. Holds at most one frame's bytes beyond what was fed.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    /// A buffer to read into; bytes appended to it are decoded next.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next whole frame, if its bytes are there.
    ///
    /// # Errors
    /// On a length over the limit or an unknown kind.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.buffer.len() < HEADER_LEN {
            return Ok(None);
        }
        let mut head = &self.buffer[..HEADER_LEN];
        let len = head.get_u32_le() as usize;
        let stream = head.get_u32_le();
        let kind_byte = head.get_u8();
        if len > MAX_PAYLOAD {
            return Err(FrameError::TooLong(len));
        }
        let kind = Kind::from_byte(kind_byte).ok_or(FrameError::UnknownKind(kind_byte))?;
        if self.buffer.len() < HEADER_LEN + len {
            self.buffer.reserve(HEADER_LEN + len - self.buffer.len());
            return Ok(None);
        }
        self.buffer.advance(HEADER_LEN);
        Ok(Some(Frame { stream, kind, payload: self.buffer.split_to(len).freeze() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let mut out = BytesMut::new();
        encode(&mut out, 7, Kind::Data1, b"hi");
        assert_eq!(&out[..], &[2, 0, 0, 0, 7, 0, 0, 0, 4, b'h', b'i']);
    }

    #[test]
    fn frames_survive_any_cut() {
        let mut wire = BytesMut::new();
        encode(&mut wire, 1, Kind::Request, b"abc");
        encode(&mut wire, 2, Kind::Data0, b"");
        encode(&mut wire, 3, Kind::Event, &[9; 300]);
        for step in 1..wire.len() {
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in wire.chunks(step) {
                decoder.buffer().extend_from_slice(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push((frame.stream, frame.payload.len()));
                }
            }
            assert_eq!(seen, [(1, 3), (2, 0), (3, 300)], "step {step}");
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_allocation() {
        let mut decoder = Decoder::default();
        decoder.buffer().extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1]);
        assert_eq!(decoder.next_frame(), Err(FrameError::TooLong(u32::MAX as usize)));
    }
}
