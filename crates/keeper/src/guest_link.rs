//! The keeper's end of the stream to the guest agent: requests out, answers sorted by stream.
//!
//! Every byte that comes in is hostile. A frame that can't be decoded, data beyond the granted credit or a flood of
//! events ends the link, and with it the machine.

use crate::{
    conn::{Receiver, Sender},
    wire::{CallError, CallErrorKind},
};
use bytes::Bytes;
use prost::Message;
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    os::fd::BorrowedFd,
    rc::Rc,
};
use tokio::sync::{Semaphore, mpsc};
use trialrun_guest_proto::{Event, EventKind, FailKind, Failed, FileStat, Op, Request, frame::Kind};

/// Bytes of data that either side may send on a stream before it is granted more.
pub const WINDOW: u32 = 256 << 10;
/// Largest piece of data that waits for credit as a whole.
const PIECE: usize = 64 << 10;
/// Host memory that the events of one stream may take in all, whether somebody waits for them or not.
const MAX_EVENT_BYTES: usize = 256 << 20;

/// Something that arrived on a stream.
#[derive(Debug)]
pub enum Arrival {
    /// An event.
    Event(EventKind),
    /// Bytes of a channel: 1 or 2.
    Data(u8, Bytes),
}

struct Lane {
    to: mpsc::UnboundedSender<Arrival>,
    /// Data bytes that may still come.
    credit: u64,
    /// What the events that arrived in all took, see [`weight`].
    events: usize,
    /// Data bytes that may still go. Closed when nobody is there any more to take them.
    room: Rc<Semaphore>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.room.close();
    }
}

/// The way of data to the process on a stream, which takes its time.
pub struct Inlet {
    sender: Sender,
    stream: u32,
    room: Rc<Semaphore>,
}

impl Inlet {
    /// Sends as the agent grants.
    ///
    /// # Errors
    /// When the machine is gone, or the request has ended.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), CallError> {
        for piece in bytes.chunks(PIECE) {
            self.room.acquire_many(piece.len() as u32).await.map_err(|_| lost())?.forget();
            self.sender.data(self.stream, Kind::Data0, piece).await.map_err(|_| lost())?;
        }
        Ok(())
    }

    /// Tells the process that nothing more comes.
    pub async fn close(self) {
        let _ = self.sender.frame(self.stream, Kind::End0, &[], &[]).await;
    }
}

/// The link. One thread.
pub struct GuestLink {
    sender: Sender,
    lanes: RefCell<HashMap<u32, Lane>>,
    next: Cell<u32>,
    dead: Cell<bool>,
}

/// One request's answers. Dropping it gives up on them.
pub struct Lines {
    link: Rc<GuestLink>,
    /// Stream id.
    pub stream: u32,
    from: mpsc::UnboundedReceiver<Arrival>,
}

/// Bytes that an event of this length on the wire takes here: two bytes there can be an entry of a list, or an event,
/// that takes a hundred times as many.
fn weight(len: usize, event: Option<&EventKind>) -> usize {
    let entries = match event {
        Some(EventKind::Entries(entries)) => entries.entries.len() * size_of::<FileStat>(),
        Some(EventKind::Done(done)) => done.skipped.len() * size_of::<String>(),
        _ => 0,
    };
    len + size_of::<Arrival>() + entries
}

fn lost() -> CallError {
    CallError { kind: CallErrorKind::MachineLost, message: "the machine is gone".to_owned() }
}

impl GuestLink {
    /// A link over a connected stream; [`Self::run`] must be polled.
    pub fn new(sender: Sender) -> Rc<Self> {
        Rc::new(Self { sender, lanes: RefCell::default(), next: Cell::new(1), dead: Cell::new(false) })
    }

    /// Reads until the stream ends; then every waiting request learns that the machine is lost.
    pub async fn run(self: Rc<Self>, mut receiver: Receiver) -> io::Result<()> {
        let result = self.pump(&mut receiver).await;
        self.dead.set(true);
        self.lanes.borrow_mut().clear();
        result
    }

    async fn pump(&self, receiver: &mut Receiver) -> io::Result<()> {
        let broken = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        while let Some(frame) = receiver.frame().await? {
            if receiver.take_fd().is_some() {
                return Err(broken("the guest agent sent a descriptor"));
            }
            let mut lanes = self.lanes.borrow_mut();
            // A stream that nobody waits for any more is no error: its request may just have been given up.
            let Some(lane) = lanes.get_mut(&frame.stream) else { continue };
            let arrival = match frame.kind {
                Kind::Event => {
                    let len = frame.payload.len();
                    let event =
                        Event::decode(frame.payload).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                    lane.events += weight(len, event.kind.as_ref());
                    if lane.events > MAX_EVENT_BYTES {
                        return Err(broken("the guest agent floods a stream with events"));
                    }
                    // An event of a kind that this generation does not know.
                    let Some(kind) = event.kind else { continue };
                    Arrival::Event(kind)
                }
                Kind::Data1 | Kind::Data2 => {
                    lane.credit = lane
                        .credit
                        .checked_sub(frame.payload.len() as u64)
                        .ok_or_else(|| broken("the guest agent sent more than it was granted"))?;
                    Arrival::Data(if frame.kind == Kind::Data1 { 1 } else { 2 }, frame.payload)
                }
                Kind::Credit => {
                    let more = <[u8; 4]>::try_from(&frame.payload[..]).map_or(0, u32::from_le_bytes) as usize;
                    lane.room.add_permits(more.min((WINDOW as usize).saturating_sub(lane.room.available_permits())));
                    continue;
                }
                _ => return Err(broken("the guest agent sent a frame that only the host sends")),
            };
            if lane.to.send(arrival).is_err() {
                lanes.remove(&frame.stream);
            }
        }
        Ok(())
    }

    /// Stream 0, on which the agent says `Ready`.
    pub fn greetings(self: &Rc<Self>) -> Lines {
        self.open(0)
    }

    fn open(self: &Rc<Self>, stream: u32) -> Lines {
        let (to, from) = mpsc::unbounded_channel();
        if !self.dead.get() {
            let room = Rc::new(Semaphore::new(WINDOW as usize));
            self.lanes.borrow_mut().insert(stream, Lane { to, credit: u64::from(WINDOW), events: 0, room });
        }
        Lines { link: self.clone(), stream, from }
    }

    /// Grants the agent more data on a stream. Waits for an agent that does not read.
    pub async fn grant(&self, stream: u32, bytes: u32) {
        if let Some(lane) = self.lanes.borrow_mut().get_mut(&stream) {
            lane.credit += u64::from(bytes);
        }
        let _ = self.sender.frame(stream, Kind::Credit, &bytes.to_le_bytes(), &[]).await;
    }

    /// Sends a request with descriptors beside it.
    ///
    /// # Errors
    /// When the machine is gone, or the request is over the frame's limit.
    pub async fn request(self: &Rc<Self>, op: Op, fds: &[BorrowedFd<'_>]) -> Result<Lines, CallError> {
        let stream = self.next.get();
        self.next.set(stream.checked_add(1).unwrap_or(1));
        let request = Request { fds: fds.len() as u32, op: Some(op) }.encode_to_vec();
        if request.len() > trialrun_guest_proto::MAX_PAYLOAD {
            let message = format!(
                "the request is {} bytes long; the limit is {}",
                request.len(),
                trialrun_guest_proto::MAX_PAYLOAD
            );
            return Err(CallError { kind: CallErrorKind::Invalid, message });
        }
        let lines = self.open(stream);
        self.sender.frame(stream, Kind::Request, &request, fds).await.map_err(|_| lost())?;
        Ok(lines)
    }
}

impl Lines {
    /// The next arrival.
    ///
    /// # Errors
    /// When the machine is gone.
    pub async fn next(&mut self) -> Result<Arrival, CallError> {
        self.from.recv().await.ok_or_else(lost)
    }

    /// The next event, for requests that carry no data; a failure becomes the error.
    ///
    /// # Errors
    /// The agent's `Failed`, or a lost machine.
    pub async fn event(&mut self) -> Result<EventKind, CallError> {
        loop {
            match self.next().await? {
                Arrival::Event(EventKind::Failed(failed)) => return Err(call_error(&failed)),
                Arrival::Event(event) => return Ok(event),
                Arrival::Data(..) => {}
            }
        }
    }

    /// The link that they came by.
    pub fn link(&self) -> Rc<GuestLink> {
        self.link.clone()
    }

    /// The way of data to the process on this stream.
    pub fn input(&self) -> Option<Inlet> {
        let room = self.link.lanes.borrow().get(&self.stream)?.room.clone();
        Some(Inlet { sender: self.link.sender.clone(), stream: self.stream, room })
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.link.lanes.borrow_mut().remove(&self.stream);
    }
}

/// An agent's failure as a call's error.
pub fn call_error(failed: &Failed) -> CallError {
    let kind = match FailKind::try_from(failed.kind).unwrap_or(FailKind::Other) {
        FailKind::NotFound => CallErrorKind::NotFound,
        FailKind::DiskFull => CallErrorKind::DiskFull,
        FailKind::Denied => CallErrorKind::Denied,
        FailKind::WrongType => CallErrorKind::WrongType,
        FailKind::BadStream => CallErrorKind::BadStream,
        FailKind::Other => CallErrorKind::Internal,
        _ => CallErrorKind::Invalid,
    };
    CallError { kind, message: failed.message.clone() }
}
