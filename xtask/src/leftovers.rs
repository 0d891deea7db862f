//! What trialrun may leave on a host, looked for by name over the whole host.
//!
//! The harness in `tests` looks for one data directory's marks after each test. This is the last look over all of them,
//! and it knows nothing of trialrun but its names.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Keepers take down their machines after their client's end; what is left after this long stays.
const SETTLE: Duration = Duration::from_secs(10);

/// What is there now, in words that are equal for equal things.
pub fn look() -> BTreeSet<String> {
    let mut found = present();
    found.retain(|thing| !is_claim_in_use(thing));
    found
}

/// What is there when a run begins, for [`since`]: also lineage numbers in use, which are no leftovers yet.
pub fn present() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    found.extend(processes());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    found.extend(mounts.lines().filter(|l| l.contains("trialrun")).map(|line| format!("mount {line}")));
    found.extend(network_namespaces(&mounts));
    cgroups(Path::new("/sys/fs/cgroup"), 3, &mut found);
    for device in entries("/sys/block") {
        let backing = fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
        // The kernel adds " (deleted)" to a file that is gone.
        if backing.trim().trim_end_matches(" (deleted)").ends_with("/pool.btrfs") {
            found.insert(format!("loop device {} of {}", name(&device), backing.trim()));
        }
    }
    found.extend(entries("/run/trialrun/lineages").filter_map(|claim| claimed(&claim)));
    found.extend(
        entries("/tmp")
            .chain(entries("/dev/shm"))
            .filter(|path| name(path).starts_with("trialrun-"))
            .map(|path| format!("file {}", path.display())),
    );
    found
}

/// What is there now and was not before, after the last machines had time to go.
pub fn since(before: &BTreeSet<String>) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let left: Vec<String> = look().difference(before).cloned().collect();
        if left.is_empty() || begun.elapsed() > SETTLE {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn entries(dir: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn pids() -> impl Iterator<Item = PathBuf> {
    entries("/proc").filter(|path| name(path).bytes().all(|b| b.is_ascii_digit()))
}

fn processes() -> Vec<String> {
    let mut found = Vec::new();
    for process in pids() {
        let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
        // The guest agent is run from a descriptor, which makes its comm a number; its argv has the name.
        let argv = fs::read(process.join("cmdline")).unwrap_or_default();
        let program = String::from_utf8_lossy(argv.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
        let is_ours = |word: &str| word.rsplit('/').next().is_some_and(|last| last.starts_with("trialrun"));
        if is_ours(comm.trim()) || is_ours(&program) {
            found.push(format!("process {} ({} {program})", name(&process), comm.trim()));
        }
    }
    found
}

/// Those that a process is in or that are mounted somewhere. One that only a descriptor holds goes with its process.
fn network_namespaces(mounts: &str) -> BTreeSet<String> {
    let held = pids().filter_map(|process| fs::read_link(process.join("ns/net")).ok());
    let mut found: BTreeSet<String> = held.map(|link| format!("network namespace {}", link.display())).collect();
    let bound = mounts.lines().filter(|line| line.starts_with("nsfs "));
    found.extend(bound.map(|line| format!("network namespace at {}", line.split(' ').nth(1).unwrap_or_default())));
    found
}

fn cgroups(dir: &Path, depth: usize, found: &mut BTreeSet<String>) {
    for below in entries(dir).filter(|path| path.is_dir()) {
        if name(&below).starts_with("trialrun-") {
            found.insert(format!("cgroup {}", below.display()));
        } else if depth > 1 {
            cgroups(&below, depth - 1, found);
        }
    }
}

/// What stands between a lineage number's file and the data directory that uses it.
const CLAIMED_BY: &str = " of the data directory ";

fn claimed(claim: &Path) -> Option<String> {
    let text = fs::read(claim).ok()?;
    let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let data_dir = value.get("data_dir")?.as_str()?;
    Some(format!("lineage {}{CLAIMED_BY}{data_dir}", claim.display()))
}

/// A lineage number is left behind once its data directory is gone.
fn is_claim_in_use(thing: &str) -> bool {
    thing.starts_with("lineage ")
        && thing.split_once(CLAIMED_BY).is_some_and(|(_, data_dir)| Path::new(data_dir).exists())
}
