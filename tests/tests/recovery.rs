//! Whatever dies, and wherever, nothing of a machine stays: at the latest after the next start.

use anyhow::Result;
use rustix::process::Signal;
use std::{path::Path, time::Duration};
use trialrun_driver_container::cgroup::Hierarchy;
use trialrun_keeper::fault::CREATE_STEPS;
use trialrun_tests::{
    World, create, host,
    leftovers::{keepers, namespaces, pids_inside},
    sh, wait_until,
};

/// Kills per test; the moments are spread over a run's whole life.
const KILLS: u32 = 25;
/// A run's life, generously: create, command, delete.
const LIFE: Duration = Duration::from_millis(260);

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::KILL));
}

/// Waits until no keeper and no process of a machine lives, then collects: the next start's work.
fn settle(world: &World) {
    let gone = wait_until("the machines' processes are gone", Duration::from_secs(20), || {
        let (keepers, inside) = (keepers(world.data()), pids_inside(world.data()));
        if keepers.is_empty() && inside.is_empty() {
            Ok(())
        } else {
            Err(format!("keepers {keepers:?}, inside {inside:?}"))
        }
    });
    gone.expect("in time");
    world.collect();
}

/// Nothing is left, once a keeper whose machine is gone has given the layers' file system back and ended.
fn nothing_left(world: &World) {
    let gone = wait_until("nothing is left", Duration::from_secs(20), || {
        let (left, spaces) = (world.leftovers(), namespaces(world.data()));
        if left.is_empty() && spaces.is_empty() { Ok(()) } else { Err(format!("{left}; {spaces:?}")) }
    });
    gone.expect("in time");
}

#[test]
fn a_step_that_fails_is_undone_at_once() {
    let Some(world) = World::new() else { return };
    for step in CREATE_STEPS {
        let run =
            world.program(["run", "--image", "host", "--", "true"]).env("TRIALRUN_FAULT", format!("{step}:fail")).run();
        assert_eq!(run.code, Some(121), "{step}: {run}");
        assert!(run.err.contains("fault was injected"), "{step}: {run}");
        // Without any next start.
        nothing_left(&world);
    }
}

#[test]
fn a_process_that_is_killed_at_a_step_leaves_nothing_after_the_next_start() {
    let Some(world) = World::new() else { return };
    for step in CREATE_STEPS {
        let run =
            world.program(["run", "--image", "host", "--", "true"]).env("TRIALRUN_FAULT", format!("{step}:kill")).run();
        assert_ne!(run.code, Some(0), "{step}: {run}");
        settle(&world);
        nothing_left(&world);
        let run = world.program(["run", "--image", "host", "--", "echo", "works"]).run();
        assert_eq!((run.code, run.out.trim()), (Some(0), "works"), "after {step}: {run}");
    }
}

#[test]
fn a_client_that_is_killed_at_any_moment_leaves_nothing() {
    let Some(world) = World::new() else { return };
    for n in 0..KILLS {
        let client = world.program(["run", "--image", "host", "--", "sleep", "0.1"]).start();
        std::thread::sleep(LIFE * n / KILLS);
        client.signal(Signal::KILL);
        let _ = client.finish();
    }
    settle(&world);
    nothing_left(&world);
}

#[test]
fn a_keeper_that_is_killed_takes_its_machine_along_and_is_told_apart() {
    let Some(world) = World::new() else { return };
    let mut lost = 0;
    for n in 0..KILLS {
        let client = world.program(["run", "--image", "host", "--", "sleep", "0.1"]).start();
        std::thread::sleep(LIFE * n / KILLS);
        keepers(world.data()).into_iter().for_each(kill);
        let run = client.finish();
        // Either it was over already, or it is a failure of ours; never the command's.
        assert!(matches!(run.code, Some(0 | 121)), "{run}");
        lost += u32::from(run.code == Some(121));
    }
    assert!(lost > 0, "no kill hit a running machine");
    settle(&world);
    nothing_left(&world);
}

#[test]
fn the_machine_dies_with_its_keeper() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        sh(&sandbox, "setsid sleep 1000 </dev/null >/dev/null 2>&1 & setsid -f sh -c 'trap \"\" TERM HUP; sleep 1000'")
            .await?;
        let spawned = sandbox.client().spawn(trialrun_model::ExecSpec {
            kind: trialrun_model::ExecKind::Spawn,
            ..trialrun_model::ExecSpec::new(trialrun_model::Command::Shell("sleep 1000".to_owned()))
        });
        spawned.await?.expect("started");
        assert!(!pids_inside(world.data()).is_empty());
        keepers(world.data()).into_iter().for_each(kill);
        wait_until("everything inside is dead", Duration::from_secs(10), || {
            let inside = pids_inside(world.data());
            if inside.is_empty() { Ok(()) } else { Err(format!("{inside:?}")) }
        })?;
        sandbox.delete().await?;
        Ok(())
    })?;
    world.collect();
    Ok(())
}

#[test]
fn a_kept_machine_outlives_its_client_and_goes_when_it_is_deleted() {
    let Some(world) = World::new() else { return };
    let run = world.program(["run", "--image", "host", "--keep", "--", "sh", "-c", "echo kept > /workspace/f"]).run();
    assert_eq!(run.code, Some(0), "{run}");
    let id = run.err.split_whitespace().find(|w| w.starts_with("sb-")).expect("the id is said").to_owned();
    let attach = world.program(["attach", &id, "--", "cat", "/workspace/f"]).run();
    assert_eq!(attach.out, "kept\n", "{attach}");
    let ps = world.program(["ps", "--json"]).run();
    let row = &ps.json()["sandboxes"][0];
    assert!(row["id"] == id.as_str() && row["detached"] == true && row["expires_ms"].is_u64(), "{ps}");
    let rm = world.program(["rm", &id]).run();
    assert_eq!(rm.code, Some(0), "{rm}");
    nothing_left(&world);
}

#[test]
fn collecting_touches_nothing_that_lives_and_nothing_without_our_marks() {
    let Some(world) = World::new() else { return };
    let run = world.program(["run", "--image", "host", "--keep", "--", "true"]).run();
    let id = run.err.split_whitespace().find(|w| w.starts_with("sb-")).expect("the id is said").to_owned();
    let Ok(hierarchy) = Hierarchy::detect() else { return };
    // A group that looks like ours but carries another data directory's mark.
    let foreign =
        hierarchy.group_dirs("00000000").into_iter().next().expect("a group directory").join("sb-000000000000");
    std::fs::create_dir_all(&foreign).expect("make a foreign group");
    world.collect();
    let alive = world.program(["attach", &id, "--", "echo", "alive"]).run();
    assert_eq!(alive.out, "alive\n", "{alive}");
    assert!(foreign.exists());
    remove_groups(&foreign);
    assert_eq!(world.program(["rm", &id]).run().code, Some(0));
}

fn remove_groups(dir: &Path) {
    std::fs::remove_dir(dir).expect("remove the foreign group");
    std::fs::remove_dir(dir.parent().expect("it has a parent")).expect("remove its parent");
}

#[test]
fn clients_at_once_share_store_and_caches() {
    let Some(world) = World::new() else { return };
    let clients: Vec<_> = (0..8)
        .map(|n| world.program(["run", "--image", "host", "--", "sh", "-c", &format!("echo {n}; exit {n}")]).start())
        .collect();
    for (n, client) in clients.into_iter().enumerate() {
        let run = client.finish();
        assert_eq!((run.code, run.out.trim()), (Some(n as i32), n.to_string().as_str()), "{run}");
    }
    let ps = world.program(["ps", "--json"]).run().json();
    assert_eq!(ps["sandboxes"].as_array().map(Vec::len), Some(0), "{ps}");
}

#[test]
fn a_client_that_is_interrupted_cleans_up() {
    let Some(world) = World::new() else { return };
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let client = world.program(["run", "--image", "host", "--", "sh", "-c", "echo started; sleep 1000"]).start();
        wait_until("the machine runs", Duration::from_secs(20), || {
            if pids_inside(world.data()).len() > 1 { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .unwrap();
        client.signal(signal);
        let run = client.finish();
        assert_eq!(run.code, Some(128 + signal.as_raw()), "{run}");
        nothing_left(&world);
    }
}

#[test]
fn a_row_that_says_more_than_there_is_is_put_right() {
    let Some(world) = World::new() else { return };
    let client = world.program(["run", "--image", "host", "--", "sleep", "1000"]).start();
    wait_until("it runs", Duration::from_secs(20), || {
        if keepers(world.data()).is_empty() { Err("no keeper".to_owned()) } else { Ok(()) }
    })
    .unwrap();
    client.signal(Signal::KILL);
    let _ = client.finish();
    settle(&world);
    let ps = world.program(["ps", "--json"]).run().json();
    assert_eq!(ps["sandboxes"].as_array().map(Vec::len), Some(0), "{ps}");
}
