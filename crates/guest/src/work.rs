//! Worker threads: one per file operation, short-lived, with a small stack; and the two ends that bytes move between.

use crate::{
    agent::Machine,
    files, glob,
    link::{Channel, Failure, Inbox, Link, Window},
    pack, tunnel, unpack,
};
use bytes::Bytes;
use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    sync::Arc,
};
use trialrun_guest_proto::{Done, FailKind, Op};

/// Stack of a worker. Deep trees are walked on the heap, but the gzip encoder is built on the stack and needs more than
/// 256 KiB in a debug build. Only what is touched takes memory.
const STACK: usize = 1 << 20;
/// Capacity asked of a passed pipe; a hint, and what an unprivileged process may have.
const PIPE: usize = 1 << 20;

/// The main loop's end of a worker.
#[derive(Debug)]
pub struct Work {
    /// Bytes from the host.
    pub inbox: Arc<Inbox>,
    /// Bytes towards the host.
    pub window: Arc<Window>,
}

/// Starts the operation. Its last event is `Done` or `Failed`.
pub fn start(machine: Arc<Machine>, link: Arc<Link>, stream: u32, op: Op, fds: Vec<OwnedFd>) -> Result<Work, Failure> {
    let work = Work { inbox: Arc::default(), window: Arc::default() };
    let channel =
        Channel { link, stream, inbox: Arc::clone(&work.inbox), window: Arc::clone(&work.window), rest: Bytes::new() };
    let body = move || {
        let link = Arc::clone(&channel.link);
        let run = std::panic::AssertUnwindSafe(|| perform(&machine, channel, op, fds));
        let result = std::panic::catch_unwind(run)
            .unwrap_or_else(|_| Err(Failure::new(FailKind::Other, "the guest agent broke over this operation")));
        trialrun_sys::spawn::trim_heap();
        link.finish(stream, result);
    };
    std::thread::Builder::new().stack_size(STACK).spawn(body).map_err(|e| Failure::io(&e, "starting a worker"))?;
    Ok(work)
}

fn perform(machine: &Machine, channel: Channel, op: Op, fds: Vec<OwnedFd>) -> Result<Done, Failure> {
    let mut fds = fds.into_iter();
    let passed = fds.next();
    let moves_bytes = matches!(op, Op::Read(_) | Op::Write(_) | Op::TarUp(_) | Op::TarDown(_) | Op::Tunnel(_));
    if fds.next().is_some() || (passed.is_some() && !moves_bytes) {
        return Err(Failure::new(FailKind::BadRequest, "too many descriptors for this operation"));
    }
    match op {
        Op::Stat(op) => files::stat(machine, &channel, &op),
        Op::List(op) => files::list(machine, &channel, &op),
        Op::Read(op) => files::read(machine, End::new(passed, channel), &op),
        Op::Write(op) => files::write(machine, End::new(passed, channel), &op),
        Op::Rename(op) => files::rename(machine, &op),
        Op::Remove(op) => files::remove(machine, &op),
        Op::Mkdir(op) => files::mkdir(machine, &op),
        Op::TarUp(op) => unpack::unpack(machine, End::new(passed, channel), &op),
        Op::TarDown(op) => pack::pack(machine, End::new(passed, channel), &op),
        Op::Tunnel(op) => tunnel::tunnel(passed, channel, &op),
        Op::Glob(op) => glob::glob(machine, &channel, &op),
        Op::Exec(_) | Op::Signal(_) | Op::Info(_) | Op::Resize(_) | Op::SetEnv(_) => {
            Err(Failure::new(FailKind::Other, "the main loop's own operation reached a worker"))
        }
    }
}

/// The host's end of a transfer: a passed descriptor, or frames.
#[derive(Debug)]
pub enum End {
    /// Blocking.
    Passed(File),
    /// With credits.
    Frames(Channel),
}

impl End {
    fn new(passed: Option<OwnedFd>, channel: Channel) -> Self {
        let Some(fd) = passed else { return Self::Frames(channel) };
        // Errors leave a pipe as it is (or mean that it is none); reading and writing will tell.
        let _ = rustix::io::ioctl_fionbio(&fd, false);
        let _ = rustix::pipe::fcntl_setpipe_size(&fd, PIPE);
        Self::Passed(File::from(fd))
    }
}

impl Read for End {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Passed(file) => file.read(out),
            Self::Frames(channel) => channel.read(out),
        }
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Passed(file) => file.write(bytes),
            Self::Frames(channel) => channel.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
