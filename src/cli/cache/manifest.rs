//! `cache manifest`: a list of what every expert should be, written and held against the store.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;

use crate::cli::args::CacheManifest;
use crate::cli::exit;
use crate::cli::exit::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::screen::Screen;
use crate::cli::setup;
use crate::residency::InstallObserver;
use crate::residency::OpenRequest;
use crate::residency::Opened;
use crate::store::Level;
use crate::store::Manifest;
use crate::store::Store;
use crate::terms::Bytes;
use crate::terms::Digest;
use crate::terms::ExpertKey;
use crate::terms::RepoId;

pub(super) fn manifest(args: &CacheManifest, screen: &Screen) -> Result<u8, CliError> {
    match (&args.write, &args.check) {
        (Some(file), _) => write(args, file, screen),
        (None, Some(file)) => check(args, file, screen),
        // The parser asks for one of them.
        (None, None) => Err(CliError::Usage(
            "neither --write nor --check".to_owned(),
            None,
        )),
    }
}

fn write(args: &CacheManifest, file: &Path, screen: &Screen) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let store = setup::look(&args.store)?;
    let repo = super::repo_named(args.model.as_deref())?;
    let opened = open(&store, repo, args.revision.clone(), &interrupt, screen)?;
    let keys: Vec<ExpertKey> = opened.spec.expert_keys().collect();
    let listed = opened.store.manifest(&keys, opened.layout.expert_len())?;
    let manifest = listed.map_err(|unlisted| {
        CliError::Missing(
            format!(
                "{}: {} of {} experts have never been here: nobody knows what they should be",
                opened.repo, unlisted.unknown, unlisted.of
            ),
            "`deltafin fetch` brings them, and proves them by whole shards".to_owned(),
        )
    })?;
    let failed = |source| CliError::File {
        path: file.display().to_string(),
        source,
    };
    let bytes = manifest.encode().map_err(failed)?;
    // Whoever publishes it reads it from its name: whole or not at all.
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty());
    let mut temporary =
        tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    temporary.write_all(&bytes).map_err(failed)?;
    let persisted = temporary.persist(file);
    persisted.map_err(|e| failed(e.error))?;
    let sha256 = Digest(Sha256::digest(&bytes).into());
    screen.text(&format!(
        "{}: {} experts of {} at {:.10}, {}, sha256 {sha256}\n",
        file.display(),
        manifest.len(),
        manifest.repo,
        manifest.commit.as_str(),
        Bytes(bytes.len() as u64),
    ));
    if manifest.level == Level::FirstUse {
        screen.note(
            "some of its digests are those of first arrivals, which no whole shard has proved; `deltafin fetch` proves them",
        );
    }
    if screen.json {
        screen.object(&json!({
            "model": manifest.repo.as_str(),
            "revision": manifest.commit.as_str(),
            "file": file.display().to_string(),
            "experts": manifest.len(),
            "bytes": bytes.len(),
            "level": manifest.level,
            "sha256": sha256.to_string(),
        }));
    }
    Ok(exit::DONE)
}

fn check(args: &CacheManifest, file: &Path, screen: &Screen) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let bytes = std::fs::read(file).map_err(|source| CliError::File {
        path: file.display().to_string(),
        source,
    })?;
    let manifest = Manifest::decode(&bytes).map_err(|error| {
        CliError::Damaged(
            format!("{}: {error}", file.display()),
            "get it again from whoever published it".to_owned(),
        )
    })?;
    let store = setup::look(&args.store)?;
    let revision = Some(manifest.commit.to_string());
    let opened = open(&store, manifest.repo.clone(), revision, &interrupt, screen)?;
    fits(&manifest, &opened, file)?;
    screen.stage(
        "holding experts against the manifest",
        0,
        manifest.len() as u64,
    );
    let checked = opened.store.check_manifest(&manifest, &mut |_| {
        screen.moved(1);
        match interrupt.asked() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    screen.done();
    for (path, damage) in &checked.wrong {
        screen.note(&format!("{}: {damage}; removed", path.display()));
    }
    screen.text(&format!(
        "{} at {:.10}: {} experts proved by the manifest, {} read; {} are not here; {} differed and were removed\n",
        manifest.repo,
        manifest.commit.as_str(),
        checked.proved,
        Bytes(checked.bytes),
        checked.absent,
        checked.wrong.len()
    ));
    if screen.json {
        let wrong = checked.wrong.iter();
        screen.object(&json!({
            "model": manifest.repo.as_str(),
            "revision": manifest.commit.as_str(),
            "file": file.display().to_string(),
            "experts": manifest.len(),
            "seen": checked.seen,
            "proved": checked.proved,
            "absent": checked.absent,
            "bytes": checked.bytes,
            "removed": wrong.map(|(p, d)| json!({"file": p.display().to_string(), "damage": d.to_string()})).collect::<Vec<_>>(),
        }));
    }
    Ok(match (interrupt.asked(), checked.wrong.len()) {
        (true, _) => exit::INTERRUPTED,
        (false, 0) => exit::DONE,
        (false, _) => exit::DAMAGED,
    })
}

/// A model of the store, without any hub.
fn open(
    store: &Store,
    repo: RepoId,
    revision: Option<String>,
    interrupt: &Interrupt,
    screen: &Screen,
) -> Result<Opened, CliError> {
    let request = OpenRequest {
        repo,
        revision,
        update: false,
    };
    Ok(Opened::open(
        store,
        None,
        &request,
        interrupt.flag(),
        screen,
    )?)
}

/// What a manifest contradicts is removed: one for a model of another shape would remove everything.
fn fits(manifest: &Manifest, opened: &Opened, file: &Path) -> Result<(), CliError> {
    let listed = manifest.digests().iter().map(|(key, _)| *key);
    let same =
        manifest.expert_bytes == opened.layout.expert_len() && listed.eq(opened.spec.expert_keys());
    if same {
        return Ok(());
    }
    Err(CliError::Damaged(
        format!(
            "{}: it lists {} experts of {} bytes, and {} has {} of {}",
            file.display(),
            manifest.len(),
            manifest.expert_bytes,
            opened.repo,
            opened.spec.expert_keys().count(),
            opened.layout.expert_len()
        ),
        "it was made for another model".to_owned(),
    ))
}
