//! What the store keeps is what the simulator says it keeps: exactly, whatever comes first.

use std::path::Path;

use deltafin::engine::Request;
use deltafin::hub::SourceAddress;
use deltafin::residency::Demand;
use deltafin::residency::Lfu;
use deltafin::residency::Lookahead;
use deltafin::residency::Lru;
use deltafin::residency::MemoryPlan;
use deltafin::residency::Replayed;
use deltafin::residency::Shape;
use deltafin::residency::Trace;
use deltafin::residency::belady;
use deltafin::residency::distinct;
use deltafin::residency::replay;
use deltafin::store::Budget;
use deltafin::store::Policy;

use crate::kit;
use crate::kit::Kit;
use crate::kit::chat;
use crate::kit::greedy;
use crate::kit::run;

/// Experts of a layer of the small model, all of which one sweep of a prompt may use.
const LAYER: u64 = 64;
/// Tokens of a reply.
const TOKENS: usize = 24;

fn model() -> SourceAddress {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    SourceAddress::Folder(fixtures.join("austen-k3/model"))
}

/// Answers two prompts; says what was used and what of it needed no hub.
fn answer_two(kit: &Kit, trace: &Path) -> Replayed {
    let failed = |e: &deltafin::residency::TraceError| panic!("{e}");
    kit.engine.trace_to(trace, failed).unwrap();
    for words in ["Tell me of the ball.", "And of Mr. Darcy?"] {
        let request = Request::new(chat(words), TOKENS, greedy());
        let request = kit::endless(&kit.engine, request);
        let (made, _) = run(&kit.engine, &request);
        assert_eq!(made.token_ids.len(), TOKENS);
    }
    kit.engine.flush();
    let counts = kit.engine.counts();
    Replayed {
        uses: counts.requested,
        hits: counts.requested - counts.experts.hub - counts.experts.peer,
    }
}

/// A budget of memory in which two or three experts of each layer stay.
pub(crate) fn room_for_some() -> u64 {
    let kit = kit::trained();
    let opened = kit.engine.opened();
    let shape = Shape::new(&opened.spec, opened.layout.core()).unwrap();
    let expert = opened.layout.expert_len();
    let mut budgets = (10_000_000..100_000_000).step_by(20_000);
    let found = budgets.find(|&budget| {
        let demand = Demand {
            budget: Some(budget),
            threads: 2,
            ..Demand::default()
        };
        let held = MemoryPlan::new(&shape, &demand).expert_memory / expert;
        (14..21).contains(&held)
    });
    found.unwrap()
}

#[test]
fn the_store_hits_what_the_simulator_says_also_after_it_was_opened_again() {
    let expert = kit::trained().engine.opened().layout.expert_len();
    let (mut rates, mut gains) = (Vec::new(), Vec::new());
    // Of memory, too little for any expert to stay, or enough for some of each layer: found there,
    // an expert is as much used as one that was read. (The disk must then hold what one sweep uses, or memory
    // keeps what the disk had to let go.)
    let (none, some) = (1, room_for_some());
    // A guess is no use of an expert, be it right or wrong.
    for (policy, capacity, memory, lookahead) in [
        (Policy::Lru, LAYER, none, Lookahead::Off),
        (Policy::Lru, 100, none, Lookahead::Off),
        (Policy::Lru, 200, none, Lookahead::Off),
        (Policy::Lru, 300, none, Lookahead::Off),
        (Policy::Lru, 430, some, Lookahead::Off),
        (Policy::Lru, 430, some, Lookahead::On),
        (Policy::Lru, 430, some, Lookahead::Contrary),
        (Policy::Lru, 100_000, none, Lookahead::Off),
        (Policy::Lfu, 7, none, Lookahead::Off),
        (Policy::Lfu, LAYER, none, Lookahead::Off),
        (Policy::Lfu, 200, none, Lookahead::Off),
        (Policy::Lfu, 300, none, Lookahead::On),
        (Policy::Lfu, 430, none, Lookahead::Contrary),
    ] {
        let demand = Demand {
            budget: Some(memory),
            lookahead,
            ..Demand::default()
        };
        let home = tempfile::tempdir().unwrap();
        let trace = tempfile::tempdir().unwrap();
        let trace = trace.path().join("trace");
        let budget = Budget::Limit(capacity * expert + expert / 2);
        let mut real = Replayed::default();
        let mut home = Some(home);
        for _ in 0..2 {
            let taken = home.take().unwrap();
            let kit = kit::governed(taken, Some(model()), budget, policy, 2, demand);
            let held = kit.engine.memory().expert_memory;
            assert_eq!(held > 0, memory == some, "{memory}");
            let found = answer_two(&kit, &trace);
            real.uses += found.uses;
            real.hits += found.hits;
            assert_eq!(kit.engine.counts().unkept, 0);
            let Kit { engine, home: left } = kit;
            drop(engine);
            home = Some(left);
        }
        let trace = Trace::read(&trace).unwrap();
        assert_eq!(trace.head.expert_bytes, expert);
        let lru = replay(&trace, capacity as usize, &mut Lru::new());
        let told = match policy {
            Policy::Lru => lru,
            Policy::Lfu => replay(&trace, capacity as usize, &mut Lfu::default()),
        };
        assert_eq!(told, real, "{policy:?}, {capacity} experts, {lookahead:?}");
        let bound = belady(&trace, capacity as usize);
        assert!(told.hits <= bound.hits);
        if capacity == 100_000 {
            assert_eq!(told.hits, told.uses - distinct(&trace) as u64);
        }
        match policy {
            Policy::Lru => rates.push(told.hits),
            Policy::Lfu => gains.push(told.hits.saturating_sub(lru.hits)),
        }
    }
    assert!(
        gains.iter().filter(|gain| **gain > 0).count() >= 3,
        "{gains:?}"
    );
    // The sizes tell apart: a comparison of nothing with nothing would prove nothing.
    assert!(rates.is_sorted() && rates.first() < rates.get(2) && rates.get(2) < rates.last());
}
