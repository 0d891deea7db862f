//! The way back to the host: frames that wait to be written, from the main loop and from worker threads.
//!
//! The main loop alone writes to the socket. Workers put frames into the outbox and wake it; they wait while the outbox
//! is full, the main loop never does.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};
use trialrun_guest_proto::{Done, Event, EventKind, FailKind, Failed, Kind, MAX_PAYLOAD, frame};

/// Bytes in the outbox above which workers wait and the main loop stops reading output.
pub const OUTBOX_FULL: usize = 1 << 20;
/// What either side may send on a stream before it is granted more.
pub const INITIAL_WINDOW: usize = 256 * 1024;
/// Longest message of a failure.
const MAX_MESSAGE: usize = 8192;
/// Capacity that an empty outbox keeps.
const OUTBOX_KEPT: usize = 64 * 1024;

/// No state is left half-changed under these locks, so a panicked worker does no harm to them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Outbox {
    bytes: BytesMut,
    /// Streams whose worker is through.
    finished: Vec<u32>,
    /// Nobody reads any more: nothing is kept and nobody waits.
    abandoned: bool,
}

/// Frames on their way to the host. Shared by the main loop and all workers; lives as long as the process.
#[derive(Debug)]
pub struct Link {
    outbox: Mutex<Outbox>,
    space: Condvar,
    wake: OwnedFd,
}

impl Link {
    /// An empty outbox.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { outbox: Mutex::default(), space: Condvar::new(), wake })
    }

    /// Readable when a worker has put something in.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes `wake_fd` unreadable again.
    pub fn clear_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }

    /// A frame from the main loop; never waits.
    pub fn push(&self, stream: u32, kind: Kind, payload: &[u8]) {
        frame::encode(&mut lock(&self.outbox).bytes, stream, kind, payload);
    }

    /// An event from the main loop; never waits.
    pub fn push_event(&self, stream: u32, kind: EventKind) {
        self.push(stream, Kind::Event, &encode_event(kind));
    }

    /// A failure from the main loop; never waits.
    pub fn push_failed(&self, stream: u32, failure: Failure) {
        self.push_event(stream, EventKind::Failed(failure.into()));
    }

    /// A frame from a worker; waits while the outbox is full.
    pub fn send(&self, stream: u32, kind: Kind, payload: &[u8]) {
        let mut outbox = lock(&self.outbox);
        while outbox.bytes.len() >= OUTBOX_FULL && !outbox.abandoned {
            outbox = self.space.wait(outbox).unwrap_or_else(PoisonError::into_inner);
        }
        if !outbox.abandoned {
            frame::encode(&mut outbox.bytes, stream, kind, payload);
        }
        drop(outbox);
        self.wake();
    }

    /// An event from a worker.
    pub fn send_event(&self, stream: u32, kind: EventKind) {
        self.send(stream, Kind::Event, &encode_event(kind));
    }

    /// A worker's last word on its stream.
    pub fn finish(&self, stream: u32, result: Result<Done, Failure>) {
        let last = match result {
            Ok(done) => EventKind::Done(done),
            Err(failure) => EventKind::Failed(failure.into()),
        };
        let mut outbox = lock(&self.outbox);
        frame::encode(&mut outbox.bytes, stream, Kind::Event, &encode_event(last));
        outbox.finished.push(stream);
        drop(outbox);
        self.wake();
    }

    /// Streams whose worker has said its last word since the last call.
    pub fn take_finished(&self) -> Vec<u32> {
        std::mem::take(&mut lock(&self.outbox).finished)
    }

    /// The connection is gone: what workers send is dropped from now on.
    pub fn abandon(&self) {
        lock(&self.outbox).abandoned = true;
        self.space.notify_all();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Whether output should wait.
    pub fn is_full(&self) -> bool {
        lock(&self.outbox).bytes.len() >= OUTBOX_FULL
    }

    /// Writes what the socket takes. Returns whether something is left.
    pub fn flush(&self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut outbox = lock(&self.outbox);
        while !outbox.bytes.is_empty() {
            match trialrun_sys::fdpass::send(socket, &outbox.bytes, &[]) {
                Ok(sent) => outbox.bytes.advance(sent),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if outbox.bytes.len() < OUTBOX_FULL {
                        self.space.notify_all();
                    }
                    return Ok(true);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if outbox.bytes.capacity() > OUTBOX_KEPT {
            outbox.bytes = BytesMut::new();
        }
        self.space.notify_all();
        Ok(false)
    }
}

fn encode_event(kind: EventKind) -> Vec<u8> {
    let bytes = Event { kind: Some(kind) }.encode_to_vec();
    debug_assert!(bytes.len() <= MAX_PAYLOAD, "events are made to fit");
    bytes
}

/// Why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// For programs.
    pub kind: FailKind,
    /// The kernel's word; 0 for none.
    pub errno: i32,
    /// For people: names the thing.
    pub message: String,
}

impl Failure {
    /// A failure that the kernel has no part in.
    pub fn new(kind: FailKind, message: impl Into<String>) -> Self {
        Self { kind, errno: 0, message: message.into() }
    }

    /// What the kernel said about `what`, with the kind that follows from the errno.
    pub fn errno(errno: Errno, what: impl AsRef<[u8]>) -> Self {
        let kind = match errno {
            Errno::NOENT => FailKind::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => FailKind::Denied,
            Errno::NOSPC | Errno::DQUOT => FailKind::DiskFull,
            Errno::ISDIR | Errno::NOTDIR => FailKind::WrongType,
            Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE => FailKind::LimitReached,
            _ => FailKind::Other,
        };
        let raw = errno.raw_os_error();
        Self { kind, errno: raw, message: format!("{}: {}", text(what.as_ref()), describe(raw)) }
    }

    /// As [`Failure::errno`], for an error of the standard library.
    pub fn io(error: &io::Error, what: impl AsRef<[u8]>) -> Self {
        match error.raw_os_error() {
            Some(raw) => Self::errno(Errno::from_raw_os_error(raw), what),
            None => Self::new(FailKind::Other, format!("{}: {error}", text(what.as_ref()))),
        }
    }

    /// The same with another kind.
    pub fn with_kind(mut self, kind: FailKind) -> Self {
        self.kind = kind;
        self
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        let mut message = failure.message;
        // Paths and arguments in a message may be long; the frame is not.
        if message.len() > MAX_MESSAGE {
            let cut = (0..=MAX_MESSAGE).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
            message.truncate(cut);
        }
        Self { kind: failure.kind.into(), errno: failure.errno, message }
    }
}

/// The kernel's error text without the number, which travels beside it.
pub fn describe(errno: i32) -> String {
    let full = io::Error::from_raw_os_error(errno).to_string();
    let text = full.split(" (os error").next().unwrap_or_default();
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

/// Bytes as text for a message: what is no UTF-8 or a control character is escaped.
pub fn text(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
        }
        for b in chunk.invalid() {
            out.extend(std::ascii::escape_default(*b).map(char::from));
        }
    }
    out
}

/// Data frames of channel 0 on their way to a worker. Filled by the main loop, emptied by the worker; bounded by the
/// credit that the host was granted.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<InboxState>,
    change: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    pieces: VecDeque<Bytes>,
    ended: bool,
    aborted: bool,
}

impl Inbox {
    /// Bytes from the host.
    pub fn push(&self, piece: Bytes) {
        if !piece.is_empty() {
            lock(&self.state).pieces.push_back(piece);
            self.change.notify_all();
        }
    }

    /// The host sends no more.
    pub fn end(&self) {
        lock(&self.state).ended = true;
        self.change.notify_all();
    }

    /// The connection is gone.
    pub fn abort(&self) {
        lock(&self.state).aborted = true;
        self.change.notify_all();
    }

    /// The next piece; nothing at the end.
    fn pop(&self) -> io::Result<Option<Bytes>> {
        let mut state = lock(&self.state);
        loop {
            if state.aborted {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if let Some(piece) = state.pieces.pop_front() {
                return Ok(Some(piece));
            }
            if state.ended {
                return Ok(None);
            }
            state = self.change.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How many bytes a worker may still send on its stream. Raised by the main loop, drawn by the worker.
#[derive(Debug)]
pub struct Window {
    /// Nothing when the connection is gone.
    left: Mutex<Option<usize>>,
    change: Condvar,
}

impl Default for Window {
    fn default() -> Self {
        Self { left: Mutex::new(Some(INITIAL_WINDOW)), change: Condvar::new() }
    }
}

impl Window {
    /// The host takes so many more.
    pub fn grant(&self, more: usize) {
        let mut left = lock(&self.left);
        *left = left.map(|left| left.saturating_add(more));
        self.change.notify_all();
    }

    /// The connection is gone.
    pub fn abort(&self) {
        *lock(&self.left) = None;
        self.change.notify_all();
    }

    /// Waits until at least one byte may go; takes at most `want`.
    fn draw(&self, want: usize) -> io::Result<usize> {
        let mut left = lock(&self.left);
        loop {
            match left.as_mut() {
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
                Some(0) => left = self.change.wait(left).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    let take = want.min(*left);
                    *left -= take;
                    return Ok(take);
                }
            }
        }
    }
}

/// A worker's end of a stream without passed descriptors.
#[derive(Debug, Clone)]
pub struct Channel {
    /// The way back.
    pub link: Arc<Link>,
    /// Stream id.
    pub stream: u32,
    /// From the host.
    pub inbox: Arc<Inbox>,
    /// Towards the host.
    pub window: Arc<Window>,
    /// What is left of a piece that was read in part.
    pub rest: Bytes,
}

impl io::Read for Channel {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.rest.is_empty() {
            match self.inbox.pop()? {
                Some(piece) => self.rest = piece,
                None => return Ok(0),
            }
        }
        let n = out.len().min(self.rest.len());
        out[..n].copy_from_slice(&self.rest[..n]);
        self.rest.advance(n);
        self.link.send(self.stream, Kind::Credit, &(n as u32).to_le_bytes());
        Ok(n)
    }
}

impl io::Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let n = self.window.draw(bytes.len().min(MAX_PAYLOAD / 2))?;
        self.link.send(self.stream, Kind::Data1, &bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
