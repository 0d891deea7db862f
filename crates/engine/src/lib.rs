//! Lifecycle of sandboxes, over keepers: create, exec, files, pool, recover.
//!
//! ```text
//! create: row "creating" ─> directory + lock ─> keeper ─> machine Ready ─> row "running"
//! fork:    row and directory as for create ─> the parent's keeper copies its disk ─> keeper ─> machine Ready ─> "running"
//! delete: row "deleting" ─> keeper destroys the machine and its directory ─> row "gone"
//! ```
//! Intent is written before the act. Whatever dies in between, the next [`Engine::open`] finds a row or a trace whose
//! lock is free and removes it. The engine knows keepers, never a concrete driver.

mod build;
mod create;
mod error;
mod files;
mod fork;
mod pool;
mod recover;
mod rootfs;
mod sandbox;
mod secret;
mod usage;
mod using;

pub use build::{BuildError, BuildEvent, BuildOptions};
pub use create::{CreateOptions, Guest};
pub use error::{CreateError, EngineError, ForkError};
pub use files::{DownloadLimits, DropRule, Moved, TransferError, UploadRules};
pub use fork::ForkOptions;
pub use pool::Pool;
pub use recover::Recovered;
pub use sandbox::{Captured, Sandbox};
pub use secret::SecretValue;
pub use trialrun_keeper::client::{Following, KeeperClient, Output, Stdin};
pub use trialrun_keeper::wire::{CallError, CallErrorKind, Description, ExecInfo, FileInfo, ForkCost, StartTimings};
pub use usage::{DiskUse, Evicted};

use std::{
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use trialrun_image::ImageStore;
use trialrun_store::Store;

/// Where things are and which programs to use.
#[derive(Debug, Clone)]
pub struct Config {
    /// State: the store, machines, layers.
    pub data_dir: PathBuf,
    /// What can be made again: images, the guest agent's program.
    pub cache_dir: PathBuf,
    /// The program to run as a keeper, and its arguments; the data directory is added to them.
    pub keeper: (PathBuf, Vec<String>),
    /// The guest agent's program.
    pub guest: Guest,
}

/// The engine. Clones share everything.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    store: Mutex<Store>,
    tag: String,
    images: ImageStore,
    /// Keepers that wait for a sandbox.
    spares: Mutex<Vec<create::Spare>>,
    /// Held so that layers' file system stays mounted while the engine lives.
    warm: Mutex<Option<Box<dyn std::any::Any + Send>>>,
    /// What was removed when it was opened, until somebody asks.
    recovered: Mutex<Recovered>,
}

impl Engine {
    /// Opens the data and cache directories, making them if need be, and removes what dead keepers left.
    ///
    /// # Errors
    /// Directories that can't be made, or a store that can't be opened.
    pub fn open(config: Config) -> Result<Self, EngineError> {
        Self::open_with(config, false)
    }

    /// As [`Self::open`], for a client that will make a sandbox next: its keeper's program loads meanwhile.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_prestarted(config: Config) -> Result<Self, EngineError> {
        Self::open_with(config, true)
    }

    fn open_with(config: Config, prestart: bool) -> Result<Self, EngineError> {
        for dir in [&config.data_dir, &config.cache_dir] {
            own_dir(dir).map_err(|cause| EngineError::Directory { path: dir.clone(), cause })?;
        }
        let machines = config.data_dir.join("machines");
        make_dir(&machines).map_err(|cause| EngineError::Directory { path: machines, cause })?;
        // A one-shot client's only keeper loads while the store opens.
        let spares = if prestart { create::Spare::start(&config).ok().into_iter().collect() } else { Vec::new() };
        let store = Store::open(&config.data_dir).map_err(EngineError::Store)?;
        let tag = store.instance_tag()?;
        let images = ImageStore::open(&config.cache_dir).map_err(EngineError::Image)?;
        let inner = Inner {
            config,
            store: Mutex::new(store),
            tag,
            images,
            spares: Mutex::new(spares),
            warm: Mutex::new(None),
            recovered: Mutex::default(),
        };
        let engine = Self { inner: Arc::new(inner) };
        engine.recover_if_needed();
        Ok(engine)
    }

    /// The data directory.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.inner.config.data_dir
    }

    /// The cache directory.
    #[must_use]
    pub fn cache_dir(&self) -> &Path {
        &self.inner.config.cache_dir
    }

    /// The images.
    #[must_use]
    pub fn images(&self) -> &ImageStore {
        &self.inner.images
    }

    /// Runs a short piece of work on the store.
    pub(crate) fn store<T>(&self, work: impl FnOnce(&Store) -> T) -> T {
        // A panic while the lock was held left no half-done work: every write is one transaction.
        let store = self.inner.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        work(&store)
    }

    /// Keeps what is costly to set up (the layers' mount, a loaded keeper) ready until the engine is dropped. For servers;
    /// a one-shot client gains nothing.
    pub fn keep_warm(&self) {
        let warm = trialrun_keeper::warm_layers(&self.inner.config.data_dir);
        *self.inner.warm.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = warm;
        self.replenish();
    }

    fn is_warm(&self) -> bool {
        self.inner.warm.lock().unwrap_or_else(std::sync::PoisonError::into_inner).is_some()
    }
}

/// Makes a directory in which only its owner, who must be us, can put anything: programs and policies come from there.
fn own_dir(dir: &Path) -> io::Result<()> {
    let refuse = |why: String| Err(io::Error::other(why));
    if let Ok(meta) = std::fs::metadata(dir) {
        let (me, mode) = (rustix::process::geteuid().as_raw(), meta.mode() & 0o7777);
        if !meta.is_dir() {
            return refuse("it is not a directory".to_owned());
        }
        if meta.uid() != me {
            return refuse(format!("it belongs to uid {} and this is uid {me}", meta.uid()));
        }
        if mode & 0o022 != 0 {
            return refuse(format!("other users can write to it (mode {mode:o}); run: chmod 700 {}", dir.display()));
        }
    }
    make_dir(dir)
}

fn make_dir(dir: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}
