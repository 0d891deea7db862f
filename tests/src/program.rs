//! The real binary, driven as a user's shell drives it.

use std::{
    ffi::OsStr,
    fmt,
    io::Read,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Variables that force a fallback: `cargo xtask test --forced` sets them for the whole run.
const FORCING: [&str; 5] =
    ["TRIALRUN_CGROUPS", "TRIALRUN_LAYERS", "TRIALRUN_QUOTA", "TRIALRUN_IDMAP", "TRIALRUN_LANDLOCK"];

/// A call that is being put together.
pub struct Program {
    command: Command,
    input: Option<Vec<u8>>,
    patience: Duration,
}

/// What it gave.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// Standard output's bytes.
    pub bytes: Vec<u8>,
    /// Wall time.
    pub took: Duration,
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit {:?} after {:?}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.took, self.out, self.err)
    }
}

impl Output {
    /// Its output as one JSON value.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("not JSON ({e}): {self}"))
    }
}

impl Program {
    pub(crate) fn new(program: &Path, data: &Path, cache: &Path) -> Self {
        let mut command = Command::new(program);
        let ours =
            std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("TRIALRUN_"));
        // What forces a fallback is this run's subject.
        let ours = ours.filter(|name| !FORCING.iter().any(|forcing| name == forcing));
        for name in ours {
            command.env_remove(name);
        }
        command.env("TRIALRUN_DATA_DIR", data).env("TRIALRUN_CACHE_DIR", cache).env("NO_COLOR", "1");
        Self { command, input: None, patience: Duration::from_secs(240) }
    }

    /// More arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    /// Standard input; without it, it is at its end.
    #[must_use]
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.input = Some(bytes.into());
        self
    }

    /// A variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Its directory.
    #[must_use]
    pub fn dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// How long it may take before it counts as hanging.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The command, for tests that start it in their own way.
    pub fn into_command(self) -> Command {
        self.command
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn start(mut self) -> Started {
        let stdin = if self.input.is_some() { Stdio::piped() } else { Stdio::null() };
        self.command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().expect("the program starts");
        if let (Some(mut pipe), Some(input)) = (child.stdin.take(), self.input) {
            // A program that ends without reading all of it is none of the test's business.
            std::thread::spawn(move || drop(std::io::Write::write_all(&mut pipe, &input)));
        }
        Started::new(child, self.patience)
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// When it can't be started or hangs.
    pub fn run(self) -> Output {
        self.start().finish()
    }
}

type Reader = std::thread::JoinHandle<Vec<u8>>;

/// A running program, its output being read.
pub struct Started {
    child: Child,
    out: Option<Reader>,
    err: Option<Reader>,
    begun: Instant,
    patience: Duration,
}

fn read(pipe: Option<impl Read + Send + 'static>) -> Option<Reader> {
    pipe.map(|mut pipe| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            bytes
        })
    })
}

impl Started {
    /// Reads what a child writes.
    pub fn new(mut child: Child, patience: Duration) -> Self {
        let (out, err) = (read(child.stdout.take()), read(child.stderr.take()));
        Self { child, out, err, begun: Instant::now(), patience }
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid()) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it hangs: it is killed then.
    pub fn finish(mut self) -> Output {
        let status = loop {
            match self.child.try_wait().expect("wait for the program") {
                Some(status) => break status,
                None if self.begun.elapsed() > self.patience => {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    let text = |r: Option<Reader>| {
                        String::from_utf8_lossy(&r.and_then(|r| r.join().ok()).unwrap_or_default()).into_owned()
                    };
                    let (out, err) = (text(self.out.take()), text(self.err.take()));
                    panic!("the program hangs after {:?}\n--- stdout\n{out}\n--- stderr\n{err}", self.patience);
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let took = self.begun.elapsed();
        let join = |r: Option<Reader>| r.and_then(|r| r.join().ok()).unwrap_or_default();
        let (bytes, err) = (join(self.out.take()), join(self.err.take()));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Output { code: status.code(), out: text(&bytes), err: text(&err), bytes, took }
    }
}
