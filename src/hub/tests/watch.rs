//! How lanes grow and shrink, whose bell rings, and how long is waited.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::Duration;

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

/// Ticks with all lanes busy; `rate` gives bytes a tick for a number of lanes.
fn drive(
    lanes: &mut Lanes,
    timing: &Timing,
    ticks: usize,
    total: &mut u64,
    rate: impl Fn(usize) -> u64,
) {
    for _ in 0..ticks {
        lanes.busy = lanes.limit;
        *total += rate(lanes.limit);
        lanes.tick(*total, true, timing);
        sleep(timing.tick);
    }
}

#[test]
fn lanes_grow_while_each_one_brings_more() {
    let mut lanes = Lanes::new(16);
    assert_eq!(lanes.limit, LANES_FIRST);
    let mut total = 0;
    drive(&mut lanes, &timing(), 400, &mut total, |n| n as u64 * 1_000);
    assert_eq!(lanes.limit, 16);
}

#[test]
fn idle_lanes_do_not_grow() {
    let mut lanes = Lanes::new(16);
    for _ in 0..100 {
        lanes.tick(0, false, &timing());
        sleep(Duration::from_millis(1));
    }
    assert_eq!(lanes.limit, LANES_FIRST);
}

#[test]
fn a_collapse_halves_and_is_remembered() {
    let timing = timing();
    let mut lanes = Lanes::new(16);
    let mut total = 0;
    let punished = |n: usize| if n > 5 { 100 } else { n as u64 * 100_000 };
    drive(&mut lanes, &timing, 300, &mut total, punished);
    assert!(lanes.limit <= 3, "{}", lanes.limit);
    // When the hold is over it grows again, and not into the next collapse.
    let soon = Timing {
        warm: Duration::from_millis(100),
        ..timing
    };
    let mut lanes = Lanes::new(16);
    let mut collapses = 0;
    for _ in 0..400 {
        lanes.busy = lanes.limit;
        total += punished(lanes.limit);
        collapses += usize::from(lanes.tick(total, true, &soon).is_some());
        sleep(soon.tick);
    }
    assert_eq!(collapses, 1, "it ran into the same wall again");
    assert!((2..=5).contains(&lanes.limit), "{}", lanes.limit);
}

#[test]
fn after_a_good_minute_every_lane_opens_at_once() {
    let timing = Timing {
        warm: Duration::from_millis(40),
        tick: Duration::from_millis(10),
        ..timing()
    };
    let mut lanes = Lanes::new(16);
    let mut total = 0;
    // No lane brings more than the first four did: growth by gain alone would stop.
    drive(&mut lanes, &timing, 8, &mut total, |_| 4_000);
    assert_eq!(lanes.limit, 16);
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
