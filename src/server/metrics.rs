//! `/metrics`, as Prometheus reads it.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use super::generator::BySource;
use super::generator::Now;
use super::queue::Queue;

/// The text of one scrape.
pub(super) fn text(queue: Option<&Queue>) -> String {
    let mut page = Page::default();
    page.one(
        "deltafin_ready",
        "gauge",
        "Whether requests can be served.",
        u64::from(queue.is_some()),
    );
    let Some(queue) = queue else {
        return page.0;
    };
    let tally = &queue.tally;
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    page.head(
        "deltafin_requests_total",
        "counter",
        "Requests by how they ended.",
    );
    for (end, count) in [
        ("finished", read(&tally.finished)),
        ("failed", read(&tally.failed)),
        ("cancelled", read(&tally.cancelled)),
        ("turned_away", read(&tally.turned_away)),
    ] {
        page.line(
            "deltafin_requests_total",
            &format!("{{end=\"{end}\"}}"),
            count,
        );
    }
    page.line_of(queue);
    page.work(&queue.generator().now());
    page.limit(queue);
    page.0
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a String takes all");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        writeln!(self.0, "{name}{labels} {value}").expect("a String takes all");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    /// The line, and what went through it.
    fn line_of(&mut self, queue: &Queue) {
        let tally = &queue.tally;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let lengths = queue.lengths();
        self.one(
            "deltafin_requests_waiting",
            "gauge",
            "Requests in line.",
            lengths.waiting as u64,
        );
        self.one(
            "deltafin_requests_running",
            "gauge",
            "Requests being served.",
            lengths.running as u64,
        );
        self.one(
            "deltafin_batch_lines_waiting",
            "gauge",
            "Lines of batches that are next.",
            lengths.batch_waiting as u64,
        );
        self.one(
            "deltafin_batch_lines_running",
            "gauge",
            "Lines of batches being answered.",
            lengths.batch_running as u64,
        );
        self.one(
            "deltafin_prompt_tokens_total",
            "counter",
            "Prompt tokens of ended generations.",
            read(&tally.prompt_tokens),
        );
        self.one(
            "deltafin_completion_tokens_total",
            "counter",
            "Tokens generated in ended generations.",
            read(&tally.completion_tokens),
        );
    }

    /// The machine at work.
    fn work(&mut self, now: &Now) {
        self.by_source(
            "deltafin_experts_total",
            "Experts delivered, by source.",
            &now.experts,
        );
        self.by_source(
            "deltafin_expert_bytes_total",
            "Their bytes, by source.",
            &now.bytes,
        );
        self.one(
            "deltafin_layer",
            "gauge",
            "The layer at work.",
            u64::from(now.layer),
        );
        self.head(
            "deltafin_last_token_seconds",
            "gauge",
            "Time the last token took.",
        );
        self.line(
            "deltafin_last_token_seconds",
            "",
            now.last_token.unwrap_or(0.0),
        );
    }

    /// What comes over the network, and how much of it may.
    fn limit(&mut self, queue: &Queue) {
        let generator = queue.generator();
        let limit = generator.limit();
        self.one(
            "deltafin_fetched_bytes_total",
            "counter",
            "Bytes of every kind from the network.",
            limit.fetched_bytes,
        );
        if let Some(max) = limit.max_bytes {
            self.one(
                "deltafin_fetched_bytes_max",
                "gauge",
                "The limit of them.",
                max,
            );
        }
        self.one(
            "deltafin_paused",
            "gauge",
            "Whether what runs waits for a higher limit.",
            u64::from(generator.now().paused),
        );
    }

    fn by_source(&mut self, name: &str, help: &str, by: &BySource) {
        self.head(name, "counter", help);
        for (source, value) in [
            ("memory", by.memory),
            ("disk", by.disk),
            ("peer", by.peer),
            ("hub", by.hub),
        ] {
            self.line(name, &format!("{{source=\"{source}\"}}"), value);
        }
    }
}
