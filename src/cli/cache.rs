//! `cache`: looking after the store.

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
use crate::store::Budget;
use crate::store::ModelStore;
use crate::store::Store;
use crate::store::VerifyOptions;
use crate::terms::Bytes;

pub(super) fn command(args: &Cache, screen: &Arc<Screen>) -> Result<u8, CliError> {
    match args {
        Cache::Stats(args) => stats(args, screen),
        Cache::Verify(args) => verify(args, screen),
        Cache::Trim(args) => trim(args, screen),
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
        .collect();
    let bytes: u64 = holds.iter().map(|h| h.expert_bytes).sum();
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
            "{repo} at {:.10}: {} files, {} read; {} proved by whole shards, {} first arrivals; {} damaged, {} removed\n",
            commit.as_str(),
            found.files,
            Bytes(found.bytes),
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

/// What the store holds of one model.
struct Holding {
    model: String,
    revision: String,
    experts: usize,
    expert_bytes: u64,
    core_bytes: u64,
    by_layer: BTreeMap<u16, usize>,
}

impl Holding {
    fn of(model: &ModelStore) -> Holding {
        let experts = model.experts();
        let mut by_layer = BTreeMap::new();
        for (key, _) in &experts {
            *by_layer.entry(key.layer).or_insert(0) += 1;
        }
        let core = std::fs::read_dir(model.folder().join("core"))
            .into_iter()
            .flatten()
            .flatten();
        Holding {
            model: model.repo().to_string(),
            revision: model.commit().to_string(),
            experts: experts.len(),
            expert_bytes: experts.iter().map(|(_, len)| len).sum(),
            core_bytes: core
                .filter_map(|f| f.metadata().ok())
                .map(|m| m.len())
                .sum(),
            by_layer,
        }
    }

    fn json(&self) -> Value {
        let layers = self.by_layer.iter();
        json!({
            "model": self.model,
            "revision": self.revision,
            "experts": self.experts,
            "expert_bytes": self.expert_bytes,
            "core_bytes": self.core_bytes,
            "by_layer": layers.map(|(l, n)| json!({"layer": l, "experts": n})).collect::<Vec<_>>(),
        })
    }

    fn line(&self) -> String {
        format!(
            "{} at {:.10}: {} experts in {} layers, {}; core {}",
            self.model,
            self.revision,
            self.experts,
            self.by_layer.len(),
            Bytes(self.expert_bytes),
            Bytes(self.core_bytes)
        )
    }
}
