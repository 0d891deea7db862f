//! The agent as PID 1: what execs may do, and what they may not. Needs root.

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod guest;

use guest::{Guest, argv, env, sh};
use trialrun_guest_proto::{Boot, Exec, FailKind};

/// A guest whose default user is 65534, or nothing with a reason.
fn machine() -> Option<Guest> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a pid namespace needs root");
        return None;
    }
    Some(Guest::boot_init(Boot { user: "65534:65534".into(), cwd: b"/".to_vec(), ..Boot::default() }))
}

fn as_root(exec: Exec) -> Exec {
    Exec { user: Some("root".into()), ..exec }
}

fn python(code: &str) -> Exec {
    argv(&["python3", "-c", code])
}

#[test]
fn the_agent_is_pid_1_and_reaps_orphans() {
    let Some(mut guest) = machine() else { return };
    let outcome = guest.exec(sh("(sleep 0.05 &) ; ps -o pid=,comm= -p 1")).ok();
    assert!(outcome.text().contains("trialrun-guest"), "{}", outcome.text());
    let start = std::time::Instant::now();
    loop {
        let seen = guest.exec(as_root(sh("ps -eo stat=,comm= | grep -c '^Z.*sleep'; pgrep -c sleep")));
        if seen.text() == "0\n0\n" {
            break;
        }
        assert!(start.elapsed().as_secs() < 10, "{}", seen.text());
    }
}

#[test]
fn capabilities_are_the_listed_ones() {
    let Some(mut guest) = machine() else { return };
    let caps = "grep ^Cap /proc/self/status | tr '\\t\\n' ' '";
    let kept = "00000000800404fb";
    let none = "0000000000000000";
    let root = guest.exec(as_root(sh(caps))).ok().text();
    assert_eq!(root, format!("CapInh: {none} CapPrm: {kept} CapEff: {kept} CapBnd: {kept} CapAmb: {none} "));
    let user = guest.exec(sh(caps)).ok().text();
    assert_eq!(user, format!("CapInh: {none} CapPrm: {none} CapEff: {none} CapBnd: {kept} CapAmb: {none} "));
    let status = guest.exec(sh("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status | tr '\\t\\n' ' '; grep 'core file' /proc/self/limits | tr -s ' '; umask; cat /proc/self/oom_score_adj"));
    assert_eq!(status.ok().text(), "NoNewPrivs: 0 Seccomp: 2 Max core file size 1 1 bytes \n0022\n500\n");
    let signals = guest.exec(sh("grep -E '^Sig(Blk|Ign):' /proc/self/status | tr '\\t\\n' ' '")).ok().text();
    assert_eq!(signals, format!("SigBlk: {none} SigIgn: {none} "));
}

#[test]
fn pid_1_is_out_of_reach() {
    let Some(mut guest) = machine() else { return };
    for exec in [
        sh("cat /proc/1/environ"),
        sh("readlink /proc/1/fd/3"),
        sh("cat /proc/1/mem"),
        sh("readlink /proc/1/exe"),
        sh("cat /proc/1/maps"),
        sh("kill -9 1; kill -TERM 1; kill -STOP 1; false"),
    ] {
        for exec in [exec.clone(), as_root(exec)] {
            let outcome = guest.exec(exec.clone());
            assert!(outcome.code() != Some(0) && outcome.out.is_empty(), "{exec:?} {outcome:?}");
        }
    }
    let attach = "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); print(l.ptrace(16,1,0,0), ctypes.get_errno())";
    assert_eq!(guest.exec(as_root(python(attach))).ok().text(), "-1 1\n");
    assert_eq!(guest.exec(argv(&["true"])).code(), Some(0));
}

#[test]
fn closed_calls_are_closed_for_root_too() {
    let Some(mut guest) = machine() else { return };
    for exec in
        [sh("unshare -U true"), sh("unshare -n true"), sh("mount -t tmpfs none /mnt"), sh("chroot / unshare -m true")]
    {
        let outcome = guest.exec(as_root(exec.clone()));
        assert_ne!(outcome.code(), Some(0), "{exec:?}");
    }
    let call = |number: i64, a: u64| {
        format!(
            "import ctypes; l=ctypes.CDLL(None,use_errno=True); r=l.syscall(ctypes.c_long({number}),ctypes.c_long({a}),0,0,0,0,0); print(r, ctypes.get_errno())"
        )
    };
    let cases = [
        (libc::SYS_clone3, 0, "-1 38\n"),
        (libc::SYS_clone, libc::CLONE_NEWUSER as u64 | 17, "-1 1\n"),
        (libc::SYS_bpf, 0, "-1 1\n"),
        (libc::SYS_io_uring_setup, 1, "-1 1\n"),
        (libc::SYS_userfaultfd, 0, "-1 1\n"),
        (libc::SYS_keyctl, 0, "-1 1\n"),
        (libc::SYS_perf_event_open, 0, "-1 1\n"),
        (libc::SYS_socket, libc::AF_VSOCK as u64, "-1 97\n"),
        (libc::SYS_memfd_secret, 0, "-1 38\n"),
        (9999, 0, "-1 38\n"),
    ];
    for (number, argument, want) in cases {
        assert_eq!(guest.exec(as_root(python(&call(number, argument)))).ok().text(), want, "{number}");
    }
    // x32: the process ends with SIGSYS.
    let x32 = guest.exec(python(&call(0x4000_0000 + 39, 0)));
    assert_eq!(x32.exited.unwrap().signal, Some(libc::SIGSYS));
}

#[test]
fn users_are_who_they_should_be() {
    let Some(mut guest) = machine() else { return };
    assert_eq!(guest.exec(sh("id -u; id -g; id -G; echo $HOME")).ok().text().lines().next(), Some("65534"));
    let outcome = guest.exec(Exec { user: Some("0".into()), ..sh("id -u; echo $HOME $USER $LOGNAME") });
    assert_eq!(outcome.ok().text(), "0\n/root root root\n");
    let mine =
        Exec { user: Some("1234:77".into()), env: vec![env("HOME", "/x")], ..sh("id -u; id -g; id -G; echo $HOME") };
    assert_eq!(guest.exec(mine).ok().text(), "1234\n77\n77\n/x\n");
    // The directory is entered as the user.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let cwd = Some(dir.path().as_os_str().as_encoded_bytes().to_vec());
    assert_eq!(guest.exec(Exec { cwd: cwd.clone(), ..argv(&["true"]) }).fail().0, FailKind::BadCwd);
    assert_eq!(guest.exec(as_root(Exec { cwd, ..argv(&["true"]) })).code(), Some(0));
}

/// sudo lives by that: no_new_privs is not set.
#[test]
fn setuid_programs_work() {
    let Some(mut guest) = machine() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let id = dir.path().join("id");
    std::fs::copy("/usr/bin/id", &id).unwrap();
    std::fs::set_permissions(&id, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    assert_eq!(guest.exec(argv(&[id.to_str().unwrap(), "-u"])).ok().text(), "0\n");
}

/// As in a real machine: all rights, but only over the namespace's own.
#[test]
fn a_user_namespace_is_enough() {
    if machine().is_none() {
        return;
    }
    let mut guest =
        Guest::boot_user_namespace(Boot { user: "1000:1000".into(), cwd: b"/".to_vec(), ..Boot::default() });
    let line = "id -u; grep -E '^(CapBnd|Seccomp):' /proc/self/status | tr '\\t\\n' ' '; cat /proc/self/oom_score_adj; cat /proc/1/environ || echo closed";
    let want = "CapBnd: 00000000800404fb Seccomp: 2 500\nclosed\n";
    assert_eq!(guest.exec(sh(line)).ok().text(), format!("1000\n{want}"));
    assert_eq!(guest.exec(as_root(sh(line))).ok().text(), format!("0\n{want}"));
    let outside = guest.exec(Exec { user: Some("70000".into()), ..argv(&["true"]) });
    assert_eq!(outside.fail().0, FailKind::UnknownUser);
    let attach = "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); print(l.ptrace(16,1,0,0), ctypes.get_errno())";
    assert_eq!(guest.exec(as_root(python(attach))).ok().text(), "-1 1\n");
}

#[test]
fn everyday_tools_work_under_the_filter() {
    let Some(mut guest) = machine() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let cwd = dir.path().as_os_str().as_encoded_bytes().to_vec();
    let lines = [
        "python3 -c 'import threading,subprocess,multiprocessing as m; t=threading.Thread(target=print); t.start(); t.join(); subprocess.run([\"true\"],check=True); m.Pool(2).map(abs,[1,2])'",
        "python3 -c 'import asyncio; asyncio.run(asyncio.create_subprocess_exec(\"true\"))'",
        "git init -q r && cd r && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && git log --oneline",
        "printf 'int main(){return 0;}' > a.c && gcc a.c -o a && ./a",
        "printf 'x:\\n\\ttrue\\n' > Makefile && make -j2",
        "seq 100000 | sort -R --parallel=2 | sort -n | tail -1",
        "find / -xdev -maxdepth 2 >/dev/null 2>&1; tar cf t.tar a.c && tar tf t.tar",
        "setarch -R true",
        "strace -f -o log true",
        "gdb -batch -ex run -ex quit --args true",
        "node -e 'setTimeout(()=>{},1)'",
        "sudo -n true",
    ];
    for line in lines {
        let program = line.split_whitespace().next().unwrap();
        if guest.exec(argv(&["sh", "-c", "command -v $0", program])).code() != Some(0) {
            eprintln!("skipped: no {program} here");
            continue;
        }
        let user = (program == "sudo").then(|| "root".to_owned());
        let env = ["HOME", "TMPDIR"].map(|name| env(name, dir.path().as_os_str().as_encoded_bytes())).to_vec();
        let outcome =
            guest.exec(Exec { shell: Some(line.to_owned()), cwd: Some(cwd.clone()), env, user, ..Exec::default() });
        assert_eq!(outcome.code(), Some(0), "{line}: {}", String::from_utf8_lossy(&outcome.err));
    }
}
