//! One run of one arm: opened, measured token by token, and closed as a process of its own would do it.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use super::machine;
use super::report;
use super::report::Figures;
use super::report::Spread;
use crate::cli::args::Bench;
use crate::cli::args::EffortArg;
use crate::cli::args::ModelArgs;
use crate::cli::args::bench::ArmFlags;
use crate::cli::env::Env;
use crate::cli::exit::CliError;
use crate::cli::generate;
use crate::cli::interrupt::Interrupt;
use crate::cli::live::Live;
use crate::cli::screen::Screen;
use crate::cli::setup;
use crate::cli::setup::Remember;
use crate::cli::setup::Setup;
use crate::engine::Engine;
use crate::engine::Event;
use crate::engine::Finish;
use crate::engine::Prompt;
use crate::engine::Request;
use crate::engine::Sampling;
use crate::residency::Counts;
use crate::share;
use crate::terms::TokenId;
use crate::text::Conversation;
use crate::text::Message;
use crate::text::Role;

/// What a model is asked when nobody says anything else.
const PROMPT: &str = "Who are you?";
/// And one that has no tokenizer; modulo its vocabulary.
const IDS: [TokenId; 8] = [7, 20, 33, 46, 59, 72, 85, 98];

/// An arm, ready to run as often as is wanted.
pub(super) struct Ready {
    pub(super) name: String,
    /// As typed.
    pub(super) flags: String,
    pub(super) meant: ArmFlags,
    pub(super) model: ModelArgs,
    pub(super) home: PathBuf,
    /// The demo is served on loopback whatever the environment says.
    pub(super) env: Env,
    /// What the model comes from, where that is served here.
    pub(super) _served: Option<Arc<share::Server>>,
}

/// What a run was.
pub(super) struct Run {
    pub(super) prompt_ids: Vec<TokenId>,
    pub(super) ids: Vec<TokenId>,
    pub(super) isa: &'static str,
    pub(super) threads: usize,
    pub(super) memory: report::Memory,
    pub(super) cache: Option<u64>,
    first_token: Duration,
    /// After the first.
    tokens: Vec<Token>,
    pub(super) interrupted: bool,
}

/// What one token cost.
struct Token {
    time: Duration,
    counts: Counts,
    system_read: Option<u64>,
}

/// What was so when the last token came.
struct Watch<'a> {
    engine: &'a Engine,
    began: Instant,
    at: Instant,
    counts: Counts,
    system_read: Option<u64>,
    first_token: Option<Duration>,
    tokens: Vec<Token>,
}

impl Watch<'_> {
    fn begin(engine: &Engine) -> Watch<'_> {
        let now = Instant::now();
        Watch {
            engine,
            began: now,
            at: now,
            counts: engine.counts(),
            system_read: machine::system_read(),
            first_token: None,
            tokens: Vec::new(),
        }
    }

    /// A token is here.
    fn token(&mut self) {
        let (now, counts) = (Instant::now(), self.engine.counts());
        let system_read = machine::system_read();
        if self.first_token.is_none() {
            self.first_token = Some(now - self.began);
        } else {
            let both = system_read.zip(self.system_read);
            self.tokens.push(Token {
                time: now - self.at,
                counts: counts.since(&self.counts),
                system_read: both.map(|(now, before)| now.saturating_sub(before)),
            });
        }
        (self.counts, self.system_read) = (counts, system_read);
        // Looking took time too, which is no token's.
        self.at = Instant::now();
    }
}

impl Ready {
    /// Opens the store and the model, leaving no trace in its settings.
    pub(super) fn open(
        &self,
        interrupt: &Interrupt,
        screen: &Arc<Screen>,
    ) -> Result<Setup, CliError> {
        let (env, stop) = (&self.env, interrupt.flag());
        setup::open_for(env, &self.model, true, &stop, screen, Remember::Nothing)
    }

    pub(super) fn run(
        &self,
        args: &Bench,
        interrupt: &Interrupt,
        screen: &Arc<Screen>,
    ) -> Result<Run, CliError> {
        let setup = self.open(interrupt, screen)?;
        setup.opened.install_core(screen.as_ref())?;
        if args.drop_page_cache {
            machine::drop_page_cache(&self.home);
        }
        let peak = machine::forget_peak();
        let engine = setup::engine(setup.opened, &self.meant.run, screen)?;
        let request = request(args, &self.meant, &engine)?;
        interrupt.stops(engine.stopper());
        let live = Live::begin(screen, &engine, setup.hub.as_ref());
        let mut watch = Watch::begin(&engine);
        let outcome = engine.generate(&request, &mut |event| {
            if let Event::Token { .. } = event {
                watch.token();
            }
            match interrupt.asked() || interrupt.flag().load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let (first_token, tokens) = (watch.first_token, std::mem::take(&mut watch.tokens));
        drop(live);
        engine.flush();
        let generation = outcome?;
        let plan = engine.memory();
        Ok(Run {
            prompt_ids: generation.prompt_ids,
            ids: generation.token_ids,
            isa: engine.kernel().isa().name(),
            threads: engine.kernel().threads(),
            memory: report::Memory {
                budget: plan.budget,
                mapped: plan.mapped,
                core: plan.pinned,
                core_streamed: plan.streamed,
                experts: plan.expert_memory,
                peak: machine::peak().filter(|_| peak),
            },
            cache: match engine.opened().store.store().budget() {
                crate::store::Budget::Limit(bytes) => Some(bytes),
                crate::store::Budget::Unlimited => None,
            },
            first_token: first_token.unwrap_or_default(),
            tokens,
            interrupted: generation.finish == Finish::Interrupted,
        })
    }
}

fn request(args: &Bench, flags: &ArmFlags, engine: &Engine) -> Result<Request, CliError> {
    let prompt = match (&args.prompt, args.ids.is_empty()) {
        (Some(text), _) => chat(args, text),
        (None, false) => Prompt::Ids(args.ids.clone()),
        (None, true) if engine.tokenizer().is_ok() => chat(args, PROMPT),
        (None, true) => {
            let vocab = u32::try_from(engine.spec().vocab).unwrap_or(u32::MAX);
            Prompt::Ids(IDS.iter().map(|id| id % vocab.max(1)).collect())
        }
    };
    let sampling = Sampling {
        temperature: flags.temperature.unwrap_or(0.0),
        top_p: flags.top_p.unwrap_or(1.0),
        seed: flags.seed.unwrap_or(1),
    };
    let tokens = usize::try_from(args.tokens).unwrap_or(usize::MAX);
    Ok(Request::new(prompt, tokens, sampling))
}

fn chat(args: &Bench, text: &str) -> Prompt {
    // The small model was taught with the vendor's default.
    let effort = match args.model.as_str() {
        "demo" => EffortArg::Max,
        _ => EffortArg::Low,
    };
    Prompt::Chat(Conversation {
        messages: vec![Message::text(Role::User, text.to_owned())],
        effort: generate::effort(effort),
        ..Conversation::default()
    })
}

/// The words that were asked; `None` where it were ids.
pub(super) fn words(args: &Bench, engine: &Engine) -> Option<String> {
    match (&args.prompt, args.ids.is_empty()) {
        (Some(text), _) => Some(text.clone()),
        (None, true) if engine.tokenizer().is_ok() => Some(PROMPT.to_owned()),
        _ => None,
    }
}

impl Run {
    /// Tokens that count, when the first `skip` after the prompt's own do not.
    fn counted(&self, skip: usize) -> &[Token] {
        self.tokens.get(skip..).unwrap_or_default()
    }

    /// Seconds of the middle token.
    pub(super) fn median(&self, skip: usize) -> f64 {
        let times = self.counted(skip).iter().map(|t| t.time.as_secs_f64());
        Spread::of(times).median
    }
}

/// All counted runs of an arm in figures; `None` if no token counts.
#[expect(clippy::cast_precision_loss, reason = "bytes for people")]
pub(super) fn figures(runs: &[Run], skip: usize) -> Option<Figures> {
    let tokens: Vec<&Token> = runs.iter().flat_map(|run| run.counted(skip)).collect();
    let spread = |of: &dyn Fn(&Token) -> f64| Spread::of(tokens.iter().map(|token| of(token)));
    let bytes = |of: &dyn Fn(&Counts) -> u64| spread(&|token| of(&token.counts) as f64);
    let waits = |token: &Token| token.counts.wait_disk + token.counts.wait_hub;
    let sum = |of: &dyn Fn(&Counts) -> u64| tokens.iter().map(|t| of(&t.counts)).sum::<u64>();
    let (guessed, foreseen) = (sum(&|c| c.guessed), sum(&|c| c.foreseen));
    (!tokens.is_empty()).then(|| Figures {
        lookahead: (guessed > 0).then(|| report::Lookahead {
            recall: foreseen as f64 / guessed as f64,
            read: bytes(&|counts| counts.read_ahead),
            used: bytes(&|counts| counts.used_ahead),
        }),
        tokens: tokens.len(),
        first_token: Spread::of(runs.iter().map(|run| run.first_token.as_secs_f64())),
        seconds: report::Seconds {
            all: spread(&|token| token.time.as_secs_f64()),
            compute: spread(&|token| token.time.saturating_sub(waits(token)).as_secs_f64()),
            wait_disk: spread(&|token| token.counts.wait_disk.as_secs_f64()),
            wait_hub: spread(&|token| token.counts.wait_hub.as_secs_f64()),
        },
        bytes: report::Bytes {
            experts_memory: bytes(&|counts| counts.bytes.memory),
            experts_disk: bytes(&|counts| counts.bytes.disk),
            experts_peer: bytes(&|counts| counts.bytes.peer),
            experts_hub: bytes(&|counts| counts.bytes.hub),
            core_disk: bytes(&|counts| counts.core_disk),
            system_read: tokens
                .iter()
                .all(|token| token.system_read.is_some())
                .then(|| spread(&|token| token.system_read.unwrap_or(0) as f64)),
        },
    })
}
