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

const _: () = assert!(TCP_PORT + 1 == DNS_PORT, "the guard chain covers both ports as one range");

/// Where in the packet's way a chain hangs (enum nf_inet_hooks).
#[derive(Clone, Copy)]
pub(crate) enum Hook {
    Forward = 2,
    Output = 3,
}

/// Loads the rules into the namespace of the calling thread.
pub(crate) fn load(ipv6: bool) -> Result<(), RefusedRequest> {
    let socket = Socket::open(Family::Netfilter).map_err(|source| RefusedRequest { request: 0, source })?;
    socket.transact(&mut ruleset(ipv6))
}

fn ruleset(ipv6: bool) -> Requests {
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
        self.expression("bitwise", |r| {
            r.attr_be32(1, REGISTER);
            r.attr_be32(2, REGISTER);
            r.attr_be32(3, 4);
            for (kind, value) in [(4, ESTABLISHED_OR_RELATED), (5, 0)] {
                let data = r.nest(kind);
                r.attr(1, &value.to_ne_bytes());
                r.close(data);
            }
        });
        self.compare(CMP_NEQ, &0u32.to_ne_bytes())
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
