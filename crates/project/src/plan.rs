//! What is installed, and with which commands.
//!
//! Order of preference:
//!
//! 1. `uv.lock`, else `poetry.lock`: the project's own answer to "which versions". With a lock, requirements files are
//!    left alone, except those for tests when the lock has no test dependencies.
//! 2. Requirements files: `requirements.txt`, and those for tests.
//! 3. The project itself, editable, which brings its `dependencies`; with extras.
//! 4. Dependency groups (PEP 735, poetry's, PDM's, uv's), as requirement strings.
//!
//! Test dependencies come from the first of these that has any: what is named for tests (`test`, `tests`, `testing`
//! as extra, group or requirements file); `[testenv]` of tox.ini and Hatch's environments; what is named `dev`. A later
//! one is not added on top: `dev` often means linters and tools that need a compiler.
//!
//! All of it goes into one pip command where that is possible (requirements with hashes need their own), so that pip
//! sees every wish at once and says so when they contradict each other, instead of one step undoing another's.
//!
//! pip runs with `-I`: the folder of a project may hold a `pip.py` or `json.py`, and must not be on pip's path.

use crate::{
    InspectOptions, PLAN_DIR, ProjectError, VENV_PYTHON,
    dependencies::{Dependencies, Lists},
    files, ini,
    lock::{self, Locked, Wanted},
    requirement::{self, Requirement, Truth, allows_python, normalise},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use toml::{Table, Value};

/// One command of the install.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InstallStep {
    /// What it installs, for people.
    pub label: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Run it in the project's folder (else anywhere).
    pub cwd_in_project: bool,
}

/// A file that has to be in the machine before the first step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanFile {
    /// Absolute path in the machine.
    pub path: String,
    /// What it holds.
    pub content: String,
}

/// A package that trialrun adds and the project does not declare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Added {
    /// Its name.
    pub package: String,
    /// Its version, known after the install ([`InstallPlan::fill_versions`]).
    pub version: Option<String>,
    /// What it is needed for.
    pub why: String,
}

/// The whole install.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct InstallPlan {
    /// Files to write first.
    pub files: Vec<PlanFile>,
    /// Commands, in order; the first that fails ends the install.
    pub steps: Vec<InstallStep>,
    /// Prints the installed versions of trialrun's tools as one JSON object; run it after the steps.
    pub probe: Vec<String>,
    /// Writes [`CONSTRAINTS`] from what is installed; run it before [`InstallPlan::tools_step`].
    pub freeze: Vec<String>,
    /// Versions that the project pins, by normalised name.
    pub pins: BTreeMap<String, String>,
    /// Names that the project declares anywhere, with the place; these never count as added by trialrun.
    pub declared: BTreeMap<String, String>,
    /// Facts worth telling.
    pub notes: Vec<String>,
    wants: Vec<(String, String)>,
}

/// Constraint file that keeps the tools from changing what the project installed.
pub const CONSTRAINTS: &str = "/var/lib/trialrun/plan/constraints.txt";

/// Reads versions from the metadata, which also knows editable and URL installs; `pip freeze` prints these in forms
/// that a constraint file may not hold.
pub(crate) const PROBE: &str = "import importlib.metadata as m,json\n\
def v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return None\n\
print(json.dumps({n:v(n) for n in ('pytest','pytest-cov','pytest-xdist') if v(n)}))";

pub(crate) const FREEZE: &str = "import importlib.metadata as m,re,sys\n\
ok=re.compile(r'[A-Za-z0-9._+!-]+').fullmatch\n\
d={(x.metadata['Name'] or '',x.version or '') for x in m.distributions()}\n\
open(sys.argv[1],'w').writelines(sorted(n+'=='+v+'\\n' for n,v in d if ok(n) and ok(v)))";

fn python(words: &[&str]) -> Vec<String> {
    std::iter::once(VENV_PYTHON).chain(["-I"]).chain(words.iter().copied()).map(str::to_owned).collect()
}

/// pip's words, after the interpreter and its `-I`.
pub(crate) const PIP_INSTALL: &str = "-m pip install --no-input --disable-pip-version-check --progress-bar=off";

fn pip_install() -> Vec<String> {
    python(&PIP_INSTALL.split(' ').collect::<Vec<_>>())
}

impl InstallPlan {
    /// Which tools are absent after the install and have to be added. `installed` is what [`InstallPlan::probe`]
    /// printed.
    #[must_use]
    pub fn tools_to_add(&self, installed: &BTreeMap<String, String>) -> Vec<Added> {
        let have: BTreeSet<String> = installed.keys().map(|k| normalise(k)).collect();
        let absent = self.wants.iter().filter(|(package, _)| !have.contains(package));
        absent.map(|(package, why)| Added { package: package.clone(), version: None, why: why.clone() }).collect()
    }

    /// The command that adds them without changing a version that is already there; `None` when there is nothing to
    /// add. Where the newest tool does not go with what is installed (pytest 6, say), pip takes an older one.
    #[must_use]
    pub fn tools_step(&self, added: &[Added]) -> Option<InstallStep> {
        if added.is_empty() {
            return None;
        }
        let mut argv = pip_install();
        argv.extend(["-c".to_owned(), CONSTRAINTS.to_owned()]);
        argv.extend(added.iter().map(|a| a.package.clone()));
        let names: Vec<&str> = added.iter().map(|a| a.package.as_str()).collect();
        Some(InstallStep { label: format!("added by trialrun: {}", names.join(", ")), argv, cwd_in_project: false })
    }

    /// Writes the versions that a second run of [`InstallPlan::probe`] printed into the list.
    pub fn fill_versions(&self, added: &mut [Added], installed: &BTreeMap<String, String>) {
        for a in added {
            a.version = installed.iter().find(|(name, _)| normalise(name) == a.package).map(|(_, v)| v.clone());
        }
    }
}

/// What was found in the folder, before it becomes commands.
struct Reader<'a> {
    root: &'a Path,
    pyproject: Table,
    setup_cfg: ini::Ini,
    setup_py: Option<String>,
    tox: ini::Ini,
    plan: InstallPlan,
}

/// Extras and groups that exist, with their requirement strings where they are known.
type Named = BTreeMap<String, Vec<String>>;

const TEST_NAMES: &[&str] = &["test", "tests", "testing"];
const DEV_NAMES: &[&str] = &["dev", "develop", "development"];
const TEST_FILES: &[&str] = &[
    "requirements-test.txt",
    "requirements-tests.txt",
    "requirements-testing.txt",
    "requirements_test.txt",
    "requirements_tests.txt",
    "test-requirements.txt",
    "test_requirements.txt",
    "tests-requirements.txt",
    "requirements/test.txt",
    "requirements/tests.txt",
    "requirements/testing.txt",
    "requirements/pytest.txt",
    "tests/requirements.txt",
];
const DEV_FILES: &[&str] = &[
    "requirements-dev.txt",
    "requirements_dev.txt",
    "dev-requirements.txt",
    "dev_requirements.txt",
    "requirements/dev.txt",
    "requirements/development.txt",
];

/// The chosen test dependencies.
#[derive(Default)]
struct Chosen {
    extras: BTreeSet<String>,
    groups: BTreeSet<String>,
    files: Vec<String>,
    strings: Vec<(String, String)>,
}

pub(crate) struct Outcome {
    pub plan: InstallPlan,
    pub dependencies: Option<Dependencies>,
    pub name: Option<String>,
    pub extras: Vec<String>,
    pub groups: Vec<String>,
    pub sources: Vec<String>,
}

pub(crate) fn read(root: &Path, pyproject: Option<Table>, options: &InspectOptions) -> Result<Outcome, ProjectError> {
    let ini_file = |name| files::text(root, name).map(|t| ini::parse(&t.unwrap_or_default()));
    let mut reader = Reader {
        root,
        setup_cfg: ini_file("setup.cfg")?,
        tox: ini_file("tox.ini")?,
        setup_py: files::text(root, "setup.py")?,
        pyproject: pyproject.unwrap_or_default(),
        plan: InstallPlan {
            probe: python(&["-c", PROBE]),
            freeze: python(&["-c", FREEZE, CONSTRAINTS]),
            ..InstallPlan::default()
        },
    };
    let tools = [
        (true, "pytest", "runs the suite"),
        (options.coverage, "pytest-cov", "measures coverage"),
        (options.parallel, "pytest-xdist", "spreads the tests over workers"),
    ];
    let wanted = tools.into_iter().filter(|(wanted, ..)| *wanted && !options.own_command);
    reader.plan.wants.extend(wanted.map(|(_, package, why)| (package.to_owned(), why.to_owned())));
    reader.run(options)
}

impl Reader<'_> {
    fn tool(&self, name: &str) -> Option<&Table> {
        self.pyproject.get("tool")?.as_table()?.get(name)?.as_table()
    }

    fn project(&self) -> Option<&Table> {
        self.pyproject.get("project")?.as_table()
    }

    fn name(&self) -> Option<String> {
        let named = |t: Option<&Table>| t.and_then(|t| t.get("name")).and_then(Value::as_str).map(str::to_owned);
        named(self.project())
            .or_else(|| named(self.tool("poetry")))
            .or_else(|| self.setup_cfg.get("metadata")?.get("name").cloned())
    }

    fn run(mut self, options: &InspectOptions) -> Result<Outcome, ProjectError> {
        let name = self.name();
        self.python_note();
        if options.no_install {
            // Nothing is installed, so nothing that is broken in these files is in the way.
            return Ok(Outcome {
                plan: self.plan,
                dependencies: None,
                name,
                extras: Vec::new(),
                groups: Vec::new(),
                sources: Vec::new(),
            });
        }
        let extras = self.extras();
        let groups = self.groups()?;
        let mut sources = Vec::new();
        let mut chosen = self.choose(options, &extras, &groups);

        let locked = self.lock(name.as_deref(), &chosen, &groups)?;
        let mut req_files: Vec<String> = Vec::new();
        if files::is_file(self.root, "requirements.txt") {
            match &locked {
                Some((file, _)) => {
                    self.plan.notes.push(format!("requirements.txt is not read: {file} is the project's lock"))
                }
                None => req_files.push("requirements.txt".to_owned()),
            }
        }
        let lock_has_tests = locked.is_some() && (!chosen.extras.is_empty() || !chosen.groups.is_empty());
        if lock_has_tests {
            chosen.files.clear();
        }
        req_files.append(&mut chosen.files);

        let mut installs_project = false;
        let mut together = Vec::new();
        let mut lists = Lists { whole: true, ..Lists::default() };
        let own = name.as_deref();
        for file in req_files {
            let Some(parsed) = requirement::read_file(self.root, &file)? else { continue };
            installs_project |= parsed.installs_project;
            self.note_requirements(&file, &parsed);
            sources.push(file.clone());
            lists.whole &= !parsed.more;
            if parsed.hashed {
                lists.hashed.push(parsed.by_name);
                let mut argv = pip_install();
                argv.extend(["-r".to_owned(), file.clone()]);
                self.plan.steps.push(InstallStep {
                    label: format!("{file} (with hashes)"),
                    argv,
                    cwd_in_project: true,
                });
            } else {
                lists.wanted.extend(parsed.by_name);
                lists.constraints.extend(parsed.constraints);
                together.extend(["-r".to_owned(), file]);
            }
        }

        let mut virtual_root = false;
        let has_lock = locked.is_some();
        if let Some((file, locked)) = locked {
            locked.lines.iter().for_each(|line| lists.want(line, own));
            virtual_root = locked.virtual_root;
            self.plan.notes.extend(locked.notes);
            for (package, version) in &locked.pins {
                self.plan.declared.entry(package.clone()).or_insert_with(|| file.to_owned());
                self.plan.pins.insert(package.clone(), version.clone());
            }
            let path = format!("{PLAN_DIR}/locked.txt");
            together.splice(0..0, ["-r".to_owned(), path.clone()]);
            let mut content = locked.lines.join("\n");
            content.push('\n');
            self.plan.files.push(PlanFile { path, content });
            sources.push(file.to_owned());
            self.group_strings(&chosen, &groups, false);
        } else {
            together.extend(self.group_strings(&chosen, &groups, true));
        }
        for (text, place) in &chosen.strings {
            together.extend(self.declare(text, place));
        }
        let mut words = together.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "-r" => drop(words.next()),
                text => lists.want(text, own),
            }
        }

        match self.installable(virtual_root) {
            Ok(()) => {
                let listed: Vec<&str> = chosen.extras.iter().map(String::as_str).collect();
                // A requirements file that installs the project has named it already; pip refuses neither, but a
                // second mention is only needed for the extras.
                if !installs_project || !listed.is_empty() {
                    let target = if listed.is_empty() { ".".to_owned() } else { format!(".[{}]", listed.join(",")) };
                    together.extend(["-e".to_owned(), target]);
                }
                let mut declared: Vec<String> =
                    self.dependencies().iter().filter_map(|text| self.declare(text, "dependencies")).collect();
                for extra in &chosen.extras {
                    for text in extras.get(extra).cloned().unwrap_or_default() {
                        declared.extend(self.declare(&text, &format!("extra {extra}")));
                    }
                }
                if !has_lock {
                    lists.whole &= self.dependencies_are_known(!chosen.extras.is_empty());
                    if lists.whole || self.project().is_some() {
                        declared.iter().for_each(|text| lists.want(text, own));
                    }
                }
                lists.build = self.build_requirements();
                sources.push("the project".to_owned());
            }
            Err(why) => {
                if let Some(why) = why {
                    self.plan.notes.push(why);
                }
                if self.plan.files.is_empty() {
                    let mut list = self.dependencies();
                    list.extend(chosen.extras.iter().filter_map(|e| extras.get(e)).flatten().cloned());
                    for text in list {
                        let declared = self.declare(&text, "pyproject.toml");
                        declared.iter().for_each(|text| lists.want(text, own));
                        together.extend(declared);
                    }
                }
            }
        }
        if !together.is_empty() {
            let mut argv = pip_install();
            let label = label(&together);
            argv.extend(together);
            self.plan.steps.push(InstallStep { label, argv, cwd_in_project: true });
        }
        for (file, what) in
            [("pdm.lock", "PDM's lock"), ("Pipfile.lock", "Pipenv's lock"), ("Pipfile", "Pipenv's list")]
        {
            if files::is_file(self.root, file) {
                self.plan
                    .notes
                    .push(format!("{file} is not read ({what} is not supported): export it to requirements.txt"));
            }
        }
        if !chosen.groups.is_empty() {
            sources.push(format!("groups {}", chosen.groups.iter().cloned().collect::<Vec<_>>().join(", ")));
        }
        lists.whole &= !installs_project || has_lock || self.dependencies_are_known(true);
        lists.tools = self.plan.wants.iter().map(|(package, _)| package.clone()).collect();
        Ok(Outcome {
            plan: self.plan,
            dependencies: Some(lists.finish()),
            name,
            extras: chosen.extras.into_iter().collect(),
            groups: chosen.groups.into_iter().collect(),
            sources,
        })
    }

    fn python_note(&mut self) {
        let own = |t: Option<&Table>, key: &str| t.and_then(|t| t.get(key)).and_then(Value::as_str).map(str::to_owned);
        let poetry = self.tool("poetry").and_then(|t| t.get("dependencies")).and_then(Value::as_table);
        let wanted = own(self.project(), "requires-python")
            .or_else(|| own(poetry, "python"))
            .or_else(|| self.setup_cfg.get("options")?.get("python_requires").cloned());
        let Some(wanted) = wanted else { return };
        match allows_python(&wanted) {
            Truth::No => self.plan.notes.push(format!(
                "the project asks for Python {wanted}; the machine has 3.11: its install will be refused"
            )),
            Truth::Unknown => self.plan.notes.push(format!(
                "the project asks for Python {wanted}; whether the machine's 3.11 is recent enough shows in the install"
            )),
            Truth::Yes => {}
        }
    }

    /// Extras that the project defines; requirement strings only where they are readable without running anything.
    fn extras(&self) -> Named {
        let mut extras = Named::new();
        let table = self.project().and_then(|p| p.get("optional-dependencies")).and_then(Value::as_table);
        for (name, list) in table.into_iter().flatten() {
            extras.insert(normalise(name), string_list(list));
        }
        let table = self.tool("poetry").and_then(|t| t.get("extras")).and_then(Value::as_table);
        for (name, list) in table.into_iter().flatten() {
            extras.entry(normalise(name)).or_insert_with(|| string_list(list));
        }
        let dynamic =
            self.tool("setuptools").and_then(|t| t.get("dynamic")).and_then(|d| d.get("optional-dependencies"));
        for name in dynamic.and_then(Value::as_table).into_iter().flatten().map(|(k, _)| k) {
            extras.entry(normalise(name)).or_default();
        }
        for (name, value) in self.setup_cfg.get("options.extras_require").into_iter().flatten() {
            extras.entry(normalise(name)).or_insert_with(|| ini::lines(value));
        }
        if let Some(text) = &self.setup_py {
            for name in setup_py_extras(text) {
                extras.entry(normalise(&name)).or_default();
            }
        }
        extras.retain(|name, _| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
        extras
    }

    /// Dependency groups with their includes resolved.
    fn groups(&mut self) -> Result<Named, ProjectError> {
        let mut groups = Named::new();
        let raw: BTreeMap<String, Value> = self
            .pyproject
            .get("dependency-groups")
            .and_then(Value::as_table)
            .into_iter()
            .flatten()
            .map(|(k, v)| (normalise(k), v.clone()))
            .collect();
        for name in raw.keys() {
            let mut out = Vec::new();
            self.group_into(&raw, name, &mut Vec::new(), &mut out)?;
            groups.insert(name.clone(), out);
        }
        if let Some(poetry) = self.tool("poetry") {
            let old = poetry.get("dev-dependencies").and_then(Value::as_table).map(|t| ("dev".to_owned(), t));
            let new = poetry.get("group").and_then(Value::as_table).into_iter().flatten();
            let new = new.filter_map(|(k, v)| Some((normalise(k), v.get("dependencies")?.as_table()?)));
            for (name, table) in old.into_iter().chain(new) {
                groups.entry(name).or_default().extend(table.iter().flat_map(|(k, v)| poetry_requirements(k, v)));
            }
        }
        let pdm = self.tool("pdm").and_then(|t| t.get("dev-dependencies")).and_then(Value::as_table);
        for (name, list) in pdm.into_iter().flatten() {
            groups.entry(normalise(name)).or_insert_with(|| string_list(list));
        }
        if let Some(list) = self.tool("uv").and_then(|t| t.get("dev-dependencies")) {
            groups.entry("dev".to_owned()).or_default().extend(string_list(list));
        }
        Ok(groups)
    }

    fn group_into(
        &mut self,
        raw: &BTreeMap<String, Value>,
        name: &str,
        chain: &mut Vec<String>,
        out: &mut Vec<String>,
    ) -> Result<(), ProjectError> {
        if chain.iter().any(|c| c == name) {
            chain.push(name.to_owned());
            let from = chain.iter().position(|c| c == name).unwrap_or(0);
            return Err(ProjectError::GroupCycle { chain: chain.split_off(from) });
        }
        // Doubling includes (each group includes the one before it twice) would grow without bound.
        if out.len() > 10_000 || chain.len() > 100 {
            return Ok(());
        }
        let Some(list) = raw.get(name).and_then(Value::as_array) else {
            self.plan.notes.push(format!("dependency group {name} is included but not defined"));
            return Ok(());
        };
        chain.push(name.to_owned());
        for item in list {
            match item {
                Value::String(text) if !out.contains(text) => out.push(text.clone()),
                Value::Table(table) => {
                    if let Some(other) = table.get("include-group").and_then(Value::as_str) {
                        self.group_into(raw, &normalise(other), chain, out)?;
                    }
                }
                _ => {}
            }
        }
        chain.pop();
        Ok(())
    }

    /// The test dependencies: those asked for, else the first rung of the ladder that holds any.
    fn choose(&mut self, options: &InspectOptions, extras: &Named, groups: &Named) -> Chosen {
        let mut chosen = Chosen::default();
        let asked =
            |kind: &str, wanted: &[String], have: &Named, into: &mut BTreeSet<String>, notes: &mut Vec<String>| {
                for name in wanted {
                    if have.contains_key(&normalise(name)) {
                        into.insert(normalise(name));
                    } else {
                        let list: Vec<&str> = have.keys().map(String::as_str).collect();
                        let list = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
                        notes.push(format!("the project has no {kind} {name} (it has: {list}): not asked for"));
                    }
                }
            };
        asked("extra", &options.extras, extras, &mut chosen.extras, &mut self.plan.notes);
        asked("dependency group", &options.groups, groups, &mut chosen.groups, &mut self.plan.notes);
        let root = self.root;
        let existing = |list: &[&str]| {
            list.iter().filter(|f| files::is_file(root, f)).map(|f| (*f).to_owned()).collect::<Vec<_>>()
        };
        let rung = |names: &[&str], file_names: &[&str]| {
            let pick = |have: &Named| {
                names.iter().filter(|n| have.contains_key(**n)).map(|n| (*n).to_owned()).collect::<BTreeSet<_>>()
            };
            (pick(extras), pick(groups), existing(file_names))
        };
        let explicit = (!options.extras.is_empty(), !options.groups.is_empty());
        let take = |found: (BTreeSet<String>, BTreeSet<String>, Vec<String>), chosen: &mut Chosen| {
            let any = !found.0.is_empty() || !found.1.is_empty() || !found.2.is_empty();
            if !explicit.0 {
                chosen.extras.extend(found.0);
            }
            if !explicit.1 {
                chosen.groups.extend(found.1);
            }
            chosen.files.extend(found.2);
            any
        };
        if take(rung(TEST_NAMES, TEST_FILES), &mut chosen)
            || explicit.0
            || explicit.1
            || self.tox(extras, groups, &mut chosen)
        {
            return chosen;
        }
        take(rung(DEV_NAMES, DEV_FILES), &mut chosen);
        chosen
    }

    /// `[testenv]` of tox.ini (or setup.cfg's, or pyproject's legacy form) and Hatch's environments.
    fn tox(&mut self, extras: &Named, groups: &Named, chosen: &mut Chosen) -> bool {
        let before = chosen.strings.len() + chosen.files.len() + chosen.extras.len() + chosen.groups.len();
        let legacy = self
            .tool("tox")
            .and_then(|t| t.get("legacy_tox_ini"))
            .and_then(Value::as_str)
            .map(ini::parse)
            .unwrap_or_default();
        let section = self.tox.get("testenv").or_else(|| legacy.get("testenv")).cloned().unwrap_or_default();
        for line in ini::lines(section.get("deps").map(String::as_str).unwrap_or_default()) {
            // Lines with a factor (`py39: x`), a substitution (`{[base]deps}`) or an option are tox's to understand.
            if let Some(file) = line.strip_prefix("-r").map(|f| f.trim().trim_start_matches("{toxinidir}/")) {
                if files::is_file(self.root, file) && !file.starts_with('/') && !file.contains("..") {
                    chosen.files.push(file.to_owned());
                }
            } else if let Some(list) = line.strip_prefix(".[").and_then(|l| l.strip_suffix(']')) {
                chosen.extras.extend(ini::words(list).iter().map(|e| normalise(e)).filter(|e| extras.contains_key(e)));
            } else if !line.contains('{') && Requirement::parse(&line).is_some() {
                chosen.strings.push((line, "tox.ini".to_owned()));
            }
        }
        let listed = |key: &str| ini::words(section.get(key).map(String::as_str).unwrap_or_default());
        chosen.extras.extend(listed("extras").iter().map(|e| normalise(e)).filter(|e| extras.contains_key(e)));
        chosen
            .groups
            .extend(listed("dependency_groups").iter().map(|e| normalise(e)).filter(|e| groups.contains_key(e)));
        let envs = self.tool("hatch").and_then(|t| t.get("envs")).and_then(Value::as_table);
        for name in ["hatch-test", "test", "default"] {
            let Some(env) = envs.and_then(|e| e.get(name)).and_then(Value::as_table) else { continue };
            for key in ["dependencies", "extra-dependencies"] {
                let list = env.get(key).map(string_list).unwrap_or_default();
                chosen.strings.extend(list.into_iter().map(|s| (s, format!("Hatch's environment {name}"))));
            }
            let features = env.get("features").map(string_list).unwrap_or_default();
            chosen.extras.extend(features.iter().map(|f| normalise(f)).filter(|f| extras.contains_key(f)));
        }
        chosen.strings.len() + chosen.files.len() + chosen.extras.len() + chosen.groups.len() > before
    }

    fn lock(
        &mut self,
        name: Option<&str>,
        chosen: &Chosen,
        groups: &Named,
    ) -> Result<Option<(&'static str, Locked)>, ProjectError> {
        let extras: Vec<String> = chosen.extras.iter().cloned().collect();
        let wanted_groups: Vec<String> = chosen.groups.iter().cloned().collect();
        if let Some(lock) = files::toml(self.root, "uv.lock")? {
            let wanted = Wanted { project: name, extras: &extras, groups: &wanted_groups, roots: &[] };
            if files::is_file(self.root, "poetry.lock") {
                self.plan.notes.push("poetry.lock is not read: uv.lock is there".to_owned());
            }
            return Ok(Some(("uv.lock", lock::uv(&lock, &wanted)?)));
        }
        if let Some(lock) = files::toml(self.root, "poetry.lock")? {
            let mut roots: Vec<Requirement> =
                self.dependencies().iter().filter_map(|d| Requirement::parse(d)).collect();
            let in_groups = chosen.groups.iter().filter_map(|g| groups.get(g)).flatten();
            roots.extend(in_groups.filter_map(|d| Requirement::parse(d)));
            let all = self.extras();
            let in_extras = chosen.extras.iter().filter_map(|e| all.get(e)).flatten();
            roots.extend(in_extras.filter_map(|d| Requirement::parse(d)));
            let wanted = Wanted { project: name, extras: &extras, groups: &wanted_groups, roots: &roots };
            return Ok(Some(("poetry.lock", lock::poetry(&lock, &wanted)?)));
        }
        Ok(None)
    }

    /// The project's own run-time dependencies, where they are readable.
    fn dependencies(&self) -> Vec<String> {
        let mut list = self.project().and_then(|p| p.get("dependencies")).map(string_list).unwrap_or_default();
        let poetry = self.tool("poetry").and_then(|t| t.get("dependencies")).and_then(Value::as_table);
        list.extend(
            poetry
                .into_iter()
                .flatten()
                .filter(|(k, _)| k.as_str() != "python")
                .filter(|(_, v)| !optional(v))
                .flat_map(|(k, v)| poetry_requirements(k, v)),
        );
        if let Some(value) = self.setup_cfg.get("options").and_then(|o| o.get("install_requires")) {
            list.extend(ini::lines(value));
        }
        list
    }

    /// Whether what the project itself depends on can be read without running anything of it.
    fn dependencies_are_known(&self, with_extras: bool) -> bool {
        let dynamic = |key: &str| {
            let list = self.project().and_then(|p| p.get("dynamic")).map(string_list).unwrap_or_default();
            list.iter().any(|name| name == key)
        };
        match self.project() {
            Some(_) => !(dynamic("dependencies") || with_extras && dynamic("optional-dependencies")),
            // An extra of poetry's names packages whose versions stand elsewhere.
            None => self.tool("poetry").is_some() && !with_extras,
        }
    }

    /// What the project's build needs (PEP 518), or what pip takes where it does not say.
    fn build_requirements(&self) -> Vec<String> {
        let system = self.pyproject.get("build-system").and_then(Value::as_table);
        let listed = system.and_then(|s| s.get("requires")).map(string_list);
        let mut list = listed.unwrap_or_else(|| vec!["setuptools>=40.8.0".to_owned()]);
        list.retain(|text| Requirement::parse(text).is_some_and(|r| r.url.is_none()));
        list
    }

    /// Whether `pip install -e .` makes sense; if not, why not (`None`: there is nothing to install).
    fn installable(&self, virtual_root: bool) -> Result<(), Option<String>> {
        let poetry_off =
            self.tool("poetry").and_then(|t| t.get("package-mode")).and_then(Value::as_bool) == Some(false);
        let uv_off = self.tool("uv").and_then(|t| t.get("package")).and_then(Value::as_bool) == Some(false);
        if virtual_root || poetry_off || uv_off {
            return Err(Some(
                "the project says that it is not a package: its dependencies are installed, itself not".to_owned(),
            ));
        }
        if self.pyproject.contains_key("build-system")
            || self.setup_py.is_some()
            || self.setup_cfg.get("metadata").is_some_and(|m| m.contains_key("name"))
        {
            return Ok(());
        }
        if self.project().is_none() {
            return Err(None);
        }
        // [project] without [build-system]: pip takes setuptools, which refuses a folder with several packages at its
        // top. uv treats such a project as no package at all.
        if self.tool("setuptools").is_some() || self.root.join("src").is_dir() || self.top_packages() <= 1 {
            return Ok(());
        }
        Err(Some("pyproject.toml has no [build-system] and the folder holds several packages: dependencies are installed, the project itself not".to_owned()))
    }

    fn top_packages(&self) -> usize {
        // What setuptools' flat layout passes over (FlatLayoutPackageFinder.DEFAULT_EXCLUDE), as far as it is common.
        const PASSED_OVER: &[&str] = &[
            "ci",
            "bin",
            "debian",
            "doc",
            "docs",
            "documentation",
            "manpages",
            "news",
            "newsfragments",
            "changelog",
            "test",
            "tests",
            "unit_test",
            "unit_tests",
            "example",
            "examples",
            "scripts",
            "tools",
            "util",
            "utils",
            "python",
            "build",
            "benchmark",
            "benchmarks",
            "exercise",
            "exercises",
            "htmlcov",
            "tasks",
            "fabfile",
            "site_scons",
        ];
        let Ok(list) = std::fs::read_dir(self.root) else { return 0 };
        let names = list.take(10_000).filter_map(Result::ok).filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let names = names.filter_map(|e| e.file_name().into_string().ok());
        names
            .filter(|n| {
                !PASSED_OVER.contains(&n.as_str())
                    && !n.starts_with(['.', '_'])
                    && n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            })
            .count()
    }

    /// Notes a requirement string and gives it back if it may stand on pip's command line: an option in the place of a
    /// requirement would be obeyed.
    fn declare(&mut self, text: &str, place: &str) -> Option<String> {
        let text = text.trim();
        let Some(r) = Requirement::parse(text) else {
            self.plan.notes.push(format!("{place}: {text:?} is not a requirement: passed over"));
            return None;
        };
        if let Some(version) = r.pin().filter(|_| r.applies()) {
            self.plan.pins.insert(r.name.clone(), version.to_owned());
        }
        self.plan.declared.entry(r.name).or_insert_with(|| place.to_owned());
        Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    fn group_strings(&mut self, chosen: &Chosen, groups: &Named, keep: bool) -> Vec<String> {
        let mut out = Vec::new();
        for name in &chosen.groups {
            for text in groups.get(name).cloned().unwrap_or_default() {
                if let Some(text) = self.declare(&text, &format!("group {name}"))
                    && keep
                    && !out.contains(&text)
                {
                    out.push(text);
                }
            }
        }
        out
    }

    fn note_requirements(&mut self, file: &str, parsed: &requirement::RequirementsFile) {
        for r in &parsed.requirements {
            self.plan.declared.entry(r.name.clone()).or_insert_with(|| file.to_owned());
            if let Some(version) = r.pin().filter(|_| r.applies()) {
                self.plan.pins.insert(r.name.clone(), version.to_owned());
            }
        }
        for index in &parsed.indexes {
            self.plan.notes.push(format!("{file} names another place for packages: {index}"));
        }
        for url in &parsed.remote {
            self.plan.notes.push(format!("{file} takes a package from {url}"));
        }
        for missing in &parsed.missing {
            self.plan.notes.push(format!("{file} names {missing}, which is not in the project"));
        }
    }
}

fn label(words: &[String]) -> String {
    let mut parts = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-r" => parts.extend(words.next().map(|f| match f.rsplit_once('/') {
                Some((PLAN_DIR, _)) => "the lock".to_owned(),
                _ => f.clone(),
            })),
            "-e" => parts.extend(words.next().map(|t| format!("the project ({t})"))),
            other => parts.push(other.to_owned()),
        }
    }
    if parts.len() > 6 {
        let rest = parts.len() - 5;
        parts.truncate(5);
        parts.push(format!("{rest} more"));
    }
    parts.join(", ")
}

fn string_list(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn optional(spec: &Value) -> bool {
    spec.get("optional").and_then(Value::as_bool) == Some(true)
}

/// A poetry dependency as requirement strings (a list has one for each alternative).
fn poetry_requirements(name: &str, spec: &Value) -> Vec<String> {
    match spec {
        Value::String(version) => vec![format!("{name}{}", crate::poetry_specifier(version))],
        Value::Array(items) => items.iter().flat_map(|i| poetry_requirements(name, i)).collect(),
        Value::Table(t) => {
            let text = |key: &str| t.get(key).and_then(Value::as_str);
            let extras = t.get("extras").map(string_list).unwrap_or_default();
            let mut out = name.to_owned();
            if !extras.is_empty() {
                out.push_str(&format!("[{}]", extras.join(",")));
            }
            let python = text("python").map(allows_python);
            if python == Some(Truth::No) {
                return Vec::new();
            }
            if let Some(git) = text("git") {
                let reference =
                    text("rev").or(text("tag")).or(text("branch")).map(|r| format!("@{r}")).unwrap_or_default();
                out.push_str(&format!(" @ git+{git}{reference}"));
            } else if let Some(url) = text("url") {
                out.push_str(&format!(" @ {url}"));
            } else if t.contains_key("path") {
                // A folder beside the project; pip needs an absolute URL for it, which only the lock step gives.
                return Vec::new();
            } else {
                out.push_str(&crate::poetry_specifier(text("version").unwrap_or("*")));
            }
            if let Some(marker) = text("markers") {
                out.push_str(&format!(" ; {marker}"));
            }
            vec![out]
        }
        _ => Vec::new(),
    }
}

/// Keys of a dictionary literal after `extras_require`, read as text. A dictionary that is computed gives none.
fn setup_py_extras(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let Some(at) = text.find("extras_require") else { return names };
    let rest = &text[at..];
    let Some(open) = rest.find('{').filter(|o| *o < 64) else { return names };
    let (mut depth, mut chars) = (0_usize, rest[open..].chars().peekable());
    while let Some(c) = chars.next() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            '#' => {
                for d in chars.by_ref() {
                    if d == '\n' {
                        break;
                    }
                }
            }
            '"' | '\'' => {
                let word: String = chars.by_ref().take_while(|d| *d != c).collect();
                while chars.next_if(|d| d.is_whitespace()).is_some() {}
                if depth == 1 && chars.peek() == Some(&':') {
                    names.push(word);
                }
            }
            _ => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_literal_dictionary_are_read_from_setup_py() {
        let text =
            "setup(name='x', extras_require={ 'test': ['a', \"b\"], # 'no': 1\n \"docs\": ['sphinx'] }, x={'y': 1})";
        assert_eq!(setup_py_extras(text), ["test", "docs"]);
        assert!(setup_py_extras("extras_require=EXTRAS)").is_empty());
    }

    #[test]
    fn poetry_dependencies_become_requirements() {
        let t: Table = "a = '^1.2'\nb = { version = '~0.3', extras = ['x'], markers = \"os_name == 'nt'\" }\nc = { git = 'https://h/c', rev = 'v1' }\nd = [{ version = '1', python = '<3.9' }, { version = '2', python = '>=3.9' }]".parse().unwrap();
        let all: Vec<String> = t.iter().flat_map(|(k, v)| poetry_requirements(k, v)).collect();
        assert_eq!(all, ["a>=1.2,<2", "b[x]>=0.3,<0.4 ; os_name == 'nt'", "c @ git+https://h/c@v1", "d==2"]);
    }
}
