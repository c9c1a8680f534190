//! Hubs that hang, readers that leave, and signals while somebody reads.

use std::io::Read;
use std::io::Write;
use std::net::Shutdown;
use std::net::SocketAddr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use deltafin::share;

use super::fetch_core;
use super::hub;
use super::limit::Stream;
use super::limit::content;
use super::limit::events;
use super::outlive::terminate;
use super::serve;
use super::stays_alive;
use super::together::post;

const CHAT: &str = "/v1/chat/completions";

/// A wire to a hub that can be held up: what is on its way then stays there.
struct Wire {
    addr: SocketAddr,
    held: Arc<AtomicBool>,
}

impl Wire {
    fn to(far: SocketAddr) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let held = Arc::new(AtomicBool::new(false));
        let hold = Arc::clone(&held);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(far) else {
                    continue;
                };
                let ways = [
                    (near.try_clone().unwrap(), far.try_clone().unwrap()),
                    (far, near),
                ];
                for (from, to) in ways {
                    let hold = Arc::clone(&hold);
                    std::thread::spawn(move || carry(from, to, &hold));
                }
            }
        });
        Wire { addr, held }
    }

    fn hold(&self, held: bool) {
        self.held.store(held, Ordering::SeqCst);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, held: &AtomicBool) {
    let mut buffer = [0; 16 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        while held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // Either side may be gone already.
    let _ = to.shutdown(Shutdown::Write);
}

fn ask(stream: bool, max_tokens: usize) -> Value {
    // No token of structure may come, and so no end.
    let bias: serde_json::Map<String, Value> = (2048..2064)
        .map(|id| (id.to_string(), json!(-100)))
        .collect();
    json!({
        "messages": [{ "role": "user", "content": "Tell a long story." }], "seed": 5,
        "max_tokens": max_tokens, "reasoning_effort": "none", "stream": stream, "logit_bias": bias,
    })
}

/// Reads on until the reply's first words have come.
fn first_words(stream: &mut Stream) -> Vec<String> {
    let mut lines = Vec::new();
    while content(&events(&lines)).is_empty() {
        lines.extend(stream.until("data: "));
    }
    lines
}

#[test]
fn a_hub_that_hangs_is_outlasted() {
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    let far = hub(None);
    let addr = far.url().trim_start_matches("http://").parse().unwrap();
    let wire = Wire::to(addr);
    let url = format!("http://{}", wire.addr);
    let model = share::Embedded::REPO;
    let mut options = vec!["--reserve", "0", "--model", model, "--hub", &url];
    // Nothing is kept, so that no token comes without the hub.
    options.extend(["--cache", "0", "--ram", "36MB"]);
    let served = serve(home.path(), &options);
    let mut stream = Stream::open(&served.addr, &ask(true, 40));
    let mut lines = first_words(&mut stream);
    wire.hold(true);
    // What came before the wire was held is read, and from then on comments alone.
    let quiet = Duration::from_millis(500);
    let socket = stream.0.get_ref().try_clone().unwrap();
    socket.set_read_timeout(Some(quiet)).unwrap();
    let mut before = Vec::new();
    let _ = stream.0.read_to_end(&mut before);
    lines.extend(
        String::from_utf8(before)
            .unwrap()
            .lines()
            .map(str::to_owned),
    );
    socket
        .set_read_timeout(Some(Duration::from_secs(15)))
        .unwrap();
    stays_alive(stream.0.get_mut(), Instant::now(), false);
    wire.hold(false);
    socket
        .set_read_timeout(Some(Duration::from_secs(300)))
        .unwrap();
    lines.extend(stream.until("data: [DONE]"));
    let whole = post(&served.addr, CHAT, &ask(false, 40)).1;
    let whole = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(content(&events(&lines)), whole);
}

#[test]
fn a_reader_who_leaves_stops_what_the_hub_is_asked() {
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    let far = hub(Some("10ms"));
    let url = far.url();
    let model = share::Embedded::REPO;
    let mut options = vec!["--reserve", "0", "--model", model, "--hub", &url];
    options.extend(["--cache", "0", "--ram", "36MB"]);
    let served = serve(home.path(), &options);
    for streamed in [true, false] {
        let mut stream = Stream::open(&served.addr, &ask(streamed, 3000));
        // The first byte of a whole reply is white space that keeps it alive.
        stream.0.read_exact(&mut [0; 1]).unwrap();
        let began = far.stats().body_requests;
        let since = Instant::now();
        while far.stats().body_requests < began + 200 {
            assert!(
                since.elapsed() < Duration::from_secs(120),
                "nothing is asked"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(stream);
        std::thread::sleep(Duration::from_secs(2));
        let left = far.stats();
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(far.stats(), left, "streamed: {streamed}");
    }
}

#[test]
fn a_signal_lets_a_reader_have_more_then_ends_the_stream_and_keeps_its_state() {
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    let far = hub(Some("60ms"));
    let url = far.url();
    let model = share::Embedded::REPO;
    let mut options = vec!["--reserve", "0", "--model", model, "--hub", &url];
    options.extend(["--cache", "0", "--ram", "36MB"]);
    let served = serve(home.path(), &options);
    let book = "It was the best of times, it was the worst of times. ".repeat(12);
    let mut first = ask(true, 3000);
    first["messages"][0]["content"] = json!(book);
    let mut stream = Stream::open(&served.addr, &first);
    let mut lines = first_words(&mut stream);
    let began = content(&events(&lines));
    let ended = std::thread::spawn(move || terminate(served));
    lines.extend(stream.until("data: [DONE]"));
    let (code, took) = ended.join().unwrap();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(80), "{took:?}");
    let events = events(&lines);
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["code"], "server_stopping", "{error}");
    let said = content(&events);
    assert!(said.len() > began.len(), "{said:?} after {began:?}");
    // The next process, over a hub without a way to it: what was read and said is not read again.
    let near = hub(None);
    let url = near.url();
    let options = ["--reserve", "0", "--model", model, "--hub", &url];
    let served = serve(home.path(), &options);
    let next = json!({
        "messages": [
            { "role": "user", "content": book },
            { "role": "assistant", "content": said },
            { "role": "user", "content": "Go on." },
        ],
        "seed": 3, "max_tokens": 2, "reasoning_effort": "none",
    });
    let (_, reply) = post(&served.addr, CHAT, &next);
    let usage = &reply["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    let computed = prompt - cached.unwrap();
    assert!(prompt > 150, "{usage}");
    assert!(computed < 60, "{computed} rows of {prompt} computed again");
}
