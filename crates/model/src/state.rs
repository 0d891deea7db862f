//! The states of a sandbox.
//!
//! ```text
//! creating ──ready──> running ──delete──> deleting ──done──> gone
//!     └──────fail / delete─────────────────────^
//! any state but gone ──lost──> gone   (its keeper died)
//! ```

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life. Stored before the act it announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Its row exists; its machine may not.
    Creating,
    /// Its machine answers.
    Running,
    /// It is being taken down.
    Deleting,
    /// Nothing of it is left.
    Gone,
}

/// What happens to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// The machine answered.
    Ready,
    /// Someone asked for its end, or a step of its creation failed.
    Delete,
    /// Its traces are removed.
    Done,
    /// Its keeper died and its traces were removed by recovery.
    Lost,
}

/// A transition that the state does not allow.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a sandbox that is {state:?} can't take {transition:?}")]
pub struct TransitionError {
    state: SandboxState,
    transition: Transition,
}

impl SandboxState {
    /// The state after `transition`.
    ///
    /// # Errors
    /// When the state does not allow it.
    pub fn after(self, transition: Transition) -> Result<Self, TransitionError> {
        use {SandboxState as S, Transition as T};
        match (self, transition) {
            (S::Creating, T::Ready) => Ok(S::Running),
            (S::Creating | S::Running | S::Deleting, T::Delete) => Ok(S::Deleting),
            (S::Deleting, T::Done) | (S::Creating | S::Running | S::Deleting, T::Lost) => Ok(S::Gone),
            (state, transition) => Err(TransitionError { state, transition }),
        }
    }

    /// The word the store keeps.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Deleting => "deleting",
            Self::Gone => "gone",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_is_final_and_delete_is_idempotent() {
        for t in [Transition::Ready, Transition::Delete, Transition::Done, Transition::Lost] {
            assert!(SandboxState::Gone.after(t).is_err());
        }
        assert_eq!(SandboxState::Deleting.after(Transition::Delete), Ok(SandboxState::Deleting));
    }
}
