//! Content by digest, kept: `CACHE/oci/blobs/<hex>`.
//!
//! A download goes to `<hex>.part`, which is locked meanwhile: who wants the same waits for it. What is in a part stays
//! after a failure, and the next try asks for the rest.

use crate::manifest::{Descriptor, Digest};
use futures_util::StreamExt;
use oci_client::{
    Client, Reference,
    client::{BlobResponse, LayerDescriptor},
    errors::OciDistributionError,
};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Tries after the first.
const RETRIES: u32 = 6;
/// The first wait between two tries; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(250);

/// A blob could not be had.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The registry, after all tries.
    #[error("fetch {digest} from the registry")]
    Registry {
        /// Which blob.
        digest: Digest,
        /// What it said last.
        source: Box<OciDistributionError>,
    },
    /// What came is something else.
    #[error("the registry sent something else than {wanted}: {got}")]
    Mismatch {
        /// Asked for.
        wanted: Digest,
        /// What it was.
        got: String,
    },
    /// The cache directory.
    #[error("{step} {}", path.display())]
    Cache {
        /// What was done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BlobError {
    let path = path.to_owned();
    move |source| BlobError::Cache { step, path, source }
}

/// The kept content.
#[derive(Debug, Clone)]
pub struct Blobs {
    dir: PathBuf,
}

/// Whether another try may help, and whether it is worth one to log in anew.
fn passing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::ServerError { code, .. } => *code == 408 || *code == 429 || *code >= 500,
        OciDistributionError::RegistryError { envelope, .. } => {
            envelope.errors.iter().any(|e| matches!(e.code, oci_client::errors::OciErrorCode::Toomanyrequests))
        }
        OciDistributionError::RequestError(e) => !e.is_builder(),
        // A token's life may end in the middle of an image.
        OciDistributionError::UnauthorizedError { .. } | OciDistributionError::IoError(_) => true,
        _ => false,
    }
}

impl Blobs {
    /// Below `cache_dir`, made when missing; only root may look.
    pub fn open(cache_dir: &Path) -> Result<Self, BlobError> {
        use std::os::unix::fs::DirBuilderExt;
        let dir = cache_dir.join("oci").join("blobs");
        let make = || -> io::Result<()> {
            fs::create_dir_all(cache_dir)?;
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)
        };
        make().map_err(at("make", &dir))?;
        Ok(Self { dir })
    }

    /// Where a blob is, or would be.
    pub fn place(&self, digest: &Digest) -> PathBuf {
        self.dir.join(digest.hex())
    }

    /// Downloads a blob if it is not here, and gives its file. `moved` hears how many bytes of it are here.
    pub async fn fetch(
        &self,
        client: &Client,
        image: &Reference,
        blob: &Descriptor,
        moved: &(dyn Fn(u64) + Sync),
    ) -> Result<PathBuf, BlobError> {
        let place = self.place(&blob.digest);
        let part = self.dir.join(format!("{}.part", blob.digest.hex()));
        let here = || place.metadata().is_ok_and(|m| m.len() == blob.size);
        let mut file = loop {
            if here() {
                moved(blob.size);
                return Ok(place);
            }
            // flock(2) blocks: not in the runtime's own thread.
            let open = tokio::task::spawn_blocking({
                let part = part.clone();
                move || -> io::Result<File> {
                    let file = File::options().create(true).truncate(false).read(true).write(true).open(part)?;
                    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
                    Ok(file)
                }
            });
            let file = open.await.map_err(|e| at("lock", &part)(io::Error::other(e)))?.map_err(at("lock", &part))?;
            // Who had it before may have finished it, and then it is no part any more.
            let same = match (file.metadata(), part.metadata()) {
                (Ok(ours), Ok(named)) => (ours.dev(), ours.ino()) == (named.dev(), named.ino()),
                _ => false,
            };
            match (same, here()) {
                (true, false) => break file,
                (true, true) => drop(fs::remove_file(&part)),
                (false, _) => {}
            }
        };
        let mut wait = FIRST_WAIT;
        for left in (0..=RETRIES).rev() {
            match self.once(client, image, blob, &mut file, &part, moved).await {
                Ok(()) => return Ok(place),
                Err(BlobError::Registry { digest, source }) if left > 0 && passing(&source) => {
                    tracing::warn!(%digest, error = %source, "the registry failed; trying again");
                    tokio::time::sleep(wait).await;
                    wait *= 2;
                }
                Err(e) => return Err(e),
            }
        }
        unreachable!("the last round returns")
    }

    async fn once(
        &self,
        client: &Client,
        image: &Reference,
        blob: &Descriptor,
        file: &mut File,
        part: &Path,
        moved: &(dyn Fn(u64) + Sync),
    ) -> Result<(), BlobError> {
        let registry =
            |source: OciDistributionError| BlobError::Registry { digest: blob.digest.clone(), source: source.into() };
        file.rewind().map_err(at("read", part))?;
        let (mut hash, mut have) = hashed(file).map_err(at("read", part))?;
        if have > blob.size {
            (hash, have) = (Sha256::new(), 0);
        }
        let digest = blob.digest.to_string();
        // Never the addresses in the manifest: those are the image's author's choice (CVE-2020-15157).
        let layer = LayerDescriptor { digest: &digest, urls: &None };
        let answer = if have < blob.size || blob.size == 0 {
            Some(client.pull_blob_stream_partial(image, &layer, have, None).await.map_err(registry)?)
        } else {
            None
        };
        let stream = match answer {
            None => None,
            Some(BlobResponse::Partial(stream)) => Some(stream),
            // A registry that knows no ranges sends all of it.
            Some(BlobResponse::Full(stream)) => {
                (hash, have) = (Sha256::new(), 0);
                Some(stream)
            }
        };
        file.set_len(have).and_then(|()| file.seek(SeekFrom::Start(have))).map_err(at("write", part))?;
        moved(have);
        if let Some(mut stream) = stream {
            while let Some(piece) = stream.next().await {
                let piece = piece.map_err(|e| registry(OciDistributionError::IoError(e)))?;
                have += piece.len() as u64;
                if have > blob.size {
                    let _ = fs::remove_file(part);
                    let got = format!("more than its {} bytes", blob.size);
                    return Err(BlobError::Mismatch { wanted: blob.digest.clone(), got });
                }
                hash.update(&piece);
                file.write_all(&piece).map_err(at("write", part))?;
                moved(have);
            }
        }
        if have < blob.size {
            // The connection ended early without saying so: the rest comes with the next try.
            return Err(registry(OciDistributionError::IoError(io::ErrorKind::UnexpectedEof.into())));
        }
        let got: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if got != blob.digest.hex() {
            let _ = fs::remove_file(part);
            return Err(BlobError::Mismatch { wanted: blob.digest.clone(), got: format!("sha256:{got}") });
        }
        fs::rename(part, self.place(&blob.digest)).map_err(at("rename", part))
    }
}

fn hashed(file: &mut File) -> io::Result<(Sha256, u64)> {
    let (mut hash, mut have) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 18];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok((hash, have));
        }
        hash.update(&buffer[..n]);
        have += n as u64;
    }
}
