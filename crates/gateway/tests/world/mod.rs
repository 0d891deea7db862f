//! A small world for the gateway: a host namespace of the test's own with "public" addresses that end on its loopback,
//! two web servers there, and a cell.

#![allow(dead_code)]

use hickory_proto::{
    op::{Edns, Message, Query},
    rr::{Name as DnsName, RecordType, rdata::opt::EdnsOption},
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{
    collections::HashMap,
    future::Future,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use trialrun_gateway::{ConnectionRecord, Gateway, GatewayConfig, GatewayHandle, Resolver};
use trialrun_net::Cell;
use trialrun_policy::Policy;

/// Address shared by good.test and evil.test.
pub const SHARED: &str = "93.184.216.34";
/// Address of other.test alone.
pub const OTHER: &str = "93.184.216.35";
/// An address of the host itself.
pub const HOST_OWN: &str = "93.184.216.99";

pub struct World {
    pub gateway: GatewayHandle,
    netns: OwnedFd,
    /// Connections that reached any server.
    pub arrived: Arc<AtomicUsize>,
    /// Everything that any server read.
    pub received: Arc<Mutex<Vec<u8>>>,
}

/// Runs a test in a host namespace of its own; a skip without root.
pub fn run<F: Future<Output = ()>>(policy: Policy, test: impl FnOnce(World) -> F + Send + 'static) {
    run_with(policy, |_| (), test);
}

pub fn run_with<F: Future<Output = ()>>(
    policy: Policy,
    configure: impl FnOnce(&mut GatewayConfig) + Send + 'static,
    test: impl FnOnce(World) -> F + Send + 'static,
) {
    start(policy, true, configure, test);
}

/// As on a kernel without nfnetlink_queue: every handshake succeeds.
pub fn run_unqueued<F: Future<Output = ()>>(policy: Policy, test: impl FnOnce(World) -> F + Send + 'static) {
    start(policy, false, |_| (), test);
}

fn start<F: Future<Output = ()>>(
    policy: Policy,
    judge_syns: bool,
    configure: impl FnOnce(&mut GatewayConfig) + Send + 'static,
    test: impl FnOnce(World) -> F + Send + 'static,
) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a cell needs root");
        return;
    }
    let thread = std::thread::spawn(move || {
        trialrun_sys::netlink::unshare_network().unwrap();
        for command in [
            "link set lo up",
            "addr add 10.9.9.9/32 dev lo",
            "addr add 93.184.216.99/32 dev lo",
            // Local without being the host's own: the source of such connections is another address.
            "route add local 93.184.216.0/26 dev lo src 10.9.9.9",
            "route add local 10.77.0.0/16 dev lo src 10.9.9.9",
        ] {
            assert!(Command::new("ip").args(command.split(' ')).status().unwrap().success(), "{command}");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let cell = Cell::create().unwrap();
            let mut config = GatewayConfig { resolver: resolver(), ..GatewayConfig::default() };
            configure(&mut config);
            let mut listeners = cell.listeners;
            if let Some(queue) = listeners.syns.take_if(|_| !judge_syns) {
                std::thread::spawn(move || {
                    loop {
                        for syn in queue.receive().unwrap_or_default() {
                            let _cell_gone = queue.answer(syn, true);
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            let gateway = Gateway::start(listeners, config, policy).unwrap();
            let world = World { gateway, netns: cell.netns, arrived: Arc::default(), received: Arc::default() };
            for address in [SHARED, OTHER, "10.77.0.1", HOST_OWN] {
                for port in [80, 443, 8443] {
                    world.serve(&format!("{address}:{port}"), false).await;
                }
                world.serve(&format!("{address}:2525"), true).await;
            }
            world.serve("127.0.0.1:443", false).await;
            test(world).await;
        });
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn resolver() -> Resolver {
    let table: [(&str, &[&str]); 10] = [
        ("good.test", &[SHARED]),
        ("evil.test", &[SHARED]),
        ("other.test", &[OTHER]),
        ("a.wild.test", &[SHARED]),
        ("wild.test", &[SHARED]),
        ("meta.test", &["169.254.169.254", "fd00:ec2::254"]),
        ("private.test", &["10.77.0.1"]),
        ("loop.test", &["127.0.0.1"]),
        ("mixed.test", &["10.77.0.1", SHARED]),
        ("closed.test", &["93.184.216.40"]),
    ];
    let table = table.into_iter().map(|(n, a)| (n.parse().unwrap(), a.iter().map(|a| a.parse().unwrap()).collect()));
    Resolver::Fixed(Arc::new(table.collect::<HashMap<_, Vec<IpAddr>>>()))
}

impl World {
    /// A server: TLS hellos get `tls ADDRESS`, HTTP requests a response each that names address and target, and where
    /// `first` is set the server greets.
    async fn serve(&self, address: &str, first: bool) {
        let listener = TcpListener::bind(address).await.unwrap();
        let (arrived, received, address) = (self.arrived.clone(), self.received.clone(), address.to_owned());
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                arrived.fetch_add(1, Ordering::SeqCst);
                let (received, address) = (received.clone(), address.clone());
                tokio::spawn(async move {
                    if first {
                        stream.write_all(b"220 hello\r\n").await?;
                    }
                    let mut held = Vec::new();
                    loop {
                        let mut buffer = [0; 4096];
                        let n = stream.read(&mut buffer).await?;
                        if n == 0 {
                            return std::io::Result::Ok(());
                        }
                        received.lock().unwrap().extend_from_slice(&buffer[..n]);
                        held.extend_from_slice(&buffer[..n]);
                        if first {
                            stream.write_all(&std::mem::take(&mut held)).await?;
                        } else if held[0] == 22 && held.windows(2).any(|w| w == RETRY_MARK.to_be_bytes()) {
                            held.clear();
                            stream.write_all(&retry_request()).await?;
                        } else if held[0] == 22 {
                            stream.write_all(format!("tls {address}").as_bytes()).await?;
                        }
                        while let Some(end) = held.windows(4).position(|w| w == b"\r\n\r\n") {
                            let head: Vec<u8> = held.drain(..end + 4).collect();
                            let head = String::from_utf8_lossy(&head).into_owned();
                            if head.contains("Upgrade: websocket") {
                                stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").await?;
                                continue;
                            }
                            let length = head
                                .split("Content-Length: ")
                                .nth(1)
                                .and_then(|l| l.split("\r\n").next()?.parse().ok());
                            held.drain(..length.unwrap_or(0).min(held.len()));
                            let target = head.split(' ').nth(1).unwrap_or("?");
                            let body = format!("{address} {target}");
                            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                            stream.write_all(answer.as_bytes()).await?;
                        }
                    }
                });
            }
        });
    }

    /// Runs `f` on a thread of its own inside the cell.
    pub async fn inside<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        let netns = self.netns.try_clone().unwrap();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let _test_gone = sender.send(f());
        });
        receiver.await.expect("the client panicked")
    }

    /// Looks a name up and connects to its first address.
    pub async fn ask(&self, name: &'static str, port: u16, send: impl Into<Vec<u8>>) -> String {
        let send = send.into();
        self.inside(move || {
            let answer = lookup(name, RecordType::A);
            match answer.addresses.first() {
                Some(address) => talk(SocketAddr::new(*address, port), &send),
                None => format!("dns {:?}", answer.code),
            }
        })
        .await
    }

    /// Connects to an address without a lookup.
    pub async fn direct(&self, address: &str, send: impl Into<Vec<u8>>) -> String {
        let (address, send) = (address.parse().unwrap(), send.into());
        self.inside(move || talk(address, &send)).await
    }

    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// The newest record that fits.
    pub fn record(&self, fits: impl Fn(&ConnectionRecord) -> bool) -> ConnectionRecord {
        let records = self.gateway.records(0);
        records.iter().rev().find(|r| fits(r)).unwrap_or_else(|| panic!("no such record in {records:#?}")).clone()
    }
}

/// Sends bytes and returns what comes back until the other side ends or is silent, with `reset` for an error.
pub fn talk(address: SocketAddr, send: &[u8]) -> String {
    let mut stream = match TcpStream::connect_timeout(&address, Duration::from_secs(3)) {
        Ok(stream) => stream,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => return "refused".to_owned(),
        // A reset may come before or after connect(2) has returned.
        Err(e) if e.kind() == ErrorKind::ConnectionReset => return "reset".to_owned(),
        Err(e) => return format!("connect {:?}", e.kind()),
    };
    stream.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
    match stream.write_all(send) {
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return "reset".to_owned(),
        written => written.unwrap(),
    }
    listen(&mut stream)
}

/// Reads until something came and 100 ms passed without more, or the end.
pub fn listen(stream: &mut TcpStream) -> String {
    let (mut got, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) if got.is_empty() => return "end".to_owned(),
            Ok(0) => break,
            Ok(n) => {
                got.extend_from_slice(&buffer[..n]);
                stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            }
            Err(_) if !got.is_empty() => break,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return "silence".to_owned(),
            Err(_) => return "reset".to_owned(),
        }
    }
    String::from_utf8(got).unwrap_or_else(|e| e.into_bytes().escape_ascii().to_string())
}

#[derive(Debug)]
pub struct Answer {
    pub code: hickory_proto::op::ResponseCode,
    pub addresses: Vec<IpAddr>,
    pub error: Option<String>,
}

pub fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(DnsName::from_ascii(name).unwrap(), kind));
    message.set_edns(Edns::new());
    message.to_vec().unwrap()
}

pub fn answer(packet: &[u8]) -> Answer {
    let message = Message::from_vec(packet).unwrap();
    let error = message.edns.as_ref().and_then(|edns| {
        edns.options().options.iter().find_map(|(_, option)| match option {
            EdnsOption::Unknown(15, value) => Some(String::from_utf8_lossy(value.get(2..)?).into_owned()),
            _ => None,
        })
    });
    let addresses = message.answers.iter().filter_map(|r| r.data.ip_addr()).collect();
    Answer { code: message.metadata.response_code, addresses, error }
}

pub fn lookup(name: &str, kind: RecordType) -> Answer {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    socket.send_to(&query(name, kind), "10.200.0.2:53").unwrap();
    let mut buffer = [0; 2048];
    let (n, from) = socket.recv_from(&mut buffer).unwrap();
    assert_eq!(from, "10.200.0.2:53".parse().unwrap(), "the answer comes from where the question went");
    answer(&buffer[..n])
}

pub fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

/// An extension by which the servers here ask for a second hello.
pub const RETRY_MARK: u16 = 0xffaa;

fn retry_request() -> Vec<u8> {
    let random = b"\xcf\x21\xad\x74\xe5\x9a\x61\x11\xbe\x1d\x8c\x02\x1e\x65\xb8\x91\xc2\xa2\x11\x16\x7a\xbb\x8c\x5e\x07\x9e\x09\xe2\xc8\xa8\x33\x9c";
    [&[22, 3, 3, 0, 42, 2, 0, 0, 38, 3, 3][..], random, &[0, 0x13, 1, 0]].concat()
}

/// A TLS client hello with these extensions.
pub fn hello_with(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let list: Vec<u8> = extensions
        .iter()
        .flat_map(|(kind, value)| [&kind.to_be_bytes()[..], &(value.len() as u16).to_be_bytes(), value].concat())
        .collect();
    let mut body =
        [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0], &(list.len() as u16).to_be_bytes(), &list].concat();
    let mut message = vec![1, 0];
    message.extend((body.len() as u16).to_be_bytes());
    message.append(&mut body);
    [&[22, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat()
}

pub fn hello(name: &str) -> Vec<u8> {
    hello_with(&[sni(name)])
}

pub fn sni(name: &str) -> (u16, Vec<u8>) {
    let n = name.len() as u16;
    (0, [&(n + 3).to_be_bytes()[..], &[0], &n.to_be_bytes(), name.as_bytes()].concat())
}

pub fn list(entries: &[&str]) -> Policy {
    Policy::allow_list(entries.iter().map(|e| e.parse().unwrap()).collect())
}
