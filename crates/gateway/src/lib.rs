//! The only way out of a cell: answers its DNS queries, hears its connections, asks the policy, dials and carries bytes.
//!
//! ```text
//! sandbox ──first packet, held by the cell──> could anything it says be allowed? if not, connect(2) fails
//!            ├── steered by the cell ──> listeners ──> hear (TLS name, HTTP Host) ──> decide ──> dial ──> carry
//!            └── DNS ──> stub: decide name, resolve on the host, filter addresses, remember address → names
//! ```
//!
//! Decisions are `trialrun-policy`'s; this crate supplies the facts and enforces the answer. It terminates no TLS: it
//! reads the client hello and passes it on untouched. Every byte from the cell is hostile: lengths are bounded before
//! anything is kept, and a connection that can't be understood is refused where a name has to be known.
//!
//! One mutex holds the policy, the names given out and the open connections, so that a change of policy and the
//! decisions of connections can't cross: after [`GatewayHandle::set_policy`] returns, no connection that the new policy
//! denies can carry another byte.
//!
//! What the DNS stub leaves out: record types other than A and AAAA get an empty answer for allowed names, and reverse
//! lookups always do. UDP other than DNS is refused by the cell's rules; the refusals are recorded here.
#![forbid(unsafe_code)]

mod config;
mod dial;
mod dns;
mod gateway;
mod hello;
mod http;
mod names;
mod record;
pub mod registries;
mod resolve;
mod shared;
mod splice;
mod tcp;
mod tls;

pub use config::{GatewayConfig, ProxyError, Resolver, UpstreamProxy};
pub use gateway::{Gateway, GatewayHandle};
pub use record::{ConnectionRecord, RecordKind};
pub use tls::{HostCaError, host_ca_bundle};
