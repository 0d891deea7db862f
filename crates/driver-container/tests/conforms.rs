//! The container driver passes the suite, and leaves nothing.
//!
//! Not run by the usual harness: a launch clones the process, which must have one thread.

use prost::Message;
use std::{fs::File, os::unix::fs::OpenOptionsExt, process::ExitCode};
use trialrun_driver::{
    Bind, DiskSource, MachineSpec, Rootfs,
    conformance::{self, Outcome},
};
use trialrun_driver_container::{ContainerDriver, cgroup::Hierarchy};
use trialrun_guest_proto::{Boot, EnvEntry};
use trialrun_model::{ByteSize, Limits, LineageId, SandboxId};

const NAME: &str = "the_container_driver_passes_the_conformance_suite";

fn main() -> ExitCode {
    // What a test runner asks before it runs anything.
    let args: Vec<String> = std::env::args().collect();
    if args.iter().any(|a| a == "--list") {
        if !args.iter().any(|a| a == "--ignored") {
            println!("{NAME}: test");
        }
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() {
        println!("SKIP {NAME}: it needs root");
        return ExitCode::SUCCESS;
    }
    let failures = run();
    for failure in &failures {
        eprintln!("{failure}");
    }
    let (passed, failed) = (usize::from(failures.is_empty()), usize::from(!failures.is_empty()));
    println!("test result: {}. {passed} passed; {failed} failed; 0 ignored", if failed == 0 { "ok" } else { "FAILED" });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run() -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let program = dir.path().join("guest");
    let mut file = File::options().create_new(true).write(true).mode(0o555).open(&program).expect("make the program");
    std::io::Write::write_all(&mut file, trialrun_embedded::GUEST).expect("write the program");
    drop(file);
    let cache = dir.path().join("cache");
    std::fs::create_dir(&cache).expect("make the cache");
    std::os::unix::fs::chown(&cache, Some(0), Some(0)).expect("own the cache");
    std::fs::set_permissions(&cache, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("close the cache");
    let host = trialrun_image::host_image(&cache, &[dir.path()]).expect("the host image");
    let rootfs = Rootfs {
        lowers: vec![host.skeleton],
        binds: host.binds.into_iter().map(|b| Bind { source: b.source, target: b.target }).collect(),
        masks: host.masks,
    };
    let data = dir.path().join("data");
    std::fs::create_dir(&data).expect("make the data directory");
    let tag = format!("conf{:04x}", std::process::id() & 0xffff);
    let number = std::cell::Cell::new(0);
    let spec = || {
        number.set(number.get() + 1);
        MachineSpec {
            id: SandboxId::from_entropy([number.get(), 1, 2, 3, 4, 5, 6, 7]),
            lineage: LineageId(LineageId::LIMIT - 1),
            limits: Limits { disk: ByteSize::mib(64), memory: ByteSize::mib(256), ..Limits::default() },
            hostname: "conformance".to_owned(),
            rootfs: rootfs.clone(),
            disk: DiskSource::Fresh,
            data_dir: data.clone(),
            tag: tag.clone(),
            guest_program: File::open(&program).expect("open the program").into(),
            boot: Boot {
                user: "runtime".to_owned(),
                cwd: b"/workspace".to_vec(),
                env: vec![EnvEntry { name: b"PATH".to_vec(), value: b"/usr/bin:/bin".to_vec() }],
                ..Boot::default()
            }
            .encode_to_vec(),
            netns: None,
        }
    };
    let mut failures = Vec::new();
    match conformance::run(&ContainerDriver::default(), &spec) {
        Err(e) => failures.push(e),
        Ok(results) => {
            for (name, outcome) in results {
                println!("{name}: {outcome:?}");
                if outcome != Outcome::Passed {
                    failures.push(format!("{name}: {outcome:?}"));
                }
            }
        }
    }
    let hierarchy = Hierarchy::detect().expect("cgroups");
    failures.extend(
        hierarchy.group_dirs(&tag).into_iter().filter(|d| d.exists()).map(|d| format!("left behind: {}", d.display())),
    );
    let pool = trialrun_driver_container::layer::Pool::open(&data).expect("the pool");
    failures.extend(pool.names().expect("layers").into_iter().map(|n| format!("left behind: the layer {n}")));
    failures
}
