//! Machines that are ready before somebody asks.
//!
//! A pooled machine carries no one's policy (its network is off), environment or secret, and is handed out once.

use crate::{CallError, CreateError, CreateOptions, Engine, Sandbox, create::worker_env};
use std::{collections::VecDeque, sync::Mutex};
use trialrun_keeper::wire::Call;
use trialrun_model::SandboxSpec;
use trialrun_policy::Policy;

/// Ready machines of one image.
pub struct Pool {
    engine: Engine,
    base: SandboxSpec,
    ready: Mutex<VecDeque<Sandbox>>,
}

/// A sandbox could not be taken from the pool.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// None was ready, and making one failed.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The ready machine did not take its limits or policy.
    #[error("prepare the pooled machine")]
    Prepare(#[source] CallError),
}

impl Pool {
    /// An empty pool of machines like `base`; see [`Self::fill`].
    #[must_use]
    pub fn new(engine: Engine, base: SandboxSpec) -> Self {
        Self { engine, base, ready: Mutex::default() }
    }

    /// Makes machines until `count` are ready.
    ///
    /// # Errors
    /// The first machine that could not be made; those made before stay.
    pub async fn fill(&self, count: usize) -> Result<(), CreateError> {
        while self.len() < count {
            let options = CreateOptions { spec: self.base.clone(), policy: Policy::off(), attached: true, lease: None };
            let sandbox = self.engine.create(options).await?;
            self.queue().push_back(sandbox);
        }
        Ok(())
    }

    /// Machines that are ready.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue().len()
    }

    /// Whether none is ready.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Sandbox>> {
        self.ready.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A machine with `spec` and `policy`: a ready one if there is one of that image and host name, else a new one.
    ///
    /// # Errors
    /// When none could be made or prepared.
    pub async fn take(&self, spec: SandboxSpec, policy: Policy) -> Result<Sandbox, TakeError> {
        let fits = spec.image == self.base.image && spec.hostname == self.base.hostname;
        let ready = if fits { self.queue().pop_front() } else { None };
        let Some(sandbox) = ready else {
            let options = CreateOptions { spec, policy, attached: true, lease: None };
            return Ok(self.engine.create(options).await?);
        };
        let mut env = spec.env;
        if spec.limits.vcpus != self.base.limits.vcpus {
            env.splice(0..0, worker_env(spec.limits.vcpus));
        }
        let calls = [
            (spec.limits != self.base.limits).then_some(Call::SetLimits(spec.limits)),
            (!env.is_empty()).then_some(Call::SetEnv(env)),
            (policy != Policy::off()).then_some(Call::SetPolicy(policy)),
        ];
        for call in calls.into_iter().flatten() {
            sandbox.client().call(&call, &[]).await.map_err(TakeError::Prepare)?;
        }
        Ok(sandbox)
    }

    /// Deletes the machines that are ready.
    pub async fn drain(&self) {
        while let Some(sandbox) = { self.queue().pop_front() } {
            let _ = sandbox.delete().await;
        }
    }
}
