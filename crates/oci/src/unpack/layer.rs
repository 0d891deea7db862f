//! One layer: from packed bytes to entries of the tree.

use super::{
    entry::{Entry, EntryError},
    tree::{Tree, TreeError},
};
use crate::manifest::Packing;
use sha2::{Digest, Sha256};
use std::{
    cell::Cell,
    io::{self, BufRead, Read},
    rc::Rc,
};

/// A layer could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The packing or the archive is broken.
    #[error("its archive is broken{}: {source}", after_entry(.after))]
    Archive {
        /// The last good entry.
        after: Option<String>,
        /// Why.
        source: io::Error,
    },
    /// An entry's header.
    #[error("{path}: {source}")]
    Entry {
        /// Its path.
        path: String,
        /// Why.
        source: EntryError,
    },
    /// An entry that the tree did not take.
    #[error("{path}: {source}")]
    Tree {
        /// Its path.
        path: String,
        /// Why.
        source: TreeError,
    },
}

impl LayerError {
    /// Whether it says nothing about the image.
    #[must_use]
    pub fn ours(&self) -> bool {
        matches!(self, Self::Tree { source, .. } if source.ours())
    }
}

fn after_entry(entry: &Option<String>) -> String {
    entry.as_ref().map(|e| format!(" after {e}")).unwrap_or_default()
}

/// Counts, limits and hashes what passes, and completes a last block.
///
/// Some tools (umoci insert, for one) end a layer with its last byte: without the padding of the last file and without the
/// two empty blocks that end an archive. Docker and podman take them, so they are taken; what the padding must not do
/// is stand for content, which `padded` tells.
struct Hashed<R> {
    inner: R,
    hash: Sha256,
    left: u64,
    read: u64,
    padded: Rc<Cell<bool>>,
}

const BLOCK: u64 = 512;

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        if n == 0 && !buffer.is_empty() && !self.read.is_multiple_of(BLOCK) {
            self.padded.set(true);
            let missing = self.read.next_multiple_of(BLOCK) - self.read;
            let n = usize::try_from(missing).unwrap_or(usize::MAX).min(buffer.len());
            buffer[..n].fill(0);
            self.read += n as u64;
            return Ok(n);
        }
        self.read += n as u64;
        self.left = self
            .left
            .checked_sub(n as u64)
            .ok_or_else(|| io::Error::other("it is larger than what may be unpacked"))?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}

/// Unpacks one layer onto `tree`, and returns the digest of its archive. `moved` hears of the tree's entries and bytes.
///
/// # Errors
/// The entry at fault, and why.
pub fn unpack_layer(
    packed: impl BufRead,
    packing: Packing,
    tree: &mut Tree,
    note: &mut impl FnMut(String),
    moved: &mut impl FnMut(u64, u64),
) -> Result<String, LayerError> {
    let broken = |source| LayerError::Archive { after: None, source };
    let reader: Box<dyn Read + '_> = match packing {
        Packing::Tar => Box::new(packed),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(packed)),
        Packing::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(packed).map_err(broken)?),
    };
    tree.begin_layer();
    // Headers and padding come on top of content.
    let left = tree.stream_limit();
    let padded = Rc::new(Cell::new(false));
    let mut archive =
        tar::Archive::new(Hashed { inner: reader, hash: Sha256::new(), left, read: 0, padded: padded.clone() });
    let mut last = None;
    {
        let entries = archive.entries().map_err(broken)?;
        for entry in entries {
            let mut entry = entry.map_err(|source| LayerError::Archive { after: last.clone(), source })?;
            let size = entry.size();
            let read = Entry::read(&mut entry).map_err(|(path, source)| LayerError::Entry { path, source })?;
            let path = read.path.display().to_string();
            tree.take(&read, size, &mut entry, note)
                .map_err(|source| LayerError::Tree { path: path.clone(), source })?;
            if padded.get() {
                let source = io::ErrorKind::UnexpectedEof.into();
                return Err(LayerError::Archive { after: last, source });
            }
            last = Some(path);
            let (entries, bytes) = tree.totals();
            moved(entries, bytes);
        }
    }
    // What follows the archive's end counts for the digest.
    let mut rest = archive.into_inner();
    io::copy(&mut rest, &mut io::sink()).map_err(|source| LayerError::Archive { after: last, source })?;
    let hex: String = rest.hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    Ok(format!("sha256:{hex}"))
}
