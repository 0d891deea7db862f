//! What can go wrong before and while a sandbox is made. All of it is ours or the host's, never the user's code.

use std::{io, path::PathBuf};
use trialrun_image::{DirError, ImageError};
use trialrun_keeper::wire::{CallError, StartFailure};
use trialrun_model::{LimitsError, SandboxId};
use trialrun_store::{OpenError, QueryError, UpdateError};

/// The engine could not be opened, or a sandbox could not be found.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A directory of ours.
    #[error("use the directory {}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        cause: io::Error,
    },
    /// The store.
    #[error("use the store")]
    Store(#[source] OpenError),
    /// A question to the store.
    #[error("read the store")]
    Query(#[from] QueryError),
    /// The image store.
    #[error("use the image store")]
    Image(#[source] DirError),
    /// No such sandbox.
    #[error("no running sandbox {0} (trialrun ps lists those there are)")]
    NotFound(String),
}

/// A sandbox could not be made. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A limit out of range.
    #[error("limits")]
    Limits(#[from] LimitsError),
    /// An environment entry that no process gets.
    #[error("environment")]
    Env(#[from] trialrun_model::EnvError),
    /// The image.
    #[error("use the image")]
    Image(#[source] ImageError),
    /// The cache directory.
    #[error("use the cache directory")]
    Cache(#[from] DirError),
    /// The store.
    #[error("write the store")]
    Store(#[source] trialrun_store::CreateError),
    /// The store, later.
    #[error("write the store")]
    Update(#[source] UpdateError),
    /// A step on the host.
    #[error("{step}")]
    Step {
        /// Which, with the object's name.
        step: String,
        /// The kernel's word.
        #[source]
        cause: io::Error,
    },
    /// The keeper said why.
    #[error("start the machine")]
    Start(#[source] StartFailure),
    /// The keeper ended without a word.
    #[error("start the machine: its keeper ended without a word{}", log.as_ref().map(|l| format!("; its log says: {l}")).unwrap_or_default())]
    KeeperDied {
        /// The end of its log.
        log: Option<String>,
    },
}

/// A sandbox could not be forked. Its parent runs on, and nothing is left of the fork.
#[derive(Debug, thiserror::Error)]
pub enum ForkError {
    /// The store has no parent.
    #[error("read the store")]
    Query(#[from] QueryError),
    /// The parent is no more.
    #[error("fork {0}: it is deleted")]
    Gone(SandboxId),
    /// The parent's keeper refused, or is gone.
    #[error("fork the disk of {parent}")]
    Parent {
        /// Which.
        parent: SandboxId,
        /// Its word.
        #[source]
        cause: CallError,
    },
    /// The child could not be made.
    #[error(transparent)]
    Create(#[from] CreateError),
}

impl CreateError {
    pub(crate) fn step(step: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let step = step.into();
        move |cause| Self::Step { step, cause }
    }
}
