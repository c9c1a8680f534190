//! Multi-head latent attention without positions, in its absorbed form.
//!
//! The cache holds one latent vector and one shared key part a position, not keys and values per
//! head: 576 values instead of 30,720 in K3. Queries are carried into the latent space, and the
//! weighted latent back out of it.

use std::sync::Arc;

use super::lanes::{add_scaled, dot};
use super::math::exp;
use super::matrix::Matrix;
use super::pool::Kernel;

/// Positions in a block of the latent cache. The softmax walks these blocks from position 0, so a
/// row's sums have one order whatever the call holds; changing this changes results.
pub const BLOCK: usize = 64;

/// Sizes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaShape {
    /// Heads.
    pub heads: usize,
    /// Channels of a query that meet the per-head key.
    pub nope: usize,
    /// Channels of a query that meet the shared key part. (No rotation is applied to it.)
    pub rope: usize,
    /// Length of the latent vector.
    pub rank: usize,
    /// Channels of a value.
    pub vdim: usize,
}

impl MlaShape {
    /// Values a position takes in the cache.
    pub fn width(&self) -> usize {
        self.rank + self.rope
    }
}

/// The latent cache of one layer and sequence, borrowed: blocks of [`BLOCK`] positions, each
/// `[BLOCK, rank + rope]`, the normalised latent before the shared key part.
#[derive(Clone, Copy, Debug)]
pub struct LatentView<'a> {
    blocks: &'a [Arc<[f32]>],
    width: usize,
}

impl<'a> LatentView<'a> {
    /// Views `blocks` with `width` values a position. What lies behind the last position that a
    /// call may see is never read.
    ///
    /// # Panics
    ///
    /// If a block has another size than `BLOCK · width`.
    #[track_caller]
    pub fn new(blocks: &'a [Arc<[f32]>], width: usize) -> Self {
        assert!(
            blocks.iter().all(|b| b.len() == BLOCK * width),
            "blocks of {BLOCK} by {width}"
        );
        LatentView { blocks, width }
    }
}

/// Causal attention of the next `t` rows of one sequence, whose own positions are already cached.
///
/// With `W_k` and `W_v` the first `nope` and the last `vdim` rows of a head's part of `kv_b`:
///
/// ```text
/// a = W_kᵀ q[..nope]                                          [rank]
/// s_p = (a · latent_p + q[nope..] · shared_p) / sqrt(nope + rope)
/// c = Σ_p softmax(s)_p · latent_p                             [rank]
/// out = W_v c                                                 [vdim]
/// ```
///
/// | name | shape | holds |
/// |---|---|---|
/// | `q` | `[t, heads · (nope + rope)]` | |
/// | `kv_b` | `[heads · (nope + vdim), rank]` | per head: key rows, then value rows |
/// | `cache` | | positions `0 .. first_position + t` at least |
/// | `first_position` | | of `q`'s first row; row `i` sees `0 ..= first_position + i` |
/// | `out` | `[t, heads · vdim]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree or the cache is too short.
#[track_caller]
pub fn attend(
    k: &Kernel,
    shape: MlaShape,
    q: &[f32],
    kv_b: Matrix<'_>,
    cache: &LatentView<'_>,
    first_position: usize,
    out: &mut [f32],
) {
    let MlaShape {
        heads,
        nope,
        rope,
        rank,
        vdim,
    } = shape;
    let (query, value) = (heads * (nope + rope), heads * vdim);
    assert!(
        query > 0 && q.len().is_multiple_of(query),
        "queries are not rows of {query}"
    );
    let t = q.len() / query;
    assert_eq!(out.len(), t * value, "outputs of {t} rows by {value}");
    assert_eq!(
        (kv_b.rows(), kv_b.cols()),
        (heads * (nope + vdim), rank),
        "shape of kv_b"
    );
    assert_eq!(cache.width, shape.width(), "width of a cached position");
    let end = first_position + t;
    assert!(
        end <= cache.blocks.len() * BLOCK,
        "position {end} is not cached"
    );
    let work = t * heads * (rank * (nope + vdim) + end * (shape.width() + rank));
    k.chunks(work, out, vdim, |i, out| {
        let (row, head) = (i / heads, i % heads);
        let q = &q[row * query + head * (nope + rope)..][..nope + rope];
        let first = head * (nope + vdim);
        let (keys, values) = (first..first + nope, first + nope..first + nope + vdim);
        let scale = 1.0 / ((nope + rope) as f32).sqrt();
        let weights = (kv_b.slice(keys), kv_b.slice(values));
        k.isa().run(
            head_row,
            (weights, q, scale, *cache, first_position + row + 1, out),
        );
    });
}

/// One row of one head: `weights` are its keys' and its values'.
#[inline(always)]
fn head_row((weights, q, scale, cache, end, out): HeadRow<'_>) {
    let (keys, values) = weights;
    let absorbed = absorb(keys, q);
    let c = gather(&absorbed, keys.cols(), scale, &cache, end);
    let mut weights = vec![0.0; values.cols()];
    for (i, out) in out.iter_mut().enumerate() {
        values.read_row(i, &mut weights);
        *out = dot(&weights, &c);
    }
}

type HeadRow<'a> = (
    (Matrix<'a>, Matrix<'a>),
    &'a [f32],
    f32,
    LatentView<'a>,
    usize,
    &'a mut [f32],
);

/// A query in the space of the cache: `[rank + rope]`.
#[inline(always)]
fn absorb(keys: Matrix<'_>, q: &[f32]) -> Vec<f32> {
    let ((nope, rope), rank) = (q.split_at(keys.rows()), keys.cols());
    let mut absorbed = vec![0.0; rank];
    let mut weights = vec![0.0; rank];
    for (i, &q) in nope.iter().enumerate() {
        keys.read_row(i, &mut weights);
        add_scaled(q, &weights, &mut absorbed);
    }
    absorbed.extend_from_slice(rope);
    absorbed
}

/// The softmax-weighted latent of positions `0..end`.
///
/// Block by block with a running maximum: what is gathered so far shrinks when a larger score
/// comes. No score is kept, so a call's memory does not grow with the context.
#[inline(always)]
fn gather(query: &[f32], rank: usize, scale: f32, cache: &LatentView<'_>, end: usize) -> Vec<f32> {
    let mut gathered = vec![0.0; rank];
    let (mut top, mut total) = (f32::NEG_INFINITY, 0.0);
    let mut scores = [0.0; BLOCK];
    for (b, block) in cache.blocks[..end.div_ceil(BLOCK)].iter().enumerate() {
        let seen = BLOCK.min(end - b * BLOCK);
        let positions = || block.chunks(cache.width).take(seen);
        for (s, position) in scores.iter_mut().zip(positions()) {
            *s = dot(query, position) * scale;
        }
        let new_top = scores[..seen].iter().copied().fold(top, f32::max);
        let shrink = exp(top - new_top);
        total *= shrink;
        gathered.iter_mut().for_each(|g| *g *= shrink);
        for (&s, position) in scores.iter().zip(positions()) {
            let p = exp(s - new_top);
            total += p;
            add_scaled(p, &position[..rank], &mut gathered);
        }
        top = new_top;
    }
    gathered.iter_mut().for_each(|g| *g /= total);
    gathered
}
