//! What outlives the server: responses, and the states of conversations.

use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use deltafin::share;

use super::Served;
use super::fetch_core;
use super::hub;
use super::serve_until;
use super::together::post;

const RESPONSES: &str = "/v1/responses";

pub(super) fn request(addr: &str, method: &str, path: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(300)))
        .unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    (
        head[9..12].parse().unwrap(),
        serde_json::from_str(body).unwrap(),
    )
}

/// A home with the demo model's core in it, and a hub for the rest.
pub(super) struct Place {
    pub(super) home: tempfile::TempDir,
    hub: share::Server,
}

impl Place {
    pub(super) fn new(link: Option<&str>) -> Place {
        let home = tempfile::tempdir().unwrap();
        fetch_core(&hub(None), home.path());
        let hub = hub(link);
        Place { home, hub }
    }

    /// Where its hub is.
    pub(super) fn url(&self) -> String {
        self.hub.url()
    }

    /// Without the core.
    pub(super) fn empty() -> Place {
        let home = tempfile::tempdir().unwrap();
        Place {
            home,
            hub: hub(None),
        }
    }

    pub(super) fn serve(&self, more: &[&str]) -> Served {
        self.serve_until("is ready", more)
    }

    pub(super) fn serve_until(&self, said: &str, more: &[&str]) -> Served {
        let url = self.url();
        let options = [
            "--reserve",
            "0",
            "--model",
            share::Embedded::REPO,
            "--hub",
            &url,
        ];
        serve_until(said, self.home.path(), &[&options[..], more].concat())
    }
}

/// `kill -9`.
pub(super) fn kill(mut served: Served) {
    served.child.kill().unwrap();
    served.child.wait().unwrap();
}

/// SIGTERM; how it ended, and how long that took.
pub(super) fn terminate(mut served: Served) -> (Option<i32>, Duration) {
    let began = Instant::now();
    let sent = Command::new("kill")
        .args(["-TERM", &served.child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
    let status = served.child.wait().unwrap();
    (status.code(), began.elapsed())
}

fn long_ask() -> Value {
    json!({
        "input": "Tell a long story.", "background": true, "seed": 5, "temperature": 1.0,
        "max_output_tokens": 300, "reasoning": { "effort": "none" },
    })
}

pub(super) fn begin(addr: &str, ask: &Value) -> String {
    let (status, response) = post(addr, RESPONSES, ask);
    assert_eq!(status, 200, "{response}");
    assert_eq!(response["status"], "queued");
    response["id"].as_str().unwrap().to_owned()
}

fn ids_file(home: &Path, id: &str) -> PathBuf {
    home.join("jobs-v1").join(id).join("ids")
}

pub(super) fn tokens(home: &Path, id: &str) -> Vec<u32> {
    let bytes = std::fs::read(ids_file(home, id)).unwrap_or_default();
    let (records, _) = bytes.as_chunks::<8>();
    let id = |r: &[u8; 8]| u32::from_le_bytes([r[0], r[1], r[2], r[3]]);
    records.iter().map(id).collect()
}

fn wait_for_tokens(home: &Path, id: &str, count: usize) {
    let began = Instant::now();
    while tokens(home, id).len() < count {
        assert!(began.elapsed() < Duration::from_secs(120), "no tokens come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn wait_for_end(addr: &str, id: &str) -> Value {
    let began = Instant::now();
    loop {
        let (status, response) = request(addr, "GET", &format!("{RESPONSES}/{id}"));
        assert_eq!(status, 200, "{response}");
        if !matches!(
            response["status"].as_str().unwrap(),
            "queued" | "in_progress"
        ) {
            return response;
        }
        assert!(began.elapsed() < Duration::from_secs(240), "it never ends");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(super) fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter();
    items
        .filter_map(|item| item["content"][0]["text"].as_str())
        .collect()
}

#[test]
fn a_killed_background_response_ends_with_the_ids_of_an_undisturbed_run() {
    let calm = Place::new(None);
    let served = calm.serve(&[]);
    let undisturbed = begin(&served.addr, &long_ask());
    let whole = wait_for_end(&served.addr, &undisturbed);
    let expected = tokens(calm.home.path(), &undisturbed);
    assert!(expected.len() > 30, "{} tokens", expected.len());
    kill(served);
    // Another home, whose experts come slowly; and no states on disk, so that what is computed
    // again is computed again.
    let place = Place::new(Some("20ms"));
    let home = place.home.path();
    let serve = || place.serve(&["--states", "0"]);
    let mut served = serve();
    let id = begin(&served.addr, &long_ask());
    let mut inside = 0;
    for least in [1, expected.len() / 3, expected.len() / 2] {
        wait_for_tokens(home, &id, least);
        kill(served);
        inside += u32::from(tokens(home, &id).len() < expected.len());
        served = serve();
    }
    assert!(inside > 0, "every kill came after the end");
    let after = wait_for_end(&served.addr, &id);
    assert_eq!(after["id"], *id);
    assert_eq!(tokens(home, &id), expected);
    assert_eq!(after["status"], whole["status"]);
    assert_eq!(text(&after), text(&whole));
    for count in ["input_tokens", "output_tokens", "output_tokens_details"] {
        assert_eq!(after["usage"][count], whole["usage"][count], "{count}");
    }
    // Its stream can be joined from its beginning, by a process that heard none of it.
    kill(served);
    let served = serve();
    let mut stream = TcpStream::connect(&served.addr).unwrap();
    let path = format!("{RESPONSES}/{id}?stream=true");
    write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let data = reply.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|d| serde_json::from_str(d).unwrap()).collect();
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], n);
    }
    let said = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta");
    let said: String = said.map(|e| e["delta"].as_str().unwrap()).collect();
    assert_eq!(said, text(&whole));
    assert_eq!(events.last().unwrap()["response"], after);
}

#[test]
fn what_is_stored_is_there_after_a_kill_and_what_is_deleted_is_not() {
    let place = Place::new(None);
    let served = place.serve(&[]);
    let ask = |input: &str| json!({ "input": input, "max_output_tokens": 8, "seed": 1 });
    let one = post(&served.addr, RESPONSES, &ask("Who are you?")).1;
    let two = post(&served.addr, RESPONSES, &ask("And why?")).1;
    let unkept = json!({ "input": "Hm", "max_output_tokens": 4, "store": false });
    let unkept = post(&served.addr, RESPONSES, &unkept).1;
    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    let mut next = ask("Go on.");
    next["previous_response_id"] = one["id"].clone();
    let went_on = post(&served.addr, RESPONSES, &next).1;
    assert_eq!(request(&served.addr, "DELETE", &path(&two)).0, 200);
    kill(served);
    let served = place.serve(&[]);
    assert_eq!(
        request(&served.addr, "GET", &path(&one)),
        (200, one.clone())
    );
    let items = format!("{}/input_items", path(&one));
    let (_, items) = request(&served.addr, "GET", &items);
    assert_eq!(items["data"][0]["content"][0]["text"], "Who are you?");
    assert_eq!(request(&served.addr, "GET", &path(&two)).0, 404);
    assert_eq!(request(&served.addr, "GET", &path(&unkept)).0, 404);
    let again = post(&served.addr, RESPONSES, &next).1;
    assert_eq!(text(&again), text(&went_on));
    assert_eq!(
        again["usage"]["input_tokens"],
        went_on["usage"]["input_tokens"]
    );
    // An earlier process's can be deleted, for good.
    assert_eq!(request(&served.addr, "DELETE", &path(&one)).0, 200);
    kill(served);
    let served = place.serve(&[]);
    assert_eq!(request(&served.addr, "GET", &path(&one)).0, 404);
}

#[test]
fn what_is_deleted_is_gone_at_once_whatever_is_still_written_of_it() {
    let place = Place::new(None);
    let served = place.serve(&[]);
    let mut paths = Vec::new();
    // While it waits, while it is made, when it has just ended.
    for round in 0..24 {
        let ask = json!({ "input": "Who are you?", "max_output_tokens": 3, "background": true });
        let id = begin(&served.addr, &ask);
        let path = format!("{RESPONSES}/{id}");
        if round % 3 == 2 {
            wait_for_end(&served.addr, &id);
        } else {
            std::thread::sleep(Duration::from_millis(round));
        }
        assert_eq!(request(&served.addr, "DELETE", &path).0, 200);
        assert_eq!(request(&served.addr, "GET", &path).0, 404, "round {round}");
        assert_eq!(request(&served.addr, "DELETE", &path).0, 404);
        paths.push(path);
    }
    kill(served);
    let served = place.serve(&[]);
    for path in paths {
        assert_eq!(request(&served.addr, "GET", &path).0, 404, "{path}");
    }
}

#[test]
fn a_background_response_is_cancelled_by_the_next_process_and_stays_so() {
    // A token needs experts, and these come slowly.
    let place = Place::new(Some("50ms"));
    let served = place.serve(&[]);
    let id = begin(&served.addr, &long_ask());
    kill(served);
    let served = place.serve(&[]);
    let path = format!("{RESPONSES}/{id}");
    let (status, response) = request(&served.addr, "POST", &format!("{path}/cancel"));
    assert_eq!((status, &response["status"]), (200, &json!("cancelled")));
    kill(served);
    let served = place.serve(&[]);
    std::thread::sleep(Duration::from_millis(300));
    let (_, response) = request(&served.addr, "GET", &path);
    assert_eq!(response["status"], "cancelled");
}

#[test]
fn a_signal_ends_what_is_read_in_order_and_puts_the_background_off() {
    let place = Place::new(Some("30ms"));
    let home = place.home.path();
    let served = place.serve(&["--parallel", "2"]);
    let id = begin(&served.addr, &long_ask());
    let waits = begin(&served.addr, &long_ask());
    let behind = begin(&served.addr, &long_ask());
    wait_for_tokens(home, &id, 2);
    let (code, took) = terminate(served);
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(60), "{took:?}");
    let state = home.join("jobs-v1").join(&id).join("state");
    assert!(state.is_file(), "no state was kept");
    // Each is gone on with, whether it was at work or stood in line.
    let served = place.serve(&[]);
    let ends: Vec<Value> = [&id, &waits, &behind]
        .into_iter()
        .map(|id| wait_for_end(&served.addr, id))
        .collect();
    assert_eq!(text(&ends[0]), text(&ends[1]));
    assert_eq!(text(&ends[0]), text(&ends[2]));
    assert_eq!(tokens(home, &id), tokens(home, &behind));
}

#[test]
fn a_second_turn_computes_its_new_tokens_alone_also_after_a_restart() {
    let place = Place::new(None);
    let served = place.serve(&[]);
    let chat = "/v1/chat/completions";
    let book = "It was the best of times, it was the worst of times. ".repeat(40);
    let first = json!({
        "messages": [{ "role": "user", "content": book }], "seed": 3, "max_tokens": 8,
        "reasoning_effort": "none",
    });
    let (_, one) = post(&served.addr, chat, &first);
    let read = one["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(read >= 600, "{read} tokens");
    assert_eq!(one["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let second = json!({
        "messages": [
            { "role": "user", "content": book },
            { "role": "assistant", "content": one["choices"][0]["message"]["content"] },
            { "role": "user", "content": "Why?" },
        ],
        "seed": 4, "max_tokens": 16, "reasoning_effort": "none", "logprobs": true,
    });
    let (_, here) = post(&served.addr, chat, &second);
    assert_eq!(terminate(served).0, Some(0));
    let served = place.serve(&[]);
    let (_, after) = post(&served.addr, chat, &second);
    kill(served);
    let fresh = Place::new(None);
    let served = fresh.serve(&["--states", "0"]);
    let (_, anew) = post(&served.addr, chat, &second);
    assert_eq!(anew["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    for (reply, whose) in [(&here, "the same process"), (&after, "the next process")] {
        // Scores too: to the bit.
        assert_eq!(reply["choices"], anew["choices"], "{whose}");
        let usage = &reply["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        let computed = usage["prompt_tokens"].as_u64().unwrap() - cached.unwrap();
        // The reply of the first turn, the new message and the markup around them.
        assert!(
            (1..60).contains(&computed),
            "{whose}: {computed} rows computed"
        );
    }
}
