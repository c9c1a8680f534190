//! In which order the pass reads the core: what may be brought ahead of it, and what is done with.
//!
//! A test holds the pass to this order; a pass that left it would still compute the same, and wait.

use crate::checkpoint::Attention;
use crate::checkpoint::Ffn;
use crate::checkpoint::Spec;
use crate::terms::CorePart;

/// The embedding, of which rows are looked up at a sweep's beginning.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head, where it is not the embedding.
pub const HEAD: &str = "lm_head.weight";
/// Read as a whole, several times over: the up-projection of the latents.
pub const WHOLE: &str = "self_attn.kv_b_proj.weight";

/// The router.
pub const ROUTER: &str = "block_sparse_moe.gate.weight";

/// The matrices of a part that are read in runs of rows, once a sweep and in this order; those that stand together are
/// read together. Everything else of the part is [`WHOLE`], the embedding's rows, or a vector that is read in the
/// first sweep alone.
pub fn order(spec: &Spec, part: CorePart) -> Vec<Vec<String>> {
    let mut order = Order(Vec::new());
    let CorePart::Layer(layer) = part else {
        order.push(if spec.tied { EMBEDDING } else { HEAD });
        return order.0;
    };
    let Some(kind) = spec.layers.get(usize::from(layer)) else {
        return order.0;
    };
    match kind.attention {
        Attention::Kda => {
            order.attention(&["q", "k", "v", "f_a", "f_b", "b"]);
            match spec.kda.full_rank_gate {
                true => order.attention(&["g"]),
                false => order.attention(&["g_a", "g_b"]),
            }
        }
        Attention::Mla => {
            match spec.mla.q_rank {
                Some(_) => order.attention(&["q_a", "q_b"]),
                None => order.attention(&["q"]),
            }
            order.push("self_attn.kv_a_proj_with_mqa.weight");
            if spec.mla.gate {
                order.attention(&["g"]);
            }
        }
    }
    order.attention(&["o"]);
    match (kind.ffn, &spec.moe) {
        (Ffn::Dense, _) => order.mlp("mlp"),
        (Ffn::Moe, Some(moe)) => {
            order.push(ROUTER);
            if moe.latent.is_some() {
                order.push("block_sparse_moe.routed_expert_down_proj.weight");
            }
            if moe.shared > 0 {
                order.mlp("block_sparse_moe.shared_experts");
            }
            if moe.latent.is_some() {
                order.push("block_sparse_moe.routed_expert_up_proj.weight");
            }
        }
        (Ffn::Moe, None) => {}
    }
    order.0
}

struct Order(Vec<Vec<String>>);

impl Order {
    fn push(&mut self, name: &str) {
        self.0.push(vec![name.to_owned()]);
    }

    fn attention(&mut self, names: &[&str]) {
        for name in names {
            self.push(&format!("self_attn.{name}_proj.weight"));
        }
    }

    fn mlp(&mut self, stem: &str) {
        let together = ["gate", "up"].map(|part| format!("{stem}.{part}_proj.weight"));
        self.0.push(together.into());
        self.push(&format!("{stem}.down_proj.weight"));
    }
}
