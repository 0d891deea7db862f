//! kill -9 at any moment, looked at after each one: nothing is left after the next start. (`recovery.rs` looks at the end
//! of many, and at each step of a creation.)

use anyhow::{Result, ensure};
use std::{
    collections::BTreeSet,
    sync::Mutex,
    time::{Duration, Instant},
};
use trialrun_tests::{World, create, host, leftovers, program::Started, sh, wait_for, wait_until};

/// Kills per test.
const KILLS: u32 = 25;
/// Longest run here that is no hang.
const PATIENCE: Duration = Duration::from_secs(30);
/// The tests of this file compare what is on the whole host, so they run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// A cheap sequence of delays that covers `0..most` evenly, the same in each run.
fn delays(most: Duration) -> impl Iterator<Item = Duration> {
    (0..KILLS).map(move |i| most.mul_f64(f64::from((i * 17) % KILLS) / f64::from(KILLS)))
}

fn start(world: &World) -> Started {
    world
        .program(["run", "--image", "host", "--", "sh", "-c", "echo hi; touch f; setsid sleep 0.02 & sleep 0.02"])
        .patience(PATIENCE)
        .start()
}

/// How long an undisturbed run takes.
fn usual(world: &World) -> Duration {
    let times = (0..3).map(|_| start(world).finish());
    let mut times: Vec<Duration> =
        times.inspect(|ran| assert_eq!(ran.code, Some(0), "{ran}")).map(|ran| ran.took).collect();
    times.sort();
    times[1]
}

fn nothing_left(world: &World, before: &BTreeSet<String>) -> Result<()> {
    // A start may be between two looks: what is gone must stay so.
    let mut looks = 0;
    wait_until("processes are gone", Duration::from_secs(20), || {
        let (at_work, inside) = (leftovers::at_work(world.data()), leftovers::pids_inside(world.data()));
        looks = if at_work.is_empty() && inside.is_empty() { looks + 1 } else { 0 };
        if looks > 10 { Ok(()) } else { Err(format!("at work {at_work:?}, inside {inside:?}")) }
    })?;
    world.collect();
    let left = world.leftovers();
    ensure!(left.is_empty(), "after the next start: {left}");
    wait_until("namespaces are gone", Duration::from_secs(10), || {
        let new: Vec<String> = leftovers::namespaces(world.data()).difference(before).cloned().collect();
        if new.is_empty() { Ok(()) } else { Err(format!("{new:?}")) }
    })
}

#[test]
fn killing_the_client_at_any_moment_leaves_nothing() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let usual = usual(&world);
    let before = leftovers::namespaces(world.data());
    for (n, delay) in delays(usual).enumerate() {
        let client = start(&world);
        std::thread::sleep(delay);
        client.signal(rustix::process::Signal::KILL);
        client.finish();
        if let Err(left) = nothing_left(&world, &before) {
            panic!("kill {n} after {delay:?} of {usual:?}: {left:#}");
        }
    }
    let ran = start(&world).finish();
    assert_eq!(ran.code, Some(0), "{ran}");
    Ok(())
}

#[test]
fn killing_the_keeper_at_any_moment_leaves_nothing_and_the_client_says_that_it_is_not_the_codes_fault() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let usual = usual(&world);
    let before = leftovers::namespaces(world.data());
    for (n, delay) in delays(usual).enumerate() {
        let mut client = start(&world);
        // The keeper is the client's child.
        let children = format!("/proc/{0}/task/{0}/children", client.pid());
        let keeper = wait_until("a keeper", Duration::from_secs(10), || {
            let text = std::fs::read_to_string(&children).unwrap_or_default();
            let found = text.split_whitespace().filter_map(|w| w.parse::<u32>().ok()).next();
            if found.is_none() && client.ended() {
                return Ok(None);
            }
            found.map(Some).ok_or_else(|| "none yet".to_owned())
        })?;
        let begun = Instant::now();
        while begun.elapsed() < delay {
            std::thread::sleep(Duration::from_micros(200));
        }
        if let Some(keeper) = keeper {
            kill(keeper);
        }
        let ended = client.finish();
        assert!(matches!(ended.code, Some(0 | 121)), "kill {n} after {delay:?} of {usual:?}: {ended}");
        if ended.code == Some(121) {
            assert!(ended.err.contains("trialrun:"), "{ended}");
        }
        if let Err(left) = nothing_left(&world, &before) {
            panic!("kill {n} after {delay:?} of {usual:?}: {left:#}\n{ended}");
        }
    }
    Ok(())
}

#[test]
fn killing_the_keeper_of_a_running_machine_ends_everything_in_it() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let before = leftovers::namespaces(world.data());
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let busy = "for i in 1 2 3 4; do setsid sh -c 'trap \"\" TERM; while :; do :; done' & done; echo up; wait";
        let mut following =
            sandbox.exec(trialrun_model::ExecSpec::new(trialrun_model::Command::Shell(busy.to_owned()))).await?;
        ensure!(matches!(following.next().await?, trialrun_engine::Output::Stdout(_)));
        let keepers = leftovers::keepers(world.data());
        ensure!(keepers.len() == 1, "{keepers:?}");
        kill(keepers[0]);
        let end = loop {
            match following.next().await {
                Err(e) => break e,
                Ok(trialrun_engine::Output::Ended(outcome)) => {
                    anyhow::bail!("an outcome from a dead keeper: {outcome:?}")
                }
                Ok(_) => {}
            }
        };
        ensure!(end.kind == trialrun_engine::CallErrorKind::MachineLost, "{end:?}");
        wait_for("everything in it is gone", Duration::from_secs(10), || async {
            let pids = leftovers::pids_inside(world.data());
            if pids.is_empty() { Ok(()) } else { Err(format!("{pids:?}")) }
        })
        .await?;
        let after = sh(&sandbox, "true").await;
        ensure!(after.is_err(), "{after:?}");
        Ok(sandbox.delete().await?)
    })?;
    nothing_left(&world, &before)
}

#[test]
fn killing_the_guest_agent_is_a_lost_machine_not_a_result() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = world.program(["run", "--image", "host", "--", "sleep", "1000"]).start();
    let pids = wait_until("the command runs", Duration::from_secs(10), || {
        let pids = leftovers::pids_inside(world.data());
        if pids.len() >= 2 { Ok(pids) } else { Err(format!("{pids:?}")) }
    })?;
    let first = pids.iter().min().copied().unwrap_or_default();
    kill(first);
    let ended = client.finish();
    assert!(matches!(ended.code, Some(121 | 125)) && ended.err.contains("failure of ours"), "{ended}");
    wait_until("nothing is left", Duration::from_secs(10), || {
        let left = world.leftovers();
        if left.is_empty() { Ok(()) } else { Err(left.to_string()) }
    })
}

#[test]
fn collecting_tells_what_opening_removed_and_gives_the_layers_space_back() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let image = world.data().join("pool.btrfs");
    let gc = |world: &World| world.program(["gc", "--json"]).run();
    let mut lost = String::new();
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        lost = sandbox.id.to_string();
        let used = gc(&world);
        ensure!(used.json()["released_bytes"] == 0 && sh(&sandbox, "true").await?.ok(), "{used}");
        leftovers::keepers(world.data()).into_iter().for_each(kill);
        Ok(())
    })?;
    wait_until("the keeper is gone", Duration::from_secs(20), || {
        let left = leftovers::keepers(world.data());
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })?;
    let made = image.exists();
    let told = gc(&world);
    assert!(told.json()["removed"] == serde_json::json!([lost]), "{told}");
    // On a data directory that is btrfs itself there is no image.
    assert!((told.json()["released_bytes"].as_u64() > Some(0)) == made && !image.exists(), "{told}");
    let run = world.program(["run", "--image", "host", "--", "echo", "again"]).run();
    assert!(run.code == Some(0) && run.out == "again\n", "{run}");
    Ok(())
}

#[test]
fn collecting_and_creating_at_once_disturb_neither() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        ensure!(sh(&sandbox, "echo here > f").await?.ok());
        for _ in 0..3 {
            let gc = world.program(["gc", "--json"]).run();
            ensure!(gc.code == Some(0) && gc.json()["removed"].as_array().is_some_and(Vec::is_empty), "{gc}");
        }
        ensure!(sh(&sandbox, "cat f").await?.out == "here\n");
        // Creations that go on while others collect.
        for i in 0..5 {
            let collector = world.program(["gc"]).start();
            let other = create(&engine, host()).await?;
            ensure!(sh(&other, &format!("echo {i}")).await?.ok());
            ensure!(collector.finish().code == Some(0));
            ensure!(sh(&other, "true").await?.ok());
            other.delete().await?;
        }
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_lease_ends_a_kept_machine_and_rm_all_removes_the_rest() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let id = sandbox.keep(Duration::from_millis(300)).await?;
        wait_for("the lease ends", Duration::from_secs(20), || async {
            let keepers = leftovers::keepers(world.data());
            if keepers.is_empty() { Ok(()) } else { Err(format!("{keepers:?}")) }
        })
        .await?;
        ensure!(engine.find(id.as_str()).is_err());
        Ok(())
    })?;
    world.collect();
    for _ in 0..3 {
        let kept = world.program(["run", "--image", "host", "--keep", "--", "true"]).run();
        assert_eq!(kept.code, Some(0), "{kept}");
    }
    let removed = world.program(["rm", "--all", "--json"]).run();
    assert_eq!((removed.code, removed.json()["deleted"].as_array().map(Vec::len)), (Some(0), Some(3)), "{removed}");
    Ok(())
}
