//! The guest agent: PID 1 in every machine, static, and the only program of ours inside.
//!
//! It runs commands and moves files for the host over one connection, and lives exactly as long as that: when the
//! connection ends, PID 1 ends, and with it the machine. It decides nothing; what it reports is evidence.
//!
//! `trialrun-guest --fd N --boot-fd N [--no-init]`: `--fd` is a connected unix stream socket, `--boot-fd` is read to its
//! end and holds a [`Boot`] message. `--no-init` serves the same protocol as an ordinary process, without PID 1's rights
//! and duties, for drivers that have no boundary.

mod agent;
mod environment;
mod exec;
mod files;
mod glob;
mod info;
mod link;
mod pack;
mod seccomp;
mod tar;
mod tunnel;
mod unpack;
mod user;
mod work;

use agent::{Agent, EndOfLife, Machine};
use prost::Message;
use rustix::{
    fs::Mode,
    process::{DumpableBehavior, Signal, umask},
};
use std::{
    fs::File,
    io::{self, Read},
    process::ExitCode,
};
use trialrun_guest_proto::Boot;

/// Most bytes of the boot message.
const MAX_BOOT: u64 = 1 << 20;

/// What the command line said.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    fd: i32,
    boot_fd: i32,
    init: bool,
}

fn arguments(mut words: impl Iterator<Item = String>) -> Option<Arguments> {
    let (mut fd, mut boot_fd, mut init) = (None, None, true);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--fd" => fd = Some(words.next()?.parse().ok()?),
            "--boot-fd" => boot_fd = Some(words.next()?.parse().ok()?),
            "--no-init" => init = false,
            _ => return None,
        }
    }
    Some(Arguments { fd: fd?, boot_fd: boot_fd?, init })
}

fn main() -> ExitCode {
    let Some(arguments) = arguments(std::env::args().skip(1)) else {
        eprintln!("usage: trialrun-guest --fd N --boot-fd N [--no-init]");
        return ExitCode::from(2);
    };
    match serve(&arguments) {
        Ok(EndOfLife::Closed) => ExitCode::SUCCESS,
        Ok(end) => {
            eprintln!("trialrun-guest: {end}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("trialrun-guest: failed to start: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Arguments) -> io::Result<EndOfLife> {
    // First of all: before this process opens anything of its own.
    let [socket, boot_fd] = trialrun_sys::spawn::inherited_fds([arguments.fd, arguments.boot_fd])?;
    trialrun_sys::spawn::one_heap();
    if arguments.init {
        // Nobody inside may look into PID 1 or take its descriptors (ptrace(2), "access mode checking").
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    let signals = trialrun_sys::spawn::child_signals(arguments.init)?;
    // Files are made with exactly the mode asked for. Execs have their own mask.
    umask(Mode::empty());

    let mut bytes = Vec::new();
    File::from(boot_fd).take(MAX_BOOT + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BOOT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the boot message is over 1 MiB"));
    }
    let boot =
        Boot::decode(&bytes[..]).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the boot message is none"))?;
    if arguments.init
        && !boot.hostname.is_empty()
        && rustix::system::uname().nodename().to_bytes() != boot.hostname.as_bytes()
    {
        // In a container the launcher has done it, and the right to may be gone.
        let _ = rustix::system::sethostname(boot.hostname.as_bytes());
    }
    let machine = Machine {
        init: arguments.init,
        root: rustix::process::geteuid().is_root(),
        env: boot.env.clone(),
        filter: if arguments.init { seccomp::program() } else { Vec::new() },
        boot,
    };
    Ok(Agent::new(machine, socket, signals)?.run())
}
