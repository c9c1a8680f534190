//! The router beyond its golden: ties, groups, poison.

use crate::kernel::route::{RouterSpec, Score, top_k};

const SPEC: RouterSpec = RouterSpec {
    score: Score::Sigmoid,
    renormalize: true,
    scale: 1.0,
    groups: 1,
    topk_groups: 1,
};

#[test]
fn ties_go_to_the_lower_index() {
    let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
    top_k(
        &[0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        &[0.0; 6],
        3,
        SPEC,
        &mut ids,
        &mut weights,
    );
    assert_eq!(ids, [1, 2, 4]);
    assert_eq!(weights, [weights[0]; 3]);
}

#[test]
fn a_group_is_judged_by_its_two_best_and_the_rest_is_closed() {
    // The best single expert stands in a group whose second best is poor.
    let logits = [3.0, -9.0, -9.0, 1.0, 1.5, -9.0, 0.0, 0.5, 0.2];
    let spec = RouterSpec {
        groups: 3,
        topk_groups: 1,
        ..SPEC
    };
    let (mut ids, mut weights) = ([0; 2], [0.0; 2]);
    top_k(&logits, &[0.0; 9], 2, spec, &mut ids, &mut weights);
    assert_eq!(ids, [4, 3]);
    let spec = RouterSpec {
        groups: 3,
        topk_groups: 2,
        ..SPEC
    };
    let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
    top_k(&logits, &[0.0; 9], 3, spec, &mut ids, &mut weights);
    assert_eq!(ids, [4, 3, 7]);
}

#[test]
fn without_renormalisation_the_weights_are_the_scores_times_the_scale() {
    let spec = RouterSpec {
        score: Score::Softmax,
        renormalize: false,
        scale: 2.0,
        ..SPEC
    };
    let (mut ids, mut weights) = ([0; 1], [0.0; 1]);
    top_k(&[0.0, 0.0], &[-1.0, 1.0], 1, spec, &mut ids, &mut weights);
    assert_eq!((ids, weights), ([1], [1.0]));
}

#[test]
fn a_poisoned_row_still_names_distinct_experts() {
    let (mut ids, mut weights) = ([0; 4], [0.0; 4]);
    top_k(
        &[f32::NAN, 1.0, f32::NAN, 2.0],
        &[0.0; 4],
        4,
        SPEC,
        &mut ids,
        &mut weights,
    );
    assert_eq!(ids, [3, 1, 0, 2]);
}
