//! One TCP connection from the cell, from accept to end.
//!
//! ```text
//! begun ─> refused unheard: connect(2) fails (nothing it could say would help)
//!   └─> accepted
//!     └─> heard (TLS, HTTP, other, silent) ─> decided ─> dialled ─> carried ─> ended
//!                                               └─> refused     └─> failed outside
//! ```
//!
//! A silent client may be one whose server begins. It is decided by address and looked-up name alone; if it begins after
//! all before the server has said anything, what it says is judged like any other beginning, so that waiting is no way
//! round the name check.

use crate::{
    dial::dial,
    hello::{self, MAX_HELLO},
    http::{self, Guess, Malformed, Requests, Step},
    resolve::is_host_own,
    shared::{Facts, Permit, Shared, Ticket, reset_on_close},
    splice::{pump, read_more, splice, write_all},
};
use rustix::net::{Shutdown, shutdown, sockopt};
use std::{
    future::Future,
    io,
    net::{SocketAddr, TcpListener as StdListener},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use trialrun_model::error_chain;
use trialrun_policy::{Claimed, Decision, Protocol};

/// Pause after a failed accept, which is mostly a lack of descriptors that passes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a refused client may take to read why.
const GOODBYE: Duration = Duration::from_millis(500);
/// Fatal alert "access denied" in a TLS 1.2 record, which every version understands.
const TLS_ACCESS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];

/// Accepts steered connections until the task is aborted.
pub(crate) async fn serve(shared: Arc<Shared>, listener: StdListener) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let v6 = listener.local_addr()?.is_ipv6();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection of the cell not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let original = if v6 {
            sockopt::ipv6_original_dst(&stream).map(SocketAddr::from)
        } else {
            sockopt::ip_original_dst(&stream).map(SocketAddr::from)
        };
        let stream = Arc::new(stream);
        match (original, shared.open(stream.clone())) {
            (Ok(original), Some(ticket)) if !trialrun_net::is_listener(original) => {
                tokio::spawn(connection(ticket, original));
            }
            _ => reset_on_close(&stream),
        }
    }
}

/// Runs one connection; a cut ends it wherever it is.
async fn connection(ticket: Ticket, original: SocketAddr) {
    let traffic = ticket.traffic.clone();
    let ended = tokio::select! {
        biased;
        () = traffic.cut.notified() => End::Reset,
        end = run(&ticket, original) => end,
    };
    if ended == End::Reset {
        reset_on_close(&ticket.client);
    }
}

/// How the client's side is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Close,
    Reset,
}

/// The beginning of a connection.
struct Heard {
    protocol: Protocol,
    claimed: Option<Claimed>,
    bytes: Vec<u8>,
}

async fn run(ticket: &Ticket, original: SocketAddr) -> End {
    let shared = &ticket.shared;
    let mut facts = facts(shared, original);
    if let Some(decision) = unheard(shared, &facts) {
        // It got here where the kernel can't hold its first packet, or the policy changed since.
        shared.record(facts.attempt(), decision);
        return End::Reset;
    }
    let client = &*ticket.client;
    let silence = shared.config.silence;
    let mut heard = match hear(ticket, Vec::new(), Some(silence)).await {
        Ok(heard) => heard,
        Err(_) => return End::Reset, // gone before it said anything
    };
    facts.set(&heard);
    let mut permit = ticket.decide_unless(&facts, heard.protocol == Protocol::Silent);
    if heard.protocol == Protocol::Silent && permit.is_err() {
        // Silence would not be allowed; a slow client may still say something that is.
        let hearing = shared.config.hearing;
        heard = match hear(ticket, Vec::new(), Some(hearing)).await {
            Ok(heard) => heard,
            Err(_) => return End::Reset,
        };
        facts.set(&heard);
        permit = ticket.decide(&facts);
    }
    let permit = match permit {
        Ok(permit) => permit,
        Err(decision) => return refuse(ticket, heard.protocol, &decision).await,
    };
    let upstream = match connect(ticket, &facts, &permit).await {
        Some(upstream) => upstream,
        None => return End::Reset,
    };
    if heard.protocol == Protocol::Silent {
        match late_beginning(ticket, &mut facts, &upstream).await {
            Ok(late) => heard = late,
            Err(end) => return end,
        }
    }
    match heard.protocol {
        Protocol::Http => return carry_http(ticket, &mut facts, &upstream, heard.bytes).await,
        Protocol::Tls | Protocol::TlsEch => return carry_tls(ticket, &mut facts, &upstream, heard.bytes).await,
        Protocol::HttpTwo | Protocol::Opaque | Protocol::Silent => {}
    }
    let (up, down) = (&ticket.traffic.up, &ticket.traffic.down);
    let carried = async {
        write_all(&upstream, &heard.bytes).await?;
        up.fetch_add(heard.bytes.len() as u64, Ordering::Relaxed);
        drop(std::mem::take(&mut heard.bytes));
        splice(client, &upstream, up, down).await
    };
    end_of(carried.await, &upstream)
}

fn end_of(carried: io::Result<()>, upstream: &TcpStream) -> End {
    if carried.is_ok() {
        return End::Close;
    }
    reset_on_close(upstream);
    End::Reset
}

fn facts(shared: &Shared, original: SocketAddr) -> Facts {
    let (addr, port) = (original.ip(), original.port());
    let (names, synthetic) = {
        let state = shared.lock();
        (state.names.of(addr), state.names.is_synthetic(addr))
    };
    let host_own = !synthetic && is_host_own(addr);
    Facts { addr, port, names, claimed: None, protocol: Protocol::Opaque, synthetic, host_own }
}

impl Facts {
    fn set(&mut self, heard: &Heard) {
        self.protocol = heard.protocol;
        self.claimed.clone_from(&heard.claimed);
    }
}

impl Ticket {
    /// Decides; while `tentative`, a denial is not final and leaves no record.
    fn decide_unless(&self, facts: &Facts, tentative: bool) -> Result<Permit, Decision> {
        if tentative {
            let decision = self.shared.lock().policy.decide_connection(&facts.destination());
            if !decision.allow {
                return Err(decision);
            }
        }
        self.decide(facts)
    }
}

/// Listens until the client's beginning is understood. `first` bounds the wait for its first byte.
async fn hear(ticket: &Ticket, mut bytes: Vec<u8>, first: Option<Duration>) -> io::Result<Heard> {
    let client = &*ticket.client;
    let heard = |protocol, claimed, bytes| Ok(Heard { protocol, claimed, bytes });
    if bytes.is_empty()
        && let Some(first) = first
    {
        match timeout(first, read_more(client, &mut bytes)).await {
            Err(_) => return heard(Protocol::Silent, None, bytes),
            Ok(read) => {
                if read? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
        }
    }
    let deadline = Instant::now() + ticket.shared.config.hearing;
    loop {
        if let Some((protocol, claimed)) = understand(&bytes) {
            return heard(protocol, claimed, bytes);
        }
        let more = timeout_at(deadline, read_more(client, &mut bytes)).await;
        if !matches!(more, Ok(Ok(1..))) {
            // It ended or went silent in the middle: whatever it is, it has shown no name.
            let protocol = match http::guess(&bytes) {
                Guess::Tls => Protocol::Tls,
                Guess::Http | Guess::More => Protocol::Http,
                Guess::HttpTwo => Protocol::HttpTwo,
                Guess::Opaque => Protocol::Opaque,
            };
            return heard(protocol, None, bytes);
        }
    }
}

/// What the bytes begin with, once that can be told.
fn understand(bytes: &[u8]) -> Option<(Protocol, Option<Claimed>)> {
    match http::guess(bytes) {
        Guess::More => None,
        Guess::Opaque => Some((Protocol::Opaque, None)),
        Guess::HttpTwo => Some((Protocol::HttpTwo, None)),
        Guess::Tls => understand_hello(hello::read(bytes), bytes.len()),
        Guess::Http => match Requests::default().step(bytes) {
            Ok(Step::Head(head)) => Some((Protocol::Http, head.host.map(Claimed::Host))),
            Ok(_) => None,
            Err(_) => Some((Protocol::Http, None)),
        },
    }
}

fn understand_hello(heard: hello::Heard, length: usize) -> Option<(Protocol, Option<Claimed>)> {
    match heard {
        // Twice, for the headers of small records.
        hello::Heard::More if length <= 2 * MAX_HELLO => None,
        hello::Heard::More | hello::Heard::Malformed => Some((Protocol::Tls, None)),
        hello::Heard::Hello(hello) => {
            let protocol = if hello.encrypted { Protocol::TlsEch } else { Protocol::Tls };
            Some((protocol, hello.name.map(Claimed::Sni)))
        }
    }
}

/// The refusal of a connection to which nothing it could say would open the way.
fn unheard(shared: &Shared, facts: &Facts) -> Option<Decision> {
    let state = shared.lock();
    state.policy.decide_before_hearing(facts.addr, facts.port, &facts.names, facts.synthetic, facts.host_own)
}

/// Whether a connection that is about to begin is refused; the refusal is recorded.
pub(crate) fn refuse_unheard(shared: &Shared, original: SocketAddr) -> bool {
    let facts = facts(shared, original);
    let decision = unheard(shared, &facts);
    let refused = decision.is_some();
    if let Some(decision) = decision {
        shared.record(facts.attempt(), decision);
    }
    refused
}

/// Tells the client in its own protocol where that has words for it.
async fn refuse(ticket: &Ticket, protocol: Protocol, decision: &Decision) -> End {
    let answer = match protocol {
        Protocol::Http => http::refusal(&ticket.policy_name(), decision),
        Protocol::Tls | Protocol::TlsEch => TLS_ACCESS_DENIED.to_vec(),
        Protocol::HttpTwo | Protocol::Opaque | Protocol::Silent => return End::Reset,
    };
    let client = &*ticket.client;
    let said = timeout(GOODBYE, async {
        write_all(client, &answer).await?;
        shutdown(client, Shutdown::Write)?;
        // Closing with unread bytes would reset the connection, and the reset could overtake the answer.
        let mut rest = Vec::new();
        while read_more(client, &mut rest).await? > 0 {
            rest.clear();
        }
        io::Result::Ok(())
    });
    if matches!(said.await, Ok(Ok(()))) { End::Close } else { End::Reset }
}

async fn connect(ticket: &Ticket, facts: &Facts, permit: &Permit) -> Option<Arc<TcpStream>> {
    match dial(&ticket.shared, facts, permit).await {
        Ok(stream) => {
            let stream = Arc::new(stream);
            let _best_effort = (stream.set_nodelay(true), ticket.client.set_nodelay(true));
            // Not attached means that the policy changed while dialling; the cut is on its way.
            ticket.attach(&stream).then_some(stream)
        }
        Err(error) => {
            tracing::debug!(error = %error_chain(&error), "dial failed");
            ticket.failed(format!("upstream failed: {}", error_chain(&error)));
            None
        }
    }
}

/// Waits for whoever begins. A client that does is judged by what it says.
async fn late_beginning(ticket: &Ticket, facts: &mut Facts, upstream: &TcpStream) -> Result<Heard, End> {
    let client = &*ticket.client;
    tokio::select! {
        biased;
        ready = client.readable() => ready.map_err(|_| End::Reset)?,
        ready = upstream.readable() => {
            ready.map_err(|_| End::Reset)?;
            return Ok(Heard { protocol: Protocol::Silent, claimed: None, bytes: Vec::new() });
        }
    }
    let mut bytes = Vec::new();
    if read_more(client, &mut bytes).await.map_err(|_| End::Reset)? == 0 {
        return Ok(Heard { protocol: Protocol::Silent, claimed: None, bytes }); // half-closed without a word
    }
    let heard = hear(ticket, bytes, None).await.map_err(|_| End::Reset)?;
    facts.set(&heard);
    match ticket.decide(facts) {
        Ok(_) => Ok(heard),
        Err(decision) => Err(refuse(ticket, heard.protocol, &decision).await),
    }
}

/// Carries a TLS connection. Should the server ask for a second hello, that is judged like the first.
async fn carry_tls(ticket: &Ticket, facts: &mut Facts, upstream: &TcpStream, bytes: Vec<u8>) -> End {
    let client = &*ticket.client;
    let (retry, mut asked) = watch::channel(None);
    let mut start = Vec::new();
    let answers = async {
        let carried = pump(upstream, client, &ticket.traffic.down, |piece| {
            if retry.borrow().is_none() {
                start.extend_from_slice(&piece[..piece.len().min(hello::RETRY_PREFIX)]);
                retry.send_replace(hello::is_retry(&start));
            }
        });
        let carried = carried.await;
        retry.send_if_modified(|r| r.replace(r.unwrap_or(false)).is_none());
        carried
    };
    let hellos = async {
        let up = &ticket.traffic.up;
        write_all(upstream, &bytes).await?;
        up.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        drop(bytes);
        // The server answers the hello before it needs anything more, so waiting for that delays nothing but early data.
        if asked.wait_for(Option::is_some).await.is_ok_and(|retry| *retry == Some(true)) {
            let second = second_hello(ticket, facts).await?;
            write_all(upstream, &second).await?;
            up.fetch_add(second.len() as u64, Ordering::Relaxed);
        }
        Ok(pump(client, upstream, up, |_| ()).await?)
    };
    match both(hellos, answers).await {
        Ok(()) => End::Close,
        Err(stop) => stopped(ticket, upstream, Protocol::Tls, stop).await,
    }
}

/// Hears a second hello and judges it.
async fn second_hello(ticket: &Ticket, facts: &mut Facts) -> Result<Vec<u8>, Stop> {
    let deadline = Instant::now() + ticket.shared.config.hearing;
    let mut bytes = Vec::new();
    loop {
        if let Some((protocol, claimed)) = understand_hello(hello::read_second(&bytes), bytes.len()) {
            (facts.protocol, facts.claimed) = (protocol, claimed);
            let _permit = ticket.decide(facts).map_err(Stop::Denied)?;
            return Ok(bytes);
        }
        let more = timeout_at(deadline, read_more(&ticket.client, &mut bytes)).await;
        if more.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? == 0 {
            return Err(Stop::Io(io::ErrorKind::UnexpectedEof.into()));
        }
    }
}

/// Ends both sides of a connection that did not end by itself.
async fn stopped(ticket: &Ticket, upstream: &TcpStream, protocol: Protocol, stop: Stop) -> End {
    reset_on_close(upstream);
    match stop {
        Stop::Io(error) => {
            tracing::debug!(%error, "connection ended");
            End::Reset
        }
        Stop::Denied(decision) => refuse(ticket, protocol, &decision).await,
    }
}

/// Why the client's side of a connection stopped.
enum Stop {
    Io(io::Error),
    Denied(Decision),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Carries an HTTP/1 connection, judging each request by its own Host.
async fn carry_http(ticket: &Ticket, facts: &mut Facts, upstream: &TcpStream, bytes: Vec<u8>) -> End {
    let client = &*ticket.client;
    let (status, first_status) = watch::channel(None);
    let mut start = Vec::new();
    let responses = async {
        let carried = pump(upstream, client, &ticket.traffic.down, |piece| {
            if status.borrow().is_none() {
                start.extend_from_slice(&piece[..piece.len().min(16)]);
                status.send_replace(status_of(&start));
            }
        });
        let carried = carried.await;
        status.send_if_modified(|s| s.replace(s.unwrap_or(0)).is_none());
        carried
    };
    let requests = carry_requests(ticket, facts, upstream, bytes, first_status);
    match both(requests, responses).await {
        Ok(()) => End::Close,
        Err(stop) => stopped(ticket, upstream, Protocol::Http, stop).await,
    }
}

async fn both(
    up: impl Future<Output = Result<(), Stop>>,
    down: impl Future<Output = io::Result<()>>,
) -> Result<(), Stop> {
    let down = async { down.await.map_err(Stop::Io) };
    tokio::try_join!(up, down)?;
    Ok(())
}

/// The status code that a response begins with; 0 for what is no response, none while too short.
fn status_of(start: &[u8]) -> Option<u16> {
    let line = start.get(..12)?;
    let code = line.strip_prefix(b"HTTP/1.").and_then(|rest| std::str::from_utf8(&rest[2..5]).ok());
    Some(code.and_then(|c| c.parse().ok()).unwrap_or(0))
}

async fn carry_requests(
    ticket: &Ticket,
    facts: &mut Facts,
    upstream: &TcpStream,
    mut held: Vec<u8>,
    mut first_status: watch::Receiver<Option<u16>>,
) -> Result<(), Stop> {
    let client = &*ticket.client;
    let up = &ticket.traffic.up;
    let (mut requests, mut number) = (Requests::default(), 0u64);
    loop {
        let step = requests.step(&held);
        let n = match step {
            Ok(Step::More) => {
                if held.is_empty() {
                    held = Vec::new();
                    client.readable().await?;
                }
                if read_more(client, &mut held).await? == 0 {
                    let _already_closed = shutdown(upstream, Shutdown::Write);
                    return Ok(());
                }
                continue;
            }
            Ok(Step::Body(n)) => n,
            Ok(Step::Head(head)) => {
                number += 1;
                facts.claimed = head.host.clone().map(Claimed::Host);
                // The first request was decided before the dial; deciding again costs little and keeps one path.
                let _permit = ticket.decide(facts).map_err(Stop::Denied)?;
                head.apply_mask(&mut held[..head.length]);
                if head.upgrade && number == 1 {
                    write_all(upstream, &held[..head.length]).await?;
                    up.fetch_add(head.length as u64, Ordering::Relaxed);
                    held.drain(..head.length);
                    // Only the first response on a connection can be told apart without following all of them, so
                    // only a first request may change the protocol.
                    if first_status.wait_for(Option::is_some).await.is_ok_and(|s| *s == Some(101)) {
                        write_all(upstream, &held).await?;
                        up.fetch_add(held.len() as u64, Ordering::Relaxed);
                        return Ok(pump(client, upstream, up, |_| ()).await?);
                    }
                    continue;
                }
                if head.upgrade {
                    return Err(denied(ticket, facts, Malformed("upgrade on a used connection")));
                }
                head.length
            }
            Err(malformed) => return Err(denied(ticket, facts, malformed)),
        };
        write_all(upstream, &held[..n]).await?;
        up.fetch_add(n as u64, Ordering::Relaxed);
        held.drain(..n);
    }
}

/// A request that can't be followed ends the connection, whatever the policy: what came after it could not be judged.
fn denied(ticket: &Ticket, facts: &Facts, malformed: Malformed) -> Stop {
    let decision = Decision::deny("HTTP must be clear", malformed.to_string());
    ticket.shared.record(facts.attempt(), decision.clone());
    Stop::Denied(decision)
}
