//! The command line itself: help, refusals with a way out, machine-readable answers.

use anyhow::Result;
use std::{os::unix::process::CommandExt, time::Duration};
use trialrun_tests::{World, program::Started};

#[test]
fn every_command_explains_itself() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    for words in [
        "",
        "run",
        "test",
        "attach",
        "ps",
        "rm",
        "gc",
        "doctor",
        "image",
        "image ls",
        "image build",
        "image inspect",
        "image rm",
    ] {
        let ran = world.program(words.split_whitespace()).args(["--help"]).run();
        assert!(ran.code == Some(0) && ran.out.contains("Usage:") && ran.out.contains("trialrun"), "{words}: {ran}");
        assert!(!ran.out.contains("__keeper"), "{ran}");
    }
    let version = world.program(["--version"]).run();
    assert!(version.code == Some(0) && version.out.starts_with("trialrun "), "{version}");
    Ok(())
}

#[test]
fn a_wrong_call_names_what_is_wrong_and_the_way_out() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let host = ["run", "--image", "host"];
    let cases: &[(&[&str], &[&str])] = &[
        (&["--env", "=x"], &["--env"]),
        (&["--env", "NOT_SET_ANYWHERE_42"], &["NOT_SET_ANYWHERE_42", "NOT_SET_ANYWHERE_42=VALUE"]),
        (&["--memory", "lots"], &["lots", "512M"]),
        (&["--memory", "1K"], &["memory"]),
        (&["--vcpu", "0"], &["vcpu"]),
        (&["--pids", "1"], &["pids"]),
        (&["--disk", "1"], &["disk"]),
        (&["--timeout", "soon"], &["soon"]),
        (&["--network", "everything"], &["everything", "registries"]),
        (&["--allow", "http://"], &["http://"]),
        (&["--allow", "*"], &["--allow"]),
        (&["--allow", "example.com:99999"], &["99999"]),
        (&["--upload", "nothing"], &["HOST_PATH:PATH_INSIDE"]),
        (&["--image", "../etc"], &["../etc"]),
    ];
    for (args, words) in cases {
        let (base, args): (&[&str], &[&str]) = if args[0] == "--image" { (&["run"], args) } else { (&host, args) };
        let ran = world.program(base.iter().chain(args.iter())).args(["--", "true"]).run();
        assert!(matches!(ran.code, Some(2 | 120)), "{args:?}: {ran}");
        for word in *words {
            assert!(ran.err.contains(word), "{args:?} without {word:?}: {ran}");
        }
        assert!(ran.out.is_empty() && ran.err.lines().count() < 12, "{ran}");
    }
    let none = world.program(["run"]).run();
    assert!(none.code.is_some_and(|c| c != 0) && none.err.contains("COMMAND"), "{none}");
    let attach = world.program(["attach", "sb-nope"]).run();
    assert!(attach.code == Some(120) && attach.err.contains("trialrun ps"), "{attach}");
    let rm = world.program(["rm", "sb-nope"]).run();
    assert!(rm.code == Some(120) && rm.err.contains("sb-nope"), "{rm}");
    let upload = world.program(["run", "--image", "host", "--upload", "/nope-42:/workspace/x", "--", "true"]).run();
    assert!(upload.code.is_some_and(|c| c != 0) && upload.err.contains("/nope-42"), "{upload}");
    let image = world.program(["image", "inspect", "nope"]).run();
    assert!(image.code.is_some_and(|c| c != 0) && image.err.contains("nope"), "{image}");
    let json = world.program(["run", "--json", "--image", "nope", "--", "true"]).run();
    assert!(json.json()["error"]["message"].as_str().is_some_and(|m| m.contains("nope")), "{json}");
    Ok(())
}

#[test]
fn without_root_one_line_says_so_and_how() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    // A place that everybody can reach: the build's folder may be below root's home.
    let shared = tempfile::Builder::new().prefix("trialrun-bin-").tempdir_in("/tmp")?;
    std::fs::set_permissions(shared.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let program = shared.path().join("trialrun");
    std::fs::copy(trialrun_tests::binary(), &program)?;
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    for words in ["run --image host -- true", "ps", "gc", "image ls", "rm --all", "attach sb-x"] {
        let mut command = std::process::Command::new(&program);
        command.args(words.split_whitespace()).uid(65534).gid(65534).current_dir("/");
        command
            .env("TRIALRUN_DATA_DIR", world.data())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        let ran = Started::new(command.spawn()?, Duration::from_secs(30)).finish();
        assert!(ran.code == Some(120) && ran.err.contains("root") && ran.err.contains("sudo"), "{words}: {ran}");
        assert_eq!(ran.err.lines().count(), 1, "{words}: {ran}");
    }
    let mut command = std::process::Command::new(&program);
    command
        .arg("doctor")
        .uid(65534)
        .gid(65534)
        .current_dir("/")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let doctor = Started::new(command.spawn()?, Duration::from_secs(60)).finish();
    assert!(doctor.out.contains("root") || doctor.err.contains("root"), "{doctor}");
    Ok(())
}

#[test]
fn the_doctor_tells_each_capability_its_consequence_and_the_way_to_it() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let text = world.program(["doctor"]).run();
    assert_eq!(text.code, Some(0), "{text}");
    let json = world.program(["doctor", "--json"]).run();
    let value = json.json().to_string().to_lowercase();
    for word in ["cgroup", "overlay", "btrfs", "kvm", "criu", "nftables", "erofs", "namespaces"] {
        assert!(value.contains(word), "{word}: {json}");
    }
    Ok(())
}

#[test]
fn json_answers_are_one_object_with_a_schema() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let run =
        world.program(["run", "--json", "--image", "host", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]).run();
    let json = run.json();
    assert_eq!((run.code, json["exit_code"].as_i64()), (Some(3), Some(3)), "{run}");
    assert_eq!(
        (json["stdout"].as_str(), json["stderr"].as_str(), json["truncated"].as_bool()),
        (Some("out\n"), Some("err\n"), Some(false)),
        "{run}"
    );
    for words in ["ps --json", "gc --json", "image ls --json", "rm --all --json"] {
        let ran = world.program(words.split_whitespace()).run();
        assert!(ran.code == Some(0) && ran.json()["schema"] == 1, "{words}: {ran}");
    }
    // Also of a call that can't be understood.
    for words in ["run --json --vcpu many -- true", "run --json --memory 1 --image host -- true", "ps --json --nope"] {
        let ran = world.program(words.split_whitespace()).run();
        let message = ran.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(ran.code == Some(120) && ran.json()["error"]["exit_code"] == 120 && !message.is_empty(), "{ran}");
        assert!(!message.contains('\u{1b}'), "{message:?}");
    }
    let cut = world
        .program(["run", "--json", "--image", "host", "--", "sh", "-c", "head -c 3M /dev/zero | tr '\\0' x"])
        .run()
        .json();
    assert_eq!((cut["truncated"].as_bool(), cut["stdout_bytes"].as_u64()), (Some(true), Some(3 << 20)));
    Ok(())
}

#[test]
fn uploads_workdir_user_and_environment_reach_the_command() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let folder = world.scratch().join("folder");
    std::fs::create_dir_all(folder.join("sub"))?;
    std::fs::write(folder.join("sub/f"), "content")?;
    let upload = format!("{}:/workspace/in", folder.display());
    let line = "pwd; cat sub/f; echo; id -u; echo $A-$B";
    let ran = world
        .program([
            "run",
            "--image",
            "host",
            "--upload",
            &upload,
            "-w",
            "/workspace/in",
            "-u",
            "root",
            "-e",
            "A=1",
            "-e",
            "B",
            "--",
            "sh",
            "-c",
            line,
        ])
        .env("B", "from outside")
        .run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "/workspace/in\ncontent\n0\n1-from outside\n"), "{ran}");
    let quiet = world.program(["run", "--image", "host", "--", "true"]).run();
    assert!(quiet.out.is_empty() && quiet.err.is_empty(), "{quiet}");
    Ok(())
}
