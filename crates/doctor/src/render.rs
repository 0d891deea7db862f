//! Findings as text.

use crate::{Finding, FindingState};
use std::fmt::Write;

/// The findings as plain text, by area, with a summary line at the end. Without `all`, good ones take one short line.
#[must_use]
pub fn render(findings: &[Finding], all: bool) -> String {
    let mut areas: Vec<&str> = Vec::new();
    for finding in findings {
        if !areas.contains(&finding.area.as_str()) {
            areas.push(&finding.area);
        }
    }
    let width = findings.iter().map(|f| f.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for area in areas {
        let _ = writeln!(text, "{area}");
        for finding in findings.iter().filter(|f| f.area == area) {
            let word = match finding.state {
                FindingState::Good => "good",
                FindingState::Degraded => "degraded",
                FindingState::Missing => "MISSING",
            };
            let found = if all || finding.state != FindingState::Good {
                finding.found.as_str()
            } else {
                finding.found.split(';').next().unwrap_or_default()
            };
            let _ = writeln!(text, "  {word:<8}  {:<width$}  {found}", finding.name);
            let indent = " ".repeat(width + 14);
            for (label, detail) in [("so", &finding.consequence), ("fix", &finding.fix)] {
                if !detail.is_empty() {
                    let _ = writeln!(text, "{indent}{label}: {detail}");
                }
            }
        }
    }
    let count = |state| findings.iter().filter(|f| f.state == state).count();
    let (good, degraded, missing) =
        (count(FindingState::Good), count(FindingState::Degraded), count(FindingState::Missing));
    let _ = writeln!(text, "\n{good} good, {degraded} degraded, {missing} missing");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_grouped_and_counted() {
        let findings = [
            Finding::good("host", "root", "running as root; really"),
            Finding::missing(
                "images",
                "mmdebstrap",
                "not found",
                "no image can be built",
                "apt-get install mmdebstrap",
            ),
            Finding::degraded("host", "kernel", "5.15", "slower", "a newer one"),
        ];
        assert_eq!(
            render(&findings, false),
            "host\n  good      root        running as root\n  degraded  kernel      5.15\n                        so: slower\n                        fix: a newer one\n\
             images\n  MISSING   mmdebstrap  not found\n                        so: no image can be built\n                        fix: apt-get install mmdebstrap\n\
             \n1 good, 1 degraded, 1 missing\n"
        );
        assert!(render(&findings, true).contains("really"));
    }
}
