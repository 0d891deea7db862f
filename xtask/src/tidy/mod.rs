//! `tidy`: the project's own rules that no other tool knows. Each problem is one line that names its file.

mod promises;
mod rooms;
mod source;
mod words;

use crate::cargo::Workspace;
use anyhow::Result;

/// Applies all rules and gives what is wrong.
///
/// # Errors
/// When a rule could not be applied at all.
pub fn run(workspace: &Workspace) -> Result<Vec<String>> {
    let files = workspace.files()?;
    let mut problems = rooms::check(&workspace.packages);
    problems.extend(source::check(workspace, &files));
    problems.extend(words::check(workspace, &files));
    problems.extend(promises::check(workspace, &files));
    Ok(problems)
}
