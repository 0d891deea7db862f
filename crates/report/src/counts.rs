//! How many tests ended in which way.

use serde::{Deserialize, Serialize};

/// Tests by outcome. A test that passes and then fails in its teardown is one passed and one error, as pytest counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Passed.
    pub passed: u64,
    /// Failed in the test itself.
    pub failed: u64,
    /// Failed around it: setup, teardown, collection.
    pub errors: u64,
    /// Skipped.
    pub skipped: u64,
    /// Failed, as was expected of them.
    pub xfailed: u64,
    /// Passed although a failure was expected. JUnit holds these as passed; see [`crate::junit::Suite::compare`].
    pub xpassed: u64,
    /// Seen with different outcomes in one run, or passed only when tried again. Also counted under the outcomes seen.
    pub flaky: u64,
}

impl Counts {
    /// All outcomes together; the flaky ones are among the others.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.passed + self.failed + self.errors + self.skipped + self.xfailed + self.xpassed
    }

    /// Whether anything failed.
    #[must_use]
    pub fn any_failed(&self) -> bool {
        self.failed + self.errors > 0
    }

    /// Whether tests were there and every one was skipped.
    #[must_use]
    pub fn only_skips(&self) -> bool {
        self.skipped > 0 && self.skipped == self.total()
    }

    /// Outcomes that occurred, worst first, with the words for them.
    #[must_use]
    pub fn words(&self) -> Vec<(u64, &'static str)> {
        let all = [
            (self.failed, "failed"),
            (self.errors, if self.errors == 1 { "error" } else { "errors" }),
            (self.passed, "passed"),
            (self.skipped, "skipped"),
            (self.xfailed, "xfailed"),
            (self.xpassed, "xpassed"),
            (self.flaky, "flaky"),
        ];
        all.into_iter().filter(|(n, _)| *n > 0).collect()
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<String> = self.words().iter().map(|(n, w)| format!("{n} {w}")).collect();
        f.write_str(&if words.is_empty() { "no tests".to_owned() } else { words.join(", ") })
    }
}
