//! Builds the guest agent static and leaves it in OUT_DIR.

use sha2::{Digest, Sha256};
use std::{env, error::Error, fs, path::PathBuf, process::Command};

fn main() -> Result<(), Box<dyn Error>> {
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for room in ["guest", "guest-proto", "model", "sys"] {
        println!("cargo::rerun-if-changed=../{room}/src");
        println!("cargo::rerun-if-changed=../{room}/Cargo.toml");
    }
    println!("cargo::rerun-if-changed=../../Cargo.lock");
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    let target = format!("{arch}-unknown-linux-gnu");
    // A target directory of its own: the outer cargo holds the lock of the other one.
    let target_dir = out.join("guest-target");
    let status = Command::new(env::var("CARGO")?)
        .args(["build", "--release", "--package", "trialrun-guest", "--target", &target, "--target-dir"])
        .arg(&target_dir)
        .current_dir(here.join("../.."))
        // Flags and settings of the outer build (coverage, sanitizers, wrappers) are not the guest's.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        .status()?;
    if !status.success() {
        return Err("the guest agent did not build; see cargo's messages above".into());
    }
    let program = fs::read(target_dir.join(&target).join("release/trialrun-guest"))?;
    fs::write(out.join("trialrun-guest"), &program)?;
    let digest: String = Sha256::digest(&program).iter().map(|byte| format!("{byte:02x}")).collect();
    println!("cargo::rustc-env=TRIALRUN_GUEST_DIGEST={digest}");
    Ok(())
}
