//! The core that a spec implies, before any header of the checkpoint was seen.

use crate::checkpoint::catalogue;
use crate::checkpoint::catalogue::Wanted;
use crate::checkpoint::core;
use crate::checkpoint::header::Dtype;
use crate::checkpoint::layout::CoreFile;
use crate::checkpoint::spec::Spec;
use crate::terms::CorePart;

/// The core's files as they will be if the checkpoint stores its matrices in BF16 and its odd vectors in F32, as K3
/// does: heads and lengths are right, and no piece says where its bytes are.
pub fn implied_core(spec: &Spec) -> Vec<CoreFile> {
    let layers = (0u16..).take(spec.layers.len());
    layers
        .map(|layer| {
            let tensors = catalogue::layer(spec, layer.into());
            file(spec, CorePart::Layer(layer), &tensors)
        })
        .chain([file(spec, CorePart::Top, &catalogue::top(spec))])
        .collect()
}

fn file(spec: &Spec, part: CorePart, tensors: &[catalogue::CoreTensor]) -> CoreFile {
    let mut end = 0u64;
    let rows: Vec<(&str, Dtype, Vec<u64>, u64, u64)> = tensors
        .iter()
        .map(|(name, wanted)| {
            let shape = match wanted {
                Wanted::Exact(shape) => shape.clone(),
                Wanted::Taps { channels, taps } => vec![*channels, 1, *taps],
                Wanted::PerHead(heads) => vec![(*heads).max(spec.kda.dim as u64)],
            };
            let dtype = match in_f32(name) {
                true => Dtype::F32,
                false => Dtype::BF16,
            };
            let len = dtype.bytes(&shape).unwrap_or(u64::MAX);
            let offset = end;
            end = core::align(end.saturating_add(len));
            (name.as_str(), dtype, shape, offset, len)
        })
        .collect();
    let rows = rows
        .iter()
        .map(|(name, dtype, shape, offset, len)| (*name, *dtype, &**shape, *offset, *len));
    let head = core::write_head(part, rows);
    CoreFile {
        part,
        len: head.len() as u64 + end,
        head,
        pieces: Vec::new(),
    }
}

fn in_f32(name: &str) -> bool {
    const NAMES: [&str; 5] = [
        "_conv1d.weight",
        ".dt_bias",
        ".A_log",
        ".o_norm.weight",
        ".e_score_correction_bias",
    ];
    NAMES.iter().any(|end| name.ends_with(end))
}
