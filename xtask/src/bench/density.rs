//! `density`: many idle machines at once.

use super::{
    table::{self, Series, mib, ms, number},
    world::World,
};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::{fs, time::Instant};
use tokio::task::{JoinSet, LocalSet};
use trialrun_engine::Sandbox;

/// Measures, prints, and gives the numbers.
pub async fn run(world: &World, n: usize) -> Result<Value> {
    // What only the first machine costs.
    world.create().await?.delete().await?;
    LocalSet::new().run_until(measure(world, n)).await
}

async fn measure(world: &World, n: usize) -> Result<Value> {
    let available = mem_available();
    let begun = Instant::now();
    let mut set = JoinSet::new();
    for _ in 0..n {
        let (engine, options) = (world.engine.clone(), world.options());
        set.spawn_local(async move { engine.create(options).await.map(|sandbox| (sandbox, ms(begun))) });
    }
    let (mut machines, mut ready, mut failed) = (Vec::new(), Series::default(), Vec::new());
    while let Some(joined) = set.join_next().await {
        match joined? {
            Ok((sandbox, at)) => {
                machines.push(sandbox);
                ready.push(at);
            }
            Err(e) => failed.push(format!("{:#}", anyhow::Error::from(e))),
        }
    }
    let wall = ms(begun);
    if !failed.is_empty() {
        failed.dedup();
        bail!("{} of {n} machines were made; the others: {}", machines.len(), failed.join(" | "));
    }
    let (keepers, agents, sums) = memory(&machines).await?;
    let host = (mib(available) - mib(mem_available())) / n as f64;
    let begun = Instant::now();
    let mut ends = JoinSet::new();
    for machine in machines {
        ends.spawn_local(machine.delete());
    }
    while let Some(joined) = ends.join_next().await {
        joined??;
    }
    let deleted = ms(begun);
    println!(
        "{n} machines at once: all ready after {wall:.0} ms ({:.1} ms each), all deleted in {deleted:.0} ms",
        wall / n as f64
    );
    let line = |name: &str, series: &Series| vec![name.to_owned(), number(series.median()), number(series.p99())];
    let rows = [line("keeper", &keepers), line("guest agent", &agents), line("both", &sums)];
    table::print(&["private MiB, idle", "median", "p99"], &rows);
    println!("the host's available memory fell by {host:.1} MiB per machine (kernel memory and page cache included)");
    Ok(json!({
        "machines": n, "wall_ms": wall, "delete_ms": deleted, "ready_ms": ready.json(),
        "keeper_private_mib": keepers.json(), "agent_private_mib": agents.json(), "both_private_mib": sums.json(),
        "host_available_fell_mib_per_machine": host,
    }))
}

async fn memory(machines: &[Sandbox]) -> Result<(Series, Series, Series)> {
    let (mut keepers, mut agents, mut sums) = (Series::default(), Series::default(), Series::default());
    for machine in machines {
        let description = machine.describe().await?;
        let (keeper, agent) = (mib(description.keeper_private_bytes), mib(description.agent_private_bytes));
        keepers.push(keeper);
        agents.push(agent);
        sums.push(keeper + agent);
    }
    Ok((keepers, agents, sums))
}

fn mem_available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) << 10
}
