//! The guest agent's program, carried inside every program of ours that starts machines.
//!
//! The build script builds the crate `guest` for the host's architecture, statically linked (`+crt-static`, which works
//! on the gnu target), so that `cargo install --path crates/cli` gives one working program.

/// The program: a static ELF executable.
pub const GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/trialrun-guest"));
/// SHA-256 of [`GUEST`], in hexadecimal.
pub const GUEST_DIGEST: &str = env!("TRIALRUN_GUEST_DIGEST");
