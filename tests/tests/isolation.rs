//! What a machine shows of the host and of its neighbours.

use anyhow::{Result, ensure};
use std::{collections::BTreeSet, fs};
use trialrun_tests::{World, create, host, leftovers, py, root_sh, sh};

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
