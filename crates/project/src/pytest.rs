//! Reads how pytest is configured, as pytest itself finds it: the first file in its own order that counts.

use crate::{ProjectError, files, ini};
use serde::Serialize;
use std::path::Path;
use toml::{Table, Value};

/// What the project's pytest configuration says that matters to a command line of ours.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PytestConfig {
    /// The file that pytest takes its configuration from.
    pub file: Option<String>,
    /// `addopts`, split as a shell would.
    pub addopts: Vec<String>,
    /// `testpaths`.
    pub testpaths: Vec<String>,
    /// `required_plugins`, as requirement strings.
    pub required_plugins: Vec<String>,
    /// Warnings become errors (`filterwarnings = error`, `-W error`).
    pub strict_warnings: bool,
}

impl PytestConfig {
    /// Whether `addopts` holds this option, alone or with `=value`.
    pub(crate) fn has(&self, option: &str) -> bool {
        self.addopts.iter().any(|a| a == option || a.strip_prefix(option).is_some_and(|rest| rest.starts_with('=')))
    }

    /// Whether a plugin is switched off by `-p no:name`.
    pub(crate) fn blocks(&self, names: &[&str]) -> bool {
        let mut previous = "";
        self.addopts.iter().any(|arg| {
            let value = arg.strip_prefix("-p").filter(|v| !v.is_empty()).or((previous == "-p").then_some(arg.as_str()));
            previous = arg;
            value.and_then(|v| v.trim().strip_prefix("no:")).is_some_and(|n| names.contains(&n))
        })
    }

    /// Whether plugins of installed packages are not loaded by themselves.
    pub(crate) fn no_autoload(&self) -> bool {
        self.has("--disable-plugin-autoload")
    }
}

pub(crate) fn read(root: &Path, pyproject: Option<&Table>) -> Result<PytestConfig, ProjectError> {
    // pytest 9's order. The first two count even when they are empty.
    for name in ["pytest.toml", ".pytest.toml"] {
        if let Some(table) = files::toml(root, name)? {
            return Ok(from_table(name, table.get("pytest").and_then(Value::as_table)));
        }
    }
    for name in ["pytest.ini", ".pytest.ini"] {
        if let Some(text) = files::text(root, name)? {
            return Ok(from_ini(name, ini::parse(&text).get("pytest")));
        }
    }
    if let Some(tool) = pyproject.and_then(|p| p.get("tool")).and_then(|t| t.get("pytest")).and_then(Value::as_table) {
        let options = tool.get("ini_options").and_then(Value::as_table).unwrap_or(tool);
        return Ok(from_table("pyproject.toml", Some(options)));
    }
    for (name, section) in [("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")] {
        if let Some(text) = files::text(root, name)?
            && let Some(keys) = ini::parse(&text).get(section)
        {
            return Ok(from_ini(name, Some(keys)));
        }
    }
    Ok(PytestConfig::default())
}

fn from_ini(file: &str, keys: Option<&std::collections::BTreeMap<String, String>>) -> PytestConfig {
    let value = |key: &str| keys.and_then(|k| k.get(key)).map(String::as_str).unwrap_or_default();
    let addopts = split(value("addopts"));
    PytestConfig {
        file: Some(file.to_owned()),
        testpaths: split(value("testpaths")),
        required_plugins: split(value("required_plugins")),
        strict_warnings: strict(&ini::lines(value("filterwarnings")), &addopts),
        addopts,
    }
}

fn from_table(file: &str, table: Option<&Table>) -> PytestConfig {
    let list = |key: &str| match table.and_then(|t| t.get(key)) {
        Some(Value::String(text)) => split(text),
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let filters: Vec<String> = match table.and_then(|t| t.get("filterwarnings")) {
        Some(Value::String(text)) => ini::lines(text),
        _ => list("filterwarnings"),
    };
    let addopts = list("addopts");
    PytestConfig {
        file: Some(file.to_owned()),
        testpaths: list("testpaths"),
        required_plugins: list("required_plugins"),
        strict_warnings: strict(&filters, &addopts),
        addopts,
    }
}

fn strict(filters: &[String], addopts: &[String]) -> bool {
    let mut previous = "";
    filters.iter().any(|f| f.trim().starts_with("error"))
        || addopts.iter().any(|a| {
            let hit = a.starts_with("-Werror")
                || a.starts_with("--pythonwarnings=error")
                || (previous == "-W" && a.starts_with("error"));
            previous = a;
            hit
        })
}

/// Splits as `shlex` does. An open quote ends with the text.
pub(crate) fn split(text: &str) -> Vec<String> {
    let (mut words, mut word, mut open, mut quote) = (Vec::new(), String::new(), false, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some('"') | None, '\\') => {
                word.extend(chars.next());
                open = true;
            }
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                open = true;
            }
            (None, '#') if !open => {
                // pytest's own ini values may end in a comment line.
                for d in chars.by_ref() {
                    if d == '\n' {
                        break;
                    }
                }
            }
            (None, c) if c.is_whitespace() => {
                if open {
                    words.push(std::mem::take(&mut word));
                }
                open = false;
            }
            (None, c) => {
                word.push(c);
                open = true;
            }
        }
    }
    if open {
        words.push(word);
    }
    words
}

/// What the project's own coverage configuration holds that could change a suite's outcome when coverage is measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CoverageConfig {
    /// The file that coverage takes its configuration from.
    pub file: Option<String>,
    /// Settings that could do so, with the reason.
    pub hazards: Vec<String>,
}

/// Settings of `[run]` that only say what is measured and where it is written.
const HARMLESS_RUN: &[&str] = &[
    "branch",
    "omit",
    "source",
    "source_pkgs",
    "source_dirs",
    "parallel",
    "relative_files",
    "disable_warnings",
    "data_file",
    "cover_pylib",
    "context",
    "command_line",
];

/// Settings that at worst make coverage warn, which only hurts where warnings are errors.
const WARNING_RUN: &[&str] = &["include", "core"];

pub(crate) fn read_coverage(
    root: &Path,
    pyproject: Option<&Table>,
    strict_warnings: bool,
) -> Result<CoverageConfig, ProjectError> {
    // Coverage's own order; the first file that holds anything of coverage's counts.
    for (name, prefix) in [(".coveragerc", ""), ("setup.cfg", "coverage:"), ("tox.ini", "coverage:")] {
        let Some(text) = files::text(root, name)? else { continue };
        let ini = ini::parse(&text);
        if !prefix.is_empty() && !ini.keys().any(|s| s.starts_with(prefix)) {
            continue;
        }
        let keys = ini.get(&format!("{prefix}run")).into_iter().flatten().map(|(k, v)| (k.clone(), v.clone()));
        return Ok(hazards(name, keys, strict_warnings));
    }
    let table = pyproject.and_then(|p| p.get("tool")).and_then(|t| t.get("coverage")).and_then(Value::as_table);
    let Some(table) = table else { return Ok(CoverageConfig::default()) };
    let run = table.get("run").and_then(Value::as_table).into_iter().flatten();
    let keys = run.map(|(k, v)| (k.clone(), v.as_str().map_or_else(|| v.to_string(), str::to_owned)));
    Ok(hazards("pyproject.toml", keys, strict_warnings))
}

fn hazards(file: &str, keys: impl Iterator<Item = (String, String)>, strict_warnings: bool) -> CoverageConfig {
    let hazards = keys
        .filter(|(k, _)| strict_warnings || !WARNING_RUN.contains(&k.as_str()))
        .filter(|(k, _)| !HARMLESS_RUN.contains(&k.as_str()))
        // The default, written down.
        .filter(|(k, v)| k != "concurrency" || v.trim() != "thread")
        .map(|(k, _)| k)
        .collect();
    CoverageConfig { file: Some(file.to_owned()), hazards }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_a_shell_would() {
        assert_eq!(
            split("-q  -k 'a b' \"c\\\"d\" e\\ f\n# gone\n--x=\"1 2\""),
            ["-q", "-k", "a b", "c\"d", "e f", "--x=1 2"]
        );
    }

    #[test]
    fn switched_off_plugins_are_seen_in_both_spellings() {
        let config = |text: &str| PytestConfig { addopts: split(text), ..PytestConfig::default() };
        assert!(config("-p no:cov").blocks(&["cov"]) && config("-pno:cov").blocks(&["cov"]));
        assert!(!config("-p cov no:cov").blocks(&["cov"]));
        assert!(config("--cov=x").has("--cov") && !config("--cov-report=x").has("--cov"));
    }
}
