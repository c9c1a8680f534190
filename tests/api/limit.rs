//! The limit of bytes from the network: what runs pauses there, keeps its state, and goes on.

use std::io::BufRead;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use super::outlive::Place;
use super::outlive::begin;
use super::outlive::kill;
use super::outlive::request;
use super::outlive::terminate;
use super::outlive::text;
use super::outlive::tokens;
use super::outlive::wait_for_end;
use super::program;
use super::together::post;

const CHAT: &str = "/v1/chat/completions";

fn ask(stream: bool) -> Value {
    json!({
        "messages": [{ "role": "user", "content": "Tell a long story." }], "seed": 5, "max_tokens": 60,
        "reasoning_effort": "none", "stream": stream,
    })
}

/// A stream that is read line by line.
pub(super) struct Stream(pub(super) BufReader<TcpStream>);

impl Stream {
    pub(super) fn open(addr: &str, body: &Value) -> Stream {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let body = body.to_string();
        write!(
            stream,
            "POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        Stream(BufReader::new(stream))
    }

    /// Reads on until a line begins so; all that was read, that line last.
    pub(super) fn until(&mut self, begin: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let read = self.0.read_line(&mut line).unwrap();
            assert!(read > 0, "it ended without {begin:?}: {lines:?}");
            let found = line.starts_with(begin);
            lines.push(line.trim_end().to_owned());
            if found {
                return lines;
            }
        }
    }
}

/// The events among some lines.
pub(super) fn events(lines: &[String]) -> Vec<Value> {
    let data = lines.iter().filter_map(|line| line.strip_prefix("data: "));
    let events = data.filter(|data| *data != "[DONE]");
    events.map(|e| serde_json::from_str(e).unwrap()).collect()
}

pub(super) fn content(events: &[Value]) -> String {
    let pieces = events.iter();
    pieces
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str())
        .collect()
}

fn wait_for_pause(addr: &str) -> Value {
    let began = Instant::now();
    loop {
        let health = request(addr, "GET", "/health").1;
        if health["now"]["paused"] == true {
            return health;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{health}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn at_the_limit_a_generation_pauses_says_so_and_goes_on_to_the_same_text() {
    let calm = Place::new(None);
    let served = calm.serve(&[]);
    let (_, whole) = post(&served.addr, CHAT, &ask(false));
    let needed = whole["usage"]["deltafin"]["bytes"]["hub"].as_u64().unwrap();
    kill(served);

    let place = Place::new(None);
    let first = (needed / 3).to_string();
    let served = place.serve(&["--max-bytes", &first]);
    let limits = |body: &Value| post(&served.addr, "/limits", body);
    for (wrong, param) in [
        (json!({}), "max_bytes"),
        (json!({ "max_bytes": -1 }), "max_bytes"),
        (json!({ "max_bytes": "lots" }), "max_bytes"),
        (json!({ "max_bytes": 1, "wibble": 2 }), "wibble"),
    ] {
        let (status, reply) = limits(&wrong);
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)));
    }
    let mut stream = Stream::open(&served.addr, &ask(true));
    let mut lines = stream.until(": paused: the limit of ");
    let health = wait_for_pause(&served.addr);
    assert_eq!(health["limits"]["max_bytes"], json!(needed / 3));
    assert!(health["limits"]["fetched_bytes"].as_u64() <= Some(needed / 3));
    // Some more, which is not enough, and then as much as it takes.
    let second = needed * 19 / 20;
    let (status, told) = limits(&json!({ "max_bytes": second }));
    assert_eq!((status, &told["max_bytes"]), (200, &json!(second)));
    let moved = || request(&served.addr, "GET", "/limits").1["fetched_bytes"].as_u64();
    let began = Instant::now();
    while moved() < Some(needed / 2) {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", moved());
        std::thread::sleep(Duration::from_millis(20));
    }
    wait_for_pause(&served.addr);
    assert!(moved() <= Some(second), "more than was allowed");
    assert_eq!(limits(&json!({ "max_bytes": null })).0, 200);
    lines.extend(stream.until("data: [DONE]"));
    let events = events(&lines);
    assert_eq!(
        content(&events),
        whole["choices"][0]["message"]["content"].as_str().unwrap()
    );
    let last = events.last().unwrap();
    assert_eq!(
        last["choices"][0]["finish_reason"],
        whole["choices"][0]["finish_reason"]
    );
    assert_eq!(
        request(&served.addr, "GET", "/health").1["now"]["paused"],
        false
    );
}

/// Waits until `/health` says so, which it then returns.
fn wait_until(addr: &str, field: &str) -> Value {
    let began = Instant::now();
    loop {
        let health = request(addr, "GET", "/health").1;
        if health[field] == true {
            return health;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{health}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn at_the_limit_the_core_waits_for_a_higher_one() {
    let place = Place::empty();
    let served = place.serve_until("listening on", &["--max-bytes", "3MB"]);
    let health = wait_until(&served.addr, "paused");
    assert_eq!(health["ready"], false);
    assert_eq!(health["limits"]["max_bytes"], 3_000_000);
    let fetched = health["limits"]["fetched_bytes"].as_u64().unwrap();
    assert!((1_000_000..=3_000_000).contains(&fetched), "{health}");
    let (status, reply) = post(&served.addr, CHAT, &ask(false));
    assert_eq!(status, 503);
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(message.contains("paused: the limit of 3"), "{message}");
    let (status, limits) = request(&served.addr, "GET", "/limits");
    assert_eq!((status, &limits["max_bytes"]), (200, &json!(3_000_000)));
    let more = json!({ "max_bytes": null });
    assert_eq!(post(&served.addr, "/limits", &more).0, 200);
    let ready = wait_until(&served.addr, "ready");
    assert_eq!(ready["limits"]["max_bytes"], Value::Null);
    assert_eq!(post(&served.addr, CHAT, &ask(false)).0, 200);
    kill(served);
}

#[test]
fn a_core_that_waits_at_the_limit_can_be_stopped_and_is_gone_on_with() {
    let fetched = |served: &super::Served| {
        assert_eq!(post(&served.addr, CHAT, &ask(false)).0, 200);
        let limits = request(&served.addr, "GET", "/limits").1;
        limits["fetched_bytes"].as_u64().unwrap()
    };
    let calm = Place::empty();
    let served = calm.serve(&[]);
    let whole = fetched(&served);
    kill(served);

    let place = Place::empty();
    let served = place.serve_until("listening on", &["--max-bytes", "6MB"]);
    wait_until(&served.addr, "paused");
    let (code, took) = terminate(served);
    assert_eq!(code, Some(130));
    assert!(took < Duration::from_secs(10), "{took:?}");
    let served = place.serve(&[]);
    // What the limit cut off on its way is fetched again, a few files of less than a megabyte each.
    let rest = fetched(&served);
    kill(served);
    assert!(rest < whole - 1_000_000, "{rest} of {whole}");
}

#[test]
fn what_is_paused_outlives_the_process_and_is_gone_on_with() {
    let background = json!({
        "input": "Tell a long story.", "background": true, "seed": 5, "temperature": 1.0,
        "max_output_tokens": 60, "reasoning": { "effort": "none" },
    });
    let calm = Place::new(None);
    let served = calm.serve(&["--states", "0"]);
    let id = begin(&served.addr, &background);
    let whole = wait_for_end(&served.addr, &id);
    let expected = tokens(calm.home.path(), &id);
    let moved = request(&served.addr, "GET", "/limits").1;
    let needed = moved["fetched_bytes"].as_u64().unwrap();
    kill(served);

    let place = Place::new(None);
    let home = place.home.path();
    let limit = (needed * 19 / 20).to_string();
    let served = place.serve(&["--states", "0", "--max-bytes", &limit]);
    let id = begin(&served.addr, &background);
    wait_for_pause(&served.addr);
    let state = home.join("jobs-v1").join(&id).join("state");
    let began = Instant::now();
    while !state.is_file() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no state was kept"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    // Without any warning.
    kill(served);
    let made = tokens(home, &id);
    assert!(!made.is_empty() && made.len() < expected.len() && expected.starts_with(&made));
    let served = place.serve(&["--states", "0"]);
    let after = wait_for_end(&served.addr, &id);
    assert_eq!(tokens(home, &id), expected);
    assert_eq!(text(&after), text(&whole));
}

#[test]
fn a_signal_ends_what_is_paused_in_order() {
    let place = Place::new(None);
    let served = place.serve(&["--max-bytes", "200kB"]);
    let mut stream = Stream::open(&served.addr, &ask(true));
    wait_for_pause(&served.addr);
    let whole = std::thread::spawn({
        let addr = served.addr.clone();
        move || {
            let mut stream = TcpStream::connect(addr).unwrap();
            let body = ask(false).to_string();
            let length = body.len();
            write!(
                stream,
                "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .unwrap();
            let mut reply = Vec::new();
            let ended = stream.read_to_end(&mut reply);
            (ended, String::from_utf8(reply).unwrap())
        }
    });
    let ended = std::thread::spawn(move || terminate(served));
    let lines = stream.until("data: [DONE]");
    let events = events(&lines);
    assert_eq!(
        events.last().unwrap()["error"]["code"],
        "server_stopping",
        "{lines:?}"
    );
    let (_, reply) = whole.join().unwrap();
    // White space kept it alive; then it was cut before its last chunk, so that nothing parses.
    assert!(
        !reply.ends_with("0\r\n\r\n") && !reply.contains("choices"),
        "{reply}"
    );
    assert_eq!(ended.join().unwrap().0, Some(0));
}

#[test]
fn a_command_that_reaches_the_limit_keeps_its_session_and_says_how_to_go_on() {
    let place = Place::new(None);
    let calm = Place::new(None);
    let talk = |place: &Place, more: &[&str]| {
        let told = program()
            .args(["stream", "--json", "--session", "talk", "--reserve", "0"])
            .args(["--threads", "1", "--model", deltafin::share::Embedded::REPO])
            .args(["--hub", &place.url(), "--home"])
            .arg(place.home.path())
            .args(more)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said: Value = serde_json::from_slice(&told.stdout).unwrap();
        let stderr = String::from_utf8(told.stderr).unwrap();
        (told.status.code(), said, stderr)
    };
    let draw = [
        "Tell a long story.",
        "--max-tokens",
        "60",
        "--temperature",
        "1",
        "--seed",
        "5",
        "--reasoning-effort",
        "none",
    ];
    let (code, whole, _) = talk(&calm, &draw);
    assert_eq!(code, Some(0));
    let needed = whole["bytes"]["hub"].as_u64().unwrap();
    let prompt = whole["prompt_ids"].as_array().unwrap().len();

    let limit = (needed * 19 / 20).to_string();
    let (code, paused, stderr) = talk(&place, &[&draw[..], &["--max-bytes", &limit]].concat());
    assert_eq!(code, Some(130), "{stderr}");
    assert!(
        stderr.contains("paused: the limit of") && stderr.contains("larger --max-bytes"),
        "{stderr}"
    );
    let made = paused["token_ids"].as_array().unwrap().len();
    assert!(made > 0, "{paused}");
    let (code, rest, stderr) = talk(&place, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(rest["text"], whole["text"]);
    // All but the row at which it was paused comes from the state that was kept.
    let cached = rest["rows"]["cached"].as_u64().unwrap();
    assert_eq!(cached, (prompt + made - 1) as u64, "{rest}");
}
