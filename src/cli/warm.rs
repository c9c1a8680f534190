//! `cache warm`: fetches the experts that were used most, before anybody waits for them.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::args::CacheWarm;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use crate::hub::HubError;
use crate::residency::Opened;
use crate::residency::ResidencyError;
use crate::residency::Trace;
use crate::residency::TraceError;
use crate::residency::hottest;
use crate::terms::Bytes;
use crate::terms::ExpertKey;

/// With `--idle`, how long nobody else may have fetched anything: longer than the arithmetic between
/// two layers takes.
const QUIET: Duration = Duration::from_secs(2);

pub(super) fn command(args: &CacheWarm, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let opened = &setup.opened;
    let order = match &args.trace {
        Some(file) => order(file, opened)?,
        None => hottest_here(opened),
    };
    if order.is_empty() {
        screen.note("nothing was used here yet: there is nothing to warm the cache with");
    }
    // What opening has cost counts too: a plan beyond the limit would end in the middle of experts.
    let spent = setup
        .hub
        .as_ref()
        .map_or(0, |hub| hub.stats().counted_bytes);
    let limit = args.model.max_bytes.map(|b| b.0.saturating_sub(spent));
    let plan = opened.warming(&order, limit);
    let len = opened.layout.expert_len();
    screen.note(&format!(
        "{}: of {} experts that were used the cache holds {}; {} of those are missing, {} to fetch",
        opened.repo,
        order.len(),
        plan.wanted.len(),
        plan.missing,
        Bytes(plan.fetch.len() as u64 * len),
    ));
    let (warmed, stopped) = if args.dry_run {
        (crate::residency::Installed::default(), None)
    } else {
        if args.idle {
            screen.note("fetching only while nobody else does");
        }
        opened.warm(&plan, args.idle.then_some(QUIET), screen.as_ref())
    };
    let interrupted = matches!(stopped, Some(ResidencyError::Interrupted));
    let capped = matches!(
        stopped,
        Some(ResidencyError::Hub(HubError::CapReached { .. }))
    );
    if interrupted || capped {
        screen.note("what was fetched is kept; run the same command again to go on");
    }
    if let Some(error) = stopped.filter(|_| !interrupted && !capped) {
        return Err(error.into());
    }
    if screen.json {
        screen.object(&json!({
            "model": opened.repo.as_str(),
            "revision": opened.snapshot.commit.as_str(),
            "expert_bytes": len,
            "used": order.len(),
            "wanted": plan.wanted.len(),
            "missing": plan.missing,
            "planned": plan.fetch.len(),
            "fetched": warmed.fetched,
            "not_kept": warmed.not_kept,
            "bytes": warmed.bytes,
        }));
    } else if !args.dry_run {
        screen.text(&format!(
            "{} experts fetched, {}\n",
            warmed.fetched,
            Bytes(warmed.bytes)
        ));
    }
    if interrupted || capped {
        return Ok(exit::INTERRUPTED);
    }
    if warmed.not_kept > 0 {
        return Err(CliError::NoSpace(
            format!("{} experts were fetched and could not be kept", warmed.not_kept),
            "the disk is full or others are reading all that is in the cache: free some space, or raise --cache"
                .to_owned(),
        ));
    }
    Ok(exit::DONE)
}

/// The experts of a trace of this model, those used most first.
pub(super) fn order(file: &Path, opened: &Opened) -> Result<Vec<ExpertKey>, CliError> {
    let trace = Trace::read(file)?;
    let (head, commit) = (&trace.head, opened.snapshot.commit.as_str());
    if head.model != opened.repo.as_str() || head.revision != commit {
        return Err(TraceError::Other {
            path: file.to_owned(),
            found: format!("{} at {:.10}", head.model, head.revision),
            wanted: format!("{} at {commit:.10}", opened.repo),
        }
        .into());
    }
    Ok(of_model(hottest(&trace), opened))
}

/// The experts that were used most with this store, lately, those first.
pub(super) fn hottest_here(opened: &Opened) -> Vec<ExpertKey> {
    of_model(opened.store.hottest(), opened)
}

/// A trace, or what is known of heat, is a file like any other: what the model does not have is not
/// asked for.
fn of_model(mut order: Vec<ExpertKey>, opened: &Opened) -> Vec<ExpertKey> {
    let there: HashSet<ExpertKey> = opened.spec.expert_keys().collect();
    order.retain(|key| there.contains(key));
    order
}
