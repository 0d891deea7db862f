//! Manifests, indexes and image configurations, as far as machines need them.
//!
//! Source: OCI image specification 1.1 (manifest, image index, config), and Docker's image manifest 2, schema 2, which
//! differs in media types only.

use serde::Deserialize;
use std::fmt;

/// Most layers that an image may have; overlay-based engines stop at 127 or 128.
const MAX_LAYERS: usize = 512;
/// Longest manifest or configuration that is read.
pub const MAX_DOCUMENT: u64 = 8 << 20;

/// What is accepted in answer to a request for a manifest.
pub const ACCEPT: [&str; 4] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// `sha256:` and 64 lower-case hexadecimal digits. Other algorithms are refused: nobody uses them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

impl Digest {
    /// The digits.
    pub fn hex(&self) -> &str {
        &self.0["sha256:".len()..]
    }
}

impl TryFrom<String> for Digest {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let hex = text.strip_prefix("sha256:").unwrap_or_default();
        let ok = hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if ok { Ok(Self(text)) } else { Err(format!("{text:?} is no sha256 digest")) }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reference to content.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Of an index's entry.
    pub platform: Option<Platform>,
}

/// For what an image was made.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct Platform {
    /// As in GOOS.
    #[serde(default)]
    pub os: String,
    /// As in GOARCH.
    #[serde(default)]
    pub architecture: String,
    /// Such as `v7`.
    #[serde(default)]
    pub variant: String,
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() { Ok(()) } else { write!(f, "/{}", self.variant) }
    }
}

/// The platform of this host's machines.
pub fn here() -> Platform {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    Platform { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: String::new() }
}

/// How a layer's archive is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Not at all.
    Tar,
    /// gzip, RFC 1952.
    Gzip,
    /// Zstandard, RFC 8878.
    Zstd,
}

/// Why a document is of no use.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ManifestError {
    /// Not JSON, or not of this kind.
    #[error("the registry's {what} can't be read: {why}")]
    Unreadable {
        /// Which document.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// Docker's first format.
    #[error("the image is in Docker's format 1, which no tool writes since 2017: push it again with a current one")]
    Schema1,
    /// Not for this platform.
    #[error("there is no image for {wanted}; there are {}", list(.present))]
    Platform {
        /// What was looked for.
        wanted: Platform,
        /// What there is.
        present: Vec<Platform>,
    },
    /// A layer that can't be used.
    #[error("layer {number} has the media type {media_type:?}, which is not a file system's layer")]
    Layer {
        /// Counted from 1.
        number: usize,
        /// What it says.
        media_type: String,
    },
    /// A layer that its registry does not have.
    #[error("layer {number} is a foreign layer, which the registry does not have ({media_type})")]
    Foreign {
        /// Counted from 1.
        number: usize,
        /// What it says.
        media_type: String,
    },
    /// No layers, too many, or a count that differs from the configuration's.
    #[error("the image has {layers} layers and its configuration tells of {told}")]
    Layers {
        /// In the manifest.
        layers: usize,
        /// In the configuration.
        told: usize,
    },
}

fn list(platforms: &[Platform]) -> String {
    if platforms.is_empty() {
        return "none".to_owned();
    }
    platforms.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A manifest: an image, or a list to choose from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Manifest {
    /// One image.
    Image {
        /// Its configuration.
        config: Descriptor,
        /// Its layers, the lowest first.
        layers: Vec<Descriptor>,
    },
    /// The chosen entry of an index.
    Index(Descriptor),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    schema_version: Option<u64>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

/// Reads a manifest; of an index, chooses the entry for `wanted`.
///
/// # Errors
/// When it is neither, or has nothing for that platform.
pub fn read(bytes: &[u8], wanted: &Platform) -> Result<Manifest, ManifestError> {
    let unreadable = |why: String| ManifestError::Unreadable { what: "manifest", why };
    let raw: Raw = serde_json::from_slice(bytes).map_err(|e| unreadable(e.to_string()))?;
    match raw {
        Raw { schema_version: Some(1), .. } => Err(ManifestError::Schema1),
        Raw { config: Some(config), layers: Some(layers), .. } => {
            if layers.is_empty() || layers.len() > MAX_LAYERS {
                return Err(ManifestError::Layers { layers: layers.len(), told: layers.len() });
            }
            Ok(Manifest::Image { config, layers })
        }
        Raw { manifests: Some(entries), .. } => {
            let fits = |p: &Platform| p.os == wanted.os && p.architecture == wanted.architecture;
            let mut present: Vec<Platform> = Vec::new();
            let mut chosen = None;
            for entry in entries {
                let platform = entry.platform.clone().unwrap_or_default();
                if chosen.is_none() && fits(&platform) {
                    chosen = Some(entry);
                } else if platform.os != "unknown" && !present.contains(&platform) {
                    // "unknown/unknown" are attestations beside the images.
                    present.push(platform);
                }
            }
            chosen.map(Manifest::Index).ok_or_else(|| ManifestError::Platform { wanted: wanted.clone(), present })
        }
        _ => Err(unreadable("it is neither an image's manifest nor an index".to_owned())),
    }
}

/// How a layer is packed, by its media type.
///
/// # Errors
/// What is not a layer of files, or not in the registry.
pub fn packing(number: usize, layer: &Descriptor) -> Result<Packing, ManifestError> {
    let media_type = layer.media_type.clone();
    if media_type.contains("foreign") {
        return Err(ManifestError::Foreign { number, media_type });
    }
    match media_type.as_str() {
        "application/vnd.oci.image.layer.v1.tar"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar"
        | "application/vnd.docker.image.rootfs.diff.tar" => Ok(Packing::Tar),
        "application/vnd.oci.image.layer.v1.tar+gzip"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
        | "application/vnd.docker.image.rootfs.diff.tar.gzip" => Ok(Packing::Gzip),
        "application/vnd.oci.image.layer.v1.tar+zstd"
        | "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
        | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Ok(Packing::Zstd),
        _ => Err(ManifestError::Layer { number, media_type }),
    }
}

/// What of an image's configuration matters here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// `NAME=value`.
    pub env: Vec<String>,
    /// `user`, `user:group`, names or numbers; empty for root.
    pub user: String,
    /// Empty for `/`.
    pub working_dir: String,
    /// Before every command.
    pub entrypoint: Vec<String>,
    /// The command when none is given.
    pub cmd: Vec<String>,
    /// Digests of the layers' archives, unpacked.
    pub diff_ids: Vec<Digest>,
}

/// Reads an image's configuration.
///
/// # Errors
/// When it can't be read, or is for another platform.
pub fn read_config(bytes: &[u8], wanted: &Platform) -> Result<Config, ManifestError> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "PascalCase", default)]
    struct Inner {
        env: Option<Vec<String>>,
        user: Option<String>,
        working_dir: Option<String>,
        entrypoint: Option<Vec<String>>,
        cmd: Option<Vec<String>>,
    }
    #[derive(Deserialize)]
    struct Rootfs {
        #[serde(default)]
        diff_ids: Vec<Digest>,
    }
    #[derive(Deserialize)]
    struct Outer {
        #[serde(flatten)]
        platform: Platform,
        config: Option<Inner>,
        rootfs: Rootfs,
    }
    let outer: Outer = serde_json::from_slice(bytes)
        .map_err(|e| ManifestError::Unreadable { what: "image configuration", why: e.to_string() })?;
    if outer.platform.os != wanted.os || outer.platform.architecture != wanted.architecture {
        return Err(ManifestError::Platform { wanted: wanted.clone(), present: vec![outer.platform] });
    }
    let inner = outer.config.unwrap_or_default();
    Ok(Config {
        env: inner.env.unwrap_or_default(),
        user: inner.user.unwrap_or_default(),
        working_dir: inner.working_dir.unwrap_or_default(),
        entrypoint: inner.entrypoint.unwrap_or_default(),
        cmd: inner.cmd.unwrap_or_default(),
        diff_ids: outer.rootfs.diff_ids,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    fn amd64() -> Platform {
        Platform { os: "linux".into(), architecture: "amd64".into(), variant: String::new() }
    }

    #[test]
    fn an_index_gives_this_platforms_entry_or_says_what_there_is() {
        let entry = |os: &str, arch: &str| {
            format!(r#"{{"digest":"{A}","size":1,"platform":{{"os":"{os}","architecture":"{arch}"}}}}"#)
        };
        let index = |entries: &[String]| format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","));
        let both = index(&[entry("unknown", "unknown"), entry("linux", "arm64"), entry("linux", "amd64")]);
        assert!(matches!(read(both.as_bytes(), &amd64()), Ok(Manifest::Index(d)) if d.size == 1));
        let other = index(&[entry("unknown", "unknown"), entry("linux", "arm64"), entry("linux", "s390x")]);
        let error = read(other.as_bytes(), &amd64()).unwrap_err().to_string();
        assert_eq!(error, "there is no image for linux/amd64; there are linux/arm64, linux/s390x");
    }

    #[test]
    fn what_is_no_manifest_is_told_apart() {
        assert_eq!(read(br#"{"schemaVersion":1,"fsLayers":[]}"#, &amd64()), Err(ManifestError::Schema1));
        for bad in
            ["", "[]", "{}", "null", r#"{"manifests":5}"#, r#"{"config":{"digest":"md5:1","size":1},"layers":[]}"#]
        {
            assert!(matches!(read(bad.as_bytes(), &amd64()), Err(ManifestError::Unreadable { .. })), "{bad}");
        }
        let none = format!(r#"{{"config":{{"digest":"{A}","size":1}},"layers":[]}}"#);
        assert!(matches!(read(none.as_bytes(), &amd64()), Err(ManifestError::Layers { .. })));
        let layer = |media: &str| Descriptor {
            media_type: media.into(),
            digest: A.to_owned().try_into().unwrap(),
            size: 1,
            platform: None,
        };
        assert_eq!(packing(1, &layer("application/vnd.oci.image.layer.v1.tar+zstd")), Ok(Packing::Zstd));
        let foreign = packing(3, &layer("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"));
        assert!(foreign.is_err_and(|e| e.to_string().contains("layer 3 is a foreign layer")));
        assert!(packing(2, &layer("application/vnd.wasm.content.layer.v1+wasm")).is_err());
    }

    #[test]
    fn a_configuration_is_read_whatever_it_leaves_out() {
        let least = br#"{"os":"linux","architecture":"amd64","rootfs":{"type":"layers"},"config":null}"#;
        assert_eq!(read_config(least, &amd64()), Ok(Config::default()));
        let all = format!(
            r#"{{"os":"linux","architecture":"amd64","rootfs":{{"diff_ids":["{A}"]}},"config":{{"Env":["A=b"],"User":"5:6",
            "WorkingDir":"/app","Entrypoint":["e"],"Cmd":null,"Volumes":{{"/x":{{}}}},"ExposedPorts":{{"80/tcp":{{}}}}}}}}"#
        );
        let config = read_config(all.as_bytes(), &amd64()).unwrap();
        assert_eq!((config.user.as_str(), config.working_dir.as_str(), config.cmd.len()), ("5:6", "/app", 0));
        let arm = br#"{"os":"linux","architecture":"arm64","rootfs":{}}"#;
        assert!(matches!(read_config(arm, &amd64()), Err(ManifestError::Platform { .. })));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            let _ = read(&bytes, &amd64());
            let _ = read_config(&bytes, &amd64());
        }
    }
}
