//! `start`: from nothing to the first byte that Python prints.

use super::{
    measure,
    peers::Peer,
    table::{self, Series, ms, number, ratio},
    world::World,
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use trialrun_engine::{Output, Pool, Sandbox, StartTimings};
use trialrun_model::{Command, ExecSpec, SandboxSpec};
use trialrun_policy::Policy;

/// Between making a machine for the pool and taking it.
const SETTLE: Duration = Duration::from_millis(30);
const PYTHON: [&str; 3] = ["/usr/bin/python3", "-c", "print(\"RESULT\", 6*7)"];
const PRINTS: &str = "RESULT 42\n";
const WARM_UP: usize = 2;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `Engine::create` and an exec, in this process, with nothing ready.
    Cold,
    /// As `Cold`, as a server does it: a keeper and its cell were made ready after the machine before.
    Warm,
    /// `Pool::take` and an exec.
    Pool,
    /// The whole command `trialrun run`.
    Program,
    Peer(Peer),
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Cold => "engine-cold",
            Self::Warm => "engine-warm",
            Self::Pool => "engine-pool",
            Self::Program => "trialrun-run",
            Self::Peer(peer) => peer.program(),
        }
    }
}

#[derive(Default)]
struct Row {
    first: Series,
    exit: Series,
    delete: Series,
}

/// Where the time of an engine's starts went, by row and part.
#[derive(Default)]
struct Breakdown {
    parts: Vec<(String, Series)>,
}

impl Breakdown {
    fn push(&mut self, kind: Kind, timings: StartTimings, create_ms: f64, first_ms: f64) {
        let StartTimings { read_ms, cell_ms, launch_ms, agent_ms } = timings;
        // A keeper that was ready ahead made its cell and waited before the create began.
        let ahead = if kind == Kind::Cold { read_ms + cell_ms } else { 0.0 };
        let parts = [
            ("keeper: the cell, the layers' file system", (kind == Kind::Cold).then_some(cell_ms)),
            ("keeper: wait for the specification", (kind == Kind::Cold).then_some(read_ms)),
            ("keeper: driver's launch", Some(launch_ms)),
            ("keeper: agent's first word", Some(agent_ms)),
            ("create, the rest", Some(create_ms - ahead - launch_ms - agent_ms)),
            ("create, all", Some(create_ms)),
            ("exec to the first byte", Some(first_ms - create_ms)),
        ];
        for (part, value) in parts.into_iter().filter_map(|(part, value)| Some((part, value?))) {
            let name = format!("{}: {part}", kind.name());
            match self.parts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, series)) => series.push(value),
                None => self.parts.push((name, [value].into_iter().collect())),
            }
        }
        // By row, in the order of the parts.
        self.parts.sort_by_key(|(name, _)| name.starts_with(Kind::Warm.name()));
    }
}

/// Measures, prints, and gives the numbers.
pub async fn run(world: &World, n: usize, breakdown: bool, only: &[String]) -> Result<Value> {
    let present: Vec<Peer> = world.peers()?.present.iter().map(|(peer, _)| *peer).collect();
    let all =
        [Kind::Cold, Kind::Warm, Kind::Pool, Kind::Program].into_iter().chain(present.into_iter().map(Kind::Peer));
    let mut rows: Vec<(Kind, Row)> = all.map(|kind| (kind, Row::default())).collect();
    for name in only {
        ensure!(rows.iter().any(|(kind, _)| kind.name() == name), "there is no row {name}; there are {}", names(&rows));
    }
    rows.retain(|(kind, _)| only.is_empty() || only.iter().any(|name| name == kind.name()));
    let pool = Pool::new(world.engine.clone(), SandboxSpec::default());
    let mut parts = Breakdown::default();
    for round in 0..WARM_UP + n {
        for (kind, row) in &mut rows {
            let begun = Instant::now();
            let (first, exit, delete) = match *kind {
                Kind::Cold | Kind::Warm => {
                    let engine = if *kind == Kind::Cold { &world.cold } else { &world.engine };
                    let sandbox = engine.create(world.options()).await?;
                    let created = ms(begun);
                    let (first, exit) = python(&sandbox, begun).await?;
                    if round >= WARM_UP {
                        parts.push(*kind, sandbox.timings(), created, first);
                    }
                    (first, exit, Some(delete(sandbox).await?))
                }
                Kind::Pool => {
                    pool.fill(1).await?;
                    // A pooled machine was made some time ago: what its making left to do must not count as its use.
                    tokio::time::sleep(SETTLE).await;
                    let begun = Instant::now();
                    let sandbox = pool.take(SandboxSpec::default(), Policy::off()).await?;
                    let (first, exit) = python(&sandbox, begun).await?;
                    (first, exit, Some(delete(sandbox).await?))
                }
                Kind::Program => program(world)?,
                Kind::Peer(peer) => {
                    let sample = world.peers()?.run(peer, &PYTHON)?.expect(PRINTS).with_context(|| peer.program())?;
                    (sample.first_ms.context("no output")?, sample.exit_ms, None)
                }
            };
            if round >= WARM_UP {
                row.first.push(first);
                row.exit.push(exit);
                delete.into_iter().for_each(|value| row.delete.push(value));
            }
        }
        // Where a signal is noticed, also when all rows are peers'.
        tokio::task::yield_now().await;
    }
    pool.drain().await;
    print(&rows);
    if breakdown {
        print_breakdown(&parts);
    }
    numbers(world, &rows, &parts)
}

fn names(rows: &[(Kind, Row)]) -> String {
    rows.iter().map(|(kind, _)| kind.name()).collect::<Vec<_>>().join(", ")
}

/// Runs Python in a machine: milliseconds since `begun` to its first byte and to its end.
async fn python(sandbox: &Sandbox, begun: Instant) -> Result<(f64, f64)> {
    let mut following = sandbox.exec(ExecSpec::new(Command::argv(PYTHON))).await?;
    let (mut first, mut out) = (None, Vec::new());
    loop {
        match following.next().await? {
            Output::Stdout(bytes) => {
                first.get_or_insert_with(|| ms(begun));
                out.extend_from_slice(&bytes);
            }
            Output::Ended(outcome) => {
                let exit = ms(begun);
                ensure!(out == PRINTS.as_bytes(), "printed {:?}: {outcome:?}", String::from_utf8_lossy(&out));
                return Ok((first.context("no output")?, exit));
            }
            Output::Stderr(bytes) => bail!("python said {:?}", String::from_utf8_lossy(&bytes)),
            Output::Dropped(_) => {}
        }
    }
}

async fn delete(sandbox: Sandbox) -> Result<f64> {
    let begun = Instant::now();
    sandbox.delete().await?;
    Ok(ms(begun))
}

/// As a user runs it: nothing of it is warm, its data directory is its own.
fn program(world: &World) -> Result<(f64, f64, Option<f64>)> {
    let path = |p: &std::path::Path| p.display().to_string();
    let (data, cache) = (path(&world.temp.path().join("program-data")), path(&world.cache_dir));
    let mut argv = vec![path(&world.program)];
    argv.extend(["run", "--data-dir", &data, "--cache-dir", &cache, "--no-stdin", "--"].map(str::to_owned));
    argv.extend(PYTHON.map(str::to_owned));
    let sample = measure::run(&argv)?.expect(PRINTS).context("trialrun run")?;
    Ok((sample.first_ms.context("no output")?, sample.exit_ms, None))
}

fn row(rows: &[(Kind, Row)], peer: Peer) -> Option<&Row> {
    rows.iter().find(|(kind, _)| *kind == Kind::Peer(peer)).map(|(_, row)| row)
}

fn print(rows: &[(Kind, Row)]) {
    let (bwrap, podman) = (row(rows, Peer::Bubblewrap), row(rows, Peer::Podman));
    let line = |(kind, row): &(Kind, Row)| {
        vec![
            kind.name().to_owned(),
            row.first.len().to_string(),
            number(row.first.median()),
            number(row.first.p99()),
            ratio(&row.first, bwrap.map(|r| &r.first)),
            ratio(&row.first, podman.map(|r| &r.first)),
            number(row.exit.median()),
            number(row.exit.p99()),
            ratio(&row.exit, bwrap.map(|r| &r.exit)),
            ratio(&row.exit, podman.map(|r| &r.exit)),
            number(row.delete.median()),
            number(row.delete.p99()),
        ]
    };
    let head =
        ["ms", "n", "first", "p99", "x bwrap", "x podman", "exit", "p99", "x bwrap", "x podman", "delete", "p99"];
    table::print(&head, &rows.iter().map(line).collect::<Vec<_>>());
}

fn print_breakdown(parts: &Breakdown) {
    println!();
    let line = |(name, series): &(String, Series)| vec![name.clone(), number(series.median()), number(series.p99())];
    table::print(&["ms", "median", "p99"], &parts.parts.iter().map(line).collect::<Vec<_>>());
}

fn numbers(world: &World, rows: &[(Kind, Row)], parts: &Breakdown) -> Result<Value> {
    let row = |(kind, row): &(Kind, Row)| {
        (
            kind.name().to_owned(),
            json!({ "first_ms": row.first.json(), "exit_ms": row.exit.json(), "delete_ms": row.delete.json() }),
        )
    };
    let part = |(name, series): &(String, Series)| (name.clone(), series.json());
    Ok(json!({
        "rows": rows.iter().map(row).collect::<serde_json::Map<_, _>>(),
        "breakdown_ms": parts.parts.iter().map(part).collect::<serde_json::Map<_, _>>(),
        "peers": world.peers()?.json(),
    }))
}
