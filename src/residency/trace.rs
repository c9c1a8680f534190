//! Which experts each sweep has used, written down: what a cache's policy is judged by.
//!
//! A trace is lines of JSON. The first names the model; every other is a sweep, its layers in order, each with
//! the experts that any of the sweep's rows has used:
//!
//! ```text
//! {"trace":"deltafin experts 1","model":"ORG/NAME","revision":"…","expert_bytes":17547264}
//! {"sweep":[[1,[3,17,200]],[2,[5,6,890]]]}
//! ```
//!
//! Runs of the same model add to one file. A line that a kill has cut short is dropped.

use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;

use serde::Deserialize;
use serde::Serialize;

use crate::terms::ExpertKey;

/// What the first line says it is.
const FORMAT: &str = "deltafin experts 1";

/// Why a trace could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file system refused.
    #[error("{path}: cannot {what} the trace", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path}, line {line}: {what}", path = path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The file is a trace of something else.
    #[error("{path} is a trace of {found}, not of {wanted}", path = path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What it is of.
        found: String,
        /// What it should be of.
        wanted: String,
    },
}

impl TraceError {
    /// One sentence a person can act on.
    pub fn hint(&self) -> Option<String> {
        match self {
            TraceError::Io { .. } => None,
            TraceError::Form { .. } => {
                Some("a trace is what --trace FILE of a generating command has written".to_owned())
            }
            TraceError::Other { .. } => {
                Some("give each model and revision a file of its own".to_owned())
            }
        }
    }
}

/// What a trace is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceHead {
    /// ORG/NAME.
    pub model: String,
    /// The commit.
    pub revision: String,
    /// Bytes of one expert.
    pub expert_bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct HeadLine {
    trace: String,
    model: String,
    revision: String,
    expert_bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct SweepLine {
    sweep: Vec<(u16, Vec<u16>)>,
}

impl TraceHead {
    fn line(&self) -> HeadLine {
        HeadLine {
            trace: FORMAT.to_owned(),
            model: self.model.clone(),
            revision: self.revision.clone(),
            expert_bytes: self.expert_bytes,
        }
    }

    fn parse(line: &[u8]) -> Result<TraceHead, String> {
        let head: HeadLine = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        if head.trace != FORMAT {
            return Err(format!("`{}` is no form that is read here", head.trace));
        }
        if head.expert_bytes == 0 {
            return Err("experts of no bytes".to_owned());
        }
        Ok(TraceHead {
            model: head.model,
            revision: head.revision,
            expert_bytes: head.expert_bytes,
        })
    }
}

/// Adds sweeps to a trace's file.
pub(super) struct Tracer {
    path: PathBuf,
    /// `None` once it has failed.
    file: Mutex<Option<File>>,
    failed: Failed,
}

/// Is told once why no more is written.
pub(super) type Failed = Box<dyn Fn(&TraceError) + Send + Sync>;

impl Tracer {
    /// Begins a file, or goes on with one of the same model.
    pub(super) fn begin(
        path: &Path,
        head: &TraceHead,
        failed: Failed,
    ) -> Result<Tracer, TraceError> {
        let io = |what| {
            move |source| TraceError::Io {
                what,
                path: path.to_owned(),
                source,
            }
        };
        let mut options = OpenOptions::new();
        let mut file = options
            .create(true)
            .append(true)
            .read(true)
            .open(path)
            .map_err(io("open"))?;
        let written = std::fs::read(path).map_err(io("read"))?;
        // A run that was killed, or whose disk was full, may have left a piece of a line.
        let whole = written
            .iter()
            .rposition(|&b| b == b'\n')
            .map_or(0, |n| n + 1);
        match written[..whole].split(|&b| b == b'\n').next() {
            Some(first) if whole > 0 => {
                let found = TraceHead::parse(first).map_err(|what| TraceError::Form {
                    path: path.to_owned(),
                    line: 1,
                    what,
                })?;
                if found != *head {
                    return Err(TraceError::Other {
                        path: path.to_owned(),
                        found: format!("{} at {:.10}", found.model, found.revision),
                        wanted: format!("{} at {:.10}", head.model, head.revision),
                    });
                }
                if whole < written.len() {
                    file.set_len(whole as u64).map_err(io("mend"))?;
                }
            }
            // Nothing of ours ends without a line's end but a head that was cut; anything else stays.
            _ if !written.is_empty() && !written.starts_with(b"{\"trace\"") => {
                return Err(TraceError::Form {
                    path: path.to_owned(),
                    line: 1,
                    what: "it is no trace, and stays as it is".to_owned(),
                });
            }
            _ => {
                file.set_len(0).map_err(io("begin"))?;
                write_line(&mut file, &head.line()).map_err(io("write"))?;
            }
        }
        Ok(Tracer {
            path: path.to_owned(),
            file: Mutex::new(Some(file)),
            failed,
        })
    }

    /// Adds a sweep; `used` is in order.
    pub(super) fn sweep(&self, used: &[ExpertKey]) {
        if used.is_empty() {
            return;
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = file.as_mut() else { return };
        let layers = used.chunk_by(|a, b| a.layer == b.layer);
        let line = SweepLine {
            sweep: layers
                .map(|keys| (keys[0].layer, keys.iter().map(|key| key.expert).collect()))
                .collect(),
        };
        if let Err(source) = write_line(open, &line) {
            *file = None;
            (self.failed)(&TraceError::Io {
                what: "write",
                path: self.path.clone(),
                source,
            });
        }
    }
}

/// One write a line, so that a kill leaves at most the last in pieces.
fn write_line(file: &mut File, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

/// A trace that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// What it is of.
    pub head: TraceHead,
    /// Of each sweep, its layers in order, each with its experts in order.
    pub sweeps: Vec<Vec<Vec<ExpertKey>>>,
}

impl Trace {
    /// Reads a whole trace; a last line without an end is left out.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or a line is not a trace's.
    pub fn read(path: &Path) -> Result<Trace, TraceError> {
        let text = std::fs::read(path).map_err(|source| TraceError::Io {
            what: "read",
            path: path.to_owned(),
            source,
        })?;
        let form = |line, what| TraceError::Form {
            path: path.to_owned(),
            line,
            what,
        };
        let mut lines = text.split_inclusive(|&b| b == b'\n');
        let first = lines.next().unwrap_or_default();
        let head = TraceHead::parse(first).map_err(|what| form(1, what))?;
        let mut sweeps = Vec::new();
        for (n, line) in lines.enumerate() {
            if !line.ends_with(b"\n") {
                break;
            }
            sweeps.push(sweep(line).map_err(|what| form(n + 2, what))?);
        }
        Ok(Trace { head, sweeps })
    }
}

fn sweep(line: &[u8]) -> Result<Vec<Vec<ExpertKey>>, String> {
    let line: SweepLine = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let mut before = None;
    let mut layers = Vec::with_capacity(line.sweep.len());
    for (layer, experts) in line.sweep {
        if before.is_some_and(|before| before >= layer) || experts.is_empty() {
            return Err(format!("layer {layer} is out of order or has no expert"));
        }
        if !experts.is_sorted_by(|a, b| a < b) {
            return Err(format!("layer {layer}: its experts are not in order"));
        }
        before = Some(layer);
        let keys = experts.into_iter();
        layers.push(keys.map(|expert| ExpertKey { layer, expert }).collect());
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> TraceHead {
        TraceHead {
            model: "org/name".to_owned(),
            revision: "0123456789abcdef".to_owned(),
            expert_bytes: 100,
        }
    }

    fn keys(all: &[(u16, u16)]) -> Vec<ExpertKey> {
        let keys = all.iter();
        keys.map(|&(layer, expert)| ExpertKey { layer, expert })
            .collect()
    }

    fn never() -> Failed {
        Box::new(|e| panic!("{e}"))
    }

    #[test]
    fn runs_add_up_also_after_a_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t");
        let first = keys(&[(1, 3), (1, 9), (2, 0)]);
        let second = keys(&[(1, 4)]);
        Tracer::begin(&path, &head(), never())
            .unwrap()
            .sweep(&first);
        let whole = std::fs::read(&path).unwrap();
        let tracer = Tracer::begin(&path, &head(), never()).unwrap();
        tracer.sweep(&second);
        tracer.sweep(&[]);
        drop(tracer);
        let two = Trace::read(&path).unwrap();
        assert_eq!(two.head, head());
        let layers = vec![keys(&[(1, 3), (1, 9)]), keys(&[(2, 0)])];
        assert_eq!(two.sweeps, [layers.clone(), vec![second.clone()]]);
        let full = std::fs::read(&path).unwrap();
        // Cut anywhere: what is whole is read, and the next run goes on from there.
        for cut in 0..full.len() {
            std::fs::write(&path, &full[..cut]).unwrap();
            let read = Trace::read(&path);
            let sweeps = usize::from(cut >= whole.len());
            let headless = !full[..cut].contains(&b'\n');
            match read {
                Ok(read) => assert_eq!(read.sweeps.len(), sweeps, "cut at {cut}"),
                Err(_) => assert!(headless, "cut at {cut}"),
            }
            if cut > 0 && cut < 8 {
                continue; // too little of the head to be known
            }
            let tracer = Tracer::begin(&path, &head(), never()).unwrap();
            tracer.sweep(&second);
            let read = Trace::read(&path).unwrap();
            assert_eq!(read.sweeps.len(), sweeps + 1, "cut at {cut}");
        }
    }

    #[test]
    fn what_is_not_this_trace_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t");
        for text in ["my only copy", "my only copy\n", "{\"a\": 1}\n", "{\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(Tracer::begin(&path, &head(), never()).is_err());
            assert!(Trace::read(&path).is_err());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::remove_file(&path).unwrap();
        Tracer::begin(&path, &head(), never()).unwrap();
        let other = TraceHead {
            revision: "fedcba9876543210".to_owned(),
            ..head()
        };
        let error = Tracer::begin(&path, &other, never()).err().unwrap();
        assert!(error.to_string().contains("fedcba9876"), "{error}");
        for line in [
            "[]",
            "{\"sweep\":[[2,[1]],[1,[1]]]}",
            "{\"sweep\":[[1,[2,1]]]}",
            "{\"sweep\":[[1,[]]]}",
            "{\"sweep\":[[1,[70000]]]}",
        ] {
            let first = serde_json::to_string(&head().line()).unwrap();
            std::fs::write(&path, format!("{first}\n{line}\n")).unwrap();
            let error = Trace::read(&path).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_told_once() {
        let told = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = std::sync::Arc::clone(&told);
        let tracer = Tracer {
            path: "/dev/full".into(),
            file: Mutex::new(Some(
                OpenOptions::new().write(true).open("/dev/full").unwrap(),
            )),
            failed: Box::new(move |_| {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }),
        };
        for _ in 0..3 {
            tracer.sweep(&keys(&[(1, 1)]));
        }
        assert_eq!(told.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
