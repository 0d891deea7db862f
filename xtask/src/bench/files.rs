//! `files`: many small files up and down, beside tar through a pipe.

use super::{
    measure,
    table::{self, Series, ms, number, ratio},
    world::World,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};
use trialrun_engine::{DownloadLimits, Sandbox, UploadRules};
use trialrun_model::{Command, ExecSpec};

const DIRS: usize = 100;
const FILES_PER_DIR: usize = 200;
const FILE_BYTES: usize = 10 << 10;
/// Where they go in the machine: a tmpfs, as on the host's side.
const INSIDE: &str = "/dev/shm/up";

/// Measures, prints, and gives the numbers.
pub async fn run(world: &World, n: usize) -> Result<Value> {
    let shm =
        tempfile::Builder::new().prefix("trialrun-bench-").tempdir_in("/dev/shm").context("a directory in /dev/shm")?;
    let (source, copy, down) = (shm.path().join("a"), shm.path().join("b"), shm.path().join("down"));
    make(&source)?;
    let sandbox = world.create().await?;
    let names = ["tar | tar", "trialrun up", "trialrun down"];
    let mut rows: Vec<(&str, Series)> = names.map(|name| (name, Series::default())).into();
    // One round to warm up, whose result is compared byte for byte.
    for round in 0..=n {
        let times = [tar(&source, &copy)?, up(&sandbox, &source).await?, get(&sandbox, &down).await?];
        if round == 0 {
            ensure!(same(&source, &copy)? && same(&source, &down)?, "what came back is not what went up");
        } else {
            rows.iter_mut().zip(times).for_each(|((_, series), value)| series.push(value));
        }
        fs::remove_dir_all(&copy)?;
        fs::remove_dir_all(&down)?;
        let removed = sandbox.capture(ExecSpec::new(Command::argv(["/bin/rm", "-rf", INSIDE])), 1 << 16).await?;
        ensure!(
            removed.outcome.status.is_some_and(trialrun_model::ExitStatus::success),
            "rm in the machine: {:?}",
            removed.outcome
        );
    }
    sandbox.delete().await?;
    let tar = rows[0].1.clone();
    let line = |(name, series): &(&str, Series)| {
        vec![
            (*name).to_owned(),
            series.len().to_string(),
            number(series.median()),
            number(series.p99()),
            ratio(series, Some(&tar)),
        ]
    };
    let head = format!("ms for {} files of {} KiB", DIRS * FILES_PER_DIR, FILE_BYTES >> 10);
    table::print(&[&head, "n", "median", "worst", "x tar"], &rows.iter().map(line).collect::<Vec<_>>());
    Ok(json!({ "ms": rows.iter().map(|(name, s)| ((*name).to_owned(), s.json())).collect::<serde_json::Map<_, _>>() }))
}

fn file(root: &Path, number: usize) -> PathBuf {
    root.join(format!("d{:02}/f{:03}", number / FILES_PER_DIR, number % FILES_PER_DIR))
}

/// Files that differ from each other and don't compress.
fn make(root: &Path) -> Result<()> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for number in 0..DIRS * FILES_PER_DIR {
        let path = file(root, number);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        let mut bytes = Vec::with_capacity(FILE_BYTES);
        while bytes.len() < FILE_BYTES {
            // xorshift64.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        fs::write(path, bytes)?;
    }
    Ok(())
}

fn same(a: &Path, b: &Path) -> Result<bool> {
    for number in 0..DIRS * FILES_PER_DIR {
        if fs::read(file(a, number))?
            != fs::read(file(b, number)).with_context(|| file(b, number).display().to_string())?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

fn tar(from: &Path, to: &Path) -> Result<f64> {
    fs::create_dir(to)?;
    let script = "tar -C \"$0\" -cf - . | tar -C \"$1\" -xf -";
    let argv = ["sh", "-c", script, &from.display().to_string(), &to.display().to_string()].map(str::to_owned);
    Ok(measure::run(&argv)?.expect("").context("tar")?.exit_ms)
}

async fn up(sandbox: &Sandbox, source: &Path) -> Result<f64> {
    let begun = Instant::now();
    let moved = sandbox.upload(source, INSIDE, UploadRules::default()).await?;
    let taken = ms(begun);
    ensure!(moved.bytes == total() && moved.skipped_total == 0, "the upload: {moved:?}");
    Ok(taken)
}

async fn get(sandbox: &Sandbox, dest: &Path) -> Result<f64> {
    let begun = Instant::now();
    let moved = sandbox.download(INSIDE, dest, DownloadLimits::default()).await?;
    let taken = ms(begun);
    ensure!(moved.bytes == total() && moved.skipped_total == 0, "the download: {moved:?}");
    Ok(taken)
}

fn total() -> u64 {
    (DIRS * FILES_PER_DIR * FILE_BYTES) as u64
}
