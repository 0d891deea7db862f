//! What the agent costs. Run with the static release build:
//! `TRIALRUN_GUEST=target/x86_64-unknown-linux-gnu/release/trialrun-guest cargo test -p trialrun-guest --test speed -- --ignored --nocapture`

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod guest;

use guest::{Guest, argv};
use std::{
    fs,
    os::fd::AsFd,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use trialrun_guest_proto::{Boot, Info, Op, TarDown, TarUp};

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn timed(mut run: impl FnMut()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

#[test]
#[ignore = "a measurement, for the release build"]
fn start_exec_and_memory() {
    println!(
        "start to ready (with sh before it): {:?}",
        median((0..50).map(|_| timed(|| drop(Guest::new()))).collect())
    );
    let init = || {
        if rustix::process::geteuid().is_root() {
            Guest::boot_init(Boot { cwd: b"/".to_vec(), ..Boot::default() })
        } else {
            Guest::new()
        }
    };
    let mut guest = init();
    let info = guest.call(Op::Info(Info {})).info.unwrap();
    println!("idle private: {} KiB", info.agent_private_bytes / 1024);
    println!("exec of true: {:?}", median((0..300).map(|_| timed(|| drop(guest.exec(argv(&["true"]))))).collect()));
    let mut plain = Guest::new();
    println!(
        "the same, --no-init: {:?}",
        median((0..300).map(|_| timed(|| drop(plain.exec(argv(&["true"]))))).collect())
    );
    println!(
        "spawn of true from here: {:?}",
        median((0..300).map(|_| timed(|| drop(Command::new("true").status()))).collect())
    );
    let info = guest.call(Op::Info(Info {})).info.unwrap();
    println!("private after 300 execs: {} KiB", info.agent_private_bytes / 1024);
    assert!(info.agent_private_bytes < 2 << 20);
}

#[test]
#[ignore = "a measurement, for the release build"]
fn tar_against_gnu_tar() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let src = dir.path().join("src");
    for d in 0..200 {
        fs::create_dir_all(src.join(format!("{d}"))).unwrap();
        for f in 0..100 {
            fs::write(src.join(format!("{d}/{f}")), vec![d as u8; 10 * 1024]).unwrap();
        }
    }
    let archive = dir.path().join("a.tar");
    assert!(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&src).arg(".").status().unwrap().success());
    let mut guest = Guest::boot(Boot {
        cwd: dir.path().as_os_str().as_encoded_bytes().to_vec(),
        user: "1001:1001".into(),
        ..Boot::default()
    });
    let (mut ours, mut gnu, mut ours_down, mut gnu_down) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let clear = |path: &Path| drop(fs::remove_dir_all(path));
    for _ in 0..7 {
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        // Both read from a pipe that cat fills, and both give the files away.
        gnu.push(timed(|| {
            let line = r#"cat "$0" | tar -xf - -C "$1" --owner=1001 --same-owner"#;
            assert!(Command::new("sh").args(["-c", line]).arg(&archive).arg(&out).status().unwrap().success());
        }));
        clear(&out);
        ours.push(timed(|| {
            let (reader, writer) = std::io::pipe().unwrap();
            let mut cat = Command::new("cat").arg(&archive).stdout(writer).spawn().unwrap();
            let stream =
                guest.request(Op::TarUp(TarUp { dest: b"out".to_vec(), ..TarUp::default() }), &[reader.as_fd()]);
            drop(reader);
            assert_eq!(guest.wait(stream).ok().done.unwrap().files, 20_000);
            cat.wait().unwrap();
        }));
        clear(&out);
        gnu_down.push(timed(|| {
            assert!(
                Command::new("sh")
                    .args(["-c", r#"tar -cf - -C "$0" . | cat >/dev/null"#])
                    .arg(&src)
                    .status()
                    .unwrap()
                    .success()
            );
        }));
        ours_down.push(timed(|| {
            let (reader, writer) = std::io::pipe().unwrap();
            let mut cat = Command::new("sh").args(["-c", "cat >/dev/null"]).stdin(reader).spawn().unwrap();
            let down = TarDown { path: b"src".to_vec(), ..TarDown::default() };
            let stream = guest.request(Op::TarDown(down), &[writer.as_fd()]);
            drop(writer);
            assert_eq!(guest.wait(stream).ok().done.unwrap().files, 20_000);
            cat.wait().unwrap();
        }));
    }
    let (ours, gnu, ours_down, gnu_down) = (median(ours), median(gnu), median(ours_down), median(gnu_down));
    let info = guest.call(Op::Info(Info {})).info.unwrap();
    println!("up: ours {ours:?}, gnu {gnu:?}, ratio {:.2}", ours.as_secs_f64() / gnu.as_secs_f64());
    println!(
        "down: ours {ours_down:?}, gnu {gnu_down:?}, ratio {:.2}",
        ours_down.as_secs_f64() / gnu_down.as_secs_f64()
    );
    println!("private after: {} KiB", info.agent_private_bytes / 1024);
    assert!(ours.as_secs_f64() < 1.3 * gnu.as_secs_f64());
}
