//! The schema's versions and the way from each to the next.
//!
//! `PRAGMA user_version` holds the number of migrations that a database has seen. A migration that was released is
//! never edited; `tests/fixtures` keeps a database of each version.

use crate::OpenError;
use rusqlite::{Connection, Transaction, TransactionBehavior};
use std::path::Path;

/// Migration `n` leads from version `n` to `n + 1`.
pub(crate) const MIGRATIONS: &[&str] = &["
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID, STRICT;
    CREATE TABLE lineages (number INTEGER PRIMARY KEY, created_ms INTEGER NOT NULL) STRICT;
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        lineage INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('creating', 'running', 'deleting', 'gone')),
        driver TEXT NOT NULL,
        image TEXT NOT NULL,
        spec_json TEXT NOT NULL,
        owner_pid INTEGER,
        keeper_pid INTEGER,
        created_ms INTEGER NOT NULL,
        expires_ms INTEGER,
        ended_ms INTEGER,
        ended_reason TEXT,
        detached INTEGER NOT NULL,
        cgroup TEXT
    ) WITHOUT ROWID, STRICT;
    CREATE INDEX sandboxes_live ON sandboxes (lineage) WHERE state <> 'gone';
    INSERT INTO meta VALUES
        ('instance', lower(hex(randomblob(4)))),
        ('lineage_offset', CAST(abs(random() % 1000000) AS TEXT));
"];

pub(crate) fn version(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Brings the database to the newest of `migrations`, in one transaction: all of them or none.
pub(crate) fn migrate(conn: &Connection, path: &Path, migrations: &[&str]) -> Result<(), OpenError> {
    let step = |step| move |source| OpenError::Sqlite { step, path: path.to_owned(), source };
    let newest = i64::try_from(migrations.len()).expect("there are few migrations");
    let tx = Transaction::new_unchecked(conn, TransactionBehavior::Immediate).map_err(step("lock for a migration"))?;
    let found = version(&tx).map_err(step("read the schema version of"))?;
    let Some(missing) = usize::try_from(found).ok().and_then(|from| migrations.get(from..)) else {
        return Err(OpenError::TooNew { path: path.to_owned(), found, known: newest });
    };
    for sql in missing {
        tx.execute_batch(sql).map_err(step("migrate"))?;
    }
    tx.pragma_update(None, "user_version", newest).map_err(step("migrate"))?;
    tx.commit().map_err(step("migrate"))
}
