//! Reads setup.cfg, tox.ini and pytest.ini as `configparser` and `iniconfig` do: sections, keys, and values that go on
//! over indented lines. Lines that fit nothing are passed over: the tools that own these files complain about them.

use std::collections::BTreeMap;

/// Section name to keys (lower case) to values. A value's lines are joined by `\n`.
pub(crate) type Ini = BTreeMap<String, BTreeMap<String, String>>;

pub(crate) fn parse(text: &str) -> Ini {
    let mut ini = Ini::new();
    let mut section = String::new();
    let mut key: Option<String> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') || trimmed.starts_with(';') {
            continue;
        }
        let indented = line.starts_with([' ', '\t']);
        if indented && let Some(k) = &key {
            if let Some(value) = ini.get_mut(&section).and_then(|s| s.get_mut(k)) {
                if !value.is_empty() {
                    value.push('\n');
                }
                value.push_str(trimmed);
            }
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|t| t.split_once(']')).map(|(n, _)| n.trim()) {
            section = name.to_owned();
            ini.entry(section.clone()).or_default();
            key = None;
            continue;
        }
        let Some(at) = trimmed.find(['=', ':']) else { continue };
        let name = trimmed[..at].trim().to_ascii_lowercase();
        let value = trimmed[at + 1..].trim().to_owned();
        ini.entry(section.clone()).or_default().insert(name.clone(), value);
        key = Some(name);
    }
    ini
}

/// A list value: one item a line (or, for keys that allow it, separated by commas), comments dropped.
pub(crate) fn lines(value: &str) -> Vec<String> {
    value
        .lines()
        .map(|l| l.split(" #").next().unwrap_or("").trim())
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// Items separated by commas or white space.
pub(crate) fn words(value: &str) -> Vec<String> {
    value.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_on_over_indented_lines() {
        let ini = parse("[a]\nx = 1\ny =\n  one\n  # no\n  two\n\n[b:c]\nz: 3\nnonsense\n");
        assert_eq!(ini["a"]["y"], "one\ntwo");
        assert_eq!(ini["b:c"]["z"], "3");
    }
}
