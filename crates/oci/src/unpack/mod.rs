//! The unpacker: a process that turns layers into a tree, and can do nothing else.
//!
//! It starts as root, opens the layers and the tree, and then gives up everything: its root directory is the tree (an
//! id-mapped mount, so that owners on disk are the image's), its ids are nobody's on the host, it has no network and
//! no further file, and a Landlock domain where the kernel has one. Only then it looks at the first byte of a layer.

mod confine;
mod entry;
mod layer;
mod tree;

pub use confine::Confined;
pub use layer::{LayerError, unpack_layer};
pub use tree::{Tree, TreeError};

use crate::manifest::Packing;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, BufReader, Read, Write},
    path::PathBuf,
    process::ExitCode,
};

/// What may come out of an image's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of all layers, unpacked.
    pub bytes: u64,
    /// Files, folders and links.
    pub entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 4_000_000 }
    }
}

/// A layer to unpack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Its file.
    pub path: PathBuf,
    /// How it is packed.
    pub packing: Packing,
    /// The digest of the archive in it.
    pub diff_id: String,
}

/// What the process is told on its standard input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The empty tree.
    pub tree: PathBuf,
    /// The lowest first.
    pub layers: Vec<LayerSpec>,
    /// What may come out.
    pub limits: Limits,
    /// Folders that must exist in the end: mount points, the working directory.
    pub folders: Vec<PathBuf>,
}

/// What the process says on its standard output, one line of JSON each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// It is confined; the barriers in force.
    Confined(Vec<String>),
    /// So many entries and bytes so far, in this layer (counted from 1).
    Layer(usize, u64, u64),
    /// Something in the image that was left out, and why.
    Note(String),
    /// The image is refused, because.
    Refused(String),
    /// It failed by itself, because.
    Failed(String),
    /// All done.
    Done,
}

/// Most notes that are sent.
const MAX_NOTES: usize = 100;

fn say(word: &Word) {
    let mut line = serde_json::to_vec(word).unwrap_or_default();
    line.push(b'\n');
    let mut out = io::stdout().lock();
    // Who asked is gone: nothing to do but end, which die-with-parent does too.
    let _ = out.write_all(&line).and_then(|()| out.flush());
}

/// The process's whole life. Its caller must be single-threaded and run nothing else.
pub fn main() -> ExitCode {
    let word = match run() {
        Ok(()) => Word::Done,
        Err(word) => word,
    };
    say(&word);
    if word == Word::Done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run() -> Result<(), Word> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: &dyn std::fmt::Display| Word::Failed(format!("{what}: {e}"))
    };
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(|e| failed("read the job")(&e))?;
    let job: Job = serde_json::from_str(&text).map_err(|e| failed("read the job")(&e))?;
    let open =
        |layer: &LayerSpec| File::open(&layer.path).map_err(|e| failed(&format!("open {}", layer.path.display()))(&e));
    let files: Vec<File> = job.layers.iter().map(open).collect::<Result<_, _>>()?;
    let confined = Confined::enter(&job.tree, job.limits.bytes).map_err(|e| failed("give up rights")(&e))?;
    say(&Word::Confined(confined.barriers.clone()));
    let mut notes = 0;
    let mut note = |text: String| {
        notes += 1;
        if notes <= MAX_NOTES {
            say(&Word::Note(text));
        }
    };
    let mut tree = Tree::new(confined.root, job.limits);
    for (n, (file, layer)) in files.into_iter().zip(&job.layers).enumerate() {
        let mut said = std::time::Instant::now();
        let mut moved = |entries, bytes| {
            if said.elapsed() > std::time::Duration::from_millis(200) {
                said = std::time::Instant::now();
                say(&Word::Layer(n + 1, entries, bytes));
            }
        };
        let reader = BufReader::with_capacity(1 << 18, file);
        let got = unpack_layer(reader, layer.packing, &mut tree, &mut note, &mut moved).map_err(|e| {
            if e.ours() {
                Word::Failed(format!("layer {}: {e}", n + 1))
            } else {
                Word::Refused(format!("layer {}: {e}", n + 1))
            }
        })?;
        if got != layer.diff_id {
            return Err(Word::Refused(format!("layer {}: it unpacks to {got}, and not to {}", n + 1, layer.diff_id)));
        }
    }
    for folder in &job.folders {
        tree.ensure_folder(folder).map_err(|e| Word::Refused(format!("{}: {e}", folder.display())))?;
    }
    tree.finish().map_err(|e| Word::Failed(e.to_string()))
}
