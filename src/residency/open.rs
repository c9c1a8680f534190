//! Opening a model: which commit, its metadata and headers, where every tensor lies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;

use super::ResidencyError;
use super::meter::Meter;
use crate::checkpoint;
use crate::checkpoint::Header;
use crate::checkpoint::Index;
use crate::checkpoint::Layout;
use crate::checkpoint::Spec;
use crate::hub::Class;
use crate::hub::FileFacts;
use crate::hub::Hub;
use crate::hub::Snapshot;
use crate::hub::Span;
use crate::store::Area;
use crate::store::FileRecord;
use crate::store::ModelStore;
use crate::store::SourceRecord;
use crate::store::Store;
use crate::terms::ByteRange;
use crate::terms::RepoId;
use crate::terms::Revision;

/// Which model to open.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The repository.
    pub repo: RepoId,
    /// A branch, tag or commit; `None` keeps a commit that the store already has.
    pub revision: Option<String>,
    /// Move to the newest commit of the branch.
    pub update: bool,
}

/// Told what opening and fetching are doing. Declared here, drawn by whoever has a screen.
pub trait InstallObserver: Send + Sync {
    /// A stage begins: `what` in the gerund, `total` bytes of which `done` are already there.
    fn stage(&self, what: &str, done: u64, total: u64);
    /// More bytes of the stage are there.
    fn moved(&self, bytes: u64);
    /// So many bytes of disk are free now.
    fn room(&self, free: u64) {
        let _ = free;
    }
    /// The stage is over.
    fn done(&self);
    /// Something a person should know, in one sentence.
    fn notice(&self, text: &str);
}

/// A model whose every tensor is located; the bytes may still be anywhere.
#[derive(Clone)]
pub struct Opened {
    /// The repository.
    pub repo: RepoId,
    /// What the model computes.
    pub spec: Arc<Spec>,
    /// Where its tensors lie.
    pub layout: Arc<Layout>,
    /// The pinned commit and its files.
    pub snapshot: Arc<Snapshot>,
    /// The model's part of the store.
    pub store: ModelStore,
    /// The hub, unless offline.
    pub hub: Option<Arc<Hub>>,
    /// Counts of everything moved for this model.
    pub meter: Arc<Meter>,
    /// Set when somebody asks to stop.
    pub stop: Arc<AtomicBool>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("repo", &self.repo)
            .finish_non_exhaustive()
    }
}

/// Metadata that is fetched when the repository has it.
const META_WANTED: &[&str] = &[
    "tokenizer_config.json",
    "tiktoken.model",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "LICENSE",
];
/// No metadata file of the family is larger.
const META_MAX: u64 = 200_000_000;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// The branch that hubs call the newest.
const BRANCH: &str = "main";
/// Headers under way at once.
const HEADER_WINDOW: usize = 8;

impl Opened {
    /// Finds or fetches the metadata and headers of a model and locates its tensors.
    ///
    /// A second opening of the same commit asks the hub at most one question: whether the branch
    /// has moved.
    ///
    /// # Errors
    ///
    /// If the model is unknown, damaged, of an unsupported kind, or not in the store while offline.
    pub fn open(
        store: &Store,
        hub: Option<Arc<Hub>>,
        request: &OpenRequest,
        stop: Arc<AtomicBool>,
        observer: &dyn InstallObserver,
    ) -> Result<Opened, ResidencyError> {
        let commit = choose_commit(store, hub.as_deref(), request, observer)?;
        let model = store.model(&request.repo, &commit);
        let meter = Arc::<Meter>::default();
        let snapshot = snapshot(&model, hub.as_deref(), &request.repo, &commit)?;
        let reader = Reader {
            repo: &request.repo,
            store: &model,
            hub: hub.as_deref(),
            snapshot: &snapshot,
            meter: &meter,
        };
        let spec = Spec::from_config(&reader.meta("config.json")?)?;
        let index = if snapshot.files.contains_key(INDEX) {
            Index::parse(&reader.meta(INDEX)?)?
        } else if snapshot.files.contains_key(SINGLE) {
            Index::single()
        } else {
            return Err(ResidencyError::NoSuchFile {
                repo: request.repo.clone(),
                file: INDEX.to_owned(),
            });
        };
        for name in META_WANTED
            .iter()
            .filter(|name| snapshot.files.contains_key(**name))
        {
            reader.meta(name)?;
        }
        let headers = headers(&reader, &index, &stop, observer)?;
        let layout = Layout::new(&spec, &index, &headers)?;
        Ok(Opened {
            repo: request.repo.clone(),
            spec: Arc::new(spec),
            layout: Arc::new(layout),
            snapshot,
            store: model,
            hub,
            meter,
            stop,
        })
    }

    /// A metadata file that opening has brought into the store.
    ///
    /// # Errors
    ///
    /// If the store cannot be read.
    pub fn meta(&self, name: &str) -> Result<Option<Vec<u8>>, ResidencyError> {
        Ok(self.store.read(Area::Meta, name)?)
    }
}

/// The commit to use: as asked, else as stored, else the newest of the branch.
fn choose_commit(
    store: &Store,
    hub: Option<&Hub>,
    request: &OpenRequest,
    observer: &dyn InstallObserver,
) -> Result<Revision, ResidencyError> {
    let asked = request.revision.as_deref();
    if let Some(Ok(commit)) = asked.map(str::parse::<Revision>) {
        return Ok(commit);
    }
    let stored = store
        .models()
        .into_iter()
        .filter(|(repo, _)| *repo == request.repo)
        .map(|(_, commit)| commit)
        .next_back();
    let Some(hub) = hub else {
        return stored.ok_or_else(|| ResidencyError::NotInstalled {
            repo: request.repo.clone(),
        });
    };
    let newest = hub.commit(&request.repo, asked.unwrap_or(BRANCH));
    match stored {
        Some(stored) if asked.is_none() && !request.update => {
            match newest {
                Ok(newest) if newest != stored => observer.notice(&format!(
                    "{} has moved on from {:.10} to {:.10}; staying with the first, use --update to move",
                    request.repo,
                    stored.as_str(),
                    newest.as_str()
                )),
                Ok(_) => {}
                Err(error) => observer.notice(&format!("cannot ask whether {} has moved on: {error}", request.repo)),
            }
            Ok(stored)
        }
        _ => Ok(newest?),
    }
}

/// The commit's list of files, from the store or the hub.
fn snapshot(
    store: &ModelStore,
    hub: Option<&Hub>,
    repo: &RepoId,
    commit: &Revision,
) -> Result<Arc<Snapshot>, ResidencyError> {
    if let Some(record) = store.source()? {
        return Ok(Arc::new(from_record(record)));
    }
    let hub = hub.ok_or_else(|| ResidencyError::NotInstalled { repo: repo.clone() })?;
    let snapshot = hub.list(repo, commit)?;
    store.set_source(&to_record(&snapshot))?;
    Ok(Arc::new(snapshot))
}

/// What the store remembers is what the hub said, in the store's own words: the two rooms never meet.
fn to_record(snapshot: &Snapshot) -> SourceRecord {
    let record = |facts: &FileFacts| FileRecord {
        size: facts.size,
        sha256: facts.sha256,
    };
    SourceRecord {
        repo: snapshot.repo.clone(),
        commit: snapshot.commit.clone(),
        files: snapshot
            .files
            .iter()
            .map(|(path, facts)| (path.clone(), record(facts)))
            .collect(),
        header_lens: BTreeMap::new(),
    }
}

fn from_record(record: SourceRecord) -> Snapshot {
    let facts = |file: FileRecord| FileFacts {
        size: file.size,
        sha256: file.sha256,
        git_sha1: None,
    };
    Snapshot {
        repo: record.repo,
        commit: record.commit,
        files: record
            .files
            .into_iter()
            .map(|(path, file)| (path, facts(file)))
            .collect(),
    }
}

struct Reader<'a> {
    repo: &'a RepoId,
    store: &'a ModelStore,
    hub: Option<&'a Hub>,
    snapshot: &'a Arc<Snapshot>,
    meter: &'a Meter,
}

impl Reader<'_> {
    /// A metadata file, from the store or else the hub.
    fn meta(&self, name: &str) -> Result<Vec<u8>, ResidencyError> {
        if let Some(bytes) = self.store.read(Area::Meta, name)? {
            return Ok(bytes);
        }
        if !self.snapshot.files.contains_key(name) {
            return Err(ResidencyError::NoSuchFile {
                repo: self.repo.clone(),
                file: name.to_owned(),
            });
        }
        let hub = self.hub.ok_or_else(|| self.missing(name))?;
        let bytes = hub.get(self.snapshot, name, META_MAX)?;
        self.meter.meta_fetched(bytes.len() as u64);
        self.store.write(Area::Meta, name, &bytes)?;
        Ok(bytes.to_vec())
    }

    fn missing(&self, what: &str) -> ResidencyError {
        ResidencyError::Missing {
            repo: self.repo.clone(),
            what: what.to_owned(),
        }
    }

    /// The size of a shard, as the hub's listing states it.
    fn size(&self, shard: &str) -> Result<u64, ResidencyError> {
        self.snapshot
            .files
            .get(shard)
            .map(|facts| facts.size)
            .ok_or_else(|| ResidencyError::NoSuchFile {
                repo: self.repo.clone(),
                file: shard.to_owned(),
            })
    }
}

/// Every shard's header, from the store or else the hub, checked against the shard's size.
fn headers(
    reader: &Reader<'_>,
    index: &Index,
    stop: &AtomicBool,
    observer: &dyn InstallObserver,
) -> Result<BTreeMap<String, Header>, ResidencyError> {
    let mut found = BTreeMap::new();
    let mut missing = Vec::new();
    for shard in index.shards() {
        match reader.store.read(Area::Headers, shard)? {
            Some(bytes) => {
                found.insert(
                    shard.to_owned(),
                    Header::read(shard, &bytes, reader.size(shard)?)?,
                );
            }
            None => missing.push(shard.to_owned()),
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    let hub = reader.hub.ok_or_else(|| reader.missing(&missing[0]))?;
    observer.stage(
        "reading headers",
        found.len() as u64,
        (found.len() + missing.len()) as u64,
    );
    for batch in missing.chunks(HEADER_WINDOW) {
        let mut begun = Vec::new();
        for shard in batch {
            begun.push(begin(hub, reader, shard, speculative(reader.size(shard)?)));
        }
        for (shard, first) in batch.iter().zip(begun) {
            let first = first.wait(stop)?;
            let size = reader.size(shard)?;
            let len = checkpoint::header_len(shard, &first, size)?;
            let mut bytes = first.to_vec();
            if (bytes.len() as u64) < len {
                let range = ByteRange::new(bytes.len() as u64, len);
                bytes.extend_from_slice(&begin(hub, reader, shard, range).wait(stop)?);
            }
            bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
            let header = Header::read(shard, &bytes, size)?;
            reader.meter.meta_fetched(len);
            reader.store.write(Area::Headers, shard, &bytes)?;
            found.insert(shard.clone(), header);
            observer.moved(1);
        }
    }
    observer.done();
    Ok(found)
}

/// What to ask first: a guess at the header's length that wastes at most a thousandth of the shard.
fn speculative(size: u64) -> ByteRange {
    ByteRange::new(0, (size / 1000).clamp(8, 1 << 20).min(size))
}

struct Begun {
    _ticket: crate::hub::Ticket,
    arrival: mpsc::Receiver<Result<crate::hub::Arrived, crate::hub::HubError>>,
}

fn begin(hub: &Hub, reader: &Reader<'_>, shard: &str, range: ByteRange) -> Begun {
    let (sender, arrival) = mpsc::channel();
    let span = Span {
        file: Arc::from(shard),
        range,
        digest: None,
    };
    let ticket = hub.fetch(reader.snapshot, span, Class::Demand, move |outcome| {
        let _ = sender.send(outcome);
    });
    Begun {
        _ticket: ticket,
        arrival,
    }
}

impl Begun {
    fn wait(self, stop: &AtomicBool) -> Result<Bytes, ResidencyError> {
        loop {
            if stop.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(ResidencyError::Interrupted);
            }
            match self.arrival.recv_timeout(Duration::from_millis(50)) {
                Ok(outcome) => return Ok(outcome?.bytes),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(ResidencyError::Interrupted);
                }
            }
        }
    }
}
