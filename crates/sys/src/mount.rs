//! The parts of the mount API that rustix does not wrap.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Maps the ids of the detached mount `mount` through the user namespace `userns`. mount_setattr(2),
/// MOUNT_ATTR_IDMAP, Linux 5.12.
///
/// # Errors
/// EINVAL when the file system can't be id-mapped.
pub fn idmap(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>) -> io::Result<()> {
    setattr(mount, libc::MOUNT_ATTR_IDMAP, userns.as_raw_fd() as u64, false)
}

/// Sets attributes (MOUNT_ATTR_RDONLY and so on) on a mount, and below it when `recursive`. mount_setattr(2).
///
/// # Errors
/// What mount_setattr(2) says.
pub fn set_attributes(mount: BorrowedFd<'_>, attributes: u64, recursive: bool) -> io::Result<()> {
    setattr(mount, attributes, 0, recursive)
}

fn setattr(mount: BorrowedFd<'_>, set: u64, userns: u64, recursive: bool) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: userns };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: `attr` outlives the call and its size is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes every mount of the current mount namespace private, so that nothing done here reaches the host.
/// mount_namespaces(7).
///
/// # Errors
/// What mount(2) says.
pub fn make_all_private() -> io::Result<()> {
    use rustix::mount::{MountPropagationFlags, mount_change};
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}
