//! `trialrun run`: one command in one machine.

use crate::{
    args::{Dirs, Machine, Run},
    context::{self, Steps},
    failure::{Failure, exit_codes},
    network::network,
    stream::{self, Ended, Interrupts, Sink, Through},
    terminal::{self, Raw},
};
use std::{ffi::OsString, os::unix::ffi::OsStringExt, time::Duration};
use trialrun_engine::{CreateOptions, Engine, Sandbox, UploadRules};
use trialrun_model::{Command, Ended as How, ExecOutcome, ExecSpec, ImageRef, SandboxSpec};

/// How long a kept machine lives.
pub const KEEP: Duration = Duration::from_secs(3600);

/// The environment that `--env` asks for.
///
/// # Errors
/// A name that is empty or can't be passed on.
pub fn environment(entries: &[String]) -> Result<Vec<(String, String)>, Failure> {
    entries
        .iter()
        .map(|entry| match entry.split_once('=') {
            Some(("", _)) => Err(Failure::usage(format!("--env {entry:?} has no name"))),
            Some((name, value)) => match trialrun_model::check_env(name.as_bytes(), value.as_bytes()) {
                Ok(()) => Ok((name.to_owned(), value.to_owned())),
                Err(e) => Err(Failure::usage(format!("--env: {e}"))),
            },
            None => match std::env::var(entry) {
                Ok(value) => Ok((entry.clone(), value)),
                Err(e) => Err(Failure::usage(format!("--env {entry}: {e} (write {entry}=VALUE)"))),
            },
        })
        .collect()
}

/// What a machine's options ask for.
///
/// # Errors
/// A limit out of range or a bad environment entry.
pub fn spec(machine: &Machine, env: Vec<(String, String)>) -> Result<SandboxSpec, Failure> {
    let limits = machine.limits();
    limits.check().map_err(|e| Failure::usage(format!("--{e}")))?;
    let mut all = env;
    all.extend(environment(&machine.env)?);
    Ok(SandboxSpec { image: machine.image.clone(), limits, env: all, ..SandboxSpec::default() })
}

/// `argv` as bytes.
pub fn argv(words: Vec<OsString>) -> Command {
    Command::Argv(words.into_iter().map(OsString::into_vec).collect())
}

/// Runs it.
///
/// # Errors
/// What kept us from running the command; its own failure is its exit status.
pub async fn run(dirs: &Dirs, run: Run) -> Result<u8, Failure> {
    let engine = context::engine_for_machine(dirs)?;
    let steps = Steps::new(run.json || !std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let mut interrupts = Interrupts::listen()?;
    let uploads = run.upload.iter().map(|text| split_upload(text)).collect::<Result<Vec<_>, _>>()?;
    interrupts.guard(context::ensure_image(&engine, &run.machine.image, &steps)).await??;
    let command = command(&engine, &run)?;
    let network =
        interrupts.guard(network(&engine, &run.machine.image, &run.network, &run.machine.allow, &steps)).await??;
    let spec = spec(&run.machine, network.env)?;
    let options = CreateOptions { spec, policy: network.policy, attached: true, lease: None };
    let sandbox = interrupts.guard(engine.create(options)).await??;
    let result = inside(&sandbox, run_parts(&run), &uploads, run.json, &steps, &mut interrupts, command).await;
    if run.keep && result.is_ok() {
        let id = sandbox.keep(KEEP).await?;
        eprintln!("trialrun: the machine is kept for {} minutes: trialrun attach {id}", KEEP.as_secs() / 60);
    } else {
        sandbox.delete().await?;
    }
    result
}

/// What is run: the image's entrypoint, then what was asked for or else the image's own command.
fn command(engine: &Engine, run: &Run) -> Result<Vec<OsString>, Failure> {
    let image = match &run.machine.image {
        ImageRef::Host => None,
        image => Some(engine.images().resolve(image)?),
    };
    let config = image.map(|image| image.config).unwrap_or_default();
    let mut words: Vec<OsString> = match &run.entrypoint {
        Some(program) if program.is_empty() => Vec::new(),
        Some(program) => vec![program.into()],
        None => config.entrypoint.into_iter().map(Into::into).collect(),
    };
    match (&run.command[..], &run.entrypoint) {
        ([], None) => words.extend(config.cmd.into_iter().map(OsString::from)),
        (command, _) => words.extend_from_slice(command),
    }
    if words.is_empty() {
        let image = &run.machine.image;
        return Err(Failure::usage(format!("what shall be run? The image {image} has no command of its own"))
            .hint("trialrun run [OPTIONS] -- COMMAND; trialrun run --help says more"));
    }
    Ok(words)
}

/// How a command runs in its machine.
pub struct Parts {
    pub timeout: Option<Duration>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub no_stdin: bool,
}

fn run_parts(run: &Run) -> Parts {
    Parts { timeout: run.timeout, user: run.user.clone(), workdir: run.workdir.clone(), no_stdin: run.no_stdin }
}

fn split_upload(text: &str) -> Result<(String, String), Failure> {
    match text.rsplit_once(':') {
        Some((host, inside)) if !host.is_empty() && !inside.is_empty() => Ok((host.to_owned(), inside.to_owned())),
        _ => Err(Failure::usage(format!("--upload {text:?} is not HOST_PATH:PATH_INSIDE"))),
    }
}

/// Uploads, then runs a command and passes its input, output and exit status through.
///
/// # Errors
/// What kept us from running the command.
pub async fn inside(
    sandbox: &Sandbox,
    parts: Parts,
    uploads: &[(String, String)],
    json: bool,
    steps: &Steps,
    interrupts: &mut Interrupts,
    command: Vec<OsString>,
) -> Result<u8, Failure> {
    for (host, inside) in uploads {
        steps.say(&format!("uploading {host}"));
        let moved = interrupts.guard(sandbox.upload(host.as_ref(), inside, UploadRules::default())).await??;
        for skipped in &moved.skipped {
            eprintln!("trialrun: left out: {}", trialrun_report::terminal::safe(skipped));
        }
    }
    steps.clear();
    let interactive = !json && !parts.no_stdin && terminal::interactive();
    let input = !parts.no_stdin && (interactive || terminal::stdin_has_content());
    let spec = ExecSpec {
        cwd: parts.workdir.map(String::into_bytes),
        user: parts.user,
        stdin: input,
        pty: interactive.then(terminal::size),
        deadline: parts.timeout,
        env: if interactive { terminal_env() } else { Vec::new() },
        ..ExecSpec::new(argv(command))
    };
    let raw = if interactive { Raw::enter() } else { None };
    let following = sandbox.exec(spec).await?;
    let mut collect = Collect::default();
    let sink: &mut dyn Sink = if json { &mut collect } else { &mut Through };
    let ended = stream::follow(sandbox.client(), following, input, interactive, sink, interrupts).await?;
    drop(raw);
    match ended {
        Ended::Interrupted(number) => Err(stream::interrupted(number)),
        Ended::Outcome(outcome) => {
            let code = exit_code(&outcome);
            if json {
                println!("{}", collect.json(&outcome, code));
            } else {
                explain(&outcome);
            }
            Ok(code)
        }
    }
}

/// What a program on a terminal reads.
pub fn terminal_env() -> Vec<(Vec<u8>, Vec<u8>)> {
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
    vec![(b"TERM".to_vec(), term.into_bytes())]
}

/// The command's own code, 128 plus its signal, or one of ours.
pub fn exit_code(outcome: &ExecOutcome) -> u8 {
    let code = match (&outcome.ended, outcome.status) {
        (How::Exited | How::OutOfMemory, Some(status)) => status.shell_code(),
        (How::TimedOut, _) => exit_codes::TIMED_OUT,
        (How::Refused(refusal), _) => match refusal.kind {
            trialrun_model::RefusalKind::NotFound => 127,
            trialrun_model::RefusalKind::NotExecutable => 126,
            _ => exit_codes::USAGE,
        },
        (How::MachineLost, _) | (_, None) => exit_codes::COULD_NOT_RUN,
        (How::Killed, Some(status)) => status.shell_code(),
    };
    code as u8
}

/// Says on standard error what an exit status alone does not.
fn explain(outcome: &ExecOutcome) {
    let words = match &outcome.ended {
        How::Exited | How::Killed => None,
        How::TimedOut => {
            Some(format!("timed out after {:.1} s; the whole process tree was killed", outcome.wall.as_secs_f64()))
        }
        How::OutOfMemory => {
            Some("the machine's memory limit was reached and the kernel killed in it (--memory)".to_owned())
        }
        How::MachineLost => Some("the machine ended under the command; this is a failure of ours".to_owned()),
        How::Refused(refusal) => Some(refusal.message.clone()),
    };
    for line in words.into_iter().chain(outcome.disk_full.map(|full| full.to_string())) {
        eprintln!("trialrun: {}", trialrun_report::terminal::safe(&line));
    }
}

/// Bytes of each stream that JSON output keeps.
const JSON_LIMIT: usize = 1 << 20;

/// Keeps the beginning of both streams.
#[derive(Default)]
struct Collect {
    out: Vec<u8>,
    err: Vec<u8>,
    out_seen: u64,
    err_seen: u64,
}

fn keep(kept: &mut Vec<u8>, seen: &mut u64, bytes: &[u8]) {
    *seen += bytes.len() as u64;
    kept.extend_from_slice(&bytes[..bytes.len().min(JSON_LIMIT - kept.len())]);
}

impl Sink for Collect {
    fn stdout(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        keep(&mut self.out, &mut self.out_seen, bytes);
        Ok(())
    }

    fn stderr(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        keep(&mut self.err, &mut self.err_seen, bytes);
        Ok(())
    }
}

impl Collect {
    fn json(&self, outcome: &ExecOutcome, code: u8) -> serde_json::Value {
        serde_json::json!({
            "schema": 1,
            "exit_code": code,
            "outcome": outcome,
            "stdout": String::from_utf8_lossy(&self.out),
            "stderr": String::from_utf8_lossy(&self.err),
            "stdout_bytes": self.out_seen,
            "stderr_bytes": self.err_seen,
            "truncated": self.out_seen > self.out.len() as u64 || self.err_seen > self.err.len() as u64,
        })
    }
}
