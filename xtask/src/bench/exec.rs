//! `exec`: commands in a running machine.

use super::{
    measure,
    peers::Peer,
    table::{self, Series, mib, ms, number, ratio},
    world::{World, forget_peak, peak_rss, pids},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Instant;
use trialrun_engine::{Output, Sandbox};
use trialrun_model::{Command, ExecSpec};

const WARM_UP: usize = 2;
const TRUE: &str = "/bin/true";
/// Bytes per stream of the check that output arrives whole.
const BOTH: usize = 8 << 20;
/// Bytes of the output that must not be held anywhere.
const FLOOD: u64 = 2 << 30;
/// Rounds of [`BOTH`].
const BOTH_ROUNDS: usize = 5;

/// Measures, prints, and gives the numbers.
pub async fn run(world: &World, n: usize) -> Result<Value> {
    let sandbox = world.create().await?;
    let trips = round_trips(world, &sandbox, n).await?;
    // Before the next one makes this process large.
    let flood = flood(&sandbox).await?;
    let both = both_streams(&sandbox).await?;
    sandbox.delete().await?;
    Ok(json!({ "round_trip_ms": trips, "flood": flood, "both_streams_ms": both, "peers": world.peers()?.json() }))
}

async fn round_trips(world: &World, sandbox: &Sandbox, n: usize) -> Result<Value> {
    let (agent, _) = pids(sandbox)?;
    let nsenter =
        ["nsenter", "-t", &agent.to_string(), "-U", "-m", "-p", "-n", "-i", "-u", "-C", TRUE].map(str::to_owned);
    let [podman, bwrap] = {
        let peers = world.peers()?;
        [Peer::Podman, Peer::Bubblewrap].map(|peer| peers.has(peer))
    };
    let names = ["trialrun exec", "nsenter into the machine", "podman exec", "bwrap, a new sandbox each"];
    let mut rows: Vec<(&str, Series)> = names.map(|name| (name, Series::default())).into();
    for round in 0..WARM_UP + n {
        for (name, series) in &mut rows {
            let taken = match *name {
                "trialrun exec" => {
                    let begun = Instant::now();
                    let captured = sandbox.capture(ExecSpec::new(Command::argv([TRUE])), 1 << 20).await?;
                    let taken = ms(begun);
                    ensure!(
                        captured.outcome.status.is_some_and(trialrun_model::ExitStatus::success),
                        "{:?}",
                        captured.outcome
                    );
                    Some(taken)
                }
                "podman exec" if podman => {
                    Some(world.peers()?.podman_exec(&[TRUE])?.expect("").context("podman exec")?.exit_ms)
                }
                "nsenter into the machine" => Some(measure::run(&nsenter)?.expect("").context("nsenter")?.exit_ms),
                _ if bwrap && name.starts_with("bwrap") => {
                    Some(world.peers()?.run(Peer::Bubblewrap, &[TRUE])?.expect("").context("bwrap")?.exit_ms)
                }
                _ => None,
            };
            if round >= WARM_UP {
                taken.into_iter().for_each(|value| series.push(value));
            }
        }
    }
    rows.retain(|(_, series)| series.len() > 0);
    let of = |start: &str| rows.iter().find(|(name, _)| name.starts_with(start)).map(|(_, series)| series);
    let line = |(name, series): &(&str, Series)| {
        vec![
            (*name).to_owned(),
            series.len().to_string(),
            number(series.median()),
            number(series.p99()),
            ratio(series, of("nsenter")),
            ratio(series, of("podman")),
        ]
    };
    table::print(
        &["ms for `true`", "n", "median", "p99", "x nsenter", "x podman"],
        &rows.iter().map(line).collect::<Vec<_>>(),
    );
    Ok(rows.iter().map(|(name, series)| ((*name).to_owned(), series.json())).collect::<serde_json::Map<_, _>>().into())
}

/// Output that nobody could hold, followed to its end.
async fn flood(sandbox: &Sandbox) -> Result<Value> {
    let (agent, keeper) = pids(sandbox)?;
    let processes = [("client (this process)", std::process::id()), ("keeper", keeper), ("guest agent", agent)];
    processes.iter().for_each(|(_, pid)| forget_peak(*pid));
    let before = processes.map(|(_, pid)| peak_rss(pid).unwrap_or(0));
    let begun = Instant::now();
    let mut following =
        sandbox.exec(ExecSpec::new(Command::argv(["/usr/bin/head", "-c", &FLOOD.to_string(), "/dev/zero"]))).await?;
    let (mut seen, mut dropped) = (0, 0);
    let outcome = loop {
        match following.next().await? {
            Output::Stdout(bytes) | Output::Stderr(bytes) => seen += bytes.len() as u64,
            Output::Dropped(bytes) => dropped += bytes,
            Output::Ended(outcome) => break outcome,
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    let peaks = processes.map(|(_, pid)| peak_rss(pid).unwrap_or(0));
    ensure!(seen + dropped == FLOOD, "{seen} bytes came and {dropped} were dropped of {FLOOD}: {outcome:?}");
    println!("\n2 GiB of output: {seconds:.2} s, {:.0} MiB/s, {dropped} bytes dropped", mib(FLOOD) / seconds);
    let line = |at: usize| {
        vec![processes[at].0.to_owned(), format!("{:.1}", mib(before[at])), format!("{:.1}", mib(peaks[at]))]
    };
    table::print(&["resident MiB", "before", "peak"], &(0..processes.len()).map(line).collect::<Vec<_>>());
    let rss =
        (0..processes.len()).map(|at| (processes[at].0.to_owned(), json!({ "before": before[at], "peak": peaks[at] })));
    Ok(json!({ "bytes": FLOOD, "seconds": seconds, "dropped": dropped, "rss": rss.collect::<serde_json::Map<_, _>>() }))
}

/// Every byte of both streams, written at the same time, must arrive.
async fn both_streams(sandbox: &Sandbox) -> Result<Value> {
    // 251 is prime to every buffer's size, so that a lost or doubled block shows.
    let code = format!(
        "import os,threading\n\
         def w(fd, first):\n\
        \x20d = bytes((i * 7 + first) % 251 for i in range(251)) * ({BOTH} // 251 + 1)\n\
        \x20d = memoryview(d)[:{BOTH}]\n\
        \x20while d: d = d[os.write(fd, d):]\n\
         t = [threading.Thread(target=w, args=a) for a in ((1, 1), (2, 2))]\n\
         [x.start() for x in t]; [x.join() for x in t]"
    );
    let expected = |first: usize| (0..BOTH).map(move |i| u8::try_from((i % 251 * 7 + first) % 251).unwrap_or(0));
    let mut series = Series::default();
    for _ in 0..BOTH_ROUNDS {
        let begun = Instant::now();
        let captured =
            sandbox.capture(ExecSpec::new(Command::argv(["/usr/bin/python3", "-c", &code])), BOTH + 1).await?;
        series.push(ms(begun));
        let whole = captured.stdout.iter().copied().eq(expected(1)) && captured.stderr.iter().copied().eq(expected(2));
        ensure!(
            whole,
            "8 MiB on both streams came damaged: {} and {} bytes",
            captured.stdout.len(),
            captured.stderr.len()
        );
    }
    println!(
        "\n8 MiB on both streams at once, intact: median {} ms, worst {} ms (n={BOTH_ROUNDS}, Python's start included)",
        number(series.median()),
        number(series.p99())
    );
    Ok(series.json())
}
