//! Activations of gated MLPs, and output gates.

use super::isa::Isa;
use super::math::{sigmoid, silu, tanh};
use super::pool::Kernel;

/// Values one task takes.
const PIECE: usize = 2048;

/// What a gated MLP does with its two halves, the gate `a` and the up branch `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `beta · tanh(a / beta) · sigmoid(a) · u'`, where `u'` is `linear_beta · tanh(u / linear_beta)`
    /// or, without it, `u`. The sigmoid takes the uncapped `a`.
    Situ {
        /// Cap of the gate.
        beta: f32,
        /// Cap of the up branch.
        linear_beta: Option<f32>,
    },
    /// `silu(a) · u`.
    Silu,
}

impl Activation {
    /// `gate[i] = act(gate[i], up[i])`.
    pub(super) fn apply(self, isa: Isa, gate: &mut [f32], up: &[f32]) {
        isa.run(apply, (self, gate, up));
    }
}

#[inline(always)]
fn apply((act, gate, up): (Activation, &mut [f32], &[f32])) {
    match act {
        Activation::Situ {
            beta,
            linear_beta: Some(cap),
        } => {
            for (a, &u) in gate.iter_mut().zip(up) {
                *a = beta * tanh(*a / beta) * sigmoid(*a) * (cap * tanh(u / cap));
            }
        }
        Activation::Situ {
            beta,
            linear_beta: None,
        } => {
            for (a, &u) in gate.iter_mut().zip(up) {
                *a = beta * tanh(*a / beta) * sigmoid(*a) * u;
            }
        }
        Activation::Silu => {
            for (a, &u) in gate.iter_mut().zip(up) {
                *a = silu(*a) * u;
            }
        }
    }
}

/// `gate[i] = act(gate[i], up[i])`, any shape.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn activate(k: &Kernel, act: Activation, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate against up");
    k.chunks(64 * gate.len(), gate, PIECE, |i, gate| {
        act.apply(k.isa(), gate, &up[i * PIECE..])
    });
}

/// `y[i] *= sigmoid(logits[i])`, any shape: the output gate of MLA.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn gate_by_sigmoid(k: &Kernel, y: &mut [f32], logits: &[f32]) {
    assert_eq!(y.len(), logits.len(), "values against gate logits");
    k.chunks(24 * y.len(), y, PIECE, |i, y| {
        k.isa().run(gate_piece, (y, &logits[i * PIECE..]))
    });
}

#[inline(always)]
fn gate_piece((y, logits): (&mut [f32], &[f32])) {
    for (y, &z) in y.iter_mut().zip(logits) {
        *y *= sigmoid(z);
    }
}

/// `x[i] = sigmoid(x[i])`, any shape: KDA's beta.
pub fn sigmoid_in_place(k: &Kernel, x: &mut [f32]) {
    k.chunks(24 * x.len(), x, PIECE, |_, x| k.isa().run(sigmoid_piece, x));
}

#[inline(always)]
fn sigmoid_piece(x: &mut [f32]) {
    for x in x {
        *x = sigmoid(*x);
    }
}
