//! Messages. Tags are never reused; see `docs/protocol.md`.

/// The first bytes of the guest agent's life: given by the launcher on the agent's command line as a file descriptor
/// that holds this message, before any connection.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Boot {
    /// Host name to set (already set by the launcher in a container).
    #[prost(string, tag = "1")]
    pub hostname: String,
    /// Environment of every exec.
    #[prost(message, repeated, tag = "2")]
    pub env: Vec<EnvEntry>,
    /// User of an exec that names none.
    #[prost(string, tag = "3")]
    pub user: String,
    /// Directory of an exec that names none.
    #[prost(bytes = "vec", tag = "4")]
    pub cwd: Vec<u8>,
}

/// One environment entry, byte for byte.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EnvEntry {
    /// Name.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// Value.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// A request; opens a stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    /// How many file descriptors travel beside this request, in the order that the operation documents.
    #[prost(uint32, tag = "1")]
    pub fds: u32,
    /// What is asked.
    #[prost(oneof = "Op", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17")]
    pub op: Option<Op>,
}

/// The operations.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Op {
    /// Run a command. Descriptors: `[cgroup directory]` or `[cgroup directory, stdin, stdout, stderr]`.
    #[prost(message, tag = "2")]
    Exec(Exec),
    /// Send a signal to the process of an exec stream.
    #[prost(message, tag = "3")]
    Signal(Signal),
    /// Metadata of one path.
    #[prost(message, tag = "4")]
    Stat(Path),
    /// Entries of a directory.
    #[prost(message, tag = "5")]
    List(Path),
    /// Bytes of a regular file. Descriptors: none (data frames) or `[sink]`.
    #[prost(message, tag = "6")]
    Read(Read),
    /// Replace a file atomically. Descriptors: none (data frames then End0) or `[source]`.
    #[prost(message, tag = "7")]
    Write(Write),
    /// Rename.
    #[prost(message, tag = "8")]
    Rename(Rename),
    /// Remove a file or directory.
    #[prost(message, tag = "9")]
    Remove(Remove),
    /// Make a directory and its parents.
    #[prost(message, tag = "10")]
    Mkdir(Mkdir),
    /// Unpack a tar stream into a directory. Descriptors: none or `[source]`.
    #[prost(message, tag = "11")]
    TarUp(TarUp),
    /// Pack a directory or file as a tar stream. Descriptors: none or `[sink]`.
    #[prost(message, tag = "12")]
    TarDown(TarDown),
    /// Connect to a port of the machine's loopback. Descriptors: none or `[socket]`.
    #[prost(message, tag = "13")]
    Tunnel(Tunnel),
    /// About the machine.
    #[prost(message, tag = "14")]
    Info(Info),
    /// New size of an exec's terminal.
    #[prost(message, tag = "15")]
    Resize(Resize),
    /// Entries added to the environment of later execs.
    #[prost(message, tag = "16")]
    SetEnv(SetEnv),
    /// Paths that match glob patterns. Answered by [`Entries`].
    #[prost(message, tag = "17")]
    Glob(Glob),
}

/// Run a command.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Exec {
    /// Program and arguments; empty when `shell` is set.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub argv: Vec<Vec<u8>>,
    /// A line for the machine's shell.
    #[prost(string, optional, tag = "2")]
    pub shell: Option<String>,
    /// Working directory.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub cwd: Option<Vec<u8>>,
    /// Environment on top of the machine's.
    #[prost(message, repeated, tag = "4")]
    pub env: Vec<EnvEntry>,
    /// User by name or number.
    #[prost(string, optional, tag = "5")]
    pub user: Option<String>,
    /// A stdin pipe is wanted (inline stdio only; with passed descriptors stdin is what was passed).
    #[prost(bool, tag = "6")]
    pub stdin: bool,
    /// Rows of the terminal; 0 for none.
    #[prost(uint32, tag = "7")]
    pub pty_rows: u32,
    /// Columns of the terminal.
    #[prost(uint32, tag = "8")]
    pub pty_cols: u32,
    /// Kill after so many milliseconds; only where the keeper can't reach the processes (microVM). 0 for none.
    #[prost(uint64, tag = "9")]
    pub deadline_ms: u64,
}

/// Send a signal.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Signal {
    /// Stream id of the exec.
    #[prost(uint32, tag = "1")]
    pub stream: u32,
    /// Signal number.
    #[prost(int32, tag = "2")]
    pub signal: i32,
    /// To the process group instead of the leader alone.
    #[prost(bool, tag = "3")]
    pub group: bool,
}

/// New size of a terminal.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Resize {
    /// Stream id of the exec.
    #[prost(uint32, tag = "1")]
    pub stream: u32,
    /// Rows.
    #[prost(uint32, tag = "2")]
    pub rows: u32,
    /// Columns.
    #[prost(uint32, tag = "3")]
    pub cols: u32,
}

/// A path inside the machine, byte for byte; relative ones start at the default directory.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Path {
    /// The path.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
}

/// Read a file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Read {
    /// The path; links are followed.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// First byte.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// At most so many bytes; 0 for all.
    #[prost(uint64, tag = "3")]
    pub limit: u64,
}

/// Replace a file atomically: written beside it, synced if asked, renamed over it. Missing parents are made.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Write {
    /// The path.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Permission bits including setuid, setgid and sticky; 0o644 when absent (an existing file keeps its own).
    #[prost(uint32, optional, tag = "2")]
    pub mode: Option<u32>,
    /// Owner as `user` or `user:group`, by name or number; the default user when absent.
    #[prost(string, optional, tag = "3")]
    pub owner: Option<String>,
    /// Exact size, so that a cut stream is never taken for a whole file. Absent when unknown.
    #[prost(uint64, optional, tag = "4")]
    pub size: Option<u64>,
}

/// Rename.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Rename {
    /// Old path.
    #[prost(bytes = "vec", tag = "1")]
    pub from: Vec<u8>,
    /// New path.
    #[prost(bytes = "vec", tag = "2")]
    pub to: Vec<u8>,
}

/// Remove.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Remove {
    /// The path.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// With everything below it.
    #[prost(bool, tag = "2")]
    pub recursive: bool,
    /// Not an error when it is not there.
    #[prost(bool, tag = "3")]
    pub missing_ok: bool,
}

/// Make a directory and its parents.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mkdir {
    /// The path.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Permission bits of the last one; 0o755 when absent.
    #[prost(uint32, optional, tag = "2")]
    pub mode: Option<u32>,
    /// Owner, as in [`Write`].
    #[prost(string, optional, tag = "3")]
    pub owner: Option<String>,
}

/// Unpack a tar stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TarUp {
    /// Directory to unpack into; made when missing.
    #[prost(bytes = "vec", tag = "1")]
    pub dest: Vec<u8>,
    /// Owner of everything unpacked, as in [`Write`].
    #[prost(string, optional, tag = "2")]
    pub owner: Option<String>,
    /// Compression of the stream: "" or "zstd" or "gzip".
    #[prost(string, tag = "3")]
    pub compression: String,
}

/// Pack a tar stream. Names in it are relative to `path`; symbolic links are kept as links; sockets and FIFOs are
/// skipped and counted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TarDown {
    /// Directory or file.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Compression of the stream: "" or "zstd" or "gzip".
    #[prost(string, tag = "2")]
    pub compression: String,
}

/// Connect to a port of the machine's loopback.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tunnel {
    /// Port.
    #[prost(uint32, tag = "1")]
    pub port: u32,
}

/// About the machine.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Info {}

/// Entries added to the environment of later execs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetEnv {
    /// The entries; a later one of the same name wins.
    #[prost(message, repeated, tag = "1")]
    pub env: Vec<EnvEntry>,
}

/// Paths that match glob patterns (`*`, `?`, `[…]`, `**`), relative to `dir`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Glob {
    /// Where to look.
    #[prost(bytes = "vec", tag = "1")]
    pub dir: Vec<u8>,
    /// Patterns.
    #[prost(string, repeated, tag = "2")]
    pub patterns: Vec<String>,
}

/// Answers on a stream. `Failed` and `Done` are last; an exec's last event is `Exited` or `Failed`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Event {
    /// What happened.
    #[prost(oneof = "EventKind", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub kind: Option<EventKind>,
}

/// The events.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum EventKind {
    /// The agent is ready for requests; sent on stream 0 when it starts.
    #[prost(message, tag = "1")]
    Ready(Ready),
    /// The command runs.
    #[prost(message, tag = "2")]
    Started(Started),
    /// The command's leader ended. Both output channels are complete when this arrives inline.
    #[prost(message, tag = "3")]
    Exited(Exited),
    /// The request was refused or failed.
    #[prost(message, tag = "4")]
    Failed(Failed),
    /// The request is done.
    #[prost(message, tag = "5")]
    Done(Done),
    /// Metadata.
    #[prost(message, tag = "6")]
    Stat(FileStat),
    /// Directory entries; may come in several events before `Done`.
    #[prost(message, tag = "7")]
    Entries(Entries),
    /// About the machine.
    #[prost(message, tag = "8")]
    Info(MachineInfo),
}

/// The agent is ready.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ready {
    /// The agent's generation.
    #[prost(uint32, tag = "1")]
    pub generation: u32,
}

/// The command runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Started {
    /// Pid inside.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

/// The leader ended.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Exited {
    /// Exit code, when it exited.
    #[prost(int32, optional, tag = "1")]
    pub code: Option<i32>,
    /// Signal, when one ended it.
    #[prost(int32, optional, tag = "2")]
    pub signal: Option<i32>,
}

/// A refusal or failure.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Failed {
    /// Kind, see [`FailKind`].
    #[prost(enumeration = "FailKind", tag = "1")]
    pub kind: i32,
    /// The kernel's errno; 0 for none.
    #[prost(int32, tag = "2")]
    pub errno: i32,
    /// Names the thing.
    #[prost(string, tag = "3")]
    pub message: String,
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FailKind {
    /// Something the kernel said; see errno.
    Other = 0,
    /// No such program, file or directory.
    NotFound = 1,
    /// Not executable.
    NotExecutable = 2,
    /// Bad working directory.
    BadCwd = 3,
    /// No such user.
    UnknownUser = 4,
    /// Bad environment name or value.
    BadEnv = 5,
    /// Bad argv.
    BadCommand = 6,
    /// No process or memory left.
    LimitReached = 7,
    /// The writable layer is full.
    DiskFull = 8,
    /// The stream of bytes was cut or malformed; nothing was changed.
    BadStream = 9,
    /// The request was not understood.
    BadRequest = 10,
    /// Permission denied.
    Denied = 11,
    /// Wrong type of file (a directory where a file was wanted, or the other way round).
    WrongType = 12,
}

/// Done.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Done {
    /// Bytes of file content moved.
    #[prost(uint64, tag = "1")]
    pub bytes: u64,
    /// Files moved.
    #[prost(uint64, tag = "2")]
    pub files: u64,
    /// Entries that were left out, each with its reason (at most 100).
    #[prost(string, repeated, tag = "3")]
    pub skipped: Vec<String>,
    /// How many were left out in all.
    #[prost(uint64, tag = "4")]
    pub skipped_total: u64,
}

/// Metadata of one path; links are not followed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FileStat {
    /// Name within its directory, byte for byte.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// `st_mode`, type bits included.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    /// Size in bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// Modification time in nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub mtime_ns: i64,
    /// Owner.
    #[prost(uint32, tag = "5")]
    pub uid: u32,
    /// Group.
    #[prost(uint32, tag = "6")]
    pub gid: u32,
    /// Target of a symbolic link.
    #[prost(bytes = "vec", optional, tag = "7")]
    pub link: Option<Vec<u8>>,
    /// Owner's name, if the machine's passwd has one.
    #[prost(string, tag = "8")]
    pub user: String,
    /// Group's name, if the machine's group file has one.
    #[prost(string, tag = "9")]
    pub group: String,
}

/// Directory entries.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Entries {
    /// The entries.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<FileStat>,
}

/// About the machine.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MachineInfo {
    /// Kernel release.
    #[prost(string, tag = "1")]
    pub kernel: String,
    /// `PRETTY_NAME` of os-release.
    #[prost(string, tag = "2")]
    pub os: String,
    /// CPUs that programs see.
    #[prost(uint32, tag = "3")]
    pub cpus: u32,
    /// The agent's private memory in bytes.
    #[prost(uint64, tag = "4")]
    pub agent_private_bytes: u64,
    /// Host name.
    #[prost(string, tag = "5")]
    pub hostname: String,
    /// Default user.
    #[prost(string, tag = "6")]
    pub user: String,
}
