//! Dials out: to the original destination, to the real addresses behind a made-up one, or through the host's proxy.

use crate::{
    config::UpstreamProxy,
    resolve::Unresolved,
    shared::{Facts, Permit, Shared},
};
use std::{
    io,
    net::{IpAddr, SocketAddr},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use trialrun_policy::Name;

/// Largest answer of a proxy to CONNECT.
const MAX_ANSWER: usize = 8 * 1024;

/// Why a dial failed. None of these is a refusal by the policy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("resolve {name}")]
    Resolve {
        name: Name,
        #[source]
        source: Unresolved,
    },
    #[error("{0} has no address that may be dialled")]
    NoAddress(Name),
    #[error("connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("connect to the proxy {host}:{port}")]
    Proxy {
        host: String,
        port: u16,
        #[source]
        source: io::Error,
    },
    #[error("the proxy answered {status} to CONNECT {target}")]
    ProxyRefused { status: String, target: String },
    #[error("no answer within {0} s")]
    TimedOut(u64),
}

/// Dials what the permit was given for.
pub(crate) async fn dial(shared: &Shared, facts: &Facts, _permit: &Permit) -> Result<TcpStream, DialError> {
    let limit = shared.config.dial_timeout;
    timeout(limit, dial_inner(shared, facts)).await.unwrap_or(Err(DialError::TimedOut(limit.as_secs())))
}

async fn dial_inner(shared: &Shared, facts: &Facts) -> Result<TcpStream, DialError> {
    let real = (!facts.synthetic).then_some(facts.addr);
    if let Some(proxy) = &shared.config.upstream_proxy
        && proxy.covers(facts.name(), real)
    {
        let host = facts.name().map_or_else(|| bracketed(facts.addr), ToString::to_string);
        return through_proxy(proxy, &host, facts.port).await;
    }
    if let Some(address) = real {
        return connect(SocketAddr::new(address, facts.port)).await;
    }
    // A made-up address has exactly the one name it was made for.
    let Some(name) = facts.names.first() else { return Err(DialError::NoAddress(unnamed())) };
    let found = shared.lookups.resolve(name).await;
    let found = found.map_err(|source| DialError::Resolve { name: name.clone(), source })?;
    let allowed: Vec<IpAddr> = {
        let state = shared.lock();
        found.into_iter().filter(|a| state.policy.decide_answer(name, *a).allow).collect()
    };
    let mut last = DialError::NoAddress(name.clone());
    for address in allowed {
        match connect(SocketAddr::new(address, facts.port)).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn unnamed() -> Name {
    "unnamed".parse().expect("a constant that is a name")
}

fn bracketed(address: IpAddr) -> String {
    if address.is_ipv6() { format!("[{address}]") } else { address.to_string() }
}

async fn connect(address: SocketAddr) -> Result<TcpStream, DialError> {
    TcpStream::connect(address).await.map_err(|source| DialError::Connect { address, source })
}

/// Asks a proxy to connect to `host:port` (RFC 9110, 9.3.6).
pub(crate) async fn through_proxy(proxy: &UpstreamProxy, host: &str, port: u16) -> Result<TcpStream, DialError> {
    let target = format!("{host}:{port}");
    let failed = |source| DialError::Proxy { host: proxy.host.clone(), port: proxy.port, source };
    let mut stream = TcpStream::connect((proxy.host.as_str(), proxy.port)).await.map_err(failed)?;
    let authorization =
        proxy.authorization.as_ref().map_or_else(String::new, |a| format!("Proxy-Authorization: {}\r\n", a.0));
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    // Byte by byte, so that nothing behind the head is taken from the tunnel; it is a hundred bytes once.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") && answer.len() < MAX_ANSWER {
        answer.push(stream.read_u8().await.map_err(failed)?);
    }
    let first = answer.split(|b| *b == b'\r').next().unwrap_or_default();
    let status = String::from_utf8_lossy(first).split(' ').nth(1).unwrap_or_default().to_owned();
    if status.starts_with('2') && status.len() == 3 {
        Ok(stream)
    } else {
        Err(DialError::ProxyRefused { status, target })
    }
}
