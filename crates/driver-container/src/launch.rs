//! From a specification to a running guest agent, in steps with undos.
//!
//! ```text
//! pool, layer ─> cgroup ─> user namespace ─> child (inside.rs)  ─> agent says Ready (the keeper's to see)
//! ```
//! A failed step drops what earlier ones made: [`Parts`] removes the layer and the groups unless it was released.

use crate::{
    cgroup::{Hierarchy, MachineCgroup},
    inside::{Inside, StepError},
    layer::{Layer, Pool, copy_upper},
    lower, owners,
};
use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use trialrun_driver::{
    Capabilities, DiskFork, DiskSource, Driver, ForkCost, LaunchError, Machine, MachineSpec, Usage, fault,
};
use trialrun_model::{ExecId, Isolation, Limits, SandboxId};
use trialrun_sys::ns::{self, Child, Namespaces};

/// How long the end of a machine waits for its killed processes to leave their cgroup.
const DEATH_PATIENCE: Duration = Duration::from_secs(10);

/// Makes container machines.
#[derive(Debug, Default)]
pub struct ContainerDriver {
    /// Opened ahead of the first launch.
    pool: Mutex<Option<Pool>>,
}

impl ContainerDriver {
    /// A driver that has opened the pool of `data_dir` already, if there is one: work that needs no specification.
    #[must_use]
    pub fn ahead(data_dir: &std::path::Path) -> Self {
        Self { pool: Mutex::new(Pool::open_existing(data_dir)) }
    }
}

struct Parts {
    pool: Pool,
    layer: Option<Layer>,
    cgroup: Option<MachineCgroup>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        if let Some(cgroup) = self.cgroup.take() {
            let _ = cgroup.remove(DEATH_PATIENCE);
        }
        if let Some(layer) = self.layer.take() {
            let _ = self.pool.remove(layer.name());
        }
    }
}

struct ContainerMachine {
    parts: Parts,
    child: Child,
    stream: Option<UnixStream>,
    isolation: Isolation,
    cgroup_dirs_left: Vec<ExecId>,
    /// Held by the one fork that makes the machine stand still.
    forking: Arc<Mutex<()>>,
    /// First of its uids on the host, and how many it has.
    ids: (u32, u32),
}

fn fail(step: &str) -> impl FnOnce(io::Error) -> LaunchError {
    let step = step.to_owned();
    move |cause| LaunchError::new(step, cause)
}

impl Driver for ContainerDriver {
    fn name(&self) -> &'static str {
        "container"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { passes_fds: true, slots: true, disk_limit: true, fork_disk: true, fork_memory: false }
    }

    fn launch(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, LaunchError> {
        let hierarchy = Hierarchy::detect().map_err(|cause| LaunchError {
            step: "find the cgroup hierarchies".to_owned(),
            way_out: Some("mount one: mount -t cgroup2 none /sys/fs/cgroup".to_owned()),
            cause,
        })?;
        let ahead = self.pool.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pool = ahead.map_or_else(|| Pool::open(&spec.data_dir), Ok)?;
        fault::point("driver-pool").map_err(fail("open the pool"))?;
        let mut parts = Parts { pool, layer: None, cgroup: None };
        let (id, base) = (spec.id.as_str(), spec.lineage.uid_base());
        parts.layer = Some(match spec.disk {
            DiskSource::Fresh => parts.pool.create(id, base, spec.limits.disk)?,
            DiskSource::Forked => parts.pool.adopt(id, spec.limits.disk)?,
        });
        fault::point("driver-layer").map_err(fail("make the layer"))?;
        let cgroup = MachineCgroup::create(hierarchy.clone(), &spec.tag, &spec.id, &spec.limits, base)
            .map_err(fail(&format!("make the cgroup of {id}")))?;
        parts.cgroup = Some(cgroup);
        fault::point("driver-cgroup").map_err(fail("make the cgroup"))?;
        let userns = ns::user_namespace(base, spec.lineage.uid_count()).map_err(fail("make the user namespace"))?;
        let refusal = lower::idmap_refusal(&spec.rootfs.lowers, userns.as_fd());
        let lowers = match &refusal {
            None => spec.rootfs.lowers.clone(),
            Some(_) => lower::shifted(&spec.data_dir, &spec.rootfs.lowers, base)?,
        };
        let binds = !spec.rootfs.binds.is_empty();
        let ids = (base, spec.lineage.uid_count());
        let (child, stream) = start(spec, &parts, &userns, &lowers, refusal.is_none())?;
        if let Err(cause) = fault::point("driver-child") {
            let _ = rustix::process::pidfd_send_signal(&child.0.pidfd, rustix::process::Signal::KILL);
            reap(&child.0);
            return Err(LaunchError::new("start the guest agent", cause));
        }
        let mut isolation = describe(&parts, &hierarchy, &child.1);
        match refusal {
            None => isolation.layers.insert(2, "id-mapped read-only base".to_owned()),
            Some(reason) => {
                isolation.layers.insert(2, "read-only base, copied for this uid range".to_owned());
                let binds = if binds { "; the host's own files belong to nobody inside" } else { "" };
                isolation.notes.push(format!("the base is copied instead of id-mapped: {reason}{binds}"));
            }
        }
        Ok(Box::new(ContainerMachine {
            parts,
            child: child.0,
            stream: Some(stream),
            isolation,
            cgroup_dirs_left: Vec::new(),
            forking: Arc::default(),
            ids,
        }))
    }
}

fn describe(parts: &Parts, hierarchy: &Hierarchy, limits: &Limits) -> Isolation {
    let mut isolation = Isolation { driver: "container".to_owned(), ..Isolation::default() };
    isolation.layers = [
        "user namespace with its own uid range",
        "mount, pid, network, ipc, uts and cgroup namespaces",
        "capabilities",
        "seccomp allow-list",
        hierarchy.label(),
        parts.pool.label(),
    ]
    .map(str::to_owned)
    .to_vec();
    match landlock_refusal() {
        None => isolation.layers.push("landlock".to_owned()),
        Some(reason) => isolation.missing.push(format!("landlock: {reason}")),
    }
    if let Some(cgroup) = &parts.cgroup {
        isolation.missing.extend(cgroup.missing());
    }
    match (parts.pool.unlimited_because(), &parts.layer) {
        (Some(reason), _) => isolation.missing.push(format!("disk limit: {reason}")),
        (None, Some(layer)) if !layer.limited() => {
            isolation.missing.push("disk limit: quotas could not be turned on in the pool of layers".to_owned());
        }
        _ => {}
    }
    let cores = cores();
    if limits.vcpus as usize > cores {
        isolation
            .notes
            .push(format!("{} vCPUs were asked for and {cores} cores are here: they share all of them", limits.vcpus));
    }
    isolation
}

/// Why Landlock is not enforced, if it is not. `TRIALRUN_LANDLOCK=off` forces it.
fn landlock_refusal() -> Option<&'static str> {
    if std::env::var_os("TRIALRUN_LANDLOCK").is_some_and(|v| v == "off") {
        return Some("TRIALRUN_LANDLOCK=off asks for it");
    }
    // The list of active security modules (securityfs) is not mounted everywhere; the call itself is the answer.
    match trialrun_sys::ns::landlock_abi() {
        Ok(_) => None,
        Err(_) => Some("this kernel has it not, or not switched on (lsm=landlock)"),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The CPUs a machine may run on: as many as its vCPUs, so that programs count right. Neighbouring lineages start at
/// different ones.
fn affinity(limits: &Limits, lineage: u32) -> Vec<usize> {
    let Ok(present) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| present.is_set(*cpu)).collect();
    let want = limits.vcpus as usize;
    if cpus.is_empty() || want >= cpus.len() {
        return Vec::new();
    }
    (0..want).map(|n| cpus[(lineage as usize * want + n) % cpus.len()]).collect()
}

fn start(
    spec: MachineSpec,
    parts: &Parts,
    userns: &OwnedFd,
    lowers: &[PathBuf],
    idmap: bool,
) -> Result<((Child, Limits), UnixStream), LaunchError> {
    let (Some(layer), Some(cgroup)) = (&parts.layer, &parts.cgroup) else {
        return Err(LaunchError::new("start", io::Error::other("the layer and the cgroup come first")));
    };
    let stage = spec.data_dir.join("stage");
    std::fs::create_dir_all(&stage).map_err(fail(&format!("make {}", stage.display())))?;
    let (host, guest) = UnixStream::pair().map_err(fail("make the guest stream"))?;
    let boot = boot_file(&spec.boot).map_err(fail("write the boot message"))?;
    let (mut report_read, report_write) = io::pipe().map_err(fail("make a pipe"))?;
    let init_dir = cgroup.init_dir().map_err(fail("open the cgroup"))?;
    let v1_groups = cgroup.v1_dirs();
    let cpus = affinity(&spec.limits, spec.lineage.0);
    let namespaces = Namespaces::MOUNT.with(Namespaces::PID).with(Namespaces::IPC).with(Namespaces::UTS);
    let namespaces = if spec.netns.is_some() { namespaces } else { namespaces.with(Namespaces::NET) };
    let mut inside = Some(Inside {
        rootfs: &spec.rootfs,
        lowers,
        idmap,
        pool: &parts.pool,
        layer,
        stage: &stage,
        userns: userns.as_fd(),
        netns: spec.netns.as_ref().map(AsFd::as_fd),
        uid_base: spec.lineage.uid_base(),
        hostname: &spec.hostname,
        shm_bytes: spec.limits.memory.bytes() / 2,
        landlock: landlock_refusal().is_none(),
        cpus: &cpus,
        v1_groups: &v1_groups,
        program: spec.guest_program,
        fds: vec![guest.into(), boot.into()],
    });
    let mut report_write = Some(report_write);
    let child = ns::clone3(namespaces, Some(init_dir.as_fd()), || {
        let Some(inside) = inside.take() else { return 1 };
        let StepError { step, cause } = inside.run();
        // Read by the parent; the pipe closes by itself when the agent starts.
        if let Some(mut report) = report_write.take() {
            let _ = write!(report, "{}\n{step}", cause.raw_os_error().unwrap_or(0));
        }
        1
    })
    .map_err(fail("make the first process"))?;
    drop((inside, report_write));
    let mut report = String::new();
    let _ = report_read.read_to_string(&mut report);
    if let Some((errno, step)) = report.split_once('\n') {
        let _ = rustix::process::pidfd_send_signal(&child.pidfd, rustix::process::Signal::KILL);
        reap(&child);
        let errno = errno.parse().ok().filter(|n| *n != 0);
        let cause = errno.map_or_else(|| io::Error::other("no errno"), io::Error::from_raw_os_error);
        return Err(LaunchError::new(step, cause));
    }
    Ok(((child, spec.limits), host))
}

fn boot_file(boot: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("boot", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(boot)?;
    file.rewind()?;
    Ok(file)
}

fn reap(child: &Child) {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let _ = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
}

impl ContainerMachine {
    fn cgroup(&self) -> Option<&MachineCgroup> {
        self.parts.cgroup.as_ref()
    }

    fn with_cgroup<T>(&self, act: impl FnOnce(&MachineCgroup) -> io::Result<T>) -> io::Result<T> {
        self.cgroup().map_or_else(|| Err(io::Error::from(io::ErrorKind::NotFound)), act)
    }
}

impl Machine for ContainerMachine {
    fn guest_stream(&mut self) -> Option<UnixStream> {
        self.stream.take()
    }

    fn death(&self) -> BorrowedFd<'_> {
        self.child.pidfd.as_fd()
    }

    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    fn open_slot(&mut self, exec: ExecId) -> io::Result<Option<OwnedFd>> {
        // Leaves that still held a dying process when their exec ended.
        self.cgroup_dirs_left.retain(|left| !self.parts.cgroup.as_ref().is_none_or(|c| c.close_exec(*left)));
        self.with_cgroup(|c| c.open_exec(exec)).map(Some)
    }

    fn kill_slot(&mut self, exec: ExecId) -> io::Result<()> {
        self.with_cgroup(|c| c.kill_exec(exec))
    }

    fn slot_usage(&self, exec: ExecId) -> (Duration, u32) {
        self.cgroup().map_or((Duration::ZERO, 0), |c| c.exec_usage(exec))
    }

    fn close_slot(&mut self, exec: ExecId) -> bool {
        let closed = self.cgroup().is_none_or(|c| c.close_exec(exec));
        if !closed {
            self.cgroup_dirs_left.push(exec);
        }
        closed
    }

    fn set_limits(&mut self, limits: &Limits) -> io::Result<()> {
        self.with_cgroup(|c| c.set_limits(limits))?;
        if let Some(layer) = &mut self.parts.layer {
            layer.set_limit(limits.disk)?;
        }
        let cpus = affinity(limits, 0);
        if !cpus.is_empty() {
            let mut set = rustix::thread::CpuSet::new();
            cpus.iter().for_each(|cpu| set.set(*cpu));
            rustix::thread::sched_setaffinity(rustix::process::Pid::from_raw(self.child.pid), &set)?;
        }
        Ok(())
    }

    fn fork_disk(&self, child: &SandboxId) -> Option<DiskFork> {
        let (layer, cgroup) = (self.parts.layer.as_ref()?, self.cgroup()?);
        let (pool, freezer, forking) = (self.parts.pool.clone(), cgroup.freezer(), self.forking.clone());
        let (child, source) = (child.to_string(), layer.dir().try_clone_to_owned());
        Some(Box::new(move || {
            let source = source.map_err(fail("hold the layer"))?;
            let _one = forking.lock().unwrap_or_else(PoisonError::into_inner);
            let began = Instant::now();
            pool.flush(source.as_fd(), &child);
            let stopped = Instant::now();
            let frozen = freezer.freeze().map_err(fail("make the machine stand still"))?;
            fault::point("fork-frozen").map_err(fail("make the machine stand still"))?;
            let copied = pool.fork(source.as_fd(), &child)?;
            drop(frozen);
            let pause = stopped.elapsed();
            pool.settle(&child)?;
            Ok(ForkCost { pause, whole: began.elapsed(), copied })
        }))
    }

    fn commit_disk(&self, into: PathBuf) -> Option<DiskFork> {
        let (layer, cgroup) = (self.parts.layer.as_ref()?, self.cgroup()?);
        let (freezer, forking, source) = (cgroup.freezer(), self.forking.clone(), layer.dir().try_clone_to_owned());
        let (base, count) = self.ids;
        Some(Box::new(move || {
            let source = source.map_err(fail("hold the layer"))?;
            let step = format!("copy the layer to {}", into.display());
            let _one = forking.lock().unwrap_or_else(PoisonError::into_inner);
            let began = Instant::now();
            let frozen = freezer.freeze().map_err(fail("make the machine stand still"))?;
            let copied = copy_upper(source.as_fd(), &into).map_err(fail(&step))?;
            drop(frozen);
            let pause = began.elapsed();
            // Whiteouts belong to the host's root, and stay so.
            let inside = |id: u32| (base..base.saturating_add(count)).contains(&id).then(|| id - base);
            owners::change(&into, &inside).map_err(fail(&step))?;
            Ok(ForkCost { pause, whole: began.elapsed(), copied: Some(copied) })
        }))
    }

    fn usage(&self) -> Usage {
        let mut usage = self.cgroup().map_or_else(Usage::default, MachineCgroup::usage);
        usage.disk_full = self.parts.layer.as_ref().and_then(Layer::full);
        usage
    }

    fn oom_kills(&self) -> u64 {
        self.cgroup().map_or(0, MachineCgroup::oom_kills)
    }

    fn tend(&mut self) {
        if let Some(layer) = &self.parts.layer {
            self.parts.pool.tend(layer);
        }
    }

    fn kill(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.child.pidfd, rustix::process::Signal::KILL);
    }

    fn destroy(&mut self) -> Result<(), LaunchError> {
        self.kill();
        reap(&self.child);
        let mut first = None;
        if let Some(cgroup) = self.parts.cgroup.take() {
            first = cgroup.remove(DEATH_PATIENCE).map_err(fail("remove the cgroup")).err();
        }
        if let Some(layer) = self.parts.layer.take() {
            let removed = self.parts.pool.remove(layer.name()).map_err(fail("remove the layer"));
            first = first.or(removed.err());
        }
        first.map_or(Ok(()), Err)
    }
}
