//! The command line: what it offers, what it says of wrong calls and of the host, and `trialrun run`.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use trialrun_tests::{
    World, binary, cache_dir,
    program::{Output, Started},
    project,
};

const MACHINE: [&str; 7] = ["--image", "--vcpu", "--memory", "--disk", "--pids", "--env", "--allow"];

/// A call that must be refused, with what its words must name.
#[track_caller]
fn refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.code, Some(code), "{output}");
    assert!(words.iter().all(|word| output.err.contains(word)), "{words:?}: {output}");
    assert!(!output.err.contains("panicked") && !output.err.contains("Error {"), "{output}");
}

fn mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

#[test]
fn every_command_has_help_that_names_its_options() {
    let Some(world) = World::new() else { return };
    let run = [
        &MACHINE[..],
        &[
            "--network",
            "--timeout",
            "--user",
            "--workdir",
            "--upload",
            "--no-stdin",
            "--keep",
            "--json",
            "registries",
            "web",
            "full",
        ],
    ]
    .concat();
    let test = [
        &MACHINE[..],
        &[
            "--install-network",
            "--network",
            "--timeout",
            "--workers",
            "--extra",
            "--group",
            "--no-install",
            "--no-cov",
            "--junit",
            "--coverage",
            "--artifacts",
            "--artifacts-dir",
            "--keep",
            "--json",
            "--quiet",
            "[default: 20m]",
        ],
    ]
    .concat();
    let commands: [(&[&str], &[&str]); 15] = [
        (&[], &["run", "test", "attach", "ps", "rm", "gc", "doctor", "image", "--version"]),
        (&["run"], &run),
        (&["test"], &test),
        (&["attach"], &["<SANDBOX>", "COMMAND"]),
        (&["ps"], &["--json"]),
        (&["rm"], &["SANDBOXES", "--all", "--json"]),
        (&["gc"], &["--json"]),
        (&["doctor"], &["--json"]),
        (&["image"], &["ls", "build", "inspect", "tag", "rm", "prune", "--json"]),
        (&["image", "ls"], &["--json"]),
        (
            &["image", "build"],
            &[
                "STOCK|RECIPE",
                "--name",
                "--from",
                "--apt",
                "--pip",
                "--requirements",
                "--npm",
                "--run",
                "--copy",
                "--secret",
                "--no-cache",
            ],
        ),
        (&["image", "inspect"], &["<IMAGE>"]),
        (&["fork"], &["<SANDBOX>", "--keep", "--json", "COMMAND"]),
        (&["df"], &["--json"]),
        (&["image", "rm"], &["<IMAGE>"]),
    ];
    for (command, options) in commands {
        let help = world.program(command).args(["--help"]).run();
        assert_eq!(help.code, Some(0), "{help}");
        assert!(help.err.is_empty(), "{help}");
        for option in
            options.iter().chain(&["--data-dir", "TRIALRUN_DATA_DIR", "--cache-dir", "TRIALRUN_CACHE_DIR", "--verbose"])
        {
            assert!(help.out.contains(option), "{command:?} --help does not name {option}: {help}");
        }
    }
    let version = world.program(["--version"]).run();
    assert_eq!(
        (version.code, version.out.trim()),
        (Some(0), concat!("trialrun ", env!("CARGO_PKG_VERSION"))),
        "{version}"
    );
}

/// A wrong call has its own code (120), which no test runner uses, and says what would be right.
#[test]
fn wrong_calls_name_the_way_out() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let project = project::write(world.scratch(), "p", &[("tests/test_a.py", "def test_a(): pass\n")]);
    let project = project.display().to_string();
    let cases: [(&[&str], &[&str]); 15] = [
        (&["--env", "=x"], &["--env \"=x\" has no name"]),
        (&["--env", "NOT_SET_HERE"], &["--env NOT_SET_HERE", "NOT_SET_HERE=VALUE"]),
        (&["--memory", "12x"], &["--memory", "12x", "512M"]),
        (&["--memory", "1M"], &["--memory is", "must be between"]),
        (&["--disk", "0"], &["--disk is 0", "must be between"]),
        (&["--vcpu", "0"], &["--vcpu is 0", "between 1 and 512"]),
        (&["--pids", "many"], &["--pids", "many"]),
        (&["--timeout", "soon"], &["--timeout", "soon", "10m"]),
        (&["--timeout", "0"], &["--timeout", "before it starts"]),
        (&["--network", "some"], &["\"some\"", "off, registries, web or full"]),
        (&["--allow", "http://"], &["--allow http://"]),
        (&["--allow", "a b:80"], &["--allow a b:80"]),
        (&["--image", "Not/Valid"], &["--image", "Not/Valid", "or host"]),
        (&["--image", "nope"], &["there is no image nope", "host"]),
        (&["--no-such-option"], &["--no-such-option", "--help"]),
    ];
    for (options, words) in cases {
        // Without an image of its own: none of these may come as far as a machine.
        let host: &[&str] = if options[0] == "--image" { &[] } else { &["--image", "host"] };
        refused(&world.program(["run"]).args(host).args(options).args(["--", "true"]).run(), 120, words);
        let test = world.program(["test", &project, "--install-network", "off"]).args(host).args(options).run();
        refused(&test, 120, words);
    }
    for (call, words) in [
        (&["run", "--image", "host"][..], &["COMMAND", "--help"][..]),
        (
            &["run", "--image", "host", "--upload", "nowhere", "--", "true"],
            &["--upload \"nowhere\"", "HOST_PATH:PATH_INSIDE"],
        ),
        (&["run", "--image", "host", "--user", "nobody-here", "--", "true"], &["nobody-here"]),
        (&["run", "--image", "host", "--workdir", "/no/such", "--", "true"], &["/no/such"]),
        (&["rm", "nope"], &["no running sandbox nope", "trialrun ps"]),
        (&["rm"], &["SANDBOXES"]),
        (&["attach", "nope", "--", "true"], &["no running sandbox nope", "trialrun ps"]),
        (&["image", "inspect", "nope"], &["there is no image nope", "host"]),
        (&["image", "rm", "nope"], &["there is no image nope"]),
        (
            &["image", "build", "nope"],
            &["\"nope\" is neither a stock image (python is) nor a recipe's file or folder", "--name NAME"],
        ),
        (&["no-such-command"], &["no-such-command", "--help"]),
        (&[], &["--help"]),
    ] {
        refused(&world.program(call).run(), 120, words);
    }
    let upload =
        world.program(["run", "--image", "host", "--upload", "/no/such/file:/workspace/x", "--", "true"]).run();
    refused(&upload, 121, &["/no/such/file"]);
    // With --json the same words come as JSON, too.
    for call in [
        &["rm", "nope", "--json"][..],
        &["image", "inspect", "nope", "--json"],
        &["run", "--json", "--image", "nope", "--", "true"],
    ] {
        let output = world.program(call).run();
        let error = output.json();
        assert!(error["schema"] == 1 && error["error"]["exit_code"] == 120, "{output}");
        assert!(error["error"]["message"].as_str().is_some_and(|m| m.contains("nope")), "{output}");
    }
    Ok(())
}

#[test]
fn the_doctor_tells_each_finding_with_its_consequence_and_remedy() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let json = world.program(["doctor", "--json"]).run();
    let report = json.json();
    assert!(json.code == Some(0) && report["schema"] == 1, "{json}");
    let findings = report["findings"].as_array().context("findings")?;
    let text = world.program(["doctor"]).run();
    assert_eq!(text.code, Some(0), "{text}");
    for name in [
        "root",
        "kernel",
        "namespaces",
        "seccomp",
        "cgroup layout",
        "overlay",
        "id-mapped mounts",
        "btrfs",
        "erofs",
        "nftables",
        "KVM",
        "criu",
        "qemu",
    ] {
        let finding = findings
            .iter()
            .find(|f| f["name"].as_str().is_some_and(|n| n.to_lowercase().contains(&name.to_lowercase())));
        let finding = finding.with_context(|| format!("{name}: {json}"))?;
        assert!(text.out.contains(finding["name"].as_str().unwrap_or("?")), "{text}");
        let told = |key: &str| finding[key].as_str().is_some_and(|t| !t.is_empty());
        assert!(told("found"), "{finding}");
        if finding["state"] != "good" {
            assert!(told("consequence") && told("fix"), "{finding}");
            assert!(text.out.contains("so: ") && text.out.contains("fix: "), "{text}");
        }
    }
    Ok(())
}

#[test]
fn lists_are_text_and_json_also_when_they_are_empty() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    assert_eq!(world.program(["ps"]).run().out, "no sandboxes\n");
    assert_eq!(world.program(["ps", "--json"]).run().json(), json!({ "schema": 1, "sandboxes": [] }));
    assert_eq!(world.program(["gc"]).run().out, "nothing to remove\n");
    assert_eq!(
        world.program(["gc", "--json"]).run().json(),
        json!({ "schema": 1, "removed": [], "failed": [], "released_bytes": 0 })
    );
    assert_eq!(world.program(["rm", "--all", "--json"]).run().json(), json!({ "schema": 1, "deleted": [] }));
    let images = world.program(["image", "ls", "--json"]).run().json();
    let python = images["images"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|i| i["names"].as_array().is_some_and(|names| names.contains(&json!("python"))))
        .context("python")?;
    let digest = python["image"]["digest"].as_str().context("a digest")?;
    let text = world.program(["image", "ls"]).run();
    assert!(text.out.contains(digest) && text.out.contains("host: "), "{text}");
    let inspect = |image: &str| world.program(["image", "inspect", image, "--json"]).run().json();
    assert_eq!(inspect("python"), json!({ "schema": 1, "image": python["image"] }));
    assert_eq!(inspect(digest), inspect("python"));
    // By its digest it is as good as by its name.
    let run = world.program(["run", "--image", digest, "--", "python3", "-c", "print(6*7)"]).run();
    assert_eq!((run.code, run.out.as_str()), (Some(0), "42\n"), "{run}");
    Ok(())
}

fn unprivileged(program: &Path, args: &[&str], scratch: &Path) -> Result<Output> {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(program).args(args);
    command
        .env("TRIALRUN_DATA_DIR", scratch.join("theirs"))
        .env("TRIALRUN_CACHE_DIR", scratch.join("cache"))
        .env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(Started::new(command.spawn()?, Duration::from_secs(60)).finish())
}

#[test]
fn without_root_one_line_says_so_and_how() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let program = world.scratch().join("trialrun");
    fs::copy(binary(), &program)?;
    mode(&program, 0o755)?;
    mode(world.scratch(), 0o755)?;
    let calls: [&[&str]; 7] = [
        &["run", "--", "true"],
        &["test", "/usr/lib/python3"],
        &["ps"],
        &["rm", "x"],
        &["gc"],
        &["image", "ls"],
        &["attach", "x"],
    ];
    for call in calls {
        let output = unprivileged(&program, call, world.scratch())?;
        let wrong_folder = call[0] == "test" && !output.err.contains("root");
        assert!(
            output.code == Some(120) && output.out.is_empty() && output.err.lines().count() == 1,
            "{call:?}: {output}"
        );
        assert!(wrong_folder || (output.err.contains("root") && output.err.contains("sudo")), "{call:?}: {output}");
    }
    let json = unprivileged(&program, &["ps", "--json"], world.scratch())?;
    assert!(json.json()["error"]["message"].as_str().is_some_and(|m| m.contains("sudo")), "{json}");
    // What needs no rights works.
    let doctor = unprivileged(&program, &["doctor"], world.scratch())?;
    assert!(
        doctor.code == Some(0) && doctor.out.contains("MISSING   root") && doctor.out.contains("fix: sudo trialrun"),
        "{doctor}"
    );
    assert_eq!(unprivileged(&program, &["run", "--help"], world.scratch())?.code, Some(0));
    assert!(!world.scratch().join("theirs").exists() && !world.scratch().join("cache").exists());
    Ok(())
}

#[test]
fn directories_that_are_files_or_open_to_others_are_refused() -> Result<()> {
    let Some(world) = World::new() else { return Ok(()) };
    let file = world.scratch().join("file");
    fs::write(&file, "x")?;
    let dir = |name: &str, bits: u32, owner: Option<u32>| -> Result<_> {
        let dir = world.scratch().join(name);
        fs::create_dir(&dir)?;
        mode(&dir, bits)?;
        chown(&dir, owner, None)?;
        Ok(dir)
    };
    let (read, write, other) =
        (dir("read", 0o755, None)?, dir("write", 0o777, None)?, dir("other", 0o700, Some(65534))?);
    let open = |option: &str, dir: &Path| {
        let dir = dir.display().to_string();
        world.program(["run", "--image", "host", option, &dir, "--", "true"]).run()
    };
    let chmod = |dir: &Path| format!("chmod 700 {}", dir.display());
    for option in ["--data-dir", "--cache-dir"] {
        refused(&open(option, &file), 121, &[&file.display().to_string(), "is not a directory", option]);
        refused(&open(option, &file.join("below")), 121, &[&file.display().to_string(), option]);
        refused(&open(option, &write), 121, &["mode 777", &chmod(&write)]);
        refused(&open(option, &other), 121, &["belongs to uid 65534"]);
        refused(&open(option, Path::new("/proc/nope")), 121, &["/proc/nope", option]);
    }
    refused(&open("--data-dir", &read), 121, &["open to other users (mode 755)", &chmod(&read)]);
    // The remedy is one.
    mode(&read, 0o700)?;
    assert_eq!(open("--data-dir", &read).code, Some(0));
    assert!(
        fs::read_dir(&write)?.next().is_none() && fs::read_dir(&other)?.next().is_none(),
        "something was put there"
    );
    Ok(())
}

#[test]
fn run_passes_input_output_and_exit_status_through() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let run = |args: &[&str]| world.program(["run"]).args(args);
    let hello = run(&["--", "python3", "-c", "print(6*7)"]).run();
    assert_eq!((hello.code, hello.out.as_str(), hello.err.as_str()), (Some(0), "42\n", ""), "{hello}");
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let cat = run(&["--", "cat"]).input(bytes.clone()).run();
    assert!(cat.code == Some(0) && cat.bytes == bytes, "{} bytes came back", cat.bytes.len());
    let unread = run(&["--no-stdin", "--", "cat"]).input("unread").run();
    assert_eq!((unread.code, unread.out.as_str()), (Some(0), ""), "{unread}");
    let both = run(&["--", "sh", "-c", "echo out; echo err >&2; exit 42"]).run();
    assert_eq!((both.code, both.out.as_str(), both.err.as_str()), (Some(42), "out\n", "err\n"), "{both}");
    let environment = run(&[
        "--env",
        "A=b=c d",
        "--env",
        "HERE",
        "--workdir",
        "/tmp",
        "--user",
        "root",
        "--",
        "sh",
        "-c",
        "echo $A $HERE $PWD $(id -u)",
    ]);
    assert_eq!(environment.env("HERE", "there").run().out, "b=c d there /tmp 0\n");
    for (line, code, said) in [
        (&["true"][..], 0, ""),
        (&["sh", "-c", "exit 255"], 255, ""),
        (&["sh", "-c", "kill -9 $$"], 137, ""),
        (&["sh", "-c", "kill -TERM $$"], 143, ""),
        (&["no-such-program"], 127, "no-such-program"),
        (&["/no/such/program"], 127, "/no/such/program"),
        (&["/etc/passwd"], 126, "/etc/passwd"),
        (&["/etc"], 126, "/etc"),
    ] {
        let output = run(&["--"]).args(line).run();
        assert!(output.code == Some(code) && output.out.is_empty() && output.err.contains(said), "{line:?}: {output}");
        assert!(said.is_empty() == output.err.is_empty(), "{line:?}: {output}");
    }
    let late = run(&["--timeout", "1s", "--", "sh", "-c", "echo so far; sleep 100"]).run();
    assert!(
        late.code == Some(124)
            && late.out == "so far\n"
            && late.err.contains("timed out after 1.")
            && late.err.contains("tree was killed"),
        "{late}"
    );
    let fat =
        run(&["--memory", "64M", "--", "python3", "-c", "b = bytearray(1 << 28); b[::4096] = b'x' * len(b[::4096])"])
            .run();
    assert!(
        fat.code == Some(137) && fat.err.contains("memory limit was reached") && fat.err.contains("--memory"),
        "{fat}"
    );
    let full = run(&["--disk", "32M", "--", "sh", "-c", "cat /dev/zero > file"]).run();
    assert!(full.code == Some(1) && full.err.contains("disk is full (--disk)"), "{full}");
    Ok(())
}

#[test]
fn run_as_json_keeps_status_output_and_cause_apart() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let run = |args: &[&str]| world.program(["run", "--json"]).args(args).run();
    let three = run(&["--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    let value = three.json();
    assert!(three.code == Some(3) && three.err.is_empty() && three.out.lines().count() == 1, "{three}");
    assert!(
        value["schema"] == 1 && value["exit_code"] == 3 && value["stdout"] == "out\n" && value["stderr"] == "err\n",
        "{three}"
    );
    assert!(value["outcome"]["ended"] == "Exited" && value["outcome"]["status"] == json!({ "Code": 3 }), "{three}");
    assert!(value["truncated"] == false && value["stdout_bytes"] == 4, "{three}");
    let signal = run(&["--", "sh", "-c", "kill -9 $$"]);
    assert!(signal.code == Some(137) && signal.json()["outcome"]["status"] == json!({ "Signal": 9 }), "{signal}");
    let missing = run(&["--", "no-such-program"]);
    let refusal = &missing.json()["outcome"]["ended"]["Refused"];
    assert!(
        missing.code == Some(127)
            && refusal["kind"] == "NotFound"
            && missing.json()["outcome"]["status"] == Value::Null,
        "{missing}"
    );
    let late = run(&["--timeout", "500ms", "--", "sleep", "100"]);
    assert!(late.code == Some(124) && late.json()["outcome"]["ended"] == "TimedOut", "{late}");
    let much = run(&["--", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"]);
    let value = much.json();
    assert!(value["truncated"] == true && value["stdout_bytes"] == 3_000_000, "{}", much.out.len());
    assert!(value["stdout"].as_str().is_some_and(|s| s.len() == 1 << 20));
    Ok(())
}

#[test]
fn run_uploads_files_and_folders_first() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let dir = project::write(
        world.scratch(),
        "with space",
        &[("a.txt", "a"), ("sub/b.txt", "b"), (".hidden", "h"), ("node_modules/c", "c")],
    );
    let made = Command::new("mkfifo").arg(dir.join("fifo")).status()?;
    assert!(made.success());
    let upload = format!("{}:/workspace/in/folder", dir.display());
    let file = format!("{}:/workspace/one.txt", dir.join("a.txt").display());
    let output = world
        .program([
            "run",
            "--upload",
            &upload,
            "--upload",
            &file,
            "--",
            "sh",
            "-c",
            "cd in/folder && find . -type f | sort && cat ../../one.txt && touch mine",
        ])
        .run();
    assert_eq!(
        (output.code, output.out.as_str()),
        (Some(0), "./.hidden\n./a.txt\n./node_modules/c\n./sub/b.txt\na"),
        "{output}"
    );
    assert!(output.err.contains("left out: ") && output.err.contains("a FIFO does not travel"), "{output}");
    Ok(())
}

#[test]
fn a_machine_that_run_keeps_is_listed_entered_and_removed() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let kept = world.program(["run", "--keep", "--", "sh", "-c", "echo left > file; exit 4"]).run();
    assert!(kept.code == Some(4) && kept.err.contains("trialrun attach sb-"), "{kept}");
    let listed = world.program(["ps", "--json"]).run().json();
    let row = &listed["sandboxes"][0];
    let id = row["id"].as_str().context("an id")?;
    assert!(
        row["state"] == "running"
            && row["image"] == "python"
            && row["expires_ms"].as_u64() > row["created_ms"].as_u64(),
        "{listed}"
    );
    let text = world.program(["ps"]).run();
    assert!(text.out.contains(id) && text.out.contains("running") && text.out.contains("python"), "{text}");
    assert_eq!(world.program(["attach", id, "--", "cat", "file"]).run().out, "left\n");
    // gc leaves alone what lives.
    assert_eq!(world.program(["gc", "--json"]).run().json()["removed"], json!([]));
    let removed = world.program(["rm", id, "--json"]).run();
    assert_eq!(removed.json(), json!({ "schema": 1, "deleted": [id] }), "{removed}");
    assert_eq!(world.program(["ps"]).run().out, "no sandboxes\n");
    Ok(())
}

/// The cache of the tests is the one thing that all of them share; nothing of a test may open it to others.
#[test]
fn the_shared_cache_stays_closed_to_others() -> Result<()> {
    let Some(_world) = World::with_python() else { return Ok(()) };
    for dir in [cache_dir(), cache_dir().join("images")] {
        let mode = fs::metadata(&dir)?.permissions().mode();
        assert_eq!(mode & 0o077, 0, "{}: {mode:o}", dir.display());
    }
    Ok(())
}
