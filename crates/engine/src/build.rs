//! Building images from recipes: each step runs in a machine on the image so far, and what it wrote becomes a layer.
//!
//! ```text
//! key of the step known and its image here ─> taken
//! else: machine on the base ─> upload ─> command ─> copy of its layer ─> image ─> key noted ─> machine gone
//! ```
//! Keys are kept by owner, so that nobody learns from a cache what another one built.

use crate::{
    CallError, CreateError, CreateOptions, Engine, Output, Sandbox, SecretValue, TransferError, UploadRules,
    secret::{Redactor, leaked},
    using::{STANDING, Staged, in_use, tempdir},
};
use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};
use trialrun_image::{
    Image, ImageConfig, ImageError, ImageRecord,
    recipe::{Action, Recipe, RecipeError, Step},
};
use trialrun_keeper::wire::{Call, Reply};
use trialrun_model::{Command, ExecOutcome, ExecSpec, ImageRef, Limits, SandboxSpec};
use trialrun_policy::Policy;

/// What to build.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The recipe.
    pub recipe: Recipe,
    /// What its paths are relative to.
    pub dir: PathBuf,
    /// The name that the image gets, if it gets one.
    pub name: Option<String>,
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
    /// How long ago at most, if not any time.
    pub max_age: Option<Duration>,
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
    /// It was built before, so long ago.
    Cached(Duration),
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
        // With the addresses of mirrors, say.
        let network = format!("{} {} {:?}", recipe.network, recipe.allow.join(" "), options.env);
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
                && let Some((known, age)) = self.known(&staged, &noted)
                && options.max_age.is_none_or(|max| age < max)
            {
                on(BuildEvent::Cached(age));
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
            let empty = staged.0.join("empty");
            fs::create_dir(&empty).map_err(|cause| BuildError::Cache { path: empty.clone(), cause })?;
            digest = self.images().add_layer(&digest, &config, &empty)?;
        }
        let Some(name) = &options.name else { return Ok(self.images().resolve(&ImageRef::Digest(digest))?) };
        self.images().tag(&ImageRef::Digest(digest), name)?;
        Ok(self.images().resolve(&ImageRef::Named(name.clone()))?)
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

    /// What a step's note says, and how old it is.
    fn known(&self, staged: &Staged, noted: &Path) -> Option<(String, Duration)> {
        let digest = fs::read_to_string(noted).ok()?;
        // A clock that was set back makes nothing young for ever.
        let age = noted.metadata().ok()?.modified().ok()?.elapsed().unwrap_or(Duration::MAX);
        let image: ImageRef = digest.trim().parse().ok()?;
        Some((self.stand(staged, &image).ok()?.digest, age))
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
        let stored = tokio::task::spawn_blocking(move || images.add_layer(&base, &config, &tree));
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

fn note(path: &Path, digest: &str) -> io::Result<()> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    crate::make_dir(dir)?;
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    fs::write(&fresh, digest)?;
    fs::rename(&fresh, path)
}
