//! `trialrun ps`, `rm` and `gc`.

use crate::{
    args::{Dirs, Json, Rm},
    context,
    failure::{Failure, OURS},
};

/// Lists sandboxes.
///
/// # Errors
/// What the store says.
pub async fn ps(dirs: &Dirs, options: &Json) -> Result<u8, Failure> {
    let engine = context::engine(dirs)?;
    let records = engine.list()?;
    if options.json {
        let rows: Vec<_> = records
            .iter()
            .map(|r| {
                serde_json::json!({
                    "id": r.id, "state": r.state, "image": r.image, "created_ms": r.created_ms,
                    "expires_ms": r.expires_ms, "detached": r.detached, "keeper_pid": r.keeper_pid,
                })
            })
            .collect();
        println!("{}", serde_json::json!({ "schema": 1, "sandboxes": rows }));
        return Ok(0);
    }
    if records.is_empty() {
        println!("no sandboxes");
    }
    for record in records {
        println!("{}  {:9} {}", record.id, record.state.as_str(), record.image);
    }
    Ok(0)
}

/// Deletes sandboxes.
///
/// # Errors
/// An unknown id.
pub async fn rm(dirs: &Dirs, options: &Rm) -> Result<u8, Failure> {
    let engine = context::engine(dirs)?;
    let ids = if options.all {
        engine.list()?.into_iter().map(|r| r.id.to_string()).collect()
    } else {
        options.sandboxes.clone()
    };
    let mut deleted = Vec::new();
    for id in &ids {
        let sandbox = engine.find(id)?;
        let id = sandbox.id.to_string();
        sandbox.delete().await?;
        if !options.json {
            println!("{id} deleted");
        }
        deleted.push(id);
    }
    if options.json {
        println!("{}", serde_json::json!({ "schema": 1, "deleted": deleted }));
    }
    Ok(0)
}

/// Removes what dead machines left.
///
/// # Errors
/// When the engine can't be opened.
pub fn gc(dirs: &Dirs, options: &Json) -> Result<u8, Failure> {
    let engine = context::engine(dirs)?;
    let recovered = engine.collect();
    let evicted = crate::df::keep_budget(dirs, &engine)?;
    if options.json {
        let mut told = serde_json::json!({
            "schema": 1,
            "removed": recovered.removed,
            "failed": recovered.failed,
            "released_bytes": recovered.released_bytes,
        });
        if let Some(evicted) = evicted {
            told["evicted"] = serde_json::json!(evicted);
        }
        println!("{told}");
    } else {
        for id in &recovered.removed {
            println!("removed what was left of {id}");
        }
        for failed in &recovered.failed {
            eprintln!("trialrun: can't {failed}");
        }
        if recovered.released_bytes > 0 {
            let size = trialrun_model::ByteSize(recovered.released_bytes);
            println!("gave back {size} that removed machines had used");
        }
        if recovered == trialrun_engine::Recovered::default() {
            println!("nothing to remove");
        }
    }
    Ok(if recovered.failed.is_empty() { 0 } else { OURS })
}
