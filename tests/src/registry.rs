//! A real registry on loopback (Debian's docker-registry), and images to push to it.

use crate::wait_until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

/// How the registry is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// HTTP, for everybody.
    Open,
    /// HTTPS with a certificate of its own authority, and for the user `anna` with the password `pass word`.
    Locked,
}

/// A registry that runs until it is dropped.
pub struct Registry {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
    dir: PathBuf,
    door: Door,
}

/// The user of a locked registry.
pub const USER: &str = "anna";
/// Her password.
pub const PASSWORD: &str = "pass word";

fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let err = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {err}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Registry {
    /// Starts one whose files are below `scratch`.
    ///
    /// # Errors
    /// When its program is missing or does not answer.
    pub fn start(scratch: &Path, door: Door) -> Result<Self> {
        let dir = scratch.join("registry");
        fs::create_dir_all(&dir)?;
        // A port that was free a moment ago: the program can't be told to choose one.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: \"{address}\"\n",
            dir.join("data").display()
        );
        if door == Door::Locked {
            let path = |name: &str| dir.join(name).display().to_string();
            run(Command::new("openssl")
                .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"])
                .args([
                    "-nodes",
                    "-keyout",
                    &path("key"),
                    "-out",
                    &path("cert"),
                    "-days",
                    "2",
                    "-subj",
                    "/CN=registry of a test",
                    "-addext",
                    "subjectAltName=IP:127.0.0.1",
                    "-addext",
                    "basicConstraints=CA:FALSE",
                ]))?;
            let htpasswd = run(Command::new("htpasswd").args(["-nbB", USER, PASSWORD]))?;
            fs::write(dir.join("htpasswd"), htpasswd.trim())?;
            config += &format!(
                "  tls: {{certificate: {}, key: {}}}\nauth: {{htpasswd: {{realm: test, path: {}}}}}\n",
                path("cert"),
                path("key"),
                path("htpasswd")
            );
        }
        fs::write(dir.join("config.yml"), config)?;
        let log = fs::File::create(dir.join("log"))?;
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("docker-registry")?;
        let registry = Self { child, address, dir, door };
        wait_until("the registry listens", Duration::from_secs(20), || {
            TcpStream::connect(address).map(drop).map_err(|e| e.to_string())
        })?;
        Ok(registry)
    }

    /// Its certificate, for clients to trust.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("cert")
    }

    /// The reference of `name` for trialrun.
    #[must_use]
    pub fn image(&self, name: &str) -> String {
        format!("oci:{}/{name}", self.address)
    }

    /// Pushes an image.
    ///
    /// # Errors
    /// When it is refused.
    pub fn push(&self, image: &TestImage, name: &str) -> Result<()> {
        let layout = image.layout(&self.dir)?;
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["copy", "--quiet", "--all", "--dest-tls-verify=false"]);
        if self.door == Door::Locked {
            skopeo.args(["--dest-creds", &format!("{USER}:{PASSWORD}")]);
        }
        skopeo.arg(format!("oci:{}:it", layout.display())).arg(format!("docker://{}/{name}", self.address));
        let pushed = run(&mut skopeo);
        fs::remove_dir_all(layout)?;
        pushed.map(drop)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a layer is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    /// Not at all.
    Tar,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

/// An image to push.
#[derive(Debug, Clone, Default)]
pub struct TestImage {
    layers: Vec<(Vec<u8>, Packed)>,
    config: Value,
    /// In place of this host's.
    pub architecture: Option<String>,
    /// What the configuration says of the layers' archives, when that is a lie.
    pub lie: Option<String>,
}

/// `sha256:` and the digits.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

impl TestImage {
    /// With this `config` (Env, User and so on).
    #[must_use]
    pub fn new(config: Value) -> Self {
        Self { config, ..Self::default() }
    }

    /// One more layer: an archive.
    #[must_use]
    pub fn layer(mut self, archive: Vec<u8>, packed: Packed) -> Self {
        self.layers.push((archive, packed));
        self
    }

    /// Writes it as an OCI layout, tagged `it`.
    fn layout(&self, dir: &Path) -> Result<PathBuf> {
        let layout = tempfile::Builder::new().prefix("layout-").tempdir_in(dir)?.keep();
        let blobs = layout.join("blobs/sha256");
        fs::create_dir_all(&blobs)?;
        let put = |bytes: &[u8]| -> Result<(String, usize)> {
            let digest = digest(bytes);
            fs::write(blobs.join(&digest["sha256:".len()..]), bytes)?;
            Ok((digest, bytes.len()))
        };
        let mut layers = Vec::new();
        let mut diff_ids = Vec::new();
        for (archive, packed) in &self.layers {
            let (bytes, ending) = match packed {
                Packed::Tar => (archive.clone(), ""),
                Packed::Gzip => {
                    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                    encoder.write_all(archive)?;
                    (encoder.finish()?, "+gzip")
                }
                Packed::Zstd => (zstd::encode_all(&archive[..], 1)?, "+zstd"),
            };
            let (digest, size) = put(&bytes)?;
            let media_type = format!("application/vnd.oci.image.layer.v1.tar{ending}");
            layers.push(json!({ "mediaType": media_type, "digest": digest, "size": size }));
            diff_ids.push(self.lie.clone().unwrap_or_else(|| self::digest(archive)));
        }
        let architecture = self
            .architecture
            .clone()
            .unwrap_or_else(|| if cfg!(target_arch = "aarch64") { "arm64".to_owned() } else { "amd64".to_owned() });
        let config = json!({
            "architecture": architecture, "os": "linux", "config": self.config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let (config_digest, config_size) = put(config.to_string().as_bytes())?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config_size },
            "layers": layers,
        });
        let (manifest_digest, manifest_size) = put(manifest.to_string().as_bytes())?;
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest_digest, "size": manifest_size,
                "annotations": { "org.opencontainers.image.ref.name": "it" },
            }],
        });
        fs::write(layout.join("index.json"), index.to_string())?;
        fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(layout)
    }
}

/// An archive under construction, which may be as wrong as a test needs it.
pub struct Archive(tar::Builder<Vec<u8>>);

impl Default for Archive {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

/// What an entry is.
pub enum Item<'a> {
    /// With its content.
    File(&'a [u8]),
    /// A folder.
    Folder,
    /// With its target.
    Symlink(&'a str),
    /// With its target's path.
    Hardlink(&'a str),
    /// Anything else, by its type's byte.
    Other(u8),
}

impl Archive {
    /// One more entry; its path is written as it is given.
    #[must_use]
    pub fn add(self, path: &str, mode: u32, item: &Item<'_>) -> Self {
        self.owned(path, mode, 0, 0, item)
    }

    /// As [`Self::add`], with an owner.
    ///
    /// # Panics
    /// When memory can't be written to.
    #[must_use]
    pub fn owned(mut self, path: &str, mode: u32, uid: u64, gid: u64, item: &Item<'_>) -> Self {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_uid(uid);
        header.set_gid(gid);
        header.set_mtime(1_600_000_000);
        let (kind, content, link) = match item {
            Item::File(content) => (tar::EntryType::Regular, *content, ""),
            Item::Folder => (tar::EntryType::Directory, &[][..], ""),
            Item::Symlink(target) => (tar::EntryType::Symlink, &[][..], *target),
            Item::Hardlink(target) => (tar::EntryType::Link, &[][..], *target),
            Item::Other(kind) => (tar::EntryType::new(*kind), &[][..], ""),
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        if let Some(gnu) = header.as_gnu_mut() {
            // Past the checks of the archive's writer.
            let long = path.len() > gnu.name.len();
            if !long {
                gnu.name[..path.len()].copy_from_slice(path.as_bytes());
            }
            gnu.linkname[..link.len()].copy_from_slice(link.as_bytes());
            if long {
                let mut name = tar::Header::new_gnu();
                name.set_entry_type(tar::EntryType::GNULongName);
                name.set_size(path.len() as u64 + 1);
                name.set_cksum();
                let content = [path.as_bytes(), b"\0"].concat();
                self.0.append(&name, &content[..]).expect("memory");
            }
        }
        header.set_cksum();
        self.0.append(&header, content).expect("memory");
        self
    }

    /// Extended attributes, and other pax records, for the next entry.
    ///
    /// # Panics
    /// When memory can't be written to.
    #[must_use]
    pub fn pax(mut self, records: &[(&str, &[u8])]) -> Self {
        self.0.append_pax_extensions(records.iter().copied()).expect("memory");
        self
    }

    /// All of it.
    ///
    /// # Panics
    /// When memory can't be written to.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        self.0.into_inner().expect("memory")
    }
}
