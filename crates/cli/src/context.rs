//! What every command starts with: root, directories, the engine.

use crate::{KEEPER, args::Dirs, failure::Failure};
use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, time::Duration};
use trialrun_engine::{Config, Engine, Guest};
use trialrun_image::BuildProgress;
use trialrun_model::{ByteSize, ImageRef};

/// Opens the engine.
///
/// # Errors
/// Without root, or when a directory or the store can't be used.
pub fn engine(dirs: &Dirs) -> Result<Engine, Failure> {
    open(dirs, false)
}

/// As [`engine`], for a command that will make a machine.
///
/// # Errors
/// As [`engine`].
pub fn engine_for_machine(dirs: &Dirs) -> Result<Engine, Failure> {
    open(dirs, true)
}

fn open(dirs: &Dirs, prestart: bool) -> Result<Engine, Failure> {
    need_root()?;
    let (program, argument) = own_program(KEEPER)?;
    let config = Config {
        data_dir: absolute(&dirs.data_dir)?,
        cache_dir: absolute(&dirs.cache_dir)?,
        keeper: (program, vec![argument]),
        guest: Guest::Embedded { program: trialrun_embedded::GUEST, digest: trialrun_embedded::GUEST_DIGEST },
    };
    let opened = if prestart { Engine::open_prestarted(config) } else { Engine::open(config) };
    Ok(opened?)
}

/// This program, to be started as something else.
fn own_program(argument: &str) -> Result<(std::path::PathBuf, String), Failure> {
    let program = std::env::current_exe().map_err(|e| Failure::ours(format!("can't find my own program: {e}")))?;
    Ok((program, argument.to_owned()))
}

fn absolute(path: &std::path::Path) -> Result<std::path::PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

/// trialrun needs root for now: uid ranges, mounts and network namespaces are made by it.
///
/// # Errors
/// Without root: one line that says so and how.
pub fn need_root() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::usage("root is needed for now: run it with sudo (sudo -E trialrun …)"))
}

/// A line that says what is being done, on a terminal; plain lines elsewhere.
pub struct Steps {
    bar: Option<ProgressBar>,
    silent: bool,
}

impl Steps {
    /// Shown on standard error; `silent` shows nothing.
    pub fn new(silent: bool) -> Self {
        let bar = (!silent && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, silent }
    }

    /// What is being done now.
    pub fn say(&self, message: &str) {
        let message = trialrun_report::terminal::safe(message);
        match &self.bar {
            Some(bar) => {
                bar.reset_elapsed();
                bar.set_message(message);
            }
            None if !self.silent => eprintln!("… {message}"),
            None => {}
        }
    }

    /// Takes the line away, before something else writes.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Builds the stock image if it is asked for and not there, and says so: that takes a minute.
///
/// # Errors
/// A build that failed.
pub async fn ensure_image(engine: &Engine, image: &ImageRef, steps: &Steps) -> Result<(), Failure> {
    let name = match image {
        ImageRef::Named(name) => name,
        ImageRef::Oci(reference) => return pull(engine, reference, false, steps).await,
        ImageRef::Host | ImageRef::Digest(_) => return Ok(()),
    };
    if name != "python" || engine.images().resolve(image).is_ok() {
        return Ok(());
    }
    steps.say("building the stock image python from Debian's packages (once, about a minute)");
    let store = engine.images().clone();
    build(steps, "python", move |tell| store.ensure_python(tell).map(|_| ())).await
}

/// Runs a build in a thread of its own and says its steps.
async fn build<F>(steps: &Steps, name: &str, work: F) -> Result<(), Failure>
where
    F: FnOnce(&mut dyn FnMut(BuildProgress)) -> Result<(), trialrun_image::ImageError> + Send + 'static,
{
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let work = tokio::task::spawn_blocking(move || {
        work(&mut |progress| {
            let _ = tell.send(progress);
        })
    });
    while let Some(progress) = told.recv().await {
        steps.say(&match progress {
            BuildProgress::Waiting => format!("waiting for another trialrun that builds the image {name}"),
            BuildProgress::Step(step) => format!("image {name}: {step}"),
        });
    }
    work.await.map_err(|e| Failure::ours(e.to_string()))??;
    Ok(())
}

/// Fetches an image from its registry and unpacks it, if it is not there, or `again`.
///
/// # Errors
/// A registry that refuses or fails, or an image that is refused.
pub async fn pull(engine: &Engine, reference: &str, again: bool, steps: &Steps) -> Result<(), Failure> {
    if !again && engine.images().resolve(&ImageRef::Oci(reference.to_owned())).is_ok() {
        return Ok(());
    }
    steps.say(&format!("asking the registry for {reference}"));
    let downloads = engine.hold_downloads().map_err(|e| Failure::ours(format!("can't lock the downloads: {e}")))?;
    let puller = trialrun_oci::Puller::new(engine.cache_dir(), own_program(crate::UNPACKER)?);
    let told = std::sync::atomic::AtomicU64::new(0);
    let tell = |p: trialrun_oci::Progress| {
        // Each tenth, where lines stay on the screen.
        let tenth = p.have * 10 / p.all.max(1);
        if told.swap(tenth, std::sync::atomic::Ordering::Relaxed) != tenth {
            let (have, all) = (ByteSize(p.have), ByteSize(p.all));
            steps.say(&format!("fetching {reference}: {have} of {all} in {} layers", p.layers));
        }
    };
    let image = puller.pull(reference, &tell).await?;
    let store = engine.images().clone();
    let built =
        build(steps, reference, move |tell| store.ensure_oci(&image.reference, &image, again, tell).map(|_| ()));
    let built = built.await;
    drop(downloads);
    built
}
