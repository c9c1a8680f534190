//! The server, driven through the program by OpenAI's own Python client, and a hub so slow that
//! only a timer can keep a client.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on fails where it stands; one that is skipped says so"
)]

use std::io::BufRead;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::path::PathBuf;
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
        .find(|line| line.contains("is ready"))
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

fn serve_demo() -> Served {
    let home = tempfile::tempdir().unwrap();
    let mut served = serve(home.path(), &["--model", "demo", "--reserve", "0"]);
    served._home = Some(home);
    served
}

/// A Python with OpenAI's client: named in the environment, or made once for all tests.
///
/// Where there is no Python or no network there is nothing to test with; where `CI` is set there
/// has to be.
fn python() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("DELTAFIN_TEST_PYTHON") {
        return Some(given.into());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let python = folder.join("bin/python");
    let works = |python: &Path| {
        let mut import = Command::new(python);
        import.args(["-c", "import openai"]).stderr(Stdio::null());
        import.status().is_ok_and(|status| status.success())
    };
    if !works(&python) {
        let mut make = Command::new("python3");
        make.args(["-m", "venv"]).arg(&folder);
        let made = make.status().is_ok_and(|status| status.success());
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "openai==3.57.0"]);
        let installed = made && install.status().is_ok_and(|status| status.success());
        if !installed || !works(&python) {
            assert!(
                std::env::var_os("CI").is_none(),
                "the OpenAI client cannot be installed: python3 with venv and pip is needed"
            );
            eprintln!("skipped: no Python with OpenAI's client");
            return None;
        }
    }
    Some(python)
}

#[test]
fn openais_python_client_gets_what_it_asks_for_streamed_and_not() {
    let Some(python) = python() else {
        return;
    };
    let served = serve_demo();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/clients/openai_python.py");
    let ran = Command::new(python)
        .arg(script)
        .arg(format!("http://{}", served.addr))
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    assert!(ran.status.success(), "{out}{err}");
}

#[test]
fn a_hub_that_takes_its_time_is_bridged_by_comments_and_left_when_the_reader_leaves() {
    let home = tempfile::tempdir().unwrap();
    let backend: Arc<dyn share::Backend> = Arc::new(share::Embedded::new());
    let start = |link: Option<&str>| {
        let options = share::ShareOptions {
            link: link.map(|link| link.parse().unwrap()),
            ..share::ShareOptions::default()
        };
        share::Server::start(
            "127.0.0.1:0".parse().unwrap(),
            Arc::clone(&backend),
            options,
        )
        .unwrap()
    };
    fetch_core(&start(None), home.path());
    // To resolve and then to fetch takes longer than the stream is watched.
    let slow = start(Some("12s"));
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
    stays_alive(&mut stream, asked);
    drop(stream);
    let idle = Instant::now();
    while !health(&served.addr).contains("\"running\":0") {
        assert!(
            idle.elapsed() < Duration::from_secs(20),
            "it works on for nobody"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
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

/// Watches a stream for 18 seconds in which no token comes.
fn stays_alive(stream: &mut TcpStream, asked: Instant) {
    let mut buffer = [0; 4096];
    let mut comments = 0;
    let mut last = asked;
    while asked.elapsed() < Duration::from_secs(18) {
        let n = stream
            .read(&mut buffer)
            .expect("silent for longer than the promise");
        assert!(n > 0, "the stream ended");
        let silent = last.elapsed();
        last = Instant::now();
        if comments == 0 {
            assert!(
                silent < Duration::from_secs(1),
                "first byte after {silent:?}"
            );
        }
        assert!(silent < Duration::from_secs(10), "silent for {silent:?}");
        let text = String::from_utf8_lossy(&buffer[..n]);
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
