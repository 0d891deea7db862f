//! Giving up rights.

use rustix::{
    fs::{CWD, Mode, OFlags},
    mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount},
    process::{Resource, Rlimit, setrlimit},
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};
use trialrun_model::{LineageId, UIDS_PER_LINEAGE};
use trialrun_sys::{
    mount,
    ns::{self, Namespaces},
};

/// All that is left to the process in its user namespace: what giving files their owners and modes takes. By number,
/// from linux/capability.h.
const CAPABILITIES: [u32; 5] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    3,  // FOWNER
    4,  // FSETID
    31, // SETFCAP
];
/// Most address space: a decompressor's window and a tar header of absurd length end here.
const ADDRESS_SPACE: u64 = 1 << 30;
/// Most open files; one per level of a folder that is removed.
const OPEN_FILES: u64 = 1024;

/// A process without rights, in its tree.
pub struct Confined {
    /// The tree's top, which is also the process's root directory.
    pub root: OwnedFd,
    /// What holds it.
    pub barriers: Vec<String>,
}

impl Confined {
    /// Confines the calling process, which must have one thread, to `tree`. Files grow to `max_file` bytes.
    ///
    /// # Errors
    /// The step that failed; the process must end then.
    pub fn enter(tree: &Path, max_file: u64) -> io::Result<Self> {
        let step = |name: &'static str| move |e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
        // Above every lineage's range, so nothing on the host belongs to these ids.
        let base = LineageId::END_OF_UIDS;
        let userns = ns::user_namespace(base, UIDS_PER_LINEAGE).map_err(step("make a user namespace"))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mapped = open_tree(CWD, tree, flags).map_err(|e| step("open the tree")(e.into()))?;
        mount::idmap(mapped.as_fd(), userns.as_fd()).map_err(step("map the tree's owners"))?;
        let away = Namespaces::MOUNT.with(Namespaces::NET).with(Namespaces::IPC).with(Namespaces::UTS);
        ns::unshare(away).map_err(step("leave the host's namespaces"))?;
        mount::make_all_private().map_err(step("make mounts private"))?;
        move_mount(mapped.as_fd(), "", CWD, tree, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|e| step("attach the tree")(e.into()))?;
        let pivot = || -> io::Result<()> {
            rustix::process::chdir(tree)?;
            rustix::process::pivot_root(".", ".")?;
            unmount(".", UnmountFlags::DETACH)?;
            Ok(rustix::process::chdir("/")?)
        };
        pivot().map_err(step("make the tree the root"))?;
        ns::enter(userns.as_fd(), Namespaces::USER).map_err(step("enter the user namespace"))?;
        ns::become_root().map_err(step("take its ids"))?;
        ns::limit_bounding_set(&CAPABILITIES).map_err(step("limit capabilities"))?;
        ns::keep_capabilities(&CAPABILITIES).map_err(step("drop capabilities"))?;
        for (resource, most) in [
            (Resource::As, ADDRESS_SPACE),
            (Resource::Fsize, max_file),
            (Resource::Nofile, OPEN_FILES),
            (Resource::Core, 0),
            (Resource::Nproc, 0),
        ] {
            setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
                .map_err(|e| step("limit resources")(e.into()))?;
        }
        rustix::process::umask(Mode::empty());
        ns::die_with_parent().map_err(step("be bound to the parent"))?;
        let root = rustix::fs::open("/", OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| step("open the tree")(e.into()))?;
        let mut barriers: Vec<String> =
            ["user namespace", "own root", "no network", "five capabilities", "resource limits"]
                .map(str::to_owned)
                .into();
        if landlocked(root.as_fd()).map_err(step("enforce the Landlock rules"))? {
            barriers.push("landlock".to_owned());
        }
        Ok(Self { root, barriers })
    }
}

/// Nothing but making, changing and removing files below `root`; no execution, no device, no signal outwards.
fn landlocked(root: std::os::fd::BorrowedFd<'_>) -> io::Result<bool> {
    use landlock::{
        ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
        RulesetCreatedAttr, RulesetStatus, Scope,
    };
    let abi = ABI::V6;
    let allowed = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::Refer
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSym
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir;
    let restrict = || -> Result<bool, Box<dyn std::error::Error>> {
        let status = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rule(PathBeneath::new(root, allowed))?
            .restrict_self()?;
        Ok(status.ruleset != RulesetStatus::NotEnforced)
    };
    restrict().map_err(|e| io::Error::other(e.to_string()))
}
