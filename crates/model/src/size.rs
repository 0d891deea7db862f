//! Amounts of bytes, with the suffixes people write.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes. Reads `512`, `64K`, `512M`, `4G`, `1T`, also with `iB` or `B`; the units are powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// A size that could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a size (write bytes, or a number with K, M, G or T, such as 512M)")]
pub struct ByteSizeError {
    text: String,
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;
    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let bad = || ByteSizeError { text: text.to_owned() };
        let upper = text.trim().to_ascii_uppercase();
        let body = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        let (digits, shift) = match body.chars().last() {
            Some('K') => (&body[..body.len() - 1], 10),
            Some('M') => (&body[..body.len() - 1], 20),
            Some('G') => (&body[..body.len() - 1], 30),
            Some('T') => (&body[..body.len() - 1], 40),
            _ => (body, 0),
        };
        let n: u64 = digits.trim().parse().map_err(|_| bad())?;
        n.checked_mul(1 << shift).map(ByteSize).ok_or_else(bad)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (unit, name) in UNITS {
            if self.0 >= unit {
                let whole = self.0 / unit;
                let tenth = (self.0 % unit) * 10 / unit;
                return if tenth == 0 { write!(f, "{whole} {name}") } else { write!(f, "{whole}.{tenth} {name}") };
            }
        }
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, want) in
            [("0", 0), ("512", 512), ("64K", 65_536), ("512m", 512 << 20), ("4GiB", 4 << 30), ("1TB", 1 << 40)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(want)), "{text}");
        }
        for text in ["", "x", "-1", "1.5G", "99999999999T", "G"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
