//! One ordered output log per exec, with a cursor.
//!
//! The cursor counts bytes of both streams in the order in which they were read. While somebody follows, the reader of
//! the pipes waits when the follower is a window behind, so a followed exec gets back-pressure. Without a follower the
//! log is a ring: its oldest bytes are dropped, and who asks for them is told how many.

use std::{cell::RefCell, collections::VecDeque};
use tokio::sync::Notify;

/// Bytes kept of an exec that nobody follows, and the most that a follower can be behind.
pub const RING_BYTES: usize = 1 << 20;

/// Which stream a chunk came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// Standard output (and a terminal's only stream).
    Stdout,
    /// Standard error.
    Stderr,
}

#[derive(Debug, Default)]
struct State {
    chunks: VecDeque<(Channel, Vec<u8>)>,
    start: u64,
    end: u64,
    dropped: u64,
    followers: Vec<(u64, u64)>,
    next_follower: u64,
    closed: bool,
}

/// The log. Lives in one thread: filled by the exec's task, read by its followers' tasks.
#[derive(Debug, Default)]
pub struct OutputLog {
    state: RefCell<State>,
    /// Woken when bytes or the end arrive.
    grown: Notify,
    /// Woken when a follower moves on or leaves.
    drained: Notify,
}

/// What a follower gets next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Bytes of one stream.
    Chunk(Channel, Vec<u8>),
    /// So many bytes at the cursor are no longer kept.
    Dropped(u64),
    /// The log is complete and was read to its end.
    End,
}

/// Somebody who reads the log. Dropping it gives up the claim on unread bytes.
pub struct Follower<'a> {
    log: &'a OutputLog,
    id: u64,
}

impl OutputLog {
    /// Appends what was read from a pipe; waits while a follower is a whole window behind.
    pub async fn push(&self, channel: Channel, bytes: &[u8]) {
        loop {
            let notified = self.drained.notified();
            {
                let state = self.state.borrow();
                let slowest = state.followers.iter().map(|(_, cursor)| *cursor).min();
                if slowest.is_none_or(|cursor| state.end - cursor.min(state.end) < RING_BYTES as u64) {
                    break;
                }
            }
            notified.await;
        }
        self.append(channel, bytes);
    }

    fn append(&self, channel: Channel, bytes: &[u8]) {
        let mut state = self.state.borrow_mut();
        state.end += bytes.len() as u64;
        match state.chunks.back_mut() {
            // Small writes are merged, so that a million one-byte chunks do not cost a million allocations.
            Some((last, chunk)) if *last == channel && chunk.len() + bytes.len() <= 16 << 10 => {
                chunk.extend_from_slice(bytes)
            }
            _ => state.chunks.push_back((channel, bytes.to_vec())),
        }
        // What a follower has not seen is never dropped; `push` bounds how much that is.
        let keep_from = state.followers.iter().map(|(_, cursor)| *cursor).min().unwrap_or(u64::MAX);
        while state.end - state.start > RING_BYTES as u64 {
            let Some((_, chunk)) = state.chunks.front() else { break };
            let len = chunk.len() as u64;
            if state.start + len > keep_from || state.end - state.start - len < RING_BYTES as u64 / 2 {
                break;
            }
            state.chunks.pop_front();
            state.start += len;
            state.dropped += len;
        }
        drop(state);
        self.grown.notify_waiters();
    }

    /// No more bytes will come.
    pub fn close(&self) {
        self.state.borrow_mut().closed = true;
        self.grown.notify_waiters();
    }

    /// Bytes seen so far, and bytes dropped.
    pub fn totals(&self) -> (u64, u64) {
        let state = self.state.borrow();
        (state.end, state.dropped)
    }

    /// Whether a follower is so far behind that `push` waits.
    pub fn held(&self) -> bool {
        let state = self.state.borrow();
        state.followers.iter().any(|(_, cursor)| state.end - cursor.min(&state.end) >= RING_BYTES as u64)
    }

    /// Starts following at `cursor`.
    pub fn follow(&self, cursor: u64) -> Follower<'_> {
        let mut state = self.state.borrow_mut();
        let id = state.next_follower;
        state.next_follower += 1;
        let cursor = cursor.min(state.end);
        state.followers.push((id, cursor));
        drop(state);
        Follower { log: self, id }
    }
}

impl Follower<'_> {
    /// The next piece, waiting for it. Cancel-safe: a piece counts as read only when it is returned.
    pub async fn next(&self) -> Next {
        loop {
            let notified = self.log.grown.notified();
            if let Some(next) = self.take() {
                self.log.drained.notify_waiters();
                return next;
            }
            notified.await;
        }
    }

    fn take(&self) -> Option<Next> {
        let mut guard = self.log.state.borrow_mut();
        let state = &mut *guard;
        let cursor = &mut state.followers.iter_mut().find(|(id, _)| *id == self.id)?.1;
        if *cursor < state.start {
            let lost = state.start - *cursor;
            *cursor = state.start;
            return Some(Next::Dropped(lost));
        }
        let mut at = state.start;
        for (channel, chunk) in &state.chunks {
            let end = at + chunk.len() as u64;
            if *cursor < end {
                let piece = chunk[(*cursor - at) as usize..].to_vec();
                *cursor = end;
                return Some(Next::Chunk(*channel, piece));
            }
            at = end;
        }
        state.closed.then_some(Next::End)
    }
}

impl Drop for Follower<'_> {
    fn drop(&mut self) {
        self.log.state.borrow_mut().followers.retain(|(id, _)| *id != self.id);
        self.log.drained.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn a_late_follower_gets_everything_in_order_and_the_end() {
        block_on(async {
            let log = OutputLog::default();
            log.push(Channel::Stdout, b"a").await;
            log.push(Channel::Stderr, b"b").await;
            log.push(Channel::Stdout, b"c").await;
            log.close();
            let follower = log.follow(1);
            assert_eq!(follower.next().await, Next::Chunk(Channel::Stderr, b"b".to_vec()));
            assert_eq!(follower.next().await, Next::Chunk(Channel::Stdout, b"c".to_vec()));
            assert_eq!(follower.next().await, Next::End);
        });
    }

    #[test]
    fn without_a_follower_the_oldest_bytes_go_and_are_counted() {
        block_on(async {
            let log = OutputLog::default();
            let total = 4 * RING_BYTES as u64;
            for _ in 0..total / 65_536 {
                log.push(Channel::Stdout, &[0; 65_536]).await;
            }
            log.close();
            let follower = log.follow(0);
            let Next::Dropped(lost) = follower.next().await else { panic!("nothing dropped") };
            let mut kept = 0;
            while let Next::Chunk(_, bytes) = follower.next().await {
                kept += bytes.len() as u64;
            }
            assert_eq!(lost + kept, total);
            assert!(kept <= RING_BYTES as u64 + 65_536, "{kept}");
            assert_eq!(log.totals(), (total, lost));
        });
    }

    #[test]
    fn a_slow_follower_holds_the_writer_and_loses_nothing() {
        block_on(async {
            let log = OutputLog::default();
            let follower = log.follow(0);
            let total = 6 * RING_BYTES;
            let write = async {
                for _ in 0..total / 4096 {
                    log.push(Channel::Stdout, &[1; 4096]).await;
                }
                log.close();
            };
            let read = async {
                let mut seen = 0;
                loop {
                    tokio::task::yield_now().await;
                    match follower.next().await {
                        Next::Chunk(_, bytes) => seen += bytes.len(),
                        Next::Dropped(n) => panic!("dropped {n}"),
                        Next::End => return seen,
                    }
                }
            };
            let ((), seen) = tokio::join!(write, read);
            assert_eq!(seen, total);
        });
    }
}
