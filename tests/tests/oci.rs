//! Images from registries. The kinds of field-reports.md, section images and builds (I01, I07, I08, E10).

use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};
use trialrun_tests::{
    World,
    program::{Output, Program},
    registry::{Archive, Door, Item, PASSWORD, Packed, Registry, TestImage, USER},
};

/// The program with a cache of this test's own, and no credentials of whoever runs the tests.
fn program(world: &World, args: &[&str]) -> Program {
    let home = world.scratch().join("home");
    fs::create_dir_all(&home).expect("a home");
    world
        .program(args)
        .env("TRIALRUN_CACHE_DIR", world.scratch().join("cache"))
        .env("HOME", &home)
        .env("DOCKER_CONFIG", home.join(".docker"))
        .env("XDG_RUNTIME_DIR", &home)
}

fn busybox() -> Archive {
    let program = fs::read("/bin/busybox").expect("busybox-static");
    let mut archive = Archive::default()
        .add("bin/", 0o755, &Item::Folder)
        .add("bin/busybox", 0o755, &Item::File(&program))
        .add("etc/", 0o755, &Item::Folder)
        .add(
            "etc/passwd",
            0o644,
            &Item::File(b"root:x:0:0:root:/root:/bin/sh\napp:x:1001:1002:An app:/home/app:/bin/sh\n"),
        )
        .add("etc/group", 0o644, &Item::File(b"root:x:0:\napps:x:1002:\nextra:x:1003:app\n"));
    for applet in ["sh", "env", "id", "pwd", "ls", "cat", "find", "stat", "echo", "true", "sort", "readlink", "du"] {
        archive = archive.add(&format!("bin/{applet}"), 0o777, &Item::Symlink("busybox"));
    }
    archive
}

fn lines(output: &Output) -> Vec<&str> {
    output.out.lines().collect()
}

/// E10, I07.
#[test]
fn an_images_own_configuration_is_honoured() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let tool = b"#!/bin/sh\necho tool \"$@\"\n";
    let image = TestImage::new(json!({
        "User": "app", "Env": ["PATH=/opt/x:/bin", "LANG=C.UTF-8", "EMPTY=", "EQUALS=a=b"], "WorkingDir": "/app/new",
        "Entrypoint": ["tool"], "Cmd": ["by", "default"],
    }))
    .layer(busybox().bytes(), Packed::Gzip)
    .layer(Archive::default().add("opt/x/tool", 0o755, &Item::File(tool)).bytes(), Packed::Zstd);
    registry.push(&image, "a/tool:1")?;
    let name = registry.image("a/tool:1");
    let run = |args: &[&str]| program(&world, &[&["run", "--image", &name][..], args].concat()).run();
    let own = run(&[]);
    ensure!(own.code == Some(0) && own.out == "tool by default\n", "{own}");
    let words = run(&["--", "x", "y z"]);
    ensure!(words.code == Some(0) && words.out == "tool x y z\n", "{words}");
    let facts = run(&["--entrypoint", "", "--", "sh", "-c", "id; pwd; env | sort; stat -c %u:%a /app/new; exit 3"]);
    ensure!(facts.code == Some(3), "{facts}");
    let told = lines(&facts);
    ensure!(
        told[0] == "uid=1001(app) gid=1002(apps) groups=1002(apps),1003(extra)" && told[1] == "/app/new",
        "{facts}"
    );
    for entry in ["PATH=/opt/x:/bin", "LANG=C.UTF-8", "EMPTY=", "EQUALS=a=b", "HOME=/home/app", "PWD=/app/new"] {
        ensure!(told.contains(&entry), "{entry}: {facts}");
    }
    ensure!(!facts.out.contains("PIP_BREAK") && told.last() == Some(&"0:755"), "{facts}");
    let over = run(&["--entrypoint", "env", "--env", "PATH=/bin", "--user", "1001:1003", "--workdir", "/", "--", "id"]);
    ensure!(lines(&over)[0].starts_with("uid=1001(app) gid=1003(extra)"), "{over}");
    let other = run(&["--entrypoint", "nope"]);
    ensure!(other.code == Some(127) && other.err.contains("nope"), "{other}");
    // It is listed, shown and removed like any other.
    let listed = program(&world, &["image", "ls"]).run();
    ensure!(listed.out.contains(&name), "{listed}");
    let json = program(&world, &["image", "inspect", "--json", &name]).run();
    ensure!(json.json()["image"]["config"]["user"] == "app", "{json}");
    ensure!(program(&world, &["image", "rm", &name]).run().code == Some(0));
    let gone = program(&world, &["image", "inspect", &name]).run();
    ensure!(gone.code == Some(120), "{gone}");
    // A number that nobody has is a user, as container engines have it; an image of one file has all that a machine needs.
    let least = TestImage::new(json!({ "User": "4321" }))
        .layer(Archive::default().add("true", 0o755, &Item::File(&fs::read("/bin/busybox")?)).bytes(), Packed::Tar);
    registry.push(&least, "least:1")?;
    let least = registry.image("least:1");
    let ran = program(&world, &["run", "--image", &least, "--", "/true"]).run();
    ensure!(ran.code == Some(0), "{ran}");
    let nothing = program(&world, &["run", "--image", &least]).run();
    ensure!(nothing.code == Some(120) && nothing.err.contains("no command of its own"), "{nothing}");
    Ok(())
}

/// I01, and its neighbours: what layers do to each other.
#[test]
fn layers_lie_over_each_other_as_engines_have_it() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let file = |text: &'static str| Item::File(text.as_bytes());
    let one = busybox()
        .add("t/a", 0o644, &file("a"))
        .add("t/b", 0o644, &file("b"))
        .add("t/dir/c", 0o644, &file("c"))
        .add("t/opaque/old", 0o644, &file("old"))
        .add("t/opaque/deep/old", 0o644, &file("old"))
        .add("t/becomes-file/x", 0o644, &file("x"))
        .add("t/becomes-folder", 0o644, &file("x"))
        .add("t/linked", 0o644, &file("first"))
        .add("t/same", 0o644, &Item::Hardlink("t/linked"))
        .add("t/real/", 0o755, &Item::Folder)
        .add("t/way", 0o777, &Item::Symlink("/t/real"))
        .add("t/setuid", 0o4755, &file("s"))
        .owned("t/owned", 0o640, 1001, 65_534, &file("o"))
        .add("t/loop", 0o777, &Item::Symlink("loop"))
        .add("t/out", 0o777, &Item::Symlink("../../../../etc/passwd"))
        .add("dev/console", 0o600, &Item::Other(b'3'));
    let two = Archive::default()
        .add("t/.wh.a", 0, &file(""))
        .add("t/.wh.dir", 0, &file(""))
        .add("t/opaque/new", 0o644, &file("new"))
        .add("t/opaque/.wh..wh..opq", 0, &file(""))
        .add("t/.wh..wh.plnk", 0, &file(""))
        .add("t/becomes-file", 0o644, &file("now"))
        .add("t/becomes-folder", 0o755, &Item::Folder)
        .add("t/becomes-folder/y", 0o644, &file("y"))
        // Written anew, not through the link: the other name keeps the old content.
        .add("t/linked", 0o644, &file("second"))
        // Through a link of the lower layer, as a program inside would go.
        .add("t/way/through", 0o644, &file("t"))
        .add("t/.wh.never-was", 0, &file(""));
    let three = Archive::default().add("t/dir/d", 0o644, &file("d")).add("./t//e", 0o600, &file("e"));
    let (one, two, three) = (one.bytes(), two.bytes(), three.bytes());
    for (n, packed) in [Packed::Tar, Packed::Gzip, Packed::Zstd].into_iter().enumerate() {
        let image = TestImage::new(json!({}))
            .layer(one.clone(), packed)
            .layer(two.clone(), packed)
            .layer(three.clone(), packed);
        registry.push(&image, &format!("layers:{n}"))?;
        let name = registry.image(&format!("layers:{n}"));
        let look = "cd /t; find . | sort; cat linked same b way/through; stat -c '%n %a %u:%g' setuid owned real dir; readlink out; ls /dev/console";
        let ran = program(&world, &["run", "--image", &name, "--env", "PATH=/bin", "--", "sh", "-c", look]).run();
        let want = "\
.
./b
./becomes-file
./becomes-folder
./becomes-folder/y
./dir
./dir/d
./e
./linked
./loop
./opaque
./opaque/new
./out
./owned
./real
./real/through
./same
./setuid
./way
secondfirstbt\
setuid 4755 0:0
owned 640 1001:65534
real 755 0:0
dir 755 0:0
../../../../etc/passwd
";
        assert_eq!(ran.out, want, "{packed:?}: {ran}");
    }
    // Three images of one content are one tree.
    let images =
        fs::read_dir(world.scratch().join("cache/images"))?.filter_map(|e| e.ok()?.file_name().into_string().ok());
    assert_eq!(images.filter(|name| name.len() == 64).count(), 1);
    Ok(())
}

/// What no machine may start from is refused with the entry's name, and leaves nothing.
#[test]
fn hostile_layers_are_refused_by_the_entrys_name() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let add = |path: &str, item: Item<'_>| Archive::default().add(path, 0o644, &item).bytes();
    let deep = "d/".repeat(300);
    let name = "n".repeat(300);
    let long = format!("{}x", "abcdefgh/".repeat(500));
    let wide = Archive::default().owned("wide", 0o644, 100_000, 0, &Item::File(b"")).bytes();
    let bad_pax = Archive::default().pax(&[("mtime", b"tomorrow")]).add("pax", 0o644, &Item::File(b"")).bytes();
    let many: Vec<(String, Vec<u8>)> = (0..300).map(|n| (format!("SCHILY.xattr.user.{n}"), b"v".to_vec())).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect();
    let xattrs = Archive::default().pax(&many).add("xattrs", 0o644, &Item::File(b"")).bytes();
    let holes = [
        ("GNU.sparse.major", &b"1"[..]),
        ("GNU.sparse.name", b"holes"),
        ("GNU.sparse.realsize", b"9223372036854775807"),
    ];
    let bomb = Archive::default().pax(&holes).add("x", 0o644, &Item::File(&[&b"0\n"[..], &[0; 510]].concat())).bytes();
    let mut cut = Archive::default().add("cut", 0o644, &Item::File(&[7; 2000])).bytes();
    cut.truncate(1000);
    let through = Archive::default()
        .add("way", 0o777, &Item::Symlink("/etc"))
        .add("way/../../escaped", 0o644, &Item::File(b"x"))
        .bytes();
    let dev_link =
        Archive::default().add("dev", 0o777, &Item::Symlink("etc")).add("etc/", 0o755, &Item::Folder).bytes();
    let cases: Vec<(&str, Vec<u8>, Vec<&str>)> = vec![
        ("up", add("../up", Item::File(b"x")), vec!["../up", "leads out of the image"]),
        ("inner-up", add("a/../../up", Item::File(b"x")), vec!["a/../../up", "leads out"]),
        ("through", through, vec!["way/../../escaped", "leads out"]),
        ("char", add("tmp/null", Item::Other(b'3')), vec!["tmp/null", "character device"]),
        ("block", add("disk", Item::Other(b'4')), vec!["disk", "block device"]),
        ("fifo", add("pipe", Item::Other(b'6')), vec!["pipe", "FIFO"]),
        ("unknown", add("what", Item::Other(b'Z')), vec!["what", "unknown type"]),
        ("link-up", add("l", Item::Hardlink("../../etc/shadow")), vec!["l: ", "leads out"]),
        ("link-nothing", add("l", Item::Hardlink("not/there")), vec!["l: ", "not/there", "not there"]),
        ("link-itself", add("l", Item::Hardlink("l")), vec!["l: ", "not there"]),
        ("no-target", add("l", Item::Symlink("")), vec!["l: ", "no target"]),
        ("top-file", add("./", Item::Symlink("x")), vec!["leads out"]),
        ("deep", add(&deep, Item::Folder), vec!["deeper than 256"]),
        ("name", add(&name, Item::File(b"")), vec!["longer than 255"]),
        ("path", add(&long, Item::File(b"")), vec!["longer than 4095"]),
        ("wide", wide, vec!["wide", "100000:0", "65535"]),
        ("pax", bad_pax, vec!["pax", "no time"]),
        ("xattrs", xattrs, vec!["xattrs", "256 extended attributes"]),
        ("bomb", bomb, vec!["holes", "larger than"]),
        ("cut", cut, vec!["cut: ", "ends in the middle of it"]),
        ("noise", vec![0x5a; 4096], vec!["archive is broken"]),
        ("dev-link", dev_link, vec!["/dev", "not a folder"]),
    ];
    for (case, archive, words) in cases {
        let image = TestImage::new(json!({})).layer(busybox().bytes(), Packed::Tar).layer(archive, Packed::Gzip);
        registry.push(&image, &format!("hostile/{case}:1"))?;
        let name = registry.image(&format!("hostile/{case}:1"));
        let ran = program(&world, &["run", "--image", &name, "--", "/bin/true"]).run();
        ensure!(ran.code == Some(121) && ran.err.contains("is refused"), "{case}: {ran}");
        for word in words {
            ensure!(ran.err.contains(word), "{case}: {word:?} is not in {ran}");
        }
    }
    // Another archive than the configuration says.
    let mut lie = TestImage::new(json!({})).layer(busybox().bytes(), Packed::Tar);
    lie.lie = Some(format!("sha256:{}", "0".repeat(64)));
    registry.push(&lie, "hostile/lie:1")?;
    let ran = program(&world, &["run", "--image", &registry.image("hostile/lie:1"), "--", "/bin/true"]).run();
    ensure!(ran.code == Some(121) && ran.err.contains("layer 1: it unpacks to sha256:"), "{ran}");
    let left: Vec<_> = fs::read_dir(world.scratch().join("cache/images"))?
        .map(|e| e.map(|e| e.file_name()))
        .collect::<Result<_, _>>()?;
    ensure!(left.iter().all(|name| name == "names" || name == ".tmp.lock"), "{left:?}");
    ensure!(fs::read_dir("/")?.all(|e| e.is_ok_and(|e| e.file_name() != "escaped" && e.file_name() != "up")));
    Ok(())
}

/// I08: a registry that asks who one is, over TLS.
#[test]
fn a_locked_registry_opens_for_dockers_credentials_and_trusted_certificates() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Locked)?;
    let image = TestImage::new(json!({ "Cmd": ["/bin/true"] })).layer(busybox().bytes(), Packed::Gzip);
    registry.push(&image, "private/it:1")?;
    let name = registry.image("private/it:1");
    let run = |args: &[&str]| program(&world, args).env("SSL_CERT_FILE", registry.certificate());
    let stranger = program(&world, &["run", "--image", &name]).run();
    ensure!(stranger.code == Some(121) && stranger.err.contains(&registry.address.to_string()), "{stranger}");
    let nobody = run(&["run", "--image", &name]).run();
    ensure!(nobody.code == Some(120) && nobody.err.contains("somebody unknown (docker login"), "{nobody}");
    let docker = world.scratch().join("home/.docker");
    fs::create_dir_all(&docker)?;
    let encoded = |password: &str| {
        let output =
            Command::new("base64").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().and_then(|mut child| {
                child.stdin.take().map(|mut stdin| write!(stdin, "{USER}:{password}"));
                child.wait_with_output()
            });
        output.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
    };
    let wrong = json!({ "auths": { registry.address.to_string(): { "auth": encoded("not it")? } } });
    fs::write(docker.join("config.json"), wrong.to_string())?;
    let refused = run(&["run", "--image", &name]).run();
    ensure!(refused.code == Some(120) && refused.err.contains("the user of docker's configuration"), "{refused}");
    fs::write(docker.join("config.json"), "{ not json")?;
    let broken = run(&["run", "--image", &name]).run();
    ensure!(broken.code == Some(121) && broken.err.contains("config.json"), "{broken}");
    // A credential helper, as desktop installations have it.
    let helper = world.scratch().join("bin");
    fs::create_dir_all(&helper)?;
    let script = format!("#!/bin/sh\nread -r server\nprintf '{{\"Username\":\"{USER}\",\"Secret\":\"{PASSWORD}\"}}'\n");
    fs::write(helper.join("docker-credential-test"), script)?;
    fs::set_permissions(helper.join("docker-credential-test"), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    fs::write(docker.join("config.json"), json!({ "credsStore": "test" }).to_string())?;
    let path = format!("{}:{}", helper.display(), std::env::var("PATH")?);
    let helped = run(&["run", "--image", &name]).env("PATH", &path).run();
    ensure!(helped.code == Some(0), "{helped}");
    ensure!(program(&world, &["image", "rm", &name]).run().code == Some(0));
    let right = json!({ "auths": { registry.address.to_string(): { "auth": encoded(PASSWORD)? } } });
    fs::write(docker.join("config.json"), right.to_string())?;
    let known = run(&["--verbose", "image", "pull", &name]).run();
    ensure!(known.code == Some(0), "{known}");
    let secret = encoded(PASSWORD)?;
    for output in [&stranger, &nobody, &refused, &broken, &helped, &known] {
        ensure!(!output.err.contains(PASSWORD) && !output.err.contains(&secret), "{output}");
    }
    Ok(())
}

/// What [`Faults`] does to one request.
enum Fault {
    Answer(&'static str),
    /// Passes so many bytes of the answer on, then cuts the connection.
    CutAfter(usize),
}

/// A way to the registry on which things go wrong, each once.
struct Faults {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Faults {
    fn start(to: SocketAddr, mut fault: impl FnMut(&str, usize) -> Option<Fault> + Send + 'static) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let seen = Arc::new(Mutex::new(Vec::<String>::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(mut client) = client else { continue };
                let mut head = Vec::new();
                let mut byte = [0];
                // 22 begins a TLS handshake: nobody here speaks that.
                while !head.ends_with(b"\r\n\r\n")
                    && head.first() != Some(&22)
                    && client.read(&mut byte).is_ok_and(|n| n == 1)
                {
                    head.push(byte[0]);
                }
                if !head.ends_with(b"\r\n\r\n") {
                    continue;
                }
                let text = String::from_utf8_lossy(&head).into_owned();
                let line = text.lines().next().unwrap_or_default().to_owned();
                let range = text.lines().find(|l| l.to_lowercase().starts_with("range:")).unwrap_or("").to_owned();
                let nth = {
                    let mut log = log.lock().expect("the log");
                    let nth = log.iter().filter(|l| l.starts_with(&line)).count();
                    log.push(format!("{line} {range}"));
                    nth
                };
                let what = fault(&line, nth);
                std::thread::spawn(move || {
                    if let Some(Fault::Answer(answer)) = what {
                        let _ = client.write_all(answer.as_bytes());
                        return;
                    }
                    let Ok(mut server) = TcpStream::connect(to) else { return };
                    // One request on each connection.
                    let text = text.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
                    let _ = server.write_all(text.as_bytes());
                    let limit = if let Some(Fault::CutAfter(n)) = what { n as u64 } else { u64::MAX };
                    let _ = std::io::copy(&mut server.take(limit), &mut client);
                });
            }
        });
        Ok(Self { address, seen })
    }
}

const TOO_MANY: &str =
    "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const BROKEN: &str = "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// I08: rate limits, failures and cut connections are tried again; what came before a cut is not fetched twice.
#[test]
fn a_registry_that_fails_now_and_then_is_asked_again() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let noise: Vec<u8> = (0..3_000_000_u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let image = TestImage::new(json!({ "Cmd": ["/bin/true"] }))
        .layer(busybox().bytes(), Packed::Gzip)
        .layer(Archive::default().add("noise", 0o644, &Item::File(&noise)).bytes(), Packed::Tar);
    registry.push(&image, "it:1")?;
    let faults = Faults::start(registry.address, |line, nth| match nth {
        0 if line.contains("/manifests/") => Some(Fault::Answer(TOO_MANY)),
        0 if line.contains("/blobs/") => Some(Fault::Answer(BROKEN)),
        1 if line.contains("/blobs/") => Some(Fault::Answer(TOO_MANY)),
        2 if line.contains("/blobs/") => Some(Fault::CutAfter(200_000)),
        _ => None,
    })?;
    let name = format!("oci:{}/it:1", faults.address);
    let ran = program(&world, &["run", "--image", &name]).run();
    ensure!(ran.code == Some(0), "{ran}");
    let seen = faults.seen.lock().expect("the log").clone();
    ensure!(
        seen.iter().any(|l| l.contains("ange: bytes=") && !l.contains("bytes=0-")),
        "nothing was resumed: {seen:#?}"
    );
    // One that never recovers is named, and is not the user's fault.
    let dead = Faults::start(registry.address, |_, _| Some(Fault::Answer(BROKEN)))?;
    let ran = program(&world, &["run", "--image", &format!("oci:{}/it:1", dead.address)])
        .patience(Duration::from_secs(60))
        .run();
    ensure!(ran.code == Some(121) && ran.err.contains(&dead.address.to_string()), "{ran}");
    Ok(())
}

/// I08: ten at once download each blob once.
#[test]
fn ten_pulls_at_once_share_one_download() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let image = TestImage::new(json!({ "Cmd": ["/bin/true"] })).layer(busybox().bytes(), Packed::Gzip);
    registry.push(&image, "it:1")?;
    let counted = Faults::start(registry.address, |_, _| None)?;
    let name = format!("oci:{}/it:1", counted.address);
    let running: Vec<_> = (0..10).map(|_| program(&world, &["run", "--image", &name]).start()).collect();
    for run in running {
        let ran = run.finish();
        ensure!(ran.code == Some(0), "{ran}");
    }
    let mut blobs: BTreeMap<String, usize> = BTreeMap::new();
    for line in counted.seen.lock().expect("the log").iter().filter(|l| l.contains("/blobs/")) {
        *blobs.entry(line.clone()).or_default() += 1;
    }
    ensure!(blobs.len() == 2 && blobs.values().all(|n| *n == 1), "{blobs:#?}");
    Ok(())
}

#[test]
fn what_is_no_image_is_told_apart() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let mut arm = TestImage::new(json!({})).layer(busybox().bytes(), Packed::Tar);
    arm.architecture = Some("s390x".to_owned());
    registry.push(&arm, "arm:1")?;
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    for (image, code, words) in [
        (registry.image("nope:1"), 120, vec!["has no image", "nope:1"]),
        (registry.image("arm:1"), 120, vec!["there is no image for linux/", "linux/s390x"]),
        (registry.image("arm:2"), 120, vec!["has no image"]),
        (format!("oci:{free}/x:1"), 121, vec!["refused"]),
        ("oci:UPPER/Case".to_owned(), 120, vec!["is no image reference"]),
        ("oci:".to_owned(), 120, vec!["is not an image name"]),
        ("oci:a b".to_owned(), 120, vec!["is not an image name"]),
    ] {
        let ran = program(&world, &["run", "--image", &image, "--", "true"]).run();
        ensure!(ran.code == Some(code) && words.iter().all(|w| ran.err.contains(w)), "{image}: {ran}");
        let json = program(&world, &["run", "--json", "--image", &image, "--", "true"]).run();
        ensure!(json.code == Some(code) && json.json()["error"]["message"].is_string(), "{json}");
    }
    Ok(())
}

/// A Debian system in an image starts as podman starts it, and its tree is podman's.
#[test]
fn an_image_of_debian_is_what_podman_makes_of_it() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let registry = Registry::start(world.scratch(), Door::Open)?;
    let digest = world.program(["image", "inspect", "--json", "python"]).run().json()["image"]["digest"]
        .as_str()
        .context("a digest")?
        .replace("sha256:", "");
    let tree = trialrun_tests::cache_dir().join("images").join(digest).join("tree");
    // What a compiler and an interpreter bring is left out, for time's sake.
    let tar = Command::new("tar")
        .args(["--create", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--sort=name", "--format=posix"])
        .args([
            "--exclude=./usr/lib/gcc*",
            "--exclude=./usr/lib/python3*",
            "--exclude=./usr/include",
            "--exclude=./usr/share/doc",
        ])
        .args(["--exclude=./usr/lib/x86_64-linux-gnu/*.a", "--exclude=./usr/lib/git-core", "--exclude=./var/cache"])
        .arg("--directory")
        .arg(&tree)
        .arg(".")
        .output()?;
    ensure!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
    let extra = Archive::default()
        .add("app/", 0o755, &Item::Folder)
        .pax(&[("SCHILY.xattr.user.note", b"hello"), ("mtime", b"1500000000.123456789")])
        .owned("app/noted", 0o640, 1000, 1000, &Item::File(b"n"))
        .pax(&[("SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0")])
        .add("app/capable", 0o755, &Item::File(b"#!/bin/sh\n"))
        .add("usr/.wh.games", 0, &Item::File(b""));
    let config = json!({
        "User": "runtime", "WorkingDir": "/app", "Entrypoint": ["/bin/sh", "-c"], "Cmd": ["true"],
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "MINE=a b"],
    });
    let image = TestImage::new(config).layer(tar.stdout, Packed::Tar).layer(extra.bytes(), Packed::Gzip);
    registry.push(&image, "debian:it")?;
    let podman = |args: &[&str]| -> Result<String> {
        let mut command = Command::new("podman");
        command
            .arg("--root")
            .arg(world.scratch().join("podman"))
            .arg("--runroot")
            .arg(world.scratch().join("podman-run"));
        command.args(["--cgroup-manager=cgroupfs", "--runtime=runc"]).args(args).stdin(Stdio::null());
        let output = command.output()?;
        ensure!(output.status.success(), "podman {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let theirs = format!("{}/debian:it", registry.address);
    let before = cgroups();
    podman(&["pull", "--quiet", "--tls-verify=false", &theirs])?;
    let script = "env | sort; echo --; id; pwd; locale; umask; cat /proc/self/comm; stat -c '%n %a %u:%g' /app /tmp /root /usr/bin/sudo; \
                  test -w /app; echo $?; cat /app/noted 2>&1; ls -d /usr/games 2>&1; true";
    let run = ["run", "--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000"];
    let want = podman(&[&run[..], &[&theirs, script]].concat());
    let mount = podman(&["image", "mount", &theirs])?;
    let own = registry.image("debian:it");
    let got = program(&world, &["run", "--image", &own, "--", script]).run();
    let compared = (|| -> Result<()> {
        let want = want?;
        ensure!(got.code == Some(0), "{got}");
        let (their_env, their_facts) = want.split_once("--\n").context("no --")?;
        let (our_env, our_facts) = got.out.split_once("--\n").context("no --")?;
        assert_eq!(our_facts, their_facts);
        // Their own marks, and what each engine sets by itself: docs/spec.md has the list.
        let theirs = ["HOSTNAME=", "container=", "TERM=", "HOME="];
        for line in their_env.lines().filter(|l| !theirs.iter().any(|t| l.starts_with(t))) {
            ensure!(our_env.lines().any(|l| l == line), "podman has {line:?}; we have {our_env}");
        }
        ensure!(
            their_env.lines().find(|l| l.starts_with("HOME=")) == our_env.lines().find(|l| l.starts_with("HOME=")),
            "{want}{got}"
        );
        let record = program(&world, &["image", "inspect", "--json", &own]).run().json();
        let hex = record["image"]["digest"].as_str().context("a digest")?.replace("sha256:", "");
        let ours = world.scratch().join("cache/images").join(hex).join("tree");
        same_trees(Path::new(mount.trim()), &ours)
    })();
    podman(&["image", "umount", "--all"])?;
    podman(&["rmi", "--all", "--force"])?;
    for group in cgroups().into_iter().filter(|g| !before.contains(g)) {
        let _ = Command::new("find").arg(&group).args(["-depth", "-type", "d", "-exec", "rmdir", "{}", ";"]).output();
    }
    compared
}

/// What podman makes beside its own directories and leaves.
fn cgroups() -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
        for path in [entry.path(), entry.path().join("libpod_parent")] {
            if path.ends_with("libpod_parent") && path.is_dir() {
                found.push(path);
            }
        }
    }
    found
}

fn same_trees(theirs: &Path, ours: &Path) -> Result<()> {
    let mut open = vec![std::path::PathBuf::new()];
    let mut compared = 0_u64;
    while let Some(dir) = open.pop() {
        let names = |top: &Path| -> Result<Vec<std::ffi::OsString>> {
            let mut names: Vec<_> =
                fs::read_dir(top.join(&dir))?.map(|e| e.map(|e| e.file_name())).collect::<Result<_, _>>()?;
            names.sort();
            Ok(names)
        };
        let (left, right) = (names(theirs)?, names(ours)?);
        ensure!(left == right, "{}: podman has {left:?}, we have {right:?}", dir.display());
        for name in left {
            let path = dir.join(name);
            let (a, b) = (theirs.join(&path).symlink_metadata()?, ours.join(&path).symlink_metadata()?);
            let facts = |m: &fs::Metadata| {
                let size = if m.is_dir() { 0 } else { m.size() };
                // A folder that a later layer changes gets the time of unpacking from podman, and its entry's own from us.
                let times = if m.is_dir() { (0, 0, 0) } else { (m.mtime(), m.mtime_nsec(), m.nlink()) };
                (m.mode(), m.uid(), m.gid(), size, times)
            };
            ensure!(facts(&a) == facts(&b), "{}: {:?} and {:?}", path.display(), facts(&a), facts(&b));
            if a.is_dir() {
                open.push(path.clone());
            } else if a.is_symlink() {
                ensure!(fs::read_link(theirs.join(&path))? == fs::read_link(ours.join(&path))?);
            } else if a.is_file() && a.size() < 1 << 20 {
                ensure!(fs::read(theirs.join(&path))? == fs::read(ours.join(&path))?, "{}", path.display());
            }
            ensure!(xattrs(&theirs.join(&path))? == xattrs(&ours.join(&path))?, "{}: attributes", path.display());
            compared += 1;
        }
    }
    ensure!(compared > 1000, "only {compared} paths");
    Ok(())
}

fn xattrs(path: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut names = vec![0; 4096];
    let n = rustix::fs::llistxattr(path, &mut names)?;
    let mut found = BTreeMap::new();
    for name in names[..n].split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let name = String::from_utf8_lossy(name).into_owned();
        if name.starts_with("trusted.overlay.") {
            continue;
        }
        let mut value = vec![0; 4096];
        let n = rustix::fs::lgetxattr(path, name.as_str(), &mut value)?;
        value.truncate(n);
        found.insert(name, value);
    }
    Ok(found)
}
