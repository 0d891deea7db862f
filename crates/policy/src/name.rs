//! Host names and patterns of them.

use serde::{Deserialize, Serialize};
use std::{fmt, net::Ipv6Addr, str::FromStr};

const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// A host name in the one spelling that is compared: lower case, without the trailing dot, ASCII. Never an address, not
/// even in the odd spellings that resolvers accept (`0x7f.1`, `2130706433`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(Box<str>);

/// Why a text is not a host name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Nothing there.
    #[error("the name is empty")]
    Empty,
    /// RFC 1035's limit on names.
    #[error("the name has more than {MAX_NAME} characters")]
    TooLong,
    /// An empty label or one over RFC 1035's limit.
    #[error("{0:?} has an empty part or one of more than {MAX_LABEL} characters")]
    Label(String),
    /// A non-ASCII name.
    #[error("{0:?} is not ASCII: write an international name in its punycode form (xn--…)")]
    International(String),
    /// A character that host names don't have.
    #[error("{0:?} has a character that a host name can't have")]
    Character(String),
    /// An address, in whatever spelling.
    #[error("{0:?} is an address or an odd spelling of one, not a name")]
    Address(String),
}

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is `localhost` or below it (RFC 6761), which every machine answers for itself.
    #[must_use]
    pub fn is_localhost(&self) -> bool {
        &*self.0 == "localhost" || self.0.ends_with(".localhost")
    }
}

impl FromStr for Name {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let trimmed = text.strip_suffix('.').unwrap_or(text);
        if trimmed.is_empty() {
            return Err(NameError::Empty);
        }
        if trimmed.len() > MAX_NAME {
            return Err(NameError::TooLong);
        }
        if !trimmed.is_ascii() {
            return Err(NameError::International(text.to_owned()));
        }
        if trimmed.parse::<Ipv6Addr>().is_ok() || looks_like_ipv4(trimmed) {
            return Err(NameError::Address(text.to_owned()));
        }
        for label in trimmed.split('.') {
            if label.is_empty() || label.len() > MAX_LABEL {
                return Err(NameError::Label(text.to_owned()));
            }
            // The underscore is no host name character by the letter, but names in use have it.
            let ok = label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
            if !ok || label.starts_with('-') || label.ends_with('-') {
                return Err(NameError::Character(text.to_owned()));
            }
        }
        Ok(Self(trimmed.to_ascii_lowercase().into()))
    }
}

/// inet_aton(3) takes decimal, octal and hex, in one to four parts. As in the URL standard, a last label that is a
/// number makes the whole an address; no top-level domain is one.
fn looks_like_ipv4(text: &str) -> bool {
    let last = text.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    match hex {
        Some(digits) => digits.bytes().all(|b| b.is_ascii_hexdigit()),
        None => !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit()),
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0.into()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name, or every name below one (`*.example.com`: any depth, but not `example.com` itself).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NamePattern {
    pub(crate) below: bool,
    pub(crate) name: Name,
}

impl NamePattern {
    /// Exactly this name.
    #[must_use]
    pub fn exact(name: Name) -> Self {
        Self { below: false, name }
    }

    /// Every name below this one.
    #[must_use]
    pub fn below(name: Name) -> Self {
        Self { below: true, name }
    }

    /// Whether the pattern covers `name`.
    #[must_use]
    pub fn covers(&self, name: &Name) -> bool {
        if !self.below {
            return self.name == *name;
        }
        name.as_str().strip_suffix(self.name.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn spelling_is_normalised() {
        assert_eq!(name("Example.COM."), name("example.com"));
        assert_eq!(name("_acme.example.com").as_str(), "_acme.example.com");
    }

    #[test]
    fn odd_spellings_of_addresses_are_not_names() {
        for text in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "1.2.3.4.",
            "::1",
            "10.0.0.0x1",
            "0x",
            "a.b.1",
        ] {
            assert!(matches!(text.parse::<Name>(), Err(NameError::Address(_))), "{text}");
        }
        assert!("0x7f.example.com".parse::<Name>().is_ok());
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in ["", ".", "a..b", "-a.test", "a-.test", "a b.test", "a/b", "*.x.test", "a\0.test", &"a".repeat(64)]
        {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
        assert!(matches!("exämple.test".parse::<Name>(), Err(NameError::International(_))));
    }

    #[test]
    fn a_wildcard_covers_what_is_below_and_nothing_else() {
        let pattern = NamePattern::below(name("x.test"));
        for covered in ["a.x.test", "a.b.x.test"] {
            assert!(pattern.covers(&name(covered)), "{covered}");
        }
        for not in ["x.test", "ax.test", "x.test.evil", "test", "a.y.test", "xn--a.xx.test"] {
            assert!(!pattern.covers(&name(not)), "{not}");
        }
    }
}
