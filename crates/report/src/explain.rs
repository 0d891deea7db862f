//! Says what an exit status means, and whether it is green.

use crate::Counts;
use serde::{Deserialize, Serialize};
use trialrun_model::ExitStatus;

/// Whether a result may be taken for success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Green {
    /// Tests ran and none failed.
    Yes,
    /// No.
    No,
    /// Nothing failed because everything was skipped: said loudly, so that nobody takes it for more.
    OnlySkips,
}

/// What an exit status means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// In words, as a fragment.
    pub meaning: String,
    /// Whether it is green as far as the status alone can say.
    pub green: Green,
}

fn explanation(meaning: impl Into<String>, green: Green) -> Explanation {
    Explanation { meaning: meaning.into(), green }
}

/// What pytest means by an exit code (the seven of pytest 9.2), other codes as in [`generic_exit`].
#[must_use]
pub fn pytest_exit(code: i32) -> Explanation {
    let meaning = match code {
        0 => return explanation("all tests that ran passed", Green::Yes),
        1 => "some tests failed",
        2 => "interrupted before the end (a collection error, or Ctrl-C)",
        3 => "pytest broke inside (internal error in pytest or a plugin)",
        4 => "pytest was called wrongly (unknown option, missing path, or a broken conftest.py)",
        5 => "no tests were collected: nothing was tested",
        // Since pytest 9.1: --max-warnings.
        6 => "tests passed, but more warnings than allowed",
        other => return generic_exit(other),
    };
    explanation(meaning, Green::No)
}

/// What the exit code of any command means.
#[must_use]
pub fn generic_exit(code: i32) -> Explanation {
    match code {
        0 => explanation("the command succeeded", Green::Yes),
        126 => explanation("the command was found but could not be executed", Green::No),
        127 => explanation("the command was not found", Green::No),
        // 255 is what many programs make of -1, and no shell reports signal 127.
        129..=192 => {
            explanation(format!("a process in the command was ended by {}", signal_name(code - 128)), Green::No)
        }
        other => explanation(format!("the command failed with code {other}"), Green::No),
    }
}

/// What a signal that ended the command means.
#[must_use]
pub fn signal(number: i32, out_of_memory: bool) -> Explanation {
    let name = signal_name(number);
    let meaning = match number {
        9 if out_of_memory => format!("killed ({name}) because the machine was out of memory"),
        9 => format!("killed ({name})"),
        11 | 7 | 4 | 8 => format!("crashed ({name}): a bug in native code, usually a C extension"),
        6 => format!("aborted itself ({name}): a failed assertion in native code, or a fatal Python error"),
        _ => format!("ended by {name}"),
    };
    explanation(meaning, Green::No)
}

/// Combines a status with the counts: green needs tests that ran.
#[must_use]
pub fn with_counts(explained: Explanation, counts: &Counts) -> Explanation {
    if explained.green != Green::Yes {
        return explained;
    }
    if counts.total() == 0 {
        return explanation("the command succeeded, but no tests ran: nothing was tested", Green::No);
    }
    if counts.any_failed() {
        return explanation(format!("the command succeeded, but its report holds failures ({counts})"), Green::No);
    }
    if counts.only_skips() {
        return explanation("nothing failed because EVERY test was skipped: nothing was tested", Green::OnlySkips);
    }
    explained
}

/// Explains a status of pytest (`pytest`) or of another command.
#[must_use]
pub fn status(status: ExitStatus, pytest: bool, out_of_memory: bool) -> Explanation {
    match status {
        ExitStatus::Code(code) if pytest => pytest_exit(code),
        ExitStatus::Code(code) => generic_exit(code),
        ExitStatus::Signal(number) => signal(number, out_of_memory),
    }
}

/// A signal's name on Linux (x86 and Arm); real-time and unknown ones by number.
#[must_use]
pub fn signal_name(number: i32) -> String {
    const NAMES: [&str; 31] = [
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGILL",
        "SIGTRAP",
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGKILL",
        "SIGUSR1",
        "SIGSEGV",
        "SIGUSR2",
        "SIGPIPE",
        "SIGALRM",
        "SIGTERM",
        "SIGSTKFLT",
        "SIGCHLD",
        "SIGCONT",
        "SIGSTOP",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGURG",
        "SIGXCPU",
        "SIGXFSZ",
        "SIGVTALRM",
        "SIGPROF",
        "SIGWINCH",
        "SIGIO",
        "SIGPWR",
        "SIGSYS",
    ];
    let name = usize::try_from(number).ok().and_then(|n| NAMES.get(n.checked_sub(1)?));
    name.map_or_else(|| format!("signal {number}"), |n| (*n).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_0_of_pytest_is_green() {
        assert_eq!(pytest_exit(0).green, Green::Yes);
        for code in [1, 2, 3, 4, 5, 6, 7, 126, 127, 137, 255, -1] {
            assert_eq!(pytest_exit(code).green, Green::No, "{code}");
        }
        assert!(pytest_exit(5).meaning.contains("nothing was tested"));
        assert!(pytest_exit(139).meaning.contains("SIGSEGV"));
    }

    #[test]
    fn counts_can_take_green_away_and_never_give_it() {
        let counts = |passed, skipped, failed| Counts { passed, skipped, failed, ..Counts::default() };
        assert_eq!(with_counts(pytest_exit(0), &counts(1, 1, 0)).green, Green::Yes);
        assert_eq!(with_counts(pytest_exit(0), &counts(0, 0, 0)).green, Green::No);
        assert_eq!(with_counts(pytest_exit(0), &counts(0, 3, 0)).green, Green::OnlySkips);
        assert_eq!(with_counts(pytest_exit(0), &counts(5, 0, 1)).green, Green::No);
        assert_eq!(with_counts(pytest_exit(1), &counts(5, 0, 0)).green, Green::No);
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(
            (signal_name(9).as_str(), signal_name(31).as_str(), signal_name(40).as_str()),
            ("SIGKILL", "SIGSYS", "signal 40")
        );
        assert!(signal(9, true).meaning.contains("out of memory"));
    }
}
