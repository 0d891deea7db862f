use super::*;
use crate::{
    coverage::Coverage,
    junit,
    run::{AddedPackage, Artifact, Phase, Refused, RunReport, Tests, Verdict},
};
use trialrun_model::{ExitStatus, Isolation};

fn full() -> RunReport {
    let xml = include_bytes!("../../corpus/pytest-9.2-xunit2.xml");
    let mut suite = junit::read(xml).unwrap();
    suite.failures.truncate(2);
    suite.failures_left_out = 6;
    let mut report =
        RunReport::new("demo", vec!["python".into()], Verdict::Failed { status: ExitStatus::Code(1).into() });
    report.tests = Some(Tests::from(suite));
    report.refused = vec![
        Refused { host: "api.example.com".into(), port: Some(443), rule: "off".into(), times: 3 },
        Refused { host: "10.0.0.1\u{1b}[2J".into(), port: None, rule: "deny 10.0.0.0/8".into(), times: 1 },
    ];
    report.added = vec![AddedPackage {
        package: "pytest-cov".into(),
        version: Some("7.1.0".into()),
        why: "measures coverage".into(),
    }];
    report.phases = vec![
        Phase { name: "upload".into(), wall_ms: 340, cpu_ms: None },
        Phase { name: "install".into(), wall_ms: 4_230, cpu_ms: Some(3_100) },
        Phase { name: "tests".into(), wall_ms: 185_000, cpu_ms: Some(61_000) },
    ];
    report.peak_memory_bytes = Some(150 << 20);
    report.isolation = Some(Isolation {
        driver: "container".into(),
        layers: vec!["user namespace".into(), "seccomp allow-list".into()],
        missing: vec!["landlock: the kernel has none".into()],
        notes: vec!["4 vCPUs asked for, 2 cores present".into()],
    });
    report.coverage = Some(Coverage {
        percent: 87.55,
        covered_lines: Some(700),
        statements: Some(800),
        missing_branches: None,
        incomplete: None,
    });
    report.artifacts = vec![
        Artifact { kind: "JUnit".into(), path: "out/junit.xml".into() },
        Artifact { kind: "coverage".into(), path: "out/htmlcov".into() },
    ];
    report.left_behind = 2;
    report.disk_full = Some(trialrun_model::DiskFull::Limit);
    report
}

#[test]
fn the_whole_screen() {
    let got = render(&full(), ScreenOptions { color: false, width: 90 });
    let want = "\
FAILED  exit code 1: some tests failed
tests     5 failed, 3 errors, 8 passed, 1 skipped, 2 xfailed (of 19)
failing   test_a::test_fail  test_a.py:3
            AssertionError: boom
          test_a::test_xps
            [XPASS(strict)] knowns
          … and 6 more; the JUnit file has them
refused   api.example.com:443  3 times, by rule off
          10.0.0.1  once, by rule deny 10.0.0.0/8
added     by trialrun, not by the project: pytest-cov 7.1.0 (measures coverage)
time      upload 340 ms, install 4.2 s (CPU 3.1 s), tests 3 min 05 s (CPU 1 min 01 s);
          together 3 min 09 s
memory    150 MiB at its peak
machine   container: user namespace, seccomp allow-list
          missing: landlock: the kernel has none
          4 vCPUs asked for, 2 cores present
coverage  87.5 % (700 of 800 lines)
wrote     JUnit: out/junit.xml
          coverage: out/htmlcov
note      the suite left 2 processes running; they were killed
          the machine's disk is full (--disk): failures may come from that
";
    assert_eq!(got, want, "\n{got}");
}

#[test]
fn the_first_line_tells_status_and_meaning() {
    let first = |verdict: Verdict| {
        render(&RunReport::new("p", Vec::new(), verdict), ScreenOptions { color: false, width: 200 })
    };
    let status = |code| ExitStatus::Code(code).into();
    for (verdict, want) in [
        (Verdict::Passed, "PASSED  exit code 0: all tests that ran passed\n"),
        (
            Verdict::Failed { status: ExitStatus::Signal(11).into() },
            "FAILED  SIGSEGV, trialrun exits with 139: crashed (SIGSEGV): a bug in native code, usually a C extension\n",
        ),
        (
            Verdict::NothingRan { status: status(5) },
            "NOTHING RAN  exit code 5: no tests were collected: nothing was tested\n",
        ),
        (
            Verdict::NothingRan { status: status(0) },
            "NOTHING RAN  exit code 0, trialrun exits with 5: the suite succeeded, but no tests ran: nothing was tested\n",
        ),
        (
            Verdict::TimedOut { limit_ms: 90_000 },
            "TIMED OUT  trialrun exits with 124: the time limit of 1 min 30 s was reached; everything was killed\n",
        ),
        (
            Verdict::InstallFailed { step: "requirements.txt".into(), status: Some(status(1)) },
            "INSTALL FAILED  exit code 1, trialrun exits with 122: the requirements could not be installed (requirements.txt); no test ran\n",
        ),
        (
            Verdict::CouldNotRun { stage: "machine".into(), message: "no cgroup".into() },
            "COULD NOT RUN  trialrun exits with 121: trialrun failed, not your code (machine): no cgroup\n",
        ),
    ] {
        assert_eq!(first(verdict), want);
    }
    let skipped = first(Verdict::OnlySkipped);
    assert!(skipped.starts_with("ALL SKIPPED") && skipped.contains("proof of nothing"), "{skipped}");
}

#[test]
fn colour_is_ours_and_nothing_of_theirs_reaches_the_terminal() {
    let mut report = full();
    let evil = "\u{1b}]0;x\u{7}\u{1b}[2J\u{202e}\r\u{8}\nsecond line \u{9b}31m".to_owned();
    report.path = evil.clone();
    report.meaning = evil.clone();
    report.output_tail = Some(evil.clone());
    report.notes = vec![evil.clone(); 100];
    report.refused = vec![Refused { host: evil.clone(), port: None, rule: evil.clone(), times: 2 }; 100];
    report.added = vec![AddedPackage { package: evil.clone(), version: Some(evil.clone()), why: evil.clone() }];
    report.artifacts = vec![Artifact { kind: evil.clone(), path: evil.clone() }];
    report.phases[0].name = evil.clone();
    if let Some(tests) = &mut report.tests {
        tests.unreadable = Some(evil.clone());
        tests.notes = vec![evil.clone()];
        for failure in &mut tests.failures {
            failure.id = evil.clone();
            failure.message = evil.clone();
            failure.file = Some(evil.clone());
        }
    }
    let plain = render(&report, ScreenOptions::default());
    assert!(plain.chars().all(|c| c == '\n' || !(c.is_control() || c == '\u{202e}')), "{plain:?}");
    assert!(plain.lines().all(|l| l.chars().count() <= 100), "{plain}");
    assert!(plain.lines().count() < 200 && plain.contains("more destinations") && plain.contains("more; --json"));
    let colour = render(&full(), ScreenOptions { color: true, width: 90 });
    assert!(colour.starts_with("\u{1b}[1;31mFAILED\u{1b}[0m  exit code 1"));
}

#[test]
fn a_narrow_terminal_breaks_lines_and_loses_nothing() {
    assert_eq!(wrap("aaa bbb cccccccccc d", 5), ["aaa", "bbb", "ccccc", "ccccc", "d"]);
    assert_eq!(wrap("", 5), [""]);
    assert_eq!(wrap("a  b", 9), ["a  b"]);
}

#[test]
fn times_read_as_people_write_them() {
    for (ms, want) in [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.0 s"),
        (59_999, "59.9 s"),
        (60_000, "1 min 00 s"),
        (7_800_000, "2 h 10 min"),
    ] {
        assert_eq!(duration(ms), want);
    }
}
