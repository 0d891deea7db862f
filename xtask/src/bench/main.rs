//! Measures trialrun beside the peers on this host, interleaved in one run: a shared machine's speed moves by 20 percent
//! within minutes, so only numbers of one run compare.

mod density;
mod exec;
mod files;
mod fork;
mod measure;
mod peers;
mod start;
mod table;
mod world;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand, builder::RangedU64ValueParser};
use std::{path::PathBuf, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};
use world::World;

/// Measure trialrun beside the peers that this host has, in one run.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// Write the numbers here instead of target/bench/NAME.json
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// State: the store, machines (default: a temporary directory)
    #[arg(long, global = true, env = "TRIALRUN_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Images; python is built there if it is missing
    #[arg(long, global = true, env = "TRIALRUN_CACHE_DIR", default_value = "/var/cache/trialrun", value_name = "DIR")]
    cache_dir: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// From nothing to the first byte that Python prints, and to the end
    Start {
        /// Rounds
        #[arg(long, short, default_value_t = 40, value_parser = at_least_one())]
        n: usize,
        /// Also where the time of the engine's starts goes
        #[arg(long)]
        breakdown: bool,
        /// Only these rows, such as engine-cold,bwrap
        #[arg(long, value_delimiter = ',', value_name = "ROW")]
        only: Vec<String>,
    },
    /// Round trip of a command in a running machine; big output
    Exec {
        /// Rounds
        #[arg(long, short, default_value_t = 100, value_parser = at_least_one())]
        n: usize,
    },
    /// 20,000 files of 10 KiB up and down, beside tar
    Files {
        /// Rounds
        #[arg(long, short, default_value_t = 7, value_parser = at_least_one())]
        n: usize,
    },
    /// From a running machine with 200 MB in 20,000 files to the first word of its fork
    Fork {
        /// Rounds
        #[arg(long, short, default_value_t = 40, value_parser = at_least_one())]
        n: usize,
    },
    /// Idle machines, made at once: do all start, how long does it take, what do they cost
    Density {
        /// Machines
        #[arg(long, short, default_value_t = 50, value_parser = at_least_one())]
        n: usize,
    },
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|arg| arg == measure::HELPER) {
        return measure::help();
    }
    let args = Args::parse();
    let done =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Into::into).and_then(|runtime| {
            let result = runtime.block_on(bench(args));
            runtime.shutdown_background();
            result
        });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn bench(args: Args) -> Result<()> {
    // Before anything is made, so that no signal finds the default.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let world = World::open(args.data_dir, args.cache_dir)?;
    let result = tokio::select! {
        result = measure(&world, args.command, args.json) => result,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("terminated")),
    };
    // Whatever happened, nothing stays.
    let left = world.close().await;
    result?;
    if !left.is_empty() {
        bail!("left behind: {}", left.join("; "));
    }
    Ok(())
}

async fn measure(world: &World, command: Command, json: Option<PathBuf>) -> Result<()> {
    world.ensure_image()?;
    let (name, numbers) = match command {
        Command::Start { n, breakdown, only } => ("start", start::run(world, n, breakdown, &only).await?),
        Command::Exec { n } => ("exec", exec::run(world, n).await?),
        Command::Files { n } => ("files", files::run(world, n).await?),
        Command::Fork { n } => ("fork", fork::run(world, n).await?),
        Command::Density { n } => ("density", density::run(world, n).await?),
    };
    let path = json.unwrap_or_else(|| world.target.join("bench").join(format!("{name}.json")));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let whole = serde_json::json!({ "bench": name, "host": world::host(), "numbers": numbers });
    std::fs::write(&path, serde_json::to_vec_pretty(&whole)?)?;
    println!("\nnumbers: {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Args::command().debug_assert();
    }
}
