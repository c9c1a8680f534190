//! What was typed: flags and their help, checked for form, with no side effects.

pub(crate) mod bench;
mod cache;
pub(crate) mod doctor;
pub(crate) mod simulate;
mod store;
mod values;
pub(crate) mod warm;

use std::path::PathBuf;

use clap::Args;
use clap::Parser;
use clap::Subcommand;

pub(crate) use self::bench::Bench;
pub(crate) use self::cache::CacheImport;
pub(crate) use self::cache::CacheManifest;
pub(crate) use self::cache::ScrubArgs;
pub(crate) use self::doctor::DoctorArgs;
pub(crate) use self::simulate::CacheSimulate;
pub(crate) use self::store::PolicyArg;
pub(crate) use self::store::StoreArgs;
use self::values::budget;
use self::values::layers;
use self::values::origin;
use self::values::probability;
use self::values::ram;
use self::values::rate;
use self::values::sequences;
use self::values::span;
use self::values::temperature;
pub(crate) use self::warm::CacheWarm;
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
    /// Answer a file of requests in OpenAI's batch format; run again, it goes on
    Batch(Batch),
    /// Look after conversations that were kept with --session
    #[command(subcommand)]
    Sessions(Sessions),
    /// Make and share the state after a beginning that many prompts have
    #[command(subcommand)]
    Prefix(Prefix),
    /// Serve the OpenAI-compatible API; streams what is missing unless --offline
    Serve(Serve),
    /// Serve a model's bytes to other machines, in the hub's own URL forms
    Share(Share),
    /// Say what a model will need: memory, bytes and seconds a token; fetches headers at most
    Plan(PlanArgs),
    /// Measure what a token costs here, in a report fit to share
    Bench(Box<Bench>),
    /// Look after the store
    #[command(subcommand)]
    Cache(Cache),
    /// Say what is here, what is wrong with it, and what to do; exit code 1 if there is something to do
    Doctor(DoctorArgs),
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

/// How the machine is used, and how things are said.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Threads for arithmetic [default: physical cores allowed to this process]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Machine")]
    pub threads: Option<u16>,
    /// Memory to use: a size such as 64GB, or `auto`, what this machine and its control groups leave
    #[arg(long, default_value = "auto", value_parser = ram, help_heading = "Machine")]
    pub ram: Ram,
    /// How the core is held, whatever the memory
    #[arg(long, value_enum, hide = true)]
    pub core: Option<CoreArg>,
    /// Read experts that the next layer will probably want while the disk is idle, where not all fits in memory;
    /// `auto`: as long as that is measured to be faster
    #[arg(long, value_enum, default_value = "off", help_heading = "Machine")]
    pub lookahead: LookaheadArg,
    /// Force an instruction set: scalar, avx2, avx512 or neon
    #[arg(long, help_heading = "Machine")]
    pub isa: Option<String>,
    /// Add which experts each pass over the weights uses to this file, for `cache simulate`
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    pub trace: Option<PathBuf>,
    /// One JSON object on stdout at the end, and no other text there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Say more on stderr
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,
}

/// Memory to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ram {
    Auto,
    Size(u64),
}

/// To compare one way of holding the core with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CoreArg {
    Mmap,
    Read,
}

/// Whether to read ahead on a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LookaheadArg {
    On,
    Off,
    Auto,
    /// To prove that a guess harms nothing.
    #[value(hide = true)]
    Wrong,
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
    /// Keep the conversation under this name, and go on with the one that is kept: after any stop,
    /// with its text and its state
    #[arg(long, value_name = "NAME", conflicts_with_all = ["raw", "ids", "logits"])]
    pub session: Option<String>,
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
    /// Which expert goes when the cache is full [default: lru]
    #[arg(long, value_enum, help_heading = "Store")]
    pub policy: Option<PolicyArg>,
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
    /// Fetch the experts first that this trace used most, as --trace of a generating command has written it
    #[arg(long, value_name = "FILE", conflicts_with = "core")]
    pub trace: Option<PathBuf>,
    /// Fetch the experts first that were used most here, lately
    #[arg(long, conflicts_with_all = ["core", "trace"])]
    pub heat: bool,
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

/// `batch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Batch {
    /// Requests, one a line: custom_id, method, url (/v1/chat/completions or /v1/completions), body
    pub input: PathBuf,
    /// Replies, one a line; what an earlier run has answered is kept
    pub output: PathBuf,
    /// Requests that got no answer, and why [default: OUTPUT with `.errors` before its ending]
    #[arg(long)]
    pub errors: Option<PathBuf>,
    /// Requests in flight: they share each pass over the weights; `auto` takes what fits in memory
    #[arg(long, default_value = "auto", value_parser = sequences)]
    pub sequences: Sequences,
    /// Hold a request's pass over the weights back for at most so long, such as 10m, while it would
    /// be alone: with company each costs less
    #[arg(long, value_parser = span)]
    pub patience: Option<std::time::Duration>,
    /// Write each request's state down at least this often, such as 5m [default: by tokens, time
    /// and what the disk can bear]
    #[arg(long, value_parser = span)]
    pub save_every: Option<std::time::Duration>,
    /// Add the ids of each reply's tokens to its usage
    #[arg(long)]
    pub token_ids: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sequences {
    /// As many as fit.
    Auto,
    /// So many.
    Some(u16),
}

/// `sessions`.
#[derive(Debug, Subcommand)]
pub(crate) enum Sessions {
    /// The conversations that are kept
    List(SessionsList),
    /// One conversation
    Show(SessionsNamed),
    /// Remove one for good
    Rm(SessionsNamed),
    /// One as a body for /v1/chat/completions, on standard output
    Export(SessionsNamed),
}

/// `sessions list`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SessionsList {
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `sessions show`, `rm`, `export`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SessionsNamed {
    /// The session's name
    pub name: String,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `prefix`.
#[derive(Debug, Subcommand)]
pub(crate) enum Prefix {
    /// Read a system message, tools and an effort once; every prompt that begins with them is then
    /// read from there
    Make(Box<PrefixMake>),
    /// The prefixes of the store
    List(SessionsList),
    /// Copy one out, for another machine with the same instruction set
    Export(PrefixExport),
    /// Copy one in, verified
    Import(PrefixImport),
    /// Remove one
    Rm(SessionsNamed),
}

/// `prefix make`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PrefixMake {
    /// A name for it
    pub name: String,
    /// System message
    #[arg(long)]
    pub system: Option<String>,
    /// A JSON file with the tools' declarations, as in OpenAI's `tools`
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// How much the model thinks first, in prompts that are to use this [default: low]
    #[arg(long, value_enum)]
    pub reasoning_effort: Option<EffortArg>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub run: RunArgs,
}

/// `prefix export`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PrefixExport {
    /// The prefix's name
    pub name: String,
    /// Where to copy it
    pub file: PathBuf,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `prefix import`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PrefixImport {
    /// What `prefix export` wrote
    pub file: PathBuf,
    /// A name for it here [default: the file's]
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
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
    /// A web origin, such as <http://localhost:3000>, whose pages may use this server; repeatable
    #[arg(long, value_name = "ORIGIN", value_parser = origin, help_heading = "Server")]
    pub allow_origin: Vec<String>,
    /// Requests served at once: they share the passes over the model's weights
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Server")]
    pub parallel: u16,
    /// Requests that wait while others are served; more are told to come back later
    #[arg(long, default_value_t = 32, help_heading = "Server")]
    pub queue: u16,
    /// States of earlier conversations kept on disk, so that a next turn computes its new tokens
    /// alone also after a restart; 0 keeps none
    #[arg(long, default_value = "8GB", help_heading = "Server")]
    pub states: Bytes,
    /// Bytes of one request, at most
    #[arg(long, default_value = "8MB", help_heading = "Server")]
    pub max_body: Bytes,
    /// Connections at once [default: 4096, or what the system's limit on open files leaves]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Server")]
    pub max_connections: Option<u16>,
    #[command(flatten)]
    pub scrub: ScrubArgs,
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
    /// Fetch what is missing from a hub, once, keep it within the budget, and pass it on
    #[arg(long, conflicts_with = "folder", help_heading = "Through")]
    pub through: bool,
    /// With --through: a hub's URL or a local folder; repeat to name several
    #[arg(long, requires = "through", help_heading = "Through")]
    pub hub: Vec<String>,
    /// With --through: at most this rate from the network, such as 40MB/s
    #[arg(long, value_parser = rate, requires = "through", help_heading = "Through")]
    pub rate: Option<u64>,
    /// With --through: fetch nothing more after this many bytes, such as 50GB; what is here stays
    /// shared
    #[arg(long, requires = "through", help_heading = "Through")]
    pub max_bytes: Option<Bytes>,
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
    #[command(flatten)]
    pub scrub: ScrubArgs,
}

/// `plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Memory to plan for: a size such as 64GB, or `auto`, what this machine and its control groups leave
    #[arg(long, default_value = "auto", value_parser = ram, help_heading = "Machine")]
    pub ram: Ram,
    /// Threads for arithmetic [default: physical cores allowed to this process]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Machine")]
    pub threads: Option<u16>,
    /// The disk's rate, such as 5.5GB/s [default: measured]
    #[arg(long, value_parser = rate, help_heading = "Machine")]
    pub disk: Option<u64>,
    /// The link's rate, such as 1gbit
    #[arg(long, help_heading = "Machine")]
    pub link: Option<Link>,
    /// Length of the prompt
    #[arg(long, default_value_t = 256, help_heading = "Use")]
    pub prompt_tokens: usize,
    /// Tokens of a sequence that memory is planned for
    #[arg(long, default_value_t = 8192, help_heading = "Use")]
    pub context: usize,
    /// Sequences at once
    #[arg(long, default_value_t = 1, help_heading = "Use")]
    pub sequences: usize,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `cache`.
#[derive(Debug, Subcommand)]
pub(crate) enum Cache {
    /// What the store holds
    Stats(CacheStats),
    /// Compare what is stored with its digests; exit code 6 if anything is damaged
    Verify(CacheVerify),
    /// Evict experts, in the policy's order, until a size is left
    Trim(CacheTrim),
    /// Take over what another program has downloaded; resumable, with no network
    Import(CacheImport),
    /// Write, or hold the store against, a list of what every expert should be
    Manifest(CacheManifest),
    /// Say what caches of other sizes and policies would have hit, from what --trace has written
    Simulate(CacheSimulate),
    /// Fetch the experts that were used most, up to the cache's budget and --max-bytes; resumable
    Warm(Box<CacheWarm>),
}

/// `cache stats`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheStats {
    /// One line a layer too
    #[arg(long)]
    pub layers: bool,
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
