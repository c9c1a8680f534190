//! Who is in the engine, who comes next, and what goes into a sweep: decisions, no work.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use std::time::Instant;

use super::pace::Pace;
use super::request::Priority;
use super::spill::SpillFile;
use super::spill::Spilled;
use super::sweeps::Lost;
use super::sweeps::Offer;
use super::sweeps::Taken;
use crate::model::Sequence;
use crate::residency::Counts;

/// How long a sweep waits for callers who have just been given their rows and will bring more.
const GRACE_MIN: Duration = Duration::from_millis(5);
const GRACE_MAX: Duration = Duration::from_secs(1);
/// How long it waits for one who was just let in.
const NEWCOMER: Duration = Duration::from_millis(2);
/// A state that makes room for an equal stays at least so many times what its moving takes.
const STAY: u32 = 20;

/// Memory for the states of running sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateMemory {
    /// Bytes, by [`Sequence::bytes`]; `None` is no limit. One sequence runs whatever it takes.
    pub budget: Option<u64>,
    /// A folder for states that do not fit. Without one, who does not fit waits in line, and a
    /// sequence that outgrows the budget is computed again later.
    pub spill: Option<PathBuf>,
}

/// One sequence in the engine.
pub(super) struct Member {
    /// Who is less goes first.
    pub(super) order: (Priority, u64),
    pub(super) patience: Option<Duration>,
    /// What its state takes, or will in the next sweeps.
    pub(super) bytes: u64,
    pub(super) place: Place,
    /// When it was let in last.
    pub(super) since: Instant,
    /// Its caller has gone: whatever still runs for it is in vain.
    pub(super) left: Arc<AtomicBool>,
    pub(super) bell: Arc<Condvar>,
    pub(super) answer: Option<Result<Taken, Lost>>,
}

pub(super) enum Place {
    /// Without a state, until there is memory for it.
    Line,
    /// Its caller has the state.
    Out,
    /// Waits for a sweep since then.
    Ready(Box<Offer>, Instant),
    /// In the sweep at work.
    Sweeping,
    /// On its way to disk or back.
    Moving,
    /// Waits for memory, its state on disk; the offer's own is empty.
    Parked(Box<Offer>, SpillFile),
}

impl Member {
    fn resident(&self) -> bool {
        !matches!(self.place, Place::Line | Place::Parked(..))
    }
}

/// What has to be done before the next sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// There is memory for it.
    Enter(u64),
    /// It makes room, and its state goes to disk.
    Park(u64),
    /// It makes room, and its state will be computed again.
    Evict(u64),
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Sweep.
    Go,
    /// Wait so long, or until something happens.
    Wait(Option<Duration>),
}

/// One sequence's part in a sweep.
pub(super) struct Entry {
    pub(super) ticket: u64,
    pub(super) offer: Box<Offer>,
    /// How many of the offered rows are taken.
    pub(super) rows: usize,
    pub(super) left: Arc<AtomicBool>,
    pub(super) priority: Priority,
}

/// Everyone in the engine.
pub(super) struct Line {
    pub(super) members: BTreeMap<u64, Member>,
    next: u64,
    pub(super) closed: bool,
    pub(super) memory: StateMemory,
    pub(super) spilled: Spilled,
    /// What was moved for those who left or failed before they could be told.
    pub(super) unclaimed: Counts,
    pub(super) pace: Pace,
    /// Rows of prompts in one sweep, at most: what memory is planned for.
    prompt_rows: usize,
    /// Until then those who are out are expected back.
    expected: Instant,
}

impl Line {
    pub(super) fn new(prompt_rows: usize) -> Line {
        Line {
            prompt_rows,
            members: BTreeMap::new(),
            next: 0,
            closed: false,
            memory: StateMemory::default(),
            spilled: Spilled::default(),
            unclaimed: Counts::default(),
            pace: Pace::new(),
            expected: Instant::now(),
        }
    }

    /// Stands in line; answers the ticket.
    pub(super) fn join(
        &mut self,
        priority: Priority,
        patience: Option<Duration>,
        bytes: u64,
    ) -> u64 {
        let ticket = self.number();
        let member = Member {
            order: (priority, ticket),
            patience,
            bytes,
            place: Place::Line,
            since: Instant::now(),
            left: Arc::default(),
            bell: Arc::default(),
            answer: None,
        };
        self.members.insert(ticket, member);
        ticket
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A sweep that took so long has been handed out.
    pub(super) fn handed_out(&mut self, took: Duration) {
        self.expected = Instant::now() + (took / 4).clamp(GRACE_MIN, GRACE_MAX);
    }

    /// Whether the machine has something to look at when a caller has offered rows.
    pub(super) fn worth_a_look(&self) -> bool {
        let out = |member: &Member| matches!(member.place, Place::Out);
        Instant::now() >= self.expected || !self.members.values().any(out)
    }

    /// What memory asks for next.
    pub(super) fn action(&self) -> Option<Action> {
        let budget = self.memory.budget.unwrap_or(u64::MAX);
        let residents = || self.members.iter().filter(|(_, m)| m.resident());
        let used: u64 = residents().map(|(_, m)| m.bytes).sum();
        let ready = || residents().filter(|(_, m)| matches!(m.place, Place::Ready(..)));
        if used > budget && residents().count() > 1 {
            let (&last, _) = ready().max_by_key(|(_, m)| m.order)?;
            return Some(match self.memory.spill {
                Some(_) => Action::Park(last),
                None => Action::Evict(last),
            });
        }
        let waiting = self
            .members
            .iter()
            .filter(|(_, member)| matches!(member.place, Place::Line | Place::Parked(..)));
        let (&first, next) = waiting.min_by_key(|(_, member)| member.order)?;
        if used.saturating_add(next.bytes) <= budget || residents().next().is_none() {
            return Some(Action::Enter(first));
        }
        self.memory.spill.as_ref()?;
        let victims = || ready().filter(|(_, member)| self.yields(member, next));
        let freed: u64 = victims().map(|(_, member)| member.bytes).sum();
        let fits = used - freed + next.bytes <= budget;
        if !fits && victims().count() < residents().count() {
            return None; // in vain: it would still not fit
        }
        let longest = victims().max_by_key(|(_, m)| (m.order.0, m.since.elapsed()));
        longest.map(|(&ticket, _)| Action::Park(ticket))
    }

    /// Whether a state goes to disk to make room for another. An equal's does when it has run so
    /// long that the moving is cheap, and somebody waits for the other: the rows of a batch come out
    /// no sooner for taking turns.
    fn yields(&self, member: &Member, to: &Member) -> bool {
        let (mine, other) = (member.order.0, to.order.0);
        mine > other
            || (mine == other
                && other == Priority::Interactive
                && member.since.elapsed() >= self.spilled.cost(member.bytes) * STAY)
    }

    /// Lets a member in: answers the state to be read back, if it has one.
    pub(super) fn enter(&mut self, ticket: u64) -> Option<(Box<Offer>, SpillFile)> {
        let member = self.members.get_mut(&ticket)?;
        member.since = Instant::now();
        match std::mem::replace(&mut member.place, Place::Out) {
            Place::Parked(offer, file) => {
                member.place = Place::Moving;
                Some((offer, file))
            }
            _ => {
                member.bell.notify_all();
                self.expected = self.expected.max(Instant::now() + NEWCOMER);
                None
            }
        }
    }

    /// Takes a waiting offer out of its place.
    pub(super) fn take_ready(&mut self, ticket: u64, place: Place) -> Option<Box<Offer>> {
        let member = self.members.get_mut(&ticket)?;
        match std::mem::replace(&mut member.place, place) {
            Place::Ready(offer, _) => Some(offer),
            other => {
                member.place = other;
                None
            }
        }
    }

    /// A state is on disk: its turn comes after those who wait now.
    pub(super) fn parked(&mut self, ticket: u64, offer: Box<Offer>, file: SpillFile) {
        let number = self.number();
        if let Some(member) = self.members.get_mut(&ticket) {
            member.order.1 = number;
            member.place = Place::Parked(offer, file);
        }
    }

    /// Tells a member that its state is gone and has to be computed again.
    pub(super) fn evict(&mut self, ticket: u64) {
        if let Some(member) = self.members.get_mut(&ticket) {
            member.place = Place::Line;
            member.answer = Some(Err(Lost::Evicted));
            member.bell.notify_all();
        }
    }

    /// Whether to sweep now.
    pub(super) fn due(&self) -> Due {
        let now = Instant::now();
        let out = self.members.values().any(|m| matches!(m.place, Place::Out));
        if out && now < self.expected {
            return Due::Wait(Some(self.expected - now));
        }
        let mut ready = self.members.values().filter_map(|m| match m.place {
            Place::Ready(_, since) => Some((since, m.patience)),
            _ => None,
        });
        let Some((since, patience)) = ready.next() else {
            return Due::Wait(None);
        };
        // Company has come, or nobody wants it.
        let until = since + patience.unwrap_or_default();
        if ready.next().is_some() || now >= until {
            return Due::Go;
        }
        Due::Wait(Some(until - now))
    }

    /// Takes the rows of the next sweep: of every interactive sequence that generates, and as many
    /// of the others as may keep them company.
    pub(super) fn compose(&mut self) -> Vec<Entry> {
        let mut ready: Vec<((Priority, bool, u64), u64, usize)> = Vec::new();
        for (&ticket, member) in &self.members {
            if let Place::Ready(offer, _) = &member.place {
                let (priority, number) = member.order;
                let class = (priority, !offer.decode, number);
                ready.push((class, ticket, offer.tokens.len()));
            }
        }
        ready.sort_unstable();
        let awaited = |&((priority, prompt, _), ..): &((Priority, bool, u64), u64, usize)| {
            priority == Priority::Interactive && !prompt
        };
        let mut company = match ready.first().is_some_and(awaited) {
            true => self.pace.company(),
            false => usize::MAX,
        };
        let mut prompt_rows = self.prompt_rows;
        let mut entries = Vec::new();
        for one in ready {
            let ((priority, prompt, _), ticket, offered) = one;
            let rows = match (awaited(&one), prompt) {
                (true, _) => offered,
                (false, false) => offered.min(company),
                (false, true) => offered.min(company).min(prompt_rows),
            };
            if rows == 0 {
                continue;
            }
            if !awaited(&one) {
                company -= rows;
            }
            if prompt {
                prompt_rows -= rows;
            }
            let Some(offer) = self.take_ready(ticket, Place::Sweeping) else {
                continue;
            };
            let left = self.members.get(&ticket).map(|m| Arc::clone(&m.left));
            entries.push(Entry {
                ticket,
                offer,
                rows,
                left: left.unwrap_or_default(),
                priority,
            });
        }
        entries
    }

    /// Whether everybody in the sweep at work has left it.
    pub(super) fn nobody_waits(&self) -> bool {
        let sweeping = |member: &Member| matches!(member.place, Place::Sweeping);
        !self.members.values().any(sweeping)
    }
}

/// An empty state for a place whose real one is elsewhere.
pub(super) fn elsewhere(offer: &mut Offer) -> Option<Sequence> {
    offer.sequence.take()
}
