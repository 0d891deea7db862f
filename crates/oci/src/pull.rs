//! From a reference to an image's layers on this host.

use crate::{
    blobs::{BlobError, Blobs},
    credentials,
    image::{Layer, OciImage},
    manifest::{self, Config, Descriptor, Digest, MAX_DOCUMENT, Manifest, ManifestError, Platform},
};
use oci_client::{
    Client, Reference,
    client::{Certificate, CertificateEncoding, ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use sha2::{Digest as _, Sha256};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Layers that are fetched at a time.
const AT_ONCE: usize = 3;
/// An index in an index in an index is somebody's joke.
const MAX_INDEXES: usize = 3;
/// Without a byte for this long, a connection counts as dead.
const SILENCE: Duration = Duration::from_secs(60);
/// Tries for a manifest after the first.
const RETRIES: u32 = 4;

/// What a pull says on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Layers of the image.
    pub layers: usize,
    /// Bytes of layers that are here.
    pub have: u64,
    /// Bytes of all layers.
    pub all: u64,
}

/// An image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The reference.
    #[error("{text:?} is no image reference ({why}); it looks like HOST/NAME:TAG, NAME:TAG or NAME@sha256:…")]
    Reference {
        /// What was given.
        text: String,
        /// What is wrong.
        why: String,
    },
    /// The configured credential.
    #[error("{0}")]
    Credential(String),
    /// A certificate of docker's configuration.
    #[error("read the certificates in {}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no such image, or we may not see it.
    #[error("the registry {registry} has no image {image}, or does not show it to {}", who(.known))]
    NotThere {
        /// Its name.
        registry: String,
        /// The image's.
        image: String,
        /// Whether we said who we are.
        known: bool,
    },
    /// The registry did not answer, or with a failure.
    #[error("ask the registry {registry} for {image}")]
    Registry {
        /// Its name.
        registry: String,
        /// The image's.
        image: String,
        /// What it said.
        source: Box<OciDistributionError>,
    },
    /// What it answered is of no use.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A document or a layer.
    #[error(transparent)]
    Blob(#[from] BlobError),
}

fn who(known: &bool) -> &'static str {
    if *known { "the user of docker's configuration" } else { "somebody unknown (docker login, podman login)" }
}

/// Pulls images into a cache directory.
#[derive(Debug, Clone)]
pub struct Puller {
    cache_dir: PathBuf,
    /// Our own program, and the argument that makes it an unpacker.
    unpacker: (PathBuf, String),
}

/// What a manifest says, read and checked.
struct Plan {
    digest: String,
    config: Config,
    layers: Vec<Descriptor>,
}

impl Puller {
    /// A puller that keeps content below `cache_dir`. `unpacker` is the program, and its argument, whose process calls
    /// [`crate::unpack::main`].
    #[must_use]
    pub fn new(cache_dir: &Path, unpacker: (PathBuf, String)) -> Self {
        Self { cache_dir: cache_dir.to_owned(), unpacker }
    }

    /// Fetches what `reference` names, for this host's platform. Nothing is fetched twice.
    ///
    /// # Errors
    /// Which step failed, and what to do.
    pub async fn pull(&self, reference: &str, progress: &(dyn Fn(Progress) + Sync)) -> Result<OciImage, PullError> {
        let image: Reference = reference
            .parse()
            .map_err(|e: oci_client::ParseError| PullError::Reference { text: reference.into(), why: e.to_string() })?;
        let auth = credentials::of(&image).map_err(PullError::Credential)?;
        let blobs = Blobs::open(&self.cache_dir)?;
        // Another crate may have chosen one before: it is the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let platform = manifest::here();
        let mut client = client(&image, ClientProtocol::Https)?;
        let plan = match self.plan(&client, &image, &auth, &blobs, &platform).await {
            // As docker has it: a registry on this very host may do without TLS.
            Err(PullError::Registry { source, .. }) if on_loopback(&image) && no_answer(&source) => {
                client = self::client(&image, ClientProtocol::Http)?;
                self.plan(&client, &image, &auth, &blobs, &platform).await?
            }
            other => other?,
        };
        let layers = self.layers(&client, &image, &plan, &blobs, progress).await?;
        Ok(OciImage {
            reference: reference.to_owned(),
            digest: plan.digest,
            config: plan.config,
            layers,
            unpacker: self.unpacker.clone(),
        })
    }

    async fn plan(
        &self,
        client: &Client,
        image: &Reference,
        auth: &RegistryAuth,
        blobs: &Blobs,
        platform: &Platform,
    ) -> Result<Plan, PullError> {
        let mut wanted = image.clone();
        for _ in 0..MAX_INDEXES {
            let (bytes, digest) = self.manifest(client, &wanted, auth).await?;
            match manifest::read(&bytes, platform)? {
                Manifest::Index(entry) => wanted = image.clone_with_digest(entry.digest.to_string()),
                Manifest::Image { config, layers } => {
                    if config.size > MAX_DOCUMENT {
                        let why = format!("it is {} bytes long", config.size);
                        return Err(ManifestError::Unreadable { what: "image configuration", why }.into());
                    }
                    for (n, layer) in layers.iter().enumerate() {
                        manifest::packing(n + 1, layer)?;
                    }
                    let path = blobs.fetch(client, image, &config, &|_| {}).await?;
                    let bytes = std::fs::read(&path).map_err(|source| BlobError::Cache {
                        step: "read",
                        path: path.clone(),
                        source,
                    })?;
                    let config = manifest::read_config(&bytes, platform)?;
                    if config.diff_ids.len() != layers.len() {
                        let told = config.diff_ids.len();
                        return Err(ManifestError::Layers { layers: layers.len(), told }.into());
                    }
                    return Ok(Plan { digest, config, layers });
                }
            }
        }
        Err(ManifestError::Unreadable { what: "manifest", why: "an index leads to an index, again and again".into() }
            .into())
    }

    /// A manifest's bytes and their digest, which are those that a reference by digest asked for.
    async fn manifest(
        &self,
        client: &Client,
        image: &Reference,
        auth: &RegistryAuth,
    ) -> Result<(Vec<u8>, String), PullError> {
        let mut wait = Duration::from_millis(250);
        let mut left = RETRIES;
        let bytes = loop {
            match client.pull_manifest_raw(image, auth, &manifest::ACCEPT).await {
                Ok((bytes, _)) => break bytes,
                Err(OciDistributionError::ServerError { code: 429 | 500.., .. }) if left > 0 => {
                    left -= 1;
                    tokio::time::sleep(wait).await;
                    wait *= 2;
                }
                Err(e) => return Err(said(image, auth, e)),
            }
        };
        let hex: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        let digest = format!("sha256:{hex}");
        if let Some(wanted) = image.digest()
            && wanted != digest
        {
            let wanted = Digest::try_from(wanted.to_owned())
                .map_err(|why| PullError::Reference { text: image.to_string(), why })?;
            return Err(BlobError::Mismatch { wanted, got: digest }.into());
        }
        Ok((bytes.to_vec(), digest))
    }

    async fn layers(
        &self,
        client: &Client,
        image: &Reference,
        plan: &Plan,
        blobs: &Blobs,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Vec<Layer>, PullError> {
        use futures_util::{StreamExt, TryStreamExt};
        let all = plan.layers.iter().map(|l| l.size).sum();
        let counts: Arc<Vec<AtomicU64>> = Arc::new(plan.layers.iter().map(|_| AtomicU64::new(0)).collect());
        let told = Mutex::new(());
        let work = plan.layers.iter().enumerate().map(|(n, layer)| {
            let (counts, told) = (counts.clone(), &told);
            async move {
                let moved = |have: u64| {
                    counts[n].store(have, Ordering::Relaxed);
                    let have = counts.iter().map(|c| c.load(Ordering::Relaxed)).sum();
                    let _one = told.lock().unwrap_or_else(PoisonError::into_inner);
                    progress(Progress { layers: counts.len(), have, all });
                };
                let path = blobs.fetch(client, image, layer, &moved).await?;
                let packing = manifest::packing(n + 1, layer)?;
                Ok::<_, PullError>(Layer { path, packing, diff_id: plan.config.diff_ids[n].clone() })
            }
        });
        futures_util::stream::iter(work).buffered(AT_ONCE).try_collect().await
    }
}

fn said(image: &Reference, auth: &RegistryAuth, error: OciDistributionError) -> PullError {
    use oci_client::errors::OciErrorCode as Code;
    let registry = image.resolve_registry().to_owned();
    let missing = match &error {
        OciDistributionError::ImageManifestNotFoundError(_) | OciDistributionError::UnauthorizedError { .. } => true,
        OciDistributionError::AuthenticationFailure(_) => true,
        OciDistributionError::ServerError { code, .. } => matches!(code, 401 | 403 | 404),
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().any(|e| {
            matches!(
                e.code,
                Code::ManifestUnknown | Code::NameUnknown | Code::NotFound | Code::Unauthorized | Code::Denied
            )
        }),
        _ => false,
    };
    let image_name = image.to_string();
    if missing {
        return PullError::NotThere { registry, image: image_name, known: *auth != RegistryAuth::Anonymous };
    }
    PullError::Registry { registry, image: image_name, source: error.into() }
}

/// No HTTP came back: nobody there, or somebody who does not speak TLS.
fn no_answer(error: &OciDistributionError) -> bool {
    matches!(error, OciDistributionError::RequestError(e) if e.is_connect() || e.is_request())
}

fn on_loopback(image: &Reference) -> bool {
    let registry = image.resolve_registry();
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn client(image: &Reference, protocol: ClientProtocol) -> Result<Client, PullError> {
    let env =
        |name: &str| std::env::var(name).or_else(|_| std::env::var(name.to_lowercase())).ok().filter(|v| !v.is_empty());
    let config = ClientConfig {
        protocol,
        extra_root_certificates: certificates(image.resolve_registry())?,
        read_timeout: Some(SILENCE),
        connect_timeout: Some(SILENCE / 2),
        https_proxy: env("HTTPS_PROXY"),
        http_proxy: std::env::var("http_proxy").ok().filter(|v| !v.is_empty()),
        no_proxy: env("NO_PROXY"),
        user_agent: concat!("trialrun/", env!("CARGO_PKG_VERSION")),
        ..ClientConfig::default()
    };
    Ok(Client::new(config))
}

/// Authorities for one registry, where docker and podman look for them (docker docs, "Verify repository client with
/// certificates").
fn certificates(registry: &str) -> Result<Vec<Certificate>, PullError> {
    let mut found = Vec::new();
    for base in ["/etc/docker/certs.d", "/etc/containers/certs.d"] {
        let Ok(entries) = std::fs::read_dir(Path::new(base).join(registry)) else { continue };
        for path in entries.filter_map(|e| Some(e.ok()?.path())) {
            if path.extension().is_some_and(|e| e == "crt") {
                let data = std::fs::read(&path).map_err(|source| PullError::Certificates { path, source })?;
                found.push(Certificate { encoding: CertificateEncoding::Pem, data });
            }
        }
    }
    Ok(found)
}
