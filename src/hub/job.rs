//! One span on its way: what was asked, what has come, who waits.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::AcqRel;
use std::sync::atomic::Ordering::Acquire;
use std::sync::atomic::Ordering::Release;

use sha2::Digest as _;
use sha2::Sha256;
use tokio::sync::Notify;

use super::Arrived;
use super::Class;
use super::HubError;
use super::Snapshot;
use super::Span;
use super::gathered::Gathered;
use super::stream::Pipe;
use crate::terms::Digest;

/// A span that was asked for and not delivered yet.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) span: Span,
    pub(super) control: Arc<Control>,
    pub(super) deliver: Deliver,
    /// Sources that could not serve it, by their place in the options.
    pub(super) tried: Vec<bool>,
    /// The most telling reason so far.
    pub(super) error: Option<HubError>,
    pub(super) partial: Arc<Mutex<Partial>>,
}

impl Job {
    pub(super) fn partial(&self) -> MutexGuard<'_, Partial> {
        self.partial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the reason that tells a person most: a wrong byte more than a refusal, a refusal more
    /// than silence, silence more than absence.
    pub(super) fn blame(&mut self, error: HubError) {
        let weight = |e: &HubError| match e {
            HubError::WrongContent { .. } => 5,
            HubError::Denied { .. } | HubError::Refused { .. } => 4,
            HubError::Protocol { .. } | HubError::NotAHub { .. } | HubError::Disk { .. } => 3,
            HubError::Unreachable { .. } => 2,
            _ => 1,
        };
        if self
            .error
            .as_ref()
            .is_none_or(|old| weight(&error) > weight(old))
        {
            self.error = Some(error);
        }
    }
}

/// The beginning of a span, growing, with its digest so far.
#[derive(Clone, Default)]
pub(super) struct Partial {
    pub(super) bytes: Gathered,
    sum: Sha256,
    /// Whether some reply did not state the pinned digest of the whole file. Another source may go
    /// on where this one stopped only if all did.
    pub(super) doubtful: bool,
    /// The one source all of it came from, or `None` if several gave a part.
    pub(super) source: Option<usize>,
    /// Where the bytes go at once, if they are not gathered here.
    pub(super) pipe: Option<Arc<Pipe>>,
    /// Bytes that went there.
    pub(super) streamed: u64,
    /// What went there should not have: the stream cannot go on.
    pub(super) void: bool,
}

impl Partial {
    pub(super) fn add(&mut self, chunk: &[u8]) {
        self.sum.update(chunk);
        self.bytes.add(chunk);
    }

    pub(super) fn new(pipe: Option<Arc<Pipe>>) -> Self {
        Partial {
            pipe,
            ..Partial::default()
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.bytes.len() as u64 + self.streamed
    }

    /// Forgets everything; returns how many bytes that were.
    pub(super) fn clear(&mut self) -> u64 {
        if self.pipe.is_some() {
            self.void |= self.streamed > 0;
            return 0;
        }
        let lost = self.len();
        *self = Partial::default();
        lost
    }

    pub(super) fn digest(&self) -> Digest {
        Digest(self.sum.clone().finalize().into())
    }
}

/// The callback, called exactly once: with `Cancelled` if nothing else came before it is dropped.
/// Behind a lock only so that a job can be looked at from several threads.
pub(super) struct Deliver(Mutex<Option<Callback>>);

type Callback = Box<dyn FnOnce(Result<Arrived, HubError>) + Send>;

impl Deliver {
    pub(super) fn new(callback: impl FnOnce(Result<Arrived, HubError>) + Send + 'static) -> Self {
        Deliver(Mutex::new(Some(Box::new(callback))))
    }

    pub(super) fn call(mut self, outcome: Result<Arrived, HubError>) {
        if let Some(callback) = self.take() {
            callback(outcome);
        }
    }

    fn take(&mut self) -> Option<Callback> {
        self.0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl Drop for Deliver {
    fn drop(&mut self) {
        if let Some(callback) = self.take() {
            callback(Err(HubError::Cancelled));
        }
    }
}

/// The wires between a ticket and its job.
pub(super) struct Control {
    class: AtomicU8,
    cancelled: AtomicBool,
    yielding: AtomicBool,
    wake: Notify,
}

impl Control {
    pub(super) fn new(class: Class) -> Self {
        Control {
            class: AtomicU8::new(class as u8),
            cancelled: AtomicBool::new(false),
            yielding: AtomicBool::new(false),
            wake: Notify::new(),
        }
    }

    pub(super) fn class(&self) -> Class {
        match self.class.load(Acquire) {
            0 => Class::Demand,
            1 => Class::Bulk,
            _ => Class::Hint,
        }
    }

    pub(super) fn set_class(&self, class: Class) {
        self.class.store(class as u8, Release);
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Release);
        self.wake.notify_one();
    }

    pub(super) fn cancelled(&self) -> bool {
        self.cancelled.load(Acquire)
    }

    /// Asks a running guess to give its lane up. Whether it had not been asked before.
    pub(super) fn yield_lane(&self) -> bool {
        let first = !self.yielding.swap(true, AcqRel);
        self.wake.notify_one();
        first
    }

    pub(super) fn resume(&self) {
        self.yielding.store(false, Release);
    }

    /// Comes back when the job should stop, for either reason.
    pub(super) async fn interrupted(&self) {
        while !self.cancelled() && !self.yielding.load(Acquire) {
            self.wake.notified().await;
        }
    }
}
