//! Many at once.

use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use super::serve_demo;

/// A request's whole reply: its status and its body.
pub(super) fn post(addr: &str, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(300)))
        .unwrap();
    let body = body.to_string();
    write!(
        stream,
        "POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let status = head[9..12].parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

fn asks() -> Vec<Value> {
    let prompts = [
        "Who are you?",
        "Tell a story.",
        "And then?",
        "Where is Bath?",
    ];
    (0..8)
        .map(|n| {
            json!({
                "messages": [{ "role": "user", "content": prompts[n % prompts.len()] }],
                "seed": n, "max_tokens": 24 + 3 * n, "logprobs": true,
            })
        })
        .collect()
}

/// What a reply says, without what is new in every reply.
fn said(reply: &Value) -> Value {
    json!([reply["choices"], reply["usage"]["completion_tokens"]])
}

#[test]
fn eight_at_once_are_answered_as_one_by_one() {
    let served = serve_demo(&["--parallel", "8"]);
    let chat = "/v1/chat/completions";
    let alone: Vec<_> = asks()
        .iter()
        .map(|ask| post(&served.addr, chat, ask))
        .collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = asks()
            .into_iter()
            .map(|ask| {
                scope.spawn({
                    let addr = &served.addr;
                    move || post(addr, chat, &ask)
                })
            })
            .collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!((alone.0, together.0), (200, 200), "{together:?}");
        assert_eq!(said(&alone.1), said(&together.1));
    }
    // The choices of one request, too.
    let ask = json!({ "prompt": ["It is", "Mr."], "n": 4, "seed": 9, "max_tokens": 12 });
    let choices = post(&served.addr, "/v1/completions", &ask).1;
    for (n, choice) in choices["choices"].as_array().unwrap().iter().enumerate() {
        let prompt = ["It is", "Mr."][n / 4];
        let one = json!({ "prompt": prompt, "seed": 9 + n % 4, "max_tokens": 12 });
        let one = post(&served.addr, "/v1/completions", &one).1;
        assert_eq!(one["choices"][0]["text"], choice["text"], "choice {n}");
    }
}
