//! `trialrun test`: a project's test suite in a machine that is thrown away.
//!
//! ```text
//! read the folder ─> machine ─> upload ─> install (registries) ─> cut the network ─> tests ─> bring the reports home ─> machine gone ─> screen
//! ```
//! A failure of ours at any stage becomes the verdict "could not run", never a red suite; the machine goes in any case.

use crate::{
    args::{Dirs, Test},
    context::{self, Steps},
    dependencies,
    failure::Failure,
    network::network,
    run::{KEEP, environment},
    stream::{self, Ended, Interrupts, Sink},
};
use std::{
    collections::{BTreeMap, VecDeque},
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};
use trialrun_engine::{CreateOptions, DownloadLimits, Engine, Sandbox, TransferError, UploadRules};
use trialrun_gateway::ConnectionRecord;
use trialrun_keeper::wire::FileOp;
use trialrun_model::{Command, ExecOutcome, ExecSpec, ImageRef, Limits, SandboxSpec};
use trialrun_policy::Policy;
use trialrun_project::{Added, CoverageOptions, InspectOptions, InstallStep, Project, TestOptions};
use trialrun_report::{
    coverage, junit, pytest_summary,
    run::{AddedPackage, Artifact, Evidence, Phase, RunReport, Status, Tests, Verdict, group_refused, judge, meaning},
    screen,
    terminal::Filter,
};

/// Where the project lies in the machine.
const PROJECT: &str = "/workspace/project";
/// Where reports are written: outside of the project, so that a suite that looks at its own folder sees no stranger.
const REPORTS: &str = "/var/lib/trialrun/reports";
/// Longest time one install step may take.
const INSTALL_DEADLINE: std::time::Duration = std::time::Duration::from_secs(1800);
/// Largest JUnit file that is read.
const JUNIT_LIMIT: usize = 256 << 20;
/// Bytes of the output's end that are kept to read pytest's last line and to show what broke.
const TAIL: usize = 64 << 10;

/// Why the run ended before its verdict was formed by the suite.
enum Stop {
    /// A verdict already: the install failed, or something of ours.
    Verdict(Verdict, Option<String>),
    /// A signal, by its number.
    Interrupted(i32),
}

fn ours(stage: &'static str) -> impl FnOnce(String) -> Stop {
    move |message| Stop::Verdict(Verdict::CouldNotRun { stage: stage.to_owned(), message }, None)
}

fn words(error: &dyn std::error::Error) -> String {
    trialrun_model::error_chain(error)
}

/// Output passed on while its end is kept.
struct Tee {
    shown: Shown,
    /// For a terminal, which the suite's bytes could do more to than show text.
    filter: Option<Filter>,
    tail: VecDeque<u8>,
    dropped: u64,
}

impl Drop for Tee {
    /// What comes next begins a line of its own, also after a suite that ended in the middle of one.
    fn drop(&mut self) {
        if let Some(filter) = &self.filter {
            let _ = self.shown.write(filter.end());
        }
        if self.tail.back().is_some_and(|last| *last != b'\n') {
            match self.shown {
                Shown::Stdout => println!(""),
                Shown::Stderr => eprintln!(),
                Shown::Nowhere => {}
            }
        }
    }
}

/// Where the suite's output is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Stdout,
    Stderr,
    Nowhere,
}

impl Shown {
    fn is_terminal(self) -> bool {
        match self {
            Self::Stdout => std::io::stdout().is_terminal(),
            Self::Stderr => std::io::stderr().is_terminal(),
            Self::Nowhere => false,
        }
    }

    fn write(self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Stderr => std::io::stderr().lock().write_all(bytes),
            Self::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes)?;
                out.flush()
            }
        }
    }
}

impl Tee {
    fn new(shown: Shown) -> Self {
        let filter = shown.is_terminal().then(Filter::default);
        Self { shown, filter, tail: VecDeque::new(), dropped: 0 }
    }

    fn take(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.tail.extend(bytes);
        let over = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..over);
        match &mut self.filter {
            Some(filter) => self.shown.write(&filter.pass(bytes)),
            None => self.shown.write(bytes),
        }
    }

    fn text(&self) -> String {
        let (a, b) = self.tail.as_slices();
        String::from_utf8_lossy(&[a, b].concat()).into_owned()
    }
}

impl Sink for Tee {
    fn stdout(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.take(bytes)
    }

    fn stderr(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.take(bytes)
    }

    fn dropped(&mut self, bytes: u64) {
        self.dropped += bytes;
    }
}

/// One run on its way to its report.
struct Suite<'a> {
    test: &'a Test,
    project: Project,
    sandbox: Sandbox,
    steps: Steps,
    interrupts: Interrupts,
    report: RunReport,
    phase: Instant,
}

/// Runs the suite and prints the screen.
///
/// # Errors
/// A wrong call, or something of ours before there was a machine.
pub async fn test(dirs: &Dirs, test: Test) -> Result<u8, Failure> {
    let project = inspect(&test)?;
    if test.command.is_empty() {
        project.require_runner().map_err(|e| Failure::usage(words(&e)))?;
    }
    let engine = context::engine_for_machine(dirs)?;
    let steps = Steps::new(test.json && !std::io::stderr().is_terminal());
    let mut interrupts = Interrupts::listen()?;
    interrupts.guard(context::ensure_image(&engine, &test.machine.image, &steps)).await??;
    let image = &test.machine.image;
    let install =
        interrupts.guard(network(&engine, image, &test.install_network, &test.machine.allow, &steps)).await??;
    let cut = interrupts.guard(network(&engine, image, &test.network, &test.machine.allow, &steps)).await??;
    let mut report = RunReport::new(test.path.display().to_string(), Vec::new(), Verdict::Interrupted);
    let mut began = Instant::now();
    let image = match &project.dependencies {
        Some(wanted) if !test.no_cache => {
            let network = (&test.install_network[..], &test.machine.allow[..], &install);
            let around = (&steps, &mut interrupts);
            let prepared = dependencies::prepare(&engine, image, wanted, network, limits(&test)?, around).await?;
            report.notes.extend(prepared.note);
            if prepared.fresh {
                report.phases.push(Phase { name: "dependencies".to_owned(), wall_ms: millis(began), cpu_ms: None });
            }
            prepared.image
        }
        _ => image.clone(),
    };
    began = Instant::now();
    steps.say("starting the machine");
    let sandbox = interrupts.guard(create(&engine, &test, image, install.policy, install.env)).await??;
    report.isolation = Some(sandbox.isolation().clone());
    report.phases.push(Phase { name: "create".to_owned(), wall_ms: millis(began), cpu_ms: None });
    let mut suite = Suite { test: &test, project, sandbox, steps, interrupts, report, phase: Instant::now() };
    let stopped = suite.run(cut.policy).await.err();
    suite.finish(stopped).await
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn inspect(test: &Test) -> Result<Project, Failure> {
    let options = InspectOptions {
        extras: test.extra.clone(),
        groups: test.group.clone(),
        no_install: test.no_install,
        parallel: test.workers.is_some(),
        coverage: !test.no_cov,
        own_command: own_command(test).is_some(),
    };
    trialrun_project::inspect(&test.path, &options).map_err(|e| Failure::usage(words(&e)))
}

/// The command given in place of what was detected. Words that begin with a dash are arguments for pytest.
fn own_command(test: &Test) -> Option<&[std::ffi::OsString]> {
    use std::os::unix::ffi::OsStrExt;
    let first = test.command.first()?;
    (!first.as_bytes().starts_with(b"-")).then_some(&test.command[..])
}

fn limits(test: &Test) -> Result<Limits, Failure> {
    let limits = test.machine.limits();
    limits.check().map_err(|e| Failure::usage(format!("--{e}")))?;
    Ok(limits)
}

async fn create(
    engine: &Engine,
    test: &Test,
    image: ImageRef,
    policy: Policy,
    mut env: Vec<(String, String)>,
) -> Result<Sandbox, Failure> {
    let limits = limits(test)?;
    let bin = format!("{}/bin", trialrun_project::VENV);
    let path =
        trialrun_model::default_env().into_iter().find(|(name, _)| name == "PATH").map_or_else(String::new, |(_, v)| v);
    env.push(("PATH".to_owned(), format!("{bin}:{path}")));
    env.push(("VIRTUAL_ENV".to_owned(), trialrun_project::VENV.to_owned()));
    env.extend(environment(&test.machine.env)?);
    let spec = SandboxSpec { image, limits, env, ..SandboxSpec::default() };
    Ok(engine.create(CreateOptions { spec, policy, attached: true, lease: None }).await?)
}

impl Suite<'_> {
    /// All stages up to the verdict.
    async fn run(&mut self, cut: Policy) -> Result<(), Stop> {
        self.upload().await?;
        if !self.test.no_install {
            let installed = self.install().await;
            self.cut_short("install", installed)?;
        }
        self.steps.say("cutting the network");
        let seen = self.newest_record().await?;
        self.sandbox.set_policy(cut).await.map_err(|e| ours("network")(e.message))?;
        let tested = self.tests(seen).await;
        self.cut_short("tests", tested)
    }

    /// Also a stage that stopped took its time.
    fn cut_short(&mut self, name: &str, result: Result<(), Stop>) -> Result<(), Stop> {
        if result.is_err() {
            self.phase(name, None);
        }
        result
    }

    /// Ends a stage: its wall time, and the CPU time of `outcomes`.
    fn phase(&mut self, name: &str, cpu_ms: Option<u64>) {
        self.report.phases.push(Phase { name: name.to_owned(), wall_ms: millis(self.phase), cpu_ms });
        self.phase = Instant::now();
    }

    async fn upload(&mut self) -> Result<(), Stop> {
        self.steps.say(&format!("uploading {}", self.test.path.display()));
        let rules = trialrun_project::upload_rules(&self.test.path);
        self.report.notes.extend(rules.notes.iter().cloned());
        let engine_rules = UploadRules {
            gitignore: rules.use_gitignore,
            keep: rules.tracked.iter().flatten().cloned().collect(),
            drops: Some(Arc::new(move |path, is_dir, marked| rules.drops(path, is_dir, marked))),
        };
        let sandbox = &self.sandbox;
        let moved = tokio::select! {
            moved = sandbox.upload(&self.test.path, PROJECT, engine_rules) => moved,
            number = self.interrupts.next() => return Err(Stop::Interrupted(number)),
        };
        let moved = moved.map_err(|e| ours("upload")(words(&e)))?;
        if moved.skipped_total > 0 {
            let shown: Vec<&str> = moved.skipped.iter().take(5).map(String::as_str).collect();
            let more = moved.skipped_total.saturating_sub(shown.len() as u64);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            self.report.notes.push(format!("not uploaded: {}{more}", shown.join("; ")));
        }
        self.phase("upload", None);
        Ok(())
    }

    /// Runs one of our commands to its end.
    async fn step(&mut self, argv: &[String], in_project: bool, tee: &mut Tee) -> Result<ExecOutcome, Stop> {
        let spec = ExecSpec {
            cwd: in_project.then(|| PROJECT.as_bytes().to_vec()),
            deadline: Some(INSTALL_DEADLINE),
            ..ExecSpec::new(Command::argv(argv.iter().cloned()))
        };
        let following = self.sandbox.exec(spec).await.map_err(|e| ours("install")(e.message))?;
        let client = self.sandbox.client().clone();
        match stream::follow(&client, following, false, false, tee, &mut self.interrupts).await {
            Ok(Ended::Outcome(outcome)) => Ok(outcome),
            Ok(Ended::Interrupted(number)) => Err(Stop::Interrupted(number)),
            Err(failure) => Err(ours("install")(failure.message)),
        }
    }

    async fn install(&mut self) -> Result<(), Stop> {
        let mut cpu = 0;
        let plan = self.project.plan.clone();
        self.report.notes.extend(plan.notes.iter().cloned());
        let mkdir = FileOp::Mkdir { path: trialrun_project::PLAN_DIR.into(), mode: None, owner: None };
        self.sandbox.file(mkdir).await.map_err(|e| ours("install")(e.message))?;
        let venv = self.sandbox.file(FileOp::Stat(trialrun_project::VENV_PYTHON.into())).await;
        let mut steps: Vec<InstallStep> = Vec::new();
        if venv.is_err() {
            // Its parent is root's.
            let mkdir = FileOp::Mkdir { path: trialrun_project::VENV.into(), mode: None, owner: None };
            self.sandbox.file(mkdir).await.map_err(|e| ours("install")(e.message))?;
            steps.push(trialrun_project::create_venv());
        }
        steps.extend(plan.steps.iter().cloned());
        for file in &plan.files {
            let write = self.sandbox.write_file(&file.path, file.content.as_bytes(), None).await;
            write.map_err(|e| ours("install")(words(&e)))?;
        }
        for step in &steps {
            cpu += self.install_step(step).await?;
        }
        let mut installed = self.probe().await?;
        let absent = plan.tools_to_add(&installed);
        if let Some(step) = plan.tools_step(&absent) {
            let freeze =
                InstallStep { label: "what is installed".to_owned(), argv: plan.freeze.clone(), cwd_in_project: false };
            cpu += self.install_step(&freeze).await?;
            cpu += self.install_step(&step).await?;
            installed = self.probe().await?;
        }
        // The image may have been given some, with the dependencies.
        let probed = self.sandbox.read_file(trialrun_project::PROBED, 64 << 10).await.ok();
        let probed: Option<BTreeMap<String, String>> = probed.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut added = probed.map_or(absent, |before| plan.tools_to_add(&before));
        plan.fill_versions(&mut added, &installed);
        let told = |a: Added| AddedPackage { package: a.package, version: a.version, why: a.why };
        self.report.added = added.into_iter().map(told).collect();
        self.phase("install", Some(cpu));
        Ok(())
    }

    /// One command of the install; its CPU time in milliseconds.
    async fn install_step(&mut self, step: &InstallStep) -> Result<u64, Stop> {
        self.steps.say(&format!("installing: {}", step.label));
        let mut tee = Tee::new(Shown::Nowhere);
        let outcome = self.step(&step.argv, step.cwd_in_project, &mut tee).await?;
        if outcome.status.is_some_and(trialrun_model::ExitStatus::success) {
            return Ok(outcome.cpu.as_millis() as u64);
        }
        self.report.disk_full = self.report.disk_full.or(outcome.disk_full);
        let verdict = match &outcome.ended {
            trialrun_model::Ended::MachineLost => {
                Verdict::MachineLost { message: "the machine ended during the install".to_owned() }
            }
            trialrun_model::Ended::OutOfMemory => Verdict::OutOfMemory { status: outcome.status.map(Status::from) },
            _ => Verdict::InstallFailed { step: step.label.clone(), status: outcome.status.map(Status::from) },
        };
        // What the install could not reach explains most failures.
        self.refused(0).await;
        Err(Stop::Verdict(verdict, Some(tee.text())))
    }

    async fn probe(&mut self) -> Result<BTreeMap<String, String>, Stop> {
        let spec = ExecSpec::new(Command::argv(self.project.plan.probe.iter().cloned()));
        let captured = self.sandbox.capture(spec, 1 << 20).await.map_err(|e| ours("install")(e.message))?;
        serde_json::from_slice(&captured.stdout).map_err(|e| {
            let said = String::from_utf8_lossy(&captured.stderr).trim().to_owned();
            ours("install")(format!("the list of installed tools can't be read ({e}): {said}"))
        })
    }

    async fn newest_record(&self) -> Result<u64, Stop> {
        let (records, _) = self.sandbox.records(0).await.map_err(|e| ours("network")(e.message))?;
        Ok(records.iter().map(|r| r.seq).max().unwrap_or(0))
    }

    /// Puts the refused connections since `seen` into the report.
    async fn refused(&mut self, seen: u64) {
        let Ok((records, _)) = self.sandbox.records(seen).await else { return };
        let denied = records.into_iter().filter(|r| !r.allow).flat_map(|r: ConnectionRecord| {
            let address = r.address.map(|a| a.to_string());
            let host = r.host.clone().or(address).unwrap_or_else(|| "?".to_owned());
            let times = usize::try_from(r.count.clamp(1, 1_000_000)).unwrap_or(1);
            std::iter::repeat_n((host, r.port, r.rule), times)
        });
        self.report.refused = group_refused(denied);
    }

    /// The suite's command, whether its codes are pytest's, and whether a JUnit file is expected.
    fn command(&mut self) -> (Command, bool, bool) {
        if let Some(own) = own_command(self.test) {
            self.report.command = own.iter().map(|w| w.to_string_lossy().into_owned()).collect();
            return (crate::run::argv(own.to_vec()), false, false);
        }
        let cov =
            CoverageOptions { html_dir: format!("{REPORTS}/htmlcov"), json_path: format!("{REPORTS}/coverage.json") };
        let options = TestOptions {
            junit_path: format!("{REPORTS}/junit.xml"),
            cov: (!self.test.no_cov && !self.test.no_install).then_some(cov),
            workers: self.test.workers.clone(),
            extra_args: self.test.command.iter().map(|w| w.to_string_lossy().into_owned()).collect(),
        };
        let command = trialrun_project::test_command(&self.project, &options);
        self.report.notes.extend(command.notes.iter().cloned());
        self.report.command = command.argv.clone();
        (Command::argv(command.argv), true, command.junit)
    }

    async fn tests(&mut self, seen: u64) -> Result<(), Stop> {
        let (command, pytest, junit_expected) = self.command();
        let mkdir = FileOp::Mkdir { path: REPORTS.into(), mode: None, owner: None };
        self.sandbox.file(mkdir).await.map_err(|e| ours("tests")(e.message))?;
        self.steps.say("running the tests");
        self.steps.clear();
        let spec = ExecSpec { cwd: Some(PROJECT.into()), deadline: Some(self.test.timeout), ..ExecSpec::new(command) };
        let shown = match (self.test.quiet, self.test.json) {
            (true, _) => Shown::Nowhere,
            (false, true) => Shown::Stderr,
            (false, false) => Shown::Stdout,
        };
        let mut tee = Tee::new(shown);
        self.phase = Instant::now();
        let following = self.sandbox.exec(spec).await.map_err(|e| ours("tests")(e.message))?;
        let client = self.sandbox.client().clone();
        let ended = stream::follow(&client, following, false, false, &mut tee, &mut self.interrupts).await;
        let outcome = match ended {
            Ok(Ended::Outcome(outcome)) => outcome,
            Ok(Ended::Interrupted(number)) => return Err(Stop::Interrupted(number)),
            Err(failure) => return Err(ours("tests")(failure.message)),
        };
        self.phase("tests", Some(outcome.cpu.as_millis() as u64));
        self.refused(seen).await;
        self.judge(&outcome, pytest, junit_expected, &tee).await;
        self.fetch().await;
        self.phase("fetch", None);
        Ok(())
    }

    async fn judge(&mut self, outcome: &ExecOutcome, pytest: bool, junit_expected: bool, tee: &Tee) {
        let output = tee.text();
        let limit_ms = self.test.timeout.as_millis() as u64;
        let read = if junit_expected { Some(self.read_junit(&output).await) } else { None };
        let evidence = match &read {
            None => Evidence::NotExpected,
            Some(None) => Evidence::Missing,
            Some(Some(Ok(suite))) => Evidence::Read(suite),
            Some(Some(Err(error))) => Evidence::Unreadable(error),
        };
        let verdict = judge(outcome, pytest, limit_ms, &evidence);
        let report = &mut self.report;
        report.exit_code = trialrun_report::run::exit_code(&verdict);
        report.meaning = meaning(&verdict, pytest);
        if let (Verdict::Failed { status }, Evidence::Missing) = (&verdict, &evidence)
            && status.code == Some(1)
        {
            // The interpreter's own 1: no pytest, or one that broke where it writes its report.
            report.meaning =
                "pytest did not run to its end and left no report: nothing is known of the tests".to_owned();
        }
        report.status = outcome.status.map(Status::from);
        report.tests = match read {
            Some(Some(Ok(suite))) => Some(suite.into()),
            Some(Some(Err(error))) => Some(Tests::from(&error)),
            _ => None,
        };
        report.left_behind = outcome.left_behind;
        report.disk_full = report.disk_full.or(outcome.disk_full);
        // A disk that was full and is not any more leaves only the test's word.
        let says =
            |text: &str| ["Disk quota exceeded", "No space left on device"].iter().any(|words| text.contains(words));
        if report.disk_full.is_none() && report.tests.iter().flat_map(|t| &t.failures).any(|f| says(&f.text)) {
            report.notes.push("a failing test says that the disk was full (--disk)".to_owned());
        }
        if matches!(verdict, Verdict::TimedOut { .. } | Verdict::NotStarted { .. } | Verdict::Unproven { .. })
            || report.tests.is_none()
        {
            report.output_tail =
                (!output.is_empty() && !verdict.green().eq(&trialrun_report::explain::Green::Yes)).then_some(output);
        }
        report.verdict = verdict;
        if tee.dropped > 0 {
            report.notes.push(format!("{} bytes of output were not kept", tee.dropped));
        }
    }

    /// The JUnit report, compared with pytest's last line. `None` when there is no file.
    async fn read_junit(&mut self, output: &str) -> Option<Result<junit::Suite, junit::JunitError>> {
        let bytes = match self.sandbox.read_file(&format!("{REPORTS}/junit.xml"), JUNIT_LIMIT).await {
            Ok(bytes) => bytes,
            Err(TransferError::Guest(_)) => return None,
            Err(e) => {
                self.report.notes.push(format!("the JUnit report could not be fetched: {}", words(&e)));
                return None;
            }
        };
        if let Some(path) = &self.test.junit {
            match write_home(path, &bytes) {
                Ok(()) => {
                    self.report.artifacts.push(Artifact { kind: "JUnit".to_owned(), path: path.display().to_string() })
                }
                Err(e) => {
                    self.report.notes.push(format!("the JUnit report could not be written to {}: {e}", path.display()))
                }
            }
        }
        Some(junit::read(&bytes).map(|mut suite| {
            if let Some(summary) = pytest_summary::parse(output) {
                suite.compare(&summary);
            }
            suite
        }))
    }

    /// Brings coverage and artifacts home. What fails here is noted; the verdict stands.
    async fn fetch(&mut self) {
        if let Ok(bytes) = self.sandbox.read_file(&format!("{REPORTS}/coverage.json"), JUNIT_LIMIT).await {
            self.report.coverage = coverage::read_json(&bytes).ok();
        }
        if let Some(dir) = self.test.coverage.clone() {
            self.bring(&format!("{REPORTS}/htmlcov"), &dir, "coverage (HTML)").await;
        }
        if !self.test.artifacts.is_empty() {
            self.artifacts().await;
        }
    }

    async fn bring(&mut self, source: &str, dest: &Path, kind: &str) {
        match self.sandbox.download(source, dest, DownloadLimits::default()).await {
            Ok(moved) => {
                self.report.artifacts.push(Artifact { kind: kind.to_owned(), path: dest.display().to_string() });
                for skipped in moved.skipped.iter().take(5) {
                    self.report.notes.push(format!("{kind}: left out {skipped}"));
                }
            }
            Err(e) => self.report.notes.push(format!("{kind} could not be brought home: {}", words(&e))),
        }
    }

    async fn artifacts(&mut self) {
        let glob = FileOp::Glob { dir: PROJECT.into(), patterns: self.test.artifacts.clone() };
        let found = match self.sandbox.file(glob).await {
            Ok(found) => found,
            Err(e) => {
                self.report.notes.push(format!("artifacts could not be looked for: {}", e.message));
                return;
            }
        };
        if found.is_empty() {
            self.report.notes.push(format!("no artifact matches {}", self.test.artifacts.join(", ")));
        }
        for file in found {
            let Ok(name) = String::from_utf8(file.name) else {
                self.report.notes.push("an artifact whose name is not UTF-8 was left out".to_owned());
                continue;
            };
            let inside = Path::new(&name).strip_prefix(PROJECT).unwrap_or(Path::new(&name)).to_owned();
            // The name is the machine's word: only plain components go into a path of the host.
            let relative: PathBuf =
                inside.components().filter(|c| matches!(c, std::path::Component::Normal(_))).collect();
            let dest = self.test.artifacts_dir.join(&relative);
            if let Some(parent) = dest.parent() {
                let _ = std::fs::create_dir_all(parent);
            }
            self.bring(&format!("{PROJECT}/{}", relative.display()), &dest, "artifact").await;
        }
    }

    /// Puts an early end into the report.
    fn stop(&mut self, stop: Stop) {
        let report = &mut self.report;
        let (verdict, tail) = match &stop {
            Stop::Verdict(verdict, tail) => (verdict.clone(), tail.clone()),
            Stop::Interrupted(_) => (Verdict::Interrupted, None),
        };
        report.exit_code = match stop {
            Stop::Interrupted(signal) => 128 + signal,
            Stop::Verdict(..) => trialrun_report::run::exit_code(&verdict),
        };
        report.meaning = meaning(&verdict, true);
        if let Verdict::InstallFailed { status, .. } | Verdict::OutOfMemory { status } = &verdict {
            report.status = *status;
        }
        report.verdict = verdict;
        report.output_tail = tail;
    }

    /// Measures, lets the machine go, and prints.
    async fn finish(mut self, stopped: Option<Stop>) -> Result<u8, Failure> {
        let interrupted = matches!(stopped, Some(Stop::Interrupted(_)));
        if let Some(stop) = stopped {
            self.stop(stop);
        }
        self.steps.clear();
        if let Ok(usage) = self.sandbox.usage().await {
            self.report.peak_memory_bytes = Some(usage.peak_memory.bytes());
            self.report.disk_full = self.report.disk_full.or(usage.disk_full);
            if usage.oom_kills > 0 && !matches!(self.report.verdict, Verdict::OutOfMemory { .. }) {
                self.report
                    .notes
                    .push(format!("the kernel killed {} processes for memory (--memory)", usage.oom_kills));
            }
        }
        if self.test.keep && !interrupted {
            let id = self.sandbox.keep(KEEP).await?;
            self.report
                .notes
                .push(format!("the machine is kept for {} minutes: trialrun attach {id}", KEEP.as_secs() / 60));
        } else if let Err(e) = self.sandbox.delete().await {
            self.report.notes.push(format!("the machine did not go cleanly: {}", e.message));
        }
        self.phase = Instant::now();
        print(&self.report, self.test.json);
        Ok(self.report.exit_code as u8)
    }
}

fn write_home(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, bytes)
}

fn print(report: &RunReport, json: bool) {
    if json {
        match serde_json::to_string(report) {
            Ok(text) => println!("{text}"),
            Err(e) => eprintln!("trialrun: the report can't be written as JSON: {e}"),
        }
        return;
    }
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let width = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(100, |s| usize::from(s.ws_col).max(40));
    print!("{}", screen::render(report, screen::ScreenOptions { color, width }));
}
