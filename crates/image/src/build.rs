//! Building a named image exactly once, however many processes ask for it at the same time.

use crate::ImageConfig;
use std::{
    io,
    path::{Path, PathBuf},
};

/// What a build says about itself on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildProgress {
    /// Another process builds this image; this one waits for it.
    Waiting,
    /// A step begins.
    Step(String),
}

/// An image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// It needs root.
    #[error("building an image needs root; run it with sudo, or use the host's own system (--image host)")]
    NotRoot,
    /// A program is not installed.
    #[error(
        "the program {program} is missing; run: apt-get install {package} (or use the host's own system: --image host)"
    )]
    ProgramMissing {
        /// Its name.
        program: &'static str,
        /// The package that has it.
        package: &'static str,
    },
    /// The host is no Debian or Ubuntu, or apt has no sources.
    #[error(
        "no Debian or Ubuntu package source is configured on this host ({why}); use the host's own system: --image host"
    )]
    NoSources {
        /// What was looked for.
        why: String,
    },
    /// A program could not be run or read from.
    #[error("failed to run {program}")]
    Run {
        /// Its name.
        program: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A program ended badly.
    #[error("{program} failed ({status}): {tail}")]
    Failed {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: String,
        /// The last lines it wrote to stderr.
        tail: String,
    },
    /// An image from elsewhere holds what no machine may start from.
    #[error("{image} is refused: {why}")]
    Refused {
        /// Which.
        image: String,
        /// The layer and the entry, and what is wrong with it.
        why: String,
    },
    /// A step on the unpacked tree failed.
    #[error("failed to {step} {}", path.display())]
    Tree {
        /// What was done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A step on the unpacked tree failed.
    #[error(transparent)]
    Dir(#[from] crate::DirError),
}

/// Fills a tree. The store decides when, locks out other builders, and moves the tree into place.
pub trait Builder {
    /// Fills the empty directory `tree` and says how its machines start. What it started must have ended when it
    /// returns, also by a panic.
    ///
    /// # Errors
    /// When it can't; the store then removes the tree.
    fn build(&self, tree: &Path, progress: &mut dyn FnMut(BuildProgress)) -> Result<ImageConfig, BuildError>;
}
