//! Batches over the real model: uploaded, answered through kills, downloaded, cancelled.

use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use super::outlive::Place;
use super::outlive::kill;
use super::outlive::request;
use super::outlive::terminate;
use super::setting;
use super::together::post;

const LIMIT: Duration = Duration::from_secs(240);

/// A reply as it is on the wire, after its head.
fn exchange(addr: &str, head: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{head}\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn upload(addr: &str, text: &str) -> String {
    let body = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n\
         {text}\r\n--XX--\r\n"
    );
    let head = "POST /v1/files HTTP/1.0\r\ncontent-type: multipart/form-data; boundary=XX";
    let (status, file) = exchange(addr, head, &body);
    assert_eq!(status, 200, "{file}");
    let file: Value = serde_json::from_str(&file).unwrap();
    file["id"].as_str().unwrap().to_owned()
}

fn begin(addr: &str, text: &str, endpoint: &str) -> String {
    let file = upload(addr, text);
    let ask = json!({ "input_file_id": file, "endpoint": endpoint, "completion_window": "24h" });
    let (status, batch) = post(addr, "/v1/batches", &ask);
    assert_eq!(status, 200, "{batch}");
    batch["id"].as_str().unwrap().to_owned()
}

fn wait_for(addr: &str, id: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let (status, batch) = request(addr, "GET", &format!("/v1/batches/{id}"));
        assert_eq!(status, 200, "{batch}");
        if holds(&batch) {
            return batch;
        }
        assert!(began.elapsed() < LIMIT, "it never comes to it: {batch}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn answered(batch: &Value) -> u64 {
    batch["request_counts"]["completed"].as_u64().unwrap()
}

fn content(addr: &str, id: &Value) -> Vec<Value> {
    let id = id.as_str().expect("a file");
    let head = format!("GET /v1/files/{id}/content HTTP/1.0");
    let (status, text) = exchange(addr, &head, "");
    assert_eq!(status, 200, "{text}");
    let lines = text.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// A line of the output without what another run does not have again.
fn settled(line: &Value) -> Value {
    let mut line = line.clone();
    let body = &mut line["response"]["body"];
    body["created"].take();
    body["usage"]["deltafin"].take();
    body["usage"]["prompt_tokens_details"].take();
    line
}

fn text(count: u64) -> String {
    let prompts = ["Who are you?", "Tell a story.", "Where is Bath?"];
    let line = |n: u64| {
        // Seeded by what it says; one in three in two choices, one in three with scores.
        let mut body = json!({
            "messages": [{ "role": "user", "content": prompts[usize::try_from(n).unwrap() % 3] }],
            "max_tokens": 20 + n % 5, "temperature": 1.0,
        });
        match n % 3 {
            1 => body["n"] = 2.into(),
            2 => body["logprobs"] = true.into(),
            _ => {}
        }
        let line = json!({
            "custom_id": format!("line-{n}"), "method": "POST", "url": "/v1/chat/completions",
            "body": body,
        });
        format!("{line}\n")
    };
    (0..count).map(line).collect::<String>() + "no json\n"
}

#[test]
fn a_batch_that_is_killed_again_and_again_gives_what_an_undisturbed_one_gives() {
    let count = setting("DELTAFIN_API_BATCH_LINES", 12);
    let chat = "/v1/chat/completions";
    let calm = Place::new(None);
    let served = calm.serve(&[]);
    let id = begin(&served.addr, &text(count), chat);
    let batch = wait_for(&served.addr, &id, |batch| batch["status"] == "completed");
    let expected = content(&served.addr, &batch["output_file_id"]);
    assert_eq!(expected.len() as u64, count);
    // A request of the same seed says the same, though nobody waited for the line.
    let body = &expected[0]["response"]["body"];
    let mut alone = json!({
        "messages": [{ "role": "user", "content": "Who are you?" }], "max_tokens": 20,
        "temperature": 1.0,
    });
    alone["seed"] = body["usage"]["deltafin"]["seed"].clone();
    let (_, alone) = post(&served.addr, chat, &alone);
    assert_eq!(alone["choices"], body["choices"]);
    kill(served);

    // Another home, whose experts come slowly, is killed between and inside of lines.
    let place = Place::new(Some("10ms"));
    let serve = || place.serve(&["--states", "0", "--parallel", "3"]);
    let mut served = serve();
    let id = begin(&served.addr, &text(count), chat);
    let mut inside = 0;
    for least in [0, count / 4, count / 2] {
        let seen = wait_for(&served.addr, &id, |batch| answered(batch) >= least);
        let begun = Instant::now();
        // A job of a line that has tokens: it is at work.
        let jobs = place.home.path().join("jobs-v1");
        let at_work = || {
            let entries = std::fs::read_dir(&jobs).into_iter().flatten().flatten();
            let mut ids = entries.map(|entry| entry.path().join("ids"));
            ids.any(|ids| ids.metadata().is_ok_and(|ids| ids.len() > 0))
        };
        while !at_work() && answered(&seen) < count && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        kill(served);
        inside += u32::from(at_work());
        served = serve();
    }
    assert!(inside > 0, "every kill came between two lines");
    // And one that is ended in order.
    assert_eq!(terminate(served).0, Some(0));
    let served = serve();
    let batch = wait_for(&served.addr, &id, |batch| batch["status"] == "completed");
    assert_eq!(
        batch["request_counts"],
        json!({ "total": count + 1, "completed": count, "failed": 1 })
    );
    let output = content(&served.addr, &batch["output_file_id"]);
    assert_eq!(output.len(), expected.len());
    for (line, expected) in output.iter().zip(&expected) {
        assert_eq!(settled(line), settled(expected));
    }
    let errors = content(&served.addr, &batch["error_file_id"]);
    assert_eq!(errors[0]["error"]["code"], "invalid_json_line");
    // Nothing that only served to go on stays.
    let left = std::fs::read_dir(place.home.path().join("jobs-v1")).unwrap();
    assert_eq!(left.count(), 0);
}

#[test]
fn a_batch_is_cancelled_by_the_next_process_and_keeps_what_it_has() {
    let place = Place::new(Some("20ms"));
    let serve = || place.serve(&["--parallel", "1"]);
    let served = serve();
    let id = begin(&served.addr, &text(200), "/v1/chat/completions");
    wait_for(&served.addr, &id, |batch| answered(batch) >= 1);
    // A request is answered at once, and not after two hundred lines.
    let ask = json!({ "messages": [{ "role": "user", "content": "Hm?" }], "max_tokens": 2 });
    let (status, _) = post(&served.addr, "/v1/chat/completions", &ask);
    assert_eq!(status, 200);
    let batch = wait_for(&served.addr, &id, |_| true);
    assert!(answered(&batch) < 200, "the request came after the batch");
    kill(served);
    let served = serve();
    let path = format!("/v1/batches/{id}/cancel");
    let (status, batch) = request(&served.addr, "POST", &path);
    assert_eq!(status, 200, "{batch}");
    let batch = wait_for(&served.addr, &id, |batch| batch["status"] == "cancelled");
    let output = content(&served.addr, &batch["output_file_id"]);
    assert_eq!(output.len() as u64, answered(&batch));
    assert!((1..200).contains(&output.len()));
    for (n, line) in output.iter().enumerate() {
        assert_eq!(line["custom_id"], format!("line-{n}"));
    }
    kill(served);
    let served = serve();
    assert_eq!(wait_for(&served.addr, &id, |_| true), batch);
}
