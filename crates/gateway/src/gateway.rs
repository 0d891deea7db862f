//! Starts a gateway's tasks and steers them from outside.

use crate::{
    GatewayConfig,
    dns::{CONCURRENT, closed_protocol, serve_tcp, serve_udp},
    record::{Attempt, ConnectionRecord, RecordKind},
    shared::Shared,
    tcp,
};
use std::{
    future::Future,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{io::unix::AsyncFd, sync::Semaphore, task::AbortHandle};
use trialrun_net::{CellListeners, SynQueue};
use trialrun_policy::Policy;

/// Makes gateways.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Serves a cell's listeners on the current tokio runtime until the handle is stopped or dropped.
    ///
    /// # Errors
    /// When a listener can't be given to the runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn start(listeners: CellListeners, config: GatewayConfig, policy: Policy) -> io::Result<GatewayHandle> {
        let shared = Shared::new(config, policy);
        let dns_limit = Arc::new(Semaphore::new(CONCURRENT));
        let mut handle = GatewayHandle { shared: shared.clone(), tasks: Mutex::default() };
        for listener in [Some(listeners.tcp_v4), listeners.tcp_v6].into_iter().flatten() {
            handle.run("tcp", tcp::serve(shared.clone(), listener));
        }
        for socket in [Some(listeners.dns_udp_v4), listeners.dns_udp_v6].into_iter().flatten() {
            handle.run("dns over udp", serve_udp(shared.clone(), socket, dns_limit.clone()));
        }
        for listener in [Some(listeners.dns_tcp_v4), listeners.dns_tcp_v6].into_iter().flatten() {
            handle.run("dns over tcp", serve_tcp(shared.clone(), listener, dns_limit.clone()));
        }
        if let Some(syns) = listeners.syns {
            handle.run("connections that begin", judge_syns(shared.clone(), watch(syns)?));
        }
        if let Some(refused) = listeners.refused {
            handle.run("refused packets", record_refused(shared, watch(refused)?));
        }
        Ok(handle)
    }
}

/// A running gateway. Dropping it stops it.
#[derive(Debug)]
pub struct GatewayHandle {
    shared: Arc<Shared>,
    /// The accepting tasks; they end only by being aborted. Connections end by themselves or are cut.
    tasks: Mutex<Vec<AbortHandle>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl GatewayHandle {
    fn run(&mut self, what: &'static str, task: impl Future<Output = io::Result<()>> + Send + 'static) {
        let task = tokio::spawn(async move {
            if let Err(error) = task.await {
                tracing::error!(%error, what, "gateway task ended");
            }
        });
        self.tasks.get_mut().unwrap_or_else(PoisonError::into_inner).push(task.abort_handle());
    }

    /// Puts a policy in force. When it returns, connections that the policy denies have been reset on both sides,
    /// whatever they were doing.
    pub fn set_policy(&self, policy: Policy) {
        self.shared.set_policy(policy);
    }

    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.shared.lock().policy.clone()
    }

    /// Records whose `seq` is greater than `since`, in order. A record that changed since (its connection ended, a repeat
    /// was merged into it) comes again with the same `id`.
    #[must_use]
    pub fn records(&self, since: u64) -> Vec<ConnectionRecord> {
        self.shared.lock().records.since(since)
    }

    /// How many records were dropped because there were too many.
    #[must_use]
    pub fn records_dropped(&self) -> u64 {
        self.shared.lock().records.dropped()
    }

    /// Cuts all connections and closes the listeners. Harmless when repeated. Records can still be read.
    pub fn stop(&self) {
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        self.shared.stop();
    }
}

impl Drop for GatewayHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Gives a descriptor to the runtime.
fn watch<T: std::os::fd::AsRawFd>(owner: T) -> io::Result<AsyncFd<T>> {
    // Deprecated for types that may close or change their descriptor; those here own one and do neither.
    #[allow(deprecated)]
    AsyncFd::new(owner)
}

/// Refuses connections that nothing they could say would open, before their handshake: connect(2) fails. What passes
/// here is judged again when it has been heard.
async fn judge_syns(shared: Arc<Shared>, queue: AsyncFd<SynQueue>) -> io::Result<()> {
    loop {
        let mut ready = queue.readable().await?;
        let waiting = match ready.try_io(|queue| queue.get_ref().receive()) {
            Err(_would_block) => continue,
            // ENOBUFS: the kernel let some through, to be judged behind their handshake.
            Ok(Err(_)) => continue,
            Ok(Ok(waiting)) => waiting,
        };
        for syn in waiting {
            let refused = syn.destination.is_some_and(|destination| tcp::refuse_unheard(&shared, destination));
            if let Err(error) = queue.get_ref().answer(syn, !refused) {
                tracing::warn!(%error, "a connection of the cell stays without an answer");
            }
        }
    }
}

/// Records what the cell's rules refused without the gateway.
async fn record_refused(shared: Arc<Shared>, socket: AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut buffer = vec![0u8; 8192];
    loop {
        let mut ready = socket.readable().await?;
        let received = ready.try_io(|fd| {
            let (n, _) = rustix::net::recv(fd.get_ref(), &mut buffer[..], rustix::net::RecvFlags::DONTWAIT)?;
            Ok(n.min(8192))
        });
        let n = match received {
            Err(_would_block) => continue,
            // ENOBUFS: the kernel dropped some. They are refused all the same.
            Ok(Err(_)) => continue,
            Ok(Ok(n)) => n,
        };
        for packet in trialrun_net::refused_packets(&buffer[..n]) {
            let (kind, protocol) = match packet.protocol {
                17 => (RecordKind::Udp, "UDP".to_owned()),
                1 | 58 => (RecordKind::Packet, "ICMP".to_owned()),
                other => (RecordKind::Packet, format!("IP protocol {other}")),
            };
            let (preset, host) = {
                let state = shared.lock();
                (state.policy.preset(), state.names.of(packet.address).first().map(ToString::to_string))
            };
            let port = (packet.port != 0).then_some(packet.port);
            let attempt = Attempt { kind, host, address: Some(packet.address), port };
            shared.record(attempt, closed_protocol(preset, &protocol));
        }
    }
}
