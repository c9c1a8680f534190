//! exp, tanh, sigmoid and softplus, defined here to the bit.
//!
//! `f32::exp` and its family call the system's mathematical library, whose last bits differ between
//! systems, so the same prompt could give different text on two machines with the same CPU. These
//! are polynomials in plain multiplications and additions: the same bits everywhere. No branch
//! depends on the value, so a loop over them becomes vector code.
//!
//! Bounds are in units in the last place of the f32 result, measured over all of the range by
//! `tests/math.rs` against f64.

/// Adding this rounds an f32 of modest size to a whole number (ties to even), which then stands in
/// the lowest bits. `f32::round` is a library call on a plain x86-64 target.
const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23

/// e^x, within 1 ulp; 0 below -104, infinity above 88.73.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or infinite anyway. `max` and `min` would drop a NaN.
    let c = if x > 89.0 { 89.0 } else { x };
    let c = if c < -105.0 { -105.0 } else { c };
    // x = n ln 2 + r with |r| ≤ 0.347. ln 2 in two parts: the first has 9 trailing zero bits, so n
    // times it is exact.
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (c - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = EXP[5];
    let p = p * r + EXP[4];
    let p = p * r + EXP[3];
    let p = p * r + EXP[2];
    let p = p * r + EXP[1];
    let p = p * r + EXP[0];
    let p = 1.0 + (r + r * r * p);
    // 2^n in two factors: n reaches -152, and a result may be subnormal.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n - half)
}

/// 2^n for -126 ≤ n ≤ 127; anything elsewhere (a NaN's n), never a panic.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e^-x), within 2.5 ulp, also where it is tiny.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    // e^-|x| never overflows, so the far negative side keeps its digits instead of becoming 1/∞.
    let e = exp(-x.abs());
    let top = if x < 0.0 { e } else { 1.0 };
    top / (1.0 + e)
}

/// x · sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Hyperbolic tangent, within 2 ulp.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    // Near 0 the exponential form cancels; a polynomial in x² does not.
    let s = x * x;
    let p = TANH[5];
    let p = p * s + TANH[4];
    let p = p * s + TANH[3];
    let p = p * s + TANH[2];
    let p = p * s + TANH[1];
    let p = p * s + TANH[0];
    let near = x + x * (s * p);
    let far = 1.0 - 2.0 / (exp(2.0 * a) + 1.0);
    // Also gives -0 its sign back, which the polynomial's last addition takes.
    (if a < 0.55 { near } else { far }).copysign(x)
}

/// (e^r - 1 - r)/r² for |r| ≤ 0.3475, interpolated at Chebyshev points; off by 1.5e-10.
const EXP: [f32; 6] = [
    0.5,
    0.166_666_67,
    0.041_666_463,
    0.008_333_31,
    0.001_393_388_1,
    0.000_198_912_47,
];

/// (tanh(x)/x - 1)/x² as a polynomial in x² for |x| < 0.556, interpolated likewise.
const TANH: [f32; 6] = [
    -0.333_333_34,
    0.133_333_24,
    -0.053_964_365,
    0.021_814_976,
    -0.008_511_812,
    0.002_505_385,
];

/// (atanh(z)/z - 1)/z² as a polynomial in z² for z ≤ 1/3, interpolated likewise.
const ATANH: [f32; 6] = [
    0.333_333_34,
    0.200_000_05,
    0.142_851_53,
    0.111_323_625,
    0.087_322_7,
    0.103_941_34,
];

/// ln(1 + e^x), within 3 ulp.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let above = if x < 0.0 { 0.0 } else { x };
    above + ln_1p_unit(exp(-x.abs()))
}

/// ln(1 + t) for 0 ≤ t ≤ 1, as 2 atanh(t / (2 + t)): no cancellation for small t.
#[inline(always)]
fn ln_1p_unit(t: f32) -> f32 {
    let z = t / (2.0 + t);
    let s = z * z;
    let p = ATANH[5];
    let p = p * s + ATANH[4];
    let p = p * s + ATANH[3];
    let p = p * s + ATANH[2];
    let p = p * s + ATANH[1];
    let p = p * s + ATANH[0];
    2.0 * (z + z * (s * p))
}

/// Softmax in place: e^(x - max), over its sum in index order.
///
/// A NaN makes all of `x` NaN. An entry of -infinity becomes 0, unless all of them are.
pub fn softmax(x: &mut [f32]) {
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = exp(*x - top);
        sum += *x;
    }
    for x in x.iter_mut() {
        *x /= sum;
    }
}
