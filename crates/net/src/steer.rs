//! Writes the cell's nf_tables rules as one netlink transaction.
//!
//! As `nft list ruleset` shows them (IPv6 alike):
//!
//! ```text
//! table inet trialrun {
//!   chain guard   { type filter hook output priority -150; policy accept;
//!     ip daddr CELL tcp dport 61001-61002 reject with tcp reset          # nobody talks to a listener directly
//!     ip daddr CELL udp dport 61001-61002 reject with icmpx admin-prohibited
//!   }
//!   chain begin   { type filter hook output priority -140; policy accept;  # absent without nfnetlink_queue
//!     meta l4proto != tcp return
//!     tcp dport 53 return
//!     tcp flags & (syn | rst | ack) != syn return
//!     ip daddr 127.0.0.0/8 return
//!     ip daddr CELL return
//!     queue flags bypass to 0                                            # held until the gateway has judged it
//!   }
//!   chain refuse  { type filter hook output priority -130; policy accept;
//!     meta mark 0x7472 reject with tcp reset                             # what the gateway refused
//!   }
//!   chain steer   { type nat hook output priority -100; policy accept;
//!     ip daddr 127.0.0.0/8 return                                        # the loopback is the sandbox's own
//!     udp dport 53 dnat ip to CELL:61002
//!     tcp dport 53 dnat ip to CELL:61002
//!     ip daddr CELL return                                               # and so is its own address
//!     meta l4proto tcp dnat ip to CELL:61001
//!   }
//!   chain out     { type filter hook output priority 0; policy drop;
//!     ct state established,related accept                                # answers, already translated
//!     ip daddr 127.0.0.0/8 accept
//!     ip daddr CELL accept
//!     limit rate 20/second log group 1 snaplen 64                        # so that the refusal can be recorded
//!     counter reject with icmpx admin-prohibited
//!   }
//!   chain forward { type filter hook forward priority 0; policy drop; }
//! }
//! ```
//!
//! A machine behind a tap enters at prerouting instead of output: `steering` takes the hook for that day.

use crate::cell::{CELL_ADDRESS_V4, CELL_ADDRESS_V6, DNS_PORT, TCP_PORT};
use std::net::IpAddr;
use trialrun_sys::netlink::{ACK, APPEND, CREATE, Family, RefusedRequest, Requests, Socket};

const TABLE: &str = "trialrun";
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const SUBSYSTEM: u16 = 10; // NFNL_SUBSYS_NFTABLES
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DNS: u16 = 53;
/// Group of nfnetlink_log(4) to which refused packets go.
pub(crate) const LOG_GROUP: u16 = 1;
/// Bytes of each refused packet that are kept: the largest IP header without options and the ports behind it.
const LOG_BYTES: u32 = 64;

/// Mark of a packet that the gateway refused. Setting one takes a capability over the cell, which nothing inside has.
pub(crate) const REFUSED_MARK: u32 = 0x7472;

const _: () = assert!(TCP_PORT + 1 == DNS_PORT, "the guard chain covers both ports as one range");

/// Where in the packet's way a chain hangs (enum nf_inet_hooks).
#[derive(Clone, Copy)]
pub(crate) enum Hook {
    Forward = 2,
    Output = 3,
}

/// How a packet is given to nfnetlink_queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queueing {
    /// nf_tables' own expression (`CONFIG_NFT_QUEUE`).
    Native,
    /// The target of iptables, by way of nft_compat.
    Compat,
}

/// Loads the rules into the namespace of the calling thread and returns how first packets are queued: `None` where the
/// kernel can't, or if `queue` says not to try.
pub(crate) fn load(ipv6: bool, queue: bool) -> Result<Option<Queueing>, RefusedRequest> {
    let tried: &[_] = if queue { &[Some(Queueing::Compat), Some(Queueing::Native), None] } else { &[None] };
    let mut refused = None;
    for queueing in tried {
        let socket = Socket::open(Family::Netfilter).map_err(|source| RefusedRequest { request: 0, source })?;
        match socket.transact(&mut ruleset(ipv6, *queueing)) {
            Ok(()) => return Ok(*queueing),
            Err(e) => refused = Some(e), // nothing of a refused batch stays
        }
    }
    Err(refused.expect("at least one was tried"))
}

fn ruleset(ipv6: bool, queue: Option<Queueing>) -> Requests {
    let mut batch = Batch(Requests::new());
    let mut addresses: Vec<IpAddr> = vec![CELL_ADDRESS_V4.into()];
    if ipv6 {
        addresses.push(CELL_ADDRESS_V6.into());
    }
    // The batch's frame carries the subsystem in nfgenmsg.res_id.
    batch.0.message(BATCH_BEGIN, 0, &[0, 0, 0, SUBSYSTEM as u8]);
    batch.0.message(NEW_TABLE, CREATE, &[NFPROTO_INET, 0, 0, 0]);
    batch.0.attr_str(1, TABLE);
    batch.0.attr_be32(2, 0);
    guard(&mut batch, &addresses);
    if let Some(queueing) = queue {
        judged(&mut batch, &addresses, queueing);
    }
    steering(&mut batch, "steer", Hook::Output, &addresses);
    filter(&mut batch, &addresses);
    batch.chain("forward", "filter", Hook::Forward, 0, false);
    batch.0.message(BATCH_END, 0, &[0, 0, 0, SUBSYSTEM as u8]);
    batch.0
}

/// Refuses direct connections to the listeners, before translation makes steered ones look like them.
fn guard(batch: &mut Batch, addresses: &[IpAddr]) {
    batch.chain("guard", "filter", Hook::Output, -150, true);
    for address in addresses {
        batch.rule("guard", |e| {
            e.bound_for(*address).protocol(TCP).port_between(TCP_PORT, DNS_PORT).reject(Reject::TcpReset);
        });
        batch.rule("guard", |e| {
            e.bound_for(*address).protocol(UDP).port_between(TCP_PORT, DNS_PORT).reject(Reject::Prohibited);
        });
    }
}

/// Holds the first packet of a connection for the gateway, and refuses what comes back marked.
fn judged(batch: &mut Batch, addresses: &[IpAddr], queueing: Queueing) {
    batch.chain("begin", "filter", Hook::Output, -140, true);
    batch.rule("begin", |e| e.not_protocol(TCP).verdict(Verdict::Return));
    batch.rule("begin", |e| e.port(DNS).verdict(Verdict::Return));
    batch.rule("begin", |e| e.not_syn().verdict(Verdict::Return));
    for address in addresses {
        batch.rule("begin", |e| e.bound_for_loopback(address.is_ipv6()).verdict(Verdict::Return));
        batch.rule("begin", |e| e.bound_for(*address).verdict(Verdict::Return));
    }
    batch.rule("begin", |e| e.queue(queueing));
    batch.chain("refuse", "filter", Hook::Output, -130, true);
    batch.rule("refuse", |e| e.protocol(TCP).marked(REFUSED_MARK).reject(Reject::TcpReset));
}

/// Turns TCP and DNS to the listeners.
fn steering(batch: &mut Batch, chain: &str, hook: Hook, addresses: &[IpAddr]) {
    batch.chain(chain, "nat", hook, -100, true);
    for address in addresses {
        batch.rule(chain, |e| e.bound_for_loopback(address.is_ipv6()).verdict(Verdict::Return));
    }
    for address in addresses {
        for protocol in [UDP, TCP] {
            batch.rule(chain, |e| {
                e.family(address.is_ipv6()).protocol(protocol).port(DNS).dnat(*address, DNS_PORT);
            });
        }
        batch.rule(chain, |e| e.bound_for(*address).verdict(Verdict::Return));
        batch.rule(chain, |e| e.family(address.is_ipv6()).protocol(TCP).dnat(*address, TCP_PORT));
    }
}

/// Lets through what stays in the cell and refuses the rest at once, rather than letting it time out.
fn filter(batch: &mut Batch, addresses: &[IpAddr]) {
    batch.chain("out", "filter", Hook::Output, 0, false);
    batch.rule("out", |e| e.established().verdict(Verdict::Accept));
    for address in addresses {
        batch.rule("out", |e| e.bound_for_loopback(address.is_ipv6()).verdict(Verdict::Accept));
        batch.rule("out", |e| e.bound_for(*address).verdict(Verdict::Accept));
    }
    batch.rule("out", |e| e.limit_per_second(20).log());
    batch.acked_rule("out", |e| e.counter().reject(Reject::Prohibited));
}

/// The transaction being written.
struct Batch(Requests);

impl Batch {
    fn chain(&mut self, name: &str, kind: &str, hook: Hook, priority: i32, accept: bool) {
        let r = &mut self.0;
        r.message(NEW_CHAIN, CREATE, &[NFPROTO_INET, 0, 0, 0]);
        r.attr_str(1, TABLE);
        r.attr_str(3, name);
        let nest = r.nest(4);
        r.attr_be32(1, hook as u32);
        r.attr_be32(2, priority.cast_unsigned());
        r.close(nest);
        r.attr_be32(5, u32::from(accept)); // NF_DROP is 0, NF_ACCEPT 1
        r.attr_str(7, kind);
    }

    fn rule(&mut self, chain: &str, write: impl FnOnce(&mut Expressions<'_>)) {
        self.rule_with(chain, 0, write);
    }

    /// The last rule asks for an acknowledgement: the kernel sends it after the commit, so it speaks for the whole
    /// batch, and a refused message is reported without being asked.
    fn acked_rule(&mut self, chain: &str, write: impl FnOnce(&mut Expressions<'_>)) {
        self.rule_with(chain, ACK, write);
    }

    fn rule_with(&mut self, chain: &str, flags: u16, write: impl FnOnce(&mut Expressions<'_>)) {
        let r = &mut self.0;
        r.message(NEW_RULE, CREATE | APPEND | flags, &[NFPROTO_INET, 0, 0, 0]);
        r.attr_str(1, TABLE);
        r.attr_str(2, chain);
        let nest = r.nest(4);
        write(&mut Expressions(r));
        r.close(nest);
    }
}

enum Verdict {
    Accept,
    Return,
}

enum Reject {
    TcpReset,
    Prohibited,
}

/// Register in which each match loads its value. 16 bytes wide, so the next one is `REGISTER + 1`.
const REGISTER: u32 = 1;
const CMP_EQ: u32 = 0;
const CMP_NEQ: u32 = 1;
const CMP_LTE: u32 = 3;
const CMP_GTE: u32 = 5;

/// The expressions of one rule, in order.
struct Expressions<'a>(&'a mut Requests);

impl Expressions<'_> {
    fn expression(&mut self, name: &str, write: impl FnOnce(&mut Requests)) -> &mut Self {
        let element = self.0.nest(1);
        self.0.attr_str(1, name);
        let data = self.0.nest(2);
        write(self.0);
        self.0.close(data);
        self.0.close(element);
        self
    }

    fn meta(&mut self, key: u32) -> &mut Self {
        self.expression("meta", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, key);
        })
    }

    fn payload(&mut self, base: u32, offset: u32, length: u32) -> &mut Self {
        self.expression("payload", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, base);
            r.attr_be32(3, offset);
            r.attr_be32(4, length);
        })
    }

    fn compare(&mut self, operation: u32, value: &[u8]) -> &mut Self {
        self.expression("cmp", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, operation);
            let data = r.nest(3);
            r.attr(1, value);
            r.close(data);
        })
    }

    fn immediate(&mut self, register: u32, value: &[u8]) -> &mut Self {
        self.expression("immediate", |r| {
            r.attr_be32(1, register);
            let data = r.nest(2);
            r.attr(1, value);
            r.close(data);
        })
    }

    fn family(&mut self, ipv6: bool) -> &mut Self {
        self.meta(15).compare(CMP_EQ, &[if ipv6 { NFPROTO_IPV6 } else { NFPROTO_IPV4 }])
    }

    fn protocol(&mut self, protocol: u8) -> &mut Self {
        self.meta(16).compare(CMP_EQ, &[protocol])
    }

    fn not_protocol(&mut self, protocol: u8) -> &mut Self {
        self.meta(16).compare(CMP_NEQ, &[protocol])
    }

    fn marked(&mut self, mark: u32) -> &mut Self {
        self.meta(3).compare(CMP_EQ, &mark.to_ne_bytes())
    }

    /// Whether it is no opening segment (RFC 9293, 3.1: flags are the header's byte 13).
    fn not_syn(&mut self) -> &mut Self {
        const SYN: u8 = 0x02;
        const SYN_RST_ACK: u8 = 0x16;
        self.payload(2, 13, 1).mask(&[SYN_RST_ACK]).compare(CMP_NEQ, &[SYN])
    }

    fn bound_for(&mut self, address: IpAddr) -> &mut Self {
        self.family(address.is_ipv6());
        match address {
            IpAddr::V4(a) => self.payload(1, 16, 4).compare(CMP_EQ, &a.octets()),
            IpAddr::V6(a) => self.payload(1, 24, 16).compare(CMP_EQ, &a.octets()),
        }
    }

    fn bound_for_loopback(&mut self, ipv6: bool) -> &mut Self {
        if ipv6 {
            return self.bound_for(std::net::Ipv6Addr::LOCALHOST.into());
        }
        self.family(false).payload(1, 16, 1).compare(CMP_EQ, &[127])
    }

    fn port(&mut self, port: u16) -> &mut Self {
        self.payload(2, 2, 2).compare(CMP_EQ, &port.to_be_bytes())
    }

    fn port_between(&mut self, first: u16, last: u16) -> &mut Self {
        self.payload(2, 2, 2).compare(CMP_GTE, &first.to_be_bytes()).compare(CMP_LTE, &last.to_be_bytes())
    }

    fn established(&mut self) -> &mut Self {
        const ESTABLISHED_OR_RELATED: u32 = 0b110;
        self.expression("ct", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, 0);
        });
        self.mask(&ESTABLISHED_OR_RELATED.to_ne_bytes());
        self.compare(CMP_NEQ, &0u32.to_ne_bytes())
    }

    fn mask(&mut self, mask: &[u8]) -> &mut Self {
        self.expression("bitwise", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, REGISTER);
            r.attr_be32(3, u32::try_from(mask.len()).expect("as long as a register"));
            for (kind, value) in [(4, mask), (5, &[0; 16][..mask.len()])] {
                let data = r.nest(kind);
                r.attr(1, value);
                r.close(data);
            }
        })
    }

    fn limit_per_second(&mut self, packets: u64) -> &mut Self {
        self.expression("limit", |r| {
            r.attr(1, &packets.to_be_bytes());
            r.attr(2, &1u64.to_be_bytes());
            r.attr_be32(3, 20); // burst
            r.attr_be32(4, 0); // packets, not bytes
        })
    }

    fn log(&mut self) {
        self.expression("log", |r| {
            r.attr(1, &LOG_GROUP.to_be_bytes());
            r.attr_be32(3, LOG_BYTES);
        });
    }

    fn counter(&mut self) -> &mut Self {
        self.expression("counter", |_| {})
    }

    fn verdict(&mut self, verdict: Verdict) {
        let code = match verdict {
            Verdict::Accept => 1i32, // NF_ACCEPT
            Verdict::Return => -5,   // NFT_RETURN
        };
        self.expression("immediate", |r| {
            r.attr_be32(1, 0); // NFT_REG_VERDICT
            let data = r.nest(2);
            let inner = r.nest(2);
            r.attr_be32(1, code.cast_unsigned());
            r.close(inner);
            r.close(data);
        });
    }

    fn reject(&mut self, reject: Reject) {
        let (kind, code) = match reject {
            Reject::TcpReset => (1, 0u8),
            Reject::Prohibited => (2, 3u8), // icmpx, admin-prohibited
        };
        self.expression("reject", |r| {
            r.attr_be32(1, kind);
            r.attr(2, &[code]);
        });
    }

    /// To queue 0; on to the next chain when nobody has bound it.
    fn queue(&mut self, queueing: Queueing) {
        const BYPASS: u16 = 1;
        match queueing {
            Queueing::Native => self.expression("queue", |r| {
                for (kind, value) in [(1, 0), (2, 1), (3, BYPASS)] {
                    r.attr(kind, &u16::to_be_bytes(value)); // first queue, how many, flags
                }
            }),
            Queueing::Compat => self.expression("target", |r| {
                r.attr_str(1, "NFQUEUE");
                r.attr_be32(2, 3); // revision
                // struct xt_NFQ_info_v3: first queue, how many, flags; the kernel's alignment makes it 8 bytes.
                let mut info = [0; 8];
                for (at, value) in [0, 1, BYPASS].into_iter().enumerate() {
                    info[2 * at..2 * at + 2].copy_from_slice(&value.to_ne_bytes());
                }
                r.attr(3, &info);
            }),
        };
    }

    fn dnat(&mut self, address: IpAddr, port: u16) {
        match address {
            IpAddr::V4(a) => self.immediate(REGISTER, &a.octets()),
            IpAddr::V6(a) => self.immediate(REGISTER, &a.octets()),
        };
        self.immediate(REGISTER + 1, &port.to_be_bytes());
        self.expression("nat", |r| {
            r.attr_be32(1, 1); // NFT_NAT_DNAT
            r.attr_be32(2, u32::from(if address.is_ipv6() { NFPROTO_IPV6 } else { NFPROTO_IPV4 }));
            r.attr_be32(3, REGISTER);
            r.attr_be32(5, REGISTER + 1);
        });
    }
}
