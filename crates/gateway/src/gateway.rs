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
use trialrun_net::CellListeners;
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
        if let Some(refused) = listeners.refused {
            // Deprecated for types that may close or change their descriptor; an OwnedFd does neither.
            #[allow(deprecated)]
            let refused = AsyncFd::new(refused)?;
            handle.run("refused packets", record_refused(shared, refused));
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
