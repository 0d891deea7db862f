//! Suites that lie about themselves. (`suite.rs` has the honest ones, and the ordinary ways to end.)

use anyhow::Result;
use std::path::Path;
use trialrun_tests::{World, program::Output, project};

fn report(world: &World, project: &Path) -> (serde_json::Value, Output) {
    let output = world.program(["test", "--json", "--no-cov"]).args([project]).run();
    let json = output.json();
    assert_eq!(json["exit_code"].as_i64(), output.code.map(i64::from), "{output}");
    (json, output)
}

#[test]
fn a_conftest_that_turns_the_exit_status_into_0_makes_nothing_green() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let lie = "def pytest_sessionfinish(session): session.exitstatus = 0\n";
    let none = project::write(world.scratch(), "none", &[("test_it.py", "x = 1\n"), ("conftest.py", lie)]);
    let (json, ran) = report(&world, &none);
    assert_eq!((ran.code, json["verdict"]["kind"].as_str()), (Some(5), Some("nothing_ran")), "{ran}");
    let failing =
        project::write(world.scratch(), "failing", &[("test_it.py", "def test_a(): assert 0\n"), ("conftest.py", lie)]);
    let (json, ran) = report(&world, &failing);
    assert_eq!((ran.code, json["verdict"]["kind"].as_str()), (Some(123), Some("unproven")), "{ran}");
    Ok(())
}

#[test]
fn a_suite_that_kills_everything_it_can_or_breaks_its_runner_is_not_green() -> Result<()> {
    let Some(world) = World::with_python() else { return Ok(()) };
    let all = project::write(world.scratch(), "all", &[("test_it.py", "import os\ndef test_a(): os.kill(-1, 9)\n")]);
    let (json, ran) = report(&world, &all);
    assert!(ran.code != Some(0) && json["verdict"]["kind"] != "passed", "{ran}");
    let hook = "def pytest_runtest_logreport(report): raise RuntimeError('in a hook')\n";
    let hook = project::write(world.scratch(), "hook", &[("conftest.py", hook), ("test_a.py", "def test_a(): pass\n")]);
    let (json, ran) = report(&world, &hook);
    assert!(ran.code.is_some_and(|c| c != 0) && json["verdict"]["kind"] == "failed", "{ran}");
    Ok(())
}
