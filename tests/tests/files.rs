//! Files in and out. The kinds of field-reports.md, section files.

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use std::{
    ffi::OsString,
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    os::{
        fd::AsFd,
        unix::{
            ffi::{OsStrExt, OsStringExt},
            fs::{MetadataExt, PermissionsExt, symlink},
            net::UnixStream,
        },
    },
    path::Path,
    time::Duration,
};
use trialrun_engine::{DownloadLimits, Sandbox, UploadRules};
use trialrun_keeper::wire::{Call, FileOp};
use trialrun_model::{ByteSize, Limits, SandboxSpec};
use trialrun_tests::{World, create, host, py, root_sh, sh};

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

async fn fetch(sandbox: &Sandbox, from: &str, to: &Path) -> Result<trialrun_engine::Moved> {
    Ok(sandbox.download(from, to, DownloadLimits::default()).await?)
}

/// F03: links that lead out of the folder stay behind, named, and nothing is written through one.
#[test]
fn a_download_writes_nothing_outside_its_folder_whatever_is_inside() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let home = world.scratch().join("home");
    let victim = world.scratch().join("victim");
    fs::create_dir_all(&victim)?;
    fs::write(victim.join("keep"), "untouched")?;
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let make = format!(
            "mkdir -p d && cd d && ln -s {victim} out && ln -s / root && ln -s ../../../../../../etc/passwd up && echo x > plain && \
             mkdir -p sub && ln -s {victim}/keep sub/file && ln -s /proc/self/root/etc proc && ln plain hard",
            victim = victim.display()
        );
        ensure!(sh(&sandbox, &make).await?.ok());
        // What lies on the host in the way is no way out either.
        fs::create_dir_all(&home)?;
        symlink(&victim, home.join("sub"))?;
        let moved = fetch(&sandbox, "/workspace/d", &home).await;
        ensure!(fs::read_to_string(victim.join("keep"))? == "untouched");
        ensure!(fs::read_dir(&victim)?.count() == 1, "something was written through a link");
        ensure!(moved.is_err(), "a folder that is a link on the host was written through: {moved:?}");
        // A program called tar inside is of no consequence: the agent packs by itself.
        ensure!(root_sh(&sandbox, "printf '#!/bin/sh\\necho hostile\\n' > /workspace/tar && chmod +x /workspace/tar").await?.ok());
        let again = world.scratch().join("again");
        let moved = fetch(&sandbox, "/workspace/d", &again).await?;
        ensure!(fs::read_to_string(again.join("plain"))? == "x\n" && fs::read_to_string(again.join("hard"))? == "x\n");
        for name in ["out", "root", "up", "sub/file", "proc"] {
            ensure!(fs::symlink_metadata(again.join(name)).is_err(), "{name} came home");
            ensure!(moved.skipped.iter().any(|s| s.starts_with(&format!("{name}: "))), "{name}: {moved:?}");
        }
        Ok(sandbox.delete().await?)
    })
}

/// F04.
#[test]
fn harmless_links_make_the_round_trip_as_links() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let tree = world.scratch().join("tree");
    fs::create_dir_all(tree.join("node_modules/.bin"))?;
    fs::create_dir_all(tree.join("node_modules/tool"))?;
    fs::write(tree.join("node_modules/tool/cli.js"), "x")?;
    let links = [
        ("absolute", "/workspace/t/b"),
        ("node_modules/.bin/tool", "../tool/cli.js"),
        ("dangling", "nowhere"),
        ("loop1", "loop2"),
        ("loop2", "loop1"),
        ("self", "self"),
        ("dot", "."),
    ];
    for (name, target) in links {
        symlink(target, tree.join(name))?;
    }
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let moved = sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await?;
        ensure!(moved.skipped_total == 0, "{moved:?}");
        let back = world.scratch().join("back");
        let moved = fetch(&sandbox, "/workspace/t", &back).await?;
        ensure!(moved.skipped_total == 0, "{moved:?}");
        for (name, target) in links {
            ensure!(fs::read_link(back.join(name))?.to_string_lossy() == target, "{name}");
        }
        ensure!(fs::read_to_string(back.join("node_modules/.bin/tool"))? == "x");
        Ok(sandbox.delete().await?)
    })
}

/// F06.
#[test]
fn what_is_uploaded_belongs_to_the_machines_user_with_the_mode_asked_for() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let me = sh(&sandbox, "id -u; id -g").await?.out.replace('\n', " ");
        sandbox.write_file("/workspace/a/b/c.txt", b"x", Some(0o640)).await?;
        let stat = sh(
            &sandbox,
            "stat -c '%u %g' a a/b a/b/c.txt | sort -u; stat -c %a a/b/c.txt; touch a/new a/b/new && echo writable",
        )
        .await?;
        ensure!(stat.out == format!("{}\n640\nwritable\n", me.trim()), "{stat:?}");
        for mode in [0o755, 0o4755, 0o2755, 0o600, 0o777] {
            sandbox.write_file("/workspace/m", b"x", Some(mode)).await?;
            let stat = sh(&sandbox, "stat -c %a m").await?;
            ensure!(stat.out.trim() == format!("{mode:o}"), "{mode:o}: {stat:?}");
        }
        // A folder: modes as they are on the host, the owner the machine's user.
        let tree = world.scratch().join("tree");
        fs::create_dir_all(tree.join("d"))?;
        fs::write(tree.join("d/script"), "#!/bin/sh\necho ran\n")?;
        fs::set_permissions(tree.join("d/script"), fs::Permissions::from_mode(0o750))?;
        fs::write(tree.join("d/private"), "x")?;
        fs::set_permissions(tree.join("d/private"), fs::Permissions::from_mode(0o600))?;
        sandbox.upload(&tree, "/workspace/tree", UploadRules::default()).await?;
        let ran =
            sh(&sandbox, "tree/d/script && stat -c '%a %u' tree/d/private && touch tree/x tree/d/x && echo writable")
                .await?;
        let uid = me.split(' ').next().unwrap_or_default();
        ensure!(ran.out == format!("ran\n600 {uid}\nwritable\n"), "{ran:?}");
        Ok(sandbox.delete().await?)
    })
}

/// F07.
#[test]
fn files_of_all_sizes_arrive_whole_both_ways() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        for size in [0_usize, 1, 511, 512, 513, 18_431, 18_432, 65_535, 65_536, 65_537, (1 << 20) + 1, 20 << 20] {
            let bytes: Vec<u8> = (0..size).map(|i| (i * 31 % 251) as u8).collect();
            sandbox.write_file("/workspace/f", &bytes, None).await?;
            let inside = sh(&sandbox, "sha256sum f | cut -d' ' -f1; stat -c %s f").await?;
            ensure!(inside.out == format!("{}\n{size}\n", sha(&bytes)), "{size}: {inside:?}");
            ensure!(sandbox.read_file("/workspace/f", size).await? == bytes, "{size}");
            let (up, down) = (world.scratch().join("up"), world.scratch().join("down"));
            fs::write(&up, &bytes)?;
            let moved = sandbox.upload(&up, "/workspace/g", UploadRules::default()).await?;
            ensure!(moved.bytes == size as u64, "{moved:?}");
            fetch(&sandbox, "/workspace/g", &down).await?;
            ensure!(fs::read(&down)? == bytes, "{size}");
        }
        let short = sandbox.read_file("/workspace/f", 100).await;
        ensure!(short.as_ref().is_err_and(|e| e.to_string().contains("100")), "{short:?}");
        let none = sandbox.read_file("/workspace/none", 100).await;
        ensure!(none.as_ref().is_err_and(|e| e.to_string().contains("/workspace/none")), "{none:?}");
        Ok(sandbox.delete().await?)
    })
}

/// F07, the slow end.
#[test]
#[ignore = "slow: 2 GiB both ways"]
fn more_than_two_gibibytes_in_one_file_arrive_whole() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let (up, down) = (world.scratch().join("up"), world.scratch().join("down"));
    let size = (2_u64 << 30) + 1;
    let mut file = File::create(&up)?;
    let block: Vec<u8> = (0..1_usize << 20).map(|i| (i * 31 % 251) as u8).collect();
    let mut left = size;
    while left > 0 {
        let n = left.min(block.len() as u64) as usize;
        file.write_all(&block[..n])?;
        left -= n as u64;
    }
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        sandbox.upload(&up, "/workspace/f", UploadRules::default()).await?;
        ensure!(sh(&sandbox, "stat -c %s f").await?.out.trim() == size.to_string());
        fetch(&sandbox, "/workspace/f", &down).await?;
        let same = std::process::Command::new("cmp").arg(&up).arg(&down).status()?;
        ensure!(same.success());
        let tree = world.scratch().join("tree");
        fs::create_dir(&tree)?;
        fs::rename(&up, tree.join("f"))?;
        sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await?;
        ensure!(sh(&sandbox, "cmp f t/f").await?.ok());
        Ok(sandbox.delete().await?)
    })
}

/// F07, sparse: 10 GiB with 1 MiB of data.
#[test]
#[ignore = "slow: 10 GiB, sparse"]
fn a_sparse_file_takes_its_data_only() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let tree = world.scratch().join("tree");
    fs::create_dir(&tree)?;
    let mut file = File::create(tree.join("f"))?;
    file.set_len(10 << 30)?;
    file.seek(SeekFrom::Start(5 << 30))?;
    file.write_all(&vec![7; 1 << 20])?;
    world.run(async |engine| {
        let sandbox =
            create(&engine, SandboxSpec { limits: Limits { disk: ByteSize::gib(1), ..Limits::default() }, ..host() })
                .await?;
        sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await?;
        let stat = sh(&sandbox, "stat -c %s t/f; du -m t/f | cut -f1").await?;
        let lines: Vec<u64> = stat.out.lines().filter_map(|l| l.parse().ok()).collect();
        ensure!(lines.first() == Some(&(10 << 30)) && lines.get(1).is_some_and(|mib| *mib <= 8), "{stat:?}");
        let back = world.scratch().join("back");
        fetch(&sandbox, "/workspace/t", &back).await?;
        let meta = fs::metadata(back.join("f"))?;
        ensure!(meta.len() == 10 << 30 && meta.blocks() * 512 < 16 << 20, "{} blocks", meta.blocks());
        let mut got = vec![0; 1 << 20];
        let mut file = File::open(back.join("f"))?;
        file.seek(SeekFrom::Start(5 << 30))?;
        file.read_exact(&mut got)?;
        ensure!(got.iter().all(|b| *b == 7));
        Ok(sandbox.delete().await?)
    })
}

/// F08.
#[test]
fn a_replaced_file_is_never_torn_and_a_cut_stream_leaves_the_old_one() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        sandbox.write_file("/workspace/f.json", b"[0]", None).await?;
        let reader = r#"
import json, os
n = 0
while not os.path.exists('/workspace/stop'):
    json.load(open('/workspace/f.json')); n += 1
print(n)
"#;
        let writer = async {
            for i in 0..300_usize {
                let text = serde_json::to_vec(&vec![i; 2000])?;
                sandbox.write_file("/workspace/f.json", &text, None).await?;
            }
            sandbox.write_file("/workspace/stop", b"", None).await?;
            anyhow::Ok(())
        };
        let (read, written) = tokio::join!(py(&sandbox, None, reader), writer);
        written?;
        let read = read?;
        ensure!(read.ok() && read.out.trim().parse::<u32>()? > 10, "{read:?}");
        // The stream ends before the size that was announced.
        let (mut ours, theirs) = UnixStream::pair()?;
        let op = FileOp::Write { path: b"/workspace/f.json".to_vec(), mode: None, owner: None, size: Some(1 << 20) };
        ours.write_all(b"half a file")?;
        drop(ours);
        let cut = sandbox.client().call(&Call::File(op), &[theirs.as_fd()]).await;
        drop(theirs);
        ensure!(cut.is_err(), "{cut:?}");
        let after = sh(&sandbox, "python3 -c 'import json; print(json.load(open(\"f.json\"))[0])'; ls -A").await?;
        ensure!(after.out == "299\nf.json\nstop\n", "{after:?}");
        // A running program can be replaced.
        let ran = sh(&sandbox, "cp /bin/sleep prog && (./prog 100 & echo $!)").await?;
        ensure!(ran.ok(), "{ran:?}");
        let mut running = sandbox
            .exec(trialrun_model::ExecSpec::new(trialrun_model::Command::Shell("exec ./prog 100".to_owned())))
            .await?;
        trialrun_tests::wait_for("the program runs", Duration::from_secs(10), || async {
            let ran = sh(&sandbox, "pgrep -x prog").await.map_err(|e| e.to_string())?;
            if ran.ok() { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await?;
        sandbox.write_file("/workspace/prog", b"#!/bin/sh\necho replaced\n", Some(0o755)).await?;
        ensure!(sh(&sandbox, "./prog").await?.out == "replaced\n");
        sandbox.kill(running.exec).await?;
        let _ = running.next().await;
        Ok(sandbox.delete().await?)
    })
}

/// F09, and everything else in a folder that can't or must not travel.
#[test]
fn an_upload_follows_no_link_and_names_what_it_leaves_out() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let secret = world.scratch().join("secret");
    fs::write(&secret, "the host's secret")?;
    let tree = world.scratch().join("tree");
    fs::create_dir_all(tree.join("sub"))?;
    fs::write(tree.join("ok"), "ok")?;
    symlink(&secret, tree.join("link"))?;
    symlink(world.scratch(), tree.join("dirlink"))?;
    symlink("a", tree.join("b"))?;
    symlink("b", tree.join("a"))?;
    symlink("..", tree.join("sub/up"))?;
    let made = std::process::Command::new("mkfifo").arg(tree.join("fifo")).status()?;
    assert!(made.success());
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket"))?;
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let moved = sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await?;
        let inside = sh(&sandbox, "cat t/ok; cat t/link t/dirlink/secret 2>&1; ls -A t; readlink t/link").await?;
        ensure!(inside.out.starts_with("ok") && !inside.out.contains("the host's secret"), "{inside:?}");
        ensure!(inside.out.contains(&format!("{}\n", secret.display())), "{inside:?}");
        for name in ["fifo", "socket"] {
            ensure!(moved.skipped.iter().any(|s| s.contains(name)), "{name}: {moved:?}");
        }
        ensure!(moved.skipped_total == 2, "{moved:?}");
        let none = sandbox.upload(&tree.join("nope"), "/workspace/x", UploadRules::default()).await;
        ensure!(none.as_ref().is_err_and(|e| e.to_string().contains("nope")), "{none:?}");
        Ok(sandbox.delete().await?)
    })
}

/// F11.
#[test]
fn odd_names_travel_byte_for_byte() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let tree = world.scratch().join("tree");
    fs::create_dir_all(&tree)?;
    let mut names: Vec<Vec<u8>> = [
        &b"caf\xc3\xa9"[..],
        b"cafe\xcc\x81",
        b"\xff\xfe",
        b"new\nline",
        b"-rf",
        b".wh.x",
        b"con",
        b"dot.",
        b"space ",
        b" lead",
        b"tab\t",
        b"quote'\"`$x",
        b"back\\slash",
        b"\x01\x7f",
        b"*?[a]",
        b"a:b",
        b"...",
        b"~",
    ]
    .iter()
    .map(|n| n.to_vec())
    .collect();
    names.push(vec![b'n'; 255]);
    for name in &names {
        fs::write(tree.join(OsString::from_vec(name.clone())), name)?;
    }
    // A path longer than a tar header's fields.
    let deep = tree.join("d".repeat(120)).join("e".repeat(120)).join("f".repeat(120));
    fs::create_dir_all(&deep)?;
    fs::write(deep.join("leaf"), "deep")?;
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let moved = sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await?;
        ensure!(moved.skipped_total == 0, "{moved:?}");
        let listed = sandbox.file(FileOp::List(b"/workspace/t".to_vec())).await?;
        for name in &names {
            ensure!(listed.iter().any(|f| f.name == *name), "{}", String::from_utf8_lossy(name));
            let (ours, theirs) = UnixStream::pair()?;
            let read = tokio::task::spawn_blocking(move || {
                let mut bytes = Vec::new();
                let mut ours = ours;
                ours.read_to_end(&mut bytes).map(|_| bytes)
            });
            let op = FileOp::Read { path: [b"/workspace/t/", name.as_slice()].concat(), offset: 0, limit: 0 };
            sandbox.client().call(&Call::File(op), &[theirs.as_fd()]).await?;
            drop(theirs);
            ensure!(read.await?? == *name);
        }
        let back = world.scratch().join("back");
        let moved = fetch(&sandbox, "/workspace/t", &back).await?;
        ensure!(moved.skipped_total == 0, "{moved:?}");
        let mut home: Vec<Vec<u8>> = fs::read_dir(&back)?
            .flatten()
            .map(|e| e.file_name().as_bytes().to_vec())
            .filter(|n| !n.starts_with(b"ddd"))
            .collect();
        home.sort();
        let mut want = names.clone();
        want.sort();
        ensure!(home == want);
        let leaf = back.join("d".repeat(120)).join("e".repeat(120)).join("f".repeat(120)).join("leaf");
        ensure!(fs::read_to_string(leaf)? == "deep");
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn files_can_be_listed_moved_and_removed() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, host()).await?;
        let b = |text: &str| text.as_bytes().to_vec();
        sandbox.file(FileOp::Mkdir { path: b("/workspace/d/e"), mode: Some(0o700), owner: None }).await?;
        sandbox.write_file("/workspace/d/e/f", b"12345", None).await?;
        let stat = sandbox.file(FileOp::Stat(b("/workspace/d/e/f"))).await?;
        ensure!(stat.first().is_some_and(|s| s.size == 5 && s.mode & 0o170_000 == 0o100_000), "{stat:?}");
        sandbox.file(FileOp::Rename(b("/workspace/d/e/f"), b("/workspace/d/g"))).await?;
        let listed = sandbox.file(FileOp::List(b("/workspace/d"))).await?;
        let mut names: Vec<_> = listed.iter().map(|f| String::from_utf8_lossy(&f.name).into_owned()).collect();
        names.sort();
        ensure!(names == ["e", "g"], "{names:?}");
        ensure!(sandbox.file(FileOp::List(b("/workspace/d/e"))).await?.is_empty());
        let remove = |path: &str, recursive, missing_ok| FileOp::Remove {
            path: path.as_bytes().to_vec(),
            recursive,
            missing_ok,
        };
        ensure!(sandbox.file(remove("/workspace/d", false, false)).await.is_err());
        sandbox.file(remove("/workspace/d", true, false)).await?;
        ensure!(sandbox.file(remove("/workspace/d", true, false)).await.is_err());
        sandbox.file(remove("/workspace/d", true, true)).await?;
        // Many entries come whole.
        ensure!(sh(&sandbox, "mkdir many && cd many && seq 3000 | xargs touch").await?.ok());
        ensure!(sandbox.file(FileOp::List(b("/workspace/many"))).await?.len() == 3000);
        let found = sandbox.file(FileOp::Glob { dir: b("/workspace/many"), patterns: vec!["29*".to_owned()] }).await?;
        ensure!(found.len() == 111, "{}", found.len());
        Ok(sandbox.delete().await?)
    })
}

#[test]
fn a_full_disk_during_an_upload_is_named_and_the_machine_lives_on() -> Result<()> {
    if !trialrun_tests::disks_are_limited() {
        return Ok(());
    }
    let Some(world) = World::new() else { return Ok(()) };
    world.run(async |engine| {
        let sandbox = create(&engine, SandboxSpec { limits: Limits { disk: ByteSize::mib(16), ..Limits::default() }, ..host() }).await?;
        let tree = world.scratch().join("tree");
        fs::create_dir_all(&tree)?;
        let mut random = vec![0; 40 << 20];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        fs::write(tree.join("big"), &random)?;
        let full = sandbox.upload(&tree, "/workspace/t", UploadRules::default()).await;
        let error = full.err().context("it fits?")?;
        let kind = matches!(&error, trialrun_engine::TransferError::Guest(e) if e.kind == trialrun_engine::CallErrorKind::DiskFull);
        ensure!(kind, "{error:?}");
        let full = sandbox.write_file("/workspace/f", &random, None).await;
        ensure!(matches!(&full, Err(trialrun_engine::TransferError::Guest(e)) if e.kind == trialrun_engine::CallErrorKind::DiskFull), "{full:?}");
        ensure!(sh(&sandbox, "rm -rf t; ls -A").await?.out.is_empty());
        Ok(sandbox.delete().await?)
    })
}
