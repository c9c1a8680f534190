use std::fs;
use std::io::Read;
use std::io::Write;
use std::net::SocketAddr;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use sha2::Digest as _;
use sha2::Sha256;

use super::Backend;
use super::Embedded;
use super::Folder;
use super::Link;
use super::Secret;
use super::Server;
use super::ShareError;
use super::ShareOptions;
use super::routes::Asked;
use super::routes::parse_range;
use crate::terms::ByteRange;

const ANY: &str = "127.0.0.1:0";
const SHARD: &str = "model-00009-of-000009.safetensors";

fn start(backend: Arc<dyn Backend>, options: ShareOptions) -> Server {
    let addr: SocketAddr = ANY.parse().unwrap();
    Server::start(addr, backend, options).unwrap()
}

fn demo() -> Server {
    start(Arc::new(Embedded::new()), ShareOptions::default())
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(n, _)| n == name);
        &found
            .unwrap_or_else(|| panic!("no {name} in {:?}", self.headers))
            .1
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// One request by hand: a client library would tidy paths, follow redirects and hide what a reply
/// really said.
fn ask(method: &str, url: &str, headers: &[(&str, &str)]) -> Reply {
    let (host, path) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut request = format!("{method} /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    let end = reply.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(reply[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap()[9..12].parse().unwrap();
    let headers = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    Reply {
        status,
        headers,
        body: reply[end + 4..].to_vec(),
    }
}

fn get(url: &str) -> Reply {
    ask("GET", url, &[])
}

fn resolve_url(server: &Server, path: &str) -> String {
    format!("{}/deltafin/austen-k3/resolve/main/{path}", server.url())
}

/// The signed URL of a shard.
fn signed(server: &Server) -> String {
    let reply = ask("HEAD", &resolve_url(server, SHARD), &[]);
    reply.header("location").to_owned()
}

fn on_disk(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/austen-k3/model");
    fs::read(folder.join(name)).unwrap()
}

#[test]
fn every_embedded_file_is_the_one_in_the_fixtures() {
    let embedded = Embedded::new();
    let folder = Folder::open(
        Embedded::REPO.parse().unwrap(),
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/austen-k3/model"),
    )
    .unwrap();
    assert_eq!(embedded.listing(), folder.listing());
    assert_eq!(embedded.listing().files.len(), 14);
}

#[test]
fn model_information_names_commit_and_files() {
    let server = demo();
    let commit = Embedded::new().listing().commit.to_string();
    for url in ["", "/revision/main", &format!("/revision/{commit}")] {
        let reply = get(&format!(
            "{}/api/models/deltafin/austen-k3{url}",
            server.url()
        ));
        assert_eq!(reply.status, 200);
        assert_eq!(reply.json()["sha"], commit.as_str());
        assert_eq!(reply.header("x-repo-commit"), commit);
        let names = reply.json()["siblings"].as_array().unwrap().clone();
        assert!(names.iter().any(|s| s["rfilename"] == SHARD), "{names:?}");
    }
}

#[test]
fn the_tree_tells_true_sizes_and_digests() {
    let server = demo();
    let reply = get(&format!(
        "{}/api/models/deltafin/austen-k3/tree/main?recursive=true&expand=false",
        server.url()
    ));
    let tree = reply.json();
    let records = tree.as_array().unwrap();
    assert_eq!(records.len(), 14);
    for record in records {
        let bytes = on_disk(record["path"].as_str().unwrap());
        let digest = crate::terms::Digest(Sha256::digest(&bytes).into()).to_string();
        assert_eq!(record["size"], bytes.len());
        assert_eq!(record["lfs"]["oid"], digest.as_str());
        assert_eq!(record["oid"].as_str().unwrap().len(), 40);
    }
}

#[test]
fn resolve_states_the_facts_and_redirects_absolutely() {
    let server = demo();
    let bytes = on_disk(SHARD);
    let digest = crate::terms::Digest(Sha256::digest(&bytes).into());
    for method in ["HEAD", "GET"] {
        let reply = ask(
            method,
            &resolve_url(&server, SHARD),
            &[("range", "bytes=0-9")],
        );
        assert_eq!(reply.status, 302);
        assert_eq!(reply.header("x-linked-size"), bytes.len().to_string());
        assert_eq!(reply.header("x-linked-etag"), format!("\"{digest}\""));
        assert_eq!(reply.header("x-repo-commit").len(), 40);
        let location = reply.header("location");
        assert!(
            location.starts_with(&format!("{}/cdn/", server.url())),
            "{location}"
        );
        assert!(location.contains("Expires="), "{location}");
    }
    assert_eq!(server.stats().resolves, 2);
}

#[test]
fn ranges_are_exact_to_the_byte() {
    let server = demo();
    let bytes = on_disk(SHARD);
    let (url, total) = (signed(&server), bytes.len());
    // Longer than a piece, across a piece's edge, a single byte, the end.
    for (first, last) in [
        (0, total - 1),
        (262_143, 262_144),
        (7, 700_000),
        (0, 0),
        (total - 1, total - 1),
    ] {
        let range = format!("bytes={first}-{last}");
        let reply = ask("GET", &url, &[("range", &range)]);
        assert_eq!(reply.status, 206);
        assert_eq!(
            reply.header("content-range"),
            format!("bytes {first}-{last}/{total}")
        );
        assert_eq!(
            reply.header("content-length"),
            (last - first + 1).to_string()
        );
        assert!(reply.body == bytes[first..=last], "wrong bytes for {range}");
    }
    let clamped = ask("GET", &url, &[("range", "bytes=10-99999999")]);
    assert!(clamped.status == 206 && clamped.body == bytes[10..]);
    let tail = ask("GET", &url, &[("range", "bytes=-5")]);
    assert!(tail.status == 206 && tail.body == bytes[total - 5..]);
    let beyond = ask("GET", &url, &[("range", &format!("bytes={total}-"))]);
    assert_eq!(beyond.status, 416);
    assert_eq!(beyond.header("content-range"), format!("bytes */{total}"));
    let several = ask("GET", &url, &[("range", "bytes=0-1,4-5")]);
    assert!(several.status == 200 && several.body == bytes);
    let stale = [("range", "bytes=0-9"), ("if-range", "\"another\"")];
    let stale = ask("GET", &url, &stale);
    assert!(stale.status == 200 && stale.body == bytes);
    let fresh = ask("HEAD", &url, &[]);
    let etag = fresh.header("etag").to_owned();
    assert_eq!(fresh.header("content-length"), total.to_string());
    let fresh = ask("GET", &url, &[("range", "bytes=0-9"), ("if-range", &etag)]);
    assert!(fresh.status == 206 && fresh.body == bytes[..10]);
}

#[test]
fn range_headers_are_read_as_rfc_9110_says() {
    let part = |start, end| Asked::Part(ByteRange::new(start, end));
    for (text, want) in [
        ("bytes=0-9", part(0, 10)),
        ("BYTES = 3-3", part(3, 4)),
        ("bytes=90-", part(90, 100)),
        ("bytes=-1", part(99, 100)),
        ("bytes=-500", part(0, 100)),
        ("bytes=5-18446744073709551615", part(5, 100)),
        ("bytes=5-99999999999999999999999", part(5, 100)),
        ("bytes=100-", Asked::Beyond),
        ("bytes=99999999999999999999999-", Asked::Beyond),
        ("bytes=-0", Asked::Beyond),
        ("bytes=9-0", Asked::Whole),
        ("bytes=+1-5", Asked::Whole),
        ("bytes=1-+5", Asked::Whole),
        ("bytes=-", Asked::Whole),
        ("bytes=a-b", Asked::Whole),
        ("bytes", Asked::Whole),
        ("lines=1-2", Asked::Whole),
        ("bytes=0-1,2-3", Asked::Whole),
    ] {
        assert_eq!(parse_range(text, 100), want, "{text}");
    }
    assert_eq!(parse_range("bytes=0-", 0), Asked::Beyond);
}

#[test]
fn what_is_missing_is_named_by_the_hubs_codes() {
    let server = demo();
    for (path, code) in [
        ("/api/models/deltafin/other", "RepoNotFound"),
        (
            "/api/models/deltafin/austen-k3/tree/dev",
            "RevisionNotFound",
        ),
        (
            "/deltafin/austen-k3/resolve/main/nothing.bin",
            "EntryNotFound",
        ),
    ] {
        let reply = get(&format!("{}{path}", server.url()));
        assert_eq!((reply.status, reply.header("x-error-code")), (404, code));
    }
}

#[test]
fn no_path_climbs_out_of_the_folder() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    fs::create_dir_all(model.join("deep")).unwrap();
    fs::write(model.join("config.json"), "{}").unwrap();
    fs::write(model.join("deep/inner.bin"), "inner").unwrap();
    fs::write(model.join(".token"), "hidden").unwrap();
    fs::write(root.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(root.path(), model.join("up")).unwrap();
    let folder = Folder::open("a/b".parse().unwrap(), &model).unwrap();
    let server = start(Arc::new(folder), ShareOptions::default());
    for path in [
        "../secret",
        "%2e%2e/secret",
        "..%2fsecret",
        "deep/../../secret",
        "deep/%2e%2e/%2e%2e/secret",
        "up/secret",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        ".token",
        "deep",
        "",
    ] {
        let reply = get(&format!("{}/a/b/resolve/main/{path}", server.url()));
        assert_eq!(reply.status, 404, "{path}");
    }
    let inner = format!("{}/a/b/resolve/main/deep/inner.bin", server.url());
    let location = get(&inner).header("location").to_owned();
    assert_eq!(get(&location).body, b"inner");
}

#[test]
fn a_file_that_changed_is_not_sent_under_its_old_etag() {
    let model = tempfile::tempdir().unwrap();
    fs::write(model.path().join("config.json"), "{}").unwrap();
    let folder = Folder::open("a/b".parse().unwrap(), model.path()).unwrap();
    let server = start(Arc::new(folder), ShareOptions::default());
    let url = format!("{}/a/b/resolve/main/config.json", server.url());
    let location = get(&url).header("location").to_owned();
    assert_eq!(get(&location).status, 200);
    fs::write(model.path().join("config.json"), "{ }").unwrap();
    assert_eq!(get(&location).status, 503);
}

#[test]
fn a_folder_without_config_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let opened = Folder::open("a/b".parse().unwrap(), folder.path());
    assert!(matches!(opened, Err(ShareError::NoModel(_))));
    let opened = Folder::open("a/b".parse().unwrap(), &folder.path().join("no"));
    assert!(matches!(opened, Err(ShareError::Read { .. })));
}

#[test]
fn a_token_guards_the_hub_paths_and_a_signature_the_bytes() {
    let options = ShareOptions {
        token: Some(Secret::new("right")),
        ..ShareOptions::default()
    };
    let server = start(Arc::new(Embedded::new()), options);
    let url = resolve_url(&server, SHARD);
    assert_eq!(get(&url).status, 401);
    let wrong = ask("GET", &url, &[("authorization", "Bearer wrong")]);
    assert_eq!(wrong.status, 401);
    let right = ask("GET", &url, &[("authorization", "Bearer right")]);
    assert_eq!(right.status, 302);
    let location = right.header("location");
    assert_eq!(get(location).status, 200);
    for forged in [
        location.replace("00009-of", "00008-of"),
        location.replace("Expires=", "Expires=9"),
        location[..location.len() - 1].to_owned(),
        location.split('?').next().unwrap().to_owned(),
    ] {
        assert_eq!(get(&forged).status, 403, "{forged}");
    }
}

#[test]
fn signatures_are_those_of_another_hmac() {
    // The key is a secret's digest; the expected value was computed with
    // Python's hmac and hashlib.
    assert_eq!(
        Secret::new("Jefe").sign("what do ya want for nothing?"),
        "142c7fede7587937a94a739156b6e8176dc3ff6d5dc58b43b5700a605fac8df3"
    );
}

#[test]
fn links_are_read_and_slips_refused() {
    let link: Link = "50mbit,30ms".parse().unwrap();
    assert_eq!(link.bytes_per_s, Some(6_250_000.0));
    assert_eq!(link.delay, Duration::from_millis(30));
    assert_eq!(
        "10ms".parse::<Link>().unwrap().delay,
        Duration::from_millis(10)
    );
    for wrong in [
        "",
        "fast",
        "50",
        "mbit",
        "50mbit,50mbit",
        "0kbit",
        "1ms,2ms",
        "9999999s",
    ] {
        assert!(wrong.parse::<Link>().is_err(), "{wrong}");
    }
}

#[test]
fn a_shaped_link_is_as_slow_as_it_says() {
    let options = ShareOptions {
        link: Some("16mbit,100ms".parse().unwrap()),
        ..ShareOptions::default()
    };
    let server = start(Arc::new(Embedded::new()), options);
    let url = signed(&server);
    let started = Instant::now();
    let range = ("range", "bytes=0-999999");
    let two: Vec<_> = (0..2)
        .map(|_| {
            let url = url.clone();
            std::thread::spawn(move || ask("GET", &url, &[range]).body.len())
        })
        .collect();
    let moved: usize = two.into_iter().map(|t| t.join().unwrap()).sum();
    assert_eq!(moved, 2_000_000);
    // Two million bytes at two million a second, both connections over the one link.
    assert!(started.elapsed() >= Duration::from_millis(1_000));
}

/// Serves `/` and `/large` under `limits` while `body` runs.
fn bounded(limits: super::Limits, body: impl FnOnce(std::net::SocketAddr)) {
    const LARGE: &[u8] = &[7; 64 << 20];
    let listener = std::net::TcpListener::bind(ANY).unwrap();
    listener.set_nonblocking(true).unwrap();
    let addr = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let router = axum::Router::new()
                .route("/", axum::routing::get(|| async { "here" }))
                .route("/large", axum::routing::get(|| async { LARGE }));
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            super::serve(listener, router, limits, async {
                let _ = stopped.await;
            })
            .await;
        });
    });
    body(addr);
    stop.send(()).unwrap();
    server.join().unwrap();
}

fn is_served(addr: std::net::SocketAddr) {
    let mut next = TcpStream::connect(addr).unwrap();
    next.set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    next.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut reply = String::new();
    next.read_to_string(&mut reply).unwrap();
    assert!(reply.ends_with("here"), "{reply}");
}

#[test]
fn a_client_that_never_ends_its_headers_is_let_go() {
    let limits = super::Limits {
        connections: 1,
        headers: Duration::from_millis(200),
        ..super::Limits::default()
    };
    // The only place is taken by one who drips; the next is served all the same.
    bounded(limits, |addr| {
        let mut slow = TcpStream::connect(addr).unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost:").unwrap();
        is_served(addr);
    });
}

#[test]
fn a_client_that_takes_nothing_of_its_reply_is_let_go() {
    let limits = super::Limits {
        connections: 1,
        write_stall: Duration::from_millis(200),
        ..super::Limits::default()
    };
    bounded(limits, |addr| {
        let mut deaf = TcpStream::connect(addr).unwrap();
        deaf.write_all(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        is_served(addr);
    });
}

#[test]
fn thousands_of_silent_connections_do_not_keep_others_out() {
    let limits = super::Limits {
        connections: 50,
        headers: Duration::from_millis(100),
        ..super::Limits::default()
    };
    bounded(limits, |addr| {
        // Two thousand, of which no more at once than leaves descriptors to the other tests.
        for _ in 0..5 {
            let silent: Vec<TcpStream> = (0..400)
                .map(|_| TcpStream::connect(addr).unwrap())
                .collect();
            is_served(addr);
            drop(silent);
        }
    });
}

#[test]
fn stopping_ends_the_listening_and_lets_a_reply_finish() {
    let server = demo();
    let addr = server.addr();
    server.stop();
    assert!(TcpStream::connect(addr).is_err());
}
