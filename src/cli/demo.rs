//! `demo`: the whole thing on the embedded small model, over real HTTP.

use std::sync::Arc;

use super::args::Demo;
use super::args::EffortArg;
use super::args::ModelArgs;
use super::args::Ram;
use super::args::RunArgs;
use super::args::SamplingArgs;
use super::args::StoreArgs;
use super::env::Env;
use super::exit::CliError;
use super::generate;
use super::interrupt::Interrupt;
use super::report::Report;
use super::screen::Screen;
use super::setup;
use crate::engine::Request;
use crate::share;
use crate::store::Budget;
use crate::terms::Bytes;

/// What the small model is asked when nobody says anything else.
const PROMPT: &str = "Who are you?";
/// The demo's memory by default: the small model's core and a few of its experts.
const RAM: u64 = 40_000_000;
/// The demo's cache by default: less than the small model's 4.4 MB of experts, so that evictions
/// happen.
const CACHE: u64 = 3_500_000;

pub(super) fn command(args: &Demo, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let prompt = if args.sampling.ids.is_empty() {
        args.prompt.as_deref().or(Some(PROMPT))
    } else {
        args.prompt.as_deref()
    };
    let sampling = SamplingArgs {
        reasoning_effort: args.sampling.reasoning_effort.or(Some(EffortArg::Max)),
        ..args.sampling.clone()
    };
    let request = generate::request(&sampling, prompt)?;
    let mut report = Report {
        seed: request.sampling.seed,
        ..Report::default()
    };
    let mut table = String::new();
    let outcome = whole(args, &request, &interrupt, screen, &mut report, &mut table);
    let finished = outcome.is_ok();
    let code = generate::conclude(outcome, &args.sampling.logits, report, screen)?;
    if finished {
        screen.note(&table);
    }
    Ok(code)
}

fn whole(
    args: &Demo,
    request: &Request,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    report: &mut Report,
    table: &mut String,
) -> Result<Option<crate::engine::Capture>, CliError> {
    let temporary = match &args.home {
        Some(_) => None,
        None => Some(
            tempfile::Builder::new()
                .prefix("deltafin-demo-")
                .tempdir()
                .map_err(|source| CliError::File {
                    path: std::env::temp_dir().display().to_string(),
                    source,
                })?,
        ),
    };
    let home = args
        .home
        .clone()
        .or_else(|| temporary.as_ref().map(|t| t.path().to_owned()));
    let served = setup::start_demo(share::ShareOptions {
        link: args.link,
        ..share::ShareOptions::default()
    })?;
    screen.note(&format!(
        "a hub with {} listens on {}",
        share::Embedded::REPO,
        served.url()
    ));
    let model = ModelArgs {
        model: Some(share::Embedded::REPO.to_owned()),
        revision: None,
        update: true,
        hub: vec![served.url()],
        offline: false,
        rate: None,
        max_bytes: None,
        store: StoreArgs {
            home,
            cache: Some(args.cache.unwrap_or(Budget::Limit(CACHE))),
            reserve: Some(Bytes(0)),
            policy: args.policy,
        },
    };
    let setup = setup::open_in(&Env::default(), &model, true, &interrupt.flag(), screen)?;
    let full = setup.opened.plan(None);
    // A machine that the small model does not fit into either, or there would be nothing to see.
    let small = RunArgs {
        ram: match args.run.ram {
            Ram::Auto => Ram::Size(RAM),
            size => size,
        },
        ..args.run.clone()
    };
    let engine = setup::engine(setup.opened, &small, screen)?;
    let outcome = generate::generate(
        &engine,
        setup.hub.as_ref(),
        request,
        interrupt,
        screen,
        report,
    );
    *table = summary(report, full.core_total, full.experts_total, full.expert_len);
    outcome
}

/// What was moved, against a full download.
fn summary(report: &Report, core: u64, experts: u64, expert_len: u64) -> String {
    let c = &report.counts;
    let moved = c.core_hub + c.bytes.hub + c.bytes.peer + report.meta;
    let full = core + experts * expert_len;
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let percent = 100.0 * moved as f64 / full as f64;
    let why = if moved > full {
        "; the demo's cache is too small on purpose"
    } else {
        ""
    };
    format!(
        "\n\
        tokens            {:>10}   ({} prompt, {} new)\n\
        experts asked     {:>10}\n\
        \x20 from memory     {:>10}   {}\n\
        \x20 from disk       {:>10}   {}\n\
        \x20 from the hub    {:>10}   {}\n\
        core fetched      {:>10}\n\
        bytes moved       {:>10}   {percent:.0} % of a full download ({}){why}\n\
        \n\
        The same for the real model (113.5 GB of core first, then experts as they are needed):\n\
        \x20 deltafin stream --model moonshotai/Kimi-K3 --cache 200GB \"Who are you?\"",
        report.prompt_ids.len() + report.token_ids.len(),
        report.prompt_ids.len(),
        report.token_ids.len(),
        c.requested,
        c.experts.memory,
        Bytes(c.bytes.memory),
        c.experts.disk,
        Bytes(c.bytes.disk),
        c.experts.hub,
        Bytes(c.bytes.hub),
        Bytes(c.core_hub),
        Bytes(moved),
        Bytes(full),
    )
}
