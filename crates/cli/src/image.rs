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
        ImageCommand::Build(build) => match build.stock() {
            Some("python") => {
                let steps = Steps::new(image.json);
                let reference = ImageRef::Named("python".to_owned());
                let built = context::ensure_image(&engine, &reference, &steps).await;
                steps.clear();
                built?;
                show(&engine.images().inspect(&reference)?, image.json);
            }
            Some(other) => {
                return Err(Failure::usage(format!(
                    "{other:?} is neither a stock image (python is) nor a recipe's file or folder"
                ))
                .hint("trialrun image build --name NAME --apt PACKAGE --run LINE … builds one from options"));
            }
            None => {
                let reference = crate::recipe::build(dirs, &build, image.json).await?;
                crate::df::keep_budget(dirs, &engine)?;
                show(&engine.images().inspect(&reference)?, image.json);
            }
        },
        ImageCommand::Tag { image: reference, name } => {
            let ImageRef::Named(new) = &name else {
                return Err(Failure::usage(format!("{name} is no name that an image can be given")));
            };
            if new == "python" {
                return Err(Failure::usage("the name python is the stock image's"));
            }
            let digest = engine.images().tag(&reference, new)?;
            if image.json {
                println!("{}", serde_json::json!({ "schema": 1, "name": new, "digest": digest }));
            } else {
                println!("{new} is {digest}");
            }
        }
        ImageCommand::Prune => {
            let removed = engine.prune_images()?;
            let bytes: u64 = removed.iter().map(|r| r.bytes).sum();
            if image.json {
                let digests: Vec<_> = removed.iter().map(|r| &r.digest).collect();
                println!("{}", serde_json::json!({ "schema": 1, "removed": digests, "bytes": bytes }));
            } else {
                removed.iter().for_each(|r| println!("{} removed", r.digest));
                println!("{} images, {}", removed.len(), ByteSize(bytes));
            }
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
            crate::df::keep_budget(dirs, &engine)?;
            show(&engine.images().inspect(&reference)?, image.json);
        }
        ImageCommand::Inspect { image: reference } => show(&engine.images().inspect(&reference)?, image.json),
        ImageCommand::Rm { image: reference } => {
            engine.remove_image(&reference)?;
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
