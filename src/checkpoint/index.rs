//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeSeed;
use serde::de::Error as _;
use serde::de::MapAccess;
use serde::de::Visitor;

use crate::checkpoint::config::cut;
use crate::checkpoint::error::CheckpointError;

/// The file of a checkpoint that has no index.
pub const SINGLE_SHARD: &str = "model.safetensors";

/// The index's file name.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Which shard holds which tensor. Nothing more: offsets are in the shards' headers, and `total_size` is wrong often
/// enough that nothing should be planned on it.
#[derive(Clone, Debug)]
pub struct Index {
    /// Shards by name.
    shards: Vec<String>,
    /// Tensors by name, each with its shard's place in `shards`; `None` is a checkpoint of one file.
    names: Option<Vec<(Box<str>, u32)>>,
}

impl Index {
    /// Reads the index.
    ///
    /// # Errors
    ///
    /// If it is no JSON, has no `weight_map` of strings, lists a tensor twice, or names a shard by anything but a
    /// plain file name.
    pub fn parse(json: &[u8]) -> Result<Index, CheckpointError> {
        let broken = |source| CheckpointError::Json {
            file: INDEX_FILE.to_owned(),
            source,
        };
        let file: IndexFile = serde_json::from_slice(json).map_err(broken)?;
        let WeightMap { shards, mut names } = file.weight_map;
        for (place, shard) in (0u32..).zip(&shards) {
            if !plain_name(shard) {
                let tensor = names.iter().find(|(_, at)| *at == place);
                return Err(CheckpointError::ShardName {
                    tensor: tensor.map_or(String::new(), |(name, _)| cut(name)),
                    shard: cut(shard),
                });
            }
        }
        let mut order: Vec<u32> = (0u32..).take(shards.len()).collect();
        order.sort_by_key(|at| &shards[*at as usize]);
        let mut place = vec![0; shards.len()];
        for (new, old) in (0u32..).zip(&order) {
            place[*old as usize] = new;
        }
        for (_, at) in &mut names {
            *at = place[*at as usize];
        }
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let twice = format!("tensor {} is listed twice", cut(&twice[0].0));
            return Err(broken(serde_json::Error::custom(twice)));
        }
        let shards = order
            .iter()
            .map(|at| shards[*at as usize].clone())
            .collect();
        Ok(Index {
            shards,
            names: Some(names),
        })
    }

    /// The index of a checkpoint that is one file, [`SINGLE_SHARD`], and comes without one: whatever the file's header
    /// lists is there.
    pub fn single() -> Index {
        Index {
            shards: vec![SINGLE_SHARD.to_owned()],
            names: None,
        }
    }

    /// All shards, by name.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// Tensors by name, each with its shard's place in [`Index::shards`]; `None` for [`Index::single`].
    pub(crate) fn names(&self) -> Option<&[(Box<str>, u32)]> {
        self.names.as_deref()
    }

    /// The shard that is said to hold `tensor`, as its place in [`Index::shards`].
    pub(crate) fn place(&self, tensor: &str) -> Option<usize> {
        match &self.names {
            None => Some(0),
            Some(names) => {
                let at = names
                    .binary_search_by(|(name, _)| (**name).cmp(tensor))
                    .ok()?;
                Some(names[at].1 as usize)
            }
        }
    }
}

/// A shard's name goes into URLs and paths, so it may not lead anywhere.
fn plain_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    name.len() <= 200
        && !name.starts_with('.')
        && name.ends_with(".safetensors")
        && name.bytes().all(plain)
}

#[derive(Deserialize)]
struct IndexFile {
    weight_map: WeightMap,
}

/// The map as it is read: half a million names of real K3 share 96 shards, so each shard's name is kept once.
struct WeightMap {
    shards: Vec<String>,
    names: Vec<(Box<str>, u32)>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to shard names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut places = HashMap::new();
        let mut read = WeightMap {
            shards: Vec::new(),
            names: Vec::new(),
        };
        while let Some(name) = map.next_key::<Box<str>>()? {
            let place = map.next_value_seed(ShardName {
                places: &mut places,
                shards: &mut read.shards,
            })?;
            read.names.push((name, place));
        }
        Ok(read)
    }
}

/// Reads one shard name and answers its place.
struct ShardName<'a> {
    places: &'a mut HashMap<String, u32>,
    shards: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for ShardName<'_> {
    type Value = u32;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for ShardName<'_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a shard")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<u32, E> {
        if let Some(place) = self.places.get(name) {
            return Ok(*place);
        }
        // Parts of a layout number shards in 16 bits.
        let place = u16::try_from(self.shards.len()).map_err(|_| E::custom("too many shards"))?;
        let place = u32::from(place);
        self.shards.push(name.to_owned());
        self.places.insert(name.to_owned(), place);
        Ok(place)
    }
}
