//! One command, timed from its start to its first byte and to its end.

use super::table::ms;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead, BufReader, Read, Seek, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

/// First argument of the helper process.
pub const HELPER: &str = "__measure";
/// A peer that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What one run gave.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sample {
    /// To the first byte of standard output; absent without one.
    pub first_ms: Option<f64>,
    /// To its end.
    pub exit_ms: f64,
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Sample {
    /// The sample, if it printed just this and ended well.
    ///
    /// # Errors
    /// What it gave instead.
    pub fn expect(self, out: &str) -> Result<Self> {
        let tail = self.err.trim().lines().last().unwrap_or_default();
        ensure!(self.code == Some(0) && self.out == out, "exit {:?}, printed {:?}, said {tail:?}", self.code, self.out);
        Ok(self)
    }
}

/// Runs a command and times it.
///
/// # Errors
/// When it can't be started.
pub fn run(argv: &[String]) -> Result<Sample> {
    // A file, not a pipe: nobody reads it meanwhile.
    let mut err_file = tempfile::tempfile()?;
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::from(err_file.try_clone()?));
    let (started, watched) = mpsc::channel::<u32>();
    let (ended, end) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let Ok(pid) = watched.recv() else { return };
        if end.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout)
            && let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let begun = Instant::now();
    let mut child = command.spawn().with_context(|| format!("run {}", argv[0]))?;
    let _ = started.send(child.id());
    let mut stdout = child.stdout.take().context("its output")?;
    let mut out = vec![0; 4096];
    let got = stdout.read(&mut out).unwrap_or(0);
    let first_ms = (got > 0).then(|| ms(begun));
    out.truncate(got);
    let _ = stdout.read_to_end(&mut out);
    let status = child.wait()?;
    let exit_ms = ms(begun);
    drop(ended);
    let _ = watchdog.join();
    let mut err = Vec::new();
    err_file.rewind()?;
    err_file.read_to_end(&mut err)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Sample { first_ms, exit_ms, code: status.code(), out: text(&out), err: text(&err) })
}

/// A process that measures in a mount namespace without the v2 hierarchy.
///
/// crun and podman refuse a hybrid host. Hiding `unified` for each run would be in their time, so a helper lives where
/// it is hidden, and measures there. The host keeps its mounts: the helper's namespace is private.
pub struct Helper {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// Where a hybrid host has its v2 hierarchy.
const UNIFIED: &str = "/sys/fs/cgroup/unified";

/// Whether this host needs the helper.
pub fn is_hybrid() -> bool {
    std::path::Path::new(UNIFIED).join("cgroup.controllers").exists()
}

impl Helper {
    /// Starts it.
    ///
    /// # Errors
    /// Without root or unshare(1).
    pub fn start() -> Result<Self> {
        let script = format!("umount {UNIFIED} && exec \"$0\" {HELPER}");
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .arg(std::env::current_exe()?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal is for the bench, which still needs it to clean up.
            .process_group(0)
            .spawn()
            .context("start the helper with unshare")?;
        let (to, from) = (child.stdin.take().context("its input")?, child.stdout.take().context("its output")?);
        Ok(Self { child, to, from: BufReader::new(from) })
    }

    /// As [`run`], in there.
    ///
    /// # Errors
    /// What it says, or that it is gone.
    pub fn run(&mut self, argv: &[String]) -> Result<Sample> {
        serde_json::to_writer(&mut self.to, argv)?;
        self.to.write_all(b"\n")?;
        let mut line = String::new();
        ensure!(self.from.read_line(&mut line)? > 0, "the helper is gone");
        let answer: Result<Sample, String> = serde_json::from_str(&line)?;
        answer.map_err(anyhow::Error::msg)
    }

    /// Ends it.
    pub fn stop(self) {
        let Self { mut child, to, .. } = self;
        drop(to);
        let _ = child.wait();
    }
}

/// The helper's main.
pub fn help() -> ExitCode {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let answer =
            serde_json::from_str::<Vec<String>>(&line).map_err(anyhow::Error::from).and_then(|argv| run(&argv));
        match serde_json::to_string(&answer.map_err(|e| format!("{e:#}"))) {
            Ok(text) => println!("{text}"),
            Err(_) => return ExitCode::FAILURE,
        }
    }
    ExitCode::SUCCESS
}
