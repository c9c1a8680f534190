//! What can be wrong with a checkpoint's description.

/// Why a checkpoint was refused. Cut by what the caller does next: a config that this engine cannot run is another
/// matter than a file that is damaged, and a damaged core file can be written again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The text is not JSON, breaks off, or lacks the fields that its kind of file has.
    #[error("{file} cannot be read: {source}")]
    Json {
        /// Which file.
        file: String,
        /// Where it stops making sense.
        source: serde_json::Error,
    },
    /// A key that must be there is not.
    #[error("config.json: `{key}` is missing; expected {expected}")]
    MissingKey {
        /// Path of the key: `text_config.hidden_size`.
        key: String,
        /// What should stand there.
        expected: &'static str,
    },
    /// A key holds something that no model could mean.
    #[error("config.json: `{key}` is {found}; expected {expected}")]
    BadKey {
        /// Path of the key.
        key: String,
        /// What stands there, shortened.
        found: String,
        /// What should stand there.
        expected: String,
    },
    /// A legal model, but not one this engine computes.
    #[error("config.json: `{key}` is {found}, which this engine cannot run; it runs {supported}")]
    Unsupported {
        /// Path of the key.
        key: String,
        /// What stands there, shortened.
        found: String,
        /// What would run.
        supported: String,
    },
    /// The index names a shard by something that is no plain file name, and could lead out of the repository.
    #[error(
        "model.safetensors.index.json: {tensor} is said to be in `{shard}`, which is no plain name of a .safetensors file"
    )]
    ShardName {
        /// The tensor.
        tensor: String,
        /// The name, shortened.
        shard: String,
    },
    /// A shard's header breaks a rule of the format.
    #[error("{shard}: the safetensors header is damaged: {fault}")]
    Header {
        /// Which shard.
        shard: String,
        /// Which rule.
        fault: HeaderFault,
    },
    /// The index names a shard of which there is no header, because the repository does not hold it.
    #[error(
        "model.safetensors.index.json names shard {shard} (for {tensor}), and there is no such shard"
    )]
    MissingShard {
        /// The shard.
        shard: String,
        /// The first tensor said to lie in it.
        tensor: String,
    },
    /// The index sends us to a shard whose header does not know the tensor.
    #[error(
        "model.safetensors.index.json says that {tensor} is in {shard}, and that shard does not hold it"
    )]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard the index names.
        shard: String,
    },
    /// A tensor that config.json calls for is in no shard.
    #[error("the checkpoint lacks tensor {tensor}, which config.json calls for")]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape or type than config.json implies.
    #[error("{shard}: tensor {tensor} is {found}; config.json implies {expected}")]
    WrongTensor {
        /// Which shard.
        shard: String,
        /// Which tensor.
        tensor: String,
        /// Its type and shape.
        found: String,
        /// The type and shape it should have.
        expected: String,
    },
    /// The head of a core file cannot be read.
    #[error("a core file has no readable head: {source}")]
    CoreHead {
        /// Where it stops making sense.
        source: serde_json::Error,
    },
    /// The head of a core file places a tensor where it cannot be.
    #[error("a core file is damaged: tensor {tensor} {fault}")]
    CoreTensor {
        /// The tensor.
        tensor: String,
        /// Why it cannot be there.
        fault: &'static str,
    },
}

impl CheckpointError {
    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> &'static str {
        match self {
            CheckpointError::Json { .. } | CheckpointError::Header { .. } => {
                "the file is damaged or cut short: fetch it again, or try another revision or mirror"
            }
            CheckpointError::MissingKey { .. } | CheckpointError::BadKey { .. } => {
                "check that --model and --revision name a Kimi K3 or Kimi-Linear checkpoint, and its config.json"
            }
            CheckpointError::Unsupported { .. } => {
                "deltafin runs Kimi K3 (kimi_k3, MXFP4 experts) and Kimi-Linear (kimi_linear, BF16 experts)"
            }
            CheckpointError::ShardName { .. }
            | CheckpointError::MissingShard { .. }
            | CheckpointError::NotInShard { .. }
            | CheckpointError::MissingTensor { .. }
            | CheckpointError::WrongTensor { .. } => {
                "config.json, index and shards do not belong together: use one complete revision of the repository"
            }
            CheckpointError::CoreHead { .. } | CheckpointError::CoreTensor { .. } => {
                "remove the file, and it is fetched and written again"
            }
        }
    }
}

/// The rule of the safetensors format that a header breaks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderFault {
    /// The file cannot even hold a header's length.
    #[error("there are {size} bytes, fewer than the 8 of a header length")]
    NoLength {
        /// Bytes there are.
        size: u64,
    },
    /// The length is more than any header needs.
    #[error("it says it is {len} bytes long; at most {max} are accepted")]
    TooLong {
        /// The length it claims.
        len: u64,
        /// The most this engine reads.
        max: u64,
    },
    /// The file ends inside the header.
    #[error("it should be {len} bytes long, but only {available} follow its length")]
    Truncated {
        /// The length it claims.
        len: u64,
        /// Bytes there are.
        available: u64,
    },
    /// It does not begin with a brace.
    #[error("it does not start with `{{`")]
    NoObject,
    /// Not JSON, or a tensor's entry lacks a field, or a key stands twice.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A name stands twice.
    #[error("tensor {tensor} is listed twice")]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// An element type nobody knows.
    #[error("tensor {tensor} has the unknown dtype {dtype}")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its type as written.
        dtype: String,
    },
    /// Shape and type do not give the length of the range.
    #[error(
        "tensor {tensor}: {dtype} of shape {shape:?} does not fill the data offsets {begin}..{end}"
    )]
    Size {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
        /// Begin of the data, relative to the header's end.
        begin: u64,
        /// End of the data, exclusive.
        end: u64,
    },
    /// The ranges do not tile the data.
    #[error(
        "tensor {tensor} starts at {begin}, but the data before it ends at {expected}: a hole or an overlap"
    )]
    Tiling {
        /// The tensor after the seam.
        tensor: String,
        /// Where it starts.
        begin: u64,
        /// Where it should start.
        expected: u64,
    },
    /// The data does not end where the file does.
    #[error("its tensors end at byte {end}, but the file has {size} bytes")]
    FileSize {
        /// End of the last tensor in the file.
        end: u64,
        /// The file's size.
        size: u64,
    },
}
