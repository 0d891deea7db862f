//! `trialrun fork`: a machine from the disk of a running one.

use crate::{
    args::{Dirs, Fork},
    context::{self, Steps},
    failure::Failure,
    run::{self, KEEP, Parts},
    stream::Interrupts,
};
use trialrun_engine::{ForkCost, ForkOptions};

/// Forks a machine; with a command, runs it in the fork.
///
/// # Errors
/// When there is no such machine, or it can't be forked. A command's own failure is its exit status.
pub async fn fork(dirs: &Dirs, fork: Fork) -> Result<u8, Failure> {
    let engine = context::engine_for_machine(dirs)?;
    let steps = Steps::new(fork.json || !std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let mut interrupts = Interrupts::listen()?;
    let parent = engine.find(&fork.sandbox)?;
    let options = ForkOptions { attached: true, lease: None };
    let (child, cost) = interrupts.guard(engine.fork(&parent, options)).await??;
    if fork.command.is_empty() {
        let id = child.keep(KEEP).await?;
        if fork.json {
            let (pause_ms, whole_ms) = (cost.pause.as_secs_f64() * 1e3, cost.whole.as_secs_f64() * 1e3);
            let cost = serde_json::json!({
                "pause_ms": pause_ms, "disk_ms": whole_ms, "copied_bytes": cost.copied.map(|bytes| bytes.bytes()),
            });
            println!("{}", serde_json::json!({ "schema": 1, "id": id, "parent": parent.id, "cost": cost }));
        } else {
            println!("{id}");
            let minutes = KEEP.as_secs() / 60;
            eprintln!("trialrun: {}; kept for {minutes} minutes: trialrun attach {id}", words(&cost));
        }
        return Ok(0);
    }
    let parts = Parts { timeout: None, user: None, workdir: None, no_stdin: false };
    let result = run::inside(&child, parts, &[], fork.json, &steps, &mut interrupts, fork.command).await;
    if fork.keep && result.is_ok() {
        let id = child.keep(KEEP).await?;
        eprintln!("trialrun: the fork is kept for {} minutes: trialrun attach {id}", KEEP.as_secs() / 60);
    } else {
        child.delete().await?;
    }
    result
}

fn words(cost: &ForkCost) -> String {
    let pause = format!("the parent stood still for {:.1} ms", cost.pause.as_secs_f64() * 1e3);
    match cost.copied {
        None => pause,
        Some(bytes) => {
            format!("{pause} while {bytes} were copied (trialrun doctor says what a fork without a copy needs)")
        }
    }
}
