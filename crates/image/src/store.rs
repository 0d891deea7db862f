//! Images by digest and by name.

use crate::{
    BuildError, BuildProgress, Builder, DebianPython, DigestError, DirError, digest,
    dir::{Temp, at, lock, private, sweep, write_atomic},
    layer,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};
use trialrun_model::ImageRef;

/// How many images one may stand on: an overlay takes some 500 layers, the steps of a recipe are far fewer.
const MAX_BELOW: usize = 100;
/// Version of `image.json` and of the names' files.
const FORMAT: u32 = 1;

/// How an image's machines start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Environment of every exec.
    pub env: Vec<(String, String)>,
    /// User of an exec that names none.
    pub user: String,
    /// Working directory of an exec that names none.
    pub cwd: String,
    /// Words before every command of `trialrun run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// The command of `trialrun run` that names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Whether machines have the image's environment without what those of our own images are given.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bare: bool,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self {
            env: Vec::new(),
            user: "runtime".into(),
            cwd: "/workspace".into(),
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            bare: false,
        }
    }
}

/// An image that is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// `sha256:…`.
    pub digest: String,
    /// The name by which it was asked for, if it was.
    pub name: Option<String>,
    /// Its own files; read-only for everyone, owners as in the image.
    pub tree: PathBuf,
    /// The files of the images that it stands on, topmost first.
    pub below: Vec<PathBuf>,
    /// How its machines start.
    pub config: ImageConfig,
}

/// `image.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Version of this file's format.
    pub format: u32,
    /// `sha256:…`.
    pub digest: String,
    /// The digest of the image that its files lie upon, if they do not stand alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// How its machines start.
    pub config: ImageConfig,
    /// When it was built, in milliseconds since 1970. Not part of the digest.
    pub created_ms: u64,
    /// Bytes of its own files.
    pub bytes: u64,
    /// Number of its own files.
    pub files: u64,
}

impl Image {
    /// Its trees, topmost first.
    #[must_use]
    pub fn trees(&self) -> Vec<PathBuf> {
        std::iter::once(&self.tree).chain(&self.below).cloned().collect()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct NameRecord {
    format: u32,
    digest: String,
}

/// An image could not be found, built or removed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No such image.
    #[error("there is no image {asked}; {}", what_is_there(.present))]
    Unknown {
        /// What was asked for.
        asked: String,
        /// The names that exist.
        present: Vec<String>,
    },
    /// The host image is no image of the store.
    #[error("the image \"host\" is made from the host's own system and is not in the image store")]
    Host,
    /// Another trialrun wrote it, or its file is damaged.
    #[error("{} is not readable by this trialrun ({why}); remove the image (trialrun image rm) and build it again", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The build failed.
    #[error("failed to build the image {name}")]
    Build {
        /// Its name.
        name: String,
        /// Why.
        source: BuildError,
    },
    /// Its digest could not be formed.
    #[error("failed to form the digest of the image {name}")]
    Digest {
        /// Its name.
        name: String,
        /// Why.
        source: DigestError,
    },
    /// Other images stand on it.
    #[error("the image {asked} can't be removed: {} on it", on_it(.dependents))]
    Stood {
        /// What was asked for.
        asked: String,
        /// The digests of those that stand on it.
        dependents: Vec<String>,
    },
    /// Machines stand on it.
    #[error("the image {asked} can't be removed: a running machine uses it (trialrun ps lists them)")]
    InUse {
        /// What was asked for.
        asked: String,
    },
    /// The images below it are too many, or one is missing.
    #[error("the image {digest} is broken: {why}; remove it (trialrun image rm) and build it again")]
    Broken {
        /// Which.
        digest: String,
        /// What is wrong.
        why: String,
    },
    /// The cache directory could not be used.
    #[error(transparent)]
    Dir(#[from] DirError),
}

fn on_it(dependents: &[String]) -> String {
    match dependents {
        [one] => format!("the image {one} stands"),
        many => format!("{} other images stand", many.len()),
    }
}

fn what_is_there(names: &[String]) -> String {
    let host = "\"host\" (the host's own system, nothing to build) always works";
    match names {
        [] => format!("no image is present yet; \"python\" is built at its first use, and {host}"),
        names => format!("present: {}; \"python\" is built at its first use, and {host}", names.join(", ")),
    }
}

/// The images of one cache directory.
#[derive(Debug, Clone)]
pub struct ImageStore {
    images: PathBuf,
}

impl ImageStore {
    /// Opens the store below `cache_dir`, makes it when it is missing, and removes what interrupted builds left.
    ///
    /// # Errors
    /// When the directory can't be made or read, or is open to other users.
    pub fn open(cache_dir: &Path) -> Result<Self, DirError> {
        let images = private(cache_dir, "images")?;
        private(&images, "names")?;
        sweep(&images)?;
        Ok(Self { images })
    }

    /// The image that `image` names.
    ///
    /// # Errors
    /// When it is not present, or its record can't be read.
    pub fn resolve(&self, image: &ImageRef) -> Result<Image, ImageError> {
        let (digest, name) = match image {
            ImageRef::Host => return Err(ImageError::Host),
            ImageRef::Digest(digest) => (Some(digest.clone()), None),
            ImageRef::Named(_) | ImageRef::Oci(_) => (self.name(&image.to_string())?, Some(image.to_string())),
        };
        let unknown = || ImageError::Unknown { asked: image.to_string(), present: self.names() };
        let digest = digest.ok_or_else(unknown)?;
        let record = self.record(&digest)?.ok_or_else(unknown)?;
        let (mut below, mut next) = (Vec::new(), record.base);
        while let Some(base) = next {
            let broken = |why: &str| ImageError::Broken { digest: digest.clone(), why: why.to_owned() };
            if below.len() >= MAX_BELOW {
                return Err(broken("it stands on too many others"));
            }
            next = self.record(&base)?.ok_or_else(|| broken(&format!("{base}, below it, is missing")))?.base;
            below.push(self.place(&base).join("tree"));
        }
        Ok(Image { tree: self.place(&digest).join("tree"), below, digest, name, config: record.config })
    }

    /// Takes a directory of the same file system as the files of an image that stands on `base`, and returns its digest.
    /// Times are cut and compiled Python files made to agree, so that the same files have the same digest.
    ///
    /// # Errors
    /// When the tree can't be read or stored; nothing is left of it then.
    pub fn add_layer(&self, base: &str, config: &ImageConfig, files: &Path) -> Result<String, ImageError> {
        let temp = Temp::new(&self.images)?;
        let tree = temp.path().join("tree");
        std::fs::rename(files, &tree).map_err(at("take", files))?;
        layer::normalise(&tree).map_err(|(path, source)| ImageError::Dir(at("prepare", &path)(source)))?;
        self.store(temp, Some(base), config, base)
    }

    /// Points a name at an image, whatever it pointed at before.
    ///
    /// # Errors
    /// When the image is not present, or the name is not one that can be given.
    pub fn tag(&self, image: &ImageRef, name: &str) -> Result<String, ImageError> {
        let digest = self.resolve(image)?.digest;
        write_atomic(&self.name_file(name), &json(&NameRecord { format: FORMAT, digest: digest.clone() }))?;
        Ok(digest)
    }

    /// Removes the images that have no name, on which no named one stands, and that `used` does not know. Returns their
    /// records.
    ///
    /// # Errors
    /// When the store can't be listed or one can't be removed; those before it are gone.
    pub fn prune(&self, used: &dyn Fn(&str) -> bool) -> Result<Vec<ImageRecord>, ImageError> {
        let mut removed = Vec::new();
        // Whoever stands on another goes first.
        loop {
            let all = self.ls()?;
            let stood: Vec<String> = all.iter().filter_map(|(r, _)| r.base.clone()).collect();
            let free = |r: &ImageRecord| !stood.contains(&r.digest) && !used(&r.digest);
            let Some((record, _)) = all.into_iter().find(|(r, names)| names.is_empty() && free(r)) else { break };
            self.bury(&record.digest)?;
            removed.push(record);
        }
        Ok(removed)
    }

    /// Notes that an image is used now.
    pub fn touch(&self, digest: &str) {
        use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
        let path = self.place(digest).join("used");
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        if utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).is_err() {
            let _ = File::create(path);
        }
    }

    /// When an image was used last, if it ever was.
    #[must_use]
    pub fn last_use(&self, digest: &str) -> Option<SystemTime> {
        self.place(digest).join("used").metadata().ok()?.modified().ok()
    }

    /// Takes the store for reading while a machine's trees are looked up and noted, or for removing.
    ///
    /// # Errors
    /// When the lock can't be taken.
    pub fn hold(&self, removing: bool) -> Result<File, DirError> {
        use rustix::fs::FlockOperation::{LockExclusive, LockShared};
        let path = self.images.join(".use.lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(at("open", &path))?;
        rustix::fs::flock(&file, if removing { LockExclusive } else { LockShared })
            .map_err(|e| at("lock", &path)(e.into()))?;
        Ok(file)
    }

    /// The image `reference` of a registry, which `builder` unpacks when it is not present, or anew when `again`.
    ///
    /// # Errors
    /// As [`ImageStore::ensure`].
    pub fn ensure_oci(
        &self,
        reference: &str,
        builder: &dyn Builder,
        again: bool,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<Image, ImageError> {
        self.ensure_named(&ImageRef::Oci(reference.to_owned()), builder, again, progress)
    }

    /// The stock image `python`: builds it from the host's Debian or Ubuntu packages when it is not present.
    ///
    /// # Errors
    /// When it can't be built.
    pub fn ensure_python(&self, progress: &mut dyn FnMut(BuildProgress)) -> Result<Image, ImageError> {
        self.ensure("python", &DebianPython::default(), progress)
    }

    /// The image `name`, which `builder` makes when it is not present: once, however many processes ask. Those that wait
    /// are told so.
    ///
    /// # Errors
    /// When it can't be built; nothing is left of it then.
    pub fn ensure(
        &self,
        name: &str,
        builder: &dyn Builder,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<Image, ImageError> {
        self.ensure_named(&ImageRef::Named(name.to_owned()), builder, false, progress)
    }

    fn ensure_named(
        &self,
        named: &ImageRef,
        builder: &dyn Builder,
        again: bool,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<Image, ImageError> {
        let present = || match self.resolve(named) {
            Err(ImageError::Unknown { .. }) => None,
            other => (!again).then_some(other),
        };
        if let Some(present) = present() {
            return present;
        }
        let name = named.to_string();
        let path = self.images.join(format!(".build-{}.lock", file_name(&name)));
        let _lock = lock(&path, || progress(BuildProgress::Waiting))?;
        let result = present().unwrap_or_else(|| {
            let digest = self.build(&name, builder, progress)?;
            let record = NameRecord { format: FORMAT, digest };
            write_atomic(&self.name_file(&name), &json(&record))?;
            self.resolve(named)
        });
        // Who waits for it looks again before it builds; at worst two build the same, and the second finds it there.
        let _ = std::fs::remove_file(&path);
        result
    }

    /// Builds and stores an image, and returns its digest.
    fn build(
        &self,
        name: &str,
        builder: &dyn Builder,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<String, ImageError> {
        let temp = Temp::new(&self.images)?;
        let tree = temp.path().join("tree");
        std::fs::create_dir(&tree)
            .and_then(|()| std::fs::set_permissions(&tree, std::fs::Permissions::from_mode(0o755)))
            .map_err(at("create", &tree))?;
        let config =
            builder.build(&tree, progress).map_err(|source| ImageError::Build { name: name.to_owned(), source })?;
        progress(BuildProgress::Step("forming the image's digest".into()));
        self.store(temp, None, &config, name)
    }

    /// Publishes a finished tree as an image.
    fn store(&self, temp: Temp, base: Option<&str>, config: &ImageConfig, name: &str) -> Result<String, ImageError> {
        let (tree_digest, totals) = digest::measure(&temp.path().join("tree"))
            .map_err(|source| ImageError::Digest { name: name.to_owned(), source })?;
        let mut hash =
            Sha256::new_with_prefix(if base.is_some() { "trialrun image 2\n" } else { "trialrun image 1\n" });
        hash.update(base.unwrap_or_default());
        hash.update(tree_digest.as_bytes());
        hash.update(json(config));
        let digest = format!("sha256:{}", digest::hex(&hash.finalize()));
        let created_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        let record = ImageRecord {
            format: FORMAT,
            digest: digest.clone(),
            base: base.map(str::to_owned),
            config: config.clone(),
            created_ms,
            bytes: totals.bytes,
            files: totals.files,
        };
        write_atomic(&temp.path().join("image.json"), &json(&record))?;
        // A tree must never be found by its digest with files that a power cut emptied.
        File::open(&self.images)
            .and_then(|dir| Ok(rustix::fs::syncfs(&dir)?))
            .map_err(at("write back", &self.images))?;
        temp.publish(&self.place(&digest))?;
        Ok(digest)
    }

    /// All images with the names that point at each.
    ///
    /// # Errors
    /// When the store can't be listed.
    pub fn ls(&self) -> Result<Vec<(ImageRecord, Vec<String>)>, ImageError> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.images).map_err(at("list", &self.images))? {
            let name = entry.map_err(at("list", &self.images))?.file_name();
            let Some(hex) = name.to_str().filter(|n| n.len() == 64) else { continue };
            let digest = format!("sha256:{hex}");
            if let Some(record) = self.record(&digest)? {
                let names =
                    self.names().into_iter().filter(|n| self.name(n).is_ok_and(|d| d.as_ref() == Some(&digest)));
                found.push((record, names.collect()));
            }
        }
        found.sort_by(|a, b| (a.0.created_ms, &a.0.digest).cmp(&(b.0.created_ms, &b.0.digest)));
        Ok(found)
    }

    /// The image's record.
    ///
    /// # Errors
    /// As [`ImageStore::resolve`].
    pub fn inspect(&self, image: &ImageRef) -> Result<ImageRecord, ImageError> {
        let found = self.resolve(image)?;
        self.record(&found.digest)?
            .ok_or_else(|| ImageError::Unknown { asked: image.to_string(), present: self.names() })
    }

    /// Removes a name, or an image by digest with all its names. An image without names is removed with its last name.
    /// One that others stand on keeps its files, without a name. `used` knows what machines stand on.
    ///
    /// # Errors
    /// When it is not present, is in use, or can't be removed.
    pub fn rm(&self, image: &ImageRef, used: &dyn Fn(&str) -> bool) -> Result<(), ImageError> {
        let digest = match image {
            ImageRef::Host => return Err(ImageError::Host),
            ImageRef::Digest(digest) => Some(digest.clone()),
            // Also with a damaged record: `rm` is the way out of that.
            ImageRef::Named(_) | ImageRef::Oci(_) => self.name(&image.to_string())?,
        };
        let unknown = || ImageError::Unknown { asked: image.to_string(), present: self.names() };
        let digest = digest.ok_or_else(unknown)?;
        let by_digest = matches!(image, ImageRef::Digest(_));
        let dependents = self.dependents(&digest);
        if by_digest && !dependents.is_empty() {
            return Err(ImageError::Stood { asked: image.to_string(), dependents });
        }
        if used(&digest) {
            return Err(ImageError::InUse { asked: image.to_string() });
        }
        let mut left = 0;
        for name in self.names() {
            let file = self.name_file(&name);
            if image.to_string() == name
                || matches!(image, ImageRef::Digest(_)) && self.name(&name)?.as_ref() == Some(&digest)
            {
                std::fs::remove_file(&file).map_err(at("remove", &file))?;
            } else if self.name(&name)?.as_ref() == Some(&digest) {
                left += 1;
            }
        }
        if left > 0 || !dependents.is_empty() {
            return Ok(());
        }
        match self.bury(&digest)? {
            false if by_digest => Err(unknown()),
            _ => Ok(()),
        }
    }

    /// Removes an image's files; false when there are none.
    fn bury(&self, digest: &str) -> Result<bool, ImageError> {
        let place = self.place(digest);
        // Out of sight first, so that half of it is never found.
        let grave = Temp::new(&self.images)?;
        match std::fs::rename(&place, grave.path().join("removed")) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(at("remove", &place)(e).into()),
        }
    }

    /// The images that stand on this one. One whose record can't be read stands on none.
    fn dependents(&self, digest: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(&self.images) else { return Vec::new() };
        let digests = entries.filter_map(|e| Some(format!("sha256:{}", e.ok()?.file_name().to_str()?)));
        digests.filter(|d| self.record(d).ok().flatten().is_some_and(|r| r.base.as_deref() == Some(digest))).collect()
    }

    fn place(&self, digest: &str) -> PathBuf {
        self.images.join(digest.strip_prefix("sha256:").unwrap_or(digest))
    }

    fn name_file(&self, name: &str) -> PathBuf {
        self.images.join("names").join(format!("{}.json", file_name(name)))
    }

    fn name(&self, name: &str) -> Result<Option<String>, ImageError> {
        let record: Option<NameRecord> = read_json(&self.name_file(name))?;
        // The digest becomes a path, so it is read as strictly as one from outside.
        Ok(record.map(|r| r.digest).filter(|d| matches!(d.parse(), Ok(ImageRef::Digest(_)))))
    }

    fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.images.join("names")) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json").map(image_name)).collect();
        names.retain(|n| !n.starts_with('.'));
        names.sort();
        names
    }

    fn record(&self, digest: &str) -> Result<Option<ImageRecord>, ImageError> {
        let path = self.place(digest).join("image.json");
        let record: Option<ImageRecord> = read_json(&path)?;
        match record {
            Some(r) if r.format != FORMAT => {
                Err(ImageError::Record { path, why: format!("format {}, known is {FORMAT}", r.format) })
            }
            other => Ok(other),
        }
    }
}

/// An image's name as a file's: a reference has slashes in it.
fn file_name(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2f")
}

fn image_name(file: &str) -> String {
    file.replace("%2f", "/").replace("%25", "%")
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers always serialise")
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, ImageError> {
    let bytes = match std::fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(at("read", path))?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| ImageError::Record { path: path.to_owned(), why: e.to_string() })
}

#[cfg(test)]
mod tests;
