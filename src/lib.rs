//! Deltafin runs the full Kimi K3 (2.8 trillion parameters, mixture of experts, MXFP4) on machines
//! far too small for it: the core lives on disk, and the routed experts are fetched from a hub when
//! the router asks for them.
//!
//! # The map of the house
//!
//! Rooms from the ground up. A room may name the rooms above it in this list, never those below;
//! `tests/house.rs` holds them to it.
//!
//! | room | one sentence |
//! |---|---|
//! | [`terms`] | nouns and units that every room shares |
//! | [`kernel`] | arithmetic on slices: scalar is the meaning, SIMD twins are only faster |
//! | [`checkpoint`] | which bytes of which shard are which tensor; `config.json` of a K3-family model |
//! | [`hub`] | verified byte ranges over HTTP, politely, from several sources |
//! | [`store`] | core, experts, metadata and digests on disk, within a budget, through crashes |
//! | [`text`] | conversations to tokens, tokens to replies |
//! | [`model`] | the forward pass and a sequence's state |
//! | [`residency`] | what is in RAM, what comes next, from where |
//! | [`engine`] | prompts in, events out: sampling, stopping, counting |
//! | [`jobs`] | generations that outlive a process: journals, states, sessions, prefixes |
//! | [`share`] | a model's bytes served to other machines, in the hub's own URL forms |
//! | [`server`] | the OpenAI-shaped door |
//! | [`cli`] | what you typed, what it means, what you see |
//!
//! # One token's walk
//!
//! ```text
//! rows ─ embed ─► for each layer:
//!                   AttnRes mix, norm
//!                   attention   KDA: recurrent state · MLA: latent cache, absorbed form
//!                   AttnRes mix, norm
//!                   router      f32, top-16 of 896 per row; union over rows
//!                     ├─ supply.request(union)      returns at once; hub, disk and memory start moving
//!                     ├─ shared experts             computed while bytes move
//!                     ├─ each expert as it ARRIVES: the rows routed to it ─► slot[row][k]
//!                     └─ per row: slots summed in router order · latent norm · up-projection
//!                 residual
//!       ─► final mix, norm, head ─► logits of the rows that asked ─► sampler ─► event
//! ```

pub mod terms;

pub mod kernel;

pub mod checkpoint;

pub mod hub;

pub mod store;

pub mod text;

pub mod model;

pub mod residency;

pub mod engine;

pub mod jobs;

pub mod share;

pub mod server;

pub mod cli;
