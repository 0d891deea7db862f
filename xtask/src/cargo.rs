//! The workspace as cargo describes it.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::Command,
};

/// The workspace.
pub struct Workspace {
    /// Its root.
    pub root: PathBuf,
    /// Where cargo builds.
    pub target: PathBuf,
    /// Its packages.
    pub packages: Vec<Package>,
}

/// One of its packages.
#[derive(Debug, Clone, Deserialize)]
pub struct Package {
    /// Name in its manifest.
    pub name: String,
    /// Its manifest.
    pub manifest_path: PathBuf,
    /// Everything it names in its manifest.
    pub dependencies: Vec<Dependency>,
}

/// A package that another names.
#[derive(Debug, Clone, Deserialize)]
pub struct Dependency {
    /// Name.
    pub name: String,
    /// `None` is an ordinary one; else `dev` or `build`.
    pub kind: Option<String>,
    /// Where it is, for those of the workspace.
    pub path: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Metadata {
    workspace_root: PathBuf,
    target_directory: PathBuf,
    packages: Vec<Package>,
}

fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

impl Workspace {
    /// Asks cargo.
    ///
    /// # Errors
    /// Outside of the workspace, or with a manifest that can't be read.
    pub fn load() -> Result<Self> {
        let here = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let output = Command::new(program())
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(&here)
            .output()
            .context("run cargo metadata")?;
        ensure!(output.status.success(), "cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Metadata = serde_json::from_slice(&output.stdout).context("read what cargo metadata says")?;
        Ok(Self { root: metadata.workspace_root, target: metadata.target_directory, packages: metadata.packages })
    }

    /// A call of cargo in the workspace's root.
    pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, args: I) -> Command {
        let mut command = Command::new(program());
        command.args(args).current_dir(&self.root);
        // Set by the cargo that runs us; the next one has its own.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
                command.env_remove(name);
            }
        }
        command
    }

    /// Files that git tracks or would add, relative to the root.
    ///
    /// # Errors
    /// Without git.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .context("run git ls-files")?;
        ensure!(output.status.success(), "git ls-files failed:\n{}", String::from_utf8_lossy(&output.stderr));
        let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let path = |name: &[u8]| PathBuf::from(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name));
        // A file that was removed but not yet from the index is listed too.
        Ok(names.map(path).filter(|path| self.root.join(path).is_file()).collect())
    }

    /// The text of a file relative to the root; `None` for what is not text.
    pub fn text(&self, file: &Path) -> Option<String> {
        std::fs::read_to_string(self.root.join(file)).ok()
    }
}
