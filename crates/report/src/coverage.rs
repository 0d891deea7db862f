//! Reads the totals of coverage.py's JSON report.

use serde::{Deserialize, Serialize};

/// Totals of a run's coverage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Percent covered, as coverage.py computes it (branches included where they were measured).
    pub percent: f64,
    /// Lines that ran.
    pub covered_lines: Option<u64>,
    /// Lines that could have run.
    pub statements: Option<u64>,
    /// Branches that were never taken, where branches were measured.
    pub missing_branches: Option<u64>,
    /// Why the number is too low or unsure; absent when nothing points to that.
    pub incomplete: Option<String>,
}

/// Why coverage could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CoverageError {
    /// The file is not JSON, or is cut off.
    #[error("read coverage report: not JSON")]
    NotJson(#[source] serde_json::Error),
    /// It is JSON without totals of coverage.py's form.
    #[error("read coverage report: it has no totals")]
    NoTotals,
}

#[derive(Deserialize)]
struct Report {
    totals: Option<Totals>,
}

#[derive(Deserialize)]
struct Totals {
    percent_covered: Option<f64>,
    covered_lines: Option<u64>,
    num_statements: Option<u64>,
    missing_branches: Option<u64>,
}

/// Reads `coverage.json`. The rest of the file, which lists every line, is passed over without being kept.
pub fn read_json(bytes: &[u8]) -> Result<Coverage, CoverageError> {
    let report: Report = serde_json::from_slice(bytes).map_err(CoverageError::NotJson)?;
    let totals = report.totals.ok_or(CoverageError::NoTotals)?;
    let percent = totals.percent_covered.filter(|p| (0.0..=100.0).contains(p)).ok_or(CoverageError::NoTotals)?;
    Ok(Coverage {
        percent,
        covered_lines: totals.covered_lines,
        statements: totals.num_statements,
        missing_branches: totals.missing_branches,
        incomplete: None,
    })
}

/// Reads the total from pytest-cov's or coverage's text report (`TOTAL  100  10  90%`), for projects whose own options
/// write no other.
#[must_use]
pub fn read_total(output: &str) -> Option<Coverage> {
    let text = crate::terminal::plain(output);
    let line = text.lines().rev().find(|l| l.starts_with("TOTAL "))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let percent: f64 = words.last()?.strip_suffix('%')?.parse().ok().filter(|p| (0.0..=100.0).contains(p))?;
    let number = |at: usize| words.get(at).and_then(|w| w.parse::<u64>().ok());
    let (statements, missed) = (number(1), number(2));
    let covered = statements.zip(missed).and_then(|(s, m)| s.checked_sub(m));
    Some(Coverage { percent, covered_lines: covered, statements, missing_branches: None, incomplete: None })
}

impl Coverage {
    /// Marks the number as incomplete when fewer data files were found than processes should have written (workers that
    /// ended without their exit handlers write none, and the total then looks plausible and is wrong).
    pub fn expect_files(&mut self, expected: u64, found: u64) {
        if found < expected {
            self.incomplete = Some(format!("coverage incomplete: {found} of {expected} processes left their data"));
        }
    }

    /// Marks the number as incomplete when pytest-cov said so in the output.
    pub fn look_for_losses(&mut self, output: &str) {
        // pytest-cov's words when a worker of xdist died before it handed its data over.
        if output.contains("The following workers failed to return coverage data") {
            self.incomplete = Some("coverage incomplete: workers failed to return their data".to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_read_from_json_and_text() {
        let json = br#"{"meta":{"format":3},"files":{"a":{"x":[1,2]}},"totals":{"covered_lines":1,"num_statements":29,"percent_covered":3.44,"missing_lines":28,"missing_branches":2}}"#;
        let got = read_json(json).unwrap();
        assert_eq!(
            (got.percent, got.covered_lines, got.statements, got.missing_branches),
            (3.44, Some(1), Some(29), Some(2))
        );
        let got = read_total("Name Stmts Miss Cover\nTOTAL     100     10    90%\n").unwrap();
        assert_eq!((got.percent, got.covered_lines), (90.0, Some(90)));
    }

    #[test]
    fn anything_else_is_an_error() {
        for bad in [
            "",
            "{",
            "[]",
            "{}",
            "{\"totals\":{}}",
            "{\"totals\":{\"percent_covered\":1e9}}",
            "{\"totals\":{\"percent_covered\":\"1\"}}",
        ] {
            assert!(read_json(bad.as_bytes()).is_err(), "{bad}");
        }
        assert_eq!(read_total("TOTAL x"), None);
    }

    #[test]
    fn lost_data_is_told() {
        let mut c = read_total("TOTAL 1 0 100%").unwrap();
        c.expect_files(2, 2);
        assert_eq!(c.incomplete, None);
        c.expect_files(4, 3);
        assert!(c.incomplete.unwrap().contains("3 of 4"));
    }
}
