//! A checkpoint folder held in memory: the plainest supply there can be.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use deltafin::checkpoint::CoreHead;
use deltafin::checkpoint::Header;
use deltafin::checkpoint::Index;
use deltafin::checkpoint::Layout;
use deltafin::checkpoint::Part;
use deltafin::checkpoint::Spec;
use deltafin::model::CoreLease;
use deltafin::model::CoreSupply;
use deltafin::model::CoreTensor;
use deltafin::model::ExpertSupply;
use deltafin::model::ModelError;
use deltafin::terms::CorePart;
use deltafin::terms::ExpertKey;

pub(crate) fn fixture(path: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("fixtures").join(path)
}

/// In which order experts arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrival {
    AsAsked,
    Backwards,
    /// Another order at each request.
    Shuffled,
}

pub(crate) struct Folder {
    pub(crate) spec: Arc<Spec>,
    experts: BTreeMap<ExpertKey, Vec<u8>>,
    core: BTreeMap<CorePart, CoreBytes>,
    pub(crate) arrival: Arrival,
    requests: AtomicU64,
}

/// A core file as an installer writes it, and its head.
struct CoreBytes {
    file: Vec<u8>,
    head: CoreHead,
}

impl Folder {
    /// Reads a checkpoint the way the engine does: headers, layout, core files written piece by piece.
    pub(crate) fn open(path: &str) -> Folder {
        let folder = fixture(path);
        let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let spec = Spec::from_config(&read("config.json")).unwrap();
        let index = Index::parse(&read("model.safetensors.index.json")).unwrap();
        let shards: BTreeMap<String, Vec<u8>> = index
            .shards()
            .iter()
            .map(|shard| (shard.clone(), read(shard)))
            .collect();
        let header = |(shard, file): (&String, &Vec<u8>)| {
            let header = Header::read(shard, file, file.len() as u64).unwrap();
            (shard.clone(), header)
        };
        let headers = shards.iter().map(header).collect();
        let layout = Layout::new(&spec, &index, &headers).unwrap();
        let bytes = |part: &Part| {
            let (start, end) = (part.range.start as usize, part.range.end as usize);
            &shards[layout.shard(*part)][start..end]
        };
        let expert = |key| {
            (
                key,
                layout.expert(key).iter().flat_map(bytes).copied().collect(),
            )
        };
        let mut core = BTreeMap::new();
        for planned in layout.core() {
            let mut file = planned.head.clone();
            for piece in &planned.pieces {
                file.resize(piece.offset as usize, 0);
                file.extend_from_slice(bytes(&piece.source));
            }
            file.resize(planned.len as usize, 0);
            let head = CoreHead::parse(&file).unwrap();
            core.insert(planned.part, CoreBytes { file, head });
        }
        Folder {
            experts: spec.expert_keys().map(expert).collect(),
            spec: Arc::new(spec),
            core,
            arrival: Arrival::AsAsked,
            requests: AtomicU64::new(0),
        }
    }

    pub(crate) fn arriving(self, arrival: Arrival) -> Folder {
        Folder { arrival, ..self }
    }
}

impl CoreSupply for Folder {
    type Lease = Lease;
    type Error = ModelError;

    fn core(&self, part: CorePart) -> Result<Lease, ModelError> {
        let core = &self.core[&part];
        Ok(Lease {
            file: core.file.clone(),
            head: core.head.clone(),
        })
    }
}

/// A copy, so that whatever outlives its lease is found by the tools that look for such things.
pub(crate) struct Lease {
    file: Vec<u8>,
    head: CoreHead,
}

impl CoreLease for Lease {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        let entry = self.head.get(local_name)?;
        let range = entry.range.start as usize..entry.range.end as usize;
        Some(CoreTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.file[range],
        })
    }
}

impl ExpertSupply for Folder {
    type Lease = Vec<u8>;
    type Error = ModelError;

    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, Vec<u8>), ModelError>> {
        let mut keys = keys.to_vec();
        match self.arrival {
            Arrival::AsAsked => {}
            Arrival::Backwards => keys.reverse(),
            Arrival::Shuffled => {
                let mut state = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
                for i in (1..keys.len()).rev() {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    keys.swap(i, (state >> 33) as usize % (i + 1));
                }
            }
        }
        keys.into_iter()
            .map(|key| Ok((key, self.experts[&key].clone())))
    }

    /// In one order of arrival only: the others are computed one by one, to the same bits.
    fn at_hand(&self, _: ExpertKey) -> bool {
        matches!(self.arrival, Arrival::AsAsked)
    }
}
