//! An engine over a folder, and generations written down to the bit.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use deltafin::engine::Engine;
use deltafin::engine::EngineOptions;
use deltafin::engine::Event;
use deltafin::engine::Generation;
use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::Sampling;
use deltafin::engine::Shaping;
use deltafin::engine::Start;
use deltafin::hub::Hub;
use deltafin::hub::HubOptions;
use deltafin::hub::SourceAddress;
use deltafin::kernel::Isa;
use deltafin::model::Sequence;
use deltafin::residency::Demand;
use deltafin::residency::InstallObserver;
use deltafin::residency::OpenRequest;
use deltafin::residency::Opened;
use deltafin::store::Budget;
use deltafin::store::Policy;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::terms::TokenId;
use deltafin::text::Conversation;
use deltafin::text::Effort;
use deltafin::text::Message;
use deltafin::text::Role;

/// Sees nothing.
struct Blind;

impl InstallObserver for Blind {
    fn stage(&self, _: &str, _: u64, _: u64) {}
    fn moved(&self, _: u64) {}
    fn done(&self) {}
    fn notice(&self, _: &str) {}
}

/// An engine, and the home it lives in.
pub(crate) struct Kit {
    pub(crate) engine: Engine,
    pub(crate) home: tempfile::TempDir,
}

/// The trained checkpoint, streamed from its folder into an unlimited cache.
pub(crate) fn trained() -> Kit {
    open("austen-k3/model", Budget::Unlimited, 2)
}

/// A fixture as a model, with so much cache and so many threads.
pub(crate) fn open(fixture: &str, budget: Budget, threads: usize) -> Kit {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(fixture);
    from(SourceAddress::Folder(folder), budget, threads)
}

pub(crate) fn from(source: SourceAddress, budget: Budget, threads: usize) -> Kit {
    let home = tempfile::tempdir().unwrap();
    at(home, Some(source), budget, threads)
}

/// In a home that may hold something already; without a source, offline.
pub(crate) fn at(
    home: tempfile::TempDir,
    source: Option<SourceAddress>,
    budget: Budget,
    threads: usize,
) -> Kit {
    planned(home, source, budget, threads, Demand::default())
}

/// With so much memory.
pub(crate) fn planned(
    home: tempfile::TempDir,
    source: Option<SourceAddress>,
    budget: Budget,
    threads: usize,
    memory: Demand,
) -> Kit {
    governed(home, source, budget, Policy::Lru, threads, memory)
}

/// Where experts go by such a policy.
pub(crate) fn governed(
    home: tempfile::TempDir,
    source: Option<SourceAddress>,
    budget: Budget,
    policy: Policy,
    threads: usize,
    memory: Demand,
) -> Kit {
    let store = Store::open(StoreOptions {
        home: home.path().to_owned(),
        budget,
        reserve: 0,
        policy,
        keep_heat: true,
    });
    let hub = source.map(|source| {
        let options = HubOptions {
            sources: vec![source],
            ..HubOptions::default()
        };
        Arc::new(Hub::open(options).unwrap())
    });
    let request = OpenRequest {
        repo: "deltafin/austen-k3".parse().unwrap(),
        revision: None,
        update: hub.is_some(),
    };
    let opened = Opened::open(&store.unwrap(), hub, &request, Arc::default(), &Blind).unwrap();
    opened.install_core(&Blind).unwrap();
    let isa = Isa::best();
    Kit {
        engine: Engine::new(
            opened,
            EngineOptions {
                isa,
                threads,
                memory,
            },
        )
        .unwrap(),
        home,
    }
}

/// The random checkpoint, streamed from its folder.
pub(crate) fn tiny(budget: Budget) -> Kit {
    open("tiny-k3", budget, 2)
}

/// `len` token ids that nobody would write.
pub(crate) fn ids(seed: u32, len: usize) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % 150
    };
    (0..len).map(|_| next()).collect()
}

/// The request, without an end that the model chooses.
pub(crate) fn endless(engine: &Engine, request: Request) -> Request {
    let bias = engine.stop_ids().iter().map(|&id| (id, -1e9)).collect();
    Request {
        shaping: Shaping {
            logit_bias: bias,
            ..request.shaping
        },
        ..request
    }
}

pub(crate) fn greedy() -> Sampling {
    Sampling {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    }
}

pub(crate) fn sampled(seed: u64) -> Sampling {
    Sampling {
        temperature: 1.0,
        top_p: 0.95,
        seed,
    }
}

pub(crate) fn chat(text: &str) -> Prompt {
    Prompt::Chat(Conversation {
        messages: vec![Message::text(Role::User, text)],
        effort: Effort::Max,
        ..Conversation::default()
    })
}

/// Everything a generation told and gave.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) tokens: Vec<TokenId>,
    /// Of each token told, the bits of its distribution.
    pub(crate) logits: Vec<Vec<u32>>,
    /// Reasoning, answer and the rest, in order, whatever the pieces they came in.
    pub(crate) reply: String,
    pub(crate) states: Vec<Arc<Start>>,
    pub(crate) replayed: usize,
}

impl Heard {
    pub(crate) fn hear(&mut self, event: &Event<'_>) {
        match event {
            Event::Token { id, logits } => {
                self.tokens.push(*id);
                self.logits.push(bits(logits));
            }
            Event::Reasoning(text) => self.said("think", text),
            Event::Answer(text) => self.said("say", text),
            Event::Reply(event) => self.reply.push_str(&format!("\n{event:?}")),
            Event::Replayed(ids) => self.replayed += ids.len(),
            Event::State { ids, sequence } => self.states.push(Arc::new(Start {
                ids: ids.to_vec(),
                sequence: Sequence::clone(sequence),
            })),
            _ => {}
        }
    }

    fn said(&mut self, how: &str, text: &str) {
        let head = format!("\n{how}: ");
        let last = self.reply.rfind('\n').map_or("", |at| &self.reply[at..]);
        if !last.starts_with(&head) {
            self.reply.push_str(&head);
        }
        self.reply.push_str(&text.replace('\n', "\\n"));
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Runs to the end.
pub(crate) fn run(engine: &Engine, request: &Request) -> (Generation, Heard) {
    let mut heard = Heard::default();
    let made = engine.generate(request, &mut |event| {
        heard.hear(&event);
        ControlFlow::Continue(())
    });
    (made.unwrap(), heard)
}

/// What a generation answered, to the bit, and nothing of how it was made.
pub(crate) fn answer(made: &Generation) -> String {
    format!(
        "{:?}\n{:?}\n{}\n{}\n{:?}\n{:?}",
        made.prompt_ids,
        made.token_ids,
        made.text,
        made.reasoning,
        made.finish,
        made.capture.as_ref().map(|capture| (
            capture.vocab,
            bits(&capture.logits),
            &capture.experts
        ))
    )
}
