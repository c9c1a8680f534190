//! Replies that take long: signs of life, leaving, standing in line.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use serde_json::json;

use super::scripted::ANY;
use super::scripted::Beat;
use super::scripted::LONG;
use super::scripted::Scripted;
use super::scripted::get;
use super::scripted::post;
use super::scripted::read_until;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::send;
use super::scripted::serve;
use super::scripted::serve_with;
use super::scripted::think;
use crate::server::Failure;
use crate::server::Generator;
use crate::server::Server;
use crate::server::ServerOptions;

const CHAT: &str = "/v1/chat/completions";

fn body(stream: bool) -> String {
    json!({ "messages": [{ "role": "user", "content": "hi" }], "stream": stream }).to_string()
}

/// A chat whose reply has begun to come.
fn ask(server: &Server, stream: bool) -> TcpStream {
    send(server.addr(), "POST", CHAT, &[], &body(stream))
}

#[test]
fn a_stream_speaks_at_once_and_comments_while_the_engine_is_silent() {
    let (server, generator) = saying(vec![Beat::Work(LONG)]);
    let mut stream = ask(&server, true);
    let (seen, took) = read_until(&mut stream, "\n\n");
    assert!(seen.contains("200 OK"), "{seen}");
    assert!(seen.contains("text/event-stream"), "{seen}");
    assert!(took < Duration::from_secs(1), "first bytes after {took:?}");
    generator.wait_for(|working, _| working == 1);
    let started = Instant::now();
    for _ in 0..3 {
        let (seen, _) = read_until(&mut stream, ": ");
        assert!(!seen.contains("[DONE]"), "{seen}");
    }
    // Three heartbeats of 100 ms; the engine never spoke.
    assert!(started.elapsed() < LONG / 2);
    let (seen, _) = read_until(&mut stream, "reading the prompt");
    assert!(seen.contains("layer 1 of 8"), "{seen}");
}

#[test]
fn a_whole_reply_is_kept_alive_by_white_space_and_still_parses() {
    let (server, _) = saying(vec![Beat::Work(Duration::from_millis(1500)), say("late")]);
    let mut stream = ask(&server, false);
    let started = Instant::now();
    let (head, _) = read_until(&mut stream, "\r\n\r\n");
    assert!(head.contains("200 OK"), "{head}");
    assert!(
        started.elapsed() < Duration::from_millis(1400),
        "headers wait"
    );
    let reply = receive(ask(&server, false));
    assert!(reply.complete);
    assert!(
        reply.body.starts_with("   "),
        "no signs of life: {:?}",
        reply.body
    );
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "late");
}

#[test]
fn a_late_failure_cuts_the_whole_reply_short() {
    let fail = Beat::Fail(Failure::Broken {
        message: "no".to_owned(),
    });
    let (server, _) = saying(vec![Beat::Work(Duration::from_millis(1200)), fail]);
    let reply = receive(ask(&server, false));
    assert_eq!(reply.status, 200);
    assert!(!reply.complete, "the reply looks whole: {:?}", reply.body);
    assert_eq!(reply.body.trim(), "");
}

#[test]
fn whoever_leaves_stops_the_generation() {
    for stream in [true, false] {
        let (server, generator) = saying(vec![think("hm"), Beat::Work(LONG)]);
        let connection = ask(&server, stream);
        generator.wait_for(|working, _| working == 1);
        drop(connection);
        generator.wait_for(|working, stopped| (working, stopped) == (0, 1));
        // And the next is served at once.
        let next = ask(&server, true);
        generator.wait_for(|working, _| working == 1);
        drop((next, server));
    }
}

#[test]
fn a_whole_reply_that_has_begun_stops_too_when_its_reader_leaves() {
    let (server, generator) = saying(vec![Beat::Work(LONG)]);
    let mut connection = ask(&server, false);
    read_until(&mut connection, "\r\n\r\n");
    drop(connection);
    generator.wait_for(|working, stopped| (working, stopped) == (0, 1));
}

#[test]
fn leaving_the_line_does_not_stop_whoever_is_served() {
    let (server, generator) = saying(vec![Beat::Work(Duration::from_secs(2)), say("mine")]);
    let first = ask(&server, true);
    generator.wait_for(|working, _| working == 1);
    let mut second = ask(&server, true);
    read_until(&mut second, "behind 1 request");
    let mut third = ask(&server, true);
    read_until(&mut third, "behind 2 requests");
    drop(second);
    read_until(&mut third, "behind 1 request");
    drop(third);
    let reply = receive(first);
    assert!(reply.body.contains("mine"), "{}", reply.body);
    assert_eq!(generator.seen.lock().unwrap().len(), 1);
    generator.wait_for(|_, stopped| stopped == 0);
}

#[test]
fn requests_are_served_one_at_a_time_in_their_order() {
    let generator = Scripted::new(|ask| {
        vec![
            Beat::Work(Duration::from_millis(50)),
            say(&ask.sampling.seed.to_string()),
        ]
    });
    let server = serve(&generator);
    let mut waiting = Vec::new();
    for seed in 0..5 {
        let body = json!({ "prompt": "x", "seed": seed }).to_string();
        waiting.push(send(server.addr(), "POST", "/v1/completions", &[], &body));
        generator.wait_for(|working, _| working <= 1);
        // In line before the next comes.
        std::thread::sleep(Duration::from_millis(20));
    }
    for (seed, connection) in waiting.into_iter().enumerate() {
        let reply = receive(connection);
        assert_eq!(reply.json()["choices"][0]["text"], seed.to_string());
    }
    let seen = generator.seen.lock().unwrap();
    let seeds: Vec<_> = seen.iter().map(|ask| ask.sampling.seed).collect();
    assert_eq!(seeds, [0, 1, 2, 3, 4]);
}

#[test]
fn a_full_line_turns_away_and_says_when_to_come_back() {
    let generator = Scripted::new(|_| vec![Beat::Work(LONG)]);
    let options = ServerOptions {
        running_max: 1,
        waiting_max: 1,
        ..ServerOptions::new()
    };
    let server = serve_with(&generator, options);
    let first = ask(&server, true);
    generator.wait_for(|working, _| working == 1);
    let mut second = ask(&server, true);
    read_until(&mut second, "behind 1 request");
    let third = receive(ask(&server, true));
    assert_eq!(third.status, 503);
    assert!(third.header("retry-after").unwrap().parse::<u64>().unwrap() >= 5);
    assert_eq!(third.json()["error"]["code"], "queue_full");
    drop((first, second));
}

#[test]
fn stopping_tells_the_served_and_the_waiting() {
    let (server, generator) = saying(vec![Beat::Work(LONG)]);
    let first = ask(&server, true);
    generator.wait_for(|working, _| working == 1);
    let mut second = ask(&server, true);
    read_until(&mut second, "behind 1 request");
    let stopping = std::thread::spawn(move || server.stop());
    for mut connection in [first, second] {
        let (seen, _) = read_until(&mut connection, "data: [DONE]\n\n");
        assert!(seen.contains("server_stopping"), "{seen}");
    }
    stopping.join().unwrap();
}

#[test]
fn a_stop_that_comes_before_the_generation_begins_is_not_lost() {
    // The generator clears an old stop when it begins; a client that leaves just before is noticed
    // at the first event all the same.
    let (server, generator) = saying(vec![Beat::Work(LONG)]);
    for _ in 0..50 {
        drop(ask(&server, true));
    }
    let next = ask(&server, true);
    generator.wait_for(|working, _| working == 1);
    drop(next);
    generator.wait_for(|working, _| working == 0);
}

#[test]
fn until_the_model_is_ready_health_says_what_is_awaited() {
    let server = Server::start(ANY.parse().unwrap(), ServerOptions::new()).unwrap();
    server.loading("fetching the core, 12 of 93 parts");
    let health = get(&server, "/health").json();
    assert_eq!(
        (&health["live"], &health["ready"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(health["loading"], "fetching the core, 12 of 93 parts");
    assert_eq!(get(&server, "/health/ready").status, 503);
    assert_eq!(get(&server, "/v1/models").json()["data"], json!([]));
    let early = receive(ask(&server, true));
    assert_eq!(early.status, 503);
    assert!(early.header("retry-after").is_some());
    assert!(early.body.contains("12 of 93"), "{}", early.body);
    let generator = Scripted::new(|_| vec![say("ready")]);
    server
        .ready(Arc::clone(&generator) as Arc<dyn Generator>)
        .unwrap();
    assert_eq!(get(&server, "/health/ready").status, 200);
    let health = get(&server, "/health").json();
    assert_eq!(
        (&health["ready"], &health["waiting"]),
        (&json!(true), &json!(0))
    );
    let served = post(&server, "/v1/completions", &json!({ "prompt": "x" }));
    assert_eq!(served.json()["choices"][0]["text"], "ready");
}

#[test]
fn a_client_that_sends_its_body_forever_holds_up_nobody() {
    let (server, _) = saying(vec![say("served")]);
    let mut slow = TcpStream::connect(server.addr()).unwrap();
    write!(
        slow,
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{"
    )
    .unwrap();
    let reply = receive(ask(&server, true));
    assert!(reply.body.contains("served"), "{}", reply.body);
}
