//! Typed identifiers: passing an exec's id where a sandbox's is wanted does not compile.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Characters of a random id: lower case, no look-alikes (after Crockford's base 32).
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Random characters in an id: 12 × 5 bits = 60 bits.
const RANDOM_CHARS: usize = 12;

/// An id that could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a sandbox id (they look like sb-0123456789ab)")]
pub struct IdError {
    text: String,
}

/// Identifies a sandbox; unique in one data directory and, being random, in practice everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

impl SandboxId {
    /// Makes an id from eight bytes of entropy that the caller got from the kernel.
    #[must_use]
    pub fn from_entropy(entropy: [u8; 8]) -> Self {
        let mut bits = u64::from_le_bytes(entropy);
        let mut text = String::with_capacity(3 + RANDOM_CHARS);
        text.push_str("sb-");
        for _ in 0..RANDOM_CHARS {
            text.push(char::from(ALPHABET[(bits & 31) as usize]));
            bits >>= 5;
        }
        Self(text)
    }

    /// The id as text; safe as a file name and as a cgroup name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let ok = text
            .strip_prefix("sb-")
            .is_some_and(|rest| rest.len() == RANDOM_CHARS && rest.bytes().all(|b| ALPHABET.contains(&b)));
        if ok { Ok(Self(text.to_owned())) } else { Err(IdError { text: text.to_owned() }) }
    }
}

impl TryFrom<String> for SandboxId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> String {
        id.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identifies a lineage (a sandbox and all its forks); its number selects the lineage's uid range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LineageId(pub u32);

/// First host uid that lineages use: above what `useradd` and systemd's dynamic users (61184 to 65519) take, and
/// above systemd-nspawn's and the usual `/etc/subuid` ranges' start.
const FIRST_UID: u32 = 0x1000_0000;
/// Uids in a lineage's range. 65,536 because `nobody` is 65534.
pub const UIDS_PER_LINEAGE: u32 = 65_536;

impl LineageId {
    /// One past the largest usable lineage number, so that uids stay below 2³¹ (some programs store them signed).
    pub const LIMIT: u32 = (0x7fff_0000 - FIRST_UID) / UIDS_PER_LINEAGE;

    /// The first host uid above all lineages' ranges. The range from here on is nobody's: the image unpacker's.
    pub const END_OF_UIDS: u32 = FIRST_UID + Self::LIMIT * UIDS_PER_LINEAGE;

    /// Host uid (and gid) that the lineage's uid 0 maps to.
    #[must_use]
    pub fn uid_base(self) -> u32 {
        FIRST_UID + (self.0 % Self::LIMIT) * UIDS_PER_LINEAGE
    }

    /// Number of uids in the range.
    #[must_use]
    pub fn uid_count(self) -> u32 {
        UIDS_PER_LINEAGE
    }
}

/// Identifies an exec or process within its sandbox; counts from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExecId(pub u32);

impl fmt::Display for ExecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back() {
        let id = SandboxId::from_entropy([1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(id.as_str().parse::<SandboxId>(), Ok(id));
    }

    #[test]
    fn a_path_is_not_an_id() {
        for text in ["", "sb-", "../../etc", "sb-0123456789a/", "sb-0123456789abc", "sb-0123456789aI"] {
            assert!(text.parse::<SandboxId>().is_err(), "{text}");
        }
    }

    #[test]
    fn ranges_of_neighbouring_lineages_do_not_overlap() {
        for n in [0, 1, LineageId::LIMIT - 2] {
            assert_eq!(LineageId(n).uid_base() + LineageId(n).uid_count(), LineageId(n + 1).uid_base());
        }
        assert!(LineageId(LineageId::LIMIT - 1).uid_base() < 0x7fff_0000);
    }
}
