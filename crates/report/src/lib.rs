//! JUnit, coverage and exit statuses, read and told truthfully.
//!
//! Everything that comes out of a machine is a stranger's text: it is bounded before it is kept, and made harmless
//! ([`terminal::safe`]) before it is shown. The parts:
//!
//! - [`junit`] reads a report and counts from its cases, never from its totals; what can't be read is an error and never
//!   a pass;
//! - [`pytest_summary`] reads pytest's last line, only to compare it with the report;
//! - [`explain`] says what an exit status means and whether it is green;
//! - [`coverage`] reads coverage.py's JSON report;
//! - [`run`] holds the whole result ([`RunReport`], also what `--json` prints) and the [`Verdict`], in which our failures
//!   never share a variant with those of the user's code;
//! - [`screen`] prints it.

mod counts;
pub mod coverage;
pub mod explain;
pub mod junit;
pub mod pytest_summary;
pub mod run;
pub mod screen;
pub mod terminal;

pub use counts::Counts;
pub use run::{RunReport, Verdict, exit_codes};
