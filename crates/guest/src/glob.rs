//! Paths that match glob patterns, found by walking.
//!
//! A pattern is matched component by component: `*` and `?` stay within one, `[…]` is a set (`!` or `^` negates), `\`
//! takes the next character as it is, and a component `**` stands for any number of directories, links not followed.
//! Names that begin with a dot match like any other.

use crate::{
    agent::Machine,
    files::{self, Names, look},
    link::{Channel, Failure},
};
use rustix::fs::{CWD, FileType, Mode, OFlags, open};
use std::collections::BTreeMap;
use trialrun_guest_proto::{Done, FailKind, FileStat, Glob};

/// Most paths of one answer.
const MAX_FOUND: usize = 100_000;
/// Deepest directory that is looked into; each level costs stack.
const MAX_DEPTH: usize = 200;

struct Search {
    names: Names,
    found: BTreeMap<Vec<u8>, FileStat>,
}

/// Finds paths.
pub fn glob(machine: &Machine, channel: &Channel, op: &Glob) -> Result<Done, Failure> {
    let dir = files::resolve(machine, &op.dir)?;
    open(&dir[..], OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Failure::errno(e, &dir))?;
    let mut search = Search { names: Names::load(), found: BTreeMap::new() };
    for pattern in &op.patterns {
        if pattern.starts_with('/') || pattern.is_empty() || pattern.contains('\0') {
            let message = format!("pattern {pattern:?} is empty, absolute or holds NUL");
            return Err(Failure::new(FailKind::BadRequest, message));
        }
        let parts: Vec<&[u8]> =
            pattern.as_bytes().split(|&b| b == b'/').filter(|p| !p.is_empty() && *p != b".").collect();
        search.walk(&dir, b"", &parts, 0)?;
    }
    let files = search.found.len() as u64;
    files::send_entries(channel, search.found.into_values());
    Ok(Done { files, ..Done::default() })
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

impl Search {
    /// `at` is relative to `root`.
    fn walk(&mut self, root: &[u8], at: &[u8], parts: &[&[u8]], depth: usize) -> Result<(), Failure> {
        let Some((part, rest)) = parts.split_first() else { return Ok(()) };
        if depth > MAX_DEPTH {
            return Ok(());
        }
        if !part.iter().any(|b| b"*?[\\".contains(b)) {
            return self.step(root, at, part, rest, depth);
        }
        let any_depth = *part == b"**";
        if any_depth {
            self.walk(root, at, rest, depth)?;
        }
        let here = [root, b"/", at].concat();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // What cannot be looked into holds nothing.
        let Ok(names) = open(&here[..], flags, Mode::empty()).and_then(|dir| files::names_in(&dir)) else {
            return Ok(());
        };
        for name in names {
            if any_depth {
                let last = rest.is_empty();
                if last {
                    self.step(root, at, &name, &[], depth)?;
                }
                let path = join(at, &name);
                let is_dir = look(CWD, &join(root, &path))
                    .is_ok_and(|(s, _)| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
                if is_dir {
                    self.walk(root, &path, parts, depth + 1)?;
                }
            } else if matches(part, &name) {
                self.step(root, at, &name, rest, depth)?;
            }
        }
        Ok(())
    }

    /// One name that matched: the end, or a directory to go on in.
    fn step(&mut self, root: &[u8], at: &[u8], name: &[u8], rest: &[&[u8]], depth: usize) -> Result<(), Failure> {
        let path = join(at, name);
        if !rest.is_empty() {
            return self.walk(root, &path, rest, depth + 1);
        }
        if let Ok((stat, link)) = look(CWD, &join(root, &path)) {
            if self.found.len() >= MAX_FOUND {
                return Err(Failure::new(FailKind::LimitReached, format!("more than {MAX_FOUND} paths match")));
            }
            let entry = self.names.describe(&path, &stat, link);
            self.found.insert(path, entry);
        }
        Ok(())
    }
}

/// Length of the character at the start, so that `?` takes a whole one.
fn char_len(name: &[u8]) -> usize {
    name.utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next()).map_or(1, char::len_utf8)
}

/// Whether a component matches. Linear in both lengths but for the last `*`, to which it goes back.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    loop {
        let step = match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, n));
                p += 1;
                continue;
            }
            None if n == name.len() => return true,
            None => None,
            Some(_) if n == name.len() => None,
            Some(b'?') => Some((p + 1, n + char_len(&name[n..]))),
            Some(b'[') => match set(&pattern[p..], name[n]) {
                Some((length, true)) => Some((p + length, n + 1)),
                Some((_, false)) => None,
                // No closing bracket: the character itself.
                None => (name[n] == b'[').then_some((p + 1, n + 1)),
            },
            Some(b'\\') if p + 1 < pattern.len() => (pattern[p + 1] == name[n]).then_some((p + 2, n + 1)),
            Some(&c) => (c == name[n]).then_some((p + 1, n + 1)),
        };
        match (step, retry) {
            (Some((next_p, next_n)), _) => (p, n) = (next_p, next_n),
            (None, Some((star, from))) if from < name.len() => {
                retry = Some((star, from + 1));
                (p, n) = (star, from + 1);
            }
            (None, _) => return false,
        }
    }
}

/// A set's length in the pattern, and whether the byte is in it.
fn set(pattern: &[u8], byte: u8) -> Option<(usize, bool)> {
    let negated = matches!(pattern.get(1), Some(b'!' | b'^'));
    let first = if negated { 2 } else { 1 };
    let mut at = first;
    let mut inside = false;
    loop {
        let low = *pattern.get(at)?;
        if low == b']' && at > first {
            return Some((at + 1, inside != negated));
        }
        match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(&high)) if high != b']' => {
                inside |= (low..=high).contains(&byte);
                at += 3;
            }
            _ => {
                inside |= low == byte;
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_match_as_in_a_shell() {
        let yes = [
            ("*", ""),
            ("*.py", "a.py"),
            ("a*b*c", "aXbYbZc"),
            ("?", "é"),
            ("[a-c]x", "bx"),
            ("[!a]", "b"),
            ("[]]", "]"),
            ("\\*", "*"),
            ("[", "["),
            ("*", ".hidden"),
        ];
        let no = [
            ("*.py", "a.pyc"),
            ("?", ""),
            ("?", "ab"),
            ("[a-c]", "d"),
            ("[^a]", "a"),
            ("\\*", "x"),
            ("a", "b"),
            ("a", "ab"),
        ];
        for (pattern, name) in yes {
            assert!(matches(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
        for (pattern, name) in no {
            assert!(!matches(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
    }
}
