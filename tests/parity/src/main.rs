//! Downloads a repository from the test hub with the `hf-hub` crate, unmodified, and holds every
//! file against the folder it was served from: `parity ENDPOINT ORG NAME FOLDER`.

use std::fs;
use std::path::Path;

use hf_hub::HFClient;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, org, name, folder] = &words[..] else {
        return Err("usage: parity ENDPOINT ORG NAME FOLDER".into());
    };
    let cache = std::env::temp_dir().join(format!("parity-{}", std::process::id()));
    let client = HFClient::builder().endpoint(endpoint).cache_dir(&cache).build()?;
    let model = client.model(org, name);
    let got = model.snapshot_download().send().await?;
    let mut files = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let expected = fs::read(entry.path())?;
        if fs::read(got.join(entry.file_name()))? != expected {
            return Err(format!("{:?} differs", entry.file_name()).into());
        }
        files += 1;
        let range = model.download_file_to_bytes();
        let file = entry.file_name().into_string().map_err(|_| "a strange name")?;
        if Path::new(&file).extension().is_some_and(|e| e == "safetensors") {
            let part = range.filename(file).range(3..50).send().await?;
            if part != expected[3..50] {
                return Err(format!("a range of {:?} differs", entry.file_name()).into());
            }
        }
    }
    fs::remove_dir_all(cache)?;
    println!("hf-hub: {files} files are equal");
    Ok(())
}
