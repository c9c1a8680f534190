//! The chat: a session at a terminal.

use std::path::Path;
use std::sync::Arc;

use rustyline::Cmd;
use rustyline::Config;
use rustyline::DefaultEditor;
use rustyline::EventHandler;
use rustyline::KeyCode;
use rustyline::KeyEvent;
use rustyline::Modifiers;
use rustyline::error::ReadlineError;

use super::args::Generate;
use super::exit;
use super::exit::CliError;
use super::generate;
use super::interrupt::Interrupt;
use super::report::Report;
use super::screen::Screen;
use super::screen::chain;
use super::session::Session;
use super::setup;
use crate::hub::Hub;
use crate::jobs::Journal;
use crate::text::Effort;

/// Lines remembered.
const HISTORY: usize = 1000;

const HELP: &str = "\
/help            this
/new             begin anew; system message and effort stay
/retry           have the last message answered again
/undo            take the last message and its reply back
/system [TEXT]   set the system message, or take it away
/effort LEVEL    how much the model thinks first: none, low, high or max
/save FILE       write the conversation down, as a body for /v1/chat/completions
/stats           what the last reply took
/exit            leave; the conversation is kept
Alt-Enter or a \\ at the end begins another line; \"\"\" opens and closes a text of many lines.
Ctrl-C finishes the token at hand, keeps everything and leaves; twice leaves at once.";

/// Talks until somebody leaves.
pub(super) fn command(
    args: &Generate,
    network: bool,
    screen: &Arc<Screen>,
) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let setup = setup::open(&args.model, network, &interrupt.flag(), screen)?;
    let engine = setup::engine(setup.opened, &args.run, screen)?;
    let home = engine.opened().store.store().home().to_owned();
    let journal = Journal::sessions(&home)?;
    let name = args.session.clone().unwrap_or_else(|| free_name(&journal));
    let session = Session::open(&journal, &name, &engine, screen)?;
    engine.opened().install_core(screen.as_ref())?;
    interrupt.gently();
    let mut chat = Chat {
        args,
        session,
        hub: setup.hub.as_ref(),
        interrupt: &interrupt,
        screen,
        last: None,
    };
    screen.note(&format!(
        "{}; this chat is kept as {name}: --session {name} goes on with it; /help says more",
        engine.name()
    ));
    let outcome = chat.talk(&home.join("chat-history"));
    if chat.session.is_empty() {
        // Nobody said anything: there is nothing to go on with.
        let _ = chat.session.remove();
    }
    outcome
}

/// The first name that no chat has yet.
fn free_name(journal: &Journal) -> String {
    let taken = journal.ids();
    let name = |n: u32| format!("chat-{n}");
    let n = (1..).find(|&n| !taken.contains(&name(n))).unwrap_or(1);
    name(n)
}

struct Chat<'a> {
    args: &'a Generate,
    session: Session,
    hub: Option<&'a Arc<Hub>>,
    interrupt: &'a Interrupt,
    screen: &'a Arc<Screen>,
    last: Option<Report>,
}

/// What comes of a line.
enum Next {
    Listen,
    Answer,
    Leave,
}

impl Chat<'_> {
    fn talk(&mut self, history: &Path) -> Result<u8, CliError> {
        let mut editor = editor().map_err(|error| terminal(&error))?;
        // The first time there is none.
        let _ = editor.load_history(history);
        if self.session.is_unfinished() {
            self.screen.note("going on with the unfinished reply");
            self.answer();
        }
        let mut warned = false;
        while !self.interrupt.asked() {
            let heard = listen(&mut editor, self.interrupt);
            match heard {
                Ok(said) => {
                    warned = false;
                    if said.trim().is_empty() {
                        continue;
                    }
                    let _ = editor.add_history_entry(said.trim_end());
                    let _ = editor.append_history(history);
                    match self.take(&said) {
                        Ok(Next::Listen) => {}
                        Ok(Next::Answer) => self.answer(),
                        Ok(Next::Leave) => return Ok(exit::DONE),
                        Err(error) => self.screen.error(&error),
                    }
                }
                Err(ReadlineError::Eof) => return Ok(exit::DONE),
                Err(ReadlineError::Interrupted) if warned => return Ok(exit::INTERRUPTED),
                Err(ReadlineError::Interrupted) => {
                    warned = true;
                    self.screen
                        .note("Ctrl-C again leaves; the conversation is kept");
                }
                Err(error) => return Err(terminal(&error)),
            }
        }
        self.screen.note(&format!(
            "kept: deltafin stream --session {} goes on",
            self.session.name()
        ));
        Ok(exit::INTERRUPTED)
    }

    fn answer(&mut self) {
        let mut report = Report::default();
        let made = self
            .session
            .answer(self.hub, self.interrupt, self.screen, &mut report);
        match made {
            Ok(()) => self.screen.detail(&report.line()),
            Err(error) => self.screen.error(&error),
        }
        self.last = Some(report);
    }

    fn take(&mut self, said: &str) -> Result<Next, CliError> {
        let Some(command) = said.trim().strip_prefix('/') else {
            self.session
                .say(&self.args.sampling, Some(said.to_owned()), self.screen)?;
            return Ok(Next::Answer);
        };
        let (command, rest) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        let rest = rest.trim();
        match command {
            "help" | "?" => self.screen.note(HELP),
            "exit" | "quit" | "bye" => return Ok(Next::Leave),
            "new" | "clear" => {
                self.session.clear()?;
                self.screen.note("a new conversation");
            }
            "retry" if self.session.retry(&self.args.sampling)? => return Ok(Next::Answer),
            "retry" | "undo" if self.session.is_empty() => {
                self.screen.note("there is nothing to take back");
            }
            "undo" => {
                self.session.undo()?;
                self.screen.note("taken back");
            }
            "system" => {
                self.session.set_system(rest)?;
                self.screen
                    .note("the system message holds from the beginning of the conversation");
            }
            "effort" => match rest.parse::<Effort>() {
                Ok(effort) => self.session.set_effort(effort)?,
                Err(error) => self.screen.note(&error.to_string()),
            },
            "save" if rest.is_empty() => self.screen.note("/save FILE"),
            "save" => {
                let text = format!("{:#}\n", self.session.export());
                std::fs::write(rest, text).map_err(|source| CliError::File {
                    path: rest.to_owned(),
                    source,
                })?;
                self.screen.note(&format!("written to {rest}"));
            }
            "stats" => match &self.last {
                Some(report) => self.screen.note(&report.line()),
                None => self.screen.note("there was no reply yet"),
            },
            other => self
                .screen
                .note(&format!("there is no /{other}; /help says what there is")),
        }
        Ok(Next::Listen)
    }
}

fn editor() -> rustyline::Result<DefaultEditor> {
    let config = Config::builder()
        .max_history_size(HISTORY)?
        .history_ignore_dups(true)?
        .build();
    let mut editor = DefaultEditor::with_config(config)?;
    let newline = || EventHandler::Simple(Cmd::Newline);
    editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), newline());
    Ok(editor)
}

/// One message: a line, or several.
fn listen(editor: &mut DefaultEditor, interrupt: &Interrupt) -> rustyline::Result<String> {
    let _prompt = interrupt.at_prompt();
    let mut said = String::new();
    let mut block = false;
    loop {
        let line = editor.readline(if said.is_empty() && !block {
            "> "
        } else {
            ". "
        })?;
        if let Some(inside) = line.trim().strip_prefix("\"\"\"").filter(|_| !block) {
            block = true;
            match inside.strip_suffix("\"\"\"") {
                Some(whole) => return Ok(whole.to_owned()),
                None if inside.is_empty() => {}
                None => said = format!("{inside}\n"),
            }
        } else if block {
            match line.trim_end().strip_suffix("\"\"\"") {
                Some(last) => return Ok((said + last).trim_end_matches('\n').to_owned()),
                None => said.push_str(&format!("{line}\n")),
            }
        } else if let Some(more) = line.strip_suffix('\\') {
            said.push_str(&format!("{more}\n"));
        } else {
            return Ok(said + &line);
        }
    }
}

fn terminal(error: &ReadlineError) -> CliError {
    CliError::Usage(
        format!("the terminal cannot be used: {}", chain(error)),
        Some("give the prompt on the command line".to_owned()),
    )
}

/// Whether somebody sits at a terminal and has said nothing yet.
pub(super) fn wanted(args: &Generate, screen: &Screen) -> bool {
    use std::io::IsTerminal;
    args.prompt.is_none()
        && args.sampling.ids.is_empty()
        && !args.sampling.raw
        && args.sampling.logits.is_none()
        && screen.moving()
        && std::io::stdin().is_terminal()
}

/// What was piped in, where nothing was typed and nobody is there to ask; `None` where it is nothing.
pub(super) fn piped() -> Result<Option<String>, CliError> {
    use std::io::IsTerminal;
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let text = generate::standard_input()?;
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}
