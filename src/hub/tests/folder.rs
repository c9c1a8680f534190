//! Folders as sources: fetches, identity, and what must not be read.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use crate::hub::Arrived;
use crate::hub::Class;
use crate::hub::Hub;
use crate::hub::HubError;
use crate::hub::HubOptions;
use crate::hub::Snapshot;
use crate::hub::SourceAddress;
use crate::hub::Span;
use crate::terms::ByteRange;
use crate::terms::RepoId;
use crate::terms::Revision;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny-k3")
}

fn repo() -> RepoId {
    "test/tiny-k3".parse().unwrap()
}

fn open(folder: &Path) -> Hub {
    let options = HubOptions {
        sources: vec![SourceAddress::Folder(folder.to_owned())],
        offline: true,
        ..HubOptions::default()
    };
    Hub::open(options).unwrap()
}

fn fetch(hub: &Hub, snapshot: &Arc<Snapshot>, span: Span) -> Result<Arrived, HubError> {
    let (sender, receiver) = mpsc::channel();
    let ticket = hub.fetch(snapshot, span, Class::Demand, move |outcome| {
        sender.send(outcome).unwrap();
    });
    let outcome = receiver.recv().unwrap();
    drop(ticket);
    outcome
}

fn span(file: &str, start: u64, end: u64) -> Span {
    Span {
        file: file.into(),
        range: ByteRange::new(start, end),
        digest: None,
    }
}

#[test]
fn a_models_own_folder_gives_its_bytes_even_offline() {
    let hub = open(&fixture());
    let commit = hub.commit(&repo(), "main").unwrap();
    let snapshot = Arc::new(hub.list(&repo(), &commit).unwrap());
    let shard = "model-00003-of-000010.safetensors";
    let whole = fs::read(fixture().join(shard)).unwrap();
    assert_eq!(snapshot.files[shard].size, whole.len() as u64);
    let arrived = fetch(&hub, &snapshot, span(shard, 100, 5_000)).unwrap();
    assert_eq!(arrived.bytes, whole[100..5_000]);
    assert_eq!(
        hub.get(&snapshot, "config.json", 1 << 20).unwrap(),
        fs::read(fixture().join("config.json")).unwrap()
    );
}

#[test]
fn a_folders_commit_changes_with_a_header_and_not_with_the_day() {
    let copy = tempfile::tempdir().unwrap();
    let inside = copy.path().join("test/tiny-k3");
    fs::create_dir_all(&inside).unwrap();
    for entry in fs::read_dir(fixture()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), inside.join(entry.file_name())).unwrap();
    }
    let original = open(&fixture()).commit(&repo(), "main").unwrap();
    // The same model, here in a folder of ORG/NAME folders.
    assert_eq!(open(copy.path()).commit(&repo(), "main").unwrap(), original);
    let shard = inside.join("model-00001-of-000010.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[20] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let hub = open(copy.path());
    assert_ne!(hub.commit(&repo(), "main").unwrap(), original);
    // And the old commit is no longer served.
    let gone = hub.list(&repo(), &original);
    assert!(matches!(gone, Err(HubError::NotFound { .. })), "{gone:?}");
}

#[test]
fn a_hugging_face_cache_serves_the_commit_it_holds() {
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join("models--test--tiny-k3");
    let commit: Revision = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
    let snapshot = cache.join("snapshots").join(commit.as_str());
    for folder in [&snapshot, &cache.join("blobs"), &cache.join("refs")] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(cache.join("refs/main"), commit.as_str()).unwrap();
    let body = b"four score and seven".to_vec();
    let name = sha256(&body);
    fs::write(cache.join("blobs").join(&name), &body).unwrap();
    let link = Path::new("../../blobs").join(&name);
    std::os::unix::fs::symlink(link, snapshot.join("a.safetensors")).unwrap();

    let hub = open(home.path());
    assert_eq!(hub.commit(&repo(), "main").unwrap(), commit);
    let mut listed = hub.list(&repo(), &commit).unwrap();
    assert_eq!(
        listed.files["a.safetensors"].sha256,
        Some(name.parse().unwrap())
    );
    let good = Arc::new(listed.clone());
    let arrived = fetch(&hub, &good, span("a.safetensors", 5, 10)).unwrap();
    assert_eq!(&arrived.bytes[..], b"score");

    // Another file under the same name is refused: the pinned digest differs.
    let facts = listed.files.get_mut("a.safetensors").unwrap();
    facts.sha256 = Some(sha256(b"other").parse().unwrap());
    let refused = fetch(&hub, &Arc::new(listed), span("a.safetensors", 5, 10));
    assert!(
        matches!(refused, Err(HubError::WrongContent { .. })),
        "{refused:?}"
    );

    // A whole file whose content does not match its name is found out.
    fs::write(cache.join("blobs").join(&name), b"five score and seven").unwrap();
    let damaged = fetch(&hub, &good, span("a.safetensors", 0, 20));
    assert!(
        matches!(damaged, Err(HubError::WrongContent { .. })),
        "{damaged:?}"
    );
}

#[test]
fn a_missing_file_and_a_range_past_the_end_are_errors_that_say_so() {
    let hub = open(&fixture());
    let commit = hub.commit(&repo(), "main").unwrap();
    let snapshot = Arc::new(hub.list(&repo(), &commit).unwrap());
    let missing = fetch(&hub, &snapshot, span("nowhere.safetensors", 0, 1));
    assert!(
        matches!(missing, Err(HubError::NotFound { .. })),
        "{missing:?}"
    );
    let beyond = fetch(&hub, &snapshot, span("config.json", 0, 1 << 40));
    assert!(
        matches!(beyond, Err(HubError::Damaged { .. })),
        "{beyond:?}"
    );
    let unknown = hub.commit(&repo(), "0123456789abcdef0123456789abcdef01234567");
    assert!(
        matches!(unknown, Err(HubError::NotFound { .. })),
        "{unknown:?}"
    );
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    crate::terms::Digest(sha2::Sha256::digest(bytes).into()).to_string()
}
