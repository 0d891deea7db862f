//! The nouns of trialrun and their rules. This crate performs no I/O.
//!
//! Types here are neither wire nor disk types by themselves, though most can be serialised: the store, the keeper
//! protocol and the dialects convert at their edges. See `docs/glossary.md` for the words.

pub mod bytes;
mod error;
mod exec;
mod id;
mod limits;
mod size;
mod spec;
mod state;

pub use error::error_chain;
pub use exec::{
    Command, DiskFull, Ended, ExecKind, ExecOutcome, ExecSpec, ExitStatus, OutputTotals, PtySize, Refusal, RefusalKind,
};
pub use id::{ExecId, IdError, LineageId, SandboxId, UIDS_PER_LINEAGE};
pub use limits::{Limits, LimitsError};
pub use size::{ByteSize, ByteSizeError};
pub use spec::{EnvError, ImageRef, ImageRefError, Isolation, SandboxSpec, check_env, default_env};
pub use state::{SandboxState, Transition, TransitionError};
