//! Cgroups: limits, kill, freeze, and what was used.
//!
//! Back ends, chosen by what is mounted. `V2`: everything in one tree. `Hybrid` (systemd's name for it): memory, pids and
//! cpu are bound to v1 hierarchies, so limits come from there; everything else (`cgroup.kill`, freeze, `cpu.stat`,
//! CLONE_INTO_CGROUP) comes from the cgroup2 mount, which gives it without any controller. Where only v1 is mounted, a
//! cgroup2 mount of our own, that appears nowhere, makes it hybrid: every kernel from 4.5 on has one.
//!
//! `TRIALRUN_CGROUPS=v1` takes a mount of our own also where there is another, `=v2` insists on the one tree.
//!
//! In a V2 tree that systemd manages, a unit with `Delegate=yes` gets a part of its own, marked with the attribute
//! `trusted.delegate` (or `user.delegate`): when this process is in one, machines are made there. The unit's processes
//! move to its leaf `host`, since a group that gives controllers on may hold none (cgroups(7), "no internal processes").
//!
//! ```text
//! <cgroup2>/trialrun-<tag>/<sandbox>/init        PID 1
//!                                   /e<N>        one per exec
//! <v1 memory|pids|cpu>/trialrun-<tag>/<sandbox>  limits (Hybrid)
//! ```
//!
//! `cgroup.procs` of the sandbox's group and of its leaves belongs to the sandbox's uid 0, so that PID 1 can clone into
//! an exec's leaf (cgroups(7), "cgroup delegation"); nothing else in them does, and no cgroup file system is mounted
//! inside.

use std::{
    fs,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use trialrun_driver::Usage;
use trialrun_model::{ByteSize, ExecId, Limits, SandboxId};

/// Microseconds of a CPU quota's period; the kernel's default.
const PERIOD_US: u64 = 100_000;
/// How long a machine may take to stand still. What keeps it is a process in a system call that can't be interrupted.
const FREEZE_PATIENCE: Duration = Duration::from_secs(2);
/// The v1 hierarchies whose limits are used.
const V1_CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// How this host mounts cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchy {
    /// One cgroup2 tree with the controllers.
    V2 {
        /// Its mount point.
        root: PathBuf,
    },
    /// Controllers in v1, an (almost) empty cgroup2 beside them.
    Hybrid {
        /// The cgroup2 mount point.
        root: PathBuf,
        /// v1 mount points by controller, those of [`V1_CONTROLLERS`] that exist.
        v1: Vec<(String, PathBuf)>,
        /// Whether the cgroup2 mount is our own.
        own: bool,
    },
}

impl Hierarchy {
    /// Reads what is mounted.
    ///
    /// # Errors
    /// When there are neither v1 hierarchies nor a cgroup2 mount, or the mount of our own can't be made.
    pub fn detect() -> io::Result<Self> {
        let wanted = std::env::var("TRIALRUN_CGROUPS").unwrap_or_default();
        // A mount point anywhere on the host may have a name that is not UTF-8.
        let text = String::from_utf8_lossy(&fs::read("/proc/self/mountinfo")?).into_owned();
        let found = Self::from_mountinfo(&text, wanted != "v1")?;
        match found {
            Self::Hybrid { v1, own: true, .. } => Ok(Self::Hybrid { root: own_mount()?, v1, own: true }),
            Self::Hybrid { .. } if wanted == "v2" => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "TRIALRUN_CGROUPS=v2, but memory, pids or cpu are bound to v1 hierarchies (cgroup_no_v1=all)",
            )),
            Self::V2 { root } => Ok(Self::V2 { root: delegated(&root).unwrap_or(root) }),
            found => Ok(found),
        }
    }

    fn from_mountinfo(text: &str, take_mounted: bool) -> io::Result<Self> {
        let (mut root, mut v1) = (None, Vec::new());
        for line in text.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let (Some(place), Some(kind)) = (left.split(' ').nth(4), right.split(' ').next()) else { continue };
            match kind {
                "cgroup2" if root.is_none() && take_mounted => root = Some(PathBuf::from(place)),
                "cgroup" => {
                    let options = right.split(' ').nth(2).unwrap_or_default();
                    for controller in options.split(',').filter(|o| V1_CONTROLLERS.contains(o)) {
                        if !v1.iter().any(|(name, _)| name == controller) {
                            v1.push((controller.to_owned(), PathBuf::from(place)));
                        }
                    }
                }
                _ => {}
            }
        }
        match (root, v1.is_empty()) {
            (Some(root), true) => Ok(Self::V2 { root }),
            (Some(root), false) => Ok(Self::Hybrid { root, v1, own: false }),
            (None, false) => Ok(Self::Hybrid { root: PathBuf::new(), v1, own: true }),
            (None, true) => Err(io::Error::new(io::ErrorKind::NotFound, "no cgroup hierarchy is mounted")),
        }
    }

    fn root(&self) -> &Path {
        match self {
            Self::V2 { root } | Self::Hybrid { root, .. } => root,
        }
    }

    fn v1(&self, controller: &str) -> Option<&Path> {
        match self {
            Self::V2 { .. } => None,
            Self::Hybrid { v1, .. } => v1.iter().find(|(name, _)| name == controller).map(|(_, path)| path.as_path()),
        }
    }

    /// The name that isolation reports use.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::V2 { .. } => "cgroup v2",
            Self::Hybrid { own: false, .. } => "cgroup hybrid",
            Self::Hybrid { own: true, .. } => "cgroup v1, with a cgroup2 mount of our own",
        }
    }

    /// Every directory that a sandbox of this tag may have, for recovery.
    #[must_use]
    pub fn sandbox_dirs(&self, tag: &str, id: &str) -> Vec<PathBuf> {
        self.group_dirs(tag).into_iter().map(|dir| dir.join(id)).collect()
    }

    /// The directories that hold this tag's sandboxes.
    #[must_use]
    pub fn group_dirs(&self, tag: &str) -> Vec<PathBuf> {
        let name = format!("trialrun-{tag}");
        let mut dirs = vec![self.root().join(&name)];
        if let Self::Hybrid { v1, .. } = self {
            dirs.extend(v1.iter().map(|(_, path)| path.join(&name)));
        }
        dirs
    }
}

/// A cgroup2 mount that belongs to no mount namespace, held by this process for good, as a path.
fn own_mount() -> io::Result<PathBuf> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
    use std::{os::fd::AsRawFd, sync::OnceLock};
    static MOUNT: OnceLock<OwnedFd> = OnceLock::new();
    if MOUNT.get().is_none() {
        let context = rustix::mount::fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        let none = MountAttrFlags::empty();
        let _ = MOUNT.set(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, none)?);
    }
    let mount = MOUNT.get().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd())))
}

/// The part of the tree at `root` that was delegated to the unit of this process.
fn delegated(root: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = own.strip_suffix("/host").unwrap_or(own);
    let place = root.join(own);
    let marked = |name: &str| {
        let mut value = [0; 8];
        rustix::fs::getxattr(&place, name, &mut value).is_ok_and(|len| value.get(..len) == Some(b"1"))
    };
    (!own.is_empty() && (marked("trusted.delegate") || marked("user.delegate"))).then_some(place)
}

/// Moves every process of a group to its leaf `host`, so that its controllers can be given on.
fn vacate(group: &Path) -> io::Result<()> {
    let leaf = group.join("host");
    match fs::create_dir(&leaf) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    for pid in fs::read_to_string(group.join("cgroup.procs"))?.lines() {
        // One that ended meanwhile is ESRCH; one that stays is found by the next write.
        let _ = write(&leaf.join("cgroup.procs"), pid);
    }
    Ok(())
}

/// One machine's cgroups.
#[derive(Debug)]
pub struct MachineCgroup {
    hierarchy: Hierarchy,
    tag: String,
    id: SandboxId,
    owner: u32,
    main: PathBuf,
}

pub(crate) fn write(path: &Path, value: &str) -> io::Result<()> {
    // Not fs::write: cgroup files must be neither created nor truncated.
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn read_key(path: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Makes `parent/name`, and `parent` too: another sandbox's end may remove an empty parent at any moment.
fn make_below(parent: &Path, name: &str, prepare: impl Fn(&Path) -> io::Result<()>) -> io::Result<PathBuf> {
    let dir = parent.join(name);
    for _ in 0..100 {
        match fs::create_dir(parent) {
            Ok(()) => prepare(parent)?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "the parent group kept disappearing"))
}

impl MachineCgroup {
    /// Makes the groups and sets the limits. `owner` is the host uid of the sandbox's uid 0.
    ///
    /// # Errors
    /// What the kernel says; what was made is removed again.
    pub fn create(hierarchy: Hierarchy, tag: &str, id: &SandboxId, limits: &Limits, owner: u32) -> io::Result<Self> {
        let parent = hierarchy.root().join(format!("trialrun-{tag}"));
        let enable = |dir: &Path| match &hierarchy {
            Hierarchy::Hybrid { .. } => Ok(()),
            Hierarchy::V2 { root } => {
                // Already on where systemd runs; needed on a bare tree and in a delegated part, whose processes are in the way.
                let give_on = |dir: &Path| write(&dir.join("cgroup.subtree_control"), "+memory +pids +cpu");
                if give_on(root).is_err() && root.join("cgroup.type").exists() {
                    vacate(root)?;
                    give_on(root)?;
                }
                give_on(dir)
            }
        };
        let main = make_below(&parent, id.as_str(), enable)?;
        let group = Self { hierarchy, tag: tag.to_owned(), id: id.clone(), owner, main };
        match group.fill(limits) {
            Ok(()) => Ok(group),
            Err(e) => {
                let _ = group.remove(Duration::ZERO);
                Err(e)
            }
        }
    }

    fn fill(&self, limits: &Limits) -> io::Result<()> {
        self.give(&self.main)?;
        self.leaf("init")?;
        if let Hierarchy::Hybrid { v1, .. } = &self.hierarchy {
            for (_, path) in v1 {
                make_below(&path.join(format!("trialrun-{}", self.tag)), self.id.as_str(), |_| Ok(()))?;
            }
        }
        self.set_limits(limits)
    }

    fn give(&self, dir: &Path) -> io::Result<()> {
        std::os::unix::fs::chown(dir.join("cgroup.procs"), Some(self.owner), Some(self.owner))
    }

    fn leaf(&self, name: &str) -> io::Result<PathBuf> {
        let dir = self.main.join(name);
        fs::create_dir(&dir)?;
        self.give(&dir)?;
        Ok(dir)
    }

    fn v1_dir(&self, controller: &str) -> Option<PathBuf> {
        Some(self.hierarchy.v1(controller)?.join(format!("trialrun-{}", self.tag)).join(self.id.as_str()))
    }

    /// Sets the limits; also on a running machine.
    ///
    /// # Errors
    /// What the kernel says, such as EBUSY for a memory limit below what is in use.
    pub fn set_limits(&self, limits: &Limits) -> io::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        let quota = PERIOD_US * u64::from(limits.vcpus);
        let limited = u64::from(limits.vcpus) < cores;
        match &self.hierarchy {
            Hierarchy::V2 { .. } => {
                write(&self.main.join("memory.max"), &limits.memory.bytes().to_string())?;
                // Absent without swap accounting; then there is nothing to forbid.
                let _ = write(&self.main.join("memory.swap.max"), "0");
                write(&self.main.join("pids.max"), &limits.pids.to_string())?;
                let max = if limited { format!("{quota} {PERIOD_US}") } else { format!("max {PERIOD_US}") };
                write(&self.main.join("cpu.max"), &max)?;
                write(&self.main.join("cpu.weight"), &(100 * limits.vcpus).clamp(1, 10_000).to_string())
            }
            Hierarchy::Hybrid { .. } => {
                if let Some(dir) = self.v1_dir("memory") {
                    write(&dir.join("memory.limit_in_bytes"), &limits.memory.bytes().to_string())?;
                    let _ = write(&dir.join("memory.memsw.limit_in_bytes"), &limits.memory.bytes().to_string());
                }
                if let Some(dir) = self.v1_dir("pids") {
                    write(&dir.join("pids.max"), &limits.pids.to_string())?;
                }
                if let Some(dir) = self.v1_dir("cpu") {
                    let value = if limited { quota.to_string() } else { "-1".to_owned() };
                    write(&dir.join("cpu.cfs_quota_us"), &value)?;
                    write(&dir.join("cpu.shares"), &(1024 * u64::from(limits.vcpus)).clamp(2, 262_144).to_string())?;
                }
                Ok(())
            }
        }
    }

    /// Which limits are not in force here.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let absent = |c: &&&str| match &self.hierarchy {
            Hierarchy::Hybrid { v1, .. } => !v1.iter().any(|(name, _)| name == **c),
            Hierarchy::V2 { .. } => false,
        };
        V1_CONTROLLERS
            .iter()
            .filter(absent)
            .map(|c| format!("{c} limit: no such cgroup hierarchy is mounted"))
            .collect()
    }

    /// A descriptor of PID 1's leaf, for CLONE_INTO_CGROUP.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn init_dir(&self) -> io::Result<OwnedFd> {
        Ok(fs::File::open(self.main.join("init"))?.into())
    }

    /// The v1 groups, which a machine's first process has to join by itself. Empty under V2.
    #[must_use]
    pub fn v1_dirs(&self) -> Vec<PathBuf> {
        V1_CONTROLLERS.iter().filter_map(|controller| self.v1_dir(controller)).collect()
    }

    fn exec_dir(&self, exec: ExecId) -> PathBuf {
        self.main.join(exec.to_string())
    }

    /// Makes an exec's leaf.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open_exec(&self, exec: ExecId) -> io::Result<OwnedFd> {
        let dir = self.leaf(&exec.to_string())?;
        Ok(fs::File::open(dir)?.into())
    }

    /// Kills everything in an exec's leaf.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn kill_exec(&self, exec: ExecId) -> io::Result<()> {
        write(&self.exec_dir(exec).join("cgroup.kill"), "1")
    }

    /// CPU time and number of processes of an exec's leaf.
    #[must_use]
    pub fn exec_usage(&self, exec: ExecId) -> (Duration, u32) {
        let dir = self.exec_dir(exec);
        let cpu = read_key(&dir.join("cpu.stat"), "usage_usec").unwrap_or(0);
        let procs = fs::read_to_string(dir.join("cgroup.procs")).map_or(0, |text| text.lines().count());
        (Duration::from_micros(cpu), procs as u32)
    }

    /// Removes an exec's leaf if it is empty.
    #[must_use]
    pub fn close_exec(&self, exec: ExecId) -> bool {
        match fs::remove_dir(self.exec_dir(exec)) {
            Ok(()) => true,
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
    }

    /// How often the kernel killed here for memory.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let path =
            self.v1_dir("memory").map_or_else(|| self.main.join("memory.events"), |d| d.join("memory.oom_control"));
        read_key(&path, "oom_kill").unwrap_or(0)
    }

    /// What the machine used.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let cpu = read_key(&self.main.join("cpu.stat"), "usage_usec").unwrap_or(0);
        let mut usage = Usage { cpu: Duration::from_micros(cpu), oom_kills: self.oom_kills(), ..Usage::default() };
        if let Some(dir) = self.v1_dir("memory") {
            usage.peak_memory = ByteSize(read_number(&dir.join("memory.max_usage_in_bytes")).unwrap_or(0));
            usage.memory = ByteSize(read_number(&dir.join("memory.usage_in_bytes")).unwrap_or(0));
        } else {
            usage.memory = ByteSize(read_number(&self.main.join("memory.current")).unwrap_or(0));
            // memory.peak is there from Linux 5.19 on.
            usage.peak_memory = ByteSize(read_number(&self.main.join("memory.peak")).unwrap_or(usage.memory.bytes()));
        }
        let pids = self.v1_dir("pids").unwrap_or_else(|| self.main.clone());
        usage.pids_refused = read_key(&pids.join("pids.events"), "max").unwrap_or(0);
        usage
    }

    /// What is needed to make it stand still, apart from the machine itself.
    #[must_use]
    pub fn freezer(&self) -> Freezer {
        Freezer { main: self.main.clone() }
    }

    /// Kills everything in the machine.
    pub fn kill(&self) {
        let _ = write(&self.main.join("cgroup.kill"), "1");
    }

    /// Removes all of it, waiting at most `patience` for the killed to be gone.
    ///
    /// # Errors
    /// The first directory that would not go.
    pub fn remove(&self, patience: Duration) -> io::Result<()> {
        remove_sandbox(&self.hierarchy, &self.tag, self.id.as_str(), patience)
    }
}

/// Makes a machine stand still: `cgroup.freeze` of cgroup2, which both back ends have.
#[derive(Debug, Clone)]
pub struct Freezer {
    main: PathBuf,
}

/// A machine that stands still until this is dropped.
#[derive(Debug)]
pub struct Frozen<'a>(&'a Freezer);

impl Freezer {
    /// Stops every process of the machine and waits until the kernel says that all of them stand.
    ///
    /// # Errors
    /// What the kernel says, or that they do not stand within [`FREEZE_PATIENCE`]; they go on then.
    pub fn freeze(&self) -> io::Result<Frozen<'_>> {
        // Thaws on every way out.
        let frozen = Frozen(self);
        write(&self.main.join("cgroup.freeze"), "1")?;
        let deadline = Instant::now() + FREEZE_PATIENCE;
        let mut wait = Duration::from_micros(50);
        while read_key(&self.main.join("cgroup.events"), "frozen") != Some(1) {
            if Instant::now() >= deadline {
                let words = format!("a process did not stand still within {FREEZE_PATIENCE:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, words));
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(Duration::from_millis(5));
        }
        Ok(frozen)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // The group is gone when the machine ended meanwhile.
        let _ = write(&self.0.main.join("cgroup.freeze"), "0");
    }
}

/// Kills and removes a sandbox's groups by name; used by a machine's end and by recovery. Not there is fine.
///
/// # Errors
/// The first directory that would not go.
pub fn remove_sandbox(hierarchy: &Hierarchy, tag: &str, id: &str, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    let mut first = None;
    for dir in hierarchy.sandbox_dirs(tag, id) {
        let _ = write(&dir.join("cgroup.kill"), "1");
        let result = loop {
            match remove_tree(&dir) {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(300));
                }
                other => break other,
            }
        };
        if let Err(e) = result {
            first.get_or_insert(e);
        }
        // The last one out takes the parent along; EBUSY or ENOTEMPTY means others are still in.
        if let Some(parent) = dir.parent() {
            let _ = fs::remove_dir(parent);
        }
    }
    first.map_or(Ok(()), Err)
}

fn remove_tree(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn controllers_in_v1_make_it_hybrid() {
        let Hierarchy::Hybrid { root, v1, own: false } = Hierarchy::from_mountinfo(HYBRID, true).unwrap() else {
            panic!("not hybrid")
        };
        assert_eq!(root, Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(v1.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["cpu", "memory"]);
    }

    #[test]
    fn one_tree_is_v2_and_none_is_an_error() {
        let text = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(Hierarchy::from_mountinfo(text, true).unwrap(), Hierarchy::V2 { root: "/sys/fs/cgroup".into() });
        assert!(Hierarchy::from_mountinfo("", true).is_err());
    }

    #[test]
    fn where_only_v1_is_mounted_a_cgroup2_mount_of_our_own_is_taken() {
        let v1: String = HYBRID.lines().filter(|l| !l.contains("cgroup2")).map(|l| format!("{l}\n")).collect();
        for found in [Hierarchy::from_mountinfo(&v1, true).unwrap(), Hierarchy::from_mountinfo(HYBRID, false).unwrap()]
        {
            assert!(matches!(found, Hierarchy::Hybrid { own: true, v1, .. } if v1.len() == 2));
        }
    }
}
