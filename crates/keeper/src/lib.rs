//! The host process of one machine.
//!
//! Owns: the machine (through its driver), the guest stream, the cell and its gateway, exec logs, deadlines, the lease.
//! The machine dies with it, always: PID 1 is bound to it by PDEATHSIG and by the guest stream's end.
//!
//! ```text
//! spec on the control stream ─> cell ─> driver.launch ─> agent Ready ─> "Ready" on the control stream
//!      ─> serve calls on <data>/machines/<id>/socket ─> destroy ─> remove the directory ─> exit
//! ```
//! What kill -9 leaves (cgroup, layer, directory) has no process in it and is removed by the engine's recovery, which
//! knows a dead keeper by its lock on the directory being free.

pub mod client;
pub mod conn;
mod exec;
mod guest_link;
mod log;
mod server;
pub mod wire;

use crate::{
    guest_link::GuestLink,
    server::{End, Keeper},
    wire::{KeeperSpec, StartFailure, StartTimings, Started},
};
use prost::Message;
use std::{
    cell::RefCell,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    rc::Rc,
    time::Instant,
};
pub use trialrun_driver::fault;
use trialrun_driver::{Driver, LaunchError, MachineSpec};
use trialrun_driver_container::ContainerDriver;
use trialrun_gateway::{Gateway, GatewayConfig, UpstreamProxy};
use trialrun_guest_proto::{Boot, EnvEntry, frame::Kind};
use trialrun_net::Cell;

/// The host's bundle of certificate authorities, if it has one.
pub use trialrun_gateway::host_ca_bundle;
/// Where a machine's `resolv.conf` points.
pub use trialrun_net::CELL_ADDRESS_V4 as CELL_DNS;

/// Name of the keeper's socket in its machine's directory.
pub const SOCKET_NAME: &str = "socket";
/// Name of the keeper's log there.
pub const LOG_NAME: &str = "keeper.log";
/// Name of the lock that a keeper holds for life.
pub const LOCK_NAME: &str = "lock";

/// Opens what makes the first machine of a data directory costlier than the next, to be held as long as that matters.
#[must_use]
pub fn warm_layers(data_dir: &Path) -> Option<Box<dyn std::any::Any + Send>> {
    trialrun_driver_container::layer::Pool::open(data_dir)
        .ok()
        .map(|pool| Box::new(pool) as Box<dyn std::any::Any + Send>)
}

/// Removes what dead machines of a data directory left; see [`trialrun_driver_container::recover`].
///
/// # Errors
/// The first thing that could not be removed is beside what was.
pub fn recover(data_dir: &Path, tag: &str, live: &dyn Fn(&str) -> bool) -> (Vec<String>, Option<io::Error>) {
    trialrun_driver_container::recover(data_dir, tag, live)
}

/// Gives the host back the space of a data directory's layers, if there are none and nobody uses them. Returns how many
/// bytes.
///
/// # Errors
/// What the kernel says.
pub fn release_layers(data_dir: &Path) -> io::Result<u64> {
    trialrun_driver_container::release(data_dir)
}

/// Bytes that a data directory's layers take on the disk.
#[must_use]
pub fn layers_bytes(data_dir: &Path) -> u64 {
    trialrun_driver_container::disk_bytes(data_dir)
}

/// The directory of one machine.
#[must_use]
pub fn machine_dir(data_dir: &Path, id: &trialrun_model::SandboxId) -> PathBuf {
    data_dir.join("machines").join(id.as_str())
}

/// The keeper's main: its standard input is the control stream to its engine. Failures to make a machine travel on that
/// stream; a stream that ends before the specification is no failure, but a spare that was not needed.
///
/// `data_dir` is known before the specification, so that what needs no more than that is done while the engine still
/// writes its intent down: the cell is made and the layers' file system is opened.
///
/// # Errors
/// When the control stream itself is broken.
pub fn main(data_dir: &Path) -> io::Result<()> {
    // Ctrl-C in the client's terminal is the client's to answer.
    let _ = rustix::process::setsid();
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut timings = StartTimings::default();
    let at = Instant::now();
    // Two waits for the kernel side by side. Both are over before the machine's first process is cloned, which a process
    // of one thread must do.
    let (driver, cell) = std::thread::scope(|scope| {
        let driver = scope.spawn(|| ContainerDriver::ahead(data_dir));
        let cell = Cell::create();
        (driver.join().unwrap_or_default(), cell)
    });
    timings.cell_ms = ms(at);
    let at = Instant::now();
    let Some((spec, _lock)) = read_spec(&control)? else { return Ok(()) };
    timings.read_ms = ms(at);
    let dir = machine_dir(&spec.data_dir, &spec.id);
    log_to(&dir)?;
    let result = start(&spec, cell, &driver, &mut timings);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        let (receiver, sender) = conn::split(control)?;
        let failure = match result {
            Ok(parts) => match keep(&spec, parts, timings, receiver, &sender, &dir).await {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            },
            Err(failure) => failure,
        };
        let _ = fs::remove_dir_all(&dir);
        sender.json(Kind::Event, &Started::Failed(failure), &[]).await
    })
}

/// Sends what is said on standard error to the machine's own log.
fn log_to(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let log = File::options().create(true).append(true).mode(0o600).open(dir.join(LOG_NAME))?;
    Ok(rustix::stdio::dup2_stderr(&log)?)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn read_spec(control: &UnixStream) -> io::Result<Option<(KeeperSpec, Option<OwnedFd>)>> {
    let mut decoder = trialrun_guest_proto::Decoder::default();
    let mut fds = std::collections::VecDeque::new();
    loop {
        if let Some(frame) = decoder.next_frame().map_err(io::Error::other)? {
            return Ok(Some((conn::from_json(&frame)?, fds.pop_front())));
        }
        if trialrun_sys::fdpass::recv(control.as_fd(), decoder.buffer(), 64 << 10, &mut fds)? == 0 {
            return Ok(None);
        }
    }
}

/// What exists once the machine runs.
struct Parts {
    machine: Box<dyn trialrun_driver::Machine>,
    listeners: trialrun_net::CellListeners,
    guest: UnixStream,
    launched: Instant,
}

fn failure(step: &str, cause: &dyn std::fmt::Display) -> StartFailure {
    StartFailure { step: step.to_owned(), cause: cause.to_string(), way_out: None }
}

fn launch_failure(error: LaunchError) -> StartFailure {
    StartFailure { step: error.step, cause: error.cause.to_string(), way_out: error.way_out }
}

fn start(
    spec: &KeeperSpec,
    cell: Result<Cell, trialrun_net::CellError>,
    driver: &dyn Driver,
    timings: &mut StartTimings,
) -> Result<Parts, StartFailure> {
    let cell = cell.map_err(|e| failure("make the cell", &trialrun_model::error_chain(&e)))?;
    fault::point("keeper-cell").map_err(|e| failure("make the cell", &e))?;
    let at = Instant::now();
    let program = File::open(&spec.guest_program)
        .map_err(|e| failure(&format!("open the guest agent {}", spec.guest_program.display()), &e))?;
    let boot = Boot {
        hostname: spec.hostname.clone(),
        env: spec.env.iter().map(|(n, v)| EnvEntry { name: n.clone().into(), value: v.clone().into() }).collect(),
        user: spec.user.clone(),
        cwd: spec.cwd.clone().into(),
    };
    let machine_spec = MachineSpec {
        id: spec.id.clone(),
        lineage: spec.lineage,
        limits: spec.limits,
        hostname: spec.hostname.clone(),
        rootfs: spec.rootfs.clone(),
        disk: spec.disk,
        data_dir: spec.data_dir.clone(),
        tag: spec.tag.clone(),
        guest_program: program.into(),
        boot: boot.encode_to_vec(),
        netns: Some(cell.netns),
    };
    let mut machine = driver.launch(machine_spec).map_err(launch_failure)?;
    timings.launch_ms = ms(at);
    let Some(guest) = machine.guest_stream() else {
        return Err(failure("take the guest stream", &"it was taken"));
    };
    Ok(Parts { machine, listeners: cell.listeners, guest, launched: Instant::now() })
}

async fn keep(
    spec: &KeeperSpec,
    parts: Parts,
    mut timings: StartTimings,
    control: conn::Receiver,
    sender: &conn::Sender,
    dir: &Path,
) -> Result<(), StartFailure> {
    let Parts { mut machine, listeners, guest, launched } = parts;
    let prepared = async {
        let (guest_receiver, guest_sender) = conn::split(guest).map_err(|e| failure("use the guest stream", &e))?;
        let link = GuestLink::new(guest_sender);
        let mut greetings = link.greetings();
        tokio::task::spawn_local(link.clone().run(guest_receiver));
        let proxy = spec
            .upstream_proxy
            .as_ref()
            .map(|url| UpstreamProxy::parse(url, spec.no_proxy.as_deref().unwrap_or_default()));
        let upstream_proxy = proxy.transpose().map_err(|e| failure("use the host's HTTPS_PROXY", &e))?;
        let config = GatewayConfig { upstream_proxy, ..GatewayConfig::default() };
        let gateway =
            Gateway::start(listeners, config, spec.policy.clone()).map_err(|e| failure("start the gateway", &e))?;
        let listener = server::bind(dir).map_err(|e| failure("make the keeper's socket", &e))?;
        listener.set_nonblocking(true).map_err(|e| failure("make the keeper's socket", &e))?;
        let listener =
            tokio::net::UnixListener::from_std(listener).map_err(|e| failure("make the keeper's socket", &e))?;
        server::await_ready(&mut greetings).await.map_err(|e| failure("hear from the guest agent", &e))?;
        fault::point("keeper-ready").map_err(|e| failure("hear from the guest agent", &e))?;
        Ok((link, gateway, listener))
    };
    let (link, gateway, listener) = match prepared.await {
        Ok(prepared) => prepared,
        Err(failure) => {
            machine.kill();
            let _ = machine.destroy();
            return Err(failure);
        }
    };
    timings.agent_ms = ms(launched);
    let isolation = machine.isolation().clone();
    let machine = Rc::new(RefCell::new(machine));
    let keeper = Keeper::new(machine.clone(), link, Some(gateway), spec);
    let ready = Started::Ready { keeper_pid: std::process::id(), isolation, timings };
    let end = match sender.json(Kind::Event, &ready, &[]).await {
        Ok(()) => keeper.serve(listener, control).await.unwrap_or(End::Terminated),
        Err(_) => End::ClientGone,
    };
    tracing::info!(sandbox_id = %spec.id, ?end, "the machine ends");
    machine.borrow_mut().kill();
    let failed = end_machine(&keeper, dir).await;
    keeper.tell_deleted(failed).await;
    Ok(())
}

/// Destroys the machine and removes its directory. Returns what went wrong, in words.
async fn end_machine(keeper: &Keeper, dir: &Path) -> Option<String> {
    if let Some(gateway) = &keeper.gateway {
        gateway.stop();
    }
    let destroyed = keeper.destroy();
    let removed = fs::remove_dir_all(dir);
    let mut words = Vec::new();
    if let Err(e) = destroyed {
        words.push(format!("can't {e}: {}", e.cause));
    }
    if let Err(e) = removed {
        words.push(format!("can't remove {}: {e}", dir.display()));
    }
    (!words.is_empty()).then(|| words.join("; "))
}
