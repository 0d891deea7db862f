//! Turns uv.lock and poetry.lock into pinned requirement lines that pip understands.
//!
//! A lock is a graph. Only what is reachable from the project with the chosen extras and groups is wanted; where the
//! project itself is not in the graph, everything is. Edges whose marker can't hold on CPython 3.11 on Linux are not
//! followed; an edge that can't be decided from outside keeps its marker, and pip decides in the machine. Hashes are
//! left out: pip knows them for a whole command or not at all, and a project installed from its folder has none.

use crate::{
    ProjectError,
    requirement::{Requirement, Truth, allows_python, marker_holds, normalise, release_order},
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use toml::{Table, Value};

/// What a lock file came to.
#[derive(Debug, Default)]
pub(crate) struct Locked {
    /// Requirement lines, sorted.
    pub lines: Vec<String>,
    /// Names and versions of those from an index.
    pub pins: BTreeMap<String, String>,
    pub notes: Vec<String>,
    /// The lock says that the project itself is not to be installed (uv's virtual projects).
    pub virtual_root: bool,
}

/// What is asked of the lock.
pub(crate) struct Wanted<'a> {
    pub project: Option<&'a str>,
    pub extras: &'a [String],
    pub groups: &'a [String],
    /// Roots for locks that don't hold the project (poetry).
    pub roots: &'a [Requirement],
}

#[derive(Debug, Clone, Default)]
struct Edge {
    name: String,
    version: Option<String>,
    marker: Option<String>,
    extras: Vec<String>,
}

#[derive(Debug, Default)]
struct Package {
    name: String,
    version: String,
    source: Source,
    /// Conditions under which this version is the chosen one, any of which is enough; empty for always.
    when: Vec<String>,
    edges: Vec<Edge>,
    extras: BTreeMap<String, Vec<Edge>>,
    groups: BTreeMap<String, Vec<Edge>>,
}

#[derive(Debug, Default, Clone, PartialEq)]
enum Source {
    #[default]
    Index,
    /// Another index than PyPI.
    OtherIndex(String),
    /// A requirement URL, after the `@`.
    Url(String),
    /// A folder or file of the project.
    Path { path: String, editable: bool },
    /// The project itself, or a virtual member: never a requirement.
    Root { installable: bool },
}

fn broken(file: &str, message: String) -> ProjectError {
    ProjectError::Broken { path: file.into(), line: None, column: None, message }
}

fn text(table: &Table, key: &str) -> Option<String> {
    table.get(key).and_then(Value::as_str).map(str::to_owned)
}

fn strings(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        Some(Value::String(one)) => vec![one.clone()],
        _ => Vec::new(),
    }
}

fn packages<'a>(file: &str, lock: &'a Table) -> Result<Vec<&'a Table>, ProjectError> {
    match lock.get("package") {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => items
            .iter()
            .enumerate()
            .map(|(i, p)| p.as_table().ok_or_else(|| broken(file, format!("package {} is not a table", i + 1))))
            .collect(),
        Some(_) => Err(broken(file, "`package` is not a list of tables".to_owned())),
    }
}

/// Reads uv.lock.
pub(crate) fn uv(lock: &Table, wanted: &Wanted<'_>) -> Result<Locked, ProjectError> {
    const FILE: &str = "uv.lock";
    match lock.get("version").and_then(Value::as_integer) {
        Some(1) => {}
        Some(other) => return Err(broken(FILE, format!("has format version {other}; this trialrun reads version 1"))),
        None => return Err(broken(FILE, "has no format version".to_owned())),
    }
    let edges = |value: Option<&Value>| -> Vec<Edge> {
        let items = value.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        items
            .iter()
            .filter_map(Value::as_table)
            .filter_map(|t| {
                Some(Edge {
                    name: normalise(t.get("name")?.as_str()?),
                    version: text(t, "version"),
                    marker: text(t, "marker"),
                    extras: strings(t.get("extra")),
                })
            })
            .collect()
    };
    let by_name = |value: Option<&Value>| -> BTreeMap<String, Vec<Edge>> {
        let table = value.and_then(Value::as_table);
        table.into_iter().flatten().map(|(k, v)| (normalise(k), edges(Some(v)))).collect()
    };
    let mut graph = Vec::new();
    let main = main_registry(packages(FILE, lock)?);
    for p in packages(FILE, lock)? {
        let name = text(p, "name").ok_or_else(|| broken(FILE, "a package has no name".to_owned()))?;
        let source = p.get("source").and_then(Value::as_table).map_or(Source::Index, |s| uv_source(s, main.as_deref()));
        let version = text(p, "version").unwrap_or_default();
        if version.is_empty() && matches!(source, Source::Index | Source::OtherIndex(_)) {
            return Err(broken(FILE, format!("package {name} has no version")));
        }
        graph.push(Package {
            name: normalise(&name),
            version,
            source,
            when: strings(p.get("resolution-markers")),
            edges: edges(p.get("dependencies")),
            extras: by_name(p.get("optional-dependencies")),
            groups: by_name(p.get("dev-dependencies")),
        });
    }
    let root = graph
        .iter()
        .position(|p| matches!(p.source, Source::Root { .. }) && wanted.project.is_none_or(|n| normalise(n) == p.name));
    let starts = root.map(|i| {
        let mut starts = graph[i].edges.clone();
        starts.extend(wanted.extras.iter().filter_map(|e| graph[i].extras.get(&normalise(e))).flatten().cloned());
        starts.extend(wanted.groups.iter().filter_map(|g| graph[i].groups.get(&normalise(g))).flatten().cloned());
        starts
    });
    let mut locked = resolve(FILE, &graph, starts);
    locked.virtual_root = root.is_some_and(|i| graph[i].source == Source::Root { installable: false });
    Ok(locked)
}

/// The registry that most packages come from. It stands for the index that the machine's pip is configured for, a mirror
/// of it perhaps; a package from another one is told.
fn main_registry<'a>(packages: impl IntoIterator<Item = &'a Table>) -> Option<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for source in packages.into_iter().filter_map(|p| p.get("source")?.as_table()) {
        if let Some(url) = text(source, "registry") {
            *counts.entry(url).or_default() += 1;
        }
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(url, _)| url)
}

fn uv_source(source: &Table, main: Option<&str>) -> Source {
    if let Some(url) = text(source, "registry") {
        return if main == Some(url.as_str()) { Source::Index } else { Source::OtherIndex(url) };
    }
    if let Some(git) = text(source, "git") {
        // `https://host/repo?rev=v1&subdirectory=x#<commit>`: pip wants `git+https://host/repo@<commit>#subdirectory=x`.
        let (address, commit) = git.split_once('#').unwrap_or((&git, ""));
        let (base, query) = address.split_once('?').unwrap_or((address, ""));
        let subdirectory = query.split('&').find_map(|kv| kv.strip_prefix("subdirectory="));
        return Source::Url(git_url(base, commit, subdirectory));
    }
    if let Some(url) = text(source, "url") {
        return Source::Url(url);
    }
    if let Some(path) = text(source, "path").or_else(|| text(source, "directory")) {
        return Source::Path { path, editable: false };
    }
    if let Some(path) = text(source, "virtual") {
        return if path == "." { Source::Root { installable: false } } else { Source::Path { path, editable: true } };
    }
    match text(source, "editable") {
        Some(path) if path == "." => Source::Root { installable: true },
        Some(path) => Source::Path { path, editable: true },
        None => Source::Index,
    }
}

fn git_url(base: &str, commit: &str, subdirectory: Option<&str>) -> String {
    let mut url = if base.starts_with("git+") { base.to_owned() } else { format!("git+{base}") };
    if !commit.is_empty() {
        url.push('@');
        url.push_str(commit);
    }
    if let Some(dir) = subdirectory.filter(|d| !d.is_empty()) {
        url.push_str("#subdirectory=");
        url.push_str(dir);
    }
    url
}

/// Reads poetry.lock (format versions 1 and 2).
pub(crate) fn poetry(lock: &Table, wanted: &Wanted<'_>) -> Result<Locked, ProjectError> {
    const FILE: &str = "poetry.lock";
    let format = lock.get("metadata").and_then(Value::as_table).and_then(|m| text(m, "lock-version"));
    match format.as_deref().and_then(|f| f.split('.').next()) {
        Some("1" | "2") => {}
        Some(_) => {
            let format = format.unwrap_or_default();
            return Err(broken(FILE, format!("has format version {format}; this trialrun reads versions 1 and 2")));
        }
        None => return Err(broken(FILE, "has no metadata.lock-version".to_owned())),
    }
    let mut graph = Vec::new();
    for p in packages(FILE, lock)? {
        let name = text(p, "name").ok_or_else(|| broken(FILE, "a package has no name".to_owned()))?;
        let version = text(p, "version").ok_or_else(|| broken(FILE, format!("package {name} has no version")))?;
        // A version that isn't for this Python stands beside one that is.
        if text(p, "python-versions").is_some_and(|v| allows_python(&v) == Truth::No) {
            continue;
        }
        let when = match p.get("markers") {
            Some(Value::String(marker)) => vec![marker.clone()],
            // A table holds one marker a group; a group without one means "always".
            Some(Value::Table(groups)) if strings(p.get("groups")).iter().all(|g| groups.contains_key(g)) => {
                groups.values().filter_map(Value::as_str).map(str::to_owned).collect()
            }
            _ => Vec::new(),
        };
        let mut edges = Vec::new();
        let mut optional = BTreeMap::new();
        for (dependency, spec) in p.get("dependencies").and_then(Value::as_table).into_iter().flatten() {
            let specs = match spec {
                Value::Array(items) => items.iter().collect(),
                one => vec![one],
            };
            for spec in specs {
                let table = spec.as_table();
                let edge = Edge {
                    name: normalise(dependency),
                    version: None,
                    marker: table.and_then(|t| text(t, "markers")),
                    extras: table.map(|t| strings(t.get("extras"))).unwrap_or_default(),
                };
                if table.and_then(|t| t.get("optional")).and_then(Value::as_bool) == Some(true) {
                    optional.insert(edge.name.clone(), edge);
                } else {
                    edges.push(edge);
                }
            }
        }
        let mut extras: BTreeMap<String, Vec<Edge>> = BTreeMap::new();
        for (extra, list) in p.get("extras").and_then(Value::as_table).into_iter().flatten() {
            let names = strings(Some(list)).into_iter().filter_map(|l| Requirement::parse(&l).map(|r| r.name));
            extras
                .insert(normalise(extra), names.filter_map(|n| optional.get(&n).cloned()).map(without_extra).collect());
        }
        let source = p.get("source").and_then(Value::as_table).map_or(Source::Index, poetry_source);
        graph.push(Package { name: normalise(&name), version, source, when, edges, extras, groups: BTreeMap::new() });
    }
    let starts = (!wanted.roots.is_empty()).then(|| {
        let edge = |r: &Requirement| Edge {
            name: r.name.clone(),
            marker: r.marker.clone(),
            extras: r.extras.clone(),
            version: None,
        };
        wanted.roots.iter().map(edge).collect()
    });
    Ok(resolve(FILE, &graph, starts))
}

/// The marker of an optional dependency says `extra == "x"`; the extra was followed, so that part holds.
fn without_extra(mut edge: Edge) -> Edge {
    if edge.marker.as_deref().is_some_and(|m| m.contains("extra")) {
        edge.marker = None;
    }
    edge
}

fn poetry_source(source: &Table) -> Source {
    let url = text(source, "url").unwrap_or_default();
    match text(source, "type").as_deref() {
        Some("git") => {
            let commit = text(source, "resolved_reference").or_else(|| text(source, "reference")).unwrap_or_default();
            Source::Url(git_url(&url, &commit, text(source, "subdirectory").as_deref()))
        }
        Some("url") => Source::Url(url),
        Some("directory") if matches!(url.as_str(), "." | "") => Source::Root { installable: true },
        Some("directory" | "file") => Source::Path { path: url, editable: false },
        Some("legacy") => Source::OtherIndex(url),
        _ => Source::Index,
    }
}

fn resolve(file: &str, graph: &[Package], starts: Option<Vec<Edge>>) -> Locked {
    let mut locked = Locked::default();
    // Package index to the markers it is reached by; `None` among them means "always".
    let mut reached: BTreeMap<usize, BTreeSet<Option<String>>> = BTreeMap::new();
    match starts {
        None => {
            locked
                .notes
                .push(format!("{file} does not say which packages are the project's own: all of them are installed"));
            for (i, p) in graph.iter().enumerate().filter(|(_, p)| holds(p)) {
                reached.insert(
                    i,
                    if p.when.is_empty() { [None].into() } else { p.when.iter().cloned().map(Some).collect() },
                );
            }
        }
        Some(starts) => {
            let mut queue: VecDeque<Edge> = starts.into();
            let mut followed_extras: BTreeSet<(usize, String)> = BTreeSet::new();
            while let Some(edge) = queue.pop_front() {
                if edge.marker.as_deref().is_some_and(|m| marker_holds(m) == Truth::No) {
                    continue;
                }
                let candidates = graph.iter().enumerate().filter(|(_, p)| p.name == edge.name && holds(p));
                let chosen: Vec<_> =
                    candidates.filter(|(_, p)| edge.version.as_ref().is_none_or(|v| *v == p.version)).collect();
                if chosen.is_empty() {
                    locked.notes.push(format!("{file} names {} but does not pin it for this Python", edge.name));
                }
                for (i, p) in chosen {
                    // A marker that is certain to hold is as good as none.
                    let undecided = edge.marker.clone().filter(|m| marker_holds(m) == Truth::Unknown);
                    let first = !reached.contains_key(&i);
                    reached.entry(i).or_default().insert(undecided);
                    if first {
                        queue.extend(p.edges.iter().cloned());
                    }
                    for extra in &edge.extras {
                        if followed_extras.insert((i, normalise(extra))) {
                            queue.extend(p.extras.get(&normalise(extra)).into_iter().flatten().cloned());
                        }
                    }
                }
            }
        }
    }
    // Where two versions of one package are left over with nothing to tell them apart, pip could install neither.
    let mut best: BTreeMap<&str, usize> = BTreeMap::new();
    let mut rivals: BTreeSet<&str> = BTreeSet::new();
    for &i in reached.keys() {
        let p = &graph[i];
        if let Some(&other) = best.get(p.name.as_str()) {
            rivals.insert(&p.name);
            if release_order(&p.version, &graph[other].version).is_lt() {
                continue;
            }
        }
        best.insert(&p.name, i);
    }
    for name in &rivals {
        let version = best.get(name).map(|i| graph[*i].version.as_str()).unwrap_or_default();
        locked.notes.push(format!("{file} pins {name} to more than one version for this Python: {version} is taken"));
    }
    let mut indexes = BTreeSet::new();
    for (i, markers) in &reached {
        let p = &graph[*i];
        if best.get(p.name.as_str()) != Some(i) {
            continue;
        }
        let marker = if markers.contains(&None) {
            String::new()
        } else {
            let all: Vec<String> = markers
                .iter()
                .flatten()
                .map(|m| if markers.len() > 1 { format!("({m})") } else { m.clone() })
                .collect();
            format!(" ; {}", all.join(" or "))
        };
        match &p.source {
            Source::Root { .. } => {}
            Source::Index | Source::OtherIndex(_) => {
                if let Source::OtherIndex(url) = &p.source {
                    indexes.insert(url.clone());
                }
                locked.pins.insert(p.name.clone(), p.version.clone());
                locked.lines.push(format!("{}=={}{marker}", p.name, p.version));
            }
            Source::Url(url) => {
                if url.starts_with("git+") {
                    locked.notes.push(format!(
                        "{file} takes {} from {url}: git must be in the machine and the host reachable",
                        p.name
                    ));
                }
                locked.lines.push(format!("{} @ {url}{marker}", p.name));
            }
            Source::Path { path, editable } => {
                // A requirement line is data of a hostile file: one that leaves the project is told, never followed.
                if path.starts_with('/') || path.split('/').any(|c| c == "..") {
                    locked.notes.push(format!(
                        "{file} takes {} from {path}, outside the project: not uploaded, not installed",
                        p.name
                    ));
                } else {
                    let path = path.trim_start_matches("./");
                    locked.lines.push(if *editable { format!("-e ./{path}") } else { format!("./{path}") });
                }
            }
        }
    }
    for url in indexes {
        locked.notes.push(format!("{file} takes packages from {url}: pip must be told of that index and reach it"));
    }
    // Text of the lock goes into a file of lines: a line break in it would add a line of its own.
    locked.lines.retain(|l| !l.contains(['\n', '\r']));
    locked.lines.sort();
    locked
}

fn holds(p: &Package) -> bool {
    p.when.is_empty() || p.when.iter().any(|m| marker_holds(m) != Truth::No)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted<'a>(extras: &'a [String], groups: &'a [String], roots: &'a [Requirement]) -> Wanted<'a> {
        Wanted { project: Some("demo"), extras, groups, roots }
    }

    const UV: &str = r#"
version = 1
requires-python = ">=3.9"
[[package]]
name = "demo"
version = "0.1"
source = { editable = "." }
dependencies = [{ name = "Rich", marker = "platform_machine == 'x86_64'" }, { name = "tomli", marker = "python_full_version < '3.11'" }, { name = "fork", version = "2", marker = "python_full_version >= '3.10'" }, { name = "fork", version = "1", marker = "python_full_version < '3.10'" }]
[package.optional-dependencies]
web = [{ name = "httpx", extra = ["http2"] }]
[package.dev-dependencies]
test = [{ name = "pytest" }, { name = "gitty" }, { name = "member" }, { name = "away" }]
[[package]]
name = "rich"
version = "13.0"
source = { registry = "https://index.test/simple" }
[[package]]
name = "tomli"
version = "2"
source = { registry = "https://index.test/simple" }
[[package]]
name = "fork"
version = "1"
source = { registry = "https://index.test/simple" }
resolution-markers = ["python_full_version < '3.10'"]
[[package]]
name = "fork"
version = "2"
source = { registry = "https://index.test/simple" }
resolution-markers = ["python_full_version >= '3.10'"]
[[package]]
name = "httpx"
version = "0.27"
source = { registry = "https://mirror.corp/simple" }
[package.optional-dependencies]
http2 = [{ name = "h2" }]
[[package]]
name = "h2"
version = "4"
source = { registry = "https://index.test/simple" }
[[package]]
name = "pytest"
version = "8.1.1"
source = { registry = "https://index.test/simple" }
dependencies = [{ name = "rich" }]
[[package]]
name = "gitty"
version = "1"
source = { git = "https://h/r?rev=v1&subdirectory=py#abc123" }
[[package]]
name = "member"
version = "1"
source = { editable = "packages/member" }
[[package]]
name = "away"
version = "1"
source = { directory = "../away" }
"#;

    #[test]
    fn uv_lock_gives_what_the_root_reaches() {
        let lock: Table = UV.parse().unwrap();
        let plain = uv(&lock, &wanted(&[], &[], &[])).unwrap();
        assert_eq!(plain.lines, ["fork==2", "rich==13.0 ; platform_machine == 'x86_64'"]);
        let all = uv(&lock, &wanted(&["web".into()], &["test".into()], &[])).unwrap();
        assert_eq!(
            all.lines,
            [
                "-e ./packages/member",
                "fork==2",
                "gitty @ git+https://h/r@abc123#subdirectory=py",
                "h2==4",
                "httpx==0.27",
                "pytest==8.1.1",
                "rich==13.0"
            ]
        );
        assert_eq!(all.pins["pytest"], "8.1.1");
        assert!(
            all.notes.iter().any(|n| n.contains("mirror.corp")) && all.notes.iter().any(|n| n.contains("../away")),
            "{:?}",
            all.notes
        );
    }

    #[test]
    fn poetry_lock_follows_roots_extras_and_markers() {
        let lock: Table = r#"
[[package]]
name = "Requests"
version = "2.31"
python-versions = ">=3.7"
groups = ["main"]
[package.dependencies]
idna = ">=2"
colorama = { version = "*", markers = "sys_platform == \"win32\"" }
pysocks = { version = ">=1", optional = true, markers = "extra == \"socks\"" }
[package.extras]
socks = ["PySocks (>=1)"]
[[package]]
name = "idna"
version = "3.4"
python-versions = ">=3.5"
[[package]]
name = "colorama"
version = "0.4"
python-versions = "*"
[[package]]
name = "pysocks"
version = "1.7"
python-versions = "*"
[[package]]
name = "dual"
version = "1"
python-versions = "<3.10"
[[package]]
name = "dual"
version = "2"
python-versions = "^3.10"
[package.source]
type = "git"
url = "https://h/dual"
resolved_reference = "def"
[metadata]
lock-version = "2.0"
"#
        .parse()
        .unwrap();
        let roots = [Requirement::parse("requests").unwrap(), Requirement::parse("dual").unwrap()];
        let got = poetry(&lock, &wanted(&[], &[], &roots)).unwrap();
        assert_eq!(got.lines, ["dual @ git+https://h/dual@def", "idna==3.4", "requests==2.31"]);
        let all = poetry(&lock, &wanted(&[], &[], &[])).unwrap();
        assert_eq!(all.lines.len(), 5);
    }

    #[test]
    fn locks_of_another_shape_are_errors_not_panics() {
        for bad in [
            "",
            "version = 2",
            "version = 1\npackage = 3",
            "version = 1\n[[package]]\nversion='1'",
            "version = 1\npackage = [1]",
        ] {
            assert!(uv(&bad.parse().unwrap(), &wanted(&[], &[], &[])).is_err(), "{bad}");
        }
        for bad in ["", "[metadata]\nlock-version = '3.0'", "[metadata]\nlock-version = '2.0'\n[[package]]\nname='x'"] {
            assert!(poetry(&bad.parse().unwrap(), &wanted(&[], &[], &[])).is_err(), "{bad}");
        }
    }
}
