use super::*;
use proptest::prelude::*;
use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};
use tempfile::TempDir;

/// Set in the child processes that some tests start: where to write.
const CHILD_ENV: &str = "TRIALRUN_STORE_TEST_CHILD";

struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn registry(&self) -> PathBuf {
        self.dir.path().join("run/lineages")
    }

    fn open(&self) -> Store {
        Store::open_with_registry(&self.data(), &self.registry()).unwrap()
    }

    /// The numbers registered on the "host".
    fn registered(&self) -> BTreeSet<u32> {
        std::fs::read_dir(self.registry())
            .map(|entries| entries.filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok()).collect())
            .unwrap_or_default()
    }

    fn child(&self, test: &str) -> std::process::Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("tests::{test}"), "--ignored", "--test-threads=1"])
            .env(CHILD_ENV, self.dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

fn child_store() -> Option<Store> {
    let dir = PathBuf::from(std::env::var_os(CHILD_ENV)?);
    Some(Store::open_with_registry(&dir.join("data"), &dir.join("run/lineages")).unwrap())
}

fn id(n: u64) -> SandboxId {
    SandboxId::from_entropy(n.to_le_bytes())
}

fn unique() -> SandboxId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    id(u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed))
}

fn new(id: SandboxId) -> NewSandbox {
    NewSandbox {
        id,
        lineage: None,
        driver: "container".into(),
        image: ImageRef::Host,
        spec: SandboxSpec::default(),
        owner_pid: Some(7),
        expires_ms: Some(9),
        detached: true,
    }
}

#[test]
fn a_row_reads_back_as_it_was_written() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let made = store.create_sandbox(&new(id(1))).unwrap();
    assert_eq!(store.get(&made.id).unwrap(), made);
    assert_eq!(fixture.registered(), BTreeSet::from([made.lineage.0]));
    store.set_keeper(&made.id, 42, Some("/c")).unwrap();
    store.detach(&made.id, None).unwrap();
    let read = fixture.open().get(&made.id).unwrap();
    assert_eq!((read.keeper_pid, read.cgroup.as_deref(), read.expires_ms), (Some(42), Some("/c"), None));
    assert!(matches!(store.create_sandbox(&new(id(1))), Err(CreateError::Exists(_))));
}

#[test]
fn states_follow_the_model_and_gone_frees_the_lineage_once_the_last_fork_is_gone() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let parent = store.create_sandbox(&new(id(1))).unwrap();
    let fork = store.create_sandbox(&NewSandbox { lineage: Some(parent.lineage), ..new(id(2)) }).unwrap();
    assert_eq!(fork.lineage, parent.lineage);
    assert_eq!(store.set_state(&parent.id, Transition::Ready).unwrap(), SandboxState::Running);
    assert!(matches!(store.set_state(&parent.id, Transition::Ready), Err(UpdateError::Transition { .. })));
    store.mark_gone(&parent.id, "deleted").unwrap();
    store.mark_gone(&parent.id, "a second time").unwrap();
    assert_eq!(store.get(&parent.id).unwrap().ended_reason.as_deref(), Some("deleted"));
    assert_eq!(fixture.registered().len(), 1);
    store.mark_gone(&fork.id, "deleted").unwrap();
    assert_eq!(fixture.registered().len(), 0);
    let error = store.create_sandbox(&NewSandbox { lineage: Some(parent.lineage), ..new(id(3)) }).unwrap_err();
    assert!(matches!(error, CreateError::NoSuchLineage(l) if l == parent.lineage));
    assert_eq!(
        store.create_sandbox(&new(id(4))).unwrap().lineage,
        parent.lineage,
        "the lowest free number comes again"
    );
    assert_eq!(store.list(true).unwrap().len(), 1);
    assert_eq!(store.prune_gone(Duration::from_secs(3600)).unwrap(), 0);
    assert_eq!(store.prune_gone(Duration::ZERO).unwrap(), 2);
    assert!(matches!(store.mark_gone(&parent.id, ""), Err(UpdateError::NotFound(_))));
}

#[test]
fn find_takes_a_prefix_and_prefers_the_living() {
    let fixture = Fixture::new();
    let store = fixture.open();
    for n in [0, 32, 33] {
        store.create_sandbox(&new(id(n))).unwrap();
    }
    // Ids are written from the lowest bits on: sb-00…, sb-01…, sb-11….
    assert_eq!(store.find("sb-01").unwrap().id, id(32));
    assert_eq!(store.find("1").unwrap().id, id(33));
    let ambiguous = store.find("sb-0").unwrap_err().to_string();
    assert!(ambiguous.contains(id(0).as_str()) && ambiguous.contains(id(32).as_str()), "{ambiguous}");
    assert!(matches!(store.find("%"), Err(QueryError::NotFound(_))));
    store.mark_gone(&id(0), "").unwrap();
    assert_eq!(store.find("0").unwrap().id, id(32));
}

#[test]
fn two_data_directories_never_share_a_number() {
    let (a, b) = (Fixture::new(), Fixture::new());
    let (mine, other) = (a.open(), Store::open_with_registry(&b.data(), &a.registry()).unwrap());
    for store in [&mine, &other] {
        store.conn.execute("UPDATE meta SET value = '5' WHERE key = 'lineage_offset'", []).unwrap();
    }
    assert_eq!(mine.create_sandbox(&new(id(1))).unwrap().lineage.0, 5);
    assert_eq!(other.create_sandbox(&new(id(1))).unwrap().lineage.0, 6);
    assert_eq!(mine.create_sandbox(&new(id(2))).unwrap().lineage.0, 7);
    assert_ne!(mine.instance_tag().unwrap(), other.instance_tag().unwrap());
    assert_eq!(mine.instance_tag().unwrap().len(), 8);
    // The other's row goes, its file stays: a crash between commit and removal. Its number is taken over.
    other.conn.execute_batch("DELETE FROM lineages").unwrap();
    assert_eq!(mine.create_sandbox(&new(id(3))).unwrap().lineage.0, 6);
    // The release of a number that now is another's leaves the file.
    other.mark_gone(&id(1), "").unwrap();
    assert_eq!(a.registered(), BTreeSet::from([5, 6, 7]));
    // A data directory that was removed holds nothing.
    drop(mine);
    std::fs::remove_dir_all(a.data()).unwrap();
    assert_eq!(other.create_sandbox(&new(id(9))).unwrap().lineage.0, 5);
}

#[test]
fn exhausted_numbers_are_an_error_with_a_way_out() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let sql = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?1) INSERT INTO lineages SELECT i, 0 FROM n";
    store.conn.execute(sql, [LineageId::LIMIT]).unwrap();
    let error = store.create_sandbox(&new(id(1))).unwrap_err();
    assert!(matches!(error, CreateError::LineagesExhausted) && error.to_string().contains("trialrun rm"));
    assert!(matches!(store.get(&id(1)), Err(QueryError::NotFound(_))), "the failed transaction left nothing");
}

#[test]
fn every_older_version_migrates() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let fresh = Fixture::new();
    let want = schema_of(&fresh.open().conn);
    for version in 1..=schema::MIGRATIONS.len() {
        let sql = std::fs::read_to_string(fixtures.join(format!("v{version}.sql"))).unwrap();
        let fixture = Fixture::new();
        ensure_private_dir(&fixture.data()).unwrap();
        Connection::open(fixture.data().join(FILE)).unwrap().execute_batch(&sql).unwrap();
        let store = fixture.open();
        assert_eq!(schema_of(&store.conn), want, "v{version}");
        assert_eq!(store.instance_tag().unwrap(), "0badcafe");
        let rows = store.list(false).unwrap();
        assert_eq!((rows.len(), rows[0].state, rows[1].state), (2, SandboxState::Gone, SandboxState::Running));
        assert_eq!(rows[1].spec.env, [("A".to_owned(), "b".to_owned())]);
        assert_eq!(store.create_sandbox(&new(id(1))).unwrap().lineage, LineageId(18));
    }
}

/// Tables and indexes by their columns: text differs between a created and an altered table.
fn schema_of(conn: &Connection) -> Vec<(String, String, String)> {
    let sql =
        "SELECT m.name, i.name, i.type || i.\"notnull\" || i.pk FROM sqlite_schema m, pragma_table_xinfo(m.name) i
               UNION ALL SELECT m.name, '', m.type FROM sqlite_schema m ORDER BY 1, 2";
    let mut statement = conn.prepare(sql).unwrap();
    statement.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_migration_that_fails_leaves_the_older_version() {
    let conn = Connection::open_in_memory().unwrap();
    let path = Path::new("x");
    schema::migrate(&conn, path, &["CREATE TABLE a (x)"]).unwrap();
    assert!(schema::migrate(&conn, path, &["", "CREATE TABLE b (x)", "nonsense"]).is_err());
    assert_eq!(schema::version(&conn).unwrap(), 1);
    assert!(conn.prepare("SELECT * FROM b").is_err());
    schema::migrate(&conn, path, &["", "CREATE TABLE b (x)", "ALTER TABLE b ADD COLUMN y"]).unwrap();
    assert_eq!(schema::version(&conn).unwrap(), 3);
    conn.prepare("SELECT y FROM b").unwrap();
}

#[test]
fn a_newer_schema_is_refused_with_both_versions_and_a_way_out() {
    let fixture = Fixture::new();
    fixture.open().conn.pragma_update(None, "user_version", 99).unwrap();
    let error = Store::open_with_registry(&fixture.data(), &fixture.registry()).unwrap_err().to_string();
    for part in ["99", &schema::MIGRATIONS.len().to_string(), "--data-dir"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_directory_open_to_others_is_refused_and_a_new_one_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    fixture.open();
    assert_eq!(std::fs::metadata(fixture.data()).unwrap().mode() & 0o7777, 0o700);
    std::fs::set_permissions(fixture.data(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Store::open_with_registry(&fixture.data(), &fixture.registry()).unwrap_err().to_string();
    assert!(error.contains("chmod 700"), "{error}");
}

/// Each thread opens a fresh database at the same time as the others, then creates and ends sandboxes.
#[test]
fn eight_threads_share_a_fresh_store() {
    let fixture = Fixture::new();
    let kept: Vec<LineageId> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| churn(&fixture.open(), 20))).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    check_shared(&fixture, &kept);
}

#[test]
fn eight_processes_share_a_fresh_store() {
    let fixture = Fixture::new();
    let children: Vec<_> = (0..8).map(|_| fixture.child("child_churns")).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let kept: Vec<_> = fixture.open().list(true).unwrap().iter().map(|r| r.lineage).collect();
    check_shared(&fixture, &kept);
}

/// Leaves every second sandbox alive.
fn churn(store: &Store, rounds: usize) -> Vec<LineageId> {
    let mut kept = Vec::new();
    for round in 0..rounds {
        let made = store.create_sandbox(&new(unique())).unwrap();
        store.set_state(&made.id, Transition::Ready).unwrap();
        if round % 2 == 0 {
            store.mark_gone(&made.id, "churn").unwrap();
        } else {
            kept.push(made.lineage);
        }
    }
    kept
}

fn check_shared(fixture: &Fixture, kept: &[LineageId]) {
    assert_eq!(kept.len(), 80);
    let distinct: BTreeSet<u32> = kept.iter().map(|l| l.0).collect();
    assert_eq!(distinct.len(), kept.len());
    assert_eq!(fixture.registered(), distinct);
    assert_eq!(fixture.open().list(false).unwrap().len(), 160);
}

#[test]
#[ignore = "run as a child process by eight_processes_share_a_fresh_store"]
fn child_churns() {
    if let Some(store) = child_store() {
        churn(&store, 20);
    }
}

#[test]
#[ignore = "run as a child process by killed_writers_leave_whole_transactions"]
fn child_writes_until_it_is_killed() {
    if let Some(store) = child_store() {
        loop {
            churn(&store, 100);
        }
    }
}

#[test]
fn killed_writers_leave_whole_transactions() {
    let fixture = Fixture::new();
    fixture.open();
    for round in 0..6 {
        let mut writers =
            [fixture.child("child_writes_until_it_is_killed"), fixture.child("child_writes_until_it_is_killed")];
        let before = fixture.open().list(false).unwrap().len();
        let start = Instant::now();
        while fixture.open().list(false).unwrap().len() < before + 5 + round {
            assert!(start.elapsed() < Duration::from_secs(20), "the writers write nothing");
        }
        for writer in &mut writers {
            writer.kill().unwrap();
            writer.wait().unwrap();
        }
        let store = fixture.open();
        let check: String = store.conn.query_row("PRAGMA integrity_check", [], |r| r.get(0)).unwrap();
        assert_eq!(check, "ok");
        let live: BTreeSet<u32> = store.list(true).unwrap().iter().map(|r| r.lineage.0).collect();
        assert_eq!(live, lineages(&store), "lineages are those of live sandboxes");
        assert!(fixture.registered().is_superset(&live), "every live number is registered");
        store.create_sandbox(&new(unique())).unwrap();
    }
}

fn lineages(store: &Store) -> BTreeSet<u32> {
    let mut statement = store.conn.prepare("SELECT number FROM lineages").unwrap();
    statement.query_map([], |r| r.get(0)).unwrap().map(Result::unwrap).collect()
}

#[derive(Debug, Clone)]
enum Op {
    Create(u64),
    Fork(u64, u64),
    Set(u64, Transition),
    MarkGone(u64),
    Prune,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let n = || 0..6_u64;
    let transition =
        prop_oneof![Just(Transition::Ready), Just(Transition::Delete), Just(Transition::Done), Just(Transition::Lost)];
    let op = prop_oneof![
        n().prop_map(Op::Create),
        (n(), n()).prop_map(|(a, b)| Op::Fork(a, b)),
        (n(), transition).prop_map(|(a, t)| Op::Set(a, t)),
        n().prop_map(Op::MarkGone),
        Just(Op::Prune),
    ];
    proptest::collection::vec(op, 1..40)
}

/// What the store should hold: state and lineage by id.
#[derive(Default)]
struct Model {
    rows: BTreeMap<u64, (SandboxState, u32)>,
    offset: u32,
}

impl Model {
    fn taken(&self) -> BTreeSet<u32> {
        self.rows.values().filter(|r| r.0 != SandboxState::Gone).map(|r| r.1).collect()
    }

    /// Whether the store should agree to it.
    fn apply(&mut self, op: &Op) -> bool {
        match *op {
            Op::Create(n) if !self.rows.contains_key(&n) => {
                let taken = self.taken();
                let free = (0..).map(|i| (self.offset + i) % LineageId::LIMIT).find(|n| !taken.contains(n)).unwrap();
                self.rows.insert(n, (SandboxState::Creating, free));
                true
            }
            Op::Fork(n, of) => match self.rows.get(&of).copied() {
                Some((_, lineage)) if !self.rows.contains_key(&n) && self.taken().contains(&lineage) => {
                    self.rows.insert(n, (SandboxState::Creating, lineage));
                    true
                }
                _ => false,
            },
            Op::Create(_) => false,
            Op::Set(n, t) => match self.rows.get_mut(&n).map(|row| (row.0.after(t), row)) {
                Some((Ok(next), row)) => {
                    row.0 = next;
                    true
                }
                _ => false,
            },
            Op::MarkGone(n) => self.rows.get_mut(&n).map(|row| row.0 = SandboxState::Gone).is_some(),
            Op::Prune => {
                self.rows.retain(|_, row| row.0 != SandboxState::Gone);
                true
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_store_does_what_a_map_does(ops in ops()) {
        let fixture = Fixture::new();
        let store = fixture.open();
        let offset: u32 = store.meta("lineage_offset").unwrap().parse().unwrap();
        let mut model = Model { offset: offset % LineageId::LIMIT, ..Model::default() };
        for op in &ops {
            let done = match op {
                Op::Create(n) => store.create_sandbox(&new(id(*n))).is_ok(),
                Op::Fork(n, of) => store.get(&id(*of)).is_ok_and(|parent| {
                    store.create_sandbox(&NewSandbox { lineage: Some(parent.lineage), ..new(id(*n)) }).is_ok()
                }),
                Op::Set(n, t) => store.set_state(&id(*n), *t).is_ok(),
                Op::MarkGone(n) => store.mark_gone(&id(*n), "test").is_ok(),
                Op::Prune => store.prune_gone(Duration::ZERO).is_ok(),
            };
            prop_assert_eq!(done, model.apply(op), "{:?}", op);
            let rows: Vec<_> = store.list(false).unwrap();
            prop_assert_eq!(rows.len(), model.rows.len());
            for (n, (state, lineage)) in &model.rows {
                let row = store.get(&id(*n)).unwrap();
                prop_assert_eq!((row.state, row.lineage.0), (*state, *lineage));
            }
            prop_assert_eq!(lineages(&store), model.taken());
            prop_assert_eq!(fixture.registered(), model.taken());
        }
    }
}

#[test]
fn a_claim_without_its_row_is_swept_and_one_in_use_or_of_another_store_is_not() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let used = store.create_sandbox(&new(id(1))).unwrap().lineage.0;
    let claim = |instance: &str| format!(r#"{{"data_dir":"/nowhere","instance":"{instance}","sandbox":"sb-x"}}"#);
    let own = store.instance_tag().unwrap();
    let (stale, foreign) = (used + 1, used + 2);
    std::fs::write(fixture.registry().join(stale.to_string()), claim(&own)).unwrap();
    std::fs::write(fixture.registry().join(foreign.to_string()), claim("00000000")).unwrap();
    assert_eq!(store.sweep_lineages().unwrap(), 1);
    assert_eq!(fixture.registered(), BTreeSet::from([used, foreign]));
}

/// The promise is 1.5 ms in a release build on an idle machine; tests run unoptimised and beside each other.
#[test]
fn opening_a_current_store_is_quick() {
    let fixture = Fixture::new();
    fixture.open().create_sandbox(&new(id(1))).unwrap();
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            drop(fixture.open());
            start.elapsed()
        })
        .collect();
    times.sort();
    let create: Vec<Duration> = {
        let store = fixture.open();
        (0..50)
            .map(|_| {
                let start = Instant::now();
                store.create_sandbox(&new(unique())).unwrap();
                start.elapsed()
            })
            .collect()
    };
    let mut create = create;
    create.sort();
    println!(
        "open and close: median {:?}, longest {:?}; create: median {:?}, longest {:?}",
        times[25], times[49], create[25], create[49]
    );
    assert!(times[25] < Duration::from_millis(5), "median {:?}", times[25]);
}
