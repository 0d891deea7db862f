//! `trialrun image`.

use crate::{
    args::{Dirs, Image, ImageCommand},
    context::{self, Steps},
    failure::Failure,
    stream::Interrupts,
};
use trialrun_model::{ByteSize, ImageRef};

/// Lists, builds, shows and removes images.
///
/// # Errors
/// An unknown image or a failed build.
pub async fn image(dirs: &Dirs, image: Image) -> Result<u8, Failure> {
    let engine = context::engine(dirs)?;
    match image.command {
        ImageCommand::Ls => {
            let images = engine.images().ls()?;
            if image.json {
                let rows: Vec<_> =
                    images.iter().map(|(r, names)| serde_json::json!({ "image": r, "names": names })).collect();
                println!("{}", serde_json::json!({ "schema": 1, "images": rows }));
            } else {
                for (record, names) in &images {
                    println!("{}  {:>9}  {}", record.digest, ByteSize(record.bytes).to_string(), names.join(", "));
                }
                println!("host: the host's own system, read-only; nothing to build");
            }
        }
        ImageCommand::Build { name } => {
            if name != "python" {
                return Err(Failure::usage(format!("{name:?} is no stock image (python is)")));
            }
            let steps = Steps::new(image.json);
            let reference = ImageRef::Named(name);
            let built = context::ensure_image(&engine, &reference, &steps).await;
            steps.clear();
            built?;
            show(&engine.images().inspect(&reference)?, image.json);
        }
        ImageCommand::Pull { image: reference } => {
            let ImageRef::Oci(name) = &reference else {
                return Err(Failure::usage(format!("{reference} is not in a registry; write oci:HOST/NAME:TAG")));
            };
            let steps = Steps::new(image.json);
            let mut interrupts = Interrupts::listen()?;
            let pulled = interrupts.guard(context::pull(&engine, name, true, &steps)).await?;
            steps.clear();
            pulled?;
            show(&engine.images().inspect(&reference)?, image.json);
        }
        ImageCommand::Inspect { image: reference } => show(&engine.images().inspect(&reference)?, image.json),
        ImageCommand::Rm { image: reference } => {
            engine.images().rm(&reference)?;
            if image.json {
                println!("{}", serde_json::json!({ "schema": 1, "removed": reference.to_string() }));
            } else {
                println!("{reference} removed");
            }
        }
    }
    Ok(0)
}

fn show(record: &trialrun_image::ImageRecord, json: bool) {
    if json {
        println!("{}", serde_json::json!({ "schema": 1, "image": record }));
    } else {
        println!("{}  {} in {} files", record.digest, ByteSize(record.bytes), record.files);
    }
}
