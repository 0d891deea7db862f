//! Images from recipes: what is in them, when a step is run again, and what never lands in a layer.

use anyhow::{Context, Result};
use std::{fs, time::Duration};
use trialrun_tests::{World, cache_dir};

/// A name of its own: images are shared between tests.
fn name(word: &str) -> String {
    format!("recipe-{word}-{}", std::process::id())
}

/// Removes its images when the test ends, whatever happened.
struct Images<'a>(&'a World, Vec<String>);

impl Drop for Images<'_> {
    fn drop(&mut self) {
        for name in &self.1 {
            self.0.program(["image", "rm", name.as_str()]).run();
        }
        self.0.program(["image", "prune"]).run();
    }
}

fn digest(world: &World, name: &str) -> Result<String> {
    let json = world.program(["image", "inspect", name, "--json"]).run().json();
    Ok(json["image"]["digest"].as_str().with_context(|| json.to_string())?.to_owned())
}

#[test]
fn a_recipe_builds_what_its_steps_say_and_the_same_again() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let image = name("steps");
    let _images = Images(&world, vec![image.clone()]);
    let dir = world.scratch().join("recipe");
    fs::create_dir_all(dir.join("src/deep"))?;
    fs::write(dir.join("src/deep/f"), "from the host\n")?;
    fs::write(
        dir.join("image.toml"),
        format!(
            "name = '{image}'\nnetwork = 'off'\nworkdir = '/srv'\n[env]\nMODE = 'two words'\n\
             [[step]]\ncopy = ['src', '/opt/src']\n\
             [[step]]\nrun = '''\nset -e\nrm /etc/debian_version; rm -r /usr/share/doc/bash; mkdir /usr/share/doc/bash\n\
             install -o runtime -m 2750 -d /srv/d; echo $MODE > /srv/d/f; ln /srv/d/f /srv/d/g; ln -s f /srv/d/l\n\
             install -m 4755 /bin/true /srv/s; echo passing > /tmp/x\n'''\n\
             [[step]]\nrun = 'id -un > /srv/who'\nuser = 'runtime'\n[[step]]\nrun = 'rm /opt/src/deep/f; date > /srv/d/h'\n"
        ),
    )?;
    // /srv belongs to root: the third step can't write there as the user.
    let failed = world.program(["image", "build"]).args([&dir]).run();
    assert_eq!(failed.code, Some(122), "{failed}");
    assert!(failed.err.contains("step 3 (run id -un > /srv/who) failed: exit status"), "{failed}");
    let text =
        fs::read_to_string(dir.join("image.toml"))?.replace("> /srv/who", "> ~/who").replace("; date > /srv/d/h", "");
    fs::write(dir.join("image.toml"), text)?;
    let built = world.program(["image", "build"]).args([&dir]).run();
    assert_eq!(built.code, Some(0), "{built}");
    assert_eq!(built.err.matches("built before").count(), 2, "{built}");
    let first = digest(&world, &image)?;
    let look = "cat /srv/d/f; stat -c '%a %U %h' /srv/d /srv/d/g /srv/s; ls /etc/debian_version /tmp /usr/share/doc/bash 2>&1; \
                cat /workspace/who; ls /opt/src/deep; pwd; echo $MODE; date -r /srv/d/f +%F";
    let ran = world.program(["run", "--image", &image, "--", "sh", "-c", look]).run();
    let expected = "two words\n2750 runtime 2\n644 root 2\n4755 root 1\nls: cannot access '/etc/debian_version': No such file or directory\n\
                    /tmp:\n\n/usr/share/doc/bash:\nruntime\n/srv\ntwo words\n2024-01-01\n";
    assert_eq!(ran.out, expected, "{ran}");
    // All of it again gives the same bytes; nothing changed gives no work; a changed file is seen.
    let again = world.program(["image", "build", "--no-cache"]).args([&dir]).run();
    assert_eq!(again.code, Some(0), "{again}");
    assert!(!again.err.contains("built before"), "{again}");
    assert_eq!(digest(&world, &image)?, first);
    let nothing = world.program(["image", "build"]).args([&dir]).run();
    assert_eq!(nothing.err.matches("built before").count(), 4, "{nothing}");
    fs::write(dir.join("src/new"), "x")?;
    let changed = world.program(["image", "build"]).args([&dir]).run();
    assert_eq!((changed.code, changed.err.matches("built before").count()), (Some(0), 0), "{changed}");
    assert_ne!(digest(&world, &image)?, first);
    Ok(())
}

#[test]
fn packages_of_every_client_are_installed_from_the_registries() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let image = name("packages");
    let _images = Images(&world, vec![image.clone()]);
    fs::write(world.scratch().join("r.txt"), "iniconfig==2.0.0\n")?;
    let build = |more: &[&str]| {
        let words = ["image", "build", "--name", &image, "--apt", "tree", "--pip", "pluggy==1.5.0", "-r", "r.txt"];
        world.program(words).args(more).dir(world.scratch()).patience(Duration::from_secs(300)).run()
    };
    let built = build(&[]);
    assert_eq!(built.code, Some(0), "{built}");
    let first = digest(&world, &image)?;
    // Imports take the compiled files that the layer has.
    let look = "tree --version | head -c 4; echo; python3 -v -c 'import pluggy, iniconfig; print(pluggy.__version__)' 2>&1 | \
                grep -E '(pluggy|iniconfig)/__pycache__/__init__.*matches|^1.5.0' | wc -l";
    let ran = world.program(["run", "--image", &image, "--", "sh", "-c", look]).run();
    assert_eq!(ran.out, "tree\n3\n", "{ran}");
    let again = build(&["--no-cache"]);
    assert_eq!(again.code, Some(0), "{again}");
    assert_eq!(digest(&world, &image)?, first, "{again}");
    // The network is closed to what is no registry.
    let closed = world
        .program([
            "image",
            "build",
            "--name",
            &image,
            "--run",
            "python3 -c 'import socket; socket.create_connection((\"203.0.113.1\", 443), 5)'",
        ])
        .run();
    assert_eq!(closed.code, Some(122), "{closed}");
    assert!(closed.err.contains("Connection refused"), "{closed}");
    Ok(())
}

#[test]
fn a_secret_is_in_its_step_and_in_no_log_and_no_layer() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let image = name("secret");
    let _images = Images(&world, vec![image.clone()]);
    let secret = "correct-horse-battery";
    let build = |run: &str| {
        let words = ["image", "build", "--name", &image, "--network", "off", "--secret", "TOKEN", "--run", run];
        world.program(words).env("TOKEN", secret).run()
    };
    let built = build("echo \"it is $TOKEN\"; echo $TOKEN | sha256sum > /srv/sum");
    assert_eq!(built.code, Some(0), "{built}");
    assert!(built.err.contains("it is ***") && !built.err.contains(secret), "{built}");
    let ran = world.program(["run", "--image", &image, "--", "sh", "-c", "cat /srv/sum; echo [$TOKEN]"]).run();
    assert!(ran.out.len() > 64 && ran.out.ends_with("[]\n"), "{ran}");
    for leak in [
        "echo $TOKEN > /srv/kept",
        "ln -s $TOKEN /srv/link",
        "mkdir /srv/$TOKEN",
        "printf %s $TOKEN$TOKEN | cat - > ~/x",
    ] {
        let leaked = build(leak);
        assert_eq!(leaked.code, Some(122), "{leak}: {leaked}");
        assert!(leaked.err.contains("the secret TOKEN") && !leaked.err.contains(secret), "{leak}: {leaked}");
    }
    // Nothing of a refused layer stays anywhere in the cache.
    let found = std::process::Command::new("grep")
        .args(["-rlsF", secret])
        .arg(cache_dir().join("images"))
        .arg(cache_dir().join("staged"))
        .output()?;
    assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
    let missing = world
        .program(["image", "build", "--name", &image, "--network", "off", "--secret", "ABSENT", "--run", "true"])
        .run();
    assert_eq!(missing.code, Some(120), "{missing}");
    let short = world.program(["image", "build", "--name", &image, "--secret", "A=short", "--run", "true"]).run();
    assert_eq!(short.code, Some(120), "{short}");
    Ok(())
}

#[test]
fn an_image_that_something_stands_on_is_not_removed() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let (below, above) = (name("below"), name("above"));
    let _images = Images(&world, vec![above.clone(), below.clone()]);
    let build = |image: &str, from: &str, line: &str| {
        let built =
            world.program(["image", "build", "--name", image, "--from", from, "--network", "off", "--run", line]).run();
        assert_eq!(built.code, Some(0), "{built}");
    };
    build(&below, "python", "echo below > /srv/below");
    build(&above, &below, "echo above > /srv/above");
    let digest = digest(&world, &below)?;
    let refused = world.program(["image", "rm", &digest]).run();
    assert_eq!(refused.code, Some(121), "{refused}");
    assert!(refused.err.contains("stands on it"), "{refused}");
    // Its name may go; what stands on it keeps it, also from being pruned.
    assert_eq!(world.program(["image", "rm", &below]).run().code, Some(0));
    assert_eq!(world.program(["image", "prune"]).run().code, Some(0));
    let kept = world.program(["run", "--image", &above, "--keep", "--", "cat", "/srv/below", "/srv/above"]).run();
    assert_eq!((kept.code, kept.out.as_str()), (Some(0), "below\nabove\n"), "{kept}");
    for image in [&above, "python"] {
        let refused = world.program(["image", "rm", image]).run();
        assert!(refused.code == Some(121) && refused.err.contains("running machine"), "{refused}");
    }
    assert_eq!(world.program(["image", "prune"]).run().code, Some(0));
    assert_eq!(world.program(["rm", "--all"]).run().code, Some(0));
    assert_eq!(world.program(["image", "rm", &above]).run().code, Some(0));
    let pruned = world.program(["image", "prune", "--json"]).run().json();
    assert!(pruned["removed"].as_array().is_some_and(|all| all.iter().any(|d| *d == digest)), "{pruned}");
    Ok(())
}

#[test]
fn a_name_can_be_given_and_a_wrong_recipe_is_named() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let tagged = name("tag");
    let _images = Images(&world, vec![tagged.clone()]);
    assert_eq!(world.program(["image", "tag", "python", &tagged]).run().code, Some(0));
    assert_eq!(digest(&world, &tagged)?, digest(&world, "python")?);
    for (words, said) in [
        (vec!["image", "tag", "nothing-there", "x"], "nothing-there"),
        (vec!["image", "tag", "python", "python"], "stock"),
        (vec!["image", "build", "--run", "true"], "no name"),
        (vec!["image", "build", "--name", "python", "--run", "true"], "stock"),
        (vec!["image", "build", "--name", "x", "--from", "host", "--run", "true"], "host"),
        (vec!["image", "build", "no-such-file.toml"], "no-such-file.toml"),
        (vec!["image", "build", "--name", "x", "--network", "off", "--copy", "nothing-here:/x"], "nothing-here"),
        (vec!["image", "build", "--name", "x", "--copy", "a"], "HOST_PATH:PATH_INSIDE"),
        (vec!["image", "build", "--name", "x", "--apt=-oX=y"], "option"),
    ] {
        let run = world.program(words.clone()).run();
        assert!(run.code == Some(120) || run.code == Some(2), "{words:?}: {run}");
        assert!(run.err.contains(said), "{words:?}: {run}");
    }
    Ok(())
}

/// An image cache of the test's own, with two steps of a small registry-free image in it.
#[test]
fn the_budget_takes_what_can_be_had_again_and_leaves_what_is_named_or_used() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let cache = world.scratch().join("cache");
    fs::create_dir(&cache)?;
    fs::set_permissions(&cache, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    // The stock image as it is, by hard links: its trees are never written to.
    let copied = std::process::Command::new("cp")
        .args(["--archive", "--link"])
        .arg(cache_dir().join("images"))
        .arg(&cache)
        .status()?;
    assert!(copied.success());
    let program = |words: &[&str]| world.program(words).env("TRIALRUN_CACHE_DIR", &cache);
    // What other tests have there is theirs.
    for name in names(&program(&["image", "ls", "--json"]).run().json()) {
        if name != "python" {
            program(&["image", "rm", &name]).run();
        }
    }
    program(&["image", "prune"]).run();
    let build = |name: &str, line: &str| {
        let built = program(&["image", "build", "--name", name, "--network", "off", "--run", line]).run();
        assert_eq!(built.code, Some(0), "{built}");
    };
    build("kept", "head -c 3M /dev/urandom > /srv/kept");
    build("passing", "head -c 5M /dev/urandom > /srv/first");
    // The name moves on: its first layer is nobody's now, and so is the next one's after it.
    build("passing", "head -c 7M /dev/urandom > /srv/second");
    build("passing", "echo last > /srv/last");
    fs::create_dir_all(cache.join("oci/blobs"))?;
    fs::write(cache.join("oci/blobs/aa"), vec![1; 9 << 20])?;
    let df = || program(&["df", "--json"]).run().json();
    let of = |json: &serde_json::Value, kind: &str, what: &str| {
        json["usage"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|u| u["kind"] == kind)
            .and_then(|u| u[what].as_u64())
            .unwrap_or(0)
    };
    let before = df();
    assert_eq!((of(&before, "steps", "items"), of(&before, "downloads", "bytes")), (2, 9 << 20), "{before}");
    assert_eq!(of(&before, "steps", "reclaimable_bytes"), of(&before, "steps", "bytes"), "{before}");
    assert_eq!(of(&before, "images", "reclaimable_bytes"), 0, "{before}");
    let cached = ["images", "steps", "downloads", "runtime"].iter().map(|k| of(&before, k, "bytes")).sum::<u64>();
    let config = world.scratch().join("config.toml");
    let gc = |max: u64| -> Result<serde_json::Value> {
        fs::write(&config, format!("[cache]\nmax_bytes = {max}\n"))?;
        Ok(program(&["gc", "--json"]).env("TRIALRUN_CONFIG", &config).run().json()["evicted"].clone())
    };
    // Enough: nothing goes. A little too much: the download. More: the older of the two layers.
    assert_eq!(gc(cached)?["removed"], serde_json::json!([]));
    assert_eq!(gc(cached - 1)?["removed"], serde_json::json!(["aa"]));
    let evicted = gc(cached - (10 << 20))?;
    assert_eq!(evicted["removed"].as_array().map(Vec::len), Some(1), "{evicted}");
    assert_eq!(of(&df(), "steps", "items"), 1);
    // Impossible: all that may go goes, the rest is said.
    let evicted = gc(1)?;
    assert_eq!(evicted["removed"].as_array().map(Vec::len), Some(1), "{evicted}");
    assert!(evicted["over_bytes"].as_u64() > Some(100 << 20), "{evicted}");
    for image in ["kept", "passing", "python"] {
        let ran = program(&["run", "--image", image, "--", "true"]).run();
        assert_eq!(ran.code, Some(0), "{image}: {ran}");
    }
    let text = program(&["df"]).env("TRIALRUN_CONFIG", &config).run();
    assert!(text.code == Some(0) && text.out.contains("of its budget"), "{text}");
    fs::write(&config, "[cache]\nmax_byte = 1\n")?;
    let wrong = program(&["df"]).env("TRIALRUN_CONFIG", &config).run();
    assert!(wrong.code == Some(120) && wrong.err.contains("max_byte"), "{wrong}");
    Ok(())
}

/// The names of all images in `image ls --json`.
fn names(json: &serde_json::Value) -> Vec<String> {
    let images = json["images"].as_array().into_iter().flatten();
    let names = images.flat_map(|image| image["names"].as_array().into_iter().flatten());
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}
