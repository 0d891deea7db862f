//! Creating a sandbox: steps with undos.

use crate::{
    Engine,
    error::CreateError,
    sandbox::Sandbox,
    using::{forget_use, note_use},
};
use rustix::fs::FlockOperation;
use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};
use trialrun_guest_proto::frame::Kind;
use trialrun_keeper::{
    client::KeeperClient,
    conn, fault, machine_dir,
    wire::{DiskSource, KeeperSpec, Started},
};
use trialrun_model::{SandboxId, SandboxSpec, Transition};
use trialrun_policy::Policy;
use trialrun_store::NewSandbox;

/// The guest agent's program.
#[derive(Debug, Clone)]
pub enum Guest {
    /// Carried inside the running program; written below the cache directory once.
    Embedded {
        /// The program.
        program: &'static [u8],
        /// Its SHA-256.
        digest: &'static str,
    },
    /// A file.
    File(PathBuf),
}

/// How a sandbox is made.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// What.
    pub spec: SandboxSpec,
    /// First egress policy.
    pub policy: Policy,
    /// Ends with this process. Else it lives until deleted or until its lease ends.
    pub attached: bool,
    /// Longest life.
    pub lease: Option<Duration>,
}

impl Guest {
    /// The program as a file that no machine can write: made once per digest, shared by all machines.
    pub(crate) fn install(&self, cache_dir: &Path) -> io::Result<PathBuf> {
        let (program, digest) = match self {
            Self::File(path) => return Ok(path.clone()),
            Self::Embedded { program, digest } => (program, digest),
        };
        let dir = cache_dir.join("guest");
        let path = dir.join(digest);
        if path.exists() {
            return Ok(path);
        }
        crate::make_dir(&dir)?;
        let fresh = dir.join(format!(".new-{}", std::process::id()));
        let write = || -> io::Result<()> {
            let mut file = File::options().create(true).truncate(true).write(true).mode(0o555).open(&fresh)?;
            io::Write::write_all(&mut file, program)?;
            fs::rename(&fresh, &path)
        };
        write().inspect_err(|_| drop(fs::remove_file(&fresh)))?;
        Ok(path)
    }
}

/// Undoes the steps of a creation that did not come to its end.
pub(crate) struct Undo<'a> {
    engine: &'a Engine,
    id: SandboxId,
    dir: PathBuf,
    keeper: Option<Child>,
    /// Whether its writable layer may be there before its keeper has heard of it.
    pub disk_made: bool,
    armed: bool,
}

impl<'a> Undo<'a> {
    pub(crate) fn new(engine: &'a Engine, id: SandboxId, dir: PathBuf) -> Self {
        Self { engine, id, dir, keeper: None, disk_made: false, armed: true }
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if let Some(keeper) = &mut self.keeper {
            // Its control stream is closed by now: it ends its machine and then itself.
            let _ = keeper.wait();
        }
        let _ = fs::remove_dir_all(&self.dir);
        let id = self.id.clone();
        forget_use(self.engine.cache_dir(), &id);
        let _ = self.engine.store(|store| store.mark_gone(&id, "creation failed"));
        if self.disk_made {
            // A disk that no keeper took.
            self.engine.recover();
        }
    }
}

impl Engine {
    /// Makes a sandbox and waits until its machine answers.
    ///
    /// # Errors
    /// The step that failed; nothing is left of the sandbox then.
    pub async fn create(&self, options: CreateOptions) -> Result<Sandbox, CreateError> {
        options.spec.limits.check()?;
        options
            .spec
            .env
            .iter()
            .try_for_each(|(name, value)| trialrun_model::check_env(name.as_bytes(), value.as_bytes()))?;
        // First of all, so that its program loads while the rest is prepared.
        let spare = self
            .keeper()
            .map_err(CreateError::step(format!("start the keeper {}", self.inner.config.keeper.0.display())))?;
        let id = new_id().map_err(CreateError::step("get random bytes"))?;
        // No image goes between its trees' being looked up and noted.
        let hold = self.images().hold(false)?;
        let rootfs = self.rootfs(&options.spec)?;
        let config = &self.inner.config;
        let guest_program =
            config.guest.install(&config.cache_dir).map_err(CreateError::step("install the guest agent"))?;
        let dir = machine_dir(&config.data_dir, &id);
        let new = NewSandbox {
            id: id.clone(),
            lineage: None,
            driver: "container".to_owned(),
            image: options.spec.image.clone(),
            spec: options.spec.clone(),
            owner_pid: Some(std::process::id()),
            expires_ms: options.lease.map(expiry_ms),
            detached: !options.attached,
        };
        let record = self.store(|store| store.create_sandbox(&new)).map_err(CreateError::Store)?;
        let undo = Undo::new(self, id.clone(), dir.clone());
        fault::point("engine-row").map_err(CreateError::step("write the store"))?;
        let lock = self.claim(&dir)?;
        note_use(&config.cache_dir, &dir, &rootfs.rootfs)
            .map_err(CreateError::step("note what the machine stands on"))?;
        drop(hold);
        fault::point("engine-directory").map_err(CreateError::step("make the machine's directory"))?;
        let keeper_spec = KeeperSpec {
            id: id.clone(),
            lineage: record.lineage,
            limits: options.spec.limits,
            hostname: options.spec.hostname.clone(),
            rootfs: rootfs.rootfs,
            disk: DiskSource::Fresh,
            env: machine_env(&rootfs.env, rootfs.bare, &options.spec),
            user: rootfs.user,
            cwd: rootfs.cwd,
            policy: options.policy,
            upstream_proxy: proxy_setting(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
            no_proxy: proxy_setting(&["NO_PROXY", "no_proxy"]),
            data_dir: config.data_dir.clone(),
            tag: self.inner.tag.clone(),
            guest_program,
            attached: options.attached,
            lease: options.lease,
        };
        self.bring_up(spare, &keeper_spec, lock, undo).await
    }

    /// Hands a specification to a keeper and waits until its machine answers.
    pub(crate) async fn bring_up(
        &self,
        spare: Spare,
        spec: &KeeperSpec,
        lock: OwnedFd,
        mut undo: Undo<'_>,
    ) -> Result<Sandbox, CreateError> {
        let (id, dir) = (spec.id.clone(), undo.dir.clone());
        let Some((ours, process)) = spare.into_parts() else {
            return Err(CreateError::KeeperDied { log: None });
        };
        undo.keeper = Some(process);
        fault::point("engine-keeper").map_err(CreateError::step("start the keeper"))?;
        let (control, started) = greet(ours, spec, lock, &dir).await?;
        let Started::Ready { keeper_pid, isolation, timings } = started else {
            let Started::Failed(failure) = started else { unreachable!("two variants") };
            return Err(CreateError::Start(failure));
        };
        self.store(|store| {
            store.set_keeper(&id, keeper_pid, None)?;
            store.set_state(&id, Transition::Ready)
        })
        .map_err(CreateError::Update)?;
        undo.armed = false;
        if self.is_warm() {
            let engine = self.clone();
            tokio::task::spawn_blocking(move || engine.replenish());
        }
        let keeper = undo.keeper.take();
        let client = KeeperClient::new(dir);
        Ok(Sandbox::new(self.clone(), id, client, Some(control), keeper, isolation, timings))
    }

    /// Makes the machine's directory and takes the lock that its keeper will hold for life.
    pub(crate) fn claim(&self, dir: &Path) -> Result<OwnedFd, CreateError> {
        // Shared against recovery's exclusive one: a directory without a taken lock is never seen by it.
        let gate = self.gate(FlockOperation::LockShared).map_err(CreateError::step("lock the machines directory"))?;
        let make = || -> io::Result<OwnedFd> {
            crate::make_dir(dir)?;
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(dir.join(trialrun_keeper::LOCK_NAME))?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok(file.into())
        };
        let lock = make().map_err(CreateError::step(format!("make {}", dir.display())))?;
        drop(gate);
        Ok(lock)
    }

    pub(crate) fn gate(&self, operation: FlockOperation) -> io::Result<File> {
        let path = self.inner.config.data_dir.join("machines.lock");
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        rustix::fs::flock(&file, operation)?;
        Ok(file)
    }

    /// A keeper to talk to: the spare one if there is one, else a new one.
    pub(crate) fn keeper(&self) -> io::Result<Spare> {
        let spare = self.spares().pop();
        spare.map_or_else(|| Spare::start(&self.inner.config), Ok)
    }

    fn spares(&self) -> std::sync::MutexGuard<'_, Vec<Spare>> {
        self.inner.spares.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Starts a keeper ahead of the next [`Self::create`], which then finds its program loaded, its cell made and the
    /// layers open. It belongs to no sandbox yet and ends with this process.
    pub(crate) fn replenish(&self) {
        match Spare::start(&self.inner.config) {
            Ok(spare) => self.spares().push(spare),
            // The next create starts its own, and says what is wrong.
            Err(error) => tracing::debug!(%error, "no spare keeper"),
        }
    }
}

/// A keeper that waits for its specification.
pub(crate) struct Spare {
    parts: Option<(UnixStream, Child)>,
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some((control, mut process)) = self.parts.take() {
            // The stream's end is its sign to go.
            drop(control);
            let _ = process.wait();
        }
    }
}

impl Spare {
    pub(crate) fn start(config: &crate::Config) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let (program, args) = &config.keeper;
        let process = Command::new(program)
            .args(args)
            .arg(&config.data_dir)
            .env_clear()
            .envs(
                std::env::vars_os()
                    .filter(|(name, _)| name.to_string_lossy().starts_with("TRIALRUN_") || name == "PATH"),
            )
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { parts: Some((ours, process)) })
    }

    fn into_parts(mut self) -> Option<(UnixStream, Child)> {
        self.parts.take()
    }
}

async fn greet(
    ours: UnixStream,
    spec: &KeeperSpec,
    lock: OwnedFd,
    dir: &Path,
) -> Result<((conn::Receiver, conn::Sender), Started), CreateError> {
    let talk = async {
        let (mut receiver, sender) = conn::split(ours)?;
        sender.json(Kind::Request, spec, &[lock.as_fd()]).await?;
        drop(lock);
        let started: Started = receiver.json().await?;
        Ok::<_, io::Error>(((receiver, sender), started))
    };
    talk.await.map_err(|_| CreateError::KeeperDied { log: last_words(dir) })
}

/// The moment `lease` from now, in milliseconds since 1970.
pub(crate) fn expiry_ms(lease: Duration) -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from((now + lease).as_millis()).unwrap_or(u64::MAX)
}

fn last_words(dir: &Path) -> Option<String> {
    let text = fs::read_to_string(dir.join(trialrun_keeper::LOG_NAME)).ok()?;
    let start = text.char_indices().rev().nth(600).map_or(0, |(at, _)| at);
    let words = text[start..].trim();
    (!words.is_empty()).then(|| words.to_owned())
}

pub(crate) fn new_id() -> io::Result<SandboxId> {
    let mut entropy = [0; 8];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
    Ok(SandboxId::from_entropy(entropy))
}

pub(crate) fn proxy_setting(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

/// Ours first, then the image's, then what programs read to choose their number of workers, then the sandbox's.
fn machine_env(image: &[(String, String)], bare: bool, spec: &SandboxSpec) -> Vec<(String, String)> {
    // As container engines have it.
    let own = || vec![("HOSTNAME".to_owned(), spec.hostname.clone())];
    let mut env = if bare { own() } else { trialrun_model::default_env() };
    env.extend_from_slice(image);
    env.extend(worker_env(spec.limits.vcpus));
    env.extend(spec.env.iter().cloned());
    env
}

/// Programs count the CPUs that they may run on; these variables say the vCPUs also where a machine has more of them
/// than the host has cores.
pub(crate) fn worker_env(vcpus: u32) -> impl Iterator<Item = (String, String)> {
    [
        "PYTEST_XDIST_AUTO_NUM_WORKERS",
        "CARGO_BUILD_JOBS",
        "RAYON_NUM_THREADS",
        "GOMAXPROCS",
        "NEXTEST_TEST_THREADS",
        "PYTHON_CPU_COUNT",
    ]
    .into_iter()
    .map(move |name| (name.to_owned(), vcpus.to_string()))
}
