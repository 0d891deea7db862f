//! `trialrun test` on small projects: what it says of every way in which a suite can end. The kinds of field-reports.md,
//! section test results.

use anyhow::{Context, Result};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    fs,
    io::{Read, Write},
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use trialrun_tests::{World, leftovers, program::Output, program::Program, project, wait_until};

const PASSING: &str = "def test_a():\n    pass\n";

fn folder(world: &World, files: &[(&str, &str)]) -> PathBuf {
    project::write(world.scratch(), "project", files)
}

/// A project of one test file.
fn one(world: &World, tests: &str) -> PathBuf {
    folder(world, &[("tests/test_a.py", tests)])
}

fn suite(world: &World, dir: &Path, args: &[&str]) -> Program {
    world.program(["test"]).args([dir]).args(args)
}

/// The screen: what follows the suite's own output.
fn screen(output: &Output) -> &str {
    let heads = [
        "PASSED",
        "ALL SKIPPED",
        "FAILED",
        "NOTHING RAN",
        "NOT PROVEN",
        "TIMED OUT",
        "OUT OF MEMORY",
        "INSTALL FAILED",
    ];
    let starts = heads.iter().filter_map(|head| output.out.rfind(&format!("{head}  ")));
    // The suite's last lines may say FAILED too; ours comes after them, at the start of a line.
    let last = starts.filter(|at| *at == 0 || output.out[..*at].ends_with('\n')).max();
    last.map_or("", |at| &output.out[at..])
}

/// The screen in one line, so that a line that was wrapped can be looked for.
fn flat(output: &Output) -> String {
    screen(output).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn ends(output: &Output, code: i32, words: &[&str]) {
    let screen = flat(output);
    assert_eq!(output.code, Some(code), "{output}");
    for word in words {
        assert!(screen.contains(word), "{word:?} is not on the screen: {output}");
    }
}

fn counts(report: &Value) -> [u64; 3] {
    ["passed", "failed", "skipped"].map(|outcome| report["tests"]["counts"][outcome].as_u64().unwrap_or(u64::MAX))
}

fn notes(report: &Value) -> String {
    report["notes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>().join("\n")
}

/// Processes of this world's machines whose command line holds `words`.
fn inside(world: &World, words: &str) -> usize {
    let command = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let pids = leftovers::pids_inside(world.data());
    pids.into_iter().filter(|pid| String::from_utf8_lossy(&command(*pid)).replace('\0', " ").contains(words)).count()
}

/// A number that no earlier run of the tests had, for lists of dependencies that nobody had before.
fn unique() -> Result<u128> {
    Ok(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos())
}

#[test]
fn a_passing_suite_is_told_on_one_screen() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = folder(
        &world,
        &[
            ("calc.py", "def half(n):\n    if n % 2:\n        raise ValueError(n)\n    return n // 2\n"),
            (
                "tests/test_calc.py",
                "import calc\n\ndef test_half():\n    assert calc.half(4) == 2\n    open('made.txt', 'w').write('here')\n",
            ),
            ("conftest.py", ""),
        ],
    );
    let home = world.scratch().join("home");
    fs::create_dir(&home)?;
    let args =
        ["--junit", "out/report.xml", "--coverage", "cov", "--artifacts", "*.txt", "--artifacts", "nothing/*.zip"];
    let output = suite(&world, &dir, &args).dir(&home).run();
    ends(
        &output,
        0,
        &[
            "PASSED exit code 0: all tests that ran passed",
            "1 passed (of 1)",
            "added by trialrun, not by the project: pytest 9",
            "pytest-cov 7",
            "install",
            "(CPU",
            "at its peak",
            "machine container: user namespace",
            "seccomp",
            "JUnit: out/report.xml",
            "coverage (HTML): cov",
            "artifact: trialrun-artifacts/made.txt",
        ],
    );
    assert!(
        output.out.contains("tests/test_calc.py .") && output.out.contains("1 passed in"),
        "no live output: {output}"
    );
    assert!(flat(&output).contains("coverage 8") && flat(&output).contains("lines)"), "{output}");
    let junit = fs::read_to_string(home.join("out/report.xml"))?;
    assert!(junit.contains("<testsuite") && junit.contains("test_half"), "{junit}");
    assert!(fs::read_to_string(home.join("cov/index.html"))?.contains("calc.py"));
    assert!(fs::read_to_string(home.join("trialrun-artifacts/made.txt"))? == "here");
    // The user's own folder is as it was.
    let names: Vec<_> = fs::read_dir(&dir)?.flatten().map(|e| e.file_name()).collect();
    assert!(names.len() == 3, "{names:?}");
    Ok(())
}

#[test]
fn a_failing_suite_names_its_tests_and_their_messages() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        r#"
import pytest
def test_good(): pass
def test_bad(): assert 40 + 1 == 42, "the answer is off by one"
def test_escapes(): assert 0, "\x1b[31mred\x1b[0m and \x07 and \udc9b"
@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown went wrong")
def test_teardown(broken): pass
@pytest.mark.xfail
def test_known(): assert 0
@pytest.mark.xfail
def test_repaired(): pass
@pytest.mark.skip
def test_later(): pass
"#,
    );
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(
        &output,
        1,
        &[
            "FAILED exit code 1: some tests failed",
            "2 failed, 1 error, 2 passed, 1 skipped, 1 xfailed, 1 xpassed (of 8)",
            "test_bad tests/test_a.py:4",
            "the answer is off by one",
            "test_escapes",
            "teardown went wrong",
        ],
    );
    // What a test says reaches the screen as text, whatever it holds.
    assert!(!screen(&output).contains(['\u{1b}', '\u{7}']), "{output}");
    let json = suite(&world, &dir, &["--no-cov", "--json", "-q"]).run();
    let report = json.json();
    assert!(json.code == Some(1) && report["verdict"]["kind"] == "failed" && counts(&report) == [2, 2, 1], "{json}");
    let failures = report["tests"]["failures"].as_array().context("failures")?;
    assert!(
        failures.iter().any(|f| f["file"] == "tests/test_a.py" && f["line"] == 4 && f["kind"] == "failed"),
        "{json}"
    );
    Ok(())
}

/// T06: the ways in which nothing is tested, none of them green.
#[test]
fn a_suite_without_tests_is_never_green() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = folder(&world, &[("pytest.ini", ""), ("tests/helper.py", "def help(): pass\n")]);
    ends(
        &suite(&world, &dir, &["--no-cov"]).run(),
        5,
        &["NOTHING RAN exit code 5: no tests were collected: nothing was tested"],
    );
    fs::write(dir.join("tests/test_a.py"), PASSING)?;
    let deselected = suite(&world, &dir, &["--no-cov", "--json", "-q", "--", "-k", "no_such_test"]).run();
    let report = deselected.json();
    assert!(
        deselected.code == Some(5) && report["verdict"]["kind"] == "nothing_ran" && counts(&report) == [0, 0, 0],
        "{deselected}"
    );
    // A folder without any sign of tests is a mistake in the call.
    let empty = folder(&world, &[("empty/readme.txt", "")]).join("empty");
    let output = suite(&world, &empty, &[]).run();
    assert!(output.code == Some(120) && output.err.contains("pass -- COMMAND"), "{output}");
    Ok(())
}

/// T07: one broken file beside good ones; files whose tests are all skipped.
#[test]
fn collection_errors_fail_and_skips_alone_are_told() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, PASSING);
    fs::write(dir.join("tests/test_b.py"), "import no_such_module\n\ndef test_b():\n    pass\n")?;
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(
        &output,
        2,
        &[
            "FAILED exit code 2: interrupted before the end (a collection error",
            "1 error (of 1)",
            "test_b",
            "no_such_module",
        ],
    );
    fs::remove_file(dir.join("tests/test_b.py"))?;
    fs::write(
        dir.join("tests/test_a.py"),
        "import pytest\npytestmark = pytest.mark.skip\ndef test_a(): assert 0\ndef test_b(): pass\n",
    )?;
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(
        &output,
        0,
        &["ALL SKIPPED", "EVERY test was skipped: nothing was tested", "2 skipped (of 2)", "proof of nothing"],
    );
    Ok(())
}

/// T06: each code of pytest passes through with its own meaning (0, 1, 2 and 5 are elsewhere).
#[test]
fn pytests_other_codes_pass_through_with_their_meanings() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, "import warnings\ndef test_a():\n    warnings.warn('old')\n");
    let run = |args: &[&str]| suite(&world, &dir, &[&["--no-cov", "--"], args].concat()).run();
    ends(&run(&["--no-such-option"]), 4, &["FAILED exit code 4: pytest was called wrongly"]);
    ends(
        &run(&["--max-warnings=0"]),
        6,
        &["FAILED exit code 6: tests passed, but more warnings than allowed", "1 passed"],
    );
    fs::write(
        dir.join("conftest.py"),
        "def pytest_runtest_logreport(report):\n    raise ValueError('a broken plugin')\n",
    )?;
    ends(&run(&["-q"]), 3, &["FAILED exit code 3: pytest broke inside"]);
    Ok(())
}

#[test]
fn a_suite_that_kills_is_told_as_it_ended() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    // Its parent is the machine's first process, which it may not touch.
    let dir =
        one(&world, "import os\ndef test_a(): pass\ndef test_kill(): os.kill(os.getppid(), 9)\ndef test_b(): pass\n");
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(&output, 1, &["FAILED exit code 1", "1 failed, 2 passed (of 3)", "test_kill", "Operation not permitted"]);
    // A child that kills its parent, which is pytest.
    let kill = "import os, subprocess, time\ndef test_a(): pass\ndef test_kill():\n    subprocess.Popen(['sh', '-c', 'kill -9 $PPID'])\n    time.sleep(60)\n";
    fs::write(dir.join("tests/test_a.py"), kill)?;
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(&output, 137, &["FAILED SIGKILL, trialrun exits with 137: killed (SIGKILL)", "tests/test_a.py ."]);
    let json = suite(&world, &dir, &["--no-cov", "--json", "-q"]).run();
    let report = json.json();
    assert!(report["verdict"] == json!({ "kind": "failed", "status": { "code": null, "signal": 9 } }), "{json}");
    assert!(report["tests"].is_null() && report["exit_code"] == 137, "{json}");
    Ok(())
}

#[test]
fn a_zero_in_the_middle_is_no_pass() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, "import os\ndef test_a(): pass\ndef test_exit(): os._exit(0)\ndef test_b(): assert 0\n");
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(&output, 123, &["NOT PROVEN exit code 0, trialrun exits with 123", "left no JUnit report"]);
    // A report that says otherwise, whoever wrote the zero.
    let liar = "import os, pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_unconfigure(config):\n    os._exit(0)\n";
    fs::write(dir.join("conftest.py"), liar)?;
    fs::write(dir.join("tests/test_a.py"), "def test_a(): assert 0\n")?;
    let json = suite(&world, &dir, &["--no-cov", "--json", "-q"]).run();
    let report = json.json();
    assert!(
        json.code == Some(123) && report["verdict"]["kind"] == "unproven" && counts(&report) == [0, 1, 0],
        "{json}"
    );
    Ok(())
}

#[test]
fn a_timeout_kills_the_whole_tree_and_keeps_the_output_so_far() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        r#"
import subprocess, time
def test_a(): pass
def test_hangs():
    deaf = "trap '' TERM INT HUP; exec sleep 765432"
    subprocess.Popen(["sh", "-c", deaf], start_new_session=True)
    subprocess.Popen(["setsid", "sh", "-c", "(sh -c \"" + deaf + "\" &)"])
    print("so far so good", flush=True)
    time.sleep(600)
"#,
    );
    let output = suite(&world, &dir, &["--no-cov", "--timeout", "4s", "--keep", "--", "-s"]).run();
    ends(
        &output,
        124,
        &[
            "TIMED OUT trialrun exits with 124: the time limit of 4.0 s was reached; everything was killed",
            "so far so good",
            "trialrun attach sb-",
        ],
    );
    assert!(output.took < Duration::from_secs(60), "{output}");
    // The machine lives, the tree does not.
    assert!(!leftovers::pids_inside(world.data()).is_empty() && inside(&world, "765432") == 0);
    let removed = world.program(["rm", "--all", "--json"]).run();
    assert!(
        removed.code == Some(0) && removed.json()["deleted"].as_array().is_some_and(|ids| ids.len() == 1),
        "{removed}"
    );
    Ok(())
}

#[test]
fn the_memory_limit_is_named_and_has_its_own_code() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        "def test_a(): pass\ndef test_b():\n    block = bytearray(1 << 30)\n    block[::4096] = b'x' * len(block[::4096])\n",
    );
    let output = suite(&world, &dir, &["--no-cov", "--memory", "256M"]).run();
    ends(
        &output,
        119,
        &[
            "OUT OF MEMORY SIGKILL, trialrun exits with 119: the machine's memory limit was reached",
            "tests/test_a.py .",
        ],
    );
    let json = suite(&world, &dir, &["--no-cov", "--memory", "256M", "--json", "-q"]).run();
    let report = json.json();
    assert!(report["verdict"]["kind"] == "out_of_memory" && report["exit_code"] == 119, "{json}");
    assert!(report["peak_memory_bytes"].as_u64().is_some_and(|b| (200 << 20..=256 << 20).contains(&b)), "{json}");
    Ok(())
}

#[test]
fn the_disk_limit_is_named() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        "import os\ndef test_a():\n    open('spare', 'wb').write(os.urandom(1 << 19))\n    try:\n        with open('big', 'wb') as f:\n            while f.write(bytes(1 << 20)): pass\n    finally:\n        os.remove('spare')\n",
    );
    let output = suite(&world, &dir, &["--no-cov", "--disk", "200M"]).run();
    ends(&output, 1, &["FAILED exit code 1: some tests failed", "1 failed (of 1)", "disk is full (--disk)"]);
    assert!(output.out.contains("Disk quota exceeded") || output.out.contains("No space left on device"), "{output}");
    // A test that takes its file away again.
    fs::write(
        dir.join("tests/test_a.py"),
        "import tempfile\ndef test_a():\n    with tempfile.TemporaryFile(dir='.') as f:\n        while f.write(bytes(1 << 20)): pass\n",
    )?;
    let output = suite(&world, &dir, &["--no-cov", "--disk", "200M"]).run();
    ends(&output, 1, &["FAILED exit code 1: some tests failed", "a failing test says that the disk was full (--disk)"]);
    // The host's own space is unharmed: the pool has its first size still. (A data directory on btrfs needs none.)
    if let Ok(pool) = fs::metadata(world.data().join("pool.btrfs")) {
        assert!(pool.blocks() * 512 <= 5 << 30, "{pool:?}");
    }
    // Where not even the report finds room, nothing is claimed of the tests.
    fs::write(
        dir.join("tests/test_a.py"),
        "def test_a():\n    with open('big', 'wb', 0) as f:\n        while f.write(bytes(4096)): pass\n",
    )?;
    let output = suite(&world, &dir, &["--no-cov", "--disk", "200M"]).run();
    ends(
        &output,
        1,
        &["FAILED exit code 1: pytest did not run to its end and left no report", "disk is full (--disk)"],
    );
    Ok(())
}

#[test]
fn a_wrong_path_or_a_broken_file_is_named_before_anything_runs() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, PASSING);
    let refused = |path: &Path, words: &[&str]| {
        for json in [false, true] {
            let output = suite(&world, path, if json { &["--json"] } else { &[] }).run();
            assert_eq!(output.code, Some(120), "{output}");
            assert!(words.iter().all(|word| output.err.contains(word)), "{words:?}: {output}");
            assert!(output.took < Duration::from_secs(20), "{output}");
            if json {
                let error = &output.json()["error"];
                assert_eq!(error["exit_code"], 120, "{output}");
                assert!(error["message"].as_str().is_some_and(|m| m.contains(words[0])), "{output}");
            } else {
                assert!(output.out.is_empty() && output.err.lines().count() <= 2, "{output}");
            }
        }
    };
    let file = dir.join("tests/test_a.py");
    refused(&file, &[&file.display().to_string(), "is not a folder; pass the folder"]);
    refused(&dir.join("nope"), &["nope does not exist; pass the project's folder"]);
    for (name, text) in [
        ("uv.lock", "version = 1\n[[package]\nname ="),
        ("poetry.lock", "[[package]]\nname = 'x'\nversion = \n"),
        ("pyproject.toml", "[project\n"),
        ("uv.lock", "version = 7\n"),
    ] {
        fs::write(dir.join(name), text)?;
        refused(&dir, &[name, "--no-install"]);
        fs::remove_file(dir.join(name))?;
    }
    let unknown = suite(&world, &dir, &["--image", "nope"]).run();
    assert!(unknown.code == Some(120) && unknown.err.contains("there is no image nope; present:"), "{unknown}");
    assert!(world.program(["ps", "--json"]).run().json()["sandboxes"] == json!([]));
    Ok(())
}

#[test]
fn odd_entries_of_a_project_travel_or_are_named() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        r#"
import os
def test_all_is_here():
    here = sorted(os.path.join(d, n) for d, _, names in os.walk(b"odd") for n in names)
    want = [b"caf\xe9", b"locked", b"loop1", b"loop2", b"new\nline", b"out", b"\xff\xfe/x"]
    assert here == sorted(b"odd/" + w for w in want), here
    assert os.stat("odd/locked").st_mode & 0o7777 == 0
    assert open(b"odd/\xff\xfe/x").read() == "x"
    assert os.readlink("odd/loop1") == "loop2" and os.readlink("odd/up") == "../odd"
    assert not os.path.exists("odd/out")
"#,
    );
    let odd = dir.join("odd");
    let byte = |name: &[u8]| odd.join(OsStr::from_bytes(name));
    fs::create_dir_all(byte(b"\xff\xfe"))?;
    for name in [&b"caf\xe9"[..], b"new\nline", b"\xff\xfe/x", b"locked", b"unreadable"] {
        fs::write(byte(name), "x")?;
    }
    fs::set_permissions(odd.join("locked"), fs::Permissions::from_mode(0o000))?;
    fs::write(world.scratch().join("secret"), "the host's")?;
    for (name, target) in [("loop1", "loop2"), ("loop2", "loop1"), ("up", "../odd")] {
        symlink(target, odd.join(name))?;
    }
    symlink(world.scratch().join("secret"), odd.join("out"))?;
    for fifo in [odd.join("fifo"), dir.join("requirements.txt")] {
        assert!(std::process::Command::new("mkfifo").arg(fifo).status()?.success());
    }
    let _socket = std::os::unix::net::UnixListener::bind(odd.join("socket"))?;
    // Not even root can open this one: its mode counts for everybody.
    let closed = "/proc/sys/net/ipv4/route/flush";
    let script =
        r#"mount --bind "$1" "$2/odd/unreadable" || exit 9; dir=$2; shift 2; exec "$@" "$dir" --no-cov --json -q"#;
    let binary = world.program(["test"]).into_command();
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh", closed]).arg(&dir).arg(binary.get_program()).args(binary.get_args());
    for (name, value) in binary.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let output = trialrun_tests::program::Started::new(command.spawn()?, Duration::from_secs(240)).finish();
    let report = output.json();
    assert!(output.code == Some(0) && counts(&report) == [1, 0, 0], "{output}");
    let told = notes(&report);
    for word in
        ["odd/fifo: a FIFO", "requirements.txt: a FIFO", "odd/socket: a socket", "odd/unreadable: Permission denied"]
    {
        assert!(told.contains(word), "{word:?} is not told: {told}");
    }
    Ok(())
}

#[test]
fn files_that_come_and_go_during_the_upload_take_nothing_else_with_them() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        "import os\ndef test_a():\n    assert len(os.listdir('still')) == 2000\n    assert all(os.path.getsize('still/' + n) == 4096 for n in os.listdir('still'))\n",
    );
    for sub in ["still", "churn"] {
        fs::create_dir(dir.join(sub))?;
    }
    for i in 0..2000 {
        fs::write(dir.join(format!("still/{i}")), [7; 4096])?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (churn, stopped) = (dir.join("churn"), stop.clone());
    let busy = std::thread::spawn(move || {
        for i in 0_u64.. {
            if stopped.load(Ordering::Relaxed) {
                break;
            }
            let _ = fs::write(churn.join((i % 50).to_string()), vec![1; 1 << 16]);
            let _ = fs::remove_file(churn.join(((i + 25) % 50).to_string()));
        }
    });
    let output = suite(&world, &dir, &["--no-cov"]).run();
    stop.store(true, Ordering::Relaxed);
    let _ = busy.join();
    ends(&output, 0, &["PASSED exit code 0", "1 passed (of 1)"]);
    Ok(())
}

/// The host's address that others would reach it by.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Nothing is sent: connecting only chooses the route.
    socket.connect("203.0.113.1:9").ok()?;
    socket.local_addr().ok().map(|a| a.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

/// Greets every connection and counts them.
fn greeter(listener: TcpListener) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            seen.fetch_add(1, Ordering::SeqCst);
            let _ = stream.and_then(|mut s| s.write_all(b"WELCOME"));
        }
    });
    count
}

#[test]
fn connections_fail_inside_are_named_and_nothing_arrives() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let port = listener.local_addr()?.port();
    let arrived = greeter(listener);
    let own = own_address();
    let host = own.map_or_else(|| "203.0.113.7".to_owned(), |ip| ip.to_string());
    let tests = r#"
import socket
def talk(host, port):
    with socket.create_connection((host, port), timeout=30) as s:
        s.sendall(b"HELLO\n")
        assert s.recv(7) == b"WELCOME"
def test_connect_alone(): socket.create_connection(("203.0.113.6", 9000), timeout=30).close()
def test_connect_ex(): assert socket.socket().connect_ex(("198.51.100.6", 80)) == 0
def test_name(): talk("service.example.com", 443)
def test_address(): talk("203.0.113.5", 8443)
def test_localhost(): talk("localhost", PORT)
def test_host(): talk("HOST", PORT)
"#;
    let dir = one(&world, &tests.replace("PORT", &port.to_string()).replace("HOST", &host));
    let output = suite(&world, &dir, &["--no-cov"]).run();
    ends(
        &output,
        1,
        &[
            "FAILED exit code 1",
            "6 failed (of 6)",
            "ConnectionRefusedError: [Errno 111] Connection refused",
            "203.0.113.5:8443 once, by rule preset off",
            "203.0.113.6:9000 once, by rule preset off",
            "198.51.100.6:80 once, by rule preset off",
            "service.example.com",
            &format!("{host}:{port} once, by rule preset off"),
        ],
    );
    assert!(arrived.load(Ordering::SeqCst) == 0, "something arrived");
    let json = suite(&world, &dir, &["--no-cov", "--json", "-q"]).run();
    let report = json.json();
    let refused = report["refused"].as_array().context("refused")?;
    assert!(
        refused.iter().any(|r| r["host"] == "203.0.113.5" && r["port"] == 8443 && r["rule"] == "preset off"),
        "{json}"
    );
    assert!(refused.iter().any(|r| r["host"] == "service.example.com" && r["rule"] == "preset off"), "{json}");
    let tests =
        report["phases"].as_array().into_iter().flatten().find(|p| p["name"] == "tests").context("the phase")?;
    assert!(tests["wall_ms"].as_u64().is_some_and(|ms| ms < 20_000), "refusals were not at once: {json}");
    assert!(arrived.load(Ordering::SeqCst) == 0, "something arrived");
    // The listener does listen, and the way there is open once it is allowed.
    let mut greeting = [0; 7];
    TcpStream::connect(("127.0.0.1", port))?.read_exact(&mut greeting)?;
    assert!(&greeting == b"WELCOME" && arrived.load(Ordering::SeqCst) == 1);
    if own.is_some() {
        let allowed =
            suite(&world, &dir, &["--no-cov", "--allow", &format!("{host}:{port}"), "--", "-k", "test_host"]).run();
        ends(&allowed, 0, &["PASSED", "1 passed"]);
        assert!(arrived.load(Ordering::SeqCst) == 2);
    }
    Ok(())
}

/// T12.
#[test]
fn a_child_that_holds_the_output_does_not_hold_the_run() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        "import subprocess\ndef test_a():\n    subprocess.Popen(['sleep', '876543'], start_new_session=True)\n",
    );
    let json = suite(&world, &dir, &["--no-cov", "--json", "--keep", "--", "-s"]).run();
    let report = json.json();
    assert!(json.code == Some(0) && report["verdict"]["kind"] == "passed" && report["left_behind"] == 1, "{json}");
    assert!(json.took < Duration::from_secs(120) && inside(&world, "876543") == 0, "{json}");
    assert!(world.program(["rm", "--all"]).run().code == Some(0));
    let output = suite(&world, &dir, &["--no-cov", "--", "-s"]).run();
    ends(&output, 0, &["PASSED", "the suite left a process running; it was killed"]);
    Ok(())
}

#[test]
fn the_json_report_holds_everything_the_screen_tells() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, PASSING);
    let output = suite(&world, &dir, &["--json"]).run();
    let report = output.json();
    assert!(output.code == Some(0) && report["schema"] == 1 && report["exit_code"] == 0, "{output}");
    assert!(
        report["verdict"] == json!({ "kind": "passed" }) && report["status"] == json!({ "code": 0, "signal": null }),
        "{output}"
    );
    let zeroes = ["failed", "errors", "skipped", "xfailed", "xpassed", "flaky"];
    assert!(counts(&report) == [1, 0, 0] && zeroes.iter().all(|k| report["tests"]["counts"][k] == 0), "{output}");
    let phases: Vec<_> = report["phases"].as_array().into_iter().flatten().filter_map(|p| p["name"].as_str()).collect();
    assert!(phases == ["create", "upload", "install", "tests", "fetch"], "{output}");
    assert!(report["phases"][3]["cpu_ms"].as_u64().is_some_and(|ms| ms > 0), "{output}");
    let added: Vec<_> =
        report["added"].as_array().into_iter().flatten().filter_map(|a| a["package"].as_str()).collect();
    assert!(added == ["pytest", "pytest-cov"], "{output}");
    assert!(
        report["coverage"]["percent"] == 100.0 && report["peak_memory_bytes"].as_u64().is_some_and(|b| b > 1 << 20),
        "{output}"
    );
    assert!(
        report["isolation"]["driver"] == "container"
            && report["isolation"]["layers"].as_array().is_some_and(|l| l.len() > 5)
    );
    assert!(report["refused"] == json!([]) && report["left_behind"] == 0 && report["disk_full"].is_null(), "{output}");
    // Standard output is the report alone; the suite's own output is beside it.
    assert!(output.out.lines().count() == 1 && output.err.contains("1 passed in"), "{output}");
    Ok(())
}

#[test]
fn a_kept_machine_can_be_entered_until_it_is_removed() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, "def test_a():\n    open('left.txt', 'w').write('evidence')\n    assert 0\n");
    let output = suite(&world, &dir, &["--no-cov", "--keep"]).run();
    ends(&output, 1, &["FAILED exit code 1", "the machine is kept for 60 minutes: trialrun attach sb-"]);
    let listed = world.program(["ps", "--json"]).run().json();
    let id = listed["sandboxes"][0]["id"].as_str().context("an id")?.to_owned();
    assert!(screen(&output).contains(&id) && listed["sandboxes"][0]["state"] == "running", "{listed}");
    let cat = world.program(["attach", &id, "--", "cat", "project/left.txt"]).run();
    assert!(cat.code == Some(0) && cat.out == "evidence", "{cat}");
    let begins = world.program(["attach", &id[..8], "--", "sh", "-c", "cat; exit 9"]).input("typed").run();
    assert!(begins.code == Some(9) && begins.out == "typed", "{begins}");
    // As after the run: its network is cut.
    let probe = "import socket; socket.create_connection(('203.0.113.5', 80), 20).recv(1) or exit(3)";
    let network = world.program(["attach", &id, "--", "python3", "-c", probe]).run();
    assert!(network.code.is_some_and(|code| code != 0), "{network}");
    let removed = world.program(["rm", &id]).run();
    assert!(removed.code == Some(0) && removed.out == format!("{id} deleted\n"), "{removed}");
    assert!(world.program(["attach", &id, "--", "true"]).run().code == Some(120));
    Ok(())
}

#[test]
fn a_command_in_place_of_pytest_keeps_its_exit_code() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = folder(&world, &[("check.sh", "echo checking; exit $1\n"), ("data", "x")]);
    let run = |args: &[&str]| suite(&world, &dir, args).run();
    let seven = run(&["--no-install", "--", "sh", "check.sh", "7"]);
    ends(&seven, 7, &["FAILED exit code 7: the command failed with code 7"]);
    assert!(seven.out.contains("checking\n"), "{seven}");
    ends(&run(&["--", "sh", "check.sh", "0"]), 0, &["PASSED exit code 0: the command succeeded"]);
    ends(&run(&["--no-install", "--", "sh", "-c", "kill -SEGV $$"]), 139, &["FAILED SIGSEGV, trialrun exits with 139"]);
    let missing = run(&["--no-install", "--", "no-such-command"]);
    assert!(
        missing.code == Some(127) && missing.out.contains("NOT STARTED") && missing.out.contains("no-such-command"),
        "{missing}"
    );
    let data = run(&["--no-install", "--json", "--", "./data"]);
    assert!(data.code == Some(126) && data.json()["verdict"]["kind"] == "not_started", "{data}");
    // The environment asked for, and that of no one else.
    let env = run(&[
        "--no-install",
        "--env",
        "A=b c",
        "--env",
        "FROM_HERE",
        "--",
        "sh",
        "-c",
        "echo \"$A/$FROM_HERE/$TRIALRUN_DATA_DIR/\"",
    ]);
    assert!(env.code == Some(120) && env.err.contains("--env FROM_HERE"), "{env}");
    let line = [
        "--no-install",
        "--env",
        "A=b c",
        "--env",
        "FROM_HERE",
        "--",
        "sh",
        "-c",
        "echo \"$A/$FROM_HERE/$TRIALRUN_DATA_DIR/\"",
    ];
    let env = suite(&world, &dir, &line).env("FROM_HERE", "x").run();
    assert!(env.code == Some(0) && env.out.starts_with("b c/x//\n"), "{env}");
    Ok(())
}

#[test]
fn without_an_install_nothing_is_claimed_of_tests_that_could_not_run() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = folder(
        &world,
        &[("tests/test_a.py", PASSING), ("requirements.txt", "no-such-thing==broken==\n"), ("uv.lock", "broken")],
    );
    let output = suite(&world, &dir, &["--no-install"]).run();
    ends(
        &output,
        1,
        &["FAILED exit code 1: pytest did not run to its end and left no report", "No module named pytest"],
    );
    assert!(!flat(&output).contains("some tests failed") && !flat(&output).contains("install"), "{output}");
    Ok(())
}

/// The host's own system has no virtual environment of ours.
#[test]
fn the_host_image_runs_a_suite_too() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let output = suite(&world, &one(&world, PASSING), &["--no-cov", "--image", "host"]).run();
    ends(&output, 0, &["PASSED exit code 0", "1 passed (of 1)", "added by trialrun, not by the project: pytest 9"]);
    Ok(())
}

#[test]
fn workers_are_as_many_as_vcpus_even_beyond_the_cores() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let cores = std::thread::available_parallelism()?.get();
    let vcpus = (cores + 1).to_string();
    let dir = one(
        &world,
        "import os, pytest\n@pytest.mark.parametrize('n', range(12))\ndef test_a(n):\n    assert os.environ['PYTEST_XDIST_AUTO_NUM_WORKERS'] == os.environ['PYTEST_XDIST_WORKER_COUNT'] == 'VCPUS'\n"
            .replace("VCPUS", &vcpus)
            .as_str(),
    );
    let output = suite(&world, &dir, &["--no-cov", "-n", "auto", "--vcpu", &vcpus]).run();
    ends(
        &output,
        0,
        &[
            "PASSED exit code 0",
            "12 passed (of 12)",
            "pytest-xdist 3",
            &format!("{vcpus} vCPUs were asked for and {cores} core"),
        ],
    );
    Ok(())
}

#[test]
fn versions_that_the_project_pins_stay_and_are_not_called_ours() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir =
        folder(&world, &[("tests/test_a.py", PASSING), ("requirements.txt", "pytest==8.3.4\npytest-cov==5.0.0\n")]);
    let output = suite(&world, &dir, &[]).run();
    ends(&output, 0, &["PASSED exit code 0", "coverage 100.0 %"]);
    assert!(output.out.contains("pytest-8.3.4") && output.out.contains("cov-5.0.0"), "{output}");
    assert!(!screen(&output).contains("added"), "{output}");
    Ok(())
}

#[test]
fn requirements_that_do_not_exist_are_told_in_pips_words() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = folder(&world, &[("tests/test_a.py", PASSING), ("requirements.txt", "iniconfig==99.0\n")]);
    let output = suite(&world, &dir, &[]).run();
    ends(
        &output,
        122,
        &[
            "INSTALL FAILED exit code 1, trialrun exits with 122: the requirements could not be installed (requirements.txt); no test ran",
            "No matching distribution found for iniconfig==99.0",
            "install",
        ],
    );
    let json = suite(&world, &dir, &["--json"]).run();
    let report = json.json();
    assert!(
        report["verdict"]["kind"] == "install_failed" && report["tests"].is_null() && json.code == Some(122),
        "{json}"
    );
    assert!(report["phases"].as_array().is_some_and(|p| p.last().is_some_and(|p| p["name"] == "install")), "{json}");
    // Without the registries, what could not be reached explains it.
    let cut = suite(&world, &dir, &["--install-network", "off"]).run();
    ends(&cut, 122, &["INSTALL FAILED", "refused", "by rule preset off"]);
    Ok(())
}

/// Ctrl-C in the install and in the tests: the report says so, and the machine is gone.
#[test]
fn a_signal_ends_the_run_and_its_machine_at_any_stage() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let hanging = "import subprocess\ndef test_a():\n    subprocess.run(['sleep', '987654'])\n";
    // A list that nobody had before: else its dependencies are there, and pip is too soon gone to be seen.
    let list = format!("six!=0.{}\n", unique()?);
    let dir = folder(&world, &[("requirements.txt", &list), ("tests/test_a.py", hanging)]);
    for (signal, sign, options) in [
        (Signal::INT, "-m pip install", &["--keep"][..]),
        (Signal::TERM, "-m pip install", &["--no-cache"]),
        (Signal::INT, "sleep 987654", &["--json"]),
        (Signal::TERM, "sleep 987654", &["--keep"]),
    ] {
        let json = options.contains(&"--json");
        let running = suite(&world, &dir, &[&["--no-cov"][..], options].concat()).start();
        wait_until(sign, Duration::from_secs(120), || match inside(&world, sign) {
            0 => Err("not seen".to_owned()),
            n => Ok(n),
        })?;
        running.signal(signal);
        let output = running.finish();
        let code = 128 + signal.as_raw();
        assert!(output.code == Some(code), "{sign}: {output}");
        if json {
            assert!(
                output.json()["verdict"]["kind"] == "interrupted" && output.json()["exit_code"] == code,
                "{output}"
            );
        } else if sign.contains("pip") && !options.contains(&"--no-cache") {
            // The dependencies are a machine of their own, before the run's.
            assert!(output.err.contains("interrupted; the machine is gone"), "{output}");
        } else {
            assert!(
                output.out.contains("INTERRUPTED") && output.out.contains("stopped on request before the end"),
                "{output}"
            );
        }
        let left = world.leftovers();
        assert!(leftovers::pids_inside(world.data()).is_empty(), "{sign}: {left}");
        assert!(world.program(["ps", "--json"]).run().json()["sandboxes"] == json!([]));
    }
    Ok(())
}

/// A reader that goes away (`| head`) is no crash, and leaves no machine.
#[test]
fn a_reader_that_goes_away_is_no_crash() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(&world, PASSING);
    let mut command = suite(&world, &dir, &["--no-cov"]).into_command();
    command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut child = command.spawn()?;
    drop(child.stdout.take());
    let output = trialrun_tests::program::Started::new(child, Duration::from_secs(240)).finish();
    assert!(output.code == Some(141) && !output.err.contains("panicked"), "{output}");
    Ok(())
}

/// What a suite prints is shown as it comes, but has no more power over a terminal than text and colours have.
#[test]
fn what_a_suite_prints_cannot_do_more_to_a_terminal_than_show_text() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = one(
        &world,
        "import os\ndef test_a():\n    os.write(1, b'\\x1b[35mpurple\\x1b[0m \\x1b]0;title\\x07\\x1b]52;c;aGk=\\x07\\x1b[2J\\x1b[6nend\\n')\n",
    );
    let odd = ["\u{1b}]0;", "\u{1b}]52", "\u{1b}[2J", "\u{1b}[6n"];
    // A pipe gets every byte.
    let piped = suite(&world, &dir, &["--no-cov", "--", "-s"]).run();
    ends(&piped, 0, &["1 passed (of 1)"]);
    assert!(odd.iter().all(|sequence| piped.out.contains(sequence)), "{piped}");
    // script(1) gives it a terminal.
    let command = suite(&world, &dir, &["--no-cov", "--", "-s"]).into_command();
    let line: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).map(OsStr::as_bytes).collect();
    let mut script = std::process::Command::new("script");
    script.args(["-qec", std::str::from_utf8(&line.join(&b' '))?, "/dev/null"]).stdin(std::process::Stdio::null());
    script.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = script.output().context("script (bsdutils)")?;
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && shown.contains("\u{1b}[35mpurple\u{1b}[0m end\r\n"), "{shown:?}");
    assert!(shown.contains("1 passed (of 1)") && !odd.iter().any(|sequence| shown.contains(sequence)), "{shown:?}");
    Ok(())
}

#[test]
fn dependencies_are_installed_once_and_no_suite_can_change_them() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let list = format!("six==1.16.0\nsix!=0.{}\n", unique()?);
    let poison = "import six, sysconfig, os\n\ndef test_a():\n    assert not hasattr(six, 'POISON')\n    \
                  open(six.__file__, 'a').write('\\nPOISON = 1\\n')\n    \
                  open(os.path.join(sysconfig.get_paths()['purelib'], 'evil.pth'), 'w').write('import six; six.POISON = 1')\n    \
                  os.makedirs(os.path.expanduser('~/.cache/pip'), exist_ok=True)\n";
    let dir = folder(&world, &[("requirements.txt", &list), ("tests/test_a.py", poison)]);
    let run = |args: &[&str]| -> Result<(Value, String)> {
        let output = suite(&world, &dir, &[&["--json", "--quiet"][..], args].concat()).run();
        let report = output.json();
        assert_eq!((output.code, counts(&report)), (Some(0), [1, 0, 0]), "{output}");
        let added: Vec<&str> =
            report["added"].as_array().into_iter().flatten().filter_map(|a| a["package"].as_str()).collect();
        assert_eq!(added, ["pytest", "pytest-cov"], "{report}");
        Ok((report.clone(), notes(&report)))
    };
    let phases =
        |report: &Value| report["phases"].as_array().into_iter().flatten().any(|p| p["name"] == "dependencies");
    let kept = "dependencies as installed";
    let (first, said) = run(&[])?;
    assert!(phases(&first) && !said.contains(kept), "{first}");
    let (second, said) = run(&[])?;
    assert!(!phases(&second) && said.contains(kept) && said.contains("--no-cache"), "{second}");
    let (without, said) = run(&["--no-cache"])?;
    assert!(!phases(&without) && !said.contains(kept), "{without}");
    // Another list is another image, and one that can't be installed is pip's word.
    fs::write(dir.join("requirements.txt"), format!("{list}idna\n"))?;
    let (other, said) = run(&[])?;
    assert!(phases(&other) && !said.contains(kept), "{other}");
    fs::write(dir.join("requirements.txt"), format!("{list}six==1.15.0\n"))?;
    let broken = suite(&world, &dir, &[]).run();
    ends(&broken, 122, &["INSTALL FAILED", "six"]);
    Ok(())
}
