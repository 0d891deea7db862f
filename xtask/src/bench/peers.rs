//! The peers that this host has, each run as it works here. All use the image's tree as their root.
//!
//! Quirks, found on Debian 12: crun refuses a hybrid cgroup host, and podman with crun so too (see [`Helper`]); without
//! CAP_SYS_RESOURCE podman may not raise limits above the host's, so it is given small ones; runsc's package knows ptrace
//! and not systrap.

use super::measure::{self, Helper, Sample};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    Bubblewrap,
    Crun,
    Runc,
    Podman,
    Runsc,
}

impl Peer {
    const ALL: [Self; 5] = [Self::Bubblewrap, Self::Crun, Self::Runc, Self::Podman, Self::Runsc];

    /// Its program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Bubblewrap => "bwrap",
            Self::Crun => "crun",
            Self::Runc => "runc",
            Self::Podman => "podman",
            Self::Runsc => "runsc",
        }
    }

    /// Whether it refuses a hybrid cgroup host.
    fn refuses_hybrid(self) -> bool {
        matches!(self, Self::Crun | Self::Podman)
    }
}

/// Those that are there and work.
pub struct Peers {
    /// With their versions.
    pub present: Vec<(Peer, String)>,
    /// The others, each with the reason.
    pub absent: Vec<(Peer, String)>,
    /// `dir/NAME` is one's state; `dir/bundle-NAME` its OCI bundle.
    dir: PathBuf,
    tree: PathBuf,
    helper: Option<Helper>,
    runs: usize,
    /// A container to exec in.
    podman_container: Option<String>,
    /// What podman makes on the host and was there before.
    podman_before: Vec<PathBuf>,
    closed: bool,
}

impl Peers {
    /// Looks for all and tries each once.
    ///
    /// # Errors
    /// When a directory can't be made.
    pub fn find(temp: &Path, tree: &Path) -> Result<Self> {
        let dir = temp.join("peers");
        fs::create_dir(&dir)?;
        let mut peers = Self {
            present: Vec::new(),
            absent: Vec::new(),
            dir,
            tree: tree.to_owned(),
            helper: None,
            runs: 0,
            podman_container: None,
            podman_before: podman_traces(),
            closed: false,
        };
        for peer in Peer::ALL {
            match peers.try_once(peer) {
                Ok(version) => peers.present.push((peer, version)),
                Err(why) => peers.absent.push((peer, format!("{why:#}"))),
            }
        }
        for (peer, why) in &peers.absent {
            println!("{}: not measured: {why}", peer.program());
        }
        Ok(peers)
    }

    fn try_once(&mut self, peer: Peer) -> Result<String> {
        let output = Command::new(peer.program()).arg("--version").output().context("it is not installed")?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned();
        self.run(peer, &["/bin/echo", "x"])?.expect("x\n").context("it does not work here")?;
        Ok(version)
    }

    /// Runs a command in a new sandbox of a peer.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn run(&mut self, peer: Peer, command: &[&str]) -> Result<Sample> {
        self.runs += 1;
        let id = format!("xtask-bench-{}-{}", std::process::id(), self.runs);
        let state = self.dir.join(peer.program()).display().to_string();
        let argv = match peer {
            Peer::Bubblewrap => {
                let tree = self.tree.display().to_string();
                let options = ["--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", &tree, "/"];
                let mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--cap-drop", "ALL"];
                words(&["bwrap"], &[&options[..], &mounts, command].concat())
            }
            Peer::Podman => self.podman(&[&["run", "--rm"], PODMAN_LIMITS, &[&self.overlaid()], command].concat()),
            Peer::Crun | Peer::Runc => {
                let bundle = self.bundle(peer, command)?;
                words(&[peer.program()], &["--root", &state, "run", "--bundle", &bundle, &id])
            }
            Peer::Runsc => {
                let bundle = self.bundle(peer, command)?;
                let options = ["--platform=ptrace", "--network=none", "--ignore-cgroups"];
                words(&["runsc", "--root", &state], &[&options[..], &["run", "--bundle", &bundle, &id]].concat())
            }
        };
        self.measure(peer, &argv)
    }

    fn measure(&mut self, peer: Peer, argv: &[String]) -> Result<Sample> {
        if !peer.refuses_hybrid() || !measure::is_hybrid() {
            return measure::run(argv);
        }
        if self.helper.is_none() {
            self.helper = Some(Helper::start()?);
        }
        self.helper.as_mut().context("the helper")?.run(argv)
    }

    fn podman(&self, command: &[&str]) -> Vec<String> {
        let (root, run) = (self.dir.join("podman"), self.dir.join("podman-run"));
        let (root, run) = (root.display().to_string(), run.display().to_string());
        words(&["podman", "--root", &root, "--runroot", &run, "--cgroup-manager=cgroupfs"], command)
    }

    /// The tree with a layer to write on, which podman takes away with the container.
    fn overlaid(&self) -> String {
        format!("{}:O", self.tree.display())
    }

    /// An OCI bundle: what `runc spec` says, with our root and command. Made once per command, not in anyone's time.
    fn bundle(&self, peer: Peer, command: &[&str]) -> Result<String> {
        let dir = self.dir.join(format!("bundle-{}", peer.program()));
        let path = dir.join("config.json");
        if !path.exists() {
            fs::create_dir(&dir)?;
            // runsc can do it too, with other defaults: all get the same.
            let made = ["runc", "crun", "runsc"].iter().find_map(|program| {
                let output = Command::new(program).arg("spec").current_dir(&dir).output().ok()?;
                output.status.success().then_some(())
            });
            made.context("no runtime could make an OCI configuration")?;
        }
        let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = json!(false);
        config["root"] = json!({ "path": self.tree, "readonly": true });
        if config["process"]["args"] != json!(command) {
            config["process"]["args"] = json!(command);
            fs::write(&path, serde_json::to_vec(&config)?)?;
        }
        Ok(dir.display().to_string())
    }

    /// Runs a command in a podman container that runs already (and is started first).
    ///
    /// # Errors
    /// When it can't be started.
    pub fn podman_exec(&mut self, command: &[&str]) -> Result<Sample> {
        let name = match self.podman_container.clone() {
            Some(name) => name,
            None => {
                let name = format!("xtask-bench-{}", std::process::id());
                let tree = self.overlaid();
                let options =
                    [&["run", "--rm", "-d", "--name", &name], PODMAN_LIMITS, &[&tree, "/bin/sleep", "3600"]].concat();
                let argv = self.podman(&options);
                let sample = self.measure(Peer::Podman, &argv)?;
                anyhow::ensure!(sample.code == Some(0), "podman run -d: {}", sample.err.trim());
                self.podman_container = Some(name.clone());
                name
            }
        };
        let argv = self.podman(&[&["exec", name.as_str()], command].concat());
        self.measure(Peer::Podman, &argv)
    }

    /// Whether it is there and works.
    pub fn has(&self, peer: Peer) -> bool {
        self.present.iter().any(|(present, _)| *present == peer)
    }

    /// For JSON.
    pub fn json(&self) -> Value {
        let of = |list: &[(Peer, String)]| {
            list.iter().map(|(p, text)| (p.program().to_owned(), json!(text))).collect::<serde_json::Map<_, _>>()
        };
        json!({ "present": of(&self.present), "absent": of(&self.absent) })
    }

    /// Removes what they made; says what could not be removed.
    pub fn close(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        if std::mem::replace(&mut self.closed, true) {
            return left;
        }
        if self.dir.join("podman").exists() {
            // Also where no container was kept: a run that was cut off may have left one.
            let argv = self.podman(&["rm", "--all", "--force", "--time", "0"]);
            match self.measure(Peer::Podman, &argv) {
                Ok(sample) if sample.code == Some(0) => {}
                Ok(sample) => left.push(format!("podman rm: {}", sample.err.trim())),
                Err(e) => left.push(format!("podman rm: {e:#}")),
            }
        }
        for peer in [Peer::Crun, Peer::Runc, Peer::Runsc] {
            let state = self.dir.join(peer.program());
            for id in fs::read_dir(&state).into_iter().flatten().flatten().map(|e| e.file_name()) {
                let id = id.to_string_lossy().into_owned();
                let argv =
                    words(&[peer.program(), "--root", &state.display().to_string()], &["delete", "--force", &id]);
                let _ = self.measure(peer, &argv);
            }
        }
        if let Some(helper) = self.helper.take() {
            helper.stop();
        }
        // Podman binds its storage on itself; where no helper's namespace took that with it, it is here.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let inside = |line: &&str| line.split(' ').nth(1).is_some_and(|place| Path::new(place).starts_with(&self.dir));
        for place in mounts
            .lines()
            .filter(inside)
            .filter_map(|line| line.split(' ').nth(1))
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
        {
            let _ = Command::new("umount").args(["--lazy", place]).status();
        }
        for trace in podman_traces().into_iter().filter(|trace| !self.podman_before.contains(trace)) {
            if trace.is_dir() { remove_group(&trace) } else { drop(fs::remove_file(&trace)) }
        }
        left
    }
}

/// For a panic; the ordinary way is [`Peers::close`], which says what it could not remove.
impl Drop for Peers {
    fn drop(&mut self) {
        self.close();
    }
}

const PODMAN_LIMITS: &[&str] =
    &["--net=none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--rootfs"];

fn words(first: &[&str], rest: &[&str]) -> Vec<String> {
    first.iter().chain(rest).map(|word| (*word).to_owned()).collect()
}

/// What podman makes outside of its directories and leaves: the groups above its own, one per hierarchy, and its locks.
fn podman_traces() -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|e| e.path());
    let groups = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]).map(|hierarchy| hierarchy.join("libpod_parent"));
    groups.chain([PathBuf::from("/dev/shm/libpod_lock")]).filter(|trace| trace.exists()).collect()
}

fn remove_group(group: &Path) {
    for below in fs::read_dir(group).into_iter().flatten().flatten().map(|e| e.path()).filter(|p| p.is_dir()) {
        remove_group(&below);
    }
    let _ = fs::remove_dir(group);
}
