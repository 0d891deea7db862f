//! Everything that a machine may leave on a host, looked for by the marks of one data directory.

use std::{
    collections::BTreeSet,
    fmt, fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use trialrun_driver_container::{cgroup::Hierarchy, layer::Pool};
use trialrun_store::Store;

/// What was found.
#[derive(Debug, Default)]
pub struct Leftovers {
    found: Vec<String>,
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.found.join("; "))
    }
}

fn entries(dir: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn contains(hay: &[u8], needle: &[u8]) -> bool {
    hay.windows(needle.len()).any(|window| window == needle)
}

/// Pids of all processes but this one.
fn processes() -> impl Iterator<Item = (u32, PathBuf)> {
    let own = std::process::id();
    entries("/proc").filter_map(move |path| {
        let pid: u32 = path.file_name()?.to_str()?.parse().ok()?;
        (pid != own).then_some((pid, path))
    })
}

/// The tag of a data directory's cgroups; `None` before its first use.
pub fn tag(data: &Path) -> Option<String> {
    if !data.join("machines").exists() {
        return None;
    }
    Store::open(data).ok()?.instance_tag().ok()
}

/// Directories of this data directory's cgroups that exist.
pub fn cgroups(data: &Path) -> Vec<PathBuf> {
    let (Some(tag), Ok(hierarchy)) = (tag(data), Hierarchy::detect()) else { return Vec::new() };
    hierarchy.group_dirs(&tag).into_iter().filter(|dir| dir.exists()).collect()
}

/// Pids of everything in this data directory's cgroups.
pub fn pids_inside(data: &Path) -> Vec<u32> {
    let mut pids = BTreeSet::new();
    let mut dirs = cgroups(data);
    while let Some(dir) = dirs.pop() {
        let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        dirs.extend(entries(&dir).filter(|path| path.is_dir()));
    }
    pids.into_iter().collect()
}

/// Pids of the keepers of a data directory: they hold the locks of its machines.
pub fn keepers(data: &Path) -> Vec<u32> {
    let machines = data.join("machines");
    let holds = |path: &Path| {
        entries(path.join("fd")).filter_map(|fd| fs::read_link(fd).ok()).any(|target| target.starts_with(&machines))
    };
    let keeper = |path: &Path| fs::read(path.join("cmdline")).is_ok_and(|c| contains(&c, b"__keeper"));
    processes().filter(|(_, path)| keeper(path) && holds(path)).map(|(pid, _)| pid).collect()
}

/// Pids of all processes that name a data directory or hold something of it open: spare keepers, and those that have not
/// yet received what they are for, included. A program of ours in the middle of its exec(2) has no arguments yet that
/// could be looked at, and counts too.
pub fn at_work(data: &Path) -> Vec<u32> {
    let starting = |path: &Path| {
        fs::read(path.join("cmdline")).is_ok_and(|c| c.is_empty())
            && fs::read_link(path.join("exe")).is_ok_and(|exe| exe == crate::binary())
    };
    processes().filter(|(_, path)| mentions(path, data) || starting(path)).map(|(pid, _)| pid).collect()
}

/// Namespaces in use by what belongs to a data directory, as `net:[4026531840]`: of processes in its cgroups, and of those
/// that name it or hold something of it open, which a keeper and everything cloned from it do.
pub fn namespaces(data: &Path) -> BTreeSet<String> {
    let own_tag = tag(data).map(|t| format!("/trialrun-{t}"));
    let ours = |path: &Path| {
        let groups = fs::read_to_string(path.join("cgroup")).unwrap_or_default();
        own_tag.as_ref().is_some_and(|t| groups.contains(t.as_str())) || mentions(path, data)
    };
    let mut all = BTreeSet::new();
    for (_, path) in processes().filter(|(_, path)| ours(path)) {
        for link in entries(path.join("ns")).chain(entries(path.join("fd"))).filter_map(|l| fs::read_link(l).ok()) {
            let text = link.to_string_lossy().into_owned();
            if text.contains(":[") && !["socket:", "pipe:", "anon_inode:"].iter().any(|p| text.starts_with(p)) {
                all.insert(text);
            }
        }
    }
    all
}

/// Whether a process names a data directory, or holds something open below it.
fn mentions(process: &Path, data: &Path) -> bool {
    let name = data.as_os_str().as_bytes();
    let text = ["cmdline", "environ"].iter().any(|file| fs::read(process.join(file)).is_ok_and(|c| contains(&c, name)));
    text || entries(process.join("fd")).filter_map(|fd| fs::read_link(fd).ok()).any(|target| target.starts_with(data))
}

impl Leftovers {
    /// Looks for everything.
    pub fn of(data: &Path) -> Self {
        let mut found = Vec::new();
        for (pid, path) in processes().filter(|(_, path)| mentions(path, data)) {
            let words = fs::read(path.join("cmdline")).unwrap_or_default();
            found.push(format!("process {pid} ({})", String::from_utf8_lossy(&words).replace('\0', " ")));
        }
        found.extend(cgroups(data).iter().map(|dir| format!("cgroup {}", dir.display())));
        found.extend(entries(data.join("machines")).map(|dir| format!("directory {}", dir.display())));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let name = data.display().to_string();
        found.extend(mounts.lines().filter(|line| line.contains(&name)).map(|line| format!("mount {line}")));
        // Opened before the loop devices are looked at: looking attaches one.
        if found.is_empty() && data.join("pool.btrfs").exists() {
            match Pool::open(data) {
                Ok(pool) => {
                    found.extend(pool.names().unwrap_or_default().into_iter().map(|name| format!("layer {name}")))
                }
                Err(e) => found.push(format!("a pool that can't be opened: {e}: {}", e.cause)),
            }
        }
        for device in entries("/sys/block") {
            let backing = fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
            if backing.starts_with(&name) {
                found.push(format!("loop device {} of {}", device.display(), backing.trim()));
            }
        }
        for claim in entries("/run/trialrun/lineages") {
            if fs::read(&claim).is_ok_and(|text| contains(&text, name.as_bytes())) {
                found.push(format!("lineage {}", claim.display()));
            }
        }
        Self { found }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }
}
