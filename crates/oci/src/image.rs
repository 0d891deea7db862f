//! A pulled image, to be stored: its layers go through the unpacker.

use crate::{
    manifest::{Config, Digest, Packing},
    unpack::{Job, LayerSpec, Limits, Word},
};
use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};
use trialrun_image::{BuildError, BuildProgress, Builder, ImageConfig};

/// Mount points that a machine needs, and what an engine makes when an image does without.
const FOLDERS: [&str; 6] = ["/dev", "/proc", "/sys", "/tmp", "/etc", "/run"];
/// What is left free on the host's file system.
const HOST_RESERVE: u64 = 1 << 30;

/// A layer on this host.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its file, checked against its digest.
    pub path: PathBuf,
    /// How it is packed.
    pub packing: Packing,
    /// The digest of the archive in it.
    pub diff_id: Digest,
}

/// An image whose layers are here.
#[derive(Debug, Clone)]
pub struct OciImage {
    /// As it was asked for.
    pub reference: String,
    /// Of its manifest: `sha256:…`.
    pub digest: String,
    pub(crate) config: Config,
    pub(crate) layers: Vec<Layer>,
    pub(crate) unpacker: (PathBuf, String),
}

/// Ends the unpacker when its parent gives up.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl OciImage {
    fn image_config(&self) -> ImageConfig {
        let config = &self.config;
        let env = config.env.iter().filter_map(|entry| entry.split_once('='));
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let cwd = if config.working_dir.is_empty() { "/" } else { &config.working_dir };
        ImageConfig {
            env,
            user: if config.user.is_empty() { "0".to_owned() } else { config.user.clone() },
            cwd: Path::new("/").join(cwd).to_string_lossy().into_owned(),
            entrypoint: config.entrypoint.clone(),
            cmd: config.cmd.clone(),
            bare: true,
        }
    }

    fn job(&self, tree: &Path) -> Result<Job, BuildError> {
        let free = rustix::fs::statvfs(tree).map_err(|e| BuildError::Tree {
            step: "look at",
            path: tree.to_owned(),
            source: e.into(),
        })?;
        let free = free.f_bavail.saturating_mul(free.f_frsize).saturating_sub(HOST_RESERVE);
        let most = Limits::default();
        let mut folders: Vec<PathBuf> = FOLDERS.iter().map(PathBuf::from).collect();
        folders.push(self.image_config().cwd.into());
        let layers = self.layers.iter().map(|layer| LayerSpec {
            path: layer.path.clone(),
            packing: layer.packing,
            diff_id: layer.diff_id.to_string(),
        });
        let limits = Limits { bytes: most.bytes.min(free), ..most };
        Ok(Job { tree: tree.to_owned(), layers: layers.collect(), limits, folders })
    }
}

impl Builder for OciImage {
    fn build(&self, tree: &Path, progress: &mut dyn FnMut(BuildProgress)) -> Result<ImageConfig, BuildError> {
        let program = "the unpacker";
        let run = |source| BuildError::Run { program, source };
        let job = serde_json::to_vec(&self.job(tree)?).map_err(|e| run(e.into()))?;
        let mut command = Command::new(&self.unpacker.0);
        command.arg(&self.unpacker.1).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Killed(command.spawn().map_err(run)?);
        let mut input = child.0.stdin.take().ok_or_else(|| run(std::io::ErrorKind::BrokenPipe.into()))?;
        input.write_all(&job).map_err(run)?;
        drop(input);
        let output = child.0.stdout.take().ok_or_else(|| run(std::io::ErrorKind::BrokenPipe.into()))?;
        let count = self.layers.len();
        let mut last = None;
        for line in BufReader::new(output).lines() {
            // What comes out of it counts as the image's own word.
            let word: Word = serde_json::from_str(&line.map_err(run)?).map_err(|e| run(e.into()))?;
            match &word {
                Word::Layer(n, entries, bytes) => {
                    let bytes = trialrun_model::ByteSize(*bytes);
                    progress(BuildProgress::Step(format!("unpacking layer {n} of {count}: {entries} files, {bytes}")));
                }
                Word::Note(text) => tracing::info!(image = %self.reference, "{text}"),
                Word::Confined(barriers) => tracing::debug!(?barriers, "the unpacker is confined"),
                Word::Refused(_) | Word::Failed(_) | Word::Done => last = Some(word),
            }
        }
        let status = child.0.wait().map_err(run)?;
        match last {
            Some(Word::Done) if status.success() => Ok(self.image_config()),
            Some(Word::Refused(why)) => Err(BuildError::Refused { image: self.reference.clone(), why }),
            Some(Word::Failed(why)) => Err(BuildError::Run { program, source: std::io::Error::other(why) }),
            // Killed for memory, most likely: an archive whose header asks for more than is allowed.
            _ => {
                let mut tail = String::new();
                if let Some(mut stderr) = child.0.stderr.take() {
                    let _ = std::io::Read::read_to_string(&mut std::io::Read::take(&mut stderr, 4096), &mut tail);
                }
                Err(BuildError::Failed { program, status: status.to_string(), tail: tail.trim().to_owned() })
            }
        }
    }
}
