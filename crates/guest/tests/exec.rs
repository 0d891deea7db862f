//! Commands, driven over the protocol.

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod guest;

use guest::{Guest, argv, env, sh};
use std::{
    io::Read,
    os::fd::AsFd,
    time::{Duration, Instant},
};
use trialrun_guest_proto::{Boot, Exec, FailKind, Info, Kind, Op, Resize, SetEnv, Signal};

#[test]
fn a_command_answers_with_code_and_both_channels() {
    let mut guest = Guest::new();
    let outcome = guest.exec(sh("echo out; echo err >&2; exit 7"));
    assert_eq!((&outcome.out[..], &outcome.err[..], outcome.code()), (&b"out\n"[..], &b"err\n"[..], Some(7)));
    assert!(outcome.pid.is_some());
    let outcome = guest.exec(sh("kill -TERM $$"));
    assert_eq!(outcome.exited.unwrap().signal, Some(15));
    let outcome = guest.exec(Exec { shell: Some("echo $((1+2)); pwd".into()), ..Exec::default() });
    assert_eq!(outcome.text(), "3\n/\n");
}

/// Field report E02.
#[test]
fn a_background_child_does_not_hold_the_exec_open() {
    let mut guest = Guest::new();
    let start = Instant::now();
    let stream = guest.request(Op::Exec(sh("sleep 30 & echo hi; echo $!")), &[]);
    let other = guest.exec(argv(&["true"]));
    assert_eq!(other.code(), Some(0));
    let outcome = guest.wait(stream);
    assert_eq!((outcome.text().lines().next(), outcome.code()), (Some("hi"), Some(0)));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let child = outcome.text().lines().nth(1).unwrap().to_owned();
    assert_eq!(guest.exec(argv(&["sh", "-c", "kill $0", &child])).code(), Some(0));
}

/// Field report E03.
#[test]
fn output_beyond_any_buffer_arrives_whole() {
    let mut guest = Guest::new();
    let outcome = guest.exec(sh(r#"head -c 8388608 /dev/zero | tr "\0" x; head -c 8388608 /dev/zero | tr "\0" y >&2"#));
    assert_eq!((outcome.out.len(), outcome.err.len(), outcome.code()), (8_388_608, 8_388_608, Some(0)));
    assert!(outcome.out.iter().all(|&b| b == b'x') && outcome.err.iter().all(|&b| b == b'y'));
    let outcome = guest.exec(sh("for i in 1 2 3 4; do head -c 1048576 /dev/zero; head -c 1048576 /dev/zero >&2; done"));
    assert_eq!((outcome.out.len(), outcome.err.len()), (4 << 20, 4 << 20));
}

/// What a leader wrote last is complete even when the host takes its time.
#[test]
fn output_waits_for_credit_after_the_leaders_end() {
    let mut guest = Guest::new();
    let stream = guest.request(Op::Exec(sh("head -c 300000 /dev/zero")), &[]);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(guest.wait(stream).out.len(), 300_000);
}

/// Field report E05: the agent moves bytes, and keeps their order.
#[test]
fn split_characters_survive() {
    let mut guest = Guest::new();
    let outcome = guest.exec(sh(r"printf '\342'; sleep .1; printf '\230'; sleep .1; printf '\225\n'"));
    assert_eq!(outcome.text(), "☕\n");
    let outcome = guest.exec(sh("i=0; while [ $i -lt 1000 ]; do printf '☕☕☕☕☕☕☕☕☕☕'; i=$((i+1)); done"));
    assert_eq!(outcome.text(), "☕".repeat(10_000));
}

/// Field report E07.
#[test]
fn stdin_is_at_its_end_unless_given() {
    let mut guest = Guest::new();
    let start = Instant::now();
    assert_eq!(guest.exec(argv(&["cat"])).code(), Some(0));
    assert_eq!(guest.exec(argv(&["grep", "x"])).code(), Some(1));
    assert!(start.elapsed() < Duration::from_secs(1));
    let input: Vec<u8> = (0..5_u32 << 20).map(|i| (i % 251) as u8).collect();
    let stream = guest.request(Op::Exec(Exec { stdin: true, ..argv(&["cat"]) }), &[]);
    guest.data(stream, &input);
    guest.send(stream, Kind::End0, b"");
    assert!(guest.wait(stream).out == input);
}

/// Field report E08.
#[test]
fn closing_stdin_ends_a_reader() {
    let mut guest = Guest::new();
    let stream = guest.request(Op::Exec(Exec { stdin: true, ..argv(&["tac"]) }), &[]);
    guest.data(stream, b"a\nb\n");
    guest.send(stream, Kind::End0, b"");
    let outcome = guest.wait(stream);
    assert_eq!((outcome.text().as_str(), outcome.code()), ("b\na\n", Some(0)));
}

#[test]
fn input_that_nobody_reads_does_not_block() {
    let mut guest = Guest::new();
    let stream = guest.request(Op::Exec(Exec { stdin: true, ..sh("exec <&-; sleep .2; exit 4") }), &[]);
    guest.data(stream, &vec![0; 1 << 20]);
    guest.send(stream, Kind::End0, b"");
    assert_eq!(guest.wait(stream).code(), Some(4));
}

/// Field report E10.
#[test]
fn programs_are_looked_up_in_the_execs_own_path() {
    let dir = tempfile::tempdir().unwrap();
    for (name, says) in [("a", "image"), ("b", "call")] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        let tool = dir.path().join(name).join("tool");
        // No first line: the shell runs it, as execvp has it.
        std::fs::write(&tool, format!("echo {says} $1 $LANG\n")).unwrap();
        std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = |name: &str| format!("{}:/usr/bin:/bin", dir.path().join(name).display());
    let boot = Boot {
        env: vec![env("PATH", path("a")), env("LANG", "C.UTF-8")],
        cwd: dir.path().as_os_str().as_encoded_bytes().to_vec(),
        ..Boot::default()
    };
    let mut guest = Guest::boot(boot);
    assert_eq!(guest.exec(argv(&["tool", "x"])).ok().text(), "image x C.UTF-8\n");
    let per_call = Exec { env: vec![env("PATH", path("b"))], ..argv(&["tool", "y"]) };
    assert_eq!(guest.exec(per_call).ok().text(), "call y C.UTF-8\n");
    assert_eq!(guest.exec(argv(&["b/tool", "z"])).ok().text(), "call z C.UTF-8\n", "relative to the default directory");
    assert_eq!(guest.exec(argv(&["pwd"])).text().trim(), dir.path().to_str().unwrap());
    guest.call(Op::SetEnv(SetEnv { env: vec![env("LANG", "C")] })).ok();
    assert_eq!(guest.exec(argv(&["tool", "x"])).ok().text(), "image x C\n");
}

/// Field report E11.
#[test]
fn a_command_that_cannot_start_says_why() {
    let mut guest = Guest::new();
    let cwd = |path: &str| Exec { cwd: Some(path.into()), ..argv(&["true"]) };
    let cases = [
        (cwd("/nope"), FailKind::BadCwd, "/nope"),
        (cwd("/etc/passwd"), FailKind::BadCwd, "/etc/passwd"),
        (Exec { user: Some("nobody42".into()), ..argv(&["true"]) }, FailKind::UnknownUser, "nobody42"),
        (argv(&["/etc/passwd"]), FailKind::NotExecutable, "/etc/passwd"),
        (argv(&["/nope"]), FailKind::NotFound, "/nope"),
        (argv(&["no-such-program-42"]), FailKind::NotFound, "no-such-program-42"),
        (argv(&["/tmp"]), FailKind::NotExecutable, "/tmp"),
        (argv(&[""]), FailKind::BadCommand, "empty"),
        (argv(&[]), FailKind::BadCommand, "empty"),
        (argv(&["echo", "a\0b"]), FailKind::BadCommand, "NUL"),
    ];
    for (exec, kind, names) in cases {
        let outcome = guest.exec(exec.clone());
        let (got, message) = outcome.fail();
        assert_eq!(got, kind, "{exec:?}: {message}");
        assert!(message.contains(names), "{message}");
    }
    assert_eq!(guest.exec(argv(&["true"])).code(), Some(0), "the agent is well");
}

#[test]
fn a_script_without_its_interpreter_is_not_taken_for_missing() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("s");
    std::fs::write(&script, "#!/nope/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let outcome = Guest::new().exec(argv(&[script.to_str().unwrap()]));
    assert_eq!(outcome.fail().0, FailKind::NotExecutable);
    assert!(outcome.fail().1.contains("interpreter"));
}

/// Field report E15.
#[test]
fn environment_values_travel_byte_for_byte() {
    let mut guest = Guest::new();
    let values =
        [b"x'y\"z $HOME `id` %s".to_vec(), b"two\nlines".to_vec(), Vec::new(), vec![b'v'; 100 << 10], vec![0xff, 0xfe]];
    let entries: Vec<_> = values.iter().enumerate().map(|(i, v)| env(format!("V{i}"), v)).collect();
    let outcome = guest.exec(Exec { env: entries, ..argv(&["cat", "/proc/self/environ"]) });
    for (i, value) in values.iter().enumerate() {
        let want = [format!("V{i}=").as_bytes(), value].concat();
        assert!(outcome.out.split(|&b| b == 0).any(|e| e == want), "V{i}");
    }
    for (name, value) in [("B=C", "x"), ("", "x"), ("N", "a\0b")] {
        let outcome = guest.exec(Exec { env: vec![env(name, value)], ..argv(&["true"]) });
        assert_eq!(outcome.fail().0, FailKind::BadEnv, "{name}");
    }
    let outcome = guest.call(Op::SetEnv(SetEnv { env: vec![env("", "x")] }));
    assert_eq!(outcome.fail().0, FailKind::BadEnv);
}

#[test]
fn passed_descriptors_become_stdio() {
    let mut guest = Guest::new();
    let (mut out, out_writer) = std::io::pipe().unwrap();
    let (in_reader, in_writer) = std::io::pipe().unwrap();
    let dir = std::fs::File::open("/").unwrap();
    let stdio = [dir.as_fd(), in_reader.as_fd(), out_writer.as_fd(), out_writer.as_fd()];
    let stream = guest.request(Op::Exec(sh("cat; ls /proc/self/fd | wc -l; umask")), &stdio);
    drop((out_writer, in_reader));
    std::io::Write::write_all(&mut &in_writer, b"hello\n").unwrap();
    drop(in_writer);
    let mut text = String::new();
    out.read_to_string(&mut text).unwrap();
    // stdin, stdout, stderr and what ls opened itself.
    assert_eq!(text, "hello\n4\n0022\n");
    assert_eq!(guest.wait(stream).code(), Some(0));
}

#[test]
fn signals_reach_the_leader_or_its_group() {
    let mut guest = Guest::new();
    for group in [false, true] {
        let stream = guest.request(Op::Exec(sh("trap 'exit 9' TERM; echo up; while :; do sleep .05; done")), &[]);
        assert!(matches!(guest.event(stream), trialrun_guest_proto::EventKind::Started(_)));
        assert_eq!(&guest.frame(stream).payload[..], b"up\n");
        guest.call(Op::Signal(Signal { stream, signal: 15, group })).ok();
        assert_eq!(guest.wait(stream).code(), Some(9));
        let gone = guest.call(Op::Signal(Signal { stream, signal: 15, group }));
        assert_eq!(gone.fail().0, FailKind::NotFound);
    }
}

#[test]
fn a_terminal_is_one() {
    let mut guest = Guest::new();
    let exec =
        Exec { pty_rows: 30, pty_cols: 100, ..sh("tty >/dev/null && stty size; read x; stty size; echo got $x; cat") };
    let stream = guest.request(Op::Exec(exec), &[]);
    assert!(matches!(guest.event(stream), trialrun_guest_proto::EventKind::Started(_)));
    assert_eq!(&guest.frame(stream).payload[..], b"30 100\r\n");
    guest.call(Op::Resize(Resize { stream, rows: 40, cols: 120 })).ok();
    guest.data(stream, b"word\n");
    guest.send(stream, Kind::End0, b"");
    let outcome = guest.wait(stream);
    assert!(outcome.text().contains("40 120\r\ngot word\r\n"), "{:?}", outcome.text());
    assert_eq!(outcome.code(), Some(0));
}

#[test]
fn a_deadline_ends_the_session() {
    let mut guest = Guest::new();
    let start = Instant::now();
    let outcome = guest.exec(Exec { deadline_ms: 200, ..sh("while :; do :; done") });
    assert_eq!(outcome.exited.unwrap().signal, Some(9));
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn nonsense_is_answered_and_survived() {
    let mut guest = Guest::new();
    guest.send(900, Kind::Request, &[0xff; 50]);
    assert_eq!(guest.wait(900).fail().0, FailKind::BadRequest);
    guest.send(901, Kind::Request, b"");
    assert_eq!(guest.wait(901).fail().0, FailKind::BadRequest);
    guest.send(12345, Kind::Data0, b"nobody");
    guest.send(12345, Kind::Credit, b"?");
    guest.send(0, Kind::Resync, &[7; 16]);
    let echo = guest.frame(0);
    assert_eq!((echo.kind, &echo.payload[..]), (Kind::Resync, &[7; 16][..]));
}

#[test]
fn the_agent_ends_with_its_connection() {
    let mut guest = Guest::new();
    let stream = guest.request(Op::Exec(argv(&["sleep", "1000"])), &[]);
    let trialrun_guest_proto::EventKind::Started(started) = guest.event(stream) else { panic!("not started") };
    guest.cut();
    let start = Instant::now();
    while std::fs::read_to_string(format!("/proc/{}/stat", started.pid)).is_ok_and(|s| !s.contains(") Z ")) {
        assert!(start.elapsed() < Duration::from_secs(10), "a child outlives the agent");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn many_short_commands_lose_nothing() {
    let mut guest = Guest::new();
    let start = Instant::now();
    let streams: Vec<u32> = (0..200).map(|i| guest.request(Op::Exec(argv(&["echo", &i.to_string()])), &[])).collect();
    for (i, stream) in streams.into_iter().enumerate() {
        assert_eq!(guest.wait(stream).text(), format!("{i}\n"));
    }
    println!("200 commands: {:?}", start.elapsed());
}

#[test]
fn an_idle_agent_is_small() {
    let mut guest = Guest::new();
    guest.exec(sh("head -c 1000000 /dev/zero"));
    let info = guest.call(Op::Info(Info {})).ok();
    let info = guest_info(info);
    println!("private bytes: {}", info.agent_private_bytes);
    assert!(info.cpus > 0 && !info.kernel.is_empty());
    assert!(info.agent_private_bytes < 2 << 20, "{}", info.agent_private_bytes);
}

fn guest_info(outcome: guest::Outcome) -> trialrun_guest_proto::MachineInfo {
    outcome.info.expect("the answer carries it")
}
