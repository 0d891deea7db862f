//! `docs/spec.md`: every promise names a test that exists.
//!
//! A promise is a row of a table that has a column "Test". Its cell names tests in backticks: a test's function, or a
//! path that ends in it (`tests/run.rs::exit_status_passes_through`).

use super::source::code_only;
use crate::cargo::Workspace;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

const SPEC: &str = "docs/spec.md";

/// All that is wrong.
pub fn check(workspace: &Workspace, files: &[PathBuf]) -> Vec<String> {
    let Some(spec) = workspace.text(Path::new(SPEC)) else { return Vec::new() };
    let sources = files.iter().filter(|f| f.extension().is_some_and(|e| e == "rs"));
    let tests = sources.filter_map(|f| workspace.text(f)).flat_map(|text| tests_of(&text)).collect();
    broken(&spec, &tests).into_iter().map(|(line, what)| format!("{SPEC}:{line}: {what}")).collect()
}

/// Names of the functions that carry a test attribute. A test program with a harness of its own has them as texts.
fn tests_of(source: &str) -> Vec<String> {
    let code = code_only(source);
    let mut names = Vec::new();
    if source.contains("{name}: test") {
        let texts = source.split('"').skip(1).step_by(2);
        names.extend(
            texts
                .filter(|t| {
                    t.contains('_') && t.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
                })
                .map(str::to_owned),
        );
    }
    let mut pending = false;
    for line in code.lines().map(str::trim) {
        pending |= line.starts_with("#[test]") || (line.starts_with("#[") && line.contains("::test"));
        let function = line
            .split_once("fn ")
            .filter(|(before, _)| before.chars().all(|c| c.is_alphanumeric() || " ()".contains(c)));
        if let Some((_, rest)) = function {
            let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            if std::mem::take(&mut pending) && !name.is_empty() {
                names.push(name.to_owned());
            }
        }
    }
    names
}

fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?;
    Some(inner.strip_suffix('|').unwrap_or(inner).split('|').map(str::trim).collect())
}

/// Rows whose promise is not held, with their line's number.
fn broken(spec: &str, tests: &BTreeSet<String>) -> Vec<(usize, String)> {
    let mut problems = Vec::new();
    let mut column = None;
    let mut in_table = false;
    for (at, line) in spec.lines().enumerate() {
        let Some(cells) = cells(line) else {
            (in_table, column) = (false, None);
            continue;
        };
        if !in_table {
            in_table = true;
            column = cells.iter().position(|cell| matches!(cell.to_ascii_lowercase().as_str(), "test" | "tests"));
            continue;
        }
        let Some(column) = column else { continue };
        if cells.iter().all(|cell| cell.chars().all(|c| matches!(c, '-' | ':'))) {
            continue;
        }
        let cell = cells.get(column).copied().unwrap_or_default();
        let named: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            problems.push((at + 1, "this promise names no test".to_owned()));
        }
        for name in named {
            let function = name.rsplit("::").next().unwrap_or(name);
            if !tests.contains(function) {
                problems.push((at + 1, format!("there is no test {name}")));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_need_tests_that_exist() {
        let spec = "# x\n| promise | test |\n| --- | --- |\n| a | `known` |\n| b | `file.rs::known`, `gone` |\n| c | |\n\n| other |\n|---|\n| d |\n";
        let broken = broken(spec, &BTreeSet::from(["known".to_owned()]));
        assert_eq!(broken, [(5, "there is no test gone".to_owned()), (6, "this promise names no test".to_owned())]);
    }

    #[test]
    fn only_functions_with_the_attribute_are_tests() {
        let source = "#[test]\nfn a() {}\nfn b() {}\n#[tokio::test(flavor = \"x\")]\n#[ignore = \"slow\"]\nasync fn c() {}\n// #[test]\nfn d() {}\n";
        assert_eq!(tests_of(source), ["a", "c"]);
    }
}
