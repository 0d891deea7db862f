//! Images from registries, by the OCI distribution and image specifications.
//!
//! ```text
//! reference ─> manifest (index: this platform's) ─> config, layers ─> CACHE/oci/blobs/<hex> ─> unpacker ─> image store
//! ```
//! Everything that a registry sends is hostile. What has a digest is checked against it before it is used; layers are
//! unpacked by a process of its own ([`unpack`]) that has the image's tree and nothing else: a user namespace whose ids
//! are nobody's on the host, no network, no other file, limits of size, number and depth.

mod blobs;
mod credentials;
mod image;
mod manifest;
mod pull;
pub mod unpack;

pub use image::OciImage;
pub use pull::{Progress, PullError, Puller};
