//! One generation: prompt in, events out.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use super::Engine;
use super::EngineError;
use super::live::Phase;
use super::request::Capture;
use super::request::Event;
use super::request::Finish;
use super::request::Generation;
use super::request::Prompt;
use super::request::Request;
use super::request::Seconds;
use super::sampler;
use super::shaping::Shaper;
use super::stop::StopTexts;
use crate::model::Row;
use crate::model::Sequence;
use crate::model::Sweep;
use crate::model::Watch;
use crate::residency::ResidencyError;
use crate::terms::TokenId;
use crate::text;
use crate::text::Opening;
use crate::text::ReplyEvent;
use crate::text::ReplyParser;

/// Rows of the prompt in one sweep. Each expert is fetched and decoded once for all of them.
const PREFILL_ROWS: usize = 512;

impl Engine {
    /// Generates, telling `on_event` of everything as it happens; breaking out of it, or
    /// [`Engine::stopper`], ends the generation with what was made.
    ///
    /// One generation runs at a time; a second caller waits.
    ///
    /// # Errors
    ///
    /// If the prompt cannot be used or a weight does not come. Whoever needs the tokens made before
    /// a failure has heard of them through `on_event`.
    pub fn generate(
        &self,
        request: &Request,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        let _turn = self
            .turn
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        self.opened().stop.store(false, Ordering::Relaxed);
        let prompt_ids = self.prompt_ids(&request.prompt)?;
        let layers = u16::try_from(self.spec().layers.len()).unwrap_or(u16::MAX);
        self.live
            .begin(prompt_ids.len(), request.max_tokens, layers);
        let before = self.meter().counts();
        let mut run = Run::new(self, request, &prompt_ids, on_event);
        let outcome = run.all();
        self.live.end();
        let Run {
            token_ids,
            text,
            reasoning,
            seconds,
            capture,
            ..
        } = run;
        let finish = outcome?;
        let counts = self.meter().counts().since(&before);
        let compute =
            (seconds.prefill + seconds.decode).saturating_sub(counts.wait_disk + counts.wait_hub);
        Ok(Generation {
            prompt_ids,
            token_ids,
            text,
            reasoning,
            finish,
            counts,
            seconds: Seconds { compute, ..seconds },
            capture,
        })
    }

    /// The prompt in tokens, checked: what cannot be generated from is refused here, before any
    /// weight is needed.
    ///
    /// # Errors
    ///
    /// If it is empty, too long, holds a token that does not exist, or needs a tokenizer that the
    /// checkpoint does not have.
    pub fn prompt_ids(&self, prompt: &Prompt) -> Result<Vec<TokenId>, EngineError> {
        let ids = match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => self.tokenizer()?.encode(text),
            Prompt::Chat(conversation) => self.tokenizer()?.encode_chat(conversation)?,
        };
        self.check_prompt(&ids)?;
        Ok(ids)
    }

    fn check_prompt(&self, ids: &[TokenId]) -> Result<(), EngineError> {
        let spec = self.spec();
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if ids.len() > spec.context {
            return Err(EngineError::PromptTooLong {
                tokens: ids.len(),
                context: spec.context,
            });
        }
        match ids.iter().find(|&&id| id as usize >= spec.vocab) {
            Some(&id) => Err(EngineError::NoSuchToken {
                id,
                vocab: spec.vocab,
            }),
            None => Ok(()),
        }
    }
}

/// A generation under way.
struct Run<'a> {
    engine: &'a Engine,
    request: &'a Request,
    prompt: &'a [TokenId],
    on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    sequence: Sequence,
    parser: Option<ReplyParser>,
    stops: StopTexts,
    token_ids: Vec<TokenId>,
    text: String,
    reasoning: String,
    called_tools: bool,
    seconds: Seconds,
    capture: Option<Capture>,
}

impl<'a> Run<'a> {
    fn new(
        engine: &'a Engine,
        request: &'a Request,
        prompt: &'a [TokenId],
        on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Self {
        let opening = match &request.prompt {
            Prompt::Chat(conversation) if conversation.effort == text::Effort::None => {
                Opening::Response
            }
            Prompt::Chat(_) => Opening::Think,
            Prompt::Ids(_) | Prompt::Text(_) => Opening::Raw,
        };
        Run {
            engine,
            request,
            prompt,
            on_event,
            sequence: Sequence::new(engine.spec()),
            parser: engine
                .tokenizer()
                .ok()
                .map(|tokenizer| ReplyParser::new(tokenizer, opening)),
            stops: StopTexts::new(&request.stop),
            token_ids: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            called_tools: false,
            seconds: Seconds::default(),
            capture: request.capture.then(Capture::default),
        }
    }

    fn all(&mut self) -> Result<Finish, EngineError> {
        let finish = match self.tokens() {
            Ok(finish) => finish,
            Err(ResidencyError::Interrupted) => Finish::Interrupted,
            Err(error) => return Err(error.into()),
        };
        let events = self
            .parser
            .as_mut()
            .map(ReplyParser::finish)
            .unwrap_or_default();
        let flow = self.say(&events);
        let rest = self.stops.finish();
        // The generation is over: nobody is left to stop it.
        let _ = self.answer(&rest);
        Ok(match (finish, flow) {
            (Finish::Stop, _) if self.called_tools && !self.stops.found() => Finish::ToolCalls,
            (finish, _) => finish,
        })
    }

    fn tokens(&mut self) -> Result<Finish, ResidencyError> {
        if (self.on_event)(Event::Prompt(self.prompt)).is_break() {
            return Ok(Finish::Interrupted);
        }
        let began = Instant::now();
        let mut logits = self.prefill()?;
        self.seconds.prefill = began.elapsed();
        let room = self.engine.spec().context - self.prompt.len();
        let mut shaper = Shaper::new(&self.request.shaping);
        while self.token_ids.len() < self.request.max_tokens.min(room) {
            let position = self.prompt.len() + self.token_ids.len();
            let sampling = &self.request.sampling;
            let shaped = shaper.shape(&logits, &self.token_ids, sampling.temperature);
            let id = sampler::sample(&shaped, sampling, position);
            shaper.chose(id);
            if self.engine.stop_ids.contains(&id) {
                let events = self.parser.as_mut().map(|p| p.push(id)).unwrap_or_default();
                return Ok(match self.say(&events) {
                    ControlFlow::Continue(()) => Finish::Stop,
                    ControlFlow::Break(()) => Finish::Interrupted,
                });
            }
            self.token_ids.push(id);
            self.engine.live.change(|p| p.generated += 1);
            if (self.on_event)(Event::Token {
                id,
                logits: &logits,
            })
            .is_break()
            {
                return Ok(Finish::Interrupted);
            }
            let events = self.parser.as_mut().map(|p| p.push(id)).unwrap_or_default();
            if self.say(&events).is_break() {
                return Ok(Finish::Interrupted);
            }
            if self.stops.found() {
                return Ok(Finish::Stop);
            }
            if self.token_ids.len() == self.request.max_tokens.min(room) {
                break; // its distribution would serve nobody
            }
            let began = Instant::now();
            let sweep = self.sweep(&[id], true)?;
            let took = began.elapsed();
            self.seconds.decode += took;
            self.engine.live.change(|p| p.last_sweep = Some(took));
            logits = sweep.logits;
        }
        Ok(Finish::Length)
    }

    /// Reads the prompt; returns the distribution after its last token.
    fn prefill(&mut self) -> Result<Vec<f32>, ResidencyError> {
        let mut logits = Vec::new();
        let chunks = self.prompt.len().div_ceil(PREFILL_ROWS);
        for (n, chunk) in self.prompt.chunks(PREFILL_ROWS).enumerate() {
            let mut sweep = self.sweep(chunk, n + 1 == chunks)?;
            self.engine.live.change(|p| p.read += chunk.len());
            let vocab = self.engine.spec().vocab;
            logits = sweep
                .logits
                .split_off(sweep.logits.len().saturating_sub(vocab));
        }
        self.engine.live.change(|p| p.phase = Phase::Decode);
        Ok(logits)
    }

    /// One sweep over the next tokens of this sequence; asks for the last distribution if `last`.
    fn sweep(&mut self, tokens: &[TokenId], last: bool) -> Result<Sweep, ResidencyError> {
        let all = self.capture.is_some();
        let count = tokens.len();
        let row = |(n, &token)| Row {
            sequence: 0,
            token,
            logits: all || (last && n + 1 == count),
        };
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        let supply = &self.engine.supply;
        let mut watch = Layers(self.engine);
        let sweep = self.engine.model.sweep(
            supply,
            supply,
            &mut [&mut self.sequence],
            &rows,
            &mut watch,
        )?;
        supply.end_of_sweep();
        if let Some(capture) = &mut self.capture {
            record(capture, &sweep, self.engine.spec().vocab);
        }
        Ok(sweep)
    }

    fn say(&mut self, events: &[ReplyEvent]) -> ControlFlow<()> {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => {
                    self.reasoning.push_str(text);
                    (self.on_event)(Event::Reasoning(text))?;
                }
                ReplyEvent::Answer(text) => {
                    let shown = self.stops.push(text);
                    self.answer(&shown)?;
                }
                other => {
                    self.called_tools |= matches!(other, ReplyEvent::ToolCallEnd { .. });
                    (self.on_event)(Event::Reply(other))?;
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn answer(&mut self, text: &str) -> ControlFlow<()> {
        if text.is_empty() {
            return ControlFlow::Continue(());
        }
        self.text.push_str(text);
        (self.on_event)(Event::Answer(text))
    }
}

/// Tells the live photograph which layer is at work.
struct Layers<'a>(&'a Engine);

impl Watch for Layers<'_> {
    fn layer(&mut self, layer: u16) {
        self.0.live.change(|p| p.layer = layer);
    }
}

fn record(capture: &mut Capture, sweep: &Sweep, vocab: usize) {
    capture.vocab = vocab;
    capture.logits.extend_from_slice(&sweep.logits);
    for routes in &sweep.routes {
        let ids = routes.experts.iter().map(|&e| i32::from(e));
        match capture
            .experts
            .iter_mut()
            .find(|(layer, _)| *layer == routes.layer)
        {
            Some((_, experts)) => experts.extend(ids),
            None => capture.experts.push((routes.layer, ids.collect())),
        }
    }
}

/// Time left at the pace of the last sweep.
pub(super) fn estimate(last_sweep: Option<Duration>, tokens_left: usize) -> Option<Duration> {
    last_sweep.map(|sweep| sweep.saturating_mul(u32::try_from(tokens_left).unwrap_or(u32::MAX)))
}
