//! About the machine, for those who ask.

use crate::{agent::Machine, user::read_bounded};
use std::path::Path;
use trialrun_guest_proto::MachineInfo;

/// What the kernel and the image say.
pub fn collect(machine: &Machine) -> MachineInfo {
    let uname = rustix::system::uname();
    let os_release = [Path::new("/etc/os-release"), Path::new("/usr/lib/os-release")]
        .map(|path| read_bounded(path, 64 * 1024))
        .into_iter()
        .find(|bytes| !bytes.is_empty())
        .unwrap_or_default();
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    MachineInfo {
        kernel: uname.release().to_string_lossy().into_owned(),
        os: pretty_name(&String::from_utf8_lossy(&os_release)),
        cpus,
        agent_private_bytes: private_bytes(),
        hostname: uname.nodename().to_string_lossy().into_owned(),
        user: machine.boot.user.clone(),
    }
}

fn pretty_name(os_release: &str) -> String {
    let value = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or_default();
    value.trim().trim_matches(|c| c == '"' || c == '\'').chars().take(200).collect()
}

/// `Anonymous` and `Swap` of smaps_rollup (proc(5)). Not the `Private_` lines: pages of the program itself, which all
/// agents of a host share, are counted there while only one runs.
fn private_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = |line: &str| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok();
    text.lines().filter(|line| line.starts_with("Anonymous:") || line.starts_with("Swap:")).filter_map(kib).sum::<u64>()
        * 1024
}
