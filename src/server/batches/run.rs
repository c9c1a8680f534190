//! A batch's life: looked through, answered line by line behind everybody who waits, written out.
//!
//! Whatever ends the process, each step is either on the disk or done again with the same outcome:
//! a line is answered when it is in the log, and the files are written from the log under names
//! chosen when the batch began.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::StreamExt;
use serde_json::Value;

use super::Batch;
use super::INPUT;
use super::Kept;
use super::Status;
use super::input::Input;
use super::input::Span;
use crate::jobs::JobError;
use crate::server::BatchLine;
use crate::server::BatchReader;
use crate::server::Door;
use crate::server::Wrong;
use crate::server::batch;
use crate::server::error::ApiError;
use crate::server::files::Purpose;
use crate::server::generator::Failure;
use crate::server::generator::SharedJob;
use crate::server::queue::News;
use crate::server::queue::Queue;

/// Batches that nobody answers are looked for this often: their server may have been stopped.
const TAKE_UP_EVERY: Duration = Duration::from_secs(60);
/// A disk that said no is asked again after this time.
const DISK_REST: Duration = Duration::from_secs(10);
/// A line whose weights did not come is tried again after a second, then after twice the time, up
/// to this; so many times, which is about an hour. The hub is away more often than for good.
const WEIGHTS_REST_MAX: Duration = Duration::from_secs(600);
const TRIES: u32 = 15;
/// How soon it is noticed that the server stops.
const LOOK: Duration = Duration::from_millis(200);

/// Goes on with the batches that earlier processes did not finish, now and whenever one is left.
pub(in crate::server) async fn resume(door: Arc<Door>) {
    loop {
        let (Some(queue), Some(_)) = (door.queue.get(), door.kept.get()) else {
            return;
        };
        if queue.closed() {
            return;
        }
        let own = Arc::clone(&door);
        let taken = tokio::task::spawn_blocking(move || {
            let (queue, kept) = (own.queue.get()?, own.kept.get()?);
            Some(kept.batches.take_up(queue.generator().model()))
        });
        for batch in taken.await.ok().flatten().unwrap_or_default() {
            start(&door, batch);
        }
        for _ in 0..TAKE_UP_EVERY.as_millis() / LOOK.as_millis() {
            tokio::time::sleep(LOOK).await;
            if queue.closed() {
                return;
            }
        }
    }
}

/// Answers a batch, from where it stands, while the server runs.
pub(in crate::server) fn start(door: &Arc<Door>, batch: Arc<Batch>) {
    let (Some(queue), Some(kept)) = (door.queue.get(), door.kept.get()) else {
        return;
    };
    let earlier = {
        let door = Arc::clone(door);
        Box::new(move |id: &str| Some(door.shelf.get(id)?.conversation()))
    };
    let reader = BatchReader::sharing(
        Arc::clone(queue.generator()),
        Arc::clone(&door.grammars),
        earlier,
    );
    let work = Arc::new(Work {
        door: Arc::clone(door),
        queue: Arc::clone(queue),
        kept: Arc::clone(kept),
        batch,
        reader,
    });
    tokio::spawn(async move {
        if work.live().await.is_none() {
            // Not over: whoever serves the model next goes on with it.
            work.kept.batches.leave(&work.batch);
        }
    });
}

struct Work {
    door: Arc<Door>,
    queue: Arc<Queue>,
    kept: Arc<Kept>,
    batch: Arc<Batch>,
    reader: BatchReader,
}

impl Work {
    /// From where it stands to its end; `None` where the server stops before.
    async fn live(self: &Arc<Self>) -> Option<()> {
        if matches!(self.batch.status(), Status::Validating | Status::InProgress) {
            self.answer_all().await?;
        }
        if self.batch.status() != Status::Failed {
            self.conclude().await?;
        }
        let own = Arc::clone(self);
        // One that panics has been reported by the panic hook, and leaves some bytes behind.
        let _ = tokio::task::spawn_blocking(move || own.kept.batches.let_go(&own.batch)).await;
        Some(())
    }

    /// Answers what is not answered yet, as far as nobody asks for the end.
    async fn answer_all(self: &Arc<Self>) -> Option<()> {
        let input = self.insist(|work| Ok(work.look_through())).await?;
        let input = match input {
            Ok(input) => Arc::new(input),
            Err(faults) => {
                let failed = move |work: &Work| {
                    let from = [Status::Validating, Status::InProgress];
                    let change = |state: &mut super::State| state.faults.clone_from(&faults);
                    work.batch.bring(&from, Status::Failed, change)
                };
                return self.insist(failed).await.map(drop);
            }
        };
        let own = Arc::clone(&input);
        let begun = move |work: &Work| {
            let total = own.total();
            let begin = |state: &mut super::State| state.total = total;
            work.batch
                .bring(&[Status::Validating], Status::InProgress, begin)?;
            if work.batch.status() != Status::InProgress {
                // Cancelled before it began: it has no lines, and so none that are wrong.
                return Ok(());
            }
            let wrong = own.wrong.iter();
            let wrong: Vec<_> = wrong.map(|(n, line)| (*n, false, line.clone())).collect();
            work.batch.log().add(&wrong)
        };
        self.insist(begun).await?;
        let open: Vec<Span> = {
            let log = self.batch.log();
            let spans = input.requests.iter().copied();
            spans.filter(|span| !log.holds(span.number)).collect()
        };
        let file = self
            .insist(|work| {
                let path = work.batch.folder.join(INPUT);
                File::open(&path)
                    .map(Arc::new)
                    .map_err(JobError::disk("cannot be opened", &path))
            })
            .await?;
        // As many as can be served at once: those behind them wait on the disk, not in the line.
        let lines = futures_util::stream::iter(open)
            .map(|span| Arc::clone(self).line(Arc::clone(&file), span))
            .buffer_unordered(self.door.options.running_max.max(1));
        // To the end of each, also after one was not answered: their jobs are to be let go.
        let all = lines.fold(true, |all, answered| async move { all && answered });
        let answered = all.await;
        (answered || self.batch.cancel.asked()).then_some(())
    }

    fn look_through(&self) -> Result<Input, Vec<Value>> {
        let path = self.batch.folder.join(INPUT);
        let endpoint = self.batch.state().wish.endpoint.clone();
        Input::read(&path, &endpoint, self.door.options.body_max)
    }

    /// Whether no further line is to be begun.
    fn ending(&self) -> bool {
        self.queue.closed() || self.batch.cancel.asked()
    }

    /// Answers one line; `false` where it was not.
    async fn line(self: Arc<Self>, input: Arc<File>, span: Span) -> bool {
        for tried in 0.. {
            if self.ending() {
                return false;
            }
            let file = Arc::clone(&input);
            let read = move |work: &Work| work.read(&file, span);
            let (good, line) = match self.insist(read).await {
                None => return false,
                Some(Err(wrong)) => (false, wrong.line),
                Some(Ok(line)) => match self.answer(span, line, tried + 1 == TRIES).await {
                    Answer::Line(good, line) => (good, line),
                    Answer::Ended => return false,
                    Answer::Later => {
                        let rest = Duration::from_secs(1 << tried.min(16));
                        self.rest(rest.min(WEIGHTS_REST_MAX), true).await;
                        continue;
                    }
                },
            };
            let add = move |work: &Work| {
                work.batch.log().add(&[(span.number, good, line.clone())])?;
                // Not before: what is neither answered nor at work is begun anew.
                if let Some(disk) = work.door.shelf.disk() {
                    disk.remove_lines(&work.names(span));
                }
                Ok(())
            };
            return self.insist(add).await.is_some();
        }
        false
    }

    fn read(&self, input: &File, span: Span) -> Result<Result<BatchLine, Wrong>, JobError> {
        let path = self.batch.folder.join(INPUT);
        let bytes = span
            .read(input)
            .map_err(JobError::disk("cannot be read", &path))?;
        let bytes = bytes.trim_ascii();
        Ok(batch::parse(bytes, span.number).and_then(|said| self.reader.request(said, false)))
    }

    /// What the names of a line's jobs begin with.
    fn names(&self, span: Span) -> String {
        format!("{}-{}-", self.batch.id(), span.number)
    }

    /// Has a line's generations made, in turn.
    async fn answer(self: &Arc<Self>, span: Span, mut line: BatchLine, last: bool) -> Answer {
        let (mut asks, scores) = line.asks();
        let choices = asks.len();
        let scored = line.scored();
        let own = Arc::clone(self);
        let jobs = tokio::task::spawn_blocking(move || own.jobs(span, choices, scored));
        let Ok(jobs) = jobs.await else {
            return Answer::Ended;
        };
        for (ask, job) in asks.iter_mut().zip(&jobs) {
            ask.patient = true;
            ask.job.clone_from(job);
        }
        let Ok(mut place) = self.queue.enter_behind(asks, scores) else {
            return Answer::Ended;
        };
        let hearing = place.ended_by(&self.batch.cancel);
        let failure = loop {
            match place.next().await {
                Some(News::Choice { choice, step }) => line.take(choice, step),
                Some(News::Done) => break None,
                Some(News::Failed(failure)) => break Some(failure),
                Some(News::Interrupted) | None => {
                    let_go(&jobs);
                    return Answer::Ended;
                }
            }
        };
        drop(hearing);
        // The queue's thread may hold them a little longer than it needs them.
        let_go(&jobs);
        match failure {
            None => Answer::Line(true, line.answer()),
            // No fault of the line's: another time it may be answered.
            Some(Failure::Unavailable { .. }) if !last => Answer::Later,
            Some(failure) => Answer::Line(false, line.refused(&ApiError::from(failure)).line),
        }
    }

    /// Where a line's choices are kept while they are made, as far as they can be: a disk that is
    /// full costs time after the next stop and nothing now.
    fn jobs(&self, span: Span, choices: usize, scored: bool) -> Vec<Option<SharedJob>> {
        let disk = self.door.shelf.disk();
        let names = self.names(span);
        let job = |choice| {
            let job = disk?.line(&format!("{names}{choice}"), scored).ok()?;
            Some(SharedJob::new(std::sync::Mutex::new(Some(job))))
        };
        (0..choices).map(job).collect()
    }

    /// Writes the files and says that it is over.
    async fn conclude(self: &Arc<Self>) -> Option<()> {
        let finalize = |work: &Work| {
            let from = [Status::InProgress];
            work.batch.bring(&from, Status::Finalizing, |_| {})
        };
        self.insist(finalize).await?;
        // From here on nobody can cancel it any more, or somebody has.
        let (from, to) = match self.batch.status() {
            Status::Cancelling => (Status::Cancelling, Status::Cancelled),
            _ => (Status::Finalizing, Status::Completed),
        };
        let write = move |work: &Work| {
            if let Some(disk) = work.door.shelf.disk() {
                // Of lines that were not to be ended any more.
                disk.remove_lines(&format!("{}-", work.batch.id()));
            }
            let output = work.write(true)?;
            let errors = work.write(false)?;
            let there = |state: &mut super::State| {
                state.output.there = output;
                state.errors.there = errors;
            };
            work.batch.bring(&[from], to, there)
        };
        self.insist(write).await.map(drop)
    }

    /// Writes the output or the error file; whether there is anything in it.
    fn write(&self, good: bool) -> Result<bool, JobError> {
        let state = self.batch.state().clone();
        let (id, kind) = match good {
            true => (state.output.id, "output"),
            false => (state.errors.id, "error"),
        };
        let log = self.batch.log();
        let (outputs, errors) = log.counts();
        if (if good { outputs } else { errors }) == 0 {
            return Ok(false);
        }
        let mut upload = self.kept.files.begin()?;
        let path = self.batch.folder.join(kind);
        let mut buffered = std::io::BufWriter::new(&mut upload);
        log.copy(good, &mut buffered)
            .and_then(|()| buffered.flush())
            .map_err(JobError::disk("cannot be written out", &path))?;
        drop(buffered);
        let name = format!("{}_{kind}.jsonl", state.id);
        upload.finish(&id, &name, Purpose::BatchOutput)?;
        Ok(true)
    }

    /// Does what needs the disk until the disk lets it: what is answered took hours. `None` where
    /// the server stops before.
    async fn insist<T: Send + 'static>(
        self: &Arc<Self>,
        what: impl Fn(&Work) -> Result<T, JobError> + Send + Sync + 'static,
    ) -> Option<T> {
        let what = Arc::new(what);
        loop {
            let (own, what) = (Arc::clone(self), Arc::clone(&what));
            // A panic, which has been reported by the panic hook, leaves it to the next process.
            let done = tokio::task::spawn_blocking(move || what(&own)).await.ok()?;
            if let Ok(done) = done {
                return Some(done);
            }
            self.rest(DISK_REST, false).await;
            if self.queue.closed() {
                return None;
            }
        }
    }

    /// Waits, unless the server stops, or, where that counts, the batch is cancelled.
    async fn rest(&self, time: Duration, cancellable: bool) {
        let until = tokio::time::Instant::now() + time;
        while tokio::time::Instant::now() < until {
            if self.queue.closed() || (cancellable && self.batch.cancel.asked()) {
                return;
            }
            tokio::time::sleep(LOOK.min(time)).await;
        }
    }
}

/// How a line's turn went.
enum Answer {
    /// A line of the output (`true`) or the error file.
    Line(bool, Value),
    /// The weights did not come.
    Later,
    /// The batch or the server ends.
    Ended,
}

/// Lets go of jobs, so that they can be taken up again.
fn let_go(jobs: &[Option<SharedJob>]) {
    for job in jobs.iter().flatten() {
        *job.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
