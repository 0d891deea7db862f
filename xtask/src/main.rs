//! Developer commands: `cargo xtask check`, `tidy`, `test`, `bench`.

mod cargo;
mod check;
mod leftovers;
mod suite;
mod tidy;

use anyhow::{Context, Result};
use cargo::Workspace;
use clap::{Parser, Subcommand};
use std::{os::unix::process::CommandExt, process::ExitCode};

/// Developer commands of trialrun.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Format, lints, tidy: runs every step and lists all that failed
    Check,
    /// The project's own rules: who may import whom, where unsafe is, what must not be in a file, promises and their tests
    Tidy,
    /// Build everything, run all tests, and see that they left nothing on the host
    Test {
        /// Also the slow tests (those that are #[ignore]d)
        #[arg(long)]
        slow: bool,
        /// Also the end-to-end tests once more under each fallback that a variable forces (about 5 minutes each)
        #[arg(long)]
        forced: bool,
        /// Only tests whose names contain one of these
        filters: Vec<String>,
    },
    /// Measure beside the peers on this host: start, exec, files, density (see `cargo xtask bench --help`)
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    match Workspace::load().and_then(|workspace| run(&workspace, args.command)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is well.
fn run(workspace: &Workspace, command: Command) -> Result<bool> {
    match command {
        Command::Check => Ok(check::run(workspace)),
        Command::Tidy => {
            let problems = tidy::run(workspace)?;
            problems.iter().for_each(|problem| eprintln!("{problem}"));
            Ok(problems.is_empty())
        }
        Command::Test { slow, forced, filters } => suite::run(workspace, slow, forced, &filters),
        Command::Bench { args } => bench(workspace, &args).map(|never| match never {}),
    }
}

/// Becomes the bench program, after it is built together with the program it measures.
fn bench(workspace: &Workspace, args: &[String]) -> Result<std::convert::Infallible> {
    let status = workspace
        .cargo(["build", "--quiet", "--release", "--workspace", "--bins", "--features", "xtask/bench"])
        .status()?;
    anyhow::ensure!(status.success(), "what is to be measured did not build");
    let program = workspace.target.join("release/xtask-bench");
    let error = std::process::Command::new(&program).args(args).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Args::command().debug_assert();
    }
}
