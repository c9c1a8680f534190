//! `cache`: looking after the store.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::json;

use super::args::Cache;
use super::args::CacheStats;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::screen::Screen;
use super::setup;
use crate::store::Budget;
use crate::store::ModelStore;
use crate::store::Store;
use crate::store::StoreOptions;
use crate::terms::Bytes;

pub(super) fn command(args: &Cache, screen: &Screen) -> Result<u8, CliError> {
    match args {
        Cache::Stats(args) => stats(args, screen),
    }
}

fn stats(args: &CacheStats, screen: &Screen) -> Result<u8, CliError> {
    let home = setup::home(&args.store, &Env::read())?;
    let (free, reserve) = setup::space(&args.store)?;
    let budget = Store::settings(&home).budget;
    // Looking may not evict, whatever budget was last set.
    let options = StoreOptions {
        home: home.clone(),
        budget: Budget::Unlimited,
        reserve,
    };
    let store = Store::open(options)?;
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
