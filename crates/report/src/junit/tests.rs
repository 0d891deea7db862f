use super::*;
use crate::pytest_summary;

fn ok(xml: impl AsRef<[u8]>) -> Suite {
    read(xml.as_ref()).unwrap_or_else(|e| panic!("{e}"))
}

fn counts(xml: impl AsRef<[u8]>) -> Counts {
    ok(xml).counts
}

fn one(outcome: &str) -> String {
    format!("<testsuite name='s'><testcase classname='c' name='n'>{outcome}</testcase></testsuite>")
}

/// What pytest 9.2 wrote for corpus/probe.py; its last line said: 5 failed, 7 passed, 1 skipped, 2 xfailed, 1 xpassed,
/// 3 errors, 2 subtests passed.
const PYTEST: &[u8] = include_bytes!("../../corpus/pytest-9.2-xunit2.xml");
const PYTEST_XUNIT1: &[u8] = include_bytes!("../../corpus/pytest-9.2-xunit1.xml");

#[test]
fn pytests_own_report_is_counted_as_pytest_counts() {
    let summary = pytest_summary::parse(
        "5 failed, 7 passed, 1 skipped, 2 xfailed, 1 xpassed, 3 errors, 2 subtests passed in 0.05s",
    )
    .unwrap();
    for bytes in [PYTEST, PYTEST_XUNIT1] {
        let mut suite = ok(bytes);
        assert_eq!(suite.counts.passed, 8, "passed and xpassed look alike in JUnit");
        suite.compare(&summary);
        assert_eq!(suite.counts, summary.counts);
        assert_eq!(suite.notes, Vec::<String>::new());
        assert_eq!(suite.cases, 17);
        assert_eq!(suite.failures.len(), 8);
    }
    let first = &ok(PYTEST_XUNIT1).failures[0];
    assert_eq!(
        (first.id.as_str(), first.file.as_deref(), first.line),
        ("test_a.py::test_fail", Some("test_a.py"), Some(3))
    );
    assert_eq!(first.message, "AssertionError: boom");
    assert!(first.text.contains("assert 1 == 2"));
    assert_eq!(ok(PYTEST).failures[0].id, "test_a::test_fail");
}

#[test]
fn a_collection_error_says_what_failed() {
    let case = "<testcase classname='' name='test_b'><error message='collection failure'>test_b.py:1: in &lt;module&gt;\n    \
                import x\nE     File 'x'\nE   ModuleNotFoundError: No module named 'x'</error></testcase>";
    let first = &ok(format!("<testsuite name='pytest'>{case}</testsuite>")).failures[0];
    assert_eq!(first.message, "collection failure: ModuleNotFoundError: No module named 'x'");
    let silent = "<testsuite><testcase name='n'><error message='collection failure'/></testcase></testsuite>";
    assert_eq!(ok(silent).failures[0].message, "collection failure");
}

#[test]
fn an_error_at_teardown_keeps_the_pass() {
    let case = "<testcase classname='c' name='n'><error message='failed on teardown with \"x\"'/></testcase>";
    let suite = format!("<testsuites name='pytest tests'><testsuite name='pytest'>{case}</testsuite></testsuites>");
    assert_eq!(counts(suite), Counts { passed: 1, errors: 1, ..Counts::default() });
    let failed = format!(
        "<testsuite name='pytest'><testcase classname='c' name='n'><failure message='m'/></testcase>{case}</testsuite>"
    );
    let suite = ok(failed);
    assert_eq!(suite.counts, Counts { failed: 1, errors: 1, ..Counts::default() });
    assert!(suite.notes.is_empty(), "{:?}", suite.notes);
}

#[test]
fn outcomes_of_other_writers_are_known() {
    for (child, want) in [
        ("", Counts { passed: 1, ..Counts::default() }),
        (
            "<system-out>&lt;failure/&gt;</system-out><properties><property name='a' value='b'/></properties>",
            Counts { passed: 1, ..Counts::default() },
        ),
        ("<skipped/>", Counts { skipped: 1, ..Counts::default() }),
        ("<skipped type='pytest.xfail' message='m'/>", Counts { xfailed: 1, ..Counts::default() }),
        // jest writes each message of a failed test as a failure.
        ("<failure>a</failure><failure>b</failure>", Counts { failed: 1, ..Counts::default() }),
        ("<error/>", Counts { errors: 1, ..Counts::default() }),
        // nextest and surefire: passed at a later try; failed at every try.
        ("<flakyFailure message='m'>t</flakyFailure>", Counts { passed: 1, flaky: 1, ..Counts::default() }),
        ("<failure/><rerunFailure/><rerunFailure/>", Counts { failed: 1, ..Counts::default() }),
    ] {
        assert_eq!(counts(one(child)), want, "{child}");
    }
    assert_eq!(counts("<testsuite><testcase name='x' status='notrun'/></testsuite>").skipped, 1);
    let again = ok(one("<failure/><rerunFailure/><rerunFailure/>"));
    assert_eq!(again.failures[0].attempts, Some(3));
}

#[test]
fn an_id_with_two_outcomes_is_flaky_and_both_are_kept() {
    let suite = ok(
        "<testsuite><testcase classname='c' name='n'><failure/></testcase><testcase classname='c' name='n'/></testsuite>",
    );
    assert_eq!(suite.counts, Counts { passed: 1, failed: 1, flaky: 1, ..Counts::default() });
    assert!(suite.notes[0].contains("more than once"));
}

#[test]
fn strange_bytes_are_read() {
    for bytes in [
        &b"<testsuite><testcase name='a\x1b[31m\x00b'><failure message='\x00\x08'>\x1b\x00</failure></testcase></testsuite>"[..],
        b"<testsuite><testcase name='&#0;&#x1B;&#xD800;&#99999999999;&nope;&'><failure>&#0; &nope; &</failure></testcase></testsuite>",
        b"<testsuite><testcase name='\xed\xa0\x80'><failure/></testcase></testsuite>",
        b"<?xml version='1.0' encoding='utf-8'?><testsuite><testcase name='caf\xe9'><failure/></testcase></testsuite>",
        b"<?xml version='1.0' encoding='ISO-8859-1'?><testsuite><testcase name='caf\xe9'><failure/></testcase></testsuite>",
        b"\xef\xbb\xbf<testsuite><testcase name='a'><failure/></testcase></testsuite>",
        b"\n\n  <testsuite><testcase name='a<b'><failure message='x < y > z'/></testcase></testsuite>\n",
    ] {
        assert_eq!(counts(bytes), Counts { failed: 1, ..Counts::default() }, "{}", String::from_utf8_lossy(bytes));
    }
    let latin = ok(
        b"<?xml version='1.0' encoding='utf-8'?><testsuite><testcase name='caf\xe9'><failure/></testcase></testsuite>",
    );
    assert_eq!(latin.failures[0].id, "café");
    assert!(latin.notes[0].contains("not valid UTF-8"));
    let xml = one("<failure message='é'/>");
    for big in [true, false] {
        let unit = |u: u16| if big { u.to_be_bytes() } else { u.to_le_bytes() };
        let plain: Vec<u8> = xml.encode_utf16().flat_map(unit).collect();
        let marked: Vec<u8> = std::iter::once(0xfeff).chain(xml.encode_utf16()).flat_map(unit).collect();
        assert_eq!(ok(plain).failures[0].message, "é");
        assert_eq!(ok(marked).failures[0].message, "é");
    }
}

#[test]
fn entities_are_never_expanded() {
    let bomb = "<!DOCTYPE x [<!ENTITY a 'aaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'><!ENTITY f SYSTEM 'file:///etc/passwd'>]>\
        <testsuite><testcase name='&b;'><failure message='&f;'>&b; &f; &lt;</failure></testcase></testsuite>";
    let suite = ok(bomb);
    assert_eq!((suite.failures[0].id.as_str(), suite.failures[0].message.as_str()), ("&b;", "&f;"));
    assert_eq!(suite.failures[0].text, "&b; &f; <");
    assert!(suite.notes.iter().any(|n| n.contains("DOCTYPE")));
}

#[test]
fn roots_and_nesting_are_as_they_come() {
    assert_eq!(counts("<testsuite><testsuite><testsuite><testcase name='a'/></testsuite></testsuite><testcase name='b'/></testsuite>").passed, 2);
    let two = ok(
        "<?xml version='1.0'?><testsuite><testcase name='a'/></testsuite><?xml version='1.0'?><testsuites><testsuite><testcase name='b'><error/></testcase></testsuite></testsuites>",
    );
    assert_eq!(two.counts, Counts { passed: 1, errors: 1, ..Counts::default() });
    assert!(two.notes[0].contains("2 documents"));
    assert_eq!(counts("<testsuite/>"), Counts::default());
    assert_eq!(counts("<testsuites></testsuites>"), Counts::default());
}

#[test]
fn what_is_no_report_is_an_error() {
    assert!(matches!(read(b""), Err(JunitError::Empty)));
    assert!(matches!(read(b" \n "), Err(JunitError::Empty)));
    for bytes in [&b"hello"[..], b"<html><body/></html>", b"{}", b"<", b"<!-- x -->", b"\0\0\0", b"\xff\xfe"] {
        assert!(read(bytes).is_err(), "{bytes:?}");
    }
}

#[test]
fn a_report_that_is_cut_off_is_unreadable_wherever_it_is_cut() {
    for cut in 1..PYTEST.len() {
        let Err(error) = read(&PYTEST[..cut]) else { panic!("read at {cut}") };
        if let Some(so_far) = error.so_far() {
            assert!(so_far.cases <= 17);
        }
    }
    let error = read(&PYTEST[..PYTEST.len() * 9 / 10]).unwrap_err();
    assert!(error.so_far().unwrap().counts.failed >= 3);
    // A failure that was read counts, even when its case never ends.
    let error = read(b"<testsuite><testcase name='a'><failure message='m'>text").unwrap_err();
    assert_eq!(error.so_far().unwrap().counts.failed, 1);
    let error = read(b"<testsuite><testcase name='a'></testsuite>").unwrap_err();
    assert_eq!(error.so_far().unwrap().counts, Counts::default());
}

#[test]
fn cases_decide_and_wrong_totals_are_noted() {
    let lie = ok(
        "<testsuites tests='9' failures='0'><testsuite tests='9' failures='0' errors='0'><testcase name='a' time='1,234.5'><failure/></testcase><testcase name='b' time='NaN'/><testcase name='c' time='-1'/></testsuite></testsuites>",
    );
    assert_eq!(lie.counts, Counts { passed: 2, failed: 1, ..Counts::default() });
    assert!(lie.notes.iter().any(|n| n.contains("disagree")), "{:?}", lie.notes);
    assert_eq!(lie.seconds, 1234.5);
    let fine = ok(
        "<testsuites><testsuite tests='1' failures='0'><testcase name='a'/></testsuite><testsuite tests='1' failures='1'><testcase name='b'><failure/></testcase></testsuite></testsuites>",
    );
    assert!(fine.notes.is_empty(), "{:?}", fine.notes);
    let overflow = ok(
        "<testsuites><testsuite tests='18446744073709551615'/><testsuite tests='18446744073709551615'/></testsuites>",
    );
    assert_eq!(overflow.counts.total(), 0);
}

#[test]
fn the_terminal_and_the_report_are_compared() {
    let mut suite = ok(one(""));
    suite.compare(&pytest_summary::parse("2 failed, 1 passed in 1s").unwrap());
    assert!(suite.notes[0].contains("disagree"));
}

#[test]
fn skipped_subtests_are_not_taken_for_skipped_tests_where_that_can_be_told() {
    let pytest = |n: usize| {
        format!("<testsuite name='pytest'><testcase name='a'>{}</testcase></testsuite>", "<skipped/>".repeat(n))
    };
    assert_eq!(counts(pytest(2)), Counts { passed: 1, ..Counts::default() });
    let mut one = ok(pytest(1));
    assert_eq!(one.counts, Counts { skipped: 1, ..Counts::default() });
    one.compare(&pytest_summary::parse("1 passed in 1s").unwrap());
    assert_eq!(one.counts.passed, 0, "text of the terminal never makes a pass");
    assert!(one.notes[0].contains("may be subtests"));
}

#[test]
fn the_place_of_a_failure_is_in_the_project_if_any_line_of_it_is() {
    let text = "x\ntests/test_a.py:7: in test\n    f()\n/usr/lib/python3.11/urllib/parse.py:117: UnicodeDecodeError";
    assert_eq!(place(text), Some(("tests/test_a.py".to_owned(), 7)));
    assert_eq!(place("/usr/lib/x.py:3: E"), Some(("/usr/lib/x.py".to_owned(), 3)));
    assert_eq!(place("E   a: b: c\n> x:1:"), None);
}

#[test]
fn huge_reports_stay_within_bounds() {
    let attribute = format!(
        "<testsuite><testcase name='a'><failure message='{}'>&amp;{}</failure></testcase></testsuite>",
        "&lt;".repeat(12 << 20),
        "y".repeat(1 << 20)
    );
    let suite = ok(&attribute);
    assert!(suite.failures[0].message.len() <= MAX_NAME && suite.failures[0].text.len() <= MAX_TEXT);
    let mut many = String::from("<testsuite>");
    for i in 0..1_000_000 {
        many.push_str(&format!("<testcase name='t{i}'><failure message='m'/></testcase>"));
    }
    many.push_str("</testsuite>");
    let suite = ok(&many);
    assert_eq!((suite.counts.failed, suite.failures.len()), (1_000_000, MAX_FAILURES));
    assert_eq!(suite.failures_left_out, 1_000_000 - MAX_FAILURES as u64);
    let records =
        format!("<testsuite name='pytest'><testcase name='a'>{}</testcase></testsuite>", "<failure/>".repeat(1000));
    assert_eq!(counts(records).failed, 1000);
    assert!(read("<testsuite>".repeat(100_000).as_bytes()).is_err());
}

#[test]
fn every_file_of_the_corpus_is_read_or_refused() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "xml") {
            let bytes = std::fs::read(&path).unwrap();
            let result = read(&bytes);
            let bad = path.file_name().unwrap().to_str().unwrap().starts_with("bad-");
            assert_eq!(result.is_err(), bad, "{}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 8);
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_read_without_a_crash(bytes: Vec<u8>) {
        let _ = read(&bytes);
    }

    #[test]
    fn anything_near_junit_is_read_without_a_crash(parts in proptest::collection::vec(proptest::sample::select(vec![
        "<testsuites>", "</testsuites>", "<testsuite name='pytest' tests='1'>", "</testsuite>", "<testcase classname='a' name='b'>",
        "<testcase name='b' file='a.py' line='x' time='1'/>", "</testcase>", "<failure message='m'>", "</failure>", "<error/>",
        "<error message='failed on teardown with x'/>", "<skipped type='pytest.xfail'/>", "<flakyFailure/>", "<![CDATA[", "]]>", "<!--", "-->",
        "&lt;", "&", "&#x0;", "<!DOCTYPE a [", "]>", "\u{0}", "é", "='", "\"", "<?xml?>", "a.py:3: E",
    ]), 0..40)) {
        let text = parts.concat();
        if let Ok(suite) = read(text.as_bytes()) {
            proptest::prop_assert!(suite.counts.total() >= suite.cases, "each case has an outcome: {text}");
        }
    }

    #[test]
    fn a_changed_byte_never_crashes_the_reader(at in 0..PYTEST.len(), byte: u8) {
        let mut bytes = PYTEST.to_vec();
        bytes[at] = byte;
        let _ = read(&bytes);
    }
}
