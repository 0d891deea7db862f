//! Forks of running machines: what a child has, what it has not, and that nothing is left.

use anyhow::{Context, Result, bail};
use std::time::Duration;
use trialrun_engine::{Engine, ForkOptions, Sandbox};
use trialrun_keeper::fault::{CREATE_STEPS, FORK_STEPS};
use trialrun_model::{ByteSize, Command, ExecSpec, ImageRef, Limits, SandboxSpec};
use trialrun_tests::{World, create, host, leftovers::keepers, root_sh, sh, wait_until};

const ATTACHED: ForkOptions = ForkOptions { attached: true, lease: None };

async fn fork(engine: &Engine, parent: &Sandbox) -> Result<Sandbox> {
    Ok(engine.fork(parent, ATTACHED).await.context("fork")?.0)
}

/// A command that stays when its exec call has returned.
async fn spawn(sandbox: &Sandbox, line: &str) -> Result<()> {
    let started = sandbox.client().spawn(ExecSpec::new(Command::Shell(line.to_owned()))).await?;
    started.map(drop).map_err(|outcome| anyhow::anyhow!("{line}: {outcome:?}"))
}

fn nothing_left(world: &World) -> Result<()> {
    wait_until("nothing is left", Duration::from_secs(20), || {
        let left = world.leftovers();
        if left.is_empty() { Ok(()) } else { Err(left.to_string()) }
    })
}

async fn says(sandbox: &Sandbox, line: &str) -> Result<String> {
    let ran = sh(sandbox, line).await?;
    if !ran.ok() {
        bail!("{line}: {ran:?}");
    }
    Ok(ran.out.trim().to_owned())
}

#[test]
fn a_fork_begins_as_its_parent_and_neither_sees_what_the_other_writes_later() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(|engine| async move {
        let parent = create(&engine, host()).await?;
        says(&parent, "echo one > f; mkdir d; echo x > d/x; ln d/x d/y; echo gone > gone; rm gone").await?;
        let child = fork(&engine, &parent).await?;
        says(&parent, "echo parent > f; echo p > p; rm -r d").await?;
        says(&child, "echo child > c; cat f > seen").await?;
        let grandchild = fork(&engine, &child).await?;
        says(&child, "echo later > f").await?;
        assert_eq!(says(&parent, "cat f; ls").await?, "parent\nf\np");
        assert_eq!(says(&child, "cat f seen; ls; stat -c %h d/x").await?, "later\none\nc\nd\nf\nseen\n2");
        assert_eq!(says(&grandchild, "cat f seen; ls").await?, "one\none\nc\nd\nf\nseen");
        // The line goes on without those it came from.
        parent.delete().await?;
        child.delete().await?;
        assert_eq!(says(&grandchild, "cat f d/y").await?, "one\nx");
        grandchild.delete().await?;
        Ok(())
    })
}

#[test]
fn a_fork_has_its_parents_settings_and_none_of_its_processes() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(|engine| async move {
        let limits = Limits { memory: ByteSize::mib(300), pids: 77, disk: ByteSize::mib(96), ..Limits::default() };
        let spec = SandboxSpec {
            env: vec![("FIRST".into(), "1".into())],
            hostname: "box".into(),
            limits,
            image: ImageRef::Host,
        };
        let parent = create(&engine, spec).await?;
        let set = trialrun_keeper::wire::Call::SetEnv(vec![("SECOND".into(), "two words".into())]);
        parent.client().call(&set, &[]).await?;
        says(&parent, "echo shm > /dev/shm/f").await?;
        spawn(&parent, "exec sleep 600").await?;
        let (child, cost) = engine.fork(&parent, ATTACHED).await?;
        assert!(cost.pause > Duration::ZERO && cost.pause <= cost.whole, "{cost:?}");
        let described = child.describe().await?;
        assert_eq!(described.limits, limits);
        assert_eq!(described.policy, parent.describe().await?.policy);
        assert_eq!(says(&child, "echo $FIRST $SECOND; hostname; id -un").await?, "1 two words\nbox\nruntime");
        assert_eq!(says(&child, "pgrep -c sleep || true; ls /dev/shm").await?, "0");
        assert_eq!(says(&parent, "pgrep -c sleep; ls /dev/shm").await?, "1\nf");
        // A disk limit of its own: what it writes itself.
        if trialrun_tests::disks_are_limited() {
            let filled = sh(&child, "head -c 200M /dev/zero > big").await?;
            assert!(filled.all.outcome.disk_full.is_some(), "{filled:?}");
        }
        assert_eq!(says(&parent, "head -c 20M /dev/zero > big; stat -c %s big").await?, "20971520");
        child.delete().await?;
        parent.delete().await?;
        Ok(())
    })
}

#[test]
fn owners_modes_and_attributes_survive_a_fork() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    const MAKE: &str = "mkdir -p /srv/t && cd /srv/t && install -o runtime -m 4755 /bin/true s && \
        install -d -o 33 -g 44 -m 1777 d && python3 -c 'import os; os.setxattr(\"s\", \"user.mark\", b\"here\")' && mkfifo p && ln -s /nowhere l && \
        truncate -s 10M hole && touch -d @86400 s && rm -rf /opt && mkdir /opt && echo o > /opt/o";
    const SEEN: &str = "cd /srv/t && stat -c '%n %a %u %g %h %s %Y' s d p l hole && python3 -c 'import os; print(os.getxattr(\"s\", \"user.mark\"))'; \
        ls -A /opt; stat -c %b hole";
    world.run(|engine| async move {
        let parent = create(&engine, host()).await?;
        let made = root_sh(&parent, MAKE).await?;
        assert!(made.ok(), "{made:?}");
        let child = fork(&engine, &parent).await?;
        let (before, after) = (root_sh(&parent, SEEN).await?, root_sh(&child, SEEN).await?);
        assert!(before.ok() && before.out.contains("s 4755"), "{before:?}");
        assert_eq!(before.out, after.out);
        child.delete().await?;
        parent.delete().await?;
        Ok(())
    })
}

#[test]
fn a_fork_is_of_one_moment_while_its_parent_writes() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    // A log of two files, the second always written after the first: never ahead of it in a copy of one moment.
    const WRITER: &str = "i=0; while :; do i=$((i+1)); echo $i > a.new; mv a.new a; echo $i > b.new; mv b.new b; \
        mkdir n$i; rmdir n$i; done";
    world.run(|engine| async move {
        let parent = create(&engine, host()).await?;
        says(&parent, "echo 0 > a; echo 0 > b").await?;
        spawn(&parent, WRITER).await?;
        for _ in 0..8 {
            let child = fork(&engine, &parent).await?;
            let seen = says(&child, "cat a b").await?;
            let (a, b) = seen.split_once('\n').context("two numbers")?;
            let (a, b): (u64, u64) = (a.parse()?, b.parse()?);
            assert!(a == b || a == b + 1, "{a} {b}");
            child.delete().await?;
        }
        // It goes on.
        let first: u64 = says(&parent, "cat a").await?.parse()?;
        let later: u64 = says(&parent, "sleep 0.1; cat a").await?.parse()?;
        assert!(later > first);
        parent.delete().await?;
        Ok(())
    })
}

#[test]
fn forks_of_one_machine_at_once_all_hold() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(|engine| async move {
        let parent = create(&engine, host()).await?;
        says(&parent, "for i in $(seq 300); do echo $i > f$i; done").await?;
        let parent = std::sync::Arc::new(parent);
        let mut at_once = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (engine, parent) = (engine.clone(), parent.clone());
            at_once.spawn(async move { fork(&engine, &parent).await });
        }
        let children = at_once.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
        let parent = std::sync::Arc::into_inner(parent).context("its forks are made")?;
        for child in &children {
            assert_eq!(says(child, "cat f1 f300; ls | wc -l").await?, "1\n300\n300");
        }
        for child in children {
            child.delete().await?;
        }
        parent.delete().await?;
        Ok(())
    })
}

#[test]
fn a_fork_whose_parent_is_gone_is_refused_and_leaves_nothing() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(|engine| async move {
        let parent = create(&engine, host()).await?;
        let same = engine.find(parent.id.as_str())?;
        parent.delete().await?;
        let error = engine.fork(&same, ATTACHED).await.err().context("it was forked")?;
        assert!(error.to_string().contains(same.id.as_str()), "{error}");
        Ok(())
    })?;
    nothing_left(&world)
}

#[test]
fn a_fork_that_fails_or_dies_at_any_step_leaves_nothing_of_it_and_its_parent_whole() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let kept = world.program(["run", "--image", "host", "--keep", "--", "sh", "-c", "echo here > f"]).run();
    assert_eq!(kept.code, Some(0), "{kept}");
    let list = || world.program(["ps", "--json"]).run().json()["sandboxes"].as_array().cloned().unwrap_or_default();
    let parent = list()[0]["id"].as_str().context("an id")?.to_owned();
    // The parent's own keeper has no fault to meet: these are the child's and the client's steps.
    for step in CREATE_STEPS.into_iter().chain(["engine-forked"]) {
        for how in ["fail", "kill"] {
            let fault = format!("{step}:{how}");
            let run = world.program(["fork", &parent, "--", "cat", "f"]).env("TRIALRUN_FAULT", &fault).run();
            assert!(run.code != Some(0) && run.out.is_empty(), "{fault}: {run}");
            assert!(how == "kill" || run.code == Some(121), "{fault}: {run}");
            let alone = wait_until("the fork is gone", Duration::from_secs(20), || {
                world.collect();
                let (living, rows) = (keepers(world.data()), list());
                if living.len() == 1 && rows.len() == 1 { Ok(()) } else { Err(format!("{living:?} {rows:?}")) }
            });
            alone?;
            let run = world.program(["fork", &parent, "--", "cat", "f"]).run();
            assert_eq!((run.code, run.out.as_str()), (Some(0), "here\n"), "after {fault}: {run}");
        }
    }
    assert_eq!(world.program(["rm", &parent]).run().code, Some(0));
    Ok(())
}

#[test]
fn a_parent_whose_fork_fails_while_it_stands_still_goes_on() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    for step in &FORK_STEPS[..2] {
        let fault = format!("{step}:fail");
        let run = ["run", "--image", "host", "--keep", "--", "sh", "-c", "echo here > f"];
        // Its keeper meets the fault, whoever asks for the fork.
        assert_eq!(world.program(run).env("TRIALRUN_FAULT", &fault).run().code, Some(0), "{fault}");
        let rows = world.program(["ps", "--json"]).run().json();
        let parent = rows["sandboxes"][0]["id"].as_str().context("an id")?.to_owned();
        let forked = world.program(["fork", &parent, "--", "true"]).run();
        assert_eq!(forked.code, Some(121), "{forked}");
        assert!(forked.err.contains("fault was injected") && forked.err.contains(&parent), "{forked}");
        let alive = world.program(["attach", &parent, "--", "cat", "f"]).run();
        assert_eq!((alive.code, alive.out.as_str()), (Some(0), "here\n"), "{alive}");
        assert_eq!(world.program(["rm", &parent]).run().code, Some(0));
        nothing_left(&world)?;
    }
    Ok(())
}

#[test]
fn the_command_forks_keeps_and_says_what_it_cost() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let kept = world.program(["run", "--image", "host", "--keep", "--", "sh", "-c", "echo here > f"]).run();
    assert_eq!(kept.code, Some(0), "{kept}");
    let parent = world.program(["ps", "--json"]).run().json()["sandboxes"][0]["id"].as_str().context("id")?.to_owned();
    let forked = world.program(["fork", &parent, "--json"]).run();
    assert_eq!(forked.code, Some(0), "{forked}");
    let told = forked.json();
    assert_eq!(told["parent"], parent.as_str());
    assert!(told["cost"]["pause_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{told}");
    let child = told["id"].as_str().context("id")?.to_owned();
    let plain = world.program(["fork", &child]).run();
    assert_eq!(plain.code, Some(0), "{plain}");
    assert!(plain.err.contains("stood still"), "{plain}");
    let third = plain.out.trim().to_owned();
    let status = world.program(["fork", &third, "--", "sh", "-c", "cat; cat f; exit 7"]).input("in\n").run();
    assert_eq!((status.code, status.out.as_str()), (Some(7), "in\nhere\n"), "{status}");
    let unknown = world.program(["fork", "sb-nothing", "--json"]).run();
    assert_eq!(unknown.code, Some(120), "{unknown}");
    assert!(unknown.out.contains("sb-nothing") || unknown.err.contains("sb-nothing"), "{unknown}");
    assert_eq!(world.program(["ps", "--json"]).run().json()["sandboxes"].as_array().map(Vec::len), Some(3));
    assert_eq!(world.program(["rm", "--all"]).run().code, Some(0));
    Ok(())
}
