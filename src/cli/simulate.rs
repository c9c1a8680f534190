//! `cache simulate`: a trace against every policy, at every size.

use serde_json::json;

use super::args::CacheSimulate;
use super::exit;
use super::exit::CliError;
use super::screen::Screen;
use crate::residency::InstallObserver;
use crate::residency::Replayed;
use crate::residency::Trace;
use crate::residency::belady;
use crate::residency::distinct;
use crate::residency::policies;
use crate::residency::replay;
use crate::terms::Bytes;

/// Sizes where none is named, in hundredths of what the trace has used.
const PARTS: [u64; 6] = [5, 10, 20, 40, 60, 80];

/// One size.
struct Row {
    bytes: u64,
    found: Vec<(&'static str, Replayed)>,
    bound: Replayed,
}

pub(super) fn command(args: &CacheSimulate, screen: &Screen) -> Result<u8, CliError> {
    let trace = Trace::read(&args.trace)?;
    let each = trace.head.expert_bytes;
    let used = distinct(&trace) as u64;
    let sizes: Vec<u64> = if args.cache.is_empty() {
        PARTS
            .iter()
            .map(|part| (used * part).div_ceil(100) * each)
            .collect()
    } else {
        args.cache.iter().map(|size| size.0).collect()
    };
    screen.stage("replaying", 0, sizes.len() as u64);
    let rows: Vec<Row> = sizes
        .into_iter()
        .map(|bytes| row(&trace, bytes, screen))
        .collect();
    screen.done();
    let uses = rows.first().map_or(0, |row| row.bound.uses);
    if screen.json {
        screen.object(&json!({
            "model": trace.head.model,
            "revision": trace.head.revision,
            "expert_bytes": each,
            "sweeps": trace.sweeps.len(),
            "uses": uses,
            "distinct": used,
            "sizes": rows.iter().map(|row| json!({
                "bytes": row.bytes,
                "policies": row.found.iter().map(|(name, found)| json!({
                    "policy": name,
                    "hits": found.hits,
                    "hit_rate": found.rate(),
                })).collect::<Vec<_>>(),
                "bound_hits": row.bound.hits,
                "bound_rate": row.bound.rate(),
            })).collect::<Vec<_>>(),
        }));
        return Ok(exit::DONE);
    }
    screen.text(&format!(
        "{} at {:.10}: {} passes, {uses} uses of {used} experts, {} in all\n",
        trace.head.model,
        trace.head.revision,
        trace.sweeps.len(),
        Bytes(used * each),
    ));
    screen.text(&table(&rows));
    Ok(exit::DONE)
}

fn row(trace: &Trace, bytes: u64, screen: &Screen) -> Row {
    let capacity = usize::try_from(bytes / trace.head.expert_bytes).unwrap_or(usize::MAX);
    let found = policies(capacity)
        .into_iter()
        .map(|mut policy| (policy.name(), replay(trace, capacity, policy.as_mut())))
        .collect();
    let bound = belady(trace, capacity);
    screen.moved(1);
    Row {
        bytes,
        found,
        bound,
    }
}

/// Bytes found in the cache, in per cent of those used.
fn table(rows: &[Row]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let mut text = format!("{:>10}", "cache");
    for (name, _) in &first.found {
        text.push_str(&format!("  {name:>13}"));
    }
    text.push_str(&format!("  {:>13}\n", "best possible"));
    for row in rows {
        text.push_str(&format!("{:>10}", Bytes(row.bytes).to_string()));
        for (_, found) in &row.found {
            text.push_str(&format!("  {:>11.1} %", found.rate() * 100.0));
        }
        text.push_str(&format!("  {:>11.1} %\n", row.bound.rate() * 100.0));
    }
    text
}
