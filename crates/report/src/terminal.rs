//! Makes a stranger's text harmless for a terminal.

/// Removes escape sequences and writes every other character that a terminal or a reader could be fooled with as an
/// escape: control characters (C0 but line feed and tab, DEL, C1), marks that reorder text (bidi) or hide in it.
#[must_use]
pub fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' if chars.peek() == Some(&'\n') => {}
            '\u{1b}' => match chars.peek() {
                // CSI: parameters and intermediates, then one final character.
                Some('[') => {
                    chars.next();
                    while chars.next_if(|c| matches!(c, ' '..='?')).is_some() {}
                    chars.next_if(|c| matches!(c, '@'..='~'));
                }
                // OSC, DCS, SOS, PM, APC: up to BEL or ST. One that never ends must not swallow the rest of the text,
                // so it ends with the line too.
                Some(']' | 'P' | 'X' | '^' | '_') => {
                    chars.next();
                    while let Some(c) = chars.next_if(|c| !matches!(c, '\n' | '\u{1b}')) {
                        if c == '\u{7}' {
                            break;
                        }
                    }
                    if chars.peek() == Some(&'\u{1b}') {
                        let mut ahead = chars.clone();
                        ahead.next();
                        if ahead.peek() == Some(&'\\') {
                            chars.next();
                            chars.next();
                        }
                    }
                }
                _ => out.push_str("\\x1b"),
            },
            c if (c as u32) < 0x20 || c == '\u{7f}' => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if fools(c) => out.push_str(&format!("\\u{{{:x}}}", c as u32)),
            c => out.push(c),
        }
    }
    out
}

fn fools(c: char) -> bool {
    matches!(
        c,
        '\u{80}'..='\u{9f}'
            | '\u{ad}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// The same on one line, at most `width` characters long, cut with an ellipsis.
#[must_use]
pub fn one_line(text: &str, width: usize) -> String {
    // What is far beyond the width need not be looked at.
    let end = text.char_indices().nth(width.saturating_mul(8).max(256)).map_or(text.len(), |(at, _)| at);
    let safe = safe(&text[..end]);
    let flat = safe.split(['\n', '\t']).map(str::trim).filter(|p| !p.is_empty()).collect::<Vec<_>>().join(" ");
    cut(&flat, width)
}

pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut out: String = text.chars().take(width.saturating_sub(1)).collect();
    out.push('…');
    out
}

/// Text without its escape sequences, for parsing.
pub(crate) fn plain(text: &str) -> String {
    safe(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_go_and_other_tricks_show() {
        for (text, want) in [
            ("\u{1b}[31mred\u{1b}[0m", "red"),
            ("\u{1b}]0;title\u{7}x", "x"),
            ("\u{1b}]8;;http://evil\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("\u{1b}]52;c;aGk=\nnext", "\nnext"),
            ("\u{1b}P1$r\u{1b}[2Jx", "x"),
            ("\u{1b}c", "\\x1bc"),
            ("a\rb\r\nc", "a\\x0db\nc"),
            ("\0\u{8}\u{7f}\u{9b}31m", "\\x00\\x08\\x7f\\u{9b}31m"),
            ("a\u{202e}b\u{2066}c\u{200b}", "a\\u{202e}b\\u{2066}c\\u{200b}"),
            ("é 日本 🎉", "é 日本 🎉"),
            ("\u{1b}[", ""),
            ("\u{1b}", "\\x1b"),
        ] {
            assert_eq!(safe(text), want, "{text:?}");
        }
    }

    #[test]
    fn one_line_is_one_line_and_cut() {
        assert_eq!(one_line("a\n  b\tc", 80), "a b c");
        assert_eq!(one_line(&"x".repeat(1_000_000), 5), "xxxx…");
    }

    proptest::proptest! {
        #[test]
        fn nothing_harmful_is_left(text in "(\\PC|[\\x00-\\x20\\x7f\u{80}-\u{9f}\u{202a}-\u{202e}\\[\\]]){0,80}") {
            let out = safe(&text);
            proptest::prop_assert!(out.chars().all(|c| c == '\n' || c == '\t' || !(c.is_control() || fools(c))), "{:?}", out);
        }
    }
}
