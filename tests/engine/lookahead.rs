//! Guesses at the next layer's experts: right, wrong or none, the answers are the same.

use std::path::Path;

use deltafin::engine::Request;
use deltafin::hub::SourceAddress;
use deltafin::residency::Counts;
use deltafin::residency::Demand;
use deltafin::residency::Lookahead;
use deltafin::residency::Share;
use deltafin::store::Budget;

use crate::kit;
use crate::kit::Kit;
use crate::kit::chat;
use crate::kit::greedy;
use crate::kit::run;
use crate::recency::room_for_some;

fn model() -> SourceAddress {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    SourceAddress::Folder(fixtures.join("austen-k3/model"))
}

fn open(budget: Option<u64>, lookahead: Lookahead) -> Kit {
    let home = tempfile::tempdir().unwrap();
    let demand = Demand {
        budget,
        lookahead,
        ..Demand::default()
    };
    kit::planned(home, Some(model()), Budget::Unlimited, 2, demand)
}

/// A reply to the bit, and every distribution it was drawn from.
fn answer(kit: &Kit) -> (String, Vec<Vec<u32>>) {
    let request = Request::new(chat("Tell me of the ball."), 24, greedy());
    let request = kit::endless(&kit.engine, request);
    let (made, heard) = run(&kit.engine, &request);
    (kit::answer(&made), heard.logits)
}

/// Answers until guesses were made and read, and what was moved by then.
fn guesses(kit: &Kit, wanted: &(String, Vec<Vec<u32>>), enough: fn(&Counts) -> bool) -> Counts {
    // How soon depends on the machine; once is enough on an idle one.
    for _ in 0..20 {
        assert!(answer(kit) == *wanted);
        kit.engine.flush();
        if enough(&kit.engine.counts()) {
            break;
        }
    }
    kit.engine.counts()
}

#[test]
fn guesses_right_and_wrong_change_no_bit() {
    let wanted = answer(&kit::trained());
    let some = room_for_some();

    let off = open(Some(some), Lookahead::Off);
    let counts = guesses(&off, &wanted, |_| false);
    assert_eq!((counts.guessed, counts.read_ahead), (0, 0));
    assert!(off.engine.recall().is_empty());
    assert_eq!(off.engine.memory().bytes(Share::Foreseen), 0);

    let on = open(Some(some), Lookahead::On);
    let plan = on.engine.memory();
    assert!(plan.bytes(Share::Foreseen) > 0 && plan.expert_memory > 0);
    assert!(plan.total() <= some, "{} of {some}", plan.total());
    let right = guesses(&on, &wanted, |counts| counts.used_ahead > 0);
    assert!(0 < right.used_ahead && right.used_ahead <= right.read_ahead);
    assert!(right.used_ahead <= right.bytes.disk);
    let layers = on.engine.recall();
    let asked: u64 = layers.values().map(|recall| recall.asked).sum();
    let foreseen: u64 = layers.values().map(|recall| recall.foreseen).sum();
    assert_eq!((asked, foreseen), (right.guessed, right.foreseen));
    // The first routed layer is guessed at too if there is one before it; none is guessed at from beyond the model.
    let routed: Vec<u16> = on.engine.spec().moe_layers().collect();
    assert!(layers.keys().all(|layer| routed.contains(layer)));

    let wrong = open(Some(some), Lookahead::Contrary);
    let wrong = guesses(&wrong, &wanted, |counts| counts.read_ahead > 0);
    assert!(wrong.read_ahead > 0);
    let recall = |counts: &Counts| counts.foreseen as f64 / counts.guessed as f64;
    let (right, wrong) = (recall(&right), recall(&wrong));
    // A sixteenth of a layer is chosen: who guesses blindly finds a sixteenth of it.
    assert!(right > 0.25 && wrong < 0.0625, "{right} and {wrong}");

    let auto = open(Some(some), Lookahead::Auto);
    guesses(&auto, &wanted, |counts| counts.guessed > 0);
    assert!(auto.engine.counts().guessed > 0);
}

#[test]
fn nothing_is_guessed_where_all_is_in_memory() {
    let wanted = answer(&kit::trained());
    for budget in [None, Some(4_000_000_000)] {
        let all = open(budget, Lookahead::On);
        assert_eq!(all.engine.memory().foreseen, 0);
        assert!(answer(&all) == wanted);
        assert_eq!(all.engine.counts().guessed, 0);
    }
}
