//! The main loop: one thread, one epoll set; it alone starts and reaps processes and speaks to the host.
//!
//! An exec's life: request, clone, `Started` (the report pipe closed) or `Failed` (it said why), output, the leader's
//! end (SIGCHLD, then waitpid), with inline stdio the drain, `Exited`. Children are reaped in one place only, so that a
//! pid in `leaders` always still means its process.
//!
//! File work goes to worker threads ([`crate::work`]), so that no disk and no slow reader holds up an exec.

use crate::{
    exec::{self, Input, Pumped, Running},
    link::{Failure, Link, text},
    user::{Database, User},
    work::{self, Work},
};
use bytes::Bytes;
use prost::Message;
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
    process::{Pid, Signal, WaitOptions},
};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use trialrun_guest_proto::{
    self as proto, Boot, Decoder, Done, EnvEntry, EventKind, Exited, FailKind, Frame, GENERATION, Kind, Op, Ready,
    Started,
};
use trialrun_sys::{fdpass, spawn::Identity};

/// How long output of processes that the leader left behind is waited for.
const DRAIN: Duration = Duration::from_millis(200);
/// Bytes asked of the socket at once.
const READ: usize = 64 * 1024;
/// Most workers at once; their stacks and buffers are the machine's memory.
const MAX_WORKERS: usize = 64;
/// Most entries that SetEnv may bring the environment to.
const MAX_ENV: usize = 4096;

/// What the agent knows of its machine.
#[derive(Debug)]
pub struct Machine {
    /// PID 1, with its rights and duties.
    pub init: bool,
    /// Whether ids can be changed.
    pub root: bool,
    /// From the launcher.
    pub boot: Boot,
    /// Environment of every exec: Boot's and what SetEnv added.
    pub env: Vec<EnvEntry>,
    /// Seccomp program of every exec.
    pub filter: Vec<libc::sock_filter>,
}

/// Whom an exec runs as.
#[derive(Debug)]
pub struct Who {
    /// For the environment.
    pub user: User,
    /// For the kernel; absent when nothing is to be changed.
    pub identity: Option<Identity>,
    /// Another user than the machine's default.
    pub other: bool,
}

impl Machine {
    /// A path, relative ones from the machine's default directory.
    pub fn absolute(&self, path: &[u8]) -> Vec<u8> {
        let base: &[u8] = if self.boot.cwd.is_empty() { b"/" } else { &self.boot.cwd };
        match path {
            [b'/', ..] => path.to_vec(),
            [] => base.to_vec(),
            _ if base.ends_with(b"/") => [base, path].concat(),
            _ => [base, b"/", path].concat(),
        }
    }

    /// Resolves an exec's user. Outside of a machine the default user may be missing: then everything stays as it is.
    pub fn exec_user(&self, name: Option<&str>) -> Result<Who, Failure> {
        let database = Database::load();
        let default_name = if self.boot.user.is_empty() { "root" } else { &self.boot.user };
        let default = database.resolve(default_name);
        let name = name.filter(|n| !n.is_empty());
        let found = match name {
            Some(name) => database.resolve(name),
            None => default.clone(),
        };
        let Some((user, identity)) = found else {
            if name.is_none() && !self.init {
                let uid = rustix::process::getuid().as_raw();
                let (user, _) = database.resolve(&uid.to_string()).unwrap_or_else(|| unreachable!("a number resolves"));
                return Ok(Who { user, identity: None, other: false });
            }
            let message = format!("no user {} in the machine", text(name.unwrap_or(default_name).as_bytes()));
            return Err(Failure::new(FailKind::UnknownUser, message));
        };
        let other = name.is_some() && default.is_none_or(|(d, _)| d.uid != user.uid);
        Ok(Who { user, identity: self.root.then_some(identity), other })
    }

    /// Resolves the owner of files: `user` or `user:group`, the default user when absent. Nothing when ids cannot be
    /// changed here.
    pub fn owner(&self, spec: Option<&str>) -> Result<Option<(u32, u32)>, Failure> {
        let who = self.exec_user(spec)?;
        Ok(who.identity.map(|identity| (identity.uid, identity.gid)))
    }
}

/// What a ready descriptor is. The token is `stream << 8 | source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Socket = 0,
    Wake = 1,
    Signals = 2,
    Report = 3,
    Output1 = 4,
    Output2 = 5,
    Input = 6,
}

fn token(stream: u32, source: Source) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(stream) << 8 | source as u64)
}

/// The agent.
#[derive(Debug)]
pub struct Agent {
    machine: Arc<Machine>,
    socket: OwnedFd,
    epoll: OwnedFd,
    signals: OwnedFd,
    link: Arc<Link>,
    decoder: Decoder,
    /// Descriptors that came and whose request was not decoded yet.
    passed: VecDeque<OwnedFd>,
    execs: BTreeMap<u32, Running>,
    /// Stream of each leader that was not reaped yet.
    leaders: BTreeMap<i32, u32>,
    work: BTreeMap<u32, Work>,
    scratch: Vec<u8>,
    /// Whether epoll tells when the socket takes bytes again.
    watching_space: bool,
}

/// Why the loop ended.
#[derive(Debug, thiserror::Error)]
pub enum EndOfLife {
    /// The keeper is gone.
    #[error("the host closed the connection")]
    Closed,
    /// What came was no frame.
    #[error("the host sent no frame")]
    Frame(#[from] proto::FrameError),
    /// The kernel refused something that the loop cannot do without.
    #[error("the main loop failed")]
    Kernel(#[source] io::Error),
}

impl Agent {
    /// Takes over the connection; `signals` tells of ended children.
    pub fn new(machine: Machine, socket: OwnedFd, signals: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let link = Arc::new(Link::new()?);
        epoll::add(&epoll, &socket, token(0, Source::Socket), epoll::EventFlags::IN)?;
        epoll::add(&epoll, link.wake_fd(), token(0, Source::Wake), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &signals, token(0, Source::Signals), epoll::EventFlags::IN)?;
        Ok(Self {
            machine: Arc::new(machine),
            socket,
            epoll,
            signals,
            link,
            decoder: Decoder::default(),
            passed: VecDeque::new(),
            execs: BTreeMap::new(),
            leaders: BTreeMap::new(),
            work: BTreeMap::new(),
            scratch: Vec::new(),
            watching_space: false,
        })
    }

    /// Serves until the connection ends.
    pub fn run(&mut self) -> EndOfLife {
        self.link.push_event(0, EventKind::Ready(Ready { generation: GENERATION }));
        loop {
            if let Err(end) = self.turn() {
                if !self.machine.init {
                    self.clean_up();
                }
                return end;
            }
        }
    }

    /// PID 1 takes everything with it; an ordinary process ends its commands, and lets its workers remove what they have
    /// half done.
    fn clean_up(&mut self) {
        for running in self.execs.values() {
            let _ = rustix::process::kill_process_group(running.child.pid, Signal::KILL);
        }
        for work in self.work.values() {
            work.inbox.abort();
            work.window.abort();
        }
        self.link.abandon();
        let patience = Instant::now() + Duration::from_secs(1);
        while !self.work.is_empty() && Instant::now() < patience {
            for stream in self.link.take_finished() {
                self.work.remove(&stream);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn turn(&mut self) -> Result<(), EndOfLife> {
        for stream in self.link.take_finished() {
            self.work.remove(&stream);
        }
        let left = self.link.flush(self.socket.as_fd()).map_err(EndOfLife::Kernel)?;
        if left != self.watching_space {
            let space = if left { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            epoll::modify(&self.epoll, &self.socket, token(0, Source::Socket), epoll::EventFlags::IN | space)
                .map_err(|e| EndOfLife::Kernel(e.into()))?;
            self.watching_space = left;
        }
        self.watch_outputs();

        let timeout = self.next_timer().map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 32];
        let (ready, _) = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok(ready) => ready,
            Err(Errno::INTR) => return Ok(()),
            Err(e) => return Err(EndOfLife::Kernel(e.into())),
        };
        for event in ready.iter() {
            let data = event.data.u64();
            let stream = (data >> 8) as u32;
            let flags = event.flags;
            match data & 0xff {
                0 if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) => {
                    self.read_socket()?;
                }
                1 => self.link.clear_wake(),
                2 => self.reap(),
                3 => self.read_report(stream),
                4 => self.pump_output(stream, 0),
                5 => self.pump_output(stream, 1),
                6 => self.pump_input(stream),
                _ => {}
            }
        }
        self.run_timers();
        Ok(())
    }

    fn read_socket(&mut self) -> Result<(), EndOfLife> {
        match fdpass::recv(self.socket.as_fd(), self.decoder.buffer(), READ, &mut self.passed) {
            Ok(0) => return Err(EndOfLife::Closed),
            Ok(_) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return Ok(()),
            Err(e) => return Err(EndOfLife::Kernel(e)),
        }
        while let Some(frame) = self.decoder.next_frame()? {
            self.frame(frame);
        }
        Ok(())
    }

    fn frame(&mut self, Frame { stream, kind, payload }: Frame) {
        match kind {
            Kind::Resync => self.link.push(0, Kind::Resync, &payload),
            Kind::Request => self.request(stream, &payload),
            Kind::Data0 => self.data(stream, payload),
            Kind::End0 => self.end(stream),
            Kind::Credit => {
                let more = <[u8; 4]>::try_from(&payload[..]).map_or(0, u32::from_le_bytes) as usize;
                if let Some(work) = self.work.get(&stream) {
                    work.window.grant(more);
                } else if let Some(inline) = self.execs.get_mut(&stream).and_then(|r| r.inline.as_mut()) {
                    inline.window = inline.window.saturating_add(more);
                }
            }
            // The agent's own kinds; nothing that the host would send.
            Kind::Event | Kind::Data1 | Kind::Data2 => {}
        }
    }

    fn request(&mut self, stream: u32, payload: &[u8]) {
        if let Err(failure) = self.dispatch(stream, payload) {
            self.link.push_failed(stream, failure);
        }
    }

    fn dispatch(&mut self, stream: u32, payload: &[u8]) -> Result<(), Failure> {
        let bad = |what: &str| Failure::new(FailKind::BadRequest, what);
        let request = proto::Request::decode(payload).map_err(|_| bad("the request is no message of this protocol"))?;
        let count = request.fds as usize;
        if count > self.passed.len() {
            return Err(bad("descriptors are missing beside the request"));
        }
        let fds: Vec<OwnedFd> = self.passed.drain(..count).collect();
        if stream == 0 || self.execs.contains_key(&stream) || self.work.contains_key(&stream) {
            return Err(bad("the stream is in use"));
        }
        match request.op.ok_or_else(|| bad("the operation is not known here"))? {
            Op::Exec(exec) => {
                let running = exec::start(&self.machine, &exec, fds)?;
                self.adopt(stream, running)
            }
            Op::Signal(signal) => self.signal(&signal).map(|()| self.done(stream)),
            Op::Resize(resize) => {
                let inline = self.execs.get(&resize.stream).and_then(|r| r.inline.as_ref());
                let terminal = inline.and_then(|i| i.terminal.as_ref());
                let terminal =
                    terminal.ok_or_else(|| Failure::new(FailKind::NotFound, "no terminal on that stream"))?;
                rustix::termios::tcsetwinsize(terminal, exec::winsize(resize.rows, resize.cols))
                    .map_err(|e| Failure::errno(e, "resizing the terminal"))?;
                self.done(stream);
                Ok(())
            }
            Op::SetEnv(set) => {
                crate::environment::check(&set.env)?;
                let machine = Arc::make_mut(&mut self.machine);
                for entry in set.env {
                    machine.env.retain(|e| e.name != entry.name);
                    machine.env.push(entry);
                }
                if machine.env.len() > MAX_ENV {
                    machine.env.truncate(MAX_ENV);
                    return Err(Failure::new(
                        FailKind::LimitReached,
                        format!("more than {MAX_ENV} environment entries"),
                    ));
                }
                self.done(stream);
                Ok(())
            }
            Op::Info(_) => {
                self.link.push_event(stream, EventKind::Info(crate::info::collect(&self.machine)));
                self.done(stream);
                Ok(())
            }
            op => {
                if self.work.len() >= MAX_WORKERS {
                    return Err(Failure::new(
                        FailKind::LimitReached,
                        format!("{MAX_WORKERS} operations are under way"),
                    ));
                }
                let work = work::start(Arc::clone(&self.machine), Arc::clone(&self.link), stream, op, fds)?;
                self.work.insert(stream, work);
                Ok(())
            }
        }
    }

    fn done(&self, stream: u32) {
        self.link.push_event(stream, EventKind::Done(Done::default()));
    }

    fn adopt(&mut self, stream: u32, running: Running) -> Result<(), Failure> {
        let report =
            epoll::add(&self.epoll, &running.child.report, token(stream, Source::Report), epoll::EventFlags::IN);
        if let Err(e) = report {
            let _ = rustix::process::pidfd_send_signal(&running.child.pidfd, Signal::KILL);
            return Err(Failure::errno(e, "watching the process"));
        }
        self.leaders.insert(running.child.pid.as_raw_nonzero().get(), stream);
        self.execs.insert(stream, running);
        Ok(())
    }

    fn signal(&self, request: &proto::Signal) -> Result<(), Failure> {
        let gone = || Failure::new(FailKind::NotFound, "no process on that stream");
        let running = self.execs.get(&request.stream).filter(|r| r.exited.is_none()).ok_or_else(gone)?;
        if request.signal == 0 {
            return Ok(());
        }
        let signal = Signal::from_named_raw(request.signal)
            .ok_or_else(|| Failure::new(FailKind::BadRequest, format!("no signal {}", request.signal)))?;
        let sent = match request.group.then(|| rustix::process::kill_process_group(running.child.pid, signal)) {
            // Not a group yet: still on its way to execve.
            None | Some(Err(Errno::SRCH)) => rustix::process::pidfd_send_signal(&running.child.pidfd, signal),
            Some(sent) => sent,
        };
        match sent {
            Ok(()) => Ok(()),
            Err(Errno::SRCH) => Err(gone()),
            Err(e) => Err(Failure::errno(e, "sending the signal")),
        }
    }

    fn data(&mut self, stream: u32, piece: Bytes) {
        if let Some(work) = self.work.get(&stream) {
            work.inbox.push(piece);
            return;
        }
        let length = piece.len();
        let Some(running) = self.execs.get_mut(&stream) else { return };
        match running.inline.as_mut().and_then(|i| i.input.as_mut()) {
            Some(input) if !input.ended => {
                if !piece.is_empty() {
                    input.queue.push_back(piece);
                }
                self.pump_input(stream);
            }
            // Nobody will read it; the host shall not wait for credit because of that.
            _ if length > 0 => {
                self.link.push(stream, Kind::Credit, &(length as u32).to_le_bytes());
            }
            _ => {}
        }
    }

    fn end(&mut self, stream: u32) {
        if let Some(work) = self.work.get(&stream) {
            work.inbox.end();
        } else if let Some(input) =
            self.execs.get_mut(&stream).and_then(|r| r.inline.as_mut()).and_then(|i| i.input.as_mut())
        {
            input.ended = true;
            self.pump_input(stream);
        }
    }

    /// The only place that waits for children: the leaders, and for PID 1 all that lost their parents.
    fn reap(&mut self) {
        let _ = rustix::io::read(&self.signals, &mut [0_u8; 1024]);
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let Some(stream) = self.leaders.remove(&pid.as_raw_nonzero().get()) else { continue };
                    // A dead child has said all it had to say.
                    self.read_report(stream);
                    let Some(running) = self.execs.get_mut(&stream) else { continue };
                    running.exited = Some(Exited { code: status.exit_status(), signal: status.terminating_signal() });
                    running.deadline = None;
                    if running.inline.is_some() {
                        running.drain_until = Some(Instant::now() + DRAIN);
                        self.pump_output(stream, 0);
                        self.pump_output(stream, 1);
                    }
                    self.conclude(stream);
                }
                Err(Errno::INTR) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    fn read_report(&mut self, stream: u32) {
        let Some(running) = self.execs.get_mut(&stream).filter(|r| r.starting) else { return };
        match running.child.outcome() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Err(failure)) => {
                let failure = running.explain(failure);
                self.link.push_failed(stream, failure);
                // Its pid stays in `leaders` until it is reaped; the stream is closed.
                self.execs.remove(&stream);
            }
            Ok(Ok(())) | Err(_) => {
                running.starting = false;
                let _ = epoll::delete(&self.epoll, &running.child.report);
                let pid = running.child.pid.as_raw_nonzero().get() as u32;
                self.link.push_event(stream, EventKind::Started(Started { pid }));
            }
        }
    }

    fn pump_output(&mut self, stream: u32, channel: usize) {
        let Some(inline) = self.execs.get_mut(&stream).and_then(|r| r.inline.as_mut()) else { return };
        let Some(output) = inline.outputs[channel].as_mut() else { return };
        if output.pump(&self.link, stream, &mut inline.window, &mut self.scratch) == Pumped::Closed {
            if output.watched {
                let _ = epoll::delete(&self.epoll, &output.fd);
            }
            inline.outputs[channel] = None;
            self.conclude(stream);
        }
    }

    fn pump_input(&mut self, stream: u32) {
        let Some(inline) = self.execs.get_mut(&stream).and_then(|r| r.inline.as_mut()) else { return };
        let Some(input) = inline.input.as_mut() else { return };
        let closed = input.pump(&self.link, stream) == Pumped::Closed;
        let wanted = !closed && !input.queue.is_empty();
        if wanted != input.watched {
            let flags = epoll::EventFlags::OUT;
            watch(&self.epoll, &input.fd, token(stream, Source::Input), flags, wanted);
            input.watched = wanted;
        }
        if closed {
            // Dropping a terminal's copy closes nothing; dropping a pipe is the process's end of input.
            inline.input = None::<Input>;
        }
    }

    /// Sends `Exited` when the leader has ended and all output is out.
    fn conclude(&mut self, stream: u32) {
        let Some(running) = self.execs.get(&stream) else { return };
        let open = running.inline.as_ref().is_some_and(|i| i.outputs.iter().any(Option::is_some));
        if !open && let Some(exited) = running.exited.clone() {
            self.link.push_event(stream, EventKind::Exited(exited));
            self.execs.remove(&stream);
        }
    }

    /// Watches those outputs whose bytes can go on. A descriptor that waits for credit is taken out of the set: epoll
    /// reports a hang-up whether asked or not.
    fn watch_outputs(&mut self) {
        let full = self.link.is_full();
        for (&stream, running) in &mut self.execs {
            let Some(inline) = running.inline.as_mut() else { continue };
            let wanted = inline.window > 0 && !full;
            for (output, source) in inline.outputs.iter_mut().zip([Source::Output1, Source::Output2]) {
                if let Some(output) = output
                    && output.watched != wanted
                {
                    watch(&self.epoll, &output.fd, token(stream, source), epoll::EventFlags::IN, wanted);
                    output.watched = wanted;
                }
            }
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        self.execs.values().flat_map(|r| [r.drain_until, r.deadline]).flatten().min()
    }

    fn run_timers(&mut self) {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let late: Vec<u32> =
            self.execs.iter().filter(|(_, r)| due(r.drain_until) || due(r.deadline)).map(|(&s, _)| s).collect();
        for stream in late {
            let Some(running) = self.execs.get_mut(&stream) else { continue };
            if due(running.deadline) {
                running.deadline = None;
                kill_session(running.child.pid);
            }
            if due(running.drain_until) {
                running.drain_until = None;
                if let Some(inline) = running.inline.as_mut() {
                    for output in inline.outputs.iter_mut().flatten() {
                        // What is there now still counts; what comes later does not.
                        output.last = Some(rustix::io::ioctl_fionread(&output.fd).unwrap_or(0) as usize);
                    }
                }
                self.pump_output(stream, 0);
                self.pump_output(stream, 1);
            }
        }
    }
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, data: epoll::EventData, flags: epoll::EventFlags, wanted: bool) {
    let fd: BorrowedFd<'_> = fd.as_fd();
    // Neither can fail for a live descriptor, save for want of memory; then the drain's timer ends the exec.
    let _ = if wanted { epoll::add(epoll, fd, data, flags) } else { epoll::delete(epoll, fd) };
}

/// Kills a leader's whole session, as far as its processes stayed in it.
fn kill_session(leader: Pid) {
    let _ = rustix::process::kill_process_group(leader, Signal::KILL);
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    for pid in pids.filter(|&pid| session(pid) == Some(leader.as_raw_nonzero().get())) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Field 6 of `/proc/<pid>/stat` (proc(5)); the name before it may hold anything but is closed by the last bracket.
fn session(pid: Pid) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let after = stat.rsplit(|&b| b == b')').next()?;
    str::from_utf8(after).ok()?.split_ascii_whitespace().nth(3)?.parse().ok()
}

impl Clone for Machine {
    fn clone(&self) -> Self {
        Self {
            init: self.init,
            root: self.root,
            boot: self.boot.clone(),
            env: self.env.clone(),
            filter: self.filter.clone(),
        }
    }
}
