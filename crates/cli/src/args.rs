//! The command line.

use clap::{Args as ClapArgs, Parser, Subcommand};
use std::{ffi::OsString, path::PathBuf, time::Duration};
use trialrun_model::{ByteSize, ImageRef, Limits};

/// Runs what a coding agent wrote in a machine that is thrown away, and says truthfully whether it works.
#[derive(Debug, Parser)]
#[command(name = "trialrun", version, max_term_width = 110)]
pub struct Args {
    #[command(flatten)]
    pub dirs: Dirs,
    /// Say more of what is done, on standard error
    #[arg(long, short, global = true)]
    pub verbose: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, ClapArgs)]
pub struct Dirs {
    /// State: the store, machines, their layers
    #[arg(long, global = true, env = "TRIALRUN_DATA_DIR", default_value = "/var/lib/trialrun")]
    pub data_dir: PathBuf,
    /// What can be made again: images
    #[arg(long, global = true, env = "TRIALRUN_CACHE_DIR", default_value = "/var/cache/trialrun")]
    pub cache_dir: PathBuf,
    /// Configuration
    #[arg(long, global = true, env = "TRIALRUN_CONFIG", default_value = crate::config::PLACE, value_name = "FILE")]
    pub config: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a new machine and pass its input, output and exit status through
    Run(Box<Run>),
    /// Run a project's test suite in a new machine and say what happened
    Test(Box<Test>),
    /// Open a shell in a machine that was kept
    Attach(Attach),
    /// Make a machine from the disk of a running one; both go their own ways from there
    Fork(Fork),
    /// List sandboxes
    Ps(Json),
    /// Delete sandboxes
    Rm(Rm),
    /// Remove what dead machines left
    Gc(Json),
    /// Say what is on the disk, what of it could go, and the budget
    Df(Json),
    /// Say what this host can do, what that means, and how to get what is missing
    Doctor(Json),
    /// Images: list, build, inspect, remove
    Image(Image),
}

impl Args {
    /// Whether errors are wanted as JSON.
    pub fn json(&self) -> bool {
        match &self.command {
            Command::Run(run) => run.json,
            Command::Test(test) => test.json,
            Command::Attach(_) => false,
            Command::Fork(fork) => fork.json,
            Command::Ps(json) | Command::Gc(json) | Command::Df(json) | Command::Doctor(json) => json.json,
            Command::Rm(rm) => rm.json,
            Command::Image(image) => image.json,
        }
    }
}

#[derive(Debug, ClapArgs)]
pub struct Json {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options that describe a machine.
#[derive(Debug, ClapArgs)]
pub struct Machine {
    /// Image: a name such as python, sha256:…, or host (the host's own system, read-only)
    #[arg(long, default_value = "python", value_name = "IMAGE")]
    pub image: ImageRef,
    /// Virtual CPUs
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub vcpu: u32,
    /// Memory, such as 512M or 4G
    #[arg(long, default_value = "4G", value_name = "SIZE")]
    pub memory: ByteSize,
    /// Size of the writable layer
    #[arg(long, default_value = "8G", value_name = "SIZE")]
    pub disk: ByteSize,
    /// Processes and threads
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub pids: u32,
    /// Environment, NAME=VALUE (or NAME to pass on your own); may be given several times
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Also allow this host, such as example.com:443, *.example.com or 10.0.0.0/8:5432; may be given several times
    #[arg(long, value_name = "HOST[:PORT]")]
    pub allow: Vec<String>,
}

impl Machine {
    pub fn limits(&self) -> Limits {
        Limits { vcpus: self.vcpu, memory: self.memory, pids: self.pids, disk: self.disk }
    }
}

#[derive(Debug, ClapArgs)]
pub struct Run {
    #[command(flatten)]
    pub machine: Machine,
    /// Network: off, registries (the package registries that this host's clients use), web (ports 80 and 443 of public
    /// addresses) or full
    #[arg(long, default_value = "off", value_name = "PRESET")]
    pub network: String,
    /// Kill the whole process tree after so long, such as 90, 90s, 10m
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// User inside, by name or number
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Directory inside
    #[arg(long, short, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Upload this file or folder first: HOST_PATH:PATH_INSIDE; may be given several times
    #[arg(long, value_name = "HOST:INSIDE")]
    pub upload: Vec<String>,
    /// Do not pass standard input on
    #[arg(long)]
    pub no_stdin: bool,
    /// Keep the machine for an hour; trialrun attach opens a shell in it
    #[arg(long)]
    pub keep: bool,
    /// Print the outcome as JSON on standard output, with the command's output inside it
    #[arg(long)]
    pub json: bool,
    /// Program before the command, in place of the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// The command and its arguments; without one, the image's own
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Test {
    /// The project's folder
    #[arg(default_value = ".", value_name = "PATH")]
    pub path: PathBuf,
    #[command(flatten)]
    pub machine: Machine,
    /// Network for the install
    #[arg(long, default_value = "registries", value_name = "PRESET")]
    pub install_network: String,
    /// Network for the tests
    #[arg(long, default_value = "off", value_name = "PRESET")]
    pub network: String,
    /// Kill the suite's whole process tree after so long
    #[arg(long, value_parser = duration, default_value = "20m", value_name = "TIME")]
    pub timeout: Duration,
    /// Run tests in N processes with pytest-xdist; auto takes the machine's vCPUs
    #[arg(short = 'n', long, value_name = "N|auto")]
    pub workers: Option<String>,
    /// Extras to install with the project
    #[arg(long, value_name = "NAME")]
    pub extra: Vec<String>,
    /// Dependency groups to install
    #[arg(long, value_name = "NAME")]
    pub group: Vec<String>,
    /// Install nothing
    #[arg(long)]
    pub no_install: bool,
    /// Install the dependencies anew, and keep them for no other run
    #[arg(long)]
    pub no_cache: bool,
    /// Measure no coverage
    #[arg(long)]
    pub no_cov: bool,
    /// Write the JUnit report here
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Write the coverage report (an HTML folder) here
    #[arg(long, value_name = "DIR")]
    pub coverage: Option<PathBuf>,
    /// Bring back what matches in the project's folder after the run; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub artifacts: Vec<String>,
    /// Where artifacts are put
    #[arg(long, default_value = "trialrun-artifacts", value_name = "DIR")]
    pub artifacts_dir: PathBuf,
    /// Keep the machine for an hour; trialrun attach opens a shell in it
    #[arg(long)]
    pub keep: bool,
    /// Print the report as JSON on standard output; the suite's output goes to standard error
    #[arg(long)]
    pub json: bool,
    /// Do not show the suite's output while it runs
    #[arg(long, short)]
    pub quiet: bool,
    /// A command to run instead of what was detected; with pytest detected and a first word that begins with "-",
    /// arguments for pytest
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Attach {
    /// The sandbox's id or its beginning
    pub sandbox: String,
    /// A command instead of a shell
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Fork {
    /// The id of the sandbox to fork, or its beginning
    pub sandbox: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Keep the fork for an hour also when a command is given
    #[arg(long)]
    pub keep: bool,
    /// A command to run in the fork, which is deleted after it; without one, the fork is kept for an hour
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Rm {
    /// Ids or their beginnings
    #[arg(required_unless_present = "all")]
    pub sandboxes: Vec<String>,
    /// All of them
    #[arg(long)]
    pub all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Image {
    #[command(subcommand)]
    pub command: ImageCommand,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// List images
    Ls,
    /// Build an image from a recipe, or the stock image if it is not there
    Build(Box<crate::recipe::Build>),
    /// Fetch an image from its registry, also when it is here already
    Pull {
        /// Such as oci:HOST/NAME:TAG
        image: ImageRef,
    },
    /// Show an image
    Inspect {
        /// Name or digest
        image: ImageRef,
    },
    /// Give an image another name
    Tag {
        /// Name or digest
        image: ImageRef,
        /// The new name; it is taken from whatever has it
        name: ImageRef,
    },
    /// Remove an image
    Rm {
        /// Name or digest
        image: ImageRef,
    },
    /// Remove the images that have no name and on which nothing stands, such as steps of recipes that changed
    Prune,
}

/// Reads `90`, `90s`, `10m`, `2h`, `500ms`.
fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a time (write 90, 90s, 10m, 2h or 500ms)");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..split].parse().map_err(|_| bad())?;
    let unit = match &text[split..] {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let time = Duration::try_from_secs_f64(number * unit).map_err(|_| bad())?;
    if time.is_zero() { Err("a time of zero would end it before it starts".to_owned()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_as_people_write_them() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for text in ["", "0", "x", "1d", "-1", "1e400"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
