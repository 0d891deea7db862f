//! The stock image `python`, from the host's Debian or Ubuntu packages.
//!
//! mmdebstrap installs the packages in a user namespace of its own and writes a tar to its stdout; tar unpacks it. Both
//! are the distribution's own tools on the distribution's own packages, so nothing here is hostile. The result depends on
//! the package versions (and the mirrors' names) alone: two builds from the same packages have one digest.

use crate::{
    BuildError, BuildProgress, Builder, ImageConfig,
    apt::Sources,
    dir::{put, put_dir, put_dirs},
};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, lchown},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

const PACKAGES: [&str; 13] = [
    "python3",
    "python3-venv",
    "python3-pip",
    "python3-dev",
    "git",
    "curl",
    "ca-certificates",
    "sudo",
    "procps",
    "bash",
    "tar",
    "zstd",
    "build-essential",
];

/// 2024-01-01: the time of every file that the build itself made. Part of each digest.
pub(crate) const SOURCE_DATE_EPOCH: i64 = 1_704_067_200;

/// Uid and gid of the user `runtime`.
const RUNTIME_ID: u32 = 1000;

/// How long mmdebstrap has to remove its temporary files after it was told to end.
const GRACE: Duration = Duration::from_secs(20);

/// Runs with the new root as `$1`, after all packages are installed and before the tar is written.
///
/// Python takes a compiled file for current when it names the source's time and size. Times after `EPOCH` are cut to it,
/// and under SOURCE_DATE_EPOCH Debian's tools write files that name the source's hash instead, which costs every import a
/// read of the source. Both kinds are compiled again: in one process and in one order, so that each build gives the same
/// bytes.
const CUSTOMIZE: &str = r#"
set -eu
in_root() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 PYTHONHASHSEED=0 HOME=/nonexistent chroot "$@"; }
compile='
import glob, importlib.util, os, py_compile, struct, sys
present_only = sys.argv[1] == "present"
for top in sys.argv[2:]:
    for source in sorted(glob.glob(top + "/**/*.py", recursive=True)):
        compiled = importlib.util.cache_from_source(source)
        stat = os.stat(source)
        try:
            with open(compiled, "rb") as file:
                header = file.read(16)
        except FileNotFoundError:
            header = None
        if header is None and present_only:
            continue
        if header is None or header[4:] != struct.pack("<III", 0, int(stat.st_mtime), stat.st_size):
            mode = py_compile.PycInvalidationMode.TIMESTAMP
            py_compile.compile(source, compiled, invalidation_mode=mode, quiet=2)
'
venv=/var/lib/trialrun/venv
mkdir -p "$1/var/lib/trialrun"
install -d -m 0755 -o 1000 -g 1000 "$1$venv"
in_root --userspec=1000:1000 --groups= "$1" python3 -m venv "$venv"
find "$1$venv" -name __pycache__ -prune -exec rm -rf {} +
# /usr/lib/python3.x/sitecustomize.py is a link into /etc.
find "$1$venv" "$1"/usr/lib/python3* "$1"/etc/python3* -newermt "@$EPOCH" -exec touch -h -d "@$EPOCH" {} +
in_root "$1" sh -c 'exec python3 -B -c "$0" present /usr/lib/python3*' "$compile"
in_root --userspec=1000:1000 --groups= "$1" python3 -B -c "$compile" all "$venv"
"#;

/// Builds the image `python` with mmdebstrap(1).
#[derive(Debug)]
pub struct DebianPython {
    program: PathBuf,
}

impl Default for DebianPython {
    fn default() -> Self {
        Self { program: "mmdebstrap".into() }
    }
}

impl Builder for DebianPython {
    fn build(&self, tree: &Path, progress: &mut dyn FnMut(BuildProgress)) -> Result<ImageConfig, BuildError> {
        if !rustix::process::geteuid().is_root() {
            return Err(BuildError::NotRoot);
        }
        let sources = Sources::of_host()?;
        progress(BuildProgress::Step(format!("building from {} packages; this happens once", sources.codename)));
        self.bootstrap(&sources, tree, progress)?;
        progress(BuildProgress::Step("setting up the user and removing traces of the build".into()));
        set_up(tree, &sources)?;
        Ok(ImageConfig::default())
    }
}

impl DebianPython {
    fn bootstrap(
        &self,
        sources: &Sources,
        tree: &Path,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<(), BuildError> {
        let run = |program| move |source| BuildError::Run { program, source };
        // Without a parent mmdebstrap must not go on: the kernel tells it (prctl(2), PR_SET_PDEATHSIG).
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "TERM", "--"])
            .arg(&self.program)
            .args(["--mode=unshare", "--variant=minbase", "--format=tar"])
            .arg(format!("--include={}", PACKAGES.join(",")))
            .args(sources.options.iter().map(|o| format!("--aptopt={o}")))
            .arg(format!("--customize-hook={CUSTOMIZE}"))
            .args([&sources.codename, "-", "-"])
            .env("SOURCE_DATE_EPOCH", SOURCE_DATE_EPOCH.to_string())
            .env("EPOCH", SOURCE_DATE_EPOCH.to_string())
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if !on_path(&self.program) {
            return Err(BuildError::ProgramMissing { program: "mmdebstrap", package: "mmdebstrap" });
        }
        let mut mmdebstrap = Running::spawn(&mut command).map_err(run("setpriv"))?;
        if let Some(mut stdin) = mmdebstrap.child.stdin.take() {
            // A program that ended early says why on its stderr, which is read below.
            let _ = stdin.write_all(sources.list().as_bytes());
        }
        let stdout = mmdebstrap.child.stdout.take().map_or_else(Stdio::null, Stdio::from);
        let mut unpack = Command::new("tar");
        unpack
            .args(["--extract", "--file=-", "--preserve-permissions", "--same-owner", "--numeric-owner"])
            .args(["--xattrs", "--xattrs-include=*", "--exclude=./dev/*", "--directory"])
            .arg(tree)
            .stdin(stdout)
            .stderr(Stdio::piped());
        let mut tar = Running::spawn(&mut unpack).map_err(run("tar"))?;
        drop(unpack); // and with it this process's end of the pipe
        let tail = follow(&mut mmdebstrap, progress);
        let status = mmdebstrap.wait().map_err(run("mmdebstrap"))?;
        let mut complaint = String::new();
        if let Some(stderr) = tar.child.stderr.take() {
            let _ = stderr.take(64 << 10).read_to_string(&mut complaint);
        }
        let unpacked = tar.wait().map_err(run("tar"))?;
        // Of the two, tar's failure is the cause: it makes mmdebstrap fail by the closed pipe. Not the other way round.
        if !unpacked.success()
            && !complaint.contains("does not look like a tar archive")
            && !complaint.contains("Unexpected EOF")
        {
            return Err(BuildError::Failed {
                program: "tar",
                status: unpacked.to_string(),
                tail: complaint.trim().to_owned(),
            });
        }
        if !status.success() || !unpacked.success() {
            return Err(BuildError::Failed { program: "mmdebstrap", status: status.to_string(), tail });
        }
        Ok(())
    }
}

fn on_path(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.exists();
    }
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Reports each "I: …" line as a step, and returns the last lines.
fn follow(child: &mut Running, progress: &mut dyn FnMut(BuildProgress)) -> String {
    let mut tail = VecDeque::new();
    let Some(stderr) = child.child.stderr.take() else { return String::new() };
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if let Some(step) = line.strip_prefix("I: ") {
            let step = if step.contains("--customize-hook") { "making the virtual environment" } else { step };
            progress(BuildProgress::Step(step.to_owned()));
        }
        if tail.len() == 15 {
            tail.pop_front();
        }
        tail.push_back(line);
    }
    Vec::from(tail).join("\n")
}

/// A child that does not outlive this value.
struct Running {
    child: Child,
}

impl Running {
    fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: command.spawn()? })
    }

    fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > GRACE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Turns a fresh Debian tree into the contract of every image, and removes what differs between builds.
fn set_up(tree: &Path, sources: &Sources) -> Result<(), BuildError> {
    remove_traces(tree)?;
    put(tree, "etc/machine-id", 0o444, b"")?;
    put(tree, "etc/apt/sources.list", 0o644, sources.list_for_image().as_bytes())?;
    let day = SOURCE_DATE_EPOCH / 86_400;
    append(tree, "etc/passwd", "runtime:x:1000:1000:runtime:/workspace:/bin/bash\n")?;
    append(tree, "etc/group", "runtime:x:1000:\n")?;
    append(tree, "etc/shadow", &format!("runtime:*:{day}:0:99999:7:::\n"))?;
    append(tree, "etc/gshadow", "runtime:!::\n")?;
    put(tree, "etc/sudoers.d/runtime", 0o440, b"runtime ALL=(ALL:ALL) NOPASSWD: ALL\n")?;
    let home = tree.join("workspace");
    put_dir(&home, 0o755)?;
    lchown(&home, Some(RUNTIME_ID), Some(RUNTIME_ID)).map_err(failed("give away", &home))?;
    put_dirs(tree, Path::new("usr/local/bin"))?;
    let python = tree.join("usr/local/bin/python");
    std::os::unix::fs::symlink("/usr/bin/python3", &python).map_err(failed("link", &python))?;
    clamp_times(tree)
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> BuildError + 'a {
    move |source| BuildError::Tree { step, path: path.to_owned(), source }
}

fn append(tree: &Path, file: &str, line: &str) -> Result<(), BuildError> {
    let path = tree.join(file);
    std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .and_then(|mut f| f.write_all(line.as_bytes()))
        .map_err(failed("append to", &path))
}

/// Files that the build leaves and a machine does not need, or that say when and where the build ran.
fn remove_traces(tree: &Path) -> Result<(), BuildError> {
    const FILES: [&str; 12] = [
        "etc/hostname",
        "etc/resolv.conf",
        "etc/machine-id",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "var/lib/dbus/machine-id",
        "var/lib/systemd/random-seed",
        "var/cache/ldconfig/aux-cache",
        "var/cache/apt/pkgcache.bin",
        "var/cache/apt/srcpkgcache.bin",
        "var/cache/debconf/config.dat-old",
        "var/cache/debconf/templates.dat-old",
        "etc/.pwd.lock",
    ];
    // Emptied of files; directories stay, because packages expect theirs.
    const EMPTIED: [&str; 8] = [
        "var/log",
        "var/cache/apt/archives",
        "var/lib/apt/lists",
        "run",
        "tmp",
        "var/tmp",
        "etc/apt/sources.list.d",
        "dev",
    ];
    for file in FILES {
        remove(&tree.join(file))?;
    }
    for dir in EMPTIED {
        empty(&tree.join(dir))?;
    }
    // Backups by passwd(5)'s tools and by dpkg.
    for (dir, suffix) in [("etc", "-"), ("var/lib/dpkg", "-old")] {
        for path in list(&tree.join(dir))? {
            if path.as_os_str().as_encoded_bytes().ends_with(suffix.as_bytes()) && path.is_file() {
                remove(&path)?;
            }
        }
    }
    let lib = tree.join("usr/lib");
    for path in list(&lib)? {
        if path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"python3")) {
            remove(&path.join("EXTERNALLY-MANAGED"))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), BuildError> {
    match std::fs::remove_file(path) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(failed("remove", path)(e))
        }
        _ => Ok(()),
    }
}

fn empty(dir: &Path) -> Result<(), BuildError> {
    for path in list(dir)? {
        if path.symlink_metadata().is_ok_and(|m| m.is_dir()) { empty(&path)? } else { remove(&path)? }
    }
    Ok(())
}

/// What is in a directory; nothing when it is missing, or a link (which would lead out of the tree).
fn list(dir: &Path) -> Result<Vec<PathBuf>, BuildError> {
    if !dir.symlink_metadata().is_ok_and(|m| m.is_dir()) {
        return Ok(Vec::new());
    }
    std::fs::read_dir(dir)
        .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect())
        .map_err(failed("list", dir))
}

/// Cuts every time of change after the epoch to the epoch. Deepest first: nothing below changes a directory afterwards.
fn clamp_times(path: &Path) -> Result<(), BuildError> {
    let meta = path.symlink_metadata().map_err(failed("look at", path))?;
    if meta.is_dir() {
        for entry in list(path)? {
            clamp_times(&entry)?;
        }
    }
    // Whole seconds: the tar has no fractions, and what was made here must not differ from it.
    let seconds = meta.mtime().min(SOURCE_DATE_EPOCH);
    if (seconds, 0) == (meta.mtime(), meta.mtime_nsec()) {
        return Ok(());
    }
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| failed("set the time of", path)(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageStore;
    use std::os::unix::fs::PermissionsExt;

    fn script(dir: &Path, text: &str) -> DebianPython {
        let program = dir.join("fake-mmdebstrap");
        std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        DebianPython { program }
    }

    fn bootstrap(builder: &DebianPython, tree: &Path, steps: &mut Vec<String>) -> Result<(), BuildError> {
        let Ok(sources) = Sources::of_host() else {
            eprintln!("skipped: the host has no Debian sources");
            return Ok(());
        };
        builder.bootstrap(&sources, tree, &mut |p| {
            if let BuildProgress::Step(s) = p {
                steps.push(s);
            }
        })
    }

    #[test]
    fn steps_are_reported_and_the_tar_is_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        let text = "grep -q '^deb ' || exit 3; echo 'I: one' >&2; echo noise >&2; cd $(mktemp -d); mkdir a; echo hi > a/b; \
                    tar cf - ./a; echo 'I: two' >&2";
        let mut steps = Vec::new();
        bootstrap(&script(dir.path(), text), &tree, &mut steps).unwrap();
        if !steps.is_empty() {
            assert_eq!(steps, ["one", "two"]);
            assert_eq!(std::fs::read_to_string(tree.join("a/b")).unwrap(), "hi\n");
        }
    }

    #[test]
    fn a_failure_carries_the_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let builder = script(dir.path(), "echo 'E: no such mirror' >&2; exit 25");
        if let Err(error) = bootstrap(&builder, dir.path(), &mut Vec::new()) {
            let text = error.to_string();
            assert!(text.contains("mmdebstrap") && text.contains("25") && text.contains("E: no such mirror"), "{text}");
        }
        let missing = DebianPython { program: "/nonexistent/mmdebstrap".into() };
        if let Err(error) = bootstrap(&missing, dir.path(), &mut Vec::new()) {
            assert!(error.to_string().contains("apt-get install mmdebstrap"), "{error}");
        }
    }

    /// Set in the child process of the test below: where its fake builder is.
    const CHILD_ENV: &str = "TRIALRUN_PYTHON_TEST_CHILD";

    #[test]
    #[ignore = "run as a child process by a_builder_ends_with_its_killed_parent"]
    fn child_bootstraps() {
        if let Some(dir) = std::env::var_os(CHILD_ENV) {
            let dir = Path::new(&dir);
            let _ =
                bootstrap(&DebianPython { program: dir.join("fake-mmdebstrap") }, &dir.join("tree"), &mut Vec::new());
        }
    }

    #[test]
    fn a_builder_ends_with_its_killed_parent() {
        if Sources::of_host().is_err() {
            eprintln!("skipped: the host has no Debian sources");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tree")).unwrap();
        script(
            dir.path(),
            &format!("echo $$ > {0}/pid.new; mv {0}/pid.new {0}/pid; exec sleep 1000", dir.path().display()),
        );
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "python::tests::child_bootstraps", "--ignored"])
            .env(CHILD_ENV, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let wait = |what: &str, done: &mut dyn FnMut() -> bool| {
            let start = Instant::now();
            while !done() {
                assert!(start.elapsed() < Duration::from_secs(30), "{what}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        wait("the builder does not start", &mut || dir.path().join("pid").exists());
        let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        assert!(rustix::process::test_kill_process(pid).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        wait("the builder lives on", &mut || ended(pid));
    }

    /// Gone, or a zombie that a slow init has not collected.
    fn ended(pid: Pid) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with('Z'))
    }

    #[test]
    fn a_dropped_child_is_ended() {
        let child = Running::spawn(Command::new("sleep").arg("1000")).unwrap();
        let pid = Pid::from_raw(i32::try_from(child.child.id()).unwrap()).unwrap();
        drop(child);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }

    /// Downloads about 150 MB twice and takes two minutes.
    #[test]
    #[ignore = "slow: builds the stock image twice"]
    fn two_builds_of_python_have_one_digest() {
        let mut digests = Vec::new();
        let dirs = [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/var/tmp").unwrap()];
        for dir in &dirs {
            let start = Instant::now();
            let store = ImageStore::open(dir.path()).unwrap();
            let image =
                store.ensure_python(&mut |p| println!("{:6.1} s  {p:?}", start.elapsed().as_secs_f32())).unwrap();
            println!("built in {:?}: {}", start.elapsed(), image.digest);
            check_contract(&image.tree);
            digests.push(image.digest);
        }
        if digests[0] != digests[1] {
            let kept: Vec<_> = dirs.into_iter().map(tempfile::TempDir::keep).collect();
            panic!("{digests:?}: compare the trees in {kept:?}");
        }
    }

    fn check_contract(tree: &Path) {
        let meta = |p: &str| std::fs::symlink_metadata(tree.join(p)).unwrap_or_else(|e| panic!("{p}: {e}"));
        assert_eq!((meta("workspace").uid(), meta("workspace").mode() & 0o7777), (1000, 0o755));
        assert_eq!((meta("etc/sudoers.d/runtime").mode() & 0o7777, meta("etc/sudoers.d/runtime").uid()), (0o440, 0));
        assert_eq!(meta("var/lib/trialrun/venv/bin/pip").uid(), 1000);
        assert_eq!(meta("etc/machine-id").len(), 0);
        assert!(meta("usr/bin/sudo").mode() & 0o4000 != 0);
        assert!(meta("usr/local/bin/python").is_symlink());
        for gone in [
            "etc/resolv.conf",
            "etc/hostname",
            "etc/passwd-",
            "etc/apt/apt.conf.d/99mmdebstrap",
            "dev/null",
            "tmp/stale",
        ] {
            assert!(std::fs::symlink_metadata(tree.join(gone)).is_err(), "{gone}");
        }
        let out = Command::new("/usr/sbin/chroot")
            .args(["--userspec=1000:1000"])
            .arg(tree)
            .args(["/bin/sh", "-c", "python -c 'import json, venv, ensurepip; print(40 + 2)' && python3 -m pip --version && /var/lib/trialrun/venv/bin/pip --version && gcc -dumpversion && test -x /usr/bin/git"])
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .unwrap();
        assert!(out.status.success() && out.stdout.starts_with(b"42\n"), "{out:?}");
        let python = "import sys, glob, importlib.util as u, os, struct; n = 0\n\
                      for f in glob.glob('/usr/lib/python3*/**/*.py', recursive=True) + glob.glob('/var/lib/trialrun/**/*.py', recursive=True):\n\
                      \x20   c = u.cache_from_source(f)\n\
                      \x20   if os.path.exists(c):\n\
                      \x20       h = open(c, 'rb').read(16); s = os.stat(f); n += 1\n\
                      \x20       assert h[4:8] == bytes(4) and struct.unpack('<II', h[8:]) == (int(s.st_mtime), s.st_size), f\n\
                      print(n)";
        let out = Command::new("/usr/sbin/chroot")
            .arg(tree)
            .args(["/usr/bin/python3", "-B", "-c", python])
            .env_clear()
            .output()
            .unwrap();
        assert!(out.status.success(), "compiled files are current: {out:?}");
        println!("current compiled files: {}", String::from_utf8_lossy(&out.stdout).trim());
    }
}
