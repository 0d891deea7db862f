//! The DNS stub of a cell: answers A and AAAA for allowed names from the host's resolver, refuses the others.
//!
//! Nothing of a query goes further than its name, and that only if the policy allows it; no query packet ever leaves.
//! Denied names get REFUSED, with the rule as an extended error (RFC 8914, "blocked") where the client speaks EDNS.
//! Addresses handed out are remembered with their names, because connections are judged by them. Where a real address
//! would not be steered to the gateway (it is a loopback address, the cell's own, or unknown because the host's proxy
//! resolves), one is made up.

use crate::{
    record::{Attempt, RecordKind},
    resolve::{TTL, has_public_ipv6},
    shared::Shared,
};
use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, RData, Record, RecordType,
        rdata::{A, AAAA, opt::EdnsOption},
    },
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener as StdListener, UdpSocket as StdUdp},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    time::timeout,
};
use trialrun_policy::{AddressClass, Decision, Name, Preset, classify};

/// Queries of one cell under way. Further UDP ones are dropped (clients ask again), further TCP ones wait.
pub(crate) const CONCURRENT: usize = 64;
/// Largest query taken; a name and a few options come nowhere near.
const MAX_QUERY: usize = 4096;
/// A TCP client that asks nothing for so long is left.
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Registered code of "blocked" in RFC 8914.
const EDE_BLOCKED: u16 = 15;
/// Option code of the extended error itself.
const EDE: u16 = 15;
const MAX_EDE_TEXT: usize = 200;
const MAX_ANSWERS: usize = 8;

/// Answers queries over UDP until the task is aborted.
pub(crate) async fn serve_udp(shared: Arc<Shared>, socket: StdUdp, limit: Arc<Semaphore>) -> io::Result<()> {
    let socket = Arc::new(UdpSocket::from_std(socket)?);
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        let (n, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                // ICMP errors of earlier answers show up here; they end nothing.
                tracing::debug!(%error, "DNS query not received");
                continue;
            }
        };
        let Ok(permit) = limit.clone().try_acquire_owned() else { continue };
        let (shared, socket, query) = (shared.clone(), socket.clone(), buffer[..n].to_vec());
        tokio::spawn(async move {
            if let Some(answer) = answer(&shared, &query).await
                && let Err(error) = socket.send_to(&answer, from).await
            {
                tracing::debug!(%error, "DNS answer not sent");
            }
            drop(permit);
        });
    }
}

/// Answers queries over TCP until the task is aborted.
pub(crate) async fn serve_tcp(shared: Arc<Shared>, listener: StdListener, limit: Arc<Semaphore>) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = limit.clone().acquire_owned().await else { return Ok(()) };
        let shared = shared.clone();
        tokio::spawn(async move {
            // Ends with the client, with its silence, or with the first thing that is no query.
            let _ended = tcp_client(&shared, stream).await;
            drop(permit);
        });
    }
}

async fn tcp_client(shared: &Shared, mut stream: TcpStream) -> io::Result<()> {
    loop {
        let length = usize::from(timeout(TCP_IDLE, stream.read_u16()).await??);
        if length > MAX_QUERY {
            return Ok(());
        }
        let mut query = vec![0; length];
        timeout(TCP_IDLE, stream.read_exact(&mut query)).await??;
        let Some(answer) = answer(shared, &query).await else { return Ok(()) };
        let length = u16::try_from(answer.len()).map_err(|_| io::ErrorKind::InvalidData)?;
        let framed = [&length.to_be_bytes(), &answer[..]].concat();
        timeout(TCP_IDLE, stream.write_all(&framed)).await??;
    }
}

/// Outcome of a query that could be read.
enum Outcome {
    Addresses(Vec<IpAddr>),
    Refused(Decision),
    /// The name is allowed, but nobody knows it.
    Unknown,
    Code(ResponseCode),
}

/// The answer to one packet; `None` for what deserves none.
async fn answer(shared: &Shared, packet: &[u8]) -> Option<Vec<u8>> {
    let Ok(query) = Message::from_vec(packet) else {
        let id = u16::from_be_bytes(*packet.first_chunk::<2>()?);
        let is_query = packet.len() >= 12 && packet[2] & 0x80 == 0;
        let response = Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
        return if is_query { response.to_vec().ok() } else { None };
    };
    if query.metadata.message_type != MessageType::Query {
        return None;
    }
    let outcome = match (&query.queries[..], query.metadata.op_code) {
        ([question], OpCode::Query) if question.query_class() == DNSClass::IN => resolve(shared, question).await,
        (_, OpCode::Query) => Outcome::Code(ResponseCode::FormErr),
        _ => Outcome::Code(ResponseCode::NotImp),
    };
    encode(shared, &query, outcome)
}

fn encode(shared: &Shared, query: &Message, outcome: Outcome) -> Option<Vec<u8>> {
    let mut response = Message::response(query.metadata.id, query.metadata.op_code);
    response.metadata.recursion_desired = query.metadata.recursion_desired;
    response.metadata.recursion_available = true;
    response.add_queries(query.queries.iter().cloned());
    let mut error = None;
    match outcome {
        Outcome::Addresses(addresses) => {
            let name = query.queries.first()?.name();
            let ttl = u32::try_from(TTL.as_secs()).unwrap_or(60);
            response.add_answers(addresses.into_iter().take(MAX_ANSWERS).map(|address| {
                let data = match address {
                    IpAddr::V4(v4) => RData::A(A(v4)),
                    IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
                };
                Record::from_rdata(name.clone(), ttl, data)
            }));
        }
        Outcome::Refused(decision) => {
            response.metadata.response_code = ResponseCode::Refused;
            let policy = shared.lock().policy.name().to_owned();
            error = Some(format!("blocked by the egress policy {policy}, rule: {}", decision.rule));
        }
        // SERVFAIL would make clients try again and say "temporary"; the host has already tried.
        Outcome::Unknown => response.metadata.response_code = ResponseCode::NXDomain,
        Outcome::Code(code) => response.metadata.response_code = code,
    }
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(1232).set_version(0);
        if let Some(mut text) = error {
            text.truncate(MAX_EDE_TEXT); // ASCII: policy and rule names are parsed names
            let value = [&EDE_BLOCKED.to_be_bytes(), text.as_bytes()].concat();
            edns.options_mut().insert(EdnsOption::Unknown(EDE, value));
        }
        response.set_edns(edns);
    }
    response.to_vec().ok()
}

/// The name of a query in the one spelling that is compared; `None` for what is no host name.
fn host_name(question: &Query) -> Option<Name> {
    let labels: Option<Vec<&str>> = question.name().iter().map(|label| std::str::from_utf8(label).ok()).collect();
    let labels = labels?;
    // A dot inside a label would make another name of it.
    if labels.iter().any(|label| label.contains('.')) { None } else { labels.join(".").parse().ok() }
}

async fn resolve(shared: &Shared, question: &Query) -> Outcome {
    let kind = question.query_type();
    if kind == RecordType::PTR {
        let off = shared.lock().policy.is_off();
        return if off { Outcome::Code(ResponseCode::Refused) } else { Outcome::Addresses(Vec::new()) };
    }
    let Some(name) = host_name(question) else {
        return refused(shared, question.name().to_ascii(), Decision::deny("not a host name", "no rule can name it"));
    };
    if name.is_localhost() {
        return Outcome::Addresses(match kind {
            RecordType::A => vec![Ipv4Addr::LOCALHOST.into()],
            RecordType::AAAA => vec![Ipv6Addr::LOCALHOST.into()],
            _ => Vec::new(),
        });
    }
    let decision = shared.lock().policy.decide_name(&name);
    if !decision.allow {
        return refused(shared, name.to_string(), decision);
    }
    record(shared, name.to_string(), decision);
    if !matches!(kind, RecordType::A | RecordType::AAAA) {
        return Outcome::Addresses(Vec::new());
    }
    let found = shared.lookups.resolve(&name).await;
    hand_out(shared, &name, kind, found.ok())
}

/// Filters what was found and remembers what is given out, under one lock, so that a policy that came meanwhile counts.
fn hand_out(shared: &Shared, name: &Name, kind: RecordType, found: Option<Vec<IpAddr>>) -> Outcome {
    let mut state = shared.lock();
    let decision = state.policy.decide_name(name);
    if !decision.allow {
        drop(state);
        return refused(shared, name.to_string(), decision);
    }
    let proxied = shared.config.upstream_proxy.as_ref().is_some_and(|p| p.covers(Some(name), None));
    let Some(found) = found else {
        // The proxy may know it.
        return match kind {
            RecordType::A if proxied => Outcome::Addresses(vec![state.names.synthetic(name)]),
            RecordType::AAAA if proxied => Outcome::Addresses(Vec::new()),
            _ => Outcome::Unknown,
        };
    };
    let (mut allowed, mut denied) = (Vec::new(), None);
    for address in found {
        let decision = state.policy.decide_answer(name, address);
        if decision.allow { allowed.push(address) } else { denied = Some(decision) }
    }
    if allowed.is_empty()
        && let Some(decision) = denied
    {
        drop(state);
        return refused(shared, name.to_string(), decision);
    }
    if allowed.iter().any(|a| needs_stand_in(*a)) {
        let stand_in = state.names.synthetic(name);
        return Outcome::Addresses(if kind == RecordType::A { vec![stand_in] } else { Vec::new() });
    }
    // A public IPv6 address that the host can't reach would only cost the client a timeout.
    let reachable = |a: &IpAddr| a.is_ipv4() || proxied || classify(*a) != AddressClass::Public || has_public_ipv6();
    let given: Vec<IpAddr> = allowed
        .into_iter()
        .filter(|a| a.is_ipv4() == (kind == RecordType::A) && reachable(a))
        .take(MAX_ANSWERS)
        .collect();
    for address in &given {
        state.names.give(name, *address);
    }
    Outcome::Addresses(given)
}

/// Whether a connection to the address would stay in the cell, or be taken for one to a made-up address.
fn needs_stand_in(address: IpAddr) -> bool {
    let own =
        address == IpAddr::V4(trialrun_net::CELL_ADDRESS_V4) || address == IpAddr::V6(trialrun_net::CELL_ADDRESS_V6);
    let made_up = matches!(address, IpAddr::V4(v4) if v4.octets()[0] == 198 && v4.octets()[1] & 0xfe == 18);
    own || made_up || classify(address) == AddressClass::Loopback
}

fn refused(shared: &Shared, host: String, decision: Decision) -> Outcome {
    record(shared, host, decision.clone());
    Outcome::Refused(decision)
}

fn record(shared: &Shared, host: String, decision: Decision) {
    shared.record(Attempt { kind: RecordKind::Dns, host: Some(host), address: None, port: None }, decision);
}

/// The rule named for packets that no policy can open.
pub(crate) fn closed_protocol(preset: Preset, protocol: &str) -> Decision {
    if preset == Preset::Off {
        return Decision::deny("preset off", "the policy lets nothing out");
    }
    Decision::deny("only TCP and DNS", format!("{protocol} is not relayed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GatewayConfig;
    use proptest::prelude::*;
    use trialrun_policy::Policy;

    fn answer_now(packet: &[u8]) -> Option<Vec<u8>> {
        // Under off nothing is resolved, so nothing has to be waited for.
        let shared = Shared::new(GatewayConfig::default(), Policy::off());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(answer(&shared, packet))
    }

    #[test]
    fn labels_with_dots_are_no_other_name() {
        let mut packet = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        packet.extend(b"\x09good.test\x00\x00\x01\x00\x01");
        let response = Message::from_vec(&answer_now(&packet).unwrap()).unwrap();
        assert_eq!(response.metadata.response_code, ResponseCode::Refused);
        packet[2] |= 0x80;
        assert_eq!(answer_now(&packet), None, "answers get no answer");
        assert_eq!(answer_now(&packet[..5]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_packet_is_taken(head in any::<[u8; 4]>(), rest in prop::collection::vec(any::<u8>(), 0..120)) {
            let packet = [&head[..], &[0, 1, 0, 0, 0, 0, 0, 0], &rest].concat();
            if let Some(response) = answer_now(&packet) {
                let response = Message::from_vec(&response).unwrap();
                prop_assert!(response.answers.iter().all(|r| r.data.ip_addr().is_some_and(|a| a.is_loopback())));
            }
        }
    }
}
