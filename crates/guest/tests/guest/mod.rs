//! A small synchronous client of the guest agent, which runs as an ordinary process.

#![allow(dead_code, missing_docs)]

use bytes::BytesMut;
use prost::Message;
use std::{
    collections::{BTreeMap, VecDeque},
    io::Write as _,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use trialrun_guest_proto::{
    Boot, Decoder, Done, EnvEntry, Event, EventKind, Exec, Exited, FailKind, Failed, FileStat, Frame, Kind,
    MachineInfo, Op, Request, frame,
};

/// Nothing in these tests takes longer unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// unshare(1) maps ids only as /etc/subuid allows, even for root.
const USER_NAMESPACE: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None)
me, go, mapped = os.getpid(), os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(go[0], 1)
    for kind in ("uid", "gid"):
        with open(f"/proc/{me}/{kind}_map", "w") as file: file.write("0 100000 65536")
    os.write(mapped[1], b"x")
    os._exit(0)
assert libc.unshare(0x10000000 | 0x20000000 | 0x20000) == 0
os.write(go[1], b"x")
os.read(mapped[0], 1)
os.setgroups([]); os.setresgid(0, 0, 0); os.setresuid(0, 0, 0)
if os.fork() == 0:
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    os.dup2(0, 3); os.dup2(1, 4); os.dup2(2, 1); os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.execv(sys.argv[1], [sys.argv[1], "--fd", "3", "--boot-fd", "4"])
os.close(0); os.close(1)
os.wait(); os.wait()
"#;

pub struct Guest {
    child: Child,
    socket: UnixStream,
    decoder: Decoder,
    next: u32,
    waiting: BTreeMap<u32, VecDeque<Frame>>,
    /// Credit that the agent has granted beyond the first window, per stream.
    credit: BTreeMap<u32, usize>,
}

/// What a stream brought up to its last event.
#[derive(Debug, Default)]
pub struct Outcome {
    pub pid: Option<u32>,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub exited: Option<Exited>,
    pub failed: Option<Failed>,
    pub done: Option<Done>,
    pub stats: Vec<FileStat>,
    pub info: Option<MachineInfo>,
}

impl Outcome {
    pub fn code(&self) -> Option<i32> {
        self.exited.as_ref().and_then(|e| e.code)
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("the output is text")
    }

    pub fn fail(&self) -> (FailKind, &str) {
        let failed = self.failed.as_ref().unwrap_or_else(|| panic!("it did not fail: {self:?}"));
        (failed.kind(), &failed.message)
    }

    pub fn ok(self) -> Self {
        assert!(self.failed.is_none(), "{:?}", self.failed);
        self
    }
}

pub fn env(name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> EnvEntry {
    EnvEntry { name: name.as_ref().to_vec(), value: value.as_ref().to_vec() }
}

pub fn argv(words: &[&str]) -> Exec {
    Exec { argv: words.iter().map(|w| w.as_bytes().to_vec()).collect(), ..Exec::default() }
}

pub fn sh(line: &str) -> Exec {
    argv(&["sh", "-c", line])
}

/// The agent under test.
fn program() -> std::ffi::OsString {
    std::env::var_os("TRIALRUN_GUEST").unwrap_or_else(|| env!("CARGO_BIN_EXE_trialrun-guest").into())
}

impl Guest {
    pub fn new() -> Self {
        Self::boot(Boot { cwd: b"/".to_vec(), ..Boot::default() })
    }

    pub fn boot(boot: Boot) -> Self {
        let line = r#"umask 077; exec "$0" --fd 3 --boot-fd 4 --no-init 3<&0 4<&1 0</dev/null 1>&2"#;
        Self::start(&boot, Command::new("/bin/sh").args(["-c", line]))
    }

    /// PID 1 of a new pid namespace, with all that it does there. Only for root.
    pub fn boot_init(boot: Boot) -> Self {
        let line = r#"exec "$0" --fd 3 --boot-fd 4 3<&0 4<&1 0</dev/null 1>&2"#;
        let flags = ["--pid", "--fork", "--mount", "--mount-proc", "/bin/sh", "-c", line];
        Self::start(&boot, Command::new("unshare").args(flags))
    }

    /// As [`Guest::boot_init`], as root of a user namespace with 65,536 ids. Only for root.
    pub fn boot_user_namespace(boot: Boot) -> Self {
        // Its ids reach the program only where everybody may: a checkout can lie in a folder that is root's alone.
        let mut copy = tempfile::NamedTempFile::new().unwrap();
        std::io::copy(&mut std::fs::File::open(program()).unwrap(), &mut copy).unwrap();
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(copy.path(), all).unwrap();
        let copy = copy.into_temp_path();
        Self::start_program(&boot, Command::new("python3").args(["-c", USER_NAMESPACE]), copy.as_os_str().to_owned())
    }

    fn start(boot: &Boot, command: &mut Command) -> Self {
        Self::start_program(boot, command, program())
    }

    fn start_program(boot: &Boot, command: &mut Command, program: std::ffi::OsString) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&boot.encode_to_vec()).unwrap();
        drop(writer);
        let child = command
            .arg(program)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(OwnedFd::from(reader)))
            .spawn()
            .unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut guest = Self {
            child,
            socket,
            decoder: Decoder::default(),
            next: 1,
            waiting: BTreeMap::new(),
            credit: BTreeMap::new(),
        };
        let ready = guest.event(0);
        assert!(matches!(ready, EventKind::Ready(_)), "{ready:?}");
        guest
    }

    pub fn agent_pid(&self) -> u32 {
        self.child.id()
    }

    pub fn send(&mut self, stream: u32, kind: Kind, payload: &[u8]) {
        let mut bytes = BytesMut::new();
        frame::encode(&mut bytes, stream, kind, payload);
        self.socket.write_all(&bytes).unwrap();
    }

    pub fn request(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> u32 {
        let stream = self.next;
        self.next += 1;
        let request = Request { fds: fds.len() as u32, op: Some(op) };
        let mut bytes = BytesMut::new();
        frame::encode(&mut bytes, stream, Kind::Request, &request.encode_to_vec());
        let sent = trialrun_sys::fdpass::send(self.socket.as_fd(), &bytes, fds).unwrap();
        self.socket.write_all(&bytes[sent..]).unwrap();
        stream
    }

    /// The next frame of a stream; grants credit for data as it comes.
    pub fn frame(&mut self, stream: u32) -> Frame {
        loop {
            if let Some(frame) = self.waiting.get_mut(&stream).and_then(VecDeque::pop_front) {
                return frame;
            }
            self.receive();
        }
    }

    fn receive(&mut self) {
        let mut fds = VecDeque::new();
        let got = trialrun_sys::fdpass::recv(self.socket.as_fd(), self.decoder.buffer(), 65536, &mut fds)
            .expect("the agent answers in time");
        assert!(got > 0, "the agent closed the connection");
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            match frame.kind {
                Kind::Credit => {
                    let more = u32::from_le_bytes(frame.payload[..].try_into().unwrap()) as usize;
                    *self.credit.entry(frame.stream).or_insert(256 * 1024) += more;
                }
                Kind::Data1 | Kind::Data2 => {
                    self.send(frame.stream, Kind::Credit, &(frame.payload.len() as u32).to_le_bytes());
                    self.waiting.entry(frame.stream).or_default().push_back(frame);
                }
                _ => self.waiting.entry(frame.stream).or_default().push_back(frame),
            }
        }
    }

    pub fn event(&mut self, stream: u32) -> EventKind {
        let frame = self.frame(stream);
        assert_eq!(frame.kind, Kind::Event);
        Event::decode(&frame.payload[..]).unwrap().kind.unwrap()
    }

    /// Sends channel 0, as credit allows.
    pub fn data(&mut self, stream: u32, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let credit = self.credit.entry(stream).or_insert(256 * 1024);
            let n = bytes.len().min(*credit).min(64 * 1024);
            if n == 0 {
                self.receive();
                continue;
            }
            *credit -= n;
            self.send(stream, Kind::Data0, &bytes[..n]);
            bytes = &bytes[n..];
        }
    }

    /// Everything up to the stream's last event.
    pub fn wait(&mut self, stream: u32) -> Outcome {
        let mut outcome = Outcome::default();
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "no end; last seen: {outcome:?}");
            let frame = self.frame(stream);
            match frame.kind {
                Kind::Data1 => outcome.out.extend_from_slice(&frame.payload),
                Kind::Data2 => outcome.err.extend_from_slice(&frame.payload),
                Kind::Event => match Event::decode(&frame.payload[..]).unwrap().kind.unwrap() {
                    EventKind::Started(started) => outcome.pid = Some(started.pid),
                    EventKind::Exited(exited) => outcome.exited = Some(exited),
                    EventKind::Failed(failed) => outcome.failed = Some(failed),
                    EventKind::Done(done) => outcome.done = Some(done),
                    EventKind::Stat(stat) => outcome.stats.push(stat),
                    EventKind::Entries(entries) => outcome.stats.extend(entries.entries),
                    EventKind::Info(info) => outcome.info = Some(info),
                    EventKind::Ready(_) => panic!("ready twice"),
                },
                kind => panic!("unexpected {kind:?}"),
            }
            if outcome.exited.is_some() || outcome.failed.is_some() || outcome.done.is_some() {
                return outcome;
            }
        }
    }

    pub fn exec(&mut self, exec: Exec) -> Outcome {
        let stream = self.request(Op::Exec(exec), &[]);
        self.wait(stream)
    }

    pub fn call(&mut self, op: Op) -> Outcome {
        let stream = self.request(op, &[]);
        self.wait(stream)
    }

    /// An operation that takes bytes.
    pub fn upload(&mut self, op: Op, bytes: &[u8]) -> Outcome {
        let stream = self.request(op, &[]);
        self.data(stream, bytes);
        self.send(stream, Kind::End0, b"");
        self.wait(stream)
    }

    /// Breaks the connection and waits for the agent's end.
    pub fn cut(mut self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "the agent outlives its connection");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
