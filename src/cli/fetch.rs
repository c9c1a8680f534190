//! `fetch`: the full install.

use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::Value;
use serde_json::json;

use super::args::Fetch;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use super::warm;
use crate::residency::Installed;
use crate::residency::Opened;
use crate::residency::Plan;
use crate::residency::Proved;
use crate::residency::ResidencyError;
use crate::terms::Bytes;
use crate::terms::ExpertKey;

pub(super) fn command(args: &Fetch, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let layers = args.layers.map(|(first, last)| first..=last);
    // Read before anything is fetched: a trace of another model is a mistake to be told of at once.
    let order = match &args.trace {
        Some(file) => warm::order(file, &setup.opened)?,
        None if args.heat => warm::hottest_here(&setup.opened),
        None => Vec::new(),
    };
    let plan = setup.opened.plan(layers.as_ref());
    let missing = if args.core {
        plan.core_missing
    } else {
        plan.missing()
    };
    let (free, reserve) = setup::space(&args.model.store)?;
    if !args.core {
        screen.note(&format!(
            "{}: {} of {} experts are missing, {} to fetch; {} free on disk",
            setup.opened.repo,
            plan.experts_missing,
            plan.experts_total,
            Bytes(missing),
            Bytes(free)
        ));
    }
    if missing > free.saturating_sub(if args.core { 0 } else { reserve }) {
        return Err(CliError::NoSpace(
            format!(
                "{} are missing, and the disk has {} free, of which {} are reserved",
                Bytes(missing),
                Bytes(free),
                Bytes(reserve)
            ),
            "free some space, choose another --home, fetch fewer --layers, or stream with a --cache that fits".to_owned(),
        ));
    }
    screen.tell_disk_of(setup.opened.store.store().home());
    let mut installed = Installed::default();
    let mut proved = None;
    if !args.dry_run {
        match install(&setup.opened, args, (layers.as_ref(), &order), screen) {
            Ok(done) => (installed, proved) = done,
            Err(ResidencyError::Interrupted) => {
                screen.note(
                    "interrupted: what was fetched is kept; run the same command again to go on",
                );
                return Ok(exit::INTERRUPTED);
            }
            Err(error) => return Err(error.into()),
        }
    }
    if screen.json {
        screen.object(&report(&setup.opened, &plan, &installed, proved.as_ref()));
    }
    if proved.is_some_and(|p| !p.different.is_empty()) {
        return Ok(exit::DAMAGED);
    }
    if installed.not_kept > 0 {
        return Err(CliError::NoSpace(
            format!(
                "{} experts were fetched and could not be kept",
                installed.not_kept
            ),
            "the disk or the budget is full: free some space, or raise --cache".to_owned(),
        ));
    }
    Ok(exit::DONE)
}

/// Fetches what was asked for; a whole install is then proved against the hub's digests.
fn install(
    opened: &Opened,
    args: &Fetch,
    (layers, order): (Option<&RangeInclusive<u16>>, &[ExpertKey]),
    screen: &Screen,
) -> Result<(Installed, Option<Proved>), ResidencyError> {
    if args.core {
        opened.install_core(screen)?;
        screen.note("the core is in the store");
        return Ok((Installed::default(), None));
    }
    // A full install is the cache that never evicts.
    opened.store.set_unlimited(true)?;
    opened.install_core(screen)?;
    let installed = opened.install_experts(layers, order, screen)?;
    screen.note(&format!(
        "{} experts fetched; everything asked for is in the store",
        installed.fetched
    ));
    if layers.is_some() || installed.not_kept > 0 {
        return Ok((installed, None));
    }
    opened.install_rest(screen)?;
    let proved = opened.prove(screen)?;
    screen.note(&format!(
        "{} whole shards have the hub's sha256, {} have none published",
        proved.whole, proved.unpublished
    ));
    for shard in &proved.different {
        screen.note(&format!(
            "{shard}: its sha256 is not the published one, although each part is what once arrived; \
             all of it was removed, and the same command fetches it anew"
        ));
    }
    Ok((installed, Some(proved)))
}

fn report(opened: &Opened, plan: &Plan, installed: &Installed, proved: Option<&Proved>) -> Value {
    let counts = opened.meter.counts();
    json!({
        "model": opened.repo.as_str(),
        "revision": opened.snapshot.commit.as_str(),
        "shards": proved.map(|p| json!({
            "whole": p.whole,
            "unpublished": p.unpublished,
            "different": p.different,
            "discarded": p.discarded,
        })),
        "core": {"bytes": plan.core_total, "missing": plan.core_missing},
        "experts": {
            "total": plan.experts_total,
            "missing": plan.experts_missing,
            "bytes_each": plan.expert_len,
            "fetched": installed.fetched,
            "not_kept": installed.not_kept,
        },
        "bytes": {
            "core_hub": counts.core_hub,
            "meta": counts.meta,
            "hub": installed.bytes,
        },
    })
}
