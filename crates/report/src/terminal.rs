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

/// Makes a stream of a stranger's output harmless for a terminal while it passes by: text, lines, colours and rewriting
/// the line it is on stay; what moves elsewhere, erases more, sets the title or the clipboard, or has the terminal
/// answer on its input goes. Knows the states of a real terminal's parser, so that nothing slips through in pieces.
#[derive(Default)]
pub struct Filter {
    parser: vte::Parser,
    kept: Kept,
}

#[derive(Default)]
struct Kept {
    out: Vec<u8>,
    coloured: bool,
}

impl Filter {
    /// What of `bytes` may be shown. A sequence that is not complete yet waits for the rest.
    pub fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, end) = line.split_at(line.len() - usize::from(line.ends_with(b"\n")));
            self.parser.advance(&mut self.kept, text);
            if !end.is_empty() {
                // A string without end ends with its line (CAN), lest it swallow all that follows.
                self.parser.advance(&mut self.kept, b"\x18\n");
            }
        }
        std::mem::take(&mut self.kept.out)
    }

    /// To be shown after the last: ends colours that are still on.
    #[must_use]
    pub fn end(&self) -> &'static [u8] {
        if self.kept.coloured { b"\x1b[0m" } else { b"" }
    }
}

impl vte::Perform for Kept {
    fn print(&mut self, c: char) {
        // C1 controls in UTF-8; the parser hands them here when they come in pieces.
        if c.is_control() {
            return;
        }
        if fools(c) {
            self.out.extend_from_slice(format!("\\u{{{:x}}}", c as u32).as_bytes());
        } else {
            self.out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    fn execute(&mut self, byte: u8) {
        if matches!(byte, b'\n' | b'\r' | b'\t' | 8) {
            self.out.push(byte);
        }
    }

    fn csi_dispatch(&mut self, params: &vte::Params, intermediates: &[u8], ignore: bool, action: char) {
        // SGR: colours and the like; EL: erase in the line.
        if ignore || !intermediates.is_empty() || !matches!(action, 'm' | 'K') {
            return;
        }
        if action == 'm' {
            self.coloured = params.iter().last().is_some_and(|last| *last != [0]);
        }
        let words: Vec<String> =
            params.iter().map(|sub| sub.iter().map(u16::to_string).collect::<Vec<_>>().join(":")).collect();
        self.out.extend_from_slice(format!("\x1b[{}{action}", words.join(";")).as_bytes());
    }
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

    #[test]
    fn a_stream_keeps_text_and_colours_and_nothing_else() {
        for (text, want) in [
            ("\u{1b}[1;31mred\u{1b}[0m\n", "\u{1b}[1;31mred\u{1b}[0m\n"),
            ("\u{1b}[38;5;208mx\u{1b}[38:2::1:2:3my\u{1b}[m", "\u{1b}[38;5;208mx\u{1b}[38:2:0:1:2:3my\u{1b}[0m"),
            ("10 %\r20 %\u{1b}[K\n", "10 %\r20 %\u{1b}[0K\n"),
            ("a\u{1b}[2J\u{1b}[H\u{1b}[5Ab", "ab"),
            ("\u{1b}]0;title\u{7}x\u{1b}]52;c;aGk=\u{1b}\\y", "xy"),
            ("\u{1b}]52;c;aGk=\nnext", "\nnext"),
            ("\u{1b}P+q544e\u{1b}\\x\u{1b}_y\u{1b}\\z", "xz"),
            ("\u{1b}[6n\u{1b}[c\u{1b}Z\u{5}x", "x"),
            ("\u{1b}c\u{1b}[?1049h\u{1b}[!px", "x"),
            ("a\0\u{7}\u{b}\u{c}\u{e}b\u{9b}2Jc", "ab2Jc"),
            ("é 日本 🎉\u{202e}", "é 日本 🎉\\u{202e}"),
        ] {
            let whole = Filter::default().pass(text.as_bytes());
            assert_eq!(String::from_utf8_lossy(&whole), want, "{text:?}");
            let mut filter = Filter::default();
            let pieces: Vec<u8> = text.bytes().flat_map(|byte| filter.pass(&[byte])).collect();
            assert_eq!(pieces, whole, "{text:?} in pieces");
        }
        let mut filter = Filter::default();
        assert_eq!(filter.pass(b"\xff\x1b[31m"), "\u{fffd}\u{1b}[31m".as_bytes());
        assert_eq!(filter.end(), b"\x1b[0m");
        filter.pass(b"\x1b[1;0m");
        assert_eq!(filter.end(), b"");
    }

    proptest::proptest! {
        #[test]
        fn a_stream_never_says_more_than_text_and_colours(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let out = Filter::default().pass(&bytes);
            // What passed once passes again, unchanged.
            proptest::prop_assert_eq!(Filter::default().pass(&out), out);
        }

        #[test]
        fn nothing_harmful_is_left(text in "(\\PC|[\\x00-\\x20\\x7f\u{80}-\u{9f}\u{202a}-\u{202e}\\[\\]]){0,80}") {
            let out = safe(&text);
            proptest::prop_assert!(out.chars().all(|c| c == '\n' || c == '\t' || !(c.is_control() || fools(c))), "{:?}", out);
        }
    }
}
