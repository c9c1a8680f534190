//! The engine behind the door: its words in the door's.

use std::ops::ControlFlow;
use std::sync::PoisonError;

use super::cancel::Cancel;
use super::generator::Arrived;
use super::generator::Ask;
use super::generator::BySource;
use super::generator::Failure;
use super::generator::Finish;
use super::generator::Generator;
use super::generator::Happening;
use super::generator::Ledger;
use super::generator::Limit;
use super::generator::Now;
use super::generator::Outcome;
use super::generator::Prompt;
use crate::engine;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::engine::Phase;
use crate::engine::Priority;
use crate::engine::Stopper;
use crate::jobs;
use crate::jobs::Keep;
use crate::terms::TokenId;
use crate::text::Effort;
use crate::text::Opening;
use crate::text::ReplyEvent;
use crate::text::ReplyParser;

/// The engine's numbers by origin, whose type belongs to a room this one does not name.
macro_rules! by_source {
    ($by:expr) => {
        BySource {
            memory: $by.memory,
            disk: $by.disk,
            peer: $by.peer,
            hub: $by.hub,
        }
    };
}
impl Generator for Engine {
    fn model(&self) -> &str {
        self.name()
    }

    fn fingerprint(&self) -> String {
        let commit = self.opened().snapshot.commit.as_str();
        format!("fp_{}_{}", &commit[..10], self.kernel().isa().name())
    }

    fn context(&self) -> usize {
        self.spec().context
    }

    fn vocab(&self) -> usize {
        self.spec().vocab
    }

    fn tokens(&self, prompt: &Prompt) -> Result<Vec<TokenId>, Failure> {
        let ids = self.prompt_ids(&to_engine(prompt))?;
        let context = self.spec().context;
        // What the engine would refuse later, when a stream has already begun.
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt.into());
        }
        if ids.len() >= context {
            let tokens = ids.len();
            return Err(EngineError::PromptTooLong { tokens, context }.into());
        }
        Ok(ids)
    }

    fn bytes(&self, id: TokenId) -> Vec<u8> {
        // Without a tokenizer no text was ever made, and none is to be shown.
        let tokenizer = self.tokenizer().ok();
        tokenizer.map_or_else(Vec::new, |tokenizer| tokenizer.bytes(id).to_vec())
    }

    fn special(&self, id: TokenId) -> bool {
        let tokenizer = self.tokenizer().ok();
        tokenizer.is_some_and(|tokenizer| tokenizer.is_special(id))
    }

    fn generate(
        &self,
        ask: &Ask,
        on: &mut dyn FnMut(Happening<'_>) -> ControlFlow<()>,
    ) -> Result<Outcome, Failure> {
        let stopper = Stopper::new();
        let request = engine::Request {
            priority: if ask.patient {
                Priority::Batch
            } else {
                Priority::Interactive
            },
            stopper: Some(stopper.clone()),
            ..to_request(self, ask)
        };
        let mut heard = |event: engine::Event<'_>| match event {
            engine::Event::Prompt(ids) => on(Happening::Prompt(ids)),
            engine::Event::Token { id, logits } => on(Happening::Token { id, logits }),
            engine::Event::Reasoning(text) => {
                on(Happening::Reply(&ReplyEvent::Reasoning(text.to_owned())))
            }
            engine::Event::Answer(text) => {
                on(Happening::Reply(&ReplyEvent::Answer(text.to_owned())))
            }
            engine::Event::Reply(event) => on(Happening::Reply(event)),
            _ => ControlFlow::Continue(()),
        };
        let _hearing = ask.cancel.hear(move || stopper.stop());
        let Some(job) = &ask.job else {
            let made = Engine::generate(self, &request, &mut heard)?;
            return Ok(outcome(&made));
        };
        let mut job = job.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(job) = job.as_mut() else {
            // Given up before its turn came.
            return Err(Failure::Broken {
                message: "the response was deleted".to_owned(),
            });
        };
        let resumed = !job.ids().is_empty();
        let keep = Keep::default();
        // A state that is refused, or a disk that is full, costs time after the next stop and
        // nothing now.
        let ran = jobs::generate(self, job, &request, keep, None, &mut heard, &mut |_| {})?;
        let made = ran.generation;
        let mut outcome = outcome(&made);
        outcome.reasoning_tokens = resumed.then(|| reasoning(self, &ask.prompt, &made));
        Ok(outcome)
    }

    fn limit(&self) -> Limit {
        let limit = self.fetch_limit();
        Limit {
            max_bytes: limit.max,
            fetched_bytes: limit.used,
        }
    }

    fn set_limit(&self, max_bytes: Option<u64>) {
        self.set_fetch_limit(max_bytes);
    }

    fn wind_down(&self) {
        self.stopper().finish_sweep();
    }

    fn read(
        &self,
        ids: &[TokenId],
        cancel: &Cancel,
        on: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Outcome, Failure> {
        let prompt = engine::Prompt::Ids(ids.to_vec());
        let sampling = engine::Sampling {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
        };
        let stopper = Stopper::new();
        let request = engine::Request {
            capture: true,
            stopper: Some(stopper.clone()),
            ..engine::Request::new(prompt, 0, sampling)
        };
        let _hearing = cancel.hear(move || stopper.stop());
        let made = Engine::generate(self, &request, &mut |_| ControlFlow::Continue(()))?;
        if let Some(capture) = &made.capture {
            let rows = capture.logits.chunks_exact(capture.vocab.max(1));
            rows.enumerate().for_each(|(row, logits)| on(row, logits));
        }
        Ok(outcome(&made))
    }

    fn arrivals(&self, since: u64) -> (u64, Vec<Arrived>) {
        let (next, found) = self.opened().meter.arrivals(since);
        let told = found.into_iter().map(|(key, origin)| Arrived {
            layer: key.layer,
            expert: key.expert,
            source: origin.name(),
        });
        (next, told.collect())
    }

    fn now(&self) -> Now {
        let progress = self.progress();
        let counts = self.counts();
        let experts = self.spec().moe.as_ref().map(|moe| moe.experts);
        Now {
            busy: progress.phase != Phase::Idle,
            paused: progress.phase == Phase::Paused,
            prompt: progress.prompt,
            read: progress.read,
            generated: progress.generated,
            layer: progress.layer,
            layers: u16::try_from(self.spec().layers.len()).unwrap_or(u16::MAX),
            experts_a_layer: experts.and_then(|n| u16::try_from(n).ok()).unwrap_or(0),
            max_tokens: progress.max_tokens,
            elapsed: progress.elapsed.as_secs_f64(),
            last_token: progress.last_sweep.map(|took| took.as_secs_f64()),
            bytes_per_s: self.fetch_rate(),
            experts: by_source!(counts.experts),
            bytes: by_source!(counts.bytes),
        }
    }
}

/// The engine's words for a request.
pub(super) fn to_request(engine: &Engine, ask: &Ask) -> engine::Request {
    let max_tokens = ask.max_tokens.unwrap_or(engine.spec().context);
    let sampling = engine::Sampling {
        temperature: ask.sampling.temperature,
        top_p: ask.sampling.top_p,
        seed: ask.sampling.seed,
    };
    engine::Request {
        shaping: engine::Shaping {
            top_k: ask.sampling.top_k,
            min_p: ask.sampling.min_p,
            presence_penalty: ask.sampling.presence_penalty,
            frequency_penalty: ask.sampling.frequency_penalty,
            logit_bias: ask.sampling.logit_bias.clone(),
            constraint: ask.constraint.clone(),
        },
        stop: ask.stop.clone(),
        ..engine::Request::new(to_engine(&ask.prompt), max_tokens, sampling)
    }
}

/// The door's words for a generation.
pub(super) fn outcome(made: &engine::Generation) -> Outcome {
    Outcome {
        finish: match made.finish {
            engine::Finish::Stop => Finish::Stop,
            engine::Finish::ToolCalls => Finish::ToolCalls,
            engine::Finish::Length => Finish::Length,
            engine::Finish::Interrupted => Finish::Interrupted,
        },
        prompt_tokens: made.prompt_ids.len(),
        cached_tokens: made.cached_tokens.min(made.prompt_ids.len()),
        completion_tokens: made.token_ids.len(),
        reasoning_tokens: None,
        ledger: Ledger {
            requested: made.counts.requested,
            experts: by_source!(made.counts.experts),
            bytes: by_source!(made.counts.bytes),
            prefill: made.seconds.prefill,
            decode: made.seconds.decode,
            compute: made.seconds.compute,
            wait_disk: made.counts.wait_disk,
            wait_hub: made.counts.wait_hub,
        },
    }
}

/// Tokens that became reasoning. Counted over the whole reply: of tokens that an earlier process
/// made only the text is heard.
pub(super) fn reasoning(engine: &Engine, prompt: &Prompt, made: &engine::Generation) -> usize {
    let (Prompt::Chat(chat), Ok(tokenizer)) = (prompt, engine.tokenizer()) else {
        return 0;
    };
    if chat.effort == Effort::None {
        return 0;
    }
    let mut parser = ReplyParser::new(tokenizer, Opening::Think);
    let (mut pending, mut reasoning) = (0, 0);
    for &id in &made.token_ids {
        pending += 1;
        for event in parser.push(id) {
            if matches!(event, ReplyEvent::Reasoning(_)) {
                reasoning += pending;
            }
            pending = 0;
        }
    }
    reasoning
}

fn to_engine(prompt: &Prompt) -> engine::Prompt {
    match prompt {
        Prompt::Ids(ids) => engine::Prompt::Ids(ids.clone()),
        Prompt::Text(text) => engine::Prompt::Text(text.clone()),
        Prompt::Chat(conversation) => engine::Prompt::Chat((**conversation).clone()),
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        let hint = error.hint();
        let message = match hint {
            Some(hint) => format!("{error} ({hint})"),
            None => error.to_string(),
        };
        let refused = |param: &str, code| Failure::Refused {
            param: Some(param.to_owned()),
            code,
            message: error.to_string(),
        };
        match error {
            EngineError::Text(error) => error.into(),
            EngineError::EmptyPrompt => refused("prompt", "empty_prompt"),
            EngineError::PromptTooLong { .. } => refused("messages", "context_length_exceeded"),
            EngineError::NoSuchToken { .. } => refused("prompt", "invalid_value"),
            EngineError::NoTokenizer { .. } => Failure::Refused {
                param: Some("prompt".to_owned()),
                code: "no_tokenizer",
                message: format!("{error}; give the prompt as token ids"),
            },
            // The network, the disk or an offline store: another time it may work.
            EngineError::Residency(_) => Failure::Unavailable { message },
            _ => Failure::Broken { message },
        }
    }
}
