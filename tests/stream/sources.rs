//! Where bytes may come from besides a hub: folders, other programs' downloads, neighbours' stores.

use std::path::Path;
use std::process::Stdio;

use deltafin::share::Server;

use crate::EXPERT;
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
        Shared::with(home, &[])
    }

    /// `share --through` of a store that fetches from `hub`.
    fn through(home: &Path, hub: &Server, more: &[&str]) -> Shared {
        let url = hub.url();
        let mut args = vec!["--through", "--hub", &url, "--reserve", "0"];
        args.extend(more);
        Shared::with(home, &args)
    }

    fn with(home: &Path, more: &[&str]) -> Shared {
        let mut command = program::command();
        command
            .args(["share", "--model", MODEL, "--port", "0", "--home"])
            .arg(home)
            .args(more)
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut lines = std::io::BufRead::lines(lines).map(Result::unwrap);
        let line = lines.find(|line| line.contains("is shared at")).unwrap();
        let mut words = line.split_whitespace();
        let url = words.find(|w| w.starts_with("http")).unwrap();
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
        capped
            .stderr
            .contains("paused: the limit of 9.0 MB fetched bytes is reached")
            && capped.stderr.contains("hint: everything fetched is kept"),
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

fn stream_from(sources: &[&str], home: &Path, more: &[&str]) -> std::process::Command {
    let mut command = program::command();
    command.args(["stream", "--model", MODEL, "--reserve", "0", "--json"]);
    for source in sources {
        command.args(["--hub", source]);
    }
    command.arg("--home").arg(home).args(WHO).args(more);
    command
}

#[test]
fn a_share_fetches_what_it_lacks_once_for_everybody() {
    let hub = hub();
    let near = tempfile::tempdir().unwrap();
    let shared = Shared::through(near.path(), &hub, &["--cache", "unlimited"]);
    let before = hub.stats().body_bytes;
    let homes: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    // Together, so that they ask for the same experts at the same time.
    let clients: Vec<_> = homes
        .iter()
        .map(|home| {
            let mut command = stream_from(&[&shared.url], home.path(), &["--cache", "0GB"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    for client in clients {
        let run = Run::from(client.wait_with_output().unwrap());
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(ids(&json(&run)), golden("chat_who"));
    }
    let kept = program::expert_bytes(near.path());
    assert!(kept > 0);
    let moved = hub.stats().body_bytes - before;
    assert_eq!(moved, kept, "each byte came once, and was kept");
    hub.stop();
    let home = tempfile::tempdir().unwrap();
    let run = Run::from(
        stream_from(&[&shared.url], home.path(), &[])
            .output()
            .unwrap(),
    );
    assert_eq!(ids(&json(&run)), golden("chat_who"), "now without the hub");
}

#[test]
fn a_share_with_little_room_passes_on_what_it_cannot_keep() {
    let hub = hub();
    for budget in ["0GB", "200kB"] {
        let near = tempfile::tempdir().unwrap();
        let far = tempfile::tempdir().unwrap();
        let shared = Shared::through(near.path(), &hub, &["--cache", budget]);
        let there = far.path().to_str().unwrap();
        let fetched = deltafin(&[
            "fetch",
            "--model",
            MODEL,
            "--hub",
            &shared.url,
            "--home",
            there,
            "--reserve",
            "0",
            "--cache",
            "unlimited",
            "--json",
        ]);
        assert_eq!(fetched.code, 0, "{}", fetched.stderr);
        let whole = json(&fetched)["shards"]["whole"].as_u64();
        assert_eq!(whole, Some(9), "by the original sha256");
        let kept = program::expert_bytes(near.path());
        assert!(kept <= 200_000, "{kept} bytes kept of {budget}");
    }
}

#[test]
fn a_share_at_its_limit_sends_clients_to_their_next_source() {
    let hub = hub();
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = hub.url();
    let shared = Shared::through(near.path(), &hub, &["--max-bytes", "9MB"]);
    let run = stream_from(&[&shared.url, &url], far.path(), &[]).output();
    let run = Run::from(run.unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(ids(&report), golden("chat_who"));
    let from = |source: &str| report["experts"][source].as_u64().unwrap();
    assert!(from("peer") > 0 && from("hub") > 0, "{report}");
}

#[test]
fn a_share_unplugged_in_mid_token_is_followed_by_the_hub() {
    let hub = hub();
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = hub.url();
    let shared = Shared::through(near.path(), &hub, &[]);
    // Slow enough that there is a middle.
    let slowly = ["--rate", "500kB/s", "--cache", "unlimited"];
    // The core comes first, and fast.
    let at = far.path().to_str().unwrap();
    let core = deltafin(&[
        "stream",
        "--model",
        MODEL,
        "--hub",
        &shared.url,
        "--home",
        at,
        "--reserve",
        "0",
        "--raw",
        "Emma",
        "--max-tokens",
        "1",
        "--cache",
        "unlimited",
    ]);
    assert_eq!(core.code, 0, "{}", core.stderr);
    let before = program::expert_bytes(far.path());
    let mut command = stream_from(&[&shared.url, &url], far.path(), &slowly);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = command.spawn().unwrap();
    let started = std::time::Instant::now();
    while program::expert_bytes(far.path()) < before + 20 * EXPERT {
        assert!(started.elapsed().as_secs() < 60, "nothing comes");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(shared);
    let run = Run::from(client.wait_with_output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(ids(&report), golden("chat_who"));
    let from = |source: &str| report["experts"][source].as_u64().unwrap();
    assert!(from("peer") > 0 && from("hub") > 0, "{report}");
}
