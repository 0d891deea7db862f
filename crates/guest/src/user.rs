//! Users and groups of the machine, from its `/etc/passwd` and `/etc/group`.
//!
//! A static C library has no name services, and the files belong to the machine's root, who may have put anything
//! there: they are read bounded, and only when they are regular files.

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use std::{io::Read, path::Path};
use trialrun_sys::spawn::Identity;

/// Most bytes of either file that are looked at.
const MAX_FILE: u64 = 1 << 20;
/// Most supplementary groups; the kernel's own limit (`NGROUPS_MAX`) is 65,536.
const MAX_GROUPS: usize = 1024;

/// A regular file's first bytes, at most `limit`; empty when there is none. Never blocks on a FIFO.
pub fn read_bounded(path: &Path, limit: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    if let Ok(file) = open(path, flags, Mode::empty())
        && fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
    {
        // What could be read is used; a file that cannot be read is as good as none.
        let _ = std::fs::File::from(file).take(limit).read_to_end(&mut bytes);
    }
    bytes
}

/// A line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name; empty when only a number was given and no line has it.
    pub name: Vec<u8>,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Home directory.
    pub home: Vec<u8>,
    /// Login shell.
    pub shell: Vec<u8>,
}

/// Both files, parsed on demand.
#[derive(Debug, Default)]
pub struct Database {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

fn number(field: &[u8]) -> Option<u32> {
    // The all-ones id means "leave unchanged" to the kernel, so it is nobody's.
    str::from_utf8(field).ok()?.parse().ok().filter(|&id| id != u32::MAX)
}

impl Database {
    /// Reads both files.
    pub fn load() -> Self {
        Self {
            passwd: read_bounded(Path::new("/etc/passwd"), MAX_FILE),
            group: read_bounded(Path::new("/etc/group"), MAX_FILE),
        }
    }

    fn users(&self) -> impl Iterator<Item = User> + '_ {
        self.passwd.split(|&b| b == b'\n').filter_map(|line| {
            let fields: Vec<&[u8]> = line.split(|&b| b == b':').collect();
            let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
            Some(User {
                name: name.into(),
                uid: number(uid)?,
                gid: number(gid)?,
                home: home.into(),
                shell: shell.into(),
            })
        })
    }

    /// Name, id, members.
    fn groups(&self) -> impl Iterator<Item = (&[u8], u32, &[u8])> + '_ {
        self.group.split(|&b| b == b'\n').filter_map(|line| {
            let fields: Vec<&[u8]> = line.split(|&b| b == b':').collect();
            let [name, _, gid, members] = fields[..] else { return None };
            Some((name, number(gid)?, members))
        })
    }

    /// The user's name, or nothing.
    pub fn user_name(&self, uid: u32) -> Option<Vec<u8>> {
        self.users().find(|u| u.uid == uid).map(|u| u.name)
    }

    /// The group's name, or nothing.
    pub fn group_name(&self, gid: u32) -> Option<Vec<u8>> {
        self.groups().find(|g| g.1 == gid).map(|g| g.0.to_vec())
    }

    /// Resolves `user` or `user:group`, each by name or number. A number that no line has is a user with group 0 and
    /// home `/`, as container engines have it; an unknown name is nobody.
    pub fn resolve(&self, spec: &str) -> Option<(User, Identity)> {
        let (user_spec, group_spec) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let wanted = user_spec.as_bytes();
        let as_number = number(wanted);
        let known = self
            .users()
            .find(|u| u.name == wanted)
            .or_else(|| as_number.and_then(|uid| self.users().find(|u| u.uid == uid)));
        let mut user = match (known, as_number, wanted) {
            (Some(user), ..) => user,
            (None, None, b"root") => User::numbered(0),
            (None, Some(uid), _) => User::numbered(uid),
            (None, None, _) => return None,
        };
        let mut groups = Vec::new();
        match group_spec {
            Some(group) => {
                let by_name = self.groups().find(|g| g.0 == group.as_bytes()).map(|g| g.1);
                user.gid = by_name.or_else(|| number(group.as_bytes()))?;
                groups.push(user.gid);
            }
            None => {
                groups.push(user.gid);
                if !user.name.is_empty() {
                    let member = |g: &(&[u8], u32, &[u8])| g.2.split(|&b| b == b',').any(|m| m == user.name);
                    groups.extend(self.groups().filter(member).map(|g| g.1).filter(|&gid| gid != user.gid));
                }
                groups.truncate(MAX_GROUPS);
            }
        }
        let identity = Identity { uid: user.uid, gid: user.gid, groups };
        Some((user, identity))
    }
}

impl User {
    fn numbered(uid: u32) -> Self {
        let (name, home) = if uid == 0 { ("root", "/root") } else { ("", "/") };
        Self { name: name.into(), uid, gid: 0, home: home.into(), shell: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> Database {
        Database {
            passwd: b"root:x:0:0:root:/root:/bin/bash\nbroken\nann:x:1001:1001::/home/ann:/bin/sh\n77:x:5:5::/x:\n"
                .to_vec(),
            group: b"root:x:0:\nann:x:1001:\nwheel:x:10:bob,ann\nann2:x:11:annie\n".to_vec(),
        }
    }

    #[test]
    fn names_and_numbers_resolve() {
        let db = database();
        let ids = |spec: &str| db.resolve(spec).map(|(_, id)| (id.uid, id.gid, id.groups));
        assert_eq!(ids("ann"), Some((1001, 1001, vec![1001, 10])));
        assert_eq!(ids("1001"), Some((1001, 1001, vec![1001, 10])));
        assert_eq!(ids("ann:wheel"), Some((1001, 10, vec![10])));
        assert_eq!(ids("ann:99"), Some((1001, 99, vec![99])));
        assert_eq!(ids("4242"), Some((4242, 0, vec![0])));
        assert_eq!(ids("77"), Some((5, 5, vec![5])), "a name made of digits wins over the number");
        assert_eq!(ids("nobody42"), None);
        assert_eq!(ids("ann:nogroup42"), None);
        assert_eq!(ids(""), None);
        assert_eq!(ids("4294967295"), None);
        assert_eq!(Database::default().resolve("root").unwrap().1.uid, 0);
    }
}
