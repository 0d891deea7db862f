//! Asks an index where its files are.

use super::{
    Index, IndexKind,
    fetch::{FetchError, Fetched, Fetcher},
};
use serde_json::Value;
use std::collections::BTreeMap;
use url::Url;

/// A package that every Python index has, since clients install it first.
const PIP_SAMPLE: &str = "pip/";
/// A tiny package without dependencies, so that its document is small.
const NPM_SAMPLE: &str = "is-number";
const PIP_ACCEPT: &str = "application/vnd.pypi.simple.v1+json, text/html;q=0.5";
const NPM_ACCEPT: &str = "application/vnd.npm.install-v1+json, application/json;q=0.5";

/// URLs, one for each host, from which the index's files come, and those of redirects on the way.
pub(super) async fn download_urls(fetcher: &Fetcher, index: &Index) -> Result<Vec<Url>, FetchError> {
    let Some((relative, accept)) = sample(index.kind) else { return Ok(Vec::new()) };
    let mut base = index.url.clone();
    if !base.path().ends_with('/') {
        base.set_path(&format!("{}/", base.path()));
    }
    let content = || FetchError::Content(base.host_str().unwrap_or_default().to_owned());
    let url = base.join(relative).map_err(|_| content())?;
    let fetched = fetcher.get(&url, accept).await?;
    let files = file_urls(index.kind, &fetched).ok_or_else(content)?;
    let mut by_host = BTreeMap::new();
    for url in fetched.visited.into_iter().chain(files) {
        by_host.entry((url.host_str().map(str::to_owned), url.port())).or_insert(url);
    }
    Ok(by_host.into_values().collect())
}

fn sample(kind: IndexKind) -> Option<(&'static str, &'static str)> {
    match kind {
        IndexKind::Pip => Some((PIP_SAMPLE, PIP_ACCEPT)),
        IndexKind::Npm => Some((NPM_SAMPLE, NPM_ACCEPT)),
        IndexKind::Cargo => Some(("config.json", "application/json")),
        IndexKind::Plain => None,
    }
}

fn file_urls(kind: IndexKind, fetched: &Fetched) -> Option<Vec<Url>> {
    let json = || serde_json::from_slice::<Value>(&fetched.body).ok();
    let join = |text: &str| fetched.url.join(text).ok();
    let texts: Vec<String> = match kind {
        IndexKind::Pip if !fetched.content_type.contains("json") => hrefs(&String::from_utf8_lossy(&fetched.body)),
        IndexKind::Pip => {
            let json = json()?;
            let files = json.get("files")?.as_array()?;
            files.iter().filter_map(|file| file.get("url")?.as_str().map(str::to_owned)).collect()
        }
        IndexKind::Npm => {
            let json = json()?;
            let versions = json.get("versions")?.as_object()?;
            versions.values().filter_map(|v| v.get("dist")?.get("tarball")?.as_str().map(str::to_owned)).collect()
        }
        // `dl` may hold placeholders such as {crate}, but not in its host.
        IndexKind::Cargo => vec![json()?.get("dl")?.as_str()?.to_owned()],
        IndexKind::Plain => Vec::new(),
    };
    Some(texts.iter().filter_map(|text| join(text)).collect())
}

/// The targets of links. A list of files is plain enough that no HTML parser is needed; what is missed is only not
/// allowed.
fn hrefs(html: &str) -> Vec<String> {
    let parts = html.split("href=").skip(1);
    let target = |part: &str| {
        let quote = part.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let end = part[1..].find(quote)?;
        Some(part[1..=end].replace("&amp;", "&"))
    };
    parts.filter_map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(kind: IndexKind, content_type: &str, body: &str) -> Option<Vec<String>> {
        let url = Url::parse("https://index.test/simple/pip/").unwrap();
        let body = body.to_owned().into();
        let fetched = Fetched { url, visited: Vec::new(), content_type: content_type.to_owned(), body };
        Some(file_urls(kind, &fetched)?.iter().map(|u| u.host_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn each_kind_of_index_is_read() {
        let html = r#"<a href="https://files.test/a.whl#sha256=1">a</a> <a href='../../b.whl'>b</a>"#;
        assert_eq!(hosts(IndexKind::Pip, "text/html", html).unwrap(), ["files.test", "index.test"]);
        let json = r#"{"files":[{"url":"https://files.test/a.whl"},{"url":"/b.whl"},{}]}"#;
        assert_eq!(
            hosts(IndexKind::Pip, "application/vnd.pypi.simple.v1+json", json).unwrap(),
            ["files.test", "index.test"]
        );
        let npm = r#"{"versions":{"1.0.0":{"dist":{"tarball":"https://tar.test/x.tgz"}}}}"#;
        assert_eq!(hosts(IndexKind::Npm, "application/json", npm).unwrap(), ["tar.test"]);
        let cargo = r#"{"dl":"https://dl.test/{crate}/{version}","api":"https://api.test"}"#;
        assert_eq!(hosts(IndexKind::Cargo, "application/json", cargo).unwrap(), ["dl.test"]);
        for kind in [IndexKind::Pip, IndexKind::Npm, IndexKind::Cargo] {
            assert_eq!(hosts(kind, "application/json", "[]"), None);
        }
    }
}
