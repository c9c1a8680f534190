//! An engine's generation, kept in a job while it runs.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use super::Identity;
use super::error::JobError;
use super::error::Refusal;
use super::job::Job;
use super::job::Slot;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::engine::Event;
use crate::engine::Finish;
use crate::engine::Generation;
use crate::engine::Request;
use crate::engine::Snapshots;
use crate::engine::Start;
use crate::model::Sequence;
use crate::terms::TokenId;

/// A state is worth writing after so many tokens more.
const TOKENS: usize = 8;
/// Or after so much time more: a token may take a minute.
const TIME: Duration = Duration::from_secs(60);

/// What is kept besides the ids.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// How long a state may be old; `None` lets tokens, time and the disk's wear decide.
    pub every: Option<Duration>,
    /// Also the state at the end of the prompt and that at the end of the reply: for a next turn.
    pub for_next_turn: bool,
}

/// A generation that was kept.
#[derive(Debug)]
pub struct Ran {
    /// The generation.
    pub generation: Generation,
    /// Rows computed again that an earlier process had computed.
    pub recomputed: usize,
}

/// What happened to the job itself while it ran.
#[derive(Debug)]
#[non_exhaustive]
pub enum Notice {
    /// A state was there and may not be used.
    Refused(std::path::PathBuf, Refusal),
    /// Something could not be kept. The generation goes on; a stop now would cost more.
    Trouble(JobError),
}

/// Generates, going on from what the job holds and keeping in it what comes. Everything else is
/// [`Engine::generate`]'s.
///
/// `known` is a state from elsewhere that may serve, such as a prefix's.
///
/// # Errors
///
/// Those of the engine.
pub fn generate(
    engine: &Engine,
    job: &mut Job,
    request: &Request,
    keep: Keep,
    known: Option<Arc<Start>>,
    on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    on_notice: &mut dyn FnMut(Notice),
) -> Result<Ran, EngineError> {
    let mut request = request.clone();
    let prompt = engine.prompt_ids(&request.prompt)?;
    request.generated = job.ids().to_vec();
    let given = request.generated.len();
    let text: Vec<TokenId> = prompt.iter().chain(&request.generated).copied().collect();
    let identity = Identity::of(engine);
    let loaded = job.start_for(&text, &identity, engine.spec());
    for (path, refusal) in loaded.refused {
        on_notice(Notice::Refused(path, refusal));
    }
    let known_len = known.as_ref().map_or(0, |known| known.ids.len());
    request.start = match loaded.start {
        Some(start) if start.ids.len() >= known_len => Some(Arc::new(start)),
        _ => known,
    };
    request.snapshots = Snapshots {
        every_tokens: keep.every.is_none().then_some(TOKENS),
        every: Some(keep.every.unwrap_or(TIME)),
        at_prompt_end: keep.for_next_turn,
        at_end: keep.for_next_turn,
    };
    let mut keeper = Keeper {
        job,
        identity,
        keep,
        prompt: prompt.len(),
        len: request.start.as_ref().map_or(0, |start| start.ids.len()),
        at: Instant::now(),
        stopping: false,
        trouble: false,
        on_notice,
    };
    let generation = engine.generate(&request, &mut |event| {
        match &event {
            Event::Token { id, .. } => keeper.token(*id),
            Event::State { ids, sequence } => keeper.state(ids, sequence, engine),
            _ => {}
        }
        let flow = on_event(event);
        keeper.stopping |= flow.is_break();
        flow
    });
    let over = |made: &Generation| made.finish != Finish::Interrupted;
    if !generation.as_ref().is_ok_and(over)
        && let Err(error) = keeper.job.flush()
    {
        (keeper.on_notice)(Notice::Trouble(error));
    }
    let generation = generation?;
    let recomputed = match given {
        0 => 0,
        // The row of the last token had not been computed: the process ended there.
        _ => generation.computed_rows.saturating_sub(1),
    };
    Ok(Ran {
        generation,
        recomputed,
    })
}

/// Keeps ids and states as they come.
struct Keeper<'a> {
    job: &'a mut Job,
    /// What the engine's states belong to, which is not always what the job was made with.
    identity: Identity,
    keep: Keep,
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens of the last state told of, and when.
    len: usize,
    at: Instant,
    /// The observer wants to stop.
    stopping: bool,
    /// The last token could not be written.
    trouble: bool,
    on_notice: &'a mut dyn FnMut(Notice),
}

impl Keeper<'_> {
    fn token(&mut self, id: TokenId) {
        match self.job.append(&[id]) {
            Ok(()) => self.trouble = false,
            // Once, until one succeeds: each later one is written with those before it.
            Err(error) if !std::mem::replace(&mut self.trouble, true) => {
                (self.on_notice)(Notice::Trouble(error));
            }
            Err(_) => {}
        }
    }

    fn state(&mut self, ids: &[TokenId], sequence: &Sequence, engine: &Engine) {
        if self.keep.for_next_turn && ids.len() == self.prompt {
            let (slot, identity) = (Slot::Prompt, &self.identity);
            self.job.snapshot(slot, identity, ids, sequence);
        }
        let old = self.at.elapsed();
        let routine = match self.keep.every {
            Some(every) => old >= every,
            None => ids.len() >= self.len + TOKENS || old >= TIME,
        };
        self.len = ids.len();
        self.at = Instant::now();
        // One that nobody expected is the last, before a stop or a next turn.
        let spared = self.keep.every.is_none() && routine && !self.stopping;
        if !spared || self.job.has_room(Sequence::bytes(engine.spec(), ids.len())) {
            let (slot, identity) = (Slot::Newest, &self.identity);
            self.job.snapshot(slot, identity, ids, sequence);
        }
    }
}
