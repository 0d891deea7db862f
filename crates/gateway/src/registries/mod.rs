//! Finds out which registries the host's package clients use, by asking the clients and then the registries.
//!
//! No registry is named in this code: what a client uses by default it is asked for like everything else. A client that
//! is not installed is skipped. Asking costs seconds, so the result is kept in a file for a day, under a key of the
//! settings that went into it; a changed setting asks again.
//!
//! Order of [`discover`]: look into the cache; ask all clients at once ([`clients`]); ask each index where its files
//! are ([`index`]); resolve the hosts, so that mirrors at private addresses are known as such.
//!
//! Settings that hold credentials are used to ask, but neither cached nor given to machines.

mod cache;
mod clients;
mod fetch;
mod index;

use crate::config::UpstreamProxy;
use fetch::Fetcher;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, path::PathBuf, time::Duration};
use trialrun_policy::{AddressClass, Name, RegistryHost, Scheme, classify};
use url::Url;

/// What discovery works with.
#[derive(Debug, Clone)]
pub struct DiscoverEnv {
    /// File for the result; none keeps nothing.
    pub cache: Option<PathBuf>,
    /// Proxy of the host.
    pub upstream_proxy: Option<UpstreamProxy>,
    /// How long one client or one request may take.
    pub step_timeout: Duration,
    /// Python indexes that the image's own pip is configured for, as the caller asked it in a machine.
    pub image_indexes: Vec<String>,
}

impl Default for DiscoverEnv {
    fn default() -> Self {
        Self { cache: None, upstream_proxy: None, step_timeout: Duration::from_secs(20), image_indexes: Vec::new() }
    }
}

/// How an index says where its files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IndexKind {
    /// The simple repository API of Python, JSON or HTML.
    Pip,
    /// npm's package documents.
    Npm,
    /// A sparse index with a `config.json`.
    Cargo,
    /// Files are on the same host.
    Plain,
}

/// An index that a client uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Index {
    pub(crate) client: &'static str,
    pub(crate) kind: IndexKind,
    pub(crate) url: Url,
}

/// What one client said.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) indexes: Vec<Index>,
    pub(crate) machine_env: Vec<(String, String)>,
    pub(crate) notes: Vec<String>,
}

/// The registries of the host's package clients.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RegistrySet {
    hosts: Vec<RegistryHost>,
    machine_env: Vec<(String, String)>,
    notes: Vec<String>,
}

impl RegistrySet {
    /// The hosts, for [`Policy::registries`](trialrun_policy::Policy::registries). Those that resolved to addresses that
    /// are not public are marked.
    #[must_use]
    pub fn hosts(&self) -> &[RegistryHost] {
        &self.hosts
    }

    /// Settings that machines need so that their clients use the same registries. Only what differs from the clients'
    /// own defaults; never local paths, never credentials.
    #[must_use]
    pub fn machine_env(&self) -> Vec<(String, String)> {
        self.machine_env.clone()
    }

    /// What was skipped or did not answer, each with its reason, for `doctor` and for people.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Asks the host's package clients and their registries, or takes the kept result. Never fails: what does not answer
/// is missing from the set and noted.
pub async fn discover(env: &DiscoverEnv) -> RegistrySet {
    let key = cache::key(env);
    if let Some(set) = env.cache.as_deref().and_then(|path| cache::load(path, &key)) {
        return set;
    }
    let set = ask(env).await;
    // An empty result is more likely a passing fault than a host without registries.
    if !set.hosts.is_empty()
        && let Some(path) = &env.cache
        && let Err(error) = cache::save(path, &key, &set)
    {
        tracing::warn!(%error, path = %path.display(), "registries not cached");
    }
    set
}

async fn ask(env: &DiscoverEnv) -> RegistrySet {
    let mut said = Answer::default();
    for answer in clients::ask_all(env.step_timeout).await {
        said.indexes.extend(answer.indexes);
        said.machine_env.extend(answer.machine_env);
        said.notes.extend(answer.notes);
    }
    for text in &env.image_indexes {
        said.add("pip in the image", IndexKind::Pip, text);
    }
    said.indexes.sort();
    said.indexes.dedup();
    let mut urls: BTreeSet<Place> = said.indexes.iter().filter_map(|index| Place::of(&index.url)).collect();
    match Fetcher::new(env) {
        Ok(fetcher) => {
            let asked = said.indexes.iter().map(|index| index::download_urls(&fetcher, index));
            for (index, found) in said.indexes.iter().zip(join_all(asked).await) {
                match found {
                    Ok(found) => urls.extend(found.iter().filter_map(Place::of)),
                    Err(error) => said.notes.push(format!(
                        "{}: {} did not say where its files are: {}",
                        index.client,
                        index.url.host_str().unwrap_or_default(),
                        trialrun_model::error_chain(&error)
                    )),
                }
            }
        }
        Err(error) => said.notes.push(trialrun_model::error_chain(&error)),
    }
    let hosts = join_all(urls.into_iter().map(|place| mark_private(place, env.step_timeout))).await;
    RegistrySet { hosts, machine_env: said.machine_env, notes: said.notes }
}

/// Runs futures together in one task. A dozen at most, so no stream machinery.
async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut pending: Vec<_> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|context| {
        let mut waiting = false;
        for (future, output) in &mut pending {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    pending.into_iter().filter_map(|(_, output)| output).collect()
}

/// Host, port and scheme of a URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    host: Name,
    port: u16,
    scheme: Scheme,
}

impl Place {
    /// None for other schemes, addresses, and the host's own loopback.
    fn of(url: &Url) -> Option<Self> {
        let scheme = match url.scheme() {
            "https" => Scheme::Https,
            "http" => Scheme::Http,
            _ => return None,
        };
        let host: Name = url.host_str()?.parse().ok()?;
        (!host.is_localhost()).then_some(Self { host, port: url.port_or_known_default()?, scheme })
    }
}

async fn mark_private(place: Place, limit: Duration) -> RegistryHost {
    let Place { host, port, scheme } = place;
    let found = tokio::time::timeout(limit, tokio::net::lookup_host((host.to_string(), port))).await;
    let private = match found {
        Ok(Ok(mut addresses)) => addresses.any(|a| classify(a.ip()) != AddressClass::Public),
        _ => false,
    };
    RegistryHost { host, port, scheme, private }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_names_with_ports() {
        let place = |text: &str| Place::of(&Url::parse(text).unwrap()).map(|p| (p.host.to_string(), p.port));
        assert_eq!(place("https://A.test/simple/"), Some(("a.test".into(), 443)));
        assert_eq!(place("http://u:p@a.test:8080"), Some(("a.test".into(), 8080)));
        for none in ["file:///srv/wheels", "https://10.0.0.1/", "http://localhost:3141/", "ftp://a.test/"] {
            assert_eq!(place(none), None, "{none}");
        }
    }

    /// Asks the real clients of this host and shows what they say.
    #[tokio::test]
    async fn the_host_s_own_clients_can_be_asked() {
        let folder = tempfile::tempdir().unwrap();
        let env = DiscoverEnv { cache: Some(folder.path().join("registries.json")), ..DiscoverEnv::default() };
        fn can_move_between_threads<T: Send>(future: T) -> T {
            future
        }
        let start = std::time::Instant::now();
        let set = can_move_between_threads(discover(&env)).await;
        let first = start.elapsed();
        eprintln!("{set:#?}");
        if set.hosts().is_empty() {
            eprintln!("skipped: no package client answers here: {:?}", set.notes());
            return;
        }
        let start = std::time::Instant::now();
        assert_eq!(discover(&env).await, set);
        eprintln!("asked in {first:?}, from the cache in {:?}", start.elapsed());
        assert!(set.machine_env().iter().all(|(_, v)| !v.starts_with('/') && !v.starts_with("file:")));
    }
}
