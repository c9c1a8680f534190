//! `cache import`: what another program has downloaded, taken over without the network.
//!
//! It is a full install whose only source is the folder: the same lanes, the same resuming, the same
//! proof by whole shards. Links would be quicker and save the copy, and are not to be had: an expert
//! is a range in the middle of a shard, a core file is laid out anew so that its tensors are aligned,
//! and every byte has to be read anyway for its digest.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use serde_json::json;

use crate::checkpoint::Index;
use crate::cli::args::CacheImport;
use crate::cli::args::ModelArgs;
use crate::cli::env::Env;
use crate::cli::exit;
use crate::cli::exit::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::screen::Screen;
use crate::cli::setup;
use crate::residency::Installed;
use crate::residency::Opened;
use crate::residency::Proved;
use crate::residency::ResidencyError;
use crate::store::Missing;
use crate::terms::Bytes;
use crate::terms::RepoId;
use crate::terms::Revision;

const INDEX: &str = "model.safetensors.index.json";
/// Where `hf download --local-dir` notes what it brought.
const NOTES: &str = ".cache/huggingface/download";
/// Missing shards that are named.
const NAMED: usize = 5;

pub(super) fn import(args: &CacheImport, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let found = Found::look(args)?;
    found.complete(&args.folder)?;
    let model = ModelArgs {
        model: Some(found.model.clone()),
        revision: found.revision.clone(),
        update: true,
        hub: vec![found.source.display().to_string()],
        offline: true,
        rate: None,
        max_bytes: None,
        store: args.store.clone(),
    };
    // The folder that was named and nothing else: another cache on this machine may be at odds with it.
    let env = Env {
        hf_cache: None,
        endpoint: None,
        ..Env::read()
    };
    let opened = setup::open_in(&env, &model, true, &interrupt.flag(), screen)?.opened;
    let missing = opened.store.missing(&opened.layout);
    room(&missing, args, screen, &opened)?;
    screen.tell_disk_of(opened.store.store().home());
    let mut done = Done::default();
    if !args.dry_run {
        match take_over(&opened, screen) {
            Ok(taken) => done = taken,
            Err(ResidencyError::Interrupted) => {
                screen.note(
                    "interrupted: what was copied is kept; run the same command again to go on",
                );
                return Ok(exit::INTERRUPTED);
            }
            Err(error) => return Err(error.into()),
        }
    }
    if screen.json {
        screen.object(&report(&opened, &missing, &done));
    }
    if !done.proved.different.is_empty() {
        return Ok(exit::DAMAGED);
    }
    if done.installed.not_kept > 0 {
        return Err(CliError::NoSpace(
            format!(
                "{} experts could not be kept: what is known of them, from elsewhere, is something else",
                done.installed.not_kept
            ),
            "see `deltafin cache verify`, or import under another --model".to_owned(),
        ));
    }
    Ok(exit::DONE)
}

/// What an import has done.
#[derive(Default)]
struct Done {
    installed: Installed,
    proved: Proved,
}

fn take_over(opened: &Opened, screen: &Screen) -> Result<Done, ResidencyError> {
    // A full install is the cache that never evicts.
    opened.store.set_unlimited(true)?;
    opened.install_core(screen)?;
    let installed = opened.install_experts(None, &[], screen)?;
    opened.install_rest(screen)?;
    let mut done = Done {
        installed,
        ..Done::default()
    };
    if installed.not_kept > 0 {
        return Ok(done);
    }
    done.proved = opened.prove(screen)?;
    for shard in &done.proved.different {
        screen.note(&format!(
            "{shard}: its sha256 is not the published one; nothing of it was taken over"
        ));
    }
    screen.note(&format!(
        "{} experts copied; {} whole shards have the published sha256, {} have none published, {} have another",
        done.installed.fetched,
        done.proved.whole,
        done.proved.unpublished,
        done.proved.different.len()
    ));
    Ok(done)
}

/// Says what there is to do, and refuses what the disk cannot hold.
fn room(
    missing: &Missing,
    args: &CacheImport,
    screen: &Screen,
    opened: &Opened,
) -> Result<(), CliError> {
    let (free, reserve) = setup::space(&args.store)?;
    let begun: u64 = opened.store.begun().values().sum();
    let bytes = missing.core_bytes + missing.expert_bytes + missing.rest_bytes;
    let bytes = bytes.saturating_sub(begun);
    screen.note(&format!(
        "{} at {:.10}: {} of core, {} experts with {}, and {} besides to copy; {} free on disk",
        opened.repo,
        opened.snapshot.commit.as_str(),
        Bytes(missing.core_bytes),
        missing.experts.len(),
        Bytes(missing.expert_bytes),
        Bytes(missing.rest_bytes),
        Bytes(free)
    ));
    if bytes <= free.saturating_sub(reserve) {
        return Ok(());
    }
    Err(CliError::NoSpace(
        format!(
            "{} are to be copied, and the disk has {} free, of which {} are reserved",
            Bytes(bytes),
            Bytes(free),
            Bytes(reserve)
        ),
        format!(
            "free some space or choose another --home; `deltafin stream --hub {}` uses the folder as it is, with a --cache that fits",
            args.folder.display()
        ),
    ))
}

fn report(opened: &Opened, missing: &Missing, done: &Done) -> Value {
    json!({
        "model": opened.repo.as_str(),
        "revision": opened.snapshot.commit.as_str(),
        "core": {"missing": missing.core_bytes},
        "experts": {
            "missing": missing.experts.len(),
            "bytes_each": opened.layout.expert_len(),
            "copied": done.installed.fetched,
            "not_kept": done.installed.not_kept,
        },
        "rest": {"missing": missing.rest_bytes},
        "shards": {
            "whole": done.proved.whole,
            "unpublished": done.proved.unpublished,
            "different": done.proved.different,
        },
        "discarded": done.proved.discarded,
    })
}

/// A model that another program has left in a folder.
struct Found {
    /// What the hub's side is told to read.
    source: PathBuf,
    /// Where the files themselves are.
    files: PathBuf,
    model: String,
    revision: Option<String>,
    /// A view of the folder as a cache would have it, while it is needed.
    _view: Option<tempfile::TempDir>,
}

impl Found {
    fn look(args: &CacheImport) -> Result<Found, CliError> {
        let folder = args.folder.canonicalize();
        let folder = folder.map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => nothing_there(&args.folder),
            _ => CliError::File {
                path: args.folder.display().to_string(),
                source,
            },
        })?;
        if let Some(found) = Found::snapshot_above(&folder, args)? {
            return Ok(found);
        }
        if folder.join("snapshots").is_dir() {
            return Found::in_cache(&folder, args.revision.clone());
        }
        if let Some(cached) = cached_model(&folder, args.model.as_deref())? {
            return Found::in_cache(&cached, args.revision.clone());
        }
        if folder.join("config.json").is_file() {
            return Found::plain(&folder, args);
        }
        Err(nothing_there(&folder))
    }

    /// `…/models--ORG--NAME/snapshots/COMMIT` itself was named.
    fn snapshot_above(folder: &Path, args: &CacheImport) -> Result<Option<Found>, CliError> {
        let commit = name_of(folder).filter(|name| name.parse::<Revision>().is_ok());
        let above = folder.parent().filter(|p| name_of(p) == Some("snapshots"));
        match (commit, above.and_then(Path::parent)) {
            (Some(commit), Some(cached)) if model_of(cached).is_some() => {
                let asked = args.revision.clone();
                Found::in_cache(cached, asked.or(Some(commit.to_owned()))).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A model's folder of a Hugging Face cache.
    fn in_cache(cached: &Path, asked: Option<String>) -> Result<Found, CliError> {
        let model = model_of(cached).ok_or_else(|| nothing_there(cached))?;
        let commit = match &asked {
            Some(text) if text.parse::<Revision>().is_ok() => text.clone(),
            _ => {
                let branch = asked.as_deref().unwrap_or("main");
                let told = std::fs::read_to_string(cached.join("refs").join(branch)).ok();
                let told = told.map(|text| text.trim().to_owned());
                match told.or_else(|| asked.is_none().then(|| only_snapshot(cached)).flatten()) {
                    Some(commit) => commit,
                    None => {
                        return Err(CliError::Missing(
                            format!("{}: no snapshot of `{branch}`", cached.display()),
                            "name one of its `snapshots` with --revision".to_owned(),
                        ));
                    }
                }
            }
        };
        Ok(Found {
            source: cached.parent().unwrap_or(cached).to_owned(),
            files: cached.join("snapshots").join(&commit),
            model: model.to_string(),
            revision: Some(commit),
            _view: None,
        })
    }

    /// A folder of files. Where the program that brought them has noted the commit and the digests, and
    /// somebody says which model it is, it is that commit; else the files speak for themselves.
    fn plain(folder: &Path, args: &CacheImport) -> Result<Found, CliError> {
        let model = match &args.model {
            Some(_) => super::repo_named(args.model.as_deref())?.to_string(),
            None => setup::local_name(folder),
        };
        if args.model.is_some()
            && let Some(notes) = Notes::read(folder)
            && args.revision.as_ref().is_none_or(|r| *r == notes.commit)
        {
            let view = notes.view(folder, &model);
            let view = view.map_err(|source| CliError::File {
                path: folder.display().to_string(),
                source,
            })?;
            return Ok(Found {
                source: view.path().to_owned(),
                files: folder.to_owned(),
                model,
                revision: Some(notes.commit),
                _view: Some(view),
            });
        }
        Ok(Found {
            source: folder.to_owned(),
            files: folder.to_owned(),
            model,
            revision: args.revision.clone(),
            _view: None,
        })
    }

    /// Whether every shard that the index names is there.
    fn complete(&self, named: &Path) -> Result<(), CliError> {
        // One that is missing or damaged is told by whoever opens the model.
        let Ok(bytes) = std::fs::read(self.files.join(INDEX)) else {
            return Ok(());
        };
        let Ok(index) = Index::parse(&bytes) else {
            return Ok(());
        };
        let absent = |shard: &&String| !self.files.join(shard).is_file();
        let missing: Vec<&String> = index.shards().iter().filter(absent).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let first: Vec<&str> = missing.iter().take(NAMED).map(|s| s.as_str()).collect();
        let more = if missing.len() > NAMED { ", …" } else { "" };
        Err(CliError::Missing(
            format!(
                "{}: {} of {} shards are not there: {}{more}",
                self.files.display(),
                missing.len(),
                index.shards().len(),
                first.join(", ")
            ),
            format!(
                "let the download finish, or use what is there: `deltafin stream --hub {} --hub https://huggingface.co`",
                named.display()
            ),
        ))
    }
}

fn nothing_there(folder: &Path) -> CliError {
    CliError::Missing(
        format!(
            "{}: neither a model's folder with a config.json nor a Hugging Face cache",
            folder.display()
        ),
        "name the folder that `hf download` wrote to, or the cache itself, such as ~/.cache/huggingface/hub"
            .to_owned(),
    )
}

fn name_of(folder: &Path) -> Option<&str> {
    folder.file_name()?.to_str()
}

/// The repository that a cache's folder is named after.
fn model_of(cached: &Path) -> Option<RepoId> {
    let name = name_of(cached)?.strip_prefix("models--")?;
    name.replacen("--", "/", 1).parse().ok()
}

/// The model meant in a whole cache: the one that was named, or the only one.
fn cached_model(cache: &Path, named: Option<&str>) -> Result<Option<PathBuf>, CliError> {
    if named.is_some() {
        let repo = super::repo_named(named)?;
        let cached = cache.join(format!("models--{}", repo.folder_name()));
        return Ok(cached.join("snapshots").is_dir().then_some(cached));
    }
    let entries = std::fs::read_dir(cache).into_iter().flatten().flatten();
    let mut models: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| model_of(path).is_some() && path.join("snapshots").is_dir())
        .collect();
    models.sort();
    if models.len() > 1 {
        let names: Vec<String> = models
            .iter()
            .filter_map(|m| model_of(m).map(|repo| repo.to_string()))
            .collect();
        return Err(CliError::Usage(
            format!("{}: several models: {}", cache.display(), names.join(", ")),
            Some("name one with --model".to_owned()),
        ));
    }
    Ok(models.pop())
}

/// The one commit of which a cache has files.
fn only_snapshot(cached: &Path) -> Option<String> {
    let entries = std::fs::read_dir(cached.join("snapshots")).ok()?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut commits = names.filter(|name| name.parse::<Revision>().is_ok());
    let only = commits.next()?;
    commits.next().is_none().then_some(only)
}

/// What `hf download --local-dir` has noted: the commit, and each file's tag, which is the sha256 of
/// large files.
struct Notes {
    commit: String,
    tags: BTreeMap<String, String>,
}

impl Notes {
    fn read(folder: &Path) -> Option<Notes> {
        let mut notes = Notes {
            commit: String::new(),
            tags: BTreeMap::new(),
        };
        for entry in std::fs::read_dir(folder.join(NOTES)).ok()?.flatten() {
            let name = entry.file_name().into_string().ok()?;
            let Some(name) = name.strip_suffix(".metadata") else {
                continue;
            };
            let text = std::fs::read_to_string(entry.path()).ok()?;
            let mut lines = text.lines().map(str::trim);
            let (commit, tag) = (lines.next()?, lines.next()?);
            commit.parse::<Revision>().ok()?;
            // Files of two commits make no model.
            if !notes.commit.is_empty() && notes.commit != commit {
                return None;
            }
            commit.clone_into(&mut notes.commit);
            notes.tags.insert(name.to_owned(), tag.to_owned());
        }
        (!notes.commit.is_empty()).then_some(notes)
    }

    /// The folder as a cache would have it: links to the files, and a list of what each should be.
    fn view(&self, folder: &Path, model: &str) -> std::io::Result<tempfile::TempDir> {
        let view = tempfile::tempdir()?;
        let cached = format!("models--{}", model.replace('/', "--"));
        let cached = view.path().join(cached);
        let snapshot = cached.join("snapshots").join(&self.commit);
        std::fs::create_dir_all(&snapshot)?;
        std::fs::create_dir_all(cached.join("trees"))?;
        let mut files = serde_json::Map::new();
        for entry in std::fs::read_dir(folder)?.flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let found = std::fs::metadata(entry.path())?;
            if name.starts_with('.') || !found.is_file() {
                continue;
            }
            std::os::unix::fs::symlink(entry.path(), snapshot.join(&name))?;
            let tag = self.tags.get(&name);
            let large = tag.filter(|tag| tag.len() == 64);
            let small = tag.filter(|tag| tag.len() == 40);
            files.insert(
                name,
                json!({
                    "size": found.len(),
                    "blob_id": small,
                    "lfs_sha256": large,
                    "lfs_size": large.map(|_| found.len()),
                }),
            );
        }
        let tree = cached.join("trees").join(format!("{}.json", self.commit));
        std::fs::write(tree, json!({ "files": files }).to_string())?;
        Ok(view)
    }
}
