//! Which lineage numbers are in use on this host, over all data directories.
//!
//! A lineage number decides a uid range, and uid ranges of two data directories must not overlap: kernel resources are
//! counted per uid. So each number in use has a file in `/run/trialrun/lineages`, which says whose it is. The directory
//! is cleared at boot, when no machine lives any more.
//!
//! Order of locks: the write lock of one's own database, then the registry's lock, which is held until the commit. Of a
//! foreign database only reads happen, which no writer blocks. So a file seen under the registry's lock has either its
//! row in its database, or was left behind by a crash and may be taken over.

use rusqlite::{Connection, OpenFlags, OptionalExtension};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs::{DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Where numbers in use are registered when nothing else is said.
pub const REGISTRY_DIR: &str = "/run/trialrun/lineages";

/// What a number's file says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub data_dir: PathBuf,
    pub instance: String,
    pub sandbox: String,
}

/// The registry, locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Registry {
    dir: PathBuf,
    _lock: File,
}

impl Registry {
    pub fn lock(dir: &Path) -> io::Result<Self> {
        let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(dir.join(".lock"));
        let lock = match open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
                open()?
            }
            other => other?,
        };
        loop {
            match flock(&lock, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        }
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    /// Registers `number`, of which the caller knows that its own database does not use it. `false`: another data
    /// directory uses it.
    pub fn claim(&self, number: u32, claim: &Claim) -> io::Result<bool> {
        let path = self.file(number);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return write(file, claim, &path).map(|()| true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
        if self.in_use(number, &claim.instance) {
            return Ok(false);
        }
        write(OpenOptions::new().write(true).truncate(true).open(&path)?, claim, &path).map(|()| true)
    }

    /// Removes `number`'s file if it is `instance`'s.
    pub fn release(&self, number: u32, instance: &str) -> io::Result<()> {
        match self.read(number) {
            Some(claim) if claim.instance == instance => std::fs::remove_file(self.file(number)),
            _ => Ok(()),
        }
    }

    /// Removes `instance`'s files but for those of the numbers in `used`; how many. A client that was killed between its
    /// claim and its commit left such a file.
    pub fn sweep(&self, instance: &str, used: &BTreeSet<u32>) -> io::Result<usize> {
        let mut removed = 0;
        for entry in std::fs::read_dir(&self.dir)? {
            let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            if !used.contains(&number) && self.read(number).is_some_and(|claim| claim.instance == instance) {
                std::fs::remove_file(self.file(number))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn file(&self, number: u32) -> PathBuf {
        self.dir.join(number.to_string())
    }

    fn read(&self, number: u32) -> Option<Claim> {
        serde_json::from_slice(&std::fs::read(self.file(number)).ok()?).ok()
    }

    /// Whether another data directory than `own` uses the number. An unreadable claim was cut off by a crash before
    /// its row was written; a database that can't be asked counts as using it.
    fn in_use(&self, number: u32, own: &str) -> bool {
        let Some(claim) = self.read(number) else { return false };
        if claim.instance == own {
            return false;
        }
        let path = claim.data_dir.join(crate::FILE);
        if !path.try_exists().unwrap_or(true) {
            return false;
        }
        has_row(&path, number, &claim.instance).unwrap_or(true)
    }
}

fn has_row(database: &Path, number: u32, instance: &str) -> rusqlite::Result<bool> {
    // Not SQLITE_OPEN_CREATE: a database that vanished meanwhile must not come back empty.
    let conn =
        Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    let sql = "SELECT 1 FROM lineages, meta WHERE number = ?1 AND key = 'instance' AND value = ?2";
    Ok(conn.query_row(sql, (number, instance), |_| Ok(())).optional()?.is_some())
}

fn write(mut file: File, claim: &Claim, path: &Path) -> io::Result<()> {
    let text = serde_json::to_vec(claim).map_err(io::Error::other)?;
    file.write_all(&text).inspect_err(|_| {
        // A file without its claim is stale by itself, so a failure here costs nothing.
        let _ = std::fs::remove_file(path);
    })
}
