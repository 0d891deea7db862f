//! The only unsafe code of trialrun: clone3, mounts, id maps, pidfds, namespaces, netlink, and starting a process in a
//! machine. Every other crate forbids `unsafe`.
//!
//! Each function wraps one kernel interface, names its man page, and returns `std::io::Error` with the errno; what the
//! call was for is the caller's to say.

pub mod blockdev;
pub mod fdpass;
pub mod mount;
pub mod netlink;
pub mod ns;
pub mod spawn;
