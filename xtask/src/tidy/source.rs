//! Rules about Rust source: where `unsafe` may be, and that no crate escapes the workspace's lints.

use crate::cargo::Workspace;
use std::path::{Path, PathBuf};

/// The only crate with `unsafe`.
const UNSAFE_ROOM: &str = "crates/sys";

/// All that is wrong.
pub fn check(workspace: &Workspace, files: &[PathBuf]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "rs") && !f.starts_with(UNSAFE_ROOM)) {
        let Some(text) = workspace.text(file) else { continue };
        for line in lines_with_unsafe(&text) {
            problems.push(format!("{}:{line}: unsafe belongs into {UNSAFE_ROOM}", file.display()));
        }
    }
    for manifest in files.iter().filter(|f| f.ends_with("Cargo.toml") && *f != Path::new("Cargo.toml")) {
        let text = workspace.text(manifest).unwrap_or_default();
        let takes_lints =
            text.split("[lints]").nth(1).is_some_and(|rest| rest.trim_start().starts_with("workspace = true"));
        let is_package = text.contains("[package]");
        if is_package && !takes_lints && !manifest.starts_with(UNSAFE_ROOM) && in_workspace(workspace, manifest) {
            problems.push(format!(
                "{}: it does not take the workspace's lints ([lints] workspace = true)",
                manifest.display()
            ));
        }
    }
    problems
}

fn in_workspace(workspace: &Workspace, manifest: &Path) -> bool {
    workspace.packages.iter().any(|p| p.manifest_path == workspace.root.join(manifest))
}

fn lines_with_unsafe(text: &str) -> Vec<usize> {
    let code = code_only(text);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let bad = |line: &str| {
        let words = || line.split(|c| !is_word(c));
        words().any(|word| word == "unsafe")
            || (words().any(|w| w == "unsafe_code") && words().any(|w| w == "allow" || w == "expect"))
    };
    code.lines().enumerate().filter(|(_, line)| bad(line)).map(|(at, _)| at + 1).collect()
}

/// The source with comments and the insides of literals blanked out. Lines stay where they are.
pub fn code_only(text: &str) -> String {
    let bytes: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = skip_literal(&bytes, at);
        if end > at {
            out.extend(bytes[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at = end;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    out
}

/// The end of the comment or literal that begins at `at`; `at` itself when none does.
fn skip_literal(text: &[char], at: usize) -> usize {
    let get = |i: usize| text.get(i).copied().unwrap_or('\0');
    let begins_word = at == 0 || !(get(at - 1).is_alphanumeric() || get(at - 1) == '_');
    match (get(at), get(at + 1)) {
        ('/', '/') => (at..text.len()).find(|i| text[*i] == '\n').unwrap_or(text.len()),
        ('/', '*') => {
            let (mut depth, mut i) = (0, at);
            while i < text.len() {
                match (get(i), get(i + 1)) {
                    ('/', '*') => (depth, i) = (depth + 1, i + 2),
                    ('*', '/') => (depth, i) = (depth - 1, i + 2),
                    _ => i += 1,
                }
                if depth == 0 {
                    break;
                }
            }
            i
        }
        ('"', _) => quoted(text, at + 1, '"'),
        // A character, not a lifetime: one character or an escape between the quotes.
        ('\'', '\\') => quoted(text, at + 1, '\''),
        ('\'', _) if get(at + 2) == '\'' => at + 3,
        ('r', '"' | '#') if begins_word => raw(text, at + 1).unwrap_or(at),
        ('b' | 'c', 'r') if begins_word => raw(text, at + 2).unwrap_or(at),
        _ => at,
    }
}

fn quoted(text: &[char], mut at: usize, quote: char) -> usize {
    while at < text.len() && text[at] != quote {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

fn raw(text: &[char], at: usize) -> Option<usize> {
    let hashes = text[at..].iter().take_while(|c| **c == '#').count();
    if text.get(at + hashes) != Some(&'"') {
        return None;
    }
    let inside = at + hashes + 1;
    let ends =
        |i: &usize| text[*i] == '"' && text[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
    Some((inside..text.len()).find(ends).map_or(text.len(), |i| i + 1 + hashes))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The word itself, so that this file is not its own problem.
    const WORD: &str = concat!("un", "safe");

    #[test]
    fn the_word_counts_in_code_only() {
        let clean = format!(
            "// {WORD}\n/* a /* {WORD} */ {WORD} */ let s = \"{WORD} \\\" {WORD}\"; r#\"{WORD} \" {WORD}\"#; b'\\''; '\"'; x_{WORD}"
        );
        assert_eq!(lines_with_unsafe(&clean), Vec::<usize>::new());
        let found = format!("fn a<'a>() {{}}\n// x\n{WORD} {{ }}\n#![allow({WORD}_code)]\n#![forbid({WORD}_code)]\n");
        assert_eq!(lines_with_unsafe(&found), [3, 4]);
    }

    #[test]
    fn lines_stay_where_they_are() {
        let text = "a\n/* b\nc */ \"d\ne\" f\n'\\n' g";
        assert_eq!(code_only(text).lines().count(), text.lines().count());
        assert!(code_only(text).ends_with(" g") && !code_only(text).contains('e'));
    }
}
