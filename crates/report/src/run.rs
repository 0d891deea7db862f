//! The whole result of `trialrun test`: what `--json` prints and [`crate::screen`] shows.

use crate::{
    Counts,
    coverage::Coverage,
    explain::{self, Green},
    junit::{Failure, JunitError, Suite},
};
use serde::{Deserialize, Serialize};
use trialrun_model::{DiskFull, Ended, ExecOutcome, ExitStatus, Isolation, RefusalKind};

/// Exit codes of `trialrun test`.
///
/// The suite's own code passes through untouched: 0 to 6 from pytest, whatever a command of the user's gives, 126 and
/// 127 as shells use them, 128 plus the number for a signal. Ours are 119 to 125, which neither pytest nor shells use;
/// 124 is what `timeout(1)` gives. A command may still end with one of these by itself: `--json` tells the two apart
/// (`verdict.kind`).
pub mod exit_codes {
    /// The machine's memory limit was reached and the suite was killed by it.
    pub const OUT_OF_MEMORY: i32 = 119;
    /// trialrun was called wrongly: unknown option, no such folder, no runner found, a broken lock file.
    pub const USAGE: i32 = 120;
    /// trialrun could not do its part. Ours, never the suite's fault; nothing is said about the code under test.
    pub const COULD_NOT_RUN: i32 = 121;
    /// The project's requirements could not be installed; no test ran.
    pub const INSTALL_FAILED: i32 = 122;
    /// The suite ended with 0, but its report is missing, unreadable or says otherwise: not a pass.
    pub const UNPROVEN: i32 = 123;
    /// The time limit was reached; everything was killed.
    pub const TIMED_OUT: i32 = 124;
    /// The machine ended under the suite. Ours.
    pub const MACHINE_LOST: i32 = 125;
    /// The command exists but could not be executed, as in a shell.
    pub const NOT_EXECUTABLE: i32 = 126;
    /// There is no such command, as in a shell.
    pub const NOT_FOUND: i32 = 127;
    /// It was stopped on request (Ctrl-C), as a shell gives it.
    pub const INTERRUPTED: i32 = 130;
    /// No test ran although the suite ended with 0: pytest's own code for that.
    pub const NOTHING_RAN: i32 = 5;
}

const _: () = assert!(exit_codes::OUT_OF_MEMORY > 6 && exit_codes::MACHINE_LOST < exit_codes::NOT_EXECUTABLE);

/// An exit status in a form that JSON readers like: one of the two is present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Exit code.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
}

impl From<ExitStatus> for Status {
    fn from(status: ExitStatus) -> Self {
        match status {
            ExitStatus::Code(code) => Self { code: Some(code), signal: None },
            ExitStatus::Signal(signal) => Self { code: None, signal: Some(signal) },
        }
    }
}

impl Status {
    fn shell_code(self) -> i32 {
        self.code.or(self.signal.map(|s| 128_i32.saturating_add(s))).unwrap_or(exit_codes::COULD_NOT_RUN)
    }
}

/// What the run came to. The user's failures and ours never share a variant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Verdict {
    /// Tests ran, none failed, the report agrees. For a command without a report: it ended with 0.
    Passed,
    /// Nothing failed because every test was skipped.
    OnlySkipped,
    /// The suite said so.
    Failed {
        /// Its status.
        status: Status,
    },
    /// No test ran.
    NothingRan {
        /// The suite's status.
        status: Status,
    },
    /// The suite ended with 0 and there is no proof of it.
    Unproven {
        /// What is missing or disagrees.
        reason: String,
    },
    /// The time limit was reached.
    TimedOut {
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// The machine's memory limit was reached.
    OutOfMemory {
        /// The suite's status, where it still had one.
        status: Option<Status>,
    },
    /// The project's requirements could not be installed.
    InstallFailed {
        /// The step that failed.
        step: String,
        /// Its status.
        status: Option<Status>,
    },
    /// The command given by the user could not be started.
    NotStarted {
        /// Why.
        message: String,
        /// 126 or 127, as in a shell.
        code: i32,
    },
    /// Stopped on request.
    Interrupted,
    /// Ours: trialrun could not do its part.
    CouldNotRun {
        /// Where: `machine`, `upload`, `network`, `fetch`, …
        stage: String,
        /// What went wrong.
        message: String,
    },
    /// Ours: the machine ended under the suite.
    MachineLost {
        /// What is known about it.
        message: String,
    },
}

/// What `trialrun test` exits with.
#[must_use]
pub fn exit_code(verdict: &Verdict) -> i32 {
    match verdict {
        Verdict::Passed | Verdict::OnlySkipped => 0,
        Verdict::Failed { status } => status.shell_code(),
        Verdict::NothingRan { status } => match status.shell_code() {
            0 => exit_codes::NOTHING_RAN,
            code => code,
        },
        Verdict::Unproven { .. } => exit_codes::UNPROVEN,
        Verdict::TimedOut { .. } => exit_codes::TIMED_OUT,
        Verdict::OutOfMemory { .. } => exit_codes::OUT_OF_MEMORY,
        Verdict::InstallFailed { .. } => exit_codes::INSTALL_FAILED,
        Verdict::NotStarted { code, .. } => *code,
        Verdict::Interrupted => exit_codes::INTERRUPTED,
        Verdict::CouldNotRun { .. } => exit_codes::COULD_NOT_RUN,
        Verdict::MachineLost { .. } => exit_codes::MACHINE_LOST,
    }
}

impl Verdict {
    /// Whether it may be taken for success.
    #[must_use]
    pub fn green(&self) -> Green {
        match self {
            Self::Passed => Green::Yes,
            Self::OnlySkipped => Green::OnlySkips,
            _ => Green::No,
        }
    }

    /// Whether trialrun is to blame, and the code under test is not judged.
    #[must_use]
    pub fn ours(&self) -> bool {
        matches!(self, Self::CouldNotRun { .. } | Self::MachineLost { .. })
    }
}

/// The report of a suite, as far as there is one.
#[derive(Debug)]
pub enum Evidence<'a> {
    /// It was read to its end.
    Read(&'a Suite),
    /// It is there and can't be read.
    Unreadable(&'a JunitError),
    /// One was asked for and is not there.
    Missing,
    /// None was asked for: a command of the user's without a report.
    NotExpected,
}

/// Judges the end of the suite's exec. `pytest` says whether the codes are pytest's; `limit_ms` is the time limit.
///
/// A green code needs a report that agrees. The two come from one process and are one witness: agreement proves little,
/// and disagreement a lot.
#[must_use]
pub fn judge(outcome: &ExecOutcome, pytest: bool, limit_ms: u64, evidence: &Evidence<'_>) -> Verdict {
    match &outcome.ended {
        Ended::TimedOut => return Verdict::TimedOut { limit_ms },
        Ended::OutOfMemory => return Verdict::OutOfMemory { status: outcome.status.map(Status::from) },
        Ended::Killed => return Verdict::Interrupted,
        Ended::MachineLost => {
            return Verdict::MachineLost { message: "the machine ended while the suite ran".to_owned() };
        }
        Ended::Refused(refusal) => {
            return match refusal.kind {
                RefusalKind::NotFound => {
                    Verdict::NotStarted { message: refusal.message.clone(), code: exit_codes::NOT_FOUND }
                }
                RefusalKind::NotExecutable | RefusalKind::BadCommand => {
                    Verdict::NotStarted { message: refusal.message.clone(), code: exit_codes::NOT_EXECUTABLE }
                }
                // trialrun chose directory, user and environment.
                _ => Verdict::CouldNotRun { stage: "tests".to_owned(), message: refusal.message.clone() },
            };
        }
        Ended::Exited => {}
    }
    let Some(status) = outcome.status else {
        return Verdict::CouldNotRun {
            stage: "tests".to_owned(),
            message: "the suite's exit status was never seen".to_owned(),
        };
    };
    if !status.success() {
        let nothing = pytest && status == ExitStatus::Code(5);
        return if nothing {
            Verdict::NothingRan { status: status.into() }
        } else {
            Verdict::Failed { status: status.into() }
        };
    }
    let unproven = |reason: String| Verdict::Unproven { reason };
    match evidence {
        Evidence::NotExpected => Verdict::Passed,
        Evidence::Missing => {
            unproven("exit code 0, but the suite left no JUnit report: it may have ended before its tests".to_owned())
        }
        Evidence::Unreadable(error) => unproven(format!("exit code 0, but the JUnit report can't be read: {error}")),
        Evidence::Read(suite) if suite.counts.total() == 0 => Verdict::NothingRan { status: status.into() },
        Evidence::Read(suite) if suite.counts.any_failed() => {
            unproven(format!("exit code 0, but the JUnit report holds failures ({})", suite.counts))
        }
        Evidence::Read(suite) if suite.counts.only_skips() => Verdict::OnlySkipped,
        Evidence::Read(_) => Verdict::Passed,
    }
}

/// What is told of the suite's tests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tests {
    /// By outcome.
    pub counts: Counts,
    /// Failures with their texts, up to a limit.
    pub failures: Vec<Failure>,
    /// Failures beyond it.
    pub failures_left_out: u64,
    /// The report was broken or missing: the counts are those up to the break.
    pub unreadable: Option<String>,
    /// What is odd about the report.
    pub notes: Vec<String>,
}

impl From<Suite> for Tests {
    fn from(suite: Suite) -> Self {
        Self {
            counts: suite.counts,
            failures: suite.failures,
            failures_left_out: suite.failures_left_out,
            unreadable: None,
            notes: suite.notes,
        }
    }
}

impl From<&JunitError> for Tests {
    fn from(error: &JunitError) -> Self {
        let mut tests = error.so_far().cloned().map(Self::from).unwrap_or_default();
        tests.unreadable = Some(error.to_string());
        tests
    }
}

/// Connections that the egress policy refused, to one destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Name or address.
    pub host: String,
    /// Port; absent for a name that was only looked up.
    pub port: Option<u16>,
    /// The rule that decided.
    pub rule: String,
    /// How often.
    pub times: u64,
}

/// Groups refused connections by destination and rule, most frequent first.
#[must_use]
pub fn group_refused(seen: impl IntoIterator<Item = (String, Option<u16>, String)>) -> Vec<Refused> {
    let mut groups: std::collections::BTreeMap<(String, Option<u16>, String), u64> = std::collections::BTreeMap::new();
    for key in seen {
        *groups.entry(key).or_default() += 1;
    }
    let mut all: Vec<Refused> =
        groups.into_iter().map(|((host, port, rule), times)| Refused { host, port, rule, times }).collect();
    all.sort_by_key(|r| std::cmp::Reverse(r.times));
    all
}

/// A package that trialrun added to the install.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedPackage {
    /// Name.
    pub package: String,
    /// Version.
    pub version: Option<String>,
    /// What for.
    pub why: String,
}

/// A stage of the run and what it took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// `create`, `upload`, `install`, `tests`, `fetch`, …
    pub name: String,
    /// Wall time.
    pub wall_ms: u64,
    /// CPU time in the machine, where it was measured.
    pub cpu_ms: Option<u64>,
}

/// Something that was brought home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// `JUnit`, `coverage (HTML)`, …
    pub kind: String,
    /// Where it is on the host.
    pub path: String,
}

/// The version of [`RunReport`]'s form. Fields are added without a change of it, never removed or given another meaning.
pub const SCHEMA: u32 = 1;

/// The whole result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The project's folder, as given.
    pub path: String,
    /// What ran.
    pub command: Vec<String>,
    /// What it came to.
    pub verdict: Verdict,
    /// What `trialrun test` exits with.
    pub exit_code: i32,
    /// The suite's status, where it had one.
    pub status: Option<Status>,
    /// What the status means, in words.
    pub meaning: String,
    /// Its tests; absent when no report was expected or nothing ran.
    pub tests: Option<Tests>,
    /// Refused connections while the tests ran.
    pub refused: Vec<Refused>,
    /// What trialrun added to the install.
    pub added: Vec<AddedPackage>,
    /// Stages, in order.
    pub phases: Vec<Phase>,
    /// The machine's highest use of memory.
    pub peak_memory_bytes: Option<u64>,
    /// What isolated it.
    pub isolation: Option<Isolation>,
    /// Coverage.
    pub coverage: Option<Coverage>,
    /// What was written on the host.
    pub artifacts: Vec<Artifact>,
    /// Processes that the suite left behind; they were killed.
    pub left_behind: u32,
    /// Whether the machine's disk was full at some time, and why.
    pub disk_full: Option<DiskFull>,
    /// The end of the output, where the verdict needs it to be understood (install failed, timed out, broke).
    pub output_tail: Option<String>,
    /// Everything else worth telling.
    pub notes: Vec<String>,
}

impl RunReport {
    /// A report with this verdict, and everything else still empty.
    #[must_use]
    pub fn new(path: impl Into<String>, command: Vec<String>, verdict: Verdict) -> Self {
        Self {
            schema: SCHEMA,
            path: path.into(),
            command,
            exit_code: exit_code(&verdict),
            meaning: meaning(&verdict, true),
            status: match &verdict {
                Verdict::Failed { status } | Verdict::NothingRan { status } => Some(*status),
                Verdict::OutOfMemory { status } | Verdict::InstallFailed { status, .. } => *status,
                Verdict::Passed | Verdict::OnlySkipped | Verdict::Unproven { .. } => {
                    Some(Status { code: Some(0), signal: None })
                }
                _ => None,
            },
            verdict,
            tests: None,
            refused: Vec::new(),
            added: Vec::new(),
            phases: Vec::new(),
            peak_memory_bytes: None,
            isolation: None,
            coverage: None,
            artifacts: Vec::new(),
            left_behind: 0,
            disk_full: None,
            output_tail: None,
            notes: Vec::new(),
        }
    }
}

/// A verdict in words. `pytest` says whose codes the status follows.
#[must_use]
pub fn meaning(verdict: &Verdict, pytest: bool) -> String {
    let status_means = |s: &Status, out_of_memory| match (s.code, s.signal) {
        (Some(code), _) if pytest => explain::pytest_exit(code).meaning,
        (Some(code), _) => explain::generic_exit(code).meaning,
        (None, Some(signal)) => explain::signal(signal, out_of_memory).meaning,
        (None, None) => "no status".to_owned(),
    };
    match verdict {
        Verdict::Passed if pytest => explain::pytest_exit(0).meaning,
        Verdict::Passed => explain::generic_exit(0).meaning,
        Verdict::OnlySkipped => "nothing failed because EVERY test was skipped: nothing was tested".to_owned(),
        Verdict::Failed { status } => status_means(status, false),
        Verdict::NothingRan { status } if status.code == Some(0) => {
            "the suite succeeded, but no tests ran: nothing was tested".to_owned()
        }
        Verdict::NothingRan { status } => status_means(status, false),
        Verdict::Unproven { reason } => reason.clone(),
        Verdict::TimedOut { limit_ms } => {
            format!("the time limit of {} was reached; everything was killed", crate::screen::duration(*limit_ms))
        }
        Verdict::OutOfMemory { .. } => {
            "the machine's memory limit was reached, and the kernel killed the suite or a part of it".to_owned()
        }
        Verdict::InstallFailed { step, .. } => format!("the requirements could not be installed ({step}); no test ran"),
        Verdict::NotStarted { message, .. } => format!("the command could not be started: {message}"),
        Verdict::Interrupted => "stopped on request before the end".to_owned(),
        Verdict::CouldNotRun { stage, message } => format!("trialrun failed, not your code ({stage}): {message}"),
        Verdict::MachineLost { message } => format!("trialrun failed, not your code (machine lost): {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use trialrun_model::{OutputTotals, Refusal};

    fn outcome(ended: Ended, status: Option<ExitStatus>) -> ExecOutcome {
        ExecOutcome {
            status,
            ended,
            wall: Duration::ZERO,
            cpu: Duration::ZERO,
            output: OutputTotals::default(),
            disk_full: None,
            left_behind: 0,
        }
    }

    fn suite(counts: Counts) -> Suite {
        Suite { counts, ..Suite::default() }
    }

    #[test]
    fn code_0_passes_only_with_a_report_that_agrees() {
        let zero = outcome(Ended::Exited, Some(ExitStatus::Code(0)));
        let judged = |evidence: &Evidence<'_>| judge(&zero, true, 0, evidence);
        let passed = suite(Counts { passed: 1, ..Counts::default() });
        assert_eq!(judged(&Evidence::Read(&passed)), Verdict::Passed);
        assert_eq!(judged(&Evidence::NotExpected), Verdict::Passed);
        let skipped = suite(Counts { skipped: 1, ..Counts::default() });
        assert_eq!(judged(&Evidence::Read(&skipped)), Verdict::OnlySkipped);
        for (verdict, code) in [
            (judged(&Evidence::Missing), 123),
            (judged(&Evidence::Unreadable(&JunitError::Empty)), 123),
            (judged(&Evidence::Read(&suite(Counts { failed: 1, passed: 9, ..Counts::default() }))), 123),
            (judged(&Evidence::Read(&suite(Counts::default()))), 5),
        ] {
            assert_eq!((verdict.green(), exit_code(&verdict), verdict.ours()), (Green::No, code, false), "{verdict:?}");
        }
    }

    #[test]
    fn the_suites_own_code_passes_through() {
        for code in [1, 2, 3, 4, 5, 6, 7, 42, 126, 127, 255] {
            let verdict = judge(&outcome(Ended::Exited, Some(ExitStatus::Code(code))), true, 0, &Evidence::Missing);
            assert_eq!((exit_code(&verdict), verdict.green()), (code, Green::No));
        }
        let verdict = judge(&outcome(Ended::Exited, Some(ExitStatus::Signal(11))), true, 0, &Evidence::Missing);
        assert_eq!(exit_code(&verdict), 139);
    }

    #[test]
    fn each_way_to_end_has_its_own_verdict_and_code() {
        let refused = |kind| Ended::Refused(Refusal { kind, message: "x".to_owned() });
        for (ended, code, ours) in [
            (Ended::TimedOut, 124, false),
            (Ended::OutOfMemory, 119, false),
            (Ended::Killed, 130, false),
            (Ended::MachineLost, 125, true),
            (refused(RefusalKind::NotFound), 127, false),
            (refused(RefusalKind::NotExecutable), 126, false),
            (refused(RefusalKind::BadCwd), 121, true),
        ] {
            let verdict = judge(&outcome(ended.clone(), None), true, 9000, &Evidence::Missing);
            assert_eq!((exit_code(&verdict), verdict.ours(), verdict.green()), (code, ours, Green::No), "{ended:?}");
            assert!(!meaning(&verdict, true).is_empty());
        }
        let never = judge(&outcome(Ended::Exited, None), true, 0, &Evidence::NotExpected);
        assert!(never.ours());
    }

    #[test]
    fn the_json_form_is_stable() {
        let mut report =
            RunReport::new("p", vec!["pytest".into()], Verdict::Failed { status: ExitStatus::Code(1).into() });
        report.refused = group_refused([
            ("a".to_owned(), Some(1), "off".to_owned()),
            ("b".into(), None, "off".into()),
            ("b".into(), None, "off".into()),
        ]);
        let json = serde_json::to_value(&report).unwrap();
        let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let mut want = vec![
            "schema",
            "path",
            "command",
            "verdict",
            "exit_code",
            "status",
            "meaning",
            "tests",
            "refused",
            "added",
            "phases",
            "peak_memory_bytes",
            "isolation",
            "coverage",
            "artifacts",
            "left_behind",
            "disk_full",
            "output_tail",
            "notes",
        ];
        want.sort_unstable();
        let mut keys = keys;
        keys.sort_unstable();
        assert_eq!(keys, want);
        assert_eq!(json["verdict"], serde_json::json!({"kind": "failed", "status": {"code": 1, "signal": null}}));
        assert_eq!(json["refused"][0]["host"], "b");
        assert_eq!(serde_json::from_value::<RunReport>(json).unwrap(), report);
    }
}
