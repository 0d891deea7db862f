//! The engine's side of a keeper's socket.

use crate::{
    conn::{self, Receiver, Sender},
    wire::{Call, CallError, CallErrorKind, Reply},
};
use bytes::Bytes;
use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
};
use trialrun_guest_proto::frame::Kind;
use trialrun_model::{ExecId, ExecOutcome, ExecSpec};

/// Calls a keeper. Cheap to clone; each call has its own connection.
#[derive(Debug, Clone)]
pub struct KeeperClient {
    dir: PathBuf,
}

/// An exec that is followed.
#[derive(Debug)]
pub struct Following {
    receiver: Receiver,
    sender: Sender,
    /// Its id.
    pub exec: ExecId,
    /// Its pid inside; 0 when it never started or was followed later.
    pub pid: u32,
    early: Option<ExecOutcome>,
}

/// What a followed exec gives.
#[derive(Debug)]
pub enum Output {
    /// Bytes of standard output.
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// So many bytes were no longer kept.
    Dropped(u64),
    /// The end.
    Ended(ExecOutcome),
}

/// Writes to a followed exec's stdin.
#[derive(Debug, Clone)]
pub struct Stdin {
    sender: Sender,
}

fn lost(e: &io::Error) -> CallError {
    if e.kind() == io::ErrorKind::InvalidInput {
        // Ours to send, and not sent.
        return CallError { kind: CallErrorKind::Invalid, message: e.to_string() };
    }
    CallError { kind: CallErrorKind::MachineLost, message: format!("the machine's keeper is gone: {e}") }
}

fn unexpected() -> CallError {
    CallError { kind: CallErrorKind::Internal, message: "the keeper gave an unexpected answer".to_owned() }
}

impl KeeperClient {
    /// A client of the keeper of the machine with this directory.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn connect(&self) -> Result<(Receiver, Sender), CallError> {
        let connect = || {
            let handle = std::fs::File::open(&self.dir)?;
            // By the directory's descriptor: a unix socket's address holds 107 bytes.
            let stream = UnixStream::connect(format!("/proc/self/fd/{}/{}", handle.as_raw_fd(), crate::SOCKET_NAME))?;
            conn::split(stream)
        };
        connect().map_err(|e| lost(&e))
    }

    /// Makes a call and gives its answer; the parts of a long one are put together.
    ///
    /// # Errors
    /// The keeper's refusal, or a lost keeper.
    pub async fn call(&self, call: &Call, fds: &[BorrowedFd<'_>]) -> Result<Reply, CallError> {
        let (mut receiver, sender) = self.connect()?;
        sender.json(Kind::Request, call, fds).await.map_err(|e| lost(&e))?;
        let mut whole: Option<Reply> = None;
        loop {
            let reply: Reply = receiver.json().await.map_err(|e| lost(&e))?;
            match (whole.take(), reply) {
                (_, Reply::Error(e)) => return Err(e),
                (Some(parts), Reply::Done) => return Ok(parts),
                (None, Reply::Done)
                    if matches!(call, Call::File(crate::wire::FileOp::List(_) | crate::wire::FileOp::Glob { .. })) =>
                {
                    return Ok(Reply::Files(Vec::new()));
                }
                (None, Reply::Done) if matches!(call, Call::Records(_)) => return Ok(Reply::Records(Vec::new(), 0)),
                (None, part @ (Reply::Files(_) | Reply::Records(..))) => whole = Some(part),
                (Some(Reply::Files(mut files)), Reply::Files(more)) => {
                    files.extend(more);
                    whole = Some(Reply::Files(files));
                }
                (Some(Reply::Records(mut records, _)), Reply::Records(more, dropped)) => {
                    records.extend(more);
                    whole = Some(Reply::Records(records, dropped));
                }
                (_, reply) => return Ok(reply),
            }
        }
    }

    /// Starts a command and follows it.
    ///
    /// # Errors
    /// A lost keeper; a refused command is an outcome.
    pub async fn exec(&self, spec: ExecSpec) -> Result<Following, CallError> {
        let (mut receiver, sender) = self.connect()?;
        sender.json(Kind::Request, &Call::Exec { spec, follow: true }, &[]).await.map_err(|e| lost(&e))?;
        let (exec, pid, early) = match receiver.json().await.map_err(|e| lost(&e))? {
            Reply::Started { exec, pid } => (exec, pid, None),
            Reply::Ended(outcome) => (ExecId(0), 0, Some(outcome)),
            Reply::Error(e) => return Err(e),
            _ => return Err(unexpected()),
        };
        Ok(Following { receiver, sender, exec, pid, early })
    }

    /// Starts a command that nobody follows.
    ///
    /// # Errors
    /// A lost keeper; the outcome of a command that could not be started is in the error's place.
    pub async fn spawn(&self, spec: ExecSpec) -> Result<Result<(ExecId, u32), ExecOutcome>, CallError> {
        match self.call(&Call::Exec { spec, follow: false }, &[]).await? {
            Reply::Started { exec, pid } => Ok(Ok((exec, pid))),
            Reply::Ended(outcome) => Ok(Err(outcome)),
            _ => Err(unexpected()),
        }
    }

    /// Follows an exec from a cursor.
    ///
    /// # Errors
    /// A lost keeper. An unknown exec is told by [`Following::next`].
    pub async fn attach(&self, exec: ExecId, cursor: u64) -> Result<Following, CallError> {
        let (receiver, sender) = self.connect()?;
        sender.json(Kind::Request, &Call::Attach { exec, cursor }, &[]).await.map_err(|e| lost(&e))?;
        Ok(Following { receiver, sender, exec, pid: 0, early: None })
    }

    /// The machine's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Following {
    /// The next piece; after [`Output::Ended`] there is none. Cancel-safe.
    ///
    /// # Errors
    /// A lost keeper or an unknown exec.
    pub async fn next(&mut self) -> Result<Output, CallError> {
        if let Some(outcome) = self.early.take() {
            return Ok(Output::Ended(outcome));
        }
        let frame = self
            .receiver
            .frame()
            .await
            .and_then(|f| f.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof)))
            .map_err(|e| lost(&e))?;
        match frame.kind {
            Kind::Data1 => Ok(Output::Stdout(frame.payload)),
            Kind::Data2 => Ok(Output::Stderr(frame.payload)),
            Kind::Event => match conn::from_json(&frame).map_err(|e| lost(&e))? {
                Reply::Dropped(bytes) => Ok(Output::Dropped(bytes)),
                Reply::Ended(outcome) => Ok(Output::Ended(outcome)),
                Reply::Error(e) => Err(e),
                _ => Err(unexpected()),
            },
            _ => Err(unexpected()),
        }
    }

    /// A writer for its stdin.
    #[must_use]
    pub fn stdin(&self) -> Stdin {
        Stdin { sender: self.sender.clone() }
    }
}

impl Stdin {
    /// Writes; what the process does not read is dropped at its end.
    ///
    /// # Errors
    /// A lost keeper.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.sender.data(0, Kind::Data0, bytes).await
    }

    /// Closes it.
    ///
    /// # Errors
    /// A lost keeper.
    pub async fn close(&self) -> io::Result<()> {
        self.sender.frame(0, Kind::End0, &[], &[]).await
    }
}
