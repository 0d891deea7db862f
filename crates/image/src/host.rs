//! The image `host`: no image at all, but a safe subset of the host's own system, read-only.
//!
//! The host's `/usr` is bound (and `/bin`, `/sbin`, `/lib*` where they are directories of their own); everything else is
//! a small tree of ours, the skeleton, with an allow-list of `/etc`. What is not on the list does not exist inside:
//! `/root`, `/home`, `/opt`, `/srv`, `/etc/shadow`, keys. Below `/usr` some places are masked.
//!
//! A package upgrade on the host changes a live machine's `/usr`; the image `python` does not have this weakness.

use crate::{
    ImageConfig,
    digest::hex,
    dir::{DirError, Temp, at, private, put, put_dir, put_dirs, sweep},
};
use sha2::{Digest, Sha256};
use std::{
    fs::Metadata,
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, lchown, symlink},
    },
    path::{Component, Path, PathBuf},
};

/// Counts up when the skeleton's layout changes.
const LAYOUT: &str = "trialrun host skeleton 1";

/// Names in `/etc` that are copied, files and directories. A trailing `*` stands for any end of the name.
const ETC: [&str; 25] = [
    "alternatives",
    "bash.bashrc",
    "bash_completion",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "default/locale",
    "host.conf",
    "inputrc",
    "ld.so.*",
    "localtime",
    "lsb-release",
    "magic",
    "mime.types",
    "networks",
    "os-release",
    "profile",
    "profile.d",
    "protocols",
    "python3*",
    "rpc",
    "services",
    "ssl/certs",
    "terminfo",
    "timezone",
];
/// Larger files than this are no configuration of programs. The certificate bundle has about 220 KB.
const LARGEST: u64 = 8 << 20;

/// Places below `/usr` that hold the host's own configuration or keys.
const MASKS: [&str; 6] = [
    "usr/local/etc",
    "usr/local/var",
    "usr/lib/ssl/private",
    "usr/share/ssl/private",
    "usr/local/ssl/private",
    "usr/local/share/ssl/private",
];

/// A directory of the host that the machine sees, read-only. Only the directory's own file system is meant: what the host
/// mounts below it stays out, so the bind must not be recursive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// On the host; no link.
    pub source: PathBuf,
    /// Inside, absolute. The skeleton has a directory there.
    pub target: PathBuf,
}

/// The host's own system as an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostImage {
    /// The overlay's lower: links, `/etc`, users, home.
    pub skeleton: PathBuf,
    /// What to bind over it.
    pub binds: Vec<Bind>,
    /// Absolute paths inside the binds that must be covered by an empty directory, or an empty file where they are files.
    /// Each exists and has no link in it.
    pub masks: Vec<PathBuf>,
    /// How its machines start.
    pub config: ImageConfig,
}

/// The host image, from the cache when nothing that it is made of has changed. `hidden` are directories of ours, such as
/// the data directory; where they are below a bind they are masked, as the cache directory is.
///
/// # Errors
/// When the cache directory can't be used or a file of the allow-list can't be copied.
pub fn host_image(cache_dir: &Path, hidden: &[&Path]) -> Result<HostImage, DirError> {
    from_root(Path::new("/"), cache_dir, hidden)
}

fn from_root(root: &Path, cache_dir: &Path, hidden: &[&Path]) -> Result<HostImage, DirError> {
    let sources = sources(root)?;
    let tops = tops(root)?;
    let key = key(&sources, &tops);
    let place = cache_dir.join("host-skel").join(&key);
    if !place.is_dir() {
        let parent = private(cache_dir, "host-skel")?;
        sweep(&parent)?;
        let temp = Temp::new(&parent)?;
        build(temp.path(), &sources, &tops)?;
        temp.publish(&place)?;
    }
    let binds: Vec<Bind> = tops
        .iter()
        .filter(|t| t.link.is_none())
        .map(|t| Bind { source: root.join(t.name), target: Path::new("/").join(t.name) })
        .collect();
    let masks = masks(root, &binds, cache_dir, hidden);
    Ok(HostImage { skeleton: place, binds, masks, config: ImageConfig::default() })
}

/// `/usr`, and the directories beside it that are links into it on a merged system.
struct Top {
    name: &'static str,
    link: Option<PathBuf>,
}

fn tops(root: &Path) -> Result<Vec<Top>, DirError> {
    let mut tops = Vec::new();
    for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        let path = root.join(name);
        let meta = match path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(at("look at", &path))?,
        };
        if meta.is_dir() {
            tops.push(Top { name, link: None });
        } else if meta.is_symlink() {
            let target = std::fs::read_link(&path).map_err(at("read", &path))?;
            // Only links into /usr are known to lead to what is bound.
            if target.strip_prefix("/").unwrap_or(&target).starts_with("usr") {
                tops.push(Top { name, link: Some(target) });
            }
        }
    }
    Ok(tops)
}

/// A file of the allow-list.
struct Source {
    host: PathBuf,
    /// Below the skeleton's root, such as `etc/profile`.
    inside: PathBuf,
    kind: Kind,
}

enum Kind {
    Dir {
        mtime: (i64, i64),
        mode: u32,
    },
    /// Not looked at: a link changes only by being replaced, which changes its directory's time. Most of the list's
    /// entries are links (alternatives, certificates), and a start waits for this.
    Link,
    File(Metadata),
}

/// What the allow-list finds, sorted. Files that not everybody on the host may read are left out: an allow-list of names
/// can't know what an administrator put into a file, its mode says it.
fn sources(root: &Path) -> Result<Vec<Source>, DirError> {
    let mut found = Vec::new();
    for pattern in ETC {
        let relative = Path::new("etc").join(pattern);
        match pattern.strip_suffix('*') {
            None => collect(root, &relative, &mut found)?,
            Some(start) => {
                let etc = root.join("etc");
                let Ok(entries) = std::fs::read_dir(&etc) else { continue };
                for entry in entries.flatten() {
                    let name = entry.file_name();
                    if name.as_bytes().starts_with(start.as_bytes()) {
                        collect(root, &Path::new("etc").join(name), &mut found)?;
                    }
                }
            }
        }
    }
    found.sort_by(|a, b| a.inside.cmp(&b.inside));
    Ok(found)
}

fn collect(root: &Path, inside: &Path, found: &mut Vec<Source>) -> Result<(), DirError> {
    let host = root.join(inside);
    let Ok(meta) = host.symlink_metadata() else { return Ok(()) };
    let kind = if meta.is_symlink() {
        Kind::Link
    } else if meta.is_dir() && meta.mode() & 0o005 == 0o005 {
        for entry in std::fs::read_dir(&host).map_err(at("list", &host))? {
            let entry = entry.map_err(at("list", &host))?;
            let inside = inside.join(entry.file_name());
            if entry.file_type().is_ok_and(|t| t.is_symlink()) {
                found.push(Source { host: entry.path(), inside, kind: Kind::Link });
            } else {
                collect(root, &inside, found)?;
            }
        }
        Kind::Dir { mtime: (meta.mtime(), meta.mtime_nsec()), mode: meta.mode() }
    } else if meta.is_file() && meta.mode() & 0o004 != 0 && meta.len() <= LARGEST {
        Kind::File(meta)
    } else {
        return Ok(());
    };
    found.push(Source { host, inside: inside.to_owned(), kind });
    Ok(())
}

/// Names, kinds, sizes and times of what the skeleton is made of.
fn key(sources: &[Source], tops: &[Top]) -> String {
    let mut hash = Sha256::new_with_prefix(LAYOUT);
    for top in tops {
        hash.update(top.name);
        hash.update(top.link.as_ref().map_or(&b"\0"[..], |l| l.as_os_str().as_bytes()));
        hash.update([0]);
    }
    for source in sources {
        hash.update(source.inside.as_os_str().as_bytes());
        hash.update([0]);
        // The inode and not only time and size: a package manager puts old times on new files.
        let numbers = match &source.kind {
            Kind::Link => [1, 0, 0, 0, 0],
            Kind::Dir { mtime: (s, n), mode } => [2, s.cast_unsigned(), n.cast_unsigned(), u64::from(*mode), 0],
            Kind::File(m) => [
                m.len() << 8 | 3,
                m.mtime().cast_unsigned(),
                m.mtime_nsec().cast_unsigned(),
                u64::from(m.mode()),
                m.ino(),
            ],
        };
        for number in numbers {
            hash.update(number.to_le_bytes());
        }
    }
    hex(&hash.finalize())
}

fn build(tree: &Path, sources: &[Source], tops: &[Top]) -> Result<(), DirError> {
    // Dirs with their modes. `usr` and its kin get their place below.
    const DIRS: [(&str, u32); 27] = [
        ("dev", 0o755),
        ("proc", 0o555),
        ("sys", 0o555),
        ("run", 0o755),
        ("run/lock", 0o1777),
        ("tmp", 0o1777),
        ("root", 0o700),
        ("home", 0o755),
        ("mnt", 0o755),
        ("media", 0o755),
        ("opt", 0o755),
        ("srv", 0o755),
        ("workspace", 0o755),
        ("etc", 0o755),
        ("var", 0o755),
        ("var/tmp", 0o1777),
        ("var/log", 0o755),
        ("var/cache", 0o755),
        ("var/lib", 0o755),
        ("var/lib/trialrun", 0o755),
        ("var/lib/misc", 0o755),
        ("var/opt", 0o755),
        ("var/mail", 0o755),
        ("var/spool", 0o755),
        ("etc/default", 0o755),
        ("etc/ssl", 0o755),
        ("etc/sudoers.d", 0o755),
    ];
    let mode = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
            .map_err(at("set the mode of", path))
    };
    mode(tree, 0o755)?;
    for (dir, mode) in DIRS {
        put_dir(&tree.join(dir), mode)?;
    }
    for top in tops {
        match &top.link {
            None => put_dir(&tree.join(top.name), 0o755)?,
            Some(target) => link(target, &tree.join(top.name))?,
        }
    }
    link(Path::new("/run"), &tree.join("var/run"))?;
    link(Path::new("/run/lock"), &tree.join("var/lock"))?;
    for source in sources {
        copy(tree, source)?;
    }
    for (file, mode, text) in OWN {
        put(tree, file, mode, text.as_bytes())?;
    }
    let home = tree.join("workspace");
    if rustix::process::geteuid().is_root() {
        lchown(&home, Some(1000), Some(1000)).map_err(at("give away", &home))?;
    }
    Ok(())
}

/// Files of ours. Sudo must work without passwords, which no user has, and without the host's directory services.
const OWN: [(&str, u32, &str); 11] = [
    (
        "etc/passwd",
        0o644,
        "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\nbin:x:2:2:bin:/bin:/usr/sbin/nologin\n\
         sys:x:3:3:sys:/dev:/usr/sbin/nologin\nmail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n\
         www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n_apt:x:42:65534::/nonexistent:/usr/sbin/nologin\n\
         runtime:x:1000:1000:runtime:/workspace:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    (
        "etc/group",
        0o644,
        "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\ndisk:x:6:\nmail:x:8:\nkmem:x:15:\nsudo:x:27:\n\
         www-data:x:33:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\nusers:x:100:\nruntime:x:1000:\nnogroup:x:65534:\n",
    ),
    (
        "etc/nsswitch.conf",
        0o644,
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\nrpc: files\n",
    ),
    ("etc/hostname", 0o644, "trialrun\n"),
    ("etc/hosts", 0o644, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
    ("etc/resolv.conf", 0o644, ""),
    ("etc/machine-id", 0o444, ""),
    ("etc/shells", 0o644, "/bin/sh\n/bin/bash\n"),
    (
        "etc/sudoers",
        0o440,
        "Defaults env_reset\nDefaults secure_path=\"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\"\n\
         root ALL=(ALL:ALL) ALL\nruntime ALL=(ALL:ALL) NOPASSWD: ALL\n",
    ),
    (
        "etc/pam.d/sudo",
        0o644,
        "auth sufficient pam_permit.so\naccount sufficient pam_permit.so\nsession sufficient pam_permit.so\n",
    ),
    (
        "etc/pam.d/other",
        0o644,
        "auth required pam_deny.so\naccount required pam_deny.so\npassword required pam_deny.so\nsession required pam_deny.so\n",
    ),
];

fn link(target: &Path, path: &Path) -> Result<(), DirError> {
    symlink(target, path).map_err(at("link", path))
}

fn copy(tree: &Path, source: &Source) -> Result<(), DirError> {
    let path = tree.join(&source.inside);
    put_dirs(tree, source.inside.parent().unwrap_or(Path::new("")))?;
    let meta = match &source.kind {
        Kind::Dir { .. } => return put_dir(&path, 0o755),
        Kind::Link => {
            return match std::fs::read_link(&source.host) {
                Ok(target) => link(&target, &path),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(e) => Err(at("read", &source.host)(e)),
            };
        }
        Kind::File(meta) => meta,
    };
    let bytes = match std::fs::read(&source.host) {
        // It went while we looked; the key, taken before, will not match again.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(at("read", &source.host))?,
    };
    if bytes.windows(PRIVATE_KEY.len()).any(|w| w == PRIVATE_KEY) {
        tracing::warn!(path = %source.host.display(), "not given to machines: it holds a private key");
        return Ok(());
    }
    let mode = if meta.mode() & 0o111 == 0 { 0o644 } else { 0o755 };
    let Some(inside) = source.inside.to_str() else { return Ok(()) };
    put(tree, inside, mode, &bytes)
}

/// In the first line of every private key in PEM form, whatever its kind.
const PRIVATE_KEY: &[u8] = b"PRIVATE KEY-----";

fn masks(root: &Path, binds: &[Bind], cache_dir: &Path, hidden: &[&Path]) -> Vec<PathBuf> {
    let mut masks: Vec<PathBuf> =
        MASKS.iter().map(|m| Path::new("/").join(m)).filter(|m| exists_without_links(root, m)).collect();
    for dir in hidden.iter().chain([&cache_dir]) {
        // By its true path: a link to a place below a bind must be masked there.
        let Ok(path) = std::fs::canonicalize(dir) else { continue };
        for bind in binds {
            let Ok(source) = std::fs::canonicalize(&bind.source) else { continue };
            if let Ok(below) = path.strip_prefix(&source) {
                masks.push(bind.target.join(below));
            }
        }
    }
    restricted(root, Path::new("/usr/local"), 2, &mut masks);
    masks.sort();
    masks.dedup();
    masks
}

/// Masks what only some on the host may read: a machine's root is mapped onto the files' owner and could read all of it.
/// What packages put below `/usr` is public; `/usr/local` is where administrators put scripts of theirs. Two levels are
/// looked at, `/usr/local/bin/x` and not what is below, because every start waits for this.
fn restricted(root: &Path, dir: &Path, levels: u32, masks: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(root.join(dir.strip_prefix("/").unwrap_or(dir))) else { return };
    for entry in entries.flatten() {
        let path = dir.join(entry.file_name());
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_symlink() {
            continue;
        }
        let readable = if meta.is_dir() { 0o005 } else { 0o004 };
        if meta.mode() & readable != readable {
            masks.push(path);
        } else if meta.is_dir() && levels > 1 {
            restricted(root, &path, levels - 1, masks);
        }
    }
}

/// A mask over a link would cover another place, or one that does not exist inside.
fn exists_without_links(root: &Path, path: &Path) -> bool {
    let mut full = root.to_owned();
    for part in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        full.push(part);
        match full.symlink_metadata() {
            Ok(meta) if !meta.is_symlink() => {}
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::PermissionsExt, time::Instant};

    fn walk(dir: &Path, base: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            found.push(path.strip_prefix(base).unwrap().to_owned());
            if path.symlink_metadata().unwrap().is_dir() {
                walk(&path, base, found);
            }
        }
    }

    fn files(image: &HostImage) -> Vec<PathBuf> {
        let mut found = Vec::new();
        walk(&image.skeleton, &image.skeleton, &mut found);
        found
    }

    fn check_nothing_forbidden(image: &HostImage) {
        for file in files(image) {
            let text = file.to_str().unwrap();
            let name = file.file_name().unwrap().to_str().unwrap();
            for dir in [
                "root/",
                "home/",
                "opt/",
                "srv/",
                "etc/ssh",
                "etc/shadow",
                "etc/gshadow",
                "etc/ssl/private",
                "etc/apt",
                "etc/cron",
            ] {
                assert!(!text.starts_with(dir), "{text}");
            }
            assert!(!name.ends_with(".key") && name != "npmrc", "{text}");
            let full = image.skeleton.join(&file);
            let meta = full.symlink_metadata().unwrap();
            assert_eq!(meta.mode() & 0o6000, 0, "{text} is set-user-id");
            if meta.is_file() {
                let bytes = std::fs::read(&full).unwrap();
                assert!(!bytes.windows(PRIVATE_KEY.len()).any(|w| w == PRIVATE_KEY), "{text}");
            }
        }
        for bind in &image.binds {
            let first = bind.target.components().nth(1).unwrap().as_os_str().to_str().unwrap().to_owned();
            assert!(["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"].contains(&first.as_str()), "{bind:?}");
            assert!(bind.source.symlink_metadata().unwrap().is_dir());
            assert!(image.skeleton.join(&first).is_dir());
        }
    }

    #[test]
    fn the_host_image_of_this_host_exposes_nothing_forbidden() {
        let cache = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let image = host_image(cache.path(), &[]).unwrap();
        println!("host_image, cold: {:?}", start.elapsed());
        check_nothing_forbidden(&image);
        if Path::new("/usr/local/etc").is_dir() {
            assert!(image.masks.contains(&PathBuf::from("/usr/local/etc")));
        }
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(host_image(cache.path(), &[]).unwrap(), image);
        }
        println!("host_image, warm: {:?}", start.elapsed() / 20);
    }

    /// A host of ours, with something forbidden in every place.
    fn fake_host() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, mode: u32, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        put("etc/profile", 0o644, "profile");
        put("etc/python3.11/sitecustomize.py", 0o644, "site");
        put("etc/ssl/certs/ca-certificates.crt", 0o644, "-----BEGIN CERTIFICATE-----");
        put("etc/ssl/certs/oops.pem", 0o644, "-----BEGIN RSA PRIVATE KEY-----");
        put("etc/ssl/certs/secret.pem", 0o600, "secret");
        put("etc/ssl/private/a.key", 0o600, "secret");
        put("etc/profile.d/tokens.sh", 0o640, "secret");
        put("etc/shadow", 0o640, "secret");
        put("etc/ssh/ssh_host_key", 0o600, "secret");
        put("root/.ssh/id", 0o600, "secret");
        put("opt/x", 0o644, "secret");
        put("usr/bin/x", 0o755, "x");
        put("usr/local/etc/npmrc", 0o644, "secret");
        put("usr/local/bin/backup.sh", 0o700, "secret");
        put("usr/local/bin/tool", 0o755, "tool");
        std::fs::create_dir_all(dir.path().join("usr/lib/ssl")).unwrap();
        symlink("/etc/ssl/private", dir.path().join("usr/lib/ssl/private")).unwrap();
        symlink("usr/bin", dir.path().join("bin")).unwrap();
        symlink("/opt/lib64", dir.path().join("lib64")).unwrap();
        std::fs::create_dir(dir.path().join("lib")).unwrap();
        dir
    }

    #[test]
    fn only_what_is_listed_and_readable_gets_in() {
        let (host, cache) = (fake_host(), tempfile::tempdir().unwrap());
        let image = from_root(host.path(), cache.path(), &[]).unwrap();
        check_nothing_forbidden(&image);
        let files = files(&image);
        let has = |p: &str| files.contains(&PathBuf::from(p));
        for there in [
            "etc/profile",
            "etc/python3.11/sitecustomize.py",
            "etc/ssl/certs/ca-certificates.crt",
            "bin",
            "workspace",
            "usr",
        ] {
            assert!(has(there), "{there}");
        }
        for absent in [
            "etc/ssl/certs/oops.pem",
            "etc/ssl/certs/secret.pem",
            "etc/ssl/private",
            "etc/profile.d/tokens.sh",
            "etc/shadow",
            "lib64",
            "usr/bin",
        ] {
            assert!(!has(absent), "{absent}");
        }
        let targets: Vec<_> = image.binds.iter().map(|b| b.target.to_str().unwrap()).collect();
        assert_eq!(targets, ["/usr", "/lib"], "the link /lib64 leads out of /usr");
        let masks = ["/usr/local/bin/backup.sh", "/usr/local/etc"].map(PathBuf::from);
        assert_eq!(image.masks, masks, "no mask over a link");
        let passwd = std::fs::read_to_string(image.skeleton.join("etc/passwd")).unwrap();
        for user in ["root:x:0:0", "runtime:x:1000:1000:runtime:/workspace", "nobody:x:65534"] {
            assert!(passwd.contains(user), "{passwd}");
        }
        assert_eq!(image.skeleton.join("tmp").metadata().unwrap().mode() & 0o7777, 0o1777);
        assert_eq!(image.skeleton.join("etc/sudoers").metadata().unwrap().mode() & 0o7777, 0o440);
    }

    #[test]
    fn own_directories_below_usr_are_masked() {
        let host = fake_host();
        let (cache, data) = (host.path().join("usr/cache"), host.path().join("lib/data"));
        std::fs::create_dir(&data).unwrap();
        let image = from_root(host.path(), &cache, &[&data]).unwrap();
        for path in ["/usr/cache", "/lib/data"] {
            assert!(image.masks.contains(&PathBuf::from(path)), "{:?}", image.masks);
        }
    }

    #[test]
    fn a_change_of_a_source_makes_a_new_skeleton() {
        let (host, cache) = (fake_host(), tempfile::tempdir().unwrap());
        let one = from_root(host.path(), cache.path(), &[]).unwrap();
        assert_eq!(from_root(host.path(), cache.path(), &[]).unwrap(), one);
        std::fs::write(host.path().join("etc/profile"), "other profile").unwrap();
        let two = from_root(host.path(), cache.path(), &[]).unwrap();
        assert_ne!(two.skeleton, one.skeleton);
        assert_eq!(std::fs::read_to_string(two.skeleton.join("etc/profile")).unwrap(), "other profile");
        std::fs::write(host.path().join("etc/unlisted"), "x").unwrap();
        assert_eq!(from_root(host.path(), cache.path(), &[]).unwrap(), two);
    }
}
