mod config;
mod header;
mod layout;
mod size;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::checkpoint::Header;
use crate::checkpoint::Index;
use crate::checkpoint::Spec;

/// A checkpoint's description, read from a folder under `fixtures`.
struct Described {
    spec: Spec,
    index: Index,
    headers: BTreeMap<String, Header>,
}

fn path(folder: &str, file: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    root.join(folder).join(file)
}

fn bytes(folder: &str, file: &str) -> Vec<u8> {
    std::fs::read(path(folder, file)).unwrap()
}

fn describe(folder: &str) -> Described {
    let spec = Spec::from_config(&bytes(folder, "config.json")).unwrap();
    let index = Index::parse(&bytes(folder, "model.safetensors.index.json")).unwrap();
    let read = |shard: &String| {
        let file = bytes(folder, shard);
        let header = Header::read(shard, &file, file.len() as u64).unwrap();
        (shard.clone(), header)
    };
    let headers = index.shards().iter().map(read).collect();
    Described {
        spec,
        index,
        headers,
    }
}

/// The front of a shard whose header is `json`, padded to a multiple of 8 as writers do.
fn front(json: &str) -> Vec<u8> {
    let mut json = json.as_bytes().to_vec();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut front = (json.len() as u64).to_le_bytes().to_vec();
    front.extend(json);
    front
}
