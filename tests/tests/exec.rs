//! Commands in a machine: streams, ends, limits, signals. The kinds of field-reports.md, section exec.

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use std::time::{Duration, Instant};
use trialrun_engine::{CallErrorKind, Output, Sandbox};
use trialrun_keeper::wire::Call;
use trialrun_model::{
    ByteSize, Command, DiskFull, Ended, ExecKind, ExecSpec, ExitStatus, Limits, PtySize, RefusalKind, SandboxSpec,
};
use trialrun_tests::{
    World, create, host, leftovers, program::Started, py, python, root_sh, run, sh, wait_for, wait_until,
};

/// Generous: a hang breaks it, a slow host does not.
const SOON: Duration = Duration::from_secs(10);

fn shell(line: &str) -> ExecSpec {
    ExecSpec::new(Command::Shell(line.to_owned()))
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn with_limits(limits: Limits) -> SandboxSpec {
    SandboxSpec { limits, ..host() }
}

/// E02.
#[test]
fn a_child_left_in_the_background_does_not_hold_the_exec() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let begun = Instant::now();
        let (left, right) = tokio::join!(sh(&sandbox, "sleep 30 & echo hi"), sh(&sandbox, "true"));
        let (left, right) = (left?, right?);
        ensure!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        ensure!(left.ok() && left.out == "hi\n" && right.ok(), "{left:?} {right:?}");
        ensure!(left.all.outcome.left_behind == 1, "{left:?}");
        let alive = sh(&sandbox, "pgrep -x sleep || echo none").await?;
        ensure!(alive.out == "none\n", "{alive:?}");
        Ok(sandbox.delete().await?)
    })
}

/// E03.
#[test]
fn eight_mebibytes_on_both_streams_arrive_intact() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let all =
            sh(&sandbox, "head -c 8388608 /dev/zero | tr '\\0' x; head -c 8388608 /dev/zero | tr '\\0' y >&2").await?;
        ensure!(all.ok());
        ensure!(sha(&all.all.stdout) == sha(&vec![b'x'; 8 << 20]) && sha(&all.all.stderr) == sha(&vec![b'y'; 8 << 20]));
        let alternating = "import sys\nfor i in range(8):\n os.write(1, b'x'*2**20); os.write(2, b'y'*2**20)\n";
        let all = py(
            &sandbox,
            None,
            &format!(
                "import os\ndef full(fd, data):\n  while data: data = data[os.write(fd, data):]\n{}",
                alternating.replace("os.write", "full")
            ),
        )
        .await?;
        ensure!(all.ok(), "{}", all.err.len());
        ensure!(sha(&all.all.stdout) == sha(&vec![b'x'; 8 << 20]) && sha(&all.all.stderr) == sha(&vec![b'y'; 8 << 20]));
        Ok(sandbox.delete().await?)
    })
}

/// E04.
#[test]
fn output_over_the_limit_is_cut_with_a_flag_and_exact_counts() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        const LIMIT: usize = 100_000;
        for (bytes, cut) in [(LIMIT - 1, false), (LIMIT, false), (LIMIT + 1, true)] {
            let got = sandbox.capture(shell(&format!("seq 1000000 | head -c {bytes}")), LIMIT).await?;
            ensure!(
                got.truncated() == cut && got.stdout_seen == bytes as u64,
                "{bytes}: {} {}",
                got.truncated(),
                got.stdout_seen
            );
            ensure!(got.stdout.len() == bytes.min(LIMIT) && got.stdout.starts_with(b"1\n2\n3\n"));
            ensure!(got.outcome.output.seen == bytes as u64);
        }
        Ok(sandbox.delete().await?)
    })
}

fn resident_kib(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).context("VmHWM")?;
    Ok(line.split_whitespace().nth(1).context("a number")?.parse()?)
}

/// E04, the second half.
#[test]
fn two_gibibytes_that_nobody_reads_stay_bounded_on_the_host_and_are_recorded() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let keeper = *leftovers::keepers(world.data()).first().context("a keeper")?;
        let before = resident_kib(keeper)?;
        let spec = ExecSpec { kind: ExecKind::Spawn, ..shell("head -c 2147483648 /dev/zero; echo end; exit 3") };
        let (exec, _) = sandbox.client().spawn(spec).await?.map_err(|o| anyhow::anyhow!("{o:?}"))?;
        let outcome = wait_for("the end of 2 GiB", Duration::from_secs(120), || async {
            let all = sandbox.execs().await.map_err(|e| e.to_string())?;
            all.into_iter().find(|e| e.exec == exec).and_then(|e| e.outcome).ok_or_else(|| "running".to_owned())
        })
        .await?;
        ensure!(outcome.status == Some(ExitStatus::Code(3)), "{outcome:?}");
        ensure!(outcome.output.seen == (2 << 30) + 4, "{outcome:?}");
        ensure!(outcome.output.dropped > 2_000_000_000, "{outcome:?}");
        let grown = resident_kib(keeper)?.saturating_sub(before);
        ensure!(grown < 50 << 10, "the keeper grew by {grown} KiB");
        // The end of it is still there, and what is missing is said.
        let (bytes, dropped, ended) = follow(&sandbox, exec, 0).await?;
        ensure!(bytes.ends_with(b"end\n") && dropped + bytes.len() as u64 == outcome.output.seen, "{dropped}");
        ensure!(ended.status == Some(ExitStatus::Code(3)));
        Ok(sandbox.delete().await?)
    })
}

async fn follow(
    sandbox: &Sandbox,
    exec: trialrun_model::ExecId,
    cursor: u64,
) -> Result<(Vec<u8>, u64, trialrun_model::ExecOutcome)> {
    let mut following = sandbox.client().attach(exec, cursor).await?;
    let (mut bytes, mut dropped) = (Vec::new(), 0);
    loop {
        match following.next().await? {
            Output::Stdout(b) | Output::Stderr(b) => bytes.extend_from_slice(&b),
            Output::Dropped(n) => dropped += n,
            Output::Ended(outcome) => return Ok((bytes, dropped, outcome)),
        }
    }
}

/// E05.
#[test]
fn a_character_split_across_writes_arrives_whole() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let split = world
        .program([
            "run",
            "--image",
            "host",
            "--",
            "bash",
            "-c",
            r"printf '\342'; sleep .1; printf '\230'; sleep .1; printf '\225\n'",
        ])
        .run();
    assert_eq!((split.code, split.out.as_str()), (Some(0), "☕\n"), "{split}");
    let many = world
        .program(["run", "--json", "--image", "host", "--", "python3", "-c", "print('☕' * 100_000, end='')"])
        .run();
    let text = many.json()["stdout"].as_str().unwrap_or_default().to_owned();
    assert_eq!(text.len(), 300_000, "{}", many.err);
    assert!(!text.contains('\u{fffd}'));
    Ok(())
}

/// E07.
#[test]
fn without_input_stdin_is_at_its_end_and_the_clients_own_open_pipe_does_not_matter() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for (line, code, out) in
            [("cat", 0, ""), ("grep x", 1, ""), ("python3 -c 'import sys;print(len(sys.stdin.read()))'", 0, "0\n")]
        {
            let ran = tokio::time::timeout(SOON, sh(&sandbox, line)).await.context(line)??;
            ensure!(ran.code() == Some(code) && ran.out == out, "{line}: {ran:?}");
        }
        Ok(sandbox.delete().await?)
    })?;
    // An open pipe that never says anything: the command does not read, so it must not matter.
    let mut command = world.program(["run", "--image", "host", "--", "echo", "done"]).into_command();
    command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut child = command.spawn()?;
    let pipe = child.stdin.take();
    let done = Started::new(child, Duration::from_secs(30)).finish();
    assert_eq!((done.code, done.out.as_str()), (Some(0), "done\n"), "{done}");
    drop(pipe);
    let text: String = (0..5 << 20).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
    let cat = world.program(["run", "--image", "host", "--", "cat"]).input(text.clone()).run();
    assert_eq!((cat.code, cat.out.len()), (Some(0), text.len()), "{}", cat.err);
    assert!(cat.out == text);
    let head = world.program(["run", "--image", "host", "--", "head", "-c", "3"]).input(text).run();
    assert_eq!((head.code, head.out.as_str()), (Some(0), "abc"), "{head}");
    Ok(())
}

/// E08.
#[test]
fn a_background_process_gets_end_of_file_and_refuses_input_after_it() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let spec = ExecSpec { stdin: true, kind: ExecKind::Spawn, ..ExecSpec::new(Command::argv(["tac"])) };
        let (exec, _) = sandbox.client().spawn(spec).await?.map_err(|o| anyhow::anyhow!("{o:?}"))?;
        sandbox.client().call(&Call::Input { exec, bytes: b"a\nb\n".to_vec(), end: true }, &[]).await?;
        let (bytes, _, outcome) = follow(&sandbox, exec, 0).await?;
        ensure!(bytes == b"b\na\n" && outcome.status == Some(ExitStatus::Code(0)), "{outcome:?}");
        let late = sandbox.client().call(&Call::Input { exec, bytes: b"c".to_vec(), end: false }, &[]).await;
        ensure!(
            late.as_ref().is_err_and(|e| e.kind == CallErrorKind::Invalid && e.message.contains("stdin")),
            "{late:?}"
        );
        Ok(sandbox.delete().await?)
    })
}

/// E10.
#[test]
fn programs_are_looked_up_in_the_path_of_their_own_environment() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let spec = SandboxSpec { env: vec![("PATH".to_owned(), "/workspace/x:/usr/bin:/bin".to_owned())], ..host() };
        let sandbox = create(&engine, spec).await?;
        ensure!(
            sh(
                &sandbox,
                "mkdir -p x y; echo 'echo from x' > x/tool; echo 'echo from y' > y/tool; chmod +x x/tool y/tool"
            )
            .await?
            .ok()
        );
        let tool = || ExecSpec::new(Command::argv(["tool"]));
        let by_machine = run(&sandbox, tool()).await?;
        let own = vec![(b"PATH".to_vec(), b"/workspace/y:/usr/bin:/bin".to_vec())];
        let by_call = run(&sandbox, ExecSpec { env: own, ..tool() }).await?;
        ensure!(by_machine.out == "from x\n" && by_call.out == "from y\n", "{by_machine:?} {by_call:?}");
        let facts =
            sh(&sandbox, "echo $LANG; pwd; id -un; echo $HOME; echo ${USER-none}; test -w . && echo writable").await?;
        let lines: Vec<&str> = facts.out.lines().collect();
        ensure!(lines.first() == Some(&"C.UTF-8") && lines.get(1) == Some(&"/workspace"), "{facts:?}");
        ensure!(lines.get(2).is_some_and(|u| *u != "root") && lines.last() == Some(&"writable"), "{facts:?}");
        Ok(sandbox.delete().await?)
    })
}

/// E11.
#[test]
fn what_cannot_be_started_is_a_typed_refusal_that_names_the_thing() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let argv = |words: &[&str]| ExecSpec::new(Command::argv(words.iter().copied()));
        let cases = [
            (ExecSpec { cwd: Some(b"/nope".to_vec()), ..argv(&["true"]) }, RefusalKind::BadCwd, "/nope"),
            (ExecSpec { cwd: Some(b"/etc/passwd".to_vec()), ..argv(&["true"]) }, RefusalKind::BadCwd, "/etc/passwd"),
            (ExecSpec { user: Some("nobody42".to_owned()), ..argv(&["true"]) }, RefusalKind::UnknownUser, "nobody42"),
            (argv(&["/etc/passwd"]), RefusalKind::NotExecutable, "/etc/passwd"),
            (argv(&["/nope"]), RefusalKind::NotFound, "/nope"),
            (argv(&["nope-in-path"]), RefusalKind::NotFound, "nope-in-path"),
            (argv(&[""]), RefusalKind::BadCommand, ""),
            (argv(&[]), RefusalKind::BadCommand, ""),
            (argv(&["echo", "a\0b"]), RefusalKind::BadCommand, ""),
            (argv(&["/usr"]), RefusalKind::NotExecutable, "/usr"),
        ];
        for (spec, kind, name) in cases {
            let what = format!("{spec:?}");
            let ran = run(&sandbox, spec).await?;
            let Ended::Refused(refusal) = &ran.all.outcome.ended else { anyhow::bail!("{what}: {ran:?}") };
            ensure!(refusal.kind == kind && refusal.message.contains(name), "{what}: {refusal:?}");
            ensure!(ran.all.outcome.status.is_none());
        }
        ensure!(sh(&sandbox, "true").await?.ok());
        Ok(sandbox.delete().await?)
    })
}

/// E12.
#[test]
fn a_command_outlives_the_connection_that_started_it_and_stays_listed_and_killable() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for kind in [ExecKind::Exec, ExecKind::Spawn] {
            let spec = ExecSpec { kind, ..shell("while :; do echo x >> /tmp/t; sleep 0.02; done") };
            let following = sandbox.exec(spec).await?;
            let exec = following.exec;
            drop(following);
            let size = async || {
                sh(&sandbox, "stat -c %s /tmp/t 2>/dev/null || echo 0")
                    .await
                    .map(|r| r.out.trim().parse::<u64>().unwrap_or(0))
            };
            let first = size().await?;
            wait_for("the file grows", SOON, || async {
                let now = size().await.map_err(|e| e.to_string())?;
                if now > first { Ok(()) } else { Err(format!("{now} bytes")) }
            })
            .await?;
            let listed = sandbox.execs().await?;
            ensure!(listed.iter().any(|e| e.exec == exec && e.outcome.is_none()), "{listed:?}");
            sandbox.kill(exec).await?;
            let ended = sandbox
                .execs()
                .await?
                .into_iter()
                .find(|e| e.exec == exec)
                .and_then(|e| e.outcome)
                .context("its outcome")?;
            ensure!(ended.ended == Ended::Killed, "{ended:?}");
            let alive = sh(&sandbox, "pgrep -f /tmp/[t] || echo none").await?;
            ensure!(alive.out == "none\n", "{alive:?}");
            sh(&sandbox, "rm -f /tmp/t").await?;
        }
        Ok(sandbox.delete().await?)
    })
}

/// E13.
#[test]
fn reattaching_with_a_cursor_loses_and_doubles_nothing() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let spec = ExecSpec {
            kind: ExecKind::Spawn,
            ..shell("i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); sleep 0.005; done; exit 7")
        };
        let (exec, _) = sandbox.client().spawn(spec).await?.map_err(|o| anyhow::anyhow!("{o:?}"))?;
        let mut seen = Vec::new();
        let outcome = 'all: loop {
            let mut following = sandbox.client().attach(exec, seen.len() as u64).await?;
            // Drops the connection after each third piece.
            for _ in 0..3 {
                match following.next().await? {
                    Output::Stdout(bytes) => seen.extend_from_slice(&bytes),
                    Output::Ended(outcome) => break 'all outcome,
                    other => anyhow::bail!("{other:?}"),
                }
            }
        };
        let want: String = (0..200).map(|i| format!("{i}\n")).collect();
        ensure!(String::from_utf8_lossy(&seen) == want);
        ensure!(outcome.status == Some(ExitStatus::Code(7)), "{outcome:?}");
        let (again, dropped, later) = follow(&sandbox, exec, 0).await?;
        ensure!(again == want.as_bytes() && dropped == 0 && later.status == Some(ExitStatus::Code(7)));
        let none = sandbox.client().attach(trialrun_model::ExecId(9999), 0).await?.next().await;
        ensure!(none.as_ref().is_err_and(|e| e.kind == CallErrorKind::NotFound), "{none:?}");
        Ok(sandbox.delete().await?)
    })
}

/// E15.
#[test]
fn the_environment_arrives_byte_for_byte_and_bad_names_are_refused() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let values: Vec<(&[u8], Vec<u8>)> = vec![
            (b"QUOTES", b"x'y\"z $HOME `id` %s".to_vec()),
            (b"NEWLINE", b"a\nb\n".to_vec()),
            (b"EMPTY", Vec::new()),
            (b"LONG", vec![b'q'; 100 << 10]),
            (b"NOT_UTF8", vec![0xff, 0xfe]),
            (b"odd-name.1", b"fine".to_vec()),
        ];
        let env = values.iter().map(|(n, v)| (n.to_vec(), v.clone())).collect();
        let got =
            run(&sandbox, ExecSpec { env, ..ExecSpec::new(Command::argv(["cat", "/proc/self/environ"])) }).await?;
        let entries: Vec<&[u8]> = got.all.stdout.split(|b| *b == 0).collect();
        for (name, value) in &values {
            let want = [*name, b"=", value.as_slice()].concat();
            ensure!(entries.contains(&want.as_slice()), "{}", String::from_utf8_lossy(name));
        }
        for (name, value) in [
            (&b"B=C"[..], &b"x"[..]),
            (b"", b"x"),
            (b"A\0B", b"x"),
            (b"A", b"x\0y"),
            (b"A;touch /tmp/p", b"x"),
            (b"`touch /tmp/p`", b"x"),
            (b"A\ntouch /tmp/p", b"x"),
        ] {
            let spec =
                ExecSpec { env: vec![(name.to_vec(), value.to_vec())], ..ExecSpec::new(Command::argv(["true"])) };
            let ran = run(&sandbox, spec).await?;
            ensure!(
                matches!(&ran.all.outcome.ended, Ended::Refused(r) if r.kind == RefusalKind::BadEnv),
                "{name:?}: {ran:?}"
            );
        }
        // More than a message holds is the caller's mistake, and the machine lives on.
        let huge = run(&sandbox, ExecSpec::new(Command::argv(["echo".to_owned(), "x".repeat(400 << 10)]))).await;
        ensure!(huge.as_ref().is_err_and(|e| e.to_string().contains("limit")), "{huge:?}");
        ensure!(sh(&sandbox, "test -e /tmp/p").await?.code() == Some(1));
        Ok(sandbox.delete().await?)
    })
}

/// E16.
#[test]
fn a_busy_loop_goes_with_its_client_when_that_is_killed() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let loops = "echo started; (setsid sh -c 'trap \"\" TERM INT HUP; while :; do :; done' &); while :; do :; done";
    let client = world.program(["run", "--image", "host", "--timeout", "20", "--", "sh", "-c", loops]).start();
    wait_until("the loops run", SOON, || match leftovers::pids_inside(world.data()).len() {
        n if n >= 3 => Ok(()),
        n => Err(format!("{n} processes")),
    })?;
    client.signal(rustix::process::Signal::KILL);
    client.finish();
    wait_until("everything is gone", SOON, || {
        let pids = leftovers::pids_inside(world.data());
        if pids.is_empty() && leftovers::keepers(world.data()).is_empty() { Ok(()) } else { Err(format!("{pids:?}")) }
    })?;
    world.collect();
    Ok(())
}

#[test]
fn a_deadline_kills_the_whole_tree_and_keeps_the_output_so_far() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let tree = "trap '' TERM; echo before; for i in 1 2 3; do setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000' & done; sleep 1000";
        let ran = run(&sandbox, ExecSpec { deadline: Some(Duration::from_millis(600)), ..shell(tree) }).await?;
        ensure!(ran.all.outcome.ended == Ended::TimedOut && ran.out == "before\n", "{ran:?}");
        ensure!(ran.all.outcome.wall >= Duration::from_millis(600) && ran.all.outcome.wall < SOON, "{ran:?}");
        let alive = sh(&sandbox, "pgrep -x sleep || echo none").await?;
        ensure!(alive.out == "none\n", "{alive:?}");
        Ok(sandbox.delete().await?)
    })?;
    let ran =
        world.program(["run", "--image", "host", "--timeout", "1", "--", "sh", "-c", "echo kept; sleep 100"]).run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(124), "kept\n"), "{ran}");
    assert!(ran.err.contains("timed out"), "{ran}");
    Ok(())
}

#[test]
fn signals_and_exit_codes_are_told_apart() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for (line, want) in [
            ("exit 137", ExitStatus::Code(137)),
            ("kill -9 $$", ExitStatus::Signal(9)),
            ("kill -15 $$", ExitStatus::Signal(15)),
            ("exit 255", ExitStatus::Code(255)),
            ("kill -11 $$", ExitStatus::Signal(11)),
        ] {
            let ran = sh(&sandbox, line).await?;
            ensure!(ran.all.outcome.status == Some(want) && ran.all.outcome.ended == Ended::Exited, "{line}: {ran:?}");
        }
        // A signal from outside reaches the leader, and its handler's exit code is told.
        let spec = ExecSpec {
            kind: ExecKind::Spawn,
            ..shell("trap 'echo got; exit 42' USR1; echo ready; while :; do sleep 0.05; done")
        };
        let mut following = sandbox.exec(spec).await?;
        let exec = following.exec;
        let mut out = Vec::new();
        let outcome = loop {
            match following.next().await? {
                Output::Stdout(bytes) => {
                    out.extend_from_slice(&bytes);
                    if out == b"ready\n" {
                        sandbox.client().call(&Call::Signal { exec, signal: 10, group: false }, &[]).await?;
                    }
                }
                Output::Ended(outcome) => break outcome,
                other => anyhow::bail!("{other:?}"),
            }
        };
        ensure!(out == b"ready\ngot\n" && outcome.status == Some(ExitStatus::Code(42)), "{outcome:?}");
        Ok(sandbox.delete().await?)
    })?;
    for (line, code) in [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("exit 119", 119)] {
        let ran = world.program(["run", "--image", "host", "--", "sh", "-c", line]).run();
        assert_eq!(ran.code, Some(code), "{line}: {ran}");
    }
    for (words, code, told) in [(vec!["nope-42"], 127, "nope-42"), (vec!["/etc/passwd"], 126, "/etc/passwd")] {
        let ran = world.program(["run", "--image", "host", "--"]).args(words).run();
        assert!(ran.code == Some(code) && ran.err.contains(told), "{ran}");
    }
    Ok(())
}

#[test]
fn running_out_of_memory_is_named_and_the_machine_lives_on() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let eat = "b = bytearray(512 << 20)\nprint(len(b))";
    world.run(async |engine| {
        let sandbox = create(&engine, with_limits(Limits { memory: ByteSize::mib(64), ..Limits::default() })).await?;
        let ran = py(&sandbox, None, eat).await?;
        ensure!(ran.all.outcome.ended == Ended::OutOfMemory, "{ran:?}");
        ensure!(ran.all.outcome.status == Some(ExitStatus::Signal(9)), "{ran:?}");
        ensure!(sandbox.usage().await?.oom_kills >= 1);
        ensure!(sh(&sandbox, "echo alive").await?.out == "alive\n");
        // The next failure has a reason of its own.
        ensure!(sh(&sandbox, "exit 3").await?.code() == Some(3));
        Ok(sandbox.delete().await?)
    })?;
    let ran = world.program(["run", "--image", "host", "--memory", "64M", "--", "python3", "-c", eat]).run();
    assert!(ran.code == Some(137) && ran.err.contains("memory"), "{ran}");
    Ok(())
}

#[test]
fn forking_without_end_meets_the_limit_and_the_machine_lives_on() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, with_limits(Limits { pids: 64, ..Limits::default() })).await?;
        let bomb = "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1000)\n    n += 1\nexcept OSError as e:\n  print(n, e.errno)\n";
        let ran = py(&sandbox, None, bomb).await?;
        let words: Vec<&str> = ran.out.split_whitespace().collect();
        ensure!(words.get(1) == Some(&"11") && words.first().and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n > 20 && n < 64), "{ran:?}");
        ensure!(sandbox.usage().await?.pids_refused > 0);
        ensure!(sh(&sandbox, "echo alive").await?.out == "alive\n");
        // A bomb that goes on for ever ends at its deadline.
        let ran = run(&sandbox, ExecSpec { deadline: Some(Duration::from_secs(1)), ..shell(":(){ :|:& };:; sleep 100") }).await?;
        ensure!(matches!(ran.all.outcome.ended, Ended::TimedOut | Ended::Exited), "{:?}", ran.all.outcome);
        wait_for("the machine takes commands again", SOON, || async {
            match sh(&sandbox, "echo alive").await {
                Ok(ran) if ran.out == "alive\n" => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_full_disk_is_an_error_inside_named_in_the_result_and_harmless_outside() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, with_limits(Limits { disk: ByteSize::mib(32), ..Limits::default() })).await?;
        let neighbour = create(&engine, host()).await?;
        let fill = "import os\ntry:\n  f = open('/workspace/big', 'wb')\n  while True: f.write(os.urandom(1 << 20)); f.flush(); os.fsync(f.fileno())\nexcept OSError as e:\n  print(e.errno, flush=True); os._exit(9)\n";
        let ran = py(&sandbox, None, fill).await?;
        ensure!(matches!(ran.out.trim(), "28" | "122") && ran.code() == Some(9), "{ran:?}");
        ensure!(ran.all.outcome.disk_full == Some(DiskFull::Limit), "{ran:?}");
        let size = sh(&sandbox, "stat -c %s /workspace/big").await?.out.trim().parse::<u64>()?;
        ensure!(size <= 32 << 20, "{size}");
        // The neighbour in the same pool does not notice.
        ensure!(sh(&neighbour, "head -c 50M /dev/zero > f && sync f && stat -c %s f").await?.out == "52428800\n");
        // Room again after a removal.
        let again = sh(&sandbox, "rm big && sync && head -c 8M /dev/zero > small && stat -c %s small").await?;
        ensure!(again.out == "8388608\n" && again.all.outcome.disk_full.is_none(), "{again:?}");
        neighbour.delete().await?;
        Ok(sandbox.delete().await?)
    })?;
    let ran = world
        .program(["run", "--image", "host", "--disk", "32M", "--", "sh", "-c", "head -c 100M /dev/urandom > f"])
        .run();
    assert!(ran.code == Some(1) && ran.err.contains("--disk"), "{ran}");
    Ok(())
}

#[test]
fn a_disk_limit_is_reached_at_the_limit_whatever_came_before() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    let Some(world) = World::new() else { return Ok(()) };
    let stat = rustix::fs::statvfs(world.data())?;
    // What the pool promises: all of a limit that is at most an eighth of what the host has left.
    let free = stat.f_bavail * stat.f_frsize;
    let limit = ByteSize::mib((free >> 20) / 16).min(ByteSize::gib(6));
    let spec = || with_limits(Limits { disk: limit, ..Limits::default() });
    world.run(async |engine| {
        let most = limit.bytes() - (64 << 20);
        for _ in 0..3 {
            let sandbox = create(&engine, spec()).await?;
            // Taken at once, faster than any program writes.
            let ran = sh(&sandbox, &format!("fallocate -l {most} f && stat -c %s f")).await?;
            ensure!(ran.out.trim() == most.to_string(), "{ran:?}");
            let ran = sh(&sandbox, "fallocate -l 128M g").await?;
            ensure!(!ran.ok() && ran.err.contains("Disk quota exceeded"), "{ran:?}");
            // Left as it is: the next one finds its whole limit all the same.
            sandbox.delete().await?;
        }
        Ok(())
    })
}

#[test]
fn sudo_pip_and_low_ports_work_as_on_a_machine_of_ones_own() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, python()).await?;
        let ran = sh(&sandbox, "sudo -n id -u; sudo -n apt-get --version | head -1; sudo -n -u root whoami").await?;
        ensure!(ran.ok() && ran.out.starts_with("0\napt ") && ran.out.ends_with("root\n"), "{ran:?}");
        let ran = root_sh(&sandbox, "id -u; touch /root/x /etc/x /usr/bin/x && echo wrote; useradd -m someone && su someone -c id").await?;
        ensure!(ran.out.starts_with("0\nwrote\nuid="), "{ran:?}");
        // Without a virtual environment, and without a network: from a folder.
        ensure!(sh(&sandbox, "mkdir -p p && cd p && printf '[build-system]\\nrequires = []\\nbuild-backend = \"b\"\\nbackend-path = [\".\"]\\n[project]\\nname = \"tiny\"\\nversion = \"1\"\\n' > pyproject.toml && cat > b.py <<'E'
import zipfile
def build_wheel(d, config_settings=None, metadata_directory=None):
    name = 'tiny-1-py3-none-any.whl'
    with zipfile.ZipFile(d + '/' + name, 'w') as z:
        z.writestr('tiny.py', 'answer = 42')
        z.writestr('tiny-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n')
        z.writestr('tiny-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
        z.writestr('tiny-1.dist-info/RECORD', '')
    return name
E").await?.ok());
        let ran = sh(&sandbox, "pip install ./p && cd / && python3 -c 'import tiny; print(tiny.answer)'").await?;
        ensure!(ran.ok() && ran.out.ends_with("42\n"), "{ran:?}");
        let listen = "import socket\ns = socket.socket(); s.bind(('0.0.0.0', 80)); s.listen(); print('bound')";
        ensure!(py(&sandbox, None, listen).await?.out == "bound\n");
        let own = "import socket, threading\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nc = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.send(b'hi'); print(a.recv(2))";
        ensure!(py(&sandbox, None, own).await?.out == "b'hi'\n");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_spawned_process_outlives_its_leader_and_its_starter() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let spec = ExecSpec {
            kind: ExecKind::Spawn,
            ..shell("(sleep 0.2; echo late > late; exec sleep 1000) & echo started")
        };
        let (exec, pid) = sandbox.client().spawn(spec).await?.map_err(|o| anyhow::anyhow!("{o:?}"))?;
        ensure!(pid > 1);
        wait_for("the leader ends, its child goes on", SOON, || async {
            let execs = sandbox.execs().await.map_err(|e| e.to_string())?;
            let ended = execs.iter().any(|e| e.exec == exec && e.outcome.is_some());
            let late = sh(&sandbox, "cat late; pgrep -x sleep").await.map_err(|e| e.to_string())?;
            if ended && late.ok() && late.out.starts_with("late") { Ok(()) } else { Err(format!("{ended} {late:?}")) }
        })
        .await?;
        // A kill by id reaches what the leader left.
        sandbox.kill(exec).await?;
        wait_for("the child is gone", SOON, || async {
            match sh(&sandbox, "pgrep -x sleep").await {
                Ok(ran) if ran.code() == Some(1) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn fifty_machines_made_at_once_all_succeed() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let engine = &engine;
        let all = (0..50).map(|i| async move {
            let sandbox = create(engine, host()).await?;
            let ran = sh(&sandbox, &format!("echo {i}")).await?;
            ensure!(ran.out == format!("{i}\n"), "{ran:?}");
            anyhow::Ok(sandbox)
        });
        let mut tasks: Vec<_> = all.map(Box::pin).collect();
        let mut made = Vec::new();
        // Polled together: the machines start at once.
        std::future::poll_fn(|cx| {
            tasks.retain_mut(|task| match task.as_mut().poll(cx) {
                std::task::Poll::Ready(result) => {
                    made.push(result);
                    false
                }
                std::task::Poll::Pending => true,
            });
            if tasks.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        let machines = made.into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(machines.len() == 50 && engine.list()?.len() == 50);
        for machine in machines {
            machine.delete().await?;
        }
        ensure!(engine.list()?.is_empty());
        Ok(())
    })
}

#[test]
fn ctrl_c_ends_the_machine_and_the_exit_status_says_so() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    for (signal, code) in
        [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143), (rustix::process::Signal::HUP, 129)]
    {
        let client =
            world.program(["run", "--image", "host", "--", "sh", "-c", "trap '' INT TERM HUP; sleep 1000"]).start();
        wait_until("the command runs", SOON, || match leftovers::pids_inside(world.data()).len() {
            n if n >= 3 => Ok(()),
            n => Err(format!("{n} processes")),
        })?;
        client.signal(signal);
        let ended = client.finish();
        assert_eq!(ended.code, Some(code), "{ended}");
        wait_until("without any next start nothing is left", SOON, || {
            let left = world.leftovers();
            if left.is_empty() { Ok(()) } else { Err(left.to_string()) }
        })?;
    }
    Ok(())
}

/// More than all buffers on the way hold, in both directions at once, and more than a command reads.
#[test]
fn input_and_output_of_any_size_flow_at_once_and_hold_no_signal() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let line = |words: &[&str]| world.program(["run", "--image", "host", "--"]).args(words);
    let much: Vec<u8> = (0..64u32 << 20).map(|n| b'a' + (n % 23) as u8).collect();
    let echoed = line(&["cat"]).input(much.clone()).run();
    ensure!(echoed.code == Some(0) && echoed.out.as_bytes() == much, "{} bytes came back", echoed.out.len());
    let head = line(&["head", "-c", "3"]).input(much.clone()).run();
    assert_eq!((head.code, head.out.as_str()), (Some(0), "abc"), "{head}");
    let client = line(&["sh", "-c", "echo started; exec sleep 1000"]).input(much).start();
    wait_until("the command runs", SOON, || match leftovers::pids_inside(world.data()).len() {
        n if n >= 2 => Ok(()),
        n => Err(format!("{n} processes")),
    })?;
    client.signal(rustix::process::Signal::TERM);
    let ended = client.finish();
    assert_eq!(ended.code, Some(143), "{ended}");
    Ok(())
}

/// What a program on a terminal does not read waits outside of the machine.
#[test]
fn a_terminal_takes_input_as_fast_as_it_is_read() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let count: usize = 8 << 20;
        let reads = format!("stty raw -echo; echo ready; read go < /tmp/go; head -c {count} | wc -c");
        ensure!(sh(&sandbox, "mkfifo /tmp/go").await?.ok());
        let spec = ExecSpec { pty: Some(PtySize { rows: 24, cols: 80 }), ..shell(&reads) };
        let mut following = sandbox.exec(spec).await?;
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("ready") {
            match following.next().await? {
                Output::Stdout(bytes) => seen.extend(bytes),
                other => anyhow::bail!("{other:?}"),
            }
        }
        let stdin = following.stdin();
        let feed = async {
            for _ in 0..count >> 16 {
                stdin.write(&[b'x'; 1 << 16]).await?;
            }
            anyhow::Ok(())
        };
        let rest = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let agent = sh(&sandbox, "grep VmRSS /proc/1/status; echo > /tmp/go").await?;
            let kib = agent.out.split_whitespace().nth(1).map(str::parse::<usize>);
            ensure!(matches!(kib, Some(Ok(kib)) if kib < 4096), "the guest agent has {kib:?} KiB");
            loop {
                match following.next().await? {
                    Output::Stdout(bytes) => seen.extend(bytes),
                    Output::Ended(outcome) => return Ok(outcome),
                    other => anyhow::bail!("{other:?}"),
                }
            }
        };
        let (fed, outcome) = tokio::join!(feed, rest);
        fed?;
        ensure!(outcome?.status == Some(ExitStatus::Code(0)));
        let said = String::from_utf8_lossy(&seen).into_owned();
        ensure!(said.contains(&count.to_string()), "{said:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn on_a_terminal_the_command_has_a_terminal_of_the_same_size_and_ctrl_c_is_its_own() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    // Python's pty module is the terminal; the program under test is its only process.
    let driver = r#"
import os, pty, sys, struct, fcntl, termios, select, signal, time
argv = sys.argv[1:]
pid, fd = pty.fork()
if pid == 0:
    os.execv(argv[0], argv)
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', 33, 77, 0, 0))
seen = b''
def until(what):
    global seen
    end = time.time() + 20
    while what not in seen:
        if time.time() > end: print('no', what, seen); os.kill(pid, 9); sys.exit(1)
        if select.select([fd], [], [], 0.2)[0]:
            try: seen += os.read(fd, 4096)
            except OSError: break
until(b'ready')
os.write(fd, b'stty size\n'); until(b'33 77')
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', 44, 99, 0, 0)); os.kill(pid, signal.SIGWINCH)
for _ in range(50):
    os.write(fd, b'stty size\n'); time.sleep(0.05)
    if select.select([fd], [], [], 0.2)[0]: seen += os.read(fd, 4096)
    if b'44 99' in seen: break
until(b'44 99')
os.write(fd, b'test -t 0 && test -t 1 && echo is-a-$((40+2))-tty\n'); until(b'is-a-42-tty')
os.write(fd, b'bash -c "trap \'echo c""aught; exit\' INT; echo g""o; while :; do sleep 0.1; done"\n'); until(b'\rgo'); os.write(fd, b'\x03'); until(b'^Ccaught')
os.write(fd, b'exit 7\n')
try:
    while os.read(fd, 4096): pass
except OSError: pass
_, status = os.waitpid(pid, 0)
print('status', os.waitstatus_to_exitcode(status))
"#;
    let inner = world
        .program([
            "run",
            "--image",
            "host",
            "--",
            "bash",
            "--norc",
            "--noprofile",
            "-c",
            "echo rea''dy; exec bash --norc --noprofile -i",
        ])
        .into_command();
    let mut command = std::process::Command::new("/usr/bin/python3");
    command.arg("-c").arg(driver).arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("TERM", "xterm").stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let ran = Started::new(command.spawn()?, Duration::from_secs(60)).finish();
    assert_eq!(ran.out.trim(), "status 7", "{ran}");
    Ok(())
}

#[test]
fn more_processors_than_the_host_has_are_accepted_and_said() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
        let sandbox = create(&engine, with_limits(Limits { vcpus: cores + 3, ..Limits::default() })).await?;
        let ran = sh(&sandbox, "echo $PYTEST_XDIST_AUTO_NUM_WORKERS; nproc").await?;
        ensure!(ran.out == format!("{}\n{cores}\n", cores + 3), "{ran:?}");
        let notes = sandbox.isolation().notes.join(" ");
        ensure!(notes.contains(&(cores + 3).to_string()), "{notes}");
        let one = create(&engine, with_limits(Limits { vcpus: 1, ..Limits::default() })).await?;
        let ran = sh(&one, "nproc; echo $PYTEST_XDIST_AUTO_NUM_WORKERS").await?;
        ensure!(ran.out == "1\n1\n", "{ran:?}");
        one.delete().await?;
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn cpu_time_of_a_daemonised_grandchild_is_counted() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let burn = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork(): os._exit(0)\n  while time.process_time() < 0.4: pass\n  os._exit(0)\nos.wait()\ntime.sleep(1)\n";
        let ran = py(&sandbox, None, burn).await?;
        ensure!(ran.ok() && ran.all.outcome.cpu >= Duration::from_millis(350), "{:?}", ran.all.outcome);
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_reader_that_goes_away_ends_the_run() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let mut command = world.program(["run", "--image", "host", "--", "yes"]).into_command();
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .stdin(std::process::Stdio::null());
    let mut child = command.spawn()?;
    let mut out = child.stdout.take().context("stdout")?;
    let mut first = [0; 4];
    std::io::Read::read_exact(&mut out, &mut first)?;
    drop(out);
    let ended = Started::new(child, Duration::from_secs(30)).finish();
    assert_eq!(ended.code, Some(141), "{ended}");
    Ok(())
}
