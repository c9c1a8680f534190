//! `--session`: a conversation that is kept while it is made, and goes on after any stop.

use std::sync::Arc;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use serde_json::json;

use super::args::EffortArg;
use super::args::Generate;
use super::args::SamplingArgs;
use super::chat;
use super::env::Env;
use super::exit::CliError;
use super::generate;
use super::interrupt::Interrupt;
use super::prefix;
use super::report::Report;
use super::screen::Screen;
use super::screen::chain;
use super::setup;
use crate::engine::Engine;
use crate::engine::Finish;
use crate::engine::Generation;
use crate::engine::Prompt;
use crate::engine::Request;
use crate::engine::Sampling;
use crate::hub::Hub;
use crate::jobs;
use crate::jobs::Identity;
use crate::jobs::Job;
use crate::jobs::JobError;
use crate::jobs::Journal;
use crate::jobs::Keep;
use crate::jobs::Notice;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Message;
use crate::text::Opening;
use crate::text::Reply;
use crate::text::ReplyParser;
use crate::text::Role;
use crate::text::messages_from_json;

/// What a session's job is called.
pub(super) const KIND: &str = "session";

/// A conversation as it is kept.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Talk {
    /// The system message.
    pub(super) system: Option<String>,
    /// How much to think.
    pub(super) effort: String,
    /// Messages in OpenAI's JSON, oldest first, without the system's.
    pub(super) messages: Vec<Value>,
    /// How the reply to the last message is drawn, while it is not finished.
    pub(super) pending: Option<Drawing>,
}

impl Talk {
    /// As a body for `/v1/chat/completions`.
    pub(super) fn export(&self, model: &str) -> Value {
        let system = self.system.iter();
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        json!({ "model": model, "messages": messages, "reasoning_effort": self.effort })
    }
}

/// How a reply's tokens are chosen: kept, so that a reply goes on as it began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Drawing {
    max_tokens: usize,
    temperature: f32,
    top_p: f32,
    seed: u64,
    stop: Vec<String>,
}

impl Drawing {
    fn new(args: &SamplingArgs) -> Drawing {
        Drawing {
            max_tokens: args.max_tokens,
            temperature: args.temperature,
            top_p: args.top_p,
            seed: args.seed.unwrap_or_else(generate::random_seed),
            stop: args.stop.clone(),
        }
    }
}

pub(super) fn command(
    args: &Generate,
    name: &str,
    network: bool,
    screen: &Arc<Screen>,
) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let mut report = Report::default();
    let outcome = whole(args, name, network, &interrupt, screen, &mut report);
    generate::conclude(outcome.map(|()| None), &None, report, screen)
}

fn whole(
    args: &Generate,
    name: &str,
    network: bool,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    report: &mut Report,
) -> Result<(), CliError> {
    let said = match args.prompt.as_deref() {
        Some("-") => Some(generate::standard_input()?),
        said => said.map(str::to_owned),
    };
    let said = said.filter(|said| !said.trim().is_empty());
    let home = setup::home(&args.model.store, &Env::read())?;
    let journal = Journal::sessions(&home)?;
    let unfinished = journal
        .look(name)
        .is_ok_and(|kept| !kept.request["pending"].is_null());
    let said = match said {
        // A reply to be finished waits for nobody's words.
        None if !unfinished => chat::piped()?,
        said => said,
    };
    if said.is_none() && matches!(journal.look(name), Err(JobError::NotFound { .. })) {
        return Err(CliError::Usage(
            format!("there is no session {name} yet, and no prompt"),
            Some(format!(
                "say something: deltafin stream --session {name} \"Who are you?\""
            )),
        ));
    }
    let setup = setup::open(&args.model, network, &interrupt.flag(), screen)?;
    let engine = setup::engine(setup.opened, &args.run, screen)?;
    let mut session = Session::open(&journal, name, &engine, screen)?;
    session.say(&args.sampling, said, screen)?;
    engine.opened().install_core(screen.as_ref())?;
    interrupt.gently();
    session.answer(setup.hub.as_ref(), interrupt, screen, report)
}

/// A conversation that this process owns.
pub(super) struct Session {
    job: Job,
    talk: Talk,
    engine: Arc<Engine>,
    identity: Identity,
}

impl Session {
    /// Opens a session, or begins one.
    pub(super) fn open(
        journal: &Journal,
        name: &str,
        engine: &Arc<Engine>,
        screen: &Screen,
    ) -> Result<Session, CliError> {
        let identity = Identity::of(engine);
        let job = journal.create_as(name, KIND, json!(Talk::default()), &identity)?;
        let talk: Talk =
            serde_json::from_value(job.request().clone()).map_err(|error| JobError::Damaged {
                path: job.folder().join("job.json"),
                reason: error.to_string(),
            })?;
        let of = job.identity().clone();
        if of.model != identity.model {
            return Err(CliError::Usage(
                format!("session {name} was held with {}", of.model),
                Some(format!("give --model {}, or another name", of.model)),
            ));
        }
        let mut session = Session {
            job,
            talk,
            engine: Arc::clone(engine),
            identity,
        };
        if of != session.identity {
            screen.note(&format!(
                "session {name} was held with {:.10}, {}; now it is {:.10}, {}: an unfinished reply begins anew",
                of.revision, of.arithmetic, session.identity.revision, session.identity.arithmetic
            ));
            session.keep()?;
        }
        Ok(session)
    }

    /// Takes what the person says; with nothing said, an unfinished reply goes on.
    pub(super) fn say(
        &mut self,
        sampling: &SamplingArgs,
        said: Option<String>,
        screen: &Screen,
    ) -> Result<(), CliError> {
        let name = self.job.id().to_owned();
        let last = self.talk.messages.last();
        let same =
            last.is_some_and(|m| m["role"] == "user" && m["content"].as_str() == said.as_deref());
        let said = match (self.talk.pending.is_some(), said) {
            (true, None) => return Ok(()),
            (true, Some(_)) if same => return Ok(()),
            (false, None) => {
                return Err(CliError::Usage(
                    format!("session {name} awaits your next message"),
                    Some(format!(
                        "say something: deltafin stream --session {name} \"...\""
                    )),
                ));
            }
            (true, Some(said)) => {
                screen.note("the unfinished reply is kept as it stands");
                let reply = self.unfinished();
                self.talk
                    .messages
                    .push(assistant(&reply.answer, &reply.reasoning));
                said
            }
            (false, Some(said)) => said,
        };
        if sampling.system.is_some() {
            self.talk.system.clone_from(&sampling.system);
        }
        if self.talk.effort.is_empty() || sampling.reasoning_effort.is_some() {
            let effort = generate::effort(sampling.reasoning_effort.unwrap_or(EffortArg::Low));
            effort.as_str().clone_into(&mut self.talk.effort);
        }
        self.talk
            .messages
            .push(json!({"role": "user", "content": said}));
        self.talk.pending = Some(Drawing::new(sampling));
        self.keep()
    }

    /// Has the model reply to the last message.
    pub(super) fn answer(
        &mut self,
        hub: Option<&Arc<Hub>>,
        interrupt: &Interrupt,
        screen: &Arc<Screen>,
        report: &mut Report,
    ) -> Result<(), CliError> {
        let request = self.request()?;
        report.seed = request.sampling.seed;
        let engine = Arc::clone(&self.engine);
        let ids = engine.prompt_ids(&request.prompt)?;
        let known = prefix::start_for(&engine, &ids, screen);
        let keep = Keep {
            every: None,
            for_next_turn: true,
        };
        let mut notice = |notice: Notice| match notice {
            Notice::Refused(path, refusal) => screen.note(&format!(
                "{} is not used: {refusal}; its rows are computed again",
                path.display()
            )),
            Notice::Trouble(error) => screen.note(&format!(
                "a stop now would cost more than usual: {}",
                chain(&error)
            )),
        };
        let mut made: Option<Generation> = None;
        let job = &mut self.job;
        generate::watched(&engine, hub, interrupt, screen, report, &mut |on| {
            let known = known.clone();
            let ran = jobs::generate(&engine, job, &request, keep, known, on, &mut notice)?;
            made = Some(ran.generation.clone());
            Ok(ran.generation)
        })?;
        match made {
            Some(made) if made.finish != Finish::Interrupted => {
                self.talk
                    .messages
                    .push(assistant(&made.text, &made.reasoning));
                self.talk.pending = None;
                self.job.flush()?;
                self.keep()
            }
            _ => Ok(()),
        }
    }

    fn request(&self) -> Result<Request, CliError> {
        let mut messages = Vec::new();
        if let Some(system) = &self.talk.system {
            messages.push(Message::text(Role::System, system));
        }
        let kept = Value::Array(self.talk.messages.clone());
        let kept = messages_from_json(&kept).map_err(crate::engine::EngineError::from)?;
        messages.extend(kept);
        let conversation = Conversation {
            messages,
            effort: self.talk.effort.parse().unwrap_or_default(),
            ..Conversation::default()
        };
        let drawing = self.talk.pending.clone().unwrap_or(Drawing {
            max_tokens: 0,
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
            stop: Vec::new(),
        });
        let sampling = Sampling {
            temperature: drawing.temperature,
            top_p: drawing.top_p,
            seed: drawing.seed,
        };
        Ok(Request {
            stop: drawing.stop,
            ..Request::new(Prompt::Chat(conversation), drawing.max_tokens, sampling)
        })
    }

    /// What there is of an unfinished reply.
    fn unfinished(&self) -> Reply {
        let mut reply = Reply::default();
        let Ok(tokenizer) = self.engine.tokenizer() else {
            return reply;
        };
        let opening = match self.talk.effort.as_str() {
            "none" => Opening::Response,
            _ => Opening::Think,
        };
        let mut parser = ReplyParser::new(tokenizer, opening);
        for &id in self.job.ids() {
            parser.push(id).iter().for_each(|event| reply.add(event));
        }
        parser.finish().iter().for_each(|event| reply.add(event));
        reply
    }

    pub(super) fn name(&self) -> &str {
        self.job.id()
    }

    /// Whether nothing has been said.
    pub(super) fn is_empty(&self) -> bool {
        self.talk.messages.is_empty()
    }

    /// Whether the last message has no whole reply.
    pub(super) fn is_unfinished(&self) -> bool {
        self.talk.pending.is_some()
    }

    /// Forgets everything said.
    pub(super) fn clear(&mut self) -> Result<(), CliError> {
        self.talk.messages.clear();
        self.talk.pending = None;
        self.job.drop_states();
        self.keep()
    }

    /// Takes the last message back, with its reply.
    pub(super) fn undo(&mut self) -> Result<(), CliError> {
        while let Some(message) = self.talk.messages.pop() {
            if message["role"] == "user" {
                break;
            }
        }
        self.talk.pending = None;
        self.keep()
    }

    /// Takes the last reply back, to be drawn anew; false where there is no message.
    pub(super) fn retry(&mut self, sampling: &SamplingArgs) -> Result<bool, CliError> {
        let from_model = |message: &Value| message["role"] != "user";
        while self.talk.messages.last().is_some_and(from_model) {
            self.talk.messages.pop();
        }
        if self.talk.messages.is_empty() {
            return Ok(false);
        }
        self.talk.pending = Some(Drawing::new(sampling));
        self.keep()?;
        Ok(true)
    }

    /// Sets the system message; an empty text takes it away.
    pub(super) fn set_system(&mut self, text: &str) -> Result<(), CliError> {
        self.talk.system = (!text.is_empty()).then(|| text.to_owned());
        self.keep()
    }

    /// Sets how much the model thinks first.
    pub(super) fn set_effort(&mut self, effort: Effort) -> Result<(), CliError> {
        effort.as_str().clone_into(&mut self.talk.effort);
        self.keep()
    }

    /// The conversation as a request's body.
    pub(super) fn export(&self) -> Value {
        self.talk.export(&self.identity.model)
    }

    /// Removes it from the disk.
    pub(super) fn remove(self) -> Result<(), CliError> {
        Ok(self.job.remove()?)
    }

    fn keep(&mut self) -> Result<(), CliError> {
        Ok(self.job.replace(json!(self.talk), &self.identity)?)
    }
}

fn assistant(text: &str, reasoning: &str) -> Value {
    let mut message = json!({"role": "assistant", "content": text});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    message
}
