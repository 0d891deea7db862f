//! What a gateway is started with.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};
use trialrun_policy::{IpRange, Name};

/// Settings of one gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Who turns names into addresses.
    pub resolver: Resolver,
    /// Proxy through which the host reaches the outside, if it has to.
    pub upstream_proxy: Option<UpstreamProxy>,
    /// Records kept; older ones are dropped and counted.
    pub records_limit: usize,
    /// Open connections of the cell; further ones are refused. Each may hold some 32 KiB while it is heard.
    pub connections_limit: usize,
    /// How long a client may be silent before it is taken for one that waits for the server to begin.
    pub silence: Duration,
    /// How long a client may take to say where it wants to go, once it has begun.
    pub hearing: Duration,
    /// How long a dial may take.
    pub dial_timeout: Duration,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            resolver: Resolver::Host,
            upstream_proxy: None,
            records_limit: 10_000,
            connections_limit: 512,
            silence: Duration::from_millis(300),
            hearing: Duration::from_secs(10),
            dial_timeout: Duration::from_secs(15),
        }
    }
}

/// Who turns names into addresses.
#[derive(Debug, Clone)]
pub enum Resolver {
    /// The host's own: nsswitch, `/etc/hosts`, its name servers.
    Host,
    /// A fixed table; other names don't exist.
    Fixed(Arc<HashMap<Name, Vec<IpAddr>>>),
}

/// The host's way out where it has no direct one: an HTTP proxy that takes CONNECT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamProxy {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Value of `Proxy-Authorization`, if the URL carries a user. Never printed.
    pub(crate) authorization: Option<Secret>,
    exceptions: Vec<Exception>,
}

/// A text that `Debug` doesn't show.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

/// One entry of `NO_PROXY`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Exception {
    Everything,
    /// The name itself and all below it, as curl takes it.
    Domain(String),
    Range(IpRange),
}

/// A proxy setting that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// Neither http:// nor a bare host.
    #[error("proxies of the kind {0}:// are not supported (only http://)")]
    Scheme(String),
    /// No host, or a port that is none.
    #[error("the proxy setting names no host and port")]
    Host,
}

impl UpstreamProxy {
    /// Reads the usual variables of the process: `HTTPS_PROXY`, `https_proxy`, `ALL_PROXY`, `all_proxy`, and the
    /// exceptions in `NO_PROXY` or `no_proxy`.
    ///
    /// # Errors
    /// When a proxy is set that can't be used.
    pub fn from_env() -> Result<Option<Self>, ProxyError> {
        let first = |names: &[&str]| names.iter().find_map(|n| std::env::var(n).ok().filter(|v| !v.is_empty()));
        let Some(url) = first(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]) else { return Ok(None) };
        Self::parse(&url, &first(&["NO_PROXY", "no_proxy"]).unwrap_or_default()).map(Some)
    }

    /// Reads a proxy's URL and a comma-separated list of exceptions.
    ///
    /// # Errors
    /// When the URL is not one of an HTTP proxy.
    pub fn parse(url: &str, no_proxy: &str) -> Result<Self, ProxyError> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some((scheme, _)) => return Err(ProxyError::Scheme(scheme.to_owned())),
            None => url,
        };
        let rest = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let (user, address) = rest.rsplit_once('@').map_or((None, rest), |(user, address)| (Some(user), address));
        let (host, port) = match address.strip_prefix('[').and_then(|a| a.split_once(']')) {
            Some((host, port)) => (host, port.strip_prefix(':')),
            None => address.split_once(':').map_or((address, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map_or(Ok(80), str::parse).map_err(|_| ProxyError::Host)?;
        if host.is_empty() || port == 0 || host.contains(|c: char| c.is_control() || c == ' ') {
            return Err(ProxyError::Host);
        }
        Ok(Self {
            host: host.to_owned(),
            port,
            authorization: user.map(|u| Secret(basic(u))),
            exceptions: no_proxy.split([',', ' ']).filter_map(exception).collect(),
        })
    }

    /// Whether the proxy is used for this destination.
    #[must_use]
    pub fn covers(&self, name: Option<&Name>, address: Option<IpAddr>) -> bool {
        !self.exceptions.iter().any(|exception| match exception {
            Exception::Everything => true,
            Exception::Range(range) => address.is_some_and(|a| range.contains(a)),
            Exception::Domain(domain) => name.is_some_and(|name| {
                name.as_str().strip_suffix(domain.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }),
        })
    }
}

fn exception(text: &str) -> Option<Exception> {
    let text = text.trim();
    if text.is_empty() {
        return None;
    }
    if text == "*" {
        return Some(Exception::Everything);
    }
    if let Ok(range) = text.parse() {
        return Some(Exception::Range(range));
    }
    let host = text.split(':').next().unwrap_or_default();
    let host = host.trim_start_matches('*').trim_start_matches('.');
    host.parse::<Name>().ok().map(|name| Exception::Domain(name.as_str().to_owned()))
}

/// The value of an authorization header for the user part of a URL.
pub(crate) fn basic(user: &str) -> String {
    format!("Basic {}", base64(&percent_decoded(user)))
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = |b: u8| char::from(b).to_digit(16);
        match (byte, after) {
            (b'%', [high, low, tail @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                let value = hex(*high).unwrap_or_default() * 16 + hex(*low).unwrap_or_default();
                out.push(u8::try_from(value).unwrap_or_default());
                rest = tail;
            }
            _ => {
                out.push(byte);
                rest = after;
            }
        }
    }
    out
}

/// RFC 4648, with padding. Twelve lines, against one more dependency for one header.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let get = |i: usize| u32::from(chunk.get(i).copied().unwrap_or_default());
        let bits = get(0) << 16 | get(1) << 8 | get(2);
        for i in 0..4 {
            let symbol = ALPHABET[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { char::from(symbol) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_settings_are_read() {
        let proxy = UpstreamProxy::parse("http://us%65r:p@proxy.test:3128/", "a.test,.b.test, 10.0.0.0/8,*.c.test:443")
            .unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port), ("proxy.test", 3128));
        assert_eq!(proxy.authorization.as_ref().unwrap().0, "Basic dXNlcjpw");
        assert!(!format!("{proxy:?}").contains("dXNl"));
        for (name, covered) in [
            ("a.test", false),
            ("x.a.test", false),
            ("xa.test", true),
            ("b.test", false),
            ("y.c.test", false),
            ("d.test", true),
        ] {
            assert_eq!(proxy.covers(Some(&name.parse().unwrap()), None), covered, "{name}");
        }
        assert!(!proxy.covers(None, Some("10.1.1.1".parse().unwrap())));
        assert!(UpstreamProxy::parse("socks5://x:1", "").is_err());
        assert!(UpstreamProxy::parse("http://:1", "").is_err());
        assert_eq!(UpstreamProxy::parse("[::1]:3128", "").unwrap().host, "::1");
    }

    #[test]
    fn base64_pads() {
        for (text, coded) in [("", ""), ("a", "YQ=="), ("ab", "YWI="), ("abc", "YWJj"), ("abcd", "YWJjZA==")] {
            assert_eq!(base64(text.as_bytes()), coded);
        }
    }
}
