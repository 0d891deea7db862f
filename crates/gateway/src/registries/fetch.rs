//! A small HTTP client for asking registries: GET, the host's trust store, the host's proxy, few redirects.

use super::DiscoverEnv;
use crate::{
    config::UpstreamProxy,
    dial::{DialError, through_proxy},
};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, LOCATION, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use std::{error::Error, io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
};
use url::Url;

/// Largest answer read. A well-used package's list of files has a few hundred kilobytes.
const MAX_BODY: usize = 16 << 20;
const MAX_REDIRECTS: usize = 3;

/// Why a registry could not be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("set up TLS with the host's trust store")]
    Trust(#[source] rustls::Error),
    #[error("no usable host in {0}")]
    Host(Url),
    #[error("connect to {host}:{port}")]
    Connect {
        host: String,
        port: u16,
        #[source]
        source: io::Error,
    },
    #[error("reach {host} through the proxy")]
    Proxy {
        host: String,
        #[source]
        source: DialError,
    },
    #[error("speak HTTP with {host}")]
    Http {
        host: String,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    #[error("{host} answered {status}")]
    Status { host: String, status: StatusCode },
    #[error("{0} did not answer in time")]
    TimedOut(String),
    #[error("{0} redirected too often")]
    Redirects(String),
    #[error("the answer of {0} was not understood")]
    Content(String),
}

/// An answer with what led to it.
pub(super) struct Fetched {
    /// Where the answer came from, after redirects.
    pub(super) url: Url,
    /// Every URL on the way.
    pub(super) visited: Vec<Url>,
    pub(super) content_type: String,
    pub(super) body: Bytes,
}

/// Asks registries.
pub(super) struct Fetcher {
    tls: TlsConnector,
    proxy: Option<UpstreamProxy>,
    limit: Duration,
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Fetcher {
    pub(super) fn new(env: &DiscoverEnv) -> Result<Self, FetchError> {
        let mut roots = RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::debug!(%error, "part of the host's trust store not read");
        }
        roots.add_parsable_certificates(found.certs);
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(FetchError::Trust)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: Arc::new(config).into(), proxy: env.upstream_proxy.clone(), limit: env.step_timeout })
    }

    /// Gets a URL, following redirects.
    pub(super) async fn get(&self, url: &Url, accept: &str) -> Result<Fetched, FetchError> {
        let host = url.host_str().unwrap_or_default().to_owned();
        timeout(self.limit, self.follow(url.clone(), accept)).await.unwrap_or(Err(FetchError::TimedOut(host)))
    }

    async fn follow(&self, mut url: Url, accept: &str) -> Result<Fetched, FetchError> {
        let mut visited = Vec::new();
        for _ in 0..=MAX_REDIRECTS {
            visited.push(url.clone());
            let (response, body) = self.once(&url, accept).await?;
            let header = |name| response.headers.get(name).and_then(|v: &hyper::header::HeaderValue| v.to_str().ok());
            let host = url.host_str().unwrap_or_default().to_owned();
            if response.status.is_redirection() {
                let to = header(LOCATION).and_then(|to| url.join(to).ok()).ok_or(FetchError::Content(host))?;
                url = to;
                continue;
            }
            if !response.status.is_success() {
                return Err(FetchError::Status { host, status: response.status });
            }
            let content_type = header(CONTENT_TYPE).unwrap_or_default().to_ascii_lowercase();
            return Ok(Fetched { url, visited, content_type, body });
        }
        Err(FetchError::Redirects(url.host_str().unwrap_or_default().to_owned()))
    }

    async fn once(&self, url: &Url, accept: &str) -> Result<(hyper::http::response::Parts, Bytes), FetchError> {
        let host = url.host_str().unwrap_or_default().to_owned();
        let http = |source: Box<dyn Error + Send + Sync>| FetchError::Http { host: host.clone(), source };
        let stream = self.connect(url).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| http(e.into()))?;
        let driver = tokio::spawn(connection); // ends with the sender
        let target = match url.query() {
            Some(query) => format!("{}?{query}", url.path()),
            None => url.path().to_owned(),
        };
        let authority = url.port().map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
        let mut request = Request::get(target)
            .header(HOST, authority)
            .header(ACCEPT, accept)
            .header(USER_AGENT, concat!("trialrun/", env!("CARGO_PKG_VERSION")));
        if !url.username().is_empty() {
            let user = format!("{}:{}", url.username(), url.password().unwrap_or_default());
            request = request.header(AUTHORIZATION, crate::config::basic(&user));
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|e| http(e.into()))?;
        let response = sender.send_request(request).await.map_err(|e| http(e.into()))?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY).collect().await.map_err(http)?.to_bytes();
        driver.abort();
        Ok((parts, body))
    }

    async fn connect(&self, url: &Url) -> Result<Box<dyn Stream>, FetchError> {
        let no_host = || FetchError::Host(without_credentials(url));
        let host = url.host_str().ok_or_else(no_host)?.to_owned();
        let port = url.port_or_known_default().ok_or_else(no_host)?;
        let name = host.parse().ok();
        let tcp = match &self.proxy {
            Some(proxy) if proxy.covers(name.as_ref(), host.parse().ok()) => through_proxy(proxy, &host, port)
                .await
                .map_err(|source| FetchError::Proxy { host: host.clone(), source })?,
            _ => TcpStream::connect((host.as_str(), port)).await.map_err(|source| FetchError::Connect {
                host: host.clone(),
                port,
                source,
            })?,
        };
        match url.scheme() {
            "http" => Ok(Box::new(tcp)),
            "https" => {
                let server = ServerName::try_from(host.clone()).map_err(|_| no_host())?;
                let tls = self.tls.connect(server, tcp).await;
                Ok(Box::new(tls.map_err(|source| FetchError::Connect { host, port, source })?))
            }
            _ => Err(no_host()),
        }
    }
}

/// The URL as it may be shown and handed on.
pub(super) fn without_credentials(url: &Url) -> Url {
    let mut url = url.clone();
    // Fails only for URLs that can't have any.
    let _none_there = (url.set_username(""), url.set_password(None));
    url
}
