//! `/v1/batches`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use super::files::delete;
use super::files::echoing;
use super::files::one_at_a_time;
use super::files::serve_at;
use super::files::upload;
use super::scripted::Beat;
use super::scripted::LONG;
use super::scripted::Scripted;
use super::scripted::get;
use super::scripted::post;
use super::scripted::read_until;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::send;
use super::scripted::think;
use crate::server::Ask;
use crate::server::Failure;
use crate::server::Server;
use crate::server::ServerOptions;

const COMPLETIONS: &str = "/v1/completions";

const CHAT: &str = "/v1/chat/completions";

fn line(n: usize, url: &str, body: Value) -> String {
    let id = format!("line-{n}");
    let line = json!({ "custom_id": id, "method": "POST", "url": url, "body": body });
    format!("{line}\n")
}

fn lines(count: usize) -> String {
    let one = |n| line(n, COMPLETIONS, json!({ "prompt": "x", "seed": n }));
    (0..count).map(one).collect()
}

fn begin_at(server: &Server, text: &str, endpoint: &str) -> String {
    let ask = json!({
        "input_file_id": upload(server, text), "endpoint": endpoint, "completion_window": "24h",
        "metadata": { "for": "test" },
    });
    let reply = post(server, "/v1/batches", &ask);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["id"].as_str().unwrap().to_owned()
}

fn begin(server: &Server, text: &str) -> String {
    begin_at(server, text, COMPLETIONS)
}

fn look(server: &Server, id: &str) -> Value {
    get(server, &format!("/v1/batches/{id}")).json()
}

fn wait_for(server: &Server, id: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let batch = look(server, id);
        if holds(&batch) {
            return batch;
        }
        assert!(began.elapsed() < LONG, "it never comes to it: {batch}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn wait_for_status(server: &Server, id: &str, status: &str) -> Value {
    wait_for(server, id, |batch| batch["status"] == status)
}

fn content(server: &Server, id: &Value) -> Vec<Value> {
    let id = id.as_str().expect("a file");
    let reply = get(server, &format!("/v1/files/{id}/content"));
    assert_eq!(reply.status, 200);
    let lines = reply.body.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn names(lines: &[Value]) -> Vec<&str> {
    let names = lines.iter().map(|line| line["custom_id"].as_str());
    names.map(Option::unwrap).collect()
}

/// Nine requests, of which three can be honoured, and a blank line.
fn mixed() -> String {
    [
        line(0, COMPLETIONS, json!({ "prompt": "x", "seed": 0 })),
        "no json\n".to_owned(),
        line(
            1,
            COMPLETIONS,
            json!({ "prompt": "x", "seed": 1, "stream": true }),
        ),
        "\n".to_owned(),
        line(
            2,
            COMPLETIONS,
            json!({ "prompt": ["x", "y"], "seed": 2, "n": 2 }),
        ),
        line(2, COMPLETIONS, json!({ "prompt": "x" })),
        line(3, CHAT, json!({ "messages": [] })),
        line(
            4,
            COMPLETIONS,
            json!({ "prompt": "x", "seed": 3, "wibble": 1 }),
        ),
        line(
            5,
            COMPLETIONS,
            json!({ "prompt": "x", "seed": 4, "model": "other" }),
        ),
        line(6, COMPLETIONS, json!({ "prompt": "x", "seed": 5 })),
    ]
    .concat()
}

/// The code of an error file's line, and the status where it was a request.
fn told(line: &Value) -> (&str, Option<u64>) {
    let inner = &line["response"]["body"]["error"]["code"];
    let code = line["error"]["code"].as_str().or(inner.as_str());
    (code.unwrap(), line["response"]["status_code"].as_u64())
}

#[test]
fn a_batch_answers_every_line_in_the_inputs_order_and_says_what_was_wrong() {
    let home = tempfile::tempdir().unwrap();
    // The first lines take longest, so that they end last.
    let generator = Scripted::new(|ask| {
        let seed = ask.sampling.seed;
        vec![
            Beat::Work(Duration::from_millis(100 - 20 * seed.min(4))),
            think("hm"),
            Beat::Token(5, vec![0.0; 400]),
            say(&seed.to_string()),
        ]
    });
    let server = serve_at(home.path(), &generator, ServerOptions::new());
    let id = begin(&server, &mixed());
    let batch = wait_for_status(&server, &id, "completed");
    assert_eq!(
        batch["request_counts"],
        json!({ "total": 9, "completed": 3, "failed": 6 })
    );
    assert_eq!(batch["metadata"], json!({ "for": "test" }));
    assert_eq!(batch["model"], "deltafin/scripted");
    assert_eq!(batch["errors"], Value::Null);
    for at in [
        "created_at",
        "in_progress_at",
        "finalizing_at",
        "completed_at",
    ] {
        assert!(batch[at].as_u64().unwrap() > 1_600_000_000, "{at}");
    }
    let output = content(&server, &batch["output_file_id"]);
    assert_eq!(names(&output), ["line-0", "line-2", "line-6"]);
    let bodies: Vec<_> = output.iter().map(|l| &l["response"]["body"]).collect();
    for (line, body) in output.iter().zip(&bodies) {
        assert_eq!(line["response"]["status_code"], 200);
        assert_eq!(line["error"], Value::Null);
        assert_eq!(body["object"], "text_completion");
    }
    assert_eq!(bodies[0]["choices"][0]["text"], "0");
    let choices = bodies[1]["choices"].as_array().unwrap().iter();
    let texts: Vec<_> = choices.map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["2", "3", "2", "3"]);
    let total: u64 = bodies
        .iter()
        .map(|body| body["usage"]["total_tokens"].as_u64().unwrap())
        .sum();
    assert_eq!(batch["usage"]["total_tokens"], total);
    let errors = content(&server, &batch["error_file_id"]);
    let told: Vec<_> = errors.iter().map(told).collect();
    assert_eq!(
        told,
        [
            ("invalid_json_line", None),
            ("invalid_value", Some(400)),
            ("duplicate_custom_id", None),
            ("invalid_url", None),
            ("unknown_parameter", Some(400)),
            ("model_not_found", Some(404)),
        ]
    );
    // What it wrote is a file like others; what only served to go on is gone.
    let file = get(
        &server,
        &format!("/v1/files/{}", batch["output_file_id"].as_str().unwrap()),
    );
    assert_eq!(file.json()["purpose"], "batch_output");
    let left: Vec<_> = std::fs::read_dir(home.path().join("batches-v1").join(&id))
        .unwrap()
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn chats_and_responses_are_answered_as_if_they_were_asked_for_alone() {
    let home = tempfile::tempdir().unwrap();
    let (server, generator) = echoing(home.path());
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "seed": 7 });
    let id = begin_at(&server, &line(1, CHAT, chat.clone()), CHAT);
    let batch = wait_for_status(&server, &id, "completed");
    let mut body = content(&server, &batch["output_file_id"])[0]["response"]["body"].clone();
    let mut alone = post(&server, CHAT, &chat).json();
    for reply in [&mut body, &mut alone] {
        assert!(
            reply["id"]
                .take()
                .as_str()
                .unwrap()
                .starts_with("chatcmpl-")
        );
        reply["created"].take();
    }
    assert_eq!(body, alone);
    let path = "/v1/responses";
    let earlier = post(&server, path, &json!({ "input": "Who?" })).json();
    let text = [
        line(
            1,
            path,
            json!({ "input": "hi", "previous_response_id": earlier["id"], "seed": 8 }),
        ),
        line(
            2,
            path,
            json!({ "input": "hi", "previous_response_id": "resp_none" }),
        ),
        line(3, path, json!({ "input": "hi", "background": true })),
        line(4, path, json!({ "input": "hi", "store": true })),
        line(5, path, json!({ "input": "hi", "stream": true })),
    ];
    let id = begin_at(&server, &text.concat(), path);
    let batch = wait_for_status(&server, &id, "completed");
    let output = content(&server, &batch["output_file_id"]);
    let body = &output[0]["response"]["body"];
    assert_eq!(
        (&body["object"], &body["status"]),
        (&json!("response"), &json!("completed"))
    );
    assert_eq!(body["store"], false);
    assert_eq!(body["output"][1]["content"][0]["text"], "8");
    let kept = format!("{path}/{}", body["id"].as_str().unwrap());
    assert_eq!(get(&server, &kept).status, 404);
    let seen = generator.seen.lock().unwrap();
    let prompt = format!("{:?}", seen.last().unwrap().prompt);
    assert!(prompt.contains("Who?"), "{prompt}");
    let errors = content(&server, &batch["error_file_id"]);
    let params: Vec<_> = errors
        .iter()
        .map(|l| l["response"]["body"]["error"]["param"].as_str().unwrap())
        .collect();
    assert_eq!(
        params,
        ["previous_response_id", "background", "store", "stream"]
    );
}

/// What each generation was asked for, by its seed.
fn seeds(generator: &Scripted) -> Vec<u64> {
    let seen = generator.seen.lock().unwrap();
    seen.iter().map(|ask| ask.sampling.seed).collect()
}

#[test]
fn a_request_never_waits_for_a_line_and_no_line_fills_the_line() {
    let home = tempfile::tempdir().unwrap();
    let slow = |ask: &Ask| vec![Beat::Work(if ask.patient { LONG } else { Duration::ZERO })];
    let generator = Scripted::new(slow);
    let options = ServerOptions {
        waiting_max: 0,
        ..one_at_a_time()
    };
    let server = serve_at(home.path(), &generator, options);
    let id = begin(&server, &lines(50));
    generator.wait_for(|working, _| working == 1);
    // One place, no room to wait, and a line of a batch in the place.
    for seed in [1000, 1001, 1002] {
        let ask = json!({ "prompt": "x", "seed": seed });
        let reply = post(&server, COMPLETIONS, &ask);
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    assert_eq!(seeds(&generator), [0, 1000, 1001, 1002]);
    let health = get(&server, "/health").json();
    assert_eq!(
        (&health["running"], &health["waiting"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(health["batch"], json!({ "running": 1, "waiting": 0 }));
    let metrics = get(&server, "/metrics").body;
    assert!(
        metrics.contains("deltafin_batch_lines_running 1"),
        "{metrics}"
    );
    assert_eq!(look(&server, &id)["request_counts"]["completed"], 0);
}

#[test]
fn a_line_is_taken_up_only_when_nobody_waits() {
    let home = tempfile::tempdir().unwrap();
    let hold = Arc::new(AtomicBool::new(true));
    let held = Arc::clone(&hold);
    let generator = Scripted::new(move |_| {
        // The first holds the place until a batch and two more requests wait behind it.
        let began = Instant::now();
        while held.load(Ordering::SeqCst) && began.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(5));
        }
        vec![say("x")]
    });
    let server = serve_at(home.path(), &generator, one_at_a_time());
    let ask = |seed: u64| {
        let body = json!({ "prompt": "x", "seed": seed, "stream": true }).to_string();
        send(server.addr(), "POST", COMPLETIONS, &[], &body)
    };
    let first = ask(1000);
    generator.wait_for(|working, _| working == 1);
    let id = begin(&server, &lines(3));
    wait_for(&server, &id, |batch| batch["status"] == "in_progress");
    let began = Instant::now();
    while get(&server, "/health").json()["batch"]["waiting"] != 1 {
        assert!(began.elapsed() < LONG);
    }
    let mut second = ask(1001);
    read_until(&mut second, "behind 1 request");
    let mut third = ask(1002);
    read_until(&mut third, "behind 2 requests");
    hold.store(false, Ordering::SeqCst);
    wait_for_status(&server, &id, "completed");
    assert_eq!(seeds(&generator), [1000, 1001, 1002, 0, 1, 2]);
    assert!(receive(first).body.contains("[DONE]"));
    read_until(&mut second, "[DONE]");
    read_until(&mut third, "[DONE]");
}

#[test]
fn a_cancelled_batch_gives_what_was_answered() {
    let home = tempfile::tempdir().unwrap();
    let generator = Scripted::new(|ask| {
        let seed = ask.sampling.seed;
        let work = Beat::Work(if seed == 2 { LONG } else { Duration::ZERO });
        vec![say(&seed.to_string()), work]
    });
    let server = serve_at(home.path(), &generator, one_at_a_time());
    let id = begin(&server, &format!("no\n{}", lines(5)));
    wait_for(&server, &id, |batch| {
        batch["request_counts"]["completed"] == 2
    });
    generator.wait_for(|working, _| working == 1);
    let path = format!("/v1/batches/{id}/cancel");
    let reply = post(&server, &path, &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(["cancelling", "cancelled"].contains(&reply.json()["status"].as_str().unwrap()));
    let batch = wait_for_status(&server, &id, "cancelled");
    assert_eq!(
        batch["request_counts"],
        json!({ "total": 6, "completed": 2, "failed": 1 })
    );
    assert!(batch["cancelling_at"].is_u64() && batch["cancelled_at"].is_u64());
    assert_eq!(batch["completed_at"], Value::Null);
    let output = content(&server, &batch["output_file_id"]);
    assert_eq!(names(&output), ["line-0", "line-1"]);
    assert_eq!(content(&server, &batch["error_file_id"]).len(), 1);
    assert_eq!(post(&server, &path, &json!({})).status, 409);
    assert_eq!(seeds(&generator), [0, 1, 2]);
    // And it stays so.
    drop(server);
    let server = serve_at(home.path(), &generator, one_at_a_time());
    assert_eq!(look(&server, &id), batch);
    assert_eq!(post(&server, &path, &json!({})).status, 409);
}

#[test]
fn a_batch_goes_on_with_the_next_server_with_no_line_twice_and_none_lost() {
    let home = tempfile::tempdir().unwrap();
    let hold = Arc::new(AtomicBool::new(true));
    let held = Arc::clone(&hold);
    let generator = Scripted::new(move |ask| {
        let seed = ask.sampling.seed;
        let stuck = held.load(Ordering::SeqCst) && seed % 5 == 4;
        let work = Beat::Work(if stuck { LONG } else { Duration::ZERO });
        vec![work, say(&seed.to_string())]
    });
    let server = serve_at(home.path(), &generator, one_at_a_time());
    let text = format!("{}no\n", lines(12));
    let id = begin(&server, &text);
    let input = look(&server, &id)["input_file_id"]
        .as_str()
        .unwrap()
        .to_owned();
    // The batch does without it.
    assert_eq!(delete(&server, &format!("/v1/files/{input}")).status, 200);
    wait_for(&server, &id, |batch| {
        batch["request_counts"]["completed"] == 4
    });
    generator.wait_for(|working, _| working == 1);
    // Another server on this home sees how it stands, and leaves it.
    let other = serve_at(home.path(), &generator, one_at_a_time());
    let seen = look(&other, &id);
    assert_eq!(
        (&seen["status"], &seen["request_counts"]["completed"]),
        (&json!("in_progress"), &json!(4))
    );
    drop(other);
    // In order, as a signal ends it: a line at work is put off.
    server.drain(Duration::ZERO, Duration::from_secs(1));
    drop(server);
    let server = serve_at(home.path(), &generator, one_at_a_time());
    wait_for(&server, &id, |batch| {
        batch["request_counts"]["completed"] == 4
    });
    generator.wait_for(|working, _| working == 1);
    // Now without a word.
    drop(server);
    hold.store(false, Ordering::SeqCst);
    let server = serve_at(home.path(), &generator, ServerOptions::new());
    let batch = wait_for_status(&server, &id, "completed");
    assert_eq!(
        batch["request_counts"],
        json!({ "total": 13, "completed": 12, "failed": 1 })
    );
    let output = content(&server, &batch["output_file_id"]);
    let expected: Vec<_> = (0..12).map(|n| format!("line-{n}")).collect();
    assert_eq!(names(&output), expected);
    for (n, line) in output.iter().enumerate() {
        let text = &line["response"]["body"]["choices"][0]["text"];
        assert_eq!(text, &n.to_string());
    }
    assert_eq!(content(&server, &batch["error_file_id"]).len(), 1);
    let seeds = seeds(&generator);
    for answered in 0..4 {
        let times = seeds.iter().filter(|&&seed| seed == answered).count();
        assert_eq!(times, 1, "line {answered} was answered again");
    }
}

#[test]
fn what_is_no_batch_fails_and_says_why() {
    let home = tempfile::tempdir().unwrap();
    let (server, generator) = echoing(home.path());
    for (text, code, at) in [
        ("", "empty_file", Value::Null),
        ("a,b\n", "invalid_json_line", json!(1)),
    ] {
        let id = begin(&server, text);
        let batch = wait_for_status(&server, &id, "failed");
        assert_eq!(batch["errors"]["object"], "list");
        let first = &batch["errors"]["data"][0];
        assert_eq!((&first["code"], &first["line"]), (&json!(code), &at));
        assert!(batch["failed_at"].is_u64());
        assert_eq!(batch["output_file_id"], Value::Null);
    }
    assert_eq!(seeds(&generator), [0; 0]);
    let file = upload(&server, &lines(1));
    let whole = json!({
        "input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h",
    });
    let with = |name: &str, value: Value| {
        let mut ask = whole.clone();
        ask[name] = value;
        ask
    };
    for (name, value, status) in [
        ("input_file_id", json!("file-0"), 404),
        ("input_file_id", Value::Null, 400),
        ("endpoint", json!("/v1/embeddings"), 400),
        ("completion_window", json!("1h"), 400),
        ("metadata", json!({ "a": 1 }), 400),
        ("metadata", json!({ "a": "x".repeat(513) }), 400),
        (
            "output_expires_after",
            json!({ "anchor": "created_at", "seconds": 9 }),
            400,
        ),
        ("wibble", json!(1), 400),
    ] {
        let refused = post(&server, "/v1/batches", &with(name, value));
        assert_eq!(refused.status, status, "{name}: {}", refused.body);
        assert_eq!(refused.json()["error"]["param"], name);
    }
    let list = get(&server, "/v1/batches").json();
    assert_eq!(list["data"].as_array().unwrap().len(), 2, "{list}");
    let page = get(&server, "/v1/batches?limit=1").json();
    assert_eq!(
        (&page["has_more"], &page["data"][0]),
        (&json!(true), &list["data"][0])
    );
    let after = format!(
        "/v1/batches?limit=1&after={}",
        page["last_id"].as_str().unwrap()
    );
    let rest = get(&server, &after).json();
    assert_eq!(
        (&rest["has_more"], &rest["data"][0]),
        (&json!(false), &list["data"][1])
    );
    assert_eq!(get(&server, "/v1/batches/batch_1").status, 404);
}

#[test]
fn weights_that_do_not_come_are_waited_for_and_other_failures_are_told() {
    let home = tempfile::tempdir().unwrap();
    let away = AtomicBool::new(true);
    let generator = Scripted::new(move |ask| match ask.sampling.seed {
        0 if away.swap(false, Ordering::SeqCst) => vec![Beat::Fail(Failure::Unavailable {
            message: "the hub is away".to_owned(),
        })],
        1 => vec![Beat::Fail(Failure::Broken {
            message: "broken".to_owned(),
        })],
        2 => vec![Beat::Panic],
        seed => vec![say(&seed.to_string())],
    });
    let server = serve_at(home.path(), &generator, one_at_a_time());
    let id = begin(&server, &lines(4));
    let batch = wait_for_status(&server, &id, "completed");
    let output = content(&server, &batch["output_file_id"]);
    assert_eq!(names(&output), ["line-0", "line-3"]);
    let errors = content(&server, &batch["error_file_id"]);
    assert_eq!(names(&errors), ["line-1", "line-2"]);
    for line in &errors {
        assert_eq!(line["response"]["status_code"], 500);
    }
    assert_eq!(
        seeds(&generator).iter().filter(|&&seed| seed == 0).count(),
        2
    );
}
