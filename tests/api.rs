//! The server, driven through the program: by the clients people use, by many at once, by hostile
//! ones, and with a hub so slow that only a timer can keep a client.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on fails where it stands"
)]

#[path = "api/batches.rs"]
mod batches;
#[path = "api/clients.rs"]
mod clients;
#[path = "api/hostile.rs"]
mod hostile;
#[path = "api/hours.rs"]
mod hours;
#[path = "api/limit.rs"]
mod limit;
#[path = "api/outlive.rs"]
mod outlive;
#[path = "api/together.rs"]
mod together;

use std::io::BufRead;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::share;

/// `deltafin serve`, ended with the test.
struct Served {
    child: Child,
    addr: String,
    _home: Option<tempfile::TempDir>,
}

impl Drop for Served {
    fn drop(&mut self) {
        // Already gone is as good as ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.env_clear();
    command
}

/// Starts the server and waits until it says that the model is ready.
fn serve(home: &Path, more: &[&str]) -> Served {
    serve_until("is ready", home, more)
}

/// Starts the server and waits until it says so, where it listens, on a line of its own.
fn serve_until(said: &str, home: &Path, more: &[&str]) -> Served {
    let mut child = program()
        .args(["serve", "--port", "0", "--threads", "1", "--home"])
        .arg(home)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let ready = lines
        .by_ref()
        .map(Result::unwrap)
        .find(|line| line.contains(said))
        .expect("the server never became ready");
    let addr = ready.split("http://").nth(1).unwrap();
    let addr = addr.split('/').next().unwrap().to_owned();
    // Whoever writes to a pipe that nobody reads stops in the end.
    std::thread::spawn(move || lines.for_each(drop));
    Served {
        child,
        addr,
        _home: None,
    }
}

/// Serves the demo's model: what is missing is streamed from its loopback hub.
fn serve_demo(more: &[&str]) -> Served {
    let home = tempfile::tempdir().unwrap();
    let options = [&["--model", "demo", "--reserve", "0"], more].concat();
    let mut served = serve(home.path(), &options);
    served._home = Some(home);
    served
}

/// Serves the demo's model once it is installed, with no network at all.
fn serve_installed() -> Served {
    let home = tempfile::tempdir().unwrap();
    let options = ["--model", share::Embedded::REPO, "--reserve", "0"];
    let hub = hub(None);
    let fetched = program()
        .arg("fetch")
        .args(options)
        .arg("--hub")
        .arg(hub.url())
        .arg("--home")
        .arg(home.path())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(fetched.success());
    drop(hub);
    let mut served = serve(home.path(), &[&options[..], &["--offline"]].concat());
    served._home = Some(home);
    served
}

/// The demo's hub, over this link.
fn hub(link: Option<&str>) -> share::Server {
    let backend: Arc<dyn share::Backend> = Arc::new(share::Embedded::new());
    let options = share::ShareOptions {
        link: link.map(|link| link.parse().unwrap()),
        ..share::ShareOptions::default()
    };
    share::Server::start("127.0.0.1:0".parse().unwrap(), backend, options).unwrap()
}

/// A count or duration that the environment may raise.
fn setting(name: &str, default: u64) -> u64 {
    let said = std::env::var(name).ok();
    said.map_or(default, |said| said.parse().unwrap())
}

/// Says it where it is seen even though the test passes.
fn skipped(why: &str) {
    let mut stderr = std::io::stderr();
    stderr
        .write_all(format!("SKIPPED: {why}\n").as_bytes())
        .unwrap();
}

#[test]
fn a_hub_that_takes_its_time_is_bridged_by_comments_and_left_when_the_reader_leaves() {
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    // To resolve and then to fetch takes longer than the stream is watched.
    let link = format!("{}s", setting("DELTAFIN_API_WATCHED_SECONDS", 18) * 2 / 3);
    let slow = hub(Some(&link));
    let url = slow.url();
    let options = [
        "--reserve",
        "0",
        "--model",
        share::Embedded::REPO,
        "--hub",
        &url,
    ];
    let served = serve(home.path(), &options);
    let mut stream = TcpStream::connect(&served.addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(15)))
        .unwrap();
    let body = r#"{"messages":[{"role":"user","content":"Who are you?"}],"stream":true}"#;
    let asked = Instant::now();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    stays_alive(&mut stream, asked, true);
    drop(stream);
    let idle = Instant::now();
    while !health(&served.addr).contains("\"running\":0") {
        assert!(
            idle.elapsed() < Duration::from_secs(20),
            "it works on for nobody"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    // Requests that were on their way when it was left arrive within the promised two seconds.
    std::thread::sleep(Duration::from_secs(2));
    let asked_for = slow.stats();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(slow.stats().body_requests, asked_for.body_requests);
}

/// The core comes over a fast link, so that only experts are waited for.
fn fetch_core(hub: &share::Server, home: &Path) {
    let fetched = program()
        .args([
            "fetch",
            "--core",
            "--reserve",
            "0",
            "--model",
            share::Embedded::REPO,
        ])
        .arg("--hub")
        .arg(hub.url())
        .arg("--home")
        .arg(home)
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(fetched.success());
}

/// Watches a stream for 18 seconds in which no token comes; from its first byte on, if it has just
/// been asked for.
fn stays_alive(stream: &mut TcpStream, asked: Instant, first: bool) {
    let mut buffer = [0; 4096];
    let mut comments = 0;
    let mut last = asked;
    let watched = Duration::from_secs(setting("DELTAFIN_API_WATCHED_SECONDS", 18));
    while asked.elapsed() < watched {
        let n = stream
            .read(&mut buffer)
            .expect("silent for longer than the promise");
        assert!(n > 0, "the stream ended");
        let silent = last.elapsed();
        last = Instant::now();
        if first && comments == 0 {
            assert!(
                silent < Duration::from_secs(1),
                "first byte after {silent:?}"
            );
        }
        assert!(silent < Duration::from_secs(10), "silent for {silent:?}");
        let text = String::from_utf8_lossy(&buffer[..n]);
        // The first chunk of a stream names a role and has no text yet.
        let silent =
            text.matches(r#""content":""#).count() == text.matches(r#""content":"""#).count();
        assert!(silent, "a token came: {text}");
        comments += text.lines().filter(|line| line.starts_with(": ")).count();
    }
    assert!(comments >= 2, "{comments} comments");
}

fn health(addr: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(
        stream,
        "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}
