//! What only the kernel can tell. Every probe works on detached mounts, descriptors or short-lived children.

use crate::{Finding, host::Host};
use landlock::{ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError, Scope};
use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string, fsmount,
        fsopen, open_tree,
    },
};
use std::{
    fs::File,
    io::{self, Read},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};
use trialrun_model::{ByteSize, LineageId};

pub(crate) fn namespaces(host: &Host) -> Finding {
    let (present, absent) = host.namespaces();
    let (area, name, all) = ("isolation", "namespaces", present.join(", "));
    let consequence = "machines can't be isolated";
    if !absent.is_empty() && absent != ["time"] {
        return Finding::missing(
            area,
            name,
            format!("the kernel lacks {}", absent.join(", ")),
            consequence,
            "a kernel with all namespaces",
        );
    }
    if host.max_user_namespaces() == Some(0) {
        return Finding::missing(
            area,
            name,
            "user namespaces are switched off",
            consequence,
            "sysctl user.max_user_namespaces=10000",
        );
    }
    let tried = Command::new("unshare")
        .args([
            "--user",
            "--pid",
            "--fork",
            "--mount",
            "--net",
            "--ipc",
            "--uts",
            "--cgroup",
            "--map-root-user",
            "true",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match tried {
        Ok(status) if status.success() => Finding::good(area, name, format!("{all}; tried")),
        Ok(_) => Finding::missing(
            area,
            name,
            format!("{all} are in the kernel, but making them was refused"),
            consequence,
            "run as root outside of a container, or allow it: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        Err(_) => Finding::good(area, name, format!("{all}; looked up, not tried")),
    }
}

pub(crate) fn landlock() -> Finding {
    let newest = [ABI::V6, ABI::V5, ABI::V4, ABI::V3, ABI::V2, ABI::V1].into_iter().find(|abi| ruleset(*abi).is_ok());
    match newest {
        Some(abi) => Finding::good("isolation", "Landlock", format!("at least ABI {}; tried", abi as u32)),
        None => Finding::degraded(
            "isolation",
            "Landlock",
            "not in the kernel, or not switched on",
            "one layer of a machine's confinement is absent; namespaces and seccomp remain",
            "boot with lsm=landlock,… on the kernel's command line",
        ),
    }
}

/// Makes a rule set that needs `abi`, and drops it. Nothing is restricted by that.
fn ruleset(abi: ABI) -> Result<(), RulesetError> {
    let mut rules =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(AccessFs::from_all(abi))?;
    if abi >= ABI::V4 {
        rules = rules.handle_access(AccessNet::from_all(abi))?;
    }
    if abi >= ABI::V6 {
        rules = rules.scope(Scope::from_all(abi))?;
    }
    rules.create().map(drop)
}

/// A directory for a probe, removed with everything in it.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(near: &Path) -> io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(".trialrun-doctor-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = existing(near).join(name);
        std::fs::create_dir(&path)?;
        Ok(Self { path })
    }

    fn dir(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.path.join(name);
        std::fs::create_dir(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The nearest directory at or above `path` that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|p| p.is_dir()).unwrap_or(Path::new("/"))
}

pub(crate) fn overlay(cache_dir: &Path) -> Finding {
    let (area, name) = ("storage", "overlay");
    let mount = |one_by_one| -> io::Result<()> {
        let scratch = Scratch::new(cache_dir)?;
        let (a, b) = (scratch.dir("a")?, scratch.dir("b")?);
        let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        if one_by_one {
            fsconfig_set_string(fs.as_fd(), "lowerdir+", &a)?;
            fsconfig_set_string(fs.as_fd(), "lowerdir+", &b)?;
        } else {
            // Names of probe directories have no colon, the path above may: then this says no, and the way of 6.8 is taken.
            fsconfig_set_string(fs.as_fd(), "lowerdir", format!("{}:{}", a.display(), b.display()))?;
        }
        fsconfig_set_string(fs.as_fd(), "upperdir", scratch.dir("upper")?)?;
        fsconfig_set_string(fs.as_fd(), "workdir", scratch.dir("work")?)?;
        fsconfig_create(fs.as_fd())?;
        // Detached: gone when this descriptor is closed, which happens before the directories go.
        drop(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?);
        Ok(())
    };
    if mount(true).is_ok() {
        return Finding::good(area, name, "new mount API with lowerdir+; tried");
    }
    match mount(false) {
        Ok(()) => Finding::degraded(
            area,
            name,
            "works, without lowerdir+ (kernel 6.8); tried",
            "few layers fit one mount, so forks are copied earlier",
            "a kernel from 6.8 on",
        ),
        Err(error) => Finding::missing(
            area,
            name,
            format!("mounting failed: {error}; tried near {}", existing(cache_dir).display()),
            "no container machines",
            "run as root; put the cache directory (--cache-dir) on ext4, xfs or btrfs, not on an overlay or a network file system",
        ),
    }
}

pub(crate) fn idmap(cache_dir: &Path) -> Finding {
    let (area, name, dir) = ("storage", "id-mapped mounts", existing(cache_dir));
    let probe = |user: &UserNamespace| -> io::Result<()> {
        let tree = open_tree(CWD, dir, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        trialrun_sys::mount::idmap(tree.as_fd(), user.namespace.as_fd())
    };
    let result = UserNamespace::new().and_then(|user| probe(&user));
    match result {
        Ok(()) => Finding::good(area, name, format!("work on the file system of {}; tried", dir.display())),
        Err(error) => Finding::missing(
            area,
            name,
            format!("{error}, tried on the file system of {}", dir.display()),
            "a machine's files would need a copy with other owners, so container machines are refused",
            "run as root; put the cache directory (--cache-dir) on ext4, xfs or btrfs with a kernel from 5.15 on",
        ),
    }
}

/// A user namespace with a machine's id map. A child holds it, because only a process with one thread may make it by
/// itself; the child ends when this is dropped.
struct UserNamespace {
    child: Child,
    namespace: File,
}

impl UserNamespace {
    fn new() -> io::Result<Self> {
        let mut child = Command::new("unshare")
            .args(["--user", "sh", "-c", "echo; read -r end"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let opened = Self::enter(&mut child);
        match opened {
            Ok(namespace) => Ok(Self { child, namespace }),
            Err(error) => {
                end(&mut child);
                Err(error)
            }
        }
    }

    fn enter(child: &mut Child) -> io::Result<File> {
        // Its line says that it is in its namespace.
        let mut ready = [0_u8];
        child.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.read_exact(&mut ready)?;
        let proc = PathBuf::from(format!("/proc/{}", child.id()));
        let lineage = LineageId(0);
        let map = format!("0 {} {}", lineage.uid_base(), lineage.uid_count());
        std::fs::write(proc.join("uid_map"), &map)?;
        std::fs::write(proc.join("gid_map"), &map)?;
        File::open(proc.join("ns/user"))
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Least free space with which nothing is wrong: an image and a few machines.
const ENOUGH: ByteSize = ByteSize::gib(5);

pub(crate) fn free_space(name: &str, dir: &Path) -> Finding {
    let near = existing(dir);
    let Ok(stat) = rustix::fs::statvfs(near) else {
        let fix = "name a readable directory";
        return Finding::missing(
            "space",
            name,
            format!("{} can't be looked at", near.display()),
            "it can't be used",
            fix,
        );
    };
    let free = ByteSize(stat.f_bavail.saturating_mul(stat.f_frsize));
    let found = format!("{free} free at {}", near.display());
    if free >= ENOUGH {
        return Finding::good("space", name, found);
    }
    Finding::degraded(
        "space",
        name,
        found,
        "an image takes 0.7 GiB and machines what they write; starts are refused when space runs out",
        "free space, or use another directory (--data-dir, --cache-dir)",
    )
}

/// Makes a cell and takes it apart.
pub(crate) fn nftables() -> Finding {
    let (area, name) = ("network", "nftables");
    // On a thread of its own: if the way back fails, only that one is in the wrong namespace.
    let cell = std::thread::spawn(trialrun_net::Cell::create).join();
    match cell {
        Ok(Ok(cell)) if cell.listeners.syns.is_some() => {
            Finding::good(area, name, "a cell was made; it holds the first packet of a connection")
        }
        Ok(Ok(_)) => Finding::degraded(
            area,
            name,
            "a cell was made, without nfnetlink_queue",
            "a refused connection is reset after its handshake: a test that only connects can pass",
            "modprobe nfnetlink_queue nft_queue, or a kernel with CONFIG_NETFILTER_NETLINK_QUEUE and CONFIG_NFT_QUEUE",
        ),
        Ok(Err(error)) => Finding::missing(
            area,
            name,
            format!("no cell could be made: {}", trialrun_model::error_chain(&error)),
            "a machine's traffic can't be steered to its gateway, so it has no network",
            "run as root; modprobe nf_tables nft_nat nft_ct nft_reject_inet, or a kernel with CONFIG_NF_TABLES_INET",
        ),
        Err(_) => Finding::missing(area, name, "the probe failed", "unknown", "report this as a bug"),
    }
}
