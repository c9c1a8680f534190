//! Where bytes may come from besides a hub: folders, other programs' downloads, neighbours' stores.

use std::path::Path;
use std::process::Stdio;

use deltafin::share::Server;

use crate::MODEL;
use crate::WHO;
use crate::golden;
use crate::hub;
use crate::ids;
use crate::program;
use crate::program::Run;
use crate::program::deltafin;
use crate::program::json;
use crate::stream;

/// `deltafin share` of a home's store on a free port, and where it listens.
struct Shared {
    child: std::process::Child,
    url: String,
}

impl Shared {
    fn of(home: &Path) -> Shared {
        let mut command = program::command();
        command
            .args(["share", "--model", MODEL, "--port", "0", "--home"])
            .arg(home)
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
        let url = line
            .split_whitespace()
            .find(|w| w.starts_with("http"))
            .expect("an address");
        let url = url.trim_end_matches(';').to_owned();
        Shared { child, url }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_neighbours_store_is_a_source_and_what_it_lacks_comes_from_the_hub() {
    let hub = hub();
    let near = tempfile::tempdir().unwrap();
    let far = tempfile::tempdir().unwrap();
    let (url, at) = (hub.url(), near.path().to_str().unwrap());
    let streamed = deltafin(&[
        "stream",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
        "--cache",
        "unlimited",
        "--raw",
        "Emma",
        "--max-tokens",
        "8",
    ]);
    assert_eq!(streamed.code, 0, "{}", streamed.stderr);
    let shared = Shared::of(near.path());
    let mut args = vec![
        "stream",
        "--model",
        MODEL,
        "--hub",
        &shared.url,
        "--hub",
        &url,
        "--reserve",
        "0",
        "--json",
        "--cache",
        "unlimited",
        "--home",
        far.path().to_str().unwrap(),
    ];
    args.extend(WHO);
    let run = deltafin(&args);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(ids(&report), golden("chat_who"));
    let from = |source: &str| report["experts"][source].as_u64().unwrap();
    assert!(
        from("peer") > 50,
        "the neighbour gives what it has: {report}"
    );
    assert!(from("hub") > 0, "and the hub the rest: {report}");
    let alone = ["--cache", "unlimited"];
    drop(shared);
    assert_eq!(
        ids(&json(&stream(far.path(), &hub, &alone))),
        golden("chat_who")
    );
}

#[test]
fn what_other_programs_have_downloaded_is_used_before_the_network() {
    let hub = hub();
    let folder = tempfile::tempdir().unwrap();
    let commit = hub_commit(&hub);
    let model = folder.path().join("hub/models--deltafin--austen-k3");
    let snapshot = model.join("snapshots").join(&commit);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::write(model.join("refs/main"), &commit).unwrap();
    for entry in std::fs::read_dir("fixtures/austen-k3/model").unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
    let home = folder.path().join("home");
    let url = hub.url();
    let before = hub.stats();
    let mut command = program::command();
    command.env("HF_HOME", folder.path()).args([
        "stream",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--reserve",
        "0",
        "--json",
        "--home",
    ]);
    let run = Run::from(command.arg(&home).args(WHO).output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(ids(&json(&run)), golden("chat_who"));
    let moved = hub.stats().body_bytes - before.body_bytes;
    assert!(
        moved < 1_000_000,
        "{moved} bytes came over the network although they were here"
    );
}

/// The commit that the loopback hub serves.
fn hub_commit(hub: &Server) -> String {
    let home = tempfile::tempdir().unwrap();
    let url = hub.url();
    let at = home.path().to_str().unwrap();
    let plan = deltafin(&[
        "fetch",
        "--dry-run",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--json",
    ]);
    json(&plan)["revision"].as_str().unwrap().to_owned()
}

#[test]
fn a_limit_of_bytes_ends_a_run_and_keeps_what_it_has_fetched() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let capped = stream(
        home.path(),
        &hub,
        &["--cache", "unlimited", "--max-bytes", "9MB"],
    );
    assert_eq!(capped.code, 130, "{}", capped.stderr);
    assert!(
        capped.stderr.contains("limit of 9.0 MB"),
        "{}",
        capped.stderr
    );
    let kept = program::expert_bytes(home.path());
    assert!(kept > 0);
    let next = stream(home.path(), &hub, &["--cache", "unlimited"]);
    assert_eq!(ids(&json(&next)), golden("chat_who"));
    let total = program::expert_bytes(home.path());
    let fetched = json(&next)["bytes"]["hub"].as_u64().unwrap();
    assert_eq!(fetched + kept, total, "nothing is fetched twice");
}

#[test]
fn a_complete_share_gives_every_shard_back_byte_for_byte() {
    let hub = hub();
    let near = tempfile::tempdir().unwrap();
    let far = tempfile::tempdir().unwrap();
    let (url, at) = (hub.url(), near.path().to_str().unwrap());
    let fetched = deltafin(&[
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
    ]);
    assert_eq!(fetched.code, 0, "{}", fetched.stderr);
    hub.stop();
    let shared = Shared::of(near.path());
    let there = far.path().to_str().unwrap();
    let again = deltafin(&[
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &shared.url,
        "--home",
        there,
        "--reserve",
        "0",
        "--json",
    ]);
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert_eq!(
        json(&again)["shards"]["whole"].as_u64(),
        Some(9),
        "by the original sha256"
    );
}

#[test]
fn a_local_folder_is_a_hub_too() {
    let home = tempfile::tempdir().unwrap();
    let at = home.path().to_str().unwrap();
    for command in ["stream", "run"] {
        let mut args = vec![
            command,
            "--hub",
            "fixtures/austen-k3/model",
            "--home",
            at,
            "--reserve",
            "0",
            "--json",
        ];
        args.extend(WHO);
        let run = deltafin(&args);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let report = json(&run);
        assert_eq!(ids(&report), golden("chat_who"));
        assert_eq!(report["model"], "local/model");
        let from_hub = report["experts"]["hub"].as_u64().unwrap();
        assert_eq!(
            from_hub > 0,
            command == "stream",
            "the second run finds everything in the store"
        );
    }
}
