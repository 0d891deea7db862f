//! Runs a command in a cell, for trying out policies by hand:
//! `cargo run -p trialrun-gateway --example cell -- web curl -sI https://example.com`.
//!
//! The policy is a preset (`off`, `web`, `full`, `registries`) or a comma-separated allow-list. The command runs as the
//! caller in the cell's network namespace, with a `resolv.conf` of its own. Records and the gateway's memory follow.

use std::{os::fd::AsRawFd, process::Command};
use trialrun_gateway::{
    Gateway, GatewayConfig, UpstreamProxy,
    registries::{DiscoverEnv, discover},
};
use trialrun_net::Cell;
use trialrun_policy::Policy;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [policy, command @ ..] = &args[..] else { return Err("usage: cell POLICY [COMMAND…]".into()) };
    let before = private_kib();
    let start = std::time::Instant::now();
    let cell = Cell::create()?;
    eprintln!("cell made in {:?}", start.elapsed());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let upstream_proxy = UpstreamProxy::from_env()?;
        let policy = match policy.as_str() {
            "off" => Policy::off(),
            "web" => Policy::web(),
            "full" => Policy::full(),
            "registries" => {
                let cache = Some(std::env::temp_dir().join("trialrun-example-registries.json"));
                let env = DiscoverEnv { cache, upstream_proxy: upstream_proxy.clone(), ..DiscoverEnv::default() };
                Policy::registries(discover(&env).await.hosts().to_vec())
            }
            list => Policy::allow_list(list.split(',').map(str::parse).collect::<Result<_, _>>()?),
        };
        let netns = format!("/proc/{}/fd/{}", std::process::id(), cell.netns.as_raw_fd());
        let config = GatewayConfig { upstream_proxy, ..GatewayConfig::default() };
        let gateway = Gateway::start(cell.listeners, config, policy)?;
        tokio::task::yield_now().await;
        eprintln!("private memory: {before} KiB before, {} KiB with the idle gateway", private_kib());
        let script = "printf 'nameserver 10.200.0.2\\n' > /tmp/resolv.conf.$$ && \
            mount --bind /tmp/resolv.conf.$$ /etc/resolv.conf && rm /tmp/resolv.conf.$$; exec \"$@\"";
        let mut child = Command::new("nsenter");
        child.arg(format!("--net={netns}")).args(["unshare", "-m", "sh", "-c", script, "sh"]).args(command);
        let status = tokio::process::Command::from(child).status().await?;
        eprintln!("{status}; private memory: {} KiB", private_kib());
        for record in gateway.records(0) {
            eprintln!("{}", serde_json::to_string(&record)?);
        }
        Ok(())
    })
}

/// Memory that only this process has, from smaps_rollup.
fn private_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let value = |line: &str| line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    text.lines().filter(|line| line.starts_with("Private_")).filter_map(value).sum()
}
