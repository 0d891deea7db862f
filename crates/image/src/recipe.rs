//! Recipes: what an image is built from, step by step.
//!
//! ```toml
//! name = "web"
//! from = "python"              # any image; python unless said
//! network = "registries"       # off, registries, web or full, while it is built
//! allow = ["example.com:443"]
//!
//! [env]                        # in every machine of the image, and while it is built
//! MODE = "test"
//!
//! [[step]]
//! apt = ["git", "libpq-dev"]
//! [[step]]
//! requirements = "requirements.txt"
//! [[step]]
//! run = "make -C /src install"
//! secrets = ["TOKEN"]
//! ```
//! Each step makes one layer. Its key says what it depends on; a step whose key was built before is not run again.

use crate::{ImageConfig, digest};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    str::FromStr,
};
use trialrun_model::ImageRef;

/// Part of every key: a change of what steps do makes old layers stale.
const KEY_VERSION: &str = "trialrun recipe 1\n";
/// Most steps of a recipe; each is a layer of the machines' root.
pub const MAX_STEPS: usize = 60;
/// Most bytes of a recipe's file.
pub const MAX_BYTES: u64 = 1 << 20;

/// A recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The image's name; `--name` comes before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it stands on.
    #[serde(default = "python")]
    pub from: String,
    /// The network's preset while it is built.
    #[serde(default = "registries")]
    pub network: String,
    /// Hosts that are open beside it.
    #[serde(default)]
    pub allow: Vec<String>,
    /// Environment of the image's machines, and of the steps.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// User of the image's machines, if not the base's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Their working directory, if not the base's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Program before every command, if not the base's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Command without another, if not the base's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmd: Option<Vec<String>>,
    /// The steps, in order.
    #[serde(default, rename = "step")]
    pub steps: Vec<Step>,
}

fn python() -> String {
    "python".to_owned()
}

fn registries() -> String {
    "registries".to_owned()
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            name: None,
            from: python(),
            network: registries(),
            allow: Vec::new(),
            env: std::collections::BTreeMap::new(),
            user: None,
            workdir: None,
            entrypoint: None,
            cmd: None,
            steps: Vec::new(),
        }
    }
}

/// One step: exactly one of the first six.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Debian or Ubuntu packages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apt: Vec<String>,
    /// Python requirements, as pip takes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pip: Vec<String>,
    /// A file of Python requirements on the host, relative to the recipe's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requirements: Option<String>,
    /// npm packages, installed globally.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub npm: Vec<String>,
    /// A shell line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// A file or folder of the host, relative to the recipe's, and where it is put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<(String, String)>,
    /// Who does it; root unless said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Names of secrets that its process has in its environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
}

/// A recipe that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file can't be read.
    #[error("read the recipe {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no recipe.
    #[error("{0}")]
    Syntax(String),
    /// A step is wrong.
    #[error("step {number}: {why}")]
    Step {
        /// From 1.
        number: usize,
        /// What is wrong, and the way out.
        why: String,
    },
    /// Something beside the steps is wrong.
    #[error("{0}")]
    Invalid(String),
}

/// What a step does to a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Runs this line in a shell, after `upload`, if any, was put at its second path.
    Shell {
        /// The line.
        line: String,
        /// Host and guest path.
        upload: Option<(PathBuf, String)>,
    },
    /// Puts a file or folder of the host there.
    Copy(PathBuf, String),
}

impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let recipe: Self =
            toml::from_str(text).map_err(|e| RecipeError::Syntax(e.to_string().trim_end().to_owned()))?;
        recipe.check()?;
        Ok(recipe)
    }
}

impl Recipe {
    /// Reads a recipe's file.
    ///
    /// # Errors
    /// When it can't be read, is too long, or is no recipe.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        use std::io::Read;
        let failed = |source| RecipeError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        let file = fs::File::open(path).map_err(failed)?;
        file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(RecipeError::Syntax(format!("{} is over {MAX_BYTES} bytes", path.display())));
        }
        text.parse().map_err(|e: RecipeError| match e {
            RecipeError::Syntax(why) => RecipeError::Syntax(format!("{}: {why}", path.display())),
            other => other,
        })
    }

    /// Whether everything in it can be used.
    ///
    /// # Errors
    /// The first thing that can't.
    pub fn check(&self) -> Result<(), RecipeError> {
        let invalid = |why: String| Err(RecipeError::Invalid(why));
        match self.from.parse::<ImageRef>() {
            Err(e) => return invalid(format!("from: {e}")),
            Ok(ImageRef::Host) => {
                return invalid(
                    "from: no image can stand on \"host\", which changes with the host; take python".to_owned(),
                );
            }
            Ok(_) => {}
        }
        if let Some(name) = &self.name
            && !matches!(name.parse::<ImageRef>(), Ok(ImageRef::Named(_)))
        {
            return invalid(format!("name: {name:?} is no image's name"));
        }
        for (name, value) in &self.env {
            trialrun_model::check_env(name.as_bytes(), value.as_bytes())
                .map_err(|e| RecipeError::Invalid(format!("env: {e}")))?;
        }
        if self.steps.len() > MAX_STEPS {
            return invalid(format!("{} steps, and {MAX_STEPS} can be; join some of them", self.steps.len()));
        }
        for (at, step) in self.steps.iter().enumerate() {
            step.check().map_err(|why| RecipeError::Step { number: at + 1, why })?;
        }
        Ok(())
    }

    /// The configuration of the image, on a base with this one.
    #[must_use]
    pub fn config(&self, base: &ImageConfig) -> ImageConfig {
        let mut config = base.clone();
        for (name, value) in &self.env {
            config.env.retain(|(known, _)| known != name);
            config.env.push((name.clone(), value.clone()));
        }
        config.user = self.user.clone().unwrap_or(config.user);
        config.cwd = self.workdir.clone().unwrap_or(config.cwd);
        config.entrypoint = self.entrypoint.clone().unwrap_or(config.entrypoint);
        config.cmd = self.cmd.clone().unwrap_or(config.cmd);
        config
    }
}

/// A word that is passed to a package client as one argument: no option of its, and nothing a shell would read.
fn package(word: &str, kind: &str) -> Result<(), String> {
    let bad = |why: &str| Err(format!("{kind}: {word:?} {why}"));
    match word {
        "" => bad("is empty"),
        _ if word.starts_with('-') => bad("begins like an option; write such things in run"),
        _ if word.chars().any(char::is_control) => bad("has a control character in it"),
        _ => Ok(()),
    }
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn words(list: &[String]) -> String {
    list.iter().map(|w| quoted(w)).collect::<Vec<_>>().join(" ")
}

impl Step {
    fn check(&self) -> Result<(), String> {
        let kinds = [
            ("apt", !self.apt.is_empty()),
            ("pip", !self.pip.is_empty()),
            ("requirements", self.requirements.is_some()),
            ("npm", !self.npm.is_empty()),
            ("run", self.run.is_some()),
            ("copy", self.copy.is_some()),
        ];
        let present: Vec<&str> = kinds.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
        match present[..] {
            [_] => {}
            [] => return Err("it does nothing; say one of apt, pip, requirements, npm, run, copy".to_owned()),
            _ => return Err(format!("it has {}; a step does one thing, so make more of them", present.join(" and "))),
        }
        for (kind, list) in [("apt", &self.apt), ("pip", &self.pip), ("npm", &self.npm)] {
            list.iter().try_for_each(|word| package(word, kind))?;
        }
        if self.run.as_ref().is_some_and(|line| line.trim().is_empty() || line.contains('\0')) {
            return Err("run: the line is empty or has a NUL in it".to_owned());
        }
        if let Some((from, to)) = &self.copy
            && (from.is_empty() || !to.starts_with('/') || from.contains('\0') || to.contains('\0'))
        {
            return Err(format!("copy: {from:?} to {to:?}: the second is an absolute path in the image"));
        }
        for name in &self.secrets {
            trialrun_model::check_env(name.as_bytes(), b"").map_err(|e| format!("secrets: {e}"))?;
        }
        if !self.secrets.is_empty() && self.copy.is_some() {
            return Err("secrets: a copy runs nothing that could use one".to_owned());
        }
        Ok(())
    }

    /// What it does, in words for people.
    #[must_use]
    pub fn title(&self) -> String {
        match self {
            Self { run: Some(line), .. } => format!("run {}", line.lines().next().unwrap_or_default()),
            Self { requirements: Some(file), .. } => format!("pip -r {file}"),
            Self { copy: Some((from, to)), .. } => format!("copy {from} to {to}"),
            Self { apt, .. } if !apt.is_empty() => format!("apt {}", apt.join(" ")),
            Self { npm, .. } if !npm.is_empty() => format!("npm {}", npm.join(" ")),
            Self { pip, .. } => format!("pip {}", pip.join(" ")),
        }
    }

    /// What it does to a machine. Paths are relative to `dir`.
    #[must_use]
    pub fn action(&self, dir: &Path) -> Action {
        // Compiled files name their source's time, which is cut later together with the source's.
        const PIP: &str =
            "unset SOURCE_DATE_EPOCH; python3 -m pip install --no-cache-dir --no-input --progress-bar off";
        let shell = |line: String| Action::Shell { line, upload: None };
        match self {
            Self { run: Some(line), .. } => shell(line.clone()),
            Self { requirements: Some(file), .. } => {
                // Below a directory whose content is in no layer.
                let place = "/tmp/trialrun-requirements.txt";
                let line = format!("{PIP} -r {place}");
                Action::Shell { line, upload: Some((dir.join(file), place.to_owned())) }
            }
            Self { copy: Some((from, to)), .. } => Action::Copy(dir.join(from), to.clone()),
            Self { apt, .. } if !apt.is_empty() => shell(format!(
                "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -q update; \
                 apt-get -q -y --no-install-recommends -o Dpkg::Use-Pty=0 install -- {}; apt-get clean; \
                 rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
                 /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old /var/lib/dpkg/*-old",
                words(apt)
            )),
            Self { npm, .. } if !npm.is_empty() => shell(format!(
                "npm install --global --no-audit --no-fund --cache /tmp/npm-cache -- {} && rm -rf ~/.npm",
                words(npm)
            )),
            Self { pip, .. } => shell(format!("{PIP} -- {}", words(pip))),
        }
    }

    /// The key of the layer that it makes on `base` for machines of `config`: everything of its inputs that is known before
    /// it runs. Secrets' values are not.
    ///
    /// # Errors
    /// When a file that it takes from the host can't be read.
    pub fn key(&self, base: &str, config: &ImageConfig, network: &str, dir: &Path) -> io::Result<String> {
        let mut hash = Sha256::new_with_prefix(KEY_VERSION);
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        let json = |value: Result<Vec<u8>, serde_json::Error>| value.map_err(io::Error::other);
        part(base.as_bytes());
        part(&json(serde_json::to_vec(config))?);
        part(network.as_bytes());
        part(&json(serde_json::to_vec(self))?);
        let taken = match self.action(dir) {
            Action::Copy(from, _) | Action::Shell { upload: Some((from, _)), .. } => content(&from)?,
            Action::Shell { .. } => String::new(),
        };
        part(taken.as_bytes());
        Ok(digest::hex(&hash.finalize()))
    }
}

/// The digest of a file or folder as an upload brings it along: names, kinds, permissions, content. Not times and owners.
fn content(root: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut open = vec![PathBuf::new()];
    while let Some(path) = open.pop() {
        let full = if path.as_os_str().is_empty() { root.to_owned() } else { root.join(&path) };
        let meta = full.symlink_metadata()?;
        let (kind, bytes) = match () {
            () if meta.is_dir() => {
                let mut below: Vec<PathBuf> =
                    fs::read_dir(&full)?.map(|e| e.map(|e| path.join(e.file_name()))).collect::<Result<_, _>>()?;
                below.sort();
                open.extend(below.into_iter().rev());
                (b'd', Vec::new())
            }
            () if meta.is_symlink() => (b'l', fs::read_link(&full)?.as_os_str().as_bytes().to_vec()),
            () if meta.is_file() => (b'f', digest::hash_file(&full)?),
            () => (b'o', Vec::new()),
        };
        for part in [path.as_os_str().as_bytes(), &[kind], &(meta.mode() & 0o777).to_le_bytes(), &bytes] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    Ok(digest::hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
        name = "web"
        [env]
        A = "1"
        [[step]]
        apt = ["git"]
        [[step]]
        copy = ["src", "/opt/src"]
        [[step]]
        run = "make"
        secrets = ["TOKEN"]
    "#;

    #[test]
    fn a_recipe_reads_back_as_it_was_written() {
        let recipe: Recipe = WHOLE.parse().unwrap();
        assert_eq!((recipe.from.as_str(), recipe.network.as_str(), recipe.steps.len()), ("python", "registries", 3));
        let again: Recipe = toml::to_string(&recipe).unwrap().parse().unwrap();
        assert_eq!(again, recipe);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("nam = 'x'", "nam"),
            ("name = 'a/b'", "name"),
            ("from = 'host'", "host"),
            ("[[step]]", "step 1: it does nothing"),
            ("[[step]]\napt = ['git']\nrun = 'x'", "apt and run"),
            ("[[step]]\napt = ['-o=x']", "option"),
            ("[[step]]\npip = ['']", "empty"),
            ("[[step]]\nrun = ' '", "empty"),
            ("[[step]]\ncopy = ['a', 'b']", "absolute"),
            ("[[step]]\ncopy = ['a']", "2"),
            ("[[step]]\nrun = 'x'\nsecrets = ['a b']", "secrets"),
            ("[env]\n'A=B' = 'x'", "env"),
            ("[[step]]\nrun = 5", "run"),
        ] {
            let said = text.parse::<Recipe>().unwrap_err().to_string();
            assert!(said.contains(word), "{text:?}: {said}");
        }
        let many = "[[step]]\nrun = 'x'\n".repeat(MAX_STEPS + 1);
        assert!(many.parse::<Recipe>().unwrap_err().to_string().contains("steps"));
    }

    #[test]
    fn words_reach_the_shell_as_they_are() {
        let step = Step { pip: vec!["a'; touch /x; '".to_owned(), "b[c]>=1".to_owned()], ..Step::default() };
        let Action::Shell { line, .. } = step.action(Path::new("/")) else { panic!("no shell") };
        assert!(line.ends_with(r"-- 'a'\''; touch /x; '\''' 'b[c]>=1'"), "{line}");
    }

    #[test]
    fn a_key_changes_with_every_input_and_with_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("r.txt"), "a\n").unwrap();
        let (config, other) = (ImageConfig::default(), ImageConfig { user: "x".to_owned(), ..ImageConfig::default() });
        let step = Step { requirements: Some("r.txt".to_owned()), ..Step::default() };
        let key =
            |base: &str, config: &ImageConfig, network: &str| step.key(base, config, network, dir.path()).unwrap();
        let first = key("b", &config, "off");
        let mut all = std::collections::BTreeSet::from([
            first.clone(),
            key("c", &config, "off"),
            key("b", &other, "off"),
            key("b", &config, "web"),
        ]);
        let time = std::time::SystemTime::UNIX_EPOCH;
        fs::File::options().append(true).open(dir.path().join("r.txt")).unwrap().set_modified(time).unwrap();
        assert_eq!(key("b", &config, "off"), first);
        fs::write(dir.path().join("r.txt"), "b\n").unwrap();
        all.insert(key("b", &config, "off"));
        assert_eq!(all.len(), 5);
        fs::remove_file(dir.path().join("r.txt")).unwrap();
        assert!(step.key("b", &config, "off", dir.path()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_recipe_or_an_error(text in "\\PC{0,200}") {
            let _ = text.parse::<Recipe>();
        }

        #[test]
        fn nearly_recipes_are_recipes_or_errors(
            parts in proptest::collection::vec(proptest::sample::select(vec![
                "[[step]]\n", "apt = ", "pip = ", "run = ", "copy = ", "[env]\n", "['x']", "[\"a\", \"/b\"]", "\"x\"", "\n", "A = ",
                "name = ", "from = ", "5", "{ }", "secrets = ", "\u{0}", "'", "user = ",
            ]), 0..24),
        ) {
            let text = parts.concat();
            if let Ok(recipe) = text.parse::<Recipe>() {
                for step in &recipe.steps {
                    let _ = (step.title(), step.action(Path::new("/")));
                }
            }
        }
    }
}
