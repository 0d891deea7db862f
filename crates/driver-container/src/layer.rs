//! Writable layers: one btrfs subvolume per machine, limited by a simple quota.
//!
//! The subvolumes live on the data directory's own file system when that is btrfs, else on a btrfs image file of ours
//! in it, attached to a loop device. That file system is mounted *detached* (fsmount(2) without move_mount(2)): it
//! appears in no mount table and goes away, loop device included, with the last keeper that holds it, however that
//! keeper ends. Measured: 3 to 5 ms for the first to mount, 0.15 ms for each further one, 0.3 ms for a subvolume.
//!
//! The image file is allocated ahead of use in steps and never below a watermark of free space on the host: a full host
//! gives `No space left on device` to who writes, and never turns the file system read-only under everybody.
//!
//! Without btrfs the layer is a plain directory: no limit is enforced, and the isolation report says so.

use rustix::{
    fs::{FallocateFlags, FlockOperation, Mode, OFlags, StatVfs},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags},
};
use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use trialrun_driver::{LaunchError, fault};
use trialrun_model::{ByteSize, DiskFull};
use trialrun_sys::blockdev::{self, BtrfsRoom, LoopDevice};

/// The image file, in the data directory.
pub(crate) const IMAGE: &str = "pool.btrfs";
/// The directory of layers, where there is no image file.
pub(crate) const DIRECTORY: &str = "layers";
/// What is kept free inside beyond a machine's own limit: what others fill between two looks (100 ms), several times.
const MARGIN: u64 = 1 << 30;
/// First size of the image file, where the host has plenty.
const FIRST_SIZE: u64 = 4 << 30;
/// Least that is kept free inside, on a host with little room.
const LEAST_AHEAD: u64 = 256 << 20;
/// Leave at least this much of the host's file system free.
const HOST_RESERVE: u64 = 1 << 30;
/// The image file grows by multiples of this.
const STEP: u64 = 64 << 20;
/// When the pool holds more than this, the space of removed layers is asked for rather than waited for.
const MUCH: u64 = 512 << 20;
/// When the pool has more than this in memory only, a layer is written out before its machine has to stand still.
const MUCH_UNWRITTEN: u64 = 4 << 20;
/// How often [`Pool::release`] looks, each 10 ms after the last.
const RELEASE_LOOKS: u32 = 50;
/// One part for metadata (256 MiB) is allocated for every so many parts for data (a tenth of the file system each).
const METADATA_RATIO: &str = "3";
/// `statfs.f_type` of btrfs, from linux/magic.h.
const BTRFS_MAGIC: i64 = 0x9123_683e;

/// Where layers live. Clones share it.
#[derive(Debug, Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: OwnedFd,
    backing: Backing,
    /// Whether a thread is at it.
    growing: AtomicBool,
}

#[derive(Debug)]
enum Backing {
    /// Our image file on a loop device.
    /// The mount's own descriptor is held too: the machine's first process moves that mount to a place of its own.
    Image { file: File, device: LoopDevice, lock: PathBuf, mount: OwnedFd },
    /// The data directory is on btrfs.
    Native { dir: PathBuf },
    /// A plain directory, with the reason why it is not better.
    Directory { dir: PathBuf, reason: String },
}

/// One machine's writable layer: a directory with `u` (upper) and `w` (work).
#[derive(Debug)]
pub struct Layer {
    name: String,
    dir: OwnedFd,
    limited: bool,
    limit: u64,
}

fn fail(step: impl Into<String>) -> impl FnOnce(io::Error) -> LaunchError {
    let step = step.into();
    move |cause| LaunchError::new(step, cause)
}

fn open_dir(at: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        at,
        name,
        OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )?)
}

impl Pool {
    fn new(root: OwnedFd, backing: Backing) -> Self {
        Self { inner: Arc::new(Inner { root, backing, growing: AtomicBool::new(false) }) }
    }

    /// Opens the pool of a data directory, making it first if need be. `TRIALRUN_LAYERS=directory` forces the plain
    /// directory.
    ///
    /// # Errors
    /// The step that failed; lack of btrfs is not one.
    pub fn open(data_dir: &Path) -> Result<Self, LaunchError> {
        let dir = data_dir.join(DIRECTORY);
        make_private_dir(&dir).map_err(fail(format!("make {}", dir.display())))?;
        let plain = |reason: String| -> Result<Self, LaunchError> {
            let root = File::open(&dir).map_err(fail(format!("open {}", dir.display())))?;
            Ok(Self::new(root.into(), Backing::Directory { dir: dir.clone(), reason }))
        };
        if std::env::var_os("TRIALRUN_LAYERS").is_some_and(|v| v == "directory") {
            return plain("TRIALRUN_LAYERS=directory asks for it".to_owned());
        }
        let stat =
            rustix::fs::statfs(&dir).map_err(|e| LaunchError::new(format!("statfs {}", dir.display()), e.into()))?;
        if stat.f_type as i64 == BTRFS_MAGIC {
            let root = File::open(&dir).map_err(fail(format!("open {}", dir.display())))?;
            return Ok(Self::new(root.into(), Backing::Native { dir }));
        }
        match Self::open_image(data_dir) {
            Ok(pool) => Ok(pool),
            Err(ImageError::NoBtrfs(LaunchError { step, way_out, cause })) => {
                plain(format!("can't {step} ({cause}); {}", way_out.unwrap_or_default()))
            }
            Err(ImageError::Failed(e)) => Err(e),
        }
    }

    /// As [`Self::open`] for a pool that was made before; `None` when there is none or it does not open.
    #[must_use]
    pub fn open_existing(data_dir: &Path) -> Option<Self> {
        data_dir.join(DIRECTORY).exists().then(|| Self::open(data_dir).ok()).flatten()
    }

    /// Removes the image file if it holds no layer and nobody uses it, and returns how many bytes the host has back.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn release(data_dir: &Path) -> io::Result<u64> {
        let path = data_dir.join(IMAGE);
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            other => other?,
        };
        let attached = || LoopDevice::is_attached(&file);
        if attached()? {
            return Ok(0);
        }
        let empty = Self::open_existing(data_dir).is_some_and(|pool| pool.names().is_ok_and(|names| names.is_empty()));
        // From here on nobody opens it; who opened it just now keeps it.
        let _lock = lock(&data_dir.join("pool.lock"))?;
        for _ in 0..RELEASE_LOOKS {
            // Our own mount goes away a moment after its descriptors.
            if empty && !attached()? {
                use std::os::unix::fs::MetadataExt;
                let bytes = file.metadata()?.blocks().saturating_mul(512);
                fs::remove_file(&path)?;
                return Ok(bytes);
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(0)
    }

    fn open_image(data_dir: &Path) -> Result<Self, ImageError> {
        let (path, lock_path) = (data_dir.join(IMAGE), data_dir.join("pool.lock"));
        let lock = lock(&lock_path).map_err(fail(format!("lock {}", lock_path.display())))?;
        if !path.exists() {
            make_image(&path)?;
        }
        let file =
            File::options().read(true).write(true).open(&path).map_err(fail(format!("open {}", path.display())))?;
        let device = LoopDevice::attach(&file).map_err(|cause| {
            no_btrfs(
                format!("attach {} to a loop device", path.display()),
                "load the loop module (modprobe loop)",
                cause,
            )
        })?;
        let (mount, root) = mount_detached(device.path()).map_err(|cause| {
            let step = format!("mount {} as btrfs", path.display());
            // ENODEV: the kernel knows no such file system. Anything else is a fault that must not pass for it.
            if cause.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) {
                no_btrfs(step, "load the btrfs module (modprobe btrfs)", cause)
            } else {
                LaunchError::new(step, cause).into()
            }
        })?;
        drop(lock);
        Ok(Self::new(root, Backing::Image { file, device, lock: lock_path, mount }))
    }

    /// A mount that has the layers below it and belongs to no mount namespace: for the machine's first process, to be
    /// attached in its own, since an overlay takes its layers only from its mounter's namespace.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn mount(&self) -> io::Result<OwnedFd> {
        use rustix::mount::{OpenTreeFlags, open_tree};
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        match &self.inner.backing {
            Backing::Image { mount, .. } => mount.try_clone(),
            Backing::Native { dir } | Backing::Directory { dir, .. } => Ok(open_tree(rustix::fs::CWD, dir, flags)?),
        }
    }

    /// Makes the layer of the machine `name`, owned by the host uid `owner`, holding at most `limit`.
    ///
    /// # Errors
    /// The step that failed; what was made is removed again.
    pub fn create(&self, name: &str, owner: u32, limit: ByteSize) -> Result<Layer, LaunchError> {
        let made = match &self.inner.backing {
            Backing::Directory { .. } => {
                rustix::fs::mkdirat(&self.inner.root, name, Mode::RWXU).map_err(io::Error::from)
            }
            Backing::Image { .. } | Backing::Native { .. } => blockdev::create_subvolume(self.inner.root.as_fd(), name),
        };
        made.map_err(fail(format!("make the layer {name}")))?;
        self.make_room(limit);
        self.fill(name, owner, limit).inspect_err(|_| drop(self.remove(name)))
    }

    fn fill(&self, name: &str, owner: u32, limit: ByteSize) -> Result<Layer, LaunchError> {
        let step = || format!("prepare the layer {name}");
        let dir = open_dir(self.inner.root.as_fd(), name).map_err(fail(step()))?;
        let inner = || -> io::Result<()> {
            rustix::fs::mkdirat(&dir, "u", Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH)?;
            rustix::fs::mkdirat(&dir, "w", Mode::RWXU)?;
            let id = |n| Some(rustix::fs::Uid::from_raw(n));
            rustix::fs::chownat(
                &dir,
                "u",
                id(owner),
                Some(rustix::fs::Gid::from_raw(owner)),
                rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
            )?;
            Ok(())
        };
        inner().map_err(fail(step()))?;
        let limited = !matches!(self.inner.backing, Backing::Directory { .. }) && self.limit(&dir, limit).is_ok();
        Ok(Layer { name: name.to_owned(), dir, limited, limit: limit.bytes() })
    }

    fn limit(&self, dir: &OwnedFd, limit: ByteSize) -> io::Result<()> {
        match blockdev::limit_subvolume(dir.as_fd(), limit.bytes()) {
            // Quotas not yet on: a pool from before, or the user's own btrfs.
            Err(_) if matches!(self.inner.backing, Backing::Image { .. }) => {
                enable_quota(self.inner.root.as_fd())?;
                blockdev::limit_subvolume(dir.as_fd(), limit.bytes())
            }
            other => other,
        }
    }

    /// Takes the layer `name`, which [`Self::fork`] made, for a machine that may write `limit` to it. With a simple quota
    /// that counts what this machine writes; what it shares with its parent is counted where it was written.
    ///
    /// # Errors
    /// The step that failed; the layer is removed then.
    pub fn adopt(&self, name: &str, limit: ByteSize) -> Result<Layer, LaunchError> {
        self.make_room(limit);
        let open = open_dir(self.inner.root.as_fd(), name).map_err(fail(format!("open the forked layer {name}")));
        let dir = open.inspect_err(|_| drop(self.remove(name)))?;
        let limited = !matches!(self.inner.backing, Backing::Directory { .. }) && self.limit(&dir, limit).is_ok();
        Ok(Layer { name: name.to_owned(), dir, limited, limit: limit.bytes() })
    }

    /// Makes the layer `child` a copy of the layer that `parent` is the directory of, whose machine must stand still.
    /// Returns how much was copied; `None` for a snapshot, which shares everything until one of both changes it.
    ///
    /// # Errors
    /// The step that failed; what was made is removed again.
    pub fn fork(&self, parent: BorrowedFd<'_>, child: &str) -> Result<Option<ByteSize>, LaunchError> {
        let step = |what: &str| format!("{what} the layer {child}");
        let copy = || -> Result<Option<ByteSize>, LaunchError> {
            if matches!(self.inner.backing, Backing::Directory { .. }) {
                let copied = copy_layer(parent, self.inner.root.as_fd(), child).map_err(fail(step("copy")))?;
                fault::point("fork-copied").map_err(fail(step("copy")))?;
                return Ok(Some(copied));
            }
            blockdev::snapshot_subvolume(self.inner.root.as_fd(), parent, child).map_err(fail(step("snapshot")))?;
            fault::point("fork-copied").map_err(fail(step("snapshot")))?;
            Ok(None)
        };
        copy().inspect_err(|_| drop(self.remove(child)))
    }

    /// Makes a layer that was copied while mounted fit to be mounted.
    ///
    /// # Errors
    /// The step that failed; the layer is removed then.
    pub fn settle(&self, name: &str) -> Result<(), LaunchError> {
        let inner = || -> io::Result<()> {
            let dir = open_dir(self.inner.root.as_fd(), name)?;
            match rustix::fs::unlinkat(&dir, "probe", rustix::fs::AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
            // In it: what the parent's overlay had under way, and its mark of a mount that was not synced ("volatile"),
            // with which the kernel refuses the next one (overlayfs.rst, "Volatile mount"). Nothing crashed here.
            match remove_tree(open_dir(dir.as_fd(), "w")?.as_fd(), "work") {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
        };
        inner().map_err(fail(format!("prepare the forked layer {name}"))).inspect_err(|_| drop(self.remove(name)))
    }

    /// Writes out what the layer of this directory has in memory only, while its machine runs on: a snapshot waits for
    /// it. Failure is none: the snapshot itself will tell.
    pub fn flush(&self, layer: BorrowedFd<'_>, child: &str) {
        // A machine's own count (memory.stat) is up to two seconds old; the file system's is of now, and of all machines.
        let much = || blockdev::btrfs_room(self.inner.root.as_fd()).is_ok_and(|room| room.unwritten > MUCH_UNWRITTEN);
        if matches!(self.inner.backing, Backing::Directory { .. }) || !much() {
            return;
        }
        // syncfs(2) would do so for every machine of the pool.
        if blockdev::snapshot_subvolume(self.inner.root.as_fd(), layer, child).is_ok() {
            let _ = blockdev::destroy_subvolume(self.inner.root.as_fd(), child);
        }
    }

    /// Removes the layer `name`. Not there is fine.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let result = match &self.inner.backing {
            Backing::Directory { .. } => remove_tree(self.inner.root.as_fd(), name),
            Backing::Image { .. } | Backing::Native { .. } => {
                blockdev::destroy_subvolume(self.inner.root.as_fd(), name)
            }
        };
        if self.inner.room().is_some_and(|room| room.used > MUCH) {
            let _ = blockdev::start_commit(self.inner.root.as_fd());
        }
        match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Names of all layers, for recovery.
    ///
    /// # Errors
    /// What reading the directory says.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.inner.root)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Why sizes are not limited, if they are not.
    #[must_use]
    pub fn unlimited_because(&self) -> Option<&str> {
        match &self.inner.backing {
            Backing::Directory { reason, .. } => Some(reason),
            Backing::Image { .. } | Backing::Native { .. } => None,
        }
    }

    /// A word for the isolation report.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self.inner.backing {
            Backing::Directory { .. } => "writable layer: plain directory",
            Backing::Image { .. } => "writable layer: btrfs image",
            Backing::Native { .. } => "writable layer: btrfs",
        }
    }

    /// Looks after a machine that may write at once: what its predecessors left is given back, and the pool grows. At
    /// worst the machine gets ENOSPC, which is named.
    fn make_room(&self, limit: ByteSize) {
        let Some(room) = self.inner.room() else { return };
        if room.used > MUCH {
            let _ = blockdev::start_commit(self.inner.root.as_fd());
        }
        if room.free >= self.inner.ahead(limit.bytes()) {
            return;
        }
        // Growing waits for a commit: next to nothing in a pool that is nearly empty.
        if room.used < MUCH || room.free < LEAST_AHEAD {
            let _ = self.inner.grow(limit.bytes());
        } else {
            self.grow_behind(limit.bytes());
        }
    }

    /// Has the pool grow in the background if less is free inside than `layer` may still want. To be called often while a
    /// machine writes.
    pub fn tend(&self, layer: &Layer) {
        if self.inner.room().is_some_and(|room| room.free < self.inner.ahead(layer.limit)) {
            self.grow_behind(layer.limit);
        }
    }

    /// The writer goes on meanwhile.
    fn grow_behind(&self, limit: u64) {
        let inner = self.inner.clone();
        if inner.growing.swap(true, Ordering::AcqRel) {
            return;
        }
        let grow = move || {
            if let Err(error) = inner.grow(limit) {
                tracing::debug!(%error, "the pool of layers does not grow");
            }
            inner.growing.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("pool".to_owned()).spawn(grow) {
            tracing::warn!(%error, "no thread to grow the pool of layers");
            self.inner.growing.store(false, Ordering::Release);
        }
    }
}

impl Inner {
    /// What is left inside, for an image file of ours.
    fn room(&self) -> Option<BtrfsRoom> {
        let Backing::Image { .. } = &self.backing else { return None };
        let told = blockdev::btrfs_room(self.root.as_fd()).or_else(|_| {
            let stat = rustix::fs::fstatvfs(&self.root)?;
            let used = stat.f_blocks.saturating_sub(stat.f_bfree).saturating_mul(stat.f_frsize);
            io::Result::Ok(BtrfsRoom { free: free_bytes(&stat), used, unwritten: 0 })
        });
        told.ok()
    }

    /// How much to keep free inside for a machine with this limit.
    fn ahead(&self, limit: u64) -> u64 {
        let Backing::Image { file, .. } = &self.backing else { return 0 };
        rustix::fs::fstatvfs(file).map_or(0, |host| ahead(free_bytes(&host), limit))
    }

    /// Grows the image file if little is free inside and the host has room.
    fn grow(&self, limit: u64) -> io::Result<()> {
        let Backing::Image { file, device, lock: lock_path, .. } = &self.backing else { return Ok(()) };
        let _lock = lock(lock_path)?;
        // Somebody may have grown it while we waited.
        device.refresh_size()?;
        blockdev::grow_to_device(self.root.as_fd())?;
        let (host, inside) = (free_bytes(&rustix::fs::fstatvfs(file)?), self.room().map_or(0, |room| room.free));
        let ahead = ahead(host, limit);
        if inside >= ahead {
            return Ok(());
        }
        let step = (ahead + MARGIN - inside).min(host.saturating_sub(HOST_RESERVE)) / STEP * STEP;
        if step == 0 {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        let size = file.metadata()?.len();
        rustix::fs::fallocate(file, FallocateFlags::empty(), size, step)?;
        device.refresh_size()?;
        blockdev::grow_to_device(self.root.as_fd())
    }
}

/// How much to keep free inside for a machine with this limit, on a host that has `host` bytes left: all that it may
/// write, so that the limit is what it meets, as long as that is a small part of what the host has.
fn ahead(host: u64, limit: u64) -> u64 {
    limit.saturating_add(MARGIN).min(host / 8).max(LEAST_AHEAD)
}

fn free_bytes(stat: &StatVfs) -> u64 {
    stat.f_bavail.saturating_mul(stat.f_frsize)
}

impl Layer {
    /// The layer's directory, with `u` and `w` in it.
    #[must_use]
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Its name in the pool.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether its size is limited.
    #[must_use]
    pub fn limited(&self) -> bool {
        self.limited
    }

    /// Sets another limit.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_limit(&mut self, limit: ByteSize) -> io::Result<()> {
        self.limit = limit.bytes();
        if self.limited { blockdev::limit_subvolume(self.dir.as_fd(), limit.bytes()) } else { Ok(()) }
    }

    /// Whether it is full, by its own limit or for want of space on the host.
    #[must_use]
    pub fn full(&self) -> Option<DiskFull> {
        // A trial write is the kernel's own answer; the blocks are given back at once.
        let open = rustix::fs::openat(&self.dir, "probe", OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RWXU);
        let tried = open.and_then(|file| {
            let bytes = (self.limit / 64).clamp(4096, 1 << 20);
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
        });
        let _ = rustix::fs::unlinkat(&self.dir, "probe", rustix::fs::AtFlags::empty());
        match tried {
            Err(rustix::io::Errno::DQUOT) => Some(DiskFull::Limit),
            Err(rustix::io::Errno::NOSPC) => Some(DiskFull::Host),
            _ => None,
        }
    }
}

/// Simple quotas, or the older ones before Linux 6.7, with which a fork's limit counts what it shares too.
/// `TRIALRUN_QUOTA=full` forces the older ones, `TRIALRUN_QUOTA=off` does without.
fn enable_quota(root: BorrowedFd<'_>) -> io::Result<()> {
    match std::env::var("TRIALRUN_QUOTA").as_deref() {
        Ok("off") => Err(io::Error::new(io::ErrorKind::Unsupported, "TRIALRUN_QUOTA=off asks for it")),
        Ok("full") => blockdev::enable_full_quota(root),
        _ => blockdev::enable_simple_quota(root).or_else(|_| blockdev::enable_full_quota(root)),
    }
}

fn mount_detached(device: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let context = rustix::mount::fsopen("btrfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(context.as_fd(), "source", device)?;
    // What is in the pool dies with its machine: no barrier, and a commit only now and then.
    rustix::mount::fsconfig_set_flag(context.as_fd(), "nobarrier")?;
    rustix::mount::fsconfig_set_string(context.as_fd(), "commit", "120")?;
    // What was allocated ahead stays so: a discarded part would be a hole in the image file, which a full host can't fill.
    rustix::mount::fsconfig_set_flag(context.as_fd(), "nodiscard")?;
    // Data would take all there is (the kernel keeps a fifth of its part empty) and leave metadata its first 8 MiB:
    // making a file then fails for want of space long before the limit. A part for it after each so many for data.
    rustix::mount::fsconfig_set_string(context.as_fd(), "metadata_ratio", METADATA_RATIO)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOATIME | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    // An O_PATH descriptor of the mount's root will not do for ioctls: open it for reading.
    let root = open_dir(mount.as_fd(), ".")?;
    Ok((mount, root))
}

/// Why the image file can't be used.
enum ImageError {
    /// The host has no btrfs: a plain directory does, and says so.
    NoBtrfs(LaunchError),
    /// Anything else, such as a full disk: never a reason to do without limits.
    Failed(LaunchError),
}

impl From<LaunchError> for ImageError {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}

fn no_btrfs(step: String, way_out: &str, cause: io::Error) -> ImageError {
    ImageError::NoBtrfs(LaunchError { step, way_out: Some(way_out.to_owned()), cause })
}

fn make_image(path: &Path) -> Result<(), ImageError> {
    let fresh = path.with_extension("new");
    let step = || format!("make {}", path.display());
    let build = || -> Result<(), ImageError> {
        let file = File::create(&fresh).map_err(fail(step()))?;
        let host = rustix::fs::fstatvfs(&file).map_err(|e| LaunchError::new(step(), e.into()))?;
        let size = ahead(free_bytes(&host), FIRST_SIZE - MARGIN);
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size).map_err(|e| LaunchError {
            step: format!("allocate {} for {}", ByteSize(size), path.display()),
            way_out: Some("free space there, or put the data directory elsewhere (TRIALRUN_DATA_DIR)".to_owned()),
            cause: e.into(),
        })?;
        let output = Command::new("mkfs.btrfs")
            .args(["--quiet", "--metadata", "single", "--data", "single", "--nodiscard"])
            .arg(&fresh)
            .stdin(Stdio::null())
            .output()
            .map_err(|cause| {
                no_btrfs("run mkfs.btrfs".to_owned(), "install it (apt-get install btrfs-progs)", cause)
            })?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(LaunchError::new(format!("mkfs.btrfs {}", fresh.display()), io::Error::other(words)).into());
        }
        Ok(fs::rename(&fresh, path).map_err(fail(step()))?)
    };
    build().inspect_err(|_| drop(fs::remove_file(&fresh)))
}

pub(crate) fn make_private_dir(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

pub(crate) fn lock(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Copies a layer that nobody writes to, with every attribute, link and hole, and returns its size on the disk.
fn copy_layer(parent: BorrowedFd<'_>, root: BorrowedFd<'_>, child: &str) -> io::Result<ByteSize> {
    rustix::fs::mkdirat(root, child, Mode::RWXU)?;
    let dir = open_dir(root, child)?;
    rustix::fs::mkdirat(&dir, "w", Mode::RWXU)?;
    copy_upper(parent, &place_of(dir.as_fd()).join("u"))
}

/// The path of a directory by its descriptor here: its own could be another's by now.
fn place_of(dir: BorrowedFd<'_>) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), dir.as_raw_fd()))
}

/// Copies the upper directory of a layer that nobody writes to, with every attribute, link and hole, to `into`, which must
/// not be there. Returns its size on the disk.
///
/// # Errors
/// What cp(1) says, [`io::ErrorKind::StorageFull`] for a full disk.
pub(crate) fn copy_upper(layer: BorrowedFd<'_>, into: &Path) -> io::Result<ByteSize> {
    let output = Command::new("cp")
        .args(["--archive", "--reflink=auto", "--sparse=always", "--no-target-directory", "--"])
        .args([place_of(layer).join("u").as_path(), into])
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let last = words.lines().last().unwrap_or("cp failed").to_owned();
        let full = last.contains("No space left") || last.contains("quota");
        return Err(io::Error::new(if full { io::ErrorKind::StorageFull } else { io::ErrorKind::Other }, last));
    }
    Ok(ByteSize(trialrun_driver::tree_bytes(into)))
}

/// Removes a tree without following links; its content was written by a guest.
fn remove_tree(at: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let dir = open_dir(at, name)?;
    // /proc/self/fd names the directory itself, whatever its path has become.
    use std::os::fd::AsRawFd;
    let place = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    for entry in fs::read_dir(&place)? {
        let path = entry?.path();
        if path.symlink_metadata()?.is_dir() { fs::remove_dir_all(&path)? } else { fs::remove_file(&path)? }
    }
    rustix::fs::unlinkat(at, name, rustix::fs::AtFlags::REMOVEDIR)?;
    Ok(())
}
