//! A full install: large ranges of shards, split into experts and the rest as they come.
//!
//! ```text
//! shard 1 | 8 + N | core | e0 | e1 | e2 | vision | e3 | ...      lane A: in order, digest in passing
//! shard 2 | 8 + N | core | e0 | e1 | ...                         lane B
//! shard 3 (all lanes busy) ...  e5 | e6 | e7 |                   taken from its end by a lane without work
//! ```
//!
//! A lane owns a shard and brings it from its first missing byte to its last, so that the whole
//! shard's digest is computed as the bytes pass, and only the header and the core, which came before,
//! are read for it. A lane that finds every shard owned helps from the end of the longest. A shard of
//! which something was there before, or which was helped with, is read back once, at the end
//! ([`Opened::prove`]).

use std::collections::HashMap;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use super::ResidencyError;
use super::growing::Growing;
use super::growing::Refused;
use super::install::Installed;
use super::lanes::Halt;
use super::lanes::in_lanes;
use super::open::InstallObserver;
use super::open::Opened;
use super::stretch::BEGINNINGS_MAX;
use super::stretch::STOP_CHECK;
use super::todo::Entry;
use super::todo::ShardTodo;
use super::todo::Todo;
use super::todo::What;
use super::todo::is_begun;
use crate::checkpoint::Part;
use crate::hub::Class;
use crate::hub::HubError;
use crate::hub::Streamed;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Holder;
use crate::store::Lookup;
use crate::store::NotKept;
use crate::store::ShardDigest;
use crate::store::Shards;
use crate::store::StoreError;
use crate::terms::ByteRange;
use crate::terms::ExpertKey;

/// Ranges under way at once, each written by a thread of its own.
pub(super) const LANES: usize = 8;
/// Who delivered what an earlier run had brought, as far as is still known.
const EARLIER: &str = "an earlier run";
/// How often the free disk is looked at.
const ROOM_EVERY: Duration = Duration::from_secs(1);

/// A lane's shard.
struct Owned {
    place: usize,
    digest: Option<ShardDigest>,
}

enum Next {
    Run(u16, VecDeque<Entry>),
    Close(Owned),
    Nothing,
}

/// One installation.
pub(super) struct Bulk<'a> {
    opened: &'a Opened,
    observer: &'a dyn InstallObserver,
    shards: &'a Shards,
    begun: HashMap<ExpertKey, u64>,
    todo: Mutex<Todo>,
    run_max: u64,
}

/// What has been brought, and what is left to be brought one by one.
pub(super) struct Brought {
    pub(super) installed: Installed,
    pub(super) late: Vec<ExpertKey>,
}

impl<'a> Bulk<'a> {
    /// Looks what is missing of the experts in `layers`, and of the rest if that is all of them.
    pub(super) fn survey(
        opened: &'a Opened,
        shards: &'a Shards,
        layers: Option<&RangeInclusive<u16>>,
        order: &[ExpertKey],
        observer: &'a dyn InstallObserver,
    ) -> Result<Self, ResidencyError> {
        let (store, layout) = (&opened.store, &opened.layout);
        let mut todo = Todo::default();
        let begun = store.begun();
        let mut entries: Vec<(u16, Entry)> = Vec::new();
        for key in opened.keys(layers) {
            if store.contains(key, layout.expert_len()) {
                continue;
            }
            match layout.expert(key) {
                [part] => entries.push((part.shard, Entry::new(part.range, What::Expert(key)))),
                _ => todo.late.push(key),
            }
        }
        if layers.is_none() {
            let rest = store.missing(layout).rest.into_iter();
            entries.extend(rest.map(|part| (part.shard, Entry::new(part.range, What::Rest))));
        }
        let ranks: HashMap<ExpertKey, usize> = order.iter().copied().zip(0..).collect();
        let rank = |entry: &Entry| match entry.what {
            What::Expert(key) => ranks.get(&key).copied(),
            What::Rest => None,
        };
        let (mut first, mut others): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|(_, e)| rank(e).is_some());
        first.sort_by_key(|(_, entry)| rank(entry));
        todo.first = first.into();
        others.sort_unstable_by_key(|(shard, entry)| (*shard, entry.range));
        for group in others.chunk_by(|(a, _), (b, _)| a == b) {
            let number = group[0].0;
            let name = &layout.shards()[usize::from(number)];
            let fetched = |s: &&crate::store::Stretch| {
                matches!(s.holder, Holder::Expert { .. } | Holder::Rest)
            };
            let all = shards.stretches(name).iter().filter(fetched).count();
            let fresh = group.iter().all(|(_, e)| !is_begun(&begun, e));
            let passing = layers.is_none() && all == group.len() && fresh;
            todo.shards.push(ShardTodo {
                number,
                entries: group.iter().map(|(_, entry)| *entry).collect(),
                owned: false,
                passing: passing && !store.is_confirmed(name)?,
            });
        }
        Ok(Bulk {
            opened,
            observer,
            shards,
            begun,
            todo: Mutex::new(todo),
            run_max: opened.run_max(),
        })
    }

    /// Bytes that are to be moved, apart from experts that come one by one. None may be left although
    /// something is to be done: an expert whose last byte came and that was never given its name.
    pub(super) fn missing(&self) -> u64 {
        self.todo().missing(&self.begun)
    }

    /// Whether all that was asked for is in the store.
    pub(super) fn is_done(&self) -> bool {
        self.todo().is_done()
    }

    /// Experts that have to come one by one.
    pub(super) fn scattered(&self) -> u64 {
        self.todo().late.len() as u64
    }

    /// Brings all of it but what has to come one by one.
    ///
    /// # Errors
    ///
    /// If the hub or the disk fails, or somebody asked to stop. What was brought is kept.
    pub(super) fn bring(self) -> Result<Brought, ResidencyError> {
        in_lanes(&self.opened.stop, LANES, |halt| self.lane(halt))?;
        let todo = self
            .todo
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(Brought {
            installed: todo.installed,
            late: todo.late,
        })
    }

    fn todo(&self) -> MutexGuard<'_, Todo> {
        self.todo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane(&self, halt: &Halt<'_>) -> Result<(), ResidencyError> {
        let mut own: Option<Owned> = None;
        loop {
            halt.check()?;
            let next = self.next(&mut own);
            match next {
                Next::Nothing => return Ok(()),
                Next::Close(owned) => self.close(owned, halt)?,
                Next::Run(shard, entries) => {
                    let digest = own.as_mut().map(|own| &mut own.digest);
                    self.fetch_run(shard, entries, digest.unwrap_or(&mut None), halt)?;
                }
            }
        }
    }

    fn next(&self, own: &mut Option<Owned>) -> Next {
        let mut todo = self.todo();
        if let Some(owned) = own.take() {
            let shard = &mut todo.shards[owned.place];
            if shard.entries.is_empty() {
                return Next::Close(owned);
            }
            let run = (shard.number, self.cut_front(&mut shard.entries));
            *own = Some(owned);
            return Next::Run(run.0, run.1);
        }
        if let Some((shard, entry)) = todo.first.pop_front() {
            return Next::Run(shard, VecDeque::from([entry]));
        }
        let place = todo
            .shards
            .iter()
            .position(|s| !s.owned && !s.entries.is_empty());
        if let Some(place) = place {
            let shard = &mut todo.shards[place];
            shard.owned = true;
            let name = &self.opened.layout.shards()[usize::from(shard.number)];
            let digest = shard.passing.then(|| ShardDigest::new(name));
            let run = self.cut_front(&mut shard.entries);
            *own = Some(Owned { place, digest });
            return Next::Run(shard.number, run);
        }
        let longest = todo.shards.iter_mut().max_by_key(|s| s.entries.len());
        match longest {
            Some(shard) if shard.entries.len() > 1 => {
                let run = self.cut_back(&mut shard.entries);
                Next::Run(shard.number, run)
            }
            _ => Next::Nothing,
        }
    }

    /// Neighbours from the front, as much as one request may ask for. One that was begun earlier is
    /// always the first of its run, since its request starts in the middle of it.
    fn cut_front(&self, entries: &mut VecDeque<Entry>) -> VecDeque<Entry> {
        let mut run: VecDeque<Entry> = entries.pop_front().into_iter().collect();
        while let (Some(last), Some(next)) = (run.back(), entries.front())
            && next.range.start == last.range.end
            && next.range.end - run[0].range.start <= self.run_max
            && !is_begun(&self.begun, next)
        {
            run.extend(entries.pop_front());
        }
        run
    }

    /// The same from the end, and no more than half of what is left.
    fn cut_back(&self, entries: &mut VecDeque<Entry>) -> VecDeque<Entry> {
        let most = entries.len().div_ceil(2);
        let mut run: VecDeque<Entry> = entries.pop_back().into_iter().collect();
        while run.len() < most
            && let (Some(next), Some(first)) = (entries.back(), run.front())
            && next.range.end == first.range.start
            && !is_begun(&self.begun, first)
            && run[run.len() - 1].range.end - next.range.start <= self.run_max
        {
            if let Some(entry) = entries.pop_back() {
                run.push_front(entry);
            }
        }
        run
    }

    /// All of an owned shard was brought: compares its digest, if it went by in order.
    fn close(&self, owned: Owned, halt: &Halt<'_>) -> Result<(), ResidencyError> {
        let Some(digest) = owned.digest else {
            return Ok(());
        };
        halt.check()?;
        let number = self.todo().shards[owned.place].number;
        let name = &self.opened.layout.shards()[usize::from(number)];
        // A lane that helped may not be done yet; then it is read back at the end.
        if let Ok(actual) = digest.finish(&self.opened.store, self.shards) {
            // One that differs is left to `prove`, which says so.
            self.opened.store.confirm_shard(self.shards, name, actual)?;
        }
        Ok(())
    }

    /// Brings entries of one shard, in their order.
    fn fetch_run(
        &self,
        shard: u16,
        mut entries: VecDeque<Entry>,
        digest: &mut Option<ShardDigest>,
        halt: &Halt<'_>,
    ) -> Result<(), ResidencyError> {
        let (mut beginnings, mut alone) = (0, false);
        while let Some(entry) = entries.front().copied() {
            halt.check()?;
            match self.begin(shard, entry)? {
                Begun::Here => {
                    self.observer.moved(entry.range.len());
                    entries.pop_front();
                }
                Begun::Elsewhere => {
                    *digest = None;
                    entries.pop_front();
                }
                // Its last byte came before a stop, its name did not.
                Begun::Writer(writer) if writer.missing() == 0 => {
                    entries.pop_front();
                    self.finish(*writer, EARLIER)?;
                }
                Begun::Writer(writer) => {
                    let mut run = Run {
                        shard,
                        entries: &mut entries,
                        digest,
                        writer: Some(*writer),
                    };
                    match self.stream(&mut run, alone, halt) {
                        Ok(()) => {}
                        Err(ResidencyError::Hub(HubError::CapReached { .. })) if !alone => {
                            alone = true;
                        }
                        Err(ResidencyError::Hub(HubError::Discontinued { .. }))
                            if beginnings < BEGINNINGS_MAX =>
                        {
                            beginnings += 1;
                            *digest = None;
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    fn begin(&self, shard: u16, entry: Entry) -> Result<Begun, ResidencyError> {
        let store = &self.opened.store;
        match entry.what {
            What::Expert(key) => match store.lookup(key, entry.range.len()) {
                Lookup::Hit(_) => Ok(Begun::Here),
                Lookup::Filling(_) => {
                    self.todo().late.push(key);
                    Ok(Begun::Elsewhere)
                }
                Lookup::Miss(slot) => match slot.grow() {
                    Ok(writer) => Ok(Begun::Writer(Box::new(Growing::Expert(writer)))),
                    Err(NotKept::Busy) => {
                        self.todo().late.push(key);
                        Ok(Begun::Elsewhere)
                    }
                    Err(why) => Err(self.refused(why)),
                },
            },
            What::Rest => {
                let range = entry.range;
                let name = self.opened.layout.shard(Part { shard, range });
                match store.rest(name, range)? {
                    CoreState::Ready(_) => Ok(Begun::Here),
                    // Whoever waits for it finds it after the lanes: see `install_rest`.
                    CoreState::Busy(_) => Ok(Begun::Elsewhere),
                    CoreState::Partial(writer) => {
                        Ok(Begun::Writer(Box::new(Growing::Rest(writer))))
                    }
                }
            }
        }
    }

    /// A full install that cannot keep what it brings has nothing more to do.
    fn refused(&self, why: NotKept) -> ResidencyError {
        let path = self.opened.store.folder().join("experts");
        ResidencyError::Store(match why {
            NotKept::Disk(kind) => StoreError::Io {
                path,
                doing: "write",
                source: kind.into(),
            },
            _ => StoreError::Full { path },
        })
    }

    /// One request: from the run's first missing byte as far as its neighbours are missing too.
    fn stream(
        &self,
        run: &mut Run<'_>,
        alone: bool,
        halt: &Halt<'_>,
    ) -> Result<(), ResidencyError> {
        let Some(hub) = self.opened.hub.as_ref() else {
            return Err(self
                .opened
                .missing_now(run.entries.front().and_then(|e| e.what.key())));
        };
        let range = self.request(run, alone);
        let part = Part {
            shard: run.shard,
            range,
        };
        if let Some(digest) = run.digest
            && digest
                .catch_up(&self.opened.store, self.shards, range.start)
                .is_err()
        {
            *run.digest = None;
        }
        let mut at = range.start;
        let mut stream = hub.stream(&self.opened.snapshot, self.opened.span(&part), Class::Bulk);
        loop {
            match stream.next(STOP_CHECK) {
                Ok(Streamed::Quiet) => {}
                Ok(Streamed::End) => return Ok(()),
                Ok(Streamed::Piece { bytes, source }) => {
                    let len = bytes.len() as u64;
                    self.observer.moved(len);
                    self.look_at_room();
                    let went_on = self.take(run, at, &bytes, &source)?;
                    at += len;
                    if !went_on {
                        return Ok(());
                    }
                }
                Err(error) => {
                    if let (HubError::Discontinued { .. }, Some(writer)) = (&error, &mut run.writer)
                    {
                        writer.restart().map_err(|why| self.refused(why))?;
                    }
                    return Err(error.into());
                }
            }
            halt.check()?;
        }
    }

    fn request(&self, run: &Run<'_>, alone: bool) -> ByteRange {
        let mut entries = run.entries.iter();
        let first = entries.next().map_or(ByteRange::new(0, 0), |e| e.range);
        let done = run.writer.as_ref().map_or(0, Growing::done);
        let mut end = first.end;
        for next in entries.take_while(|_| !alone) {
            let here = match next.what {
                What::Expert(key) => {
                    let len = self.opened.layout.expert_len();
                    self.opened.store.contains(key, len)
                }
                What::Rest => false,
            };
            if here || next.range.start != end {
                break;
            }
            end = next.range.end;
        }
        ByteRange::new(first.start + done, end)
    }

    /// Splits what has come into entries. False if what comes next is not wanted any more.
    fn take(
        &self,
        run: &mut Run<'_>,
        mut at: u64,
        mut bytes: &[u8],
        source: &str,
    ) -> Result<bool, ResidencyError> {
        self.todo().installed.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            if run.writer.is_none() {
                let Some(entry) = run.entries.front().copied() else {
                    return Ok(false);
                };
                match self.begin(run.shard, entry)? {
                    // What was begun by another process goes on in the middle: another request.
                    Begun::Writer(writer) if writer.done() == 0 => run.writer = Some(*writer),
                    Begun::Writer(_) => return Ok(false),
                    Begun::Here => {
                        run.entries.pop_front();
                        return Ok(false);
                    }
                    Begun::Elsewhere => {
                        *run.digest = None;
                        run.entries.pop_front();
                        return Ok(false);
                    }
                }
            }
            let Some(writer) = &mut run.writer else {
                return Ok(false);
            };
            let step = usize::try_from(writer.missing()).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(step.min(bytes.len()));
            writer.append(now).map_err(|why| match why {
                Refused::Store(error) => error.into(),
                Refused::NotKept(why) => self.refused(why),
            })?;
            if let Some(digest) = run.digest {
                digest.feed(at, now);
            }
            at += now.len() as u64;
            bytes = later;
            if writer.missing() == 0
                && let Some(writer) = run.writer.take()
            {
                run.entries.pop_front();
                self.finish(writer, source)?;
            }
        }
        Ok(true)
    }

    fn finish(&self, writer: Growing, source: &str) -> Result<(), ResidencyError> {
        match writer {
            Growing::Rest(writer) => {
                writer.finish(source)?;
            }
            Growing::Expert(writer) => match writer.finish(source) {
                Filled::Kept => self.todo().installed.fetched += 1,
                Filled::NotKept(NotKept::Conflict(_)) => self.todo().installed.not_kept += 1,
                Filled::NotKept(why) => return Err(self.refused(why)),
            },
        }
        Ok(())
    }

    fn look_at_room(&self) {
        let mut todo = self.todo();
        if todo.looked.is_some_and(|at| at.elapsed() < ROOM_EVERY) {
            return;
        }
        todo.looked = Some(Instant::now());
        drop(todo);
        if let Some(free) = self.opened.store.free() {
            self.observer.room(free);
        }
    }
}

/// A request under way.
struct Run<'a> {
    shard: u16,
    /// Not yet finished; the first is what `writer` writes.
    entries: &'a mut VecDeque<Entry>,
    digest: &'a mut Option<ShardDigest>,
    writer: Option<Growing>,
}

enum Begun {
    /// It is on disk.
    Here,
    /// Somebody else brings it.
    Elsewhere,
    Writer(Box<Growing>),
}
