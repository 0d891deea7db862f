//! Points at which a test can make a step fail or kill the process.
//!
//! `TRIALRUN_FAULT=STEP:fail` makes the step of that name fail; `STEP:kill` kills the process there with SIGKILL, as a
//! crash would. Every multi-step operation has a point after each step, and a test goes through all of them and counts
//! what is left. Only who starts the programs can set the variable; machines never see it.

use std::io;

/// The steps of making a sandbox, in order, with the process that takes them.
pub const CREATE_STEPS: [&str; 9] = [
    "engine-row",
    "engine-directory",
    "engine-keeper",
    "keeper-cell",
    "driver-pool",
    "driver-layer",
    "driver-cgroup",
    "driver-child",
    "keeper-ready",
];

/// The steps of a fork, in order, before those of its child's creation in [`CREATE_STEPS`] that follow the directory's.
pub const FORK_STEPS: [&str; 3] = ["fork-frozen", "fork-copied", "engine-forked"];

/// Passes, unless a test wants it otherwise.
///
/// # Errors
/// The injected one.
pub fn point(step: &str) -> io::Result<()> {
    let Some(fault) = std::env::var_os("TRIALRUN_FAULT") else { return Ok(()) };
    match fault.to_str().and_then(|f| f.split_once(':')) {
        Some((name, "kill")) if name == step => {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            Ok(())
        }
        Some((name, "fail")) if name == step => Err(io::Error::other(format!("a fault was injected after {step}"))),
        _ => Ok(()),
    }
}
