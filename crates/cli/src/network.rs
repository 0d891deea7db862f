//! From `--network` and `--allow` to a policy.

use crate::{args::Dirs, context::Steps, failure::Failure};
use trialrun_policy::{AllowEntry, Policy};

/// A policy and what machines under it need in their environment.
pub struct Network {
    /// The policy.
    pub policy: Policy,
    /// Environment, such as a mirror's address.
    pub env: Vec<(String, String)>,
}

/// Reads a preset and the allow entries on top of it.
///
/// # Errors
/// An unknown preset or an entry that can't be read.
pub async fn network(dirs: &Dirs, preset: &str, allow: &[String], steps: &Steps) -> Result<Network, Failure> {
    let (mut policy, env) = match preset {
        "off" => (Policy::off(), Vec::new()),
        "web" => (Policy::web(), Vec::new()),
        "full" => (Policy::full(), Vec::new()),
        "registries" => {
            steps.say("asking the package clients which registries they use");
            let set = trialrun_gateway::registries::discover(&discover_env(dirs)).await;
            (set.policy(), set.machine_env())
        }
        other => {
            return Err(Failure::usage(format!("{other:?} is not a network preset (off, registries, web or full)")));
        }
    };
    for text in allow {
        let entry: AllowEntry = text.parse().map_err(|e| Failure::usage(format!("--allow {text}: {e}")))?;
        policy = policy.allow(entry);
    }
    Ok(Network { policy, env })
}

fn discover_env(dirs: &Dirs) -> trialrun_gateway::registries::DiscoverEnv {
    trialrun_gateway::registries::DiscoverEnv::of_host(Some(dirs.cache_dir.join("registries.json")))
}
