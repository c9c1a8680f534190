use std::sync::Arc;

use proptest::prelude::*;

use super::CoreChoice;
use super::Demand;
use super::MemoryPlan;
use super::Moved;
use super::Rates;
use super::Shape;
use super::Share;
use super::Stored;
use super::predict;
use crate::checkpoint::Spec;
use crate::model::Sequence;

fn shape(model: &str) -> Shape {
    let config = std::fs::read(format!("fixtures/{model}/config.json")).unwrap();
    let spec = Spec::from_config(&config).unwrap();
    Shape::implied(&Arc::new(spec)).unwrap()
}

fn k3() -> Shape {
    shape("kimi-k3")
}

fn demand(budget: u64) -> Demand {
    Demand {
        budget: Some(budget),
        threads: 8,
        context: 8192,
        sequences: 1,
        taking_turns: false,
        core: CoreChoice::Auto,
        ..Demand::default()
    }
}

#[test]
fn the_real_k3_has_its_published_sizes_before_a_header_is_read() {
    let k3 = k3();
    assert_eq!(k3.expert_len(), 17_547_264);
    assert_eq!(k3.experts(), 82_432);
    assert_eq!(k3.experts_a_token(), 92 * 16);
    // 113,509,540,864 bytes of tensors, and what files add: heads, and each tensor up to a page.
    let files = k3.core_bytes() - 113_509_540_864;
    assert!(files < 12_000_000, "{files}");
}

#[test]
fn a_machine_of_64_gb_pins_half_of_k3_and_reads_the_rest_evenly() {
    let (k3, gb) = (k3(), 1_000_000_000);
    let plan = MemoryPlan::new(&k3, &demand(64 * gb));
    assert!(!plan.mapped && plan.short == 0);
    assert!(plan.total() <= 64 * gb);
    assert!(plan.pinned > 55 * gb, "{plan:?}");
    assert_eq!(plan.expert_memory, 0, "core first");
    let (pieces, pins) = plan.pieces(&k3);
    assert!(pieces.iter().all(|piece| piece.bytes <= 16 << 20));
    // No layer is all pinned or all read.
    for layer in 0..93 {
        let of = |kept: bool| {
            let some = pieces.iter().zip(&pins);
            let some = some.filter(|(piece, pin)| piece.part == layer && **pin == kept);
            some.map(|(piece, _)| piece.bytes).sum::<usize>()
        };
        assert!(
            of(true) > of(false) / 4 && of(false) > of(true) / 4,
            "{layer}"
        );
    }
}

#[test]
fn everything_that_fits_is_mapped_and_read_from_nowhere() {
    let k3 = k3();
    let all = MemoryPlan::new(&k3, &demand(2_000_000_000_000));
    assert!(all.mapped);
    assert_eq!(all.streamed, 0);
    assert_eq!(all.expert_memory, k3.expert_bytes());
    let core = MemoryPlan::new(&k3, &demand(200_000_000_000));
    assert!(!core.mapped);
    assert_eq!(core.streamed, 0);
    assert!(core.expert_memory > 70_000_000_000 && core.total() <= 200_000_000_000);
    let none = MemoryPlan::new(&k3, &Demand::default());
    assert!(none.mapped && none.short == 0);
}

#[test]
fn what_is_streamed_decides_a_token_on_a_small_machine() {
    let k3 = k3();
    let rates = Rates {
        disk: 5.5e9,
        core_disk: 5.5e9,
        link: Some(125e6),
        core: 100e9,
        experts: 60e9,
        many: 1e12,
        many_experts: 1e12,
    };
    let plan = MemoryPlan::new(&k3, &demand(64_000_000_000));
    let here = |experts_here| {
        let core_missing = 0;
        let stored = Stored {
            core_missing,
            experts_here,
        };
        predict(&k3, &plan, &rates, &stored, 300)
    };
    let installed = here(1.0);
    let Moved {
        core_disk,
        expert_disk,
        expert_hub,
        ..
    } = installed.token;
    assert_eq!(expert_hub, 0.0);
    let disk = (core_disk + expert_disk) / rates.disk;
    assert!((installed.seconds.unwrap() - disk).abs() < 1e-9);
    let streamed = here(0.0);
    assert!(streamed.seconds.unwrap() > 200.0, "25.8 GB over 1 Gbit/s");
    assert!(streamed.first_token.unwrap() > streamed.seconds.unwrap());
    let blind = Rates {
        link: None,
        ..rates
    };
    let stored = Stored {
        core_missing: 1,
        experts_here: 0.5,
    };
    let unknown = predict(&k3, &plan, &blind, &stored, 1);
    assert_eq!((unknown.seconds, unknown.core_fetch), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_plan_holds_its_budget_and_wastes_little(
        budget in 0u64..150_000_000_000,
        threads in 1usize..64,
        context in 1usize..200_000,
        sequences in 1usize..8,
        tiny in any::<bool>(),
        taking_turns in any::<bool>(),
    ) {
        let shape = if tiny { shape("tiny-k3") } else { k3() };
        let demand = Demand { budget: Some(budget), threads, context, sequences, core: CoreChoice::Read, taking_turns, ..Demand::default() };
        let plan = MemoryPlan::new(&shape, &demand);
        // Never more than there is, unless it says so.
        prop_assert_eq!(plan.short, plan.total().saturating_sub(budget));
        let (runs, whole) = shape.read_a_sweep();
        prop_assert_eq!(plan.streamed > 0, plan.pinned < runs + whole);
        if plan.short == 0 && plan.streamed > 0 {
            // What is left over is less than a piece of each kind, and an expert.
            let unused = budget - plan.total();
            prop_assert!(unused <= 3 * (16 << 20) + shape.expert_len(), "{} unused", unused);
            // Experts get what no piece of the core fits in.
            prop_assert!(plan.expert_memory <= 3 * (16 << 20));
        }
        let (pieces, pins) = plan.pieces(&shape);
        let held: u64 = pieces.iter().zip(&pins).filter(|(_, pin)| **pin).map(|(p, _)| p.bytes as u64).sum();
        let whole_held = if plan.whole_pinned { whole } else { 0 };
        prop_assert_eq!(held + whole_held, plan.pinned);
        let lone = pieces.iter().zip(&pins).filter(|(_, pin)| !**pin).map(|(p, _)| p.bytes as u64);
        prop_assert!(lone.max().unwrap_or(0) * 2 <= plan.ring);
        // More memory never reads more.
        let more = Demand { budget: Some(budget + budget / 2), ..demand };
        let more = MemoryPlan::new(&shape, &more);
        prop_assert!(more.streamed <= plan.streamed + 3 * (16 << 20));
        let states = plan.bytes(Share::Sequences);
        let one = Sequence::bytes(&shape.spec, context);
        if taking_turns {
            prop_assert!(states >= one && states <= (budget / 8).max(one));
        } else {
            prop_assert_eq!(states, one * sequences as u64);
        }
    }

    #[test]
    fn pieces_cover_every_row_once_and_begin_where_a_direct_read_may(piece in 4096usize..(64 << 20)) {
        for (shape, piece) in [(shape("tiny-k3"), piece), (k3(), piece + (1 << 20))] {
            let mut last = (0, 0, 0);
            for piece in shape.pieces(piece) {
                let group = &shape.parts[piece.part].groups[piece.group];
                let expected = if (piece.part, piece.group) == (last.0, last.1) { last.2 } else { 0 };
                prop_assert_eq!(piece.rows.start, expected);
                for offset in &group.offsets {
                    prop_assert_eq!((offset + (piece.rows.start * group.row_bytes) as u64) % 4096, 0);
                }
                prop_assert_eq!(piece.bytes % 4096, 0);
                last = (piece.part, piece.group, piece.rows.end);
                if piece.rows.end == group.rows {
                    last = (piece.part, piece.group + 1, 0);
                }
            }
        }
    }
}
