//! `trialrun df`: what is on the disk, what of it could go, and the budget.

use crate::{
    args::{Dirs, Json},
    config::{Config, PLACE},
    context,
    failure::Failure,
};
use trialrun_engine::Engine;
use trialrun_model::ByteSize;

/// Says it.
///
/// # Errors
/// When the engine can't be opened or images can't be listed.
pub fn df(dirs: &Dirs, options: &Json) -> Result<u8, Failure> {
    let budget = Config::read(&dirs.config)?.cache.max_bytes.map(|size| size.0);
    let engine = context::engine(dirs)?;
    let usage = engine.disk_usage()?;
    if options.json {
        println!(
            "{}",
            serde_json::json!({ "schema": 1, "usage": usage, "cache_max_bytes": budget.map(ByteSize::bytes) })
        );
        return Ok(0);
    }
    let words = [
        ("images", "images with a name"),
        ("steps", "images without one: steps of recipes"),
        ("downloads", "what registries sent"),
        ("runtime", "what machines are given beside their image"),
        ("machines", "machines and their layers"),
    ];
    println!("{:>5}  {:>9}  {:>9}", "items", "size", "can go");
    for (kind, what) in words {
        let Some(u) = usage.iter().find(|u| u.kind == kind) else { continue };
        let (size, free) = (ByteSize(u.bytes).to_string(), ByteSize(u.reclaimable_bytes).to_string());
        println!("{:>5}  {size:>9}  {free:>9}  {what}", u.items);
    }
    let cache: u64 = usage.iter().filter(|u| u.kind != "machines").map(|u| u.bytes).sum();
    match budget {
        Some(max) => println!("the cache takes {} of its budget of {max}", ByteSize(cache)),
        None => println!("the cache takes {}; it has no budget (cache.max_bytes in {PLACE})", ByteSize(cache)),
    }
    Ok(0)
}

/// Keeps the budget, after something was added to the cache, and says what went.
///
/// # Errors
/// When images can't be listed or removed.
pub fn keep_budget(dirs: &Dirs, engine: &Engine) -> Result<Option<trialrun_engine::Evicted>, Failure> {
    let Some(max) = Config::read(&dirs.config)?.cache.max_bytes else { return Ok(None) };
    let evicted = engine.keep_budget(max.0.bytes())?;
    if !evicted.removed.is_empty() {
        let (count, size) = (evicted.removed.len(), ByteSize(evicted.bytes));
        eprintln!("trialrun: {count} things of the cache went for its budget: {size}");
    }
    if evicted.over_bytes > 0 {
        let over = ByteSize(evicted.over_bytes);
        eprintln!("trialrun: the cache is {over} over its budget; what is left is named or in use (trialrun df)");
    }
    Ok(Some(evicted))
}
