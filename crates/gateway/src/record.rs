//! What was decided, kept for whoever asks: a bounded, ordered list.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{SystemTime, UNIX_EPOCH},
};
use trialrun_policy::Decision;

/// How many of the newest records are searched for an equal one before a new one is made.
const MERGE_WINDOW: usize = 32;

/// What kind of attempt it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordKind {
    /// A name was looked up.
    Dns,
    /// A TCP connection that is neither TLS nor HTTP, or was refused before it said what it is.
    Tcp,
    /// A TLS connection.
    Tls,
    /// An HTTP/1 connection; where it was denied, the request that was.
    Http,
    /// A UDP packet that the cell's rules refused.
    Udp,
    /// Any other packet that the cell's rules refused.
    Packet,
}

/// One decision, and for an allowed connection what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionRecord {
    /// Order of the last change. A record that changes (a connection ends, a repeat is merged) moves to the end.
    pub seq: u64,
    /// Stays the same when `seq` changes.
    pub id: u64,
    /// When it was first decided, in milliseconds since 1970.
    pub time_ms: u64,
    /// What was attempted.
    pub kind: RecordKind,
    /// The name, if one is known: the claimed one, else the one looked up.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub host: Option<String>,
    /// Destination address.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub address: Option<IpAddr>,
    /// Destination port.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub port: Option<u16>,
    /// Whether it was allowed.
    pub allow: bool,
    /// The rule that decided.
    pub rule: String,
    /// One line for a person.
    pub reason: String,
    /// For an allowed one that did not come about: what failed outside. Not a refusal by the policy.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<String>,
    /// Bytes sent by the sandbox, once the connection has ended.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_up: Option<u64>,
    /// Bytes received by the sandbox, once the connection has ended.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_down: Option<u64>,
    /// How many equal attempts this record stands for.
    pub count: u32,
}

/// The facts of a record to be made.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) kind: RecordKind,
    pub(crate) host: Option<String>,
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: Option<u16>,
}

/// The records of one gateway.
#[derive(Debug)]
pub(crate) struct Records {
    by_seq: BTreeMap<u64, ConnectionRecord>,
    next: u64,
    limit: usize,
    dropped: u64,
}

impl Records {
    pub(crate) fn new(limit: usize) -> Self {
        Self { by_seq: BTreeMap::new(), next: 1, limit: limit.max(1), dropped: 0 }
    }

    /// Adds a decision, or counts it on an equal recent one. Allowed connections are never merged, since each has its
    /// own bytes. Returns the record's number for [`update`](Self::update).
    pub(crate) fn add(&mut self, attempt: Attempt, decision: Decision) -> u64 {
        let Attempt { kind, host, address, port } = attempt;
        let seq = self.next;
        self.next += 1;
        if !decision.allow || kind == RecordKind::Dns {
            let equal = self.by_seq.values().rev().take(MERGE_WINDOW).find(|r| {
                r.kind == kind
                    && r.allow == decision.allow
                    && r.address == address
                    && r.port == port
                    && r.host == host
                    && r.rule == decision.rule
                    && r.failure.is_none()
            });
            if let Some(mut record) = equal.map(|r| r.seq).and_then(|old| self.by_seq.remove(&old)) {
                record.seq = seq;
                record.count = record.count.saturating_add(1);
                self.by_seq.insert(seq, record);
                return seq;
            }
        }
        let Decision { allow, rule, reason } = decision;
        let record = ConnectionRecord {
            seq,
            id: seq,
            time_ms: now_ms(),
            kind,
            host,
            address,
            port,
            allow,
            rule,
            reason,
            failure: None,
            bytes_up: None,
            bytes_down: None,
            count: 1,
        };
        self.by_seq.insert(seq, record);
        while self.by_seq.len() > self.limit {
            self.by_seq.pop_first();
            self.dropped += 1;
        }
        seq
    }

    /// Changes a record, which moves it to the end; returns its new number. One that was dropped stays so.
    pub(crate) fn update(&mut self, seq: u64, change: impl FnOnce(&mut ConnectionRecord)) -> u64 {
        let Some(mut record) = self.by_seq.remove(&seq) else { return seq };
        change(&mut record);
        record.seq = self.next;
        self.next += 1;
        let seq = record.seq;
        self.by_seq.insert(seq, record);
        seq
    }

    pub(crate) fn since(&self, seq: u64) -> Vec<ConnectionRecord> {
        self.by_seq.range(seq.saturating_add(1)..).map(|(_, r)| r.clone()).collect()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(host: &str) -> Attempt {
        Attempt { kind: RecordKind::Dns, host: Some(host.to_owned()), address: None, port: None }
    }

    #[test]
    fn repeats_are_counted_and_move_to_the_end() {
        let mut records = Records::new(10);
        records.add(attempt("a"), Decision::deny("r", "x"));
        let b = records.add(attempt("b"), Decision::deny("r", "x"));
        records.add(attempt("a"), Decision::deny("r", "x"));
        let seen = records.since(b);
        assert_eq!((seen.len(), seen[0].count, seen[0].id), (1, 2, 1));
        assert_eq!(records.since(0).len(), 2);
    }

    #[test]
    fn the_oldest_are_dropped_and_counted() {
        let mut records = Records::new(3);
        for i in 0..5 {
            records.add(attempt(&i.to_string()), Decision::deny("r", "x"));
        }
        assert_eq!((records.since(0).len(), records.dropped()), (3, 2));
        assert_eq!(records.update(1, |r| r.count = 9), 1);
    }
}
