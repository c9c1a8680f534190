//! How lanes grow and shrink, whose bell rings, and how long is waited.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::Duration;
use std::time::Instant;

use crate::hub::Timing;
use crate::hub::net::back_off;
use crate::hub::watch::LANES_FIRST;
use crate::hub::watch::Lanes;
use crate::hub::watch::Meter;
use crate::hub::watch::Watched;
use crate::hub::watch::ring;

fn timing() -> Timing {
    Timing {
        tick: Duration::from_millis(2),
        speed_window: Duration::from_millis(20),
        warm: Duration::from_secs(60),
        ..Timing::default()
    }
}

/// Lanes at a time of their own, so that a busy machine changes nothing.
struct Driven {
    lanes: Lanes,
    now: Instant,
    total: u64,
}

impl Driven {
    fn new() -> Driven {
        Driven {
            lanes: Lanes::new(16),
            now: Instant::now(),
            total: 0,
        }
    }

    /// Ticks with all lanes busy; `rate` gives bytes a tick for a number of lanes. How often
    /// throughput collapsed.
    fn drive(&mut self, timing: &Timing, ticks: usize, rate: impl Fn(usize) -> u64) -> usize {
        let mut collapses = 0;
        for _ in 0..ticks {
            self.now += timing.tick;
            self.lanes.busy = self.lanes.limit;
            self.total += rate(self.lanes.limit);
            let told = self.lanes.tick(self.now, self.total, true, timing);
            collapses += usize::from(told.is_some());
        }
        collapses
    }
}

#[test]
fn lanes_grow_while_each_one_brings_more() {
    let mut link = Driven::new();
    assert_eq!(link.lanes.limit, LANES_FIRST);
    link.drive(&timing(), 400, |n| n as u64 * 1_000);
    assert_eq!(link.lanes.limit, 16);
}

#[test]
fn idle_lanes_do_not_grow() {
    let mut lanes = Lanes::new(16);
    let mut now = Instant::now();
    for _ in 0..100 {
        now += timing().tick;
        lanes.tick(now, 0, false, &timing());
    }
    assert_eq!(lanes.limit, LANES_FIRST);
}

#[test]
fn a_collapse_halves_and_is_remembered() {
    let timing = timing();
    let punished = |n: usize| if n > 5 { 100 } else { n as u64 * 100_000 };
    let mut link = Driven::new();
    link.drive(&timing, 300, punished);
    assert!(link.lanes.limit <= 3, "{}", link.lanes.limit);
    // When the hold is over it grows again, and not into the next collapse.
    let soon = Timing {
        warm: Duration::from_millis(100),
        ..timing
    };
    let mut link = Driven::new();
    let collapses = link.drive(&soon, 400, punished);
    assert_eq!(collapses, 1, "it ran into the same wall again");
    let limit = link.lanes.limit;
    assert!((2..=5).contains(&limit), "{limit}");
}

#[test]
fn after_a_good_minute_every_lane_opens_at_once() {
    let timing = Timing {
        warm: Duration::from_millis(40),
        tick: Duration::from_millis(10),
        ..timing()
    };
    let mut link = Driven::new();
    // No lane brings more than the first four did: growth by gain alone would stop.
    link.drive(&timing, 8, |_| 4_000);
    assert_eq!(link.lanes.limit, 16);
}

/// Six spans that move and four that do not, each lacking `missing` bytes; returns how many of those
/// four get a second request, if `all` bytes came so far. They have been `asked` for, or wait.
fn second_requests(all: u64, missing: u64, asked: bool) -> usize {
    let timing = timing();
    let meters: Vec<Meter> = (0..10).map(|_| Meter::new()).collect();
    let begun = if asked { &meters } else { &meters[..6] };
    begun.iter().for_each(Meter::restart);
    let mut cost = 0;
    for _ in 0..30 {
        meters[..6].iter().for_each(|m| m.add(1 << 20));
        sleep(timing.tick);
        let watched = meters.iter().map(|meter| Watched { meter, missing });
        let watched: Vec<Watched<'_>> = watched.collect();
        ring(&watched, &VecDeque::new(), &timing, all, &mut cost);
    }
    assert!(
        cost * 10 <= all,
        "{cost} of {all} bytes for second requests"
    );
    let hedged = |m: &&Meter| m.hedged.load(Relaxed);
    assert_eq!(meters[..6].iter().filter(hedged).count(), 0);
    meters[6..].iter().filter(hedged).count()
}

#[test]
fn fault_30_second_requests_cost_at_most_a_tenth() {
    assert_eq!(second_requests(100 << 20, 1 << 20, true), 4);
    assert_eq!(second_requests(35 << 20, 1 << 20, true), 3);
    assert_eq!(second_requests(5 << 20, 1 << 20, true), 0);
    // A span that waits for its turn is not slow.
    assert_eq!(second_requests(100 << 20, 1 << 20, false), 0);
}

#[test]
fn fault_18_waits_double_up_to_a_limit_and_are_spread_over_all_of_it() {
    let timing = Timing::default();
    assert_eq!(back_off(&timing, 1, 0.5), timing.backoff / 2);
    assert_eq!(back_off(&timing, 2, 0.5), timing.backoff);
    assert_eq!(back_off(&timing, 3, 0.5), timing.backoff * 2);
    assert_eq!(back_off(&timing, 60, 1.0), timing.backoff_max);
    assert_eq!(back_off(&timing, u32::MAX, 0.0), Duration::ZERO);
}
