//! Decides what a sandbox may reach. Pure: no I/O, no clock, no resolver.
//!
//! A [`Policy`] is a preset and, in front of it, ordered rules; the first rule that matches decides, and what no rule
//! matches is denied. The gateway asks three questions, in the order in which a connection comes about:
//!
//! 1. [`Policy::decide_name`]: may this name be looked up?
//! 2. [`Policy::decide_answer`]: may this address be given out for it?
//! 3. [`Policy::decide_connection`]: may this connection, with the name it claims (SNI or Host), go there?
//!
//! An allow rule for a name takes effect only where DNS answer and claimed name agree. Addresses that are not public
//! are refused whatever the rules say, except for [`PrivateNames`] and for rules that name such a range themselves.
//! Every [`Decision`] names its rule.
#![forbid(unsafe_code)]

mod address;
mod connection;
mod entry;
mod name;
mod policy;

pub use address::{AddressClass, IpRange, IpRangeError, classify};
pub use connection::{Claimed, Decision, Destination, Protocol};
pub use entry::{AllowEntry, AllowEntryError, Ports, Target};
pub use name::{Name, NameError, NamePattern};
pub use policy::{Action, Policy, Preset, PrivateNames, RegistryHost, Rule, Scheme};
