//! What the bytes of each file should be: an append-only file of JSON lines.
//!
//! ```text
//! {"file":"experts/042/0123","offset":0,"length":17547264,"sha256":"…","level":"first use",
//!  "source":"https://huggingface.co","time":1764547200,"by":"1880…","n":17}
//! {"mark":"synced","by":"1880…","n":17}      lines 1 to 17 of that process, and their files, are safe
//! {"mark":"unclean"}                          everything above is looked at again before it is used
//! ```
//!
//! Each process numbers its own lines (`by`, `n`), so that one process's mark says nothing about
//! another's. A line that does not parse is ignored: it was cut by a crash or a full disk.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde::Serialize;

use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::read_vec;
use super::lock;
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    checked: bool,
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

#[derive(Serialize, Deserialize)]
#[serde(tag = "mark", rename_all = "lowercase")]
enum Mark {
    Synced { by: String, n: u64 },
    Unclean,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    known: Known,
    /// Number of the process that wrote the file, and of its line.
    by: u32,
    n: u64,
    /// Position among all lines of the last line that vouches for the file.
    seen: u64,
}

/// All lines read so far.
#[derive(Debug, Default)]
struct Table {
    records: HashMap<Subject, Record>,
    writers: HashMap<String, u32>,
    synced: HashMap<u32, u64>,
    lines: u64,
    unclean_at: u64,
    /// Bytes of the file that are read.
    read_to: u64,
}

impl Table {
    fn writer(&mut self, by: &str) -> u32 {
        if let Some(writer) = self.writers.get(by) {
            return *writer;
        }
        let writer = u32::try_from(self.writers.len()).unwrap_or(u32::MAX);
        self.writers.insert(by.to_owned(), writer);
        writer
    }

    /// Takes in every complete line of `bytes`; returns how many bytes that were.
    fn replay(&mut self, bytes: &[u8]) -> usize {
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

    fn take(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        self.lines += 1;
        if let Ok(raw) = serde_json::from_str::<RawLine<'_>>(line) {
            return self.take_line(&raw);
        }
        match serde_json::from_str::<Mark>(line) {
            Ok(Mark::Synced { by, n }) => {
                let writer = self.writer(&by);
                let synced = self.synced.entry(writer).or_default();
                *synced = n.max(*synced);
            }
            Ok(Mark::Unclean) => self.unclean_at = self.lines,
            // A line that was cut, and the next one glued to it.
            Err(_) => {
                let glued = line.rfind("{\"file\":").max(line.rfind("{\"mark\":"));
                if let Some(start) = glued.filter(|start| *start > 0) {
                    self.take(&line[start..]);
                }
            }
        }
    }

    fn take_line(&mut self, raw: &RawLine<'_>) {
        let (by, subject) = (self.writer(&raw.by), Subject::of(&raw.file));
        let mut record = Record {
            known: Known {
                sha256: raw.sha256.0,
                length: raw.length,
                level: raw.level,
            },
            by,
            n: raw.n,
            seen: self.lines,
        };
        if let Some(old) = self.records.get(&subject) {
            if old.known.sha256 == record.known.sha256 {
                // Fetching the same bytes once more proves no less than before.
                record.known.level = record.known.level.max(old.known.level);
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
}

/// What [`DigestLog::get`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) known: Known,
    /// No line since the last unclean stop vouches for the file.
    pub(super) suspect: bool,
    /// The file was safe from a power loss when the log was last read.
    pub(super) synced: bool,
}

#[derive(Debug)]
enum Pending {
    /// The line is written, the file not yet published.
    Writing,
    Published(PathBuf),
    /// The file was not published after all.
    Nothing,
}

#[derive(Debug, Default)]
struct Tail {
    file: Option<Box<dyn DiskFile>>,
    /// An append failed and may have left half a line.
    broken: bool,
    next: u64,
    pending: BTreeMap<u64, Pending>,
}

/// One model's digests.
#[derive(Debug)]
pub(super) struct DigestLog {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    by: String,
    /// The folders above the log, up to the one that holds the home.
    above: Vec<PathBuf>,
    /// Whether those are safe from a power loss.
    rooted: AtomicBool,
    table: Mutex<Option<Table>>,
    tail: Mutex<Tail>,
}

impl DigestLog {
    /// The log of the model in `folder`, which lies somewhere below `home`.
    pub(super) fn new(disk: Arc<dyn Disk>, home: &Path, folder: &Path, session: u64) -> Self {
        let in_home = folder.ancestors().take_while(|f| f.starts_with(home));
        let above = in_home.chain(home.parent()).map(Path::to_owned);
        DigestLog {
            disk,
            path: folder.join("digests"),
            by: format!("{session:016x}"),
            above: above.collect(),
            rooted: AtomicBool::new(false),
            table: Mutex::default(),
            tail: Mutex::default(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Asks the table; reads the file first, or what others have added to it since, if the table
    /// does not know.
    pub(super) fn get(&self, subject: &Subject) -> io::Result<Option<Told>> {
        let mut table = lock(&self.table);
        if let Some(told) = table.as_ref().and_then(|t| tell(t, subject)) {
            return Ok(Some(told));
        }
        self.refresh(&mut table)?;
        Ok(table.as_ref().and_then(|t| tell(t, subject)))
    }

    fn refresh(&self, table: &mut Option<Table>) -> io::Result<()> {
        let known = table.get_or_insert_default();
        let file = match self.disk.open(&self.path, How::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        let len = file.facts()?.len;
        if len < known.read_to {
            *known = Table::default(); // another process has rewritten it
        }
        let fresh =
            usize::try_from(len - known.read_to).map_err(|_| io::ErrorKind::FileTooLarge)?;
        if fresh > 0 {
            let bytes = read_vec(&*file, known.read_to, fresh)?;
            known.read_to += known.replay(&bytes) as u64;
        }
        Ok(())
    }

    /// Writes lines, each for a file that is about to be published or was compared just now. Returns
    /// the number of the last one.
    pub(super) fn append(&self, lines: &[Line<'_>]) -> io::Result<u64> {
        let mut tail = lock(&self.tail);
        let mut text = String::new();
        let mut n = tail.next;
        for line in lines {
            n += 1;
            let raw = RawLine {
                file: line.subject.path().into(),
                offset: 0,
                length: line.known.length,
                sha256: Hex(line.known.sha256),
                level: line.known.level,
                source: line.source.into(),
                time: self.disk.now() / 1_000_000_000,
                by: self.by.as_str().into(),
                n,
                checked: line.checked,
            };
            text += &serde_json::to_string(&raw).map_err(io::Error::other)?;
            text.push('\n');
        }
        // Numbers are used up even if the append fails: half of it may stand in the file.
        let first = tail.next + 1;
        tail.next = n;
        self.write(&mut tail, text)?;
        for (number, line) in (first..=n).zip(lines) {
            let waits = if line.checked {
                Pending::Nothing
            } else {
                Pending::Writing
            };
            tail.pending.insert(number, waits);
        }
        drop(tail);
        let mut table = lock(&self.table);
        if table.is_some() {
            self.refresh(&mut table)?;
        }
        Ok(n)
    }

    /// Says that everything so far is to be looked at again before it is used.
    pub(super) fn mark_unclean(&self) -> io::Result<()> {
        let text = serde_json::to_string(&Mark::Unclean).map_err(io::Error::other)?;
        let mut tail = lock(&self.tail);
        self.write(&mut tail, text + "\n")?;
        tail.file.as_ref().map_or(Ok(()), |file| file.sync())?;
        drop(tail);
        let mut table = lock(&self.table);
        self.refresh(&mut table)
    }

    fn write(&self, tail: &mut Tail, text: String) -> io::Result<()> {
        let fresh = tail.file.is_none();
        let file = match &mut tail.file {
            Some(file) => file,
            none => none.insert(self.disk.open(&self.path, How::Append)?),
        };
        let cut = tail.broken || fresh && ends_cut(&**file)?;
        let text = if cut { format!("\n{text}") } else { text };
        let written = file.append(text.as_bytes());
        tail.broken = written.is_err();
        written
    }

    /// Says under which name the file of line `n` was published, or that it was not.
    pub(super) fn settle(&self, n: u64, published: Option<PathBuf>) {
        let settled = published.map_or(Pending::Nothing, Pending::Published);
        lock(&self.tail).pending.insert(n, settled);
    }

    /// Makes every published file and its line safe from a power loss, and says so in the log.
    /// Returns how many files that were.
    pub(super) fn sync(&self) -> io::Result<usize> {
        let (upto, files) = self.take_settled();
        if files.is_empty() && upto == 0 {
            return Ok(0);
        }
        let done = self.sync_files(&files).and_then(|()| {
            let mut tail = lock(&self.tail);
            tail.file.as_ref().map_or(Ok(()), |file| file.sync())?;
            if upto == 0 {
                return Ok(());
            }
            let by = self.by.clone();
            let mark = Mark::Synced { by, n: upto };
            let text = serde_json::to_string(&mark).map_err(io::Error::other)?;
            self.write(&mut tail, text + "\n")?;
            tail.file.as_ref().map_or(Ok(()), |file| file.sync())
        });
        if done.is_err() {
            let mut tail = lock(&self.tail);
            for (n, path) in &files {
                tail.pending.insert(*n, Pending::Published(path.clone()));
            }
        }
        done.map(|()| files.len())
    }

    /// The highest number below which nothing is still being written, and the files up to it.
    fn take_settled(&self) -> (u64, Vec<(u64, PathBuf)>) {
        let mut tail = lock(&self.tail);
        let writing = |(n, p): (&u64, &Pending)| matches!(p, Pending::Writing).then_some(*n);
        let first_open = tail.pending.iter().find_map(writing).unwrap_or(u64::MAX);
        let still_open = tail.pending.split_off(&first_open);
        let settled = std::mem::replace(&mut tail.pending, still_open);
        let upto = settled.keys().next_back().copied().unwrap_or(0);
        let files = settled.into_iter().filter_map(|(n, p)| match p {
            Pending::Published(path) => Some((n, path)),
            Pending::Writing | Pending::Nothing => None,
        });
        (upto, files.collect())
    }

    fn sync_files(&self, files: &[(u64, PathBuf)]) -> io::Result<()> {
        let mut folders: Vec<&Path> = Vec::new();
        for (_, path) in files {
            match self.disk.open(path, How::Read).and_then(|file| file.sync()) {
                Ok(()) => {}
                // Evicted meanwhile. Its folder is synced nevertheless: a name that comes back after
                // a power loss would stand for bytes that were never synced.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
            // The layer's folder may be new, and so may the one above it.
            folders.extend(path.ancestors().skip(1).take(2));
        }
        folders.sort_unstable();
        folders.dedup();
        folders
            .iter()
            .try_for_each(|folder| self.disk.sync_folder(folder))?;
        self.sync_roots()
    }

    /// Makes the model's own folder, and those above it, safe from a power loss. Once is enough: they
    /// are never removed; but the log itself may be new later.
    pub(super) fn sync_roots(&self) -> io::Result<()> {
        let rooted = self.rooted.load(Ordering::Acquire);
        let known = if rooted { 1 } else { self.above.len() };
        for folder in &self.above[..known.min(self.above.len())] {
            match self.disk.sync_folder(folder) {
                // The folder that holds the home may be one we may not even open.
                Err(_) if Some(folder) == self.above.last() && known > 1 => {}
                other => other?,
            }
        }
        self.rooted.store(true, Ordering::Release);
        Ok(())
    }
}

fn tell(table: &Table, subject: &Subject) -> Option<Told> {
    let record = table.records.get(subject)?;
    Some(Told {
        known: record.known,
        suspect: record.seen <= table.unclean_at,
        synced: table.is_synced(record),
    })
}

/// Whether the file ends within a line.
fn ends_cut(file: &dyn DiskFile) -> io::Result<bool> {
    let len = file.facts()?.len;
    Ok(len > 0 && read_vec(file, len - 1, 1)? != b"\n")
}
