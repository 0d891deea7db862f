//! Requirement strings (PEP 508), their files, and whether their markers hold in the machine.
//!
//! pip in the machine is the judge of all of these. Here they are read only to know which names the project declares,
//! which versions it pins, and which edges of a lock file lead anywhere on CPython 3.11 on Linux.

use crate::{ProjectError, files};
use std::path::{Component, Path, PathBuf};

/// A requirement, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Requirement {
    /// Normalised name (PEP 503).
    pub name: String,
    pub extras: Vec<String>,
    pub specifier: String,
    pub url: Option<String>,
    pub marker: Option<String>,
}

/// PEP 503: lower case, runs of `-`, `_` and `.` become one `-`.
pub(crate) fn normalise(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.trim().chars() {
        if matches!(c, '-' | '_' | '.') {
            if !out.ends_with('-') {
                out.push('-');
            }
        } else {
            out.extend(c.to_lowercase());
        }
    }
    out
}

impl Requirement {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let end =
            text.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))).unwrap_or(text.len());
        if end == 0 || !text.as_bytes()[0].is_ascii_alphanumeric() {
            return None;
        }
        let name = normalise(&text[..end]);
        let mut rest = text[end..].trim_start();
        let mut extras = Vec::new();
        if let Some(after) = rest.strip_prefix('[') {
            let (list, after) = after.split_once(']')?;
            extras = list.split(',').map(normalise).filter(|e| !e.is_empty()).collect();
            rest = after.trim_start();
        }
        if let Some(url) = rest.strip_prefix('@') {
            // In a URL requirement the marker must be set off by white space.
            let (url, marker) = match url.split_once(" ;") {
                Some((url, marker)) => (url, Some(marker.trim().to_owned())),
                None => (url, None),
            };
            return Some(Self { name, extras, specifier: String::new(), url: Some(url.trim().to_owned()), marker });
        }
        let (specifier, marker) = match rest.split_once(';') {
            Some((s, m)) => (s, Some(m.trim().to_owned())),
            None => (rest, None),
        };
        let specifier = specifier.trim().trim_start_matches('(').trim_end_matches(')').trim().to_owned();
        if !specifier.is_empty() && !specifier.starts_with(['=', '<', '>', '!', '~']) {
            return None;
        }
        Some(Self { name, extras, specifier, url: None, marker })
    }

    /// The one version that the requirement allows, if it is one.
    pub(crate) fn pin(&self) -> Option<&str> {
        let version = self.specifier.strip_prefix("===").or_else(|| self.specifier.strip_prefix("=="))?.trim();
        (!version.contains([',', '*']) && !version.is_empty()).then_some(version)
    }

    pub(crate) fn applies(&self) -> bool {
        self.marker.as_deref().is_none_or(|m| marker_holds(m) != Truth::No)
    }
}

/// What a requirements file says, with the files it includes.
#[derive(Debug, Default)]
pub(crate) struct RequirementsFile {
    pub requirements: Vec<Requirement>,
    /// It uses `--hash`, which puts pip into its require-hashes mode for the whole command.
    pub hashed: bool,
    /// It installs the project itself (`.` or `-e .[test]`).
    pub installs_project: bool,
    /// Indexes and links that it names.
    pub indexes: Vec<String>,
    /// Requirements by URL or version control.
    pub remote: Vec<String>,
    /// Files that it names and that are not there.
    pub missing: Vec<String>,
    /// Its lines that need nothing of the folder: requirements by name, and options about indexes.
    pub by_name: Vec<String>,
    /// The same of its constraint files.
    pub constraints: Vec<String>,
    /// It asks for more than those, beside the project itself.
    pub more: bool,
}

/// Reads a requirements file and what it includes, inside the project only.
pub(crate) fn read_file(root: &Path, name: &str) -> Result<Option<RequirementsFile>, ProjectError> {
    let mut file = RequirementsFile::default();
    let mut visited = Vec::new();
    Ok(read_into(root, name, &mut file, &mut visited)?.then_some(file))
}

fn read_into(
    root: &Path,
    name: &str,
    out: &mut RequirementsFile,
    visited: &mut Vec<String>,
) -> Result<bool, ProjectError> {
    // Includes may go in circles (pip itself then fails); each file is read once and no more than 100 of them.
    if visited.len() > 100 || visited.iter().any(|v| v == name) {
        return Ok(true);
    }
    visited.push(name.to_owned());
    let Some(text) = files::text(root, name)? else { return Ok(false) };
    for line in logical_lines(&text) {
        let (flag, value) = split_option(&line);
        match flag {
            "-r" | "--requirement" | "-c" | "--constraint" => match inside(name, value) {
                Some(target) => {
                    let constraint = flag == "-c" || flag == "--constraint";
                    let mut child = RequirementsFile::default();
                    if !read_into(root, &target, &mut child, visited)? {
                        out.missing.push(target);
                        out.more = true;
                    }
                    out.hashed |= child.hashed;
                    out.indexes.append(&mut child.indexes);
                    out.missing.append(&mut child.missing);
                    out.constraints.append(&mut child.constraints);
                    out.more |= child.more;
                    let lines = if constraint { &mut out.constraints } else { &mut out.by_name };
                    lines.append(&mut child.by_name);
                    if !constraint {
                        out.requirements.append(&mut child.requirements);
                        out.remote.append(&mut child.remote);
                        out.installs_project |= child.installs_project;
                    }
                }
                None => {
                    out.missing.push(value.to_owned());
                    out.more = true;
                }
            },
            "-e" | "--editable" => note_target(value, out),
            "-i" | "--index-url" | "--extra-index-url" | "-f" | "--find-links" => {
                out.indexes.push(value.to_owned());
                if value.contains("://") { out.by_name.push(line.clone()) } else { out.more = true }
            }
            _ if flag.starts_with('-') => {
                out.hashed |= flag == "--require-hashes";
                out.by_name.push(line.clone());
            }
            _ => {
                let (requirement, options) = match line.find(" --") {
                    Some(at) => (&line[..at], &line[at..]),
                    None => (line.as_str(), ""),
                };
                out.hashed |= options.contains("--hash");
                match Requirement::parse(requirement) {
                    Some(r) => {
                        match &r.url {
                            Some(url) => {
                                out.remote.push(url.clone());
                                out.more = true;
                            }
                            None => out.by_name.push(line.clone()),
                        }
                        out.requirements.push(r);
                    }
                    None => note_target(requirement, out),
                }
            }
        }
    }
    Ok(true)
}

fn note_target(target: &str, out: &mut RequirementsFile) {
    let target = target.trim();
    let bare = target.split('[').next().unwrap_or("").trim_end_matches('/');
    if matches!(bare, "." | "./." | "file:.") {
        out.installs_project = true;
        return;
    }
    out.more = true;
    if target.contains("://") {
        out.remote.push(target.to_owned());
        if let Some(egg) = target.split("#egg=").nth(1) {
            let name = egg.split(['&', '[']).next().unwrap_or("");
            if let Some(r) = Requirement::parse(name) {
                out.requirements.push(r);
            }
        }
    }
}

fn split_option(line: &str) -> (&str, &str) {
    let at = line.find(['=', ' ', '\t']).unwrap_or(line.len());
    if !line.starts_with('-') {
        return ("", line);
    }
    let (flag, value) = line.split_at(at);
    // `-rbase.txt` and `-e.` are allowed by pip.
    if flag.len() > 2 && !flag.starts_with("--") && line.is_char_boundary(2) {
        return (&line[..2], line[2..].trim());
    }
    (flag, value.trim_start_matches(['=', ' ', '\t']).trim())
}

/// The path of an include, relative to the file that names it, kept inside the project.
fn inside(from: &str, target: &str) -> Option<String> {
    let target = target.trim().trim_matches(['"', '\'']);
    if target.is_empty() || target.contains("://") || target.starts_with('/') {
        return None;
    }
    let mut parts: Vec<String> = Vec::new();
    let joined: PathBuf = Path::new(from).parent().unwrap_or(Path::new("")).join(target);
    for part in joined.components() {
        match part {
            Component::Normal(p) => parts.push(p.to_str()?.to_owned()),
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(parts.join("/"))
}

fn logical_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if open.is_empty() && trimmed.starts_with('#') {
            continue;
        }
        let line = line.split(" #").next().unwrap_or("");
        if let Some(start) = line.trim_end().strip_suffix('\\') {
            open.push_str(start);
            open.push(' ');
            continue;
        }
        open.push_str(line);
        let done = open.trim().to_owned();
        open.clear();
        if !done.is_empty() && !done.starts_with('#') {
            lines.push(done);
        }
    }
    if !open.trim().is_empty() {
        lines.push(open.trim().to_owned());
    }
    lines
}

/// A statement about the machine that may not be decidable from outside (its exact patch release, its CPU).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truth {
    Yes,
    No,
    Unknown,
}

impl Truth {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Yes, Self::Yes) => Self::Yes,
            _ => Self::Unknown,
        }
    }
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Yes, _) | (_, Self::Yes) => Self::Yes,
            (Self::No, Self::No) => Self::No,
            _ => Self::Unknown,
        }
    }
    fn from(b: bool) -> Self {
        if b { Self::Yes } else { Self::No }
    }
}

/// Whether a specifier set (`>=3.8,<4`, also poetry's `^3.8` and `||`) allows the machine's Python 3.11.
pub(crate) fn allows_python(spec: &str) -> Truth {
    spec.split("||")
        .map(|alternative| specifier_holds(&crate::poetry_specifier(alternative)))
        .fold(Truth::No, Truth::or)
}

fn specifier_holds(spec: &str) -> Truth {
    spec.split(',')
        .map(str::trim)
        .filter(|c| !c.is_empty() && *c != "*")
        .map(|clause| {
            let at = clause.find(|c: char| !matches!(c, '<' | '>' | '=' | '!' | '~')).unwrap_or(clause.len());
            let op = if at == 0 { "==" } else { &clause[..at] };
            full_version(op, clause[at..].trim())
        })
        .fold(Truth::Yes, Truth::and)
}

/// `python_full_version OP version`, where only 3.11 is known: the two ends of the release line must agree.
fn full_version(op: &str, version: &str) -> Truth {
    let (low, high) = (compare(&[3, 11, 0], op, version), compare(&[3, 11, 999], op, version));
    match (low, high) {
        (Some(a), Some(b)) if a == b => {
            // An exact patch release lies between the ends and agrees with neither.
            let exact = release(version.trim_end_matches(".*"));
            let undecided = exact.as_ref().is_some_and(|v| v.len() > 2 && v[..2] == [3, 11] && v[2] > 0);
            if undecided && matches!(op, "==" | "!=" | "===") { Truth::Unknown } else { Truth::from(a) }
        }
        _ => Truth::Unknown,
    }
}

fn release(version: &str) -> Option<Vec<u64>> {
    let version = version.trim().trim_start_matches('v');
    let end = version.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(version.len());
    let parts: Option<Vec<u64>> = version[..end].trim_end_matches('.').split('.').map(|p| p.parse().ok()).collect();
    parts
}

fn compare(have: &[u64], op: &str, version: &str) -> Option<bool> {
    let star = version.trim().ends_with(".*");
    let want = release(version.trim().trim_end_matches(".*"))?;
    let pad = |v: &[u64], n: usize| (0..n).map(|i| v.get(i).copied().unwrap_or(0)).collect::<Vec<_>>();
    let n = have.len().max(want.len());
    let (a, b) = (pad(have, n), pad(&want, n));
    let prefix = pad(have, want.len()) == want;
    Some(match op {
        "==" | "===" if star => prefix,
        "!=" if star => !prefix,
        "==" | "===" => a == b,
        "!=" => a != b,
        "<" => a < b,
        "<=" => a <= b,
        ">" => a > b,
        ">=" => a >= b,
        "~=" => a >= b && want.len() > 1 && pad(have, want.len() - 1) == want[..want.len() - 1],
        _ => return None,
    })
}

/// Compares two versions by their release numbers, for choosing the higher of two.
pub(crate) fn release_order(a: &str, b: &str) -> std::cmp::Ordering {
    release(a).cmp(&release(b))
}

/// Whether an environment marker holds in the machine. What can't be read is unknown, never an error.
pub(crate) fn marker_holds(marker: &str) -> Truth {
    let tokens = tokens(marker);
    let mut at = 0;
    let truth = any_of(&tokens, &mut at, 0);
    if at == tokens.len() { truth.unwrap_or(Truth::Unknown) } else { Truth::Unknown }
}

#[derive(Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Op(String),
    Open,
    Close,
}

fn tokens(marker: &str) -> Vec<Token> {
    let mut out = Vec::new();
    let mut chars = marker.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '(' => out.push(Token::Open),
            ')' => out.push(Token::Close),
            '"' | '\'' => {
                let mut text = String::new();
                for d in chars.by_ref() {
                    if d == c {
                        break;
                    }
                    text.push(d);
                }
                out.push(Token::Text(text));
            }
            '<' | '>' | '=' | '!' | '~' => {
                let mut op = String::from(c);
                while let Some(d) = chars.next_if(|d| matches!(d, '=' | '<' | '>')) {
                    op.push(d);
                }
                out.push(Token::Op(op));
            }
            c if c.is_whitespace() => {}
            c => {
                let mut word = String::from(c);
                while let Some(d) = chars.next_if(|d| d.is_alphanumeric() || matches!(d, '_' | '.')) {
                    word.push(d);
                }
                out.push(Token::Word(word));
            }
        }
    }
    out
}

// Deep nesting of brackets would otherwise use up the stack.
const MAX_NESTING: usize = 64;

fn any_of(t: &[Token], at: &mut usize, depth: usize) -> Option<Truth> {
    let mut truth = all_of(t, at, depth)?;
    while t.get(*at) == Some(&Token::Word("or".to_owned())) {
        *at += 1;
        truth = truth.or(all_of(t, at, depth)?);
    }
    Some(truth)
}

fn all_of(t: &[Token], at: &mut usize, depth: usize) -> Option<Truth> {
    let mut truth = one(t, at, depth)?;
    while t.get(*at) == Some(&Token::Word("and".to_owned())) {
        *at += 1;
        truth = truth.and(one(t, at, depth)?);
    }
    Some(truth)
}

fn one(t: &[Token], at: &mut usize, depth: usize) -> Option<Truth> {
    if depth > MAX_NESTING {
        return None;
    }
    if t.get(*at) == Some(&Token::Open) {
        *at += 1;
        let truth = any_of(t, at, depth + 1)?;
        (t.get(*at) == Some(&Token::Close)).then_some(())?;
        *at += 1;
        return Some(truth);
    }
    let left = t.get(*at)?;
    let (op, used) = match (t.get(*at + 1)?, t.get(*at + 2)) {
        (Token::Op(op), _) => (op.clone(), 2),
        (Token::Word(w), _) if w == "in" => ("in".to_owned(), 2),
        (Token::Word(w), Some(Token::Word(x))) if w == "not" && x == "in" => ("not in".to_owned(), 3),
        _ => return None,
    };
    let right = t.get(*at + used)?;
    *at += used + 1;
    Some(match (left, right) {
        (Token::Word(name), Token::Text(value)) => variable(name, &op, value),
        (Token::Text(value), Token::Word(name)) => {
            let flipped = match op.as_str() {
                "<" => ">",
                "<=" => ">=",
                ">" => "<",
                ">=" => "<=",
                "in" => "contains",
                "not in" => "not contains",
                other => other,
            };
            variable(name, flipped, value)
        }
        _ => Truth::Unknown,
    })
}

fn variable(name: &str, op: &str, value: &str) -> Truth {
    let have = match name {
        "python_version" => {
            return match op {
                "in" => Truth::from(value.contains("3.11")),
                "not in" => Truth::from(!value.contains("3.11")),
                op => compare(&[3, 11], op, value).map_or(Truth::Unknown, Truth::from),
            };
        }
        "python_full_version" | "implementation_version" => return full_version(op, value),
        "os_name" | "os.name" => "posix",
        "sys_platform" | "sys.platform" => "linux",
        "platform_system" => "Linux",
        "platform_python_implementation" | "python_implementation" => "CPython",
        "implementation_name" => "cpython",
        // Extras are chosen by following a lock's edges, not by markers; without one, an extra's requirement is out.
        "extra" => "",
        _ => return Truth::Unknown,
    };
    match op {
        "==" | "===" => Truth::from(have == value),
        "!=" => Truth::from(have != value),
        "in" => Truth::from(value.contains(have)),
        "not in" => Truth::from(!value.contains(have)),
        "contains" => Truth::from(have.contains(value)),
        "not contains" => Truth::from(!have.contains(value)),
        _ => Truth::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_taken_apart() {
        let r = Requirement::parse("Foo_Bar.baz[a,b] == 1.0 ; python_version < '3'").unwrap();
        assert_eq!((r.name.as_str(), r.pin(), r.applies()), ("foo-bar-baz", Some("1.0"), false));
        assert_eq!(
            Requirement::parse("x @ git+https://h/r@v1#sub ; os_name=='nt'").unwrap().url.unwrap(),
            "git+https://h/r@v1#sub"
        );
        assert_eq!(Requirement::parse("x==1.*").unwrap().pin(), None);
        assert_eq!(Requirement::parse("x>=1,<2").unwrap().pin(), None);
        for bad in ["", "./x", "-e .", "git+https://x", "{[a]b}"] {
            assert_eq!(Requirement::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn markers_hold_for_cpython_3_11_on_linux() {
        for (marker, want) in [
            ("python_version >= '3.10'", Truth::Yes),
            ("python_version < '3.10' or sys_platform == 'linux'", Truth::Yes),
            ("python_version == '3.11' and (os_name == 'nt' or os_name == 'posix')", Truth::Yes),
            ("'3.9' > python_version", Truth::No),
            ("sys_platform in 'linux darwin'", Truth::Yes),
            ("sys_platform not in 'win32 cygwin'", Truth::Yes),
            ("python_full_version < '3.11.4'", Truth::Unknown),
            ("python_full_version >= '3.11'", Truth::Yes),
            ("python_full_version == '3.11.2'", Truth::Unknown),
            ("platform_machine == 'x86_64'", Truth::Unknown),
            ("platform_python_implementation != 'PyPy'", Truth::Yes),
            ("extra == 'test'", Truth::No),
            ("((((", Truth::Unknown),
            ("nonsense", Truth::Unknown),
        ] {
            assert_eq!(marker_holds(marker), want, "{marker}");
        }
        assert_eq!(marker_holds(&"(".repeat(100_000)), Truth::Unknown);
    }

    #[test]
    fn python_specifiers_are_judged_for_3_11() {
        for (spec, want) in [
            (">=3.8", Truth::Yes),
            (">=3.12", Truth::No),
            ("<3.11", Truth::No),
            ("^3.8", Truth::Yes),
            ("~3.10", Truth::No),
            (">=2.7, !=3.0.*, <4", Truth::Yes),
            ("^2.7 || ^3.9", Truth::Yes),
            ("==3.11.*", Truth::Yes),
            (">=3.11.4", Truth::Unknown),
            ("*", Truth::Yes),
            ("", Truth::Yes),
        ] {
            assert_eq!(allows_python(spec), want, "{spec}");
        }
    }

    #[test]
    fn includes_stay_inside_the_project() {
        assert_eq!(inside("requirements/test.txt", "base.txt").as_deref(), Some("requirements/base.txt"));
        assert_eq!(inside("requirements/test.txt", "../a.txt").as_deref(), Some("a.txt"));
        assert_eq!(inside("a.txt", "../../etc/passwd"), None);
        assert_eq!(inside("a.txt", "/etc/passwd"), None);
    }
}
