//! A report as it is kept and shared: `docs/benchmarks/schema.json` says the same.

use std::path::Path;

use serde::Deserialize;
use serde::Serialize;

use crate::cli::exit::CliError;

/// What the first field of every report says.
pub(super) const FORMAT: &str = "deltafin-bench/1";

/// What was measured, where, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Report {
    pub(super) format: String,
    pub(super) deltafin: String,
    /// Day of the measurement, UTC.
    pub(super) date: String,
    pub(super) note: Option<String>,
    pub(super) machine: Machine,
    pub(super) rates: Rates,
    pub(super) model: Model,
    pub(super) asked: Asked,
    pub(super) arms: Vec<Arm>,
}

/// The machine, as far as it tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Machine {
    pub(super) os: String,
    pub(super) arch: String,
    pub(super) cpu: Option<String>,
    /// Physical cores, and threads they run at once.
    pub(super) cores: usize,
    pub(super) threads: usize,
    /// Bytes.
    pub(super) ram: Option<u64>,
    /// What this process may use of it, if that is less.
    pub(super) ram_limit: Option<u64>,
    /// The model of the disk that the store lies on.
    pub(super) disk: Option<String>,
}

/// Bytes a second.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rates {
    /// Direct reads from the store's disk.
    pub(super) disk: Option<f64>,
    /// Experts from the hub.
    pub(super) link: Option<f64>,
}

/// The model and its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) revision: String,
    pub(super) core_bytes: u64,
    pub(super) experts: u64,
    pub(super) expert_bytes: u64,
}

/// What every arm was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// The words; `None` where it was asked in ids.
    pub(super) prompt: Option<String>,
    pub(super) prompt_tokens: usize,
    pub(super) prompt_sha256: String,
    /// Tokens of each run, and those at its beginning that are not counted.
    pub(super) tokens: u32,
    pub(super) skip: u32,
    pub(super) rounds: u16,
    pub(super) warm_up: u16,
    pub(super) page_cache_dropped: bool,
    /// Of the ids of a reply, which all arms have given.
    pub(super) reply_tokens: usize,
    pub(super) reply_sha256: String,
}

/// One way to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arm {
    pub(super) name: String,
    pub(super) flags: String,
    pub(super) isa: String,
    pub(super) threads: usize,
    pub(super) memory: Memory,
    /// Bytes of disk for experts; `None` is no limit.
    pub(super) cache: Option<u64>,
    /// `None` if the arm was rejected.
    pub(super) figures: Option<Figures>,
    /// Why it was.
    pub(super) rejected: Option<String>,
}

/// Bytes of memory, as planned and as held.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Memory {
    /// `None` is no limit.
    pub(super) budget: Option<u64>,
    pub(super) mapped: bool,
    pub(super) core: u64,
    /// Of the core, what is read for every token.
    pub(super) core_streamed: u64,
    pub(super) experts: u64,
    /// The most that was resident in a run.
    pub(super) peak: Option<u64>,
}

/// What the counted tokens of all counted runs cost.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figures {
    /// Counted tokens.
    pub(super) tokens: usize,
    /// From the prompt to the first token.
    pub(super) first_token: Spread,
    pub(super) seconds: Seconds,
    pub(super) bytes: Bytes,
    /// `None` where no layer's choice was guessed at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lookahead: Option<Lookahead>,
}

/// What guesses at the next layer's experts were worth.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Lookahead {
    /// Of the experts asked for where there was a guess, the part that it had named.
    pub(super) recall: f64,
    /// Bytes a token read from disk on a guess, and of these those that were then asked for.
    pub(super) read: Spread,
    pub(super) used: Spread,
}

/// Seconds a token.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Seconds {
    pub(super) all: Spread,
    pub(super) compute: Spread,
    pub(super) wait_disk: Spread,
    pub(super) wait_hub: Spread,
}

/// Bytes a token.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Bytes {
    pub(super) experts_memory: Spread,
    pub(super) experts_disk: Spread,
    pub(super) experts_peer: Spread,
    pub(super) experts_hub: Spread,
    pub(super) core_disk: Spread,
    /// What the system says it has read from disk for this process.
    pub(super) system_read: Option<Spread>,
}

/// The middle of many, and how far they lie apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Spread {
    pub(super) median: f64,
    /// A tenth lies below.
    pub(super) p10: f64,
    /// A tenth lies above.
    pub(super) p90: f64,
}

impl Spread {
    /// Of no values, all are 0.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Spread {
            median: at(&values, 0.5),
            p10: at(&values, 0.1),
            p90: at(&values, 0.9),
        }
    }
}

/// The value below which this part of the sorted values lies, between two of them where it must be.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index of a list"
)]
fn at(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let place = part * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

impl Report {
    /// Reads a report that somebody has written.
    pub(super) fn read(file: &Path) -> Result<Report, CliError> {
        let name = file.display().to_string();
        let bytes = std::fs::read(file).map_err(|source| CliError::File {
            path: name.clone(),
            source,
        })?;
        let wrong = |why: String| {
            CliError::Damaged(
            format!("{name} is no report that this version can read: {why}"),
            "reports are what `deltafin bench --out FILE` writes; docs/benchmarks/schema.json says what they hold".to_owned(),
        )
        };
        let report: Report =
            serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        if report.format != FORMAT {
            return Err(wrong(format!("its format is `{}`", report.format)));
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_lies_between_the_values_it_is_of() {
        let spread = Spread::of((0..=10).rev().map(f64::from));
        assert_eq!((spread.p10, spread.median, spread.p90), (1.0, 5.0, 9.0));
        let two = Spread::of([4.0, 2.0]);
        assert_eq!(two.median, 3.0);
        assert_eq!(Spread::of([7.0]).p90, 7.0);
        assert_eq!(Spread::of([]), Spread::default());
    }
}
