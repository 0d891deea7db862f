//! What a run needs and takes away again: directories, an engine, the program.

use super::peers::Peers;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use trialrun_engine::{Config, CreateOptions, Engine, Guest, Sandbox};
use trialrun_model::{ImageRef, SandboxSpec};
use trialrun_policy::Policy;

/// A machine that takes longer to go than this stays.
const SETTLE: Duration = Duration::from_secs(20);

/// One run's world.
pub struct World {
    /// Before the directories, which they use until they end.
    peers: RefCell<Option<Peers>>,
    /// Removed at the end.
    pub temp: TempDir,
    /// As `temp`, in memory.
    pub shm: TempDir,
    /// Kept warm as a server's is: the layers' file system stays mounted, and a keeper with its cell is ready ahead.
    pub engine: Engine,
    /// As a one-shot client's is: nothing of it is ready. It has a data directory of its own, so that nothing that the
    /// other keeps ready serves it.
    pub cold: Engine,
    /// A copy of the program, so that a build meanwhile does not change what is measured.
    pub program: PathBuf,
    /// Images.
    pub cache_dir: PathBuf,
    /// Where cargo builds.
    pub target: PathBuf,
}

impl World {
    /// Makes it.
    ///
    /// # Errors
    /// Without root, or when a directory can't be made.
    pub fn open(data_dir: Option<PathBuf>, cache_dir: PathBuf) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "machines need root: run it with sudo -E");
        let exe = std::env::current_exe()?;
        let release = exe.parent().context("my own directory")?;
        let prefix = "trialrun-bench-";
        let temp = tempfile::Builder::new().prefix(prefix).tempdir()?;
        let shm = tempfile::Builder::new().prefix(prefix).tempdir_in("/dev/shm").context("a directory in /dev/shm")?;
        let program = temp.path().join("trialrun");
        fs::copy(release.join("trialrun"), &program).context("take the program; cargo xtask bench builds it")?;
        let cache_dir = std::path::absolute(cache_dir)?;
        let open = |data_dir: PathBuf| -> Result<Engine> {
            Ok(Engine::open(Config {
                data_dir: std::path::absolute(data_dir)?,
                cache_dir: cache_dir.clone(),
                keeper: (program.clone(), vec!["__keeper".to_owned()]),
                guest: Guest::Embedded { program: trialrun_embedded::GUEST, digest: trialrun_embedded::GUEST_DIGEST },
            })?)
        };
        let engine = open(data_dir.unwrap_or_else(|| temp.path().join("data")))?;
        engine.keep_warm();
        let cold = open(temp.path().join("cold-data"))?;
        let target = release.parent().unwrap_or(Path::new("target")).to_owned();
        Ok(Self { peers: RefCell::default(), temp, shm, engine, cold, program, cache_dir, target })
    }

    /// Builds the image python where it is missing.
    ///
    /// # Errors
    /// When it can't be built.
    pub fn ensure_image(&self) -> Result<()> {
        let python = ImageRef::Named("python".to_owned());
        if self.engine.images().resolve(&python).is_err() {
            eprintln!("building the image python in {} (about a minute)", self.cache_dir.display());
            self.engine.images().ensure_python(&mut |_| ())?;
        }
        Ok(())
    }

    /// The image's files, which all peers run from too.
    ///
    /// # Errors
    /// Without the image.
    pub fn tree(&self) -> Result<PathBuf> {
        Ok(self.engine.images().resolve(&ImageRef::Named("python".to_owned()))?.tree)
    }

    /// What a machine of a run is: the default one, its network off.
    pub fn options(&self) -> CreateOptions {
        CreateOptions { spec: SandboxSpec::default(), policy: Policy::off(), attached: true, lease: None }
    }

    /// A machine.
    ///
    /// # Errors
    /// What creation says.
    pub async fn create(&self) -> Result<Sandbox> {
        Ok(self.engine.create(self.options()).await?)
    }

    /// The peers, found at the first call.
    ///
    /// # Errors
    /// When what they need can't be made.
    pub fn peers(&self) -> Result<std::cell::RefMut<'_, Peers>> {
        if self.peers.borrow().is_none() {
            *self.peers.borrow_mut() = Some(Peers::find(self.temp.path(), &self.tree()?)?);
        }
        Ok(std::cell::RefMut::map(self.peers.borrow_mut(), |peers| peers.as_mut().expect("found above")))
    }

    /// Takes everything away and says what could not be. Machines of a cut run end with their handles, which are gone
    /// by now; their keepers need a moment.
    pub async fn close(self) -> Vec<String> {
        let mut left = self.peers.into_inner().map(|mut peers| peers.close()).unwrap_or_default();
        let begun = Instant::now();
        for engine in [self.engine, self.cold] {
            let dir = engine.data_dir().join("machines");
            while !fs_names(&dir).is_empty() && begun.elapsed() < SETTLE {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            left.extend(fs_names(&dir).iter().map(|name| format!("machine {name}")));
            left.extend(engine.recover().failed);
        }
        for dir in [self.temp, self.shm] {
            let path = dir.keep();
            // A download that was cut off writes until it notices that its machine is gone.
            while let Err(e) = fs::remove_dir_all(&path) {
                if begun.elapsed() > SETTLE {
                    left.push(format!("{}: {e}", path.display()));
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        left
    }
}

fn fs_names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// What the numbers were taken on.
pub fn host() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or_default();
    json!({
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "cpu": model.trim_start_matches([' ', '\t', ':']),
        "cpus": cpus,
        "load_at_end": read("/proc/loadavg").split(' ').next(),
        "taken_at": std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
    })
}

/// `VmHWM` of a process in bytes: its largest resident size since it began or since [`forget_peak`].
pub fn peak_rss(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Starts a process's peak anew at its present size (proc(5), `clear_refs`).
pub fn forget_peak(pid: u32) {
    let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

/// Pids on the host of a machine's guest agent and of its keeper, which is the agent's parent.
///
/// # Errors
/// When there is none.
pub fn pids(sandbox: &Sandbox) -> Result<(u32, u32)> {
    let mark = format!("/{}/init", sandbox.id);
    for name in fs_names(Path::new("/proc")) {
        let Ok(agent) = name.parse::<u32>() else { continue };
        if !fs::read_to_string(format!("/proc/{agent}/cgroup")).is_ok_and(|text| text.contains(&mark)) {
            continue;
        }
        let status = fs::read_to_string(format!("/proc/{agent}/status"))?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        return Ok((agent, parent.context("the agent's parent")?));
    }
    anyhow::bail!("no process is in the cgroup {mark}")
}
