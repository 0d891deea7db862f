//! `trialrun attach`: a shell in a machine that was kept.

use crate::{
    args::{Attach, Dirs},
    context,
    failure::Failure,
    run::{argv, exit_code, terminal_env},
    stream::{self, Ended, Interrupts, Through},
    terminal::{self, Raw},
};
use trialrun_model::{Command, ExecSpec};

/// Runs a shell, or a command, in a running machine.
///
/// # Errors
/// When there is no such machine.
pub async fn attach(dirs: &Dirs, attach: Attach) -> Result<u8, Failure> {
    let engine = context::engine(dirs)?;
    let sandbox = engine.find(&attach.sandbox)?;
    let mut interrupts = Interrupts::listen()?;
    let interactive = terminal::interactive();
    let input = interactive || terminal::stdin_has_content();
    let command = if attach.command.is_empty() {
        Command::Shell("exec bash -i || exec sh -i".to_owned())
    } else {
        argv(attach.command)
    };
    let spec = ExecSpec {
        stdin: input,
        pty: interactive.then(terminal::size),
        env: if interactive { terminal_env() } else { Vec::new() },
        ..ExecSpec::new(command)
    };
    let raw = if interactive { Raw::enter() } else { None };
    let following = sandbox.exec(spec).await?;
    let ended = stream::follow(sandbox.client(), following, input, interactive, &mut Through, &mut interrupts).await?;
    drop(raw);
    match ended {
        Ended::Interrupted(number) => Ok((128 + number) as u8),
        Ended::Outcome(outcome) => Ok(exit_code(&outcome)),
    }
}
