//! The package sources and fetch options that the host's own apt is configured with.
//!
//! They are asked for and never written here, so that a company's mirror, proxy or snapshot is used wherever the host
//! uses it.

use crate::BuildError;
use std::{collections::BTreeSet, path::Path, process::Command};

/// Where the stock image's packages come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sources {
    /// The release's code name.
    pub codename: String,
    /// Lines for sources.list(5).
    lines: Vec<Line>,
    keyring: Option<String>,
    /// Options for apt.conf(5), such as the proxy.
    pub options: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    uri: String,
    release: String,
    components: BTreeSet<String>,
}

/// Where the distribution's own archive keys are; the same path inside the image.
const KEYRINGS: [(&str, &str); 2] = [
    ("debian", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    ("ubuntu", "/usr/share/keyrings/ubuntu-archive-keyring.gpg"),
];

impl Sources {
    /// Asks the host's apt.
    pub fn of_host() -> Result<Self, BuildError> {
        let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        let format = "--format=$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ORIGIN)";
        let targets = run("apt-get", &["indextargets", format, "Created-By: Packages"])?;
        let options = run("apt-config", &["dump", "Acquire"])?;
        Self::parse(&release, &targets, &options, |path| Path::new(path).exists())
    }

    fn parse(release: &str, targets: &str, options: &str, exists: impl Fn(&str) -> bool) -> Result<Self, BuildError> {
        let none = |why: &str| BuildError::NoSources { why: why.to_owned() };
        let codename =
            os_release(release, "VERSION_CODENAME").ok_or_else(|| none("os-release has no VERSION_CODENAME"))?;
        let id = os_release(release, "ID").unwrap_or_default();
        let (vendor, keyring) = KEYRINGS
            .into_iter()
            .find(|(vendor, _)| *vendor == id)
            .ok_or_else(|| none(&format!("os-release says ID={id}")))?;
        let targets: Vec<[&str; 4]> =
            targets.lines().filter_map(|l| l.split('\t').collect::<Vec<_>>().try_into().ok()).collect();
        // The origin is in lists that were fetched; a host whose lists were removed only knows the release's name.
        let known = |origin: &str| !origin.is_empty() && !origin.starts_with('$');
        let any_known = targets.iter().any(|[.., origin]| known(origin));
        let usual: &[&str] = if vendor == "ubuntu" { &["main", "universe"] } else { &["main"] };
        let mut lines: Vec<Line> = Vec::new();
        for [uri, suite, component, origin] in targets {
            let own = if any_known { origin.eq_ignore_ascii_case(vendor) } else { is_release(suite, &codename) };
            if !own || !usual.contains(&component) {
                continue;
            }
            match lines.iter_mut().find(|l| l.uri == uri && l.release == suite) {
                Some(line) => {
                    line.components.insert(component.to_owned());
                }
                None => lines.push(Line {
                    uri: uri.to_owned(),
                    release: suite.to_owned(),
                    components: BTreeSet::from([component.to_owned()]),
                }),
            }
        }
        if lines.is_empty() {
            return Err(none(&format!("apt has no source of {vendor} {codename}")));
        }
        let wanted =
            ["Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries ", "Acquire::ForceIPv"];
        let options = options.lines().filter(|l| wanted.iter().any(|w| l.starts_with(w))).map(str::to_owned).collect();
        Ok(Self { codename, lines, keyring: exists(keyring).then(|| keyring.to_owned()), options })
    }

    /// The sources as a one-line-style list.
    pub fn list(&self) -> String {
        self.render(|uri| uri.to_owned())
    }

    /// As [`Sources::list`], for inside an image: without user names and passwords.
    pub fn list_for_image(&self) -> String {
        self.render(without_userinfo)
    }

    fn render(&self, uri: impl Fn(&str) -> String) -> String {
        let option = self.keyring.as_ref().map(|k| format!("[signed-by={k}] ")).unwrap_or_default();
        let line = |l: &Line| {
            let components: Vec<&str> = l.components.iter().map(String::as_str).collect();
            format!("deb {option}{} {} {}\n", uri(&l.uri), l.release, components.join(" "))
        };
        self.lines.iter().map(line).collect()
    }
}

fn is_release(suite: &str, codename: &str) -> bool {
    suite.strip_prefix(codename).is_some_and(|rest| matches!(rest, "" | "-updates" | "-security"))
}

fn without_userinfo(uri: &str) -> String {
    let Some((scheme, rest)) = uri.split_once("://") else { return uri.to_owned() };
    let authority = rest.find('/').unwrap_or(rest.len());
    match rest[..authority].rfind('@') {
        Some(at) => format!("{scheme}://{}", &rest[at + 1..]),
        None => uri.to_owned(),
    }
}

fn os_release(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim_matches('"').to_owned()).filter(|v| !v.is_empty())
}

fn run(program: &'static str, args: &[&str]) -> Result<String, BuildError> {
    let out = match Command::new(program).args(args).env("LC_ALL", "C").output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(BuildError::NoSources { why: format!("there is no {program}") });
        }
        other => other.map_err(|source| BuildError::Run { program, source })?,
    };
    if !out.status.success() {
        let tail = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        return Err(BuildError::Failed { program, status: out.status.to_string(), tail });
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBIAN: &str = "ID=debian\nVERSION_CODENAME=bookworm\n";

    #[test]
    fn only_the_distribution_itself_is_taken() {
        let targets = "http://m.test/debian/\tbookworm\tmain\tDebian\nhttp://m.test/debian/\tbookworm\tnon-free\tDebian\n\
                       http://u:p@m.test/sec/\tbookworm-security\tmain\tDebian\nhttps://other.test/\tbookworm\tmain\tOther\n\
                       http://m.test/debian/\tbookworm-backports\tmain\tDebian Backports\n";
        let options =
            "Acquire::http::Proxy \"http://p.test\";\nAcquire::Languages \"none\";\nAcquire::Check-Date \"false\";\n";
        let sources = Sources::parse(DEBIAN, targets, options, |_| true).unwrap();
        let key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]";
        assert_eq!(
            sources.list(),
            format!(
                "deb {key} http://m.test/debian/ bookworm main\ndeb {key} http://u:p@m.test/sec/ bookworm-security main\n"
            )
        );
        assert!(!sources.list_for_image().contains("u:p"));
        assert_eq!(sources.options, ["Acquire::http::Proxy \"http://p.test\";", "Acquire::Check-Date \"false\";"]);
    }

    #[test]
    fn without_lists_the_release_name_decides() {
        let targets = "http://m.test/u/\tnoble\tmain\t$(ORIGIN)\nhttp://m.test/u/\tnoble\tuniverse\t\nhttp://x.test/\tnodistro\tmain\t\n";
        let sources = Sources::parse("ID=ubuntu\nVERSION_CODENAME=noble\n", targets, "", |_| false).unwrap();
        assert_eq!(sources.list(), "deb http://m.test/u/ noble main universe\n");
        assert_eq!(sources.codename, "noble");
    }

    #[test]
    fn another_distribution_is_refused_with_a_way_out() {
        let error = Sources::parse("ID=fedora\nVERSION_CODENAME=x\n", "", "", |_| true).unwrap_err().to_string();
        assert!(error.contains("fedora") && error.contains("--image host"), "{error}");
        assert!(Sources::parse(DEBIAN, "", "", |_| true).is_err());
    }
}
