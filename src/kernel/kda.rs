//! Kimi Delta Attention: a matrix per head that forgets, is corrected and is read, token by token.

use std::ops::Range;

use super::lanes::sum_squares;
use super::math::{exp, sigmoid, softplus};
use super::pool::Kernel;

/// Value columns that are carried together through all tokens of a call: 128 keys times 32 values
/// are 16 KB, which stay in the first-level cache.
const COLUMNS: usize = 32;

/// Tokens between two visits of a column block: bounds the scratch for their decay factors.
const TOKENS: usize = 64;

/// Heads and channels per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdaShape {
    /// Heads.
    pub heads: usize,
    /// Channels per head, of keys and of values.
    pub dim: usize,
}

/// What the recurrence reads, all `[n, heads, dim]` but `beta`.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Normalised queries, scaled by `dim^-1/2`.
    pub q: &'a [f32],
    /// Normalised keys.
    pub k: &'a [f32],
    /// Values, not normalised.
    pub v: &'a [f32],
    /// Logarithms of the decay, at most 0; see [`log_decay`].
    pub log_decay: &'a [f32],
    /// `[n, heads]`, after the sigmoid.
    pub beta: &'a [f32],
}

/// The rows of one sequence within a call, in position order, and that sequence's state.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Rows of the call.
    pub rows: Range<usize>,
    /// `[heads, dim, dim]`: head, key channel, value channel. Updated.
    pub state: &'a mut [f32],
}

/// Logarithm of the decay: with `z = logits + dt_bias` and `a = exp(a_log[head])`,
/// `floor · sigmoid(a · z)` where a floor is set (K3), else `-a · softplus(z)` (Kimi-Linear).
///
/// | name | shape | holds |
/// |---|---|---|
/// | `logits` | `[n, heads · dim]` | output of the low-rank decay projection |
/// | `dt_bias` | `[heads · dim]` | |
/// | `a_log` | `[heads ..]` | one number per HEAD; K3 pads it to `dim` entries |
/// | `out` | `[n, heads · dim]` | overwritten |
///
/// The floor is no clamp: the whole curve scales with it.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn log_decay(
    k: &Kernel,
    logits: &[f32],
    dt_bias: &[f32],
    a_log: &[f32],
    heads: usize,
    floor: Option<f32>,
    out: &mut [f32],
) {
    let lanes = dt_bias.len();
    assert_eq!(logits.len(), out.len(), "values in against values out");
    assert!(
        heads > 0 && lanes.is_multiple_of(heads),
        "{lanes} biases for {heads} heads"
    );
    assert!(
        a_log.len() >= heads,
        "{} rates for {heads} heads",
        a_log.len()
    );
    assert!(
        lanes > 0 && out.len().is_multiple_of(lanes),
        "values are not rows of {lanes}"
    );
    let rates: Vec<f32> = a_log[..heads].iter().map(|&a| exp(a)).collect();
    let dim = lanes / heads;
    k.chunks(32 * out.len(), out, lanes, |row, out| {
        let logits = &logits[row * lanes..(row + 1) * lanes];
        for (head, (out, &a)) in out.chunks_mut(dim).zip(&rates).enumerate() {
            let at = head * dim..(head + 1) * dim;
            k.isa().run(
                head_decay,
                (out, &logits[at.clone()], &dt_bias[at], a, floor),
            );
        }
    });
}

#[inline(always)]
fn head_decay((out, logits, bias, a, floor): HeadDecay<'_>) {
    let z = out
        .iter_mut()
        .zip(logits.iter().zip(bias).map(|(z, bias)| z + bias));
    match floor {
        Some(floor) => {
            for (out, z) in z {
                *out = floor * sigmoid(a * z);
            }
        }
        None => {
            for (out, z) in z {
                *out = -a * softplus(z);
            }
        }
    }
}

type HeadDecay<'a> = (&'a mut [f32], &'a [f32], &'a [f32], f32, Option<f32>);

/// The recurrence, per head with state `S` `[key, value]`, for every token in turn:
///
/// ```text
/// S = diag(exp(log_decay)) S      decay first,
/// r = Sᵀ k                        read after the decay,
/// S = S + beta · k (v - r)ᵀ       write,
/// out = Sᵀ q                      read after the write
/// ```
///
/// `out` is `[n, heads, dim]`; rows that no segment names are left alone.
///
/// Whether tokens come in one call or in many, a state and an output have the same bits: this is
/// the recurrence itself. (The chunked algebra of GPU kernels rounds differently, and its
/// `exp(-cumsum)` overflows after some 20 tokens at the strongest decay.)
///
/// # Panics
///
/// If lengths disagree or segments overlap, run backwards or are not in ascending order.
#[track_caller]
pub fn scan(
    kernel: &Kernel,
    shape: KdaShape,
    tokens: Tokens<'_>,
    segments: Vec<Segment<'_>>,
    out: &mut [f32],
) {
    let KdaShape { heads, dim } = shape;
    let Tokens {
        q,
        k,
        v,
        log_decay,
        beta,
    } = tokens;
    let lanes = heads * dim;
    assert!(
        lanes > 0 && out.len().is_multiple_of(lanes),
        "values are not rows of {lanes}"
    );
    for (name, x) in [("q", q), ("k", k), ("v", v), ("log_decay", log_decay)] {
        assert_eq!(x.len(), out.len(), "{name} against out");
    }
    assert_eq!(beta.len() * dim, out.len(), "beta against out");
    let mut tasks = Vec::new();
    let (mut rest, mut next, mut rows) = (out, 0, 0);
    for segment in segments {
        let Range { start, end } = segment.rows;
        assert!(
            next <= start && start <= end,
            "segment {start}..{end} after row {next}"
        );
        assert_eq!(
            segment.state.len(),
            lanes * dim,
            "state of {heads} heads of {dim}"
        );
        let (_, after) = rest.split_at_mut((start - next) * lanes);
        let (mine, after) = after.split_at_mut((end - start) * lanes);
        (rest, next) = (after, end);
        rows += end - start;
        let first = tasks.len();
        tasks.extend(
            segment
                .state
                .chunks_mut(dim * dim)
                .enumerate()
                .map(|(head, state)| Task {
                    head,
                    first: start,
                    state,
                    out: Vec::with_capacity(end - start),
                }),
        );
        for (i, out) in mine.chunks_mut(dim).enumerate() {
            tasks[first + i % heads].out.push(out);
        }
    }
    kernel.tasks(4 * rows * lanes * dim, tasks, |task| {
        kernel.isa().run(head_scan, (shape, tokens, task));
    });
}

/// One head of one sequence.
struct Task<'a> {
    head: usize,
    first: usize,
    state: &'a mut [f32],
    /// `dim` values for each row.
    out: Vec<&'a mut [f32]>,
}

#[inline(always)]
fn head_scan((shape, tokens, task): (KdaShape, Tokens<'_>, Task<'_>)) {
    let KdaShape { heads, dim } = shape;
    let Task {
        head,
        mut first,
        state,
        mut out,
    } = task;
    let mut decay = vec![0.0; TOKENS.min(out.len()) * dim];
    let mut block = vec![[0.0; COLUMNS]; dim];
    for out in out.chunks_mut(TOKENS) {
        let at = |row: usize| ((first + row) * heads + head) * dim;
        for (row, decay) in decay.chunks_mut(dim).enumerate().take(out.len()) {
            for (decay, &g) in decay
                .iter_mut()
                .zip(&tokens.log_decay[at(row)..at(row) + dim])
            {
                *decay = exp(g);
            }
        }
        for left in (0..dim).step_by(COLUMNS) {
            let width = COLUMNS.min(dim - left);
            for (block, state) in block.iter_mut().zip(state.chunks(dim)) {
                block[..width].copy_from_slice(&state[left..left + width]);
            }
            for (row, out) in out.iter_mut().enumerate() {
                let at = at(row);
                let mut v = [0.0; COLUMNS];
                v[..width].copy_from_slice(&tokens.v[at + left..at + left + width]);
                let read = step(
                    &mut block,
                    &decay[row * dim..(row + 1) * dim],
                    &tokens.k[at..at + dim],
                    &tokens.q[at..at + dim],
                    (&v, tokens.beta[at / dim]),
                );
                out[left..left + width].copy_from_slice(&read[..width]);
            }
            for (block, state) in block.iter().zip(state.chunks_mut(dim)) {
                state[left..left + width].copy_from_slice(&block[..width]);
            }
        }
        first += out.len();
    }
}

/// One token over some value columns of the state, one `block` row per key channel.
#[inline(always)]
fn step(
    block: &mut [[f32; COLUMNS]],
    decay: &[f32],
    k: &[f32],
    q: &[f32],
    (v, beta): (&[f32; COLUMNS], f32),
) -> [f32; COLUMNS] {
    let mut read = [0.0; COLUMNS];
    for ((s, &decay), &k) in block.iter_mut().zip(decay).zip(k) {
        for i in 0..COLUMNS {
            s[i] *= decay;
            read[i] += s[i] * k;
        }
    }
    let mut write = [0.0; COLUMNS];
    for i in 0..COLUMNS {
        write[i] = beta * (v[i] - read[i]);
    }
    let mut out = [0.0; COLUMNS];
    for ((s, &k), &q) in block.iter_mut().zip(k).zip(q) {
        for i in 0..COLUMNS {
            s[i] += k * write[i];
            out[i] += s[i] * q;
        }
    }
    out
}

/// Normalises and gates the recurrence's output, head by head:
/// `out = rms(o, gain, eps) · sigmoid(logits)`.
///
/// | name | shape | holds |
/// |---|---|---|
/// | `o` | `[n, heads, dim]` | output of [`scan`] |
/// | `gain` | `[dim]` | shared by all heads |
/// | `logits` | `[n, heads · dim]` | of the output gate |
/// | `out` | `[n, heads · dim]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn gate(k: &Kernel, o: &[f32], gain: &[f32], eps: f32, logits: &[f32], out: &mut [f32]) {
    let dim = gain.len();
    assert_eq!(o.len(), out.len(), "values in against values out");
    assert_eq!(logits.len(), out.len(), "gate logits against values");
    assert!(
        dim > 0 && out.len().is_multiple_of(dim),
        "values are not heads of {dim}"
    );
    let group = dim * (2048 / dim).max(1);
    k.chunks(24 * out.len(), out, group, |part, out| {
        let at = part * group..part * group + out.len();
        k.isa()
            .run(gate_heads, (&o[at.clone()], gain, eps, &logits[at], out));
    });
}

#[inline(always)]
fn gate_heads((o, gain, eps, logits, out): GateHeads<'_>) {
    let dim = gain.len();
    for ((o, logits), out) in o
        .chunks(dim)
        .zip(logits.chunks(dim))
        .zip(out.chunks_mut(dim))
    {
        let factor = 1.0 / (sum_squares(o) / dim as f32 + eps).sqrt();
        for (((out, o), g), &z) in out.iter_mut().zip(o).zip(gain).zip(logits) {
            *out = g * (o * factor) * sigmoid(z);
        }
    }
}

type GateHeads<'a> = (&'a [f32], &'a [f32], f32, &'a [f32], &'a mut [f32]);
