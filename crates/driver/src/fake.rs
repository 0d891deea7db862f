//! A driver without isolation, for tests: the real guest agent as an ordinary child process.
//!
//! It exists so that what stands above drivers can be tested where no root and no namespaces are, and it passes the same
//! conformance suite as the real ones, so that it can't drift from them. It confines nothing and must never run code
//! that is not the test's own: it is compiled only into tests (feature `fake`).

use crate::{Capabilities, Driver, LaunchError, Machine, MachineSpec, Usage};
use rustix::{
    fs::{MemfdFlags, SeekFrom},
    io::FdFlags,
    process::{Pid, PidfdFlags, Signal},
};
use std::{
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, Stdio},
    time::Duration,
};
use trialrun_model::{ExecId, Isolation, Limits};

/// Makes machines that are plain processes.
#[derive(Debug, Default)]
pub struct FakeDriver;

struct FakeMachine {
    child: Child,
    pidfd: OwnedFd,
    stream: Option<UnixStream>,
    isolation: Isolation,
}

fn fail(step: &str) -> impl FnOnce(io::Error) -> LaunchError {
    let step = step.to_owned();
    move |cause| LaunchError::new(step, cause)
}

impl Driver for FakeDriver {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { passes_fds: true, ..Capabilities::default() }
    }

    fn launch(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, LaunchError> {
        let (ours, theirs) = UnixStream::pair().map_err(fail("make the guest stream"))?;
        let boot = boot_file(&spec.boot).map_err(fail("write the boot message"))?;
        // Inherited by number: the flag is taken off just for these two.
        for fd in [theirs.as_fd(), boot.as_fd()] {
            rustix::io::fcntl_setfd(fd, FdFlags::empty()).map_err(|e| fail("pass descriptors")(e.into()))?;
        }
        let program = format!("/proc/self/fd/{}", spec.guest_program.as_raw_fd());
        let child = Command::new(program)
            .args(["--fd", &theirs.as_raw_fd().to_string(), "--boot-fd", &boot.as_raw_fd().to_string(), "--no-init"])
            .stdin(Stdio::null())
            .spawn()
            .map_err(fail("start the guest agent"))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid =
            pid.ok_or_else(|| LaunchError::new("read the agent's pid", io::Error::from(io::ErrorKind::InvalidData)))?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| fail("hold the guest agent")(e.into()))?;
        let isolation = Isolation {
            driver: "fake".to_owned(),
            missing: vec!["everything: this driver is for tests".to_owned()],
            ..Isolation::default()
        };
        Ok(Box::new(FakeMachine { child, pidfd, stream: Some(ours), isolation }))
    }
}

fn boot_file(boot: &[u8]) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("boot", MemfdFlags::empty())?;
    let mut file = std::fs::File::from(fd);
    file.write_all(boot)?;
    rustix::fs::seek(&file, SeekFrom::Start(0))?;
    Ok(file.into())
}

impl Machine for FakeMachine {
    fn guest_stream(&mut self) -> Option<UnixStream> {
        self.stream.take()
    }

    fn death(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    fn open_slot(&mut self, _exec: ExecId) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    fn kill_slot(&mut self, _exec: ExecId) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    fn slot_usage(&self, _exec: ExecId) -> (Duration, u32) {
        (Duration::ZERO, 0)
    }

    fn close_slot(&mut self, _exec: ExecId) -> bool {
        true
    }

    fn set_limits(&mut self, _limits: &Limits) -> io::Result<()> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn kill(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    fn destroy(&mut self) -> Result<(), LaunchError> {
        self.kill();
        self.child.wait().map(drop).map_err(fail("wait for the guest agent"))
    }
}
