//! One sandbox as its user holds it.

use crate::{
    CallError, CallErrorKind, Description, Engine, EngineError, ExecInfo, FileInfo, Following, KeeperClient, Output,
    StartTimings, create::expiry_ms,
};
use std::{
    os::{fd::AsFd, unix::net::UnixStream},
    process::Child,
    time::Duration,
};
use trialrun_driver::Usage;
use trialrun_gateway::ConnectionRecord;
use trialrun_keeper::{
    conn, machine_dir,
    wire::{Call, FileOp, Reply},
};
use trialrun_model::{ExecId, ExecOutcome, ExecSpec, Isolation, SandboxId, Transition};
use trialrun_policy::Policy;

/// A sandbox. Dropping an attached one without [`Self::delete`] ends its machine too: its control stream closes.
pub struct Sandbox {
    engine: Engine,
    /// Its id.
    pub id: SandboxId,
    client: KeeperClient,
    control: Option<(conn::Receiver, conn::Sender)>,
    keeper: Option<Child>,
    isolation: Isolation,
    timings: StartTimings,
}

/// Output kept whole up to a limit per stream.
#[derive(Debug, Clone)]
pub struct Captured {
    /// The end.
    pub outcome: ExecOutcome,
    /// First bytes of standard output.
    pub stdout: Vec<u8>,
    /// First bytes of standard error.
    pub stderr: Vec<u8>,
    /// Bytes seen on standard output.
    pub stdout_seen: u64,
    /// Bytes seen on standard error.
    pub stderr_seen: u64,
}

impl Captured {
    /// Whether a stream had more than was kept.
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.stdout_seen > self.stdout.len() as u64 || self.stderr_seen > self.stderr.len() as u64
    }
}

pub(crate) fn unexpected() -> CallError {
    CallError { kind: CallErrorKind::Internal, message: "the keeper gave an unexpected answer".to_owned() }
}

impl Sandbox {
    pub(crate) fn new(
        engine: Engine,
        id: SandboxId,
        client: KeeperClient,
        control: Option<(conn::Receiver, conn::Sender)>,
        keeper: Option<Child>,
        isolation: Isolation,
        timings: StartTimings,
    ) -> Self {
        Self { engine, id, client, control, keeper, isolation, timings }
    }

    /// Isolation in force, as the driver said at the start.
    #[must_use]
    pub fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    /// Where the start's time went.
    #[must_use]
    pub fn timings(&self) -> StartTimings {
        self.timings
    }

    /// The keeper's calls.
    #[must_use]
    pub fn client(&self) -> &KeeperClient {
        &self.client
    }

    /// Starts a command and follows it.
    ///
    /// # Errors
    /// A lost machine. A command that could not be started is an outcome.
    pub async fn exec(&self, spec: ExecSpec) -> Result<Following, CallError> {
        self.client.exec(spec).await
    }

    /// Runs a command to its end and keeps the first `limit` bytes of each stream.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn capture(&self, spec: ExecSpec, limit: usize) -> Result<Captured, CallError> {
        let mut following = self.exec(spec).await?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let (mut stdout_seen, mut stderr_seen) = (0, 0);
        let keep = |kept: &mut Vec<u8>, seen: &mut u64, bytes: &[u8]| {
            *seen += bytes.len() as u64;
            kept.extend_from_slice(&bytes[..bytes.len().min(limit - kept.len().min(limit))]);
        };
        loop {
            match following.next().await? {
                Output::Stdout(bytes) => keep(&mut stdout, &mut stdout_seen, &bytes),
                Output::Stderr(bytes) => keep(&mut stderr, &mut stderr_seen, &bytes),
                Output::Dropped(bytes) => stdout_seen += bytes,
                Output::Ended(outcome) => return Ok(Captured { outcome, stdout, stderr, stdout_seen, stderr_seen }),
            }
        }
    }

    /// Puts another egress policy in force; when this returns, connections that it denies are cut.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn set_policy(&self, policy: Policy) -> Result<(), CallError> {
        self.client.call(&Call::SetPolicy(policy), &[]).await.map(drop)
    }

    /// The gateway's records after a sequence number, and how many older ones were dropped.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn records(&self, since: u64) -> Result<(Vec<ConnectionRecord>, u64), CallError> {
        match self.client.call(&Call::Records(since), &[]).await? {
            Reply::Records(records, dropped) => Ok((records, dropped)),
            _ => Err(unexpected()),
        }
    }

    /// What it used so far.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn usage(&self) -> Result<Usage, CallError> {
        match self.client.call(&Call::Usage, &[]).await? {
            Reply::Usage(usage) => Ok(usage),
            _ => Err(unexpected()),
        }
    }

    /// Everything about the machine.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn describe(&self) -> Result<Description, CallError> {
        match self.client.call(&Call::Describe, &[]).await? {
            Reply::Description(description) => Ok(*description),
            _ => Err(unexpected()),
        }
    }

    /// Its execs, ended ones included while they are kept.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn execs(&self) -> Result<Vec<ExecInfo>, CallError> {
        match self.client.call(&Call::List, &[]).await? {
            Reply::Execs(execs) => Ok(execs),
            _ => Err(unexpected()),
        }
    }

    /// Kills an exec's whole tree.
    ///
    /// # Errors
    /// An unknown exec or a lost machine.
    pub async fn kill(&self, exec: ExecId) -> Result<(), CallError> {
        self.client.call(&Call::Kill(exec), &[]).await.map(drop)
    }

    /// A file operation without a byte stream.
    ///
    /// # Errors
    /// The guest's refusal or a lost machine.
    pub async fn file(&self, op: FileOp) -> Result<Vec<FileInfo>, CallError> {
        match self.client.call(&Call::File(op), &[]).await? {
            Reply::Files(files) => Ok(files),
            Reply::Done | Reply::Moved { .. } => Ok(Vec::new()),
            _ => Err(unexpected()),
        }
    }

    /// A stream to a port of the machine's loopback.
    ///
    /// # Errors
    /// When nothing listens there, or a lost machine.
    pub async fn tunnel(&self, port: u16) -> Result<UnixStream, CallError> {
        let pair = UnixStream::pair();
        let (ours, theirs) = pair.map_err(|e| CallError { kind: CallErrorKind::Internal, message: e.to_string() })?;
        self.client.call(&Call::Tunnel(port), &[theirs.as_fd()]).await?;
        Ok(ours)
    }

    /// Lets it outlive this process, for at most `lease`.
    ///
    /// # Errors
    /// A lost machine.
    pub async fn keep(mut self, lease: Duration) -> Result<SandboxId, CallError> {
        self.client.call(&Call::Detach(lease), &[]).await?;
        let _ = self.engine.store(|store| store.detach(&self.id, Some(expiry_ms(lease))));
        self.control = None;
        Ok(self.id.clone())
    }

    /// Deletes it. When this returns, nothing of the machine is left; its keeper has nothing to do but give the layers'
    /// file system back to the kernel, and exit.
    ///
    /// # Errors
    /// What could not be removed; recovery tries again later.
    pub async fn delete(mut self) -> Result<(), CallError> {
        let _ = self.engine.store(|store| store.set_state(&self.id, Transition::Delete));
        let result = self.client.call(&Call::Delete, &[]).await;
        self.control = None;
        if let Some(mut keeper) = self.keeper.take() {
            tokio::task::spawn_blocking(move || keeper.wait());
        }
        match result {
            Ok(_) => {
                self.engine.note_gone(&self.id, "deleted");
                Ok(())
            }
            Err(e) if e.kind == CallErrorKind::MachineLost => {
                // Its keeper died before: what it left goes the way of recovery.
                self.engine.recover();
                Ok(())
            }
            Err(e) => Err(e),
        }
    }
}

impl Engine {
    /// A running sandbox by its id or a unique beginning of it.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, id: &str) -> Result<Sandbox, EngineError> {
        let record = self.store(|store| store.find(id)).map_err(|_| EngineError::NotFound(id.to_owned()))?;
        let dir = machine_dir(self.data_dir(), &record.id);
        if !crate::recover::lock_is_held(&dir) {
            return Err(EngineError::NotFound(id.to_owned()));
        }
        let client = KeeperClient::new(dir);
        Ok(Sandbox::new(self.clone(), record.id, client, None, None, Isolation::default(), StartTimings::default()))
    }

    /// All sandboxes that are not gone.
    ///
    /// # Errors
    /// What the store says.
    pub fn list(&self) -> Result<Vec<trialrun_store::SandboxRecord>, EngineError> {
        Ok(self.store(|store| store.list(true))?)
    }
}
