//! More sequences than memory: they wait, take turns over the disk, or are computed again, and
//! answer the same.

use std::time::Duration;

use deltafin::engine::Engine;
use deltafin::engine::Generation;
use deltafin::engine::Priority;
use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::StateMemory;
use deltafin::model::Sequence;
use deltafin::store::Budget;

use crate::kit::Kit;
use crate::kit::answer;
use crate::kit::endless;
use crate::kit::greedy;
use crate::kit::ids;
use crate::kit::run;
use crate::kit::sampled;
use crate::kit::tiny;

/// Memory for the states of so many sequences of up to `len` tokens.
fn room(kit: &Kit, states: u64, len: usize) -> Option<u64> {
    Some(states * Sequence::bytes(kit.engine.spec(), len))
}

fn all(engine: &Engine, requests: &[Request]) -> Vec<Generation> {
    std::thread::scope(|scope| {
        let run = |request| scope.spawn(move || run(engine, request).0);
        let runs: Vec<_> = requests.iter().map(run).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

fn requests(count: u32, tokens: usize) -> Vec<Request> {
    let one = |n| Request::new(Prompt::Ids(ids(n, 10)), tokens, sampled(n.into()));
    (0..count).map(one).collect()
}

#[test]
fn sixty_four_finish_in_memory_for_sixteen() {
    let kit = tiny(Budget::Unlimited);
    let requests = requests(64, 24);
    let alone: Vec<_> = requests.iter().map(|r| run(&kit.engine, r).0).collect();
    let folder = tempfile::tempdir().unwrap();
    for spill in [None, Some(folder.path().join("states"))] {
        kit.engine.set_state_memory(StateMemory {
            budget: room(&kit, 16, 34),
            spill: spill.clone(),
        });
        let made = all(&kit.engine, &requests);
        for (n, (made, whole)) in made.iter().zip(&alone).enumerate() {
            assert_eq!(answer(made), answer(whole), "{n}, {spill:?}");
            let sharing = made.sharing;
            assert!(sharing.sequences <= 16 * sharing.sweeps, "{n}: {sharing:?}");
            assert_eq!(sharing.evicted, 0, "nobody outgrew the room set aside");
        }
        let spilled = kit.engine.spilled();
        assert_eq!(spilled.writes > 0, spill.is_some(), "{spilled:?}");
        assert_eq!((spilled.reads, spilled.failed), (spilled.writes, 0));
        assert_eq!(spilled.bytes_read, spilled.bytes_written);
        if let Some(spill) = spill {
            assert!(spilled.bytes_written > 0 && spilled.time > Duration::ZERO);
            assert_eq!(std::fs::read_dir(spill).unwrap().count(), 0, "files stay");
        }
    }
}

#[test]
fn a_person_does_not_wait_for_a_batch_to_end() {
    let kit = tiny(Budget::Unlimited);
    let folder = tempfile::tempdir().unwrap();
    kit.engine.set_state_memory(StateMemory {
        budget: room(&kit, 1, 300),
        spill: Some(folder.path().to_owned()),
    });
    let engine = &kit.engine;
    let long = Request::new(Prompt::Ids(ids(1, 10)), 3_000, greedy());
    let batch = Request {
        priority: Priority::Batch,
        ..endless(engine, long)
    };
    let person = Request::new(Prompt::Ids(ids(2, 10)), 5, greedy());
    std::thread::scope(|scope| {
        let stopper = engine.stopper();
        let batch = scope.spawn(|| run(engine, &batch).0);
        while engine.running().first().is_none_or(|r| r.generated < 3) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(run(engine, &person).0.token_ids.len(), 5);
        let running = engine.running();
        assert_eq!(running.len(), 1, "the batch had ended first");
        assert!(engine.spilled().writes >= 1);
        // And the batch goes on from where it was.
        while engine.running()[0].generated < running[0].generated + 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        stopper.stop();
        let batch = batch.join().unwrap();
        assert_eq!((batch.computed_rows, batch.sharing.evicted), (10, 0));
    });
}

#[test]
fn who_outgrows_the_memory_is_computed_again_to_the_same_bits() {
    let kit = tiny(Budget::Unlimited);
    let requests: Vec<Request> = (0..2)
        .map(|n| Request {
            capture: true,
            ..endless(
                &kit.engine,
                Request::new(Prompt::Ids(ids(n, 10)), 400, greedy()),
            )
        })
        .collect();
    let alone: Vec<_> = requests.iter().map(|r| run(&kit.engine, r).0).collect();
    // Both fit as they come in, with what is set aside for a reply, and do not as they grow.
    kit.engine.set_state_memory(StateMemory {
        budget: room(&kit, 2, 300),
        spill: None,
    });
    let made = all(&kit.engine, &requests);
    for (made, whole) in made.iter().zip(&alone) {
        assert_eq!(answer(made), answer(whole));
    }
    assert_eq!(made.iter().map(|m| m.sharing.evicted).sum::<u64>(), 1);
    // One that is alone runs, whatever it takes.
    kit.engine.set_state_memory(StateMemory {
        budget: Some(1),
        spill: None,
    });
    assert_eq!(answer(&run(&kit.engine, &requests[0]).0), answer(&alone[0]));
}
