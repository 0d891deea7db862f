//! The container driver passes the suite, and leaves nothing.
//!
//! Not run by the usual harness: a launch clones the process, which must have one thread.

use prost::Message;
use std::{fs::File, os::unix::fs::OpenOptionsExt, process::ExitCode};
use trialrun_driver::{
    Bind, DiskSource, Driver, MachineSpec, Rootfs,
    conformance::{self, Outcome},
};
use trialrun_driver_container::{ContainerDriver, cgroup::Hierarchy};
use trialrun_guest_proto::{Boot, EnvEntry};
use trialrun_model::{ByteSize, Limits, LineageId, SandboxId};

/// The test's name, what is forced by which variable, and a word of the isolation report that says so.
type Variant = (&'static str, Option<(&'static str, &'static str)>, &'static str);

const VARIANTS: [Variant; 7] = [
    ("the_container_driver_passes_the_conformance_suite", None, ""),
    ("it_passes_with_a_cgroup2_mount_of_its_own", Some(("TRIALRUN_CGROUPS", "v1")), "cgroup2 mount of our own"),
    ("it_passes_with_layers_in_plain_directories", Some(("TRIALRUN_LAYERS", "directory")), "plain directory"),
    ("it_passes_with_the_older_quotas", Some(("TRIALRUN_QUOTA", "full")), ""),
    ("it_passes_without_quotas", Some(("TRIALRUN_QUOTA", "off")), "disk limit: "),
    ("it_passes_without_id_mapped_mounts", Some(("TRIALRUN_IDMAP", "off")), "copied"),
    ("it_passes_without_landlock", Some(("TRIALRUN_LANDLOCK", "off")), "landlock: "),
];
/// Set for the process that runs one variant.
const FORCED: &str = "TRIALRUN_TEST_FORCED";

fn main() -> ExitCode {
    // What a test runner asks before it runs anything.
    let args: Vec<String> = std::env::args().collect();
    if args.iter().any(|a| a == "--list") {
        if !args.iter().any(|a| a == "--ignored") {
            VARIANTS.iter().for_each(|(name, ..)| println!("{name}: test"));
        }
        return ExitCode::SUCCESS;
    }
    if let Some(name) = std::env::var_os(FORCED) {
        let failures = run(&name.to_string_lossy());
        failures.iter().for_each(|failure| eprintln!("{}: {failure}", name.display()));
        return if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let wanted: Vec<&str> = args.iter().skip(1).map(String::as_str).filter(|a| !a.starts_with('-')).collect();
    let (mut passed, mut failed) = (0, 0);
    for (name, forced, _) in
        VARIANTS.iter().filter(|(name, ..)| wanted.is_empty() || wanted.iter().any(|w| name.contains(w)))
    {
        if !rustix::process::geteuid().is_root() {
            println!("SKIP {name}: it needs root");
            continue;
        }
        // In a process of its own: the environment is read at every launch, and a launch wants one thread.
        let mut child = std::process::Command::new(std::env::current_exe().expect("my own program"));
        child.env(FORCED, name).envs(*forced);
        if child.status().expect("run a variant").success() { passed += 1 } else { failed += 1 }
    }
    println!("test result: {}. {passed} passed; {failed} failed; 0 ignored", if failed == 0 { "ok" } else { "FAILED" });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(variant: &str) -> Vec<String> {
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
                // The disk without quotas has no limit, and says so.
                let unlimited = name == conformance::DISK_LIMIT && outcome == Outcome::Skipped("disk_limit");
                let by_design =
                    ["it_passes_without_quotas", "it_passes_with_layers_in_plain_directories"].contains(&variant);
                if outcome != Outcome::Passed && !(unlimited && by_design) {
                    failures.push(format!("{name}: {outcome:?}"));
                }
            }
        }
    }
    failures.extend(said(variant, &spec).err());
    let hierarchy = Hierarchy::detect().expect("cgroups");
    failures.extend(
        hierarchy.group_dirs(&tag).into_iter().filter(|d| d.exists()).map(|d| format!("left behind: {}", d.display())),
    );
    let pool = trialrun_driver_container::layer::Pool::open(&data).expect("the pool");
    failures.extend(pool.names().expect("layers").into_iter().map(|n| format!("left behind: the layer {n}")));
    failures
}

/// What was forced is in the isolation report.
fn said(variant: &str, spec: &dyn Fn() -> MachineSpec) -> Result<(), String> {
    let word = VARIANTS.iter().find(|(name, ..)| *name == variant).map_or("", |(.., word)| *word);
    let mut machine = ContainerDriver::default().launch(spec()).map_err(|e| format!("{e}: {}", e.cause))?;
    let isolation = machine.isolation().clone();
    machine.kill();
    machine.destroy().map_err(|e| format!("{e}: {}", e.cause))?;
    let all = [isolation.layers, isolation.missing, isolation.notes].concat();
    if all.iter().any(|line| line.contains(word)) { Ok(()) } else { Err(format!("no word {word:?} in {all:?}")) }
}
