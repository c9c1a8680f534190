//! The nouns and units every room shares. Data only: no I/O, no behaviour beyond arithmetic.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde::Serialize;

/// A token's number in the vocabulary.
pub type TokenId = u32;

/// Names one routed expert of one layer.
///
/// Ordered by layer, then expert: the order in which ties of recency are broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertKey {
    /// Transformer layer, counted from 0.
    pub layer: u16,
    /// Expert within the layer, counted from 0.
    pub expert: u16,
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}

/// A part of the core that is kept in one file and handed out as one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CorePart {
    /// Everything of one transformer layer but its routed experts; counted from 0.
    Layer(u16),
    /// Embedding, head and the final norms.
    Top,
}

impl fmt::Display for CorePart {
    /// The part's file name under `core/`: `042` or `top`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CorePart::Layer(layer) => write!(f, "{layer:03}"),
            CorePart::Top => f.write_str("top"),
        }
    }
}

/// Bytes `start..end` of a file, end exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// One past the last byte; never below `start`.
    pub end: u64,
}

impl ByteRange {
    /// # Panics
    ///
    /// If `end` lies before `start`: ranges from a file are checked where the file is read.
    #[track_caller]
    pub fn new(start: u64, end: u64) -> Self {
        assert!(start <= end, "range {start}..{end} runs backwards");
        ByteRange { start, end }
    }

    /// Length in bytes.
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether the range holds no byte.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..{}", self.start, self.end)
    }
}

/// A model repository, `ORG/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepoId(String);

impl RepoId {
    /// The whole name, `ORG/NAME`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the repository's folder on disk: `ORG--NAME`.
    pub fn folder_name(&self) -> String {
        self.0.replace('/', "--")
    }
}

/// A text that does not name what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct Malformed {
    /// What was given.
    pub text: String,
    /// What it should have been, with an article: "a repository of the form ORG/NAME".
    pub expected: &'static str,
}

impl FromStr for RepoId {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let part = |p: &str| {
            !p.is_empty()
                && p.len() <= 96
                && !p.starts_with(['.', '-'])
                && !p.contains("--")
                && !p.contains("..")
                && p.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
        };
        let parts: Vec<&str> = text.split('/').collect();
        if parts.len() == 2 && parts.iter().all(|p| part(p)) {
            Ok(RepoId(text.to_owned()))
        } else {
            Err(Malformed {
                text: text.to_owned(),
                expected: "a repository of the form ORG/NAME",
            })
        }
    }
}

impl TryFrom<String> for RepoId {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Self, Malformed> {
        text.parse()
    }
}

impl From<RepoId> for String {
    fn from(repo: RepoId) -> String {
        repo.0
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A pinned commit: 40 lower-case hexadecimal digits, never a branch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Revision(String);

impl Revision {
    /// All 40 digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Revision {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        if text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            Ok(Revision(text.to_owned()))
        } else {
            Err(Malformed {
                text: text.to_owned(),
                expected: "a commit of 40 hexadecimal digits",
            })
        }
    }
}

impl TryFrom<String> for Revision {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Self, Malformed> {
        text.parse()
    }
}

impl From<Revision> for String {
    fn from(revision: Revision) -> String {
        revision.0
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A SHA-256 digest; written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let wrong = || Malformed {
            text: text.to_owned(),
            expected: "a sha256 of 64 hexadecimal digits",
        };
        if text.len() != 64 || !text.is_ascii() {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Digest(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Self, Malformed> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// A number of bytes, shown in decimal units as disks and links count them: `113.5 GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [
            (1_000_000_000_000, "TB"),
            (1_000_000_000, "GB"),
            (1_000_000, "MB"),
            (1_000, "kB"),
        ];
        match UNITS.iter().find(|(unit, _)| self.0 >= *unit) {
            #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
            Some((unit, name)) => write!(f, "{:.1} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl FromStr for Bytes {
    type Err = Malformed;

    /// Reads `200GB` (decimal), `64GiB` (binary), `1.5TB` or a plain number of bytes.
    fn from_str(text: &str) -> Result<Self, Malformed> {
        let wrong = || Malformed {
            text: text.to_owned(),
            expected: "a size such as 200GB or 64GiB",
        };
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" => 1_000,
            "m" | "mb" => 1_000_000,
            "g" | "gb" => 1_000_000_000,
            "t" | "tb" => 1_000_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            _ => return Err(wrong()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Bytes).ok_or_else(wrong);
        }
        let number: f64 = number.parse().map_err(|_| wrong())?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "a fraction of a unit was asked for"
        )]
        let bytes = number * scale as f64;
        if !bytes.is_finite() || bytes >= 1.8e19 {
            return Err(wrong());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked above"
        )]
        Ok(Bytes(bytes as u64))
    }
}
