//! `batch`: many requests from a file, their replies into another.

mod output;
mod progress;
mod room;

use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use self::output::Output;
use self::progress::Progress;
use self::room::Room;
use super::args::Batch;
use super::args::Sequences;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::screen::chain;
use super::screen::duration;
use super::setup;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::engine::Event;
use crate::engine::Finish;
use crate::engine::Priority;
use crate::engine::StateMemory;
use crate::jobs;
use crate::jobs::Identity;
use crate::jobs::Journal;
use crate::jobs::Keep;
use crate::jobs::Notice;
use crate::jobs::Prefixes;
use crate::model::Sequence;
use crate::residency::Counts;
use crate::server::BatchLine;
use crate::server::BatchReader;

/// Sequences in flight at most where nobody says how many.
const SEQUENCES_MAX: u64 = 32;
/// Tokens that a sequence is taken to reach when its memory is estimated.
const TOKENS_GUESSED: usize = 4096;
/// Finished lines are synced, and their jobs removed, at most this often.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// That tokens or states cannot be kept is said at most this often.
const TROUBLE_EVERY: Duration = Duration::from_secs(60);

pub(super) fn command(args: &Batch, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let input = std::fs::read(&args.input).map_err(|e| output::file_error(&args.input, e))?;
    if output::same(&args.input, &args.output) {
        return Err(CliError::Usage(
            "the output is the input".to_owned(),
            Some("name another output file".to_owned()),
        ));
    }
    // Before anything is fetched: a night's work must not end on a file that cannot be written.
    let output = Output::open(&args.output)?;
    let errors = args
        .errors
        .clone()
        .unwrap_or_else(|| output::beside(&args.output));
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let home = setup.opened.store.store().home().to_owned();
    let most = match args.sequences {
        Sequences::Some(n) => u64::from(n),
        Sequences::Auto => SEQUENCES_MAX,
    };
    let most = usize::try_from(most).unwrap_or(1);
    let engine = setup::engine_of_many(setup.opened, &args.run, most, screen)?;
    engine.opened().install_core(screen.as_ref())?;
    interrupt.gently();
    interrupt.stops(engine.stopper());
    // More sequences than fit take turns, by way of the disk.
    engine.set_state_memory(StateMemory {
        budget: Some(setup::state_memory(&engine).0),
        spill: Some(home.clone()),
    });
    let reader = BatchReader::new(Arc::clone(&engine));
    let lines = read(&reader, &input, args.token_ids);
    let work = Work {
        engine: &engine,
        reader,
        journal: Journal::open(&home)?,
        prefixes: Prefixes::open(&home),
        identity: Identity::of(&engine),
        scope: output::scope(&args.output),
        interrupt: &interrupt,
        screen,
        room: Room::new(screen, &interrupt),
        keep: Keep {
            every: args.save_every,
            for_next_turn: false,
        },
        patience: args.patience,
        state: Mutex::new(State::new(output, lines, screen)?),
        began: Instant::now(),
        before: engine.counts(),
    };
    let sequences = match args.sequences {
        Sequences::Some(n) => usize::from(n),
        Sequences::Auto => auto(&engine),
    };
    let outcome = work.all(sequences);
    engine.flush();
    work.journal.flush();
    work.conclude(outcome, &errors, sequences)
}

/// One line of the input.
enum Item {
    /// To be answered; the line itself while nobody works on it.
    Request(String, Option<Box<BatchLine>>),
    /// Got no answer, and why.
    Wrong(Value),
}

struct State {
    output: Output,
    items: Vec<Item>,
    waiting: VecDeque<usize>,
    /// Jobs of lines that are in the output and perhaps not yet on the disk.
    done: Vec<String>,
    synced: Instant,
    said: Instant,
    kept: usize,
    answered: usize,
    tokens: u64,
    /// Tokens of the replies that are in the output or about to be.
    in_answers: u64,
    prompt_tokens: u64,
    recomputed: u64,
    trouble: Option<Instant>,
    failure: Option<CliError>,
}

struct Work<'a> {
    engine: &'a Arc<Engine>,
    reader: BatchReader,
    journal: Journal,
    prefixes: Prefixes,
    identity: Identity,
    /// Tells the jobs of one output file from another's.
    scope: String,
    interrupt: &'a Interrupt,
    screen: &'a Arc<Screen>,
    room: Room<'a>,
    keep: Keep,
    patience: Option<Duration>,
    state: Mutex<State>,
    began: Instant,
    before: Counts,
}

impl State {
    fn new(output: Output, items: Vec<Item>, screen: &Screen) -> Result<State, CliError> {
        let ids: HashSet<&str> = items
            .iter()
            .filter_map(|item| match item {
                Item::Request(id, _) => Some(id.as_str()),
                Item::Wrong(_) => None,
            })
            .collect();
        let strangers = output.strangers(&ids);
        if strangers > 0 {
            let copy = output.copy_aside()?;
            screen.note(&format!(
                "{strangers} lines of the output belong to requests that have changed or are gone; \
                 it was copied to {}",
                copy.display()
            ));
        }
        let open = |(_, item): &(usize, &Item)| match item {
            Item::Request(id, _) => !output.holds(id),
            Item::Wrong(_) => false,
        };
        let waiting: VecDeque<usize> = items
            .iter()
            .enumerate()
            .filter(open)
            .map(|(n, _)| n)
            .collect();
        let kept = ids.iter().filter(|id| output.holds(id)).count();
        let now = Instant::now();
        Ok(State {
            kept,
            output,
            items,
            waiting,
            done: Vec::new(),
            synced: now,
            said: now,
            answered: 0,
            tokens: 0,
            in_answers: 0,
            prompt_tokens: 0,
            recomputed: 0,
            trouble: None,
            failure: None,
        })
    }
}

impl Work<'_> {
    /// Answers what waits, so many at a time.
    fn all(&self, sequences: usize) -> Result<(), CliError> {
        let waiting = self.lock().waiting.len();
        let kept = self.lock().kept;
        self.remove_leftovers();
        self.screen.note(&format!(
            "{waiting} lines to answer, {kept} are already; {sequences} at a time"
        ));
        std::thread::scope(|scope| {
            for _ in 0..sequences.min(waiting) {
                scope.spawn(|| {
                    while let Some((n, line)) = self.next() {
                        if let Err(error) = self.line(n, line) {
                            // The first says why; the others end because of it.
                            self.lock().failure.get_or_insert(error);
                        }
                    }
                });
            }
        });
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Whole between any two statements that matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(usize, BatchLine)> {
        let mut state = self.lock();
        if state.failure.is_some() || self.interrupt.asked() {
            return None;
        }
        loop {
            let n = state.waiting.pop_front()?;
            if let Some(Item::Request(_, line)) = state.items.get_mut(n)
                && let Some(line) = line.take()
            {
                return Some((n, *line));
            }
        }
    }

    /// Answers one line, as far as nobody stops it.
    fn line(&self, n: usize, mut line: BatchLine) -> Result<(), CliError> {
        let requests = self.reader.requests(self.engine, &line);
        let mut names = Vec::new();
        for (choice, request) in requests.into_iter().enumerate() {
            let name = self.job(&line.id, choice);
            let create = || {
                let made = self
                    .journal
                    .create_as(&name, "batch", Value::Null, &self.identity);
                // Jobs that are over may be what fills the disk.
                made.map_err(|error| self.settled(error.into()))
            };
            let mut job = self.room.wait(create)?;
            names.push(name);
            if line.scored() && !job.ids().is_empty() {
                job.replace(Value::Null, &self.identity)?;
            }
            let request = crate::engine::Request {
                priority: Priority::Batch,
                patience: self.patience,
                ..request
            };
            let known = self.prefix(&request);
            let mut on = |event: Event<'_>| {
                line.hear(choice, &event);
                if matches!(event, Event::Token { .. }) {
                    self.token();
                }
                match self.interrupt.asked() || self.lock().failure.is_some() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            };
            let mut notice = |notice: Notice| self.notice(&notice);
            let keep = self.keep;
            let ran = jobs::generate(
                self.engine,
                &mut job,
                &request,
                keep,
                known,
                &mut on,
                &mut notice,
            );
            let ran = match ran {
                Ok(ran) => ran,
                // The network, the disk: no fault of the line's. Another time it may be answered.
                Err(error @ EngineError::Residency(_)) => return Err(error.into()),
                Err(error) => {
                    self.lock().items[n] = Item::Wrong(line.failed(error).line);
                    let _ = job.remove();
                    return Ok(());
                }
            };
            let mut state = self.lock();
            state.recomputed += ran.recomputed as u64;
            drop(state);
            if ran.generation.finish == Finish::Interrupted {
                return Ok(());
            }
            let made = &ran.generation;
            let mut state = self.lock();
            state.prompt_tokens += made.prompt_ids.len() as u64;
            state.in_answers += made.token_ids.len() as u64;
            drop(state);
            self.reader.ended(self.engine, &mut line, choice, made);
        }
        let id = line.id.clone();
        self.finished(&id, &line.answer(), names)
    }

    /// Writes an answer down, and now and then has everything survive a power cut.
    fn finished(&self, id: &str, answer: &Value, jobs: Vec<String>) -> Result<(), CliError> {
        self.room.wait(|| {
            let added = self.lock().output.add(id, answer);
            added.map_err(|error| self.settled(error))
        })?;
        let mut state = self.lock();
        state.answered += 1;
        state.done.extend(jobs);
        let due = state.synced.elapsed() >= SYNC_EVERY;
        drop(state);
        if due { self.settle() } else { Ok(()) }
    }

    /// Has the answers survive a power cut, and removes their jobs.
    fn settle(&self) -> Result<(), CliError> {
        let mut state = self.lock();
        state.synced = Instant::now();
        state.output.sync()?;
        let done = std::mem::take(&mut state.done);
        drop(state);
        self.tidy(&done);
        Ok(())
    }

    /// `error`, once everything is removed that is done with.
    fn settled(&self, error: CliError) -> CliError {
        // An output that cannot be synced keeps its jobs, and says so where it is written.
        let _ = self.settle();
        error
    }

    /// Removes jobs whose answers are safe. One that stays costs some bytes and is found again.
    fn tidy(&self, jobs: &[String]) {
        for job in jobs {
            let _ = self.journal.remove(job);
        }
    }

    /// Jobs of this output whose lines are answered, or are not asked for any more: a run that was
    /// killed could not remove them.
    fn remove_leftovers(&self) {
        let scope = format!("b-{}-", self.scope);
        let open = |job: &&String| {
            let state = self.lock();
            let item = |&n: &usize| match &state.items[n] {
                Item::Request(id, _) => job.contains(&id.replace("batch_req_", "")),
                Item::Wrong(_) => false,
            };
            state.waiting.iter().any(item)
        };
        let jobs = self.journal.ids();
        let left = jobs.iter().filter(|job| job.starts_with(&scope));
        let over: Vec<String> = left.filter(|job| !open(job)).cloned().collect();
        self.tidy(&over);
    }

    fn job(&self, id: &str, choice: usize) -> String {
        let id = id.replace("batch_req_", "");
        format!("b-{}-{id}-{choice}", self.scope)
    }

    fn prefix(&self, request: &crate::engine::Request) -> Option<Arc<crate::engine::Start>> {
        let ids = self.engine.prompt_ids(&request.prompt).ok()?;
        let spec = self.engine.spec();
        let loaded = self.prefixes.start_for(&ids, &self.identity, spec);
        loaded.start.map(Arc::new)
    }

    fn notice(&self, notice: &Notice) {
        match notice {
            Notice::Refused(path, refusal) => self.screen.note(&format!(
                "{} is not used: {refusal}; its rows are computed again",
                path.display()
            )),
            Notice::Trouble(error) => {
                // Every sequence has the same to say of the same disk.
                let mut state = self.lock();
                let again = state.trouble.is_none_or(|t| t.elapsed() >= TROUBLE_EVERY);
                if !again {
                    return;
                }
                state.trouble = Some(Instant::now());
                drop(state);
                self.screen.note(&format!(
                    "a stop now would cost more than usual: {}",
                    chain(error)
                ));
            }
        }
    }

    /// Counts a token, and says how things stand.
    fn token(&self) {
        let mut state = self.lock();
        state.tokens += 1;
        if state.said.elapsed() < super::screen::PLAIN_EVERY {
            return;
        }
        state.said = Instant::now();
        let counts = self.engine.counts().since(&self.before);
        let progress = Progress {
            lines: state.items.len(),
            over: state.kept + state.answered + wrong(&state.items),
            answered: state.answered,
            in_answers: state.in_answers,
            tokens: state.tokens,
            fetched: counts.bytes.hub + counts.bytes.peer + counts.core_hub,
            read: counts.bytes.disk + counts.core_disk,
            took: self.began.elapsed(),
        };
        drop(state);
        self.screen.note(&progress.line());
    }

    /// Puts the files in order and says how it went.
    fn conclude(
        &self,
        outcome: Result<(), CliError>,
        errors: &Path,
        sequences: usize,
    ) -> Result<u8, CliError> {
        let mut state = self.lock();
        let ids: Vec<&str> = state
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Request(id, _) => Some(id.as_str()),
                Item::Wrong(_) => None,
            })
            .collect();
        self.room.wait(|| state.output.sort(ids.iter().copied()))?;
        let unfinished = ids.iter().filter(|id| !state.output.holds(id)).count();
        let wrong = wrong_lines(&state.items);
        if !wrong.is_empty() {
            self.room.wait(|| output::write_whole(errors, &wrong))?;
        } else if errors.exists() {
            // Of an earlier run, whose errors are gone.
            std::fs::remove_file(errors).map_err(|e| output::file_error(errors, e))?;
        }
        let done = std::mem::take(&mut state.done);
        self.tidy(&done);
        let error = outcome.as_ref().err().map(|error| chain(error));
        if self.screen.json {
            let summary = self.summary(&state, errors, sequences, unfinished, error);
            self.screen.object(&summary);
        }
        self.screen.note(&format!(
            "{} of {} lines answered ({} before), {} with errors, {unfinished} unfinished; {} tokens in {}",
            state.kept + state.answered,
            state.items.len(),
            state.kept,
            wrong.lines().count(),
            state.tokens,
            duration(self.began.elapsed()),
        ));
        if unfinished > 0 {
            self.screen.note("run the same command again to go on");
        }
        match outcome {
            Err(error) => {
                self.screen.error(&error);
                Ok(error.code())
            }
            Ok(()) if unfinished > 0 => Ok(exit::INTERRUPTED),
            Ok(()) => Ok(exit::DONE),
        }
    }

    fn summary(
        &self,
        state: &State,
        errors: &Path,
        sequences: usize,
        unfinished: usize,
        error: Option<String>,
    ) -> Value {
        let counts = self.engine.counts().since(&self.before);
        let wrong = wrong(&state.items);
        let spilled = self.engine.spilled();
        let mut summary = json!({
            "model": self.identity.model, "revision": self.identity.revision,
            "lines": state.items.len(), "answered": state.kept + state.answered,
            "kept": state.kept, "errors": wrong, "unfinished": unfinished,
            "sequences": sequences,
            "tokens": {
                "prompt": state.prompt_tokens, "generated": state.tokens,
                "recomputed": state.recomputed,
            },
            "experts": {
                "requested": counts.requested, "memory": counts.experts.memory,
                "disk": counts.experts.disk, "peer": counts.experts.peer,
                "hub": counts.experts.hub,
            },
            "bytes": {
                "memory": counts.bytes.memory, "disk": counts.bytes.disk,
                "peer": counts.bytes.peer, "hub": counts.bytes.hub,
                "core_disk": counts.core_disk, "core_hub": counts.core_hub,
            },
            "spilled": {
                "states": spilled.writes, "bytes": spilled.bytes_written + spilled.bytes_read,
                "seconds": spilled.time.as_secs_f64(),
            },
            "seconds": self.began.elapsed().as_secs_f64(),
            "errors_file": (wrong > 0).then(|| errors.display().to_string()),
        });
        if let (Some(error), Value::Object(fields)) = (error, &mut summary) {
            fields.insert("error".to_owned(), error.into());
        }
        summary
    }
}

fn wrong(items: &[Item]) -> usize {
    let wrong = |item: &&Item| matches!(item, Item::Wrong(_));
    items.iter().filter(wrong).count()
}

fn wrong_lines(items: &[Item]) -> String {
    let line = |item: &Item| match item {
        Item::Wrong(line) => Some(format!("{line}\n")),
        Item::Request(..) => None,
    };
    items.iter().filter_map(line).collect()
}

/// Every line that is not blank, read.
fn read(reader: &BatchReader, input: &[u8], token_ids: bool) -> Vec<Item> {
    let input = input.strip_prefix(b"\xef\xbb\xbf").unwrap_or(input);
    let mut firsts: HashMap<String, usize> = HashMap::new();
    let mut items = Vec::new();
    for (number, line) in (1..).zip(input.split(|&b| b == b'\n')) {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let request = reader.read(line, number, token_ids);
        let custom_id = match &request {
            Ok(request) => Some(request.custom_id.clone()),
            Err(wrong) => wrong.custom_id.clone(),
        };
        // Whatever else is wrong with a second one: nobody could tell its answer from the first's.
        let first = custom_id.as_ref().and_then(|id| firsts.get(id).copied());
        items.push(match (&custom_id, first, request) {
            (Some(id), Some(first), _) => {
                Item::Wrong(BatchReader::duplicate(id, number, first).line)
            }
            (_, _, Ok(request)) => Item::Request(request.id.clone(), Some(Box::new(request))),
            (_, _, Err(wrong)) => Item::Wrong(wrong.line),
        });
        if let Some(id) = custom_id {
            firsts.entry(id).or_insert(number);
        }
    }
    items
}

/// As many sequences as fit at once into the memory for their states.
fn auto(engine: &Engine) -> usize {
    let tokens = TOKENS_GUESSED.min(engine.spec().context);
    let each = Sequence::bytes(engine.spec(), tokens).max(1);
    let fit = setup::state_memory(engine).0 / each;
    usize::try_from(fit.clamp(1, SEQUENCES_MAX)).unwrap_or(1)
}
