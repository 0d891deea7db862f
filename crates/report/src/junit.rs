//! Reads JUnit XML as the world really writes it, and counts from its cases.
//!
//! The report comes from the machine in which the code under trial ran, so every byte may be hostile, and honest
//! writers are sloppy too: raw control characters, wrong encodings, two documents in one file, totals that disagree.
//! Rules:
//!
//! - The cases decide. Totals in attributes are compared and a difference is noted.
//! - What ends in the middle, is no XML, or holds no JUnit is [`JunitError`], which carries what was read so far, and is
//!   never a pass.
//! - No entity is defined or expanded, no DOCTYPE is followed.
//! - Memory is bounded: what is kept of one case, and of all, has a limit; the counts go on.

use crate::Counts;
use quick_xml::{
    Reader,
    events::{BytesStart, Event},
};
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

/// Bytes kept of one failure's text. A traceback is some kilobytes.
const MAX_TEXT: usize = 64 << 10;
/// Bytes kept of a name or message.
const MAX_NAME: usize = 4 << 10;
/// Failures kept with their text.
const MAX_FAILURES: usize = 2_000;
/// Bytes of text kept of all failures together.
const MAX_ALL_TEXT: usize = 8 << 20;
/// Ids remembered to see repetitions. 16 bytes each.
const MAX_IDS: usize = 4_000_000;
/// Elements inside each other. JUnit needs six or so.
const MAX_DEPTH: usize = 256;

/// In which way a case did not simply pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The test failed.
    Failed,
    /// Something around it did: setup, teardown, collection.
    Error,
    /// It failed and passed when tried again.
    Flaky,
}

/// A case that failed, or did at first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// `file::Class::name` where the file is known, else `classname::name`.
    pub id: String,
    /// In which way.
    pub kind: FailureKind,
    /// First line of the message.
    pub message: String,
    /// The full text, usually a traceback, cut at a limit.
    pub text: String,
    /// File, as the report or the traceback's last line has it.
    pub file: Option<String>,
    /// Line in it, counted from 1.
    pub line: Option<u64>,
    /// Attempts that were made, where the report tells.
    pub attempts: Option<u64>,
}

/// A report, counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Suite {
    /// Tests by outcome.
    pub counts: Counts,
    /// `<testcase>` elements.
    pub cases: u64,
    /// Failures, in order, up to a limit.
    pub failures: Vec<Failure>,
    /// Failures beyond the limit, which are only counted.
    pub failures_left_out: u64,
    /// Sum of the cases' times in seconds, where they are numbers.
    pub seconds: f64,
    /// What is odd about the report.
    pub notes: Vec<String>,
}

/// Why a report could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub enum JunitError {
    /// The file is empty.
    #[error("read JUnit report: it is empty")]
    Empty,
    /// It is XML, or something, but not JUnit.
    #[error("read JUnit report: no <testsuites> or <testsuite> in it")]
    NotJunit,
    /// It is broken or cut off at some place.
    #[error("read JUnit report: {message} at byte {offset}, after {} cases ({})", so_far.cases, so_far.counts)]
    Unreadable {
        /// What is wrong.
        message: String,
        /// Where, in the decoded text.
        offset: u64,
        /// What was read up to there.
        so_far: Box<Suite>,
    },
}

impl JunitError {
    /// What was read before the reader had to stop.
    #[must_use]
    pub fn so_far(&self) -> Option<&Suite> {
        match self {
            Self::Unreadable { so_far, .. } => Some(so_far),
            Self::Empty | Self::NotJunit => None,
        }
    }
}

impl Suite {
    /// Compares the report with pytest's last line. Moves the xpassed, which JUnit doesn't tell from the passed, and
    /// notes every difference.
    pub fn compare(&mut self, summary: &crate::pytest_summary::Summary) {
        let said = summary.counts;
        if said.xpassed > 0 && self.counts.xpassed == 0 && self.counts.passed == said.passed + said.xpassed {
            self.counts.passed = said.passed;
            self.counts.xpassed = said.xpassed;
        }
        let mine = Counts { flaky: 0, ..self.counts };
        // A single skipped subtest looks like a skipped test.
        let subtests = Counts { passed: said.passed, skipped: said.skipped, ..mine } == said
            && said.passed > mine.passed
            && said.passed + said.skipped == mine.passed + mine.skipped;
        if subtests {
            self.notes.push(format!(
                "{} of the skipped may be subtests of passed tests: JUnit does not tell them apart",
                mine.skipped.saturating_sub(said.skipped)
            ));
        } else if mine != said {
            self.notes.push(format!("the JUnit report ({mine}) and pytest's last line ({said}) disagree"));
        }
    }
}

/// Reads a report.
///
/// # Errors
///
/// When it is empty, not JUnit, broken or cut off.
pub fn read(bytes: &[u8]) -> Result<Suite, JunitError> {
    let mut state = State::default();
    let text = decode(bytes, &mut state.suite.notes);
    if text.trim().is_empty() {
        return Err(JunitError::Empty);
    }
    state.run(&text)
}

/// Makes text of the bytes, whatever they claim to be.
fn decode<'a>(bytes: &'a [u8], notes: &mut Vec<String>) -> Cow<'a, str> {
    let utf16 = |bytes: &[u8], big: bool| {
        let units = bytes
            .chunks_exact(2)
            .map(|b| if big { u16::from_be_bytes([b[0], b[1]]) } else { u16::from_le_bytes([b[0], b[1]]) });
        Cow::Owned(char::decode_utf16(units).map(|c| c.unwrap_or('\u{fffd}')).collect::<String>())
    };
    match bytes {
        [0xff, 0xfe, rest @ ..] => return utf16(rest, false),
        [0xfe, 0xff, rest @ ..] => return utf16(rest, true),
        [b'<', 0, ..] => return utf16(bytes, false),
        [0, b'<', ..] => return utf16(bytes, true),
        _ => {}
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        return Cow::Borrowed(text);
    }
    let head = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).to_ascii_lowercase();
    let declared = head.split("?>").next().unwrap_or_default();
    let latin = ["iso-8859-1", "latin-1", "latin1", "windows-1252", "cp1252"].iter().any(|e| declared.contains(e));
    if latin {
        return Cow::Owned(bytes.iter().map(|b| char::from(*b)).collect());
    }
    notes.push("the report is not valid UTF-8: wrong bytes were read as Latin-1".to_owned());
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        out.extend(chunk.invalid().iter().map(|b| char::from(*b)));
    }
    Cow::Owned(out)
}

/// Resolves character references and the five names of XML; everything else stays as it is written. Never more than
/// `limit` bytes.
fn unescape(raw: &str, limit: usize) -> String {
    // A reference is longer than what it stands for, so looking at this much is enough.
    let mut rest = cut(raw, limit.saturating_mul(10));
    let mut out = String::new();
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        match rest.get(1..).and_then(|r| r.char_indices().take(12).find(|(_, c)| *c == ';')) {
            Some((end, _)) => {
                match reference(&rest[1..=end]) {
                    Some(c) => out.push(c),
                    None => out.push_str(&rest[..end + 2]),
                }
                rest = &rest[end + 2..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
        if out.len() > limit {
            break;
        }
    }
    out.push_str(rest);
    let end = cut(&out, limit).len();
    out.truncate(end);
    out
}

fn reference(name: &str) -> Option<char> {
    Some(match name {
        "lt" => '<',
        "gt" => '>',
        "amp" => '&',
        "quot" => '"',
        "apos" => '\'',
        _ => {
            let number = name.strip_prefix('#')?;
            let code = match number.strip_prefix(['x', 'X']) {
                Some(hex) => u32::from_str_radix(hex, 16).ok()?,
                None => number.parse().ok()?,
            };
            // A lone surrogate or a number beyond Unicode still is a character that somebody meant.
            char::from_u32(code).unwrap_or('\u{fffd}')
        }
    })
}

fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Totals as an element's attributes give them.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    tests: Option<u64>,
    failures: Option<u64>,
    errors: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    Suites,
    Suite,
    Case,
    /// A child of a case that says something about its outcome; its text is kept.
    Result,
    Other,
}

/// A result child of the open case.
#[derive(Debug, Default)]
struct Record {
    tag: String,
    message: String,
    kind: String,
    text: String,
}

#[derive(Debug, Default)]
struct Case {
    class: String,
    name: String,
    file: Option<String>,
    line: Option<u64>,
    not_run: bool,
    records: Vec<Record>,
    records_left_out: u64,
}

/// What was seen of an id, as bits.
const SEEN_PASSED: u8 = 1;
const SEEN_FAILED: u8 = 2;
const SEEN_TEARDOWN: u8 = 4;
const SEEN_OTHER: u8 = 8;
const TOLD_FLAKY: u8 = 16;

#[derive(Debug, Default)]
struct State {
    suite: Suite,
    open: Vec<Element>,
    case: Option<Case>,
    roots: u64,
    stray: bool,
    doctype: bool,
    pytest: bool,
    attributes: Totals,
    /// The open root has totals of its own.
    root_totals: bool,
    kept_text: usize,
    ids: HashMap<u64, u8>,
    hasher: RandomState,
    repeated: u64,
}

impl State {
    fn run(mut self, text: &str) -> Result<Suite, JunitError> {
        let mut reader = Reader::from_str(text);
        let config = reader.config_mut();
        config.allow_dangling_amp = true;
        config.check_end_names = true;
        loop {
            let event = match reader.read_event() {
                Ok(event) => event,
                Err(error) => return Err(self.unreadable(error.to_string(), reader.error_position())),
            };
            let problem = match event {
                Event::Eof => break,
                Event::Start(tag) => self.start(&tag).err(),
                Event::Empty(tag) => self.start(&tag).map(|()| self.end()).err(),
                Event::End(_) => {
                    self.end();
                    None
                }
                Event::Text(part) => {
                    self.text(&part.into_inner());
                    None
                }
                Event::CData(part) => {
                    self.text(&part.into_inner());
                    None
                }
                Event::GeneralRef(name) => {
                    match reference(&name) {
                        Some(c) => self.text(c.encode_utf8(&mut [0; 4])),
                        // Whatever a DOCTYPE may define, it stays as it is written.
                        None => self.text(&format!("&{};", cut(&name, 64))),
                    }
                    None
                }
                Event::DocType(_) => {
                    self.doctype = true;
                    None
                }
                Event::Decl(_) | Event::Comment(_) | Event::PI(_) => None,
            };
            if let Some(message) = problem {
                return Err(self.unreadable(message, reader.buffer_position()));
            }
        }
        if !self.open.is_empty() {
            return Err(self.unreadable("it ends in the middle".to_owned(), text.len() as u64));
        }
        if self.roots == 0 {
            return Err(JunitError::NotJunit);
        }
        self.closing_notes();
        Ok(self.suite)
    }

    fn unreadable(mut self, message: String, offset: u64) -> JunitError {
        if self.roots == 0 {
            return JunitError::NotJunit;
        }
        // The open case is left out: how it would have ended is not known. One with a failure already read counts.
        if self.case.as_ref().is_some_and(|c| c.records.iter().any(|r| matches!(r.tag.as_str(), "failure" | "error"))) {
            self.close_case();
        }
        self.closing_notes();
        JunitError::Unreadable { message: cut(&message, 300).to_owned(), offset, so_far: Box::new(self.suite) }
    }

    fn start(&mut self, tag: &BytesStart<'_>) -> Result<(), String> {
        if self.open.len() >= MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} elements inside each other"));
        }
        let local = tag.local_name();
        let name: &str = local.as_ref();
        let parent = self.open.last().copied();
        let element = match (parent, name) {
            (None, "testsuites") | (Some(Element::Suites), "testsuites") => Element::Suites,
            (None | Some(Element::Suites | Element::Suite), "testsuite") => Element::Suite,
            (Some(Element::Suites | Element::Suite), "testcase") => Element::Case,
            (
                Some(Element::Case),
                "failure" | "error" | "skipped" | "flakyFailure" | "flakyError" | "rerunFailure" | "rerunError",
            ) => Element::Result,
            (None, other) => {
                if self.roots == 0 {
                    return Err(format!("the root is <{}>", cut(other, 64)));
                }
                self.stray = true;
                Element::Other
            }
            _ => Element::Other,
        };
        match element {
            Element::Suites | Element::Suite => self.open_suite(tag, parent),
            Element::Case => self.open_case(tag),
            Element::Result => self.open_result(tag, name),
            Element::Other => {}
        }
        self.open.push(element);
        Ok(())
    }

    fn open_suite(&mut self, tag: &BytesStart<'_>, parent: Option<Element>) {
        let mut own = Totals::default();
        for (key, value) in attributes(tag) {
            match key {
                // Both names are pytest's; the second can be configured, the first is there since pytest 8.3.
                "name" => self.pytest |= matches!(value, "pytest tests" | "pytest"),
                "tests" => own.tests = value.trim().parse().ok(),
                "failures" => own.failures = value.trim().parse().ok(),
                "errors" => own.errors = value.trim().parse().ok(),
                _ => {}
            }
        }
        if parent.is_none() {
            self.roots += 1;
        }
        // Totals of outer elements hold those of inner ones: only the outermost that has any is compared.
        if parent.is_none() || (parent == Some(Element::Suites) && self.open.len() == 1) {
            let add = |a: &mut Option<u64>, b: Option<u64>| {
                if let Some(b) = b {
                    *a = Some(a.unwrap_or(0).saturating_add(b));
                }
            };
            if !(parent.is_some() && self.root_totals) {
                add(&mut self.attributes.tests, own.tests);
                add(&mut self.attributes.failures, own.failures);
                add(&mut self.attributes.errors, own.errors);
            }
            if parent.is_none() {
                self.root_totals = own.tests.is_some() || own.failures.is_some();
            }
        }
    }

    fn open_case(&mut self, tag: &BytesStart<'_>) {
        let mut case = Case::default();
        for (key, value) in attributes(tag) {
            match key {
                "classname" => case.class = unescape(value, MAX_NAME),
                "name" => case.name = unescape(value, MAX_NAME),
                "file" => case.file = Some(unescape(value, MAX_NAME)).filter(|f| !f.is_empty()),
                "line" => case.line = value.trim().parse().ok(),
                "time" => self.suite.seconds += seconds(value).unwrap_or(0.0),
                // Google Test: a disabled test is a case like any other but for this.
                "status" => case.not_run = matches!(value, "notrun" | "disabled" | "skipped"),
                _ => {}
            }
        }
        self.case = Some(case);
    }

    fn open_result(&mut self, tag: &BytesStart<'_>, name: &str) {
        let Some(case) = &mut self.case else { return };
        // Memory of one case stays bounded, and a count must still be right.
        if case.records.len() >= 64 {
            case.records_left_out += u64::from(matches!(name, "failure" | "error"));
            return;
        }
        let mut record = Record { tag: name.to_owned(), ..Record::default() };
        for (key, value) in attributes(tag) {
            match key {
                "message" => record.message = unescape(value, MAX_TEXT),
                "type" => record.kind = unescape(value, MAX_NAME),
                _ => {}
            }
        }
        case.records.push(record);
    }

    fn text(&mut self, part: &str) {
        match self.open.last() {
            None if !part.trim().is_empty() => self.stray = true,
            Some(Element::Result) => {
                let kept = self.case.as_mut().filter(|c| c.records_left_out == 0).and_then(|c| c.records.last_mut());
                if let Some(record) = kept {
                    let room = MAX_TEXT.saturating_sub(record.text.len());
                    record.text.push_str(cut(part, room));
                }
            }
            _ => {}
        }
    }

    fn end(&mut self) {
        if self.open.pop() == Some(Element::Case) {
            self.close_case();
        }
    }

    fn close_case(&mut self) {
        let Some(case) = self.case.take() else { return };
        self.suite.cases += 1;
        let id = id(&case);
        let key = self.hasher.hash_one(&id);
        let before = self.ids.get(&key).copied().unwrap_or(0);
        let has = |tags: &[&str]| case.records.iter().any(|r| tags.contains(&r.tag.as_str()));
        let teardown = |r: &Record| {
            r.tag == "error"
                && (r.message.starts_with("failed on teardown with") || r.message == "test teardown failure")
        };
        let (failures, errors) = (count(&case, "failure"), count(&case, "error"));
        let counts = &mut self.suite.counts;
        let mut now = 0;

        if failures + errors > 0 {
            // pytest counts each failed subtest; other writers put several messages of one failure into one case.
            counts.failed += if self.pytest { failures + case.records_left_out } else { failures.min(1) };
            counts.errors +=
                if self.pytest || failures == 0 { errors.min(if self.pytest { u64::MAX } else { 1 }) } else { 0 };
            let only_teardown = failures == 0 && case.records.iter().all(|r| r.tag != "error" || teardown(r));
            if only_teardown && !has(&["skipped"]) {
                now |= SEEN_TEARDOWN;
                // The call passed, unless this is the second element that pytest writes for a test whose call failed.
                if self.pytest && before & (SEEN_FAILED | SEEN_PASSED | SEEN_OTHER) == 0 {
                    counts.passed += 1;
                    now |= SEEN_PASSED;
                }
            } else if only_teardown {
                now |= SEEN_TEARDOWN;
            } else {
                now |= SEEN_FAILED;
            }
        }
        // A test is skipped once; several of these are skipped subtests of a test that went on (pytest 9).
        let subtests = self.pytest && count(&case, "skipped") > 1;
        let skip = case.records.iter().find(|r| r.tag == "skipped");
        if let Some(skip) = skip.filter(|_| now & SEEN_FAILED == 0 && !subtests) {
            if skip.kind == "pytest.xfail" {
                counts.xfailed += 1;
            } else {
                counts.skipped += 1;
            }
            now |= SEEN_OTHER;
        } else if now == 0 {
            if case.not_run {
                counts.skipped += 1;
                now |= SEEN_OTHER;
            } else {
                counts.passed += 1;
                now |= SEEN_PASSED;
            }
        }

        let retried = has(&["flakyFailure", "flakyError"]);
        let both =
            before & SEEN_FAILED != 0 && now & SEEN_PASSED != 0 || before & SEEN_PASSED != 0 && now & SEEN_FAILED != 0;
        let flaky = (retried && now & SEEN_FAILED == 0) || both;
        if flaky && before & TOLD_FLAKY == 0 {
            counts.flaky += 1;
            now |= TOLD_FLAKY;
        }
        if before != 0 && now & SEEN_TEARDOWN == 0 {
            self.repeated += 1;
        }
        if self.ids.len() < MAX_IDS || before != 0 {
            self.ids.insert(key, before | now);
        }
        self.keep(case, &id, retried && now & SEEN_FAILED == 0);
    }

    fn keep(&mut self, case: Case, id: &str, flaky: bool) {
        let attempts =
            case.records.iter().filter(|r| r.tag.starts_with("flaky") || r.tag.starts_with("rerun")).count() as u64;
        let attempts = (attempts > 0).then_some(attempts + 1);
        for record in case.records {
            let kind = match record.tag.as_str() {
                "failure" => FailureKind::Failed,
                "error" => FailureKind::Error,
                "flakyFailure" | "flakyError" if flaky => FailureKind::Flaky,
                _ => continue,
            };
            let size = record.text.len() + record.message.len();
            if self.suite.failures.len() >= MAX_FAILURES || self.kept_text + size > MAX_ALL_TEXT {
                self.suite.failures_left_out += 1;
                continue;
            }
            self.kept_text += size;
            let text = if record.text.trim().is_empty() { &record.message } else { &record.text };
            let first = |t: &str| t.lines().map(str::trim).find(|l| !l.is_empty()).map(|l| cut(l, MAX_NAME).to_owned());
            let mut message =
                first(&record.message).or_else(|| first(&record.text)).unwrap_or_else(|| record.kind.clone());
            if message == "collection failure" {
                // pytest's whole message; what failed is in its traceback's last line of error.
                let error =
                    text.lines().rev().filter_map(|l| l.strip_prefix("E ")).map(str::trim).find(|l| !l.is_empty());
                message.extend(error.into_iter().flat_map(|e| [": ", cut(e, MAX_NAME)]));
            }
            let place = place(text);
            let (file, line) = match (&place, &case.file) {
                (Some((file, line)), _) => (Some(file.clone()), Some(*line)),
                // pytest counts the lines of its `line` attribute from 0.
                (None, Some(file)) => {
                    (Some(file.clone()), case.line.map(|l| if self.pytest { l.saturating_add(1) } else { l }))
                }
                (None, None) => (None, None),
            };
            self.suite.failures.push(Failure {
                id: id.to_owned(),
                kind,
                message,
                text: text.clone(),
                file,
                line,
                attempts,
            });
        }
        self.suite.failures_left_out += case.records_left_out;
    }

    fn closing_notes(&mut self) {
        let counts = self.suite.counts;
        let notes = &mut self.suite.notes;
        if self.roots > 1 {
            notes.push(format!("the report holds {} documents in one file", self.roots));
        }
        if self.stray {
            notes.push("there is something after the end of the report".to_owned());
        }
        if self.doctype {
            notes.push("the report has a DOCTYPE, which was not followed".to_owned());
        }
        if self.repeated > 0 {
            notes.push(format!("{} test ids appear more than once", self.repeated));
        }
        let Totals { tests, failures, errors } = self.attributes;
        // pytest counts passed subtests in `tests` and writes no case for them.
        let tests_differ = tests.is_some_and(|t| t != self.suite.cases && !(self.pytest && t > self.suite.cases));
        let differ = failures.is_some_and(|f| f != counts.failed) || errors.is_some_and(|e| e != counts.errors);
        if tests_differ || differ {
            let say = |n: Option<u64>| n.map_or("?".to_owned(), |n| n.to_string());
            notes.push(format!(
                "the report's own totals ({} tests, {} failures, {} errors) disagree with its cases ({} cases, {} failed, {} errors): the cases count",
                say(tests),
                say(failures),
                say(errors),
                self.suite.cases,
                counts.failed,
                counts.errors,
            ));
        }
    }
}

fn count(case: &Case, tag: &str) -> u64 {
    case.records.iter().filter(|r| r.tag == tag).count() as u64
}

/// Attributes with their raw values; what follows a broken one is passed over.
fn attributes<'a>(tag: &'a BytesStart<'_>) -> impl Iterator<Item = (&'a str, &'a str)> {
    let mut rest = tag.attributes_raw();
    // An own scanner: the library's stops at what XML forbids, such as a `<` in a value, and names would be lost.
    std::iter::from_fn(move || {
        let at = rest.find('=')?;
        let key = rest[..at].trim();
        let key = key.rsplit(|c: char| c.is_whitespace() || c == ':').next().unwrap_or(key);
        let value = rest[at + 1..].trim_start();
        let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (value, after) = value[1..].split_once(quote)?;
        rest = after;
        Some((key, value))
    })
}

fn seconds(value: &str) -> Option<f64> {
    // "1,234.5": some writers group digits.
    value.trim().replace(',', "").parse::<f64>().ok().filter(|s| s.is_finite() && *s >= 0.0)
}

fn id(case: &Case) -> String {
    let Some(file) = &case.file else {
        return if case.class.is_empty() { case.name.clone() } else { format!("{}::{}", case.class, case.name) };
    };
    // pytest's class name is the file's with dots, then the classes.
    let dotted = file.strip_suffix(".py").unwrap_or(file).replace('/', ".");
    match case.class.strip_prefix(&dotted).map(|c| c.trim_start_matches('.')).filter(|c| !c.is_empty()) {
        Some(classes) => format!("{file}::{}::{}", classes.replace('.', "::"), case.name),
        None => format!("{file}::{}", case.name),
    }
}

/// A `path:line:` at the start of a line, as the entries of pytest's tracebacks end: the last one that lies in the
/// project, else the last.
fn place(text: &str) -> Option<(String, u64)> {
    let places = text.lines().rev().take(2_000).filter_map(|line| {
        let (file, rest) = line.split_once(':')?;
        let (number, _) = rest.split_once(':')?;
        let fits = !file.is_empty()
            && file.len() < 512
            && !file.starts_with(['>', ' '])
            && !file.contains(char::is_whitespace);
        fits.then_some((file.to_owned(), number.parse().ok()?))
    });
    let mut last = None;
    for (file, line) in places {
        if !file.starts_with(['/', '.', '<']) && !file.contains("site-packages") {
            return Some((file, line));
        }
        last = last.or(Some((file, line)));
    }
    last
}

#[cfg(test)]
mod tests;
