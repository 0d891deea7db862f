//! What the engine and a keeper say to each other over the keeper's unix socket.
//!
//! Both ends come from one program, so messages are JSON in the frames of `guest-proto` (stream 0): a connection carries
//! one [`Call`] in a `Request` frame, with file descriptors beside it where the call says so, and [`Reply`]s in `Event`
//! frames. Output of a followed exec travels as `Data1` and `Data2` frames, input as `Data0` and `End0`. Closing a
//! connection never kills a command.

use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};
use trialrun_driver::Usage;
pub use trialrun_driver::{Bind, DiskSource, ForkCost, Rootfs};
use trialrun_gateway::ConnectionRecord;
use trialrun_model::{ExecId, ExecOutcome, ExecSpec, Isolation, Limits, LineageId, PtySize, SandboxId};
use trialrun_policy::Policy;

/// What a keeper needs to make its machine. Sent first on the control stream, with the machine's lock beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeeperSpec {
    /// The sandbox.
    pub id: SandboxId,
    /// Its lineage.
    pub lineage: LineageId,
    /// Ceilings.
    pub limits: Limits,
    /// Host name inside.
    pub hostname: String,
    /// Read-only part of the root.
    pub rootfs: Rootfs,
    /// Its writable layer.
    pub disk: DiskSource,
    /// Environment of every exec.
    pub env: Vec<(String, String)>,
    /// Default user.
    pub user: String,
    /// Default directory.
    pub cwd: String,
    /// First egress policy.
    pub policy: Policy,
    /// Proxy for the gateway's own connections, as `HTTPS_PROXY` has it.
    pub upstream_proxy: Option<String>,
    /// Names for which that proxy is not used, as `NO_PROXY` has it.
    pub no_proxy: Option<String>,
    /// The data directory.
    pub data_dir: PathBuf,
    /// Marks this data directory's cgroups.
    pub tag: String,
    /// The guest agent's program.
    pub guest_program: PathBuf,
    /// Ends with its client's control stream. Else it lives until its lease ends.
    pub attached: bool,
    /// Longest life; `None` for no limit of its own (attached).
    pub lease: Option<Duration>,
}

/// Milliseconds that the steps of a start took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StartTimings {
    /// Waiting for the specification, while the engine prepared it.
    pub read_ms: f64,
    /// Making the cell, which the keeper does before it has its specification.
    pub cell_ms: f64,
    /// The driver's launch.
    pub launch_ms: f64,
    /// From there to the agent's first word.
    pub agent_ms: f64,
}

/// Why a machine could not be made.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("can't {step}: {cause}{}", way_out.as_ref().map(|w| format!(" ({w})")).unwrap_or_default())]
pub struct StartFailure {
    /// The step.
    pub step: String,
    /// What the kernel said.
    pub cause: String,
    /// What to do.
    pub way_out: Option<String>,
}

/// The keeper's answer on the control stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Started {
    /// The machine answers.
    Ready {
        /// The keeper's pid.
        keeper_pid: u32,
        /// Isolation in force.
        isolation: Isolation,
        /// Where the time went.
        timings: StartTimings,
    },
    /// It could not be made; nothing of it is left.
    Failed(StartFailure),
}

/// A file operation; paths are bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum FileOp {
    /// Metadata.
    Stat(Vec<u8>),
    /// Entries of a directory.
    List(Vec<u8>),
    /// Bytes of a file, into the descriptor beside the call.
    Read {
        /// Path.
        path: Vec<u8>,
        /// First byte.
        offset: u64,
        /// At most so many; 0 for all.
        limit: u64,
    },
    /// Replace a file with what the descriptor beside the call gives.
    Write {
        /// Path.
        path: Vec<u8>,
        /// Mode.
        mode: Option<u32>,
        /// Owner.
        owner: Option<String>,
        /// Exact size.
        size: Option<u64>,
    },
    /// Rename.
    Rename(Vec<u8>, Vec<u8>),
    /// Remove.
    Remove {
        /// Path.
        path: Vec<u8>,
        /// With everything below.
        recursive: bool,
        /// Missing is fine.
        missing_ok: bool,
    },
    /// Make a directory and its parents.
    Mkdir {
        /// Path.
        path: Vec<u8>,
        /// Mode.
        mode: Option<u32>,
        /// Owner.
        owner: Option<String>,
    },
    /// Unpack the tar stream that the descriptor beside the call gives.
    TarUp {
        /// Directory.
        dest: Vec<u8>,
        /// Owner.
        owner: Option<String>,
        /// "", "zstd" or "gzip".
        compression: String,
    },
    /// Pack a tar stream into the descriptor beside the call.
    TarDown {
        /// Path.
        path: Vec<u8>,
        /// "", "zstd" or "gzip".
        compression: String,
    },
    /// Paths that match patterns.
    Glob {
        /// Where.
        dir: Vec<u8>,
        /// Patterns.
        patterns: Vec<String>,
    },
}

/// A request to a keeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Call {
    /// Run a command. With `follow`, its output comes on this connection until it ends.
    Exec {
        /// What.
        spec: ExecSpec,
        /// Whether output is wanted here.
        follow: bool,
    },
    /// Follow an exec from a cursor: the number of bytes, both streams together, that were seen already.
    Attach {
        /// Which.
        exec: ExecId,
        /// From where.
        cursor: u64,
    },
    /// Send a signal.
    Signal {
        /// To which exec's leader.
        exec: ExecId,
        /// Number.
        signal: i32,
        /// To its process group.
        group: bool,
    },
    /// Kill an exec's whole tree.
    Kill(ExecId),
    /// Resize an exec's terminal.
    Resize(ExecId, PtySize),
    /// Write to an exec's stdin, and close it when `end`.
    Input {
        /// Which.
        exec: ExecId,
        /// Bytes.
        #[serde(with = "trialrun_model::bytes")]
        bytes: Vec<u8>,
        /// Close it after them.
        end: bool,
    },
    /// All execs, ended ones included while they are kept.
    List,
    /// A file operation.
    File(FileOp),
    /// Connect the descriptor beside the call with a port of the machine's loopback.
    Tunnel(u16),
    /// Add entries to the environment of later execs.
    SetEnv(Vec<(String, String)>),
    /// Put another egress policy in force.
    SetPolicy(Policy),
    /// The gateway's records after a sequence number.
    Records(u64),
    /// What was used.
    Usage,
    /// Isolation, limits, policy, private memory.
    Describe,
    /// Apply other limits.
    SetLimits(Limits),
    /// Copy the disk for this sandbox of the same lineage, which is made from the copy next.
    Fork(SandboxId),
    /// Copy what changed on the base to this new directory, as a tree for other machines.
    Commit(PathBuf),
    /// Outlive the client, for at most so long.
    Detach(Duration),
    /// Delete the machine; the answer comes when nothing of it is left.
    Delete,
}

/// What is known of one exec.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExecInfo {
    /// Id.
    pub exec: ExecId,
    /// Pid inside.
    pub pid: u32,
    /// Its command, for people.
    pub command: String,
    /// Seconds since 1970.
    pub started_at: u64,
    /// Its end, if it has ended.
    pub outcome: Option<ExecOutcome>,
}

/// One directory entry or path's metadata.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FileInfo {
    /// Name, byte for byte.
    #[serde(with = "trialrun_model::bytes")]
    pub name: Vec<u8>,
    /// `st_mode`.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
    /// Nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// A link's target.
    #[serde(with = "trialrun_model::bytes::option", default)]
    pub link: Option<Vec<u8>>,
}

/// Everything about a machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Description {
    /// Isolation in force.
    pub isolation: Isolation,
    /// Ceilings.
    pub limits: Limits,
    /// Policy in force.
    pub policy: Policy,
    /// The keeper's private memory.
    pub keeper_private_bytes: u64,
    /// The guest agent's private memory, as it says.
    pub agent_private_bytes: u64,
    /// Kernel release inside.
    pub kernel: String,
    /// System inside.
    pub os: String,
}

/// What a fork of a machine takes over from it, apart from its disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Forked {
    /// Ceilings in force.
    pub limits: Limits,
    /// Host name.
    pub hostname: String,
    /// The very trees below its writable layer, whatever its image's name stands for by now.
    pub rootfs: Rootfs,
    /// Environment, with what was added to it.
    pub env: Vec<(String, String)>,
    /// Default user.
    pub user: String,
    /// Default directory.
    pub cwd: String,
    /// Policy in force.
    pub policy: Policy,
    /// What it cost.
    pub cost: ForkCost,
}

/// Kinds of refusal of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallErrorKind {
    /// No such exec, file or directory.
    NotFound,
    /// The writable layer is full.
    DiskFull,
    /// Permission.
    Denied,
    /// A directory where a file was wanted, or the other way round.
    WrongType,
    /// The stream was cut or malformed.
    BadStream,
    /// The caller's mistake otherwise.
    Invalid,
    /// The machine is gone.
    MachineLost,
    /// Ours.
    Internal,
}

/// A refused or failed call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    /// Kind.
    pub kind: CallErrorKind,
    /// Names the thing.
    pub message: String,
}

/// An answer of a keeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The exec runs.
    Started {
        /// Its id.
        exec: ExecId,
        /// Its pid inside.
        pid: u32,
    },
    /// So many bytes of the output that was asked for are no longer kept.
    Dropped(u64),
    /// The exec ended; last on its connection.
    Ended(ExecOutcome),
    /// Execs.
    Execs(Vec<ExecInfo>),
    /// Files.
    Files(Vec<FileInfo>),
    /// Moved.
    Moved {
        /// Bytes of content.
        bytes: u64,
        /// Files.
        files: u64,
        /// What was left out, each with its reason.
        skipped: Vec<String>,
        /// How many in all.
        skipped_total: u64,
    },
    /// Records, and how many were dropped before them.
    Records(Vec<ConnectionRecord>, u64),
    /// Usage.
    Usage(Usage),
    /// Description.
    Description(Box<Description>),
    /// The disk lies ready.
    Forked(Box<Forked>),
    /// The tree lies ready.
    Committed(ForkCost),
    /// Done.
    Done,
    /// Refused or failed.
    Error(CallError),
}

#[cfg(test)]
mod tests {
    use trialrun_model::{Command, ExecSpec};

    #[test]
    fn every_byte_reads_back_and_text_stays_short() {
        let all: Vec<u8> = (0..=255).collect();
        let spec = ExecSpec {
            cwd: Some(all.clone()),
            env: vec![(all.clone(), vec![b'q'; 1000])],
            ..ExecSpec::new(Command::Argv(vec![all, Vec::new()]))
        };
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<ExecSpec>(&json).unwrap(), spec);
        assert!(json.contains(&"q".repeat(1000)));
        assert!(serde_json::from_str::<Command>(r#"{"Argv":["\u0100"]}"#).is_err());
    }
}
