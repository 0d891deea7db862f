//! What the host and the guest agent say to each other; the only decoder of guest bytes.
//!
//! The stream carries frames ([`frame`]); a request opens a stream id, events and data answer on it. Messages are
//! protocol buffers ([`message`]); the schema is append-only: fields and variants are added, never renumbered, and an
//! older peer skips what it does not know. `docs/protocol.md` has the layout and a worked example.
//!
//! In a container, file descriptors travel beside a request (`SCM_RIGHTS` on the request's first byte): the exec's
//! stdio, its cgroup directory, a transfer's byte stream. Where a driver cannot pass descriptors, the same bytes travel
//! as data frames with credits. Either way the messages are the same.
//!
//! Every byte from the guest is hostile: lengths are checked before anything is allocated.

pub mod frame;
pub mod message;

pub use frame::{Decoder, Frame, FrameError, Kind, MAGIC_LEN, MAX_PAYLOAD};
pub use message::*;

/// The protocol's generation: counts up when a peer must know of a change to work at all.
pub const GENERATION: u32 = 1;
