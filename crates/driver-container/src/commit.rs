//! From a machine's writable layer to a tree that other machines can stand on.

use crate::layer::copy_upper;
use rustix::fs::{XattrFlags, lgetxattr, lremovexattr, lsetxattr};
use std::{
    fs, io,
    os::{
        fd::BorrowedFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::Path,
};
use trialrun_model::ByteSize;

/// What an overlay notes of its own layers, which means nothing in another place (overlayfs.rst).
const OVERLAY_NOTES: [&str; 5] = ["origin", "impure", "nlink", "uuid", "upper"];
const CAPABILITY: &str = "security.capability";
/// `VFS_CAP_REVISION_MASK` and two revisions, from linux/capability.h.
const REVISION_MASK: u32 = 0xff00_0000;
const REVISION_2: u32 = 0x0200_0000;
const REVISION_3: u32 = 0x0300_0000;
/// Bytes of a capability attribute without the root id that revision 3 adds.
const REVISION_2_LEN: usize = 20;

/// Copies the upper directory of a layer to `into`, which must not be there. Returns its size.
///
/// # Errors
/// What the file system says.
pub fn copy(layer: BorrowedFd<'_>, into: &Path) -> io::Result<ByteSize> {
    copy_upper(layer, into)
}

/// Gives every file of the copied tree the owner that a machine of the uid range `base..base + count` sees.
///
/// # Errors
/// What the file system says.
pub fn unshift(place: &Path, base: u32, count: u32) -> io::Result<()> {
    let meta = place.symlink_metadata()?;
    for note in OVERLAY_NOTES {
        match lremovexattr(place, format!("trusted.overlay.{note}")) {
            Ok(()) | Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let inside = |id: u32| (base..base.saturating_add(count)).contains(&id).then(|| id - base);
    // A hard link's other names find it done; whiteouts belong to the host's root and stay so.
    if let (Some(uid), Some(gid)) = (inside(meta.uid()), inside(meta.gid())) {
        let mut value = [0; REVISION_2_LEN + 4];
        let capability = match lgetxattr(place, CAPABILITY, &mut value) {
            Ok(len) => Some(len),
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => None,
            Err(e) => return Err(e.into()),
        };
        // A change of owner takes setuid bits and capabilities away.
        std::os::unix::fs::lchown(place, Some(uid), Some(gid))?;
        if !meta.is_symlink() {
            fs::set_permissions(place, fs::Permissions::from_mode(meta.mode() & 0o7777))?;
        }
        if let Some(len) = capability {
            let magic = u32::from_le_bytes([value[0], value[1], value[2], value[3]]);
            let kept = if magic & REVISION_MASK == REVISION_3 && len > REVISION_2_LEN {
                // The root that may use them was this machine's; now any machine's is.
                value[..4].copy_from_slice(&((magic & !REVISION_MASK) | REVISION_2).to_le_bytes());
                &value[..REVISION_2_LEN]
            } else {
                &value[..len]
            };
            lsetxattr(place, CAPABILITY, kept, XattrFlags::empty())?;
        }
    }
    if meta.is_dir() {
        for entry in fs::read_dir(place)? {
            unshift(&entry?.path(), base, count)?;
        }
    }
    Ok(())
}
