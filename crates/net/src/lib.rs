//! Makes the cell: the network namespace of a sandbox, which has no link out.
//!
//! The namespace is owned by the host's user namespace, so nothing in the sandbox can change it. Its only interface is
//! the loopback; the default routes end there. nf_tables rules (`steer`) turn every TCP connection and every DNS query
//! to the listeners that this crate opens inside and that the gateway serves from outside. The rules only steer: were
//! they flushed, a connection would still find no way but the listeners. They are written as raw netlink, because
//! starting `ip` and `nft` costs more than the rest of the cell together.
//!
//! What connects where is not decided here; that is `trialrun-gateway`'s, which gets [`CellListeners`].
//!
//! Order in [`Cell::create`]: unshare, links and addresses, sysctl, queue, rules, listeners, and back. Listeners come last so
//! that none exists without rules. A failure at any step drops the namespace with the last descriptor.
#![forbid(unsafe_code)]

mod cell;
mod link;
mod log;
mod packet;
mod queue;
mod steer;

pub use cell::{CELL_ADDRESS_V4, CELL_ADDRESS_V6, Cell, CellError, CellListeners, DNS_PORT, TCP_PORT, is_listener};
pub use log::refused_packets;
pub use packet::PacketHead;
pub use queue::{SynQueue, WaitingSyn};
