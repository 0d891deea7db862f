//! `trialrun image build`: images from recipes, given as a file or as options.

use crate::{
    args::Dirs,
    context::{self, Steps},
    failure::{Failure, exit_codes},
    network::network,
    stream::Interrupts,
};
use clap::{Arg, ArgAction, ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
};
use trialrun_engine::{BuildError, BuildEvent, BuildOptions, SecretValue};
use trialrun_image::recipe::{Recipe, RecipeError, Step};
use trialrun_model::{ByteSize, ImageRef, Limits};
use trialrun_report::terminal::Filter;

/// Whose cache of steps the command line uses: whoever is root here.
pub const OWNER: &str = "local";
/// The recipe's file in a folder.
const FILE: &str = "image.toml";
/// What a step's log keeps for the end, when it fails and was not shown.
const TAIL: usize = 4 << 10;

/// Options of `trialrun image build`.
#[derive(Debug, ClapArgs)]
pub struct Build {
    /// A stock image (python), or a recipe: its file, or a folder with an image.toml
    #[arg(value_name = "STOCK|RECIPE")]
    pub what: Option<PathBuf>,
    /// The image's name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The image that it stands on; python unless said
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<ImageRef>,
    #[command(flatten)]
    pub steps: StepOptions,
    /// Environment of the image's machines, NAME=VALUE; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// User of the image's machines
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Working directory of the image's machines
    #[arg(long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Network while it is built: off, registries, web or full; registries unless said
    #[arg(long, value_name = "PRESET")]
    pub network: Option<String>,
    /// Also allow this host while it is built; may be given several times
    #[arg(long, value_name = "HOST[:PORT]")]
    pub allow: Vec<String>,
    /// A secret for the steps, NAME=VALUE or NAME to take your own variable: in their environment, in no layer and no log.
    /// Every --run of the command line has it; a recipe's steps name those they want
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub secret: Vec<String>,
    /// Run every step, also those that were built before
    #[arg(long)]
    pub no_cache: bool,
    /// Do not show what the steps print
    #[arg(long, short)]
    pub quiet: bool,
    /// Virtual CPUs of the machines that build it
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub vcpu: u32,
    /// Memory of the machines that build it
    #[arg(long, default_value = "4G", value_name = "SIZE")]
    pub memory: ByteSize,
    /// Size of each step's layer
    #[arg(long, default_value = "8G", value_name = "SIZE")]
    pub disk: ByteSize,
}

/// The options that are steps, in the order in which they were given.
#[derive(Debug, Default)]
pub struct StepOptions(Vec<Step>);

/// Name, short name, value's name, help, whether it takes several values.
const STEPS: [(&str, Option<char>, &str, &str, bool); 6] = [
    (
        "apt",
        None,
        "PACKAGE",
        "Install Debian packages. Options that are steps are taken in the order given, each as often as you like",
        true,
    ),
    ("pip", None, "REQUIREMENT", "Install Python packages", true),
    ("requirements", Some('r'), "FILE", "Install the Python packages of this file", false),
    ("npm", None, "PACKAGE", "Install npm packages globally", true),
    ("run", None, "LINE", "Run this shell line as root", false),
    ("copy", None, "HOST:INSIDE", "Put a file or folder of the host there", false),
];

impl ClapArgs for StepOptions {
    fn augment_args(mut command: Command) -> Command {
        for (name, short, value, help, several) in STEPS {
            let mut arg = Arg::new(name).long(name).value_name(value).help(help).action(ArgAction::Append);
            if let Some(short) = short {
                arg = arg.short(short);
            }
            command = command.arg(if several { arg.num_args(1..) } else { arg });
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for StepOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found: Vec<(usize, Step)> = Vec::new();
        for (name, ..) in STEPS {
            let mut indices = matches.indices_of(name).into_iter().flatten();
            for group in matches.get_occurrences::<String>(name).into_iter().flatten() {
                let words: Vec<String> = group.cloned().collect();
                let at = indices.by_ref().take(words.len()).min().unwrap_or(0);
                found.push((at, step(name, words)?));
            }
        }
        found.sort_by_key(|(at, _)| *at);
        Ok(Self(found.into_iter().map(|(_, step)| step).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn step(name: &str, words: Vec<String>) -> Result<Step, clap::Error> {
    let mut step = Step::default();
    let first = || words.first().cloned().unwrap_or_default();
    match name {
        "apt" => step.apt = words,
        "pip" => step.pip = words,
        "npm" => step.npm = words,
        "requirements" => step.requirements = Some(first()),
        "run" => step.run = Some(first()),
        _ => {
            let text = first();
            let Some((from, to)) = text.rsplit_once(':') else {
                let words = format!("--copy {text:?} is not HOST_PATH:PATH_INSIDE\n");
                return Err(clap::Error::raw(clap::error::ErrorKind::ValueValidation, words));
            };
            step.copy = Some((from.to_owned(), to.to_owned()));
        }
    }
    Ok(step)
}

impl Build {
    /// The stock image that is asked for, if it is one.
    pub fn stock(&self) -> Option<&str> {
        let bare = self.name.is_none() && self.from.is_none() && self.steps.0.is_empty();
        match &self.what {
            None if bare && !Path::new(FILE).exists() => Some("python"),
            Some(what) if bare && !what.exists() => what.to_str(),
            _ => None,
        }
    }

    /// The recipe, and the folder that its paths are relative to.
    fn recipe(&self) -> Result<(Recipe, PathBuf), Failure> {
        let here = PathBuf::from(".");
        let file = match &self.what {
            Some(what) if what.is_dir() => Some(what.join(FILE)),
            Some(what) => Some(what.clone()),
            None if self.steps.0.is_empty() && self.from.is_none() => Some(here.join(FILE)).filter(|f| f.exists()),
            None => None,
        };
        let (mut recipe, dir) = match file {
            Some(file) => {
                let dir = file.parent().filter(|d| !d.as_os_str().is_empty()).map_or(here, Path::to_owned);
                (Recipe::read(&file)?, dir)
            }
            None => (Recipe::default(), here),
        };
        let secrets: Vec<String> =
            self.secret.iter().map(|s| s.split('=').next().unwrap_or_default().to_owned()).collect();
        for step in &self.steps.0 {
            let secrets = if step.copy.is_some() { Vec::new() } else { secrets.clone() };
            recipe.steps.push(Step { secrets, ..step.clone() });
        }
        recipe.name = self.name.clone().or(recipe.name);
        if let Some(from) = &self.from {
            recipe.from = from.to_string();
        }
        recipe.env.extend(crate::run::environment(&self.env)?);
        recipe.user = self.user.clone().or(recipe.user);
        recipe.workdir = self.workdir.clone().or(recipe.workdir);
        recipe.network = self.network.clone().unwrap_or(recipe.network);
        recipe.allow.extend(self.allow.iter().cloned());
        recipe.check()?;
        Ok((recipe, dir))
    }

    fn secrets(&self) -> Result<Vec<(String, SecretValue)>, Failure> {
        let one = |text: &String| {
            let (name, value) = match text.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => match std::env::var(text) {
                    Ok(value) => (text.clone(), value),
                    Err(e) => return Err(Failure::usage(format!("--secret {text}: {e} (write {text}=VALUE)"))),
                },
            };
            let value = SecretValue::new(value).map_err(|e| Failure::usage(format!("--secret {name}: {e}")))?;
            Ok((name, value))
        };
        self.secret.iter().map(one).collect()
    }
}

impl From<RecipeError> for Failure {
    fn from(error: RecipeError) -> Self {
        Self::usage(trialrun_model::error_chain(&error))
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        let text = trialrun_model::error_chain(&error);
        match error {
            // The recipe's, not ours.
            BuildError::Step { .. } | BuildError::Leaked { .. } => {
                Self { code: exit_codes::INSTALL_FAILED as u8, message: text, hint: None }
            }
            BuildError::Recipe(_) | BuildError::NoSecret { .. } | BuildError::Host { .. } => Self::usage(text),
            BuildError::Create(create) => create.into(),
            BuildError::Image(image) => image.into(),
            _ => Self::ours(format!("can't {text}")),
        }
    }
}

/// Builds an image from a recipe and returns its name.
///
/// # Errors
/// A recipe that can't be used, a step that failed, or a failure of ours.
pub async fn build(dirs: &Dirs, build: &Build, json: bool) -> Result<ImageRef, Failure> {
    let (recipe, dir) = build.recipe()?;
    let secrets = build.secrets()?;
    let Some(name) = recipe.name.clone() else {
        return Err(Failure::usage("the image has no name (--name NAME, or name in the recipe)"));
    };
    if name == "python" {
        return Err(Failure::usage("the name python is the stock image's; take another (--name NAME)"));
    }
    let limits = Limits { vcpus: build.vcpu, memory: build.memory, disk: build.disk, ..Limits::default() };
    limits.check().map_err(|e| Failure::usage(format!("--{e}")))?;
    let from: ImageRef = recipe.from.parse().map_err(|e| Failure::usage(format!("from: {e}")))?;
    let engine = context::engine_for_machine(dirs)?;
    let steps = Steps::new(json);
    let mut interrupts = Interrupts::listen()?;
    interrupts.guard(context::ensure_image(&engine, &from, &steps)).await??;
    let network = interrupts.guard(network(&engine, &from, &recipe.network, &recipe.allow, &steps)).await??;
    let options = BuildOptions {
        recipe,
        dir,
        name: Some(name.clone()),
        policy: network.policy,
        env: network.env,
        secrets,
        limits,
        cached: !build.no_cache,
        max_age: None,
        owner: OWNER.to_owned(),
    };
    let mut tail = Vec::new();
    let mut filter = std::io::stderr().is_terminal().then(Filter::default);
    let quiet = build.quiet || json;
    let mut on = |event: BuildEvent<'_>| match event {
        BuildEvent::Step { number, of, title } => {
            tail.clear();
            if quiet {
                steps.say(&format!("step {number} of {of}: {title}"));
            } else {
                steps.clear();
                eprintln!("step {number} of {of}: {}", trialrun_report::terminal::safe(title));
            }
        }
        BuildEvent::Cached(_) if !quiet => eprintln!("  built before"),
        BuildEvent::Layer { bytes, files } if !quiet => eprintln!("  a layer of {} in {files} files", ByteSize(bytes)),
        BuildEvent::Output(bytes) => {
            tail.extend_from_slice(bytes);
            let over = tail.len().saturating_sub(TAIL);
            tail.drain(..over);
            if !quiet {
                let shown = filter.as_mut().map(|filter| filter.pass(bytes));
                let _ = std::io::stderr().write_all(shown.as_deref().unwrap_or(bytes));
            }
        }
        _ => {}
    };
    let built = interrupts.guard(engine.build_image(&options, &mut on)).await;
    steps.clear();
    match built? {
        Ok(_) => Ok(ImageRef::Named(name)),
        Err(error) => {
            if quiet && matches!(error, BuildError::Step { .. }) {
                let text = String::from_utf8_lossy(&tail).into_owned();
                text.lines().for_each(|line| eprintln!("  {}", trialrun_report::terminal::safe(line)));
            }
            Err(error.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn steps(words: &[&str]) -> Vec<String> {
        #[derive(Parser)]
        struct Only {
            #[command(flatten)]
            build: Build,
        }
        let only = Only::try_parse_from(["build"].iter().chain(words)).unwrap();
        only.build.steps.0.iter().map(Step::title).collect()
    }

    #[test]
    fn steps_keep_the_order_in_which_they_were_given() {
        let words = ["--run", "one", "--apt", "git", "curl", "--run", "two", "-r", "f", "--apt", "x", "--copy", "a:/b"];
        assert_eq!(steps(&words), ["run one", "apt git curl", "run two", "pip -r f", "apt x", "copy a to /b"]);
        assert!(steps(&[]).is_empty());
    }
}
