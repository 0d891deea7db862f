//! Keeps what machines start from: image trees by digest, the stock image `python`, the safe subset of the host's own
//! system, and the small layer that carries a machine's name resolution and certificates.
//!
//! ```text
//! CACHE/images/<hex>/tree/        an image, unpacked; owners as in the image
//! CACHE/images/<hex>/image.json   its record
//! CACHE/images/names/<name>.json  the name's digest
//! CACHE/images/.tmp-…/            a build under way; removed at the next open when its builder is dead
//! CACHE/host-skel/<hash>/         the host image's own part
//! CACHE/runtime/<hash>/           run-time layers
//! ```
//!
//! An image is a tree and not an erofs file: a fresh file-backed mount costs each start about 4 ms of page-cache misses
//! and shares no page between machines; a tree's files are shared by all. Every tree has a
//! parent that only root may enter, so no user of the host reaches the setuid files in it.
//!
//! Nothing here mounts anything. The driver stacks the trees and maps their owners.

mod apt;
mod build;
mod digest;
mod dir;
mod host;
mod layer;
mod python;
pub mod recipe;
mod runtime;
mod store;

pub use build::{BuildError, BuildProgress, Builder};
pub use digest::{DigestError, tree_digest};
pub use dir::DirError;
pub use host::{Bind, HostImage, host_image};
pub use python::DebianPython;
pub use runtime::runtime_layer;
pub use store::{Image, ImageConfig, ImageError, ImageRecord, ImageStore};
