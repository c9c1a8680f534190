//! Every environment variable the program reads, in one place.

use std::env;
use std::path::PathBuf;

/// What the environment says. Read once, at the start.
#[derive(Clone, Debug, Default)]
pub(super) struct Env {
    /// `DELTAFIN_HOME`: the store's folder.
    pub(super) home: Option<PathBuf>,
    /// `DELTAFIN_API_KEY`: the key that clients of `serve` must send.
    pub(super) api_key: Option<String>,
    /// `HF_ENDPOINT`: the hub's address.
    pub(super) endpoint: Option<String>,
    /// The hub's token and where it came from: `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN` or a file.
    pub(super) token: Option<(String, String)>,
    /// `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`, by name.
    pub(super) offline: Option<&'static str>,
    /// `HF_HUB_CACHE`, else `hub` below `HF_HOME`: what other programs have downloaded.
    pub(super) hf_cache: Option<PathBuf>,
    /// `SSL_CERT_FILE`: certificates trusted besides the system's.
    pub(super) ca_file: Option<PathBuf>,
}

impl Env {
    pub(super) fn read() -> Env {
        Env {
            home: path("DELTAFIN_HOME"),
            api_key: text("DELTAFIN_API_KEY"),
            endpoint: text("HF_ENDPOINT"),
            token: token(),
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
                .into_iter()
                .find(|name| switched_on(name)),
            hf_cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .or_else(|| hf_home().map(|h| h.join("hub"))),
            ca_file: path("SSL_CERT_FILE"),
        }
    }
}

/// Bytes of memory that are free for use; a guess where the system does not say.
pub(super) fn memory_available() -> u64 {
    const GUESS: u64 = 4 << 30;
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(GUESS, |kib| kib << 10)
}

fn text(name: &str) -> Option<String> {
    env::var(name)
        .ok()
        .map(|v| v.trim().to_owned())
        .filter(|v| !v.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
}

fn switched_on(name: &str) -> bool {
    text(name)
        .is_some_and(|v| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

/// The order of the hub's own clients: the variables, then the file that `hf auth login` writes.
fn token() -> Option<(String, String)> {
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        if let Some(value) = text(name) {
            return Some((value, name.to_owned()));
        }
    }
    if switched_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let file = path("HF_TOKEN_PATH").or_else(|| hf_home().map(|h| h.join("token")))?;
    let value = std::fs::read_to_string(&file).ok()?.trim().to_owned();
    (!value.is_empty()).then(|| (value, file.display().to_string()))
}

/// Where the hub's own clients keep their things.
fn hf_home() -> Option<PathBuf> {
    path("HF_HOME")
        .or_else(|| path("XDG_CACHE_HOME").map(|c| c.join("huggingface")))
        .or_else(|| dirs::home_dir().map(|h| h.join(".cache/huggingface")))
}
