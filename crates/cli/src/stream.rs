//! Passing a followed exec's input, output, signals and terminal size through.

use crate::{failure::Failure, terminal};
use std::io::{Read, Write};
use tokio::signal::unix::{Signal, SignalKind, signal};
use trialrun_engine::{Following, KeeperClient, Output};
use trialrun_keeper::wire::Call;
use trialrun_model::ExecOutcome;

/// How a followed exec ended for its client.
pub enum Ended {
    /// With an outcome.
    Outcome(ExecOutcome),
    /// The client got a signal (its number) and everything is to be cleaned up.
    Interrupted(i32),
}

/// Signals that end the client.
pub struct Interrupts {
    int: Signal,
    term: Signal,
    hup: Signal,
}

impl Interrupts {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the runtime can't.
    pub fn listen() -> Result<Self, Failure> {
        let on = |kind| signal(kind).map_err(|e| Failure::ours(format!("can't listen for signals: {e}")));
        Ok(Self {
            int: on(SignalKind::interrupt())?,
            term: on(SignalKind::terminate())?,
            hup: on(SignalKind::hangup())?,
        })
    }

    /// The next one's number. Cancel-safe.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.int.recv() => 2,
            _ = self.term.recv() => 15,
            _ = self.hup.recv() => 1,
        }
    }

    /// Runs `work` unless a signal comes first.
    ///
    /// # Errors
    /// A failure with the signal's exit code.
    pub async fn guard<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            done = work => Ok(done),
            number = self.next() => Err(interrupted(number)),
        }
    }
}

/// What a client that got a signal ends with.
pub fn interrupted(number: i32) -> Failure {
    Failure { code: (128 + number) as u8, message: "interrupted; the machine is gone".to_owned(), hint: None }
}

/// Where output goes.
pub trait Sink {
    /// Standard output's bytes.
    ///
    /// # Errors
    /// When it can't be written.
    fn stdout(&mut self, bytes: &[u8]) -> std::io::Result<()>;
    /// Standard error's bytes.
    ///
    /// # Errors
    /// When it can't be written.
    fn stderr(&mut self, bytes: &[u8]) -> std::io::Result<()>;
    /// So many bytes are missing here.
    fn dropped(&mut self, _bytes: u64) {}
}

/// Straight through.
pub struct Through;

impl Sink for Through {
    fn stdout(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    fn stderr(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        std::io::stderr().lock().write_all(bytes)
    }

    fn dropped(&mut self, bytes: u64) {
        eprintln!("trialrun: {bytes} bytes of output were not kept");
    }
}

/// Reads our standard input in a thread of its own and gives its pieces.
fn read_stdin() -> tokio::sync::mpsc::Receiver<Vec<u8>> {
    let (to, from) = tokio::sync::mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n) = std::io::stdin().lock().read(&mut buffer) {
            if n == 0 || to.blocking_send(buffer[..n].to_vec()).is_err() {
                break;
            }
        }
    });
    from
}

/// Follows an exec to its end. With `input`, our standard input goes to it; with `pty`, window changes too.
///
/// # Errors
/// A lost machine.
pub async fn follow(
    client: &KeeperClient,
    mut following: Following,
    input: bool,
    pty: bool,
    sink: &mut dyn Sink,
    interrupts: &mut Interrupts,
) -> Result<Ended, Failure> {
    let stdin = following.stdin();
    // By itself: a command that does not read its input meanwhile must hold neither its output nor a signal.
    let mut feed = std::pin::pin!(async {
        if input {
            let mut from = read_stdin();
            while let Some(bytes) = from.recv().await {
                let _ = stdin.write(&bytes).await;
            }
            let _ = stdin.close().await;
        }
    });
    let mut fed = false;
    let exec = following.exec;
    let mut resized = signal(SignalKind::window_change()).map_err(|e| Failure::ours(e.to_string()))?;
    loop {
        tokio::select! {
            biased;
            number = interrupts.next() => return Ok(Ended::Interrupted(number)),
            output = following.next() => {
                let written = match output? {
                    Output::Stdout(bytes) => sink.stdout(&bytes),
                    Output::Stderr(bytes) => sink.stderr(&bytes),
                    Output::Dropped(bytes) => { sink.dropped(bytes); Ok(()) }
                    Output::Ended(outcome) => return Ok(Ended::Outcome(outcome)),
                };
                // A reader of ours that went away (head) ends the conversation, as it would end any writer.
                if written.is_err() {
                    let _ = client.call(&Call::Kill(exec), &[]).await;
                    return Ok(Ended::Interrupted(13));
                }
            }
            () = &mut feed, if !fed => fed = true,
            _ = resized.recv(), if pty => {
                let _ = client.call(&Call::Resize(exec, terminal::size()), &[]).await;
            }
        }
    }
}
