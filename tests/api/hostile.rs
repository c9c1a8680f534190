//! Requests that nobody should send.

use std::io::BufRead;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::Shutdown;
use std::net::TcpStream;
use std::time::Duration;

use serde_json::json;

use super::Served;
use super::health;
use super::serve_demo;
use super::setting;
use super::skipped;
use super::together::post;

/// A generator of numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }
}

const PATHS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];
const WHOLE: &str = r#"{"wibble":1,"model":"austen-k3","messages":[{"role":"user","content":[{"type":"text","text":"é"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"enum":[1,"b"]}}}}}],"tool_choice":"auto","logit_bias":{"5":-100},"stop":["a"],"n":1,"prompt":["x",[1,2]],"input":[{"type":"message","role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}},"temperature":0.5,"max_tokens":1,"stream":false,"logprobs":true,"top_logprobs":3}"#;

/// A body that was whole once.
fn broken(dice: &mut Dice) -> Vec<u8> {
    let mut body = WHOLE.as_bytes().to_vec();
    match dice.roll(5) {
        0 => body.truncate(dice.roll(body.len())),
        1 => {
            let values = [
                "null",
                "-1",
                "1e999",
                "\"\\ud800\"",
                "[[[[[[]]]]]]",
                "{\"a\":{}}",
                "18446744073709551616",
            ];
            let text = String::from_utf8(body).unwrap();
            let at = dice.roll(12);
            let parts: Vec<_> = text.split("\":").collect();
            let put = values[dice.roll(values.len())];
            let mut made = parts.join("\":");
            if let Some(part) = parts.get(at + 1) {
                let end = part.find(',').unwrap_or(part.len());
                made = made.replacen(
                    &format!("\":{part}"),
                    &format!("\":{put}{}", &part[end..]),
                    1,
                );
            }
            body = made.into_bytes();
        }
        2 => {
            let depth = 1 + dice.roll(4000);
            body = "[".repeat(depth).into_bytes();
        }
        _ => {
            for _ in 0..=dice.roll(6) {
                let at = dice.roll(body.len());
                body[at] = u8::try_from(dice.roll(256)).unwrap();
            }
        }
    }
    body
}

fn rss(served: &Served) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}

/// The status of the next reply on a connection that is kept.
fn status(reader: &mut BufReader<TcpStream>) -> Option<u16> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let status = line.get(9..12)?.parse().ok()?;
    let mut length = None;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header == "\r\n" {
            break;
        }
        if let Some(said) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            length = said.trim().parse::<usize>().ok();
        }
    }
    // A reply without a length is one that goes on: nobody waits for its end here.
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    Some(status)
}

fn connect(served: &Served) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(&served.addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    BufReader::new(stream)
}

#[test]
fn thousands_of_broken_requests_are_refused_in_level_memory() {
    let served = serve_demo(&[]);
    let mut dice = Dice(0x5eed);
    let mut connection = connect(&served);
    let mut refused = 0;
    let count = setting("DELTAFIN_API_MALFORMED", 10_000);
    let mut level = 0;
    for n in 0..count {
        let body = broken(&mut dice);
        let path = PATHS[dice.roll(PATHS.len())];
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let sent = [head.as_bytes(), &body].concat();
        connection.get_mut().write_all(&sent).unwrap();
        match status(&mut connection) {
            Some(400..=499) => refused += 1,
            // A flipped bit may leave a request that can be served. Leaving ends it.
            Some(200) => connection = connect(&served),
            other => panic!("{other:?} for {}", String::from_utf8_lossy(&body)),
        }
        if n == count / 4 {
            level = rss(&served);
        }
    }
    assert!(refused > count * 8 / 10, "{refused} of {count}");
    let grown = rss(&served).saturating_sub(level);
    assert!(
        grown < 16 << 20,
        "{grown} bytes more after {count} requests"
    );
    still_serving(&served);
}

fn still_serving(served: &Served) {
    let ask = json!({ "prompt": "It is", "max_tokens": 2, "temperature": 0 });
    let (status, reply) = post(&served.addr, "/v1/completions", &ask);
    assert_eq!(
        (status, &reply["usage"]["completion_tokens"]),
        (200, &json!(2))
    );
}

#[test]
fn what_is_no_http_and_what_is_too_much_of_it_is_turned_away() {
    let served = serve_demo(&[]);
    let bomb = format!(
        "GET /health HTTP/1.1\r\nx-bomb: {}\r\n\r\n",
        "x".repeat(1 << 20)
    );
    let many: String = (0..20_000).map(|n| format!("x-{n}: 1\r\n")).collect();
    let many = format!("GET /health HTTP/1.1\r\n{many}\r\n");
    let rounds = setting("DELTAFIN_API_BOMBS", 8);
    let cases: Vec<(&str, Vec<u8>, &[u16])> = vec![
        ("noise", vec![0, 159, 146, 150, 13, 10, 13, 10], &[400]),
        ("a bomb in a header", bomb.into_bytes(), &[431]),
        ("a bomb of headers", many.into_bytes(), &[431]),
        ("a line without end", vec![b'A'; 1 << 20], &[400, 414, 431]),
        ("no version", b"GET /health\r\n\r\n".to_vec(), &[400]),
        ("two lengths", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}".to_vec(), &[400]),
        ("a length that is none", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -2\r\n\r\n{}".to_vec(), &[400]),
        ("chunks that are none", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".to_vec(), &[400, 413]),
        ("a body beyond the limit", [b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000000\r\n\r\n".to_vec(), vec![b'['; 20_000_000]].concat(), &[413]),
    ];
    let mut level = 0;
    let mut told = vec![0; cases.len()];
    for round in 0..rounds {
        for ((what, sent, expected), told) in cases.iter().zip(&mut told) {
            let mut connection = connect(&served);
            // Who is turned away early finds the connection closed.
            let _ = connection.get_mut().write_all(sent);
            let _ = connection.get_mut().shutdown(Shutdown::Write);
            // A reset may overtake the reply to a sender that does not stop.
            if let Some(got) = status(&mut connection) {
                assert!(expected.contains(&got), "{what}: {got}");
                *told += 1;
            }
        }
        if round == 1 {
            level = rss(&served);
        }
    }
    let untold = cases.iter().zip(&told).find(|(_, told)| **told == 0);
    assert!(
        untold.is_none(),
        "never told why: {:?}",
        untold.map(|u| u.0.0)
    );
    let grown = rss(&served).saturating_sub(level);
    assert!(grown < 32 << 20, "{grown} bytes more after {rounds} rounds");
    still_serving(&served);
}

#[test]
fn thousands_of_idle_connections_keep_nobody_out() {
    let served = serve_demo(&[]);
    let wanted = setting("DELTAFIN_API_IDLE", 2000);
    let before = rss(&served);
    let mut idle = Vec::new();
    for n in 0..wanted {
        let Ok(mut stream) = TcpStream::connect(&served.addr) else {
            skipped(&format!(
                "only {n} idle connections: this test has no more files"
            ));
            break;
        };
        // A third says nothing, a third begins a head, a third begins a body.
        let said: &[u8] = match n % 3 {
            0 => b"",
            1 => b"GET /health HTTP/1.1\r\nhost: loc",
            _ => b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
        };
        stream.write_all(said).unwrap();
        idle.push(stream);
    }
    assert!(health(&served.addr).contains("\"ready\":true"));
    still_serving(&served);
    let grown = rss(&served).saturating_sub(before);
    assert!(
        grown < 256 << 20,
        "{grown} bytes for {} connections",
        idle.len()
    );
    drop(idle);
    still_serving(&served);
}
