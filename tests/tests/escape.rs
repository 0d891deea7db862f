//! Attacks on every barrier, one row of the threat model's table each: from inside, from a neighbour, from an image and
//! from the guest agent itself.

use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::{SocketAddr, UnixListener},
        },
    },
    path::Path,
    time::Duration,
};
use trialrun_engine::{CallErrorKind, CreateError, DownloadLimits, Engine, Guest, Sandbox, UploadRules};
use trialrun_keeper::wire::FileOp;
use trialrun_model::{ByteSize, Command, Ended, ExecSpec, Limits, SandboxSpec};
use trialrun_tests::{World, create, host, leftovers, py, python, root_sh, run, sh, wait_until};

/// Most of them: what one process inside can try.
const ROWS: &str = include_str!("escape/rows.py");
const ROWS_TEST: &str = "every_row_is_refused_to_the_user_and_to_root";
const THREAT_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/threat-model.md");
/// For an answer of a machine that is under attack.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rows of the table by their number, with the tests that they name.
fn documented() -> Result<BTreeMap<String, Vec<String>>> {
    let mut rows = BTreeMap::new();
    for line in fs::read_to_string(THREAT_MODEL)?.lines().filter(|l| l.starts_with("| B")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let tests = cells.last().context("cells")?.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let fresh = rows.insert(cells[0].to_owned(), tests).is_none();
        ensure!(fresh, "{} is there twice", cells[0]);
    }
    Ok(rows)
}

async fn try_rows(sandbox: &Sandbox, user: Option<&str>) -> Result<BTreeSet<String>> {
    let spec = ExecSpec {
        user: user.map(str::to_owned),
        deadline: Some(Duration::from_secs(120)),
        ..ExecSpec::new(Command::argv(["python3", "-c", ROWS]))
    };
    let ran = run(sandbox, spec).await?;
    ensure!(ran.ok(), "{ran:?}");
    let (mut names, mut open) = (BTreeSet::new(), Vec::new());
    for line in ran.out.lines() {
        let said: serde_json::Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        if said["open"] != serde_json::json!([]) || said["answers"] == 0 {
            open.push(line.to_owned());
        }
        names.insert(said["row"].as_str().context("a row's name")?.to_owned());
    }
    ensure!(open.is_empty(), "open to {user:?}: {open:#?}");
    Ok(names)
}

#[test]
fn every_row_is_refused_to_the_user_and_to_root() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let wanted: BTreeSet<String> = documented()?
        .into_iter()
        .filter(|(_, tests)| tests.iter().any(|t| t == ROWS_TEST))
        .map(|(name, _)| name)
        .collect();
    world.run(async |engine| {
        for spec in [python(), host()] {
            let sandbox = create(&engine, spec).await?;
            for user in [None, Some("root")] {
                let tried = try_rows(&sandbox, user).await?;
                ensure!(tried == wanted, "documented and not tried, or the other way: {:?}", &tried ^ &wanted);
            }
            ensure!(sh(&sandbox, "echo alive").await?.out == "alive\n");
            sandbox.delete().await?;
        }
        Ok(())
    })
}

#[test]
fn the_threat_model_has_its_rows() -> Result<()> {
    let rows = documented()?;
    ensure!(rows.len() >= 60, "{} rows", rows.len());
    for (name, tests) in rows {
        ensure!(!tests.is_empty(), "{name} names no test");
    }
    Ok(())
}

#[test]
fn a_process_that_kills_everything_it_may_ends_itself_alone() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for user in ["root", "runtime"] {
            for line in ["kill -9 -1; kill -9 1", "kill -STOP -1; kill -STOP 1; kill -9 $$"] {
                let spec = ExecSpec {
                    user: Some(user.to_owned()),
                    deadline: Some(Duration::from_secs(10)),
                    ..ExecSpec::new(Command::Shell(line.to_owned()))
                };
                let ran = run(&sandbox, spec).await?;
                ensure!(ran.all.outcome.ended != Ended::MachineLost, "{ran:?}");
            }
            ensure!(sh(&sandbox, "echo alive").await?.out == "alive\n");
        }
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn abstract_sockets_of_the_host_and_of_a_machine_do_not_meet() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let name = format!("trialrun-escape-{}", std::process::id());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let code = format!("import socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect('\\0{name}')\nexcept OSError as e: print(e.errno)\nelse: print('open')\ns = socket.socket(socket.AF_UNIX); s.bind('\\0{name}'); print('mine')");
        let ran = py(&sandbox, Some("root"), &code).await?;
        ensure!(ran.out == "111\nmine\n", "{ran:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_working_directory_or_program_by_a_descriptor_leads_nowhere_outside() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let inside = root_sh(&sandbox, "stat -c %d:%i /").await?.out;
        let mut places: Vec<String> = (0..20).map(|fd| format!("/proc/self/fd/{fd}")).collect();
        places.extend(
            ["/proc/1/cwd", "/proc/1/root", "/proc/1/root/..", "/dev/fd/3", "/proc/self/fd/7/../../.."]
                .map(str::to_owned),
        );
        for place in places {
            for (cwd, program) in [(place.as_str(), "/bin/sh".to_owned()), ("/", format!("{place}/bin/sh"))] {
                let spec = ExecSpec {
                    cwd: Some(cwd.as_bytes().to_vec()),
                    user: Some("root".to_owned()),
                    ..ExecSpec::new(Command::argv([
                        &program,
                        "-c",
                        "cd /proc/self/cwd && while [ \"$(pwd -P)\" != / ]; do cd ..; done; stat -c %d:%i .",
                    ]))
                };
                let ran = run(&sandbox, spec).await?;
                let refused = matches!(ran.all.outcome.ended, Ended::Refused(_)) || !ran.ok();
                ensure!(refused || ran.out == inside, "{cwd} {program}: {ran:?}");
            }
        }
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_setuid_program_of_a_machine_is_nobodys_on_the_host() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let made =
            root_sh(&sandbox, "install -o root -m 6755 /bin/sh /workspace/shell && stat -c %u:%a /workspace/shell")
                .await?;
        ensure!(made.out == "0:6755\n", "{made:?}");
        // Through the one way there is to it, that of the host's root.
        let pid = leftovers::pids_inside(world.data()).into_iter().next().context("a process inside")?;
        let seen = fs::metadata(format!("/proc/{pid}/root/workspace/shell"))?;
        ensure!(seen.uid() >= 0x1000_0000 && seen.gid() >= 0x1000_0000, "{} {}", seen.uid(), seen.gid());
        ensure!(fs::metadata(world.data())?.mode() & 0o077 == 0);
        let mut dirs = vec![world.data().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir)?.flatten() {
                let meta = entry.path().symlink_metadata()?;
                // Layers in plain directories are below the data directory, which nobody else may enter.
                ensure!(
                    !meta.is_file() || meta.mode() & 0o6000 == 0 || meta.uid() >= 0x1000_0000,
                    "{}",
                    entry.path().display()
                );
                if meta.is_dir() {
                    dirs.push(entry.path());
                }
            }
        }
        Ok(sandbox.delete().await?)
    })
}

/// Swaps what lies at a name all the time, between a folder and links out of it.
const SWAP: &str = "mkdir -p t/real; echo content > t/real/f; cp -r t/real t/x; \
    while :; do ln -sfn / t/x.new; mv -T t/x t/old 2>/dev/null; mv -T t/x.new t/x; ln -sfn ../../../../../../../../../../tmp t/x.new; \
    mv -fT t/x.new t/x; rm -f t/x; rm -rf t/old; cp -r t/real t/x; done";

#[test]
fn names_that_change_while_they_travel_lead_nowhere_outside() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let (down, up, outside) =
        (world.scratch().join("down"), world.scratch().join("up"), world.scratch().join("outside"));
    fs::create_dir_all(up.join("x"))?;
    fs::create_dir(&outside)?;
    fs::write(outside.join("secret"), "secret of the host")?;
    fs::write(up.join("x/f"), "mine")?;
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        sandbox
            .client()
            .spawn(ExecSpec::new(Command::Shell(SWAP.to_owned())))
            .await?
            .map_err(|o| anyhow::anyhow!("{o:?}"))?;
        // On the host's side the names change too.
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (swapped, stopped, target) = (up.join("x"), stop.clone(), outside.clone());
        let swapper = std::thread::spawn(move || {
            let aside = swapped.with_file_name("aside");
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = fs::rename(&swapped, &aside);
                let _ = std::os::unix::fs::symlink(&target, &swapped);
                let _ = fs::remove_file(&swapped);
                let _ = fs::rename(&aside, &swapped);
            }
        });
        let mut whole = 0;
        for round in 0..40 {
            let dest = down.join(round.to_string());
            fs::create_dir_all(&dest)?;
            // A folder that changes may be refused; what counts is where anything lands.
            whole += usize::from(sandbox.download("/workspace/t", &dest, DownloadLimits::default()).await.is_ok());
            let _ = sandbox.upload(&up, "/workspace/up", UploadRules::default()).await;
            let stolen = sh(&sandbox, "grep -rs 'secret of the host' /workspace/up; true").await?;
            ensure!(stolen.out.is_empty(), "{stolen:?}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        swapper.join().map_err(|_| anyhow::anyhow!("the swapping thread"))?;
        ensure!(whole > 0, "not one download came through");
        ensure!(fs::read_dir(&outside)?.count() == 1);
        let mut dirs = vec![down.clone()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir)?.flatten() {
                let kind = entry.file_type()?;
                if kind.is_symlink() {
                    let target = fs::read_link(entry.path())?;
                    ensure!(target.is_relative() && !target.starts_with(".."), "{}", target.display());
                } else if kind.is_dir() {
                    dirs.push(entry.path());
                }
            }
        }
        Ok(sandbox.delete().await?)
    })
}

/// What one machine does to take all there is, and what its neighbour must still be able to do meanwhile.
async fn beside(engine: &Engine, limits: Limits, hog: (Option<&str>, &str), neighbour: &str) -> Result<()> {
    let (one, two) = (
        create(engine, SandboxSpec { limits, ..host() }).await?,
        create(engine, SandboxSpec { limits, ..host() }).await?,
    );
    let spec = ExecSpec { user: hog.0.map(str::to_owned), ..ExecSpec::new(Command::argv(["python3", "-c", hog.1])) };
    let mut following = one.exec(spec).await?;
    // It says when it has all that it can get.
    let taken = async {
        loop {
            match following.next().await? {
                trialrun_engine::Output::Stdout(bytes) => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
                trialrun_engine::Output::Ended(outcome) => bail!("the hog ended: {outcome:?}"),
                _ => {}
            }
        }
    };
    let taken = tokio::time::timeout(Duration::from_secs(60), taken).await.context("the hog takes for ever")??;
    let ran = tokio::time::timeout(PATIENCE, py(&two, None, neighbour)).await.context("the neighbour hangs")??;
    ensure!(ran.ok() && ran.out == "fine\n", "after the other took {taken}: {ran:?}");
    // The host too.
    ensure!(std::process::Command::new("true").status()?.success());
    one.delete().await?;
    Ok(two.delete().await?)
}

const SMALL: Limits = Limits { vcpus: 1, memory: ByteSize(256 << 20), pids: 256, disk: ByteSize(64 << 20) };

/// Python that calls something until it fails, says how often, and stays.
fn until_refused(setup: &str, call: &str) -> String {
    format!(
        "import os, sys, time, socket, ctypes, resource\nkept = []\n{setup}\n\
         try:\n while True: kept.append({call})\nexcept (OSError, MemoryError) as e: print(len(kept), e, flush=True)\ntime.sleep(600)"
    )
}

fn hogs(setup: &str, call: &str, neighbour: &str) -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let hog = until_refused(setup, call);
    world.run(async |engine| {
        beside(&engine, SMALL, (None, &hog), &format!("{neighbour}\nprint('fine')")).await?;
        beside(&engine, SMALL, (Some("root"), &hog), &format!("{neighbour}\nprint('fine')")).await
    })
}

#[test]
fn a_neighbour_of_who_takes_every_descriptor_opens_files() -> Result<()> {
    hogs(
        "limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\nresource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 100000),) * 2)",
        "os.open('/dev/null', 0)",
        "kept = [open('/dev/null') for _ in range(500)]",
    )
}

#[test]
fn a_neighbour_of_who_takes_every_pipe_has_whole_ones() -> Result<()> {
    hogs(
        "import fcntl\ndef pipe():\n r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); return w",
        "pipe()",
        "import os, fcntl\nr, w = os.pipe()\nassert fcntl.fcntl(w, 1031, 1 << 20) == 1 << 20 and fcntl.fcntl(os.pipe()[1], 1032) == 65536",
    )
}

#[test]
fn a_neighbour_of_who_watches_everything_can_watch() -> Result<()> {
    hogs(
        "libc = ctypes.CDLL(None, use_errno=True)\ndef watch():\n fd = libc.inotify_init1(0)\n if fd < 0: raise OSError(ctypes.get_errno(), 'inotify')\n return fd",
        "watch()",
        "import ctypes\nfds = [ctypes.CDLL(None).inotify_init1(0) for _ in range(50)]\nassert min(fds) >= 0, fds",
    )
}

#[test]
fn a_neighbour_of_who_opens_every_terminal_has_terminals() -> Result<()> {
    hogs("", "os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)", "import os\nkept = [os.openpty() for _ in range(20)]")
}

#[test]
fn a_neighbour_of_who_queues_signals_and_timers_has_both() -> Result<()> {
    hogs(
        "libc = ctypes.CDLL(None, use_errno=True)\ndef timer():\n t = ctypes.c_void_p()\n if libc.timer_create(1, None, ctypes.byref(t)) < 0: raise OSError(ctypes.get_errno(), 'timer')\n return t",
        "timer()",
        "import ctypes\nlibc = ctypes.CDLL(None)\nmade = [libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) for _ in range(200)]\nassert not any(made), made",
    )
}

#[test]
fn a_neighbour_of_who_fills_message_queues_and_shared_memory_has_both() -> Result<()> {
    hogs(
        "libc = ctypes.CDLL(None, use_errno=True)\ndef segment():\n s = libc.shmget(0, 1 << 20, 0o1600)\n if s < 0 or libc.msgget(0, 0o1600) < 0 or libc.semget(0, 250, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'ipc')\n return s",
        "segment()",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.shmget(0, 1 << 20, 0o1600) >= 0 and libc.msgget(0, 0o1600) >= 0 and libc.semget(0, 250, 0o1600) >= 0",
    )
}

#[test]
fn a_neighbour_of_who_takes_every_port_has_ports() -> Result<()> {
    hogs(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\nports = iter(range(1024, 65537))\ndef port():\n s = socket.socket(); n = next(ports)\n if n > 65535: raise OSError(98, 'all taken')\n s.bind(('0.0.0.0', n)); return s",
        "port()",
        "import socket\nkept = [socket.create_server(('127.0.0.1', 0)) for _ in range(100)]",
    )
}

#[test]
fn a_neighbour_of_who_fills_its_disk_with_files_writes() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    hogs(
        "os.makedirs('many', exist_ok=True); os.chdir('many')\nn = iter(range(10 ** 9))\ndef file():\n os.close(os.open(f'{next(n):0200}', os.O_CREAT | os.O_WRONLY)); return 0",
        "file()",
        "for n in range(1000): open(str(n), 'w').write('x' * 1000)",
    )
}

#[test]
fn a_neighbour_of_who_fills_its_disk_with_bytes_writes() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    hogs(
        "f = os.open('big', os.O_CREAT | os.O_WRONLY)\npiece = b'x' * (1 << 20)\ndef more():\n os.write(f, piece); os.fsync(f); return 0",
        "more()",
        "open('f', 'wb').write(b'x' * (20 << 20))",
    )
}

#[test]
fn a_neighbour_of_a_fork_bomb_has_processes() -> Result<()> {
    hogs(
        "def child():\n pid = os.fork()\n if pid == 0:\n  time.sleep(600); os._exit(0)\n return pid",
        "child()",
        "import subprocess\nfor _ in range(20): assert subprocess.run(['true']).returncode == 0",
    )
}

#[test]
fn a_neighbour_of_who_eats_memory_has_its_own() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let hog = "import os, time\nwhile True:\n pid = os.fork()\n if pid == 0:\n  kept = []\n  while True: kept.append(bytearray(1 << 20))\n os.waitpid(pid, 0)\n print('once', flush=True)";
    world.run(async |engine| {
        let neighbour = "kept = bytearray(100 << 20)\nprint('fine')";
        beside(&engine, SMALL, (None, hog), neighbour).await?;
        beside(&engine, SMALL, (Some("root"), hog), neighbour).await
    })
}

#[test]
fn a_crash_inside_starts_no_program_on_the_host() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        // The kernel hands no dump to a core_pattern's program when the limit is exactly one byte, and writes no file.
        let line = "ulimit -c unlimited 2>/dev/null; grep core /proc/self/limits; cd /tmp && sh -c 'kill -SEGV $$'; echo $?; ls /tmp/core* 2>/dev/null | wc -l";
        for ran in [sh(&sandbox, line).await?, root_sh(&sandbox, line).await?] {
            let words: Vec<&str> = ran.out.split_whitespace().collect();
            ensure!(words.get(4..6) == Some(&["1", "1"]) && ran.out.ends_with("139\n0\n"), "{ran:?}");
        }
        Ok(sandbox.delete().await?)
    })
}

/// The attack's program, where every machine may run it.
fn hostile_guest(world: &World) -> Result<Guest> {
    let program = world.scratch().join("hostile-agent");
    fs::copy(env!("CARGO_BIN_EXE_hostile-agent"), &program)?;
    fs::set_permissions(&program, PermissionsExt::from_mode(0o555))?;
    fs::set_permissions(world.scratch(), PermissionsExt::from_mode(0o755))?;
    Ok(Guest::File(program))
}

fn attacked_by(attack: &str) -> SandboxSpec {
    let limits = Limits { memory: ByteSize::mib(256), ..Limits::default() };
    SandboxSpec { env: vec![("HOSTILE".to_owned(), attack.to_owned())], limits, ..host() }
}

/// The largest size that a process had, in MiB.
fn peak_mib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? >> 10)
}

/// Makes every kind of call to a machine under attack: each must end in time, with whatever typed answer, and its keeper
/// stays small and can be told to delete it.
async fn survive(engine: &Engine, attack: &str, scratch: &Path) -> Result<()> {
    let sandbox = create(engine, attacked_by(attack)).await.with_context(|| attack.to_owned())?;
    let keeper =
        engine.list()?.into_iter().find(|r| r.id == sandbox.id).and_then(|r| r.keeper_pid).context("a keeper")?;
    let within = async |what: &str, call: std::pin::Pin<Box<dyn Future<Output = String> + '_>>| -> Result<String> {
        tokio::time::timeout(PATIENCE, call).await.with_context(|| format!("{attack}: {what} hangs"))
    };
    let spec = ExecSpec { deadline: Some(Duration::from_secs(1)), ..ExecSpec::new(Command::argv(["true"])) };
    let exec =
        within("exec", Box::pin(async { format!("{:?}", sandbox.capture(spec, 1 << 20).await.map(|c| c.outcome)) }))
            .await?;
    let usage = within("usage", Box::pin(async { format!("{:?}", sandbox.usage().await) })).await?;
    let dest = scratch.join(format!("from-{attack}"));
    fs::create_dir(&dest)?;
    let limits = DownloadLimits { bytes: 64 << 20, ..DownloadLimits::default() };
    if attack.ends_with("archive") {
        let came =
            within("download", Box::pin(async { format!("{:?}", sandbox.download("/srv", &dest, limits).await) }))
                .await?;
        ensure!(attack == "hostile-archive" || came.starts_with("Err"), "{attack}: {came}");
    } else {
        // An agent that says nothing to a file's call holds that call, not its caller: who waits may go.
        let list = FileOp::List(b"/".to_vec());
        let _ = tokio::time::timeout(Duration::from_secs(2), sandbox.file(list)).await;
    }
    let peak = peak_mib(keeper).unwrap_or(0);
    ensure!(peak < 600, "{attack}: its keeper took {peak} MiB; {exec} {usage}");
    ensure!(!exec.contains("ended: Exited, status: Some(Code(0))") || attack == "wrong-answers", "{attack}: {exec}");
    tokio::time::timeout(PATIENCE, sandbox.delete()).await.with_context(|| format!("{attack}: delete hangs"))??;
    Ok(())
}

fn survives(attacks: &[&str]) -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let guest = hostile_guest(&world)?;
    world.run(async |honest| {
        let engine = world.engine_with(guest)?;
        let neighbour = create(&honest, host()).await?;
        for attack in attacks {
            survive(&engine, attack, world.scratch()).await?;
            let ran =
                tokio::time::timeout(PATIENCE, sh(&neighbour, "echo fine")).await.context("the neighbour hangs")??;
            ensure!(ran.out == "fine\n", "after {attack}: {ran:?}");
        }
        Ok(neighbour.delete().await?)
    })
}

#[test]
fn an_agent_that_sends_half_frames_or_lengths_beyond_all_is_cut_off() -> Result<()> {
    survives(&["half-frame", "half-payload", "huge-length", "just-too-long"])
}

#[test]
fn an_agent_that_sends_what_is_no_frame_or_message_is_cut_off() -> Result<()> {
    survives(&["unknown-kind", "host-kind", "garbage", "not-a-message"])
}

#[test]
fn an_agent_that_floods_takes_no_memory_of_the_hosts() -> Result<()> {
    survives(&["small-events", "empty-entries", "other-streams", "data-without-credit", "output-into-pipes"])
}

#[test]
fn an_agent_that_sends_descriptors_is_cut_off() -> Result<()> {
    survives(&["descriptors"])
}

#[test]
fn an_agent_that_lies_about_ends_and_answers_is_taken_as_what_it_is() -> Result<()> {
    survives(&["two-ends", "wrong-answers"])
}

#[test]
fn an_agent_that_falls_silent_or_dies_ends_no_call_in_a_hang() -> Result<()> {
    survives(&["silence", "death"])
}

#[test]
fn an_agent_that_packs_hostile_archives_writes_nothing_outside() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    survives(&["endless-archive", "hostile-archive"])?;
    let guest = hostile_guest(&world)?;
    world.run(async |_| {
        let engine = world.engine_with(guest)?;
        let sandbox = create(&engine, attacked_by("hostile-archive")).await?;
        let dest = world.scratch().join("a/b/dest");
        fs::create_dir_all(&dest)?;
        let _ = sandbox.download("/srv", &dest, DownloadLimits::default()).await;
        for place in ["a/above", "above", "a/b/above", "a/b/through", "a/through"] {
            ensure!(!world.scratch().join(place).exists(), "{place}");
        }
        for name in ["/absolute", "/tmp/through"] {
            ensure!(!Path::new(name).exists(), "{name}");
        }
        for entry in fs::read_dir(&dest)?.flatten() {
            let meta = entry.path().symlink_metadata()?;
            ensure!(meta.is_file() || meta.is_dir(), "{}: {:?}", entry.path().display(), meta.file_type());
            ensure!(meta.mode() & 0o7000 == 0, "{}: {:o}", entry.path().display(), meta.mode());
        }
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn an_agent_that_does_not_greet_right_is_a_failure_of_ours_with_its_reason() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let guest = hostile_guest(&world)?;
    world.run(async |_| {
        let engine = world.engine_with(guest)?;
        for attack in ["ready-later-generation", "dies-at-once", "garbage-first", "floods-first", "never-ready"] {
            let made = tokio::time::timeout(Duration::from_secs(40), create(&engine, attacked_by(attack))).await;
            let error = made
                .with_context(|| format!("{attack}: hangs"))?
                .err()
                .with_context(|| format!("{attack}: it was made"))?;
            let failure = error.chain().find_map(|e| e.downcast_ref::<CreateError>());
            ensure!(matches!(failure, Some(CreateError::Start(_))), "{attack}: {error:?}");
            ensure!(format!("{error:#}").contains("guest agent"), "{attack}: {error:#}");
        }
        Ok(())
    })?;
    wait_until("nothing is left", PATIENCE, || {
        let left = world.leftovers();
        if left.is_empty() { Ok(()) } else { Err(left.to_string()) }
    })
}

#[test]
fn a_machine_that_is_lost_is_said_to_be_lost() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let guest = hostile_guest(&world)?;
    world.run(async |_| {
        let engine = world.engine_with(guest)?;
        for attack in ["huge-length", "garbage", "descriptors", "death"] {
            let sandbox = create(&engine, attacked_by(attack)).await?;
            let ran = sandbox.capture(ExecSpec::new(Command::argv(["true"])), 1 << 10).await;
            let lost = match &ran {
                Ok(captured) => captured.outcome.ended == Ended::MachineLost,
                Err(e) => e.kind == CallErrorKind::MachineLost,
            };
            ensure!(lost, "{attack}: {ran:?}");
            sandbox.delete().await?;
        }
        Ok(())
    })
}
