//! Responses on the disk: each is a job of its own in the journal, under its id.
//!
//! What was said of it when it was made is the job's request; the response as it ended, with what a
//! stream said of it, is the job's outcome. One without an outcome is still to be made.

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;

use crate::jobs::Identity;
use crate::jobs::Job;
use crate::jobs::JobError;
use crate::jobs::Journal;
use crate::jobs::Listed;
use crate::jobs::Outcome;
use crate::server::reply::Frame;

/// The kind of these jobs.
const KIND: &str = "response";
/// The kind of the jobs of a batch's lines.
const LINE: &str = "batch-line";

/// What a response was made from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::server) struct Made {
    /// The request's body; of a background response alone.
    pub(in crate::server) body: Value,
    /// The conversation it goes on from.
    pub(in crate::server) before: Vec<Value>,
    /// Of its draws, where the body names none.
    pub(in crate::server) seed: u64,
    pub(in crate::server) background: bool,
    /// Seconds since 1970.
    pub(in crate::server) created: u64,
    /// The items of the input.
    pub(in crate::server) input: Vec<Value>,
    /// The conversation up to it, as messages of a chat.
    pub(in crate::server) messages: Vec<Value>,
    /// As it was before anything was made.
    pub(in crate::server) response: Value,
}

/// How a response ended.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    pub(super) response: Value,
    /// What it adds to a conversation.
    pub(super) message: Value,
    /// What a stream said; of a background response alone.
    pub(super) frames: Vec<Frame>,
}

/// Where responses outlive the process.
#[derive(Debug)]
pub(in crate::server) struct Disk {
    journal: Journal,
    identity: Identity,
}

impl Disk {
    pub(in crate::server) fn new(journal: Journal, identity: Identity) -> Disk {
        Disk { journal, identity }
    }

    /// Begins to keep one.
    pub(in crate::server) fn begin(&self, id: &str, made: &Made) -> Result<Job, JobError> {
        let request = serde_json::to_value(made).unwrap_or_default();
        self.journal.create_as(id, KIND, request, &self.identity)
    }

    /// Takes one up again that nobody owns. What another commit or another arithmetic began is
    /// begun anew: its tokens are not those that would follow here.
    pub(in crate::server) fn take_up(&self, id: &str) -> Result<Job, JobError> {
        let mut job = self.journal.get(id)?;
        if *job.identity() != self.identity {
            job.replace(job.request().clone(), &self.identity)?;
        }
        Ok(job)
    }

    /// The one of this id, as it lies there.
    pub(super) fn look(&self, id: &str) -> Option<(Made, Option<Ended>)> {
        let listed = self.journal.look(id).ok().filter(|job| job.kind == KIND)?;
        let ended = match &listed.outcome {
            Some(Outcome::Result(value)) => serde_json::from_value(value.clone()).ok(),
            _ => None,
        };
        made(&listed).map(|made| (made, ended))
    }

    /// The job of one choice of a batch's line, as far as an earlier process came with it; `anew`
    /// where that does not help, as scores are not kept.
    pub(in crate::server) fn line(&self, name: &str, anew: bool) -> Result<Job, JobError> {
        let mut job = self
            .journal
            .create_as(name, LINE, Value::Null, &self.identity)?;
        if *job.identity() != self.identity || (anew && !job.ids().is_empty()) {
            job.replace(Value::Null, &self.identity)?;
        }
        Ok(job)
    }

    /// Removes the jobs of lines whose names begin so. One that stays is a few bytes.
    pub(in crate::server) fn remove_lines(&self, begin: &str) {
        let ids = self.journal.ids();
        for id in ids.iter().filter(|id| id.starts_with(begin)) {
            let _ = self.journal.remove(id);
        }
    }

    pub(super) fn remove(&self, id: &str) {
        // One that another process is making stays; one that cannot be removed is found again.
        let _ = self.journal.remove(id);
    }

    /// The names of all, the oldest first, and of those of this model that are still to be made.
    pub(in crate::server) fn all(&self) -> (Vec<String>, Vec<(String, Made)>) {
        let listed = self.journal.list(KIND);
        let ids = listed.iter().map(|job| job.id.clone()).collect();
        let ours = |job: &&Listed| job.identity.model == self.identity.model;
        let open = listed
            .iter()
            .filter(ours)
            .filter(|job| job.outcome.is_none() && !job.running);
        let open = open.filter_map(|job| Some((job.id.clone(), made(job)?)));
        let open: Vec<_> = open.filter(|(_, made)| made.background).collect();
        (ids, open)
    }
}

fn made(job: &Listed) -> Option<Made> {
    serde_json::from_value(job.request.clone()).ok()
}
