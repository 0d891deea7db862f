//! The seccomp allow-list that every exec'd process and its children live under.
//!
//! One program for the kernel's classic BPF (seccomp(2)): the architecture is checked, then the system call's number is
//! searched in a tree of ranges, and the few calls that depend on their arguments are looked at. A tree, not a chain,
//! because the kernel runs the program once for every number when it is installed, which is at every exec: a chain of
//! 300 comparisons would cost more than the fork.
//!
//! What is not listed answers ENOSYS, so that C libraries fall back as they do on an older kernel (clone3, above all:
//! its flags are behind a pointer, where no filter can look). What is known and refused answers EPERM. Foreign
//! architectures and x32 numbers end the process.

use libc::{c_long, sock_filter};

const LD_W_ABS: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JA: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JGE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JSET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
const NOT_PERMITTED: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const NO_SUCH_CALL: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
const NO_SUCH_PROTOCOL: u32 = libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT as u32;
const NO_SUCH_FAMILY: u32 = libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32;

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
/// The low half of an argument; both architectures are little-endian.
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

/// `AUDIT_ARCH_*` of linux/audit.h.
#[cfg(target_arch = "x86_64")]
const THIS_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const THIS_ARCH: u32 = 0xc000_00b7;
/// Not in the libc crate's table.
const IO_PGETEVENTS: c_long = if cfg!(target_arch = "x86_64") { 333 } else { 292 };
/// Numbers from here on belong to the x32 ABI.
const X32_BIT: u32 = 0x4000_0000;

/// `CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET`. (`CLONE_NEWTIME` lies in the exit signal's
/// byte, where clone(2) does not take it as a flag.)
const NEW_NAMESPACE: u32 =
    0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000;

/// Protocols of IPv4 and IPv6: what a family has by default, ICMP ("ping sockets"), TCP, UDP, ICMPv6. Go's listeners ask
/// for MPTCP first and take TCP when there is none.
const IP_PROTOCOLS: [u32; 5] = [0, 1, 6, 17, 58];
/// Protocols of netlink: routes, socket diagnosis, and the generic one. Not: packet rules, audit, IPsec, cryptography, what
/// only drivers and security modules serve, and device events, since the host's are heard in every network namespace that
/// belongs to its user namespace, as a cell does.
const NETLINK_PROTOCOLS: [u32; 3] = [0, 4, 16];
/// What a call names the machine's first process by.
const AGENT: u32 = 1;

/// How a system call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Always(u32),
    /// clone: no new namespaces.
    Clone,
    /// socket and socketpair: families that are namespaced, and of those the protocols that programs need.
    Socket,
    /// Calls that change a process: not the machine's first, which belongs to root inside as every process does. The
    /// argument with this index says which process.
    NotTheAgent(u32),
    /// ioctl: nothing that types into a terminal for another process.
    Ioctl,
    /// personality: asking, the default, and no address randomisation.
    Personality,
}

/// Allowed whatever the arguments. Numbers that Linux gave after the libc crate's tables are written out.
#[rustfmt::skip]
const ALLOWED: &[c_long] = &[
    // Files and directories.
    libc::SYS_read, libc::SYS_write, libc::SYS_close, libc::SYS_fstat, libc::SYS_lseek, libc::SYS_pread64,
    libc::SYS_pwrite64, libc::SYS_readv, libc::SYS_writev, libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2,
    libc::SYS_pwritev2, libc::SYS_openat, libc::SYS_openat2, libc::SYS_close_range, libc::SYS_dup, libc::SYS_dup3,
    libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_sync, libc::SYS_syncfs,
    libc::SYS_sync_file_range, libc::SYS_truncate, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_getdents64,
    libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_unlinkat,
    libc::SYS_symlinkat, libc::SYS_linkat, libc::SYS_renameat2, libc::SYS_readlinkat, libc::SYS_fchmod,
    libc::SYS_fchmodat, libc::SYS_fchmodat2, libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_faccessat,
    libc::SYS_faccessat2, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs,
    libc::SYS_utimensat, libc::SYS_umask, libc::SYS_chroot, libc::SYS_fadvise64, libc::SYS_readahead,
    libc::SYS_copy_file_range, libc::SYS_sendfile, libc::SYS_splice, libc::SYS_tee, libc::SYS_vmsplice,
    libc::SYS_pipe2, libc::SYS_name_to_handle_at, libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr,
    libc::SYS_getxattr, libc::SYS_lgetxattr, libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr,
    libc::SYS_flistxattr, libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr,
    451, // cachestat
    463, 464, 465, 466, // setxattrat, getxattrat, listxattrat, removexattrat
    468, 469, // file_getattr, file_setattr
    // Waiting for files.
    libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_signalfd4, libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime, libc::SYS_inotify_init1, libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch, libc::SYS_io_setup, libc::SYS_io_destroy, libc::SYS_io_submit, libc::SYS_io_cancel,
    libc::SYS_io_getevents, IO_PGETEVENTS, libc::SYS_fanotify_init, libc::SYS_fanotify_mark,
    // Memory.
    libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_madvise,
    libc::SYS_process_madvise, libc::SYS_brk, libc::SYS_msync, libc::SYS_mincore, libc::SYS_mlock, libc::SYS_mlock2,
    libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_membarrier, libc::SYS_memfd_create,
    libc::SYS_remap_file_pages, libc::SYS_mbind, libc::SYS_get_mempolicy, libc::SYS_set_mempolicy,
    libc::SYS_set_mempolicy_home_node, libc::SYS_pkey_alloc,
    libc::SYS_pkey_free, libc::SYS_pkey_mprotect, libc::SYS_process_mrelease,
    453, // map_shadow_stack
    462, // mseal
    // Processes and threads.
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
    libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list, libc::SYS_rseq,
    libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid, libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid,
    libc::SYS_setsid, libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd, libc::SYS_pidfd_send_signal, libc::SYS_prctl, libc::SYS_ptrace,
    libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_kcmp, libc::SYS_futex,
    libc::SYS_futex_waitv, libc::SYS_getrusage, libc::SYS_getrlimit, libc::SYS_setrlimit,
    libc::SYS_getpriority, libc::SYS_ioprio_get, libc::SYS_sched_yield, libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
    libc::SYS_sched_rr_get_interval, libc::SYS_getcpu, libc::SYS_times, libc::SYS_vhangup,
    454, 455, 456, // futex_wake, futex_wait, futex_requeue
    // Signals.
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo, libc::SYS_rt_sigsuspend,
    libc::SYS_sigaltstack, libc::SYS_restart_syscall,
    // Users, capabilities, confinement of one's own.
    libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getresuid,
    libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid,
    libc::SYS_setregid, libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid,
    libc::SYS_setgroups, libc::SYS_capget, libc::SYS_capset, libc::SYS_seccomp, libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self,
    459, 460, 461, // lsm_get_self_attr, lsm_set_self_attr, lsm_list_modules
    // Time.
    libc::SYS_gettimeofday, libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create, libc::SYS_timer_settime,
    libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete, libc::SYS_adjtimex,
    libc::SYS_clock_adjtime, libc::SYS_clock_settime, libc::SYS_settimeofday,
    // Sockets, beside socket and socketpair themselves.
    libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_connect,
    libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_sendto, libc::SYS_recvfrom, libc::SYS_sendmsg,
    libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg, libc::SYS_shutdown, libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    // System V and POSIX message passing.
    libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
    libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl,
    libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
    // The system.
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom,
];

/// Calls that only older architectures have.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_LEGACY: &[c_long] = &[
    libc::SYS_open, libc::SYS_creat, libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink,
    libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_mknod, libc::SYS_unlink, libc::SYS_link, libc::SYS_symlink,
    libc::SYS_rename, libc::SYS_renameat, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_utime,
    libc::SYS_utimes, libc::SYS_futimesat, libc::SYS_getdents, libc::SYS_dup2, libc::SYS_pipe, libc::SYS_poll,
    libc::SYS_select, libc::SYS_epoll_create, libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd,
    libc::SYS_inotify_init, libc::SYS_fork, libc::SYS_vfork, libc::SYS_getpgrp, libc::SYS_alarm, libc::SYS_pause,
    libc::SYS_time, libc::SYS_arch_prctl, libc::SYS_ustat, libc::SYS_sysfs,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[c_long] = &[];

/// Known, and refused as if for lack of rights.
#[rustfmt::skip]
const REFUSED: &[c_long] = &[
    libc::SYS_unshare, libc::SYS_setns, libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root,
    libc::SYS_open_tree, libc::SYS_move_mount, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount,
    libc::SYS_fspick, libc::SYS_mount_setattr, libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key,
    libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register, libc::SYS_userfaultfd, libc::SYS_kexec_load, libc::SYS_init_module,
    libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_reboot,
    libc::SYS_syslog, libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_acct, libc::SYS_open_by_handle_at,
    libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_lookup_dcookie, libc::SYS_nfsservctl,
];
#[cfg(target_arch = "x86_64")]
const REFUSED_LEGACY: &[c_long] =
    &[libc::SYS_kexec_file_load, libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_uselib];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_LEGACY: &[c_long] = &[];

/// Calls that change a process, each with the index of the argument that says which.
const NOT_OF_THE_AGENT: &[(c_long, u32)] = &[
    (libc::SYS_prlimit64, 0),
    (libc::SYS_sched_setaffinity, 0),
    (libc::SYS_sched_setattr, 0),
    (libc::SYS_sched_setparam, 0),
    (libc::SYS_sched_setscheduler, 0),
    (libc::SYS_migrate_pages, 0),
    (libc::SYS_move_pages, 0),
    (libc::SYS_setpriority, 1),
    (libc::SYS_ioprio_set, 1),
];

fn answers() -> Vec<(u32, Answer)> {
    let always = |list: &'static [c_long], action| list.iter().map(move |&n| (n as u32, Answer::Always(action)));
    let mut all: Vec<(u32, Answer)> = always(ALLOWED, ALLOW)
        .chain(always(ALLOWED_LEGACY, ALLOW))
        .chain(always(REFUSED, NOT_PERMITTED))
        .chain(always(REFUSED_LEGACY, NOT_PERMITTED))
        .chain([
            (libc::SYS_clone as u32, Answer::Clone),
            (libc::SYS_socket as u32, Answer::Socket),
            (libc::SYS_socketpair as u32, Answer::Socket),
            (libc::SYS_ioctl as u32, Answer::Ioctl),
            (libc::SYS_personality as u32, Answer::Personality),
        ])
        .chain(NOT_OF_THE_AGENT.iter().map(|&(number, index)| (number as u32, Answer::NotTheAgent(index))))
        .collect();
    all.sort_unstable_by_key(|&(number, _)| number);
    all
}

/// Every number from 0 up to the last, as first numbers of ranges with one answer each.
fn ranges() -> Vec<(u32, Answer)> {
    let unknown = Answer::Always(NO_SUCH_CALL);
    let mut ranges: Vec<(u32, Answer)> = Vec::new();
    let mut push = |first: u32, answer: Answer| match ranges.last_mut() {
        Some((_, last)) if *last == answer => {}
        Some((at, last)) if *at == first => *last = answer,
        _ => ranges.push((first, answer)),
    };
    push(0, unknown);
    let mut next = 0;
    for (number, answer) in answers() {
        if number > next {
            push(next, unknown);
        }
        push(number, answer);
        next = number + 1;
    }
    push(next, unknown);
    push(X32_BIT, Answer::Always(KILL));
    ranges
}

const fn statement(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// The argument holds one of `values` (or not), in its low half after `mask`.
fn one_of(index: u32, mask: u32, values: &[u32], yes: u32, no: u32) -> Vec<sock_filter> {
    let mut code = vec![statement(LD_W_ABS, argument(index)), statement(AND, mask)];
    for (i, &value) in values.iter().enumerate() {
        // To the last instruction: over the comparisons that are left and the "no".
        code.push(jump(JEQ, value, (values.len() - i) as u8, 0));
    }
    code.extend([statement(RET, no), statement(RET, yes)]);
    code
}

fn leaf(answer: Answer) -> Vec<sock_filter> {
    match answer {
        Answer::Always(action) => vec![statement(RET, action)],
        Answer::Clone => vec![
            statement(LD_W_ABS, argument(0)),
            jump(JSET, NEW_NAMESPACE, 0, 1),
            statement(RET, NOT_PERMITTED),
            statement(RET, ALLOW),
        ],
        Answer::Socket => {
            let ip = one_of(2, u32::MAX, &IP_PROTOCOLS, ALLOW, NO_SUCH_PROTOCOL);
            let netlink = one_of(2, u32::MAX, &NETLINK_PROTOCOLS, ALLOW, NO_SUCH_PROTOCOL);
            let mut code = vec![
                statement(LD_W_ABS, argument(0)),
                jump(JEQ, libc::AF_UNIX as u32, 4, 0),
                jump(JEQ, libc::AF_INET as u32, 4, 0),
                jump(JEQ, libc::AF_INET6 as u32, 3, 0),
                jump(JEQ, libc::AF_NETLINK as u32, 2 + ip.len() as u8, 0),
                statement(RET, NO_SUCH_FAMILY),
                statement(RET, ALLOW),
            ];
            code.extend(ip);
            code.extend(netlink);
            code
        }
        Answer::NotTheAgent(index) => one_of(index, u32::MAX, &[AGENT], NOT_PERMITTED, ALLOW),
        Answer::Ioctl => one_of(1, u32::MAX, &[libc::TIOCSTI as u32, libc::TIOCLINUX as u32], NOT_PERMITTED, ALLOW),
        Answer::Personality => {
            one_of(0, u32::MAX, &[0, libc::ADDR_NO_RANDOMIZE as u32, u32::MAX], ALLOW, NOT_PERMITTED)
        }
    }
}

fn tree(ranges: &[(u32, Answer)]) -> Vec<sock_filter> {
    if let [(_, answer)] = ranges {
        return leaf(*answer);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (below, above) = (tree(low), tree(high));
    let mut code = Vec::with_capacity(below.len() + above.len() + 2);
    match u8::try_from(below.len()) {
        Ok(distance) => code.push(jump(JGE, high[0].0, distance, 0)),
        // Conditional jumps reach 255 instructions, the unconditional one any distance.
        Err(_) => code.extend([jump(JGE, high[0].0, 0, 1), statement(JA, below.len() as u32)]),
    }
    code.extend(below);
    code.extend(above);
    code
}

/// The program.
pub fn program() -> Vec<sock_filter> {
    let mut code =
        vec![statement(LD_W_ABS, ARCH), jump(JEQ, THIS_ARCH, 1, 0), statement(RET, KILL), statement(LD_W_ABS, NUMBER)];
    code.extend(tree(&ranges()));
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel's interpreter would answer.
    fn run(program: &[sock_filter], arch: u32, number: u32, args: [u64; 6]) -> u32 {
        let mut data = [0_u8; 64];
        data[..4].copy_from_slice(&number.to_le_bytes());
        data[4..8].copy_from_slice(&arch.to_le_bytes());
        for (i, arg) in args.iter().enumerate() {
            data[16 + 8 * i..24 + 8 * i].copy_from_slice(&arg.to_le_bytes());
        }
        let (mut at, mut a) = (0, 0_u32);
        loop {
            let op = program[at];
            at += 1;
            match op.code {
                LD_W_ABS => {
                    let offset = op.k as usize;
                    a = u32::from_le_bytes(data[offset..offset + 4].try_into().unwrap());
                }
                AND => a &= op.k,
                JA => at += op.k as usize,
                JEQ => at += usize::from(if a == op.k { op.jt } else { op.jf }),
                JGE => at += usize::from(if a >= op.k { op.jt } else { op.jf }),
                JSET => at += usize::from(if a & op.k != 0 { op.jt } else { op.jf }),
                RET => return op.k,
                code => panic!("unknown instruction {code}"),
            }
        }
    }

    #[test]
    fn no_number_is_listed_twice() {
        let all = answers();
        assert!(all.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn every_number_gets_the_answer_of_its_list() {
        let program = program();
        assert!(program.len() < 1000, "{}", program.len());
        let all = answers();
        for number in 0..1000 {
            let want = match all.iter().find(|(n, _)| *n == number) {
                None => NO_SUCH_CALL,
                Some((_, Answer::Always(action))) => *action,
                Some(_) => continue,
            };
            assert_eq!(run(&program, THIS_ARCH, number, [0; 6]), want, "number {number}");
        }
        assert_eq!(run(&program, THIS_ARCH, libc::SYS_clone3 as u32, [0; 6]), NO_SUCH_CALL);
        assert_eq!(run(&program, THIS_ARCH, X32_BIT, [0; 6]), KILL);
        assert_eq!(run(&program, THIS_ARCH, u32::MAX, [0; 6]), KILL);
        assert_eq!(run(&program, 0x4000_0003, 1, [0; 6]), KILL, "32-bit x86");
    }

    #[test]
    fn arguments_decide() {
        let program = program();
        let high = 0xdead_beef_0000_0000_u64;
        let cases = [
            (libc::SYS_clone, [0x1200_0000_u64 & !0x1000_0000 & !0x0200_0000, 0], ALLOW),
            (libc::SYS_clone, [libc::CLONE_VM as u64 | 17, 0], ALLOW),
            (libc::SYS_clone, [libc::CLONE_NEWUSER as u64 | 17, 0], NOT_PERMITTED),
            (libc::SYS_clone, [libc::CLONE_NEWNET as u64, 0], NOT_PERMITTED),
            (libc::SYS_clone, [libc::CLONE_NEWCGROUP as u64, 0], NOT_PERMITTED),
            (libc::SYS_socket, [libc::AF_INET6 as u64, 0], ALLOW),
            (libc::SYS_socket, [libc::AF_VSOCK as u64, 0], NO_SUCH_FAMILY),
            (libc::SYS_socket, [libc::AF_PACKET as u64, 0], NO_SUCH_FAMILY),
            (libc::SYS_socketpair, [libc::AF_UNIX as u64, 0], ALLOW),
            (libc::SYS_prlimit64, [0, 7], ALLOW),
            (libc::SYS_prlimit64, [77, 7], ALLOW),
            (libc::SYS_prlimit64, [1 | high, 7], NOT_PERMITTED),
            (libc::SYS_setpriority, [0, 1], NOT_PERMITTED),
            (libc::SYS_setpriority, [1, 0], ALLOW),
            (libc::SYS_ioctl, [0, libc::TCGETS], ALLOW),
            (libc::SYS_ioctl, [0, libc::TIOCSTI], NOT_PERMITTED),
            (libc::SYS_ioctl, [0, libc::TIOCSTI | high], NOT_PERMITTED),
            (libc::SYS_ioctl, [0, libc::TIOCLINUX | high], NOT_PERMITTED),
            (libc::SYS_personality, [0xffff_ffff, 0], ALLOW),
            (libc::SYS_personality, [libc::ADDR_NO_RANDOMIZE as u64, 0], ALLOW),
            (libc::SYS_personality, [8, 0], NOT_PERMITTED),
        ];
        for (number, [a, b], want) in cases {
            assert_eq!(run(&program, THIS_ARCH, number as u32, [a, b, 0, 0, 0, 0]), want, "{number} {a:#x} {b:#x}");
        }
        let protocols = [
            (libc::AF_INET, 0, ALLOW),
            (libc::AF_INET, 6, ALLOW),
            (libc::AF_INET6, 17, ALLOW),
            (libc::AF_INET6, 58, ALLOW),
            (libc::AF_INET, 132, NO_SUCH_PROTOCOL),
            (libc::AF_INET6, 262, NO_SUCH_PROTOCOL),
            (libc::AF_NETLINK, 0, ALLOW),
            (libc::AF_NETLINK, 16, ALLOW),
            (libc::AF_NETLINK, 12, NO_SUCH_PROTOCOL),
            (libc::AF_NETLINK, 9, NO_SUCH_PROTOCOL),
            (libc::AF_NETLINK, 15, NO_SUCH_PROTOCOL),
            (libc::AF_UNIX, 77, ALLOW),
            (libc::AF_ALG, 0, NO_SUCH_FAMILY),
        ];
        for (family, protocol, want) in protocols {
            let args = [family as u64 | high, 3, protocol | high, 0, 0, 0];
            assert_eq!(run(&program, THIS_ARCH, libc::SYS_socket as u32, args), want, "{family} {protocol}");
        }
    }
}
