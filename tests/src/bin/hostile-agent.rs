//! A guest agent that attacks its keeper; which attack is in the machine's variable `HOSTILE`.
//!
//! It is started as the real one is (`--fd N --boot-fd N`), greets as that does unless the greeting is the attack, and
//! answers every request with what its attack is.

use anyhow::{Context, Result, bail};
use bytes::BytesMut;
use prost::Message;
use std::{
    collections::VecDeque,
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};
use trialrun_guest_proto::{
    Boot, Decoder, Done, Entries, Event, EventKind, Exited, Failed, FileStat, GENERATION, MachineInfo, Op, Ready,
    Request, Started,
    frame::{Kind, encode},
};

struct Agent {
    stream: UnixStream,
}

impl Agent {
    fn frame(&mut self, stream: u32, kind: Kind, payload: &[u8]) -> Result<()> {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, stream, kind, payload);
        Ok(self.stream.write_all(&bytes)?)
    }

    fn event(&mut self, stream: u32, kind: EventKind) -> Result<()> {
        self.frame(stream, Kind::Event, &Event { kind: Some(kind) }.encode_to_vec())
    }

    fn head(&mut self, len: u32, stream: u32, kind: u8) -> Result<()> {
        let head = [&len.to_le_bytes()[..], &stream.to_le_bytes(), &[kind]].concat();
        Ok(self.stream.write_all(&head)?)
    }

    /// Answers one request. `fds` came beside it.
    fn attack(&mut self, attack: &str, stream: u32, op: Option<&Op>, fds: &mut VecDeque<OwnedFd>) -> Result<()> {
        match attack {
            "half-frame" => self.stream.write_all(&[200, 0, 0]).map_err(Into::into),
            "half-payload" => {
                self.head(1000, stream, Kind::Event as u8)?;
                Ok(self.stream.write_all(&[0; 10])?)
            }
            "huge-length" => self.head(u32::MAX, stream, Kind::Event as u8),
            "just-too-long" => self.head((256 << 10) + 1, stream, Kind::Data1 as u8),
            "unknown-kind" => self.head(0, stream, 99),
            "host-kind" => self.frame(stream, Kind::Request, b"\x08\x00"),
            "garbage" => {
                let mut noise = vec![0; 1 << 20];
                File::open("/dev/urandom")?.read_exact(&mut noise)?;
                Ok(self.stream.write_all(&noise)?)
            }
            "not-a-message" => self.frame(stream, Kind::Event, &[0xff; 4096]),
            "small-events" => loop {
                self.event(stream, EventKind::Started(Started { pid: 1 }))?;
            },
            "other-streams" => loop {
                for other in [0, 1, stream + 1, u32::MAX] {
                    self.event(other, EventKind::Done(Done::default()))?;
                    self.frame(other, Kind::Data1, &[b'x'; 1000])?;
                }
            },
            "empty-entries" => loop {
                let entries = vec![FileStat::default(); 100_000];
                self.event(stream, EventKind::Entries(Entries { entries }))?;
            },
            "data-without-credit" => {
                self.event(stream, EventKind::Started(Started { pid: 2 }))?;
                loop {
                    self.frame(stream, Kind::Data1, &[b'x'; 64 << 10])?;
                }
            }
            "descriptors" => {
                let null = File::open("/dev/null")?;
                let many = [null.as_fd(); 32];
                loop {
                    let mut bytes = BytesMut::new();
                    encode(&mut bytes, 0, Kind::Event, &[]);
                    trialrun_sys::fdpass::send(self.stream.as_fd(), &bytes, &many)?;
                }
            }
            "output-into-pipes" => {
                // Standard output and error of an exec without a terminal are the last two.
                self.event(stream, EventKind::Started(Started { pid: 2 }))?;
                let mut out = File::from(fds.pop_back().context("no descriptor")?);
                std::thread::spawn(move || while out.write_all(&[b'y'; 64 << 10]).is_ok() {});
                Ok(())
            }
            "two-ends" => {
                self.event(stream, EventKind::Started(Started { pid: u32::MAX }))?;
                for code in [i32::MIN, 0, i32::MAX] {
                    self.event(stream, EventKind::Exited(Exited { code: Some(code), signal: Some(-code / 2) }))?;
                }
                Ok(())
            }
            "wrong-answers" => {
                self.event(stream, EventKind::Ready(Ready { generation: 7 }))?;
                self.event(
                    stream,
                    EventKind::Info(MachineInfo { kernel: "x".repeat(200_000), ..MachineInfo::default() }),
                )?;
                self.event(stream, EventKind::Stat(FileStat { size: u64::MAX, ..FileStat::default() }))?;
                self.event(
                    stream,
                    EventKind::Failed(Failed { kind: 77, errno: -1, message: "\x1b]0;owned\x07".repeat(999) }),
                )
            }
            "endless-archive" | "hostile-archive" => {
                if let Some(Op::TarDown(_) | Op::Read(_)) = op {
                    let mut out = File::from(fds.pop_back().context("no descriptor")?);
                    if attack == "endless-archive" {
                        let head = entry("big", b'0', "", 1 << 60);
                        std::thread::spawn(move || {
                            let _ = out.write_all(&head);
                            while out.write_all(&[b'z'; 64 << 10]).is_ok() {}
                        });
                        return Ok(());
                    }
                    for (name, kind, link) in [
                        ("../above", b'0', ""),
                        ("/absolute", b'0', ""),
                        ("a/../../above", b'0', ""),
                        ("link", b'2', "/tmp"),
                        ("link/through", b'0', ""),
                        ("up", b'2', "../.."),
                        ("up/through", b'0', ""),
                        ("hard", b'1', "/etc/passwd"),
                        ("device", b'3', ""),
                        ("pipe", b'6', ""),
                    ] {
                        let content = if kind == b'0' { 5 } else { 0 };
                        out.write_all(&entry(name, kind, link, content))?;
                        if content > 0 {
                            let mut block = [0; 512];
                            block[..5].copy_from_slice(b"owned");
                            out.write_all(&block)?;
                        }
                    }
                    out.write_all(&[0; 1024])?;
                    drop(out);
                    return self.event(stream, EventKind::Done(Done { bytes: 1 << 50, files: 9, ..Done::default() }));
                }
                // A folder.
                self.event(stream, EventKind::Stat(FileStat { mode: 0o040_755, ..FileStat::default() }))
            }
            "silence" => Ok(()),
            "death" => bail!("as asked"),
            other => bail!("no attack {other:?}"),
        }
    }
}

/// A ustar header.
fn entry(name: &str, kind: u8, link: &str, size: u64) -> [u8; 512] {
    let mut head = [0; 512];
    let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0004777\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    if size < 1 << 33 {
        put(124, format!("{size:011o}\0").as_bytes());
    } else {
        put(124, &[&[0x80, 0, 0, 0][..], &size.to_be_bytes()].concat());
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, link.as_bytes());
    put(257, b"ustar\x0000");
    let sum: u32 = head.iter().map(|b| u32::from(*b)).sum();
    head[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    head
}

fn number(args: &[String], name: &str) -> Result<i32> {
    let at = args.iter().position(|a| a == name).with_context(|| format!("no {name}"))?;
    Ok(args.get(at + 1).context("no value")?.parse()?)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let numbers = [number(&args, "--fd")?, number(&args, "--boot-fd")?];
    let [stream, boot] = trialrun_sys::spawn::inherited_fds(numbers)?;
    let mut bytes = Vec::new();
    File::from(boot).read_to_end(&mut bytes)?;
    let boot = Boot::decode(&bytes[..])?;
    let attack = boot.env.iter().find(|e| e.name == b"HOSTILE").context("no attack is named")?;
    let attack = String::from_utf8(attack.value.clone())?;
    let mut agent = Agent { stream: stream.into() };
    match attack.as_str() {
        "never-ready" => loop {
            std::thread::sleep(Duration::from_secs(60));
        },
        "ready-later-generation" => agent.event(0, EventKind::Ready(Ready { generation: GENERATION + 1 }))?,
        "dies-at-once" => return Ok(()),
        "garbage-first" => agent.stream.write_all(&[0xa5; 4096])?,
        "floods-first" => loop {
            agent.event(0, EventKind::Done(Done::default()))?;
        },
        _ => agent.event(0, EventKind::Ready(Ready { generation: GENERATION }))?,
    }
    let (mut decoder, mut fds) = (Decoder::default(), VecDeque::new());
    while trialrun_sys::fdpass::recv(agent.stream.as_fd(), decoder.buffer(), 64 << 10, &mut fds)? > 0 {
        while let Some(frame) = decoder.next_frame()? {
            if frame.kind == Kind::Request {
                let request = Request::decode(frame.payload)?;
                agent.attack(&attack, frame.stream, request.op.as_ref(), &mut fds)?;
            }
        }
    }
    Ok(())
}
