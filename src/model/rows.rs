//! What goes into a sweep and what comes out.

use crate::terms::TokenId;

/// One token position of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which of the sequences given to the sweep.
    pub sequence: usize,
    /// The token at that position.
    pub token: TokenId,
    /// Whether the distribution after this token is wanted. Reading a prompt needs only the last one, and the head is
    /// one of the largest matrices of the model.
    pub logits: bool,
}

/// The experts that one layer chose.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRoutes {
    /// The layer, counted from 0.
    pub layer: u16,
    /// `[n, top_k]`, for every row of the sweep, best choice first.
    pub experts: Vec<u16>,
    /// `[n, top_k]`: their weights, renormalised and scaled.
    pub weights: Vec<f32>,
}

/// What a sweep computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// `[rows that asked, vocab]`, in the order of the rows.
    pub logits: Vec<f32>,
    /// One for each layer with routed experts, from the bottom.
    pub routes: Vec<LayerRoutes>,
}
