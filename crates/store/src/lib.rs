//! Holds what exists: sandboxes, their states, and which lineage numbers are taken, in SQLite.
//!
//! One file, `DATA/trialrun.db`, in write-ahead mode, shared by any number of processes: one-shot clients, keepers and
//! the server. Each write is one `BEGIN IMMEDIATE` transaction, so a process that is killed leaves either all of it or
//! nothing. Intent is stored before the act: a row in state `creating` exists before its machine does.
//!
//! What rows mean for processes, mounts and cgroups is the engine's to know; nothing here touches a machine.

mod registry;
mod schema;

pub use registry::REGISTRY_DIR;
use registry::{Claim, Registry};
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, config::DbConfig};
use rustix::fs::{FlockOperation, flock};
use std::{
    collections::BTreeSet,
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use trialrun_model::{ImageRef, LineageId, SandboxId, SandboxSpec, SandboxState, Transition, TransitionError};

/// The database's name in the data directory.
const FILE: &str = "trialrun.db";
/// How long a writer waits for another. Writes take well under a millisecond, so this only ends on a stuck process.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The data directory could not be made or looked at.
    #[error("failed to {step} {}", path.display())]
    Io {
        /// The step that failed.
        step: &'static str,
        /// What it was done to.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Other users could reach what machines write.
    #[error("{} is open to other users (mode {mode:o}); run: chmod 700 {}", path.display(), path.display())]
    Permissions {
        /// The data directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A newer trialrun wrote it.
    #[error(
        "{} has schema version {found}, and this trialrun knows versions up to {known}; use the newer trialrun that wrote it, \
         or another data directory (--data-dir)",
        path.display()
    )]
    TooNew {
        /// The database.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The newest one known here.
        known: i64,
    },
    /// SQLite refused.
    #[error("failed to {step} {}", path.display())]
    Sqlite {
        /// The step that failed.
        step: &'static str,
        /// The database.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
}

/// A sandbox could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The id is taken.
    #[error("sandbox {0} exists already")]
    Exists(SandboxId),
    /// A fork named a lineage of which no sandbox lives.
    #[error("lineage {} has no live sandbox to fork from", .0.0)]
    NoSuchLineage(LineageId),
    /// Every uid range is taken.
    #[error(
        "all {} lineage numbers are in use; delete sandboxes that are no longer needed (trialrun rm)",
        LineageId::LIMIT
    )]
    LineagesExhausted,
    /// The host-wide registry of lineage numbers failed.
    #[error("failed to register a lineage number in {}", dir.display())]
    Registry {
        /// The registry's directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The spec could not be written as JSON.
    #[error("failed to write the spec as JSON")]
    Spec(#[source] serde_json::Error),
    /// SQLite refused.
    #[error("failed to enter sandbox {id}")]
    Sqlite {
        /// The sandbox.
        id: SandboxId,
        /// Why.
        source: rusqlite::Error,
    },
}

/// A sandbox's row could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// No such sandbox.
    #[error("there is no sandbox {0}; list them with: trialrun ls --all")]
    NotFound(SandboxId),
    /// Its state does not allow it.
    #[error("failed to change the state of {id}")]
    Transition {
        /// The sandbox.
        id: SandboxId,
        /// Which state and transition.
        source: TransitionError,
    },
    /// The host-wide registry of lineage numbers failed.
    #[error("failed to free a lineage number in {}", dir.display())]
    Registry {
        /// The registry's directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// SQLite refused.
    #[error("failed to change the row of {id}")]
    Sqlite {
        /// The sandbox.
        id: SandboxId,
        /// Why.
        source: rusqlite::Error,
    },
}

/// Rows could not be read.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// Nothing matches.
    #[error("there is no sandbox {0:?}; list them with: trialrun ls --all")]
    NotFound(String),
    /// More than one matches.
    #[error("{prefix:?} could be any of {}; write more of the id", .matches.join(", "))]
    Ambiguous {
        /// What was asked for.
        prefix: String,
        /// The ids it begins.
        matches: Vec<String>,
    },
    /// SQLite refused, or a row holds what this version does not understand.
    #[error("failed to read sandboxes")]
    Sqlite(#[source] rusqlite::Error),
}

/// What a new sandbox's row says.
#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// Its id.
    pub id: SandboxId,
    /// A fork's lineage; a new one is allocated when absent.
    pub lineage: Option<LineageId>,
    /// The driver's name.
    pub driver: String,
    /// The image as it was resolved, or as it was asked for.
    pub image: ImageRef,
    /// What was asked for.
    pub spec: SandboxSpec,
    /// The process that asked; an attached sandbox ends with it.
    pub owner_pid: Option<u32>,
    /// When its lease ends, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Whether it outlives its owner.
    pub detached: bool,
}

/// A sandbox's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRecord {
    /// Its id.
    pub id: SandboxId,
    /// Its lineage. Once it is gone the number may belong to others.
    pub lineage: LineageId,
    /// Its state.
    pub state: SandboxState,
    /// The driver's name.
    pub driver: String,
    /// The image.
    pub image: ImageRef,
    /// What was asked for.
    pub spec: SandboxSpec,
    /// The process that asked.
    pub owner_pid: Option<u32>,
    /// Its keeper, once there is one.
    pub keeper_pid: Option<u32>,
    /// When its row was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When its lease ends.
    pub expires_ms: Option<u64>,
    /// When it was gone.
    pub ended_ms: Option<u64>,
    /// Why it ended.
    pub ended_reason: Option<String>,
    /// Whether it outlives its owner.
    pub detached: bool,
    /// Its cgroup, once there is one.
    pub cgroup: Option<String>,
}

/// An open store. Cheap to open, so each thread or process opens its own.
#[derive(Debug)]
pub struct Store {
    conn: Connection,
    data_dir: PathBuf,
    registry_dir: PathBuf,
}

impl Store {
    /// Opens the store in `data_dir`; makes both when they do not exist, and migrates an older schema.
    ///
    /// # Errors
    /// When the directory is open to others, the schema is newer than this program, or the file system or SQLite fails.
    pub fn open(data_dir: &Path) -> Result<Self, OpenError> {
        Self::open_with_registry(data_dir, Path::new(REGISTRY_DIR))
    }

    /// As [`Store::open`], with another place for the host-wide registry of lineage numbers. For tests: stores with
    /// different registries hand out overlapping uid ranges.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_with_registry(data_dir: &Path, registry_dir: &Path) -> Result<Self, OpenError> {
        ensure_private_dir(data_dir)?;
        let path = data_dir.join(FILE);
        let step = |step| {
            let path = path.clone();
            move |source| OpenError::Sqlite { step, path, source }
        };
        // No mutex: a connection is not shared between threads (`Store` is not `Sync`).
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&path, flags).map_err(step("open"))?;
        conn.busy_timeout(BUSY_TIMEOUT).map_err(step("configure"))?;
        // The last one to close would checkpoint, sync and delete the log, and the next to open would make it again: two
        // syncs for every one-shot command. The log is checkpointed when it has grown instead, early enough (1 MB) that reading
        // it at open stays below a millisecond.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(step("configure"))?;
        conn.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON; PRAGMA wal_autocheckpoint = 250;")
            .map_err(step("configure"))?;
        let store = Self { conn, data_dir: data_dir.to_owned(), registry_dir: registry_dir.to_owned() };
        if schema::version(&store.conn).map_err(step("read the schema version of"))? != schema::MIGRATIONS.len() as i64
        {
            store.migrate(&path)?;
        }
        Ok(store)
    }

    fn migrate(&self, path: &Path) -> Result<(), OpenError> {
        // Two processes that switch a fresh database to write-ahead mode at once get SQLITE_BUSY without a wait.
        let lock_path = self.data_dir.join(".migrate.lock");
        let io_error = |source| OpenError::Io { step: "lock", path: lock_path.clone(), source };
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(io_error)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| io_error(e.into()))?;
        let step = |source| OpenError::Sqlite { step: "switch to write-ahead mode", path: path.to_owned(), source };
        self.conn.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).map_err(step)?;
        schema::migrate(&self.conn, path, schema::MIGRATIONS)
    }

    /// Eight hex digits that mark the cgroups and mounts of this data directory.
    ///
    /// # Errors
    /// When SQLite fails.
    pub fn instance_tag(&self) -> Result<String, QueryError> {
        self.meta("instance").map_err(QueryError::Sqlite)
    }

    /// Enters a sandbox in state `creating`, and gives it its lineage: the given one, or the first free number. Whether
    /// a number is free is decided over all data directories of this host.
    ///
    /// # Errors
    /// When the id exists, the given lineage has no live sandbox, all numbers are taken, or a write fails.
    pub fn create_sandbox(&self, new: &NewSandbox) -> Result<SandboxRecord, CreateError> {
        let sqlite = |source| CreateError::Sqlite { id: new.id.clone(), source };
        let spec = serde_json::to_string(&new.spec).map_err(CreateError::Spec)?;
        let now = now_ms();
        let tx = self.write().map_err(sqlite)?;
        if get(&tx, new.id.as_str()).map_err(sqlite)?.is_some() {
            return Err(CreateError::Exists(new.id.clone()));
        }
        // Held until the commit, see `registry`.
        let (lineage, _registry) = match new.lineage {
            Some(lineage) if has_lineage(&tx, lineage).map_err(sqlite)? => (lineage, None),
            Some(lineage) => return Err(CreateError::NoSuchLineage(lineage)),
            None => {
                let (lineage, registry) = self.allocate(&tx, &new.id)?;
                tx.execute("INSERT INTO lineages VALUES (?1, ?2)", (lineage.0, now.cast_signed())).map_err(sqlite)?;
                (lineage, Some(registry))
            }
        };
        let image = new.image.to_string();
        let sql = "INSERT INTO sandboxes (id, lineage, state, driver, image, spec_json, owner_pid, created_ms, expires_ms, detached)
                   VALUES (?1, ?2, 'creating', ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
        let expires = new.expires_ms.map(u64::cast_signed);
        tx.prepare_cached(sql)
            .and_then(|mut s| {
                s.execute((
                    new.id.as_str(),
                    lineage.0,
                    &new.driver,
                    &image,
                    &spec,
                    new.owner_pid,
                    now.cast_signed(),
                    expires,
                    new.detached,
                ))
            })
            .map_err(sqlite)?;
        tx.commit().map_err(sqlite)?;
        Ok(SandboxRecord {
            id: new.id.clone(),
            lineage,
            state: SandboxState::Creating,
            driver: new.driver.clone(),
            image: new.image.clone(),
            spec: new.spec.clone(),
            owner_pid: new.owner_pid,
            keeper_pid: None,
            created_ms: now,
            expires_ms: new.expires_ms,
            ended_ms: None,
            ended_reason: None,
            detached: new.detached,
            cgroup: None,
        })
    }

    /// Moves a sandbox to the state after `transition`, and returns that. When nothing of it is left (`Done`, `Lost`),
    /// its lineage is freed as by [`Store::mark_gone`].
    ///
    /// # Errors
    /// When there is no such sandbox, its state does not allow the transition, or a write fails.
    pub fn set_state(&self, id: &SandboxId, transition: Transition) -> Result<SandboxState, UpdateError> {
        self.transition(id, |_| Some(transition), None)
    }

    /// Notes that nothing of the sandbox is left, and frees its lineage when no other sandbox of it lives. A sandbox
    /// that is gone already keeps its first reason.
    ///
    /// # Errors
    /// When there is no such sandbox, or a write fails.
    pub fn mark_gone(&self, id: &SandboxId, reason: &str) -> Result<(), UpdateError> {
        let by = |state| match state {
            SandboxState::Gone => None,
            SandboxState::Deleting => Some(Transition::Done),
            SandboxState::Creating | SandboxState::Running => Some(Transition::Lost),
        };
        self.transition(id, by, Some(reason)).map(|_| ())
    }

    /// Frees the lineage numbers that are registered for this store and that it does not use: a client that was killed
    /// while it created a sandbox may leave one. Returns how many.
    ///
    /// # Errors
    /// When SQLite or the registry's directory fails.
    pub fn sweep_lineages(&self) -> Result<usize, CreateError> {
        let registry = |source| CreateError::Registry { dir: self.registry_dir.clone(), source };
        let sqlite = |e| registry(io::Error::other(e));
        // Nobody of this store is between a claim and its commit while the write lock is held.
        let tx = self.write().map_err(sqlite)?;
        let mut statement = tx.prepare_cached("SELECT number FROM lineages").map_err(sqlite)?;
        let used = statement.query_map([], |row| row.get(0)).and_then(Iterator::collect).map_err(sqlite)?;
        let instance = self.meta("instance").map_err(sqlite)?;
        Registry::lock(&self.registry_dir).and_then(|locked| locked.sweep(&instance, &used)).map_err(registry)
    }

    /// Notes the sandbox's keeper and cgroup.
    ///
    /// # Errors
    /// When there is no such sandbox, or a write fails.
    pub fn set_keeper(&self, id: &SandboxId, pid: u32, cgroup: Option<&str>) -> Result<(), UpdateError> {
        self.update(id, |tx| {
            tx.execute("UPDATE sandboxes SET keeper_pid = ?2, cgroup = ?3 WHERE id = ?1", (id.as_str(), pid, cgroup))
        })
    }

    /// Notes that the sandbox does without its client from now on, and when its lease ends.
    ///
    /// # Errors
    /// When there is no such sandbox, or a write fails.
    pub fn detach(&self, id: &SandboxId, expires_ms: Option<u64>) -> Result<(), UpdateError> {
        let expires = expires_ms.map(u64::cast_signed);
        self.update(id, |tx| {
            tx.execute("UPDATE sandboxes SET expires_ms = ?2, detached = 1 WHERE id = ?1", (id.as_str(), expires))
        })
    }

    /// The sandbox's row.
    ///
    /// # Errors
    /// When there is none, or it can't be read.
    pub fn get(&self, id: &SandboxId) -> Result<SandboxRecord, QueryError> {
        get(&self.conn, id.as_str()).map_err(QueryError::Sqlite)?.ok_or_else(|| QueryError::NotFound(id.to_string()))
    }

    /// The one sandbox whose id begins with `prefix`, with or without `sb-`. Live ones come before gone ones.
    ///
    /// # Errors
    /// When none or several match, or rows can't be read.
    pub fn find(&self, prefix: &str) -> Result<SandboxRecord, QueryError> {
        let full = if prefix.starts_with("sb-") { prefix.to_owned() } else { format!("sb-{prefix}") };
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id");
        let mut found = self.select(&sql, [&full])?;
        if found.iter().any(|r| r.state != SandboxState::Gone) {
            found.retain(|r| r.state != SandboxState::Gone);
        }
        match found.len() {
            0 => Err(QueryError::NotFound(prefix.to_owned())),
            1 => Ok(found.remove(0)),
            _ => {
                let matches = found.into_iter().map(|r| r.id.to_string()).collect();
                Err(QueryError::Ambiguous { prefix: prefix.to_owned(), matches })
            }
        }
    }

    /// All sandboxes, oldest first; without the gone ones when `live_only`.
    ///
    /// # Errors
    /// When rows can't be read.
    pub fn list(&self, live_only: bool) -> Result<Vec<SandboxRecord>, QueryError> {
        let which = if live_only { "WHERE state <> 'gone'" } else { "" };
        self.select(&format!("SELECT {COLUMNS} FROM sandboxes {which} ORDER BY created_ms, id"), [])
    }

    /// Forgets sandboxes that are gone for at least `older_than`; returns how many.
    ///
    /// # Errors
    /// When a write fails.
    pub fn prune_gone(&self, older_than: Duration) -> Result<usize, QueryError> {
        let limit = now_ms().saturating_sub(u64::try_from(older_than.as_millis()).unwrap_or(u64::MAX));
        self.conn
            .execute("DELETE FROM sandboxes WHERE state = 'gone' AND ended_ms <= ?1", [limit.cast_signed()])
            .map_err(QueryError::Sqlite)
    }

    fn write(&self) -> rusqlite::Result<Transaction<'_>> {
        Transaction::new_unchecked(&self.conn, TransactionBehavior::Immediate)
    }

    fn meta(&self, key: &str) -> rusqlite::Result<String> {
        self.conn.query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0))
    }

    /// The first free number from this database's own offset on, so that several data directories rarely meet.
    fn allocate(&self, tx: &Connection, id: &SandboxId) -> Result<(LineageId, Registry), CreateError> {
        let sqlite = |source| CreateError::Sqlite { id: id.clone(), source };
        let registry = |source| CreateError::Registry { dir: self.registry_dir.clone(), source };
        let taken: BTreeSet<u32> = tx
            .prepare_cached("SELECT number FROM lineages")
            .and_then(|mut s| s.query_map([], |row| row.get(0))?.collect())
            .map_err(sqlite)?;
        let offset: u32 = self.meta("lineage_offset").map_err(sqlite)?.parse().unwrap_or(0);
        let claim = Claim {
            data_dir: std::path::absolute(&self.data_dir).map_err(registry)?,
            instance: self.meta("instance").map_err(sqlite)?,
            sandbox: id.to_string(),
        };
        let locked = Registry::lock(&self.registry_dir).map_err(registry)?;
        for step in 0..LineageId::LIMIT {
            let number = (offset % LineageId::LIMIT + step) % LineageId::LIMIT;
            if !taken.contains(&number) && locked.claim(number, &claim).map_err(registry)? {
                return Ok((LineageId(number), locked));
            }
        }
        Err(CreateError::LineagesExhausted)
    }

    /// Applies the transition that `by` picks for the present state; none leaves everything as it is.
    fn transition(
        &self,
        id: &SandboxId,
        by: impl FnOnce(SandboxState) -> Option<Transition>,
        reason: Option<&str>,
    ) -> Result<SandboxState, UpdateError> {
        let sqlite = |source| UpdateError::Sqlite { id: id.clone(), source };
        let tx = self.write().map_err(sqlite)?;
        let record = get(&tx, id.as_str()).map_err(sqlite)?.ok_or_else(|| UpdateError::NotFound(id.clone()))?;
        let Some(transition) = by(record.state) else { return Ok(record.state) };
        let next =
            record.state.after(transition).map_err(|source| UpdateError::Transition { id: id.clone(), source })?;
        if next != SandboxState::Gone {
            tx.execute("UPDATE sandboxes SET state = ?2 WHERE id = ?1", (id.as_str(), next.as_str()))
                .map_err(sqlite)?;
            tx.commit().map_err(sqlite)?;
            return Ok(next);
        }
        let sql = "UPDATE sandboxes SET state = 'gone', ended_ms = ?2, ended_reason = ?3 WHERE id = ?1";
        tx.execute(sql, (id.as_str(), now_ms().cast_signed(), reason)).map_err(sqlite)?;
        let sql = "SELECT EXISTS (SELECT 1 FROM sandboxes WHERE lineage = ?1 AND state <> 'gone')";
        let lives: bool = tx.query_row(sql, [record.lineage.0], |row| row.get(0)).map_err(sqlite)?;
        if lives {
            tx.commit().map_err(sqlite)?;
            return Ok(next);
        }
        tx.execute("DELETE FROM lineages WHERE number = ?1", [record.lineage.0]).map_err(sqlite)?;
        let registry = |source| UpdateError::Registry { dir: self.registry_dir.clone(), source };
        let instance = self.meta("instance").map_err(sqlite)?;
        // The file goes after the commit (a crash between them leaves a stale file, which anyone may take over) and under
        // the registry's lock (or it could go after another process took the number over).
        let locked = Registry::lock(&self.registry_dir).map_err(registry)?;
        tx.commit().map_err(sqlite)?;
        locked.release(record.lineage.0, &instance).map_err(registry)?;
        Ok(next)
    }

    fn update(
        &self,
        id: &SandboxId,
        change: impl FnOnce(&Connection) -> rusqlite::Result<usize>,
    ) -> Result<(), UpdateError> {
        // A single statement is its own transaction, and takes the write lock before it reads.
        match change(&self.conn) {
            Ok(0) => Err(UpdateError::NotFound(id.clone())),
            Ok(_) => Ok(()),
            Err(source) => Err(UpdateError::Sqlite { id: id.clone(), source }),
        }
    }

    fn select(&self, sql: &str, params: impl rusqlite::Params) -> Result<Vec<SandboxRecord>, QueryError> {
        self.conn
            .prepare_cached(sql)
            .and_then(|mut s| s.query_map(params, record)?.collect())
            .map_err(QueryError::Sqlite)
    }
}

const COLUMNS: &str = "id, lineage, state, driver, image, spec_json, owner_pid, keeper_pid, created_ms, expires_ms, ended_ms, \
                       ended_reason, detached, cgroup";

fn get(conn: &Connection, id: &str) -> rusqlite::Result<Option<SandboxRecord>> {
    conn.prepare_cached(&format!("SELECT {COLUMNS} FROM sandboxes WHERE id = ?1"))?.query_row([id], record).optional()
}

fn has_lineage(conn: &Connection, lineage: LineageId) -> rusqlite::Result<bool> {
    conn.query_row("SELECT EXISTS (SELECT 1 FROM lineages WHERE number = ?1)", [lineage.0], |row| row.get(0))
}

fn record(row: &Row<'_>) -> rusqlite::Result<SandboxRecord> {
    let ms = |column| row.get::<_, Option<i64>>(column).map(|v| v.map(i64::cast_unsigned));
    Ok(SandboxRecord {
        id: parsed(row, 0, |text| text.parse())?,
        lineage: LineageId(row.get(1)?),
        state: parsed(row, 2, |text| serde_json::from_value(text.into()))?,
        driver: row.get(3)?,
        image: parsed(row, 4, |text| text.parse())?,
        spec: parsed(row, 5, |text| serde_json::from_str(text))?,
        owner_pid: row.get(6)?,
        keeper_pid: row.get(7)?,
        created_ms: row.get::<_, i64>(8)?.cast_unsigned(),
        expires_ms: ms(9)?,
        ended_ms: ms(10)?,
        ended_reason: row.get(11)?,
        detached: row.get(12)?,
        cgroup: row.get(13)?,
    })
}

fn parsed<T, E: std::error::Error + Send + Sync + 'static>(
    row: &Row<'_>,
    column: usize,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    parse(&text)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(e)))
}

fn ensure_private_dir(path: &Path) -> Result<(), OpenError> {
    let io_error = |step| move |source| OpenError::Io { step, path: path.to_owned(), source };
    let found = match std::fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io_error("create"));
        }
        other => other.map_err(io_error("look at"))?,
    };
    // A directory that happens to exist is not ours to change the mode of.
    let mode = found.mode() & 0o7777;
    if mode & 0o077 == 0 { Ok(()) } else { Err(OpenError::Permissions { path: path.to_owned(), mode }) }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
