//! `check`: everything that takes seconds.

use crate::{cargo::Workspace, tidy};
use std::time::Instant;

/// Gives what went wrong, in words.
type Step<'a> = &'a dyn Fn() -> Result<(), String>;

/// Runs every step, whatever the others say. Whether all passed.
pub fn run(workspace: &Workspace) -> bool {
    let steps: [(&str, Step<'_>); 3] = [
        ("format", &|| cargo(workspace, &["fmt", "--all", "--check"])),
        ("tidy", &|| tidy(workspace)),
        ("clippy", &|| {
            let flags = [
                "--quiet",
                "--release",
                "--workspace",
                "--all-targets",
                "--features",
                "xtask/bench",
                "--",
                "-D",
                "warnings",
            ];
            cargo(workspace, &[&["clippy"], &flags[..]].concat())
        }),
    ];
    let mut failed = Vec::new();
    for (name, step) in steps {
        let begun = Instant::now();
        let result = step();
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        eprintln!("{name}: {word} ({:.1} s)", begun.elapsed().as_secs_f64());
        if let Err(words) = result {
            eprintln!("{words}");
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        eprintln!("failed: {}", failed.join(", "));
    }
    failed.is_empty()
}

fn cargo(workspace: &Workspace, args: &[&str]) -> Result<(), String> {
    let output = workspace.cargo(args).output().map_err(|e| format!("can't run cargo: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err([output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat())
}

fn tidy(workspace: &Workspace) -> Result<(), String> {
    let problems = tidy::run(workspace).map_err(|e| format!("{e:#}"))?;
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) }
}
