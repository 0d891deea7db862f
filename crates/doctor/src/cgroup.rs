//! Which cgroup hierarchies the host has, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// How the controllers are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupMode {
    /// One unified hierarchy.
    V2,
    /// Controllers on v1, and a v2 hierarchy beside them.
    Hybrid,
    /// v1 only.
    V1,
    /// No hierarchy is mounted.
    None,
}

/// The mounted hierarchies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroups {
    /// How the controllers are laid out.
    pub mode: CgroupMode,
    /// Where v2 is mounted, and whether read-only.
    pub v2: Option<(PathBuf, bool)>,
    /// For each v1 controller, where it is mounted, and whether read-only.
    pub v1: BTreeMap<String, (PathBuf, bool)>,
}

/// Controllers of v1 that say what is mounted where; other super options are no controllers.
const V1_CONTROLLERS: [&str; 14] = [
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "net_cls",
    "net_prio",
    "perf_event",
    "hugetlb",
    "rdma",
    "misc",
];

impl Cgroups {
    /// Reads the lines of a mountinfo file. Lines that it can't read are skipped.
    #[must_use]
    pub fn parse(mountinfo: &str) -> Self {
        let mut v2 = None;
        let mut v1 = BTreeMap::new();
        for line in mountinfo.lines() {
            let Some((before, after)) = line.split_once(" - ") else { continue };
            let before: Vec<&str> = before.split(' ').collect();
            let after: Vec<&str> = after.split(' ').collect();
            let (Some(point), Some(options), [kind, _, super_options]) =
                (before.get(4), before.get(5), after.as_slice())
            else {
                continue;
            };
            let mounted = (PathBuf::from(unescape(point)), options.split(',').any(|o| o == "ro"));
            match *kind {
                "cgroup2" if v2.is_none() => v2 = Some(mounted),
                "cgroup" => {
                    for controller in super_options.split(',').filter(|o| V1_CONTROLLERS.contains(o)) {
                        v1.entry(controller.to_owned()).or_insert_with(|| mounted.clone());
                    }
                }
                _ => {}
            }
        }
        let mode = match (&v2, v1.is_empty()) {
            (Some(_), true) => CgroupMode::V2,
            (Some(_), false) => CgroupMode::Hybrid,
            (None, false) => CgroupMode::V1,
            (None, true) => CgroupMode::None,
        };
        Self { mode, v2, v1 }
    }
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A systemd host.
    const V2: &str = "\
24 30 0:22 / /proc rw,relatime shared:14 - proc proc rw
35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
    /// A host whose init mounts each v1 controller, and v2 with what is left.
    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids ro,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
garbage
";
    const V1: &str = "\
33 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
34 25 0:29 / /sys/fs/cgroup/with\\040space rw,nosuid shared:11 master:2 - cgroup cgroup rw,memory
";

    #[test]
    fn the_three_layouts_are_told_apart() {
        let v2 = Cgroups::parse(V2);
        assert_eq!((v2.mode, v2.v2), (CgroupMode::V2, Some(("/sys/fs/cgroup".into(), false))));
        let hybrid = Cgroups::parse(HYBRID);
        assert_eq!((hybrid.mode, &hybrid.v2), (CgroupMode::Hybrid, &Some(("/sys/fs/cgroup/unified".into(), false))));
        assert_eq!(
            hybrid.v1.keys().collect::<Vec<_>>(),
            ["cpu", "memory", "pids"],
            "a named hierarchy is no controller"
        );
        assert!(hybrid.v1["pids"].1);
        let v1 = Cgroups::parse(V1);
        assert_eq!((v1.mode, v1.v1.len()), (CgroupMode::V1, 3));
        assert_eq!(v1.v1["memory"].0, PathBuf::from("/sys/fs/cgroup/with space"));
        assert_eq!(v1.v1["cpu"], v1.v1["cpuacct"]);
        assert_eq!(Cgroups::parse("").mode, CgroupMode::None);
    }
}
