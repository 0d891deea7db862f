//! The environment of an exec: who overrides whom.

use crate::{
    link::{Failure, text},
    user::User,
};
use std::ffi::CString;
use trialrun_guest_proto::{EnvEntry, FailKind};

/// PATH where nobody sets one.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Names with values, byte for byte, in the order in which they were first set.
#[derive(Debug, Default, Clone)]
pub struct Environment(Vec<(Vec<u8>, Vec<u8>)>);

impl Environment {
    fn set(&mut self, name: &[u8], value: &[u8]) {
        match self.0.iter_mut().find(|(n, _)| n == name) {
            Some(entry) => entry.1 = value.to_vec(),
            None => self.0.push((name.to_vec(), value.to_vec())),
        }
    }

    /// A value.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice())
    }

    /// From the user's own values, the machine's, and the exec's: the later wins. An exec under another user than the
    /// machine's default has that user's own HOME, USER and LOGNAME, whatever the machine's environment says.
    pub fn for_exec(user: &User, machine: &[EnvEntry], other_user: bool, terminal: bool, exec: &[EnvEntry]) -> Self {
        let mut env = Self::default();
        let home: &[u8] = if user.home.is_empty() { b"/" } else { &user.home };
        let shell: &[u8] = if user.shell.is_empty() { b"/bin/sh" } else { &user.shell };
        let own = |env: &mut Self| {
            env.set(b"HOME", home);
            if !user.name.is_empty() {
                env.set(b"USER", &user.name);
                env.set(b"LOGNAME", &user.name);
            }
        };
        env.set(b"PATH", DEFAULT_PATH);
        own(&mut env);
        env.set(b"SHELL", shell);
        if terminal {
            env.set(b"TERM", b"xterm-256color");
        }
        for entry in machine {
            env.set(&entry.name, &entry.value);
        }
        if other_user {
            own(&mut env);
        }
        for entry in exec {
            env.set(&entry.name, &entry.value);
        }
        env
    }

    /// As execve wants it.
    pub fn to_strings(&self) -> Result<Vec<CString>, Failure> {
        let entry = |(name, value): &(Vec<u8>, Vec<u8>)| {
            CString::new([name.as_slice(), b"=", value].concat()).map_err(|_| {
                Failure::new(FailKind::BadEnv, format!("environment entry {} holds a NUL byte", text(name)))
            })
        };
        self.0.iter().map(entry).collect()
    }
}

/// Refuses entries that no process is given.
pub fn check(entries: &[EnvEntry]) -> Result<(), Failure> {
    entries.iter().try_for_each(|EnvEntry { name, value }| {
        trialrun_model::check_env(name, value).map_err(|e| Failure::new(FailKind::BadEnv, e.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, value: &str) -> EnvEntry {
        EnvEntry { name: name.into(), value: value.into() }
    }

    #[test]
    fn the_later_source_wins() {
        let user = User { name: b"ann".into(), uid: 5, gid: 5, home: b"/home/ann".into(), shell: Vec::new() };
        let machine = [entry("HOME", "/workspace"), entry("PATH", "/opt/x"), entry("A", "1"), entry("A", "2")];
        let env = Environment::for_exec(&user, &machine, false, false, &[entry("PATH", "/p")]);
        assert_eq!(env.get(b"HOME"), Some(&b"/workspace"[..]));
        assert_eq!(env.get(b"USER"), Some(&b"ann"[..]));
        assert_eq!(env.get(b"PATH"), Some(&b"/p"[..]));
        assert_eq!(env.get(b"A"), Some(&b"2"[..]));
        let env = Environment::for_exec(&user, &machine, true, false, &[]);
        assert_eq!(env.get(b"HOME"), Some(&b"/home/ann"[..]), "another user than the machine's has its own home");
        let env = Environment::for_exec(&user, &machine, true, false, &[entry("HOME", "/x")]);
        assert_eq!(env.get(b"HOME"), Some(&b"/x"[..]));
    }

    #[test]
    fn bad_names_are_named() {
        for (name, value, want) in [("B=C", "", "B=C"), ("", "", "empty"), ("N", "a\0b", "NUL")] {
            let failure = check(&[entry(name, value)]).unwrap_err();
            assert_eq!(failure.kind, FailKind::BadEnv);
            assert!(failure.message.contains(want), "{}", failure.message);
        }
    }
}
