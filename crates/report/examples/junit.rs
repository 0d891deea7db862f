//! Reads a JUnit file and, if given, the suite's output, and prints the screen of it:
//! `cargo run -p trialrun-report --example junit -- JUNIT.xml [OUTPUT.txt]`.

use trialrun_model::ExitStatus;
use trialrun_report::{
    junit, pytest_summary,
    run::{RunReport, Tests, Verdict},
    screen,
};

fn main() {
    let mut args = std::env::args().skip(1);
    let bytes = std::fs::read(args.next().unwrap_or_default()).unwrap_or_default();
    let summary = args
        .next()
        .and_then(|o| std::fs::read(o).ok())
        .and_then(|o| pytest_summary::parse(&String::from_utf8_lossy(&o)));
    let (verdict, tests) = match junit::read(&bytes) {
        Ok(mut suite) => {
            if let Some(summary) = &summary {
                suite.compare(summary);
            }
            let failed = Verdict::Failed { status: ExitStatus::Code(1).into() };
            (if suite.counts.any_failed() { failed } else { Verdict::Passed }, Tests::from(suite))
        }
        Err(e) => (Verdict::Unproven { reason: e.to_string() }, Tests::from(&e)),
    };
    let mut report = RunReport::new("", Vec::new(), verdict);
    report.tests = Some(tests);
    print!("{}", screen::render(&report, screen::ScreenOptions::default()));
}
