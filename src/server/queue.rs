//! One generation at a time on a thread of its own, a short line before it.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

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
    cancelled: Arc<AtomicBool>,
}

impl Place {
    /// The next news; `None` only after the last.
    pub(super) async fn next(&mut self) -> Option<News> {
        self.news.recv().await
    }

    /// How many requests come before this one: 0 when it is being served.
    pub(super) fn before(&self) -> usize {
        let line = self.queue.lock();
        match line.waiting.iter().position(|job| job.id == self.id) {
            Some(at) => at + usize::from(line.running.is_some()),
            None => 0,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // First the word, then the shout: a generation that begins between the two clears the
        // shout, and then finds the word at its first event.
        self.cancelled.store(true, Ordering::SeqCst);
        let mut line = self.queue.lock();
        line.waiting.retain(|job| job.id != self.id);
        if line.running == Some(self.id) {
            self.queue.generator.stop();
        }
    }
}

struct Job {
    id: u64,
    asks: Vec<Ask>,
    /// Score tokens, with so many alternatives.
    scores: Option<usize>,
    news: mpsc::UnboundedSender<News>,
    cancelled: Arc<AtomicBool>,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Job>,
    running: Option<u64>,
    closed: bool,
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
    pub(super) completion_tokens: AtomicU64,
}

/// The line before a generator.
pub(super) struct Queue {
    generator: Arc<dyn Generator>,
    line: Mutex<Line>,
    bell: Condvar,
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
    /// Starts the thread that generates.
    ///
    /// # Errors
    ///
    /// Where the system gives no thread.
    pub(super) fn start(
        generator: Arc<dyn Generator>,
        waiting_max: usize,
    ) -> std::io::Result<Arc<Queue>> {
        let queue = Arc::new(Queue {
            generator,
            line: Mutex::default(),
            bell: Condvar::new(),
            waiting_max,
            next_id: AtomicU64::new(0),
            tally: Tally::default(),
        });
        let worker = Arc::clone(&queue);
        std::thread::Builder::new()
            .name("deltafin-generate".to_owned())
            .spawn(move || worker.work())?;
        Ok(queue)
    }

    pub(super) fn generator(&self) -> &Arc<dyn Generator> {
        &self.generator
    }

    /// Waiting and running requests.
    pub(super) fn lengths(&self) -> (usize, usize) {
        let line = self.lock();
        (line.waiting.len(), usize::from(line.running.is_some()))
    }

    /// Stands in line with one or more generations, which are made one after the other.
    ///
    /// # Errors
    ///
    /// Where the line is full or closed.
    pub(super) fn enter(
        self: &Arc<Self>,
        asks: Vec<Ask>,
        scores: Option<usize>,
    ) -> Result<Place, TurnedAway> {
        let (sender, news) = mpsc::unbounded_channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut line = self.lock();
        if line.closed {
            return Err(TurnedAway::Closed);
        }
        let idle = line.running.is_none() && line.waiting.is_empty();
        if !idle && line.waiting.len() >= self.waiting_max {
            self.tally.turned_away.fetch_add(1, Ordering::Relaxed);
            return Err(TurnedAway::Full(line.waiting.len()));
        }
        self.tally.accepted.fetch_add(1, Ordering::Relaxed);
        line.waiting.push_back(Job {
            id,
            asks,
            scores,
            news: sender,
            cancelled: Arc::clone(&cancelled),
        });
        drop(line);
        self.bell.notify_one();
        Ok(Place {
            id,
            news,
            queue: Arc::clone(self),
            cancelled,
        })
    }

    /// Ends the running generation, turns the line away and lets nobody in any more.
    pub(super) fn close(&self) {
        let mut line = self.lock();
        line.closed = true;
        for job in line.waiting.drain(..) {
            // A client that is gone needs no word.
            let _ = job.news.send(News::Interrupted);
        }
        if line.running.is_some() {
            self.generator.stop();
        }
        drop(line);
        self.bell.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // The line is whole between any two statements, so a panic elsewhere leaves it usable.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self) -> bool {
        self.lock().closed
    }

    fn work(&self) {
        while let Some(job) = self.next_job() {
            // A panic in the arithmetic costs one request, not the server.
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| self.run(&job)));
            let last = ran.unwrap_or_else(|_| {
                News::Failed(Failure::Broken {
                    message: "the engine failed; its own message is in the server's log".to_owned(),
                })
            });
            let count = match &last {
                News::Failed(_) => &self.tally.failed,
                News::Interrupted => &self.tally.cancelled,
                _ => &self.tally.finished,
            };
            count.fetch_add(1, Ordering::Relaxed);
            // Off the stage before the last word: who hears it may enter again at once.
            self.lock().running = None;
            let _ = job.news.send(last);
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut line = self.lock();
        loop {
            if let Some(job) = line.waiting.pop_front() {
                line.running = Some(job.id);
                return Some(job);
            }
            if line.closed {
                return None;
            }
            line = self.bell.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes a job's generations; returns the last news.
    fn run(&self, job: &Job) -> News {
        for (choice, ask) in job.asks.iter().enumerate() {
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
                if sent.is_err() || job.cancelled.load(Ordering::SeqCst) || self.closed() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            };
            let outcome = match self.generator.generate(ask, &mut on) {
                Ok(outcome) => outcome,
                Err(failure) => return News::Failed(failure),
            };
            let tokens = &self.tally;
            let add =
                |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
            add(&tokens.prompt_tokens, outcome.prompt_tokens);
            add(&tokens.completion_tokens, outcome.completion_tokens);
            if outcome.finish == Finish::Interrupted {
                return News::Interrupted;
            }
            let step = Step::Ended(outcome);
            // A client that left is noticed at the next choice, or there is none.
            let _ = job.news.send(News::Choice { choice, step });
        }
        News::Done
    }
}
