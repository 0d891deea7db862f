//! A project's dependencies as an image of their own, so that the next run need not install them.
//!
//! The image is made by a machine that never sees the project's folder, from lists alone, and no machine that stands on it
//! can change it. It decides nothing: the whole install runs on top.

use crate::{context::Steps, failure::Failure, network::Network, recipe::OWNER, stream::Interrupts};
use std::{io, os::unix::fs::PermissionsExt, path::Path, time::Duration};
use trialrun_engine::{BuildError, BuildEvent, BuildOptions, Engine};
use trialrun_image::recipe::{Recipe, Step};
use trialrun_model::{ImageRef, Limits};
use trialrun_project::{Dependencies, PLAN_DIR, VENV};

/// After so long they are installed anew, so that what an index has meanwhile is not missed for long.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Longest time that making them may take.
const DEADLINE: Duration = Duration::from_secs(1800);

/// What a run's machine stands on.
pub struct Prepared {
    /// The image.
    pub image: ImageRef,
    /// Whether it was made now.
    pub fresh: bool,
    /// What the report says of it.
    pub note: Option<String>,
}

/// The image with these dependencies on `base`: the one that was made before, or a new one; `base` itself where there can
/// be none. What fails here is no failure of the run: the install meets the same and says so.
///
/// # Errors
/// When no machine can be made, or a signal.
pub async fn prepare(
    engine: &Engine,
    base: &ImageRef,
    dependencies: &Dependencies,
    (preset, allow, network): (&str, &[String], &Network),
    limits: Limits,
    (steps, interrupts): (&Steps, &mut Interrupts),
) -> Result<Prepared, Failure> {
    let without = |note| Prepared { image: base.clone(), fresh: false, note };
    // No image can stand on the host's own system; what else is wrong with an image is said when its machine is made.
    let Ok(resolved) = engine.images().resolve(base) else { return Ok(without(None)) };
    let not_kept = |why: String| without(Some(format!("the dependencies could not be kept for the next run: {why}")));
    let staged = match stage(dependencies) {
        Ok(staged) => staged,
        Err(e) => return Ok(not_kept(format!("write a temporary folder: {e}"))),
    };
    let copy = Step { copy: Some((".".to_owned(), parent().display().to_string())), ..Step::default() };
    let run = Step { run: Some(dependencies.script.clone()), user: Some(resolved.config.user), ..Step::default() };
    let options = BuildOptions {
        recipe: Recipe {
            from: resolved.digest,
            network: preset.to_owned(),
            allow: allow.to_vec(),
            steps: vec![copy, run],
            ..Recipe::default()
        },
        dir: staged.path().to_owned(),
        name: None,
        policy: network.policy.clone(),
        env: network.env.clone(),
        secrets: Vec::new(),
        limits,
        cached: true,
        max_age: Some(MAX_AGE),
        owner: OWNER.to_owned(),
    };
    let mut age = None;
    let mut on = |event: BuildEvent<'_>| match event {
        BuildEvent::Cached(then) => age = Some(then),
        BuildEvent::Step { number: 2, .. } => {
            age = None;
            steps.say("installing the dependencies, which are kept for the next run");
        }
        _ => {}
    };
    let build = tokio::time::timeout(DEADLINE, engine.build_image(&options, &mut on));
    Ok(match interrupts.guard(build).await? {
        Ok(Ok(image)) => {
            let note =
                age.map(|age| format!("dependencies as installed {} ago; --no-cache installs them anew", ago(age)));
            Prepared { image: ImageRef::Digest(image.digest), fresh: age.is_none(), note }
        }
        Ok(Err(BuildError::Create(error))) => return Err(error.into()),
        Err(_) | Ok(Err(BuildError::Step { .. })) => without(None),
        Ok(Err(other)) => not_kept(trialrun_model::error_chain(&other)),
    })
}

fn ago(age: Duration) -> String {
    match age.as_secs() {
        s @ 0..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
}

fn parent() -> &'static Path {
    Path::new(PLAN_DIR).parent().unwrap_or(Path::new("/"))
}

/// A folder with the lists, as it will be in the machine.
fn stage(dependencies: &Dependencies) -> io::Result<tempfile::TempDir> {
    let dir = tempfile::tempdir()?;
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755))?;
    let place = |path: &str| dir.path().join(Path::new(path).strip_prefix(parent()).unwrap_or(Path::new(path)));
    std::fs::create_dir_all(place(VENV))?;
    std::fs::create_dir_all(place(PLAN_DIR))?;
    for file in &dependencies.files {
        std::fs::write(place(&file.path), &file.content)?;
    }
    Ok(dir)
}
