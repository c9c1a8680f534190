//! Whether what was read can be honoured. It takes a thread that may work for a while: a prompt may
//! be a book. One code for a request and for a line of a batch, so that neither gets what the other
//! is refused.

use std::sync::Arc;
use std::sync::OnceLock;

use crate::engine::ConstraintSource;
use crate::server::ask::Read;
use crate::server::error::ApiError;
use crate::server::generator::Failure;
use crate::server::generator::Generator;
use crate::server::generator::Prompt;
use crate::server::grammar::Demand;
use crate::server::grammar::Grammars;
use crate::server::grammar::NoGrammar;
use crate::server::params::wrong_value;

/// Distributions of a prompt that are held at once while it is scored, in bytes.
const SCORED_BYTES: usize = 1 << 30;

/// Made when first asked for: it reads the whole vocabulary.
pub(in crate::server) type SharedGrammars = Arc<OnceLock<Option<Grammars>>>;

/// The prompts of a request, each once, and whether it is scored.
pub(in crate::server) fn prompts<K>(read: &Read<K>) -> Vec<(Prompt, bool)> {
    let asks = read.asks.iter().step_by(read.n);
    asks.map(|ask| (ask.prompt.clone(), ask.score_prompt))
        .collect()
}

/// Renders every prompt, so that one that cannot be used is a 400 and not a broken stream.
///
/// # Errors
///
/// Where a prompt is empty, too long, or cannot be rendered.
pub(in crate::server) fn fits(
    generator: &dyn Generator,
    prompts: &[(Prompt, bool)],
) -> Result<(), Failure> {
    prompts.iter().try_for_each(|(prompt, scored)| {
        let tokens = generator.tokens(prompt)?.len();
        let most = SCORED_BYTES / (generator.vocab() * size_of::<f32>()).max(1);
        if *scored && tokens > most {
            return Err(Failure::Refused {
                param: Some("echo".to_owned()),
                code: "invalid_value",
                message: format!(
                    "The prompt has {tokens} tokens; with 'logprobs', up to {most} are echoed."
                ),
            });
        }
        Ok(())
    })
}

/// Compiles what a reply to `prompt` is held to; `None` where the prompt is no chat.
///
/// # Errors
///
/// Where a schema cannot be made into a grammar.
pub(in crate::server) fn constraint(
    generator: &dyn Generator,
    grammars: &SharedGrammars,
    prompt: &Prompt,
    demand: &Demand,
) -> Result<Option<ConstraintSource>, ApiError> {
    let Prompt::Chat(chat) = prompt else {
        return Ok(None);
    };
    let param = match demand.schema {
        Some(_) => "response_format",
        None => "tools",
    };
    let grammars = grammars.get_or_init(|| Grammars::new(generator)).as_ref();
    let no_markup = || NoGrammar("this model's vocabulary has no chat markup".to_owned());
    let made = grammars
        .ok_or_else(no_markup)
        .and_then(|grammars| grammars.constraint(chat, demand));
    made.map(Some)
        .map_err(|error| wrong_value(param, &error.to_string()))
}
