//! The keeper's main loop and its answers to calls.
//!
//! One thread. Each connection is a task; each exec is a task; the machine is shared between them and never borrowed
//! across an await. The loop in [`serve`] ends on the first of: delete asked for, the client of an attached machine
//! gone, the lease over, SIGTERM, the machine dead. Then the machine is destroyed, and only after that are those who
//! asked told.

use crate::{
    conn::{self, Receiver, Sender},
    exec::{self, Exec, SharedMachine},
    guest_link::{Arrival, GuestLink, Lines},
    log::{Channel, Follower, Next},
    wire::{Call, CallError, CallErrorKind, Description, FileInfo, FileOp, Forked, KeeperSpec, Reply},
};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    rc::Rc,
    time::Duration,
};
use tokio::{
    io::unix::AsyncFd,
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    sync::Notify,
    time::Instant,
};
use trialrun_driver::{DiskFork, ForkCost};
use trialrun_gateway::GatewayHandle;
use trialrun_guest_proto::{self as proto, EventKind, Op, frame::Kind};
use trialrun_model::{ExecId, SandboxId};

/// Ended execs that stay listed.
const ENDED_KEPT: usize = 64;
/// How long a part of a list of files may become, well below a frame's limit.
const FILES_PART_BYTES: usize = 200 << 10;

/// A running keeper's state.
pub struct Keeper {
    /// The machine.
    pub machine: SharedMachine,
    /// The agent.
    pub guest: Rc<GuestLink>,
    /// The way out.
    pub gateway: Option<GatewayHandle>,
    /// What it was made from, with what was changed since: limits and environment.
    origin: RefCell<KeeperSpec>,
    execs: RefCell<BTreeMap<u32, Rc<Exec>>>,
    next_exec: Cell<u32>,
    attached: Cell<bool>,
    lease_end: Cell<Option<Instant>>,
    lease_changed: Notify,
    delete: Notify,
    waiting: RefCell<Vec<Sender>>,
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Someone asked.
    Deleted,
    /// The client is gone.
    ClientGone,
    /// The lease is over.
    LeaseOver,
    /// SIGTERM.
    Terminated,
}

impl Keeper {
    /// A keeper of a machine whose agent is ready.
    pub fn new(
        machine: SharedMachine,
        guest: Rc<GuestLink>,
        gateway: Option<GatewayHandle>,
        spec: &KeeperSpec,
    ) -> Rc<Self> {
        Rc::new(Self {
            machine,
            guest,
            gateway,
            origin: RefCell::new(spec.clone()),
            execs: RefCell::default(),
            next_exec: Cell::new(1),
            attached: Cell::new(spec.attached),
            lease_end: Cell::new(spec.lease.map(|l| Instant::now() + l)),
            lease_changed: Notify::new(),
            delete: Notify::new(),
            waiting: RefCell::default(),
        })
    }

    /// Serves calls until the machine is to end.
    pub async fn serve(self: &Rc<Self>, listener: UnixListener, control: Receiver) -> std::io::Result<End> {
        let mut terminate = signal(SignalKind::terminate())?;
        #[expect(deprecated, reason = "an OwnedFd never changes its descriptor; the replacement is unsafe to call")]
        let death = AsyncFd::new(self.machine.borrow().death().try_clone_to_owned()?)?;
        let mut control = Some(control);
        let mut dead = false;
        loop {
            let client_gone = async {
                match &mut control {
                    // Nothing is expected on it but its end.
                    Some(control) => while matches!(control.frame().await, Ok(Some(_))) {},
                    None => std::future::pending().await,
                }
            };
            let lease_over = async {
                match self.lease_end.get() {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                    let keeper = self.clone();
                    tokio::task::spawn_local(async move {
                        if let Ok(stream) = stream.into_std() {
                            let _ = keeper.connection(stream).await;
                        }
                    });
                },
                () = self.delete.notified() => return Ok(End::Deleted),
                () = client_gone => {
                    if self.attached.get() {
                        return Ok(End::ClientGone);
                    }
                    control = None;
                }
                () = lease_over => return Ok(End::LeaseOver),
                () = self.lease_changed.notified() => {}
                _ = terminate.recv() => return Ok(End::Terminated),
                // Stays up after the machine's death, so that its clients get their outcomes and learn why.
                _ = death.readable(), if !dead => dead = true,
            }
        }
    }

    /// Destroys the machine. Called once, last.
    ///
    /// # Errors
    /// The first thing that would not go.
    pub fn destroy(&self) -> Result<(), trialrun_driver::LaunchError> {
        self.machine.borrow_mut().destroy()
    }

    /// Tells those who asked for the end that nothing is left.
    pub async fn tell_deleted(&self, failure: Option<String>) {
        let reply = match failure {
            None => Reply::Done,
            Some(message) => Reply::Error(CallError { kind: CallErrorKind::Internal, message }),
        };
        let waiting = self.waiting.take();
        for sender in waiting {
            let _ = tokio::time::timeout(Duration::from_secs(1), sender.json(Kind::Event, &reply, &[])).await;
        }
    }

    async fn connection(self: Rc<Self>, stream: std::os::unix::net::UnixStream) -> std::io::Result<()> {
        let (mut receiver, sender) = conn::split(stream)?;
        // A client may make several calls in a row on one connection.
        while let Some(frame) = receiver.frame().await? {
            if frame.kind != Kind::Request {
                continue;
            }
            let call: Call = conn::from_json(&frame)?;
            let fd = receiver.take_fd();
            let followed = match call {
                Call::Exec { spec, follow } => {
                    let exec = self.start(spec);
                    exec.started().await;
                    if exec.pid() != 0 {
                        sender.json(Kind::Event, &Reply::Started { exec: exec.id, pid: exec.pid() }, &[]).await?;
                    }
                    if !follow && exec.outcome().is_none() {
                        continue;
                    }
                    Ok((exec, 0))
                }
                Call::Attach { exec, cursor } => self.exec(exec).map(|exec| (exec, cursor)),
                Call::Delete => {
                    self.waiting.borrow_mut().push(sender.clone());
                    self.delete.notify_one();
                    continue;
                }
                call => {
                    let reply = self.answer(call, fd).await.unwrap_or_else(Reply::Error);
                    send_reply(&sender, reply).await?;
                    continue;
                }
            };
            match followed {
                Ok((exec, cursor)) => follow(&exec, cursor, &mut receiver, &sender).await?,
                Err(e) => sender.json(Kind::Event, &Reply::Error(e), &[]).await?,
            }
        }
        Ok(())
    }

    fn start(self: &Rc<Self>, spec: trialrun_model::ExecSpec) -> Rc<Exec> {
        let number = self.next_exec.get();
        self.next_exec.set(number + 1);
        let exec = Exec::new(ExecId(number), spec);
        self.forget_old();
        self.execs.borrow_mut().insert(number, exec.clone());
        tokio::task::spawn_local(exec::run(exec.clone(), self.machine.clone(), self.guest.clone()));
        exec
    }

    fn forget_old(&self) {
        let mut execs = self.execs.borrow_mut();
        let over: Vec<u32> = execs.iter().filter(|(_, e)| e.outcome().is_some()).map(|(n, _)| *n).collect();
        for number in over.iter().take(over.len().saturating_sub(ENDED_KEPT)) {
            execs.remove(number);
        }
    }

    fn exec(&self, id: ExecId) -> Result<Rc<Exec>, CallError> {
        self.execs.borrow().get(&id.0).cloned().ok_or_else(|| CallError {
            kind: CallErrorKind::NotFound,
            message: format!("no exec {id} (the last {ENDED_KEPT} that ended are kept)"),
        })
    }

    async fn answer(self: &Rc<Self>, call: Call, fd: Option<OwnedFd>) -> Result<Reply, CallError> {
        match call {
            Call::Exec { .. } | Call::Attach { .. } | Call::Delete => Err(internal("handled elsewhere")),
            Call::Signal { exec, signal, group } => {
                let exec = self.exec(exec)?;
                let op = Op::Signal(proto::Signal { stream: exec.stream.get(), signal, group });
                self.simple(op, &[]).await
            }
            Call::Kill(exec) => {
                let exec = self.exec(exec)?;
                if exec.outcome().is_some() {
                    // What a spawned leader left behind still lives in its slot.
                    let _ = self.machine.borrow_mut().kill_slot(exec.id);
                }
                exec.ask_kill();
                exec.ended().await;
                Ok(Reply::Done)
            }
            Call::Resize(exec, size) => {
                let exec = self.exec(exec)?;
                let (rows, cols) = (u32::from(size.rows), u32::from(size.cols));
                self.simple(Op::Resize(proto::Resize { stream: exec.stream.get(), rows, cols }), &[]).await
            }
            Call::Input { exec, bytes, end } => {
                let exec = self.exec(exec)?;
                if !bytes.is_empty() {
                    exec.write(&bytes).await?;
                }
                if end {
                    exec.close_input().await;
                }
                Ok(Reply::Done)
            }
            Call::List => Ok(Reply::Execs(self.execs.borrow().values().map(|e| e.info()).collect())),
            Call::File(op) => self.file(op, fd).await,
            Call::Tunnel(port) => {
                let fd = fd.ok_or_else(|| internal("a tunnel needs a descriptor"))?;
                let mut lines =
                    self.guest.request(Op::Tunnel(proto::Tunnel { port: u32::from(port) }), &[fd.as_fd()]).await?;
                // Started says that it is connected; Done comes when both directions have ended.
                let _ = lines.event().await?;
                tokio::task::spawn_local(async move {
                    while lines.event().await.is_ok_and(|e| !matches!(e, EventKind::Done(_))) {}
                });
                Ok(Reply::Done)
            }
            Call::SetEnv(env) => {
                let entry = |(name, value): &(String, String)| proto::EnvEntry {
                    name: name.clone().into(),
                    value: value.clone().into(),
                };
                let set = proto::SetEnv { env: env.iter().map(entry).collect() };
                let reply = self.simple(Op::SetEnv(set), &[]).await?;
                self.origin.borrow_mut().env.extend(env);
                Ok(reply)
            }
            Call::SetPolicy(policy) => match &self.gateway {
                Some(gateway) => {
                    gateway.set_policy(policy);
                    Ok(Reply::Done)
                }
                None => Err(internal("this machine has no gateway")),
            },
            Call::Records(since) => Ok(match &self.gateway {
                Some(gateway) => {
                    let records = gateway.records(since);
                    Reply::Records(records, gateway.records_dropped())
                }
                None => Reply::Records(Vec::new(), 0),
            }),
            Call::Usage => Ok(Reply::Usage(self.machine.borrow().usage())),
            Call::Describe => self.describe().await,
            Call::SetLimits(limits) => {
                limits.check().map_err(|e| CallError { kind: CallErrorKind::Invalid, message: e.to_string() })?;
                let set = self.machine.borrow_mut().set_limits(&limits);
                set.map_err(|e| CallError { kind: CallErrorKind::Invalid, message: format!("set the limits: {e}") })?;
                self.origin.borrow_mut().limits = limits;
                Ok(Reply::Done)
            }
            Call::Fork(child) => self.fork(&child).await,
            Call::Commit(into) => {
                let commit = self.machine.borrow().commit_disk(into);
                Ok(Reply::Committed(copied(commit, "commit").await?))
            }
            Call::Detach(lease) => {
                self.attached.set(false);
                self.lease_end.set(Some(Instant::now() + lease));
                self.lease_changed.notify_one();
                Ok(Reply::Done)
            }
        }
    }

    async fn simple(&self, op: Op, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<Reply, CallError> {
        let mut lines = self.guest.request(op, fds).await?;
        finish(&mut lines).await
    }

    async fn file(&self, op: FileOp, fd: Option<OwnedFd>) -> Result<Reply, CallError> {
        let needs_fd =
            matches!(op, FileOp::Read { .. } | FileOp::Write { .. } | FileOp::TarUp { .. } | FileOp::TarDown { .. });
        if needs_fd != fd.is_some() {
            return Err(internal("the call and its descriptor do not fit"));
        }
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        let mut lines = self.guest.request(guest_op(op), &fds).await?;
        drop(fds);
        // Ours must not keep the stream open once the agent has its own.
        drop(fd);
        // What is written may be large: the room for it is made while it comes, as under an exec.
        let mut done = std::pin::pin!(finish(&mut lines));
        let mut tend = tokio::time::interval_at(Instant::now() + exec::TEND_EVERY, exec::TEND_EVERY);
        loop {
            tokio::select! {
                reply = &mut done => return reply,
                _ = tend.tick() => self.machine.borrow_mut().tend(),
            }
        }
    }

    async fn fork(&self, child: &SandboxId) -> Result<Reply, CallError> {
        let fork = self.machine.borrow().fork_disk(child);
        let cost = copied(fork, "fork").await?;
        let origin = self.origin.borrow().clone();
        Ok(Reply::Forked(Box::new(Forked {
            limits: origin.limits,
            hostname: origin.hostname,
            rootfs: origin.rootfs,
            env: origin.env,
            user: origin.user,
            cwd: origin.cwd,
            policy: self.gateway.as_ref().map_or_else(trialrun_policy::Policy::off, GatewayHandle::policy),
            cost,
        })))
    }

    async fn describe(&self) -> Result<Reply, CallError> {
        let mut lines = self.guest.request(Op::Info(proto::Info {}), &[]).await?;
        let EventKind::Info(info) = lines.event().await? else { return Err(internal("an unexpected answer")) };
        Ok(Reply::Description(Box::new(Description {
            isolation: self.machine.borrow().isolation().clone(),
            limits: self.origin.borrow().limits,
            policy: self.gateway.as_ref().map_or_else(trialrun_policy::Policy::off, GatewayHandle::policy),
            keeper_private_bytes: private_bytes(),
            agent_private_bytes: info.agent_private_bytes,
            kernel: info.kernel,
            os: info.os,
        })))
    }
}

/// Sends a reply; one that is too long for a frame goes in parts.
async fn send_reply(sender: &Sender, reply: Reply) -> std::io::Result<()> {
    match reply {
        Reply::Files(files) => {
            // A name's byte takes up to six in JSON, and a link's target has up to 4096 of them.
            let weight = |f: &FileInfo| 256 + 6 * (f.name.len() + f.link.as_ref().map_or(0, Vec::len));
            let mut part = Vec::new();
            let mut room = FILES_PART_BYTES;
            for file in files {
                if weight(&file) > room && !part.is_empty() {
                    sender.json(Kind::Event, &Reply::Files(std::mem::take(&mut part)), &[]).await?;
                    room = FILES_PART_BYTES;
                }
                room = room.saturating_sub(weight(&file));
                part.push(file);
            }
            if !part.is_empty() {
                sender.json(Kind::Event, &Reply::Files(part), &[]).await?;
            }
            sender.json(Kind::Event, &Reply::Done, &[]).await
        }
        Reply::Records(records, dropped) => {
            for part in records.chunks(64) {
                sender.json(Kind::Event, &Reply::Records(part.to_vec(), dropped), &[]).await?;
            }
            sender.json(Kind::Event, &Reply::Done, &[]).await
        }
        reply => sender.json(Kind::Event, &reply, &[]).await,
    }
}

/// Does a driver's copy of a disk elsewhere: the machine's clients are served, and its deadlines kept, while that waits.
async fn copied(copy: Option<DiskFork>, what: &str) -> Result<ForkCost, CallError> {
    let copy = copy.ok_or_else(|| CallError {
        kind: CallErrorKind::Invalid,
        message: format!("this machine's driver can't {what} disks"),
    })?;
    let done = tokio::task::spawn_blocking(copy).await.map_err(|e| internal(&format!("{what} the disk: {e}")))?;
    done.map_err(|e| CallError {
        kind: match e.cause.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => CallErrorKind::DiskFull,
            _ => CallErrorKind::Internal,
        },
        message: format!("can't {}: {}", e.step, e.cause),
    })
}

fn internal(message: &str) -> CallError {
    CallError { kind: CallErrorKind::Internal, message: message.to_owned() }
}

fn guest_op(op: FileOp) -> Op {
    match op {
        FileOp::Stat(path) => Op::Stat(proto::Path { path }),
        FileOp::List(path) => Op::List(proto::Path { path }),
        FileOp::Read { path, offset, limit } => Op::Read(proto::Read { path, offset, limit }),
        FileOp::Write { path, mode, owner, size } => Op::Write(proto::Write { path, mode, owner, size }),
        FileOp::Rename(from, to) => Op::Rename(proto::Rename { from, to }),
        FileOp::Remove { path, recursive, missing_ok } => Op::Remove(proto::Remove { path, recursive, missing_ok }),
        FileOp::Mkdir { path, mode, owner } => Op::Mkdir(proto::Mkdir { path, mode, owner }),
        FileOp::TarUp { dest, owner, compression } => Op::TarUp(proto::TarUp { dest, owner, compression }),
        FileOp::TarDown { path, compression } => Op::TarDown(proto::TarDown { path, compression }),
        FileOp::Glob { dir, patterns } => Op::Glob(proto::Glob { dir, patterns }),
    }
}

fn file_info(stat: proto::FileStat) -> FileInfo {
    FileInfo {
        name: stat.name,
        mode: stat.mode,
        size: stat.size,
        mtime_ns: stat.mtime_ns,
        uid: stat.uid,
        gid: stat.gid,
        link: stat.link,
    }
}

/// Collects a request's events until it is done.
async fn finish(lines: &mut Lines) -> Result<Reply, CallError> {
    let mut files = Vec::new();
    loop {
        match lines.event().await? {
            EventKind::Stat(stat) => return Ok(Reply::Files(vec![file_info(stat)])),
            EventKind::Entries(entries) => files.extend(entries.entries.into_iter().map(file_info)),
            // Only listings and searches have entries; a search counts them as well.
            EventKind::Done(_) if !files.is_empty() => return Ok(Reply::Files(files)),
            EventKind::Done(done) => {
                return Ok(Reply::Moved {
                    bytes: done.bytes,
                    files: done.files,
                    skipped: done.skipped,
                    skipped_total: done.skipped_total,
                });
            }
            _ => {}
        }
    }
}

/// Sends an exec's output from a cursor, then its outcome. Frames that come meanwhile are its stdin.
async fn follow(exec: &Rc<Exec>, cursor: u64, receiver: &mut Receiver, sender: &Sender) -> std::io::Result<()> {
    let follower = exec.log.follow(cursor);
    let output = send_output(exec, &follower, sender);
    let input = async {
        loop {
            match receiver.frame().await {
                Ok(Some(frame)) if frame.kind == Kind::Data0 => {
                    // A process that no longer reads is not the client's error; its outcome tells.
                    let _ = exec.write(&frame.payload).await;
                }
                Ok(Some(frame)) if frame.kind == Kind::End0 => exec.close_input().await,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
    };
    tokio::select! {
        result = output => result,
        // The client is gone: the command runs on.
        () = input => Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)),
    }
}

async fn send_output(exec: &Exec, follower: &Follower<'_>, sender: &Sender) -> std::io::Result<()> {
    loop {
        // The outcome does not wait for bytes that a process left behind may still write.
        let next = tokio::select! {
            biased;
            next = follower.next() => next,
            _ = exec.ended() => Next::End,
        };
        match next {
            Next::Chunk(channel, bytes) => {
                let kind = if channel == Channel::Stdout { Kind::Data1 } else { Kind::Data2 };
                sender.data(0, kind, &bytes).await?;
            }
            Next::Dropped(bytes) => sender.json(Kind::Event, &Reply::Dropped(bytes), &[]).await?,
            Next::End => return sender.json(Kind::Event, &Reply::Ended(exec.ended().await), &[]).await,
        }
    }
}

/// Waits for the agent's first word.
///
/// # Errors
/// A word for people.
pub async fn await_ready(lines: &mut Lines) -> Result<(), String> {
    let wait = async {
        loop {
            match lines.next().await {
                Ok(Arrival::Event(EventKind::Ready(ready))) if ready.generation == proto::GENERATION => return Ok(()),
                Ok(Arrival::Event(EventKind::Ready(ready))) => {
                    return Err(format!(
                        "the guest agent speaks generation {}, not {}",
                        ready.generation,
                        proto::GENERATION
                    ));
                }
                Ok(_) => {}
                Err(_) => return Err("the guest agent ended before its first word".to_owned()),
            }
        }
    };
    let patience = Duration::from_secs(20);
    tokio::time::timeout(patience, wait)
        .await
        .unwrap_or_else(|_| Err(format!("the guest agent said nothing for {patience:?}")))
}

/// This process's private memory in bytes (`Private_*` of smaps_rollup, proc(5)).
fn private_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib: u64 = text
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    kib * 1024
}

/// Binds the keeper's socket in its directory, whatever the length of its path (unix(7) allows 107 bytes).
///
/// # Errors
/// What the kernel says.
pub fn bind(dir: &std::path::Path) -> std::io::Result<std::os::unix::net::UnixListener> {
    let handle = std::fs::File::open(dir)?;
    std::os::unix::net::UnixListener::bind(format!("/proc/self/fd/{}/{}", handle.as_raw_fd(), crate::SOCKET_NAME))
}
