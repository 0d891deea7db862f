//! The topmost read-only layer of a machine: name resolution and the host's certificates, which are given at run time and
//! never are part of an image's digest.

use crate::{
    digest::hex,
    dir::{DirError, Temp, at, private, put},
};
use sha2::{Digest, Sha256};
use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

/// Counts up when the layer's layout changes, so that older layers are not taken for new ones.
const LAYOUT: &str = "trialrun runtime layer 1";

/// A small tree with `/etc/resolv.conf`, `/etc/hosts`, `/etc/hostname` and, when a bundle is given,
/// `/etc/ssl/certs/ca-certificates.crt`. The same contents give the same tree, which is made once.
///
/// # Errors
/// When the bundle can't be read or the cache directory can't be used.
pub fn runtime_layer(
    cache_dir: &Path,
    ca_bundle: Option<&Path>,
    dns: IpAddr,
    hostname: &str,
) -> Result<PathBuf, DirError> {
    let mut files = vec![
        ("etc/resolv.conf", format!("nameserver {dns}\noptions timeout:2 attempts:2\n").into_bytes()),
        (
            "etc/hosts",
            format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n")
                .into_bytes(),
        ),
        ("etc/hostname", format!("{hostname}\n").into_bytes()),
    ];
    if let Some(bundle) = ca_bundle {
        let bytes = std::fs::read(bundle).map_err(at("read the certificates in", bundle))?;
        files.push(("etc/ssl/certs/ca-certificates.crt", bytes));
    }
    let mut hash = Sha256::new_with_prefix(LAYOUT);
    for (name, bytes) in &files {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    let key = hex(&hash.finalize());
    let place = cache_dir.join("runtime").join(&key);
    if place.is_dir() {
        return Ok(place);
    }
    let parent = private(cache_dir, "runtime")?;
    crate::dir::sweep(&parent)?;
    let temp = Temp::new(&parent)?;
    // An overlay shows the topmost layer's attributes for a directory, so they must be those of a usual system.
    std::fs::set_permissions(temp.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .map_err(at("create", temp.path()))?;
    for (name, bytes) in &files {
        put(temp.path(), name, 0o644, bytes)?;
    }
    temp.publish(&place)?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::MetadataExt, time::Instant};

    #[test]
    fn a_layer_is_made_once_for_its_contents() {
        let cache = tempfile::tempdir().unwrap();
        let bundle = cache.path().join("ca.pem");
        std::fs::write(&bundle, "CERTIFICATES").unwrap();
        let make = |ca: Option<&Path>, host| runtime_layer(cache.path(), ca, [10, 0, 0, 1].into(), host).unwrap();
        let one = make(Some(&bundle), "h");
        assert_eq!(
            std::fs::read_to_string(one.join("etc/resolv.conf")).unwrap(),
            "nameserver 10.0.0.1\noptions timeout:2 attempts:2\n"
        );
        assert!(std::fs::read_to_string(one.join("etc/hosts")).unwrap().contains("127.0.1.1\th\n"));
        assert_eq!(std::fs::read(one.join("etc/ssl/certs/ca-certificates.crt")).unwrap(), b"CERTIFICATES");
        assert_eq!(std::fs::metadata(&one).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(std::fs::metadata(one.parent().unwrap()).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(std::fs::read_dir(&one).unwrap().count(), 1, "no mark is left in the layer");
        assert_eq!(make(Some(&bundle), "h"), one);
        assert_ne!(make(Some(&bundle), "other"), one);
        let plain = make(None, "h");
        assert!(!plain.join("etc/ssl").exists());
        std::fs::write(&bundle, "OTHER CERTIFICATES").unwrap();
        assert_ne!(make(Some(&bundle), "h"), one);
    }

    #[test]
    fn eight_threads_make_one_layer() {
        let cache = tempfile::tempdir().unwrap();
        let made: std::collections::BTreeSet<_> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8)
                .map(|_| s.spawn(|| runtime_layer(cache.path(), None, [10, 0, 0, 1].into(), "h").unwrap()))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(made.len(), 1);
        let left = std::fs::read_dir(cache.path().join("runtime")).unwrap();
        let left: Vec<_> =
            left.map(|e| e.unwrap().file_name().into_string().unwrap()).filter(|n| n.starts_with(".tmp-")).collect();
        assert_eq!(left, Vec::<String>::new());
    }

    #[test]
    fn a_present_layer_is_cheap() {
        let cache = tempfile::tempdir().unwrap();
        let host = Path::new("/etc/ssl/certs/ca-certificates.crt");
        let bundle = host.exists().then_some(host);
        let make = || runtime_layer(cache.path(), bundle, [10, 0, 0, 1].into(), "h").unwrap();
        make();
        let start = Instant::now();
        (0..20).for_each(|_| drop(make()));
        println!("runtime_layer, present: {:?}", start.elapsed() / 20);
    }
}
