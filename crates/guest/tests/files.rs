//! Files, driven over the protocol. Every test has its own directory and leaves nothing.

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod guest;

use guest::{Guest, argv};
use std::{
    ffi::OsStr,
    fs,
    io::{Read as _, Write as _},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, PermissionsExt, symlink},
        },
    },
    path::Path,
};
use tempfile::TempDir;
use trialrun_guest_proto::{
    Boot, FailKind, Glob, Kind, Mkdir, Op, Path as GuestPath, Read, Remove, Rename, TarDown, TarUp, Tunnel, Write,
};

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory and a guest whose relative paths start there.
fn start() -> (TempDir, Guest) {
    let dir = tempfile::tempdir().unwrap();
    let user = if is_root() { "1001:1002".to_owned() } else { String::new() };
    let guest = Guest::boot(Boot { cwd: bytes(dir.path()), user, ..Boot::default() });
    (dir, guest)
}

fn write(path: impl AsRef<[u8]>, size: usize) -> Write {
    Write { path: path.as_ref().to_vec(), size: Some(size as u64), ..Write::default() }
}

fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn names(dir: &Path) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().as_bytes().to_vec()).collect();
    names.sort();
    names
}

/// Field report F06.
#[test]
fn what_is_written_has_the_owner_and_mode_that_were_asked_for() {
    let (dir, mut guest) = start();
    let file = dir.path().join("a/b/c.txt");
    guest.upload(Op::Write(Write { mode: Some(0o640), ..write("a/b/c.txt", 3) }), b"abc").ok();
    let meta = fs::metadata(&file).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o640);
    guest.upload(Op::Write(Write { mode: Some(0o6755), ..write("a/b/s", 0) }), b"").ok();
    assert_eq!(fs::metadata(dir.path().join("a/b/s")).unwrap().mode() & 0o7777, 0o6755);
    if is_root() {
        for path in ["a", "a/b", "a/b/c.txt"] {
            let meta = fs::metadata(dir.path().join(path)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (1001, 1002), "{path}");
        }
        guest.upload(Op::Write(Write { owner: Some("7:8".into()), ..write("o", 0) }), b"").ok();
        let meta = fs::metadata(dir.path().join("o")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (7, 8));
    }
    // An existing file keeps its mode when none is asked for.
    guest.upload(Op::Write(write("a/b/c.txt", 1)), b"x").ok();
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(fs::metadata(dir.path().join("a")).unwrap().mode() & 0o7777, 0o755, "whatever the umask");
}

/// Field report F07, with frames and with a passed descriptor.
#[test]
fn every_size_arrives_whole() {
    let (dir, mut guest) = start();
    for size in [0, 1, 18_431, 18_432, 65_535, 65_536, (1 << 20) + 1] {
        let data = pattern(size);
        let done = guest.upload(Op::Write(write("f", size)), &data).ok().done.unwrap();
        assert_eq!(done.bytes, size as u64);
        assert!(fs::read(dir.path().join("f")).unwrap() == data, "{size}");
        assert!(guest.call(Op::Read(Read { path: b"f".to_vec(), ..Read::default() })).ok().out == data, "{size}");

        let (reader, mut writer) = std::io::pipe().unwrap();
        let stream = guest.request(Op::Write(write("g", size)), &[reader.as_fd()]);
        drop(reader);
        writer.write_all(&data).unwrap();
        drop(writer);
        guest.wait(stream).ok();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let stream = guest.request(Op::Read(Read { path: b"g".to_vec(), ..Read::default() }), &[writer.as_fd()]);
        drop(writer);
        let mut back = Vec::new();
        reader.read_to_end(&mut back).unwrap();
        assert!(back == data, "{size}");
        guest.wait(stream).ok();
    }
    let part = guest.call(Op::Read(Read { path: b"f".to_vec(), offset: 5, limit: 9 })).ok();
    assert_eq!(part.out, pattern(100)[5..14]);
    assert_eq!(names(dir.path()), [b"f", b"g"]);
}

#[test]
fn zeros_take_no_room() {
    let (dir, mut guest) = start();
    let mut data = vec![0; 8 << 20];
    data[4 << 20] = 1;
    guest.upload(Op::Write(write("f", data.len())), &data).ok();
    assert!(fs::read(dir.path().join("f")).unwrap() == data);
    assert!(fs::metadata(dir.path().join("f")).unwrap().blocks() * 512 < 1 << 20);
}

/// Field report F08.
#[test]
fn a_cut_stream_leaves_the_old_content_and_nothing_else() {
    let (dir, mut guest) = start();
    guest.upload(Op::Write(write("f", 3)), b"old").ok();
    let short = guest.upload(Op::Write(write("f", 100)), b"new");
    assert_eq!(short.fail().0, FailKind::BadStream);
    let long = guest.upload(Op::Write(write("f", 2)), b"new");
    assert_eq!(long.fail().0, FailKind::BadStream);
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"old");
    assert_eq!(names(dir.path()), [b"f"]);

    let stream = guest.request(Op::Write(write("f", 1 << 20)), &[]);
    guest.data(stream, &[1; 200_000]);
    guest.cut();
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"old");
    assert_eq!(names(dir.path()), [b"f"]);
}

#[test]
fn readers_never_see_half_a_file() {
    let (dir, mut guest) = start();
    let file = dir.path().join("f");
    fs::write(&file, [0; 5000]).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let seen = fs::read(&file).unwrap();
                assert!(seen.len() == 5000 && seen.iter().all(|&b| b == seen[0]), "torn");
            }
        });
        for i in 0..100 {
            guest.upload(Op::Write(write("f", 5000)), &[i; 5000]).ok();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_running_program_can_be_replaced_and_a_link_is_written_through() {
    let (dir, mut guest) = start();
    let program = dir.path().join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let stream = guest
        .request(Op::Exec(trialrun_guest_proto::Exec { user: Some("0".into()), ..argv(&["./sleep", "100"]) }), &[]);
    guest.event(stream);
    guest.upload(Op::Write(write("sleep", 3)), b"new").ok();
    assert_eq!(fs::read(&program).unwrap(), b"new");

    fs::create_dir(dir.path().join("d")).unwrap();
    symlink("d/real", dir.path().join("link")).unwrap();
    guest.upload(Op::Write(write("link", 1)), b"x").ok();
    assert_eq!(fs::read(dir.path().join("d/real")).unwrap(), b"x");
    assert!(fs::symlink_metadata(dir.path().join("link")).unwrap().is_symlink());
    let onto_dir = guest.upload(Op::Write(write("d", 1)), b"x");
    assert_eq!(onto_dir.fail().0, FailKind::WrongType);
    symlink("loop", dir.path().join("loop")).unwrap();
    assert!(guest.upload(Op::Write(write("loop", 1)), b"x").failed.is_some());
}

/// Field report F11.
#[test]
fn odd_names_come_back_exactly() {
    let (dir, mut guest) = start();
    let long = [b'n'; 255];
    let odd: [&[u8]; 12] = [
        b"caf\xc3\xa9",
        b"cafe\xcc\x81",
        b"\xff\xfe",
        b"new\nline",
        b"-rf",
        &long,
        b".wh.x",
        b"con",
        b"dot.",
        b"space ",
        b"*",
        b".hidden",
    ];
    for name in odd {
        guest.upload(Op::Write(write(name, name.len())), name).ok();
    }
    let listed = guest.call(Op::List(GuestPath::default())).ok();
    let mut want: Vec<&[u8]> = odd.to_vec();
    want.sort_unstable();
    assert_eq!(listed.stats.iter().map(|e| &e.name[..]).collect::<Vec<_>>(), want);
    for name in odd {
        assert_eq!(guest.call(Op::Read(Read { path: name.to_vec(), ..Read::default() })).ok().out, name);
        assert_eq!(guest.call(Op::Stat(GuestPath { path: name.to_vec() })).ok().stats[0].name, name);
    }
    assert_eq!(names(dir.path()).len(), odd.len());
}

#[test]
fn a_large_directory_is_listed_in_order() {
    let (dir, mut guest) = start();
    for i in 0..1500 {
        fs::write(dir.path().join(format!("{i:05}")), "").unwrap();
    }
    let listed = guest.call(Op::List(GuestPath { path: bytes(dir.path()) })).ok();
    assert_eq!(listed.stats.len(), 1500);
    assert!(listed.stats.windows(2).all(|pair| pair[0].name < pair[1].name));
}

#[test]
fn errors_have_their_kind() {
    let (dir, mut guest) = start();
    fs::write(dir.path().join("f"), "x").unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.path().join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let path = |p: &str| GuestPath { path: p.into() };
    let read = |p: &str| Op::Read(Read { path: p.into(), ..Read::default() });
    let remove = |p: &str, recursive, missing_ok| Op::Remove(Remove { path: p.into(), recursive, missing_ok });
    let cases = [
        (Op::Stat(path("nope")), FailKind::NotFound),
        (Op::Stat(path("f/x")), FailKind::WrongType),
        (Op::List(path("f")), FailKind::WrongType),
        (Op::List(path("nope")), FailKind::NotFound),
        (read("d"), FailKind::WrongType),
        (read("fifo"), FailKind::WrongType),
        (read("nope"), FailKind::NotFound),
        (read("a\0b"), FailKind::BadRequest),
        (remove("nope", true, false), FailKind::NotFound),
        (remove("/", true, false), FailKind::Denied),
        (Op::Rename(Rename { from: b"nope".to_vec(), to: b"x".to_vec() }), FailKind::NotFound),
        (Op::Mkdir(Mkdir { path: b"f/d".to_vec(), ..Mkdir::default() }), FailKind::WrongType),
        (
            Op::Mkdir(Mkdir { path: b"x".to_vec(), owner: Some("nobody42".into()), ..Mkdir::default() }),
            FailKind::UnknownUser,
        ),
        (Op::TarDown(TarDown { path: b"nope".to_vec(), ..TarDown::default() }), FailKind::NotFound),
        (Op::TarDown(TarDown { path: b"fifo".to_vec(), ..TarDown::default() }), FailKind::WrongType),
        (Op::Tunnel(Tunnel { port: 70_000 }), FailKind::BadRequest),
        (Op::Tunnel(Tunnel { port: 1 }), FailKind::NotFound),
    ];
    for (op, kind) in cases {
        let outcome = guest.call(op.clone());
        assert_eq!(outcome.fail().0, kind, "{op:?}: {}", outcome.fail().1);
    }
    guest.call(remove("nope", true, true)).ok();
    guest.call(Op::Mkdir(Mkdir { path: b"x/y/z".to_vec(), mode: Some(0o2770), owner: None })).ok();
    assert_eq!(fs::metadata(dir.path().join("x/y/z")).unwrap().mode() & 0o7777, 0o2770);
    guest.call(Op::Mkdir(Mkdir { path: b"x/y/z".to_vec(), ..Mkdir::default() })).ok();
    assert!(guest.call(remove("x", false, false)).failed.is_some(), "not empty");
    guest.call(remove("x", true, false)).ok();
    guest.call(Op::Rename(Rename { from: b"f".to_vec(), to: b"g".to_vec() })).ok();
    assert_eq!(names(dir.path()), [&b"d"[..], b"fifo", b"g"]);
}

#[test]
fn globs_find_paths() {
    let (dir, mut guest) = start();
    for path in ["a/b/c.py", "a/d.py", "e.py", "e.txt", "a/b/.h.py"] {
        fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
        fs::write(dir.path().join(path), "").unwrap();
    }
    symlink(".", dir.path().join("a/self")).unwrap();
    let mut glob = |patterns: &[&str]| -> Vec<String> {
        let patterns = patterns.iter().map(|&p| p.to_owned()).collect();
        let outcome = guest.call(Op::Glob(Glob { dir: Vec::new(), patterns })).ok();
        outcome.stats.into_iter().map(|s| String::from_utf8(s.name).unwrap()).collect()
    };
    assert_eq!(glob(&["*.py"]), ["e.py"]);
    assert_eq!(glob(&["**/*.py"]), ["a/b/.h.py", "a/b/c.py", "a/d.py", "e.py"]);
    assert_eq!(glob(&["a/**"]), ["a/b", "a/b/.h.py", "a/b/c.py", "a/d.py", "a/self"]);
    assert_eq!(glob(&["e.*", "*.txt"]), ["e.py", "e.txt"]);
    assert_eq!(glob(&["a/?.py", "nope/*"]), ["a/d.py"]);
}

#[test]
fn a_tunnel_reaches_a_local_server() {
    let (_dir, mut guest) = start();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = u32::from(listener.local_addr().unwrap().port());
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut peer, _) = listener.accept().unwrap();
            let mut seen = Vec::new();
            peer.read_to_end(&mut seen).unwrap();
            seen.reverse();
            peer.write_all(&seen).unwrap();
        }
    });
    let outcome = guest.upload(Op::Tunnel(Tunnel { port }), b"abc").ok();
    assert_eq!((&outcome.out[..], outcome.done.unwrap().bytes), (&b"cba"[..], 6));

    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let stream = guest.request(Op::Tunnel(Tunnel { port }), &[theirs.as_fd()]);
    drop(theirs);
    ours.write_all(b"xyz").unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = String::new();
    ours.read_to_string(&mut back).unwrap();
    assert_eq!(back, "zyx");
    guest.wait(stream).ok();
    server.join().unwrap();
}

fn tar_up(dest: &str) -> TarUp {
    TarUp { dest: dest.into(), ..TarUp::default() }
}

/// Field report F04, and names, modes, times, holes and second names besides.
#[test]
fn a_tree_survives_down_and_up() {
    let (dir, mut guest) = start();
    let src = dir.path().join("src");
    fs::create_dir_all(src.join("node_modules/.bin")).unwrap();
    fs::create_dir_all(src.join("pkg/x".repeat(60))).unwrap();
    fs::write(src.join("pkg/x".repeat(60)).join("deep"), "deep").unwrap();
    symlink("/work/b", src.join("a")).unwrap();
    symlink("../pkg/tool", src.join("node_modules/.bin/tool")).unwrap();
    symlink("nowhere", src.join("dangling")).unwrap();
    symlink("loop", src.join("loop")).unwrap();
    symlink("t".repeat(300), src.join("long-target")).unwrap();
    fs::write(src.join("run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(src.join("run.sh"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(src.join("run.sh"), src.join("same.sh")).unwrap();
    for name in [&b"\xff\xfe"[..], &[b'n'; 255], b"new\nline"] {
        fs::write(src.join(OsStr::from_bytes(name)), name).unwrap();
    }
    let sparse = fs::File::create(src.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &pattern(1 << 20), 50 << 20).unwrap();
    sparse.set_len(100 << 20).unwrap();
    fs::set_permissions(src.join("node_modules"), fs::Permissions::from_mode(0o750)).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, src.join("fifo"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();

    for compression in ["", "zstd", "gzip"] {
        let down = TarDown { path: b"src".to_vec(), compression: compression.into() };
        let outcome = guest.call(Op::TarDown(down)).ok();
        let done = outcome.done.unwrap();
        assert_eq!((done.skipped_total, done.skipped), (1, vec!["fifo: FIFO".to_owned()]));
        assert!(outcome.out.len() < 3 << 20, "holes do not travel: {}", outcome.out.len());
        let dest = format!("dst{compression}");
        let up = TarUp { compression: compression.into(), ..tar_up(&dest) };
        guest.upload(Op::TarUp(up), &outcome.out).ok();
        let dest = dir.path().join(dest);
        let diff = std::process::Command::new("diff")
            .args(["-r", "--no-dereference", "-x", "fifo"])
            .args([&src, &dest])
            .output()
            .unwrap();
        assert!(diff.status.success(), "{}", String::from_utf8_lossy(&diff.stdout));
        let meta = |name: &str| fs::symlink_metadata(dest.join(name)).unwrap();
        assert_eq!(meta("run.sh").mode() & 0o7777, 0o4755);
        assert_eq!(meta("node_modules").mode() & 0o7777, 0o750);
        assert_eq!(meta("run.sh").ino(), meta("same.sh").ino());
        assert!(meta("sparse").blocks() * 512 < 3 << 20);
        for name in ["run.sh", "pkg", "a", ""] {
            let original = fs::symlink_metadata(src.join(name)).unwrap();
            assert_eq!(
                (meta(name).mtime(), meta(name).mtime_nsec()),
                (original.mtime(), original.mtime_nsec()),
                "{name}"
            );
        }
        if is_root() {
            assert_eq!((meta("pkg").uid(), meta("a").uid(), meta("sparse").gid()), (1001, 1001, 1002));
        }
    }
}

#[test]
fn archives_are_understood_by_gnu_tar_and_the_other_way_round() {
    let (dir, mut guest) = start();
    let src = dir.path().join("src");
    fs::create_dir_all(src.join("d")).unwrap();
    fs::write(src.join("d").join("n".repeat(150)), "long").unwrap();
    fs::write(src.join(OsStr::from_bytes(b"\xff")), "bytes").unwrap();
    let sparse = fs::File::create(src.join("sparse")).unwrap();
    for i in 0..40 {
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", i << 20).unwrap();
    }
    sparse.set_len(64 << 20).unwrap();
    let same = |a: &Path, b: &Path| {
        let diff = std::process::Command::new("diff").arg("-r").args([a, b]).output().unwrap();
        assert!(diff.status.success(), "{}", String::from_utf8_lossy(&diff.stdout));
    };

    let archive = dir.path().join("down.tar");
    fs::write(&archive, guest.call(Op::TarDown(TarDown { path: b"src".to_vec(), ..TarDown::default() })).ok().out)
        .unwrap();
    let out = dir.path().join("gnu");
    fs::create_dir(&out).unwrap();
    let tar = std::process::Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&out).status().unwrap();
    assert!(tar.success());
    same(&src, &out);
    let listed: Vec<_> = tar::Archive::new(fs::File::open(&archive).unwrap())
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path_bytes().into_owned())
        .collect();
    assert_eq!(listed[0], b"./");
    assert_eq!(listed.len(), 5);

    for (i, options) in [
        &["--format=gnu", "-S"][..],
        &["--format=posix", "-S"],
        &["--format=posix", "-S", "--sparse-version=0.1"],
        &["--format=posix", "-S", "--sparse-version=0.0"],
        &["--format=v7", "--exclude=nnn*"],
    ]
    .iter()
    .enumerate()
    {
        let archive = dir.path().join("up.tar");
        let tar = std::process::Command::new("tar")
            .args(*options)
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&src)
            .arg(".")
            .output();
        assert!(tar.unwrap().status.success(), "{options:?}");
        guest.upload(Op::TarUp(tar_up(&format!("up{i}"))), &fs::read(&archive).unwrap()).ok();
        let up = dir.path().join(format!("up{i}"));
        if i == 4 {
            fs::write(up.join("d").join("n".repeat(150)), "long").unwrap();
        } else {
            assert!(fs::metadata(up.join("sparse")).unwrap().blocks() * 512 < 2 << 20, "{options:?}");
        }
        same(&src, &up);
    }
}

/// One hostile entry, written by the tar crate where it lets us, else by hand.
fn entry(name: &[u8], kind: tar::EntryType, link: &str, data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(data.len() as u64);
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

const END: [u8; 1024] = [0; 1024];

#[test]
fn hostile_archives_stay_below_the_destination() {
    use tar::EntryType as T;
    let (dir, mut guest) = start();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    let target = outside.to_str().unwrap();
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("absolute", vec![entry(format!("{target}/x").as_bytes(), T::Regular, "", b"x")]),
        ("dotdot", vec![entry(b"../outside/x", T::Regular, "", b"x")]),
        ("inner dotdot", vec![entry(b"a/../../outside/x", T::Regular, "", b"x")]),
        ("through a link", vec![entry(b"l", T::Symlink, target, b""), entry(b"l/x", T::Regular, "", b"x")]),
        (
            "through a relative link",
            vec![entry(b"l", T::Symlink, "../outside", b""), entry(b"l/x", T::Regular, "", b"x")],
        ),
        ("directory through a link", vec![entry(b"l", T::Symlink, target, b""), entry(b"l/x", T::Directory, "", b"")]),
        ("hard link out", vec![entry(b"h", T::Link, "../outside/secret", b""), entry(b"h", T::Regular, "", b"x")]),
        ("hard link through a link", vec![entry(b"l", T::Symlink, target, b""), entry(b"h", T::Link, "l/secret", b"")]),
    ];
    for (i, (what, entries)) in cases.into_iter().enumerate() {
        let archive = [entries.concat(), END.to_vec()].concat();
        let outcome = guest.upload(Op::TarUp(tar_up(&format!("d{i}"))), &archive);
        let (kind, message) = outcome.fail();
        assert_eq!(kind, FailKind::BadStream, "{what}: {message}");
        assert!(message.contains("entry "), "{what}: {message}");
        assert_eq!(names(&outside), [b"secret"], "{what}");
        assert_eq!(fs::read(outside.join("secret")).unwrap(), b"secret", "{what}");
    }
    // A file over a link replaces the link, not its target.
    let over =
        [entry(b"l", T::Symlink, &format!("{target}/secret"), b""), entry(b"l", T::Regular, "", b"new")].concat();
    guest.upload(Op::TarUp(tar_up("over")), &[over, END.to_vec()].concat()).ok();
    assert_eq!(fs::read(dir.path().join("over/l")).unwrap(), b"new");
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"secret");
    // A link that stays inside is followed, as a merged /usr needs it.
    fs::create_dir_all(dir.path().join("in/usr/bin")).unwrap();
    symlink("usr/bin", dir.path().join("in/bin")).unwrap();
    let inside = [entry(b"bin/", T::Directory, "", b""), entry(b"bin/tool", T::Regular, "", b"x")].concat();
    guest.upload(Op::TarUp(tar_up("in")), &[inside, END.to_vec()].concat()).ok();
    assert_eq!(fs::read(dir.path().join("in/usr/bin/tool")).unwrap(), b"x");
}

#[test]
fn cut_archives_are_never_taken_for_whole() {
    let (_dir, mut guest) = start();
    let whole = [entry(b"a", tar::EntryType::Regular, "", &pattern(700)), END.to_vec()].concat();
    for length in [0, 1, 511, 512, 513, 1100, 1535, 1536, 1700] {
        let outcome = guest.upload(Op::TarUp(tar_up("d")), &whole[..length]);
        assert_eq!(outcome.fail().0, FailKind::BadStream, "{length}");
    }
    guest.upload(Op::TarUp(tar_up("d")), &whole).ok();
    let mut bad = whole.clone();
    bad[3] ^= 1;
    assert_eq!(guest.upload(Op::TarUp(tar_up("d")), &bad).fail().0, FailKind::BadStream);
    let zstd = TarUp { compression: "zstd".into(), ..tar_up("d") };
    assert_eq!(guest.upload(Op::TarUp(zstd), b"no zstd").fail().0, FailKind::BadStream);
    let lzma = TarUp { compression: "lzma".into(), ..tar_up("d") };
    assert_eq!(guest.upload(Op::TarUp(lzma), b"").fail().0, FailKind::BadRequest);
}

#[test]
fn a_single_file_is_one_entry() {
    let (dir, mut guest) = start();
    fs::write(dir.path().join("f"), "content").unwrap();
    let archive = guest.call(Op::TarDown(TarDown { path: b"f".to_vec(), ..TarDown::default() })).ok().out;
    let mut archive = tar::Archive::new(&archive[..]);
    let seen: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path_bytes().into_owned()).collect();
    assert_eq!(seen, [b"f"]);
}

#[test]
fn frames_for_other_streams_do_not_disturb_a_transfer() {
    let (_dir, mut guest) = start();
    let stream = guest.request(Op::Write(write("f", 6)), &[]);
    guest.data(stream, b"abc");
    assert_eq!(guest.exec(argv(&["true"])).code(), Some(0));
    guest.data(stream, b"def");
    guest.send(stream, Kind::End0, b"");
    guest.wait(stream).ok();
    assert_eq!(guest.call(Op::Read(Read { path: b"f".to_vec(), ..Read::default() })).out, b"abcdef");
}
