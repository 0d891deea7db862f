//! Loop devices (loop(4)) and btrfs subvolumes (btrfs(5), ioctl(2) BTRFS_IOC_*).

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsRawFd, BorrowedFd},
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of linux/loop.h.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// A loop device that is open, and therefore stays attached.
#[derive(Debug)]
pub struct LoopDevice {
    file: File,
    path: PathBuf,
}

impl LoopDevice {
    /// The device that is attached to `backing`, or a newly attached one. It detaches by itself when its last opener or
    /// mount is gone (LO_FLAGS_AUTOCLEAR), so a killed process leaves none behind.
    ///
    /// # Errors
    /// When there is no loop support or no free device.
    pub fn attach(backing: &File) -> io::Result<Self> {
        match Self::find(backing)? {
            Some(device) => Ok(device),
            None => Self::configure(backing),
        }
    }

    /// Whether any device is attached to `backing`.
    ///
    /// # Errors
    /// When `backing` can't be read.
    pub fn is_attached(backing: &File) -> io::Result<bool> {
        Self::find(backing).map(|device| device.is_some())
    }

    fn find(backing: &File) -> io::Result<Option<Self>> {
        let want = backing.metadata()?;
        for number in 0..1024u32 {
            let path = PathBuf::from(format!("/dev/loop{number}"));
            // The directory exists only while the device is attached, which spares opening every idle device.
            if !std::path::Path::new(&format!("/sys/block/loop{number}/loop")).exists() {
                if !path.exists() {
                    break;
                }
                continue;
            }
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
            // SAFETY: all-zero is a valid value of this plain struct.
            let mut info: LoopInfo64 = unsafe { std::mem::zeroed() };
            // SAFETY: the kernel fills the struct, whose layout is that of linux/loop.h.
            let got = unsafe { libc::ioctl(file.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
            // st_dev of user space and the kernel's own encoding agree for the small numbers of real devices.
            if got == 0 && info.inode == want.ino() && decode_dev(info.device) == want.dev() {
                return Ok(Some(Self { file, path }));
            }
        }
        Ok(None)
    }

    fn configure(backing: &File) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
        loop {
            // SAFETY: takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            // SAFETY: all-zero is a valid value of this plain struct.
            let mut config: LoopConfig = unsafe { std::mem::zeroed() };
            config.fd = backing.as_raw_fd() as u32;
            config.info.flags = LO_FLAGS_AUTOCLEAR;
            // SAFETY: the struct outlives the call; its layout is that of linux/loop.h.
            if unsafe { libc::ioctl(file.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
                return Ok(Self { file, path });
            }
            let error = io::Error::last_os_error();
            // Somebody else took the free device between the two calls.
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error);
            }
        }
    }

    /// The device's path.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Has the device take notice of its backing file's new size.
    ///
    /// # Errors
    /// What the ioctl says.
    pub fn refresh_size(&self) -> io::Result<()> {
        // SAFETY: takes a plain number.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_CAPACITY, 0) })
    }
}

/// Undoes the kernel's `huge_encode_dev`.
fn decode_dev(encoded: u64) -> u64 {
    let major = ((encoded & 0xf_ff00) >> 8) as u32;
    let minor = ((encoded & 0xff) | ((encoded >> 12) & 0xf_ff00)) as u32;
    libc::makedev(major, minor)
}

const BTRFS_IOC_DEV_INFO: libc::c_ulong = 0xd000_941e;
const BTRFS_IOC_FS_INFO: libc::c_ulong = 0x8400_941f;
const BTRFS_IOC_START_SYNC: libc::c_ulong = 0x8008_9418;
const BTRFS_IOC_RESIZE: libc::c_ulong = 0x5000_9403;
const BTRFS_IOC_SUBVOL_CREATE: libc::c_ulong = 0x5000_940e;
const BTRFS_IOC_SNAP_DESTROY: libc::c_ulong = 0x5000_940f;
const BTRFS_IOC_SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;
const BTRFS_IOC_QUOTA_CTL: libc::c_ulong = 0xc010_9428;
const BTRFS_IOC_QGROUP_LIMIT: libc::c_ulong = 0x8030_942b;
const BTRFS_QUOTA_CTL_ENABLE: u64 = 1;
const BTRFS_QUOTA_CTL_ENABLE_SIMPLE: u64 = 4;
const BTRFS_QGROUP_LIMIT_MAX_RFER: u64 = 1;

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

fn fill(target: &mut [u8], name: &str) -> io::Result<()> {
    if name.is_empty() || name.len() >= target.len() || name.contains('/') || name.contains('\0') {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    target[..name.len()].copy_from_slice(name.as_bytes());
    Ok(())
}

fn vol_call(dir: BorrowedFd<'_>, request: libc::c_ulong, name: &str) -> io::Result<()> {
    let mut args = VolArgs { fd: 0, name: [0; 4088] };
    fill(&mut args.name, name)?;
    // SAFETY: the struct has btrfs_ioctl_vol_args' layout and outlives the call; the name ends with NUL.
    check(unsafe { libc::ioctl(dir.as_raw_fd(), request, &raw const args) })
}

/// Makes the subvolume `name` in the directory `dir`.
///
/// # Errors
/// What BTRFS_IOC_SUBVOL_CREATE says.
pub fn create_subvolume(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    vol_call(dir, BTRFS_IOC_SUBVOL_CREATE, name)
}

/// Removes the subvolume `name` of the directory `dir` with everything in it; its space is given back in the background.
///
/// # Errors
/// What BTRFS_IOC_SNAP_DESTROY says.
pub fn destroy_subvolume(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    vol_call(dir, BTRFS_IOC_SNAP_DESTROY, name)
}

/// Makes the subvolume `name` in `dir` a writable snapshot of the subvolume `source`.
///
/// # Errors
/// What BTRFS_IOC_SNAP_CREATE_V2 says.
pub fn snapshot_subvolume(dir: BorrowedFd<'_>, source: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut args =
        VolArgsV2 { fd: i64::from(source.as_raw_fd()), transid: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    fill(&mut args.name, name)?;
    // SAFETY: the struct has btrfs_ioctl_vol_args_v2's layout and outlives the call.
    check(unsafe { libc::ioctl(dir.as_raw_fd(), BTRFS_IOC_SNAP_CREATE_V2, &raw const args) })
}

/// Turns simple quotas on (Linux 6.7): each extent is charged to the subvolume that wrote it.
///
/// # Errors
/// EINVAL on older kernels.
pub fn enable_simple_quota(root: BorrowedFd<'_>) -> io::Result<()> {
    quota_ctl(root, BTRFS_QUOTA_CTL_ENABLE_SIMPLE)
}

/// Turns the older kind of quotas on: each extent is charged to every subvolume that refers to it, which has to be found
/// out at each commit.
///
/// # Errors
/// What BTRFS_IOC_QUOTA_CTL says.
pub fn enable_full_quota(root: BorrowedFd<'_>) -> io::Result<()> {
    quota_ctl(root, BTRFS_QUOTA_CTL_ENABLE)
}

fn quota_ctl(root: BorrowedFd<'_>, command: u64) -> io::Result<()> {
    let mut args = [command, 0u64];
    // SAFETY: two u64, as btrfs_ioctl_quota_ctl_args has.
    check(unsafe { libc::ioctl(root.as_raw_fd(), BTRFS_IOC_QUOTA_CTL, args.as_mut_ptr()) })
}

/// Limits what the subvolume that `subvolume` is the root of may hold; past it, writes fail with EDQUOT.
///
/// # Errors
/// What BTRFS_IOC_QGROUP_LIMIT says, such as EINVAL without quotas.
pub fn limit_subvolume(subvolume: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let args: [u64; 6] = [0, BTRFS_QGROUP_LIMIT_MAX_RFER, bytes, 0, 0, 0];
    // SAFETY: btrfs_ioctl_qgroup_limit_args is six u64; qgroup 0 stands for the descriptor's own subvolume.
    check(unsafe { libc::ioctl(subvolume.as_raw_fd(), BTRFS_IOC_QGROUP_LIMIT, args.as_ptr()) })
}

/// Grows the mounted file system to its device's size.
///
/// # Errors
/// What BTRFS_IOC_RESIZE says.
pub fn grow_to_device(root: BorrowedFd<'_>) -> io::Result<()> {
    vol_call(root, BTRFS_IOC_RESIZE, "max")
}

/// Has a commit begin in the background. After it, the space of removed subvolumes is given back: the kernel's cleaner
/// is woken by commits alone. Nothing happens when nothing changed since the last one.
///
/// # Errors
/// What BTRFS_IOC_START_SYNC says.
pub fn start_commit(root: BorrowedFd<'_>) -> io::Result<()> {
    let mut transaction = 0u64;
    // SAFETY: the kernel writes one u64.
    check(unsafe { libc::ioctl(root.as_raw_fd(), BTRFS_IOC_START_SYNC, &raw mut transaction) })
}

/// Bytes that a new file of the file system that has only one device can take: what is not yet given to any use, and what
/// is free in the part for data. Unlike statvfs(3) it counts out what is only reserved, such as written pages that have
/// not reached the device; that can be gigabytes.
///
/// # Errors
/// What the ioctls say, or reading `/sys/fs/btrfs/UUID/allocation/data`.
pub fn btrfs_room(root: BorrowedFd<'_>) -> io::Result<BtrfsRoom> {
    let mut info = [0u64; 128]; // struct btrfs_ioctl_fs_info_args: 1024 bytes; the UUID is bytes 16 to 32
    // SAFETY: the buffer has the size that the request's number says.
    check(unsafe { libc::ioctl(root.as_raw_fd(), BTRFS_IOC_FS_INFO, info.as_mut_ptr()) })?;
    let mut device = [0u64; 512]; // struct btrfs_ioctl_dev_info_args: devid, UUID, bytes_used, total_bytes
    device[0] = 1;
    // SAFETY: as above: 4096 bytes.
    check(unsafe { libc::ioctl(root.as_raw_fd(), BTRFS_IOC_DEV_INFO, device.as_mut_ptr()) })?;
    let unallocated = device[4].saturating_sub(device[3]);

    let hex: String = info[2..4].iter().flat_map(|half| half.to_ne_bytes()).map(|b| format!("{b:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    let data = PathBuf::from(format!("/sys/fs/btrfs/{uuid}/allocation/data"));
    let number = |name: &str| -> io::Result<u64> {
        std::fs::read_to_string(data.join(name))?.trim().parse().map_err(io::Error::other)
    };
    let mut free = number("total_bytes")?;
    let used = number("bytes_used")?;
    for name in ["bytes_pinned", "bytes_reserved", "bytes_may_use", "bytes_readonly"] {
        free = free.saturating_sub(number(name)?);
    }
    // What is reserved may be more than the part for data has: it will be taken from the rest.
    let unwritten = number("bytes_may_use")?;
    let taken = used.saturating_add(unwritten);
    let over = taken.saturating_sub(number("total_bytes")?);
    let free = (unallocated + free.saturating_sub(used)).saturating_sub(over);
    Ok(BtrfsRoom { free, used: taken, unwritten })
}

/// What a btrfs file system has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BtrfsRoom {
    /// Bytes that can still be written.
    pub free: u64,
    /// Bytes of data that are there or on their way, removed ones included until they are given back.
    pub used: u64,
    /// Bytes of data that are in memory only.
    pub unwritten: u64,
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
