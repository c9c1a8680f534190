//! `--logits`: every distribution and routing of a run, as a safetensors file.

use std::io::Write;
use std::path::Path;

use serde_json::json;

use crate::engine::Capture;

/// Writes `logits` f32 `[rows, vocab]` and `experts.L{i}` i32 `[rows, k]`.
pub(super) fn write(path: &Path, capture: &Capture) -> std::io::Result<()> {
    let rows = capture.logits.len() / capture.vocab.max(1);
    let mut header = serde_json::Map::new();
    let mut end = 0;
    let mut place = |name: String, dtype: &str, shape: [usize; 2]| {
        let begin = end;
        end += shape[0] * shape[1] * 4;
        header.insert(
            name,
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}),
        );
    };
    place("logits".to_owned(), "F32", [rows, capture.vocab]);
    for (layer, experts) in &capture.experts {
        place(
            format!("experts.L{layer}"),
            "I32",
            [rows, experts.len() / rows.max(1)],
        );
    }
    let mut json = serde_json::Value::Object(header).to_string();
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    // Beside its final name first: a file that exists is whole.
    let partial = path.with_extension("partial");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&partial)?);
    file.write_all(&(json.len() as u64).to_le_bytes())?;
    file.write_all(json.as_bytes())?;
    for value in &capture.logits {
        file.write_all(&value.to_le_bytes())?;
    }
    for (_, experts) in &capture.experts {
        for id in experts {
            file.write_all(&id.to_le_bytes())?;
        }
    }
    file.into_inner()
        .map_err(std::io::IntoInnerError::into_error)?;
    std::fs::rename(&partial, path)
}
