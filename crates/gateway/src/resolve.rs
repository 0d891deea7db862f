//! Resolves names on the host, each at most once at a time and then kept for as long as its answer's TTL.

use crate::config::Resolver;
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::OnceCell;
use trialrun_policy::Name;

/// TTL of the stub's answers, and how long a lookup is kept.
pub(crate) const TTL: Duration = Duration::from_secs(30);
/// Names kept. The host's own resolver caches as well, so losing them costs little.
const KEPT: usize = 512;
/// Addresses of one name that are used; an answer with eight of each kind still fits a plain UDP packet.
const MAX_ADDRESSES: usize = 8;

/// The host could not resolve the name: it does not exist, or its name servers don't answer. getaddrinfo(3) knows which,
/// but the standard library does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host could not resolve the name")]
pub(crate) struct Unresolved;

type Answer = Arc<OnceCell<Result<Vec<IpAddr>, Unresolved>>>;

/// Lookups under way or done.
pub(crate) struct Lookups {
    resolver: Resolver,
    known: Mutex<HashMap<Name, (Instant, Answer)>>,
}

impl Lookups {
    pub(crate) fn new(resolver: Resolver) -> Self {
        Self { resolver, known: Mutex::default() }
    }

    /// The name's addresses, IPv4 first.
    pub(crate) async fn resolve(&self, name: &Name) -> Result<Vec<IpAddr>, Unresolved> {
        if let Resolver::Fixed(table) = &self.resolver {
            return table.get(name).cloned().ok_or(Unresolved);
        }
        let answer = self.entry(name);
        answer.get_or_init(|| ask_host(name)).await.clone()
    }

    fn entry(&self, name: &Name) -> Answer {
        let now = Instant::now();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((since, answer)) = known.get(name)
            && now.saturating_duration_since(*since) < TTL
        {
            return answer.clone();
        }
        if known.len() >= KEPT {
            known.retain(|_, (since, _)| now.saturating_duration_since(*since) < TTL);
        }
        if known.len() >= KEPT {
            known.clear();
        }
        let answer = Answer::default();
        known.insert(name.clone(), (now, answer.clone()));
        answer
    }
}

async fn ask_host(name: &Name) -> Result<Vec<IpAddr>, Unresolved> {
    // The trailing dot keeps the host's search list out: the sandbox asked for this name and no other. A single label
    // goes without it, since /etc/hosts and private zones know such names only bare.
    let text = if name.as_str().contains('.') { format!("{name}.") } else { name.to_string() };
    let found = match tokio::net::lookup_host((text, 0)).await {
        Ok(found) => found,
        // nsswitch's files compare literally: a name that is only in /etc/hosts has no dot there.
        Err(_) => tokio::net::lookup_host((name.to_string(), 0)).await.map_err(|error| {
            tracing::debug!(%name, %error, "name not resolved");
            Unresolved
        })?,
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in found.map(|a| a.ip()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses.sort_by_key(IpAddr::is_ipv6); // stable: the resolver's order stays within a family
    let v4 = addresses.iter().filter(|a| a.is_ipv4()).take(MAX_ADDRESSES);
    let v6 = addresses.iter().filter(|a| a.is_ipv6()).take(MAX_ADDRESSES);
    Ok(v4.chain(v6).copied().collect())
}

/// The address that the host would use to reach `address`; sends nothing.
fn source_for(address: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(SocketAddr::new(address, 9)).ok()?;
    socket.local_addr().ok().map(|a| a.ip())
}

/// Whether `address` is one of the host's own.
pub(crate) fn is_host_own(address: IpAddr) -> bool {
    source_for(address) == Some(address)
}

/// Whether the host has a way to public IPv6 addresses. Asked afresh each time, since it comes and goes with the
/// network and costs microseconds.
pub(crate) fn has_public_ipv6() -> bool {
    const SOMEWHERE: Ipv6Addr = Ipv6Addr::new(0x2600, 0, 0, 0, 0, 0, 0, 1);
    matches!(source_for(SOMEWHERE.into()), Some(IpAddr::V6(v6)) if v6.segments()[0] & 0xe000 == 0x2000)
}
