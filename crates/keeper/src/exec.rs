//! One exec, from request to outcome.
//!
//! ```text
//! slot ─> request to the agent ─> Started ─> pipes drained into the log ─┬─ leader exited ─> drain ≤ 200 ms ─> kill the rest ─> outcome
//!                └ Failed ─> refused                                    ├─ deadline ─> kill the tree, timed out
//!                                                                       ├─ kill asked for ─> killed
//!                                                                       └─ machine gone ─> machine lost
//! ```
//! The deadline is the keeper's own clock; what the agent says of the leader's exit is evidence, not authority.

use crate::{
    guest_link::{Arrival, GuestLink, Inlet, Lines, WINDOW},
    log::{Channel, OutputLog},
    wire::{CallError, CallErrorKind, ExecInfo},
};
use rustix::{
    fs::{Mode, OFlags},
    pipe::PipeFlags,
};
use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{io::AsyncReadExt, net::unix::pipe, sync::Notify, time::Instant};
use trialrun_driver::Machine;
use trialrun_guest_proto::{self as proto, EventKind, FailKind, Op};
use trialrun_model::{
    Command, Ended, ExecId, ExecKind, ExecOutcome, ExecSpec, ExitStatus, OutputTotals, Refusal, RefusalKind,
};

/// How long output is still read after the leader's exit, while something else holds the pipes open.
const DRAIN: Duration = Duration::from_millis(200);
/// How often the machine is tended while an exec runs or files are moved.
pub const TEND_EVERY: Duration = Duration::from_millis(100);
/// Buffer of one pipe reader.
const READ_BYTES: usize = 64 << 10;

/// The machine, shared by the keeper's tasks.
pub type SharedMachine = Rc<RefCell<Box<dyn Machine>>>;

/// One exec as its keeper knows it.
pub struct Exec {
    /// Id.
    pub id: ExecId,
    /// What was asked.
    pub spec: ExecSpec,
    /// Output.
    pub log: OutputLog,
    /// Agent's stream; 0 until the request is sent.
    pub stream: Cell<u32>,
    pid: Cell<u32>,
    started_at: SystemTime,
    outcome: RefCell<Option<ExecOutcome>>,
    changed: Notify,
    kill: Notify,
    kill_asked: Cell<bool>,
    input: RefCell<Input>,
}

/// Where stdin goes.
enum Input {
    None,
    Pipe(Option<pipe::Sender>),
    Inline(Inlet),
    Closed,
}

impl Exec {
    /// A new exec, not yet started.
    pub fn new(id: ExecId, spec: ExecSpec) -> Rc<Self> {
        Rc::new(Self {
            id,
            spec,
            log: OutputLog::default(),
            stream: Cell::new(0),
            pid: Cell::new(0),
            started_at: SystemTime::now(),
            outcome: RefCell::new(None),
            changed: Notify::new(),
            kill: Notify::new(),
            kill_asked: Cell::new(false),
            input: RefCell::new(Input::None),
        })
    }

    /// Pid inside; 0 before the start.
    pub fn pid(&self) -> u32 {
        self.pid.get()
    }

    /// The end, if it has come.
    pub fn outcome(&self) -> Option<ExecOutcome> {
        self.outcome.borrow().clone()
    }

    /// Waits for the start or an end without one.
    pub async fn started(&self) {
        loop {
            let changed = self.changed.notified();
            if self.pid.get() != 0 || self.outcome.borrow().is_some() {
                return;
            }
            changed.await;
        }
    }

    /// Waits for the end.
    pub async fn ended(&self) -> ExecOutcome {
        loop {
            let changed = self.changed.notified();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            changed.await;
        }
    }

    /// Asks for the end of the whole tree.
    pub fn ask_kill(&self) {
        self.kill_asked.set(true);
        self.kill.notify_one();
    }

    /// For listings.
    pub fn info(&self) -> ExecInfo {
        let command = match &self.spec.command {
            Command::Shell(line) => line.clone(),
            Command::Argv(words) => {
                words.iter().map(|w| String::from_utf8_lossy(w).into_owned()).collect::<Vec<_>>().join(" ")
            }
        };
        ExecInfo {
            exec: self.id,
            pid: self.pid.get(),
            command: command.chars().take(400).collect(),
            started_at: self.started_at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            outcome: self.outcome(),
        }
    }

    /// Writes to stdin; waits while the process does not read.
    ///
    /// # Errors
    /// When stdin is closed or was never asked for.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), CallError> {
        let refuse =
            |why: &str| CallError { kind: CallErrorKind::Invalid, message: format!("exec {}: {why}", self.id) };
        // Taken out while writing, so that the borrow does not last over an await.
        let mut input = std::mem::replace(&mut *self.input.borrow_mut(), Input::Closed);
        let result = match &mut input {
            Input::None => Err(refuse("it has no stdin; ask for one when starting it")),
            Input::Closed | Input::Pipe(None) => Err(refuse("its stdin is closed")),
            Input::Pipe(Some(pipe)) => {
                let write = tokio::io::AsyncWriteExt::write_all(pipe, bytes);
                tokio::select! {
                    written = write => written.map_err(|_| refuse("it closed its stdin")),
                    _ = self.ended() => Err(refuse("it has ended")),
                }
            }
            Input::Inline(inlet) => inlet.write(bytes).await.map_err(|_| refuse("it has ended")),
        };
        if result.is_ok() || matches!(input, Input::None) {
            *self.input.borrow_mut() = input;
        }
        result
    }

    /// Closes stdin.
    pub async fn close_input(&self) {
        let input = std::mem::replace(&mut *self.input.borrow_mut(), Input::Closed);
        if let Input::Inline(inlet) = input {
            inlet.close().await;
        }
    }

    fn finish(&self, outcome: ExecOutcome) {
        *self.outcome.borrow_mut() = Some(outcome);
        *self.input.borrow_mut() = Input::Closed;
        self.log.close();
        self.changed.notify_waiters();
    }
}

/// The child's ends of its stdio, and ours.
struct Stdio {
    child: Vec<OwnedFd>,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
}

fn make_stdio(exec: &Exec) -> io::Result<Stdio> {
    let pipe = || -> io::Result<(OwnedFd, OwnedFd)> { Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?) };
    let stdin = if exec.spec.stdin {
        let (read, write) = pipe()?;
        rustix::io::ioctl_fionbio(&write, true)?;
        *exec.input.borrow_mut() = Input::Pipe(Some(pipe::Sender::from_owned_fd(write)?));
        read
    } else {
        rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?
    };
    let receiver = |read: OwnedFd| -> io::Result<pipe::Receiver> {
        rustix::io::ioctl_fionbio(&read, true)?;
        pipe::Receiver::from_owned_fd(read)
    };
    let (out_read, out_write) = pipe()?;
    let (err_read, err_write) = pipe()?;
    Ok(Stdio { child: vec![stdin, out_write, err_write], stdout: receiver(out_read)?, stderr: receiver(err_read)? })
}

fn request(spec: &ExecSpec) -> proto::Exec {
    let (argv, shell) = match &spec.command {
        Command::Argv(words) => (words.clone(), None),
        Command::Shell(line) => (Vec::new(), Some(line.clone())),
    };
    proto::Exec {
        argv,
        shell,
        cwd: spec.cwd.clone(),
        env: spec
            .env
            .iter()
            .map(|(name, value)| proto::EnvEntry { name: name.clone(), value: value.clone() })
            .collect(),
        user: spec.user.clone(),
        stdin: spec.stdin,
        pty_rows: spec.pty.map_or(0, |p| u32::from(p.rows.max(1))),
        pty_cols: spec.pty.map_or(0, |p| u32::from(p.cols.max(1))),
        deadline_ms: 0,
    }
}

/// How the wait for the leader ended.
enum Wait {
    Exited(ExitStatus),
    Refused(Refusal),
    TimedOut,
    Killed,
    Lost,
}

/// Runs an exec to its end. The outcome lands in `exec`.
pub async fn run(exec: Rc<Exec>, machine: SharedMachine, guest: Rc<GuestLink>) {
    let begun = Instant::now();
    let before = machine.borrow().oom_kills();
    let outcome = match start(&exec, &machine, &guest).await {
        Ok((lines, readers)) => attend(&exec, &machine, lines, readers, begun, before).await,
        Err(refusal) => ended(&exec, None, Ended::Refused(refusal), begun),
    };
    exec.finish(outcome);
}

fn ended(exec: &Exec, status: Option<ExitStatus>, how: Ended, begun: Instant) -> ExecOutcome {
    let (seen, dropped) = exec.log.totals();
    ExecOutcome {
        status,
        ended: how,
        wall: begun.elapsed(),
        cpu: Duration::ZERO,
        output: OutputTotals { seen, dropped },
        disk_full: None,
        left_behind: 0,
    }
}

type Readers = Option<(pipe::Receiver, pipe::Receiver)>;

async fn start(exec: &Exec, machine: &SharedMachine, guest: &Rc<GuestLink>) -> Result<(Lines, Readers), Refusal> {
    let ours =
        |what: &str, e: &dyn std::fmt::Display| Refusal { kind: RefusalKind::Other, message: format!("{what}: {e}") };
    let slot = machine.borrow_mut().open_slot(exec.id).map_err(|e| ours("make the exec's cgroup", &e))?;
    let stdio = match exec.spec.pty {
        Some(_) => None,
        None => Some(make_stdio(exec).map_err(|e| ours("make pipes", &e))?),
    };
    let mut fds: Vec<BorrowedFd<'_>> = slot.iter().map(AsFd::as_fd).collect();
    if let Some(stdio) = &stdio {
        fds.extend(stdio.child.iter().map(AsFd::as_fd));
    }
    let lines = guest.request(Op::Exec(request(&exec.spec)), &fds).await.map_err(|e| match e.kind {
        CallErrorKind::Invalid => Refusal { kind: RefusalKind::BadCommand, message: e.message },
        _ => ours("send the request", &e),
    })?;
    exec.stream.set(lines.stream);
    if exec.spec.pty.is_some() {
        *exec.input.borrow_mut() = lines.input().map_or(Input::Closed, Input::Inline);
    }
    Ok((lines, stdio.map(|s| (s.stdout, s.stderr))))
}

async fn drain(exec: &Exec, channel: Channel, mut pipe: pipe::Receiver) {
    let mut buffer = vec![0; READ_BYTES];
    while let Ok(n) = pipe.read(&mut buffer).await {
        if n == 0 {
            break;
        }
        exec.log.push(channel, &buffer[..n]).await;
    }
}

async fn attend(
    exec: &Rc<Exec>,
    machine: &SharedMachine,
    mut lines: Lines,
    readers: Readers,
    begun: Instant,
    before: u64,
) -> ExecOutcome {
    // Spawned processes may leave children that go on writing, so their readers live on by themselves.
    let mut output = tokio::task::spawn_local({
        let exec = exec.clone();
        async move {
            if let Some((stdout, stderr)) = readers {
                tokio::join!(drain(&exec, Channel::Stdout, stdout), drain(&exec, Channel::Stderr, stderr));
            }
        }
    });
    let wait = wait_for_end(exec, machine, &mut lines, begun).await;
    let (status, how) = match wait {
        Wait::Exited(status) => (Some(status), Ended::Exited),
        Wait::Refused(refusal) => (None, Ended::Refused(refusal)),
        Wait::TimedOut => (None, Ended::TimedOut),
        Wait::Killed => (None, Ended::Killed),
        Wait::Lost => (None, Ended::MachineLost),
    };
    let complete = match how {
        // The tree is dead, so the pipes end by themselves as soon as they are read empty.
        Ended::TimedOut | Ended::Killed => tokio::time::timeout(DRAIN * 10, &mut output).await.is_ok(),
        Ended::MachineLost => tokio::time::timeout(DRAIN, &mut output).await.is_ok(),
        _ => drained(exec, &mut output).await,
    };
    let (cpu, left) = machine.borrow().slot_usage(exec.id);
    let kills_rest = exec.spec.kind == ExecKind::Exec || !matches!(how, Ended::Exited);
    if kills_rest {
        if left > 0 {
            let _ = machine.borrow_mut().kill_slot(exec.id);
        }
        if !complete {
            output.abort();
        }
    }
    let _ = machine.borrow_mut().close_slot(exec.id);
    let mut outcome = ended(exec, status, how, begun);
    outcome.cpu = cpu;
    outcome.left_behind = if outcome.ended == Ended::Exited && kills_rest { left } else { 0 };
    explain(&mut outcome, machine, before);
    outcome
}

/// Waits for the pipes' end, at most [`DRAIN`]: a daemon that holds them open does not hold the exec. A follower that
/// reads slowly does, since what the leader wrote is still on its way to it.
async fn drained(exec: &Exec, output: &mut tokio::task::JoinHandle<()>) -> bool {
    loop {
        if tokio::time::timeout(DRAIN, &mut *output).await.is_ok() {
            return true;
        }
        if !exec.log.held() {
            return false;
        }
    }
}

/// Adds what the kernel knows: killed for memory, disk full.
fn explain(outcome: &mut ExecOutcome, machine: &SharedMachine, oom_before: u64) {
    let failed = !matches!(outcome.status, Some(status) if status.success());
    if !failed || matches!(outcome.ended, Ended::Refused(_) | Ended::MachineLost) {
        return;
    }
    let usage = machine.borrow().usage();
    outcome.disk_full = usage.disk_full;
    if outcome.ended == Ended::Exited && usage.oom_kills > oom_before {
        outcome.ended = Ended::OutOfMemory;
    }
}

async fn wait_for_end(exec: &Exec, machine: &SharedMachine, lines: &mut Lines, begun: Instant) -> Wait {
    let deadline = exec.spec.deadline.map(|d| begun + d);
    let mut tend = tokio::time::interval_at(begun + TEND_EVERY, TEND_EVERY);
    let (link, stream) = (lines.link(), lines.stream);
    // A piece of inline output on its way. A follower or an agent that does not read holds it, never the deadline.
    let mut passing: Option<std::pin::Pin<Box<dyn Future<Output = ()> + '_>>> = None;
    loop {
        let until_deadline = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = exec.kill.notified() => {
                let _ = machine.borrow_mut().kill_slot(exec.id);
                return Wait::Killed;
            }
            () = until_deadline => {
                let _ = machine.borrow_mut().kill_slot(exec.id);
                return Wait::TimedOut;
            }
            () = async { if let Some(passing) = &mut passing { passing.await } }, if passing.is_some() => passing = None,
            arrival = lines.next(), if passing.is_none() => match arrival {
                Err(_) => return if exec.kill_asked.get() { Wait::Killed } else { Wait::Lost },
                Ok(Arrival::Event(EventKind::Started(started))) => {
                    exec.pid.set(started.pid.max(1));
                    exec.changed.notify_waiters();
                }
                Ok(Arrival::Event(EventKind::Exited(exited))) => return Wait::Exited(match (exited.code, exited.signal) {
                    (_, Some(signal)) => ExitStatus::Signal(signal),
                    (code, None) => ExitStatus::Code(code.unwrap_or(0)),
                }),
                Ok(Arrival::Event(EventKind::Failed(failed))) => return Wait::Refused(refusal(&failed)),
                Ok(Arrival::Event(_)) => {}
                // Output of what was never started: no follower is there yet that could take it.
                Ok(Arrival::Data(..)) if exec.pid() == 0 => return Wait::Lost,
                Ok(Arrival::Data(channel, bytes)) => {
                    let channel = if channel == 1 { Channel::Stdout } else { Channel::Stderr };
                    let link = &link;
                    passing = Some(Box::pin(async move {
                        exec.log.push(channel, &bytes).await;
                        link.grant(stream, bytes.len() as u32).await;
                    }));
                }
            },
            _ = tend.tick() => machine.borrow_mut().tend(),
        }
    }
}

fn refusal(failed: &proto::Failed) -> Refusal {
    let kind = match FailKind::try_from(failed.kind).unwrap_or(FailKind::Other) {
        FailKind::NotFound => RefusalKind::NotFound,
        FailKind::NotExecutable | FailKind::Denied => RefusalKind::NotExecutable,
        FailKind::BadCwd => RefusalKind::BadCwd,
        FailKind::UnknownUser => RefusalKind::UnknownUser,
        FailKind::BadEnv => RefusalKind::BadEnv,
        FailKind::BadCommand => RefusalKind::BadCommand,
        FailKind::LimitReached => RefusalKind::LimitReached,
        _ => RefusalKind::Other,
    };
    Refusal { kind, message: failed.message.clone() }
}

const _: () = assert!(WINDOW as usize <= crate::log::RING_BYTES, "a whole window of inline output fits in the log");
