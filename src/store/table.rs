//! What the digest log says, line by line.
//!
//! ```text
//! {"file":"experts/042/0123","offset":0,"length":17547264,"sha256":"…","level":"first use",
//!  "source":"https://huggingface.co","time":1764547200,"by":"1880…","n":17,"quick":9…,"line":"4f…"}
//! {"mark":"synced","by":"1880…","n":17}      lines 1 to 17 of that process, and their files, are safe
//! {"mark":"unclean"}                          everything above is looked at again before it is used
//! {"mark":"forgotten","file":"core/003"}      nothing is known of that file any more
//! ```
//!
//! Each process numbers its own lines (`by`, `n`), so that one process's mark says nothing about
//! another's. `quick` is the fast sum that finds rot at first use, `line` a sum of the line itself:
//! a rotten digit in a digest would otherwise condemn a sound file, and every sound copy after it.
//! A line that does not parse, or has another sum, is ignored.

use std::collections::HashMap;

use serde::Deserialize;
use serde::Serialize;

use super::ledger::fnv;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// How much a digest proves, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Level {
    /// These bytes arrived first. Rot and a later change at the source show.
    #[serde(rename = "first use")]
    FirstUse,
    /// The whole shard was put together from parts like this and had the sha256 the hub publishes.
    #[serde(rename = "whole shard")]
    WholeShard,
    /// A published list names it.
    #[serde(rename = "manifest")]
    Manifest,
}

/// What is known of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Their digest.
    pub sha256: Digest,
    /// Their number.
    pub length: u64,
    /// How much that proves.
    pub level: Level,
}

/// What a line speaks of: an expert, or any other file of the model by its path in the model's folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    Expert(ExpertKey),
    File(Box<str>),
}

impl Subject {
    pub(super) fn path(&self) -> String {
        match self {
            Subject::Expert(key) => format!("experts/{:03}/{:04}", key.layer, key.expert),
            Subject::File(path) => path.to_string(),
        }
    }

    fn of(path: &str) -> Self {
        match path.strip_prefix("experts/").and_then(expert_of) {
            Some(key) => Subject::Expert(key),
            None => Subject::File(path.into()),
        }
    }
}

/// Reads `042/0123`, in exactly the form in which it is written.
pub(super) fn expert_of(path: &str) -> Option<ExpertKey> {
    let (layer, expert) = path.split_once('/')?;
    Some(ExpertKey {
        layer: number(layer, 3)?,
        expert: number(expert, 4)?,
    })
}

/// A number written with at least `digits` digits and no more zeros than that.
pub(super) fn number(text: &str, digits: usize) -> Option<u16> {
    let plain = text.bytes().all(|b| b.is_ascii_digit())
        && (text.len() == digits || text.len() > digits && !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

/// One line to be written.
#[derive(Clone, Debug)]
pub(super) struct Line<'a> {
    pub(super) subject: Subject,
    pub(super) known: Known,
    /// The fast sum of the file's bytes, where it was computed.
    pub(super) quick: Option<u64>,
    pub(super) source: &'a str,
    /// The file was there before and has been compared; it did not arrive just now.
    pub(super) checked: bool,
}

#[derive(Serialize, Deserialize)]
struct RawLine<'a> {
    #[serde(borrow)]
    file: std::borrow::Cow<'a, str>,
    offset: u64,
    length: u64,
    sha256: Hex,
    level: Level,
    #[serde(borrow)]
    source: std::borrow::Cow<'a, str>,
    /// Seconds since 1970.
    time: u64,
    #[serde(borrow)]
    by: std::borrow::Cow<'a, str>,
    n: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quick: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    checked: bool,
}

impl<'a> RawLine<'a> {
    fn of(line: &'a Line<'a>, by: &'a str, n: u64, time: u64) -> Self {
        RawLine {
            file: line.subject.path().into(),
            offset: 0,
            length: line.known.length,
            sha256: Hex(line.known.sha256),
            level: line.known.level,
            source: line.source.into(),
            time,
            by: by.into(),
            n,
            quick: line.quick,
            checked: line.checked,
        }
    }
}

/// A line as it is written: line `n` of the process `by`, at so many seconds since 1970.
pub(super) fn written(line: &Line<'_>, by: &str, n: u64, time: u64) -> std::io::Result<String> {
    seal(&RawLine::of(line, by, n, time))
}

/// What stands between a line's own text and its sum, and after that.
const SEAL: (&str, &str) = (",\"line\":\"", "\"}");
const SEAL_LEN: usize = SEAL.0.len() + 16 + SEAL.1.len();

fn seal(line: &impl Serialize) -> std::io::Result<String> {
    let mut text = serde_json::to_string(line).map_err(std::io::Error::other)?;
    text.pop();
    let sum = fnv(text.as_bytes());
    text += &format!("{}{sum:016x}{}\n", SEAL.0, SEAL.1);
    Ok(text)
}

/// Whether a line is as it was written, as far as it tells: earlier versions wrote no sum.
fn seal_holds(line: &str) -> bool {
    let split = line.len().checked_sub(SEAL_LEN);
    let Some((text, seal)) = split.and_then(|at| line.split_at_checked(at)) else {
        return true;
    };
    let sum = seal
        .strip_prefix(SEAL.0)
        .and_then(|s| s.strip_suffix(SEAL.1));
    sum.is_none_or(|sum| u64::from_str_radix(sum, 16) == Ok(fnv(text.as_bytes())))
}

/// A digest read without an allocation: there is one for each of 82,432 experts.
struct Hex(Digest);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&str>::deserialize(deserializer)?;
        text.parse().map(Hex).map_err(serde::de::Error::custom)
    }
}

/// A line that is about other lines.
#[derive(Serialize, Deserialize)]
#[serde(tag = "mark", rename_all = "lowercase")]
pub(super) enum Mark {
    Synced { by: String, n: u64 },
    Unclean,
    Forgotten { file: String },
}

impl Mark {
    /// The mark as it is written.
    pub(super) fn written(&self) -> std::io::Result<String> {
        seal(self)
    }
}

#[derive(Clone, Copy, Debug)]
struct Record {
    known: Known,
    quick: Option<u64>,
    /// Number of the process that wrote the file, and of its line.
    by: u32,
    n: u64,
    /// Position among all lines of the last line that vouches for the file.
    seen: u64,
    source: u32,
    /// Seconds since 1970.
    time: u64,
}

/// Names that occur again and again, each kept once.
#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
}

impl Names {
    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        self.numbers.insert(name.to_owned(), number);
        self.names.push(name.to_owned());
        number
    }

    fn name(&self, number: u32) -> &str {
        self.names.get(number as usize).map_or("", String::as_str)
    }
}

/// All lines read so far.
#[derive(Debug, Default)]
pub(super) struct Table {
    records: HashMap<Subject, Record>,
    writers: Names,
    sources: Names,
    synced: HashMap<u32, u64>,
    lines: u64,
    unclean_at: u64,
    /// Bytes of the file that are read.
    pub(super) read_to: u64,
    /// Which file that was.
    pub(super) file: u64,
}

impl Table {
    /// Lines read so far, marks and all.
    pub(super) fn lines(&self) -> u64 {
        self.lines
    }

    /// Takes in every complete line of `bytes`; returns how many bytes that were.
    pub(super) fn replay(&mut self, bytes: &[u8]) -> usize {
        let whole = bytes
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |end| end + 1);
        for line in bytes[..whole].split(|b| *b == b'\n') {
            if let Ok(line) = std::str::from_utf8(line) {
                self.take(line);
            }
        }
        whole
    }

    /// Has everything read so far looked at again before it is used, as the mark would.
    pub(super) fn suspect_all(&mut self) {
        self.unclean_at = self.lines;
    }

    fn take(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        self.lines += 1;
        let whole = seal_holds(line);
        if whole && let Ok(raw) = serde_json::from_str::<RawLine<'_>>(line) {
            return self.take_line(&raw);
        }
        if whole && let Ok(mark) = serde_json::from_str::<Mark>(line) {
            return self.take_mark(mark);
        }
        // A line that was cut, and the next one glued to it.
        let glued = line.rfind("{\"file\":").max(line.rfind("{\"mark\":"));
        if let Some(start) = glued.filter(|start| *start > 0) {
            self.take(&line[start..]);
        }
    }

    fn take_mark(&mut self, mark: Mark) {
        match mark {
            Mark::Synced { by, n } => {
                let writer = self.writers.number(&by);
                let synced = self.synced.entry(writer).or_default();
                *synced = n.max(*synced);
            }
            Mark::Unclean => self.suspect_all(),
            Mark::Forgotten { file } => {
                self.records.remove(&Subject::of(&file));
            }
        }
    }

    fn take_line(&mut self, raw: &RawLine<'_>) {
        let (by, subject) = (self.writers.number(&raw.by), Subject::of(&raw.file));
        let mut record = Record {
            known: Known {
                sha256: raw.sha256.0,
                length: raw.length,
                level: raw.level,
            },
            quick: raw.quick,
            by,
            n: raw.n,
            seen: self.lines,
            source: self.sources.number(&raw.source),
            time: raw.time,
        };
        if let Some(old) = self.records.get(&subject) {
            if old.known.sha256 == record.known.sha256 {
                // Fetching the same bytes once more proves no less than before.
                record.known.level = record.known.level.max(old.known.level);
                record.quick = record.quick.or(old.quick);
            }
            if raw.checked {
                (record.by, record.n) = (old.by, old.n);
            }
        }
        self.records.insert(subject, record);
    }

    fn is_synced(&self, record: &Record) -> bool {
        let synced = self.synced.get(&record.by).copied().unwrap_or(0);
        record.n <= synced
    }

    /// What the lines say of a file.
    pub(super) fn tell(&self, subject: &Subject) -> Option<Told> {
        let record = self.records.get(subject)?;
        Some(Told {
            known: record.known,
            quick: record.quick,
            suspect: record.seen <= self.unclean_at,
            synced: self.is_synced(record),
        })
    }

    /// How many of the lines speak of something that is kept.
    pub(super) fn live(&self, keep: &dyn Fn(&Subject, Level) -> bool) -> u64 {
        let records = self.records.iter();
        let kept = records.filter(|(subject, record)| keep(subject, record.known.level));
        kept.count() as u64
    }

    /// The shortest log that says the same of everything that is kept: what is under suspicion, the
    /// mark that makes it so, the rest, and how far each writer's lines are safe.
    ///
    /// # Errors
    ///
    /// None but from the serializer, which has no reason for any.
    pub(super) fn rewritten(
        &self,
        keep: &dyn Fn(&Subject, Level) -> bool,
    ) -> std::io::Result<String> {
        let records = self.records.iter();
        let kept = records.filter(|(subject, record)| keep(subject, record.known.level));
        let mut kept: Vec<_> = kept.collect();
        kept.sort_unstable_by_key(|(_, record)| record.seen);
        let (suspect, fine) =
            kept.split_at(kept.partition_point(|(_, record)| record.seen <= self.unclean_at));
        let mut text = String::new();
        for (subject, record) in suspect {
            text += &self.line(subject, record)?;
        }
        if !suspect.is_empty() {
            text += &Mark::Unclean.written()?;
        }
        for (subject, record) in fine {
            text += &self.line(subject, record)?;
        }
        let mut writers: Vec<u32> = kept.iter().map(|(_, record)| record.by).collect();
        writers.sort_unstable();
        writers.dedup();
        for writer in writers {
            if let Some(n) = self.synced.get(&writer).copied() {
                let by = self.writers.name(writer).to_owned();
                text += &Mark::Synced { by, n }.written()?;
            }
        }
        Ok(text)
    }

    fn line(&self, subject: &Subject, record: &Record) -> std::io::Result<String> {
        let line = Line {
            subject: subject.clone(),
            known: record.known,
            quick: record.quick,
            source: self.sources.name(record.source),
            // What it inherited from the line before it stands in it now.
            checked: false,
        };
        let by = self.writers.name(record.by);
        written(&line, by, record.n, record.time)
    }
}

/// What [`super::digests::DigestLog::get`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) known: Known,
    /// The fast sum of the file's bytes, where it is known.
    pub(super) quick: Option<u64>,
    /// No line since the last unclean stop vouches for the file.
    pub(super) suspect: bool,
    /// The file was safe from a power loss when the log was last read.
    pub(super) synced: bool,
}
