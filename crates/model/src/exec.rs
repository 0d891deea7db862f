//! Exec: the request to run a command, and how it ended.
//!
//! Three facts are kept apart: the exit code, the signal, and the way it ended. None is folded into another, so "exit
//! code 137" never has to be guessed at.

use serde::{Deserialize, Serialize};
use std::{fmt, time::Duration};

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// A program and its arguments, byte for byte; the program is looked up in the PATH of the exec's environment.
    Argv(#[serde(with = "crate::bytes::list")] Vec<Vec<u8>>),
    /// A line for the shell: `/bin/bash -c` where the image has bash, else `/bin/sh -c`.
    Shell(String),
}

impl Command {
    /// A program with arguments given as text.
    pub fn argv<I: IntoIterator<Item = S>, S: Into<String>>(words: I) -> Self {
        Self::Argv(words.into_iter().map(|w| w.into().into_bytes()).collect())
    }
}

/// Whether the exec's processes end with its leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecKind {
    /// What the leader left behind is killed after a short drain.
    Exec,
    /// A process: lives until it ends by itself or is killed. Its children may outlive it.
    Spawn,
}

/// Size of a pseudo-terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// A request to run a command in a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// What to run.
    pub command: Command,
    /// Working directory; the image's (or `/workspace`) when absent.
    #[serde(with = "crate::bytes::option", default)]
    pub cwd: Option<Vec<u8>>,
    /// Environment on top of the machine's. Later entries win.
    #[serde(with = "crate::bytes::pairs", default)]
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// User by name or number; the image's user when absent.
    pub user: Option<String>,
    /// Whether a stdin pipe is wanted. Without it, stdin is at its end at once.
    pub stdin: bool,
    /// Run on a pseudo-terminal of this size; stdout and stderr are then one stream.
    pub pty: Option<PtySize>,
    /// Wall time after which the whole process tree is killed.
    pub deadline: Option<Duration>,
    /// Exec or spawn.
    pub kind: ExecKind,
}

impl ExecSpec {
    /// An exec of `command` with everything else at its default.
    #[must_use]
    pub fn new(command: Command) -> Self {
        Self {
            command,
            cwd: None,
            env: Vec::new(),
            user: None,
            stdin: false,
            pty: None,
            deadline: None,
            kind: ExecKind::Exec,
        }
    }
}

/// A process's exit status as the kernel said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It called `exit`.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl ExitStatus {
    /// Exit code 0.
    #[must_use]
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }

    /// What a shell would show in `$?`: the code, or 128 plus the signal's number.
    #[must_use]
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Why a command could not be started. The user's mistake, not a failure of the command or of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// No such program, by path or in PATH.
    NotFound,
    /// There, but not executable (or of a format the kernel does not run).
    NotExecutable,
    /// The working directory is missing or is not a directory.
    BadCwd,
    /// No such user in the machine.
    UnknownUser,
    /// An environment name that is empty or holds `=` or NUL, or a value that holds NUL.
    BadEnv,
    /// An empty argv, an empty program name, or an argument with NUL.
    BadCommand,
    /// The machine's limit of processes or memory left no room to start it.
    LimitReached,
    /// Something else the kernel said; the message has it.
    Other,
}

/// A refusal with its words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Which kind.
    pub kind: RefusalKind,
    /// Names the thing: the program, path, user or variable, and what the kernel said.
    pub message: String,
}

/// How an exec ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// By itself (by exit or by a signal that was not ours).
    Exited,
    /// Its deadline passed; the whole tree was killed.
    TimedOut,
    /// The machine's memory limit was reached and the kernel killed in it.
    OutOfMemory,
    /// It was killed on request (`signal`, or the sandbox was deleted).
    Killed,
    /// The machine ended under it. Ours, never the command's.
    MachineLost,
    /// It never started.
    Refused(Refusal),
}

/// How much a process wrote, and how much of that is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OutputTotals {
    /// Bytes read from the process.
    pub seen: u64,
    /// Bytes that were dropped from the log (always its oldest).
    pub dropped: u64,
}

/// Why a write found no space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFull {
    /// The machine's own limit is reached: EDQUOT inside.
    Limit,
    /// The host has no room for what the limit would allow: ENOSPC inside.
    Host,
}

impl std::fmt::Display for DiskFull {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Limit => "the machine's disk is full (--disk)",
            Self::Host => "the host has no space left for what the machine writes, which is no fault of the program",
        })
    }
}

/// The end of an exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecOutcome {
    /// Code or signal of the leader; absent when it never started or its end was never seen.
    pub status: Option<ExitStatus>,
    /// The way it ended.
    pub ended: Ended,
    /// Wall time from start to end.
    pub wall: Duration,
    /// CPU time of the whole tree, daemons included, from the exec's cgroup.
    pub cpu: Duration,
    /// Both streams together.
    pub output: OutputTotals,
    /// The writable layer was full when it ended.
    #[serde(default)]
    pub disk_full: Option<DiskFull>,
    /// Processes that were still there when the leader ended and were killed.
    pub left_behind: u32,
}
