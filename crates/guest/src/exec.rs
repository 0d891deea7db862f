//! One exec: from the request to the prepared child, and its stdio while it runs.

use crate::{
    agent::Machine,
    environment::{self, Environment},
    link::{Failure, INITIAL_WINDOW, Link, describe, text},
};
use bytes::{Buf, Bytes};
use rustix::{
    fs::{Access, Gid, Mode, OFlags, Uid, access, fchown, open},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
    pty::OpenptFlags,
    termios::{Winsize, tcsetwinsize},
};
use std::{
    collections::VecDeque,
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};
use trialrun_guest_proto::{Exec, Exited, FailKind, Kind};
use trialrun_sys::spawn::{Confinement, Identity, Prepared, SpawnedChild, StartFailure, Step, spawn};

/// Capabilities that stay within reach of root inside: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
/// NET_BIND_SERVICE, SYS_CHROOT, SETFCAP (capabilities(7)). SYS_PTRACE is not among them, which keeps PID 1 out of
/// reach, nor is anything that mounts or makes devices.
pub const KEPT_CAPS: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 18 | 1 << 31;
/// Out of memory, the kernel takes the exec's processes before the agent.
const OOM_SCORE_ADJ: i32 = 500;
/// Most bytes of one output frame.
pub const PIECE: usize = 64 * 1024;
/// Control-D, which a terminal in its usual mode takes for the end of input.
const END_OF_INPUT: &[u8] = &[4];

/// An exec that was started.
#[derive(Debug)]
pub struct Running {
    /// The process.
    pub child: SpawnedChild,
    /// Still between clone and execve, as far as we know.
    pub starting: bool,
    /// Named in a failure to start.
    pub program: Vec<u8>,
    /// Named in a failure to start.
    pub cwd: Vec<u8>,
    /// Stdio through frames.
    pub inline: Option<Inline>,
    /// How the leader ended.
    pub exited: Option<Exited>,
    /// Until when output of processes that the leader left behind is waited for.
    pub drain_until: Option<Instant>,
    /// When it is to be killed.
    pub deadline: Option<Instant>,
}

/// Stdio through frames.
#[derive(Debug)]
pub struct Inline {
    /// Output channels 1 and 2.
    pub outputs: [Option<Output>; 2],
    /// Input.
    pub input: Option<Input>,
    /// Bytes that the host still takes.
    pub window: usize,
    /// The terminal.
    pub terminal: Option<OwnedFd>,
}

/// One output channel.
#[derive(Debug)]
pub struct Output {
    /// Pipe or terminal; non-blocking.
    pub fd: OwnedFd,
    /// Data1 or Data2.
    pub kind: Kind,
    /// Whether epoll watches it.
    pub watched: bool,
    /// After the drain: how many bytes are still to be taken before it is closed.
    pub last: Option<usize>,
}

/// The input channel.
#[derive(Debug)]
pub struct Input {
    /// Pipe or terminal; non-blocking.
    pub fd: OwnedFd,
    /// What the process has not taken yet.
    pub queue: VecDeque<Bytes>,
    /// The host sends no more.
    pub ended: bool,
    /// Whether epoll watches it.
    pub watched: bool,
    /// The end is a character, not a closed pipe.
    pub terminal: bool,
}

/// What became of a pump's turn.
#[derive(Debug, PartialEq, Eq)]
pub enum Pumped {
    /// More may come.
    Open,
    /// The channel's end.
    Closed,
}

impl Output {
    /// Moves what is there and what the host takes, in pieces, a bounded number of them.
    pub fn pump(&mut self, link: &Link, stream: u32, window: &mut usize, scratch: &mut Vec<u8>) -> Pumped {
        scratch.resize(PIECE, 0);
        for _ in 0..8 {
            if self.last == Some(0) {
                return Pumped::Closed;
            }
            if *window == 0 || link.is_full() {
                return Pumped::Open;
            }
            let want = PIECE.min(*window).min(self.last.unwrap_or(PIECE));
            match rustix::io::read(&self.fd, &mut scratch[..want]) {
                Ok(0) => return Pumped::Closed,
                Ok(n) => {
                    link.push(stream, self.kind, &scratch[..n]);
                    *window -= n;
                    if let Some(last) = &mut self.last {
                        *last -= n;
                    }
                }
                Err(Errno::AGAIN) if self.last.is_some() => return Pumped::Closed,
                Err(Errno::AGAIN) => return Pumped::Open,
                Err(Errno::INTR) => {}
                // A terminal that no process has open any more answers EIO.
                Err(_) => return Pumped::Closed,
            }
        }
        Pumped::Open
    }
}

impl Input {
    /// Moves what the process takes, and grants the host as much again.
    pub fn pump(&mut self, link: &Link, stream: u32) -> Pumped {
        let mut taken = 0;
        let mut result = Pumped::Open;
        while let Some(piece) = self.queue.front_mut() {
            match rustix::io::write(&self.fd, piece) {
                Ok(n) => {
                    taken += n;
                    piece.advance(n);
                    if piece.is_empty() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // Nobody reads: what the host sends is dropped, and it is told to go on.
                Err(_) => {
                    taken += self.queue.drain(..).map(|p| p.len()).sum::<usize>();
                    result = Pumped::Closed;
                }
            }
        }
        if taken > 0 {
            link.push(stream, Kind::Credit, &(taken as u32).to_le_bytes());
        }
        if self.ended && self.queue.is_empty() {
            if self.terminal && result == Pumped::Open {
                let _ = rustix::io::write(&self.fd, END_OF_INPUT);
            }
            result = Pumped::Closed;
        }
        result
    }
}

/// Starts what was asked for. The passed descriptors are the process's own afterwards.
pub fn start(machine: &Machine, request: &Exec, fds: Vec<OwnedFd>) -> Result<Running, Failure> {
    environment::check(&request.env)?;
    let terminal = request.pty_rows > 0;
    let (cgroup, passed) = split_fds(fds)?;
    if terminal && passed.is_some() {
        return Err(Failure::new(FailKind::BadRequest, "a terminal goes without passed stdio"));
    }
    let who = machine.exec_user(request.user.as_deref())?;
    let env = Environment::for_exec(&who.user, &machine.env, who.other, terminal, &request.env);
    let (programs, argv) = command(request, &env)?;
    let program = argv.first().map(|s| s.as_bytes().to_vec()).unwrap_or_default();
    let (cwd, cwd_may_fail) = match &request.cwd {
        Some(cwd) if !cwd.is_empty() => (machine.absolute(cwd), false),
        _ => (machine.absolute(b""), true),
    };
    let cwd_string = CString::new(cwd.clone())
        .map_err(|_| Failure::new(FailKind::BadCwd, format!("working directory {} holds NUL", text(&cwd))))?;

    let (stdio, inline) = match passed {
        Some(stdio) => (stdio, None),
        None if terminal => open_terminal(request, who.identity.as_ref())?,
        None => open_pipes(request.stdin)?,
    };
    let [stdin, stdout, stderr] = &stdio;
    let prepared = Prepared {
        programs,
        argv,
        env: env.to_strings()?,
        cwd: cwd_string,
        cwd_may_fail,
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        terminal,
        cgroup: cgroup.as_ref().filter(|fd| machine.init || is_cgroup(fd)).map(AsFd::as_fd),
        identity: who.identity.as_ref(),
        confinement: machine.init.then_some(Confinement { keep_caps: KEPT_CAPS, filter: &machine.filter }),
        oom_score_adj: machine.init.then_some(OOM_SCORE_ADJ),
    };
    let child = spawn(&prepared).map_err(|e| Failure::io(&e, "starting a process"))?;
    rustix::io::ioctl_fionbio(&child.report, true).map_err(|e| Failure::errno(e, "starting a process"))?;
    let deadline = (request.deadline_ms > 0)
        .then(|| Instant::now().checked_add(std::time::Duration::from_millis(request.deadline_ms)))
        .flatten();
    Ok(Running { child, starting: true, program, cwd, inline, exited: None, drain_until: None, deadline })
}

/// A driver without cgroups passes some directory in its place.
fn is_cgroup(fd: &OwnedFd) -> bool {
    // CGROUP2_SUPER_MAGIC of linux/magic.h.
    rustix::fs::fstatfs(fd).is_ok_and(|fs| fs.f_type as u64 == 0x6367_7270)
}

type Passed = (Option<OwnedFd>, Option<[OwnedFd; 3]>);

fn split_fds(fds: Vec<OwnedFd>) -> Result<Passed, Failure> {
    let count = fds.len();
    let mut fds = fds.into_iter();
    let cgroup = if count == 1 || count == 4 { fds.next() } else { None };
    let rest: Vec<OwnedFd> = fds.collect();
    match <[OwnedFd; 3]>::try_from(rest) {
        Ok(stdio) => {
            for fd in &stdio {
                // The host's end may have been made by an event loop. Programs expect blocking stdio.
                let _ = rustix::io::ioctl_fionbio(fd, false);
            }
            Ok((cgroup, Some(stdio)))
        }
        Err(rest) if rest.is_empty() => Ok((cgroup, None)),
        Err(_) => {
            Err(Failure::new(FailKind::BadRequest, format!("an exec takes 0, 1, 3 or 4 descriptors, not {count}")))
        }
    }
}

/// Programs to try, and argv.
fn command(request: &Exec, env: &Environment) -> Result<(Vec<CString>, Vec<CString>), Failure> {
    let bad = |what: &str| Failure::new(FailKind::BadCommand, what);
    let argv: Vec<Vec<u8>> = match &request.shell {
        Some(line) => {
            let bash = access("/bin/bash", Access::EXEC_OK).is_ok();
            let shell: &[u8] = if bash { b"/bin/bash" } else { b"/bin/sh" };
            vec![shell.to_vec(), b"-c".to_vec(), line.as_bytes().to_vec()]
        }
        None => request.argv.clone(),
    };
    let name = argv.first().ok_or_else(|| bad("the command is empty"))?;
    if name.is_empty() {
        return Err(bad("the program's name is empty"));
    }
    let c_string = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| bad("an argument holds NUL"));
    let programs = if name.contains(&b'/') {
        vec![c_string(name.clone())?]
    } else {
        let path = env.get(b"PATH").unwrap_or_default();
        let in_dir = |dir: &[u8]| if dir.is_empty() { [b"./", &name[..]].concat() } else { [dir, b"/", name].concat() };
        path.split(|&b| b == b':').map(|dir| c_string(in_dir(dir))).collect::<Result<_, _>>()?
    };
    let argv = argv.into_iter().map(c_string).collect::<Result<_, _>>()?;
    Ok((programs, argv))
}

type Stdio = ([OwnedFd; 3], Option<Inline>);

fn open_pipes(stdin: bool) -> Result<Stdio, Failure> {
    let pipe = || -> Result<(OwnedFd, OwnedFd), Failure> {
        pipe_with(PipeFlags::CLOEXEC).map_err(|e| Failure::errno(e, "making a pipe"))
    };
    let ours = |fd: OwnedFd| -> Result<OwnedFd, Failure> {
        rustix::io::ioctl_fionbio(&fd, true).map_err(|e| Failure::errno(e, "making a pipe"))?;
        Ok(fd)
    };
    let (child_in, input) = if stdin {
        let (reader, writer) = pipe()?;
        (reader, Some(Input::new(ours(writer)?, false)))
    } else {
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Failure::errno(e, "/dev/null").with_kind(FailKind::Other))?;
        (null, None)
    };
    let (out, child_out) = pipe()?;
    let (err, child_err) = pipe()?;
    let outputs = [Some(Output::new(ours(out)?, Kind::Data1)), Some(Output::new(ours(err)?, Kind::Data2))];
    Ok(([child_in, child_out, child_err], Some(Inline { outputs, input, window: INITIAL_WINDOW, terminal: None })))
}

fn open_terminal(request: &Exec, identity: Option<&Identity>) -> Result<Stdio, Failure> {
    let open = || -> io::Result<(OwnedFd, OwnedFd)> {
        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::pty::unlockpt(&master)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        tcsetwinsize(&master, winsize(request.pty_rows, request.pty_cols))?;
        if let Some(identity) = identity {
            // For programs that open their terminal by its name.
            let _ = fchown(&slave, Some(Uid::from_raw(identity.uid)), None::<Gid>);
        }
        rustix::io::ioctl_fionbio(&master, true)?;
        Ok((master, slave))
    };
    let copy = |fd: &OwnedFd| fd.try_clone();
    let (master, slave) = open().map_err(|e| Failure::io(&e, "opening a terminal").with_kind(FailKind::Other))?;
    let parts = || -> io::Result<_> { Ok((copy(&slave)?, copy(&slave)?, copy(&master)?, copy(&master)?)) };
    let (out, err, input, output) = parts().map_err(|e| Failure::io(&e, "opening a terminal"))?;
    let inline = Inline {
        outputs: [Some(Output::new(output, Kind::Data1)), None],
        input: Some(Input::new(input, true)),
        window: INITIAL_WINDOW,
        terminal: Some(master),
    };
    Ok(([slave, out, err], Some(inline)))
}

/// A terminal's size; the kernel has 16 bits for each side.
pub fn winsize(rows: u32, cols: u32) -> Winsize {
    let side = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    Winsize { ws_row: side(rows), ws_col: side(cols), ws_xpixel: 0, ws_ypixel: 0 }
}

impl Output {
    fn new(fd: OwnedFd, kind: Kind) -> Self {
        Self { fd, kind, watched: false, last: None }
    }
}

impl Input {
    fn new(fd: OwnedFd, terminal: bool) -> Self {
        Self { fd, queue: VecDeque::new(), ended: false, watched: false, terminal }
    }
}

impl Running {
    /// What a failed start means to the one who asked.
    pub fn explain(&self, failure: StartFailure) -> Failure {
        let StartFailure { step, errno } = failure;
        let error = Errno::from_raw_os_error(errno);
        let limit = matches!(error, Errno::AGAIN | Errno::NOMEM);
        let says = |what: &str| format!("{what}: {}", describe(errno));
        let program = text(&self.program);
        let (kind, message) = match step {
            _ if limit => (FailKind::LimitReached, says("starting a process")),
            Step::Exec => match error {
                Errno::NOENT if self.program.contains(&b'/') && self.program_exists() => {
                    (FailKind::NotExecutable, format!("{program}: its interpreter is missing"))
                }
                Errno::NOENT if self.program.contains(&b'/') => (FailKind::NotFound, says(&program)),
                Errno::NOENT => (FailKind::NotFound, format!("{program}: no such program in PATH")),
                Errno::NOTDIR | Errno::NAMETOOLONG | Errno::LOOP => (FailKind::NotFound, says(&program)),
                Errno::ACCESS | Errno::NOEXEC | Errno::ISDIR | Errno::PERM => (FailKind::NotExecutable, says(&program)),
                Errno::TOOBIG => (FailKind::BadCommand, says(&program)),
                _ => (FailKind::Other, says(&program)),
            },
            Step::Cwd => (FailKind::BadCwd, says(&format!("working directory {}", text(&self.cwd)))),
            Step::Identity if error == Errno::INVAL => {
                (FailKind::UnknownUser, says("user or group outside of the machine"))
            }
            Step::Identity => (FailKind::Other, says("becoming the user")),
            Step::Cgroup => (FailKind::Other, says("joining the cgroup")),
            Step::Session => (FailKind::Other, says("making a session")),
            Step::Stdio => (FailKind::Other, says("setting up stdio")),
            Step::Capabilities => (FailKind::Other, says("dropping capabilities")),
            Step::Seccomp => (FailKind::Other, says("installing the seccomp filter")),
        };
        Failure { kind, errno, message }
    }

    fn program_exists(&self) -> bool {
        use std::os::unix::ffi::OsStrExt;
        let dir = std::path::Path::new(std::ffi::OsStr::from_bytes(&self.cwd));
        dir.join(std::ffi::OsStr::from_bytes(&self.program)).exists()
    }
}
