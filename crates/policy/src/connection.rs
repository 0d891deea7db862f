//! What is known of a connection, and what was decided about it.

use crate::Name;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The name that the connection itself claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed {
    /// TLS server name indication.
    Sni(Name),
    /// HTTP Host, agreeing with the request's target.
    Host(Name),
}

impl Claimed {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &Name {
        match self {
            Self::Sni(name) | Self::Host(name) => name,
        }
    }
}

/// What the first bytes turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// A TLS client hello whose server name, if any, is the real one.
    Tls,
    /// A TLS client hello with the encrypted-hello extension: its visible server name may be a front.
    TlsEch,
    /// HTTP/1.
    Http,
    /// HTTP/2 without TLS, whose requests can't be judged one by one.
    HttpTwo,
    /// Something else that the client began.
    Opaque,
    /// The client waits for the server to begin.
    Silent,
}

/// A connection that wants to go out.
#[derive(Debug, Clone, Copy)]
pub struct Destination<'a> {
    /// Original destination address.
    pub addr: IpAddr,
    /// Original destination port.
    pub port: u16,
    /// Names for which the sandbox's resolver gave out this address.
    pub names_from_dns: &'a [Name],
    /// The name the connection claims.
    pub claimed: Option<&'a Claimed>,
    /// What it speaks.
    pub protocol: Protocol,
    /// The resolver made the address up to stand for the name (the real one is dialled elsewhere), so its class says
    /// nothing.
    pub synthetic: bool,
    /// The address is one of the host's own.
    pub host_own: bool,
}

/// Allow or deny, with the rule that decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a decision has to be enforced"]
pub struct Decision {
    /// Whether it may go.
    pub allow: bool,
    /// The rule, such as `preset off`, `allow example.com:443`, `private address` or `no rule allows it`.
    pub rule: String,
    /// One line for a person.
    pub reason: String,
}

impl Decision {
    /// An allow.
    pub fn allow(rule: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { allow: true, rule: rule.into(), reason: reason.into() }
    }

    /// A deny.
    pub fn deny(rule: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { allow: false, rule: rule.into(), reason: reason.into() }
    }
}
