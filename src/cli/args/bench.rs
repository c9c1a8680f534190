//! `bench`: what is measured, and how the arms of a comparison differ.

use std::path::PathBuf;

use clap::Args;
use clap::CommandFactory;
use clap::FromArgMatches;
use clap::Parser;
use clap::Subcommand;
use clap::builder::OsStr;
use clap::builder::Resettable;

use super::PolicyArg;
use super::RunArgs;
use super::StoreArgs;
use super::values::budget;
use super::values::probability;
use super::values::rate;
use super::values::temperature;
use crate::share::Link;
use crate::store::Budget;
use crate::terms::Bytes;
use crate::terms::TokenId;

/// `bench`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub then: Option<BenchThen>,
    /// Another way to run, as "NAME: FLAGS", such as "paged: --core mmap"; repeat to compare several,
    /// run by turns. FLAGS are those under Machine and Arm
    #[arg(long = "arm", value_name = "ARM", value_parser = arm)]
    pub arms: Vec<Arm>,
    /// Runs of each arm
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: u16,
    /// Runs of each arm before those, not counted
    #[arg(long, default_value_t = 1)]
    pub warm_up: u16,
    /// Tokens of a run
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Tokens at the beginning of each run that are not counted: the prompt's own, and so many more
    #[arg(long, default_value_t = 2)]
    pub skip: u32,
    /// What to say to the model [default: "Who are you?"; some ids for a model without a tokenizer]
    #[arg(long, conflicts_with = "ids")]
    pub prompt: Option<String>,
    /// The prompt as token ids, such as 5,9,12
    #[arg(long, value_delimiter = ',')]
    pub ids: Vec<TokenId>,
    /// Let go of what the page cache holds of the store before each run
    #[arg(long)]
    pub drop_page_cache: bool,
    /// Measure the disk alone
    #[arg(long, conflicts_with_all = ["arms", "drop_page_cache"])]
    pub disk: bool,
    /// Measure the link alone: experts are fetched for two seconds, and not kept
    #[arg(long, conflicts_with_all = ["arms", "drop_page_cache"])]
    pub link: bool,
    /// Write the report to FILE.json and FILE.md too
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// A sentence about the machine for the report, such as "laptop of 2019, on battery"
    #[arg(long)]
    pub note: Option<String>,
    /// A model's name, ORG/NAME, or its folder; `demo` is the embedded small model
    #[arg(long, default_value = "demo", help_heading = "Model")]
    pub model: String,
    /// Branch, tag or commit; without it a commit already in the store is kept
    #[arg(long, help_heading = "Model")]
    pub revision: Option<String>,
    /// A hub's URL or a local folder; repeatable
    #[arg(long, help_heading = "Model")]
    pub hub: Vec<String>,
    /// Use no network at all
    #[arg(long, help_heading = "Model")]
    pub offline: bool,
    /// Stop after this many bytes from the network in one run, such as 50GB
    #[arg(long, help_heading = "Model")]
    pub max_bytes: Option<Bytes>,
    #[command(flatten)]
    pub place: BenchStore,
    #[command(flatten)]
    pub flags: ArmFlags,
}

/// Where things are kept while they are measured.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchStore {
    /// The store's folder [default: for the demo and for a model's folder a temporary one, else as for `stream`]
    #[arg(long, help_heading = "Store")]
    pub home: Option<PathBuf>,
    /// Free disk that experts never touch
    #[arg(long, help_heading = "Store")]
    pub reserve: Option<Bytes>,
}

/// What may differ from arm to arm.
#[derive(Args, Clone, Debug)]
pub(crate) struct ArmFlags {
    /// Disk for experts; never less than what a store already holds
    #[arg(long, value_parser = budget, help_heading = "Arm")]
    pub cache: Option<Budget>,
    /// Which expert goes when the cache is full; what was used before the measurement does not count [default: lru]
    #[arg(long, value_enum, help_heading = "Arm")]
    pub policy: Option<PolicyArg>,
    /// At most this rate from the network, such as 40MB/s
    #[arg(long, value_parser = rate, help_heading = "Arm")]
    pub rate: Option<u64>,
    /// Serve the demo, or a model's folder, over a link such as 200mbit,40ms
    #[arg(long, value_name = "LINK", help_heading = "Arm")]
    pub shape: Option<Link>,
    /// 0 is greedy; 1 samples the model's own distribution
    #[arg(long, value_parser = temperature, help_heading = "Arm")]
    pub temperature: Option<f32>,
    /// Sample from the likeliest tokens that together reach this probability
    #[arg(long, value_parser = probability, help_heading = "Arm")]
    pub top_p: Option<f32>,
    /// Seed of the draws [default: 1]
    #[arg(long, help_heading = "Arm")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// One arm as it was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arm {
    /// What it is called.
    pub name: String,
    /// Its flags.
    pub flags: String,
}

#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct ArmLine {
    #[command(flatten)]
    flags: ArmFlags,
}

impl Arm {
    /// The flags that every arm has, changed by this one's own.
    pub(crate) fn over(&self, common: &ArmFlags) -> Result<ArmFlags, String> {
        // Defaults would otherwise undo what was said for all.
        let line = ArmLine::command().mut_args(|arg| arg.default_value(Resettable::<OsStr>::Reset));
        let matches = line
            .try_get_matches_from(self.flags.split_whitespace())
            .map_err(|error| format!("arm `{}`: {}", self.name, reason(&error)))?;
        let mut flags = common.clone();
        flags
            .update_from_arg_matches(&matches)
            .map_err(|error| format!("arm `{}`: {}", self.name, reason(&error)))?;
        (flags.run.json, flags.run.verbose) = (common.run.json, common.run.verbose);
        Ok(flags)
    }
}

/// What clap says, without its usage.
fn reason(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    first.trim_start_matches("error: ").to_owned()
}

fn arm(text: &str) -> Result<Arm, String> {
    let (name, flags) = text.split_once(':').unwrap_or((text, ""));
    let (name, flags) = (name.trim(), flags.trim());
    let bad = |c: char| c.is_control() || c == '|';
    if name.is_empty() || name.starts_with('-') || text.contains(bad) {
        return Err(format!(
            "`{text}` is not an arm such as \"paged: --core mmap\""
        ));
    }
    Ok(Arm {
        name: name.to_owned(),
        flags: flags.split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

impl Bench {
    /// The store as other commands have it.
    pub(crate) fn store(&self, home: Option<PathBuf>, cache: Option<Budget>) -> StoreArgs {
        StoreArgs {
            home,
            cache,
            reserve: self.place.reserve,
            policy: None,
        }
    }
}

/// What is done with reports.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchThen {
    /// Set two reports side by side
    Compare(BenchCompare),
    /// Make a table of the reports in a folder
    Table(BenchTable),
}

/// `bench compare`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchCompare {
    /// A report
    pub a: PathBuf,
    /// Another
    pub b: PathBuf,
    /// Compare even what was asked of different models, or in different words
    #[arg(long)]
    pub anyway: bool,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `bench table`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchTable {
    /// The folder with the reports
    #[arg(default_value = "docs/benchmarks")]
    pub folder: PathBuf,
    /// Put the table between `<!-- bench:begin -->` and `<!-- bench:end -->` of this file instead of on stdout
    #[arg(long, value_name = "FILE")]
    pub into: Option<PathBuf>,
}
