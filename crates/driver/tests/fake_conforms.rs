//! The fake driver passes the suite of the real ones.

use prost::Message;
use std::{fs::File, os::unix::fs::OpenOptionsExt};
use trialrun_driver::{
    DiskSource, MachineSpec,
    conformance::{self, Outcome},
    fake::FakeDriver,
};
use trialrun_model::{Limits, LineageId, SandboxId};

#[test]
fn the_fake_driver_passes_the_conformance_suite() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("guest");
    let mut file = File::options().create_new(true).write(true).mode(0o755).open(&program).unwrap();
    std::io::Write::write_all(&mut file, trialrun_embedded::GUEST).unwrap();
    drop(file);
    let spec = || MachineSpec {
        id: SandboxId::from_entropy([7; 8]),
        lineage: LineageId(0),
        limits: Limits::default(),
        hostname: "fake".to_owned(),
        rootfs: trialrun_driver::Rootfs::default(),
        disk: DiskSource::Fresh,
        data_dir: dir.path().to_owned(),
        tag: "fake".to_owned(),
        guest_program: File::open(&program).unwrap().into(),
        boot: trialrun_guest_proto::Boot {
            cwd: b"/".to_vec(),
            env: vec![trialrun_guest_proto::EnvEntry { name: b"PATH".to_vec(), value: b"/usr/bin:/bin".to_vec() }],
            ..Default::default()
        }
        .encode_to_vec(),
        netns: None,
    };
    let results = conformance::run(&FakeDriver, &spec).unwrap();
    let failed: Vec<_> = results.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Failed(_))).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    // What the fake can't do is named, and nothing else is skipped.
    let skipped: Vec<_> =
        results.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Skipped(_))).map(|(name, _)| *name).collect();
    let wanted = [
        "a slot counts, kills and measures a whole tree",
        conformance::DISK_LIMIT,
        "a forked disk begins as its parent's and goes its own way",
    ];
    assert_eq!(skipped, wanted);
}
