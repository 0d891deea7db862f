//! `fork`: from a running machine to the first word of its fork, beside a new machine and beside a copy of the files.

use super::{
    table::{self, Series, ms, number, ratio},
    world::World,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{path::Path, time::Instant};
use trialrun_engine::{ForkOptions, Output, Sandbox};
use trialrun_model::{Command, ExecSpec};

/// What the parent's layer holds: 20,000 files of 10 KiB, 205 MB in all.
const FILL: &str = "import os\nfor d in range(200):\n os.makedirs(f'tree/{d}')\n for n in range(100):\n  \
    open(f'tree/{d}/{n}', 'wb').write(os.urandom(10240))\nprint(sum(len(f) for _, _, f in os.walk('tree')))";
const FILES: &str = "20000";
/// What the parent writes between two forks in the second row.
const CHANGE: &str = "head -c 20000000 /dev/urandom > changed";
const ATTACHED: ForkOptions = ForkOptions { attached: true, lease: None };

/// Measures, prints, and gives the numbers.
pub async fn run(world: &World, n: usize) -> Result<Value> {
    let parent = world.create().await?;
    let filled = parent.capture(ExecSpec::new(Command::argv(["/usr/bin/python3", "-c", FILL])), 1 << 16).await?;
    let said = String::from_utf8_lossy(&filled.stdout).trim().to_owned();
    ensure!(said == FILES, "the parent's files: {said:?} {}", String::from_utf8_lossy(&filled.stderr));
    let copied = world.temp.path().join("copy-source");
    std::fs::create_dir(&copied)?;
    parent.download("/workspace/tree", &copied, trialrun_engine::DownloadLimits::default()).await?;
    let [mut fresh, mut quiet, mut busy, mut pause, mut busy_pause, mut copy] =
        std::array::from_fn(|_| Series::default());
    for round in 0..=n {
        // The first of each is not counted: it writes out what filling left, and loads programs.
        let counted = round > 0;
        let begun = Instant::now();
        let machine = world.create().await?;
        first_word(&machine).await?;
        let took = ms(begun);
        machine.delete().await?;
        if counted {
            fresh.push(took);
        }
        for change in [false, true] {
            if change {
                parent.capture(shell(CHANGE), 0).await?;
            }
            let begun = Instant::now();
            let (child, cost) = world.engine.fork(&parent, ATTACHED).await?;
            first_word(&child).await?;
            let took = ms(begun);
            child.delete().await?;
            if counted {
                let (series, paused) = if change { (&mut busy, &mut busy_pause) } else { (&mut quiet, &mut pause) };
                series.push(took);
                paused.push(cost.pause.as_secs_f64() * 1e3);
            }
        }
        if counted && round <= 5 {
            copy.push(copy_once(&copied, &world.temp.path().join("copy"))?);
        }
    }
    parent.delete().await?;
    let line = |name: &str, series: &Series| {
        vec![name.to_owned(), number(series.median()), number(series.p99()), ratio(series, Some(&fresh))]
    };
    let rows = [
        line("a new machine, its first word", &fresh),
        line("a fork, its first word", &quiet),
        line("  the parent stands still", &pause),
        line("a fork after 20 MB were written", &busy),
        line("  the parent stands still", &busy_pause),
        line("cp --archive of the files", &copy),
    ];
    println!("parent's layer: {FILES} files, 200 MB");
    table::print(&["ms", "median", "p99", "of a new machine"], &rows);
    Ok(json!({
        "fresh_ms": fresh.json(), "fork_ms": quiet.json(), "pause_ms": pause.json(),
        "fork_after_writing_ms": busy.json(), "pause_after_writing_ms": busy_pause.json(), "copy_ms": copy.json(),
    }))
}

fn shell(line: &str) -> ExecSpec {
    ExecSpec::new(Command::Shell(line.to_owned()))
}

async fn first_word(machine: &Sandbox) -> Result<()> {
    let mut following = machine.exec(ExecSpec::new(Command::argv(["/bin/echo", "word"]))).await?;
    loop {
        match following.next().await? {
            Output::Stdout(_) => return Ok(()),
            Output::Ended(outcome) => anyhow::bail!("ended without a word: {outcome:?}"),
            _ => {}
        }
    }
}

fn copy_once(from: &Path, to: &Path) -> Result<f64> {
    let begun = Instant::now();
    let status = std::process::Command::new("cp").arg("--archive").args([from, to]).status().context("run cp")?;
    let took = ms(begun);
    ensure!(status.success(), "cp: {status}");
    std::fs::remove_dir_all(to)?;
    Ok(took)
}
