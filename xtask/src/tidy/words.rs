//! Words that must not be in a file: paths of the machine it was written on, and hosts of package registries, which are
//! asked of the clients where they are needed.

use crate::cargo::Workspace;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

/// Written by clients themselves, with their registries' hosts.
const LOCK_FILES: &[&str] = &["Cargo.lock", "package-lock.json", "uv.lock", "poetry.lock"];

/// All that is wrong.
pub fn check(workspace: &Workspace, files: &[PathBuf]) -> Vec<String> {
    let paths = machine_paths(&workspace.root);
    let hosts = registry_hosts();
    let mut problems = Vec::new();
    for file in files {
        let Some(text) = workspace.text(file) else { continue };
        let is_lock = file.extension().is_some_and(|e| e == "lock")
            || file.file_name().is_some_and(|name| LOCK_FILES.iter().any(|lock| *lock == name));
        for (number, line) in text.lines().enumerate() {
            let at = || format!("{}:{}", file.display(), number + 1);
            if let Some(path) = paths.iter().find(|path| has_path(line, path)) {
                problems.push(format!("{}: {path} is a path of this machine", at()));
            }
            if let Some(host) = hosts.iter().find(|host| !is_lock && line.contains(host.as_str())) {
                problems
                    .push(format!("{}: {host} is a package registry's host; ask the client for it at run time", at()));
            }
        }
    }
    problems
}

/// The checkout, what lies beside it, and the user's home.
fn machine_paths(root: &Path) -> BTreeSet<String> {
    let mut paths = BTreeSet::from([root.to_owned()]);
    // What lies beside a checkout right below these is not ours to have an opinion on.
    if let Some(parent) = root.parent().filter(|p| p.components().count() > 1 && *p != std::env::temp_dir()) {
        let beside = std::fs::read_dir(parent).into_iter().flatten().flatten();
        paths.extend(beside.filter(|e| e.path().is_dir()).map(|e| e.path()));
    }
    // root's home is the same on every machine.
    paths.extend(std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.components().count() > 2));
    paths.iter().filter(|path| path.components().count() > 2).map(|path| path.display().to_string()).collect()
}

/// Whether the line has the path as a whole: not the beginning of a longer name, nor the end of a longer path.
fn has_path(line: &str, path: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + path.len()..].chars().next();
        !before.is_some_and(is_name) && !after.is_some_and(is_name)
    })
}

/// What the clients on this machine say. One that is not there has no say.
fn registry_hosts() -> BTreeSet<String> {
    let pip = "from pip._internal.models.index import PyPI; print(PyPI.netloc); print(PyPI.file_storage_domain)";
    let asked: [&[&str]; 5] = [
        &["python3", "-c", pip],
        &["pip", "config", "get", "global.index-url"],
        &["npm", "config", "get", "registry"],
        &["go", "env", "GOPROXY"],
        &["gem", "sources", "--list"],
    ];
    let mut hosts = BTreeSet::new();
    for words in asked {
        // Outside of any project, whose own settings are not the machine's.
        let Ok(output) = Command::new(words[0]).args(&words[1..]).current_dir("/").output() else { continue };
        if output.status.success() {
            hosts.extend(String::from_utf8_lossy(&output.stdout).split([',', '|', '\n', ' ']).filter_map(host));
        }
    }
    hosts
}

/// The host of a URL, or a bare host name; nothing that names this machine.
fn host(text: &str) -> Option<String> {
    let text = text.trim();
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let name = rest.split('/').next()?.rsplit('@').next()?.split(':').next()?;
    let good = name.contains('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-'));
    (good && name.parse::<std::net::IpAddr>().is_err()).then(|| name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_as_a_whole() {
        assert!(has_path("see /home/me/x/y", "/home/me/x"));
        assert!(has_path("`/home/me/x`", "/home/me/x"));
        assert!(!has_path("/home/me/xylophone", "/home/me/x"));
        assert!(!has_path("a/home/me/x", "/home/me/x"));
    }

    #[test]
    fn hosts_are_read_from_what_clients_print() {
        assert_eq!(host("https://user:pw@mirror.example.com:8443/simple/"), Some("mirror.example.com".into()));
        assert_eq!(host("files.example.org"), Some("files.example.org".into()));
        for text in ["", "direct", "off", "undefined", "http://127.0.0.1:3141/", "localhost", "***"] {
            assert_eq!(host(text), None, "{text}");
        }
    }
}
