//! Lower trees whose files belong to the machine's root: id-mapped mounts, or copies where the kernel has none.
//!
//! Overlays take id-mapped layers from Linux 5.19 on, and not every file system can be mapped. Without it, each tree is
//! copied once per uid range, owners shifted, below `shifted/` in the data directory; `trialrun gc` removes the copies when
//! no layer is left. Directories of the host that are bound can't be copied: their files then belong to nobody inside.
//! `TRIALRUN_IDMAP=off` forces all that.

use crate::{layer, owners};
use rustix::{
    fs::CWD,
    mount::{OpenTreeFlags, open_tree},
};
use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use trialrun_driver::LaunchError;
use trialrun_sys::mount;

/// The first kernel whose overlays take id-mapped layers.
const OVERLAY_IDMAP: (u32, u32) = (5, 19);
/// Where copies are, below the data directory.
pub const SHIFTED: &str = "shifted";

/// Why id-mapped mounts of these trees can't be used, if so.
pub fn idmap_refusal(trees: &[PathBuf], userns: BorrowedFd<'_>) -> Option<String> {
    if std::env::var_os("TRIALRUN_IDMAP").is_some_and(|v| v == "off") {
        return Some("TRIALRUN_IDMAP=off asks for it".to_owned());
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
    if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
        && (major, minor) < OVERLAY_IDMAP
    {
        return Some(format!("Linux {major}.{minor} has no id-mapped overlay layers (5.19)"));
    }
    trees.iter().find_map(|tree| {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        // A tree that can't be opened is the launch's to report.
        let copy = open_tree(CWD, tree, flags).ok()?;
        mount::idmap(copy.as_fd(), userns)
            .err()
            .map(|e| format!("the file system of {} refuses it: {e}", tree.display()))
    })
}

/// Copies of the trees for the uid range that begins at `base`, made where they are missing.
///
/// # Errors
/// The step that failed.
pub fn shifted(data_dir: &Path, trees: &[PathBuf], base: u32) -> Result<Vec<PathBuf>, LaunchError> {
    let dir = data_dir.join(SHIFTED).join(base.to_string());
    let step = |what: &str, path: &Path| format!("{what} {}", path.display());
    layer::make_private_dir(&data_dir.join(SHIFTED))
        .and_then(|()| layer::make_private_dir(&dir))
        .map_err(|e| LaunchError::new(step("make", &dir), e))?;
    let lock = data_dir.join(SHIFTED).join("lock");
    let _lock = layer::lock(&lock).map_err(|e| LaunchError::new(step("lock", &lock), e))?;
    let copy = |tree: &PathBuf| -> Result<PathBuf, LaunchError> {
        // Trees are named after their content and never change.
        let name: String = tree.to_string_lossy().chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        let place = dir.join(name.trim_start_matches('-'));
        if place.exists() {
            return Ok(place);
        }
        let fresh = place.with_extension("new");
        let make = || -> io::Result<()> {
            if fresh.exists() {
                fs::remove_dir_all(&fresh)?;
            }
            copy_tree(tree, &fresh)?;
            owners::change(&fresh, &|id| (id < base).then_some(base + id))?;
            fs::rename(&fresh, &place)
        };
        make().map_err(|cause| LaunchError {
            step: format!("copy {} for a machine whose kernel can't map ids", tree.display()),
            way_out: Some("free space under the data directory, or use Linux 5.19 or later".to_owned()),
            cause,
        })?;
        Ok(place)
    };
    trees.iter().map(copy).collect()
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    let output = Command::new("cp")
        .args(["--archive", "--reflink=auto", "--no-target-directory", "--"])
        .args([from, to])
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(words.lines().last().unwrap_or("cp failed").to_owned()))
}
