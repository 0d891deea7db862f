//! Namespaces, credentials and the birth of a machine's first process.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

/// Which namespaces a call is about; the kernel's CLONE_NEW* bits (namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespaces(pub u64);

impl Namespaces {
    /// None: all are shared.
    pub const NONE: Self = Self(0);
    /// Mount namespace.
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    /// PID namespace.
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    /// System V IPC and POSIX queues.
    pub const IPC: Self = Self(libc::CLONE_NEWIPC as u64);
    /// Host name.
    pub const UTS: Self = Self(libc::CLONE_NEWUTS as u64);
    /// Network.
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);
    /// User.
    pub const USER: Self = Self(libc::CLONE_NEWUSER as u64);
    /// Cgroup view.
    pub const CGROUP: Self = Self(libc::CLONE_NEWCGROUP as u64);

    /// Both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// linux/sched.h; libc's constant of that name overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A child made by [`clone3`].
#[derive(Debug)]
pub struct Child {
    /// Its pid in the caller's PID namespace.
    pub pid: i32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// Makes a child in new `namespaces`, in the cgroup that `cgroup` is a directory descriptor of (cgroup v2), and runs
/// `body` in it; the child exits with what `body` returns. clone3(2), Linux 5.7 for the cgroup.
///
/// The caller must be single-threaded: the child is a copy of the process, and a lock held by another thread would stay
/// held in it for ever. Nothing of the parent's destructors runs in the child.
///
/// # Errors
/// What clone3(2) says; [`io::ErrorKind::ResourceBusy`] when the process has more than one thread.
pub fn clone3(namespaces: Namespaces, cgroup: Option<BorrowedFd<'_>>, body: impl FnOnce() -> i32) -> io::Result<Child> {
    // A thread that was joined a moment ago may still be listed: joining waits for its memory, not for its end.
    let mut looks = 0;
    while std::fs::read_dir("/proc/self/task")?.count() != 1 {
        looks += 1;
        if looks > 2000 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "clone3 with more than one thread"));
        }
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
    let mut pidfd: RawFd = -1;
    // SAFETY: an all-zero clone_args is the valid "no options" value (clone3(2)).
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces.0 | libc::CLONE_PIDFD as u64;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(fd) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = fd.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and with no stack the call behaves like fork(2); `args` and `pidfd` outlive it, and the
    // process has one thread, so the child's copy of the allocator and of std is consistent.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
            // SAFETY: _exit never returns and runs no destructor of the parent's copy.
            unsafe { libc::_exit(code) }
        }
        pid => {
            // SAFETY: the kernel stored a new descriptor there that nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Child { pid: pid as i32, pidfd })
        }
    }
}

/// Makes a user namespace that maps its ids `0..count` to the host's `base..base + count` and in which no further user
/// namespace can be made (`max_user_namespaces` 0, namespaces(7)). user_namespaces(7).
///
/// It belongs to the host's uid `base`, not to root: what the kernel counts per user in a namespace (inotify instances
/// and watches, pending signals, …) it also counts for the namespace's owner in the one above, so that machines with one
/// owner would use up each other's and the host root's share (kernel/ucount.c, `inc_ucount`).
///
/// # Errors
/// What clone3(2) or writing the maps says. The caller must be single-threaded and privileged.
pub fn user_namespace(base: u32, count: u32) -> io::Result<OwnedFd> {
    use std::io::{Read, Write};
    let (mut wait, go) = io::pipe()?;
    let mut go = Some(go);
    let (mut report, mut done) = io::pipe()?;
    let child = clone3(Namespaces::NONE, None, || {
        // With a copy of its own it would wait for itself, for ever, when the parent is killed.
        drop(go.take());
        let mut byte = [0];
        let made = become_keeping_capabilities(base).and_then(|()| unshare(Namespaces::USER));
        let errno = made.map_or_else(|e| e.raw_os_error().unwrap_or(libc::EIO), |()| 0);
        if done.write_all(&errno.to_ne_bytes()).is_err() || errno != 0 || wait.read_exact(&mut byte).is_err() {
            return 1;
        }
        // The sysctl is that of the opener's own user namespace, whose root the child is once the map is written.
        let limited = std::fs::write("/proc/sys/user/max_user_namespaces", "0").is_ok();
        if done.write_all(&[u8::from(limited)]).is_err() || wait.read_exact(&mut byte).is_err() {
            return 1;
        }
        0
    })?;
    let result = (|| {
        let go = go.as_mut().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let mut errno = [0; 4];
        report.read_exact(&mut errno)?;
        match i32::from_ne_bytes(errno) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        let proc = format!("/proc/{}", child.pid);
        let map = format!("0 {base} {count}\n");
        std::fs::write(format!("{proc}/uid_map"), &map)?;
        std::fs::write(format!("{proc}/gid_map"), &map)?;
        // Needs no right, so that whoever comes first decides (user_namespaces(7)).
        std::fs::write(format!("{proc}/projid_map"), &map)?;
        go.write_all(b"m")?;
        let mut limited = [0];
        report.read_exact(&mut limited)?;
        if limited[0] != 1 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "max_user_namespaces could not be set"));
        }
        let file = std::fs::File::open(format!("{proc}/ns/user"))?;
        go.write_all(b"x")?;
        Ok(OwnedFd::from(file))
    })();
    drop(go);
    let _ = rustix::process::waitid(
        rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&child.pidfd)),
        rustix::process::WaitIdOptions::EXITED,
    );
    result
}

/// Takes a user and group id with all capabilities kept, which setresuid(2) otherwise takes away from who leaves uid 0
/// (capabilities(7), `SECBIT_NO_SETUID_FIXUP`).
fn become_keeping_capabilities(id: u32) -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // SAFETY: only the calling thread's credentials change. The bare calls: glibc's change every thread's.
    unsafe {
        check(libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0))?;
        check(libc::syscall(libc::SYS_setresgid, id, id, id) as i32)?;
        check(libc::syscall(libc::SYS_setresuid, id, id, id) as i32)
    }
}

/// Moves the calling thread into the namespace that `fd` refers to. setns(2).
///
/// # Errors
/// What setns(2) says.
pub fn enter(fd: BorrowedFd<'_>, kind: Namespaces) -> io::Result<()> {
    // SAFETY: setns changes only the calling thread's namespaces; the descriptor is open.
    check(unsafe { libc::setns(fd.as_raw_fd(), kind.0 as i32) })
}

/// Gives the calling thread new namespaces. unshare(2).
///
/// # Errors
/// What unshare(2) says.
pub fn unshare(kind: Namespaces) -> io::Result<()> {
    // SAFETY: only namespace bits are passed, never CLONE_FILES or CLONE_VM.
    check(unsafe { libc::unshare(kind.0 as i32) })
}

/// Becomes uid 0 and gid 0 of the current user namespace, without supplementary groups. setresuid(2).
///
/// # Errors
/// What the calls say. For a single-threaded process: only the calling thread changes.
pub fn become_root() -> io::Result<()> {
    // SAFETY: plain system calls without pointers (the group list is empty).
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) as i32)?;
        check(libc::syscall(libc::SYS_setresgid, 0, 0, 0) as i32)?;
        check(libc::syscall(libc::SYS_setresuid, 0, 0, 0) as i32)
    }
}

/// Takes every capability but `keep` out of the bounding set. capabilities(7).
///
/// # Errors
/// What prctl(2) says; numbers that the kernel does not know end the loop.
pub fn limit_bounding_set(keep: &[u32]) -> io::Result<()> {
    for capability in 0..64u32 {
        // SAFETY: prctl with these options takes plain numbers.
        let known = unsafe { libc::prctl(libc::PR_CAPBSET_READ, libc::c_ulong::from(capability), 0, 0, 0) };
        if known < 0 {
            break;
        }
        if known == 1 && !keep.contains(&capability) {
            // SAFETY: as above.
            check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) })?;
        }
    }
    Ok(())
}

/// Leaves the calling thread the capabilities `keep` and no other: permitted and effective. capset(2).
///
/// # Errors
/// What capset(2) says.
pub fn keep_capabilities(keep: &[u32]) -> io::Result<()> {
    // struct __user_cap_header_struct, version 3, and two struct __user_cap_data_struct of linux/capability.h.
    let header: [u32; 2] = [0x2008_0522, 0];
    let mask = keep.iter().filter(|n| **n < 64).fold(0_u64, |mask, n| mask | 1 << n);
    let (low, high) = (mask as u32, (mask >> 32) as u32);
    let data: [u32; 6] = [low, low, 0, high, high, 0];
    // SAFETY: both arrays have the layout and size that version 3 asks for and live through the call.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) } as i32)
}

/// Has the kernel kill this process when the thread that made it ends. PR_SET_PDEATHSIG(2const); cleared by later
/// changes of credentials, so set it last.
///
/// # Errors
/// What prctl(2) says.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: prctl with plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) })
}

/// Makes orphaned grandchildren the caller's children. PR_SET_CHILD_SUBREAPER(2const).
///
/// # Errors
/// What prctl(2) says.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: prctl with plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as libc::c_ulong, 0, 0, 0) })
}

/// Takes a real-time or deadline scheduling policy off the calling thread: a machine does not inherit its client's, and
/// such a thread can't enter a cgroup without a real-time budget. sched_setscheduler(2).
///
/// # Errors
/// What the kernel says.
pub fn ordinary_scheduling() -> io::Result<()> {
    // SAFETY: an all-zero sched_param is valid for SCHED_OTHER, and it outlives the call.
    let param: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: as above; 0 is the calling thread.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const param) })
}

/// The Landlock version of the running kernel. landlock_create_ruleset(2) with LANDLOCK_CREATE_RULESET_VERSION.
///
/// # Errors
/// ENOSYS or EOPNOTSUPP where there is none.
pub fn landlock_abi() -> io::Result<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the call takes no pointer and a size of zero.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
    u32::try_from(abi).map_err(|_| io::Error::last_os_error())
}

/// Places `fds` at the numbers 3, 4, … in that order, closes everything above, and executes `program`, a descriptor of
/// an executable file, with `argv` and an empty environment. execveat(2) with AT_EMPTY_PATH. Returns only on failure.
///
/// # Errors
/// The first call that failed.
pub fn exec_with_fds(program: OwnedFd, argv: &[&CStr], fds: Vec<OwnedFd>) -> io::Error {
    let first: RawFd = 3;
    let count = fds.len() as RawFd;
    // Moved out of the way first, so that no target number is still one of the sources.
    let floor = first + count + 1;
    let lift = |fd: RawFd| -> io::Result<RawFd> {
        // SAFETY: duplicates an open descriptor.
        let lifted = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor) };
        if lifted < 0 { Err(io::Error::last_os_error()) } else { Ok(lifted) }
    };
    let place = || -> io::Result<RawFd> {
        let program = lift(program.as_raw_fd())?;
        let lifted = fds.iter().map(|fd| lift(fd.as_raw_fd())).collect::<io::Result<Vec<_>>>()?;
        for (n, fd) in lifted.iter().enumerate() {
            // SAFETY: dup2 onto numbers that this single-threaded process is about to hand over; it clears CLOEXEC.
            check(unsafe { libc::dup2(*fd, first + n as RawFd) })?;
        }
        // The program's own descriptor must survive close_range, and close on exec by its flag.
        // SAFETY: marks descriptors; nothing in this process uses them after the exec.
        check(unsafe {
            libc::syscall(libc::SYS_close_range, first + count, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) as i32
        })?;
        Ok(program)
    };
    let program = match place() {
        Ok(fd) => fd,
        Err(e) => return e,
    };
    let mut words: Vec<*const libc::c_char> = argv.iter().map(|word| word.as_ptr()).collect();
    words.push(std::ptr::null());
    let env = [std::ptr::null::<libc::c_char>()];
    // SAFETY: NUL-terminated strings in NULL-terminated arrays that outlive the call.
    unsafe {
        libc::syscall(libc::SYS_execveat, program, c"".as_ptr(), words.as_ptr(), env.as_ptr(), libc::AT_EMPTY_PATH);
    }
    io::Error::last_os_error()
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
