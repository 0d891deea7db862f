//! What of the cache is in use: which images machines and builds stand on, over all data directories.

use crate::{BuildError, recover::lock_is_held};
use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use trialrun_keeper::wire::Rootfs;

/// Below the cache: a file for each machine, with its directory and the trees that it stands on.
const USERS: &str = "users";
/// Below the cache: a directory for each build under way.
const STAGED: &str = "staged";
/// In it: the images that the build stands on.
pub(crate) const STANDING: &str = "standing";
/// Notes, for who would remove it, what a machine stands on.
///
/// # Errors
/// What the file system says.
pub(crate) fn note_use(cache: &Path, machine: &Path, rootfs: &Rootfs) -> io::Result<()> {
    let dir = cache.join(USERS);
    let lines = std::iter::once(machine).chain(rootfs.lowers.iter().map(PathBuf::as_path));
    let text: Vec<u8> = lines.flat_map(|path| [path.as_os_str().as_bytes(), b"\n"].concat()).collect();
    let file = dir.join(machine.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    match fs::write(&file, &text) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            crate::make_dir(&dir)?;
            fs::write(&file, &text)
        }
        other => other,
    }
}

/// Takes the note away when the machine is gone.
pub(crate) fn forget_use(cache: &Path, id: &trialrun_model::SandboxId) {
    let _ = fs::remove_file(cache.join(USERS).join(id.as_str()));
}

/// The hexadecimal digits of the images that running machines, of any data directory, and builds stand on. Notes of what
/// has ended are removed on the way.
pub(crate) fn in_use(cache: &Path) -> Vec<String> {
    let mut used = Vec::new();
    let mut take = |text: &[u8]| {
        let parts = text.split(|b| matches!(b, b'/' | b'\n')).filter(|part| part.len() == 64);
        used.extend(parts.map(|part| String::from_utf8_lossy(part).into_owned()));
    };
    for entry in fs::read_dir(cache.join(USERS)).into_iter().flatten().flatten() {
        let text = fs::read(entry.path()).unwrap_or_default();
        let machine = text.split(|b| *b == b'\n').next().unwrap_or_default();
        if lock_is_held(Path::new(std::ffi::OsStr::from_bytes(machine))) {
            take(&text);
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    for entry in fs::read_dir(cache.join(STAGED)).into_iter().flatten().flatten() {
        take(&fs::read(entry.path().join(STANDING)).unwrap_or_default());
    }
    used
}

/// A directory that goes with its handle.
pub(crate) struct Staged(pub PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A directory below the cache for a tree under way. What a killed build left there goes first.
pub(crate) fn tempdir(cache: &Path) -> Result<Staged, BuildError> {
    let parent = cache.join(STAGED);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| BuildError::Cache { path, cause }
    };
    crate::make_dir(&parent).map_err(failed(&parent))?;
    for entry in fs::read_dir(&parent).map_err(failed(&parent))?.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.split('-').next()?.parse::<u32>().ok());
        if !pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| failed(&parent)(e.into()))?;
    let place = parent.join(format!("{}-{:016x}", std::process::id(), u64::from_ne_bytes(random)));
    fs::create_dir(&place).map_err(failed(&place))?;
    Ok(Staged(place))
}
