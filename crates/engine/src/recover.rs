//! What dead keepers left, found and removed.
//!
//! A keeper holds a lock on its machine's directory for life; a lock that can be taken means that no keeper lives. The
//! marks: a row that is not "gone", a directory below `machines/`, a cgroup below `trialrun-<tag>`, a layer. Nothing
//! without one of these is touched.

use crate::Engine;
use rustix::fs::FlockOperation;
use std::{
    fs::{self, File},
    path::Path,
    sync::PoisonError,
};
use trialrun_model::SandboxId;

/// What recovery did.
#[derive(Debug, Default, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Recovered {
    /// Sandboxes whose traces were removed.
    pub removed: Vec<String>,
    /// What could not be removed, in words.
    pub failed: Vec<String>,
    /// Bytes that the host has back.
    pub released_bytes: u64,
}

impl Recovered {
    fn add(&mut self, other: Self) {
        self.removed.extend(other.removed);
        self.removed.sort();
        self.removed.dedup();
        self.failed.extend(other.failed);
        self.released_bytes += other.released_bytes;
    }
}

impl Engine {
    /// Removes everything that carries this data directory's marks and has no living keeper.
    pub fn recover(&self) -> Recovered {
        let mut result = Recovered::default();
        // Nobody is between making a directory and locking it while this is held.
        let _gate = match self.gate(FlockOperation::LockExclusive) {
            Ok(gate) => gate,
            Err(e) => {
                result.failed.push(format!("lock the machines directory: {e}"));
                return result;
            }
        };
        let machines = self.data_dir().join("machines");
        let rows = self.store(|store| store.list(true)).unwrap_or_default();
        let young = |id: &str| rows.iter().any(|row| row.id.as_str() == id && creator_lives(row));
        let live = |id: &str| lock_is_held(&machines.join(id)) || (!machines.join(id).exists() && young(id));
        let (removed, failed) = trialrun_keeper::recover(self.data_dir(), &self.inner.tag, &live);
        result.removed = removed;
        result.failed.extend(failed.map(|e| format!("remove a machine's traces: {e}")));
        for entry in fs::read_dir(&machines).into_iter().flatten().flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if live(&id) {
                continue;
            }
            match fs::remove_dir_all(entry.path()) {
                Ok(()) => result.removed.push(id),
                Err(e) => result.failed.push(format!("remove {}: {e}", entry.path().display())),
            }
        }
        for row in rows.iter().filter(|row| !live(row.id.as_str())) {
            let _ = self.store(|store| store.mark_gone(&row.id, "its keeper ended"));
            crate::using::forget_use(self.cache_dir(), &row.id);
            result.removed.push(row.id.to_string());
        }
        if let Err(e) = self.store(trialrun_store::Store::sweep_lineages) {
            result.failed.push(format!("free lineage numbers: {e}"));
        }
        result.removed.sort();
        result.removed.dedup();
        result
    }

    /// As [`Self::recover`], and gives back the space of layers that are gone. What was removed when the engine was opened
    /// is counted too, once.
    pub fn collect(&self) -> Recovered {
        let mut result = std::mem::take(&mut *self.inner.recovered.lock().unwrap_or_else(PoisonError::into_inner));
        result.add(self.recover());
        match self
            .gate(FlockOperation::LockExclusive)
            .and_then(|_gate| trialrun_keeper::release_layers(self.data_dir()))
        {
            Ok(bytes) => result.released_bytes = bytes,
            Err(e) => result.failed.push(format!("give back the space of layers: {e}")),
        }
        result
    }

    /// As [`Self::recover`], when anything looks dead. Cheap otherwise.
    pub(crate) fn recover_if_needed(&self) {
        let machines = self.data_dir().join("machines");
        let rows = self.store(|store| store.list(true)).unwrap_or_default();
        let dead_row = rows.iter().any(|row| !lock_is_held(&machines.join(row.id.as_str())) && !creator_lives(row));
        let dead_dir =
            || fs::read_dir(&machines).into_iter().flatten().flatten().any(|entry| !lock_is_held(&entry.path()));
        if dead_row || dead_dir() {
            let recovered = self.recover();
            tracing::info!(removed = recovered.removed.len(), failed = ?recovered.failed, "recovered");
            self.inner.recovered.lock().unwrap_or_else(PoisonError::into_inner).add(recovered);
        }
    }

    /// Marks a sandbox whose keeper says that it is gone.
    pub(crate) fn note_gone(&self, id: &SandboxId, reason: &str) {
        crate::using::forget_use(self.cache_dir(), id);
        if let Err(error) = self.store(|store| store.mark_gone(id, reason)) {
            tracing::warn!(%id, %error, "the store did not take a sandbox's end");
        }
    }
}

/// A row whose machine's directory is not there yet belongs to a client that is just making it.
fn creator_lives(row: &trialrun_store::SandboxRecord) -> bool {
    row.state == trialrun_model::SandboxState::Creating
        && row.owner_pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
}

/// Whether a living keeper (or a client on the way to one) holds the lock of a machine's directory.
pub(crate) fn lock_is_held(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join(trialrun_keeper::LOCK_NAME)) else { return false };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => false,
        Err(e) => e == rustix::io::Errno::WOULDBLOCK,
    }
}
