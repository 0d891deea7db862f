//! Container machines: namespaces, an overlay on an id-mapped base, cgroups, capabilities, seccomp, Landlock.
//!
//! What each file does: [`cgroup`] limits, kills and measures; [`layer`] makes writable layers; `launch` is the ordered
//! list of steps from a specification to a running guest agent; `inside` is the part of it that runs in the child; `lower`
//! gives the base's files to the machine's root, and `owners` changes whose files are.

pub mod cgroup;
mod inside;
mod launch;
pub mod layer;
mod lower;
mod owners;

pub use launch::ContainerDriver;

use cgroup::Hierarchy;
use std::{io, path::Path, time::Duration};

/// Gives the host back what a data directory keeps for its next machine: the image file of layers, copies of base trees.
/// Only when no layer is left and nobody uses it. Returns how many bytes.
///
/// # Errors
/// What the kernel says.
pub fn release(data_dir: &Path) -> io::Result<u64> {
    let shifted = data_dir.join(lower::SHIFTED);
    let mut bytes = 0;
    if shifted.exists() && layer::Pool::open_existing(data_dir).is_some_and(|p| p.names().is_ok_and(|n| n.is_empty())) {
        bytes += trialrun_driver::tree_bytes(&shifted);
        std::fs::remove_dir_all(&shifted)?;
    }
    Ok(bytes + layer::Pool::release(data_dir)?)
}

/// Bytes that the layers of a data directory, and what is kept for the next ones, take on the disk.
#[must_use]
pub fn disk_bytes(data_dir: &Path) -> u64 {
    let places = [layer::IMAGE, layer::DIRECTORY, lower::SHIFTED];
    places.iter().map(|name| trialrun_driver::tree_bytes(&data_dir.join(name))).sum()
}

/// Removes what dead machines of a data directory left: their cgroups and layers. `live` says whose keeper lives.
/// Returns the ids whose traces were found and removed.
///
/// # Errors
/// The first thing that could not be removed; the rest was still tried.
pub fn recover(data_dir: &Path, tag: &str, live: &dyn Fn(&str) -> bool) -> (Vec<String>, Option<io::Error>) {
    let (mut found, mut first) = (Vec::new(), None);
    if let Ok(hierarchy) = Hierarchy::detect() {
        for group in hierarchy.group_dirs(tag) {
            let Ok(entries) = std::fs::read_dir(&group) else { continue };
            for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
                let id = entry.file_name().to_string_lossy().into_owned();
                if live(&id) {
                    continue;
                }
                if let Err(e) = cgroup::remove_sandbox(&hierarchy, tag, &id, Duration::from_secs(5)) {
                    first.get_or_insert(e);
                }
                found.push(id);
            }
            let _ = std::fs::remove_dir(&group);
        }
    }
    if data_dir.join(layer::IMAGE).exists() || data_dir.join(layer::DIRECTORY).exists() {
        match layer::Pool::open(data_dir) {
            Ok(pool) => {
                for id in pool.names().unwrap_or_default().into_iter().filter(|id| !live(id)) {
                    if let Err(e) = pool.remove(&id) {
                        first.get_or_insert(e);
                    }
                    found.push(id);
                }
            }
            Err(e) => {
                first.get_or_insert(e.cause);
            }
        }
    }
    found.sort();
    found.dedup();
    (found, first)
}
