//! Many generations at once: what each answers, what it costs, and who is told what.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use deltafin::engine::Engine;
use deltafin::engine::EngineError;
use deltafin::engine::Event;
use deltafin::engine::Finish;
use deltafin::engine::Generation;
use deltafin::engine::Phase;
use deltafin::engine::Priority;
use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::Shaping;
use deltafin::engine::Stopper;
use deltafin::hub::SourceAddress;
use deltafin::residency::Counts;
use deltafin::share::Folder;
use deltafin::share::Server;
use deltafin::share::ShareOptions;
use deltafin::store::Budget;

use crate::kit;
use crate::kit::Heard;
use crate::kit::answer;
use crate::kit::endless;
use crate::kit::greedy;
use crate::kit::ids;
use crate::kit::run;
use crate::kit::sampled;
use crate::kit::tiny;

/// A mix of what callers ask: lengths, sampling, penalties, priorities.
fn mixed(n: u32) -> Request {
    let len = [3, 40, 7, 130, 1, 600, 20, 64][n as usize % 8];
    let prompt = Prompt::Ids(ids(n, len));
    let sampling = match n % 3 {
        0 => greedy(),
        _ => sampled(u64::from(n)),
    };
    Request {
        shaping: Shaping {
            top_k: if n % 4 == 1 { 20 } else { 0 },
            frequency_penalty: if n % 5 == 2 { 0.5 } else { 0.0 },
            ..Shaping::default()
        },
        capture: n.is_multiple_of(2),
        priority: match n % 4 {
            3 => Priority::Batch,
            _ => Priority::Interactive,
        },
        ..Request::new(prompt, 6 + n as usize % 9, sampling)
    }
}

/// Runs requests at the same time, each on a thread of its own after a pause of its own.
fn together(engine: &Engine, requests: &[Request], pause: Duration) -> Vec<(Generation, Heard)> {
    std::thread::scope(|scope| {
        let run = |(n, request)| {
            scope.spawn(move || {
                std::thread::sleep(pause * u32::try_from(n * 7 % 5).unwrap());
                run(engine, request)
            })
        };
        let runs: Vec<_> = requests.iter().enumerate().map(run).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

#[test]
fn many_at_once_answer_as_one_by_one() {
    let kit = tiny(Budget::Unlimited);
    let requests: Vec<Request> = (0..16).map(mixed).collect();
    let alone: Vec<_> = requests.iter().map(|r| run(&kit.engine, r)).collect();
    assert!(
        alone
            .iter()
            .all(|(made, _)| made.sharing.sweeps == made.sharing.sequences)
    );
    for (count, pause) in [(4, 0), (8, 3), (16, 0), (16, 11)] {
        let shared = together(
            &kit.engine,
            &requests[..count],
            Duration::from_millis(pause),
        );
        for (n, ((made, heard), (whole, before))) in shared.iter().zip(&alone).enumerate() {
            assert_eq!(answer(made), answer(whole), "{n} of {count}");
            assert!(heard.logits == before.logits, "{n} of {count}: bits");
        }
        let company = shared
            .iter()
            .any(|(made, _)| made.sharing.sequences > made.sharing.sweeps);
        assert!(company, "{count} at once never shared a sweep");
    }
}

#[test]
fn the_cancelled_leave_at_once_and_harm_nobody() {
    let kit = tiny(Budget::Unlimited);
    let requests: Vec<Request> = (0..12).map(mixed).collect();
    let alone: Vec<_> = requests.iter().map(|r| run(&kit.engine, r)).collect();
    let engine = &kit.engine;
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let run = |(n, request): (usize, &Request)| {
            let stopper = Stopper::new();
            let request = Request {
                stopper: Some(stopper.clone()),
                ..request.clone()
            };
            scope.spawn(move || {
                let mut heard = Heard::default();
                let made = engine.generate(&request, &mut |event| {
                    heard.hear(&event);
                    match (n % 4, heard.tokens.len()) {
                        (0, 3) => stopper.stop(),
                        (1, 2) => stopper.finish_sweep(),
                        (2, 4) => return ControlFlow::Break(()),
                        _ => {}
                    }
                    ControlFlow::Continue(())
                });
                (made.unwrap(), heard)
            })
        };
        let runs: Vec<_> = requests.iter().enumerate().map(run).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    for (n, ((made, heard), (whole, before))) in outcomes.iter().zip(&alone).enumerate() {
        if n % 4 == 3 {
            assert_eq!(answer(made), answer(whole), "{n}");
        } else {
            assert_eq!(made.finish, Finish::Interrupted, "{n}");
            assert_eq!(made.token_ids.len(), [3, 2, 4][n % 4], "{n}");
        }
        assert!(before.logits.starts_with(&heard.logits), "{n}: bits");
    }
    assert_eq!(engine.progress().phase, Phase::Idle);
    assert_eq!(answer(&run(engine, &requests[0]).0), answer(&alone[0].0));
}

#[test]
fn a_stopper_used_before_stops_and_the_engines_spares_the_next() {
    let kit = tiny(Budget::Unlimited);
    let stopper = Stopper::new();
    stopper.stop();
    let request = Request {
        stopper: Some(stopper),
        ..mixed(0)
    };
    assert_eq!(run(&kit.engine, &request).0.finish, Finish::Interrupted);
    kit.engine.stopper().stop();
    assert_eq!(run(&kit.engine, &mixed(0)).0.finish, Finish::Length);
}

/// Numbers that have to be equal to the byte; waits and arithmetic are measured.
fn moved(counts: &Counts) -> String {
    let unmeasured = Counts {
        wait_disk: Duration::ZERO,
        wait_hub: Duration::ZERO,
        ..*counts
    };
    format!("{unmeasured:?}")
}

#[test]
fn a_cold_stream_of_eight_moves_the_union_of_their_routes_and_all_of_it_is_accounted_for() {
    let kit = tiny(Budget::Limit(0));
    let requests: Vec<Request> = (0..8)
        .map(|n| Request {
            capture: true,
            ..mixed(n)
        })
        .collect();
    let before = kit.engine.counts();
    let shared = together(&kit.engine, &requests, Duration::from_millis(2));
    let counts = kit.engine.counts().since(&before);

    // The union over the rows of a sweep, layer by layer.
    let mut union: BTreeMap<(u64, u16), BTreeSet<i32>> = BTreeMap::new();
    let mut rows = 0;
    for (made, _) in &shared {
        let capture = made.capture.as_ref().unwrap();
        rows += capture.sweeps.len();
        for (layer, experts) in &capture.experts {
            let chosen = experts.chunks(capture.top_k);
            assert_eq!(chosen.len(), capture.sweeps.len());
            for (sweep, chosen) in capture.sweeps.iter().zip(chosen) {
                union.entry((*sweep, *layer)).or_default().extend(chosen);
            }
        }
    }
    // Memory holds all of the small model: what was fetched once is fetched no more, though the disk keeps nothing.
    let keys = union.iter().flat_map(|((_, layer), experts)| {
        let layer = *layer;
        experts.iter().map(move |expert| (layer, *expert))
    });
    let fetched = keys.collect::<BTreeSet<(u16, i32)>>().len() as u64;
    let union: u64 = union.values().map(|experts| experts.len() as u64).sum();
    let expert = kit.engine.opened().layout.expert_len();
    assert_eq!(counts.requested, union);
    assert_eq!(counts.bytes.hub, fetched * expert, "over {rows} rows");
    assert_eq!(counts.bytes.memory, (union - fetched) * expert);
    assert_eq!(counts.bytes.disk + counts.bytes.peer, 0);
    let mut sum = Counts::default();
    shared.iter().for_each(|(made, _)| sum += made.counts);
    assert_eq!(moved(&sum), moved(&counts));
    assert_eq!(sum.wait_hub, counts.wait_hub);
    assert_eq!(moved(&kit.engine.unclaimed()), moved(&Counts::default()));
}

#[test]
fn the_photograph_shows_everyone() {
    let kit = tiny(Budget::Unlimited);
    let engine = &kit.engine;
    let most = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let most = &most;
            scope.spawn(move || {
                let request = Request::new(Prompt::Ids(ids(n, 9)), 200, greedy());
                let request = endless(engine, request);
                let mut told = 0;
                let made = engine.generate(&request, &mut |event| {
                    if let Event::Token { .. } = event {
                        let running = engine.running();
                        // No token of this generation's own is missing from its photograph.
                        let mine = running
                            .iter()
                            .filter(|r| r.generated == told && r.read == 9);
                        assert!(mine.count() >= 1, "{running:?} at {told}");
                        told += 1;
                        most.fetch_max(running.len(), Ordering::Relaxed);
                        assert_eq!(engine.progress().prompt, 9);
                    }
                    ControlFlow::Continue(())
                });
                assert_eq!(made.unwrap().token_ids.len(), 200);
            });
        }
    });
    assert_eq!(most.into_inner(), 4);
    assert!(engine.running().is_empty());
    assert_eq!(engine.progress().rows, 0);
}

#[test]
fn patience_waits_for_company_and_not_for_ever() {
    let kit = tiny(Budget::Unlimited);
    let engine = &kit.engine;
    let patient = Request {
        priority: Priority::Batch,
        patience: Some(Duration::from_secs(3_600)),
        stopper: Some(Stopper::new()),
        ..Request::new(Prompt::Ids(ids(1, 5)), 8, greedy())
    };
    let waits = |tokens: usize| {
        let began = Instant::now();
        while engine
            .running()
            .first()
            .is_none_or(|r| r.generated < tokens)
        {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "it never came to {tokens}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        let held = scope.spawn(|| run(engine, &patient).0);
        waits(0);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(engine.running()[0].read, 0, "it went alone");
        // Company for some sweeps, not to the end.
        let company = run(engine, &Request::new(Prompt::Ids(ids(2, 5)), 4, greedy())).0;
        assert_eq!(company.token_ids.len(), 4);
        waits(1);
        patient.stopper.as_ref().unwrap().finish_sweep();
        let held = held.join().unwrap();
        assert_eq!(held.finish, Finish::Interrupted);
        assert!(
            held.sharing.sequences >= 2 * held.sharing.sweeps,
            "{:?}",
            held.sharing
        );
    });
    let hurried = Request {
        patience: Some(Duration::from_millis(1)),
        stopper: None,
        ..patient
    };
    assert_eq!(run(engine, &hurried).0.token_ids.len(), 8);
}

/// A hub that takes its time over everything.
fn slow_hub() -> Server {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny-k3");
    let options = ShareOptions {
        link: Some("2mbit,2ms".parse().unwrap()),
        ..ShareOptions::default()
    };
    let backend = Folder::open("deltafin/austen-k3".parse().unwrap(), folder.as_ref());
    let backend = std::sync::Arc::new(backend.unwrap());
    Server::start(([127, 0, 0, 1], 0).into(), backend, options).unwrap()
}

#[test]
fn one_who_stops_is_released_in_the_middle_of_a_shared_sweep() {
    let hub = slow_hub();
    let kit = kit::from(SourceAddress::Http(hub.url()), Budget::Limit(0), 2);
    let fast = tiny(Budget::Unlimited);
    let engine = &kit.engine;
    let stay = Request::new(Prompt::Ids(ids(3, 30)), 2, greedy());
    let whole = run(&fast.engine, &stay).0;
    let stopper = Stopper::new();
    let leave = Request {
        stopper: Some(stopper.clone()),
        ..Request::new(Prompt::Ids(ids(4, 30)), 1_000, greedy())
    };
    std::thread::scope(|scope| {
        let stays = scope.spawn(|| run(engine, &stay).0);
        let leaves = scope.spawn(|| {
            let made = run(engine, &leave).0;
            (made, Instant::now())
        });
        let began = Instant::now();
        while engine.progress().sequences < 2 {
            assert!(began.elapsed() < Duration::from_secs(60), "they never met");
            std::thread::sleep(Duration::from_millis(1));
        }
        stopper.stop();
        let stopped = Instant::now();
        let (made, at) = leaves.join().unwrap();
        assert_eq!(made.finish, Finish::Interrupted);
        // The sweep was far from its end: 30 rows over such a link take many seconds.
        assert!(at - stopped < Duration::from_secs(10), "{:?}", at - stopped);
        assert_eq!(answer(&stays.join().unwrap()), answer(&whole));
    });
    // One that is alone ends the sweep itself, and what it waited for is cancelled.
    let alone = Stopper::new();
    let request = Request {
        stopper: Some(alone.clone()),
        ..leave
    };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| run(engine, &request).0);
        while engine.progress().sequences < 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        alone.stop();
        assert_eq!(run.join().unwrap().finish, Finish::Interrupted);
    });
    let began = Instant::now();
    while engine.progress().sequences > 0 {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "the sweep went on for nobody"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_expert_that_does_not_come_fails_those_who_need_it() {
    let online = tiny(Budget::Unlimited);
    let has: Vec<Request> = (0..3)
        .map(|n| Request::new(Prompt::Ids(ids(n, 6)), 5, greedy()))
        .collect();
    let whole: Vec<_> = has.iter().map(|r| run(&online.engine, r).0).collect();
    online.engine.flush();
    let kit::Kit { engine, home } = online;
    drop(engine);
    let offline = kit::at(home, None, Budget::Unlimited, 2);
    let engine = &offline.engine;
    // Long and various: it needs experts that the others never met.
    let lacks = Request::new(Prompt::Ids(ids(99, 300)), 5, greedy());
    for round in 0..3 {
        std::thread::scope(|scope| {
            let fails = scope.spawn(|| engine.generate(&lacks, &mut |_| ControlFlow::Continue(())));
            let others: Vec<_> = has
                .iter()
                .map(|r| scope.spawn(|| run(engine, r).0))
                .collect();
            for (other, whole) in others.into_iter().zip(&whole) {
                assert_eq!(
                    answer(&other.join().unwrap()),
                    answer(whole),
                    "round {round}"
                );
            }
            let error = fails.join().unwrap().unwrap_err();
            assert!(matches!(error, EngineError::Residency(_)), "{error:?}");
            assert!(error.to_string().contains("is not in the store"), "{error}");
        });
    }
    assert_eq!(answer(&run(engine, &has[0]).0), answer(&whole[0]));
}
