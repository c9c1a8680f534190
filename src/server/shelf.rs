//! Responses that are kept: looked up by their names, gone on from, and, in the background, made
//! while nobody listens. With a journal they outlive the process: see [`disk`].

pub(super) mod disk;

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use serde_json::Value;
use serde_json::json;
use tokio::sync::watch;

use self::disk::Disk;
use self::disk::Ended;
use self::disk::Made;
use super::cancel::Cancel;
use super::generator::SharedJob;
use super::queue::Step;
use super::reply::Frame;
use super::reply::Shape;
use super::reply::responses::ResponseReply;

/// Responses kept; the oldest that are over go first.
const KEPT_MAX: usize = 1000;

/// One response that is kept.
pub(super) struct Record {
    pub(super) id: String,
    pub(super) background: bool,
    /// The items of the input, as they came.
    pub(super) input: Vec<Value>,
    /// The conversation up to it, as messages of a chat.
    messages: Vec<Value>,
    reply: Mutex<Held>,
    /// What a stream has said so far; of a background response alone.
    frames: Mutex<Vec<Frame>>,
    /// How many frames there are, and whether those are all.
    grown: watch::Sender<(usize, bool)>,
    /// Ends a background response.
    pub(super) cancel: Cancel,
    /// Where it is kept.
    job: SharedJob,
    deleted: AtomicBool,
}

/// A response that is made here, or as it was read from the disk.
enum Held {
    Live(Box<ResponseReply>),
    Past { response: Value, message: Value },
}

impl Held {
    fn live(&mut self) -> Option<&mut ResponseReply> {
        match self {
            Held::Live(reply) => Some(reply),
            Held::Past { .. } => None,
        }
    }
}

impl Record {
    pub(super) fn new(
        id: &str,
        background: bool,
        input: Vec<Value>,
        messages: Vec<Value>,
        reply: ResponseReply,
    ) -> Arc<Record> {
        Arc::new(Record {
            id: id.to_owned(),
            background,
            input,
            messages,
            reply: Mutex::new(Held::Live(Box::new(reply))),
            frames: Mutex::default(),
            grown: watch::Sender::new((0, false)),
            cancel: Cancel::default(),
            job: SharedJob::default(),
            deleted: AtomicBool::new(false),
        })
    }

    /// One that is not made here: it has ended, or another process makes it.
    fn past(id: &str, made: Made, ended: Option<Ended>) -> Arc<Record> {
        let ended = ended.unwrap_or_else(|| Ended {
            response: made.response,
            message: json!({ "role": "assistant", "content": "" }),
            frames: Vec::new(),
        });
        let length = ended.frames.len();
        Arc::new(Record {
            id: id.to_owned(),
            background: made.background,
            input: made.input,
            messages: made.messages,
            reply: Mutex::new(Held::Past {
                response: ended.response,
                message: ended.message,
            }),
            frames: Mutex::new(ended.frames),
            grown: watch::Sender::new((length, true)),
            cancel: Cancel::default(),
            job: SharedJob::default(),
            deleted: AtomicBool::new(false),
        })
    }

    /// Where its generation keeps itself.
    pub(super) fn job(&self) -> SharedJob {
        Arc::clone(&self.job)
    }

    /// Waits until one that is over is on the disk, and one that is cancelled has ended, for as long
    /// as it takes to leave an expert.
    pub(super) async fn ended(&self) {
        let mut grown = self.watch();
        let over = grown.wait_for(|(_, last)| *last);
        // Whoever asked hears how it stands in any case: a disk may be stuck.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), over).await;
    }

    /// Keeps how it ended, and lets its job go. A disk that refuses costs what is kept only here.
    fn conclude(&self) {
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut job) = job.take() else { return };
        if self.deleted.load(Ordering::SeqCst) {
            let _ = job.remove();
            return;
        }
        let ended = Ended {
            response: self.response(),
            message: self.message(),
            frames: self.frames(0),
        };
        let _ = job.finish(serde_json::to_value(&ended).unwrap_or_default());
    }

    /// Has it be made anew at the next start.
    pub(super) fn put_off(&self) {
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        *job = None;
    }

    fn message(&self) -> Value {
        match &*self.reply() {
            Held::Live(reply) => reply.message(),
            Held::Past { message, .. } => message.clone(),
        }
    }

    fn reply(&self) -> MutexGuard<'_, Held> {
        self.reply.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The response as it stands.
    pub(super) fn response(&self) -> Value {
        match &*self.reply() {
            Held::Live(reply) => reply.response(),
            Held::Past { response, .. } => response.clone(),
        }
    }

    /// Whether nothing more will change.
    pub(super) fn over(&self) -> bool {
        match &*self.reply() {
            Held::Live(reply) => reply.over(),
            Held::Past { .. } => true,
        }
    }

    /// Whether it is still to be made, and not here.
    pub(super) fn elsewhere(&self) -> bool {
        match &*self.reply() {
            Held::Live(_) => false,
            Held::Past { response, .. } => response["status"] == "queued",
        }
    }

    /// Marks it as cancelled, unless it is over, and has its making ended.
    pub(super) fn end(&self) {
        if let Some(reply) = self.reply().live() {
            reply.cancel();
        }
        self.cancel.cancel();
    }

    /// The conversation with this response at its end, to go on from.
    pub(super) fn conversation(&self) -> Vec<Value> {
        let mut messages = self.messages.clone();
        messages.push(self.message());
        messages
    }

    /// Adds to what a stream says; `last` with its end.
    pub(super) fn say(&self, frames: Vec<Frame>, last: bool) {
        let length = self.hold(frames);
        self.grown.send_replace((length, last));
    }

    /// Adds to what a stream will say, and says nothing yet; how much there is.
    pub(super) fn hold(&self, frames: Vec<Frame>) -> usize {
        let mut all = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(frames);
        all.len()
    }

    /// What a stream says from this frame on.
    pub(super) fn frames(&self, from: usize) -> Vec<Frame> {
        let all = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(from..).map(<[Frame]>::to_vec).unwrap_or_default()
    }

    /// Hears of more frames.
    pub(super) fn watch(&self) -> watch::Receiver<(usize, bool)> {
        self.grown.subscribe()
    }

    /// The input as `/v1/responses/{id}/input_items` has it.
    pub(super) fn input_items(&self) -> Value {
        let whole = self.id.trim_start_matches("resp_");
        let item = |(n, item): (usize, &Value)| {
            let mut item = item.clone();
            let kind = item["type"].as_str().unwrap_or("message").to_owned();
            if let Value::Object(fields) = &mut item {
                fields.insert("type".to_owned(), kind.into());
                fields
                    .entry("id")
                    .or_insert(format!("in_{whole}{n:02x}").into());
                fields.entry("status").or_insert("completed".into());
            }
            if let Value::String(text) = &item["content"] {
                let kind = if item["role"] == "assistant" {
                    "output_text"
                } else {
                    "input_text"
                };
                let mut part = json!({ "type": kind, "text": text });
                if kind == "output_text" {
                    part["annotations"] = json!([]);
                }
                item["content"] = json!([part]);
            }
            item
        };
        let data: Vec<Value> = self.input.iter().enumerate().map(item).collect();
        let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
        json!({
            "object": "list", "first_id": id(data.first()), "last_id": id(data.last()),
            "has_more": false, "data": data,
        })
    }
}

/// A kept response as a kind of reply, and the disk it is kept on when it has ended.
pub(super) struct Kept(pub(super) Arc<Record>, pub(super) Option<Keeping>);

/// What it takes to keep a response that somebody waits for, once it is whole.
pub(super) struct Keeping {
    pub(super) disk: Arc<Disk>,
    pub(super) made: Made,
}

impl Kept {
    fn live<T: Default>(&self, of: impl FnOnce(&mut ResponseReply) -> T) -> T {
        self.0.reply().live().map(of).unwrap_or_default()
    }

    /// It has ended: before anybody hears so it is on the disk.
    fn keep(&mut self) {
        let Some(Keeping { disk, made }) = self.1.take() else {
            return;
        };
        let record = &self.0;
        on_disk(|| {
            if let Ok(job) = disk.begin(&record.id, &made) {
                *record.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
                record.conclude();
            }
        });
    }
}

/// Does what may wait for the disk; the work of the runtime's other threads does not wait for it.
fn on_disk<T>(what: impl FnOnce() -> T) -> T {
    let runtime = tokio::runtime::Handle::try_current();
    match runtime.map(|handle| handle.runtime_flavor()) {
        Ok(tokio::runtime::RuntimeFlavor::MultiThread) => tokio::task::block_in_place(what),
        _ => what(),
    }
}

impl Shape for Kept {
    fn take(&mut self, choice: usize, step: Step) -> Vec<Frame> {
        self.live(|reply| reply.take(choice, step))
    }

    fn end(&mut self) -> Vec<Frame> {
        let frames = self.live(Shape::end);
        self.keep();
        frames
    }

    fn fail(&mut self, error: Value) -> Vec<Frame> {
        let frames = self.live(|reply| reply.fail(error));
        self.keep();
        frames
    }

    fn whole(&mut self) -> Value {
        let whole = self.live(Shape::whole);
        self.keep();
        whole
    }

    fn farewell(&self) -> Option<&'static str> {
        self.live(|reply| reply.farewell())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Whoever waited is gone: what is not over by now never will be.
        if !self.0.background {
            self.live(ResponseReply::cancel);
            self.keep();
        }
    }
}

/// Everything that is kept.
#[derive(Default)]
pub(super) struct Shelf {
    records: Mutex<Records>,
    disk: OnceLock<Arc<Disk>>,
}

#[derive(Default)]
struct Records {
    by_id: HashMap<String, Arc<Record>>,
    order: VecDeque<String>,
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has what is kept outlive the process.
    pub(super) fn keep_on(&self, disk: Disk) {
        // A second disk would hold nothing of the first.
        let _ = self.disk.set(Arc::new(disk));
    }

    pub(super) fn disk(&self) -> Option<&Arc<Disk>> {
        self.disk.get()
    }

    /// Counts in what an earlier process left; those that are still to be made.
    pub(super) fn find_left(&self) -> Vec<(String, Made)> {
        let Some(disk) = self.disk() else {
            return Vec::new();
        };
        let (ids, open) = disk.all();
        let mut kept = self.lock();
        for id in ids.into_iter().rev() {
            if !kept.by_id.contains_key(&id) {
                kept.order.push_front(id);
            }
        }
        open
    }

    /// Keeps one, and whatever is needed to keep it when the process ends.
    pub(super) fn put(&self, record: &Arc<Record>) {
        let mut kept = self.lock();
        kept.order.retain(|id| *id != record.id);
        kept.order.push_back(record.id.clone());
        kept.by_id.insert(record.id.clone(), Arc::clone(record));
        let mut gone = Vec::new();
        // Those at work are few: the queue sees to that.
        while kept.order.len() > KEPT_MAX {
            let over = |id: &String| kept.by_id.get(id).is_none_or(|record| record.over());
            let Some(at) = kept.order.iter().position(over) else {
                break;
            };
            if let Some(id) = kept.order.remove(at) {
                kept.by_id.remove(&id);
                gone.push(id);
            }
        }
        drop(kept);
        if let Some(disk) = self.disk() {
            gone.iter().for_each(|id| disk.remove(id));
        }
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Record>> {
        if let Some(record) = self.lock().by_id.get(id) {
            return Some(Arc::clone(record));
        }
        let (made, ended) = self.disk()?.look(id)?;
        Some(Record::past(id, made, ended))
    }

    pub(super) fn remove(&self, id: &str) -> Option<Arc<Record>> {
        let record = self.get(id)?;
        on_disk(|| {
            // Who makes it holds this lock from its look at the mark to the last byte it writes: it
            // finds the mark, or no job, or what it wrote is there to be removed below.
            let mut job = record.job.lock().unwrap_or_else(PoisonError::into_inner);
            record.deleted.store(true, Ordering::SeqCst);
            if let Some(job) = job.take() {
                let _ = job.remove();
            }
        });
        let mut kept = self.lock();
        kept.order.retain(|kept| kept != id);
        kept.by_id.remove(id);
        drop(kept);
        if let Some(disk) = self.disk() {
            disk.remove(id);
        }
        Some(record)
    }
}

/// Keeps the end of a background response, on a thread that may wait for the disk.
pub(super) async fn conclude(record: &Arc<Record>) {
    let record = Arc::clone(record);
    // A panic there has been reported by the panic hook.
    let _ = tokio::task::spawn_blocking(move || record.conclude()).await;
}
