//! What is on the disk, what of it could go, and the budget that makes it go.
//!
//! Only what can be made or fetched again is ever evicted: downloads, images without a name, images of registries; oldest
//! use first, and never what a machine, a build or another image stands on. Images that somebody built and named stay,
//! and so does the stock image, even when the budget is not met then: that is said.

use crate::{Engine, using::in_use};
use rustix::fs::FlockOperation;
use std::{
    fs::{self, File},
    io,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use trialrun_driver::tree_bytes;
use trialrun_image::{ImageError, ImageRecord};
use trialrun_model::ImageRef;

/// Below the cache: what registries sent.
const DOWNLOADS: &str = "oci/blobs";
/// Held while downloads are fetched and used.
const DOWNLOADS_LOCK: &str = "oci/use.lock";

/// One kind of thing on the disk.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DiskUse {
    /// `images`, `steps`, `downloads`, `runtime` or `machines`.
    pub kind: &'static str,
    /// How many.
    pub items: u64,
    /// Their size.
    pub bytes: u64,
    /// What of it the budget may evict, or nobody uses.
    pub reclaimable_bytes: u64,
}

/// What the budget did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Evicted {
    /// What went: digests and names.
    pub removed: Vec<String>,
    /// Their size.
    pub bytes: u64,
    /// What the cache has now.
    pub left_bytes: u64,
    /// By how much that is over the budget: what is left is in use, or named.
    pub over_bytes: u64,
}

/// Something that may go.
struct Candidate {
    /// What is cheapest to have again goes first.
    class: u8,
    used: SystemTime,
    bytes: u64,
    what: What,
}

enum What {
    Download(PathBuf),
    Image(Box<ImageRecord>, Vec<String>),
}

impl Engine {
    /// What the cache and the data directory hold.
    ///
    /// # Errors
    /// When images can't be listed.
    pub fn disk_usage(&self) -> Result<Vec<DiskUse>, ImageError> {
        let mut kinds = ["images", "steps", "downloads", "runtime", "machines"].map(|kind| DiskUse {
            kind,
            items: 0,
            bytes: 0,
            reclaimable_bytes: 0,
        });
        let [images, steps, downloads, runtime, machines] = &mut kinds;
        let candidates = self.candidates(false)?;
        let may_go = |digest: &str| {
            candidates.iter().any(|c| matches!(&c.what, What::Image(record, _) if record.digest == digest))
        };
        for (record, names) in self.images().ls()? {
            let kind = if names.is_empty() { &mut *steps } else { &mut *images };
            kind.items += 1;
            kind.bytes += record.bytes;
            kind.reclaimable_bytes += if may_go(&record.digest) { record.bytes } else { 0 };
        }
        for (_, bytes, _) in self.downloads() {
            downloads.items += 1;
            downloads.bytes += bytes;
            downloads.reclaimable_bytes += bytes;
        }
        for name in ["host-skel", "runtime", "guest"] {
            let dir = self.cache_dir().join(name);
            runtime.items += fs::read_dir(&dir).map_or(0, |entries| entries.count() as u64);
            runtime.bytes += tree_bytes(&dir);
        }
        machines.items = fs::read_dir(self.data_dir().join("machines")).map_or(0, |entries| entries.count() as u64);
        machines.bytes = trialrun_keeper::layers_bytes(self.data_dir());
        if machines.items == 0 {
            machines.reclaimable_bytes = machines.bytes;
        }
        Ok(kinds.to_vec())
    }

    /// Evicts until the cache takes at most `max` bytes, or nothing more may go.
    ///
    /// # Errors
    /// When images can't be listed or removed.
    pub fn keep_budget(&self, max: u64) -> Result<Evicted, ImageError> {
        let size = |usage: &[DiskUse]| usage.iter().filter(|u| u.kind != "machines").map(|u| u.bytes).sum::<u64>();
        let mut evicted = Evicted { left_bytes: size(&self.disk_usage()?), ..Evicted::default() };
        // Nobody fetches or unpacks while this is held; else downloads stay this time.
        let lock = self.downloads_lock().ok();
        let free =
            lock.as_ref().is_some_and(|file| rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok());
        let (mut next, mut gone_of_these) = (Vec::new(), true);
        while evicted.left_bytes > max {
            let _hold = self.images().hold(true)?;
            let Some(candidate) = next.pop() else {
                // Anew: what an image that went stood on may go now.
                if !std::mem::take(&mut gone_of_these) {
                    break;
                }
                next = self.candidates(free)?;
                next.sort_by_key(|c| std::cmp::Reverse((c.class, c.used)));
                continue;
            };
            let removed = match candidate.what {
                What::Download(path) => {
                    let gone = fs::remove_file(&path).is_ok();
                    gone.then(|| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
                }
                What::Image(record, names) => {
                    let used = in_use(self.cache_dir());
                    let image = ImageRef::Digest(record.digest.clone());
                    let gone = self.images().rm(&image, &|d| used.iter().any(|hex| d.ends_with(hex.as_str()))).is_ok();
                    gone.then(|| names.into_iter().next().unwrap_or(record.digest))
                }
            };
            // What is used again by now stays.
            let Some(removed) = removed else { continue };
            gone_of_these = true;
            evicted.removed.push(removed);
            evicted.bytes += candidate.bytes;
            evicted.left_bytes = evicted.left_bytes.saturating_sub(candidate.bytes);
        }
        drop(lock);
        evicted.over_bytes = evicted.left_bytes.saturating_sub(max);
        Ok(evicted)
    }

    /// Holds what is downloaded as long as it is needed.
    ///
    /// # Errors
    /// When the lock can't be taken.
    pub fn hold_downloads(&self) -> io::Result<File> {
        let file = self.downloads_lock()?;
        rustix::fs::flock(&file, FlockOperation::LockShared)?;
        Ok(file)
    }

    fn downloads_lock(&self) -> io::Result<File> {
        let path = self.cache_dir().join(DOWNLOADS_LOCK);
        if let Some(dir) = path.parent() {
            crate::make_dir(dir)?;
        }
        File::options().create(true).truncate(false).write(true).open(path)
    }

    /// Whole downloads: path, size, last use.
    fn downloads(&self) -> Vec<(PathBuf, u64, SystemTime)> {
        let entries = fs::read_dir(self.cache_dir().join(DOWNLOADS)).into_iter().flatten().flatten();
        entries
            .filter_map(|e| {
                let meta = e.metadata().ok().filter(fs::Metadata::is_file)?;
                Some((e.path(), meta.len(), meta.modified().ok()?))
            })
            .collect()
    }

    fn candidates(&self, downloads: bool) -> Result<Vec<Candidate>, ImageError> {
        let mut found = Vec::new();
        if downloads {
            for (path, bytes, used) in self.downloads() {
                found.push(Candidate { class: 0, used, bytes, what: What::Download(path) });
            }
        }
        let all = self.images().ls()?;
        let used = in_use(self.cache_dir());
        let stood: Vec<String> = all.iter().filter_map(|(r, _)| r.base.clone()).collect();
        for (record, names) in all {
            let class = match &names[..] {
                [] => 1,
                names if names.iter().all(|n| n.starts_with("oci:")) => 2,
                _ => continue,
            };
            if stood.contains(&record.digest) || used.iter().any(|hex| record.digest.ends_with(hex.as_str())) {
                continue;
            }
            let made = UNIX_EPOCH + Duration::from_millis(record.created_ms);
            let used = self.images().last_use(&record.digest).unwrap_or(made);
            found.push(Candidate { class, used, bytes: record.bytes, what: What::Image(Box::new(record), names) });
        }
        Ok(found)
    }
}
