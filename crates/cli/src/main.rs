//! The program `trialrun`: thin faces over the engine.

// In place of std's, which panic when the reader went away (`trialrun test | head`).
macro_rules! print {
    ($($word:tt)*) => { $crate::terminal::put(format_args!($($word)*)) };
}
macro_rules! println {
    ($($word:tt)*) => { $crate::terminal::put(format_args!("{}\n", format_args!($($word)*))) };
}

mod args;
mod attach;
mod config;
mod context;
mod dependencies;
mod df;
mod doctor;
mod failure;
mod fork;
mod image;
mod manage;
mod network;
mod recipe;
mod run;
mod stream;
mod suite;
mod terminal;

use clap::Parser;
use std::process::ExitCode;

/// First argument of a keeper process. Not for people.
const KEEPER: &str = "__keeper";
/// First argument of a process that unpacks an image's layers. Not for people.
const UNPACKER: &str = "__unpack";

fn main() -> ExitCode {
    // Before anything else: a keeper's start is on the hot path of every machine's.
    let mut words = std::env::args_os().skip(1);
    match words.next() {
        Some(word) if word == KEEPER => return keeper(&words.next().unwrap_or_default()),
        Some(word) if word == UNPACKER => return trialrun_oci::unpack::main(),
        _ => {}
    }
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            if !error.use_stderr() {
                return ExitCode::SUCCESS;
            }
            if std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json") {
                let words = error.render().to_string();
                println!("{}", failure::Failure::usage(words.trim_start_matches("error: ").trim()).json());
            }
            // Clap's own 2 is also pytest's "interrupted".
            return ExitCode::from(failure::WRONG_CALL);
        }
    };
    start_log(args.verbose);
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("trialrun: can't start: {e}");
            return ExitCode::from(failure::OURS);
        }
    };
    let json = args.json();
    let code = match runtime.block_on(dispatch(args)) {
        Ok(code) => code,
        Err(failure) => failure.report(json),
    };
    // Blocking reads of a terminal's stdin have no end of their own: they must not hold the exit.
    runtime.shutdown_background();
    ExitCode::from(code)
}

fn keeper(data_dir: &std::ffi::OsStr) -> ExitCode {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).with_ansi(false).init();
    match trialrun_keeper::main(data_dir.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("the keeper lost its engine: {e}");
            ExitCode::FAILURE
        }
    }
}

fn start_log(verbose: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TRIALRUN_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(if verbose { "debug" } else { "error" }));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

async fn dispatch(args: args::Args) -> Result<u8, failure::Failure> {
    use args::Command;
    match args.command {
        Command::Run(run) => run::run(&args.dirs, *run).await,
        Command::Test(test) => suite::test(&args.dirs, *test).await,
        Command::Attach(attach) => attach::attach(&args.dirs, attach).await,
        Command::Fork(fork) => fork::fork(&args.dirs, fork).await,
        Command::Ps(ps) => manage::ps(&args.dirs, &ps).await,
        Command::Rm(rm) => manage::rm(&args.dirs, &rm).await,
        Command::Gc(gc) => manage::gc(&args.dirs, &gc),
        Command::Df(options) => df::df(&args.dirs, &options),
        Command::Doctor(options) => doctor::doctor(&args.dirs, &options),
        Command::Image(image) => image::image(&args.dirs, image).await,
    }
}
