//! The polynomials against the standard library's f64, over the whole range of f32.

use super::support::{Random, assert_same_bits};
use crate::kernel::math::{exp, sigmoid, silu, softmax, softplus, tanh};

/// Distance from the exact value in units of the last place of f32 at that value.
fn ulps(got: f32, want: f64) -> f64 {
    let want32 = want as f32;
    if got == want32 || (got.is_nan() && want.is_nan()) {
        return 0.0;
    }
    let exponent = (want.abs().max(f64::from(f32::MIN_POSITIVE)))
        .log2()
        .floor() as i32;
    (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
}

/// Values of every size, both signs, dense between -120 and 120.
fn arguments() -> impl Iterator<Item = f32> {
    let sizes =
        (0..=255u32).flat_map(|e| (0..16u32).map(move |m| f32::from_bits(e << 23 | m << 19)));
    let dense = (-120_000..=120_000).map(|i| i as f32 * 0.001);
    let mut random = Random(7);
    let drawn = (0..200_000).map(move |_| 20.0 * random.unit() * random.unit().abs());
    sizes.flat_map(|x| [x, -x]).chain(dense).chain(drawn)
}

#[track_caller]
fn check(name: &str, bound: f64, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) {
    let mut worst = (0.0, 0.0);
    for x in arguments() {
        let off = ulps(f(x), exact(f64::from(x)));
        if off > worst.0 || off.is_nan() {
            worst = (off, x);
        }
        assert!(!off.is_nan(), "{name}({x:e}) = {:e}", f(x));
    }
    let (off, x) = worst;
    assert!(
        off <= bound,
        "{name}({x:e}): {:e}, off by {off:.2} ulp",
        f(x)
    );
}

#[test]
fn exp_is_within_one_unit_in_the_last_place() {
    check("exp", 1.0, exp, f64::exp);
}

#[test]
fn sigmoid_is_within_two_and_a_half_units_also_where_it_is_tiny() {
    check("sigmoid", 2.5, sigmoid, |x| {
        if x < 0.0 {
            x.exp() / (1.0 + x.exp())
        } else {
            1.0 / (1.0 + (-x).exp())
        }
    });
}

#[test]
fn tanh_is_within_two_units() {
    check("tanh", 2.0, tanh, f64::tanh);
}

#[test]
fn softplus_is_within_three_units() {
    check("softplus", 3.0, softplus, |x| {
        x.max(0.0) + (-x.abs()).exp().ln_1p()
    });
}

#[test]
fn the_ends_of_the_range_are_exact() {
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
    assert_eq!(
        (sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)),
        (1.0, 0.0)
    );
    assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    assert_same_bits(
        "tanh keeps the sign of zero",
        &[tanh(0.0), tanh(-0.0)],
        &[0.0, -0.0],
    );
    assert_eq!(softplus(f32::NEG_INFINITY), 0.0);
    assert_eq!(softplus(1e30), 1e30);
    assert_eq!(silu(0.0), 0.0);
    for f in [exp, sigmoid, tanh, softplus, silu] {
        assert!(f(f32::NAN).is_nan(), "a NaN must not be lost");
    }
}

#[test]
fn softmax_of_large_values_does_not_overflow_and_minus_infinity_gets_nothing() {
    let mut x = [1000.0, 1001.0, f32::NEG_INFINITY];
    softmax(&mut x);
    assert!(
        (x[0] - 0.268_941_42).abs() < 1e-7 && (x[1] - 0.731_058_6).abs() < 1e-7,
        "{x:?}"
    );
    assert_eq!(x[2], 0.0);
    let mut x = [0.0, f32::NAN];
    softmax(&mut x);
    assert!(
        x.iter().all(|x| x.is_nan()),
        "a NaN must poison the whole distribution: {x:?}"
    );
}
