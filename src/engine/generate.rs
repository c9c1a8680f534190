//! One generation: prompt in, events out.

use std::ops::ControlFlow;
use std::time::Duration;

use super::Engine;
use super::EngineError;
use super::live::Live;
use super::request::Event;
use super::request::Generation;
use super::request::Prompt;
use super::request::Request;
use super::run::Run;
use super::stopper::Stops;
use super::sweeps::Seat;
use crate::model::Sequence;
use crate::terms::TokenId;

/// Tokens of a reply that memory is set aside for from the beginning. Most replies end before a
/// limit that nobody chose: room for the whole context would let one sequence run at a time.
const AHEAD: usize = 256;

/// Takes a generation out of the photograph, however it ends.
struct Gone<'a>(&'a Live, u64);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Engine {
    /// Generates, telling `on_event` of everything as it happens; breaking out of it, or
    /// [`Engine::stopper`], ends the generation with what was made.
    ///
    /// May be called from many threads at once: the sequences share sweeps, in which each expert is
    /// fetched and decoded once for all rows that need it. What a generation answers depends on
    /// none of it, to the bit.
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
        let stops = Stops::new(request.stopper.as_ref(), &self.stopper);
        let prompt = self.prompt_ids(&request.prompt)?;
        self.check_generated(prompt.len(), &request.generated)?;
        let machine = self.machine();
        let ahead = request.max_tokens.min(AHEAD);
        let len = (prompt.len() + request.generated.len())
            .saturating_add(ahead)
            .min(self.spec().context);
        let class = (request.priority, request.patience);
        let bytes = Sequence::bytes(self.spec(), len);
        let seat = Seat::take(machine, stops, class, bytes);
        let ticket = seat.ticket;
        let live = &machine.live;
        live.begin(ticket, request.priority, prompt.len(), request.max_tokens);
        let _gone = Gone(live, ticket);
        let mut run = Run::new(self, request, seat, prompt, on_event);
        let finish = run.all()?;
        Ok(run.generation(finish))
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
        let context = self.spec().context;
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if ids.len() > context {
            let tokens = ids.len();
            return Err(EngineError::PromptTooLong { tokens, context });
        }
        self.check_ids(&ids)?;
        Ok(ids)
    }

    fn check_generated(&self, prompt: usize, generated: &[TokenId]) -> Result<(), EngineError> {
        let (tokens, context) = (prompt + generated.len(), self.spec().context);
        if tokens > context {
            return Err(EngineError::PromptTooLong { tokens, context });
        }
        self.check_ids(generated)
    }

    fn check_ids(&self, ids: &[TokenId]) -> Result<(), EngineError> {
        let vocab = self.spec().vocab;
        match ids.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::NoSuchToken { id, vocab }),
            None => Ok(()),
        }
    }
}

/// Time left at the pace of the last sweep.
pub(super) fn estimate(last_sweep: Option<Duration>, tokens_left: usize) -> Option<Duration> {
    last_sweep.map(|sweep| sweep.saturating_mul(u32::try_from(tokens_left).unwrap_or(u32::MAX)))
}
