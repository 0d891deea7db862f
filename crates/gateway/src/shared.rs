//! What the tasks of one gateway share: policy, names given out, open connections, records; behind one mutex that is
//! never held across an await.

use crate::{
    GatewayConfig,
    names::GivenNames,
    record::{Attempt, RecordKind, Records},
    resolve::Lookups,
};
use rustix::net::{connect_unspec, sockopt::set_socket_linger};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{net::TcpStream, sync::Notify};
use trialrun_policy::{Claimed, Decision, Destination, Name, Policy, Protocol};

/// What is known of a connection; owned, unlike [`Destination`].
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) addr: IpAddr,
    pub(crate) port: u16,
    pub(crate) names: Vec<Name>,
    pub(crate) claimed: Option<Claimed>,
    pub(crate) protocol: Protocol,
    pub(crate) synthetic: bool,
    pub(crate) host_own: bool,
}

impl Facts {
    pub(crate) fn destination(&self) -> Destination<'_> {
        Destination {
            addr: self.addr,
            port: self.port,
            names_from_dns: &self.names,
            claimed: self.claimed.as_ref(),
            protocol: self.protocol,
            synthetic: self.synthetic,
            host_own: self.host_own,
        }
    }

    /// The name to record and to dial by: the claimed one, else the one looked up.
    pub(crate) fn name(&self) -> Option<&Name> {
        self.claimed.as_ref().map(Claimed::name).or(self.names.first())
    }

    pub(crate) fn attempt(&self) -> Attempt {
        let kind = match self.protocol {
            Protocol::Tls | Protocol::TlsEch => RecordKind::Tls,
            Protocol::Http | Protocol::HttpTwo => RecordKind::Http,
            Protocol::Opaque | Protocol::Silent => RecordKind::Tcp,
        };
        let host = self.name().map(ToString::to_string);
        Attempt { kind, host, address: Some(self.addr), port: Some(self.port) }
    }
}

/// Proof that the policy allowed a connection; a dial needs one. Only [`Ticket::decide`] makes it.
#[derive(Debug)]
pub(crate) struct Permit(());

pub(crate) struct Shared {
    pub(crate) config: GatewayConfig,
    pub(crate) lookups: Lookups,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) policy: Policy,
    pub(crate) names: GivenNames,
    pub(crate) records: Records,
    connections: HashMap<u64, Connection>,
    next: u64,
    stopped: bool,
}

struct Connection {
    client: Arc<TcpStream>,
    upstream: Option<Arc<TcpStream>>,
    facts: Option<Facts>,
    record: Option<u64>,
    traffic: Arc<Traffic>,
}

/// Bytes carried, and the signal that the connection was cut.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) up: AtomicU64,
    pub(crate) down: AtomicU64,
    pub(crate) cut: Notify,
}

impl Connection {
    /// Resets both sides now, whatever their task is doing, and tells the task.
    fn cut(&self) {
        reset(&self.client);
        if let Some(upstream) = &self.upstream {
            reset(upstream);
        }
        self.traffic.cut.notify_one();
    }
}

/// Sends a reset at once. connect(2) with AF_UNSPEC ends a TCP connection though other owners of the socket remain,
/// which closing could not.
pub(crate) fn reset(stream: &TcpStream) {
    if let Err(e) = connect_unspec(stream) {
        tracing::debug!(error = %e, "socket could not be reset");
    }
}

/// Makes the coming close a reset.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    if let Err(e) = set_socket_linger(stream, Some(Duration::ZERO)) {
        tracing::debug!(error = %e, "linger could not be set");
    }
}

impl Shared {
    pub(crate) fn new(config: GatewayConfig, policy: Policy) -> Arc<Self> {
        let state = State {
            policy,
            names: GivenNames::default(),
            records: Records::new(config.records_limit),
            connections: HashMap::new(),
            next: 0,
            stopped: false,
        };
        Arc::new(Self { lookups: Lookups::new(config.resolver.clone()), config, state: Mutex::new(state) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section is short and leaves the state whole, so a panic in one does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new connection; `None` when there are too many or the gateway has stopped.
    pub(crate) fn open(self: &Arc<Self>, client: Arc<TcpStream>) -> Option<Ticket> {
        let mut state = self.lock();
        if state.stopped || state.connections.len() >= self.config.connections_limit {
            return None;
        }
        state.next += 1;
        let (id, traffic) = (state.next, Arc::new(Traffic::default()));
        let connection =
            Connection { client: client.clone(), upstream: None, facts: None, record: None, traffic: traffic.clone() };
        state.connections.insert(id, connection);
        Some(Ticket { shared: self.clone(), id, client, traffic })
    }

    pub(crate) fn record(&self, attempt: Attempt, decision: Decision) {
        log_decision(&attempt, &decision);
        self.lock().records.add(attempt, decision);
    }

    /// Replaces the policy and cuts what the new one denies, all under the lock.
    pub(crate) fn set_policy(&self, policy: Policy) {
        let mut state = self.lock();
        let state = &mut *state;
        state.policy = policy;
        for connection in state.connections.values_mut() {
            let Some(facts) = &connection.facts else { continue }; // not yet decided: it will meet the new policy
            let decision = state.policy.decide_connection(&facts.destination());
            if decision.allow {
                continue;
            }
            connection.cut();
            let attempt = facts.attempt();
            let decision = Decision { reason: format!("cut by a change of policy: {}", decision.reason), ..decision };
            log_decision(&attempt, &decision);
            state.records.add(attempt, decision);
            connection.facts = None;
        }
        tracing::info!(policy = state.policy.name(), "egress policy set");
    }

    /// Cuts everything and takes nothing more.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        for connection in state.connections.values() {
            connection.cut();
        }
    }
}

fn log_decision(attempt: &Attempt, decision: &Decision) {
    tracing::debug!(
        host = attempt.host, address = ?attempt.address, port = attempt.port, allow = decision.allow,
        rule = decision.rule, reason = decision.reason, "egress decision"
    );
}

/// One connection's place in the table; leaving it ends the record.
pub(crate) struct Ticket {
    pub(crate) shared: Arc<Shared>,
    id: u64,
    pub(crate) client: Arc<TcpStream>,
    pub(crate) traffic: Arc<Traffic>,
}

impl Ticket {
    /// Asks the policy, records the answer and, if it allows, keeps the facts so that a later policy can be asked again.
    /// A further request of a connection is recorded only if it goes to another name or is denied.
    pub(crate) fn decide(&self, facts: &Facts) -> Result<Permit, Decision> {
        let mut state = self.shared.lock();
        let state = &mut *state;
        let decision = state.policy.decide_connection(&facts.destination());
        let Some(connection) = state.connections.get_mut(&self.id) else { return Err(decision_cut()) };
        let denied = (!decision.allow).then(|| decision.clone());
        let known = connection.facts.as_ref().is_some_and(|known| known.name() == facts.name());
        if !known || denied.is_some() {
            let attempt = facts.attempt();
            log_decision(&attempt, &decision);
            let seq = state.records.add(attempt, decision);
            if denied.is_none() {
                connection.record.get_or_insert(seq);
            }
        }
        if let Some(decision) = denied {
            return Err(decision);
        }
        connection.facts = Some(facts.clone());
        Ok(Permit(()))
    }

    /// Ties the dialled connection to this one; refused when the policy changed meanwhile.
    pub(crate) fn attach(&self, upstream: &Arc<TcpStream>) -> bool {
        let mut state = self.shared.lock();
        let stopped = state.stopped;
        match state.connections.get_mut(&self.id) {
            Some(connection) if connection.facts.is_some() && !stopped => {
                connection.upstream = Some(upstream.clone());
                true
            }
            _ => false,
        }
    }

    /// Notes what failed outside.
    pub(crate) fn failed(&self, failure: String) {
        let mut state = self.shared.lock();
        let state = &mut *state;
        if let Some(Connection { record: Some(record), .. }) = state.connections.get_mut(&self.id) {
            *record = state.records.update(*record, |r| r.failure = Some(failure));
        }
    }

    /// The name of the policy in force.
    pub(crate) fn policy_name(&self) -> String {
        self.shared.lock().policy.name().to_owned()
    }
}

fn decision_cut() -> Decision {
    Decision::deny("gateway stopped", "the connection is no longer known")
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let state = &mut *state;
        if let Some(Connection { record: Some(record), .. }) = state.connections.remove(&self.id) {
            let (up, down) = (self.traffic.up.load(Ordering::Relaxed), self.traffic.down.load(Ordering::Relaxed));
            state.records.update(record, |r| (r.bytes_up, r.bytes_down) = (Some(up), Some(down)));
        }
    }
}
