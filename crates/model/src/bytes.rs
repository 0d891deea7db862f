//! Bytes in JSON: one character per byte (U+0000 to U+00FF).
//!
//! A list of numbers, serde's own form, is four times as long as the bytes that people write, and a message has a limit.
//! Use with `#[serde(with = "trialrun_model::bytes")]`, or the modules for lists, pairs and options.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(*b)).collect()
}

fn bytes<E: Error>(text: &str) -> Result<Vec<u8>, E> {
    let byte = |c| u8::try_from(u32::from(c)).map_err(|_| E::custom("a character that stands for no byte"));
    text.chars().map(byte).collect()
}

/// Writes bytes.
///
/// # Errors
/// The serialiser's.
pub fn serialize<S: Serializer>(value: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text(value))
}

/// Reads bytes.
///
/// # Errors
/// A text with a character beyond U+00FF.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    bytes(&String::deserialize(deserializer)?)
}

/// A list of byte strings.
pub mod list {
    use super::{Deserialize, Deserializer, Serializer, bytes, text};

    /// Writes it.
    ///
    /// # Errors
    /// The serialiser's.
    pub fn serialize<S: Serializer>(value: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(value.iter().map(|v| text(v)))
    }

    /// Reads it.
    ///
    /// # Errors
    /// A text with a character beyond U+00FF.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<u8>>, D::Error> {
        Vec::<String>::deserialize(deserializer)?.iter().map(|t| bytes(t)).collect()
    }
}

/// A list of pairs of byte strings.
pub mod pairs {
    use super::{Deserialize, Deserializer, Serializer, bytes, text};

    type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

    /// Writes it.
    ///
    /// # Errors
    /// The serialiser's.
    pub fn serialize<S: Serializer>(value: &Pairs, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(value.iter().map(|(a, b)| (text(a), text(b))))
    }

    /// Reads it.
    ///
    /// # Errors
    /// A text with a character beyond U+00FF.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Pairs, D::Error> {
        Vec::<(String, String)>::deserialize(deserializer)?.iter().map(|(a, b)| Ok((bytes(a)?, bytes(b)?))).collect()
    }
}

/// Bytes that may be absent.
pub mod option {
    use super::{Deserialize, Deserializer, Serialize, Serializer, bytes, text};

    /// Writes it.
    ///
    /// # Errors
    /// The serialiser's.
    pub fn serialize<S: Serializer>(value: &Option<Vec<u8>>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_deref().map(text).serialize(serializer)
    }

    /// Reads it.
    ///
    /// # Errors
    /// A text with a character beyond U+00FF.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
        Option::<String>::deserialize(deserializer)?.map(|t| bytes(&t)).transpose()
    }
}
