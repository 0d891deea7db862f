//! Prints the one honest screen.
//!
//! The first line is the exit status and what it means. Then only what there is to tell; nothing is repeated, nothing
//! that was left out goes unmentioned.

use crate::{
    explain::Green,
    junit::FailureKind,
    run::{RunReport, Verdict},
    terminal::{cut, one_line, safe},
};
use std::fmt::Write as _;
use trialrun_model::ByteSize;

/// How it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScreenOptions {
    /// Colours of the terminal.
    pub color: bool,
    /// Width in characters; at least 40 is used.
    pub width: usize,
}

impl Default for ScreenOptions {
    fn default() -> Self {
        Self { color: false, width: 100 }
    }
}

/// Failures shown with their messages. More than a screen of them helps nobody; the JUnit file has all.
const SHOWN_FAILURES: usize = 20;
/// Refused destinations, notes and lines of output shown.
const SHOWN_REFUSED: usize = 10;
const SHOWN_NOTES: usize = 20;
const SHOWN_OUTPUT: usize = 20;
/// Width of the column of labels.
const LABEL: usize = 10;

/// Prints the report.
#[must_use]
pub fn render(report: &RunReport, options: ScreenOptions) -> String {
    let mut screen = Screen { out: String::new(), width: options.width.max(40), color: options.color };
    screen.head(report);
    screen.tests(report);
    screen.output(report);
    screen.refused(report);
    screen.install(report);
    screen.cost(report);
    screen.machine(report);
    screen.results(report);
    screen.notes(report);
    screen.out
}

/// A time as people read it: `340 ms`, `4.2 s`, `3 min 05 s`, `2 h 10 min`.
#[must_use]
pub fn duration(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        60_000..3_600_000 => format!("{} min {:02} s", ms / 60_000, ms % 60_000 / 1_000),
        _ => format!("{} h {:02} min", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

struct Screen {
    out: String,
    width: usize,
    color: bool,
}

impl Screen {
    fn row(&mut self, label: &str, text: &str) {
        let room = self.width.saturating_sub(LABEL);
        for (i, line) in wrap(&one_line(text, 2_000), room).iter().enumerate() {
            let label = if i == 0 { label } else { "" };
            let _ = writeln!(self.out, "{label:<LABEL$}{line}");
        }
    }

    fn head(&mut self, report: &RunReport) {
        let (word, colour) = match &report.verdict {
            Verdict::Passed => ("PASSED", "32"),
            Verdict::OnlySkipped => ("ALL SKIPPED", "33"),
            Verdict::Failed { .. } => ("FAILED", "31"),
            Verdict::NothingRan { .. } => ("NOTHING RAN", "31"),
            Verdict::Unproven { .. } => ("NOT PROVEN", "31"),
            Verdict::TimedOut { .. } => ("TIMED OUT", "31"),
            Verdict::OutOfMemory { .. } => ("OUT OF MEMORY", "31"),
            Verdict::InstallFailed { .. } => ("INSTALL FAILED", "31"),
            Verdict::NotStarted { .. } => ("NOT STARTED", "31"),
            Verdict::Interrupted => ("INTERRUPTED", "33"),
            Verdict::CouldNotRun { .. } | Verdict::MachineLost { .. } => ("COULD NOT RUN", "35"),
        };
        let status = match report.status {
            Some(s) => match (s.code, s.signal) {
                (Some(code), _) => format!("exit code {code}"),
                (None, Some(signal)) => crate::explain::signal_name(signal),
                (None, None) => String::new(),
            },
            None => String::new(),
        };
        // What the suite said and what trialrun says differ where ours is the last word.
        let own = if status.is_empty() || report.status.and_then(|s| s.code) != Some(report.exit_code) {
            format!("trialrun exits with {}", report.exit_code)
        } else {
            String::new()
        };
        let facts: Vec<String> = [status, own].into_iter().filter(|s| !s.is_empty()).collect();
        let line = format!("{word}  {}: {}", facts.join(", "), one_line(&report.meaning, 1_000));
        let mut lines = wrap(&line, self.width).into_iter();
        let first = lines.next().unwrap_or_default();
        let first =
            if self.color { first.replacen(word, &format!("\u{1b}[1;{colour}m{word}\u{1b}[0m"), 1) } else { first };
        let _ = writeln!(self.out, "{first}");
        for line in lines {
            let _ = writeln!(self.out, "{line}");
        }
    }

    fn tests(&mut self, report: &RunReport) {
        let Some(tests) = &report.tests else { return };
        let mut line = tests.counts.to_string();
        if tests.counts.total() > 0 {
            let _ = write!(line, " (of {})", tests.counts.total());
        }
        if tests.unreadable.is_some() {
            line.push_str(" up to the place where the report breaks off");
        }
        self.row("tests", &line);
        if let Some(why) = &tests.unreadable {
            self.row("", why);
        }
        for (i, failure) in tests.failures.iter().take(SHOWN_FAILURES).enumerate() {
            let place = match (&failure.file, failure.line) {
                (Some(file), Some(line)) => format!("  {}:{line}", one_line(file, 120)),
                _ => String::new(),
            };
            let mark = match failure.kind {
                FailureKind::Failed => "",
                FailureKind::Error => "error: ",
                FailureKind::Flaky => "flaky: ",
            };
            let label = if i == 0 { "failing" } else { "" };
            let head = format!("{mark}{}{place}", one_line(&failure.id, self.width * 2));
            self.row(label, &head);
            let room = self.width.saturating_sub(LABEL + 2);
            let message = one_line(&failure.message, room);
            if !message.is_empty() {
                let _ = writeln!(self.out, "{:LABEL$}  {message}", "");
            }
        }
        let rest = tests.failures.len().saturating_sub(SHOWN_FAILURES) as u64 + tests.failures_left_out;
        if rest > 0 {
            self.row("", &format!("… and {rest} more; the JUnit file has them"));
        }
    }

    fn output(&mut self, report: &RunReport) {
        let Some(tail) = &report.output_tail else { return };
        let text = safe(tail);
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|l| !l.is_empty()).collect();
        let from = lines.len().saturating_sub(SHOWN_OUTPUT);
        let room = self.width.saturating_sub(LABEL + 2);
        for (i, line) in lines[from..].iter().enumerate() {
            let label = if i == 0 { "output" } else { "" };
            let _ = writeln!(self.out, "{label:<LABEL$}| {}", cut(&line.replace('\t', "    "), room));
        }
    }

    fn refused(&mut self, report: &RunReport) {
        for (i, refused) in report.refused.iter().take(SHOWN_REFUSED).enumerate() {
            let port = refused.port.map(|p| format!(":{p}")).unwrap_or_default();
            let times = if refused.times == 1 { "once".to_owned() } else { format!("{} times", refused.times) };
            let label = if i == 0 { "refused" } else { "" };
            self.row(
                label,
                &format!("{}{port}  {times}, by rule {}", one_line(&refused.host, 200), one_line(&refused.rule, 100)),
            );
        }
        if report.refused.len() > SHOWN_REFUSED {
            self.row("", &format!("… and {} more destinations", report.refused.len() - SHOWN_REFUSED));
        }
    }

    fn install(&mut self, report: &RunReport) {
        if report.added.is_empty() {
            return;
        }
        let all: Vec<String> = report
            .added
            .iter()
            .map(|a| format!("{} {} ({})", a.package, a.version.as_deref().unwrap_or("?"), a.why))
            .collect();
        self.row("added", &format!("by trialrun, not by the project: {}", all.join(", ")));
    }

    fn cost(&mut self, report: &RunReport) {
        if !report.phases.is_empty() {
            let phase = |p: &crate::run::Phase| match p.cpu_ms {
                Some(cpu) => format!("{} {} (CPU {})", p.name, duration(p.wall_ms), duration(cpu)),
                None => format!("{} {}", p.name, duration(p.wall_ms)),
            };
            let total: u64 = report.phases.iter().map(|p| p.wall_ms).sum();
            let all: Vec<String> = report.phases.iter().map(phase).collect();
            self.row("time", &format!("{}; together {}", all.join(", "), duration(total)));
        }
        if let Some(bytes) = report.peak_memory_bytes {
            self.row("memory", &format!("{} at its peak", ByteSize(bytes)));
        }
    }

    fn machine(&mut self, report: &RunReport) {
        let Some(isolation) = &report.isolation else { return };
        let layers =
            if isolation.layers.is_empty() { "no layers reported".to_owned() } else { isolation.layers.join(", ") };
        self.row("machine", &format!("{}: {layers}", isolation.driver));
        for missing in &isolation.missing {
            self.row("", &format!("missing: {missing}"));
        }
        for note in &isolation.notes {
            self.row("", note);
        }
    }

    fn results(&mut self, report: &RunReport) {
        if let Some(c) = &report.coverage {
            let lines = match (c.covered_lines, c.statements) {
                (Some(covered), Some(all)) => format!(" ({covered} of {all} lines)"),
                _ => String::new(),
            };
            self.row("coverage", &format!("{:.1} %{lines}", c.percent));
            if let Some(why) = &c.incomplete {
                self.row("", why);
            }
        }
        let all: Vec<String> = report.artifacts.iter().map(|a| format!("{}: {}", a.kind, a.path)).collect();
        for (i, line) in all.iter().enumerate() {
            self.row(if i == 0 { "wrote" } else { "" }, line);
        }
    }

    fn notes(&mut self, report: &RunReport) {
        let mut notes = Vec::new();
        if report.verdict.green() == Green::OnlySkips {
            notes.push("every test was skipped: green, and proof of nothing".to_owned());
        }
        if let Some(flaky) = report.tests.as_ref().map(|t| t.counts.flaky).filter(|n| *n > 0) {
            notes.push(format!("{flaky} flaky: different outcomes in one run, or passed only when tried again"));
        }
        if report.left_behind > 0 {
            notes.push(match report.left_behind {
                1 => "the suite left a process running; it was killed".to_owned(),
                n => format!("the suite left {n} processes running; they were killed"),
            });
        }
        if let Some(full) = report.disk_full {
            notes.push(format!("{full}: failures may come from that"));
        }
        notes.extend(report.tests.iter().flat_map(|t| t.notes.iter().cloned()));
        notes.extend(report.notes.iter().cloned());
        for (i, note) in notes.iter().take(SHOWN_NOTES).enumerate() {
            self.row(if i == 0 { "note" } else { "" }, note);
        }
        if notes.len() > SHOWN_NOTES {
            self.row("", &format!("… and {} more; --json has them", notes.len() - SHOWN_NOTES));
        }
    }
}

/// Breaks at spaces; a word longer than the line goes on in the next one, since a path that is cut can't be opened.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    // Double spaces set columns apart and are kept inside a line: `split` gives an empty word for each.
    for word in text.split(' ') {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            lines.push(String::new());
            used = 0;
        } else if used > 0 {
            lines.last_mut().into_iter().for_each(|l| l.push(' '));
            used += 1;
        }
        for c in word.chars() {
            if used == width {
                lines.push(String::new());
                used = 0;
            }
            lines.last_mut().into_iter().for_each(|l| l.push(c));
            used += 1;
        }
    }
    lines.into_iter().map(|l| l.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests;
