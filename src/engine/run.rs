//! A generation under way: the walk from prompt to finish.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use super::Engine;
use super::EngineError;
use super::limit;
use super::limit::AtLimit;
use super::live::Phase;
use super::live::Running;
use super::reply::Telling;
use super::request::Capture;
use super::request::Event;
use super::request::Finish;
use super::request::Generation;
use super::request::Prompt;
use super::request::Request;
use super::request::Seconds;
use super::request::Sharing;
use super::request::Start;
use super::sampler;
use super::shaping::Shaper;
use super::sweeps::Lost;
use super::sweeps::Offer;
use super::sweeps::Seat;
use super::sweeps::Taken;
use crate::model::Sequence;
use crate::residency::Counts;
use crate::residency::ResidencyError;
use crate::terms::TokenId;
use crate::text::ResponseFormat;
use crate::text::ToolChoice;

/// A generation under way.
///
/// `ids` is the whole text, prompt first; `sequence` has taken in a beginning of it. A step is
/// always the same: take in what is missing, draw, append.
pub(super) struct Run<'a> {
    engine: &'a Engine,
    request: &'a Request,
    seat: Seat<'a>,
    telling: Telling<'a>,
    shaper: Shaper<'a>,
    /// Prompt, then what was generated.
    ids: Vec<TokenId>,
    /// How many of `ids` are the prompt.
    prompt: usize,
    /// How many of `ids` were there from the beginning.
    given: usize,
    /// `None` before it is let in, and when it was lost.
    sequence: Option<Sequence>,
    /// The distribution after the last row taken in.
    logits: Vec<f32>,
    told: Told,
    began: Instant,
    counts: Counts,
    seconds: Seconds,
    sharing: Sharing,
    computed_rows: usize,
    cached_tokens: usize,
    capture: Option<Capture>,
    keeping: Option<Keeping>,
}

/// How often who waits for a higher limit looks whether there is one, or whether to stop.
const PAUSE_CHECK: Duration = Duration::from_millis(50);

/// Which states are kept for later texts.
struct Keeping {
    /// The end of the prompt's last whole message: what a conversation will go on from, however the
    /// reply is written down in it. The whole prompt, where it is no conversation.
    boundary: usize,
    every_tokens: usize,
    /// Length of the last one kept.
    last: usize,
}

/// Why the walk ended before its finish.
enum Ended {
    Stopped,
    Failed(Arc<ResidencyError>),
}

/// When the state was last told of.
struct Told {
    len: usize,
    at: Instant,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        engine: &'a Engine,
        request: &'a Request,
        seat: Seat<'a>,
        prompt: Vec<TokenId>,
        on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Self {
        let given = prompt.len() + request.generated.len();
        let keeping = engine.kept.wanted().map(|every_tokens| Keeping {
            boundary: boundary(&engine.stop_ids, request, &prompt),
            every_tokens,
            last: 0,
        });
        Run {
            keeping,
            engine,
            request,
            seat,
            telling: Telling::new(engine.tokenizer().ok(), request, on_event),
            shaper: Shaper::new(&request.shaping),
            prompt: prompt.len(),
            given,
            ids: prompt,
            sequence: None,
            logits: Vec::new(),
            told: Told {
                len: 0,
                at: Instant::now(),
            },
            began: Instant::now(),
            counts: Counts::default(),
            seconds: Seconds::default(),
            sharing: Sharing::default(),
            computed_rows: 0,
            cached_tokens: 0,
            capture: request.capture.then(Capture::default),
        }
    }

    /// Waits for memory, and takes a state to go on from: the request's start where it fits and
    /// nobody wants to see the rows it saves, else an empty one.
    fn enter(&mut self) -> Result<Sequence, Ended> {
        self.now(|running| running.phase = Phase::Waiting);
        self.seat.enter().map_err(ended)?;
        self.now(|running| running.phase = Phase::Prefill);
        let spec = self.engine.spec();
        let own = self.request.start.as_ref().filter(|s| self.serves(s));
        let own_len = own.map_or(0, |start| start.ids.len());
        let kept = match (&self.keeping, &self.capture) {
            (Some(_), None) => self.engine.kept.find(spec, &self.ids, own_len),
            _ => None,
        };
        if let Some(start) = &kept {
            self.engine.kept.used(start.ids.len());
        }
        let sequence = match kept.as_ref().or(own) {
            Some(start) => start.sequence.clone(),
            None => Sequence::new(spec),
        };
        self.cached_tokens = sequence.len();
        self.told.len = self.told.len.max(sequence.len());
        if let Some(keeping) = &mut self.keeping {
            keeping.last = keeping.last.max(sequence.len());
        }
        Ok(sequence)
    }

    /// Keeps the state at hand for later texts, if it is one to keep.
    fn keep(&mut self, at_end: bool) {
        let (Some(keeping), Some(sequence)) = (&mut self.keeping, &self.sequence) else {
            return;
        };
        let len = sequence.len();
        let more = len.saturating_sub(keeping.last);
        if more > 0 && (at_end || len == keeping.boundary || more >= keeping.every_tokens) {
            keeping.last = len;
            self.engine.kept.keep(&self.ids[..len], sequence);
        }
    }

    /// Whether a state is one to go on from: the last row has to be computed in any case.
    fn serves(&self, start: &Start) -> bool {
        self.capture.is_none()
            && start.ids.len() < self.ids.len()
            && start.ids.len() == start.sequence.len()
            && self.ids.starts_with(&start.ids)
            && !start.sequence.poisoned()
            && start.sequence.fits(self.engine.spec())
    }

    /// Tokens taken in.
    fn len(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }

    /// Changes this generation's photograph.
    fn now(&self, change: impl FnOnce(&mut Running)) {
        let live = &self.engine.machine().live;
        live.change(self.seat.ticket, change);
    }

    /// The walk, and the words at its end.
    pub(super) fn all(&mut self) -> Result<Finish, EngineError> {
        let finish = match self.tokens() {
            Ok(finish) => finish,
            Err(Ended::Stopped) => Finish::Interrupted,
            Err(Ended::Failed(error)) => return Err(EngineError::Residency(error)),
        };
        let wanted = match finish {
            Finish::Interrupted => self.request.snapshots.wanted(),
            _ => self.request.snapshots.at_end,
        };
        if wanted && self.len() > self.told.len {
            // The generation is over: nobody is left to stop it.
            let _ = self.tell_state();
        }
        self.keep(true);
        Ok(self.telling.end(finish))
    }

    /// What came of it.
    pub(super) fn generation(self, finish: Finish) -> Generation {
        let swept = self.seconds.prefill + self.seconds.decode;
        let mut prompt_ids = self.ids;
        let token_ids = prompt_ids.split_off(self.prompt);
        Generation {
            prompt_ids,
            token_ids,
            text: self.telling.text,
            reasoning: self.telling.reasoning,
            finish,
            counts: self.counts,
            seconds: Seconds {
                waited: self.began.elapsed().saturating_sub(swept),
                ..self.seconds
            },
            sharing: self.sharing,
            computed_rows: self.computed_rows,
            cached_tokens: self.cached_tokens,
            capture: self.capture,
        }
    }

    fn tokens(&mut self) -> Result<Finish, Ended> {
        if self.telling.tell(Event::Prompt(&self.ids)).is_break() {
            return Ok(Finish::Interrupted);
        }
        if let Some(finish) = self.replay() {
            if self.capture.is_some() {
                self.take_in(self.ids.len() - 1)?;
            }
            return Ok(finish);
        }
        // Also where no token may follow: whoever asks for none wants the prompt read.
        self.take_in(self.ids.len())?;
        self.now(|running| running.phase = Phase::Decode);
        while self.ids.len() < self.end() {
            self.take_in(self.ids.len())?;
            if let Some(finish) = self.draw() {
                return Ok(finish);
            }
        }
        Ok(Finish::Length)
    }

    /// Length of prompt and reply that is not exceeded.
    fn end(&self) -> usize {
        let most = self.prompt.saturating_add(self.request.max_tokens);
        most.min(self.engine.spec().context)
    }

    /// Takes the tokens of an earlier process over, as if they had just been drawn. Where one of
    /// them had ended the generation it ends now: the process may have died between the two.
    fn replay(&mut self) -> Option<Finish> {
        let generated = &self.request.generated;
        if generated.is_empty() {
            return None;
        }
        for &id in generated {
            if self.ids.len() >= self.end() {
                break;
            }
            self.shaper.chose(id);
            if let Some(finish) = self.append(id) {
                return Some(finish);
            }
        }
        if self.telling.tell(Event::Replayed(generated)).is_break() {
            return Some(Finish::Interrupted);
        }
        (self.ids.len() >= self.end()).then_some(Finish::Length)
    }

    /// Draws the next token from the distribution at hand and tells of it.
    fn draw(&mut self) -> Option<Finish> {
        let sampling = &self.request.sampling;
        let generated = &self.ids[self.prompt..];
        let shaped = self
            .shaper
            .shape(&self.logits, generated, sampling.temperature);
        let id = sampler::sample(&shaped, sampling, self.ids.len());
        self.shaper.chose(id);
        if self.engine.stop_ids.contains(&id) {
            return Some(match self.telling.token(id) {
                ControlFlow::Continue(()) => Finish::Stop,
                ControlFlow::Break(()) => Finish::Interrupted,
            });
        }
        let logits = &self.logits;
        let event = Event::Token { id, logits };
        if self.telling.tell(event).is_break() {
            self.ids.push(id);
            return Some(Finish::Interrupted);
        }
        self.append(id)
    }

    /// Adds a token to the text; says why it was the last, if it was.
    fn append(&mut self, id: TokenId) -> Option<Finish> {
        self.ids.push(id);
        self.now(|running| running.generated += 1);
        if self.telling.token(id).is_break() {
            return Some(Finish::Interrupted);
        }
        self.telling.stopped().then_some(Finish::Stop)
    }

    /// Sweeps until the sequence has taken in `ids[..end]`.
    fn take_in(&mut self, end: usize) -> Result<(), Ended> {
        while self.sequence.is_none() || self.len() < end {
            let sequence = match self.sequence.take() {
                Some(sequence) => sequence,
                None => self.enter()?,
            };
            let from = sequence.len();
            let mut to = end.min(from + self.engine.machine().supply.plan().prefill_rows);
            if self.request.snapshots.at_prompt_end && from < self.prompt {
                to = to.min(self.prompt);
            }
            let boundary = self
                .keeping
                .as_ref()
                .map_or(end, |keeping| keeping.boundary);
            if from < boundary {
                to = to.min(boundary);
            }
            let offer = Offer {
                sequence: Some(sequence),
                tokens: self.ids[from..to].to_vec(),
                decode: from >= self.given && to - from == 1,
                last: to == self.ids.len(),
                all: self.capture.is_some(),
            };
            match self.seat.step(offer) {
                Ok(taken) => {
                    self.took(from, taken);
                    self.keep(false);
                }
                // The rows are computed again, to the same bits.
                Err(Lost::Evicted) => {
                    self.sharing.evicted += 1;
                    continue;
                }
                Err(Lost::Stopped(sequence)) => {
                    self.sequence = sequence;
                    return Err(Ended::Stopped);
                }
                Err(Lost::Limited(sequence, error)) => {
                    self.sequence = Some(sequence);
                    self.pause(error)?;
                    continue;
                }
                Err(lost) => return Err(ended(lost)),
            }
            if self.state_is_due() && self.tell_state().is_break() {
                return Err(Ended::Stopped);
            }
        }
        Ok(())
    }

    /// The limit of fetched bytes is reached. The state is whole, and kept at once: this may last for
    /// days, and processes end. Returns when there is a higher limit.
    fn pause(&mut self, error: Arc<ResidencyError>) -> Result<(), Ended> {
        if self.request.snapshots.wanted() && self.len() > self.told.len {
            // Whether to stop is asked below.
            let _ = self.tell_state();
        }
        self.keep(true);
        let machine = self.engine.machine();
        if machine.at_limit() == AtLimit::Fail {
            return Err(Ended::Failed(error));
        }
        let reading = self.len() < self.given;
        self.now(|running| running.phase = Phase::Paused);
        let reached = limit::reached(&error);
        while self.engine.fetch_limit().max == reached {
            if self.seat.stopping() {
                return Err(Ended::Stopped);
            }
            std::thread::sleep(PAUSE_CHECK);
        }
        let phase = match reading {
            true => Phase::Prefill,
            false => Phase::Decode,
        };
        self.now(|running| running.phase = phase);
        Ok(())
    }

    /// Rows from position `from` on have been taken in.
    fn took(&mut self, from: usize, taken: Taken) {
        let share = taken.share;
        let to = from + taken.rows;
        self.counts += share.counts;
        self.seconds.compute += share.compute;
        self.sharing.sweeps += 1;
        self.sharing.sequences += share.sequences as u64;
        if from < self.given {
            self.seconds.prefill += share.took;
            self.computed_rows += to.min(self.given) - from;
            self.now(|running| running.read = to.min(running.prompt));
        } else {
            self.seconds.decode += share.took;
            self.now(|running| running.last_sweep = Some(share.took));
        }
        let vocab = self.engine.spec().vocab;
        if let Some(capture) = &mut self.capture {
            record(capture, &taken, from, vocab);
        }
        let mut logits = taken.logits;
        let row = logits.len().saturating_sub(vocab);
        self.logits = logits.split_off(row);
        self.sequence = Some(taken.sequence);
    }

    fn state_is_due(&self) -> bool {
        let when = &self.request.snapshots;
        let len = self.len();
        // Rows that are computed again have been told of.
        let more = len.saturating_sub(self.told.len);
        when.every_tokens.is_some_and(|every| more >= every.max(1))
            || (more > 0
                && when
                    .every
                    .is_some_and(|every| self.told.at.elapsed() >= every))
            || (when.at_prompt_end && len == self.prompt)
    }

    fn tell_state(&mut self) -> ControlFlow<()> {
        let Some(sequence) = &self.sequence else {
            return ControlFlow::Continue(());
        };
        self.told.len = sequence.len();
        let ids = &self.ids[..sequence.len()];
        let flow = self.telling.tell(Event::State { ids, sequence });
        self.told.at = Instant::now();
        flow
    }
}

/// Where a prompt's last whole message ends. Notes that the engine writes behind the messages, and
/// the opening of the reply, are not in the next prompt of a conversation.
fn boundary(stop_ids: &[TokenId], request: &Request, prompt: &[TokenId]) -> usize {
    let notes = match &request.prompt {
        Prompt::Chat(chat) => {
            usize::from(chat.tool_choice != ToolChoice::Auto)
                + usize::from(chat.response_format != ResponseFormat::Text)
        }
        Prompt::Ids(_) | Prompt::Text(_) => 0,
    };
    let ends = (0..prompt.len())
        .rev()
        .filter(|&at| stop_ids.contains(&prompt[at]));
    ends.map(|at| at + 1).nth(notes).unwrap_or(prompt.len())
}

fn ended(lost: Lost) -> Ended {
    match lost {
        Lost::Failed(error) | Lost::Limited(_, error) => Ended::Failed(error),
        Lost::Stopped(_) | Lost::Evicted => Ended::Stopped,
        Lost::Panicked => panic!("the arithmetic panicked; its own message came first"),
    }
}

/// Keeps what was computed of rows from position `from` on; those that were computed before, and
/// had to be again, are kept already.
fn record(capture: &mut Capture, taken: &Taken, from: usize, vocab: usize) {
    let known = capture.sweeps.len().saturating_sub(from).min(taken.rows);
    capture.vocab = vocab;
    capture
        .logits
        .extend_from_slice(&taken.logits[known * vocab..]);
    let sweeps = std::iter::repeat_n(taken.share.sweep, taken.rows - known);
    capture.sweeps.extend(sweeps);
    for routes in &taken.routes {
        let k = routes.experts.len() / taken.rows;
        capture.top_k = k;
        let ids = routes.experts[known * k..].iter().map(|&e| i32::from(e));
        let layers = &mut capture.experts;
        match layers.iter_mut().find(|(layer, _)| *layer == routes.layer) {
            Some((_, experts)) => experts.extend(ids),
            None => layers.push((routes.layer, ids.collect())),
        }
    }
}
