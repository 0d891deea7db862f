//! The one error of this crate's one operation.

use std::path::PathBuf;

/// Why a project folder could not be read. Always the caller's folder, never a failure of trialrun.
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// Nothing is at the path.
    #[error("{} does not exist; pass the project's folder", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The path names something that is not a folder.
    #[error("{} is not a folder; pass the folder that holds the project{}", path.display(), parent_hint(path))]
    NotADirectory {
        /// The path as given.
        path: PathBuf,
    },
    /// The folder or a file in it that matters could not be read.
    #[error("read {}; give read permission or pass another folder", path.display())]
    Unreadable {
        /// The folder or file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A file that says what the project needs is not what its format asks for.
    #[error("read {}{}: {message}; repair the file, or pass --no-install to go without it", path.display(), place(*line, *column))]
    Broken {
        /// The file, relative to the project.
        path: PathBuf,
        /// Line, counted from 1, where the format's parser tells it.
        line: Option<usize>,
        /// Column, counted from 1.
        column: Option<usize>,
        /// What is wrong, in the parser's words.
        message: String,
    },
    /// Dependency groups include each other in a circle.
    #[error("read pyproject.toml: dependency groups include each other: {}; break the circle, or pass --no-install", chain.join(" -> "))]
    GroupCycle {
        /// The groups in order; the first is also the last.
        chain: Vec<String>,
    },
    /// No test runner was recognised and no command was given.
    #[error("no test runner found in {}: pass -- COMMAND{}", path.display(), hint.as_ref().map(|h| format!(" ({h})")).unwrap_or_default())]
    NoRunner {
        /// The project's folder.
        path: PathBuf,
        /// What the folder looks like instead, with a command to try.
        hint: Option<String>,
    },
}

fn place(line: Option<usize>, column: Option<usize>) -> String {
    match (line, column) {
        (Some(line), Some(column)) => format!(" at line {line}, column {column}"),
        (Some(line), None) => format!(" at line {line}"),
        _ => String::new(),
    }
}

fn parent_hint(path: &std::path::Path) -> String {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => format!(", such as {}", parent.display()),
        _ => ", such as .".to_owned(),
    }
}
