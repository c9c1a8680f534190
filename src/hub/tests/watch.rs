//! How lanes grow and shrink.

use std::thread::sleep;
use std::time::Duration;

use crate::hub::Timing;
use crate::hub::watch::LANES_FIRST;
use crate::hub::watch::Lanes;

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
