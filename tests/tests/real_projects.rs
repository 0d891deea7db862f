//! Real projects from PyPI: `trialrun test` says what an ordinary user's own run says, outcome by outcome.
//!
//! Each is taken by name and version as a source archive with the ordinary pip client, and runs twice: in a machine, and as
//! a user without rights or network in a plain virtual environment of `/usr/bin/python3` with the versions that the machine
//! had. Only the options that bring reports home differ.

use anyhow::{Context, Result, ensure};
use rustix::fs::FlockOperation;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use trialrun_tests::{
    World, cache_dir,
    program::{Output, Started},
    skip,
};

const PYTHON: &str = "/usr/bin/python3";
const MACHINE_PYTHON: &str = "/var/lib/trialrun/venv/bin/python";
/// A user whom nobody else is.
const USER: &str = "64321";
const OUTCOMES: [&str; 6] = ["passed", "failed", "errors", "skipped", "xfailed", "xpassed"];
/// Build backends that the archives name: pip wants their metadata before it keeps an archive.
const BACKENDS: [&str; 6] = ["setuptools", "wheel", "setuptools-scm", "hatchling", "hatch-vcs", "flit-core"];

struct Case {
    name: &'static str,
    version: &'static str,
    /// Options of `trialrun test`.
    options: &'static [&'static str],
    /// Outcomes that its suite has.
    outcomes: &'static [&'static str],
    /// A compiled module that both runs must have used.
    compiled: Option<&'static str>,
}

const fn case(name: &'static str, version: &'static str, outcomes: &'static [&'static str]) -> Case {
    Case { name, version, options: &[], outcomes, compiled: None }
}

const INICONFIG: Case = case("iniconfig", "2.3.1", &["passed"]);
const PLUGGY: Case = case("pluggy", "1.7.0", &["passed"]);
const ITSDANGEROUS: Case = case("itsdangerous", "2.2.0", &["passed"]);
const ASYNC_TIMEOUT: Case = case("async-timeout", "5.0.1", &["passed", "failed", "skipped"]);
const SQLPARSE: Case = case("sqlparse", "0.6.1", &["passed", "xfailed", "xpassed"]);
const H11: Case = case("h11", "0.16.0", &["passed"]);
const ASGIREF: Case = case("asgiref", "3.13.0", &["passed", "skipped", "xfailed"]);
const MARKUPSAFE: Case = Case {
    options: &["-n", "auto"],
    compiled: Some("markupsafe._speedups"),
    ..case("markupsafe", "3.0.4", &["passed", "skipped"])
};
const SIMPLEJSON: Case =
    Case { compiled: Some("simplejson._speedups"), ..case("simplejson", "4.3.0", &["passed", "skipped"]) };

/// Runs a command to its end.
fn finish(command: &mut Command) -> Result<Output> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("{:?}", command.get_program()))?;
    Ok(Started::new(child, Duration::from_secs(280)).finish())
}

fn done(command: &mut Command) -> Result<Output> {
    let output = finish(command)?;
    ensure!(output.code == Some(0), "{command:?}: {output}");
    Ok(output)
}

/// The source archive, taken once per cache.
fn archive(case: &Case) -> Result<PathBuf> {
    let dir = cache_dir().join("test-archives");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    let lock = File::options().create(true).truncate(false).write(true).open(dir.join("lock"))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let path = dir.join(format!("{}-{}.tar.gz", case.name.replace('-', "_"), case.version));
    if path.exists() {
        return Ok(path);
    }
    let (venv, mark) = (dir.join("venv"), dir.join("venv/complete"));
    let pip = |words: &[&str]| {
        let mut command = Command::new(venv.join("bin/python"));
        command.args(["-m", "pip", "--disable-pip-version-check"]).args(words).env("PIP_NO_INPUT", "1");
        command
    };
    if !mark.exists() {
        done(Command::new(PYTHON).args(["-m", "venv", "--clear"]).arg(&venv))?;
        done(&mut pip(&[&["install", "--upgrade"], &BACKENDS[..]].concat()))?;
        File::create(mark)?;
    }
    let wanted = format!("{}=={}", case.name, case.version);
    done(pip(&["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", &wanted, "--dest"]).arg(&dir))?;
    Ok(path)
}

fn unpack(archive: &Path, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    done(
        Command::new("tar")
            .args(["-xzf"])
            .arg(archive)
            .args(["--strip-components=1", "--no-same-owner", "-C"])
            .arg(dir),
    )
    .map(drop)
}

/// An ordinary user with a home of their own.
struct User {
    home: PathBuf,
}

impl User {
    fn new(world: &World) -> Result<Self> {
        let home = world.scratch().join("home");
        fs::create_dir_all(home.join("tmp"))?;
        fs::set_permissions(world.scratch(), fs::Permissions::from_mode(0o711))?;
        Ok(Self { home })
    }

    fn own_everything(&self) -> Result<()> {
        done(Command::new("chown").args(["-R", &format!("{USER}:{USER}")]).arg(&self.home)).map(drop)
    }

    /// A command of the user's; `before` are words before it (how it is started).
    fn command(&self, before: &[&str], words: &[&str]) -> Command {
        let mut all: Vec<&str> = before.to_vec();
        all.extend(["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--"]);
        all.extend(words);
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).current_dir(&self.home).env_clear();
        // How this host's pip and its network are set up.
        command.envs(std::env::vars_os().filter(|(name, _)| {
            let name = name.to_string_lossy();
            name.starts_with("PIP_") || name.to_ascii_lowercase().ends_with("_proxy") || name == "SSL_CERT_FILE"
        }));
        // As for a user of this host whose name can be looked up: pytest's folder in /tmp is named by it.
        command.env("HOME", &self.home).env("LANG", "C.UTF-8").env("TMPDIR", self.home.join("tmp"));
        command.env("PATH", format!("{}/venv/bin:/usr/local/bin:/usr/bin:/bin", self.home.display()));
        command
    }
}

/// Brings the loopback up in the network namespace that `unshare -n` made, and goes on.
const LOOPBACK: &str = "import fcntl, os, socket, struct, sys\n\
fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'lo', 0x41))\n\
os.execvp(sys.argv[1], sys.argv[1:])";

/// Reads pytest's last line.
fn last_line(output: &str) -> Option<BTreeMap<&'static str, u64>> {
    let line = output.lines().rev().find(|l| l.contains(" passed") || l.contains(" failed"))?;
    let (list, _) = line.trim_matches(['=', ' ']).rsplit_once(" in ")?;
    let mut counts: BTreeMap<_, _> = OUTCOMES.iter().map(|o| (*o, 0)).collect();
    for part in list.split(", ") {
        let (number, word) = part.split_once(' ')?;
        let word = if word == "error" { "errors" } else { word };
        if let Some(count) = counts.get_mut(word) {
            *count = number.parse().ok()?;
        }
    }
    Some(counts)
}

fn check(case: &Case) {
    match lacks(case) {
        Ok(None) => {}
        Ok(Some(what)) => return skip(what),
        Err(error) => panic!("{error:?}"),
    }
    let Some(world) = World::with_python() else { return };
    // The world outlives the error, so that its directory is kept.
    if let Err(error) = parity(case, &world) {
        panic!("{} {}: {error:?}", case.name, case.version);
    }
}

/// What an ordinary user's run would need of this host.
fn lacks(case: &Case) -> Result<Option<&'static str>> {
    if !Command::new(PYTHON).args(["-c", "import ensurepip, venv"]).status().is_ok_and(|s| s.success()) {
        return Ok(Some("needs Debian's python3-venv on the host"));
    }
    if case.compiled.is_some() {
        let header = "import os, sysconfig; assert os.path.exists(sysconfig.get_path('include') + '/Python.h')";
        let compiler = Command::new("cc").arg("--version").stdout(Stdio::null()).status();
        if !compiler.is_ok_and(|s| s.success()) || finish(Command::new(PYTHON).args(["-c", header]))?.code != Some(0) {
            return Ok(Some("needs a C compiler and Debian's python3-dev on the host"));
        }
    }
    Ok(None)
}

fn parity(case: &Case, world: &World) -> Result<()> {
    let archive = archive(case)?;
    let folder = world.scratch().join(case.name);
    unpack(&archive, &folder)?;

    // In a machine.
    let output = world.program(["test", "--json", "--keep", "-q"]).args([&folder]).args(case.options).run();
    let report = output.json();
    let listed = world.program(["ps", "--json"]).run().json();
    let id =
        listed["sandboxes"][0]["id"].as_str().with_context(|| format!("no machine was kept: {output}"))?.to_owned();
    let inside = |words: &[&str]| world.program(["attach", &id, "--", MACHINE_PYTHON]).args(words).run();
    let frozen = inside(&["-m", "pip", "freeze", "--all", "--exclude-editable"]);
    let version = inside(&["--version"]);
    let compiled = case.compiled.map(|module| inside(&["-c", &format!("import {module}")]));
    let removed = world.program(["rm", &id]).run();
    ensure!(removed.code == Some(0), "{removed}");
    ensure!(frozen.code == Some(0) && frozen.out.contains("pytest=="), "{frozen}");
    ensure!(compiled.as_ref().is_none_or(|c| c.code == Some(0)), "{compiled:?}");
    ensure!(report["tests"].is_object(), "no tests were told: {output}");
    ensure!(report["tests"]["unreadable"].is_null() && report["tests"]["notes"] == serde_json::json!([]), "{output}");

    // As a user.
    let user = User::new(world)?;
    let (project, venv) = (user.home.join("project"), user.home.join("venv"));
    unpack(&archive, &project)?;
    fs::write(user.home.join("frozen.txt"), &frozen.out)?;
    user.own_everything()?;
    done(&mut user.command(&[], &[PYTHON, "-m", "venv", &venv.display().to_string()]))?;
    let own_version = done(&mut user.command(&[], &["venv/bin/python", "--version"]))?;
    ensure!(own_version.out == version.out, "another Python: {} here, {} there", own_version.out, version.out);
    let pip =
        ["venv/bin/python", "-m", "pip", "--no-input", "install", "--no-deps", "-r", "frozen.txt", "-e", "./project"];
    done(&mut user.command(&[], &pip))?;
    let argv: Vec<&str> = report["command"].as_array().into_iter().flatten().filter_map(|w| w.as_str()).collect();
    let options: Vec<&str> =
        argv.iter().copied().skip(3).filter(|w| !w.starts_with("--junitxml=") && !w.starts_with("--cov")).collect();
    ensure!(
        argv.starts_with(&[MACHINE_PYTHON, "-m", "pytest"]) && options.iter().all(|o| case.options.contains(o)),
        "{argv:?}"
    );
    let python = venv.join("bin/python").display().to_string();
    if let Some(module) = case.compiled {
        done(&mut user.command(&[], &[&python, "-c", &format!("import {module}")]))?;
    }
    let start = ["unshare", "-n", PYTHON, "-I", "-c", LOOPBACK];
    let mut suite = user.command(&start, &[&[python.as_str(), "-m", "pytest"], &options[..]].concat());
    let plain = finish(suite.current_dir(&project).env("PYTEST_XDIST_AUTO_NUM_WORKERS", "2"))?;

    let theirs = last_line(&plain.out).with_context(|| format!("no last line: {plain}"))?;
    let ours: BTreeMap<&str, u64> =
        OUTCOMES.iter().map(|o| (*o, report["tests"]["counts"][o].as_u64().unwrap_or(u64::MAX))).collect();
    let told = || format!("\n--- trialrun\n{output}\n--- an ordinary user\n{plain}");
    ensure!(ours == theirs, "other counts: {ours:?} and {theirs:?}{}", told());
    ensure!(
        output.code == plain.code && report["exit_code"].as_i64() == plain.code.map(i64::from),
        "another exit status{}",
        told()
    );
    for outcome in OUTCOMES {
        ensure!((ours[outcome] > 0) == case.outcomes.contains(&outcome), "{outcome}: {ours:?}{}", told());
    }
    println!(
        "{} {}: exit {:?}, {ours:?}; trialrun {:?}, user's suite {:?}",
        case.name, case.version, output.code, output.took, plain.took
    );
    Ok(())
}

#[test]
fn together_they_show_every_outcome() {
    let quick = [INICONFIG, PLUGGY, ITSDANGEROUS, ASYNC_TIMEOUT, SQLPARSE, H11, MARKUPSAFE, SIMPLEJSON];
    for outcome in ["passed", "failed", "skipped", "xfailed", "xpassed"] {
        assert!(quick.iter().any(|case| case.outcomes.contains(&outcome)), "{outcome}");
    }
    assert!(
        quick.iter().any(|case| case.options.contains(&"auto")) && quick.iter().any(|case| case.compiled.is_some())
    );
}

#[test]
fn iniconfig_as_an_ordinary_user_sees_it() {
    check(&INICONFIG);
}

#[test]
fn pluggy_as_an_ordinary_user_sees_it() {
    check(&PLUGGY);
}

#[test]
fn itsdangerous_as_an_ordinary_user_sees_it() {
    check(&ITSDANGEROUS);
}

#[test]
fn async_timeout_with_its_failure_as_an_ordinary_user_sees_it() {
    check(&ASYNC_TIMEOUT);
}

#[test]
fn sqlparse_with_its_expected_failures_as_an_ordinary_user_sees_it() {
    check(&SQLPARSE);
}

#[test]
fn h11_as_an_ordinary_user_sees_it() {
    check(&H11);
}

#[test]
fn markupsafe_compiled_and_spread_over_workers_as_an_ordinary_user_sees_it() {
    check(&MARKUPSAFE);
}

#[test]
fn simplejson_compiled_as_an_ordinary_user_sees_it() {
    check(&SIMPLEJSON);
}

#[test]
#[ignore = "slow: its suite waits for 14 s, twice"]
fn asgiref_as_an_ordinary_user_sees_it() {
    check(&ASGIREF);
}
