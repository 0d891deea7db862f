//! Forking a sandbox: the child starts from its parent's disk as it is at one moment.
//!
//! The child belongs to its parent's lineage, so that the owners of its files are right, and has a keeper, a cell and
//! cgroups of its own. It takes over the limits, the environment, the egress policy and the very base that its parent
//! has. No process, no memory and no memory-backed mount (`/dev/shm`) of the parent is in it.

use crate::{
    CallError, CallErrorKind, CreateError, Engine, ForkCost, ForkError, Sandbox,
    create::{Undo, expiry_ms, new_id, proxy_setting},
    using::note_use,
};
use std::time::Duration;
use trialrun_keeper::{
    fault, machine_dir,
    wire::{Call, DiskSource, KeeperSpec, Reply},
};
use trialrun_model::SandboxState;
use trialrun_store::NewSandbox;

/// How a fork lives.
#[derive(Debug, Clone, Copy)]
pub struct ForkOptions {
    /// Ends with this process. Else it lives until deleted or until its lease ends.
    pub attached: bool,
    /// Longest life.
    pub lease: Option<Duration>,
}

impl Engine {
    /// Makes a sandbox from the disk of a running one, and waits until its machine answers. Also says what that cost the
    /// parent, which is stopped for a moment and otherwise goes on.
    ///
    /// # Errors
    /// The step that failed; nothing is left of the fork then, and the parent runs on unless it was lost.
    pub async fn fork(&self, parent: &Sandbox, options: ForkOptions) -> Result<(Sandbox, ForkCost), ForkError> {
        let spare = self.keeper().map_err(CreateError::step("start the fork's keeper"))?;
        let origin = self.store(|store| store.find(parent.id.as_str()))?;
        if matches!(origin.state, SandboxState::Gone | SandboxState::Deleting) {
            return Err(ForkError::Gone(origin.id));
        }
        let config = &self.inner.config;
        let guest_program =
            config.guest.install(&config.cache_dir).map_err(CreateError::step("install the guest agent"))?;
        let id = new_id().map_err(CreateError::step("get random bytes"))?;
        let dir = machine_dir(&config.data_dir, &id);
        let new = NewSandbox {
            id: id.clone(),
            lineage: Some(origin.lineage),
            driver: origin.driver,
            image: origin.image,
            spec: origin.spec,
            owner_pid: Some(std::process::id()),
            expires_ms: options.lease.map(expiry_ms),
            detached: !options.attached,
        };
        let record = self.store(|store| store.create_sandbox(&new)).map_err(CreateError::Store)?;
        let mut undo = Undo::new(self, id.clone(), dir.clone());
        fault::point("engine-row").map_err(CreateError::step("write the store"))?;
        let lock = self.claim(&dir)?;
        fault::point("engine-directory").map_err(CreateError::step("make the fork's directory"))?;
        undo.disk_made = true;
        let forked = match parent.client().call(&Call::Fork(id.clone()), &[]).await {
            Ok(Reply::Forked(forked)) => *forked,
            Ok(_) => {
                let message = "the keeper gave an unexpected answer".to_owned();
                let cause = CallError { kind: CallErrorKind::Internal, message };
                return Err(ForkError::Parent { parent: parent.id.clone(), cause });
            }
            Err(cause) => return Err(ForkError::Parent { parent: parent.id.clone(), cause }),
        };
        note_use(&config.cache_dir, &dir, &forked.rootfs)
            .map_err(CreateError::step("note what the machine stands on"))?;
        fault::point("engine-forked").map_err(CreateError::step("fork the disk"))?;
        let spec = KeeperSpec {
            id,
            lineage: record.lineage,
            limits: forked.limits,
            hostname: forked.hostname,
            rootfs: forked.rootfs,
            disk: DiskSource::Forked,
            env: forked.env,
            user: forked.user,
            cwd: forked.cwd,
            policy: forked.policy,
            upstream_proxy: proxy_setting(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
            no_proxy: proxy_setting(&["NO_PROXY", "no_proxy"]),
            data_dir: config.data_dir.clone(),
            tag: self.inner.tag.clone(),
            guest_program,
            attached: options.attached,
            lease: options.lease,
        };
        Ok((self.bring_up(spare, &spec, lock, undo).await?, forked.cost))
    }
}
