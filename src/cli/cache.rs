//! `cache`: looking after the store.

mod import;
mod manifest;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use serde_json::Value;
use serde_json::json;

use super::args::Cache;
use super::args::CacheStats;
use super::args::CacheTrim;
use super::args::CacheVerify;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use super::simulate;
use super::warm;
use crate::residency::InstallObserver;
use crate::share;
use crate::store::Budget;
use crate::store::Held;
use crate::store::Lookups;
use crate::store::ModelStore;
use crate::store::Store;
use crate::store::VerifyOptions;
use crate::terms::Bytes;
use crate::terms::RepoId;

pub(super) fn command(args: &Cache, screen: &Arc<Screen>) -> Result<u8, CliError> {
    match args {
        Cache::Stats(args) => stats(args, screen),
        Cache::Verify(args) => verify(args, screen),
        Cache::Trim(args) => trim(args, screen),
        Cache::Import(args) => import::import(args, screen),
        Cache::Manifest(args) => manifest::manifest(args, screen),
        Cache::Simulate(args) => simulate::command(args, screen),
        Cache::Warm(args) => warm::command(args, screen),
    }
}

fn stats(args: &CacheStats, screen: &Screen) -> Result<u8, CliError> {
    let (free, reserve) = setup::space(&args.store)?;
    let store = setup::look(&args.store)?;
    let home = store.home();
    let budget = Store::settings(home)?.budget;
    let holds: Vec<Holding> = store
        .models()
        .iter()
        .map(|(repo, commit)| Holding::of(&store.model(repo, commit)))
        .collect::<Result<_, _>>()?;
    let bytes: u64 = holds.iter().map(|h| h.all.bytes).sum();
    if screen.json {
        screen.object(&json!({
            "home": home.display().to_string(),
            "expert_bytes": bytes,
            "budget": budget.and_then(|b| match b {
                Budget::Limit(bytes) => Some(bytes),
                Budget::Unlimited => None,
            }),
            "reserve": reserve,
            "free": free,
            "models": holds.iter().map(Holding::json).collect::<Vec<_>>(),
        }));
        return Ok(exit::DONE);
    }
    let budget = budget.map_or("not yet set".to_owned(), setup::budget);
    screen.text(&format!(
        "{}: {} of experts; budget {budget}; {} free on disk, {} reserved\n",
        home.display(),
        Bytes(bytes),
        Bytes(free),
        Bytes(reserve)
    ));
    for holding in &holds {
        screen.text(&format!("{}\n", holding.line()));
        if args.layers {
            for (layer, held) in &holding.by_layer {
                screen.text(&format!("  layer {layer}: {}\n", line(held)));
            }
        }
    }
    Ok(exit::DONE)
}

fn verify(args: &CacheVerify, screen: &Screen) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let store = setup::look(&args.store)?;
    let options = VerifyOptions {
        every: args.every as usize,
        repair: args.repair,
    };
    let mut models = Vec::new();
    let mut damaged = 0;
    for (repo, commit) in store.models() {
        let mut staged = false;
        let found = store.model(&repo, &commit).verify(options, &mut |so_far| {
            if !staged {
                staged = true;
                screen.stage(&format!("verifying {repo}"), 0, so_far.of as u64);
            }
            screen.moved(1);
            if interrupt.asked() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        screen.done();
        damaged += found.damaged.len();
        for (path, damage) in &found.damaged {
            screen.note(&format!("{}: {damage}", path.display()));
        }
        let line = format!(
            "{repo} at {:.10}: {} files, {} read; {} proved by a manifest, {} by whole shards, {} first arrivals; {} damaged, {} removed\n",
            commit.as_str(),
            found.files,
            Bytes(found.bytes),
            found.manifest,
            found.whole_shard,
            found.first_use,
            found.damaged.len(),
            found.removed
        );
        screen.text(&line);
        models.push(json!({
            "model": repo.as_str(),
            "revision": commit.as_str(),
            "files": found.files,
            "bytes": found.bytes,
            "whole_shard": found.whole_shard,
            "manifest": found.manifest,
            "first_use": found.first_use,
            "damaged": found.damaged.iter().map(|(p, d)| json!({"file": p.display().to_string(), "damage": d.to_string()})).collect::<Vec<_>>(),
            "removed": found.removed,
        }));
    }
    if screen.json {
        screen.object(&json!({ "models": models }));
    }
    Ok(match (interrupt.asked(), damaged) {
        (true, _) => exit::INTERRUPTED,
        (false, 0) => exit::DONE,
        (false, _) => exit::DAMAGED,
    })
}

fn trim(args: &CacheTrim, screen: &Screen) -> Result<u8, CliError> {
    let store = setup::look(&args.store)?;
    let trimmed = store.trim(args.size.0)?;
    screen.text(&format!(
        "{} experts evicted, {}; {} are left\n",
        trimmed.experts,
        Bytes(trimmed.bytes),
        Bytes(trimmed.left)
    ));
    if screen.json {
        screen.object(&json!({
            "experts": trimmed.experts,
            "bytes": trimmed.bytes,
            "left": trimmed.left,
        }));
    }
    Ok(exit::DONE)
}

/// The repository of that name, or the real K3.
fn repo_named(name: Option<&str>) -> Result<RepoId, CliError> {
    let name = match name {
        Some("demo") => share::Embedded::REPO,
        Some(name) => name,
        None => setup::DEFAULT_MODEL,
    };
    let parsed = name.parse();
    parsed.map_err(|error| CliError::Usage(format!("--model: {error}"), None))
}

/// What the store holds of one model.
struct Holding {
    model: String,
    revision: String,
    core_bytes: u64,
    all: Held,
    by_layer: BTreeMap<u16, Held>,
}

impl Holding {
    fn of(model: &ModelStore) -> Result<Holding, CliError> {
        let by_layer = model.held()?;
        let core = std::fs::read_dir(model.folder().join("core"))
            .into_iter()
            .flatten()
            .flatten();
        Ok(Holding {
            model: model.repo().to_string(),
            revision: model.commit().to_string(),
            core_bytes: core
                .filter_map(|f| f.metadata().ok())
                .map(|m| m.len())
                .sum(),
            all: by_layer.values().fold(Held::default(), Held::plus),
            by_layer,
        })
    }

    fn json(&self) -> Value {
        let layers = self.by_layer.iter().map(|(layer, held)| {
            let mut fields = serde_json::Map::new();
            fields.insert("layer".to_owned(), json!(layer));
            fields.insert("experts".to_owned(), json!(held.experts));
            fields.insert("bytes".to_owned(), json!(held.bytes));
            fields.extend(proofs_and_lookups(held));
            Value::Object(fields)
        });
        let layers: Vec<Value> = layers.collect();
        let mut fields = serde_json::Map::new();
        fields.insert("model".to_owned(), json!(self.model));
        fields.insert("revision".to_owned(), json!(self.revision));
        fields.insert("experts".to_owned(), json!(self.all.experts));
        fields.insert("expert_bytes".to_owned(), json!(self.all.bytes));
        fields.insert("core_bytes".to_owned(), json!(self.core_bytes));
        fields.extend(proofs_and_lookups(&self.all));
        fields.insert("by_layer".to_owned(), json!(layers));
        Value::Object(fields)
    }

    fn line(&self) -> String {
        let layers = self.by_layer.values().filter(|held| held.experts > 0);
        format!(
            "{} at {:.10}: {} in {} layers; core {}",
            self.model,
            self.revision,
            line(&self.all),
            layers.count(),
            Bytes(self.core_bytes)
        )
    }
}

/// How well experts are proved, and how often they were there when they were needed.
fn proofs_and_lookups(held: &Held) -> serde_json::Map<String, Value> {
    let fields = json!({
        "levels": {
            "manifest": held.manifest,
            "whole_shard": held.whole_shard,
            "first_use": held.first_use,
            "unknown": held.unknown,
        },
        "lookups": {
            "hits": held.lookups.hits,
            "misses": held.lookups.misses,
            "rate": held.lookups.rate(),
        },
    });
    match fields {
        Value::Object(fields) => fields,
        _ => serde_json::Map::new(),
    }
}

fn line(held: &Held) -> String {
    let mut text = format!("{} experts, {}", held.experts, Bytes(held.bytes));
    let levels = [
        (held.manifest, "by a manifest"),
        (held.whole_shard, "by whole shards"),
        (held.first_use, "first arrivals"),
        (held.unknown, "by nothing"),
    ];
    let proved: Vec<String> = levels
        .iter()
        .filter(|(experts, _)| *experts > 0)
        .map(|(experts, by)| format!("{experts} {by}"))
        .collect();
    if !proved.is_empty() {
        text += &format!(" (proved: {})", proved.join(", "));
    }
    if let Some(rate) = held.lookups.rate() {
        let Lookups { hits, misses } = held.lookups;
        let all = hits.saturating_add(misses);
        text += &format!(", {:.1} % of {all} lookups found theirs", rate * 100.0);
    }
    text
}
