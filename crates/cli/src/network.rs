//! From `--network` and `--allow` to a policy.

use crate::{args::Dirs, context::Steps, failure::Failure};
use trialrun_gateway::{
    UpstreamProxy,
    registries::{self, DiscoverEnv},
};
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
            let upstream_proxy = UpstreamProxy::from_env().map_err(|e| Failure::usage(format!("HTTPS_PROXY: {e}")))?;
            let env = DiscoverEnv { cache: Some(dirs.cache_dir.join("registries.json")), upstream_proxy, ..DiscoverEnv::default() };
            let set = registries::discover(&env).await;
            for note in set.notes() {
                tracing::warn!("{note}");
            }
            (Policy::registries(set.hosts().to_vec()), set.machine_env())
        }
        other => {
            return Err(Failure::usage(format!("{other:?} is not a network preset (off, registries, web or full)")));
        }
    };
    for text in allow {
        let entry: AllowEntry = text.parse().map_err(|e| Failure::usage(format!("--allow {text}: {e}")))?;
        policy.allow(entry);
    }
    Ok(Network { policy, env })
}
