//! The forward pass against golden values, and against itself: every way to cut, share and schedule the same work
//! must give the same bits.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "golden/faults.rs"]
mod faults;
#[path = "golden/folder.rs"]
mod folder;
#[path = "golden/goldens.rs"]
mod goldens;
#[path = "golden/runner.rs"]
mod runner;
#[path = "golden/runs.rs"]
mod runs;

use deltafin::kernel::Isa;
use deltafin::model::Row;
use deltafin::model::Sequence;
use deltafin::model::Sweep;

use crate::folder::Arrival;
use crate::folder::Folder;
use crate::goldens::Goldens;
use crate::goldens::assert_close;
use crate::goldens::assert_routes;
use crate::runner::Runner;
use crate::runner::Taps;
use crate::runner::append;
use crate::runner::bits;
use crate::runner::row;

/// What a float32 engine may be off by, in logits and intermediate values.
const TOLERANCE: f32 = 1e-3;

/// Checkpoints and the goldens that hold for them.
const TINY: [(&str, &str); 3] = [
    ("tiny-k3", "goldens/tiny-k3.safetensors"),
    ("tiny-k3-scattered", "goldens/tiny-k3.safetensors"),
    ("tiny-linear", "goldens/tiny-linear.safetensors"),
];

#[track_caller]
fn check_routes(
    name: &str,
    runner: &Runner,
    sweep: &Sweep,
    goldens: &Goldens,
    prefix: &str,
    weights: bool,
) {
    let moe = runner.folder.spec.moe.as_ref().unwrap();
    assert_eq!(sweep.routes.len(), runner.folder.spec.moe_layers().count());
    for routes in &sweep.routes {
        let stem = format!("{prefix}.L{}", routes.layer);
        let wanted = goldens.i32(&format!("{stem}.experts"));
        let wanted_weights = weights.then(|| goldens.f32(&format!("{stem}.weights")));
        assert_routes(
            &format!("{name} {stem}"),
            moe.top_k,
            (&routes.experts, &routes.weights),
            (&wanted, wanted_weights.as_deref()),
            TOLERANCE,
        );
    }
}

#[test]
fn every_stage_of_a_prompt_matches_its_golden() {
    for (model, file) in TINY {
        let (runner, goldens) = (Runner::open(model), Goldens::open(file));
        let ids = goldens.ids("A.ids");
        let rows: Vec<Row> = ids.iter().map(|id| row(0, *id)).collect();
        let mut taps = Taps::default();
        runner.sweep(&mut [&mut runner.sequence()], &rows, &mut taps);
        let wanted = goldens.names("A.tap.");
        assert!(wanted.len() > 50, "{model}: goldens are there");
        for name in &wanted {
            let short = name.strip_prefix("A.tap.").unwrap();
            let found = taps
                .0
                .get(short)
                .unwrap_or_else(|| panic!("{model}: no stage {short}"));
            assert_close(
                &format!("{model} {name}"),
                found,
                &goldens.f32(name),
                TOLERANCE,
            );
        }
        assert_eq!(
            taps.0.len(),
            wanted.len(),
            "{model}: no stage without a golden"
        );
    }
}

#[test]
fn logits_and_routes_match_at_every_position_of_every_prompt() {
    for (model, file) in TINY {
        let (runner, goldens) = (Runner::open(model), Goldens::open(file));
        for prompt in ["A", "B", "C"] {
            let name = format!("{model} {prompt}");
            let sweep = runner.read(
                &mut runner.sequence(),
                &goldens.ids(&format!("{prompt}.ids")),
                usize::MAX,
            );
            assert_close(
                &name,
                &sweep.logits,
                &goldens.f32(&format!("{prompt}.logits")),
                TOLERANCE,
            );
            check_routes(&name, &runner, &sweep, &goldens, prompt, true);
        }
    }
}

#[test]
fn the_state_after_a_prompt_matches_its_golden() {
    for (model, file) in TINY {
        let (runner, goldens) = (Runner::open(model), Goldens::open(file));
        let ids = goldens.ids("A.ids");
        let mut sequence = runner.sequence();
        runner.read(&mut sequence, &ids, usize::MAX);
        assert_eq!(sequence.len(), ids.len());
        let mut checked = 0;
        for slice in sequence.slices() {
            let golden = |name: &str| goldens.f32(&format!("A.state.L{}.{name}", slice.layer));
            let name = format!("{model} layer {} {}", slice.layer, slice.name);
            if slice.name == "latent" {
                let rank = runner.folder.spec.mla.kv_rank;
                let rows = || slice.values.chunks(slice.values.len() / ids.len());
                let latent: Vec<f32> = rows().flat_map(|row| &row[..rank]).copied().collect();
                let rot: Vec<f32> = rows().flat_map(|row| &row[rank..]).copied().collect();
                assert_close(&name, &latent, &golden("latent"), TOLERANCE);
                assert_close(&name, &rot, &golden("rot"), TOLERANCE);
                checked += 2;
            } else {
                assert_close(&name, slice.values, &golden(slice.name), TOLERANCE);
                checked += 1;
            }
        }
        assert_eq!(
            checked,
            goldens.names("A.state.").len(),
            "{model}: all of the state"
        );
    }
}

#[test]
fn greedy_continuations_match_in_ids_logits_and_routes() {
    for (model, file) in TINY {
        let (runner, goldens) = (Runner::open(model), Goldens::open(file));
        for prompt in ["A", "B", "C"] {
            let name = format!("{model} {prompt}");
            let ids = goldens.ids(&format!("{prompt}.ids"));
            let wanted = goldens.ids(&format!("{prompt}.greedy_ids"));
            let mut sequence = runner.sequence();
            let prefill = runner.read(&mut sequence, &ids, usize::MAX);
            let last = &prefill.logits[prefill.logits.len() - runner.folder.spec.vocab..];
            let (found, rows, sweep) = runner.greedy(&mut sequence, last, wanted.len(), &[]);
            assert_eq!(found, wanted, "{name}");
            assert_close(
                &name,
                &rows,
                &goldens.f32(&format!("{prompt}.greedy_logits")),
                TOLERANCE,
            );
            check_routes(
                &name,
                &runner,
                &sweep,
                &goldens,
                &format!("{prompt}.greedy"),
                true,
            );
        }
    }
}

#[test]
fn the_trained_model_matches_its_goldens() {
    let runner = Runner::open("austen-k3/model");
    let vocab = runner.folder.spec.vocab;
    for case in ["plain", "chat_who", "chat_story", "long"] {
        let goldens = Goldens::open(&format!("austen-k3/goldens/{case}.safetensors"));
        let ids = goldens.ids("ids");
        let mut sequence = runner.sequence();
        let prefill = runner.read(&mut sequence, &ids, 256);
        let last = |rows: usize| &prefill.logits[prefill.logits.len() - rows * vocab..];
        assert_close(case, last(4), &goldens.f32("logits_last4"), TOLERANCE);
        check_routes(case, &runner, &prefill, &goldens, "prompt", false);
        let wanted = goldens.ids("greedy_ids");
        let stops = &runner.folder.spec.eos;
        let (found, rows, sweep) = runner.greedy(&mut sequence, last(1), wanted.len(), stops);
        assert_eq!(found, wanted, "{case}");
        assert_close(case, &rows, &goldens.f32("greedy_logits"), TOLERANCE);
        check_routes(case, &runner, &sweep, &goldens, "greedy", false);
    }
}

/// Prompts for the comparisons of the engine with itself, and the models that read them.
fn prompts() -> [(&'static str, Vec<u32>); 3] {
    let tiny = |file: &str| Goldens::open(file).ids("C.ids")[..90].to_vec();
    let austen = Goldens::open("austen-k3/goldens/chat_who.safetensors").ids("ids");
    [
        ("tiny-k3", tiny(TINY[0].1)),
        ("tiny-linear", tiny(TINY[2].1)),
        ("austen-k3/model", austen[..90].to_vec()),
    ]
}

#[test]
fn however_a_prompt_is_cut_into_sweeps_the_bits_are_the_same() {
    for isa in Isa::available() {
        for (model, ids) in prompts() {
            let runner = Runner::new(Folder::open(model), isa, 2);
            let run = |rows| {
                let mut sequence = runner.sequence();
                let sweep = runner.read(&mut sequence, &ids, rows);
                bits(&sweep, &sequence)
            };
            let whole = run(usize::MAX);
            for rows in [1, 2, 7, 64] {
                assert!(
                    run(rows) == whole,
                    "{model}, {}, sweeps of {rows} rows",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn however_many_threads_compute_the_bits_are_the_same() {
    for isa in Isa::available() {
        for (model, ids) in prompts() {
            let run = |threads, rows| {
                let runner = Runner::new(Folder::open(model), isa, threads);
                let mut sequence = runner.sequence();
                let sweep = runner.read(&mut sequence, &ids, rows);
                bits(&sweep, &sequence)
            };
            let one = run(1, usize::MAX);
            for threads in [2, 3] {
                assert!(
                    run(threads, usize::MAX) == one,
                    "{model}, {}, {threads} threads",
                    isa.name()
                );
                assert!(
                    run(threads, 1) == one,
                    "{model}, {}, {threads} threads, token by token",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn in_whatever_order_experts_arrive_the_bits_are_the_same() {
    for (model, ids) in prompts() {
        let run = |arrival| {
            let runner = Runner::new(Folder::open(model).arriving(arrival), Isa::best(), 2);
            let mut sequence = runner.sequence();
            let sweep = runner.read(&mut sequence, &ids, 30);
            bits(&sweep, &sequence)
        };
        let asked = run(Arrival::AsAsked);
        assert!(run(Arrival::Backwards) == asked, "{model} backwards");
        assert!(run(Arrival::Shuffled) == asked, "{model} shuffled");
    }
}

#[test]
fn sequences_that_share_sweeps_get_the_bits_they_get_alone() {
    for isa in Isa::available() {
        for (model, ids) in prompts() {
            let runner = Runner::new(Folder::open(model), isa, 2);
            let texts = [&ids[..50], &ids[20..33], &ids[40..]];
            let alone: Vec<Vec<u32>> = texts
                .iter()
                .map(|ids| {
                    let mut sequence = runner.sequence();
                    let sweep = runner.read(&mut sequence, ids, usize::MAX);
                    bits(&sweep, &sequence)
                })
                .collect();
            // Uneven steps, and in each sweep another order of the sequences.
            let mut sequences: Vec<Sequence> = texts.iter().map(|_| runner.sequence()).collect();
            let mut found = vec![Sweep::default(); texts.len()];
            for turn in 0.. {
                let order = (0..texts.len()).map(|i| (i + turn) % texts.len());
                let mut rows = Vec::new();
                for s in order {
                    let left = &texts[s][sequences[s].len()..];
                    rows.extend(
                        left.iter()
                            .take(1 + (turn + s) % 4 * 3)
                            .map(|id| row(s, *id)),
                    );
                }
                if rows.is_empty() {
                    break;
                }
                let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
                let sweep = runner.sweep(&mut all, &rows, &mut ());
                for (s, found) in found.iter_mut().enumerate() {
                    append(found, part(&sweep, &rows, s, &runner));
                }
            }
            for (s, (sweep, sequence)) in found.iter().zip(&sequences).enumerate() {
                assert!(
                    bits(sweep, sequence) == alone[s],
                    "{model}, {}, sequence {s}",
                    isa.name()
                );
            }
        }
    }
}

/// What a sweep of several sequences computed for one of them.
fn part(sweep: &Sweep, rows: &[Row], sequence: usize, runner: &Runner) -> Sweep {
    let spec = &runner.folder.spec;
    let (vocab, top_k) = (spec.vocab, spec.moe.as_ref().unwrap().top_k);
    let mine: Vec<usize> = (0..rows.len())
        .filter(|at| rows[*at].sequence == sequence)
        .collect();
    let mut part = Sweep::default();
    for at in &mine {
        part.logits
            .extend_from_slice(&sweep.logits[at * vocab..(at + 1) * vocab]);
    }
    for routes in &sweep.routes {
        let mut routes = routes.clone();
        let places = || mine.iter().flat_map(|at| at * top_k..(at + 1) * top_k);
        routes.experts = places().map(|at| routes.experts[at]).collect();
        routes.weights = places().map(|at| routes.weights[at]).collect();
        part.routes.push(routes);
    }
    if mine.is_empty() {
        Sweep::default()
    } else {
        part
    }
}

#[test]
fn a_long_prompt_leaves_the_state_that_token_by_token_decoding_leaves() {
    let tokens = std::env::var("DELTAFIN_LONG_TOKENS");
    let tokens = tokens.map_or(640, |tokens| tokens.parse().unwrap());
    for model in ["tiny-k3", "tiny-linear"] {
        let runner = Runner::open(model);
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % u32::try_from(runner.folder.spec.vocab).unwrap()
        };
        let ids: Vec<u32> = (0..tokens).map(|_| next()).collect();
        let run = |rows| {
            let mut sequence = runner.sequence();
            let sweep = runner.read(&mut sequence, &ids, rows);
            assert_eq!(sequence.len(), tokens);
            bits(&sweep, &sequence)
        };
        assert!(run(512) == run(1), "{model}: {tokens} tokens");
    }
}

#[test]
fn rows_that_ask_for_no_logits_change_nothing_for_those_that_do() {
    for (model, ids) in prompts() {
        let runner = Runner::open(model);
        let vocab = runner.folder.spec.vocab;
        let whole = runner.read(&mut runner.sequence(), &ids, usize::MAX);
        let asks = |at: usize| at.is_multiple_of(13) || at + 1 == ids.len();
        let rows: Vec<Row> = (0..ids.len())
            .map(|at| Row {
                logits: asks(at),
                ..row(0, ids[at])
            })
            .collect();
        let sweep = runner.sweep(&mut [&mut runner.sequence()], &rows, &mut ());
        let wanted: Vec<f32> = (0..ids.len())
            .filter(|at| asks(*at))
            .flat_map(|at| &whole.logits[at * vocab..(at + 1) * vocab])
            .copied()
            .collect();
        assert!(sweep.logits == wanted, "{model}");
        assert_eq!(
            sweep.routes, whole.routes,
            "{model}: routes are told for every row"
        );
    }
}

#[test]
fn a_sequence_rebuilt_from_its_slices_continues_with_the_same_bits() {
    for (model, ids) in prompts() {
        let runner = Runner::open(model);
        let mut first = runner.sequence();
        runner.read(&mut first, &ids[..70], usize::MAX);
        let mut second = Sequence::with_len(&runner.folder.spec, first.len());
        let mut copied = 0;
        for (from, to) in first.slices().zip(second.slices_mut()) {
            assert_eq!((from.layer, from.name), (to.layer, to.name));
            to.values.copy_from_slice(from.values);
            copied += 1;
        }
        assert_eq!(copied, first.slices().count());
        let go_on = |sequence: &mut Sequence| {
            let sweep = runner.read(sequence, &ids[70..], 8);
            bits(&sweep, sequence)
        };
        assert!(go_on(&mut second) == go_on(&mut first), "{model}");
    }
}
