//! What a driver is: it makes one machine and gives its keeper hold of it.
//!
//! Order, for every driver:
//!
//! 1. [`Driver::launch`] is called once, in a single-threaded process (a driver may have to clone it), before any
//!    asynchronous runtime exists. Either it returns a machine whose guest agent will say `Ready` on
//!    [`Machine::guest_stream`], or it undoes what it did and returns the error.
//! 2. For each exec the keeper asks for a slot ([`Machine::open_slot`]), gives its descriptor to the guest agent, and
//!    closes the slot when the exec has ended ([`Machine::close_slot`]).
//! 3. [`Machine::kill`] ends everything in the machine and may be called at any time, more than once.
//! 4. [`Machine::destroy`] is called last, once, after the machine is dead, and leaves nothing of it.
//!
//! The machine also dies when its keeper does, without any of these calls (fail closed).

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "fake")]
pub mod fake;
pub mod fault;

use serde::{Deserialize, Serialize};
use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};
use trialrun_model::{ByteSize, DiskFull, ExecId, Isolation, Limits, LineageId, SandboxId};

/// What a driver can do on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Capabilities {
    /// Descriptors can be passed to the guest agent beside a request.
    pub passes_fds: bool,
    /// The keeper can reach an exec's processes from outside (kill, count, measure).
    pub slots: bool,
    /// The writable layer's size is limited.
    pub disk_limit: bool,
    /// The disk of a running machine can be forked.
    pub fork_disk: bool,
    /// Memory and disk of a running machine can be forked.
    pub fork_memory: bool,
}

/// Something of the host that is shown, read-only, at a place in the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// On the host.
    pub source: PathBuf,
    /// In the machine; absolute.
    pub target: PathBuf,
}

/// The read-only part of a machine's root.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rootfs {
    /// Trees below the writable layer, topmost first.
    pub lowers: Vec<PathBuf>,
    /// Read-only host directories on top.
    pub binds: Vec<Bind>,
    /// Paths in the machine that are covered by an empty read-only directory.
    pub masks: Vec<PathBuf>,
}

/// Where a machine's writable layer comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DiskSource {
    /// Empty.
    #[default]
    Fresh,
    /// Made for this machine before, by [`Machine::fork_disk`] of another one of its lineage.
    Forked,
}

/// What a fork of a disk cost its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ForkCost {
    /// How long the parent stood still.
    pub pause: Duration,
    /// How long all of it took.
    pub whole: Duration,
    /// What was copied. `None` where parent and child share what neither has changed.
    pub copied: Option<ByteSize>,
}

/// A fork of a disk, to be run where it may wait: see [`Machine::fork_disk`].
pub type DiskFork = Box<dyn FnOnce() -> Result<ForkCost, LaunchError> + Send>;

/// What a machine is made from.
#[derive(Debug)]
pub struct MachineSpec {
    /// The sandbox that it realizes.
    pub id: SandboxId,
    /// Its lineage; selects the uid range.
    pub lineage: LineageId,
    /// Ceilings.
    pub limits: Limits,
    /// Host name inside.
    pub hostname: String,
    /// The read-only part of the root.
    pub rootfs: Rootfs,
    /// Its writable layer.
    pub disk: DiskSource,
    /// Where the driver keeps what outlives no machine: layers, its own lock files.
    pub data_dir: PathBuf,
    /// Marks this data directory's cgroups.
    pub tag: String,
    /// The guest agent's program, open for execution.
    pub guest_program: OwnedFd,
    /// The encoded `Boot` message.
    pub boot: Vec<u8>,
    /// The cell to live in.
    pub netns: Option<OwnedFd>,
}

/// A launch that failed: the step, the thing, the cause. Never the user's fault.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct LaunchError {
    /// What was being done, with the object's name.
    pub step: String,
    /// What to do about it, when that is known.
    pub way_out: Option<String>,
    /// The kernel's word.
    #[source]
    pub cause: io::Error,
}

impl LaunchError {
    /// A failed step.
    pub fn new(step: impl Into<String>, cause: io::Error) -> Self {
        Self { step: step.into(), way_out: None, cause }
    }
}

/// What a machine used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time of everything that ever ran in it.
    pub cpu: Duration,
    /// Highest memory use, page cache included.
    pub peak_memory: ByteSize,
    /// Memory now.
    pub memory: ByteSize,
    /// How often the kernel killed in it for memory.
    pub oom_kills: u64,
    /// How often a fork was refused by the limit of processes.
    pub pids_refused: u64,
    /// Bytes in the writable layer, where the driver can tell.
    pub disk: Option<ByteSize>,
    /// Whether the writable layer is full (fewer than 1 MiB left).
    pub disk_full: Option<DiskFull>,
}

/// Makes machines.
pub trait Driver {
    /// `container`, `microvm` or `fake`.
    fn name(&self) -> &'static str;

    /// What it can do on this host.
    fn capabilities(&self) -> Capabilities;

    /// Makes a machine.
    ///
    /// # Errors
    /// The step that failed; what earlier steps made is undone.
    fn launch(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, LaunchError>;
}

/// Bytes that a file or tree takes on the disk. What can't be read counts as nothing; links are not followed.
#[must_use]
pub fn tree_bytes(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = path.symlink_metadata() else { return 0 };
    let entries = if meta.is_dir() { std::fs::read_dir(path).ok() } else { None };
    let below = entries.into_iter().flatten().flatten().map(|entry| tree_bytes(&entry.path()));
    below.fold(meta.blocks().saturating_mul(512), u64::saturating_add)
}

/// A running machine, held by its keeper.
pub trait Machine: Send {
    /// The stream to the guest agent. Taken once.
    fn guest_stream(&mut self) -> Option<std::os::unix::net::UnixStream>;

    /// Readable when the machine is dead.
    fn death(&self) -> BorrowedFd<'_>;

    /// Isolation in force.
    fn isolation(&self) -> &Isolation;

    /// Opens a slot for an exec; the descriptor goes to the guest agent. `None` when the driver has no slots.
    ///
    /// # Errors
    /// What the kernel says.
    fn open_slot(&mut self, exec: ExecId) -> io::Result<Option<OwnedFd>>;

    /// Kills everything in an exec's slot, at once.
    ///
    /// # Errors
    /// What the kernel says.
    fn kill_slot(&mut self, exec: ExecId) -> io::Result<()>;

    /// CPU time used in a slot and how many processes are in it now.
    fn slot_usage(&self, exec: ExecId) -> (Duration, u32);

    /// Removes an exec's slot when nothing is left in it; false when something still is.
    fn close_slot(&mut self, exec: ExecId) -> bool;

    /// Applies other limits to the running machine.
    ///
    /// # Errors
    /// What the kernel says.
    fn set_limits(&mut self, limits: &Limits) -> io::Result<()>;

    /// Makes the writable layer of the machine `child` a copy of this running machine's, as of one moment at which none of
    /// its processes runs. Both go their own ways from there. Memory-backed mounts are not part of it. `None` when the
    /// driver can't.
    ///
    /// The work is in what is returned and needs no hold of the machine, which goes on being served meanwhile. When that
    /// fails, the machine runs on and nothing is left of the copy.
    fn fork_disk(&self, _child: &SandboxId) -> Option<DiskFork> {
        None
    }

    /// Copies what the machine changed on its base to the new directory `into` of the host, as a tree that can lie on that
    /// base below another machine's writable layer: owners are those that the machine sees, removed files are whiteouts.
    /// The machine stands still meanwhile. `None` when the driver can't.
    fn commit_disk(&self, _into: PathBuf) -> Option<DiskFork> {
        None
    }

    /// What it used so far.
    fn usage(&self) -> Usage;

    /// How often the kernel killed in it for memory so far; cheaper than [`Self::usage`].
    fn oom_kills(&self) -> u64 {
        self.usage().oom_kills
    }

    /// Called every few hundred milliseconds while execs run: for work ahead of use, such as growing a pool.
    fn tend(&mut self) {}

    /// Kills everything in the machine.
    fn kill(&mut self);

    /// Removes what is left of a dead machine. Goes on past failures and returns the first.
    ///
    /// # Errors
    /// The first thing that could not be removed.
    fn destroy(&mut self) -> Result<(), LaunchError>;
}
