//! What a generation was and what it moved: the JSON object and the short table.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::json;

use super::screen::duration;
use crate::engine::Engine;
use crate::engine::Finish;
use crate::engine::Generation;
use crate::engine::Seconds;
use crate::hub::Hub;
use crate::residency::Counts;
use crate::residency::Recall;
use crate::terms::Bytes;
use crate::terms::TokenId;

/// What is known of a generation, finished or not.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) revision: Option<String>,
    pub(super) prompt_ids: Vec<TokenId>,
    pub(super) token_ids: Vec<TokenId>,
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) finish: Option<Finish>,
    pub(super) seconds: Seconds,
    pub(super) counts: Counts,
    /// How often guesses were right, by layer.
    pub(super) recall: BTreeMap<u16, Recall>,
    /// Rows of the prompt that were computed, and that were there already.
    pub(super) rows: (usize, usize),
    pub(super) resolves: u64,
    pub(super) meta: u64,
    pub(super) isa: &'static str,
    pub(super) threads: usize,
    /// Bytes of memory: what might be used, and what was planned.
    pub(super) memory: (Option<u64>, u64),
    pub(super) seed: u64,
    pub(super) error: Option<String>,
}

impl Report {
    /// What the engine has moved since it was opened, its installation included.
    pub(super) fn measure(&mut self, engine: &Engine, hub: Option<&Hub>) {
        self.counts = engine.counts();
        self.recall = engine.recall();
        let stats = hub.map(Hub::stats);
        self.resolves = stats.as_ref().map_or(0, |s| s.resolves);
        self.meta = self
            .counts
            .meta
            .max(stats.as_ref().map_or(0, |s| s.meta_bytes));
        self.isa = engine.kernel().isa().name();
        self.threads = engine.kernel().threads();
        let plan = engine.memory();
        self.memory = (plan.budget, plan.total());
    }

    pub(super) fn finish(&mut self, generation: &Generation) {
        self.prompt_ids.clone_from(&generation.prompt_ids);
        self.token_ids.clone_from(&generation.token_ids);
        self.text.clone_from(&generation.text);
        self.reasoning.clone_from(&generation.reasoning);
        self.finish = Some(generation.finish);
        self.seconds = generation.seconds;
        self.rows = (generation.computed_rows, generation.cached_tokens);
    }

    pub(super) fn json(&self) -> Value {
        let c = &self.counts;
        let mut object = json!({
            "model": self.model,
            "revision": self.revision,
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish.map(Finish::name),
            "seconds": {
                "prefill": self.seconds.prefill.as_secs_f64(),
                "decode": self.seconds.decode.as_secs_f64(),
                "compute": self.seconds.compute.as_secs_f64(),
                "wait_disk": c.wait_disk.as_secs_f64(),
                "wait_hub": c.wait_hub.as_secs_f64(),
            },
            "experts": {
                "requested": c.requested,
                "memory": c.experts.memory,
                "disk": c.experts.disk,
                "peer": c.experts.peer,
                "hub": c.experts.hub,
            },
            "bytes": {
                "memory": c.bytes.memory,
                "disk": c.bytes.disk,
                "peer": c.bytes.peer,
                "hub": c.bytes.hub,
                "core_disk": c.core_disk,
                "core_hub": c.core_hub,
                "meta": self.meta,
            },
            "lookahead": {
                "asked": c.guessed,
                "foreseen": c.foreseen,
                "bytes_read": c.read_ahead,
                "bytes_used": c.used_ahead,
                "layers": self.recall.iter().map(|(layer, recall)| json!({
                    "layer": layer,
                    "asked": recall.asked,
                    "foreseen": recall.foreseen,
                })).collect::<Vec<Value>>(),
            },
            "rows": { "computed": self.rows.0, "cached": self.rows.1 },
            "memory": { "budget": self.memory.0, "planned": self.memory.1 },
            "resolves": self.resolves,
            "isa": self.isa,
            "threads": self.threads,
            "seed": self.seed,
        });
        if let (Some(error), Value::Object(fields)) = (&self.error, &mut object) {
            fields.insert("error".to_owned(), Value::String(error.clone()));
        }
        object
    }

    /// One line for the end of a run.
    pub(super) fn line(&self) -> String {
        let c = &self.counts;
        let time = self.seconds.prefill + self.seconds.decode;
        format!(
            "{} prompt + {} new tokens in {}; experts: {} asked, {} memory, {} disk, {} hub ({} fetched); seed {}",
            self.prompt_ids.len(),
            self.token_ids.len(),
            duration(time),
            c.requested,
            c.experts.memory,
            c.experts.disk,
            c.experts.hub + c.experts.peer,
            Bytes(c.bytes.hub + c.bytes.peer),
            self.seed
        )
    }
}
