//! What of an install can be done before the project's folder is in the machine, and kept for the next run.
//!
//! [`Dependencies`] are lists of requirements and a script that installs them. It decides nothing: the whole install
//! ([`crate::InstallPlan`]) runs on top of it in any case, and finds satisfied what is right and changes what is not. So
//! whatever can't be read without running the project's code is left out here. No text of the project's is part of the
//! script; it reaches pip in files.

use crate::{
    PLAN_DIR, PlanFile, VENV, VENV_PYTHON,
    plan::{CONSTRAINTS, FREEZE, PIP_INSTALL, PROBE},
    requirement::{Requirement, normalise},
};
use serde::Serialize;

/// What the tools' probe said before trialrun added any.
pub const PROBED: &str = "/var/lib/trialrun/plan/probed.json";

/// The part of an install that needs nothing of the project but its lists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Dependencies {
    /// Files that have to be in the machine first.
    pub files: Vec<PlanFile>,
    /// A script for sh(1), run by the user who will run the tests, whose [`VENV`] is an empty directory.
    pub script: String,
}

/// The lists that [`Dependencies`] are made of.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    /// Lines of requirements files: requirements by name, and options about indexes.
    pub wanted: Vec<String>,
    /// Lines of constraint files.
    pub constraints: Vec<String>,
    /// Each a file with hashes, which pip takes alone.
    pub hashed: Vec<Vec<String>>,
    /// Requirements of the project's build.
    pub build: Vec<String>,
    /// trialrun's tools.
    pub tools: Vec<String>,
    /// Whether the project asks for nothing beside these lists, so that the tools can be added.
    pub whole: bool,
}

impl Lists {
    /// Takes a requirement string, unless it is an address or the project's own name.
    pub(crate) fn want(&mut self, text: &str, own: Option<&str>) {
        match Requirement::parse(text) {
            Some(r) if r.url.is_none() && own.is_none_or(|own| normalise(own) != r.name) => {
                self.wanted.push(text.to_owned());
            }
            _ => self.whole = false,
        }
    }

    pub(crate) fn finish(self) -> Dependencies {
        let mut files = Vec::new();
        let mut script = vec!["set -e".to_owned(), "unset SOURCE_DATE_EPOCH".to_owned()];
        let mut file = |name: &str, lines: &[String]| {
            let path = format!("{PLAN_DIR}/{name}");
            files
                .push(PlanFile { path: path.clone(), content: lines.iter().map(|line| format!("{line}\n")).collect() });
            path
        };
        let pip = |words: &str| format!("{VENV_PYTHON} -I {PIP_INSTALL} --no-cache-dir {words}").replace('\n', " ");
        script.push(format!("/usr/bin/python3 -I -m venv {VENV}"));
        for (at, lines) in self.hashed.iter().enumerate() {
            script.push(pip(&format!("-r {}", file(&format!("hashed-{at}.txt"), lines))));
        }
        if !self.wanted.is_empty() {
            let mut words = format!("-r {}", file("wanted.txt", &self.wanted));
            if !self.constraints.is_empty() {
                words.push_str(&format!(" -c {}", file("wanted-constraints.txt", &self.constraints)));
            }
            script.push(pip(&words));
        }
        let mut later = self.build;
        if self.whole {
            let (probe, freeze) = (file("probe.py", &[PROBE.to_owned()]), file("freeze.py", &[FREEZE.to_owned()]));
            script.push(format!("{VENV_PYTHON} -I {probe} > {PROBED}"));
            script.push(format!("{VENV_PYTHON} -I {freeze} {CONSTRAINTS}"));
            if !self.tools.is_empty() {
                script.push(pip(&format!("-c {CONSTRAINTS} -r {}", file("tools.txt", &self.tools))));
            }
        } else {
            later.extend(self.tools);
        }
        if !later.is_empty() {
            // Into pip's own cache, for the steps that come later; what fails here will say so there.
            let list = file("later.txt", &later);
            let to = "/tmp/trialrun-downloads";
            script.push(format!(
                "{VENV_PYTHON} -I -m pip download -q --no-input --disable-pip-version-check -d {to} -r {list} || true"
            ));
        }
        Dependencies { files, script: script.join("\n") }
    }
}
