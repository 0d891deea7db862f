//! Harness of the end-to-end tests: the real binary and the engine, each test in its own data directory.
//!
//! [`World`] is one test's world. When it is dropped it looks for everything that may be left of its machines and fails
//! the test if there is something; a failing test keeps its directory and says where it is.

pub mod leftovers;
pub mod program;
pub mod project;
pub mod registry;

use anyhow::{Context, Result, bail};
use leftovers::Leftovers;
use program::Program;
use std::{
    fs,
    future::Future,
    io::Write,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};
use trialrun_engine::{Captured, Config, CreateOptions, Engine, Guest, Sandbox};
use trialrun_model::{Command, Ended, ExecSpec, ExitStatus, ImageRef, SandboxSpec};
use trialrun_policy::Policy;

/// Longest time that one test may take before it counts as hanging.
pub const HANG: Duration = Duration::from_secs(300);

/// Says that a test can't run here, and why. CI counts these lines (`TRIALRUN_SKIP_FILE`).
pub fn skip(reason: &str) {
    let name = std::thread::current().name().unwrap_or("?").to_owned();
    eprintln!("skipped: {name}: {reason}");
    if let Some(path) = std::env::var_os("TRIALRUN_SKIP_FILE") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut f| writeln!(f, "{name}: {reason}"));
    }
}

/// Waits until `probe` gives a value; its last status is in the error.
///
/// # Errors
/// When the deadline passes first.
pub fn wait_until<T>(what: &str, deadline: Duration, mut probe: impl FnMut() -> Result<T, String>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(status) if begun.elapsed() > deadline => bail!("{what}: not within {deadline:?}; last seen: {status}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// As [`wait_until`], where looking needs the runtime.
///
/// # Errors
/// When the deadline passes first.
pub async fn wait_for<T, F>(what: &str, deadline: Duration, mut probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T, String>>,
{
    let begun = Instant::now();
    loop {
        match probe().await {
            Ok(value) => return Ok(value),
            Err(status) if begun.elapsed() > deadline => bail!("{what}: not within {deadline:?}; last seen: {status}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// The directory that holds the build's output, such as `target/release`.
fn build_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap_or_default();
    exe.parent().and_then(Path::parent).map(Path::to_owned).unwrap_or_default()
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The binary under test: `TRIALRUN_BIN`, or the one beside the test program, built first if it is missing or older than
/// its sources.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("TRIALRUN_BIN") {
            return path.into();
        }
        let path = build_dir().join("trialrun");
        if is_stale(&path) {
            let mut cargo = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            cargo.args(["build", "--release", "-p", "trialrun"]).current_dir(workspace());
            let status = cargo.status();
            assert!(
                status.as_ref().is_ok_and(std::process::ExitStatus::success),
                "building the program failed: {status:?}"
            );
        }
        path
    })
}

fn is_stale(binary: &Path) -> bool {
    let Ok(built) = fs::metadata(binary).and_then(|m| m.modified()) else { return true };
    let mut dirs = vec![workspace().join("crates")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let (path, Ok(meta)) = (entry.path(), entry.metadata()) else { continue };
            if meta.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "toml")
                && meta.modified().is_ok_and(|m| m > built)
            {
                return true;
            }
        }
    }
    false
}

/// Whether disks are limited in this run; a named skip where plain directories are forced, which have no limit.
pub fn disks_are_limited() -> bool {
    let forced = std::env::var_os("TRIALRUN_LAYERS").is_some_and(|v| v == "directory");
    if forced {
        skip("TRIALRUN_LAYERS=directory: layers in plain directories have no limit");
    }
    !forced
}

/// Where images are kept between tests: `TRIALRUN_TEST_CACHE`, or `target/test-cache`.
pub fn cache_dir() -> PathBuf {
    std::env::var_os("TRIALRUN_TEST_CACHE").map_or_else(|| build_dir().with_file_name("test-cache"), PathBuf::from)
}

/// One test's world.
pub struct World {
    root: Option<tempfile::TempDir>,
    data: PathBuf,
}

impl World {
    /// A fresh data directory; `None` (and a named skip) without root.
    pub fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip("needs root");
            return None;
        }
        let root = tempfile::Builder::new().prefix("trialrun-test-").tempdir().expect("a temporary directory");
        let data = root.path().join("data");
        fs::DirBuilder::new().mode(0o700).create(&data).expect("a data directory");
        Some(Self { root: Some(root), data })
    }

    /// As [`Self::new`], with the stock image `python` built (by the first test that needs it; the program itself lets
    /// the others wait).
    pub fn with_python() -> Option<Self> {
        static BUILT: OnceLock<()> = OnceLock::new();
        let world = Self::new()?;
        BUILT.get_or_init(|| {
            let built = world.program(["image", "build", "python"]).patience(Duration::from_secs(900)).run();
            assert_eq!(built.code, Some(0), "the image python: {built}");
        });
        Some(world)
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// A directory for the test's own files.
    pub fn scratch(&self) -> &Path {
        self.root.as_ref().map_or(Path::new("/nonexistent"), tempfile::TempDir::path)
    }

    /// The real binary with these arguments, in this world.
    pub fn program<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(&self, args: I) -> Program {
        Program::new(binary(), &self.data, &cache_dir()).args(args)
    }

    /// An engine in this process.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn engine(&self) -> Result<Engine> {
        self.engine_with(Guest::Embedded { program: trialrun_embedded::GUEST, digest: trialrun_embedded::GUEST_DIGEST })
    }

    /// An engine whose machines have another guest agent.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn engine_with(&self, guest: Guest) -> Result<Engine> {
        let config = Config {
            data_dir: self.data.clone(),
            cache_dir: cache_dir(),
            keeper: (binary().to_owned(), vec!["__keeper".to_owned()]),
            guest,
        };
        Engine::open(config).context("open the engine")
    }

    /// Runs a test's body that uses the engine. A hang is a failure.
    ///
    /// # Errors
    /// When there is no runtime.
    ///
    /// # Panics
    /// With the body's error: a panic keeps the world's directory.
    pub fn run<F: Future<Output = Result<()>>>(&self, body: impl FnOnce(Engine) -> F) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(async {
            let engine = self.engine()?;
            tokio::time::timeout(HANG, body(engine)).await.context("the test hangs")?
        });
        // A read that was abandoned must not hold the test's end.
        runtime.shutdown_background();
        if let Err(error) = result {
            panic!("{error:?}");
        }
        Ok(())
    }

    /// Does what the next start does: removes what dead keepers and clients left.
    ///
    /// # Panics
    /// When something can't be removed.
    pub fn collect(&self) {
        let gc = self.program(["gc", "--json"]).run();
        assert_eq!(gc.code, Some(0), "{gc}");
    }

    /// What is left of this world's machines.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers::of(&self.data)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let Some(root) = self.root.take() else { return };
        if std::thread::panicking() {
            eprintln!("the test's data is kept in {}", root.keep().display());
            return;
        }
        // A keeper takes down its machine after its client's end: what counts is that nothing stays.
        let gone = wait_until("nothing is left of the test's machines", Duration::from_secs(20), || {
            let left = self.leftovers();
            if left.is_empty() { Ok(()) } else { Err(left.to_string()) }
        });
        if let Err(left) = gone {
            panic!("{left:#}; kept in {}", root.keep().display());
        }
    }
}

/// A sandbox's specification from the host's own system.
pub fn host() -> SandboxSpec {
    SandboxSpec { image: ImageRef::Host, ..SandboxSpec::default() }
}

/// A sandbox's specification from the stock image.
pub fn python() -> SandboxSpec {
    SandboxSpec::default()
}

/// Makes a sandbox that ends with this process, its network off.
///
/// # Errors
/// What creation says.
pub async fn create(engine: &Engine, spec: SandboxSpec) -> Result<Sandbox> {
    create_with(engine, spec, Policy::off()).await
}

/// Makes a sandbox that ends with this process.
///
/// # Errors
/// What creation says.
pub async fn create_with(engine: &Engine, spec: SandboxSpec, policy: Policy) -> Result<Sandbox> {
    let options = CreateOptions { spec, policy, attached: true, lease: None };
    engine.create(options).await.context("create a sandbox")
}

/// What a command gave, as text.
#[derive(Debug)]
pub struct Ran {
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// Everything.
    pub all: Captured,
}

impl Ran {
    /// Its exit code, if it ended by itself with one.
    pub fn code(&self) -> Option<i32> {
        match (&self.all.outcome.ended, self.all.outcome.status) {
            (Ended::Exited, Some(ExitStatus::Code(code))) => Some(code),
            _ => None,
        }
    }

    /// Whether it ended with 0.
    pub fn ok(&self) -> bool {
        self.code() == Some(0)
    }
}

/// Runs a command and keeps 64 MiB of each stream.
///
/// # Errors
/// A lost machine.
pub async fn run(sandbox: &Sandbox, spec: ExecSpec) -> Result<Ran> {
    let all = sandbox.capture(spec, 64 << 20).await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Ran { out: text(&all.stdout), err: text(&all.stderr), all })
}

/// Runs a shell line.
///
/// # Errors
/// A lost machine.
pub async fn sh(sandbox: &Sandbox, line: &str) -> Result<Ran> {
    run(sandbox, ExecSpec::new(Command::Shell(line.to_owned()))).await
}

/// Runs a shell line as root.
///
/// # Errors
/// A lost machine.
pub async fn root_sh(sandbox: &Sandbox, line: &str) -> Result<Ran> {
    run(sandbox, ExecSpec { user: Some("root".to_owned()), ..ExecSpec::new(Command::Shell(line.to_owned())) }).await
}

/// Runs a Python program given as text.
///
/// # Errors
/// A lost machine.
pub async fn py(sandbox: &Sandbox, user: Option<&str>, code: &str) -> Result<Ran> {
    let spec =
        ExecSpec { user: user.map(str::to_owned), ..ExecSpec::new(Command::argv(["/usr/bin/python3", "-c", code])) };
    run(sandbox, spec).await
}
