//! What the machine's first process does between its birth and the guest agent: build the root, shed the host.
//!
//! Runs in a child made by clone3(2) from a single-threaded process, in new mount, PID, IPC and UTS namespaces that
//! belong to the *initial* user namespace. Entering the sandbox's own user namespace comes last: from then on it has
//! every capability there and none over the mounts, the network or the PID namespace it lives in.

use crate::layer::{Layer, Pool};
use rustix::{
    fs::{CWD, Mode},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
    },
};
use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};
use trialrun_driver::Rootfs;
use trialrun_sys::{
    mount,
    ns::{self, Namespaces},
};

/// Everything the child needs, opened before it is born.
pub struct Inside<'a> {
    pub rootfs: &'a Rootfs,
    /// Trees below the writable layer, topmost first.
    pub lowers: &'a [PathBuf],
    pub pool: &'a Pool,
    pub layer: &'a Layer,
    /// An empty directory to build the root on; only this mount namespace sees that.
    pub stage: &'a Path,
    pub userns: BorrowedFd<'a>,
    /// Whether lower trees and host directories are id-mapped; else the trees were shifted before.
    pub idmap: bool,
    pub netns: Option<BorrowedFd<'a>>,
    pub uid_base: u32,
    pub hostname: &'a str,
    pub shm_bytes: u64,
    /// Landlock is to be enforced too.
    pub landlock: bool,
    pub cpus: &'a [usize],
    /// The v1 groups to join.
    pub v1_groups: &'a [PathBuf],
    pub program: OwnedFd,
    /// The agent's stream and its boot message.
    pub fds: Vec<OwnedFd>,
}

/// Capabilities of the guest agent (its children get fewer): what file work, changes of user, signals and reaping ask
/// for, and SYS_ADMIN, which installing a seccomp filter without no_new_privs asks for. The mount, network and PID
/// namespaces belong to the initial user namespace, so SYS_ADMIN gives nothing there.
const AGENT_CAPABILITIES: [u32; 14] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    2,  // DAC_READ_SEARCH
    3,  // FOWNER
    4,  // FSETID
    5,  // KILL
    6,  // SETGID
    7,  // SETUID
    8,  // SETPCAP
    10, // NET_BIND_SERVICE
    18, // SYS_CHROOT
    21, // SYS_ADMIN
    24, // SYS_RESOURCE
    31, // SETFCAP
];

/// A step's name with the kernel's word.
pub struct StepError {
    pub step: &'static str,
    pub cause: io::Error,
}

fn at<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, StepError> {
    result.map_err(|e| StepError { step, cause: e.into() })
}

const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

fn attach(mount: BorrowedFd<'_>, place: &Path) -> rustix::io::Result<()> {
    move_mount(mount, "", CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

fn new_mount(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> rustix::io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        if value.is_empty() {
            fsconfig_set_flag(context.as_fd(), *key)?;
        } else {
            fsconfig_set_string(context.as_fd(), *key, *value)?;
        }
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

const NO_EXTRAS: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV).union(MountAttrFlags::MOUNT_ATTR_NOEXEC);
const READ_ONLY: u64 = libc_rdonly();

const fn libc_rdonly() -> u64 {
    MountAttrFlags::MOUNT_ATTR_RDONLY.bits() as u64
}

impl Inside<'_> {
    /// Becomes the guest agent. Returns only on failure.
    pub fn run(mut self) -> StepError {
        match self.prepare() {
            Ok(()) => {}
            Err(e) => return e,
        }
        let argv: [&CStr; 5] = [c"trialrun-guest", c"--fd", c"3", c"--boot-fd", c"4"];
        let cause = ns::exec_with_fds(self.program, &argv, self.fds);
        StepError { step: "execute the guest agent", cause }
    }

    /// A detached copy of a host directory's mount, its ids mapped to the sandbox's.
    fn mapped(&self, source: &Path) -> io::Result<OwnedFd> {
        let tree = open_tree(CWD, source, CLONE)?;
        if self.idmap {
            mount::idmap(tree.as_fd(), self.userns)?;
        }
        Ok(tree)
    }

    fn prepare(&mut self) -> Result<(), StepError> {
        at("take ordinary scheduling", ns::ordinary_scheduling())?;
        // A thread that moves itself ("0" to `tasks`) is spared the lock of all thread groups, which any other way in
        // takes and which waits some 10 ms for a grace period (kernel/cgroup: "Optimize single thread migration", 5.14).
        // This process has one thread.
        for group in self.v1_groups {
            at("come under the limits", crate::cgroup::write(&group.join("tasks"), "0"))?;
        }
        at("make mounts private", mount::make_all_private())?;
        if let Some(netns) = self.netns {
            at("enter the cell", ns::enter(netns, Namespaces::NET))?;
        }
        let root = &at("mount the root", self.overlay(self.stage))?;
        self.proc(root)?;
        at("fill /dev", self.dev(&root.join("dev")))?;
        at("fill /sys", sys(&root.join("sys")))?;
        at("show host directories", self.binds(root))?;
        at("change the root", pivot(root))?;
        at("set the host name", rustix::system::sethostname(self.hostname.as_bytes()))?;
        self.affinity()?;
        let _ = rustix::process::setsid();
        at("hide cgroups", ns::unshare(Namespaces::CGROUP))?;
        at("enter the user namespace", ns::enter(self.userns, Namespaces::USER))?;
        at("become the sandbox's root", ns::become_root())?;
        at("limit capabilities", ns::limit_bounding_set(&AGENT_CAPABILITIES))?;
        if self.landlock {
            at("enforce the Landlock rules", landlock_mounts(self.program.as_fd()))?;
        }
        rustix::process::umask(Mode::from_raw_mode(0o022));
        at("be bound to the keeper", ns::die_with_parent())?;
        Ok(())
    }

    /// Mounts the overlay below the stage and gives its place.
    ///
    /// Each layer gets a place of its own first: before Linux 6.15 an overlay takes its layers only from mounts of the
    /// mounter's namespace, and before 6.8 only as one option (of at most 255 bytes, hence the short relative names).
    /// These places go with the old root; the overlay keeps its own hold of what it needs.
    fn overlay(&self, stage: &Path) -> io::Result<PathBuf> {
        let tmpfs = new_mount("tmpfs", &[("mode", "0700"), ("size", "64k")], NO_EXTRAS)?;
        attach(tmpfs.as_fd(), stage)?;
        rustix::process::chdir(stage)?;
        let place = |name: &str, mount: OwnedFd| -> io::Result<()> {
            std::fs::create_dir(name)?;
            Ok(attach(mount.as_fd(), Path::new(name))?)
        };
        let mut names = Vec::new();
        for (n, lower) in self.lowers.iter().enumerate() {
            place(&n.to_string(), self.mapped(lower)?)?;
            names.push(n.to_string());
        }
        place("p", self.pool.mount()?)?;
        std::fs::create_dir("root")?;
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "lowerdir", names.join(":"))?;
        fsconfig_set_string(context.as_fd(), "upperdir", format!("p/{}/u", self.layer.name()))?;
        fsconfig_set_string(context.as_fd(), "workdir", format!("p/{}/w", self.layer.name()))?;
        // A changed mode would otherwise leave a file's content in the base alone (where the host has that on), and a copy of
        // the layer without it.
        fsconfig_set_string(context.as_fd(), "metacopy", "off")?;
        // The layer dies with the machine: nothing needs to reach the disk in order.
        fsconfig_set_flag(context.as_fd(), "volatile")?;
        fsconfig_create(context.as_fd())?;
        let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?;
        let root = stage.join("root");
        attach(mount.as_fd(), &root)?;
        Ok(root)
    }

    fn proc(&self, root: &Path) -> Result<(), StepError> {
        let proc = root.join("proc");
        let mount = at("mount /proc", new_mount("proc", &[], NO_EXTRAS))?;
        at("attach /proc", attach(mount.as_fd(), &proc))?;
        for name in ["sys", "sysrq-trigger", "irq", "bus", "fs"] {
            let place = proc.join(name);
            let Ok(tree) = open_tree(CWD, &place, CLONE) else { continue };
            at("protect /proc", mount::set_attributes(tree.as_fd(), READ_ONLY, false))?;
            at("protect /proc", attach(tree.as_fd(), &place))?;
        }
        // Host facts and side channels that no test suite needs.
        for name in [
            "kcore",
            "kmsg",
            "keys",
            "key-users",
            "timer_list",
            "sched_debug",
            "latency_stats",
            "kallsyms",
            "kpagecount",
            "kpageflags",
            "kpagecgroup",
            "config.gz",
            "vmallocinfo",
            "modules",
        ] {
            let place = proc.join(name);
            if place.exists() {
                let null = at("mask /proc", open_tree(CWD, "/dev/null", CLONE))?;
                at("mask /proc", mount::set_attributes(null.as_fd(), READ_ONLY, false))?;
                at("mask /proc", attach(null.as_fd(), &place))?;
            }
        }
        // The machine's first process, this one, belongs to root inside, whose ids its files have. With these, root could
        // have the kernel kill the agent first, and a suite that eats memory would look like a failure of ours.
        for name in ["oom_score_adj", "oom_adj", "autogroup", "coredump_filter", "clear_refs"] {
            let place = proc.join("1").join(name);
            let Ok(file) = open_tree(CWD, &place, CLONE) else { continue };
            at("protect /proc/1", mount::set_attributes(file.as_fd(), READ_ONLY, false))?;
            at("protect /proc/1", attach(file.as_fd(), &place))?;
        }
        for name in ["acpi", "scsi", "asound"] {
            let place = proc.join(name);
            if place.is_dir() {
                at("mask /proc", empty_over(&place))?;
            }
        }
        Ok(())
    }

    fn dev(&self, dev: &Path) -> io::Result<()> {
        use rustix::fs::{FileType, makedev, mknodat, symlink};
        let id = self.uid_base.to_string();
        let nosuid_noexec = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let tmpfs = new_mount("tmpfs", &[("mode", "0755"), ("size", "1m"), ("uid", &id), ("gid", &id)], nosuid_noexec)?;
        attach(tmpfs.as_fd(), dev)?;
        for (name, major, minor) in
            [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)]
        {
            let place = dev.join(name);
            mknodat(CWD, &place, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))?;
            rustix::fs::chmod(&place, Mode::from_raw_mode(0o666))?;
        }
        for (target, name) in
            [("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr"), ("pts/ptmx", "ptmx")]
        {
            symlink(target, dev.join(name))?;
        }
        std::fs::create_dir(dev.join("pts"))?;
        // Group 5 is `tty` in Debian's and most other systems' group file.
        let tty = (self.uid_base + 5).to_string();
        // The kernel has 3,072 for all machines together (kernel.pty.max less kernel.pty.reserve).
        let pts = new_mount(
            "devpts",
            &[("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620"), ("gid", &tty), ("max", "128")],
            nosuid_noexec,
        )?;
        attach(pts.as_fd(), &dev.join("pts"))?;
        std::fs::create_dir(dev.join("shm"))?;
        let size = self.shm_bytes.to_string();
        let nosuid_nodev = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let shm = new_mount("tmpfs", &[("mode", "1777"), ("size", &size), ("uid", &id), ("gid", &id)], nosuid_nodev)?;
        attach(shm.as_fd(), &dev.join("shm"))?;
        std::fs::create_dir(dev.join("mqueue"))?;
        Ok(())
    }

    fn binds(&self, root: &Path) -> io::Result<()> {
        let below = |path: &Path| -> PathBuf { root.join(path.strip_prefix("/").unwrap_or(path)) };
        for bind in &self.rootfs.binds {
            let tree = self.mapped(&bind.source)?;
            mount::set_attributes(tree.as_fd(), READ_ONLY | u64::from(MountAttrFlags::MOUNT_ATTR_NODEV.bits()), false)?;
            attach(tree.as_fd(), &below(&bind.target))?;
        }
        for mask in &self.rootfs.masks {
            let place = below(mask);
            if place.is_dir() {
                empty_over(&place)?;
            } else if place.is_file() {
                let null = open_tree(CWD, "/dev/null", CLONE)?;
                mount::set_attributes(null.as_fd(), READ_ONLY, false)?;
                attach(null.as_fd(), &place)?;
            }
        }
        Ok(())
    }

    fn affinity(&self) -> Result<(), StepError> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        let mut set = rustix::thread::CpuSet::new();
        for cpu in self.cpus {
            set.set(*cpu);
        }
        at("set the CPU affinity", rustix::thread::sched_setaffinity(None, &set))
    }
}

/// Covers a directory with an empty read-only one.
fn empty_over(place: &Path) -> io::Result<()> {
    let options = [("mode", "0555"), ("size", "4k")];
    let tmpfs = new_mount("tmpfs", &options, NO_EXTRAS | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    Ok(attach(tmpfs.as_fd(), place)?)
}

/// `/sys` with what programs read to count processors, and nothing else of the host.
fn sys(place: &Path) -> io::Result<()> {
    let host_trees = ["/sys/devices/system/cpu", "/sys/devices/system/node"];
    let trees: Vec<(PathBuf, OwnedFd)> = host_trees
        .iter()
        .filter_map(|path| Some((place.join(path.trim_start_matches("/sys/")), open_tree(CWD, *path, CLONE).ok()?)))
        .collect();
    let tmpfs = new_mount("tmpfs", &[("mode", "0755"), ("size", "64k")], NO_EXTRAS)?;
    attach(tmpfs.as_fd(), place)?;
    for (target, tree) in &trees {
        std::fs::create_dir_all(target)?;
        mount::set_attributes(tree.as_fd(), READ_ONLY, false)?;
        attach(tree.as_fd(), target)?;
    }
    std::fs::create_dir_all(place.join("fs/cgroup"))?;
    mount::set_attributes(tmpfs.as_fd(), READ_ONLY, false)
}

fn pivot(root: &Path) -> io::Result<()> {
    rustix::process::chdir(root)?;
    // The old root comes to lie on top of the new one and is then taken off (pivot_root(2), "pivot_root(".", ".")").
    rustix::process::pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}

/// A Landlock domain that allows every access to files: what remains of it is that nothing inside can mount, unmount or
/// change the root, whatever capability or seccomp hole there might be, nor trace or signal a process outside of it
/// (landlock(7)). Installed without no_new_privs, which would break sudo; SYS_ADMIN in the user namespace permits that.
fn landlock_mounts(program: BorrowedFd<'_>) -> io::Result<()> {
    use landlock::{
        ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
        Scope,
    };
    let abi = ABI::V6;
    let restrict = || -> Result<(), Box<dyn std::error::Error>> {
        let rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rule(PathBeneath::new(PathFd::new("/")?, AccessFs::from_all(abi)))?
            // The agent's own program lies outside of the machine's root.
            .add_rule(PathBeneath::new(program, AccessFs::Execute | AccessFs::ReadFile))?;
        rules.no_new_privs(false).restrict_self()?;
        Ok(())
    };
    restrict().map_err(|e| io::Error::other(e.to_string()))
}
