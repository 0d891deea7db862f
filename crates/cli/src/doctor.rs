//! `trialrun doctor`.

use crate::{
    args::{Dirs, Json},
    failure::Failure,
};

/// Says what this host can do.
///
/// # Errors
/// None today; the signature is that of every command.
pub fn doctor(dirs: &Dirs, options: &Json) -> Result<u8, Failure> {
    let findings = trialrun_doctor::examine(&dirs.data_dir, &dirs.cache_dir);
    if options.json {
        println!("{}", serde_json::json!({ "schema": 1, "findings": findings }));
    } else {
        print!("{}", trialrun_doctor::render(&findings, true));
    }
    Ok(0)
}
