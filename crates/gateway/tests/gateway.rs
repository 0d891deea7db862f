//! The gateway against the real kernel: what the policy allows arrives, and what it denies does not and is recorded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers as well")]

mod world;

use hickory_proto::{op::ResponseCode, rr::RecordType};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::mpsc,
    time::{Duration, Instant},
};
use trialrun_gateway::{RecordKind, UpstreamProxy};
use trialrun_policy::Policy;
use world::*;

/// The alert that says "access denied".
const TLS_DENIED: &str = "\\x15\\x03\\x03\\x00\\x02\\x021";

fn is_tls_denied(answer: &str) -> bool {
    answer.as_bytes() == [21, 3, 3, 0, 2, 2, 49] || answer == TLS_DENIED
}

#[test]
fn under_off_nothing_arrives_and_everything_is_recorded() {
    run(Policy::off(), |world| async move {
        let refused = world.inside(|| lookup("good.test", RecordType::A)).await;
        assert_eq!(refused.code, ResponseCode::Refused);
        assert!(refused.error.unwrap().contains("rule: preset off"));
        for (address, bytes) in [
            (format!("{SHARED}:443"), hello("good.test")),
            (format!("{SHARED}:80"), get("good.test", "/").into()),
            ("203.0.113.5:22".to_owned(), b"x".to_vec()),
            ("[2001:db8::1]:443".to_owned(), hello("good.test")),
        ] {
            assert_eq!(world.direct(&address, bytes).await, "refused", "{address}");
        }
        let udp = world.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"q", "203.0.113.5:443")).await;
        assert!(udp.is_err());

        assert_eq!(world.arrived(), 0);
        let dns = world.record(|r| r.kind == RecordKind::Dns);
        assert_eq!((dns.host.as_deref(), dns.allow, dns.rule.as_str()), (Some("good.test"), false, "preset off"));
        let http = world.record(|r| r.port == Some(80));
        assert_eq!((http.kind, http.count, http.rule.as_str()), (RecordKind::Tcp, 1, "preset off"));
        let v6 = world.record(|r| r.address == Some("2001:db8::1".parse().unwrap()));
        assert_eq!((v6.port, v6.allow), (Some(443), false));
        let deadline = Instant::now() + Duration::from_secs(3);
        while !world.gateway.records(0).iter().any(|r| r.kind == RecordKind::Udp) {
            assert!(Instant::now() < deadline, "{:?}", world.gateway.records(0));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(world.record(|r| r.kind == RecordKind::Udp).rule, "preset off");
    });
}

#[test]
fn where_the_kernel_has_no_queue_the_reset_follows_the_handshake() {
    run_unqueued(Policy::off(), |world| async move {
        for address in [format!("{SHARED}:443"), format!("{SHARED}:80"), "[2001:db8::1]:443".to_owned()] {
            assert_eq!(world.direct(&address, hello("good.test")).await, "reset", "{address}");
        }
        assert_eq!(world.arrived(), 0);
        assert_eq!(world.record(|r| r.port == Some(443)).rule, "preset off");
    });
}

#[test]
fn a_change_of_policy_reaches_the_next_connect() {
    run(list(&["93.184.216.34:443"]), |world| async move {
        let address = format!("{SHARED}:443");
        assert_eq!(world.direct(&address, hello_with(&[])).await, format!("tls {SHARED}:443"));
        world.gateway.set_policy(Policy::off());
        assert_eq!(world.direct(&address, hello_with(&[])).await, "refused");
        world.gateway.set_policy(Policy::web());
        assert_eq!(world.direct(&address, hello_with(&[])).await, format!("tls {SHARED}:443"));
    });
}

#[test]
fn an_allow_list_lets_through_what_it_names() {
    run(list(&["good.test", "*.wild.test", "other.test:8443", "good.test:2525"]), |world| async move {
        let tls = world.ask("good.test", 443, hello("good.test")).await;
        assert_eq!(tls, format!("tls {SHARED}:443"));
        let http = world.ask("good.test", 80, get("good.test", "/x")).await;
        assert!(http.ends_with(&format!("{SHARED}:80 /x")), "{http}");
        assert_eq!(world.ask("a.wild.test", 443, hello("a.wild.test")).await, format!("tls {SHARED}:443"));
        assert_eq!(world.ask("other.test", 8443, hello("other.test")).await, format!("tls {OTHER}:8443"));
        assert_eq!(world.ask("good.test", 2525, "").await, "220 hello\r\n");
        let tls = world.record(|r| r.port == Some(443) && r.host.as_deref() == Some("good.test"));
        assert_eq!((tls.kind, tls.rule.as_str()), (RecordKind::Tls, "allow good.test"));
        let deadline = Instant::now() + Duration::from_secs(3);
        let ended = loop {
            let record = world.record(|r| r.id == tls.id);
            if record.bytes_up.is_some() {
                break record;
            }
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        assert_eq!(ended.bytes_up, Some(hello("good.test").len() as u64));
        assert_eq!(ended.bytes_down, Some(format!("tls {SHARED}:443").len() as u64));
    });
}

#[test]
fn an_allow_list_refuses_every_way_round_it() {
    run(list(&["good.test", "*.wild.test", "good.test:8443"]), |world| async move {
        // N04, N11: names of the same address, below and beside the wildcard.
        for name in ["evil.test", "wild.test", "x.good.test", "good.test.evil", "xwild.test"] {
            assert_eq!(world.ask(name, 443, hello(name)).await, "dns Refused", "{name}");
        }
        let before = world.arrived();
        let at = |port| format!("{SHARED}:{port}");
        // The address is known from here on.
        assert_eq!(world.inside(|| lookup("good.test", RecordType::A)).await.addresses.len(), 1);
        for (what, address, bytes) in [
            ("the neighbour on the same address", at(443), hello("evil.test")),
            ("no server name", at(443), hello_with(&[])),
            ("encrypted hello", at(443), hello_with(&[sni("good.test"), (0xfe0d, vec![0; 8])])),
            ("two server names", at(443), hello_with(&[sni("good.test"), sni("evil.test")])),
            ("an address as server name", at(443), hello(SHARED)),
            ("the neighbour on another port", at(8443), hello("evil.test")),
        ] {
            let answer = world.direct(&address, bytes).await;
            assert!(is_tls_denied(&answer), "{what}: {answer}");
            assert!(!world.record(|r| r.kind == RecordKind::Tls).allow, "{what}");
        }
        for (what, address, bytes) in [
            ("ssh on 443", at(443), b"SSH-2.0-x\r\n".to_vec()),
            ("one byte", at(443), b"\x00".to_vec()),
            ("cleartext HTTP/2", at(80), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
        ] {
            let answer = world.direct(&address, bytes).await;
            assert_eq!(answer, "reset", "{what}");
        }
        for (what, address, bytes) in [
            ("an address nobody gave out", format!("{OTHER}:443"), hello("good.test")),
            ("a must-be-refused address", "203.0.113.5:443".to_owned(), hello("good.test")),
            ("the metadata address", "169.254.169.254:8080".to_owned(), b"x".to_vec()),
            ("IPv6", "[fd00:ec2::254]:443".to_owned(), hello("good.test")),
            ("NAT64", "[64:ff9b::a9fe:a9fe]:443".to_owned(), hello("good.test")),
            (
                "the metadata address on 80",
                "169.254.169.254:80".to_owned(),
                get("good.test", "/latest/meta-data").into(),
            ),
        ] {
            let answer = world.direct(&address, bytes).await;
            assert_eq!(answer, "refused", "{what}");
        }
        for (what, bytes) in [
            ("another Host", get("evil.test", "/")),
            ("Host is not the target", "GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n".into()),
            ("target is not the Host", "GET http://good.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n".into()),
            ("no Host", "GET / HTTP/1.0\r\n\r\n".into()),
            ("two Hosts", "GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n".into()),
            ("CONNECT", "CONNECT good.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n".into()),
            ("a leading empty line", format!("\r\n{}", get("evil.test", "/"))),
        ] {
            let answer = world.direct(&at(80), bytes).await;
            assert!(answer.starts_with("HTTP/1.1 403 "), "{what}: {answer}");
            assert!(answer.contains("x-trialrun-denied: "), "{what}: {answer}");
        }
        assert_eq!(world.arrived(), before, "nothing of all that reached a server");
        assert!(
            world
                .gateway
                .records(0)
                .iter()
                .filter(|r| r.kind != RecordKind::Dns)
                .all(|r| !r.allow && !r.rule.is_empty())
        );
    });
}

#[test]
fn every_request_of_a_connection_is_judged() {
    run(list(&["good.test"]), |world| async move {
        let two = format!("{}{}", get("good.test", "/1"), get("good.test", "/2"));
        let both = world.ask("good.test", 80, two).await;
        assert!(both.contains("/1") && both.contains("/2"), "{both}");
        let answers = world
            .inside(|| {
                let address = lookup("good.test", RecordType::A).addresses[0];
                let mut stream = TcpStream::connect((address, 80)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                let mut answers = Vec::new();
                for host in ["good.test", "good.test", "evil.test"] {
                    stream.write_all(get(host, "/secret").as_bytes()).unwrap();
                    answers.push(listen(&mut stream));
                }
                answers
            })
            .await;
        assert!(answers[0].contains("200 OK") && answers[1].contains("200 OK"), "{answers:?}");
        assert!(answers[2].starts_with("HTTP/1.1 403 "), "{answers:?}");
        let received = String::from_utf8_lossy(&world.received.lock().unwrap()).into_owned();
        assert!(!received.contains("evil.test"));
        let record = world.record(|r| !r.allow);
        assert_eq!((record.host.as_deref(), record.kind), (Some("evil.test"), RecordKind::Http));
        // Pipelined: the first is answered or not, but the second never arrives.
        world.ask("good.test", 80, format!("{}{}", get("good.test", "/"), get("evil.test", "/"))).await;
        let hidden =
            format!("POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 4\r\n\r\nbody{}", get("evil.test", "/"));
        world.ask("good.test", 80, hidden).await;
        assert!(!String::from_utf8_lossy(&world.received.lock().unwrap()).contains("evil.test"));
    });
}

#[test]
fn keep_alive_and_websockets_go_through() {
    run(list(&["good.test"]), |world| async move {
        let (requests, echoed) = world
            .inside(|| {
                let address = lookup("good.test", RecordType::A).addresses[0];
                let mut stream = TcpStream::connect((address, 80)).unwrap();
                let expected = format!("{SHARED}:80 /n");
                for _ in 0..200 {
                    stream.write_all(get("good.test", "/n").as_bytes()).unwrap();
                    let mut buffer = vec![0; 39 + expected.len()];
                    stream.read_exact(&mut buffer).unwrap();
                    assert!(buffer.ends_with(b"/n"), "{}", String::from_utf8_lossy(&buffer));
                }
                let mut stream = TcpStream::connect((address, 80)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                let upgrade =
                    "GET /ws HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
                stream.write_all(upgrade.as_bytes()).unwrap();
                let switched = listen(&mut stream);
                stream.write_all(b"\x81\x05frame").unwrap();
                (200, switched)
            })
            .await;
        assert_eq!(requests, 200);
        assert!(echoed.starts_with("HTTP/1.1 101"), "{echoed}");
        let deadline = Instant::now() + Duration::from_secs(2);
        while !world.received.lock().unwrap().windows(7).any(|w| w == b"\x81\x05frame") {
            assert!(Instant::now() < deadline, "the frame did not arrive");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_change_of_policy_cuts_an_idle_connection_before_it_returns() {
    run(list(&["good.test", "other.test"]), |world| async move {
        let (to_client, client_hears) = mpsc::channel::<()>();
        let (client_says, from_client) = tokio::sync::oneshot::channel();
        let client = world.inside(move || {
            let open = |name: &'static str| {
                let address = lookup(name, RecordType::A).addresses[0];
                let mut stream = TcpStream::connect((address, 443)).unwrap();
                stream.write_all(&hello(name)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                let answer = listen(&mut stream);
                assert!(answer.starts_with("tls "), "{answer}");
                stream
            };
            let (mut cut, mut kept) = (open("good.test"), open("other.test"));
            client_says.send(()).unwrap();
            client_hears.recv().unwrap();
            // No waiting: the reset has been delivered.
            cut.set_nonblocking(true).unwrap();
            let read = cut.read(&mut [0; 16]).map_err(|e| e.kind());
            kept.write_all(b"still here").unwrap();
            read
        });
        let test = async {
            from_client.await.unwrap();
            let before = world.received.lock().unwrap().len();
            world.gateway.set_policy(list(&["other.test"]));
            to_client.send(()).unwrap();
            before
        };
        let (read, before) = tokio::join!(client, test);
        assert_eq!(read, Err(std::io::ErrorKind::ConnectionReset));
        let deadline = Instant::now() + Duration::from_secs(2);
        while !world.received.lock().unwrap()[before..].ends_with(b"still here") {
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let record = world.record(|r| !r.allow && r.kind == RecordKind::Tls);
        assert_eq!(record.host.as_deref(), Some("good.test"));
        assert!(record.reason.contains("change of policy"), "{}", record.reason);
        assert_eq!(world.gateway.policy(), list(&["other.test"]));
        assert_eq!(world.ask("good.test", 443, hello("good.test")).await, "dns Refused");
    });
}

#[test]
fn web_reaches_public_addresses_only() {
    run(Policy::web(), |world| async move {
        assert_eq!(world.ask("evil.test", 443, hello("evil.test")).await, format!("tls {SHARED}:443"));
        assert_eq!(world.direct(&format!("{OTHER}:443"), hello_with(&[])).await, format!("tls {OTHER}:443"));
        assert!(world.ask("good.test", 80, get("good.test", "/")).await.contains("200 OK"));
        let before = world.arrived();
        assert_eq!(world.ask("meta.test", 80, get("meta.test", "/")).await, "dns Refused");
        assert_eq!(world.record(|r| r.host.as_deref() == Some("meta.test") && !r.allow).rule, "private address");
        assert_eq!(world.ask("private.test", 443, hello("private.test")).await, "dns Refused");
        assert_eq!(world.ask("loop.test", 443, hello("loop.test")).await, "dns Refused");
        for address in [
            "10.77.0.1:443",
            "169.254.169.254:443",
            "[fd00:ec2::254]:443",
            "[::ffff:10.77.0.1]:443",
            "[64:ff9b::a4d:1]:443",
        ] {
            assert_eq!(world.direct(address, hello("good.test")).await, "refused", "{address}");
        }
        assert_eq!(
            world.direct(&format!("{HOST_OWN}:443"), hello("good.test")).await,
            "refused",
            "the host's own address"
        );
        assert_eq!(world.direct(&format!("{SHARED}:2525"), "").await, "refused", "another port");
        assert_eq!(world.arrived(), before);
        // A private address beside a public one is left out of the answer.
        let mixed = world.inside(|| lookup("mixed.test", RecordType::A)).await;
        assert_eq!(mixed.addresses, [SHARED.parse::<std::net::IpAddr>().unwrap()]);
    });
}

#[test]
fn private_names_and_ranges_open_exactly_what_they_say() {
    let mut policy = list(&["private.test", "loop.test", "10.77.0.0/16:8443"]);
    policy.allow_private_name("private.test".parse().unwrap(), 443);
    policy.allow_private_name("loop.test".parse().unwrap(), 443);
    run(policy, |world| async move {
        assert_eq!(world.ask("private.test", 443, hello("private.test")).await, "tls 10.77.0.1:443");
        // The host's loopback is reached through a made-up address, and only by this name and port.
        assert_eq!(world.ask("loop.test", 443, hello("loop.test")).await, "tls 127.0.0.1:443");
        let stand_in = world.inside(|| lookup("loop.test", RecordType::A)).await.addresses[0];
        assert!(stand_in.to_string().starts_with("198.18."), "{stand_in}");
        let before = world.arrived();
        assert_eq!(world.ask("private.test", 80, get("private.test", "/")).await, "refused");
        assert!(is_tls_denied(&world.ask("private.test", 443, hello("loop.test")).await));
        assert_eq!(world.arrived(), before);
        assert_eq!(world.direct("10.77.0.1:8443", hello_with(&[])).await, "tls 10.77.0.1:8443");
    });
}

#[test]
fn silence_is_no_way_round_the_name() {
    run(list(&["good.test:8443", "good.test:2525"]), |world| async move {
        let late = |name: &'static str| {
            world.inside(move || {
                let address = lookup("good.test", RecordType::A).addresses[0];
                let mut stream = TcpStream::connect((address, 8443)).unwrap();
                std::thread::sleep(Duration::from_millis(600));
                stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                stream.write_all(&hello(name)).unwrap();
                listen(&mut stream)
            })
        };
        assert_eq!(late("good.test").await, format!("tls {SHARED}:8443"));
        let answer = late("evil.test").await;
        assert!(is_tls_denied(&answer), "{answer}");
        assert!(!String::from_utf8_lossy(&world.received.lock().unwrap()).contains("evil.test"));
        assert_eq!(world.ask("good.test", 2525, "").await, "220 hello\r\n");
    });
}

#[test]
fn a_second_hello_is_judged_like_the_first() {
    run(list(&["good.test"]), |world| async move {
        let twice = |second: &'static str| {
            world.inside(move || {
                let address = lookup("good.test", RecordType::A).addresses[0];
                let mut stream = TcpStream::connect((address, 443)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                stream.write_all(&hello_with(&[sni("good.test"), (RETRY_MARK, vec![])])).unwrap();
                assert!(listen(&mut stream).starts_with("\\x16"), "the server asks again");
                let bytes = [&[20, 3, 3, 0, 1, 1][..], &hello(second)].concat();
                let (first, rest) = bytes.split_at(20);
                stream.write_all(first).unwrap();
                std::thread::sleep(Duration::from_millis(30));
                stream.write_all(rest).unwrap();
                listen(&mut stream)
            })
        };
        let denied = twice("evil.test").await;
        assert!(is_tls_denied(&denied), "{denied}");
        assert!(!String::from_utf8_lossy(&world.received.lock().unwrap()).contains("evil.test"));
        twice("good.test").await;
        let received = String::from_utf8_lossy(&world.received.lock().unwrap()).into_owned();
        assert_eq!(received.matches("good.test").count(), 3, "the second hello arrived");
    });
}

#[test]
fn the_stub_answers_and_nothing_leaves_by_dns() {
    run(list(&["good.test", "unknown.test"]), |world| async move {
        let code = |name: &'static str, kind| async move { (name, kind) };
        for (name, kind, expected) in [
            ("data.evil.test", RecordType::A, ResponseCode::Refused),
            ("data.evil.test", RecordType::TXT, ResponseCode::Refused),
            ("good.test", RecordType::TXT, ResponseCode::NoError),
            ("good.test", RecordType::AAAA, ResponseCode::NoError),
            ("GOOD.test", RecordType::A, ResponseCode::NoError),
            ("unknown.test", RecordType::A, ResponseCode::NXDomain),
            ("34.216.184.93.in-addr.arpa", RecordType::PTR, ResponseCode::NoError),
            ("localhost", RecordType::A, ResponseCode::NoError),
        ] {
            let (name, kind) = code(name, kind).await;
            let answer = world.inside(move || lookup(name, kind)).await;
            assert_eq!(answer.code, expected, "{name} {kind}");
            let addresses = usize::from(kind == RecordType::A && expected == ResponseCode::NoError);
            assert_eq!(answer.addresses.len(), addresses, "{name} {kind}");
        }
        // Over TCP, to another resolver's address.
        let over_tcp = world
            .inside(|| {
                let mut stream = TcpStream::connect("203.0.113.53:53").unwrap();
                let query = query("good.test", RecordType::A);
                stream.write_all(&[&(query.len() as u16).to_be_bytes()[..], &query].concat()).unwrap();
                let mut length = [0; 2];
                stream.read_exact(&mut length).unwrap();
                let mut packet = vec![0; usize::from(u16::from_be_bytes(length))];
                stream.read_exact(&mut packet).unwrap();
                answer(&packet)
            })
            .await;
        assert_eq!(over_tcp.addresses, [SHARED.parse::<std::net::IpAddr>().unwrap()]);
        // DNS over TLS to an address nobody gave out.
        assert_eq!(world.direct("203.0.113.53:853", hello("good.test")).await, "refused");
        // Garbage gets an error or nothing, and the stub lives on.
        world
            .inside(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                for n in 0..40usize {
                    let garbage: Vec<u8> = (0..n).map(|i| (i * 37 + n) as u8).collect();
                    socket.send_to(&garbage, "10.200.0.2:53").unwrap();
                }
            })
            .await;
        assert_eq!(world.inside(|| lookup("good.test", RecordType::A)).await.code, ResponseCode::NoError);
        assert_eq!(world.arrived(), 0);
    });
}

#[test]
fn a_failure_outside_is_not_a_refusal() {
    run(list(&["closed.test"]), |world| async move {
        assert_eq!(world.ask("closed.test", 443, hello("closed.test")).await, "reset");
        let record = world.record(|r| r.kind == RecordKind::Tls);
        assert!(record.allow);
        assert!(record.failure.unwrap().contains("connect to 93.184.216.40:443"));
    });
}

#[test]
fn the_host_s_proxy_is_used_where_there_is_one() {
    let policy = list(&["only-proxy-knows.test", "good.test"]);
    let configure = |config: &mut trialrun_gateway::GatewayConfig| {
        config.upstream_proxy = Some(UpstreamProxy::parse("http://10.9.9.9:3128", "good.test").unwrap());
    };
    run_with(policy, configure, |world| async move {
        let listener = tokio::net::TcpListener::bind("10.9.9.9:3128").await.unwrap();
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 1024];
                let n = stream.read(&mut buffer).await.unwrap();
                let line = String::from_utf8_lossy(&buffer[..n]).lines().next().unwrap().to_owned();
                stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{line}").as_bytes()).await.unwrap();
                let _client_gone = stream.read(&mut buffer).await;
            }
        });
        let answer = world.ask("only-proxy-knows.test", 443, hello("only-proxy-knows.test")).await;
        assert_eq!(answer, "CONNECT only-proxy-knows.test:443 HTTP/1.1");
        assert_eq!(world.ask("good.test", 443, hello("good.test")).await, format!("tls {SHARED}:443"), "an exception");
    });
}

#[test]
fn too_many_connections_are_refused() {
    run_with(
        list(&["good.test:2525"]),
        |config| config.connections_limit = 4,
        |world| async move {
            let outcomes = world
                .inside(|| {
                    let address: SocketAddr = SocketAddr::new(lookup("good.test", RecordType::A).addresses[0], 2525);
                    let mut streams: Vec<_> = (0..6).map(|_| TcpStream::connect(address)).collect();
                    let told = streams.iter_mut().map(|stream| match stream {
                        Ok(stream) => {
                            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                            listen(stream)
                        }
                        // The reset was there before connect(2) had returned.
                        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => "reset".to_owned(),
                        Err(e) => e.to_string(),
                    });
                    told.collect::<Vec<_>>()
                })
                .await;
            assert_eq!(outcomes.iter().filter(|o| *o == "220 hello\r\n").count(), 4, "{outcomes:?}");
            assert_eq!(outcomes.iter().filter(|o| *o == "reset").count(), 2, "{outcomes:?}");
        },
    );
}

#[test]
fn stopping_cuts_and_closes() {
    run(list(&["good.test"]), |world| async move {
        assert_eq!(world.ask("good.test", 443, hello("good.test")).await, format!("tls {SHARED}:443"));
        world.gateway.stop();
        world.gateway.stop();
        tokio::task::yield_now().await;
        let answer = world.direct(&format!("{SHARED}:443"), hello("good.test")).await;
        // With nobody to judge it, a first packet is dropped.
        assert!(matches!(&*answer, "refused" | "reset" | "connect TimedOut"), "{answer}");
        assert!(!world.gateway.records(0).is_empty());
    });
}
