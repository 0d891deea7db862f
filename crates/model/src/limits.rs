//! What one machine may use.

use crate::ByteSize;
use serde::{Deserialize, Serialize};

/// Ceilings of one machine. Disk and memory are ceilings, not reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Virtual CPUs. More than the host has are a quota over all its cores.
    pub vcpus: u32,
    /// Memory, page cache of the machine's own files included.
    pub memory: ByteSize,
    /// Processes and threads.
    pub pids: u32,
    /// The writable layer.
    pub disk: ByteSize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { vcpus: 2, memory: ByteSize::gib(4), pids: 4096, disk: ByteSize::gib(8) }
    }
}

/// A limit out of its range.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what} is {actual}; it must be between {least} and {most}")]
pub struct LimitsError {
    what: &'static str,
    actual: String,
    least: String,
    most: String,
}

impl Limits {
    /// Checks each limit's range.
    ///
    /// # Errors
    /// Names the first limit that is out of range, with the range.
    pub fn check(&self) -> Result<(), LimitsError> {
        let ranges = [
            ("vcpu", u64::from(self.vcpus), 1, 512),
            ("memory", self.memory.bytes(), 16 << 20, 1 << 44),
            ("pids", u64::from(self.pids), 16, 4_194_304),
            ("disk", self.disk.bytes(), 1 << 20, 1 << 46),
        ];
        for (what, actual, least, most) in ranges {
            if !(least..=most).contains(&actual) {
                let bytes = matches!(what, "memory" | "disk");
                let word = |n: u64| if bytes { ByteSize(n).to_string() } else { n.to_string() };
                return Err(LimitsError { what, actual: word(actual), least: word(least), most: word(most) });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_in_range_and_zero_is_not() {
        assert_eq!(Limits::default().check(), Ok(()));
        let none = Limits { vcpus: 0, ..Limits::default() };
        assert!(none.check().is_err_and(|e| e.to_string().contains("vcpu is 0")));
        let little = Limits { memory: ByteSize(1000), ..Limits::default() };
        let words = "memory is 1000 B; it must be between 16 MiB and 16 TiB";
        assert!(little.check().is_err_and(|e| e.to_string() == words), "{:?}", little.check());
    }
}
