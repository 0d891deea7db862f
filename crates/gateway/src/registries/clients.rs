//! Asks the package clients for their settings, all at once.
//!
//! Clients run in the root folder, so that no project's settings mix in.

use super::{Answer, Index, IndexKind, fetch::without_credentials};
use serde_json::Value;
use std::{fs, io, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::Command,
    time::timeout,
};
use url::Url;

/// Asks every client. Those that are not there answer nothing.
pub(super) async fn ask_all(limit: Duration) -> Vec<Answer> {
    let (pip, npm, apt, cargo, go, gem, yarn) =
        tokio::join!(pip(limit), npm(limit), apt(limit), cargo(limit), go(limit), gem(limit), yarn(limit));
    vec![pip, npm, apt, cargo, go, gem, yarn]
}

/// Why a client did not answer.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("not installed")]
    Missing,
    #[error("could not be started")]
    Start(#[source] io::Error),
    #[error("gave no answer in time")]
    TimedOut,
    #[error("failed ({0})")]
    Failed(std::process::ExitStatus),
}

/// Runs a client and returns what it printed.
async fn ask(limit: Duration, program: &str, args: &[&str]) -> Result<String, AskError> {
    let mut command = command(program);
    let output = match timeout(limit, command.args(args).output()).await {
        Err(_) => return Err(AskError::TimedOut),
        Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => return Err(AskError::Missing),
        Ok(Err(e)) => return Err(AskError::Start(e)),
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        return Err(AskError::Failed(output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    command
}

impl Answer {
    fn note(&mut self, client: &str, error: &AskError) {
        if !matches!(error, AskError::Missing) {
            self.notes.push(format!("{client}: {}", trialrun_model::error_chain(error)));
        }
    }

    pub(super) fn add(&mut self, client: &'static str, kind: IndexKind, text: &str) {
        match Url::parse(text) {
            Ok(url) if matches!(url.scheme(), "http" | "https") => self.indexes.push(Index { client, kind, url }),
            Ok(_) => {} // a folder or a checkout: nothing to open
            Err(_) => self.notes.push(format!("{client}: a setting is not a URL")),
        }
    }

    /// A setting for machines, if it is a URL that means something there.
    fn give(&mut self, client: &str, variable: &str, texts: &[&str]) {
        let mut urls = Vec::new();
        for url in texts.iter().filter_map(|text| Url::parse(text).ok()) {
            if !matches!(url.scheme(), "http" | "https") {
                continue;
            }
            let bare = without_credentials(&url);
            if bare != url {
                self.notes.push(format!("{client}: machines get {bare} without its credentials"));
            }
            urls.push(bare.to_string());
        }
        if !urls.is_empty() {
            self.machine_env.push((variable.to_owned(), urls.join(" ")));
        }
    }
}

async fn pip(limit: Duration) -> Answer {
    const DEFAULT: &str = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)";
    let mut answer = Answer::default();
    let (settings, default) =
        tokio::join!(ask(limit, "python3", &["-m", "pip", "config", "list"]), ask(limit, "python3", &["-c", DEFAULT]));
    let settings = match settings {
        Ok(settings) => PipSettings::read(&settings),
        Err(error) => {
            answer.note("pip", &error);
            return answer;
        }
    };
    let default = match default {
        Ok(default) => default.trim().to_owned(),
        Err(error) => {
            answer.note("pip", &error);
            String::new()
        }
    };
    let index = settings.index.as_deref().unwrap_or(&default);
    if !index.is_empty() && !settings.no_index {
        answer.add("pip", IndexKind::Pip, index);
    }
    let extra: Vec<&str> = settings.extra.iter().map(String::as_str).collect();
    for url in &extra {
        answer.add("pip", IndexKind::Pip, url);
    }
    if index != default {
        answer.give("pip", "PIP_INDEX_URL", &[index]);
    }
    answer.give("pip", "PIP_EXTRA_INDEX_URL", &extra);
    uv(&mut answer);
    answer
}

/// uv takes its settings from the same kind of index. Its files can hold more, but it has no command that tells them.
fn uv(answer: &mut Answer) {
    for variable in ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"] {
        let Ok(value) = std::env::var(variable) else { continue };
        // An index may be written NAME=URL.
        let urls: Vec<&str> =
            value.split_whitespace().map(|u| u.split_once("=http").map_or(u, |(n, _)| &u[n.len() + 1..])).collect();
        for url in &urls {
            answer.add("uv", IndexKind::Pip, url);
        }
        answer.give("uv", variable, &urls);
    }
}

/// What `pip config list` says that matters here.
#[derive(Debug, Default, PartialEq, Eq)]
struct PipSettings {
    index: Option<String>,
    extra: Vec<String>,
    no_index: bool,
}

impl PipSettings {
    /// Lines are `section.name='value'`, with the environment as the section `:env:`. The more particular section wins.
    fn read(text: &str) -> Self {
        let rank = |section: &str| match section {
            ":env:" => 3,
            "install" | "download" => 2,
            "global" => 1,
            _ => 0,
        };
        let mut best: std::collections::HashMap<String, (i32, String)> = std::collections::HashMap::new();
        for line in text.lines() {
            let Some((key, value)) = line.split_once('=') else { continue };
            let Some((section, name)) = key.rsplit_once('.') else { continue };
            let rank = rank(section);
            let value = unquoted(value);
            let name = name.to_ascii_lowercase().replace('_', "-");
            if rank > 0 && best.get(&name).is_none_or(|(r, _)| *r <= rank) {
                best.insert(name, (rank, value));
            }
        }
        let mut take = |name: &str| best.remove(name).map(|(_, value)| value);
        Self {
            index: take("index-url").map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()),
            extra: take("extra-index-url").unwrap_or_default().split_whitespace().map(str::to_owned).collect(),
            no_index: take("no-index").is_some_and(|v| matches!(v.as_str(), "1" | "true" | "yes" | "on" | "True")),
        }
    }
}

/// Undoes Python's repr of a string, as far as URLs need it.
fn unquoted(text: &str) -> String {
    let text = text.trim();
    let inner = text
        .strip_prefix('\'')
        .and_then(|t| t.strip_suffix('\''))
        .or_else(|| text.strip_prefix('"').and_then(|t| t.strip_suffix('"')))
        .unwrap_or(text);
    inner.replace("\\n", "\n").replace("\\\\", "\\")
}

async fn npm(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    let (settings, default) = tokio::join!(ask(limit, "npm", &["config", "list", "--json"]), npm_default(limit));
    let settings: Value = match settings {
        Ok(text) => serde_json::from_str(&text).unwrap_or_default(),
        Err(error) => {
            answer.note("npm", &error);
            return answer;
        }
    };
    for (key, value) in settings.as_object().into_iter().flatten() {
        let Some(url) = value.as_str() else { continue };
        if key == "registry" {
            answer.add("npm", IndexKind::Npm, url);
            if default.as_deref() != Some(url) {
                answer.give("npm", "NPM_CONFIG_REGISTRY", &[url]);
            }
        } else if key.ends_with(":registry") && key.starts_with('@') {
            // A scope has packages of its own, so there is none to ask for; its host serves its files.
            answer.add("npm", IndexKind::Plain, url);
            answer.give("npm", &format!("npm_config_{key}"), &[url]);
        }
    }
    answer
}

/// npm's own default: what it says when it reads no settings.
async fn npm_default(limit: Duration) -> Option<String> {
    let mut command = command("npm");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().to_ascii_lowercase().starts_with("npm_config_") {
            command.env_remove(&name);
        }
    }
    let args = ["config", "get", "registry", "--userconfig=/dev/null", "--globalconfig=/nonexistent/npmrc"];
    let output = timeout(limit, command.args(args).output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

async fn yarn(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    // The first generation has its own default; later ones name the setting otherwise and answer "undefined".
    match ask(limit, "yarn", &["config", "get", "registry"]).await {
        Ok(text) if text.trim().starts_with("http") => answer.add("yarn", IndexKind::Npm, text.trim()),
        Ok(_) => {}
        Err(error) => answer.note("yarn", &error),
    }
    answer
}

async fn apt(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    match ask(limit, "apt-get", &["indextargets", "--format", "$(SITE)"]).await {
        Ok(text) => {
            let mut sites: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
            sites.sort_unstable();
            sites.dedup();
            for site in sites {
                answer.add("apt", IndexKind::Plain, site);
            }
        }
        Err(error) => answer.note("apt", &error),
    }
    answer
}

async fn go(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    match ask(limit, "go", &["env", "GOPROXY", "GOSUMDB"]).await {
        Ok(text) => {
            let mut lines = text.lines();
            let proxies = lines.next().unwrap_or_default();
            for url in proxies.split([',', '|']).filter(|p| p.starts_with("http")) {
                answer.add("go", IndexKind::Plain, url);
            }
            // `name`, or `name+key url`.
            let sum = lines.next().unwrap_or_default().split_whitespace().last().unwrap_or_default();
            if !sum.is_empty() && sum != "off" {
                let url = if sum.starts_with("http") { sum.to_owned() } else { format!("https://{sum}") };
                answer.add("go", IndexKind::Plain, &url);
            }
            if std::env::var_os("GOPROXY").is_some() {
                let first: Vec<&str> = proxies.split([',', '|']).take(1).collect();
                answer.give("go", "GOPROXY", &first);
            }
        }
        Err(error) => answer.note("go", &error),
    }
    answer
}

async fn gem(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    match ask(limit, "gem", &["sources", "--list"]).await {
        Ok(text) => {
            for url in text.lines().map(str::trim).filter(|l| l.starts_with("http")) {
                answer.add("gem", IndexKind::Plain, url);
            }
        }
        Err(error) => answer.note("gem", &error),
    }
    answer
}

async fn cargo(limit: Duration) -> Answer {
    let mut answer = Answer::default();
    let config = cargo_config();
    let mut replaced = false;
    for text in cargo_indexes(&config, &mut replaced) {
        match text.strip_prefix("sparse+") {
            Some(url) => answer.add("cargo", IndexKind::Cargo, url),
            None => answer.add("cargo", IndexKind::Plain, &text), // a git index: its host, no more can be asked
        }
    }
    if replaced {
        answer.notes.push("cargo: its source is replaced, which no variable can tell machines".to_owned());
        return answer;
    }
    match cargo_default(limit).await {
        Ok(Some(url)) => answer.add("cargo", IndexKind::Cargo, &url),
        Ok(None) => answer.notes.push("cargo: asked for nothing when asked for a package".to_owned()),
        Err(error) => answer.note("cargo", &error),
    }
    answer
}

fn cargo_home() -> Option<std::path::PathBuf> {
    let set = std::env::var_os("CARGO_HOME").filter(|v| !v.is_empty()).map(std::path::PathBuf::from);
    set.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
}

fn cargo_config() -> toml::Table {
    let text = cargo_home().and_then(|home| {
        fs::read_to_string(home.join("config.toml")).or_else(|_| fs::read_to_string(home.join("config"))).ok()
    });
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The indexes named in cargo's settings: what replaces the default source, and further registries.
fn cargo_indexes(config: &toml::Table, replaced: &mut bool) -> Vec<String> {
    let table = |name: &str| config.get(name).and_then(toml::Value::as_table);
    let text = |value: &toml::Value, key: &str| value.get(key).and_then(toml::Value::as_str).map(str::to_owned);
    let mut found = Vec::new();
    let mut source = "crates-io".to_owned();
    // Replacements chain; a loop of them would be refused by cargo itself.
    for _ in 0..8 {
        let Some(next) = table("source").and_then(|s| s.get(&source)).and_then(|s| text(s, "replace-with")) else {
            break;
        };
        *replaced = true;
        source = next;
    }
    if *replaced && let Some(url) = table("source").and_then(|s| s.get(&source)).and_then(|s| text(s, "registry")) {
        found.push(url);
    }
    for registry in table("registries").into_iter().flat_map(|r| r.values()) {
        found.extend(text(registry, "index"));
    }
    found
}

/// Asks cargo for its default index by letting it ask for a package through a proxy of ours, which only listens.
async fn cargo_default(limit: Duration) -> Result<Option<String>, AskError> {
    // A home of its own, without cached indexes, so that it has to ask.
    let home = tempfile::tempdir().map_err(AskError::Start)?;
    if let Some(real) = cargo_home() {
        for file in ["config.toml", "config"] {
            if let Ok(bytes) = fs::read(real.join(file)) {
                fs::write(home.path().join(file), bytes).map_err(AskError::Start)?;
            }
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(AskError::Start)?;
    let proxy = format!("http://{}", listener.local_addr().map_err(AskError::Start)?);
    let mut command = command("cargo");
    command.env("CARGO_HTTP_PROXY", proxy).env("CARGO_NET_RETRY", "0");
    command
        .env("CARGO_HOME", home.path())
        .env_remove("NO_PROXY")
        .env_remove("no_proxy")
        .env_remove("CARGO_NET_OFFLINE");
    command.args(["info", "cfg-if", "--quiet"]).stdout(Stdio::null());
    let mut child = command.spawn().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => AskError::Missing,
        _ => AskError::Start(e),
    })?;
    let heard = async {
        let (stream, _) = listener.accept().await?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await?;
        io::Result::Ok(line)
    };
    // Closing the connection is the refusal; the child is killed when it goes out of scope.
    let line = timeout(limit, async {
        tokio::select! {
            line = heard => line.map(Some),
            ended = child.wait() => ended.map(|_| None),
        }
    });
    let line = line.await.map_err(|_| AskError::TimedOut)?.map_err(AskError::Start)?;
    let _already_gone = child.kill().await;
    Ok(line.as_deref().and_then(asked_url))
}

/// The index's root from the first line that a proxy hears. The default index lies at its host's root.
fn asked_url(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    match (words.next()?, words.next()?) {
        ("CONNECT", authority) => Some(format!("https://{}/", authority.strip_suffix(":443").unwrap_or(authority))),
        ("GET", url) if url.starts_with("http://") => Some(url.strip_suffix("config.json").unwrap_or(url).to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_s_settings_are_read_with_their_rank() {
        let text = "global.index-url='https://a.test/simple'\n:env:.index-url='https://b.test/simple'\n\
            install.extra-index-url='\\nhttps://c.test/\\nhttps://d.test/'\n:env:.find-links='/opt/wheels'\nbroken\n";
        let expected = PipSettings {
            index: Some("https://b.test/simple".into()),
            extra: vec!["https://c.test/".into(), "https://d.test/".into()],
            no_index: false,
        };
        assert_eq!(PipSettings::read(text), expected);
        assert_eq!(PipSettings::read(""), PipSettings::default());
    }

    #[test]
    fn machines_get_neither_paths_nor_credentials() {
        let mut answer = Answer::default();
        answer.give("pip", "A", &["https://u:secret@a.test/simple"]);
        answer.give("pip", "B", &["/opt/wheels", "file:///opt/wheels"]);
        assert_eq!(answer.machine_env, [("A".to_owned(), "https://a.test/simple".to_owned())]);
        assert!(!format!("{answer:?}").contains("secret"));
    }

    #[test]
    fn cargo_s_replaced_source_is_followed() {
        let config: toml::Table = "[source.crates-io]\nreplace-with = 'a'\n[source.a]\nreplace-with = 'b'\n\
            [source.b]\nregistry = 'sparse+https://b.test/i/'\n[registries.own]\nindex = 'https://git.test/i'\n"
            .parse()
            .unwrap();
        let mut replaced = false;
        assert_eq!(cargo_indexes(&config, &mut replaced), ["sparse+https://b.test/i/", "https://git.test/i"]);
        assert!(replaced);
    }

    #[test]
    fn a_proxy_s_first_line_tells_the_index() {
        assert_eq!(asked_url("CONNECT i.test:443 HTTP/1.1\r\n").as_deref(), Some("https://i.test/"));
        assert_eq!(asked_url("CONNECT i.test:8443 HTTP/1.1\r\n").as_deref(), Some("https://i.test:8443/"));
        assert_eq!(asked_url("GET http://i.test/x/config.json HTTP/1.1\r\n").as_deref(), Some("http://i.test/x/"));
        assert_eq!(asked_url("\r\n"), None);
    }
}
