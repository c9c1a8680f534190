//! The engine's own parts: drawing and stopping.

use super::sampler::Sampling;
use super::sampler::sample;
use super::stop::StopTexts;

fn sampling(temperature: f32, top_p: f32, seed: u64) -> Sampling {
    Sampling {
        temperature,
        top_p,
        seed,
    }
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_of_equals() {
    assert_eq!(sample(&[1.0, 3.0, 3.0, -2.0], &sampling(0.0, 1.0, 9), 0), 1);
    assert_eq!(sample(&[f32::NAN, 3.0, 4.0], &sampling(0.0, 1.0, 9), 0), 2);
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0_f32, 1.0, 2.0];
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut counts = [0_u32; 3];
    let draws = 30_000;
    for position in 0..draws {
        counts[sample(&logits, &sampling(1.0, 1.0, 7), position) as usize] += 1;
    }
    for (count, weight) in counts.iter().zip(weights) {
        let share = f64::from(*count) / draws as f64;
        assert!((share - weight / total).abs() < 0.01, "{counts:?}");
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
    let draw = |seed, position| sample(&logits, &sampling(0.9, 1.0, seed), position);
    let first: Vec<u32> = (0..64).map(|p| draw(5, p)).collect();
    let backwards: Vec<u32> = (0..64).rev().map(|p| draw(5, p)).collect();
    assert!(first.iter().eq(backwards.iter().rev()));
    assert_ne!(first, (0..64).map(|p| draw(6, p)).collect::<Vec<_>>());
}

#[test]
fn top_p_never_draws_outside_the_nucleus() {
    let logits = [5.0_f32, 4.9, 0.0, -1.0];
    for position in 0..2_000 {
        assert!(sample(&logits, &sampling(1.0, 0.9, 3), position) < 2);
    }
    assert_eq!(sample(&logits, &sampling(1.0, 1e-6, 3), 0), 0);
}

#[test]
fn the_nucleus_of_many_is_that_of_a_full_sort() {
    let sizes = [1, 255, 256, 257, 300, 2_304, 2_305, 30_000];
    for (n, top_p) in sizes
        .into_iter()
        .flat_map(|n| [(n, 0.5), (n, 0.99), (n, 0.999_999)])
    {
        // Many equals, so that ties at the edges of the parts count.
        let logits: Vec<f32> = (0..n).map(|i| ((i * 7_919) % 211) as f32 * 0.02).collect();
        let top = logits.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f64> = logits
            .iter()
            .map(|&l| f64::from(crate::kernel::math::exp(l - top)))
            .collect();
        let mut ranked: Vec<usize> = (0..n).collect();
        ranked.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
        let wanted = top_p * weights.iter().sum::<f64>();
        let mut kept = 0.0;
        let inside = ranked.iter().position(|i| {
            kept += weights[*i];
            kept >= wanted
        });
        ranked.truncate(inside.map_or(n, |at| at + 1));
        let mut all: Vec<(usize, f64)> = weights.iter().copied().enumerate().collect();
        let (sum, count) = super::sampler::nucleus(&mut all, wanted);
        assert_eq!((sum, count), (kept, ranked.len()), "{n} at {top_p}");
        let first: Vec<usize> = all[..count].iter().map(|one| one.0).collect();
        assert_eq!(first, ranked, "{n} at {top_p}");
    }
}

#[test]
fn a_stop_text_is_found_across_pieces_and_never_shown() {
    let text = "one two END three";
    for cut in 1..text.len() {
        let mut stops = StopTexts::new(&["END".to_owned(), "zzz".to_owned()]);
        let mut shown = stops.push(&text[..cut]);
        shown.push_str(&stops.push(&text[cut..]));
        shown.push_str(&stops.finish());
        assert_eq!(shown, "one two ");
        assert!(stops.found());
    }
}

#[test]
fn what_only_looked_like_a_stop_text_is_shown_in_the_end() {
    let mut stops = StopTexts::new(&["END".to_owned()]);
    assert_eq!(stops.push("the EN"), "the ");
    assert_eq!(stops.push("É"), "ENÉ");
    assert_eq!(stops.push("E"), "");
    assert_eq!(stops.finish(), "E");
    assert!(!stops.found());
}
