//! A part's tensors as the arithmetic wants them: matrices where they lie, vectors widened once.

use std::ops::Range;

use crate::checkpoint::Attention;
use crate::checkpoint::Dtype;
use crate::checkpoint::ExpertShape;
use crate::checkpoint::Ffn;
use crate::checkpoint::Spec;
use crate::kernel::Matrix;
use crate::kernel::bf16;
use crate::model::error::ModelError;
use crate::model::ports::CoreLease;
use crate::model::ports::CoreTensor;
use crate::terms::CorePart;

/// A leased part of the core. What comes out of it is checked: a lease holds whatever the machinery brought.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub(super) lease: &'a dyn CoreLease,
    pub(super) part: CorePart,
}

impl<'a> Weights<'a> {
    /// The matrix `name` of that shape, where it lies.
    pub(super) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix<'a>, ModelError> {
        let values = rows * cols;
        let tensor = self.tensor(name, |len| len == values, &[rows, cols])?;
        Ok(view(&tensor, rows, cols))
    }

    /// Shows the matrices `names`, all of that shape, in runs of rows: `show(rows, parts)` gets the same rows of each.
    /// A part that lies in memory as a whole is one run.
    pub(super) fn runs(
        &self,
        names: &[&str],
        (rows, cols): (usize, usize),
        mut show: impl FnMut(Range<usize>, &[Matrix<'_>]),
    ) -> Result<(), ModelError> {
        let mut next = 0;
        let mut wrong = None;
        let found = self.lease.runs(names, &mut |first, parts| {
            if wrong.is_some() || first != next {
                wrong.get_or_insert_with(|| format!("rows from {first} after row {next}"));
                return;
            }
            let views = parts.iter().map(|part| run(part, cols, rows - next));
            match views.collect::<Result<Vec<Matrix<'_>>, String>>() {
                Ok(views) if !views.is_empty() => {
                    next += views[0].rows();
                    show(first..next, &views);
                }
                Ok(_) => wrong = Some("nothing".to_owned()),
                Err(found) => wrong = Some(found),
            }
        });
        let wrong = match found {
            None => Some("missing".to_owned()),
            Some(()) if next != rows => wrong.or_else(|| Some(format!("{next} rows"))),
            Some(()) => wrong,
        };
        match wrong {
            None => Ok(()),
            Some(found) => Err(ModelError::Core {
                part: self.part,
                tensor: names.join(", "),
                found,
                expected: format!("BF16 or F32 [{rows}, {cols}]"),
            }),
        }
    }

    /// The rows `rows` of the matrix `name`, each `cols` wide, copied into `bytes`.
    pub(super) fn rows<'b>(
        &self,
        name: &str,
        rows: &[usize],
        cols: usize,
        bytes: &'b mut Vec<u8>,
    ) -> Result<Matrix<'b>, ModelError> {
        let wrong = |found: String| ModelError::Core {
            part: self.part,
            tensor: name.to_owned(),
            found,
            expected: format!("BF16 or F32 rows of {cols}"),
        };
        let found = self.lease.rows(name, rows, bytes);
        let dtype = found.ok_or_else(|| wrong("missing".to_owned()))?;
        let size = bytes_of(dtype).ok_or_else(|| wrong(dtype.name().to_owned()))?;
        if bytes.len() != rows.len() * cols * size {
            let len = bytes.len();
            return Err(wrong(format!("{len} bytes for {} rows", rows.len())));
        }
        let tensor = CoreTensor {
            dtype,
            shape: &[],
            bytes,
        };
        Ok(view(&tensor, rows.len(), cols))
    }

    /// The `len` values of `name`, whatever axes they are arranged in, widened to f32.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.values(name, |found| found == len, len)
    }

    /// The first `len` values of `name`, which may be padded.
    pub(super) fn padded(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut values = self.values(name, |found| found >= len, len)?;
        values.truncate(len);
        Ok(values)
    }

    fn values(
        &self,
        name: &str,
        fits: impl Fn(usize) -> bool,
        len: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, fits, &[len])?;
        Ok(match tensor.dtype {
            Dtype::F32 => bf16::read_f32(tensor.bytes),
            _ => bf16::widen(tensor.bytes),
        })
    }

    /// A BF16 or F32 tensor whose number of values `fits`.
    fn tensor(
        &self,
        name: &str,
        fits: impl Fn(usize) -> bool,
        shape: &[usize],
    ) -> Result<CoreTensor<'a>, ModelError> {
        let wrong = |found: String| ModelError::Core {
            part: self.part,
            tensor: name.to_owned(),
            found,
            expected: format!("BF16 or F32 {shape:?}"),
        };
        let lease = self.lease;
        let tensor = lease
            .tensor(name)
            .ok_or_else(|| wrong("missing".to_owned()))?;
        let Some(bytes) = bytes_of(tensor.dtype) else {
            let dtype = tensor.dtype.name();
            return Err(wrong(format!("{dtype} {:?}", tensor.shape)));
        };
        let len = tensor.shape.iter().product();
        if !fits(len) || tensor.bytes.len() != bytes * len {
            let found = format!("{} {:?}", tensor.dtype.name(), tensor.shape);
            return Err(wrong(format!("{found} in {} bytes", tensor.bytes.len())));
        }
        Ok(tensor)
    }
}

/// Bytes of one value of a type that the core may have.
fn bytes_of(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::BF16 => Some(2),
        _ => None,
    }
}

/// Rows of a matrix that is `cols` wide, at most `rows_max` of them; else what was found instead.
fn run<'a>(tensor: &CoreTensor<'a>, cols: usize, rows_max: usize) -> Result<Matrix<'a>, String> {
    let found = || format!("{} {:?}", tensor.dtype.name(), tensor.shape);
    let size = bytes_of(tensor.dtype).ok_or_else(found)?;
    let rows = tensor.bytes.len() / (size * cols);
    if tensor.bytes.len() != rows * size * cols || rows > rows_max {
        return Err(format!("{} in {} bytes", found(), tensor.bytes.len()));
    }
    Ok(view(tensor, rows, cols))
}

/// `tensor` as the matrix `[rows, cols]` that it was found to be.
fn view<'a>(tensor: &CoreTensor<'a>, rows: usize, cols: usize) -> Matrix<'a> {
    match tensor.dtype {
        Dtype::F32 => Matrix::f32(tensor.bytes, rows, cols),
        _ => Matrix::bf16(tensor.bytes, rows, cols),
    }
}

/// The vectors of one layer in f32. They are a two-thousandth of the core, so they are widened once and kept.
#[derive(Debug)]
pub(super) struct LayerVectors {
    pub(super) attention_norm: Vec<f32>,
    pub(super) ffn_norm: Vec<f32>,
    /// Scores of the attention residual, before attention and before the MLP: gain times projection.
    pub(super) scores: Option<[Vec<f32>; 2]>,
    pub(super) attention: AttentionVectors,
    /// `[experts]`, added for the choice alone.
    pub(super) router_bias: Vec<f32>,
    pub(super) latent_norm: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(super) enum AttentionVectors {
    Kda(KdaVectors),
    Mla {
        q_norm: Option<Vec<f32>>,
        kv_norm: Vec<f32>,
    },
}

#[derive(Debug)]
pub(super) struct KdaVectors {
    /// For q, k and v: `[heads * dim, taps]`.
    pub(super) conv: [Vec<f32>; 3],
    /// `[heads * dim]`.
    pub(super) dt_bias: Vec<f32>,
    /// `[heads]`, of a tensor that K3 pads to `dim`.
    pub(super) a_log: Vec<f32>,
    /// `[dim]`.
    pub(super) o_norm: Vec<f32>,
}

impl LayerVectors {
    pub(super) fn read(spec: &Spec, w: &Weights<'_>, layer: u16) -> Result<Self, ModelError> {
        let kind = spec.layers[layer as usize];
        let hidden = spec.hidden;
        let moe = spec.moe.as_ref().filter(|_| kind.ffn == Ffn::Moe);
        let stem = "block_sparse_moe";
        Ok(LayerVectors {
            attention_norm: w.vector("input_layernorm.weight", hidden)?,
            ffn_norm: w.vector("post_attention_layernorm.weight", hidden)?,
            scores: match spec.attn_res_block {
                Some(_) => Some([
                    score(w, "self_attention_res", hidden)?,
                    score(w, "mlp_res", hidden)?,
                ]),
                None => None,
            },
            attention: match kind.attention {
                Attention::Kda => AttentionVectors::Kda(KdaVectors::read(spec, w)?),
                Attention::Mla => AttentionVectors::Mla {
                    q_norm: match spec.mla.q_rank {
                        Some(rank) => Some(w.vector("self_attn.q_a_layernorm.weight", rank)?),
                        None => None,
                    },
                    kv_norm: w.vector("self_attn.kv_a_layernorm.weight", spec.mla.kv_rank)?,
                },
            },
            router_bias: match moe {
                Some(moe) => {
                    w.vector(&format!("{stem}.gate.e_score_correction_bias"), moe.experts)?
                }
                None => Vec::new(),
            },
            latent_norm: match moe.and_then(|moe| moe.latent.filter(|_| moe.latent_norm)) {
                Some(width) => Some(w.vector(&format!("{stem}.routed_expert_norm.weight"), width)?),
                None => None,
            },
        })
    }
}

impl KdaVectors {
    fn read(spec: &Spec, w: &Weights<'_>) -> Result<Self, ModelError> {
        let kda = &spec.kda;
        let width = kda.width();
        let taps = width * kda.conv;
        Ok(KdaVectors {
            conv: [
                w.vector("self_attn.q_conv1d.weight", taps)?,
                w.vector("self_attn.k_conv1d.weight", taps)?,
                w.vector("self_attn.v_conv1d.weight", taps)?,
            ],
            dt_bias: w.vector("self_attn.dt_bias", width)?,
            a_log: w.padded("self_attn.A_log", kda.heads)?,
            o_norm: w.vector("self_attn.o_norm.weight", kda.dim)?,
        })
    }
}

/// The vectors outside the layers.
#[derive(Debug)]
pub(super) struct TopVectors {
    pub(super) norm: Vec<f32>,
    /// Score of the last attention residual.
    pub(super) score: Option<Vec<f32>>,
}

impl TopVectors {
    pub(super) fn read(spec: &Spec, w: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(TopVectors {
            norm: w.vector("model.norm.weight", spec.hidden)?,
            score: match spec.attn_res_block {
                Some(_) => Some(score(w, "model.output_attn_res", spec.hidden)?),
                None => None,
            },
        })
    }
}

/// Norm gain times projection: the scores need only their product.
fn score(w: &Weights<'_>, stem: &str, hidden: usize) -> Result<Vec<f32>, ModelError> {
    let mut gain = w.vector(&format!("{stem}_norm.weight"), hidden)?;
    let proj = w.vector(&format!("{stem}_proj.weight"), hidden)?;
    gain.iter_mut().zip(&proj).for_each(|(g, p)| *g *= p);
    Ok(gain)
}

/// One routed expert's three matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertWeights<'a> {
    /// `[inner, width]`.
    pub(super) gate: Matrix<'a>,
    /// `[inner, width]`.
    pub(super) up: Matrix<'a>,
    /// `[width, inner]`.
    pub(super) down: Matrix<'a>,
}

impl<'a> ExpertWeights<'a> {
    /// The matrices of an expert in its file's order: w1 (gate), w2 (down), w3 (up), codes before scales.
    ///
    /// # Panics
    ///
    /// If `bytes` has another length than `shape`.
    #[track_caller]
    pub(super) fn view(bytes: &'a [u8], shape: ExpertShape) -> Self {
        assert_eq!(bytes.len(), shape.bytes(), "bytes of an expert");
        let ExpertShape {
            inner,
            width,
            packed,
        } = shape;
        let (codes, scales) = shape.matrix_bytes();
        let matrix = |place: usize, rows, cols| {
            let bytes = &bytes[place * (codes + scales)..(place + 1) * (codes + scales)];
            if packed {
                let (codes, scales) = bytes.split_at(codes);
                Matrix::mxfp4(codes, scales, rows, cols)
            } else {
                Matrix::bf16(bytes, rows, cols)
            }
        };
        ExpertWeights {
            gate: matrix(0, inner, width),
            down: matrix(1, width, inner),
            up: matrix(2, inner, width),
        }
    }
}
