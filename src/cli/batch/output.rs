//! The output file of a batch: a log while the batch runs, in the input's order when it is done.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::fs::TryLockError;
use std::io::Read;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;

use serde_json::Value;
use sha2::Digest;
use sha2::Sha256;

use crate::cli::exit::CliError;

/// What every line begins with.
const BEGINNING: &[u8] = b"{\"id\":\"batch_req_";

/// The output file, owned by this process.
pub(super) struct Output {
    path: PathBuf,
    file: File,
    /// Lines by their ids, as they stand in the file.
    lines: HashMap<String, String>,
    /// Ids in the file's order.
    order: Vec<String>,
    /// Bytes of whole lines.
    len: u64,
    /// Whether a part of a line may stand behind them.
    torn: bool,
}

impl Output {
    /// Opens it, and reads what an earlier run left. A cut last line is cut off.
    pub(super) fn open(path: &Path) -> Result<Output, CliError> {
        let failed = |source| file_error(path, source);
        let open = || {
            OpenOptions::new()
                .read(true)
                .append(true)
                .create(true)
                .open(path)
        };
        let mut file = open().map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy(path)),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        // The owner before may have put another file in its place.
        let there = fs::metadata(path).map_err(failed)?.ino();
        if file.metadata().map_err(failed)?.ino() != there {
            return Err(busy(path));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let whole = bytes
            .iter()
            .rposition(|&b| b == b'\n')
            .map_or(0, |at| at + 1);
        let mut output = Output {
            // A link's own file: what is renamed into place would otherwise replace the link, and lie elsewhere.
            path: path.canonicalize().map_err(failed)?,
            file,
            lines: HashMap::new(),
            order: Vec::new(),
            len: whole as u64,
            torn: false,
        };
        let mut foreign = 0;
        for line in bytes[..whole]
            .split(|&b| b == b'\n')
            .filter(|l| !l.is_empty())
        {
            match own(line) {
                Some((id, line)) => {
                    // A line twice cannot come of this program; the first one stands.
                    if output.lines.insert(id.clone(), line).is_none() {
                        output.order.push(id);
                    }
                }
                None => foreign += 1,
            }
        }
        if foreign > 0
            || (whole == 0 && !bytes.starts_with(BEGINNING) && !BEGINNING.starts_with(&bytes))
        {
            return Err(CliError::Usage(
                format!("{} holds what no batch has written", path.display()),
                Some("name another output file, or remove this one".to_owned()),
            ));
        }
        output.file.set_len(whole as u64).map_err(failed)?;
        Ok(output)
    }

    pub(super) fn holds(&self, id: &str) -> bool {
        self.lines.contains_key(id)
    }

    /// Lines that are not among these: of a request that has changed since, or is gone.
    pub(super) fn strangers(&self, known: &HashSet<&str>) -> usize {
        let strange = |id: &&String| !known.contains(id.as_str());
        self.order.iter().filter(strange).count()
    }

    /// Keeps the file as it is beside itself; returns the copy's name.
    pub(super) fn copy_aside(&self) -> Result<PathBuf, CliError> {
        let free = |n: &u32| !aside(&self.path, *n).exists();
        let to = aside(&self.path, (1..).find(free).unwrap_or(1));
        fs::copy(&self.path, &to).map_err(|source| file_error(&to, source))?;
        Ok(to)
    }

    /// Adds a line at the end. After an error the file is as it was, and the same line may be tried again.
    pub(super) fn add(&mut self, id: &str, line: &Value) -> Result<(), CliError> {
        let line = line.to_string();
        let failed = |source| file_error(&self.path, source);
        if self.torn {
            // A full disk has cut a line short: the next behind it would make one that nobody can read.
            self.file.set_len(self.len).map_err(failed)?;
        }
        // One write: a stop leaves at most this line cut.
        let bytes = format!("{line}\n");
        self.torn = true;
        if let Err(source) = self.file.write_all(bytes.as_bytes()) {
            // What stays of it is cut off before the next, or when the file is opened again.
            self.torn = self.file.set_len(self.len).is_err();
            return Err(failed(source));
        }
        self.torn = false;
        self.len += bytes.len() as u64;
        self.lines.insert(id.to_owned(), line);
        self.order.push(id.to_owned());
        Ok(())
    }

    /// Has everything survive a power cut.
    pub(super) fn sync(&self) -> Result<(), CliError> {
        let synced = self.file.sync_data();
        synced.map_err(|source| file_error(&self.path, source))
    }

    /// Puts the lines into this order, and leaves out all others.
    pub(super) fn sort<'a>(&self, ids: impl Iterator<Item = &'a str>) -> Result<(), CliError> {
        let wanted: Vec<&str> = ids.filter(|id| self.holds(id)).collect();
        if wanted.iter().eq(self.order.iter()) {
            return self.sync();
        }
        let text: String = wanted
            .iter()
            .map(|id| format!("{}\n", self.lines[*id]))
            .collect();
        write_whole(&self.path, &text)
    }
}

/// Replaces a file, at once or not at all.
pub(super) fn write_whole(path: &Path, text: &str) -> Result<(), CliError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        file_error(path, source)
    })
}

fn own(line: &[u8]) -> Option<(String, String)> {
    let json: Value = serde_json::from_slice(line).ok()?;
    let id = json["id"]
        .as_str()
        .filter(|id| id.starts_with("batch_req_"))?;
    Some((id.to_owned(), String::from_utf8(line.to_vec()).ok()?))
}

fn aside(path: &Path, n: u32) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{n}.old"));
    path.with_file_name(name)
}

fn busy(path: &Path) -> CliError {
    CliError::Usage(
        format!("another process is writing {}", path.display()),
        Some("wait for it to end, or name another output file".to_owned()),
    )
}

pub(super) fn file_error(path: &Path, source: std::io::Error) -> CliError {
    CliError::File {
        path: path.display().to_string(),
        source,
    }
}

/// `out.jsonl` has its errors in `out.errors.jsonl`.
pub(super) fn beside(output: &Path) -> PathBuf {
    match output.extension() {
        Some(ending) => {
            let mut name = std::ffi::OsString::from("errors.");
            name.push(ending);
            output.with_extension(name)
        }
        None => output.with_extension("errors"),
    }
}

pub(super) fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A short name for an output file.
pub(super) fn scope(output: &Path) -> String {
    let path = output.canonicalize().unwrap_or_else(|_| output.to_owned());
    let digest = Sha256::digest(path.display().to_string());
    digest.iter().take(4).map(|b| format!("{b:02x}")).collect()
}
