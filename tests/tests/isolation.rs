//! Each way out that the threat model names, tried from inside as the ordinary user and as root.

use anyhow::{Context, Result, ensure};
use std::{collections::BTreeSet, fs};
use trialrun_model::{Command, ExecSpec};
use trialrun_tests::{World, create, host, leftovers, py, python, root_sh, run, sh};

/// Tries everything and prints one JSON object: what was tried, and the errno (0 for success).
const ATTEMPTS: &str = r#"
import ctypes, errno, json, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
results = {}
def call(name, number, *args):
    ctypes.set_errno(0)
    r = libc.syscall(number, *args)
    results[name] = ctypes.get_errno() if r == -1 else 0
def attempt(name, work):
    try: work(); results[name] = 0
    except OSError as e: results[name] = e.errno
os.makedirs('/tmp/m', exist_ok=True)
call('mount tmpfs', 165, b'tmpfs', b'/tmp/m', b'tmpfs', 0, None)
call('mount proc', 165, b'proc', b'/tmp/m', b'proc', 0, None)
call('bind mount', 165, b'/proc', b'/tmp/m', None, 4096, None)
call('remount', 165, None, b'/proc/sys', None, 32 | 4096, None)
call('umount /proc', 166, b'/proc', 2)
call('fsopen', 430, b'tmpfs', 0)
call('open_tree clone', 428, -100, b'/', 1)
call('pivot_root', 155, b'/tmp', b'/tmp/m')
for name, flag in [('user', 0x10000000), ('mount', 0x20000), ('net', 0x40000000), ('pid', 0x20000000), ('cgroup', 0x2000000), ('uts', 0x4000000), ('ipc', 0x8000000)]:
    call('unshare ' + name, 272, flag)
    pid = libc.syscall(56, flag | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    results['clone new ' + name] = ctypes.get_errno() if pid == -1 else 0
for ns in ['mnt', 'net', 'user', 'pid']:
    try: fd = os.open('/proc/1/ns/' + ns, os.O_RDONLY)
    except OSError as e: results['setns ' + ns] = e.errno
    else: call('setns ' + ns, 308, fd, 0)
attempt('mknod null', lambda: os.mknod('/tmp/null', 0o20666, os.makedev(1, 3)))
attempt('mknod disk', lambda: os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0)))
attempt('mknod mem', lambda: os.mknod('/tmp/mem', 0o20666, os.makedev(1, 1)))
call('ptrace attach 1', 101, 16, 1, 0, 0)
call('ptrace seize 1', 101, 0x4206, 1, 0, 0)
buffer = ctypes.create_string_buffer(16)
class Iovec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
local = Iovec(ctypes.addressof(buffer), 16); remote = Iovec(0x400000, 16)
call('process_vm_readv 1', 310, 1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
call('pidfd_getfd 1', 438, libc.syscall(434, 1, 0), 0, 0)
def read(path):
    with open(path, 'rb') as f:
        if not f.read(16): raise OSError(1, 'covered: nothing to read')
def write(path, text):
    with open(path, 'w') as f: f.write(text)
for path in ['/proc/1/environ', '/proc/1/mem', '/proc/kcore', '/proc/kmsg', '/proc/sched_debug', '/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/loop0', '/dev/loop-control', '/dev/kvm', '/dev/fuse', '/dev/net/tun']:
    attempt('read ' + path, lambda: read(path))
def first_mapping():
    with open('/proc/1/maps') as f: start = int(f.readline().split('-')[0], 16)
    with open('/proc/1/mem', 'rb') as f: f.seek(start); f.read(16)
attempt('read /proc/1/maps and mem', first_mapping)
def through_fds():
    for fd in os.listdir('/proc/1/fd'):
        try: os.close(os.open('/proc/1/fd/' + fd, os.O_RDWR))
        except OSError: continue
        if os.readlink('/proc/1/fd/' + fd) not in ('/dev/null',): return
    raise OSError(1, 'nothing opens')
attempt('open what pid 1 has open', through_fds)
attempt('follow /proc/1/root', lambda: os.listdir('/proc/1/root'))
for path, text in [('/proc/sys/kernel/hostname', 'x'), ('/proc/sys/kernel/core_pattern', '|/tmp/x'), ('/proc/sys/net/ipv4/ip_forward', '1'), ('/proc/sys/vm/overcommit_memory', '1'), ('/proc/sysrq-trigger', 'c'), ('/proc/sys/fs/binfmt_misc/register', ':x:M::x::/x:'), ('/proc/1/oom_score_adj', '-1000'), ('/proc/self/oom_score_adj', '-1000')]:
    attempt('write ' + path, lambda: write(path, text))
for name, family, kind, proto in [('vsock', 40, 1, 0), ('packet', 17, 3, 0), ('raw', 2, 3, 1), ('raw6', 10, 3, 58), ('alg', 38, 5, 0), ('bluetooth', 31, 3, 0), ('xdp', 44, 3, 0), ('can', 29, 3, 1), ('tipc', 30, 1, 0), ('sctp', 2, 1, 132)]:
    attempt('socket ' + name, lambda: socket.socket(family, kind, proto).close())
for name, number, args in [('keyctl', 250, (0, -3, 0)), ('add_key', 248, (b'user', b'x', b'y', 1, -3)), ('bpf', 321, (0, None, 0)), ('perf_event_open', 298, (None, 0, -1, -1, 0)), ('io_uring_setup', 425, (8, buffer)), ('userfaultfd', 323, (0,)), ('init_module', 175, (buffer, 16, b'')), ('finit_module', 313, (0, b'', 0)), ('kexec_load', 246, (0, 0, None, 0)), ('reboot', 169, (0xfee1dead, 672274793, 0, None)), ('swapon', 167, (b'/tmp/x', 0)), ('open_by_handle_at', 304, (-100, buffer, 0)), ('quotactl', 179, (0, None, 0, None)), ('syslog', 103, (3, buffer, 16)), ('acct', 163, (b'/tmp/x',)), ('settimeofday', 164, (buffer, None)), ('iopl', 172, (3,)), ('sethostname', 170, (b'x', 1)), ('fanotify mount', 300, (0x10, 0))]:
    call(name, number, *args)
# These sockets can be made; what one would say through them is refused.
def netlink(proto, kind):
    s = socket.socket(16, 3, proto); s.settimeout(5)
    s.send(struct.pack('=IHHIIBBH', 20, kind, 0x305, 1, 0, 0, 0, 0))
    answer = s.recv(4096)
    code = struct.unpack_from('=i', answer, 16)[0]
    if code: raise OSError(-code, 'refused')
attempt('netfilter list', lambda: netlink(12, 0xa01))
attempt('audit status', lambda: netlink(9, 1000))
attempt('audit listen', lambda: socket.socket(16, 3, 9).bind((0, 1)))
call('clone3', 435, None, 0)
call('ioctl TIOCSTI', 16, 0, 0x5412, b'x')
attempt('setuid file of host range', lambda: os.chown('/tmp/m', 70000, 70000))
print(json.dumps(results))
"#;

/// What succeeds on purpose: harmless by itself, and asked for to be a machine of one's own.
fn harmless(name: &str, root: bool) -> bool {
    // Its root is the machine's own.
    matches!((name, root), ("follow /proc/1/root", true))
}

async fn attempts(
    sandbox: &trialrun_engine::Sandbox,
    user: Option<&str>,
    sudo: bool,
) -> Result<serde_json::Map<String, serde_json::Value>> {
    let words = if sudo { vec!["sudo", "-n", "python3", "-c", ATTEMPTS] } else { vec!["python3", "-c", ATTEMPTS] };
    let spec = ExecSpec { user: user.map(str::to_owned), ..ExecSpec::new(Command::argv(words)) };
    let ran = run(sandbox, spec).await?;
    ensure!(ran.ok(), "{ran:?}");
    let results: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&ran.out).with_context(|| ran.out.clone())?;
    ensure!(results.len() > 70, "only {} attempts", results.len());
    Ok(results)
}

fn check(results: &serde_json::Map<String, serde_json::Value>, root: bool) -> Result<()> {
    let open: Vec<&String> =
        results.iter().filter(|(name, errno)| **errno == 0 && !harmless(name, root)).map(|(name, _)| name).collect();
    ensure!(open.is_empty(), "these succeeded (root: {root}): {open:?}");
    ensure!(results["clone3"] == 38, "clone3: {}", results["clone3"]);
    Ok(())
}

#[test]
fn every_way_out_is_refused_to_the_user_and_to_root() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, python()).await?;
        check(&attempts(&sandbox, None, false).await?, false)?;
        check(&attempts(&sandbox, Some("root"), false).await?, true)?;
        check(&attempts(&sandbox, None, true).await?, true)?;
        ensure!(sh(&sandbox, "echo alive").await?.out == "alive\n");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn every_way_out_is_refused_in_the_hosts_own_system_too() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        check(&attempts(&sandbox, None, false).await?, false)?;
        check(&attempts(&sandbox, Some("root"), false).await?, true)?;
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn the_hosts_own_files_are_not_there() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let secret = world.scratch().join("secret-of-the-host");
    fs::write(&secret, "secret")?;
    // Something of the host's that everybody may read, below a folder that is bound in many products.
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for path in [secret.display().to_string(), world.data().display().to_string(), trialrun_tests::cache_dir().display().to_string()] {
            let ran = root_sh(&sandbox, &format!("ls -la {path} 2>&1; cat {path} 2>&1")).await?;
            ensure!(ran.code() != Some(0) && !ran.out.contains("secret\n"), "{path}: {ran:?}");
        }
        let ran = root_sh(&sandbox, "cat /etc/shadow | grep -v '^[a-z_-]*:[*!]' ; ls -A /root /home /opt /srv /mnt /media 2>/dev/null | grep -v : | grep .; ls -A /etc/ssl/private /etc/ssh /etc/sudoers.d 2>/dev/null | grep key; true").await?;
        ensure!(!ran.out.contains('$'), "{ran:?}");
        // Nothing of the host's homes: not one entry of the host's /root is inside.
        let host_entries: BTreeSet<String> = fs::read_dir("/root")?.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        let inside = root_sh(&sandbox, "ls -A /root /home /opt /srv 2>/dev/null").await?;
        let ordinary = [".bashrc", ".profile"];
        let leaked: Vec<&str> = inside.out.lines().filter(|l| host_entries.contains(*l) && !ordinary.contains(l)).collect();
        ensure!(leaked.is_empty(), "{leaked:?}");
        let write = root_sh(&sandbox, "touch /usr/bin/x /usr/lib/x /bin/x 2>&1; echo end").await?;
        ensure!(!fs::exists("/usr/bin/x")? && !fs::exists("/usr/lib/x")?, "{write:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn kernel_interfaces_show_only_the_machine() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let mounts = sh(&sandbox, "cat /proc/self/mounts /proc/self/mountinfo").await?.out;
        let kinds = sh(&sandbox, "cut -d' ' -f3 /proc/self/mounts | sort -u").await?.out;
        ensure!(!kinds.contains("cgroup") && !kinds.contains("debugfs") && !kinds.contains("nsfs"), "{mounts}");
        ensure!(!mounts.contains(&world.data().display().to_string()), "{mounts}");
        let sys = root_sh(&sandbox, "ls -A /sys /sys/devices /sys/devices/system /proc/scsi /proc/acpi /sys/fs/cgroup 2>/dev/null; ls /sys/fs/cgroup 2>/dev/null; true").await?;
        let names: BTreeSet<&str> = sys.out.lines().filter(|l| !l.is_empty() && !l.ends_with(':')).collect();
        ensure!(names == BTreeSet::from(["cpu", "devices", "fs", "node", "system"]), "{sys:?}");
        let processes = sh(&sandbox, "ls /proc | grep -c '^[0-9]*$'").await?;
        ensure!(processes.out.trim().parse::<u32>()? < 8, "{processes:?}");
        let net = root_sh(&sandbox, "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | cut -d: -f1").await?;
        ensure!(net.out.trim() == "lo", "{net:?}");
        let caps = root_sh(&sandbox, "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status").await?;
        ensure!(caps.out.contains("Seccomp:\t2"), "{caps:?}");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn two_machines_share_no_uid_and_do_not_see_each_other() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let (one, two) = (create(&engine, host()).await?, create(&engine, host()).await?);
        let mut bases = BTreeSet::new();
        for pid in leftovers::pids_inside(world.data()) {
            let map = fs::read_to_string(format!("/proc/{pid}/uid_map"))?;
            let words: Vec<u64> = map.split_whitespace().filter_map(|w| w.parse().ok()).collect();
            ensure!(words.first() == Some(&0) && words.get(1).is_some_and(|base| *base >= 0x1000_0000), "{map}");
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            ensure!(!status.lines().any(|l| l.starts_with("Uid:") && l.split_whitespace().any(|w| w == "0")), "pid {pid} runs as the host's root");
            bases.insert(words[1]);
        }
        ensure!(bases.len() == 2, "{bases:?}");
        let (a, b): (Vec<u64>, Vec<u64>) = (bases.iter().copied().take(1).collect(), bases.iter().copied().skip(1).collect());
        ensure!(b[0] - a[0] >= 65_536);
        ensure!(sh(&one, "echo mine > /tmp/f; echo mine > /dev/shm/f; python3 -c 'import socket; s=socket.socket(socket.AF_UNIX); s.bind(chr(0)+\"x\")'").await?.ok());
        let other = sh(&two, "cat /tmp/f /dev/shm/f").await?;
        ensure!(other.code() == Some(1) && other.out.is_empty(), "{other:?}");
        let abstracts = py(&two, None, "print(open('/proc/net/unix').read())").await?;
        ensure!(!abstracts.out.contains("@x"), "{abstracts:?}");
        one.delete().await?;
        Ok(two.delete().await?)
    })
}
