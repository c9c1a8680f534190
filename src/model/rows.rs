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

/// What a sweep of several sequences came to.
#[derive(Debug)]
pub struct Shared<E> {
    /// What was computed. The values of lost sequences' rows mean nothing.
    pub sweep: Sweep,
    /// Sequences whose rows were lost, as an expert that they need did not come, or [`Watch::left`](super::Watch::left)
    /// said so. They are [`Sequence::poisoned`](super::Sequence::poisoned).
    pub lost: Vec<usize>,
    /// The first error that lost one.
    pub failure: Option<E>,
}

/// What a sweep computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// `[rows that asked, vocab]`, in the order of the rows.
    pub logits: Vec<f32>,
    /// One for each layer with routed experts, from the bottom.
    pub routes: Vec<LayerRoutes>,
}
