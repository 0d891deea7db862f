//! Errors as text.

use std::error::Error;

/// An error and its causes on one line, each said once.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Link(&'static str, #[source] Option<Box<Link>>);

    #[test]
    fn each_cause_is_said_once() {
        let inner = Link("no such file", None);
        let middle = Link("open x: no such file", Some(Box::new(inner)));
        assert_eq!(error_chain(&Link("start", Some(Box::new(middle)))), "start: open x: no such file");
    }
}
