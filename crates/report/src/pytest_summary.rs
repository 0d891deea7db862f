//! Reads pytest's last line ("3 failed, 10 passed in 1.23s").
//!
//! Anything in the suite can print such a line, so it is never what a verdict rests on; it is compared with the report.

use crate::{Counts, terminal};
use serde::{Deserialize, Serialize};

/// What the line says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Tests by outcome.
    pub counts: Counts,
    /// Warnings.
    pub warnings: u64,
    /// Tests that were left out by a selection.
    pub deselected: u64,
    /// Attempts that were repeated (pytest-rerunfailures).
    pub rerun: u64,
    /// Wall time in seconds.
    pub seconds: f64,
}

/// How much of the end of the output is looked at: programs may print after the line, at exit.
const TAIL: usize = 64 << 10;

/// The last such line in the output; `None` when there is none.
#[must_use]
pub fn parse(output: &str) -> Option<Summary> {
    let mut start = output.len().saturating_sub(TAIL);
    while !output.is_char_boundary(start) {
        start += 1;
    }
    terminal::plain(&output[start..]).lines().rev().find_map(line)
}

fn line(text: &str) -> Option<Summary> {
    let text = text.trim().trim_matches('=').trim();
    let (list, time) = text.rsplit_once(" in ")?;
    // "1.23s", or "75.20s (0:01:15)".
    let seconds = time.split_whitespace().next()?.strip_suffix('s')?.parse::<f64>().ok().filter(|s| s.is_finite())?;
    let mut summary = Summary { seconds, ..Summary::default() };
    let mut seen = false;
    for part in list.split(", ") {
        if matches!(part, "no tests ran" | "no tests collected") {
            seen = true;
            continue;
        }
        let (number, word) = part.split_once(' ')?;
        let n: u64 = number.parse().ok()?;
        let slot = match word {
            "failed" => &mut summary.counts.failed,
            "passed" => &mut summary.counts.passed,
            "skipped" => &mut summary.counts.skipped,
            "xfailed" => &mut summary.counts.xfailed,
            "xpassed" => &mut summary.counts.xpassed,
            "error" | "errors" => &mut summary.counts.errors,
            "warning" | "warnings" => &mut summary.warnings,
            "deselected" => &mut summary.deselected,
            "rerun" => &mut summary.rerun,
            // Plugins add words of their own ("2 subtests passed"); a sentence with none of pytest's is no summary.
            _ if word.split(' ').all(|w| w.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-')) => continue,
            _ => return None,
        };
        // The same word twice is no line of pytest's; the last one stands, and a hostile sum can't overflow.
        *slot = n;
        seen = true;
    }
    seen.then_some(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_found_in_any_dress() {
        let all = "3 failed, 10 passed, 2 skipped, 1 deselected, 1 xfailed, 1 xpassed, 2 warnings, 1 error, 2 subtests passed in 1.23s";
        for text in [
            all.to_owned(),
            format!("===== {all} ====="),
            format!("x\n\u{1b}[31m= \u{1b}[1m{all}\u{1b}[0m =\nprinted at exit\n"),
        ] {
            let got = parse(&text).unwrap();
            assert_eq!(
                got.counts,
                Counts { passed: 10, failed: 3, errors: 1, skipped: 2, xfailed: 1, xpassed: 1, flaky: 0 }
            );
            assert_eq!((got.warnings, got.deselected, got.seconds), (2, 1, 1.23));
        }
        assert_eq!(parse("1 passed in 75.20s (0:01:15)").unwrap().counts.passed, 1);
        assert_eq!(parse("no tests ran in 0.01s").unwrap().counts, Counts::default());
        assert_eq!(parse("==== 5 deselected in 0.01s ====").unwrap().deselected, 5);
    }

    #[test]
    fn other_lines_are_no_summary() {
        for text in [
            "",
            "passed in 1s",
            "it was 3 in 1.2s",
            "x passed in 1.0s",
            "1 passed",
            "1 passed in NaNs",
            "2 files in 0.1s",
            "99999999999999999999 passed in 1s",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
