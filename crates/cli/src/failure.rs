//! Failures of ours or of the call, never of the user's code: what went wrong, the way out, the exit code.

pub use trialrun_report::exit_codes;

/// Exit code of a failure of ours.
pub const OURS: u8 = exit_codes::COULD_NOT_RUN as u8;
/// Exit code of a wrong call.
pub const WRONG_CALL: u8 = exit_codes::USAGE as u8;

/// Something that kept us from doing what was asked.
#[derive(Debug)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    /// What, in one line.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// A mistake in the call.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: WRONG_CALL, message: message.into(), hint: None }
    }

    /// A failure of ours or of the host.
    pub fn ours(message: impl Into<String>) -> Self {
        Self { code: OURS, message: message.into(), hint: None }
    }

    /// With the way out.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// As a document for programs.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "schema": 1,
            "error": { "message": self.message, "hint": self.hint, "exit_code": self.code },
        })
    }

    /// Prints it and gives the exit code.
    pub fn report(&self, json: bool) -> u8 {
        if json {
            println!("{}", self.json());
        }
        eprintln!("trialrun: {}", trialrun_report::terminal::safe(&self.message));
        if let Some(hint) = &self.hint {
            eprintln!("          {}", trialrun_report::terminal::safe(hint));
        }
        self.code
    }
}

impl From<trialrun_engine::CreateError> for Failure {
    fn from(error: trialrun_engine::CreateError) -> Self {
        match error {
            trialrun_engine::CreateError::Limits(limits) => return Self::usage(limits.to_string()),
            trialrun_engine::CreateError::Env(env) => return Self::usage(env.to_string()),
            trialrun_engine::CreateError::Image(image @ trialrun_image::ImageError::Unknown { .. }) => {
                return image.into();
            }
            _ => {}
        }
        Self::ours(format!("can't make the machine: {}", trialrun_model::error_chain(&error)))
            .hint("trialrun doctor says what this host can do")
    }
}

impl From<trialrun_engine::ForkError> for Failure {
    fn from(error: trialrun_engine::ForkError) -> Self {
        use trialrun_engine::{CallErrorKind, ForkError};
        let text = format!("can't {}", trialrun_model::error_chain(&error));
        match error {
            ForkError::Create(create) => create.into(),
            ForkError::Parent { cause, .. } if cause.kind == CallErrorKind::DiskFull => Self::ours(text)
                .hint("trialrun rm machines that are not needed, or free space under the data directory"),
            ForkError::Gone(_) => Self::usage(text),
            ForkError::Parent { .. } | ForkError::Query(_) => Self::ours(text),
        }
    }
}

impl From<trialrun_engine::EngineError> for Failure {
    fn from(error: trialrun_engine::EngineError) -> Self {
        use trialrun_engine::EngineError;
        let failure = Self::ours(format!("can't {}", trialrun_model::error_chain(&error)));
        match &error {
            EngineError::NotFound(_) => Self::usage(error.to_string()),
            EngineError::Directory { .. } => failure.hint("name another with --data-dir or --cache-dir"),
            _ => failure,
        }
    }
}

impl From<trialrun_engine::CallError> for Failure {
    fn from(error: trialrun_engine::CallError) -> Self {
        Self::ours(error.message)
    }
}

impl From<trialrun_engine::TransferError> for Failure {
    fn from(error: trialrun_engine::TransferError) -> Self {
        Self::ours(format!("can't {}", trialrun_model::error_chain(&error)))
    }
}

impl From<trialrun_image::ImageError> for Failure {
    fn from(error: trialrun_image::ImageError) -> Self {
        match error {
            trialrun_image::ImageError::Unknown { .. } | trialrun_image::ImageError::Host => {
                Self::usage(trialrun_model::error_chain(&error))
            }
            _ => Self::ours(trialrun_model::error_chain(&error)),
        }
    }
}

impl From<trialrun_oci::PullError> for Failure {
    fn from(error: trialrun_oci::PullError) -> Self {
        use trialrun_oci::PullError;
        let text = trialrun_model::error_chain(&error);
        match error {
            PullError::Reference { .. } | PullError::NotThere { .. } | PullError::Manifest(_) => Self::usage(text),
            _ => Self::ours(format!("can't {text}")),
        }
    }
}
