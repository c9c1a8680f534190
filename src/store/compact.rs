//! Rewriting a digest log that has grown long, so that it holds one line a file.
//!
//! Each fetch of an expert adds a line, and each check of one after an unclean stop; a cache that
//! turns over again and again would be outgrown by its log. The new log is written beside the old one,
//! synced, and renamed: at every instant the name holds the old lines or the new ones.
//!
//! It is rewritten only while no other process is on the home, inside the gate, where none can come
//! in: another's appends would go to the file that has lost its name.
//!
//! What stays: lines of everything that is there; lines of files other than experts, which may be
//! just about to get their names; and what whole shards or a manifest have proved of experts, whether
//! they are here or not. A first arrival that is gone proves nothing to its successor.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Inner;
use super::Model;
use super::digests::DigestLog;
use super::disk::Kind;
use super::disk::write_file;
use super::index::EntryId;
use super::lock;
use super::recover;
use super::table::Level;
use super::table::Subject;
use super::table::Table;

/// A log may have so many lines more than twice those that are live: rewriting it is no use for less.
const SLACK: u64 = 256;
/// About the length of a line.
const LINE_BYTES: u64 = 300;

impl DigestLog {
    /// Whether the log is so long that it is worth looking how much of it is live.
    fn is_long(&self) -> bool {
        let least = self.look_at.load(Ordering::Relaxed).max(SLACK);
        let table = lock(&self.table);
        table.as_ref().is_some_and(|t| t.lines() > least)
    }

    /// Rewrites the log if it holds more than about twice the lines of what `keep` says is live.
    /// Returns whether it did.
    ///
    /// # Errors
    ///
    /// If the disk refuses; then the old log is as good as ever.
    fn shorten(&self, keep: &dyn Fn(&Subject, Level) -> bool) -> io::Result<bool> {
        // Nobody may append to what is about to lose its name. Who only asks need not wait for the
        // new log to be synced: until then the old lines are as true.
        let mut tail = lock(&self.tail);
        let text = {
            let mut guard = lock(&self.table);
            self.refresh(&mut guard)?;
            let Some(table) = guard.as_ref() else {
                return Ok(false);
            };
            let limit = table.live(keep) * 2 + SLACK;
            self.look_at.store(limit, Ordering::Relaxed);
            if table.lines() <= limit {
                return Ok(false);
            }
            table.rewritten(keep)?
        };
        // Whatever becomes of it, what is open may no longer be what has the name.
        tail.file = None;
        tail.broken = false;
        write_file(&*self.disk, &self.path, text.as_bytes())?;
        let mut short = Table::default();
        short.file = self.disk.facts(&self.path)?.id;
        short.read_to = short.replay(text.as_bytes()) as u64;
        *lock(&self.table) = Some(short);
        Ok(true)
    }
}

impl Inner {
    /// Something of this model was stored: it is synced behind, and its log shortened if it is long.
    pub(super) fn stored(&self, model: &Model) {
        if let Some(syncer) = &self.syncer {
            syncer.wake();
        }
        if !model.log.is_long() {
            return;
        }
        // A gate that is busy, or a disk that refuses, costs some bytes of log until the next time.
        let Ok(entered) = self.gate.enter(Duration::ZERO) else {
            return;
        };
        if recover::others_alive(self).is_ok_and(|others| !others) {
            let _ = self.shorten(model);
        }
        drop(entered);
    }

    /// Shortens every log that is long, when a home is opened by the only process on it. The length of
    /// the file decides which are read for it: reading each would make every opening slow.
    pub(super) fn shorten_logs(&self) {
        let models = lock(&self.state).models.clone();
        for model in models {
            let Ok(facts) = self.disk.facts(model.log.path()) else {
                continue;
            };
            let experts = lock(&self.state).index.of_model(model.id).count() as u64;
            if facts.kind == Kind::File && facts.len / LINE_BYTES > experts * 2 + SLACK {
                let _ = self.shorten(&model);
            }
        }
    }

    /// Called inside the gate, by the only process on the home.
    fn shorten(&self, model: &Model) -> io::Result<bool> {
        let here = |key| {
            let id = EntryId {
                model: model.id,
                key,
            };
            // One that another process has brought may not be in the index yet.
            lock(&self.state).index.get(id).is_some()
                || self
                    .disk
                    .facts(&recover::expert_path(&model.folder, key))
                    .is_ok()
        };
        model.log.shorten(&|subject, level| match subject {
            Subject::Expert(key) => level > Level::FirstUse || here(*key),
            Subject::File(_) => true,
        })
    }
}
