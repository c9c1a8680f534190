//! What was typed: flags and their help, checked for form, with no side effects.

use std::path::PathBuf;

use clap::Args;
use clap::Parser;
use clap::Subcommand;

use crate::share::Link;
use crate::store::Budget;
use crate::terms::Bytes;
use crate::terms::TokenId;

/// Runs the full Kimi K3 on machines far too small for it, streaming its experts from a hub.
#[derive(Debug, Parser)]
#[command(
    name = "deltafin",
    version,
    about,
    after_help = "Exit codes: 0 done, 2 usage, 3 not found or not allowed \
or offline and missing, 4 network, 5 disk, 6 damaged or unsupported data, 7 out of memory, 130 interrupted."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the whole thing at work: stream the embedded small model from a loopback hub
    Demo(Demo),
    /// Generate, fetching the core once and experts on demand
    Stream(Generate),
    /// Generate from what the store holds, with no network at all
    Run(Generate),
    /// Install the whole model: the core, then every expert; resumable
    Fetch(Fetch),
    /// Serve the OpenAI-compatible API; streams what is missing unless --offline
    Serve(Serve),
    /// Serve a model's bytes to other machines, in the hub's own URL forms
    Share(Share),
    /// Look after the store
    #[command(subcommand)]
    Cache(Cache),
}

/// Which model, from where, into which store.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// Model repository, ORG/NAME; `demo` is the embedded small model [default: moonshotai/Kimi-K3, or
    /// `local/FOLDER` where --hub is a model's own folder]
    #[arg(long, help_heading = "Model")]
    pub model: Option<String>,
    /// Branch, tag or commit; without it a commit already in the store is kept
    #[arg(long, help_heading = "Model")]
    pub revision: Option<String>,
    /// Move to the newest commit of the branch
    #[arg(long, help_heading = "Model")]
    pub update: bool,
    /// A hub's URL or a local folder; repeat to name several, tried in order before `HF_ENDPOINT`
    #[arg(long, help_heading = "Model")]
    pub hub: Vec<String>,
    /// Use no network at all
    #[arg(long, help_heading = "Model")]
    pub offline: bool,
    /// At most this rate from the network, such as 40MB/s
    #[arg(long, value_parser = rate, help_heading = "Model")]
    pub rate: Option<u64>,
    /// Stop after this many bytes from the network, such as 50GB; what was fetched is kept
    #[arg(long, help_heading = "Model")]
    pub max_bytes: Option<Bytes>,
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Where things are kept, and how much of them.
#[derive(Args, Clone, Debug)]
pub(crate) struct StoreArgs {
    /// The store's folder [default: `DELTAFIN_HOME`, else the platform's data folder]
    #[arg(long, help_heading = "Store")]
    pub home: Option<PathBuf>,
    /// Disk for experts: a size such as 200GB, or `unlimited` [default: as last set, else the
    /// smaller of 200GB and free space less the reserve]
    #[arg(long, value_parser = budget, help_heading = "Store")]
    pub cache: Option<Budget>,
    /// Free disk that experts never touch [default: the larger of 10GB and 5 %]
    #[arg(long, help_heading = "Store")]
    pub reserve: Option<Bytes>,
}

/// How the machine is used, and how things are said.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Threads for arithmetic [default: physical cores allowed to this process]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Machine")]
    pub threads: Option<u16>,
    /// Force an instruction set: scalar, avx2, avx512 or neon
    #[arg(long, help_heading = "Machine")]
    pub isa: Option<String>,
    /// One JSON object on stdout at the end, and no other text there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Say more on stderr
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,
}

/// How text is made.
#[derive(Args, Clone, Debug)]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate
    #[arg(long, default_value_t = 1024, help_heading = "Generation")]
    pub max_tokens: usize,
    /// 0 is greedy; 1 samples the model's own distribution
    #[arg(long, default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true, help_heading = "Generation")]
    pub temperature: f32,
    /// Sample from the likeliest tokens that together reach this probability
    #[arg(long, default_value_t = 1.0, value_parser = probability, help_heading = "Generation")]
    pub top_p: f32,
    /// Seed of the draws; the seed used is always reported [default: random]
    #[arg(long, help_heading = "Generation")]
    pub seed: Option<u64>,
    /// Stop before this text; repeatable
    #[arg(long, help_heading = "Generation")]
    pub stop: Vec<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, help_heading = "Generation")]
    pub raw: bool,
    /// System message for the chat
    #[arg(long, conflicts_with_all = ["raw", "ids"], help_heading = "Generation")]
    pub system: Option<String>,
    /// How much the model thinks first. The vendor's default is `max`, which at a minute a token means
    /// days [default: low; for the demo, whose model was taught with it, max]
    #[arg(long, value_enum, help_heading = "Generation")]
    pub reasoning_effort: Option<EffortArg>,
    /// The prompt as token ids, such as 5,9,12
    #[arg(long, value_delimiter = ',', help_heading = "Generation")]
    pub ids: Vec<TokenId>,
    /// Write every distribution and routing to this safetensors file
    #[arg(long, value_name = "FILE", help_heading = "Generation")]
    pub logits: Option<PathBuf>,
}

/// `none` turns thinking off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum EffortArg {
    None,
    Low,
    High,
    Max,
}

/// `stream` and `run`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Generate {
    /// What to say to the model; `-` reads standard input
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `demo`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Demo {
    /// What to say to the small model
    pub prompt: Option<String>,
    /// Disk for experts; small by default, so that evictions happen
    #[arg(long, value_parser = budget, help_heading = "Store")]
    pub cache: Option<Budget>,
    /// Keep the demo's store here instead of a temporary folder
    #[arg(long, help_heading = "Store")]
    pub home: Option<PathBuf>,
    /// Shape the loopback link, such as 50mbit,30ms, to feel what a slow link is like
    #[arg(long, help_heading = "Model")]
    pub link: Option<Link>,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `fetch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Fetch {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Fetch the core alone
    #[arg(long)]
    pub core: bool,
    /// Fetch the experts of these layers alone, such as 1-20 (counted from 0)
    #[arg(long, value_parser = layers)]
    pub layers: Option<(u16, u16)>,
    /// Say what would be fetched, and fetch nothing but metadata
    #[arg(long)]
    pub dry_run: bool,
    /// One JSON object on stdout at the end, and no other text there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Say more on stderr
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,
}

/// `serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub run: RunArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000, help_heading = "Server")]
    pub port: u16,
    /// Key that clients must send as a bearer token; needed beyond loopback [env: `DELTAFIN_API_KEY`]
    #[arg(long, help_heading = "Server")]
    pub api_key: Option<String>,
}

/// `share`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Share {
    /// A folder in Hugging Face layout to share instead of the store
    pub folder: Option<PathBuf>,
    /// Model of the store, ORG/NAME, or the name the folder is shared under; `demo` is the embedded
    /// small model [default: moonshotai/Kimi-K3, or `local/FOLDER`]
    #[arg(long)]
    pub model: Option<String>,
    #[command(flatten)]
    pub store: StoreArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8090, help_heading = "Server")]
    pub port: u16,
    /// Secret that clients must name, as in --hub http://:SECRET@host:8090; needed beyond loopback
    #[arg(long, help_heading = "Server")]
    pub token: Option<String>,
}

/// `cache`.
#[derive(Debug, Subcommand)]
pub(crate) enum Cache {
    /// What the store holds
    Stats(CacheStats),
    /// Compare what is stored with its digests; exit code 6 if anything is damaged
    Verify(CacheVerify),
    /// Evict the least recently used experts until a size is left
    Trim(CacheTrim),
}

/// `cache stats`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheStats {
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `cache verify`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheVerify {
    /// Read only every n-th file
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub every: u32,
    /// Remove what is damaged, so that it is fetched again when it is needed
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `cache trim`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheTrim {
    /// Bytes of experts to leave, such as 100GB
    pub size: Bytes,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

fn budget(text: &str) -> Result<Budget, String> {
    if text == "unlimited" {
        return Ok(Budget::Unlimited);
    }
    text.parse::<Bytes>()
        .map(|b| Budget::Limit(b.0))
        .map_err(|e| format!("{e}, or `unlimited`"))
}

fn rate(text: &str) -> Result<u64, String> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    match size.parse::<Bytes>() {
        Ok(Bytes(0)) => Err("a rate of zero would never finish".to_owned()),
        Ok(Bytes(rate)) => Ok(rate),
        Err(_) => Err(format!("`{text}` is not a rate such as 40MB/s")),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(t) if (0.0..=100.0).contains(&t) => Ok(t),
        _ => Err("a temperature lies between 0 and 100".to_owned()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a probability lies above 0 and up to 1".to_owned()),
    }
}

fn layers(text: &str) -> Result<(u16, u16), String> {
    let wrong = || format!("`{text}` is not a range of layers such as 1-20");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first: u16 = first.trim().parse().map_err(|_| wrong())?;
    let last: u16 = last.trim().parse().map_err(|_| wrong())?;
    if first <= last {
        Ok((first, last))
    } else {
        Err(wrong())
    }
}
