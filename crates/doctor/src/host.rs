//! What files of the host say.

use crate::{CgroupMode, Cgroups, Finding, FindingState};
use std::path::{Path, PathBuf};
use trialrun_model::ByteSize;

/// The host, or a directory that a test made look like one.
pub(crate) struct Host {
    root: PathBuf,
}

/// Programs that something of ours runs: name, area, package, what goes without it, whether most users need it.
const PROGRAMS: [(&str, &str, &str, &str, bool); 13] = [
    ("mmdebstrap", "images", "mmdebstrap", "the stock image \"python\" can't be built; --image host works", true),
    (
        "git",
        "images",
        "git",
        "projects are copied by their files alone, without what git ignores and without a base to compare with",
        true,
    ),
    ("newuidmap", "images", "uidmap", "mmdebstrap can't make its user namespace, so no image can be built", true),
    (
        "mkfs.btrfs",
        "storage",
        "btrfs-progs",
        "no btrfs image for writable layers: forks stack or copy layers, and disk limits are looser",
        true,
    ),
    ("nft", "network", "nftables", "rules of a cell can't be looked at; trialrun itself does not need it", false),
    ("qemu-system-x86_64", "microvm", "qemu-system-x86", "no microVM machines; containers work", false),
    ("criu", "isolation", "criu", "no memory forks of containers; microVM snapshots don't need it", false),
    ("python3", "packages", "python3", "with --image host, machines have no Python", false),
    ("pip", "packages", "python3-pip", "with --image host, machines have no pip", false),
    ("npm", "packages", "npm", "with --image host, machines have no npm", false),
    ("cargo", "packages", "cargo", "with --image host, machines have no cargo", false),
    ("apt-get", "packages", "apt", "this is no Debian or Ubuntu: the stock image can't be built here", true),
    ("setpriv", "images", "util-linux", "no image can be built", true),
];

impl Host {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok().map(|t| t.trim_end().to_owned())
    }

    fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Major and minor; (0, 0) when it can't be told.
    pub fn version(&self) -> (u32, u32) {
        let text = self.read("proc/sys/kernel/osrelease").unwrap_or_default();
        let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    pub fn kernel(&self) -> Finding {
        let release = self.read("proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
        // 5.14: cgroup.kill; 5.12: id-mapped mounts; 5.15 is the oldest that is tested (Ubuntu 22.04).
        let missing: Vec<&str> = [
            ((5, 15), "id-mapped lowers and cgroup.kill (5.15)"),
            ((6, 7), "btrfs simple quotas (6.7)"),
            ((6, 8), "overlay lowers one by one (6.8)"),
        ]
        .into_iter()
        .filter_map(|(least, what)| (self.version() < least).then_some(what))
        .collect();
        let upgrade = "a newer kernel; on Debian 12: apt-get install -t bookworm-backports linux-image-amd64";
        match self.version() {
            v if v < (5, 15) => {
                Finding::missing("host", "kernel", release, "container machines need 5.15 or newer", upgrade)
            }
            _ if missing.is_empty() => Finding::good("host", "kernel", release),
            _ => {
                let lacks = format!("without {}: the slower or looser way is taken", missing.join(", "));
                Finding::degraded("host", "kernel", release, &lacks, upgrade)
            }
        }
    }

    /// Kinds of namespaces that the kernel has.
    pub fn namespaces(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup", "time"]
            .into_iter()
            .partition(|kind| self.root.join("proc/self/ns").join(kind).symlink_metadata().is_ok())
    }

    /// How many user namespaces may exist. 0 forbids them.
    pub fn max_user_namespaces(&self) -> Option<u64> {
        self.read("proc/sys/user/max_user_namespaces")?.parse().ok()
    }

    pub fn seccomp(&self) -> Finding {
        let actions = self.read("proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
        let has = |action| actions.split(' ').any(|a| a == action);
        if has("errno") && has("kill_process") {
            return Finding::good("isolation", "seccomp", format!("filters with {actions}; looked up, not tried"));
        }
        let found = if actions.is_empty() { "the kernel has no seccomp filters" } else { &actions };
        Finding::missing(
            "isolation",
            "seccomp",
            found,
            "no machine is started without its system call filter",
            "a kernel with CONFIG_SECCOMP_FILTER",
        )
    }

    pub fn cgroups(&self) -> Vec<Finding> {
        let cgroups = Cgroups::parse(&self.read("proc/self/mountinfo").unwrap_or_default());
        vec![self.cgroup_layout(&cgroups), self.cgroup_limits(&cgroups)]
    }

    fn cgroup_layout(&self, cgroups: &Cgroups) -> Finding {
        let name = "cgroup layout";
        let writable = |mount: &Option<(PathBuf, bool)>| {
            mount.as_ref().is_some_and(|(path, ro)| {
                let path = self.root.join(path.strip_prefix("/").unwrap_or(path));
                !ro && rustix::fs::access(&path, rustix::fs::Access::WRITE_OK).is_ok()
            })
        };
        let v2 = cgroups.v2.as_ref().map_or(String::new(), |(path, _)| format!("v2 at {}", path.display()));
        let remount = "mount the hierarchy read-write, or run trialrun where it is (in a container: --privileged, --cgroupns=host)";
        match cgroups.mode {
            CgroupMode::None => Finding::missing(
                "limits",
                name,
                "no cgroup hierarchy is mounted",
                "no limits, and no sure end of a machine's processes",
                "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
            ),
            CgroupMode::V1 => Finding::degraded(
                "limits",
                name,
                format!("v1 only: {}", keys(cgroups)),
                "machines are ended and measured by a cgroup2 mount of our own, which no other tool sees",
                "nothing need be done; to see their groups: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified",
            ),
            CgroupMode::V2 | CgroupMode::Hybrid if !writable(&cgroups.v2) => Finding::missing(
                "limits",
                name,
                format!("{v2}, not writable"),
                "machines can't have cgroups of their own",
                remount,
            ),
            CgroupMode::V2 => Finding::good("limits", name, format!("{v2}, writable")),
            CgroupMode::Hybrid => Finding::good(
                "limits",
                name,
                format!("hybrid: {v2}, writable, ends and measures machines; limits on v1: {}", keys(cgroups)),
            ),
        }
    }

    fn cgroup_limits(&self, cgroups: &Cgroups) -> Finding {
        let name = "cgroup limits";
        let on_v2 = cgroups.v2.as_ref().map_or(String::new(), |(path, _)| {
            let path = path.strip_prefix("/").unwrap_or(path).join("cgroup.controllers");
            path.to_str().and_then(|p| self.read(p)).unwrap_or_default()
        });
        let mut places = Vec::new();
        let mut absent = Vec::new();
        for controller in ["memory", "pids", "cpu"] {
            if on_v2.split(' ').any(|c| c == controller) {
                places.push(format!("{controller} on v2"));
            } else if cgroups.v1.get(controller).is_some_and(|(_, ro)| !ro) {
                places.push(format!("{controller} on v1"));
            } else {
                absent.push(controller);
            }
        }
        if absent.is_empty() {
            return Finding::good("limits", name, places.join(", "));
        }
        let consequence = format!("no limit of {} for a machine, which is told with each", absent.join(", "));
        let fix = "boot with cgroup_enable=memory; under systemd, give trialrun's unit Delegate=yes";
        Finding::missing("limits", name, format!("not available: {}", absent.join(", ")), &consequence, fix)
    }

    pub fn cpus(&self) -> Finding {
        let count =
            self.read("proc/cpuinfo").unwrap_or_default().lines().filter(|l| l.starts_with("processor")).count();
        if count >= 2 {
            return Finding::good("host", "processors", count.to_string());
        }
        Finding::degraded(
            "host",
            "processors",
            count.to_string(),
            "machines and their keepers share one processor",
            "a host with more processors",
        )
    }

    pub fn memory(&self) -> Finding {
        let info = self.read("proc/meminfo").unwrap_or_default();
        let kib =
            info.lines().find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let Some(available) = kib.and_then(|k| k.checked_mul(1024)).map(ByteSize) else {
            return Finding::degraded(
                "space",
                "memory",
                "unknown",
                "free memory is not checked before a start",
                "mount /proc",
            );
        };
        let found = format!("{available} available");
        if available >= ByteSize::gib(1) {
            Finding::good("space", "memory", found)
        } else {
            Finding::degraded(
                "space",
                "memory",
                found,
                "few machines fit, and the kernel may kill processes",
                "free memory, or lower --memory",
            )
        }
    }

    fn filesystem(&self, name: &str) -> bool {
        self.read("proc/filesystems").unwrap_or_default().lines().any(|l| l.split('\t').next_back() == Some(name))
    }

    pub fn btrfs(&self) -> Finding {
        let consequence = "forks stack or copy layers instead of a snapshot in milliseconds";
        if !self.filesystem("btrfs") {
            return Finding::degraded(
                "storage",
                "btrfs",
                "not in /proc/filesystems (a module may not be loaded yet)",
                consequence,
                "modprobe btrfs, or a kernel that has it",
            );
        }
        if self.version() < (6, 7) {
            let fix = "a kernel from 6.7 on";
            return Finding::degraded(
                "storage",
                "btrfs",
                "in the kernel, without simple quotas",
                "disk limits use the slower full quotas",
                fix,
            );
        }
        Finding::good("storage", "btrfs", "in the kernel, simple quotas by its version; looked up, not tried")
    }

    pub fn loop_devices(&self) -> Finding {
        if self.exists("dev/loop-control") {
            return Finding::good("storage", "loop devices", "/dev/loop-control is there");
        }
        Finding::degraded(
            "storage",
            "loop devices",
            "no /dev/loop-control",
            "no btrfs image: needs data on btrfs, or layers are stacked and copied",
            "modprobe loop",
        )
    }

    pub fn erofs(&self) -> Finding {
        let found = match (self.filesystem("erofs"), self.version() >= (6, 12)) {
            (true, true) => "in the kernel, mounts files directly",
            (true, false) => "in the kernel, through loop devices",
            (false, _) => "not in the kernel; nothing uses it today",
        };
        Finding::good("storage", "erofs", found)
    }

    /// Whether a guest would run at native speed. A device node alone says nothing: some hypervisors give one that emulates.
    pub fn kvm(&self) -> Finding {
        let (area, name) = ("microvm", "KVM");
        let slow = "microVMs run emulated (QEMU TCG): restores stay fast, but code runs about 10 times slower; containers are the default here";
        let fix = "a bare-metal host, or nested virtualization from the provider";
        if !self.exists("dev/kvm") {
            return Finding::degraded(area, name, "no /dev/kvm", slow, fix);
        }
        let cpuinfo = self.read("proc/cpuinfo").unwrap_or_default();
        let flags: Vec<&str> =
            cpuinfo.lines().find(|l| l.starts_with("flags")).unwrap_or_default().split(' ').collect();
        let hardware = flags.contains(&"vmx") || flags.contains(&"svm");
        let nested = flags.contains(&"hypervisor");
        if self.exists("sys/module/kvm_pvm") && !hardware {
            return Finding::degraded(area, name, "/dev/kvm is there, by kvm_pvm: it emulates in software", slow, fix);
        }
        if !hardware {
            return Finding::degraded(
                area,
                name,
                "/dev/kvm is there, but the processor shows neither vmx nor svm",
                slow,
                fix,
            );
        }
        let how = if nested { "nested in another hypervisor" } else { "on this hardware" };
        Finding::good(
            area,
            name,
            format!("/dev/kvm {how}; looked up, not probed: the first microVM measures its real speed"),
        )
    }

    pub fn programs(&self) -> Vec<Finding> {
        PROGRAMS.iter().map(|p| self.program(p)).collect()
    }

    fn program(&self, &(name, area, package, consequence, needed): &(&str, &str, &str, &str, bool)) -> Finding {
        // With --image host, machines see the host's /usr and nothing of /root, /home or /opt.
        let inside = |p: &PathBuf| {
            area != "packages" || p.starts_with("/usr") || p.starts_with("/bin") || p.starts_with("/sbin")
        };
        let found = match self.find(name, inside) {
            Some(path) => return Finding::good(area, name, path.display().to_string()),
            None => match self.find(name, |_| true) {
                Some(path) => format!("only {}, which machines don't see", path.display()),
                None => "not found".to_owned(),
            },
        };
        let state = if needed { FindingState::Missing } else { FindingState::Degraded };
        Finding::new(area, name, state, found, consequence, &format!("apt-get install {package}"))
    }

    /// In PATH and the usual places: a user's PATH often lacks sbin.
    fn find(&self, program: &str, wanted: impl Fn(&PathBuf) -> bool) -> Option<PathBuf> {
        let path = std::env::var("PATH").unwrap_or_default();
        let usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
        path.split(':')
            .chain(usual)
            .filter(|d| d.starts_with('/'))
            .map(|d| Path::new(d).join(program))
            .find(|p| wanted(p) && self.root.join(p.strip_prefix("/").unwrap_or(p)).is_file())
    }
}

fn keys(cgroups: &Cgroups) -> String {
    cgroups.v1.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let host = Host::new(dir.path());
        (dir, host)
    }

    #[test]
    fn the_kernel_version_decides_what_is_missing() {
        for (release, state, word) in [
            ("6.18.44-fc", FindingState::Good, ""),
            ("6.1.0-18-amd64", FindingState::Degraded, "6.7"),
            ("5.10.0", FindingState::Missing, "5.15"),
        ] {
            let (_dir, host) = host(&[("proc/sys/kernel/osrelease", release)]);
            let finding = host.kernel();
            assert_eq!(finding.state, state, "{release}");
            assert!(finding.consequence.contains(word), "{finding:?}");
        }
    }

    #[test]
    fn an_emulating_kvm_is_told_from_a_real_one() {
        type Case<'a> = (&'a [(&'a str, &'a str)], FindingState, &'a str);
        let cases: [Case<'_>; 4] = [
            (&[], FindingState::Degraded, "no /dev/kvm"),
            (
                &[("dev/kvm", ""), ("proc/cpuinfo", "flags : fpu hypervisor"), ("sys/module/kvm_pvm/x", "")],
                FindingState::Degraded,
                "kvm_pvm",
            ),
            (&[("dev/kvm", ""), ("proc/cpuinfo", "flags\t\t: fpu hypervisor")], FindingState::Degraded, "neither"),
            (&[("dev/kvm", ""), ("proc/cpuinfo", "flags\t\t: fpu svm de")], FindingState::Good, "not probed"),
        ];
        for (files, state, word) in cases {
            let (_dir, host) = host(files);
            let finding = host.kvm();
            assert_eq!(finding.state, state);
            assert!(finding.found.contains(word), "{finding:?}");
        }
    }

    #[test]
    fn limits_are_found_on_either_hierarchy() {
        let mounts = "31 23 0:28 / /c/memory rw - cgroup cgroup rw,memory\n32 23 0:29 / /c/pids rw - cgroup cgroup rw,pids\n\
                      33 23 0:30 / /c/unified rw - cgroup2 cgroup2 rw\n";
        let (_dir, hybrid) = host(&[("proc/self/mountinfo", mounts), ("c/unified/cgroup.controllers", "cpu io\n")]);
        let findings = hybrid.cgroups();
        assert_eq!(findings[1].found, "memory on v1, pids on v1, cpu on v2");
        assert!(findings[0].found.starts_with("hybrid: v2 at /c/unified"), "{:?}", findings[0]);
        let (_dir, bare) =
            host(&[("proc/self/mountinfo", "33 23 0:30 / /c rw - cgroup2 c rw\n"), ("c/cgroup.controllers", "pids")]);
        assert_eq!(bare.cgroups()[1].found, "not available: memory, cpu");
        assert_eq!(bare.cgroups()[0].state, FindingState::Good);
        let (_dir, ro) = host(&[("proc/self/mountinfo", "33 23 0:30 / /c ro - cgroup2 c rw\n"), ("c/x", "")]);
        assert_eq!(ro.cgroups()[0].state, FindingState::Missing);
        let (_dir, none) = host(&[]);
        assert!(none.cgroups().iter().all(|f| f.state == FindingState::Missing));
    }

    #[test]
    fn small_files_are_read() {
        let (_dir, host) = host(&[
            ("proc/meminfo", "MemTotal: 2 kB\nMemAvailable:    2097152 kB\n"),
            ("proc/filesystems", "nodev\toverlay\n\tbtrfs\n"),
            ("proc/sys/kernel/osrelease", "6.8.0"),
            ("proc/sys/kernel/seccomp/actions_avail", "kill_process errno allow"),
            ("usr/sbin/mkfs.btrfs", ""),
        ]);
        assert_eq!(host.memory().found, "2 GiB available");
        assert_eq!(host.btrfs().state, FindingState::Good);
        assert_eq!(host.seccomp().state, FindingState::Good);
        let programs = host.programs();
        let find = |name: &str| programs.iter().find(|f| f.name == name).unwrap();
        assert_eq!(
            (find("mkfs.btrfs").state, find("mkfs.btrfs").found.as_str()),
            (FindingState::Good, "/usr/sbin/mkfs.btrfs")
        );
        assert_eq!((find("criu").state, find("mmdebstrap").state), (FindingState::Degraded, FindingState::Missing));
        assert_eq!(find("newuidmap").fix, "apt-get install uidmap");
    }
}
