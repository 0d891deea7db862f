//! Starts a process in a machine: the part that must happen between clone and execve, and what PID 1 needs of signals.
//!
//! Everything that allocates, opens or looks up happens before the clone, in [`Prepared`]. The child between clone and
//! execve makes system calls only: it is the copy of a process that may have had other threads, so a lock of the C
//! library (malloc's, say) may be held for ever (signal-safety(7)). For the same reason ids are changed with raw system
//! calls: glibc's `setresuid` would signal threads that do not exist in the child.
//!
//! A child that cannot get as far as execve says at which [`Step`] and with which errno over a pipe that execve closes;
//! no exit code is ever taken for that.

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags},
};
use std::{
    ffi::CString,
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

/// `CLONE_INTO_CGROUP` of clone(2), Linux 5.7; the libc crate's type for it differs between targets.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// Highest capability number tried; the kernel answers EINVAL above its own last one, which ends the loop.
const MAX_CAP: u64 = 63;
/// `_LINUX_CAPABILITY_VERSION_3` of capget(2): two words per set.
const CAP_VERSION_3: u32 = 0x2008_0522;

/// Who the process is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// User id: real, effective and saved.
    pub uid: u32,
    /// Group id: real, effective and saved.
    pub gid: u32,
    /// Supplementary groups, complete.
    pub groups: Vec<u32>,
}

/// What confines the process for good, and all its children.
#[derive(Debug, Clone, Copy)]
pub struct Confinement<'a> {
    /// Capabilities (bit per number) that stay in the bounding set, and in root's permitted set.
    pub keep_caps: u64,
    /// Seccomp program, installed without `no_new_privs` (so the caller needs CAP_SYS_ADMIN in its user namespace).
    pub filter: &'a [libc::sock_filter],
}

/// Everything that the child needs, made before the clone.
#[derive(Debug)]
pub struct Prepared<'a> {
    /// Paths to try in this order, as execvp(3) goes through PATH.
    pub programs: Vec<CString>,
    /// Arguments, the program's name first.
    pub argv: Vec<CString>,
    /// The whole environment.
    pub env: Vec<CString>,
    /// Working directory, entered as the target user.
    pub cwd: CString,
    /// Use `/` when `cwd` cannot be entered.
    pub cwd_may_fail: bool,
    /// stdin, stdout, stderr. None of them may be a descriptor below 3.
    pub stdio: [BorrowedFd<'a>; 3],
    /// stdin is a terminal that becomes the new session's.
    pub terminal: bool,
    /// Directory of the version 2 cgroup to be born in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Whom to become; unchanged when absent.
    pub identity: Option<&'a Identity>,
    /// Confinement; unchanged when absent.
    pub confinement: Option<Confinement<'a>>,
    /// Written to `oom_score_adj`; failing is fine.
    pub oom_score_adj: Option<i32>,
}

/// Where a child was when it could not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// Joining the cgroup after birth (only where clone3 is missing).
    Cgroup = 1,
    /// New session, or the terminal for it.
    Session = 2,
    /// stdin, stdout and stderr.
    Stdio = 3,
    /// Capability sets.
    Capabilities = 4,
    /// Seccomp.
    Seccomp = 5,
    /// User and groups.
    Identity = 6,
    /// Working directory.
    Cwd = 7,
    /// execve itself.
    Exec = 8,
}

impl Step {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Cgroup,
            2 => Self::Session,
            3 => Self::Stdio,
            4 => Self::Capabilities,
            5 => Self::Seccomp,
            6 => Self::Identity,
            7 => Self::Cwd,
            8 => Self::Exec,
            _ => return None,
        })
    }
}

/// Why a child never became the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartFailure {
    /// Where.
    pub step: Step,
    /// What the kernel said.
    pub errno: i32,
}

/// A child that was started. It must be waited for by its `pid`.
#[derive(Debug)]
pub struct SpawnedChild {
    /// Process id.
    pub pid: Pid,
    /// Stable reference to the process.
    pub pidfd: OwnedFd,
    /// Becomes readable when the child has become the program or has failed; see [`SpawnedChild::outcome`].
    pub report: OwnedFd,
}

impl SpawnedChild {
    /// Whether the child has become its program. Blocks until that is known, unless `report` was made non-blocking.
    /// A child that was killed on the way counts as started: its wait status tells the rest.
    ///
    /// # Errors
    /// What read(2) says, `WouldBlock` included.
    pub fn outcome(&self) -> io::Result<Result<(), StartFailure>> {
        let mut bytes = [0; 5];
        loop {
            return match rustix::io::read(&self.report, &mut bytes) {
                Err(Errno::INTR) => continue,
                Err(e) => Err(e.into()),
                Ok(5) => {
                    let errno = i32::from_ne_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
                    Ok(Step::from_byte(bytes[0]).map_or(Ok(()), |step| Err(StartFailure { step, errno })))
                }
                Ok(_) => Ok(Ok(())),
            };
        }
    }
}

/// Pointers into a list of C strings, null-terminated. Valid as long as the list is.
fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// What the child reads; made before the clone.
struct Plan<'a> {
    prepared: &'a Prepared<'a>,
    programs: Vec<*const libc::c_char>,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    /// `/bin/sh`, a place for the script, and the arguments.
    script_argv: Vec<*const libc::c_char>,
    oom: Option<CString>,
    report: RawFd,
    /// Whether the child has to move itself into the cgroup.
    join_cgroup: bool,
}

/// Starts a process: clone3(2) with a pidfd, born in its cgroup. Where clone3 is missing: clone, pidfd_open(2), and the
/// child moves itself.
///
/// # Errors
/// What clone says: `EAGAIN` and `ENOMEM` mean that a limit is reached.
pub fn spawn(prepared: &Prepared<'_>) -> io::Result<SpawnedChild> {
    let (report, report_writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut script_argv = vec![c"/bin/sh".as_ptr(), ptr::null()];
    script_argv.extend(prepared.argv.iter().skip(1).map(|s| s.as_ptr()));
    script_argv.push(ptr::null());
    let mut plan = Plan {
        prepared,
        programs: pointers(&prepared.programs),
        argv: pointers(&prepared.argv),
        env: pointers(&prepared.env),
        script_argv,
        oom: prepared.oom_score_adj.and_then(|n| CString::new(n.to_string()).ok()),
        report: report_writer.as_raw_fd(),
        join_cgroup: false,
    };

    // SAFETY: all zero is a valid value of this plain structure; it means "nothing asked for".
    let mut args: libc::clone_args = unsafe { MaybeUninit::zeroed().assume_init() };
    let mut pidfd: RawFd = -1;
    args.flags = libc::CLONE_PIDFD as u64;
    args.pidfd = ptr::from_mut(&mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = prepared.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and with no stack given, clone3 is fork(2): the child goes on here on a copy of the
    // stack. `args` is valid for its size, and `pidfd`, which it points to, outlives the call.
    let mut pid = unsafe { libc::syscall(libc::SYS_clone3, ptr::from_ref(&args), size_of::<libc::clone_args>()) };
    if pid < 0 {
        let error = io::Error::last_os_error();
        // EBADF: a directory of a version 1 hierarchy, into which nobody is born.
        let without = error.raw_os_error() == Some(libc::EBADF) && prepared.cgroup.is_some();
        if error.raw_os_error() != Some(libc::ENOSYS) && !without {
            return Err(error);
        }
        plan.join_cgroup = prepared.cgroup.is_some();
        // SAFETY: as above: clone with only an exit signal is fork(2).
        pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if pid == 0 {
        // SAFETY: this is the child of a fork; the plan is complete and its pointers are into `prepared`, which lives.
        unsafe { child(&mut plan) }
    }
    drop(report_writer);
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let pidfd = if pidfd >= 0 {
        // SAFETY: the kernel has just made this descriptor for us; nobody else knows of it.
        unsafe { OwnedFd::from_raw_fd(pidfd) }
    } else {
        // The child is not waited for before the caller knows its pid, so the number still means it.
        rustix::process::pidfd_open(pid, PidfdFlags::empty())?
    };
    Ok(SpawnedChild { pid, pidfd, report })
}

fn errno() -> i32 {
    // SAFETY: glibc's errno is a thread-local that is always there.
    unsafe { *libc::__errno_location() }
}

/// Says why, and ends the child.
///
/// # Safety
/// Only in the child of a fork.
unsafe fn give_up(report: RawFd, step: Step, errno: i32) -> ! {
    let number = errno.to_ne_bytes();
    let bytes = [step as u8, number[0], number[1], number[2], number[3]];
    // SAFETY: plain system calls on a valid buffer; `_exit` runs no handlers of the copied process.
    unsafe {
        libc::write(report, bytes.as_ptr().cast(), bytes.len());
        libc::_exit(127)
    }
}

/// The life of the child up to execve.
///
/// # Safety
/// Only in the child of a fork; all pointers in `plan` must be valid.
unsafe fn child(plan: &mut Plan<'_>) -> ! {
    let prepared = plan.prepared;
    let mut report = plan.report;
    macro_rules! must {
        ($step:expr, $call:expr) => {
            if $call < 0 {
                give_up(report, $step, errno());
            }
        };
    }
    // SAFETY: system calls only, on memory that was made before the fork; nothing here allocates or takes a lock.
    unsafe {
        if plan.join_cgroup
            && let Some(cgroup) = prepared.cgroup
        {
            let procs = libc::openat(cgroup.as_raw_fd(), c"cgroup.procs".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            must!(Step::Cgroup, procs);
            must!(Step::Cgroup, libc::write(procs, c"0".as_ptr().cast(), 1));
        }

        must!(Step::Session, libc::setsid());
        if prepared.terminal {
            must!(Step::Session, libc::ioctl(prepared.stdio[0].as_raw_fd(), libc::TIOCSCTTY, 0));
        }

        for (number, fd) in prepared.stdio.iter().enumerate() {
            must!(Step::Stdio, libc::dup2(fd.as_raw_fd(), number as RawFd));
        }
        if report != 3 {
            must!(Step::Stdio, libc::dup3(report, 3, libc::O_CLOEXEC));
            report = 3;
        }
        // Before Linux 5.9 this fails; every descriptor of ours is closed on exec anyway.
        libc::syscall(libc::SYS_close_range, 4, libc::c_uint::MAX, 0);

        // The kernel's own structure (handler, flags, restorer, mask), all zero for the default. Not glibc's call, which
        // refuses signals 32 and 33, that a parent may have left ignored. KILL and STOP refuse, and need nothing.
        let default = [0_u64; 4];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null_mut::<u64>(), 8);
        }
        let mut none: libc::sigset_t = MaybeUninit::zeroed().assume_init();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        libc::umask(0o022);
        // 1, not 0: a host whose core_pattern is a program would run it, as the host's root, at every crash in a machine;
        // this value alone keeps it from that, and no file is written either (fs/coredump.c).
        let no_core = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
        libc::setrlimit(libc::RLIMIT_CORE, &no_core);

        if let Some(value) = &plan.oom {
            // The files in /proc of a process that is not dumpable belong to the host's root (proc(5)).
            let dumpable = libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0);
            libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
            let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if file >= 0 {
                libc::write(file, value.as_ptr().cast(), value.as_bytes().len());
                libc::close(file);
            }
            libc::prctl(libc::PR_SET_DUMPABLE, dumpable, 0, 0, 0);
        }

        if let Some(confinement) = prepared.confinement {
            if let Err(e) = confine(confinement, prepared.identity) {
                give_up(report, e.0, e.1);
            }
        } else if let Some(identity) = prepared.identity {
            become_user(identity).unwrap_or_else(|e| give_up(report, e.0, e.1));
        }

        if libc::chdir(prepared.cwd.as_ptr()) < 0 {
            let error = errno();
            if !prepared.cwd_may_fail || libc::chdir(c"/".as_ptr()) < 0 {
                give_up(report, Step::Cwd, error);
            }
        }

        let error = exec(plan);
        give_up(report, Step::Exec, error)
    }
}

/// Bounding set, seccomp, own capability sets, ids; in this order, as each needs rights that a later one takes away.
///
/// # Safety
/// Only in the child of a fork.
unsafe fn confine(confinement: Confinement<'_>, identity: Option<&Identity>) -> Result<(), (Step, i32)> {
    // SAFETY: system calls only, on memory that was made before the fork or on the stack.
    unsafe {
        for cap in 0..=MAX_CAP {
            if confinement.keep_caps & (1 << cap) == 0 && libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 {
                if errno() == libc::EINVAL {
                    break;
                }
                return Err((Step::Capabilities, errno()));
            }
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);

        let program = libc::sock_fprog {
            len: confinement.filter.len() as libc::c_ushort,
            filter: confinement.filter.as_ptr().cast_mut(),
        };
        if libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, ptr::from_ref(&program)) < 0 {
            return Err((Step::Seccomp, errno()));
        }

        // capget(2): header {version, pid}, then {effective, permitted, inheritable} for numbers below 32 and above.
        let header = [CAP_VERSION_3, 0];
        let mut sets = [[0_u32; 3]; 2];
        if libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) < 0 {
            return Err((Step::Capabilities, errno()));
        }
        let keep = [confinement.keep_caps as u32, (confinement.keep_caps >> 32) as u32];
        for (set, keep) in sets.iter_mut().zip(keep) {
            *set = [set[0] & keep, set[1] & keep, 0];
        }
        if libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) < 0 {
            return Err((Step::Capabilities, errno()));
        }
        identity.map_or(Ok(()), |identity| become_user(identity))
    }
}

/// Groups, group, user.
///
/// # Safety
/// Only in the child of a fork: other threads would keep their ids.
unsafe fn become_user(identity: &Identity) -> Result<(), (Step, i32)> {
    let (uid, gid) = (identity.uid, identity.gid);
    // SAFETY: system calls on a valid list.
    unsafe {
        if libc::syscall(libc::SYS_setgroups, identity.groups.len(), identity.groups.as_ptr()) < 0
            || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
            || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
        {
            return Err((Step::Identity, errno()));
        }
    }
    Ok(())
}

/// Tries the programs as execvp(3) does; returns the errno that says it best.
///
/// # Safety
/// Only in the child of a fork; all pointers in `plan` must be valid.
unsafe fn exec(plan: &mut Plan<'_>) -> i32 {
    let mut denied = false;
    for at in 0..plan.programs.len() - 1 {
        let program = plan.programs[at];
        // SAFETY: null-terminated lists of pointers to C strings that live in `prepared`.
        unsafe { libc::execve(program, plan.argv.as_ptr(), plan.env.as_ptr()) };
        match errno() {
            libc::EACCES => denied = true,
            libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ESTALE | libc::ETIMEDOUT => {}
            // SAFETY: `program` is a C string that lives in `prepared`.
            libc::ENOEXEC if !unsafe { is_elf(program) } => {
                // A script without a first line: the shell runs it, as execvp has it.
                plan.script_argv[1] = program;
                // SAFETY: as above.
                unsafe { libc::execve(c"/bin/sh".as_ptr(), plan.script_argv.as_ptr(), plan.env.as_ptr()) };
                return libc::ENOEXEC;
            }
            error => return error,
        }
    }
    if denied { libc::EACCES } else { libc::ENOENT }
}

/// Whether a file is a program of another architecture rather than a script.
///
/// # Safety
/// `path` must be a C string.
unsafe fn is_elf(path: *const libc::c_char) -> bool {
    let mut start = [0_u8; 4];
    // SAFETY: system calls on a C string and a valid buffer.
    unsafe {
        let file = libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK);
        file >= 0 && libc::read(file, start.as_mut_ptr().cast(), 4) == 4 && start == *b"\x7fELF"
    }
}

/// Blocks SIGCHLD (and, for PID 1, every signal) in this thread and those it will make, and returns a non-blocking
/// signalfd(2) that becomes readable when children ended.
///
/// # Errors
/// What sigprocmask(2) and signalfd(2) say.
pub fn child_signals(all: bool) -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by the sig*set calls before use; the descriptor is new and ours.
    unsafe {
        let mut set: libc::sigset_t = MaybeUninit::zeroed().assume_init();
        if all {
            libc::sigfillset(&mut set);
        } else {
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGCHLD);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &set, ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Takes over a descriptor that the parent process has left open under an agreed number, and marks it closed on exec.
///
/// # Errors
/// When the number is below 3 (those stay the standard streams), or when it is not open.
///
/// # Safety
/// Nothing else in the process may own that number; to be called at the very start of `main`.
unsafe fn take_fd(number: RawFd) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: fcntl takes any number.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: open, and by the caller's word nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes over descriptors that the parent process has left open under agreed numbers, and closes all others above the
/// standard streams. Only the first call in a process gets any, so that no number has two owners; it belongs at the very
/// start of `main`, before anything is opened.
///
/// # Errors
/// When called again, when a number is below 3, twice in the list, or not open.
pub fn inherited_fds<const N: usize>(numbers: [RawFd; N]) -> io::Result<[OwnedFd; N]> {
    use std::sync::atomic::{AtomicBool, Ordering};
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let doubled = numbers.iter().enumerate().any(|(i, n)| numbers[..i].contains(n));
    if doubled || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut fds = Vec::with_capacity(N);
    for number in numbers {
        // SAFETY: called once per process, before `main` opens anything of its own (the caller's documented duty), and
        // no number occurs twice.
        fds.push(unsafe { take_fd(number)? });
    }
    let mut kept = numbers;
    kept.sort_unstable();
    let mut first = 3;
    for next in kept.into_iter().chain([RawFd::MAX]) {
        if first < next {
            // SAFETY: closes what nobody in this process has opened; before Linux 5.9 it does nothing.
            unsafe { libc::syscall(libc::SYS_close_range, first, next - 1, 0) };
        }
        first = next.saturating_add(1);
    }
    fds.try_into().map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Keeps the C library's heap in one arena: a thread's own arena would cost an idle agent 130 KiB each.
pub fn one_heap() {
    // SAFETY: mallopt only sets parameters.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Gives freed memory back to the kernel.
pub fn trim_heap() {
    // SAFETY: takes malloc's locks itself.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Read, os::fd::AsFd};

    fn run(programs: &[&std::ffi::CStr], argv: &[&std::ffi::CStr], cwd: &std::ffi::CStr) -> (SpawnedChild, String) {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (mut out, out_writer) = std::io::pipe().unwrap();
        let child = spawn(&Prepared {
            programs: programs.iter().map(|&s| s.to_owned()).collect(),
            argv: argv.iter().map(|&s| s.to_owned()).collect(),
            env: vec![c"A=b".to_owned()],
            cwd: cwd.to_owned(),
            cwd_may_fail: false,
            stdio: [null.as_fd(), out_writer.as_fd(), out_writer.as_fd()],
            terminal: false,
            cgroup: None,
            identity: None,
            confinement: None,
            oom_score_adj: None,
        })
        .unwrap();
        drop(out_writer);
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        (child, text)
    }

    fn wait(child: &SpawnedChild) -> Option<i32> {
        rustix::process::waitpid(Some(child.pid), rustix::process::WaitOptions::empty())
            .unwrap()
            .unwrap()
            .1
            .exit_status()
    }

    #[test]
    fn a_program_runs_with_its_environment_and_directory() {
        let (child, text) = run(&[c"/nope/sh", c"/bin/sh"], &[c"sh", c"-c", c"echo $A; pwd; umask; exit 3"], c"/usr");
        assert_eq!(child.outcome().unwrap(), Ok(()));
        assert_eq!(text, "b\n/usr\n0022\n");
        assert_eq!(wait(&child), Some(3));
    }

    #[test]
    fn a_failure_names_its_step() {
        let cases: [(&std::ffi::CStr, &std::ffi::CStr, Step, i32); 4] = [
            (c"/nope", c"/", Step::Exec, libc::ENOENT),
            (c"/etc/passwd", c"/", Step::Exec, libc::EACCES),
            (c"/bin/true", c"/nope", Step::Cwd, libc::ENOENT),
            (c"/bin/true", c"/etc/passwd", Step::Cwd, libc::ENOTDIR),
        ];
        for (program, cwd, step, errno) in cases {
            let (child, _) = run(&[program], &[c"x"], cwd);
            assert_eq!(child.outcome().unwrap(), Err(StartFailure { step, errno }));
            wait(&child);
        }
    }
}
