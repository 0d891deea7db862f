//! The command line of the suite.
//!
//! The rule above all others: the same counts and the same exit status as a plain `python -m pytest` in the project's
//! folder. What is added reads, and must not decide:
//!
//! - `--junitxml` comes after the project's `addopts`, so that a path of theirs gives way. The project's
//!   `junit_family` stays; both families are read.
//! - Coverage runs inside pytest-cov, not around pytest: workers of xdist are then measured too, and `sys.argv` and
//!   `__main__` stay what the suite expects. The ways in which that could change an outcome (all seen with pytest 9.2,
//!   pytest-cov 7.1, coverage 7.17) are closed one by one: `fail_under` of the project's coverage configuration would
//!   fail a green suite, hence `--cov-fail-under=0`; a coverage plugin that isn't installed, `dynamic_context` (an
//!   error under xdist, and under `filterwarnings = error` everywhere) and other settings of `[run]` that do more than
//!   choose files end the session before the first test, hence an empty configuration (`--cov-config=/dev/null`) for
//!   projects that have one of them.
//! - A project whose own `addopts` ask for coverage keeps its sources and its threshold: a plain run has them too.
//!   Only reports are added. Where `addopts` switch coverage, its plugin or xdist off, nothing is added: the option
//!   would be unknown, exit status 4.
//!
//! What remains, and is told by nobody: a tracer is set while tests run, so a test that sets its own, counts frames or
//! is about speed may see it. `--no-coverage` is the way out.

use crate::{Project, VENV_PYTHON};
use serde::Serialize;

/// Where coverage's reports go, in the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoverageOptions {
    /// Folder of the HTML report.
    pub html_dir: String,
    /// File of the JSON report.
    pub json_path: String,
}

/// What is wanted of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestOptions {
    /// JUnit file, in the machine.
    pub junit_path: String,
    /// Coverage, unless it isn't wanted.
    pub cov: Option<CoverageOptions>,
    /// Workers of xdist: a number, `auto` or `logical`.
    pub workers: Option<String>,
    /// Arguments of the user, after all of ours.
    pub extra_args: Vec<String>,
}

/// A command, and what of the wishes went into it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TestCommand {
    /// Program and arguments; to be run in the project's folder.
    pub argv: Vec<String>,
    /// A JUnit file will be written.
    pub junit: bool,
    /// Coverage reports will be written.
    pub coverage: bool,
    /// What was left out or changed, and why.
    pub notes: Vec<String>,
}

/// The command that runs this project's suite.
#[must_use]
pub fn test_command(project: &Project, options: &TestOptions) -> TestCommand {
    let config = &project.pytest;
    let mut argv: Vec<String> = [VENV_PYTHON, "-m", "pytest"].map(str::to_owned).into();
    let mut notes = Vec::new();
    let file = config.file.as_deref().unwrap_or("the configuration");
    let junit = !config.blocks(&["junitxml"]);
    if junit {
        argv.push(format!("--junitxml={}", options.junit_path));
    } else {
        notes.push(format!("{file} switches pytest's JUnit plugin off: no JUnit report"));
    }
    let mut coverage = false;
    if let Some(cov) = &options.cov {
        if config.blocks(&["cov", "pytest_cov"]) || config.has("--no-cov") {
            notes.push(format!("{file} switches coverage off: none was measured"));
        } else {
            coverage = true;
            if config.no_autoload() {
                argv.extend(["-p".to_owned(), "pytest_cov".to_owned()]);
            }
            if config.has("--cov") {
                notes.push(format!("coverage is measured as {file} says"));
            } else {
                argv.extend(["--cov=.".to_owned(), "--cov-fail-under=0".to_owned()]);
                if !project.coverage.hazards.is_empty() && !config.has("--cov-config") {
                    argv.push("--cov-config=/dev/null".to_owned());
                    notes.push(format!(
                        "{} sets {} for coverage, which could change the suite's outcome: coverage was measured without that file",
                        project.coverage.file.as_deref().unwrap_or("the project"),
                        project.coverage.hazards.join(", "),
                    ));
                }
            }
            argv.push(format!("--cov-report=html:{}", cov.html_dir));
            argv.push(format!("--cov-report=json:{}", cov.json_path));
        }
    }
    if let Some(workers) = &options.workers {
        if config.blocks(&["xdist"]) {
            notes.push(format!("{file} switches pytest-xdist off: the suite runs in one process"));
        } else {
            if config.no_autoload() {
                argv.extend(["-p".to_owned(), "xdist".to_owned()]);
            }
            argv.extend(["-n".to_owned(), workers.clone()]);
        }
    }
    argv.extend(options.extra_args.iter().cloned());
    TestCommand { argv, junit, coverage, notes }
}
