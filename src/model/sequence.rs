//! What a sequence leaves behind for its next token.

use std::sync::Arc;

use crate::checkpoint::Attention;
use crate::checkpoint::Spec;
use crate::kernel::mla::BLOCK;
use crate::kernel::mla::LatentView;

/// The state of one sequence: fixed for KDA layers, growing with each token for MLA layers.
///
/// A clone copies what is fixed and shares what has grown, until one of the two writes to it.
///
/// Real K3 holds 465 MB a sequence and 55 kB for each of its tokens.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub(super) layers: Vec<LayerState>,
    pub(super) len: usize,
    pub(super) poisoned: bool,
}

/// What one layer remembers.
#[derive(Clone, Debug)]
pub(super) enum LayerState {
    Kda(KdaState),
    Mla(Latents),
}

/// The recurrent state of a KDA layer.
#[derive(Clone, Debug)]
pub(super) struct KdaState {
    /// `[heads, dim, dim]`: head, key channel, value channel.
    pub(super) state: Vec<f32>,
    /// Last raw inputs of the short convolutions for q, k and v: each `[heads * dim, taps - 1]`, oldest first.
    pub(super) history: [Vec<f32>; 3],
}

/// The cache of an MLA layer: for each position the normed latent and the key part that all heads share.
#[derive(Clone, Debug)]
pub(super) struct Latents {
    /// `kv_rank + rope`.
    width: usize,
    /// Each `[BLOCK, width]`: a cache grows by whole blocks, so that growing copies nothing. A copy
    /// of the sequence shares them; a block is copied when one of its owners writes to it.
    blocks: Vec<Arc<[f32]>>,
}

/// A piece of a sequence's state, for snapshots.
#[derive(Debug)]
pub struct Slice<T> {
    /// Layer it belongs to, counted from 0.
    pub layer: u16,
    /// `S`, `q`, `k`, `v` or `latent`.
    pub name: &'static str,
    /// Its values: `S` `[heads, dim, dim]`, convolution histories `[heads * dim, taps - 1]`, and runs of positions
    /// `[positions, kv_rank + rope]`, latent first, one after the other.
    pub values: T,
}

impl Sequence {
    /// A sequence without tokens. Its memory is touched when it is first written.
    pub fn new(spec: &Spec) -> Sequence {
        Sequence::with_len(spec, 0)
    }

    /// A sequence of `len` tokens whose state is all zeros, to be filled through [`Sequence::slices_mut`] from a
    /// snapshot of a sequence of that length and spec.
    pub fn with_len(spec: &Spec, len: usize) -> Sequence {
        let kda = &spec.kda;
        let layer = |kind: Attention| match kind {
            Attention::Kda => LayerState::Kda(KdaState {
                state: vec![0.0; kda.width() * kda.dim],
                history: std::array::from_fn(|_| vec![0.0; kda.width() * (kda.conv - 1)]),
            }),
            Attention::Mla => {
                let mut latents = Latents {
                    width: spec.mla.kv_rank + spec.mla.rope,
                    blocks: Vec::new(),
                };
                latents.reach(len);
                LayerState::Mla(latents)
            }
        };
        Sequence {
            layers: spec
                .layers
                .iter()
                .map(|kind| layer(kind.attention))
                .collect(),
            len,
            poisoned: false,
        }
    }

    /// Tokens taken in so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has been taken in.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a sweep failed half-way: some layers have taken in tokens that others have not, and nothing can be
    /// computed from it any more.
    pub fn poisoned(&self) -> bool {
        self.poisoned
    }

    /// Whether it was made for such a model.
    pub fn fits(&self, spec: &Spec) -> bool {
        let fits = |(state, kind): (&LayerState, Attention)| match (state, kind) {
            (LayerState::Kda(kda), Attention::Kda) => {
                kda.state.len() == spec.kda.width() * spec.kda.dim
                    && kda.history[0].len() == spec.kda.width() * (spec.kda.conv - 1)
            }
            (LayerState::Mla(latents), Attention::Mla) => {
                latents.width == spec.mla.kv_rank + spec.mla.rope
            }
            _ => false,
        };
        let kinds = spec.layers.iter().map(|kind| kind.attention);
        self.layers.len() == spec.layers.len() && self.layers.iter().zip(kinds).all(fits)
    }

    /// Bytes of a sequence of `len` tokens.
    pub fn bytes(spec: &Spec, len: usize) -> u64 {
        let kda = &spec.kda;
        let fixed = kda.width() * kda.dim + 3 * kda.width() * (kda.conv - 1);
        let growing = len.next_multiple_of(BLOCK) * (spec.mla.kv_rank + spec.mla.rope);
        let values = |kind: Attention| match kind {
            Attention::Kda => fixed as u64,
            Attention::Mla => growing as u64,
        };
        let layers = spec.layers.iter();
        4 * layers.map(|kind| values(kind.attention)).sum::<u64>()
    }

    /// Blocks of the part that clones share: where each lies, as a name, and its bytes.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, u64)> {
        let latents = self.layers.iter().filter_map(|state| match state {
            LayerState::Mla(latents) => Some(latents),
            LayerState::Kda(_) => None,
        });
        let blocks = latents.flat_map(|latents| &latents.blocks);
        blocks.map(|block| (block.as_ptr().addr(), 4 * block.len() as u64))
    }

    /// Bytes of the part that every clone has for itself.
    pub fn own_bytes(&self) -> u64 {
        let values = |state: &LayerState| match state {
            LayerState::Kda(kda) => {
                kda.state.len() + kda.history.iter().map(Vec::len).sum::<usize>()
            }
            LayerState::Mla(_) => 0,
        };
        4 * self.layers.iter().map(values).sum::<usize>() as u64
    }

    /// All of the state, layer by layer, always in the same order.
    pub fn slices(&self) -> impl Iterator<Item = Slice<&[f32]>> {
        (0u16..).zip(&self.layers).flat_map(|(layer, state)| {
            let named: Vec<(&'static str, &[f32])> = match state {
                LayerState::Kda(kda) => {
                    let [q, k, v] = &kda.history;
                    vec![("S", &kda.state), ("q", q), ("k", k), ("v", v)]
                }
                LayerState::Mla(latents) => {
                    let used = latents.used(self.len);
                    let blocks = latents.blocks.iter().zip(used);
                    blocks.map(|(b, n)| ("latent", &b[..n])).collect()
                }
            };
            let slice = move |(name, values)| Slice {
                layer,
                name,
                values,
            };
            named.into_iter().map(slice)
        })
    }

    /// The same as [`Sequence::slices`], to be filled.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = Slice<&mut [f32]>> {
        let len = self.len;
        (0u16..)
            .zip(&mut self.layers)
            .flat_map(move |(layer, state)| {
                let named: Vec<(&'static str, &mut [f32])> = match state {
                    LayerState::Kda(kda) => {
                        let [q, k, v] = &mut kda.history;
                        vec![("S", &mut kda.state), ("q", q), ("k", k), ("v", v)]
                    }
                    LayerState::Mla(latents) => {
                        let used = latents.used(len);
                        let blocks = latents.blocks.iter_mut().zip(used);
                        blocks
                            .map(|(b, n)| ("latent", &mut Arc::<[f32]>::make_mut(b)[..n]))
                            .collect()
                    }
                };
                let slice = move |(name, values)| Slice {
                    layer,
                    name,
                    values,
                };
                named.into_iter().map(slice)
            })
    }
}

impl Latents {
    /// Makes room for positions below `len`.
    pub(super) fn reach(&mut self, len: usize) {
        while self.blocks.len() * BLOCK < len {
            self.blocks.push(vec![0.0; BLOCK * self.width].into());
        }
    }

    /// One position, `[kv_rank + rope]`.
    pub(super) fn at(&mut self, position: usize) -> &mut [f32] {
        let from = position % BLOCK * self.width;
        &mut Arc::make_mut(&mut self.blocks[position / BLOCK])[from..from + self.width]
    }

    /// All of it, as the kernel reads it.
    pub(super) fn view(&self) -> LatentView<'_> {
        LatentView::new(&self.blocks, self.width)
    }

    /// Values it has room for.
    #[cfg(test)]
    pub(super) fn values(&self) -> usize {
        self.blocks.iter().map(|block| block.len()).sum()
    }

    /// How many values of each block positions below `len` take.
    fn used(&self, len: usize) -> impl Iterator<Item = usize> + use<> {
        let width = self.width;
        (0..len.div_ceil(BLOCK)).map(move |block| (len - block * BLOCK).min(BLOCK) * width)
    }
}
