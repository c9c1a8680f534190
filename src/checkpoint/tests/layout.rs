use std::collections::BTreeMap;
use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::Described;
use super::bytes;
use super::describe;
use super::front;
use crate::checkpoint::CORE_ALIGN;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::CoreFile;
use crate::checkpoint::CoreHead;
use crate::checkpoint::Dtype;
use crate::checkpoint::Header;
use crate::checkpoint::Index;
use crate::checkpoint::Layout;
use crate::checkpoint::Part;
use crate::checkpoint::catalogue;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

impl Described {
    fn layout(&self) -> Result<Layout, CheckpointError> {
        Layout::new(&self.spec, &self.index, &self.headers)
    }
}

fn read_part(folder: &str, layout: &Layout, part: Part) -> Vec<u8> {
    let file = bytes(folder, layout.shard(part));
    file[part.range.start as usize..part.range.end as usize].to_vec()
}

fn read_expert(folder: &str, layout: &Layout, key: ExpertKey) -> Vec<u8> {
    let parts = layout.expert(key).iter();
    parts
        .flat_map(|part| read_part(folder, layout, *part))
        .collect()
}

/// Writes a core file as whoever installs it will.
fn write_core(folder: &str, layout: &Layout, core: &CoreFile) -> Vec<u8> {
    let mut file = core.head.clone();
    for piece in &core.pieces {
        file.resize(piece.offset as usize, 0);
        file.extend(read_part(folder, layout, piece.source));
    }
    file.resize(core.len as usize, 0);
    file
}

#[test]
fn experts_in_one_piece_are_one_part() {
    let described = describe("tiny-k3");
    let layout = described.layout().unwrap();
    assert_eq!(layout.expert_count(), 7 * 16);
    for key in described.spec.expert_keys() {
        let parts = layout.expert(key);
        assert_eq!(parts.len(), 1, "{key}");
        assert_eq!(parts[0].range.len(), layout.expert_len(), "{key}");
    }
    assert!(
        !layout.has_expert(ExpertKey {
            layer: 0,
            expert: 0
        }),
        "layer 0 is dense"
    );
    assert!(!layout.has_expert(ExpertKey {
        layer: 1,
        expert: 16
    }));
    assert!(!layout.has_expert(ExpertKey {
        layer: 8,
        expert: 0
    }));
}

#[test]
fn scattered_experts_join_to_the_same_bytes() {
    let (plain, scattered) = (describe("tiny-k3"), describe("tiny-k3-scattered"));
    let (one, many) = (plain.layout().unwrap(), scattered.layout().unwrap());
    for key in plain.spec.expert_keys() {
        assert!(many.expert(key).len() > 1, "{key}");
        assert_eq!(
            read_expert("tiny-k3", &one, key),
            read_expert("tiny-k3-scattered", &many, key),
            "{key}"
        );
    }
    let split = many.expert(ExpertKey {
        layer: 2,
        expert: 3,
    });
    let shards: BTreeSet<u16> = split.iter().map(|part| part.shard).collect();
    assert_eq!(shards.len(), 2, "expert 3 lies in two shards");
}

#[test]
fn core_files_hold_every_tensor_aligned_and_readable() {
    for folder in [
        "tiny-k3",
        "tiny-k3-scattered",
        "tiny-linear",
        "austen-k3/model",
    ] {
        let described = describe(folder);
        let layout = described.layout().unwrap();
        assert_eq!(layout.core().len(), described.spec.layers.len() + 1);
        for core in layout.core() {
            let file = write_core(folder, &layout, core);
            assert_eq!(file.len() as u64, core.len);
            assert_eq!(core.len % CORE_ALIGN, 0);
            assert!(
                core.pieces
                    .iter()
                    .all(|piece| piece.offset % CORE_ALIGN == 0)
            );
            assert!(
                core.pieces
                    .windows(2)
                    .all(|p| p[0].offset < p[1].offset && p[0].source < p[1].source)
            );
            let head = CoreHead::parse(&file).unwrap();
            assert_eq!(head.part(), core.part);
            let (stem, wanted) = match core.part {
                CorePart::Layer(layer) => (
                    format!("model.layers.{layer}."),
                    catalogue::layer(&described.spec, layer.into()),
                ),
                CorePart::Top => (String::new(), catalogue::top(&described.spec)),
            };
            assert_eq!(head.entries().len(), wanted.len());
            for (name, _) in wanted {
                let entry = head.get(&name).unwrap();
                let full = format!("{}{stem}{name}", described.spec.family.prefix());
                let (shard, source) = described
                    .headers
                    .iter()
                    .find_map(|(s, h)| Some((s, h.get(&full)?)))
                    .unwrap();
                let shard = bytes(folder, shard);
                let source_bytes = &shard[source.range.start as usize..source.range.end as usize];
                assert_eq!(
                    &file[entry.range.start as usize..entry.range.end as usize],
                    source_bytes,
                    "{full}"
                );
            }
        }
    }
}

#[test]
fn headers_core_experts_and_rest_make_every_shard_whole() {
    for folder in ["tiny-k3", "tiny-k3-scattered", "tiny-linear"] {
        let described = describe(folder);
        let layout = described.layout().unwrap();
        let mut parts: Vec<Part> = layout.rest().to_vec();
        parts.extend(
            layout
                .core()
                .iter()
                .flat_map(|c| c.pieces.iter().map(|p| p.source)),
        );
        parts.extend(
            described
                .spec
                .expert_keys()
                .flat_map(|key| layout.expert(key).to_vec()),
        );
        parts.sort();
        for (number, shard) in layout.shards().iter().enumerate() {
            let data = described.headers[shard].data();
            let mut end = data.start;
            for part in parts.iter().filter(|part| part.shard as usize == number) {
                assert_eq!(part.range.start, end, "{shard}");
                end = part.range.end;
            }
            assert_eq!(end, data.end, "{shard}");
        }
    }
    let vision = describe("tiny-k3").layout().unwrap();
    assert_eq!(
        vision
            .rest()
            .iter()
            .map(|part| part.range.len())
            .sum::<u64>(),
        32
    );
    assert_eq!(describe("tiny-linear").layout().unwrap().rest(), []);
}

#[test]
fn a_checkpoint_of_one_file_needs_no_index() {
    let described = describe("tiny-linear");
    let (json, data) = merged(&described);
    let front = front(&json);
    let header = Header::read("model.safetensors", &front, front.len() as u64 + data).unwrap();
    let headers = BTreeMap::from([("model.safetensors".to_owned(), header)]);
    let layout = Layout::new(&described.spec, &Index::single(), &headers).unwrap();
    assert_eq!(layout.shards(), ["model.safetensors"]);
    assert_eq!(layout.expert_count(), 5 * 12);
}

/// All tensors of a checkpoint in one header; and how many bytes they take.
fn merged(described: &Described) -> (String, u64) {
    let mut end = 0;
    let mut table = serde_json::Map::new();
    for entry in described.headers.values().flat_map(Header::entries) {
        let begin = end;
        end += entry.range.len();
        let fields = json!({"dtype": entry.dtype.name(), "shape": entry.shape, "data_offsets": [begin, end]});
        table.insert(entry.name.to_string(), fields);
    }
    (Value::Object(table).to_string(), end)
}

/// Rewrites the table of one shard; its data may then be of any length.
fn rewrite(
    described: &mut Described,
    shard: &str,
    change: impl FnOnce(&mut Vec<(String, Dtype, Vec<u64>)>),
) {
    let entries = described.headers[shard].entries().iter();
    let mut tensors = entries
        .map(|e| (e.name.to_string(), e.dtype, e.shape.to_vec()))
        .collect();
    change(&mut tensors);
    described
        .headers
        .insert(shard.to_owned(), header(shard, &tensors));
}

fn header(shard: &str, tensors: &[(String, Dtype, Vec<u64>)]) -> Header {
    let mut end = 0;
    let mut rows = Vec::new();
    for (name, dtype, shape) in tensors {
        let begin = end;
        end += dtype.bytes(shape).unwrap();
        let fields = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, end]});
        rows.push(format!("{}:{fields}", json!(name)));
    }
    let front = front(&format!("{{{}}}", rows.join(",")));
    Header::read(shard, &front, front.len() as u64 + end).unwrap()
}

const SHARD: &str = "model-00002-of-000010.safetensors";
const LAYER: &str = "language_model.model.layers.1.";

#[test]
fn an_index_that_names_what_is_not_there_is_refused() {
    let mut described = describe("tiny-k3");
    described.headers.remove(SHARD);
    let text = described.layout().unwrap_err().to_string();
    assert!(
        text.contains(&format!("names shard {SHARD} (for {LAYER}")),
        "{text}"
    );

    let mut described = describe("tiny-k3");
    rewrite(&mut described, SHARD, |tensors| {
        tensors.remove(0);
    });
    let text = described.layout().unwrap_err().to_string();
    assert!(
        text.contains("and that shard does not hold it") && text.contains(SHARD),
        "{text}"
    );
}

#[test]
fn a_missing_tensor_is_named() {
    for name in [
        format!("{LAYER}self_attn.A_log"),
        format!("{LAYER}block_sparse_moe.experts.7.w2.weight_scale"),
    ] {
        let mut described = describe("tiny-k3");
        let mut index: Value =
            serde_json::from_slice(&bytes("tiny-k3", "model.safetensors.index.json")).unwrap();
        index["weight_map"]
            .as_object_mut()
            .unwrap()
            .remove(&name)
            .unwrap();
        described.index = Index::parse(index.to_string().as_bytes()).unwrap();
        let text = described.layout().unwrap_err().to_string();
        assert_eq!(
            text,
            format!("the checkpoint lacks tensor {name}, which config.json calls for")
        );
    }
}

#[test]
fn another_shape_or_type_is_refused_with_both() {
    let change = |name: &'static str, dtype: Dtype, shape: &'static [u64]| {
        let mut described = describe("tiny-k3");
        rewrite(&mut described, SHARD, |tensors| {
            let at = tensors
                .iter_mut()
                .find(|t| t.0 == format!("{LAYER}{name}"))
                .unwrap();
            (at.1, at.2) = (dtype, shape.to_vec());
        });
        described.layout().map_err(|error| error.to_string())
    };
    let text = change("self_attn.o_proj.weight", Dtype::BF16, &[96, 128]).unwrap_err();
    assert!(
        text.ends_with(
            "self_attn.o_proj.weight is BF16 [96, 128]; config.json implies BF16 or F32 [128, 96]"
        ),
        "{text}"
    );
    assert!(change("self_attn.o_proj.weight", Dtype::F16, &[128, 96]).is_err());
    assert!(
        change(
            "block_sparse_moe.experts.3.w1.weight_packed",
            Dtype::U8,
            &[96, 31]
        )
        .is_err()
    );
    assert!(
        change(
            "block_sparse_moe.experts.3.w1.weight_packed",
            Dtype::I8,
            &[96, 32]
        )
        .is_err()
    );
    // Core tensors may be BF16 or F32; A_log and the convolutions come in several shapes.
    assert!(change("self_attn.o_proj.weight", Dtype::F32, &[128, 96]).is_ok());
    assert!(change("self_attn.dt_bias", Dtype::BF16, &[96]).is_ok());
    assert!(change("self_attn.A_log", Dtype::F32, &[3]).is_ok());
    assert!(change("self_attn.A_log", Dtype::BF16, &[1, 1, 3, 1]).is_ok());
    assert!(
        change("self_attn.A_log", Dtype::F32, &[2]).is_err(),
        "one number a head"
    );
    assert!(change("self_attn.A_log", Dtype::F32, &[3, 3]).is_err());
    assert!(change("self_attn.q_conv1d.weight", Dtype::BF16, &[96, 4]).is_ok());
    assert!(change("self_attn.q_conv1d.weight", Dtype::F32, &[96, 1, 3]).is_err());
}

#[test]
fn an_index_with_unsafe_or_double_names_is_refused() {
    let parse = |json: &str| {
        Index::parse(json.as_bytes())
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    for shard in [
        "../a.safetensors",
        "/a.safetensors",
        "a/b.safetensors",
        "",
        ".safetensors",
        "a.bin",
        "a?.safetensors",
    ] {
        let text = parse(&format!(r#"{{"weight_map":{{"t":"{shard}"}}}}"#)).unwrap_err();
        assert!(text.contains("t is said to be in"), "{text}");
    }
    let twice = r#"{"weight_map":{"t":"a.safetensors","u":"a.safetensors","t":"b.safetensors"}}"#;
    assert!(
        parse(twice)
            .unwrap_err()
            .contains("tensor t is listed twice")
    );
    for json in [
        "",
        "{}",
        "[]",
        r#"{"weight_map":3}"#,
        r#"{"weight_map":{"a":3}}"#,
        r#"{"weight_map":{"a":"b.safetens"#,
    ] {
        assert!(parse(json).is_err(), "{json}");
    }
    assert!(parse(r#"{"metadata":{"total_size":"x"},"weight_map":{"t":"a.safetensors"}}"#).is_ok());
}

#[test]
fn a_core_file_that_lies_is_refused() {
    let layout = describe("tiny-k3").layout().unwrap();
    let file = write_core("tiny-k3", &layout, &layout.core()[1]);
    assert!(CoreHead::parse(&file).is_ok());
    assert!(
        CoreHead::parse(&file[..file.len() - 4096])
            .unwrap_err()
            .to_string()
            .contains("beyond the end")
    );
    assert!(CoreHead::parse(&[]).is_err());
    let head = |text: &str| {
        let mut file = text.as_bytes().to_vec();
        file.resize(4096, b' ');
        file.resize(12288, 0);
        CoreHead::parse(&file).map_err(|e| e.to_string())
    };
    let tensors =
        |t: &str| format!(r#"{{"format":"deltafin-core-1","part":"003","tensors":{{{t}}}}}"#);
    let one = r#""a":{"dtype":"F32","shape":[2],"offsets":[0,8]}"#;
    assert_eq!(
        head(&tensors(one)).unwrap().get("a").unwrap().range.start,
        4096
    );
    assert!(
        head(&tensors(&one.replace("[0,8]", "[0,9]")))
            .unwrap_err()
            .contains("not its shape's")
    );
    assert!(
        head(&tensors(&one.replace("[0,8]", "[8,16]")))
            .unwrap_err()
            .contains("multiple of 4,096")
    );
    assert!(
        head(&tensors(&one.replace("[0,8]", "[8192,8200]")))
            .unwrap_err()
            .contains("beyond the end")
    );
    let huge = format!("[{},{}]", u64::MAX - 4095, u64::MAX);
    assert!(
        head(&tensors(
            &one.replace("[0,8]", &huge)
                .replace("F32", "U8")
                .replace("[2]", "[4095]")
        ))
        .is_err()
    );
    let both = format!("{one},{}", one.replace("\"a\"", "\"b\""));
    assert!(head(&tensors(&both)).unwrap_err().contains("overlaps"));
    assert!(
        head(&tensors(one).replace("core-1", "core-9"))
            .unwrap_err()
            .contains("core-9")
    );
    assert!(head(&tensors(one).replace("003", "x")).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_change_of_a_core_head_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let layout = describe("tiny-k3").layout().unwrap();
        let core = &layout.core()[3];
        let mut file = core.head.clone();
        let used = file.iter().rposition(|b| *b != b' ').unwrap() + 1;
        file.resize(core.len as usize, 0);
        for (at, byte) in changes {
            file[at.index(used)] = byte;
        }
        if let Ok(head) = CoreHead::parse(&file) {
            prop_assert!(head.entries().iter().all(|e| e.range.end <= file.len() as u64));
        }
    }

    #[test]
    fn no_bytes_of_an_index_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Index::parse(&bytes);
        let _ = CoreHead::parse(&bytes);
    }
}
