//! What a batch has answered so far: lines of its output and of its error file, in the order in which
//! they came.
//!
//! `NUMBER o JSON` is a line of the output, `NUMBER e JSON` one of the error file, where NUMBER is
//! that of the input's line. What is in the log is answered, and is never answered again.

use std::collections::BTreeMap;
use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::io::BufRead;
use std::io::BufReader;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use serde_json::json;

use crate::jobs::JobError;

/// Bytes copied at a time.
const PIECE: usize = 1 << 16;

/// Tokens of all answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tokens {
    input: u64,
    cached: u64,
    output: u64,
    reasoning: u64,
}

impl Tokens {
    /// Counts in what a line says of its usage, in the words of either kind of reply.
    fn add(&mut self, line: &Value) {
        let usage = &line["response"]["body"]["usage"];
        let count = |names: [&str; 2]| names.iter().find_map(|name| usage[*name].as_u64());
        let detail = |names: [&str; 2], what: &str| {
            names.iter().find_map(|name| usage[*name][what].as_u64())
        };
        let inside = ["input_tokens_details", "prompt_tokens_details"];
        let outside = ["output_tokens_details", "completion_tokens_details"];
        self.input += count(["input_tokens", "prompt_tokens"]).unwrap_or(0);
        self.output += count(["output_tokens", "completion_tokens"]).unwrap_or(0);
        self.cached += detail(inside, "cached_tokens").unwrap_or(0);
        self.reasoning += detail(outside, "reasoning_tokens").unwrap_or(0);
    }

    /// OpenAI's object.
    pub(super) fn json(&self) -> Value {
        json!({
            "input_tokens": self.input,
            "input_tokens_details": { "cached_tokens": self.cached },
            "output_tokens": self.output,
            "output_tokens_details": { "reasoning_tokens": self.reasoning },
            "total_tokens": self.input + self.output,
        })
    }
}

/// Where a line's JSON stands in the log.
#[derive(Clone, Copy, Debug)]
struct Entry {
    good: bool,
    at: u64,
    len: usize,
}

/// Lines of the output and of the error file in a log that another process may be writing.
pub(super) fn glance(path: &Path) -> (usize, usize) {
    let mut counts = (0, 0);
    let Ok(file) = File::open(path) else {
        return counts;
    };
    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
    for line in lines {
        match line.split(|&b| b == b' ').nth(1) {
            Some(b"o") => counts.0 += 1,
            Some(b"e") => counts.1 += 1,
            _ => {}
        }
    }
    counts
}

/// The log of one batch, which this process owns.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
    /// By the number of the input's line.
    entries: BTreeMap<usize, Entry>,
    end: u64,
    tokens: Tokens,
}

impl Log {
    /// Opens it, and reads what an earlier process left. What is cut, or is no line of a log, and
    /// all after it, is cut off: it is answered again.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub(super) fn open(path: &Path) -> Result<Log, JobError> {
        let failed = |source| JobError::disk("cannot be read", path)(source);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        let mut log = Log {
            path: path.to_owned(),
            entries: BTreeMap::new(),
            end: 0,
            tokens: Tokens::default(),
            file,
        };
        let mut reader = BufReader::new(log.file.try_clone().map_err(failed)?);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line).map_err(failed)?;
            if read == 0 || !log.take(&line) {
                break;
            }
        }
        log.file.set_len(log.end).map_err(failed)?;
        Ok(log)
    }

    /// Counts in a line that stands at the end; `false` where it is none.
    fn take(&mut self, line: &[u8]) -> bool {
        let read = || {
            let text = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
            let (number, rest) = text.split_once(' ')?;
            let (kind, json) = rest.split_once(' ')?;
            let good = match kind {
                "o" => true,
                "e" => false,
                _ => return None,
            };
            let value: Value = serde_json::from_str(json).ok()?;
            let entry = Entry {
                good,
                at: self.end + (text.len() - json.len()) as u64,
                len: json.len(),
            };
            Some((number.parse::<usize>().ok()?, entry, value))
        };
        let Some((number, entry, value)) = read() else {
            return false;
        };
        self.end += line.len() as u64;
        if let std::collections::btree_map::Entry::Vacant(free) = self.entries.entry(number) {
            free.insert(entry);
            self.tokens.add(&value);
        }
        true
    }

    /// Whether the input's line of this number is answered.
    pub(super) fn holds(&self, number: usize) -> bool {
        self.entries.contains_key(&number)
    }

    /// Adds lines, of the output (`true`) or the error file, and has them survive a power cut. A
    /// line that is there already stays as it is.
    ///
    /// # Errors
    ///
    /// Where the disk says no; none of them is then in it.
    pub(super) fn add(&mut self, lines: &[(usize, bool, Value)]) -> Result<(), JobError> {
        let failed = |source| JobError::disk("cannot be written", &self.path)(source);
        let fresh = lines.iter().filter(|(number, ..)| !self.holds(*number));
        let texts: Vec<String> = fresh
            .map(|(number, good, line)| {
                let kind = if *good { 'o' } else { 'e' };
                format!("{number} {kind} {line}\n")
            })
            .collect();
        // At its place rather than at the end: a write that failed half-way is written over.
        self.file
            .write_all_at(texts.concat().as_bytes(), self.end)
            .and_then(|()| self.file.sync_data())
            .map_err(failed)?;
        for text in texts {
            self.take(text.as_bytes());
        }
        Ok(())
    }

    /// Lines of the output and of the error file.
    pub(super) fn counts(&self) -> (usize, usize) {
        let good = self.entries.values().filter(|entry| entry.good).count();
        (good, self.entries.len() - good)
    }

    /// Tokens of all answers.
    pub(super) fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// Writes the lines of the output (`true`) or the error file in the order of the input.
    ///
    /// # Errors
    ///
    /// Where either disk says no.
    pub(super) fn copy(&self, good: bool, to: &mut dyn Write) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        for entry in self.entries.values().filter(|entry| entry.good == good) {
            let mut done = 0;
            while done < entry.len {
                let len = PIECE.min(entry.len - done);
                self.file
                    .read_exact_at(&mut piece[..len], entry.at + done as u64)?;
                to.write_all(&piece[..len])?;
                done += len;
            }
            to.write_all(b"\n")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(log: &Log, good: bool) -> String {
        let mut bytes = Vec::new();
        log.copy(good, &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn usage(input: u64) -> Value {
        json!({ "response": { "body": { "usage": {
            "prompt_tokens": input, "completion_tokens": 2,
            "completion_tokens_details": { "reasoning_tokens": 1 },
        } } } })
    }

    #[test]
    fn lines_come_out_in_the_inputs_order_and_none_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = Log::open(&path).unwrap();
        log.add(&[(7, true, usage(5)), (2, false, json!({ "no": 2 }))])
            .unwrap();
        log.add(&[(3, true, usage(6)), (7, true, json!("again"))])
            .unwrap();
        drop(log);
        let log = Log::open(&path).unwrap();
        assert_eq!(log.counts(), (2, 1));
        assert_eq!(glance(&path), (2, 1));
        assert_eq!(copied(&log, true), format!("{}\n{}\n", usage(6), usage(5)));
        assert_eq!(copied(&log, false), "{\"no\":2}\n");
        assert_eq!(log.tokens().json()["total_tokens"], 15);
        assert_eq!(
            log.tokens().json()["output_tokens_details"]["reasoning_tokens"],
            2
        );
    }

    #[test]
    fn wherever_it_is_cut_what_is_whole_stays_and_the_rest_can_be_added_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let lines: Vec<_> = (1..4).map(|n| (n, n != 2, json!({ "é": n }))).collect();
        let mut log = Log::open(&path).unwrap();
        log.add(&lines).unwrap();
        let (outputs, errors) = (copied(&log, true), copied(&log, false));
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            // A power cut may also leave zeros.
            for zeros in [0, 5] {
                let mut bytes = whole[..cut].to_vec();
                bytes.extend(vec![0; zeros]);
                std::fs::write(&path, bytes).unwrap();
                let mut log = Log::open(&path).unwrap();
                let ends = whole[..cut].iter().filter(|&&b| b == b'\n').count();
                assert_eq!(log.counts().0 + log.counts().1, ends, "cut at {cut}");
                log.add(&lines).unwrap();
                assert_eq!(copied(&log, true), outputs);
                assert_eq!(copied(&Log::open(&path).unwrap(), false), errors);
            }
        }
    }
}
