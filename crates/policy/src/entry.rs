//! What a person writes to open something: `example.com`, `*.example.com:8443`, `10.1.0.0/16:5432`.

use crate::{AddressClass, IpRange, IpRangeError, Name, NameError, NamePattern, classify};
use serde::{Deserialize, Serialize};
use std::{fmt, net::IpAddr, str::FromStr};

/// Where an entry or rule points.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A name or all names below one.
    Name(NamePattern),
    /// Addresses.
    Range(IpRange),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(pattern) => write!(f, "{pattern}"),
            // With its port behind it, an IPv6 range needs the brackets.
            Self::Range(range) if range.base().is_ipv6() => write!(f, "[{range}]"),
            Self::Range(range) => write!(f, "{range}"),
        }
    }
}

/// Which ports an entry or rule covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ports {
    /// 80 and 443: what an entry without a port means.
    Web,
    /// One.
    One(u16),
    /// From the first to the last, both included.
    Between(u16, u16),
    /// Every port, written `:*`.
    Any,
}

impl Ports {
    /// Whether `port` is one of them.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        match self {
            Self::Web => matches!(port, 80 | 443),
            Self::One(one) => port == one,
            Self::Between(first, last) => (first..=last).contains(&port),
            Self::Any => true,
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Web => Ok(()),
            Self::One(port) => write!(f, ":{port}"),
            Self::Between(first, last) => write!(f, ":{first}-{last}"),
            Self::Any => f.write_str(":*"),
        }
    }
}

/// A destination to open, as written after `--allow`. Without a port it means 80 and 443.
///
/// ```
/// let entry: trialrun_policy::AllowEntry = "*.Example.com:8443".parse().unwrap();
/// assert_eq!(entry.to_string(), "*.example.com:8443");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AllowEntry {
    /// Where to.
    pub target: Target,
    /// On which ports.
    pub ports: Ports,
}

/// Why a text is not an entry, worded for the person who wrote it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllowEntryError {
    /// Nothing there.
    #[error("the entry is empty (write example.com, *.example.com:8443 or 10.1.0.0/16:5432)")]
    Empty,
    /// A URL was written.
    #[error("{given:?} has a scheme; write only the host and, if need be, the port: {meant}")]
    Scheme {
        /// What was written.
        given: String,
        /// The part that could be meant.
        meant: String,
    },
    /// A path was written.
    #[error("{0:?} has a path; rules cover whole hosts, so write only the host")]
    Path(String),
    /// A user was written.
    #[error("{0:?} has a user; write only the host")]
    User(String),
    /// `*` alone.
    #[error("a bare * is not an entry; to open all public web addresses choose the web policy")]
    Everything,
    /// `*` somewhere else than as the first label, or directly below a top-level domain.
    #[error("{0:?}: a * stands only for the first part of a name with at least two more, as in *.example.com")]
    Wildcard(String),
    /// The machine itself.
    #[error("{0:?} is the machine's own loopback, which is never closed and never leads to the host")]
    Loopback(String),
    /// Not a port.
    #[error("{0:?} is not a port (1 to 65535, a range such as 8000-8100, or *)")]
    Port(String),
    /// Square brackets that don't hold an IPv6 address.
    #[error("{0:?} has brackets that don't hold an IPv6 address, as in [2001:db8::1]:443")]
    Brackets(String),
    /// Neither name nor address.
    #[error("not a host name")]
    Name(#[source] NameError),
    /// An address range with a mistake.
    #[error("not an address range")]
    Range(#[source] IpRangeError),
}

impl FromStr for AllowEntry {
    type Err = AllowEntryError;
    fn from_str(text: &str) -> Result<Self, AllowEntryError> {
        use AllowEntryError as E;
        let text = text.trim();
        if text.is_empty() {
            return Err(E::Empty);
        }
        if let Some((scheme, rest)) = text.split_once("://") {
            return Err(E::Scheme { given: text.to_owned(), meant: meant_by_url(scheme, rest) });
        }
        if text.contains('@') {
            return Err(E::User(text.to_owned()));
        }
        let (host, port) = split_port(text)?;
        let ports = port.map_or(Ok(Ports::Web), |p| parse_ports(p).ok_or_else(|| E::Port(p.to_owned())))?;
        let target = parse_target(host, text)?;
        Ok(Self { target, ports })
    }
}

/// Separates the port, minding IPv6 with and without brackets.
fn split_port(text: &str) -> Result<(&str, Option<&str>), AllowEntryError> {
    if let Some(rest) = text.strip_prefix('[') {
        let bad = || AllowEntryError::Brackets(text.to_owned());
        let (inside, after) = rest.split_once(']').ok_or_else(bad)?;
        if !inside.contains(':') {
            return Err(bad());
        }
        return match after {
            "" => Ok((inside, None)),
            _ => after.strip_prefix(':').map(|port| (inside, Some(port))).ok_or_else(bad),
        };
    }
    // More than one colon without brackets: an IPv6 address or range without a port.
    Ok(match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (text, None),
    })
}

fn parse_ports(text: &str) -> Option<Ports> {
    let port = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u16>().ok().filter(|n| digits && *n != 0)
    };
    if text == "*" {
        return Some(Ports::Any);
    }
    match text.split_once('-') {
        Some((first, last)) => {
            let (first, last) = (port(first)?, port(last)?);
            (first <= last).then_some(Ports::Between(first, last))
        }
        None => port(text).map(Ports::One),
    }
}

fn parse_target(host: &str, text: &str) -> Result<Target, AllowEntryError> {
    use AllowEntryError as E;
    let address = host.split('/').next().unwrap_or_default();
    if address.parse::<IpAddr>().is_ok() {
        let range: IpRange = host.parse().map_err(E::Range)?;
        return match classify(range.base()) {
            AddressClass::Loopback => Err(E::Loopback(text.to_owned())),
            _ => Ok(Target::Range(range)),
        };
    }
    if host.contains(['/', '?', '#']) {
        return Err(E::Path(text.to_owned()));
    }
    if host == "*" {
        return Err(E::Everything);
    }
    let pattern = match host.strip_prefix("*.") {
        Some(rest) => {
            let rest = rest.strip_suffix('.').unwrap_or(rest);
            if rest.contains('*') || !rest.contains('.') {
                return Err(E::Wildcard(text.to_owned()));
            }
            NamePattern::below(rest.parse().map_err(E::Name)?)
        }
        None if host.contains('*') => return Err(E::Wildcard(text.to_owned())),
        None => NamePattern::exact(host.parse().map_err(E::Name)?),
    };
    if pattern.name.is_localhost() {
        return Err(E::Loopback(text.to_owned()));
    }
    Ok(Target::Name(pattern))
}

fn meant_by_url(scheme: &str, rest: &str) -> String {
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = host.rsplit('@').next().unwrap_or_default();
    let has_port = host.rsplit_once(':').is_some_and(|(_, p)| p.bytes().all(|b| b.is_ascii_digit()) && !p.is_empty());
    match scheme {
        _ if has_port => host.to_owned(),
        "https" => format!("{host}:443"),
        "http" => format!("{host}:80"),
        _ => host.to_owned(),
    }
}

impl AllowEntry {
    /// An entry for one exact name and port.
    #[must_use]
    pub fn exact(name: Name, port: u16) -> Self {
        Self { target: Target::Name(NamePattern::exact(name)), ports: Ports::One(port) }
    }
}

impl TryFrom<String> for AllowEntry {
    type Error = AllowEntryError;
    fn try_from(text: String) -> Result<Self, AllowEntryError> {
        text.parse()
    }
}

impl From<AllowEntry> for String {
    fn from(entry: AllowEntry) -> String {
        entry.to_string()
    }
}

impl fmt::Display for AllowEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.target, self.ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_read_and_print_alike() {
        for (text, printed) in [
            ("example.com", "example.com"),
            ("Example.COM.", "example.com"),
            (" *.example.com ", "*.example.com"),
            ("example.com:8443", "example.com:8443"),
            ("example.com.:8443", "example.com:8443"),
            ("example.com:8000-8100", "example.com:8000-8100"),
            ("example.com:*", "example.com:*"),
            ("10.1.0.0/16:5432", "10.1.0.0/16:5432"),
            ("10.1.2.3", "10.1.2.3"),
            ("[2001:db8::1]:443", "[2001:db8::1]:443"),
            ("[2001:db8::/32]:443", "[2001:db8::/32]:443"),
            ("2001:db8::/32", "[2001:db8::/32]"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("xn--exmple-cua.test", "xn--exmple-cua.test"),
        ] {
            let entry: AllowEntry = text.parse().unwrap();
            assert_eq!(entry.to_string(), printed);
            assert_eq!(printed.parse::<AllowEntry>().unwrap(), entry, "{printed}");
        }
    }

    #[test]
    fn mistakes_are_explained() {
        for (text, part) in [
            ("", "empty"),
            ("https://example.com/x", "example.com:443"),
            ("http://u:p@example.com:8080", "example.com:8080"),
            ("example.com/path", "path"),
            ("me@example.com", "user"),
            ("*", "web policy"),
            ("*:443", "web policy"),
            ("*.com", "first part"),
            ("a.*.com", "first part"),
            ("*a.example.com", "first part"),
            ("*.*.example.com", "first part"),
            ("localhost", "own loopback"),
            ("a.localhost:80", "own loopback"),
            ("127.0.0.1:80", "own loopback"),
            ("[::1]:80", "own loopback"),
            ("example.com:0", "not a port"),
            ("example.com:", "not a port"),
            ("example.com:+1", "not a port"),
            ("example.com:9-1", "not a port"),
            ("example.com:65536", "not a port"),
            ("[example.com]:443", "brackets"),
            ("[2001:db8::1", "brackets"),
            ("[2001:db8::1]443", "brackets"),
        ] {
            let error = text.parse::<AllowEntry>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        for (text, part) in [
            ("bücher.example", "punycode"),
            ("2130706433", "odd spelling"),
            ("0x7f.1:80", "odd spelling"),
            ("010.0.0.1", "odd spelling"),
            ("10.1.2.3/16", "did you mean 10.1.0.0/16"),
            ("10.1.0.0/99", "prefix"),
        ] {
            let error = text.parse::<AllowEntry>().unwrap_err();
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains(part), "{text}: {cause}");
        }
    }
}
