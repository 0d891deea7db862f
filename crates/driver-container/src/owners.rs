//! Other owners for a tree: those that a machine sees for what was copied out of its layer, those of its uid range for what
//! it is to stand on.

use rustix::fs::{XattrFlags, lgetxattr, lremovexattr, lsetxattr};
use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

/// What an overlay notes of its own layers, which means nothing in another place (overlayfs.rst).
const OVERLAY_NOTES: [&str; 5] = ["origin", "impure", "nlink", "uuid", "upper"];
const CAPABILITY: &str = "security.capability";
/// `VFS_CAP_REVISION_MASK` and two revisions, from linux/capability.h.
const REVISION_MASK: u32 = 0xff00_0000;
const REVISION_2: u32 = 0x0200_0000;
const REVISION_3: u32 = 0x0300_0000;
/// Bytes of a capability attribute without the root id that revision 3 adds.
const REVISION_2_LEN: usize = 20;

/// Gives every file of a tree the owner and group that `new` says for its present ones; `None` leaves it as it is. Set-id
/// bits and capabilities stay, an overlay's notes go.
///
/// # Errors
/// What the file system says.
pub fn change(place: &Path, new: &dyn Fn(u32) -> Option<u32>) -> io::Result<()> {
    let meta = place.symlink_metadata()?;
    for note in OVERLAY_NOTES {
        match lremovexattr(place, format!("trusted.overlay.{note}")) {
            Ok(()) | Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    // A hard link's other names find it done.
    if let (Some(uid), Some(gid)) = (new(meta.uid()), new(meta.gid())) {
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
            change(&entry?.path(), new)?;
        }
    }
    Ok(())
}
