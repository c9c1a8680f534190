//! `plan`: what a model will need here, before anything of it is fetched.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use super::args::PlanArgs;
use super::args::Ram;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::screen::duration;
use super::screen::whole_bytes;
use super::setup;
use crate::checkpoint::Spec;
use crate::kernel::Activation;
use crate::kernel::Kernel;
use crate::residency::Demand;
use crate::residency::MemoryPlan;
use crate::residency::Moved;
use crate::residency::Opened;
use crate::residency::Prediction;
use crate::residency::Rates;
use crate::residency::Shape;
use crate::residency::Stored;
use crate::residency::predict;
use crate::residency::ram;
use crate::residency::rates;
use crate::store::Budget;
use crate::terms::Bytes;

/// The real K3, so that it can be planned for where nothing of it is.
const K3: &[u8] = include_bytes!("../../fixtures/kimi-k3/config.json");

/// Reads of the core under way at once.
const CORE_READS: usize = 2;

/// What is planned for.
struct Subject {
    model: String,
    /// The shape is K3's published one, not read from headers.
    built_in: bool,
    shape: Shape,
    stored: Stored,
    /// Files of the store whose disk is to be measured.
    files: Vec<PathBuf>,
}

pub(super) fn command(args: &PlanArgs, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let subject = subject(args, &interrupt, screen)?;
    let threads = args
        .threads
        .map_or_else(setup::default_threads, usize::from);
    let found = ram::available();
    let (budget, by) = match args.ram {
        Ram::Size(bytes) => (Some(bytes), "--ram".to_owned()),
        Ram::Auto => match found {
            Some(ram) => (Some(ram.budget), ram.by),
            None => (None, "nothing that this system tells of".to_owned()),
        },
    };
    let demand = Demand {
        budget,
        threads,
        context: args.context,
        sequences: args.sequences,
        taking_turns: false,
        core: crate::residency::CoreChoice::Auto,
        lookahead: crate::residency::Lookahead::Off,
    };
    let plan = MemoryPlan::new(&subject.shape, &demand);
    let rates = measure(args, &subject, threads, &plan)?;
    let cost = predict(
        &subject.shape,
        &plan,
        &rates,
        &subject.stored,
        args.prompt_tokens,
    );
    if screen.json {
        screen.object(&object(args, &subject, &plan, &rates, &cost));
    } else {
        screen.text(&page(args, &subject, &plan, &rates, &cost, &by));
    }
    Ok(exit::DONE)
}

fn subject(
    args: &PlanArgs,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
) -> Result<Subject, CliError> {
    match setup::open(&args.model, true, &interrupt.flag(), screen) {
        Ok(setup) => opened(&setup.opened),
        Err(error) => {
            let named = args.model.model.as_deref().unwrap_or(setup::DEFAULT_MODEL);
            if named != setup::DEFAULT_MODEL || !args.model.hub.is_empty() {
                return Err(error);
            }
            screen.note("the hub does not answer and the store has no headers: using the published shape of Kimi K3");
            built_in(args)
        }
    }
}

fn opened(opened: &Opened) -> Result<Subject, CliError> {
    let shape = Shape::new(&opened.spec, opened.layout.core())
        .map_err(crate::residency::ResidencyError::from)?;
    let installed = opened.plan(None);
    let here = installed.experts_total - installed.experts_missing;
    let core = opened.layout.core().iter();
    Ok(Subject {
        model: opened.repo.to_string(),
        built_in: false,
        stored: Stored {
            core_missing: installed.core_missing,
            experts_here: part(here * installed.expert_len, &shape),
        },
        files: core
            .filter_map(|file| opened.store.core_ready(file.part, file.len))
            .collect(),
        shape,
    })
}

fn built_in(args: &PlanArgs) -> Result<Subject, CliError> {
    let spec = Spec::from_config(K3).map_err(crate::residency::ResidencyError::from)?;
    let shape = Shape::implied(&Arc::new(spec)).map_err(crate::residency::ResidencyError::from)?;
    let here = match args.model.store.cache {
        Some(Budget::Limit(bytes)) => bytes,
        Some(Budget::Unlimited) => u64::MAX,
        None => 0,
    };
    Ok(Subject {
        model: setup::DEFAULT_MODEL.to_owned(),
        built_in: true,
        stored: Stored {
            core_missing: shape.core_bytes(),
            experts_here: part(here, &shape),
        },
        files: Vec::new(),
        shape,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a part of a whole")]
fn part(bytes: u64, shape: &Shape) -> f64 {
    (bytes as f64 / shape.expert_bytes().max(1) as f64).min(1.0)
}

#[expect(clippy::cast_precision_loss, reason = "rates")]
fn measure(
    args: &PlanArgs,
    subject: &Subject,
    threads: usize,
    plan: &MemoryPlan,
) -> Result<Rates, CliError> {
    let (disk, core_disk) = match args.disk {
        Some(rate) => (rate as f64, rate as f64),
        None => disk(args, subject, plan)?,
    };
    let kernel = Kernel::new(crate::kernel::Isa::best(), threads);
    let memory = plan.budget.unwrap_or(u64::MAX) / 4;
    let arithmetic = rates::arithmetic(&kernel, Activation::Silu, &subject.shape, memory);
    Ok(Rates {
        disk,
        core_disk,
        link: args.link.and_then(|link| link.bytes_per_s),
        core: arithmetic.core,
        experts: arithmetic.experts,
        many: arithmetic.many,
        many_experts: arithmetic.many_experts,
    })
}

/// How fast experts are read and, where some of it passes by, the core: by reads as large as theirs.
fn disk(args: &PlanArgs, subject: &Subject, plan: &MemoryPlan) -> Result<(f64, f64), CliError> {
    let home = setup::home(&args.model.store, &Env::read())?;
    let folder = home.ancestors().find(|f| f.is_dir());
    let folder = folder.unwrap_or(&home);
    let failed = |source| CliError::File {
        path: folder.display().to_string(),
        source,
    };
    let rate =
        |len, deep| rates::disk(&subject.files, folder, rates::Reads { len, deep }).map_err(failed);
    let expert = usize::try_from(subject.shape.expert_len()).unwrap_or(usize::MAX);
    let experts = rate(expert, plan.window)?;
    let reads = plan.core_reads(&subject.shape);
    let core = match subject.files.len() == subject.shape.parts() {
        _ if reads.is_empty() => experts,
        // The very reads of a sweep: how fast a disk is depends on them.
        true => rates::replay(&subject.files, &reads, CORE_READS).map_err(failed)?,
        false => {
            let bytes: usize = reads.iter().map(|(_, _, len)| len).sum();
            rate(bytes / reads.len(), CORE_READS)?
        }
    };
    Ok((experts, core))
}

fn page(
    args: &PlanArgs,
    subject: &Subject,
    plan: &MemoryPlan,
    rates: &Rates,
    cost: &Prediction,
    by: &str,
) -> String {
    let shape = &subject.shape;
    let mut page = format!(
        "{}{}: {} of core, {} experts of {} ({} in all)\n",
        subject.model,
        if subject.built_in {
            " (published shape)"
        } else {
            ""
        },
        Bytes(shape.core_bytes()),
        shape.experts(),
        Bytes(shape.expert_len()),
        Bytes(shape.core_bytes() + shape.expert_bytes()),
    );
    let missing = subject.stored.core_missing;
    page.push_str(&format!(
        "here: {} of the core missing, {:.1} % of the experts on disk\n\n",
        Bytes(missing),
        100.0 * subject.stored.experts_here
    ));
    let budget = plan
        .budget
        .map_or("no limit".to_owned(), |b| Bytes(b).to_string());
    page.push_str(&format!("memory: {budget}, by {by}\n"));
    for line in &plan.lines {
        let bytes = Bytes(line.bytes).to_string();
        page.push_str(&format!(
            "  {:<20} {bytes:>10}  {}\n",
            line.share.name(),
            line.reason
        ));
    }
    if plan.short > 0 {
        page.push_str(&format!(
            "  this is {} more than there is: the least that works; expect swapping, or the end\n",
            Bytes(plan.short)
        ));
    }
    let rate = |rate: f64| format!("{}/s", whole_bytes(rate));
    page.push_str(&format!(
        "\nrates: disk {}, link {}, arithmetic {} of core and {} of experts\n",
        rate(rates.disk),
        rates.link.map_or("not known (--link)".to_owned(), rate),
        rate(rates.core),
        rate(rates.experts),
    ));
    page.push_str(&format!("\na token: {}\n", time(cost.seconds)));
    page.push_str(&moved(&cost.token));
    page.push_str(&format!(
        "  arithmetic {}\n\nfirst token of a prompt of {}: {}\n{}",
        time(Some(cost.compute)),
        args.prompt_tokens,
        time(cost.first_token),
        moved(&cost.prompt),
    ));
    if missing > 0 {
        let fetch = time(cost.core_fetch);
        page.push_str(&format!(
            "  before it, once, the core over the link: {fetch}\n"
        ));
    }
    page
}

fn moved(moved: &Moved) -> String {
    let mut text = String::new();
    for (what, bytes) in [
        ("core from memory", moved.core_memory),
        ("core from disk", moved.core_disk),
        ("experts from memory", moved.expert_memory),
        ("experts from disk", moved.expert_disk),
        ("experts from the hub", moved.expert_hub),
    ] {
        if bytes >= 1.0 {
            let bytes = whole_bytes(bytes).to_string();
            text.push_str(&format!("  {what:<20} {bytes:>10}\n"));
        }
    }
    text
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "not known without the link's rate (--link)".to_owned(),
        Some(s) if s < 10.0 => format!("{s:.2} s"),
        Some(s) => duration(Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX)),
    }
}

fn object(
    args: &PlanArgs,
    subject: &Subject,
    plan: &MemoryPlan,
    rates: &Rates,
    cost: &Prediction,
) -> Value {
    let moved = |m: &Moved| {
        json!({
            "core_memory": m.core_memory.round(), "core_disk": m.core_disk.round(),
            "expert_memory": m.expert_memory.round(), "expert_disk": m.expert_disk.round(),
            "expert_hub": m.expert_hub.round(),
        })
    };
    let lines = plan
        .lines
        .iter()
        .map(|line| json!({"for": line.share.name(), "bytes": line.bytes, "reason": line.reason}));
    json!({
        "model": subject.model,
        "published_shape": subject.built_in,
        "core_bytes": subject.shape.core_bytes(),
        "core_missing": subject.stored.core_missing,
        "experts": subject.shape.experts(),
        "expert_bytes": subject.shape.expert_len(),
        "experts_here": subject.stored.experts_here,
        "memory": {
            "budget": plan.budget, "total": plan.total(), "short": plan.short, "mapped": plan.mapped,
            "streamed": plan.streamed, "prefill_rows": plan.prefill_rows,
            "lines": lines.collect::<Vec<_>>(),
        },
        "rates": {
            "disk": rates.disk, "core_disk": rates.core_disk, "link": rates.link, "core": rates.core, "experts": rates.experts,
            "multiply_adds": rates.many, "expert_multiply_adds": rates.many_experts,
        },
        "token": {"bytes": moved(&cost.token), "seconds": cost.seconds, "compute": cost.compute},
        "prompt": {
            "tokens": args.prompt_tokens, "bytes": moved(&cost.prompt), "first_token": cost.first_token,
        },
        "core_fetch_seconds": cost.core_fetch,
    })
}
