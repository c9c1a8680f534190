//! A whole checkpoint taken apart into the store, and put together again.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;

use bytes::Bytes;

use super::support::model;
use super::support::open;
use crate::checkpoint::Header;
use crate::checkpoint::Index;
use crate::checkpoint::Layout;
use crate::checkpoint::Part;
use crate::checkpoint::Spec;
use crate::store::Area;
use crate::store::Budget;
use crate::store::CoreState;
use crate::store::FileRecord;
use crate::store::Filled;
use crate::store::Holder;
use crate::store::Level;
use crate::store::Lookup;
use crate::store::ModelStore;
use crate::store::ShardDigest;
use crate::store::Shards;
use crate::store::SourceRecord;
use crate::store::StoreError;
use crate::store::Verdict;
use crate::store::model::digest_of;
use crate::terms::ByteRange;
use crate::terms::ExpertKey;

/// A checkpoint in a folder, as the hub would give it.
struct Checkpoint {
    folder: PathBuf,
    layout: Layout,
    shards: Shards,
}

impl Checkpoint {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures")
            .join(name);
        let file = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let spec = Spec::from_config(&file("config.json")).unwrap();
        let index = Index::parse(&file("model.safetensors.index.json")).unwrap();
        let headers: BTreeMap<String, Header> = index
            .shards()
            .iter()
            .map(|shard| {
                let bytes = file(shard);
                let header = Header::read(shard, &bytes, bytes.len() as u64).unwrap();
                (shard.clone(), header)
            })
            .collect();
        let layout = Layout::new(&spec, &index, &headers).unwrap();
        let shards = Shards::new(&layout);
        Checkpoint {
            folder,
            layout,
            shards,
        }
    }

    fn shard(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.join(name)).unwrap()
    }

    fn part(&self, part: Part) -> Vec<u8> {
        let bytes = self.shard(self.layout.shard(part));
        bytes[part.range.start as usize..part.range.end as usize].to_vec()
    }

    fn expert(&self, key: ExpertKey) -> Bytes {
        let parts = self.layout.expert(key).iter();
        parts.flat_map(|part| self.part(*part)).collect()
    }

    fn source(&self, model: &ModelStore) -> SourceRecord {
        let files = self.shards.names().iter().map(|name| {
            let bytes = self.shard(name);
            let record = FileRecord {
                size: bytes.len() as u64,
                sha256: Some(digest_of(&bytes)),
            };
            (name.clone(), record)
        });
        SourceRecord {
            repo: model.repo().clone(),
            commit: model.commit().clone(),
            files: files.collect(),
            header_lens: BTreeMap::new(),
        }
    }

    fn put_expert(&self, model: &ModelStore, key: ExpertKey, bytes: Bytes) -> Filled {
        match model.lookup(key, self.layout.expert_len()) {
            Lookup::Miss(slot) => slot.fill(bytes.clone(), digest_of(&bytes), "test"),
            other => panic!("{key}: {other:?}"),
        }
    }

    /// Everything but the experts.
    fn put_frame(&self, model: &ModelStore) {
        model.set_source(&self.source(model)).unwrap();
        for name in self.shards.names() {
            let front = self.shards.stretches(name)[0].range;
            let header = &self.shard(name)[..front.end as usize];
            model.write(Area::Headers, name, header).unwrap();
        }
        for file in self.layout.core() {
            let CoreState::Partial(mut writer) = model.core(file.part, file.len).unwrap() else {
                panic!("{}: already there", file.part);
            };
            writer.append(&file.head).unwrap();
            for piece in &file.pieces {
                let gap = piece.offset - writer.done();
                writer.append(&vec![0; gap as usize]).unwrap();
                writer.append(&self.part(piece.source)).unwrap();
            }
            let tail = file.len - writer.done();
            writer.append(&vec![0; tail as usize]).unwrap();
            writer.finish("test").unwrap();
        }
        for part in self.layout.rest() {
            let shard = self.layout.shard(*part);
            let CoreState::Partial(mut writer) = model.rest(shard, part.range).unwrap() else {
                panic!("{part:?}: already there");
            };
            writer.append(&self.part(*part)).unwrap();
            writer.finish("test").unwrap();
        }
    }
}

const CHECKPOINTS: [&str; 4] = [
    "tiny-k3",
    "tiny-k3-scattered",
    "tiny-linear",
    "austen-k3/model",
];

#[test]
fn every_shard_is_put_together_again_and_proved() {
    for name in CHECKPOINTS {
        let checkpoint = Checkpoint::read(name);
        let home = tempfile::tempdir().unwrap();
        let store = open(home.path(), Budget::Unlimited);
        let model = model(&store);
        checkpoint.put_frame(&model);
        let missing = model.missing(&checkpoint.layout);
        assert_eq!(
            missing.experts.len(),
            checkpoint.layout.expert_count(),
            "{name}"
        );
        assert!(
            missing.core.is_empty() && missing.rest.is_empty(),
            "{name}: {missing:?}"
        );
        for key in missing.experts {
            let bytes = checkpoint.expert(key);
            assert_eq!(checkpoint.put_expert(&model, key, bytes), Filled::Kept);
        }
        let shards = &checkpoint.shards;
        for shard in shards.names() {
            let bytes = checkpoint.shard(shard);
            let actual = ShardDigest::new(shard).finish(&model, shards).unwrap();
            assert_eq!(actual, digest_of(&bytes), "{name}/{shard}");
            let verdict = model.confirm_shard(shards, shard, actual).unwrap();
            assert_eq!(verdict, Verdict::Whole, "{name}/{shard}");
        }
        for (key, _) in model.experts() {
            let level = model.known(key).unwrap().level;
            assert_eq!(level, Level::WholeShard, "{name}: {key}");
        }
        assert_eq!(model.missing(&checkpoint.layout), Default::default());
    }
}

#[test]
fn any_range_of_a_shard_reads_as_on_the_hub() {
    let checkpoint = Checkpoint::read("tiny-k3-scattered");
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Unlimited);
    let model = model(&store);
    checkpoint.put_frame(&model);
    for key in model.missing(&checkpoint.layout).experts {
        checkpoint.put_expert(&model, key, checkpoint.expert(key));
    }
    let shards = &checkpoint.shards;
    for shard in shards.names() {
        let bytes = checkpoint.shard(shard);
        // Every edge of every stretch, one byte to either side of it, and odd lengths.
        for edge in shards.stretches(shard).iter().map(|s| s.range.end) {
            for (from, len) in [
                (edge.saturating_sub(1), 2),
                (edge, 1),
                (edge.saturating_sub(777), 5000),
            ] {
                let range = ByteRange::new(from, (from + len).min(bytes.len() as u64));
                if range.is_empty() || from > range.end {
                    continue;
                }
                assert!(model.has_range(shards, shard, range));
                let mut read = vec![0; range.len() as usize];
                model.read_shard(shards, shard, from, &mut read).unwrap();
                let expected = &bytes[range.start as usize..range.end as usize];
                assert!(read == expected, "{shard}: {range}");
            }
        }
        let beyond = ByteRange::new(0, bytes.len() as u64 + 1);
        assert!(!model.has_range(shards, shard, beyond));
        let mut read = vec![0; bytes.len() + 1];
        let refused = model.read_shard(shards, shard, 0, &mut read);
        assert!(
            matches!(refused, Err(StoreError::Absent { .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn bytes_that_are_not_here_are_said_to_be_absent() {
    let checkpoint = Checkpoint::read("tiny-k3");
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Unlimited);
    let model = model(&store);
    checkpoint.put_frame(&model);
    let shards = &checkpoint.shards;
    let with_expert = |s: &&String| {
        let mut stretches = shards.stretches(s).iter();
        stretches.any(|s| matches!(s.holder, Holder::Expert { .. }))
    };
    let shard = shards.names().iter().find(with_expert).unwrap();
    let whole = ByteRange::new(0, checkpoint.shard(shard).len() as u64);
    assert!(!model.has_range(shards, shard, whole));
    let refused = ShardDigest::new(shard).finish(&model, shards);
    assert!(
        matches!(refused, Err(StoreError::Absent { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_first_arrival_that_was_wrong_shows_when_its_shard_is_whole() {
    let checkpoint = Checkpoint::read("tiny-k3");
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Unlimited);
    let model = model(&store);
    checkpoint.put_frame(&model);
    let experts = model.missing(&checkpoint.layout).experts;
    for key in &experts {
        let mut bytes = checkpoint.expert(*key).to_vec();
        if key == &experts[3] {
            bytes[100] ^= 1;
        }
        checkpoint.put_expert(&model, *key, bytes.into());
    }
    let shards = &checkpoint.shards;
    let mut wrong = Vec::new();
    for shard in shards.names() {
        let actual = ShardDigest::new(shard).finish(&model, shards).unwrap();
        match model.confirm_shard(shards, shard, actual).unwrap() {
            Verdict::Whole => {}
            Verdict::Different { .. } => wrong.push(shard.clone()),
            Verdict::Unpublished => panic!("{shard}"),
        }
    }
    let part = checkpoint.layout.expert(experts[3])[0];
    assert_eq!(wrong, [checkpoint.layout.shard(part)]);
    assert_eq!(model.known(experts[3]).unwrap().level, Level::FirstUse);
}

#[test]
fn a_shard_that_came_by_out_of_order_is_hashed_once_and_right() {
    let checkpoint = Checkpoint::read("tiny-k3");
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Unlimited);
    let model = model(&store);
    checkpoint.put_frame(&model);
    for key in model.missing(&checkpoint.layout).experts {
        checkpoint.put_expert(&model, key, checkpoint.expert(key));
    }
    let shard = &checkpoint.shards.names()[3];
    let bytes = checkpoint.shard(shard);
    let mut digest = ShardDigest::new(shard);
    digest.feed(0, &bytes[..100]);
    digest.feed(200, &bytes[200..300]); // too early: read back later
    digest.feed(50, &bytes[50..150]); // half of it known
    digest.feed(0, &bytes[..10]); // long known
    assert_eq!(digest.at(), 150);
    digest.catch_up(&model, &checkpoint.shards, 170).unwrap();
    digest.feed(170, &bytes[170..1000]);
    assert_eq!(digest.at(), 1000);
    assert_eq!(
        digest.finish(&model, &checkpoint.shards).unwrap(),
        digest_of(&bytes)
    );
}
