//! From `--network` and `--allow` to a policy.

use crate::{context::Steps, failure::Failure};
use trialrun_engine::{CreateOptions, Engine};
use trialrun_gateway::{
    UpstreamProxy,
    registries::{self, DiscoverEnv},
};
use trialrun_model::{Command, ExecSpec, ImageRef, SandboxSpec};
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
pub async fn network(
    engine: &Engine,
    image: &ImageRef,
    preset: &str,
    allow: &[String],
    steps: &Steps,
) -> Result<Network, Failure> {
    let (mut policy, env) = match preset {
        "off" => (Policy::off(), Vec::new()),
        "web" => (Policy::web(), Vec::new()),
        "full" => (Policy::full(), Vec::new()),
        "registries" => {
            steps.say("asking the package clients which registries they use");
            let upstream_proxy = UpstreamProxy::from_env().map_err(|e| Failure::usage(format!("HTTPS_PROXY: {e}")))?;
            let env = DiscoverEnv {
                cache: Some(engine.cache_dir().join("registries.json")),
                upstream_proxy,
                image_indexes: image_indexes(engine, image).await?,
                ..DiscoverEnv::default()
            };
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

/// Prints the indexes of the pip that runs it as JSON: its default one unless another is set, and the extra ones.
const ASK_PIP: &str = r#"
import json, subprocess, sys
try:
    from pip._internal.models.index import PyPI
except ImportError:
    print("[]"); sys.exit()
found, default = [], PyPI.simple_url
for line in subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout.splitlines():
    key, _, value = line.partition("=")
    name, value = key.rpartition(".")[2], value.strip("'")
    if name == "index-url":
        default = value
    elif name == "extra-index-url":
        found += value.replace("\\n", " ").split()
print(json.dumps([default, *found]))
"#;

/// The Python indexes that the image's own pip is configured for: asked once per image, in a machine without network. A
/// host without pip still installs from where its machines' pip would.
async fn image_indexes(engine: &Engine, image: &ImageRef) -> Result<Vec<String>, Failure> {
    // The host image's clients are the host's.
    let Ok(resolved) = engine.images().resolve(image) else { return Ok(Vec::new()) };
    let kept = engine.cache_dir().join("image-indexes");
    let file = kept.join(resolved.digest.trim_start_matches("sha256:"));
    if let Some(known) = std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        return Ok(known);
    }
    let spec = SandboxSpec { image: image.clone(), ..SandboxSpec::default() };
    let sandbox = engine.create(CreateOptions { spec, policy: Policy::off(), attached: true, lease: None }).await?;
    let asked = sandbox.capture(ExecSpec::new(Command::argv(["python3", "-c", ASK_PIP])), 64 << 10).await;
    sandbox.delete().await?;
    // An image without Python has no such client.
    let indexes: Vec<String> = serde_json::from_slice(&asked?.stdout).unwrap_or_default();
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(&kept)?;
        std::fs::write(&file, serde_json::to_vec(&indexes)?)
    };
    if let Err(error) = write() {
        tracing::warn!(%error, "an image's indexes were not kept");
    }
    Ok(indexes)
}
