//! A few requests at a time, each on threads of its own, and a short line before them.
//!
//! Two classes: whoever waits for an answer, and lines of batches. Lines of batches take places that
//! nobody else wants, and take none away: a request never waits for a line that is being answered,
//! which may take hours, but is served beside it. The engine then gives it the passes it needs.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use tokio::sync::mpsc;

use super::cancel::Cancel;
use super::cancel::Hearing;
use super::generator::Ask;
use super::generator::Failure;
use super::generator::Finish;
use super::generator::Generator;
use super::generator::Happening;
use super::generator::Outcome;
use super::logprobs;
use super::logprobs::Scored;
use crate::terms::TokenId;
use crate::text::ReplyEvent;

/// What a waiting client hears of its request.
#[derive(Debug)]
pub(super) enum News {
    /// Something happened in one of its choices.
    Choice { choice: usize, step: Step },
    /// The whole request failed; the last news.
    Failed(Failure),
    /// The server stopped; the last news.
    Interrupted,
    /// Every choice has ended; the last news.
    Done,
}

/// A step of one choice.
#[derive(Debug)]
pub(super) enum Step {
    /// The prompt in tokens.
    Prompt(Vec<TokenId>),
    /// The prompt's tokens after the first, scored. Comes before the prompt, where it was asked for.
    PromptScores(Vec<Scored>),
    /// A token was generated; scored where that was asked for.
    Token(Option<Box<Scored>>),
    /// The reply goes on.
    Reply(ReplyEvent),
    /// The choice is whole.
    Ended(Outcome),
}

/// A request's place in the line, and what it hears. Dropping it cancels the request.
pub(super) struct Place {
    id: u64,
    news: mpsc::UnboundedReceiver<News>,
    queue: Arc<Queue>,
    cancel: Cancel,
}

impl Place {
    /// The next news; `None` only after the last.
    pub(super) async fn next(&mut self) -> Option<News> {
        self.news.recv().await
    }

    /// Has the request end, too, when `other` is asked for; its news go on until the last.
    pub(super) fn ended_by(&self, other: &Cancel) -> Hearing {
        let cancel = self.cancel.clone();
        let queue = Arc::downgrade(&self.queue);
        let id = self.id;
        other.hear(move || {
            cancel.cancel();
            if let Some(queue) = queue.upgrade() {
                queue.leave(id);
            }
        })
    }

    /// How many requests come before this one: 0 when it is being served.
    pub(super) fn before(&self) -> usize {
        let line = self.queue.lock();
        match line.waiting.iter().position(|job| job.id == self.id) {
            Some(at) => at + line.served(Class::Awaited),
            None => 0,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.lock().take_out(self.id);
        self.cancel.cancel();
    }
}

/// Who goes first where not all can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// A request.
    Awaited,
    /// A line of a batch.
    Batch,
}

struct Job {
    id: u64,
    class: Class,
    asks: Vec<Ask>,
    /// Score tokens, with so many alternatives.
    scores: Option<usize>,
    news: mpsc::UnboundedSender<News>,
    cancel: Cancel,
}

/// A request that is being served.
struct Running {
    class: Class,
    cancel: Cancel,
    /// Nobody is there to see it.
    patient: bool,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Job>,
    /// Lines of batches that wait; whoever runs a batch lets few of them in at a time.
    batch: VecDeque<Job>,
    /// What ends each request that is being served.
    running: HashMap<u64, Running>,
    /// Nobody is let in any more.
    closed: bool,
    /// Who is being served has had the time there was.
    ending: bool,
}

impl Line {
    /// How many of a class are being served.
    fn served(&self, class: Class) -> usize {
        let of = |running: &&Running| running.class == class;
        self.running.values().filter(of).count()
    }

    /// Takes the next that may be served, where at most so many are at once.
    fn pick(&mut self, running_max: usize) -> Option<Job> {
        // Lines of batches are not counted: nobody waits for one of them to end.
        if self.served(Class::Awaited) < running_max
            && let Some(job) = self.waiting.pop_front()
        {
            return Some(job);
        }
        let free = self.waiting.is_empty() && self.running.len() < running_max;
        free.then(|| self.batch.pop_front()).flatten()
    }

    /// Takes out one that waits.
    fn take_out(&mut self, id: u64) -> Option<Job> {
        [&mut self.waiting, &mut self.batch]
            .into_iter()
            .find_map(|waiting| {
                let at = waiting.iter().position(|job| job.id == id)?;
                waiting.remove(at)
            })
    }

    /// Lets nobody in any more, and tells those who wait.
    fn close(&mut self) {
        self.closed = true;
        for job in self.waiting.drain(..).chain(self.batch.drain(..)) {
            // A client that is gone needs no word.
            let _ = job.news.send(News::Interrupted);
        }
    }
}

/// How long the line is, and how many are being served, by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    pub(super) waiting: usize,
    pub(super) running: usize,
    pub(super) batch_waiting: usize,
    pub(super) batch_running: usize,
}

/// Counts for `/metrics`.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) accepted: AtomicU64,
    pub(super) turned_away: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) cached_tokens: AtomicU64,
    pub(super) completion_tokens: AtomicU64,
}

/// The line before a generator.
pub(super) struct Queue {
    generator: Arc<dyn Generator>,
    line: Mutex<Line>,
    bell: Condvar,
    /// Requests served at once, and so many choices of each.
    running_max: usize,
    waiting_max: usize,
    next_id: AtomicU64,
    pub(super) tally: Tally,
}

/// The line is full, or closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnedAway {
    /// So many are waiting already.
    Full(usize),
    /// The server is stopping.
    Closed,
}

impl Queue {
    /// Starts the threads that generate.
    ///
    /// # Errors
    ///
    /// Where the system gives no thread.
    pub(super) fn start(
        generator: Arc<dyn Generator>,
        running_max: usize,
        waiting_max: usize,
    ) -> std::io::Result<Arc<Queue>> {
        let queue = Arc::new(Queue {
            generator,
            line: Mutex::default(),
            bell: Condvar::new(),
            running_max: running_max.max(1),
            waiting_max,
            next_id: AtomicU64::new(0),
            tally: Tally::default(),
        });
        // As many again: lines of batches may hold every place when requests come.
        for _ in 0..2 * queue.running_max {
            let worker = Arc::clone(&queue);
            std::thread::Builder::new()
                .name("deltafin-generate".to_owned())
                .spawn(move || worker.work())?;
        }
        Ok(queue)
    }

    pub(super) fn generator(&self) -> &Arc<dyn Generator> {
        &self.generator
    }

    /// Who waits and who is served.
    pub(super) fn lengths(&self) -> Lengths {
        let line = self.lock();
        Lengths {
            waiting: line.waiting.len(),
            running: line.served(Class::Awaited),
            batch_waiting: line.batch.len(),
            batch_running: line.served(Class::Batch),
        }
    }

    /// Stands in line with one or more generations.
    ///
    /// # Errors
    ///
    /// Where the line is full or closed.
    pub(super) fn enter(
        self: &Arc<Self>,
        asks: Vec<Ask>,
        scores: Option<usize>,
    ) -> Result<Place, TurnedAway> {
        self.stand(Class::Awaited, asks, scores, self.waiting_max)
    }

    /// The same for a request that was let in before: however long the line is.
    ///
    /// # Errors
    ///
    /// Where it is closed.
    pub(super) fn enter_again(self: &Arc<Self>, asks: Vec<Ask>) -> Result<Place, TurnedAway> {
        self.stand(Class::Awaited, asks, None, usize::MAX / 2)
    }

    /// The same for a line of a batch: behind every request, and counted with none of them.
    ///
    /// # Errors
    ///
    /// Where it is closed.
    pub(super) fn enter_behind(
        self: &Arc<Self>,
        asks: Vec<Ask>,
        scores: Option<usize>,
    ) -> Result<Place, TurnedAway> {
        self.stand(Class::Batch, asks, scores, usize::MAX / 2)
    }

    fn stand(
        self: &Arc<Self>,
        class: Class,
        mut asks: Vec<Ask>,
        scores: Option<usize>,
        waiting_max: usize,
    ) -> Result<Place, TurnedAway> {
        let (sender, news) = mpsc::unbounded_channel();
        let cancel = Cancel::default();
        for ask in &mut asks {
            ask.cancel = cancel.clone();
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut line = self.lock();
        if line.closed {
            return Err(TurnedAway::Closed);
        }
        // Who is about to be taken by an idle thread waits for nobody.
        let idle = self.running_max.saturating_sub(line.served(Class::Awaited));
        if line.waiting.len() >= waiting_max + idle {
            self.tally.turned_away.fetch_add(1, Ordering::Relaxed);
            return Err(TurnedAway::Full(line.waiting.len()));
        }
        self.tally.accepted.fetch_add(1, Ordering::Relaxed);
        let waiting = match class {
            Class::Awaited => &mut line.waiting,
            Class::Batch => &mut line.batch,
        };
        waiting.push_back(Job {
            id,
            class,
            asks,
            scores,
            news: sender,
            cancel: cancel.clone(),
        });
        drop(line);
        self.bell.notify_one();
        Ok(Place {
            id,
            news,
            queue: Arc::clone(self),
            cancel,
        })
    }

    /// Turns the line away and lets nobody in any more. Who is being served goes on for up to
    /// `grace`, and then ends where its state is whole, if that comes within `patience`; what nobody
    /// waits for ends so at once. Returns when nobody is served.
    pub(super) fn drain(&self, grace: Duration, patience: Duration) {
        self.lock().close();
        self.bell.notify_all();
        self.wait(grace, |line| line.running.values().any(|r| !r.patient));
        self.lock().ending = true;
        self.generator.wind_down();
        self.wait(patience, |line| !line.running.is_empty());
    }

    fn wait(&self, most: Duration, busy: impl Fn(&Line) -> bool) {
        let until = Instant::now() + most;
        while busy(&self.lock()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether nobody is let in any more.
    pub(super) fn closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether a request that is being served is to end where it is.
    fn ending(&self, patient: bool) -> bool {
        let line = self.lock();
        line.ending || (line.closed && patient)
    }

    /// Ends what is running, turns the line away and lets nobody in any more.
    pub(super) fn close(&self) {
        let mut line = self.lock();
        line.close();
        line.ending = true;
        let running: Vec<Cancel> = line.running.values().map(|r| r.cancel.clone()).collect();
        drop(line);
        running.iter().for_each(Cancel::cancel);
        self.bell.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // The line is whole between any two statements, so a panic elsewhere leaves it usable.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request that waits leaves the line; its last news say so.
    fn leave(&self, id: u64) {
        let left = self.lock().take_out(id);
        if let Some(job) = left {
            // A client that is gone needs no word.
            let _ = job.news.send(News::Interrupted);
        }
    }

    fn work(&self) {
        while let Some(job) = self.next_job() {
            let last = self.run(&job);
            let count = match &last {
                News::Failed(_) => &self.tally.failed,
                News::Interrupted => &self.tally.cancelled,
                _ => &self.tally.finished,
            };
            count.fetch_add(1, Ordering::Relaxed);
            // Off the stage before the last word: who hears it may enter again at once.
            self.lock().running.remove(&job.id);
            let _ = job.news.send(last);
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut line = self.lock();
        loop {
            if let Some(job) = line.pick(self.running_max) {
                let running = Running {
                    class: job.class,
                    cancel: job.cancel.clone(),
                    patient: job.asks.iter().all(|ask| ask.patient),
                };
                line.running.insert(job.id, running);
                return Some(job);
            }
            if line.closed {
                return None;
            }
            line = self.bell.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Scores the tokens of a prompt; tells of the prompt too where nothing is generated after it.
    fn score_prompt(&self, job: &Job, choice: usize) -> Result<Outcome, Failure> {
        let ids = self.generator.tokens(&job.asks[choice].prompt)?;
        let top = job.scores.unwrap_or(0);
        let mut scores = Vec::with_capacity(ids.len());
        let outcome = self.generator.read(&ids, &job.cancel, &mut |row, logits| {
            if let Some(&next) = ids.get(row + 1) {
                scores.push(logprobs::score(next, logits, top));
            }
        })?;
        let tell = |step| {
            // A client that left is noticed by whoever generates next.
            let _ = job.news.send(News::Choice { choice, step });
        };
        tell(Step::PromptScores(scores));
        if job.asks[choice].max_tokens == Some(0) {
            tell(Step::Prompt(ids));
        }
        Ok(outcome)
    }

    /// Makes a job's generations, several at a time where there are several; returns the last news.
    fn run(&self, job: &Job) -> News {
        let next = AtomicUsize::new(0);
        let worst = Mutex::new(None);
        let lane = || {
            while let Some(choice) = Some(next.fetch_add(1, Ordering::Relaxed))
                && choice < job.asks.len()
            {
                // A panic in the arithmetic costs one request, not the server.
                let ran = std::panic::catch_unwind(AssertUnwindSafe(|| self.choice(job, choice)));
                let ended = ran.unwrap_or_else(|_| Some(News::Failed(broken())));
                if ended.is_some() {
                    // What is left of the request serves nobody.
                    job.cancel.cancel();
                    next.store(job.asks.len(), Ordering::Relaxed);
                    let mut worst = worst.lock().unwrap_or_else(PoisonError::into_inner);
                    // The first to fail says why; others end because of it.
                    *worst = worst.take().or(ended);
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.running_max.min(job.asks.len()) {
                scope.spawn(lane);
            }
            lane();
        });
        let worst = worst.into_inner().unwrap_or_else(PoisonError::into_inner);
        worst.unwrap_or(News::Done)
    }

    /// Makes one choice; `None` where it ended well.
    fn choice(&self, job: &Job, choice: usize) -> Option<News> {
        let ask = &job.asks[choice];
        let mut read = None;
        if ask.score_prompt {
            match self.score_prompt(job, choice) {
                Ok(outcome) => read = Some(outcome),
                Err(failure) => return Some(News::Failed(failure)),
            }
        }
        let mut on = |happening: Happening<'_>| {
            let step = match happening {
                Happening::Prompt(ids) => Step::Prompt(ids.to_vec()),
                Happening::Token { id, logits } => {
                    let score = |top| Box::new(logprobs::score(id, logits, top));
                    Step::Token(job.scores.map(score))
                }
                Happening::Reply(event) => Step::Reply(event.clone()),
            };
            let sent = job.news.send(News::Choice { choice, step });
            if sent.is_err() || job.cancel.asked() || self.ending(ask.patient) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let made = match read {
            // The echo was all.
            Some(outcome) if ask.max_tokens == Some(0) => Ok(outcome),
            Some(outcome) if outcome.finish == Finish::Interrupted => Ok(outcome),
            _ => self.generator.generate(ask, &mut on),
        };
        let mut outcome = match made {
            Ok(outcome) => outcome,
            Err(failure) => return Some(News::Failed(failure)),
        };
        if let Some(read) = read
            && ask.max_tokens != Some(0)
        {
            outcome.ledger.add(&read.ledger);
        }
        let tokens = &self.tally;
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        add(&tokens.prompt_tokens, outcome.prompt_tokens);
        add(&tokens.cached_tokens, outcome.cached_tokens);
        add(&tokens.completion_tokens, outcome.completion_tokens);
        if outcome.finish == Finish::Interrupted {
            return Some(News::Interrupted);
        }
        let step = Step::Ended(outcome);
        // A client that left is noticed at the next choice, or there is none.
        let _ = job.news.send(News::Choice { choice, step });
        None
    }
}

fn broken() -> Failure {
    Failure::Broken {
        message: "the engine failed; its own message is in the server's log".to_owned(),
    }
}
