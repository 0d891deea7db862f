//! The client's own terminal.

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{ErrorKind, Write, stdin, stdout};
use trialrun_model::PtySize;

/// Puts the terminal into raw mode until dropped.
pub struct Raw {
    before: Termios,
}

impl Raw {
    /// Raw mode on standard input; `None` when it is no terminal.
    pub fn enter() -> Option<Self> {
        let before = tcgetattr(stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

/// Writes to standard output. A reader that went away wants no more; any other failure ends the program, because a report
/// that is not there must not look like one.
pub fn put(text: std::fmt::Arguments<'_>) {
    let mut out = stdout().lock();
    if let Err(error) = out.write_fmt(text).and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("trialrun: can't write to standard output: {error}");
        std::process::exit(crate::failure::OURS.into());
    }
}

/// Whether both ends of the conversation are a terminal.
pub fn interactive() -> bool {
    isatty(stdin()) && isatty(stdout())
}

/// The terminal's size.
pub fn size() -> PtySize {
    let size = tcgetwinsize(stdout()).ok().filter(|s| s.ws_row > 0 && s.ws_col > 0);
    size.map_or(PtySize { rows: 24, cols: 80 }, |s| PtySize { rows: s.ws_row, cols: s.ws_col })
}

/// Whether standard input is something to pass on: a pipe, a file or a socket. A closed one or `/dev/null` is not.
pub fn stdin_has_content() -> bool {
    rustix::fs::fstat(stdin()).is_ok_and(|stat| {
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        kind == rustix::fs::FileType::Fifo
            || kind == rustix::fs::FileType::RegularFile
            || kind == rustix::fs::FileType::Socket
    })
}
