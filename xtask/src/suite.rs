//! `test`: the whole test run. Its last line is `N passed, N failed, N skipped`.
//!
//! Doc tests are not run: every one is a program to link, and what the API does is shown in tests.

use crate::{cargo::Workspace, leftovers};
use anyhow::{Context, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

/// Where nextest leaves its report, from the root; see `xtask/nextest.toml`.
const REPORT: &str = "target/nextest/default/junit.xml";

/// What the program falls back to on some hosts, by the variable that forces it; see ARCHITECTURE.md.
const FALLBACKS: [(&str, &str); 5] = [
    ("TRIALRUN_CGROUPS", "v1"),
    ("TRIALRUN_LAYERS", "directory"),
    ("TRIALRUN_QUOTA", "full"),
    ("TRIALRUN_IDMAP", "off"),
    ("TRIALRUN_LANDLOCK", "off"),
];

/// Counts of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
}

/// Builds, runs, looks for leftovers. Whether all is well.
///
/// # Errors
/// When the run could not even be started.
pub fn run(workspace: &Workspace, slow: bool, forced: bool, filters: &[String]) -> Result<bool> {
    let before = leftovers::present();
    for thing in leftovers::look().iter().filter(|thing| !thing.starts_with("network namespace")) {
        eprintln!("there before the run, not counted: {thing}");
    }
    let skip_file = workspace.target.join(format!("xtask-skips-{}", std::process::id()));
    let _ = fs::remove_file(&skip_file);
    let built = build(workspace)?;
    let mut counts =
        if built { tests(workspace, slow, filters, &skip_file, None)? } else { Counts { passed: 0, failed: 1 } };
    for fallback in FALLBACKS.iter().filter(|_| built && forced) {
        eprintln!("forced: {}={}", fallback.0, fallback.1);
        let more = tests(workspace, slow, filters, &skip_file, Some(*fallback))?;
        eprintln!("forced {}={}: {} passed, {} failed", fallback.0, fallback.1, more.passed, more.failed);
        counts.passed += more.passed;
        counts.failed += more.failed;
    }
    let skips = read_skips(&skip_file);
    let _ = fs::remove_file(&skip_file);
    // A test that can't run here ends well; it must not count as one that did.
    counts.passed = counts.passed.saturating_sub(skips.len());
    for (name, reasons) in &skips {
        eprintln!("skipped {name}: {}", reasons.join("; "));
    }
    if built {
        let left = leftovers(&before, counts.failed > 0);
        if left.is_empty() { counts.passed += 1 } else { counts.failed += 1 }
    }
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, skips.len());
    Ok(counts.failed == 0)
}

/// Everything in one go, so that the program and the tests share what is built.
fn build(workspace: &Workspace) -> Result<bool> {
    let args =
        ["build", "--release", "--workspace", "--lib", "--bins", "--tests", "--examples", "--features", "xtask/bench"];
    Ok(workspace.cargo(args).status().context("run cargo build")?.success())
}

fn tests(
    workspace: &Workspace,
    slow: bool,
    filters: &[String],
    skip_file: &Path,
    fallback: Option<(&str, &str)>,
) -> Result<Counts> {
    let prepare = |command: &mut Command| {
        command
            .envs(fallback)
            .env("TRIALRUN_BIN", workspace.target.join("release/trialrun"))
            .env("TRIALRUN_SKIP_FILE", skip_file);
    };
    let nextest = workspace.cargo(["nextest", "--version"]).output().is_ok_and(|o| o.status.success());
    if nextest {
        let mut command = workspace.cargo(["nextest", "run", "--config-file", "xtask/nextest.toml"]);
        command.args(["--workspace", "--cargo-profile", "release", "--features", "xtask/bench"]);
        if fallback.is_some() {
            command.args(["-E", "package(trialrun-tests)"]);
        }
        if slow {
            command.args(["--run-ignored", "all"]);
        }
        prepare(&mut command);
        with_nextest(workspace, command.args(filters))
    } else {
        eprintln!("cargo-nextest is not installed (cargo install cargo-nextest --locked): using cargo test");
        let mut command =
            workspace.cargo(["test", "--release", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]);
        command.args(["--features", "xtask/bench", "--"]).args(filters);
        if slow {
            command.arg("--include-ignored");
        }
        prepare(&mut command);
        with_cargo_test(&mut command)
    }
}

fn with_nextest(workspace: &Workspace, command: &mut Command) -> Result<Counts> {
    let report = workspace.root.join(REPORT);
    let _ = fs::remove_file(&report);
    let status = command.status().context("run cargo nextest")?;
    let text = fs::read_to_string(&report).unwrap_or_default();
    let Some(mut counts) = read_report(&text) else {
        eprintln!("nextest ran no test ({status})");
        return Ok(Counts { passed: 0, failed: 1 });
    };
    // It ended badly for a reason that is no test's, such as a signal.
    if !status.success() && counts.failed == 0 {
        counts.failed = 1;
    }
    Ok(counts)
}

/// Reads the totals in the report's first element.
fn read_report(text: &str) -> Option<Counts> {
    let element = text.split_once("<testsuites")?.1.split_once('>')?.0;
    let number =
        |name: &str| -> Option<usize> { element.split_once(&format!(" {name}=\""))?.1.split_once('"')?.0.parse().ok() };
    let failed = number("failures")? + number("errors")?;
    Some(Counts { passed: number("tests")?.saturating_sub(failed), failed })
}

fn with_cargo_test(command: &mut Command) -> Result<Counts> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("run cargo test")?;
    let mut counts = Counts::default();
    for line in BufReader::new(child.stdout.take().context("its output")?).lines() {
        let line = line?;
        println!("{line}");
        if let Some(summary) = line.strip_prefix("test result: ") {
            let number = |word: &str| {
                let part = summary.split([';', '.']).find(|part| part.ends_with(word))?;
                part.split_whitespace().find_map(|w| w.parse::<usize>().ok())
            };
            counts.passed += number("passed").unwrap_or(0);
            counts.failed += number("failed").unwrap_or(0);
        }
    }
    if !child.wait()?.success() && counts.failed == 0 {
        counts.failed = 1;
    }
    Ok(counts)
}

/// Reasons by test. A line is `name: reason`; a name may be a path with `::`.
fn read_skips(file: &Path) -> BTreeMap<String, Vec<String>> {
    let mut skips: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in fs::read_to_string(file).unwrap_or_default().lines() {
        let (name, reason) =
            line.strip_prefix("SKIP ").unwrap_or(line).split_once(": ").unwrap_or((line, "no reason given"));
        let reasons = skips.entry(name.to_owned()).or_default();
        if !reasons.iter().any(|known| known == reason) {
            reasons.push(reason.to_owned());
        }
    }
    skips
}

/// What the run left on the host. A failed test keeps its directory on purpose, and says where.
fn leftovers(before: &BTreeSet<String>, failed: bool) -> Vec<String> {
    let mut left = leftovers::since(before);
    if failed {
        left.retain(|thing| !thing.starts_with("file /tmp/trialrun-test-"));
    }
    for thing in &left {
        eprintln!("LEFT BEHIND: {thing}");
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_gives_the_totals() {
        let text = "<?xml version=\"1.0\"?>\n<testsuites name=\"x\" tests=\"12\" failures=\"2\" errors=\"1\" uuid=\"u\" time=\"1\">\n<testsuite tests=\"1\" failures=\"0\"/>";
        assert_eq!(read_report(text), Some(Counts { passed: 9, failed: 3 }));
        assert_eq!(read_report(""), None);
    }

    #[test]
    fn skips_are_counted_once_per_test() {
        let file = std::env::temp_dir().join(format!("xtask-skips-test-{}", std::process::id()));
        fs::write(&file, "a::b: needs root\na::b: needs root\nSKIP c: no kvm\n").unwrap();
        let skips = read_skips(&file);
        fs::remove_file(&file).unwrap();
        assert_eq!(skips.keys().collect::<Vec<_>>(), ["a::b", "c"]);
        assert_eq!(skips["a::b"], ["needs root"]);
    }
}
