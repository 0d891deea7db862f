//! Building images from recipes: each step runs in a machine on the image so far, and what it wrote becomes a layer.
//!
//! ```text
//! key of the step known and its image here ─> taken
//! else: machine on the base ─> upload ─> command ─> copy of its layer ─> image ─> key noted ─> machine gone
//! ```
//! Keys are kept by owner, so that nobody learns from a cache what another one built.

use crate::{
    CallError, CreateError, CreateOptions, Engine, Output, Sandbox, TransferError, UploadRules, recover::lock_is_held,
};
use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use trialrun_image::{
    Image, ImageConfig, ImageError, ImageRecord,
    recipe::{Action, Recipe, RecipeError, Step},
};
use trialrun_keeper::wire::{Call, Reply, Rootfs};
use trialrun_model::{Command, ExecOutcome, ExecSpec, ImageRef, Limits, SandboxSpec};
use trialrun_policy::Policy;

/// Below the cache: a file for each machine, with its directory and the trees that it stands on.
const USERS: &str = "users";
/// Below the cache: a directory for each build under way.
const STAGED: &str = "staged";
/// In it: the images that the build stands on.
const STANDING: &str = "standing";
/// Shorter values can't be told from ordinary text.
const SECRET_MIN: usize = 8;
/// What a secret's place in a log says.
const REDACTED: &[u8] = b"***";

/// A value that is not printed.
#[derive(Clone)]
pub struct SecretValue(String);

impl std::fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl SecretValue {
    /// A secret.
    ///
    /// # Errors
    /// When it is shorter than 8 bytes, or holds what no environment can.
    pub fn new(value: String) -> Result<Self, String> {
        if value.len() < SECRET_MIN {
            return Err(format!(
                "it has {} bytes; shorter than {SECRET_MIN} it could not be kept out of a log",
                value.len()
            ));
        }
        if value.contains('\0') {
            return Err("it has a NUL in it".to_owned());
        }
        Ok(Self(value))
    }
}

/// What to build.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The recipe.
    pub recipe: Recipe,
    /// What its paths are relative to.
    pub dir: PathBuf,
    /// The name that the image gets.
    pub name: String,
    /// Egress of the machines that build it.
    pub policy: Policy,
    /// Environment of the steps alone, such as a mirror's address.
    pub env: Vec<(String, String)>,
    /// Secrets by name.
    pub secrets: Vec<(String, SecretValue)>,
    /// Ceilings of the machines that build it.
    pub limits: Limits,
    /// Whether steps that were built before are taken.
    pub cached: bool,
    /// Whose cache of steps is used.
    pub owner: String,
}

/// What a build says about itself on the way.
#[derive(Debug, Clone, Copy)]
pub enum BuildEvent<'a> {
    /// A step begins.
    Step {
        /// From 1.
        number: usize,
        /// How many there are.
        of: usize,
        /// What it does.
        title: &'a str,
    },
    /// It was built before.
    Cached,
    /// It says this, both streams together, secrets taken out.
    Output(&'a [u8]),
    /// Its layer is stored.
    Layer {
        /// Bytes.
        bytes: u64,
        /// Files.
        files: u64,
    },
}

/// An image could not be built. Nothing is left of the step that failed; those before it stay in the cache.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The recipe.
    #[error("use the recipe")]
    Recipe(#[from] RecipeError),
    /// A step's command failed: the recipe's fault, not ours.
    #[error("step {number} ({title}) failed: {how}")]
    Step {
        /// From 1.
        number: usize,
        /// What it does.
        title: String,
        /// How it ended, for people.
        how: String,
        /// How it ended.
        outcome: Box<ExecOutcome>,
    },
    /// A secret is in a step's layer.
    #[error("step {number} ({title}) wrote the secret {secret} to {place}; a layer that holds it is not stored")]
    Leaked {
        /// From 1.
        number: usize,
        /// What it does.
        title: String,
        /// The secret's name.
        secret: String,
        /// A path in the image.
        place: String,
    },
    /// A step names a secret that is not given.
    #[error("step {number} wants the secret {secret}, which is not given (--secret {secret})")]
    NoSecret {
        /// From 1.
        number: usize,
        /// The secret's name.
        secret: String,
    },
    /// A file of the host.
    #[error("step {number} ({title}): read {}", path.display())]
    Host {
        /// From 1.
        number: usize,
        /// What it does.
        title: String,
        /// Which.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        cause: io::Error,
    },
    /// A machine could not be made.
    #[error("make a machine for it")]
    Create(#[from] CreateError),
    /// A machine was lost or refused.
    #[error("use the machine that builds it")]
    Call(#[from] CallError),
    /// An upload.
    #[error("upload to the machine that builds it")]
    Transfer(#[from] TransferError),
    /// The store of images.
    #[error("store the image")]
    Image(#[from] ImageError),
    /// The cache of steps.
    #[error("use {}", path.display())]
    Cache {
        /// Which.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        cause: io::Error,
    },
}

/// Where a build is.
#[derive(Clone, Copy)]
struct At<'a> {
    options: &'a BuildOptions,
    staged: &'a Staged,
    /// The image so far.
    base: &'a str,
    /// That of the image to be.
    config: &'a ImageConfig,
    /// From 1.
    number: usize,
    step: &'a Step,
}

impl Engine {
    /// Builds an image and points its name at it. The base must be present.
    ///
    /// # Errors
    /// The step that failed.
    pub async fn build_image(
        &self,
        options: &BuildOptions,
        on: &mut dyn FnMut(BuildEvent<'_>),
    ) -> Result<Image, BuildError> {
        let recipe = &options.recipe;
        recipe.check()?;
        let from: ImageRef = recipe.from.parse().map_err(|e| RecipeError::Invalid(format!("from: {e}")))?;
        for (at, step) in recipe.steps.iter().enumerate() {
            let given = |name: &&String| !options.secrets.iter().any(|(known, _)| known == *name);
            if let Some(secret) = step.secrets.iter().find(given) {
                return Err(BuildError::NoSecret { number: at + 1, secret: secret.clone() });
            }
        }
        let staged = tempdir(self.cache_dir())?;
        let base = self.stand(&staged, &from)?;
        let config = recipe.config(&base.config);
        let network = format!("{} {}", recipe.network, recipe.allow.join(" "));
        let mut digest = base.digest;
        for (at, step) in recipe.steps.iter().enumerate() {
            let (number, title) = (at + 1, step.title());
            on(BuildEvent::Step { number, of: recipe.steps.len(), title: &title });
            let key = step.key(&digest, &config, &network, &options.dir).map_err(|cause| {
                let path = match step.action(&options.dir) {
                    Action::Copy(from, _) | Action::Shell { upload: Some((from, _)), .. } => from,
                    Action::Shell { .. } => options.dir.clone(),
                };
                BuildError::Host { number, title: title.clone(), path, cause }
            })?;
            let noted = self.cache_dir().join("recipes").join(&options.owner).join(key);
            if options.cached
                && let Some(known) = self.known(&staged, &noted)
            {
                on(BuildEvent::Cached);
                digest = known;
                continue;
            }
            let built = {
                let at = At { options, staged: &staged, base: &digest, config: &config, number, step };
                self.step(&at, on).await?
            };
            let built = self.stand(&staged, &ImageRef::Digest(built))?.digest;
            note(&noted, &built).map_err(|cause| BuildError::Cache { path: noted.clone(), cause })?;
            digest = built;
        }
        if recipe.steps.is_empty() {
            digest = self.images().add_layer(&digest, &config, |tree| -> Result<(), BuildError> {
                fs::create_dir(tree).map_err(|cause| BuildError::Cache { path: tree.to_owned(), cause })
            })?;
        }
        self.images().tag(&ImageRef::Digest(digest), &options.name)?;
        Ok(self.images().resolve(&ImageRef::Named(options.name.clone()))?)
    }

    /// An image that a build stands on from here to its end: nobody removes it meanwhile.
    fn stand(&self, staged: &Staged, image: &ImageRef) -> Result<Image, BuildError> {
        let _hold = self.images().hold(false).map_err(ImageError::from)?;
        let found = self.images().resolve(image)?;
        let path = staged.0.join(STANDING);
        let mut file = fs::File::options().create(true).append(true).open(&path);
        let written = file.as_mut().map_err(|e| io::Error::from(e.kind())).and_then(|f| {
            io::Write::write_all(f, format!("{}\n", found.digest.trim_start_matches("sha256:")).as_bytes())
        });
        written.map_err(|cause| BuildError::Cache { path, cause })?;
        Ok(found)
    }

    fn known(&self, staged: &Staged, noted: &Path) -> Option<String> {
        let digest = fs::read_to_string(noted).ok()?;
        let image: ImageRef = digest.trim().parse().ok()?;
        Some(self.stand(staged, &image).ok()?.digest)
    }

    async fn step(&self, at: &At<'_>, on: &mut dyn FnMut(BuildEvent<'_>)) -> Result<String, BuildError> {
        let mut env: Vec<(String, String)> = at.options.env.clone();
        env.extend(at.options.recipe.env.iter().map(|(n, v)| (n.clone(), v.clone())));
        let image = ImageRef::Digest(at.base.to_owned());
        let spec = SandboxSpec { image, limits: at.options.limits, env, ..SandboxSpec::default() };
        let create = CreateOptions { spec, policy: at.options.policy.clone(), attached: true, lease: None };
        let sandbox = self.create(create).await?;
        let result = self.in_machine(&sandbox, at, on).await;
        let deleted = sandbox.delete().await;
        let digest = result?;
        deleted?;
        Ok(digest)
    }

    async fn in_machine(
        &self,
        sandbox: &Sandbox,
        at: &At<'_>,
        on: &mut dyn FnMut(BuildEvent<'_>),
    ) -> Result<String, BuildError> {
        let At { options, staged, base, config, number, step } = *at;
        match step.action(&options.dir) {
            Action::Copy(from, to) => {
                sandbox.upload(&from, &to, UploadRules::default()).await?;
            }
            Action::Shell { line, upload } => {
                if let Some((from, to)) = upload {
                    sandbox.upload(&from, &to, UploadRules::default()).await?;
                }
                let given = options.secrets.iter().filter(|(name, _)| step.secrets.contains(name));
                let spec = ExecSpec {
                    user: Some(step.user.clone().unwrap_or_else(|| "root".to_owned())),
                    env: given.map(|(name, value)| (name.clone().into_bytes(), value.0.clone().into_bytes())).collect(),
                    ..ExecSpec::new(Command::Shell(line))
                };
                let outcome = follow(sandbox, spec, Redactor::new(&options.secrets), on).await?;
                if !matches!(outcome.status, Some(trialrun_model::ExitStatus::Code(0))) || outcome.disk_full.is_some() {
                    let how = how(&outcome);
                    return Err(BuildError::Step { number, title: step.title(), how, outcome: Box::new(outcome) });
                }
            }
        }
        let tree = staged.0.join(format!("step-{number}"));
        match sandbox.client().call(&Call::Commit(tree.clone()), &[]).await? {
            Reply::Committed(_) => {}
            _ => return Err(crate::sandbox::unexpected().into()),
        }
        let leak = leaked(&tree, &options.secrets).map_err(|cause| BuildError::Cache { path: tree.clone(), cause })?;
        if let Some((secret, place)) = leak {
            let place = place.strip_prefix(&tree).unwrap_or(&place);
            let mut redactor = Redactor::new(&options.secrets);
            let mut place = [&b"/"[..], &redactor.take(place.as_os_str().as_bytes())].concat();
            place.extend(redactor.end());
            let place = String::from_utf8_lossy(&place).into_owned();
            return Err(BuildError::Leaked { number, title: step.title(), secret, place });
        }
        let images = self.images().clone();
        let (base, config) = (base.to_owned(), config.clone());
        let stored = tokio::task::spawn_blocking(move || {
            images.add_layer(&base, &config, |place| -> Result<(), BuildError> {
                fs::rename(&tree, place).map_err(|cause| BuildError::Cache { path: tree.clone(), cause })
            })
        });
        let digest = stored
            .await
            .map_err(|e| BuildError::Cache { path: staged.0.clone(), cause: io::Error::other(e.to_string()) })??;
        let record = self.images().inspect(&ImageRef::Digest(digest.clone()))?;
        on(BuildEvent::Layer { bytes: record.bytes, files: record.files });
        Ok(digest)
    }

    /// Removes an image, unless a machine or another image stands on it.
    ///
    /// # Errors
    /// As [`trialrun_image::ImageStore::rm`].
    pub fn remove_image(&self, image: &ImageRef) -> Result<(), ImageError> {
        let _hold = self.images().hold(true)?;
        let used = in_use(self.cache_dir());
        self.images().rm(image, &|digest| used.iter().any(|hex| digest.ends_with(hex.as_str())))
    }

    /// Removes the images that have no name and on which nothing stands.
    ///
    /// # Errors
    /// As [`trialrun_image::ImageStore::prune`].
    pub fn prune_images(&self) -> Result<Vec<ImageRecord>, ImageError> {
        let _hold = self.images().hold(true)?;
        let used = in_use(self.cache_dir());
        self.images().prune(&|digest| used.iter().any(|hex| digest.ends_with(hex.as_str())))
    }
}

fn how(outcome: &ExecOutcome) -> String {
    use trialrun_model::{Ended, ExitStatus};
    let end = match (&outcome.ended, outcome.status) {
        (Ended::Refused(refusal), _) => refusal.message.clone(),
        (Ended::OutOfMemory, _) => "it ran out of memory (--memory)".to_owned(),
        (Ended::MachineLost, _) => "the machine was lost".to_owned(),
        (_, Some(ExitStatus::Code(code))) => format!("exit status {code}"),
        (ended, status) => format!("{ended:?} {status:?}"),
    };
    outcome.disk_full.map_or(end.clone(), |full| format!("{end}; {full}"))
}

async fn follow(
    sandbox: &Sandbox,
    spec: ExecSpec,
    mut redactor: Redactor,
    on: &mut dyn FnMut(BuildEvent<'_>),
) -> Result<ExecOutcome, BuildError> {
    let mut following = sandbox.exec(spec).await?;
    loop {
        match following.next().await? {
            Output::Stdout(bytes) | Output::Stderr(bytes) => {
                let clean = redactor.take(&bytes);
                if !clean.is_empty() {
                    on(BuildEvent::Output(&clean));
                }
            }
            Output::Dropped(_) => {}
            Output::Ended(outcome) => {
                let rest = redactor.end();
                if !rest.is_empty() {
                    on(BuildEvent::Output(&rest));
                }
                return Ok(outcome);
            }
        }
    }
}

/// Takes secrets out of a stream, also where one lies across two pieces.
struct Redactor {
    secrets: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Redactor {
    fn new(secrets: &[(String, SecretValue)]) -> Self {
        let mut secrets: Vec<Vec<u8>> = secrets.iter().map(|(_, value)| value.0.clone().into_bytes()).collect();
        // One may hold another.
        secrets.sort_by_key(|s| std::cmp::Reverse(s.len()));
        Self { secrets, held: Vec::new() }
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        self.pass(false)
    }

    fn pass(&mut self, last: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.held.len());
        let mut at = 0;
        while at < self.held.len() {
            let rest = &self.held[at..];
            if !last && self.secrets.iter().any(|s| s.len() > rest.len() && s.starts_with(rest)) {
                // It may be the beginning of one.
                break;
            } else if let Some(secret) = self.secrets.iter().find(|s| rest.starts_with(s)) {
                out.extend_from_slice(REDACTED);
                at += secret.len();
            } else {
                out.push(rest[0]);
                at += 1;
            }
        }
        self.held.drain(..at);
        out
    }

    fn end(mut self) -> Vec<u8> {
        self.pass(true)
    }
}

/// The first file, link or name below a tree that has a secret in it.
fn leaked(tree: &Path, secrets: &[(String, SecretValue)]) -> io::Result<Option<(String, PathBuf)>> {
    if secrets.is_empty() {
        return Ok(None);
    }
    let has = |bytes: &[u8]| {
        secrets
            .iter()
            .find(|(_, s)| memchr::memmem::find(bytes, s.0.as_bytes()).is_some())
            .map(|(name, _)| name.clone())
    };
    let mut dirs = vec![tree.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            let meta = path.symlink_metadata()?;
            let name = path.file_name().and_then(|n| has(n.as_bytes()));
            let found = match () {
                () if name.is_some() => name,
                () if meta.is_symlink() => has(fs::read_link(&path)?.as_os_str().as_bytes()),
                () if meta.is_file() => in_file(&path, secrets)?,
                () => None,
            };
            if let Some(secret) = found {
                return Ok(Some((secret, path)));
            }
            if meta.is_dir() {
                dirs.push(path);
            }
        }
    }
    Ok(None)
}

fn in_file(path: &Path, secrets: &[(String, SecretValue)]) -> io::Result<Option<String>> {
    use std::io::Read;
    let longest = secrets.iter().map(|(_, s)| s.0.len()).max().unwrap_or(0);
    let mut file = fs::File::open(path)?;
    let (mut buffer, mut kept) = (vec![0; longest + (1 << 20)], 0);
    loop {
        let n = file.read(&mut buffer[kept..])?;
        if n == 0 {
            return Ok(None);
        }
        let end = kept + n;
        for (name, secret) in secrets {
            if memchr::memmem::find(&buffer[..end], secret.0.as_bytes()).is_some() {
                return Ok(Some(name.clone()));
            }
        }
        // A secret may lie across two pieces.
        let keep = end.min(longest - 1);
        buffer.copy_within(end - keep..end, 0);
        kept = keep;
    }
}

fn note(path: &Path, digest: &str) -> io::Result<()> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    crate::make_dir(dir)?;
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    fs::write(&fresh, digest)?;
    fs::rename(&fresh, path)
}

/// Notes, for who would remove it, what a machine stands on.
///
/// # Errors
/// What the file system says.
pub(crate) fn note_use(cache: &Path, machine: &Path, rootfs: &Rootfs) -> io::Result<()> {
    let dir = cache.join(USERS);
    let lines = std::iter::once(machine).chain(rootfs.lowers.iter().map(PathBuf::as_path));
    let text: Vec<u8> = lines.flat_map(|path| [path.as_os_str().as_bytes(), b"\n"].concat()).collect();
    let file = dir.join(machine.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    match fs::write(&file, &text) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            crate::make_dir(&dir)?;
            fs::write(&file, &text)
        }
        other => other,
    }
}

/// Takes the note away when the machine is gone.
pub(crate) fn forget_use(cache: &Path, id: &trialrun_model::SandboxId) {
    let _ = fs::remove_file(cache.join(USERS).join(id.as_str()));
}

/// The hexadecimal digits of the images that running machines, of any data directory, and builds stand on. Notes of what
/// has ended are removed on the way.
pub(crate) fn in_use(cache: &Path) -> Vec<String> {
    let mut used = Vec::new();
    let mut take = |text: &[u8]| {
        let parts = text.split(|b| matches!(b, b'/' | b'\n')).filter(|part| part.len() == 64);
        used.extend(parts.map(|part| String::from_utf8_lossy(part).into_owned()));
    };
    for entry in fs::read_dir(cache.join(USERS)).into_iter().flatten().flatten() {
        let text = fs::read(entry.path()).unwrap_or_default();
        let machine = text.split(|b| *b == b'\n').next().unwrap_or_default();
        if lock_is_held(Path::new(std::ffi::OsStr::from_bytes(machine))) {
            take(&text);
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    for entry in fs::read_dir(cache.join(STAGED)).into_iter().flatten().flatten() {
        take(&fs::read(entry.path().join(STANDING)).unwrap_or_default());
    }
    used
}

/// A directory that goes with its handle.
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A directory below the cache for a tree under way. What a killed build left there goes first.
fn tempdir(cache: &Path) -> Result<Staged, BuildError> {
    let parent = cache.join(STAGED);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| BuildError::Cache { path, cause }
    };
    crate::make_dir(&parent).map_err(failed(&parent))?;
    for entry in fs::read_dir(&parent).map_err(failed(&parent))?.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.split('-').next()?.parse::<u32>().ok());
        if !pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| failed(&parent)(e.into()))?;
    let place = parent.join(format!("{}-{:016x}", std::process::id(), u64::from_ne_bytes(random)));
    fs::create_dir(&place).map_err(failed(&place))?;
    Ok(Staged(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(values: &[&str]) -> Vec<(String, SecretValue)> {
        values.iter().enumerate().map(|(n, v)| (format!("S{n}"), SecretValue::new((*v).to_owned()).unwrap())).collect()
    }

    #[test]
    fn a_secret_is_taken_out_wherever_the_stream_is_cut() {
        let text = b"begin secret-one secret-one-longer secret end secret-on";
        for cut in 0..text.len() {
            let mut redactor = Redactor::new(&secrets(&["secret-one", "secret-one-longer"]));
            let mut out = redactor.take(&text[..cut]);
            out.extend(redactor.take(&text[cut..]));
            out.extend(redactor.end());
            assert_eq!(String::from_utf8(out).unwrap(), "begin *** *** secret end secret-on", "{cut}");
        }
    }

    #[test]
    fn a_secret_is_found_in_contents_links_and_names() {
        let all = secrets(&["hunter2hunter2"]);
        let dir = tempfile::tempdir().unwrap();
        assert!(leaked(dir.path(), &all).unwrap().is_none());
        let mut long = vec![b'x'; (1 << 20) + 7];
        long.extend_from_slice(b"hunter2hunter2");
        fs::write(dir.path().join("long"), &long).unwrap();
        assert_eq!(leaked(dir.path(), &all).unwrap().unwrap().1, dir.path().join("long"));
        fs::remove_file(dir.path().join("long")).unwrap();
        std::os::unix::fs::symlink("/x/hunter2hunter2", dir.path().join("l")).unwrap();
        assert!(leaked(dir.path(), &all).unwrap().is_some());
        fs::remove_file(dir.path().join("l")).unwrap();
        fs::create_dir(dir.path().join("a-hunter2hunter2")).unwrap();
        assert_eq!(leaked(dir.path(), &all).unwrap().unwrap().0, "S0");
    }

    #[test]
    fn a_secret_does_not_print_and_is_not_too_short() {
        let secret = SecretValue::new("hunter2hunter2".to_owned()).unwrap();
        assert!(!format!("{secret:?}").contains("hunter2"));
        assert!(SecretValue::new("short".to_owned()).unwrap_err().contains('8'));
        assert!(SecretValue::new("nul\0nul\0nul".to_owned()).is_err());
    }
}
