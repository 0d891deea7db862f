//! Who may import whom.
//!
//! Every crate has a floor, and imports only what is on a lower one. Beyond that, some are kept apart on purpose: see
//! [`check`]. Dev-dependencies are not looked at: tests may use what they like.

use crate::cargo::Package;
use std::collections::BTreeSet;

/// From the bottom up. A crate without a floor is a problem, so that somebody decides.
const FLOORS: &[&[&str]] = &[
    // Nouns and pure text.
    &["model", "project"],
    // Contracts and system calls.
    &["policy", "guest-proto", "sys", "api"],
    // Mechanisms that know nothing of a machine's life.
    &["guest", "net", "driver", "image", "store", "report", "client"],
    &["gateway", "router", "driver-container", "driver-microvm", "embedded", "doctor", "oci"],
    // One machine, then all of them.
    &["keeper"],
    &["engine"],
    // What is done with machines.
    &["build", "level3"],
    &["trial"],
    // Faces.
    &["dialect-runtime", "dialect-pandastack", "mcp"],
    &["server"],
    &["cli"],
    &["tests", "xtask"],
];

/// A driver sees a cell's handle, never what decides about it or what remembers it.
const HIDDEN_FROM_DRIVERS: &[&str] = &["gateway", "store", "router"];
/// The guest agent is on the other side of the barrier: these are all it shares with the host.
const SHARED_WITH_GUEST: &[&str] = &["guest-proto", "sys", "model"];
/// Crates that do no I/O, and what they may import from outside of the workspace.
const PURE: &[(&str, &[&str])] = &[("model", &["serde", "thiserror"]), ("policy", &["serde", "thiserror"])];

/// The room's name: the package's without our prefix.
fn room(package: &str) -> &str {
    match package {
        "trialrun" => "cli",
        other => other.strip_prefix("trialrun-").unwrap_or(other),
    }
}

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

fn is_driver(room: &str) -> bool {
    room == "driver" || is_concrete_driver(room)
}

fn is_concrete_driver(room: &str) -> bool {
    room.starts_with("driver-")
}

/// Rooms that a package imports itself.
fn imports(package: &Package) -> impl Iterator<Item = &str> {
    let shipped = package.dependencies.iter().filter(|d| d.kind.as_deref() != Some("dev"));
    shipped.filter(|d| d.path.is_some()).map(|d| room(&d.name))
}

/// Rooms that a room imports, through others too.
fn reaches<'a>(packages: &'a [Package], start: &'a str) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    let mut open = vec![start];
    while let Some(next) = open.pop() {
        let found = packages.iter().filter(|p| room(&p.name) == next).flat_map(imports);
        open.extend(found.filter(|name| seen.insert(*name)));
    }
    seen
}

/// All that is wrong.
pub fn check(packages: &[Package]) -> Vec<String> {
    let mut problems = Vec::new();
    for package in packages {
        let name = room(&package.name);
        let mut problem = |what: String| problems.push(format!("{}: {what}", package.manifest_path.display()));
        let Some(own) = floor(name) else {
            problem(format!("the crate {name} has no floor in xtask/src/tidy/rooms.rs"));
            continue;
        };
        for import in imports(package) {
            if floor(import).is_some_and(|other| other >= own) {
                problem(format!("{name} imports {import}, which is not below it (imports point down only)"));
            }
            if is_concrete_driver(import) && !matches!(name, "keeper" | "tests") {
                problem(format!("{name} imports {import}: only the keeper names a concrete driver"));
            }
        }
        let reached = reaches(packages, name);
        if is_driver(name) {
            for hidden in HIDDEN_FROM_DRIVERS.iter().filter(|hidden| reached.contains(**hidden)) {
                problem(format!("{name} reaches {hidden}, which drivers never see"));
            }
        }
        if name == "guest" {
            for other in reached.iter().filter(|other| !SHARED_WITH_GUEST.contains(other)) {
                problem(format!("guest reaches {other}, which belongs to the host"));
            }
        }
        if let Some((_, allowed)) = PURE.iter().find(|(pure, _)| *pure == name) {
            let outside = package.dependencies.iter().filter(|d| d.path.is_none() && d.kind.is_none());
            for other in outside.filter(|d| !allowed.contains(&d.name.as_str())) {
                problem(format!(
                    "{name} does no I/O and imports nothing but {}; found {}",
                    allowed.join(", "),
                    other.name
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::Dependency;

    fn package(name: &str, imports: &[&str]) -> Package {
        let dependency = |name: &&str| {
            let (name, kind) = name.strip_prefix("dev:").map_or((*name, None), |name| (name, Some("dev".to_owned())));
            let path = (name.starts_with("trialrun")).then(|| name.into());
            Dependency { name: name.to_owned(), kind, path }
        };
        Package {
            name: name.to_owned(),
            manifest_path: name.into(),
            dependencies: imports.iter().map(dependency).collect(),
        }
    }

    #[test]
    fn imports_point_down_only() {
        let fine = [
            package("trialrun-engine", &["trialrun-keeper"]),
            package("trialrun-keeper", &["dev:trialrun-engine", "serde"]),
        ];
        assert_eq!(check(&fine), Vec::<String>::new());
        let up = check(&[package("trialrun-keeper", &["trialrun-engine"])]);
        assert!(up.len() == 1 && up[0].contains("keeper imports engine"), "{up:?}");
        let beside = check(&[package("trialrun-net", &["trialrun-driver"])]);
        assert_eq!(beside.len(), 1, "{beside:?}");
    }

    #[test]
    fn drivers_reach_no_gateway_even_through_others() {
        let packages =
            [package("trialrun-driver-container", &["trialrun-net"]), package("trialrun-net", &["trialrun-gateway"])];
        let problems = check(&packages);
        assert!(problems.iter().any(|p| p.contains("driver-container reaches gateway")), "{problems:?}");
    }

    #[test]
    fn only_the_keeper_names_a_driver() {
        let problems = check(&[package("trialrun-engine", &["trialrun-driver-container"])]);
        assert!(problems.iter().any(|p| p.contains("only the keeper")), "{problems:?}");
        assert_eq!(check(&[package("trialrun-keeper", &["trialrun-driver-container"])]), Vec::<String>::new());
    }

    #[test]
    fn the_guest_shares_little_and_pure_crates_import_little() {
        assert_eq!(check(&[package("trialrun-guest", &["trialrun-policy"])]).len(), 1);
        assert_eq!(check(&[package("trialrun-model", &["serde", "tokio", "dev:proptest"])]).len(), 1);
    }

    #[test]
    fn a_new_crate_needs_a_floor() {
        assert!(check(&[package("trialrun-novel", &[])])[0].contains("has no floor"));
    }
}
