//! Examines the host: what is there, what is not, what that costs, and how to get it.
//!
//! Files are read below a root that tests replace. Probes that need the kernel are made on detached mounts and file
//! descriptors, which vanish when they are closed: nothing on the host changes. What was only looked up and not tried says
//! so in its finding.

mod cgroup;
mod host;
mod probe;
mod render;

pub use cgroup::{CgroupMode, Cgroups};
pub use render::render;

use host::Host;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How a thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingState {
    /// As it should be.
    Good,
    /// There, but weaker or slower than it could be; or optional and absent.
    Degraded,
    /// Not there, and something depends on it.
    Missing,
}

/// One thing about the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What it is for: `host`, `isolation`, `limits`, `storage`, `network`, `microvm`, `images`, `space`, `packages`.
    pub area: String,
    /// Its name.
    pub name: String,
    /// How it stands.
    pub state: FindingState,
    /// What was found, and whether it was tried or only looked up.
    pub found: String,
    /// What that means for a user. Empty when it is good.
    pub consequence: String,
    /// How to get it. Empty when there is nothing to do.
    pub fix: String,
}

impl Finding {
    fn good(area: &str, name: &str, found: impl Into<String>) -> Self {
        Self::new(area, name, FindingState::Good, found, "", "")
    }

    fn degraded(area: &str, name: &str, found: impl Into<String>, consequence: &str, fix: &str) -> Self {
        Self::new(area, name, FindingState::Degraded, found, consequence, fix)
    }

    fn missing(area: &str, name: &str, found: impl Into<String>, consequence: &str, fix: &str) -> Self {
        Self::new(area, name, FindingState::Missing, found, consequence, fix)
    }

    fn new(
        area: &str,
        name: &str,
        state: FindingState,
        found: impl Into<String>,
        consequence: &str,
        fix: &str,
    ) -> Self {
        Self {
            area: area.into(),
            name: name.into(),
            state,
            found: found.into(),
            consequence: consequence.into(),
            fix: fix.into(),
        }
    }
}

/// Examines this host for a trialrun with these directories. Neither needs to exist: then the nearest one above counts.
#[must_use]
pub fn examine(data_dir: &Path, cache_dir: &Path) -> Vec<Finding> {
    let host = Host::new(Path::new("/"));
    let mut findings = vec![root(), host.kernel()];
    findings.push(probe::namespaces(&host));
    findings.push(host.seccomp());
    findings.push(probe::landlock());
    findings.extend(host.cgroups());
    findings.push(host.cpus());
    findings.push(host.memory());
    findings.push(probe::overlay(cache_dir));
    findings.push(probe::idmap(cache_dir));
    findings.push(host.btrfs());
    findings.push(host.loop_devices());
    findings.push(host.erofs());
    findings.push(probe::free_space("data directory", data_dir));
    findings.push(probe::free_space("cache directory", cache_dir));
    findings.push(probe::nftables());
    findings.push(host.kvm());
    findings.extend(host.programs());
    findings
}

fn root() -> Finding {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return Finding::good("host", "root", "running as root");
    }
    Finding::missing(
        "host",
        "root",
        format!("running as uid {}", uid.as_raw()),
        "machines can't be made: namespaces, id-mapped mounts and cgroups need root; some findings below are of this user only",
        "sudo trialrun …",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_of_this_host_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let findings = examine(&dir.path().join("data"), &dir.path().join("cache"));
        let start = std::time::Instant::now();
        let again = examine(dir.path(), dir.path());
        println!("{}\nexamined in {:?}", render(&again, true), start.elapsed());
        let mut names: Vec<_> = findings.iter().map(|f| &f.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), findings.len(), "names are unique");
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.consequence.is_empty(), finding.state == FindingState::Good, "{finding:?}");
            assert!(finding.state == FindingState::Good || !finding.fix.is_empty(), "{finding:?}");
        }
        let json = serde_json::to_string(&findings).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Finding>>(&json).unwrap(), findings);
        assert!(json.contains(r#""state":"good""#));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
