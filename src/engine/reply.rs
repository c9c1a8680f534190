//! What is told of a generation: tokens become reasoning, answer and tool calls.

use std::ops::ControlFlow;

use super::request::Event;
use super::request::Finish;
use super::request::Prompt;
use super::request::Request;
use super::stop::StopTexts;
use crate::terms::TokenId;
use crate::text;
use crate::text::Opening;
use crate::text::ReplyEvent;
use crate::text::ReplyParser;
use crate::text::Tokenizer;

/// Turns tokens into words, looks for stop texts in them, tells the observer and keeps the whole.
pub(super) struct Telling<'a> {
    on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    parser: Option<ReplyParser>,
    stops: StopTexts,
    called_tools: bool,
    /// The answer so far.
    pub(super) text: String,
    /// The reasoning so far.
    pub(super) reasoning: String,
}

impl<'a> Telling<'a> {
    /// Without a tokenizer tokens are told, and no words.
    pub(super) fn new(
        tokenizer: Option<&Tokenizer>,
        request: &Request,
        on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Telling<'a> {
        let opening = match &request.prompt {
            Prompt::Chat(conversation) if conversation.effort == text::Effort::None => {
                Opening::Response
            }
            Prompt::Chat(_) => Opening::Think,
            Prompt::Ids(_) | Prompt::Text(_) => Opening::Raw,
        };
        Telling {
            on_event,
            parser: tokenizer.map(|tokenizer| ReplyParser::new(tokenizer, opening)),
            stops: StopTexts::new(&request.stop),
            called_tools: false,
            text: String::new(),
            reasoning: String::new(),
        }
    }

    /// Tells the observer.
    pub(super) fn tell(&mut self, event: Event<'_>) -> ControlFlow<()> {
        (self.on_event)(event)
    }

    /// Tells what a token adds to the reply.
    pub(super) fn token(&mut self, id: TokenId) -> ControlFlow<()> {
        let events = self.parser.as_mut().map(|p| p.push(id)).unwrap_or_default();
        self.say(&events)
    }

    /// Whether a stop text came up.
    pub(super) fn stopped(&self) -> bool {
        self.stops.found()
    }

    /// Tells what was held back, and names the end.
    pub(super) fn end(&mut self, finish: Finish) -> Finish {
        let parser = self.parser.as_mut();
        let events = parser.map(ReplyParser::finish).unwrap_or_default();
        // The generation is over: nobody is left to stop it.
        let _ = self.say(&events);
        let rest = self.stops.finish();
        let _ = self.answer(&rest);
        match finish {
            Finish::Stop if self.called_tools && !self.stops.found() => Finish::ToolCalls,
            finish => finish,
        }
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
