//! From an image reference to what a driver mounts.

use crate::{Engine, error::CreateError};
use std::{net::IpAddr, path::PathBuf};
use trialrun_keeper::wire::{Bind, Rootfs};
use trialrun_model::{ImageRef, SandboxSpec};

/// A root and how its execs start.
pub struct PreparedRoot {
    pub rootfs: Rootfs,
    pub env: Vec<(String, String)>,
    pub user: String,
    pub cwd: String,
    /// Whether the image's environment stands alone.
    pub bare: bool,
}

/// Where a machine asks for names. Any address would do, since port 53 is steered; this one is the cell's own.
const DNS: IpAddr = IpAddr::V4(trialrun_keeper::CELL_DNS);

impl Engine {
    pub(crate) fn rootfs(&self, spec: &SandboxSpec) -> Result<PreparedRoot, CreateError> {
        let config = &self.inner.config;
        // Without one, machines have what their image has.
        let bundle = trialrun_keeper::host_ca_bundle().ok();
        let top = trialrun_image::runtime_layer(&config.cache_dir, bundle.as_deref(), DNS, &spec.hostname)?;
        let (mut rootfs, image_config) = match &spec.image {
            ImageRef::Host => {
                let host = trialrun_image::host_image(&config.cache_dir, &[&config.data_dir])?;
                let binds = host.binds.into_iter().map(|b| Bind { source: b.source, target: b.target }).collect();
                (Rootfs { lowers: vec![host.skeleton], binds, masks: host.masks }, host.config)
            }
            image => {
                let image = self.inner.images.resolve(image).map_err(CreateError::Image)?;
                self.inner.images.touch(&image.digest);
                (Rootfs { lowers: image.trees(), ..Rootfs::default() }, image.config)
            }
        };
        rootfs.lowers.insert(0, top);
        let mut env = ca_env(bundle.is_some());
        env.extend(image_config.env);
        Ok(PreparedRoot { rootfs, env, user: image_config.user, cwd: image_config.cwd, bare: image_config.bare })
    }
}

/// Where clients that bring their own list of authorities find the machine's, which holds the host's extra ones too.
/// These variables replace a client's list, so the file is a whole bundle.
fn ca_env(present: bool) -> Vec<(String, String)> {
    if !present {
        return Vec::new();
    }
    let path = PathBuf::from("/etc/ssl/certs/ca-certificates.crt").to_string_lossy().into_owned();
    [
        "SSL_CERT_FILE",
        "PIP_CERT",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "CARGO_HTTP_CAINFO",
    ]
    .map(|name| (name.to_owned(), path.clone()))
    .to_vec()
}
