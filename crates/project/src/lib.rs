//! Reads a project folder: how its tests run and what they need.
//!
//! Nothing is executed and nothing is written. A folder here is a stranger's: files are read only when they are regular
//! and of bearable size, walks are bounded, links are not followed, and text from it reaches a command line only after
//! it was recognised as what it should be. [`inspect`] gives a [`Project`]: the runner ([`Runner`]), the commands that
//! install what is needed ([`InstallPlan`]) and what [`test_command`] makes the suite's command of. [`upload_rules`]
//! says what of the folder goes into the machine.
//!
//! How the commands go together in the machine, with `cwd` the project's folder:
//!
//! 1. [`create_venv`], once;
//! 2. write `plan.files`; run `plan.steps`;
//! 3. run `plan.probe`; `plan.tools_to_add(&installed)`; if any: run `plan.freeze`, then `plan.tools_step(&added)`, then
//!    the probe again for `plan.fill_versions`;
//! 4. cut the network; run [`test_command`].

mod command;
mod dependencies;
mod error;
mod files;
mod ini;
mod lock;
mod plan;
mod pytest;
mod requirement;
mod upload;

pub use command::{CoverageOptions, TestCommand, TestOptions, test_command};
pub use dependencies::{Dependencies, PROBED};
pub use error::ProjectError;
pub use plan::{Added, CONSTRAINTS, InstallPlan, InstallStep, PlanFile};
pub use pytest::{CoverageConfig, PytestConfig};
pub use upload::{DROPPED_DIRS, DROPPED_SUFFIXES, UploadRules, VENV_MARK, upload_rules};

use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The virtual environment in the machine.
pub const VENV: &str = "/var/lib/trialrun/venv";
/// Its interpreter.
pub const VENV_PYTHON: &str = "/var/lib/trialrun/venv/bin/python";
/// Where [`PlanFile`]s and [`CONSTRAINTS`] are.
pub const PLAN_DIR: &str = "/var/lib/trialrun/plan";

/// The command that makes [`VENV`].
#[must_use]
pub fn create_venv() -> InstallStep {
    let argv = ["/usr/bin/python3", "-I", "-m", "venv", VENV].map(str::to_owned).into();
    InstallStep { label: "virtual environment".to_owned(), argv, cwd_in_project: false }
}

/// What the caller wants.
#[derive(Debug, Clone, Default)]
pub struct InspectOptions {
    /// Extras to install instead of the usual ones.
    pub extras: Vec<String>,
    /// Dependency groups to install instead of the usual ones.
    pub groups: Vec<String>,
    /// Install nothing of the project's.
    pub no_install: bool,
    /// The suite is to be spread over workers (pytest-xdist).
    pub parallel: bool,
    /// Coverage is wanted (pytest-cov).
    pub coverage: bool,
    /// The suite has a command of its own: no tool is added for it.
    pub own_command: bool,
}

/// What runs the tests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Runner {
    /// pytest, which also runs `unittest` cases.
    Pytest {
        /// What it was recognised by.
        evidence: String,
    },
    /// No runner was recognised; a command has to be given.
    None {
        /// What the folder looks like instead, with a command to try.
        hint: Option<String>,
    },
}

/// A project as it was read.
#[derive(Debug, Clone, Serialize)]
pub struct Project {
    /// The folder, as given.
    pub path: PathBuf,
    /// The name that the project gives itself.
    pub name: Option<String>,
    /// What runs its tests.
    pub runner: Runner,
    /// How pytest is configured.
    pub pytest: PytestConfig,
    /// How coverage is configured.
    pub coverage: CoverageConfig,
    /// Extras that are installed.
    pub extras: Vec<String>,
    /// Dependency groups that are installed.
    pub groups: Vec<String>,
    /// Where dependencies come from, in order.
    pub sources: Vec<String>,
    /// The commands.
    pub plan: InstallPlan,
    /// What of it can be done without the folder, and kept; nothing where nothing is installed.
    pub dependencies: Option<Dependencies>,
}

impl Project {
    /// An error with the way out when no runner was recognised.
    pub fn require_runner(&self) -> Result<(), ProjectError> {
        match &self.runner {
            Runner::Pytest { .. } => Ok(()),
            Runner::None { hint } => Err(ProjectError::NoRunner { path: self.path.clone(), hint: hint.clone() }),
        }
    }
}

/// Reads the folder at `path`.
///
/// # Errors
///
/// When `path` is not a readable folder, or a file that says what the project needs is broken. A missing runner is not
/// an error here, since the caller may have a command: see [`Project::require_runner`].
pub fn inspect(path: &Path, options: &InspectOptions) -> Result<Project, ProjectError> {
    let unreadable = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => ProjectError::Missing { path: path.to_owned() },
        _ => ProjectError::Unreadable { path: path.to_owned(), source },
    };
    if !fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Err(ProjectError::NotADirectory { path: path.to_owned() });
    }
    fs::read_dir(path).map_err(unreadable)?;

    // With --no-install a broken file stands in nobody's way: pytest itself will say what it thinks of it.
    let lenient =
        |r: Result<Option<toml::Table>, ProjectError>| if options.no_install { Ok(r.unwrap_or(None)) } else { r };
    let pyproject = lenient(files::toml(path, "pyproject.toml"))?;
    let pytest = match pytest::read(path, pyproject.as_ref()) {
        Err(_) if options.no_install => PytestConfig::default(),
        other => other?,
    };
    let coverage = pytest::read_coverage(path, pyproject.as_ref(), pytest.strict_warnings)?;
    let seen = files::walk(path);
    let runner = runner(path, &pytest, &seen);
    let mut outcome = plan::read(path, pyproject, options)?;
    let notes = &mut outcome.plan.notes;
    if seen.truncated {
        notes.push("the folder is very large: only its upper part was looked at for tests".to_owned());
    }
    if files::is_file(path, "manage.py") && !outcome.plan.declared.contains_key("pytest-django") {
        notes.push(
            "a Django project without pytest-django: if its tests need Django's runner, pass -- python manage.py test"
                .to_owned(),
        );
    }
    if !options.no_install {
        for plugin in &pytest.required_plugins {
            let name = requirement::Requirement::parse(plugin).map(|r| r.name);
            if name.is_some_and(|n| !outcome.plan.declared.contains_key(&n)) {
                notes.push(format!(
                    "pytest is configured to require {plugin}, which no dependency list of the project names"
                ));
            }
        }
    }
    Ok(Project {
        path: path.to_owned(),
        name: outcome.name,
        runner,
        pytest,
        coverage,
        extras: outcome.extras,
        groups: outcome.groups,
        sources: outcome.sources,
        plan: outcome.plan,
        dependencies: outcome.dependencies,
    })
}

fn runner(root: &Path, pytest: &PytestConfig, seen: &files::Seen) -> Runner {
    let found = |evidence: String| Runner::Pytest { evidence };
    if let Some(file) = &pytest.file {
        return found(format!("{file} configures pytest"));
    }
    let name = |p: &PathBuf| p.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
    let is_test = |n: &str| n.ends_with(".py") && (n.starts_with("test_") || n.ends_with("_test.py"));
    if let Some(file) =
        seen.files.iter().find(|p| is_test(&name(p))).or_else(|| seen.files.iter().find(|p| name(p) == "conftest.py"))
    {
        return found(file.display().to_string());
    }
    let python = || seen.files.iter().any(|p| p.extension().is_some_and(|e| e == "py"));
    if let Some(dir) =
        seen.dirs.iter().find(|p| matches!(name(p).as_str(), "tests" | "test" | "testing")).filter(|_| python())
    {
        return found(format!("{}/", dir.display()));
    }
    let looks = [
        ("package.json", "this looks like a Node project: -- npm test"),
        ("Cargo.toml", "this looks like a Rust project: -- cargo test"),
        ("go.mod", "this looks like a Go project: -- go test ./..."),
        ("Makefile", "there is a Makefile: -- make test"),
    ];
    Runner::None { hint: looks.iter().find(|(file, _)| files::is_file(root, file)).map(|(_, hint)| (*hint).to_owned()) }
}

/// A poetry version constraint as PEP 440 writes it; what is PEP 440 already stays.
pub(crate) fn poetry_specifier(spec: &str) -> String {
    let one = |clause: &str| -> String {
        let clause = clause.trim();
        let bump = |version: &str, at: usize| {
            let mut parts: Vec<u64> = version.split('.').map_while(|p| p.parse().ok()).collect();
            parts.resize(at + 1, 0);
            parts[at] = parts[at].saturating_add(1);
            parts.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
        };
        if let Some(version) = clause.strip_prefix('^') {
            let version = version.trim();
            let parts: Vec<u64> = version.split('.').map_while(|p| p.parse().ok()).collect();
            let at = parts.iter().position(|p| *p != 0).unwrap_or(parts.len().saturating_sub(1));
            return format!(">={version},<{}", bump(version, at));
        }
        if let Some(version) = clause.strip_prefix('~').filter(|v| !v.starts_with('=')) {
            let version = version.trim();
            return format!(">={version},<{}", bump(version, usize::from(version.contains('.'))));
        }
        match clause {
            "" | "*" => String::new(),
            c if c.starts_with(|d: char| d.is_ascii_digit()) => format!("=={c}"),
            c => c.split_whitespace().collect::<Vec<_>>().join(""),
        }
    };
    // poetry also separates by white space: ">=1.0 <2.0".
    let joined = spec.trim().replace(" <", ",<").replace(" >", ",>").replace(" !", ",!").replace(",,", ",");
    joined.split(',').map(one).filter(|c| !c.is_empty()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
