//! What every driver has to pass.
//!
//! The suite speaks the guest protocol over the machine's own stream, as a keeper does, so it needs no keeper, cell or
//! engine. A check that needs a capability which the driver does not declare is skipped with the capability's name;
//! a declared one is never skipped. Checks that the machine is confined belong to the barrier tests, not here.

use crate::{Capabilities, DiskSource, Driver, Machine, MachineSpec};
use bytes::BytesMut;
use prost::Message;
use std::{
    collections::VecDeque,
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};
use trialrun_guest_proto::{
    Decoder, EnvEntry, Event, EventKind, Exec, FailKind, Op, Path, Request, Write as WriteFile,
    frame::{Frame, Kind, encode},
};
use trialrun_model::ExecId;

/// How long any one answer may take before the check counts as hung.
const PATIENCE: Duration = Duration::from_secs(30);

/// What became of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Passed,
    /// The driver does not declare what it needs.
    Skipped(&'static str),
    /// It does not hold: what was seen.
    Failed(String),
}

/// A machine under test with its agent's stream.
struct Rig {
    machine: Box<dyn Machine>,
    stream: UnixStream,
    decoder: Decoder,
    fds: VecDeque<OwnedFd>,
    next: u32,
}

type Check = fn(&mut Rig, Capabilities) -> Result<Outcome, String>;

/// The name of the check that a machine skips which says that its disk is not limited.
pub const DISK_LIMIT: &str = "the disk's limit is met and named";

/// The checks, by name.
const CHECKS: [(&str, Check); 10] = [
    ("an exec's exit code and output arrive", exit_code_and_output),
    ("a signal is told apart from an exit code", signal_is_not_a_code),
    ("a program that is not there is refused, not exited", missing_program),
    ("the environment arrives byte for byte", environment),
    ("without stdin, input is at its end", no_stdin),
    ("a file is written whole and read back", files),
    ("a slot counts, kills and measures a whole tree", slots),
    (DISK_LIMIT, disk_limit),
    ("kill ends everything and is seen", kill_is_seen),
    ("a machine without its stream's other end dies", stream_end_is_death),
];

/// Runs every check, each in a machine of its own that `spec` describes.
///
/// # Errors
/// When a machine can't be made at all.
pub fn run(driver: &dyn Driver, spec: &dyn Fn() -> MachineSpec) -> Result<Vec<(&'static str, Outcome)>, String> {
    let mut results = Vec::new();
    for (name, check) in CHECKS {
        let mut rig = Rig::start(driver, spec())?;
        let outcome = check(&mut rig, driver.capabilities()).unwrap_or_else(Outcome::Failed);
        rig.machine.kill();
        drop(rig.stream);
        let outcome = match rig.machine.destroy() {
            Err(e) if outcome == Outcome::Passed => Outcome::Failed(format!("destroy: {e}: {}", e.cause)),
            _ => outcome,
        };
        results.push((name, outcome));
    }
    let forks = if driver.capabilities().fork_disk {
        forked_disks(driver, spec).map_or_else(Outcome::Failed, |()| Outcome::Passed)
    } else {
        Outcome::Skipped("fork_disk")
    };
    results.push(("a forked disk begins as its parent's and goes its own way", forks));
    Ok(results)
}

/// A machine, its fork, and that one's fork, each of which writes after the next was made.
fn forked_disks(driver: &dyn Driver, spec: &dyn Fn() -> MachineSpec) -> Result<(), String> {
    // Fresh files, changed ones, hard links, holes, removed ones, and a directory in the place of one of the base.
    const BEGIN: &str = "mkdir d && echo one > d/a && ln d/a d/b && truncate -s 1M hole && ln -s d/a link && \
                         mkdir gone && rmdir gone && echo x > gone && rm gone";
    const SEEN: &str = "cat d/a; cat link; stat -c %h d/b; stat -c %s hole; ls gone 2>/dev/null; echo end";
    let expected = |words: &str| format!("{words}\n{words}\n2\n1048576\nend\n").into_bytes();
    let mut line = vec![Rig::start(driver, spec())?];
    let check = |line: &mut Vec<Rig>| -> Result<(), String> {
        line[0].exec(shell(BEGIN))?;
        for generation in ["two", "three"] {
            let last = line.last_mut().ok_or("none")?;
            let next = spec();
            let fork = last.machine.fork_disk(&next.id).ok_or("declared, and refused")?;
            let cost = fork().map_err(|e| format!("fork: {e}: {}", e.cause))?;
            if cost.pause > cost.whole {
                return Err(format!("a part is longer than the whole: {cost:?}"));
            }
            line.push(Rig::start(driver, MachineSpec { disk: DiskSource::Forked, ..next })?);
            let written = format!("echo {generation} > d/a && echo more > {generation}");
            line.last_mut().ok_or("none")?.exec(shell(&written))?;
        }
        for (rig, words) in line.iter_mut().zip(["one", "two", "three"]) {
            want("the disk", &rig.exec(shell(SEEN))?.1, &expected(words))?;
        }
        let (_, listed) = line[1].exec(shell("ls two three 2>/dev/null"))?;
        want("the middle one's files", &listed, &b"two\n".to_vec())
    };
    let mut result = check(&mut line);
    for mut rig in line {
        rig.machine.kill();
        drop(rig.stream);
        if let Err(e) = rig.machine.destroy() {
            result = result.and(Err(format!("destroy: {e}: {}", e.cause)));
        }
    }
    result
}

impl Rig {
    fn start(driver: &dyn Driver, spec: MachineSpec) -> Result<Self, String> {
        let mut machine = driver.launch(spec).map_err(|e| format!("launch: {e}: {}", e.cause))?;
        let stream = machine.guest_stream().ok_or("the machine has no stream")?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(|e| e.to_string())?;
        let mut rig = Self { machine, stream, decoder: Decoder::default(), fds: VecDeque::new(), next: 1 };
        match rig.event(0)? {
            EventKind::Ready(_) => Ok(rig),
            other => Err(format!("the agent's first word is {other:?}")),
        }
    }

    fn frame(&mut self) -> Result<Frame, String> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| e.to_string())? {
                return Ok(frame);
            }
            let mut piece = [0; 4096];
            let n = self.stream.read(&mut piece).map_err(|e| format!("read the stream: {e}"))?;
            if n == 0 {
                return Err("the stream ended".to_owned());
            }
            self.decoder.buffer().extend_from_slice(&piece[..n]);
        }
    }

    fn event(&mut self, stream: u32) -> Result<EventKind, String> {
        loop {
            let frame = self.frame()?;
            if frame.stream == stream && frame.kind == Kind::Event {
                let event = Event::decode(frame.payload).map_err(|e| e.to_string())?;
                return event.kind.ok_or_else(|| "an empty event".to_owned());
            }
        }
    }

    fn request(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> Result<u32, String> {
        let stream = self.next;
        self.next += 1;
        let payload = Request { fds: fds.len() as u32, op: Some(op) }.encode_to_vec();
        let mut bytes = BytesMut::new();
        encode(&mut bytes, stream, Kind::Request, &payload);
        let sent = trialrun_sys::fdpass::send(self.stream.as_fd(), &bytes, fds).map_err(|e| e.to_string())?;
        self.stream.write_all(&bytes[sent..]).map_err(|e| e.to_string())?;
        debug_assert!(self.fds.is_empty(), "the agent sends no descriptors");
        Ok(stream)
    }

    /// Runs a command with passed pipes: its last event and its output.
    fn exec(&mut self, exec: Exec) -> Result<(EventKind, Vec<u8>), String> {
        let id = ExecId(self.next);
        let slot = self.machine.open_slot(id).map_err(|e| e.to_string())?;
        let (mut out_read, out_write) = std::io::pipe().map_err(|e| e.to_string())?;
        let null = std::fs::File::open("/dev/null").map_err(|e| e.to_string())?;
        let mut fds: Vec<BorrowedFd<'_>> = slot.iter().map(AsFd::as_fd).collect();
        fds.extend([null.as_fd(), out_write.as_fd(), out_write.as_fd()]);
        let stream = self.request(Op::Exec(exec), &fds)?;
        drop(fds);
        drop(out_write);
        let end = loop {
            match self.event(stream)? {
                EventKind::Started(_) => {}
                other => break other,
            }
        };
        let mut output = Vec::new();
        out_read.read_to_end(&mut output).map_err(|e| e.to_string())?;
        let _ = self.machine.close_slot(id);
        Ok((end, output))
    }

    fn dead_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(self.machine.death(), rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec {
            tv_sec: until.saturating_duration_since(Instant::now()).as_secs() as i64,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0)
    }
}

fn shell(line: &str) -> Exec {
    Exec { shell: Some(line.to_owned()), ..Exec::default() }
}

fn want<T: PartialEq + std::fmt::Debug>(what: &str, seen: &T, expected: &T) -> Result<(), String> {
    if seen == expected { Ok(()) } else { Err(format!("{what}: saw {seen:?}, expected {expected:?}")) }
}

fn exit_code_and_output(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let (end, output) = rig.exec(shell("echo out; echo err >&2; exit 7"))?;
    let EventKind::Exited(exited) = end else { return Err(format!("ended with {end:?}")) };
    want("exit code", &(exited.code, exited.signal), &(Some(7), None))?;
    want("output", &output, &b"out\nerr\n".to_vec())?;
    Ok(Outcome::Passed)
}

fn signal_is_not_a_code(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let (end, _) = rig.exec(shell("kill -TERM $$"))?;
    let EventKind::Exited(exited) = end else { return Err(format!("ended with {end:?}")) };
    want("status", &(exited.code, exited.signal), &(None, Some(15)))?;
    Ok(Outcome::Passed)
}

fn missing_program(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let (end, _) = rig.exec(Exec { argv: vec![b"/no/such/program".to_vec()], ..Exec::default() })?;
    let EventKind::Failed(failed) = end else { return Err(format!("ended with {end:?}")) };
    want("kind", &failed.kind, &(FailKind::NotFound as i32))?;
    if failed.message.contains("/no/such/program") { Ok(Outcome::Passed) } else { Err(failed.message) }
}

fn environment(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let value = b"x'y\"z $HOME `id` %s\nline\xff".to_vec();
    let env = vec![EnvEntry { name: b"TRICKY".to_vec(), value: value.clone() }];
    let (_, output) = rig.exec(Exec { env, ..shell("printenv TRICKY") })?;
    want("value", &output, &[&value[..], b"\n"].concat())?;
    Ok(Outcome::Passed)
}

fn no_stdin(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let (_, output) = rig.exec(shell("cat; echo end"))?;
    want("output", &output, &b"end\n".to_vec())?;
    Ok(Outcome::Passed)
}

fn files(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    let content = vec![b'x'; 300_000];
    let (_, dir) = rig.exec(shell("mktemp -d"))?;
    let path = [dir.trim_ascii_end(), b"/deep/file"].concat();
    let (read, mut write) = std::io::pipe().map_err(|e| e.to_string())?;
    let op =
        Op::Write(WriteFile { path: path.clone(), mode: Some(0o640), owner: None, size: Some(content.len() as u64) });
    let stream = rig.request(op, &[read.as_fd()])?;
    drop(read);
    write.write_all(&content).map_err(|e| e.to_string())?;
    drop(write);
    let EventKind::Done(_) = rig.event(stream)? else { return Err("the write did not end with Done".to_owned()) };
    let stream = rig.request(Op::Stat(Path { path: path.clone() }), &[])?;
    let EventKind::Stat(stat) = rig.event(stream)? else { return Err("no stat".to_owned()) };
    want("size and mode", &(stat.size, stat.mode & 0o7777), &(content.len() as u64, 0o640))?;
    let _ = rig
        .exec(Exec { argv: vec![b"rm".to_vec(), b"-rf".to_vec(), dir.trim_ascii_end().to_vec()], ..Exec::default() })?;
    Ok(Outcome::Passed)
}

fn slots(rig: &mut Rig, capabilities: Capabilities) -> Result<Outcome, String> {
    if !capabilities.slots {
        return Ok(Outcome::Skipped("slots"));
    }
    let id = ExecId(900);
    let slot = rig.machine.open_slot(id).map_err(|e| e.to_string())?.ok_or("no descriptor for a slot")?;
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").map_err(|e| e.to_string())?;
    // Two daemons that left the session, and a leader that spins for a while.
    let line = "setsid sleep 600 & setsid sleep 600 & i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 600";
    let stream = rig.request(Op::Exec(shell(line)), &[slot.as_fd(), null.as_fd(), null.as_fd(), null.as_fd()])?;
    let EventKind::Started(_) = rig.event(stream)? else { return Err("not started".to_owned()) };
    let until = Instant::now() + PATIENCE;
    loop {
        let (cpu, processes) = rig.machine.slot_usage(id);
        if processes >= 3 && cpu > Duration::ZERO {
            break;
        }
        if Instant::now() > until {
            return Err(format!("the slot shows {processes} processes and {cpu:?} of CPU"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.machine.kill_slot(id).map_err(|e| e.to_string())?;
    let EventKind::Exited(exited) = rig.event(stream)? else { return Err("no end".to_owned()) };
    want("status", &(exited.code, exited.signal), &(None, Some(9)))?;
    while !rig.machine.close_slot(id) {
        if Instant::now() > until {
            return Err(format!("{} processes outlived the kill", rig.machine.slot_usage(id).1));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Outcome::Passed)
}

/// The specification's limit is to be below 200 MiB.
fn disk_limit(rig: &mut Rig, capabilities: Capabilities) -> Result<Outcome, String> {
    let unlimited = rig.machine.isolation().missing.iter().any(|m| m.starts_with("disk limit"));
    if !capabilities.disk_limit || unlimited {
        return Ok(Outcome::Skipped("disk_limit"));
    }
    let (_, output) =
        rig.exec(shell("head -c 200M /dev/zero > big; echo $?; sync big; stat -c %s big; echo more > small"))?;
    let words = String::from_utf8_lossy(&output).into_owned();
    let full = rig.machine.usage().disk_full;
    if words.contains("209715200") || full.is_none() {
        return Err(format!("200 MiB were written; full: {full:?}; {words}"));
    }
    let (_, freed) = rig.exec(shell("rm -f big small; sync; head -c 1M /dev/zero > big && echo fine"))?;
    want("after it was emptied", &freed, &b"fine\n".to_vec())?;
    Ok(Outcome::Passed)
}

fn kill_is_seen(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    rig.machine.kill();
    rig.machine.kill();
    if rig.dead_within(PATIENCE) { Ok(Outcome::Passed) } else { Err("death was not signalled".to_owned()) }
}

fn stream_end_is_death(rig: &mut Rig, _: Capabilities) -> Result<Outcome, String> {
    rig.stream.shutdown(std::net::Shutdown::Both).map_err(|e| e.to_string())?;
    if rig.dead_within(PATIENCE) { Ok(Outcome::Passed) } else { Err("the machine outlived its stream".to_owned()) }
}
