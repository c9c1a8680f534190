//! `/v1/files`.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use serde_json::json;

use super::scripted::ANY;
use super::scripted::LONG;
use super::scripted::Reply;
use super::scripted::Scripted;
use super::scripted::get;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::send;
use super::scripted::think;
use crate::server::Generator;
use crate::server::Server;
use crate::server::ServerOptions;

pub(super) fn serve_at(home: &Path, generator: &Arc<Scripted>, options: ServerOptions) -> Server {
    let server = Server::start(ANY.parse().unwrap(), options).unwrap();
    server.keep_files(home).unwrap();
    server
        .ready(Arc::clone(generator) as Arc<dyn Generator>)
        .unwrap();
    server
}

pub(super) fn one_at_a_time() -> ServerOptions {
    ServerOptions {
        running_max: 1,
        ..ServerOptions::new()
    }
}

/// A server that says the seed it was asked with.
pub(super) fn echoing(home: &Path) -> (Server, Arc<Scripted>) {
    let generator = Scripted::new(|ask| vec![think("hm"), say(&ask.sampling.seed.to_string())]);
    let server = serve_at(home, &generator, one_at_a_time());
    (server, generator)
}

const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=XX");

fn form(purpose: &str, text: &str) -> String {
    format!(
        "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n{purpose}\r\n\
         --XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n{text}\r\n--XX--\r\n"
    )
}

fn send_form(server: &Server, body: &str) -> Reply {
    receive(send(server.addr(), "POST", "/v1/files", &[FORM], body))
}

pub(super) fn upload(server: &Server, text: &str) -> String {
    let reply = send_form(server, &form("batch", text));
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["id"].as_str().unwrap().to_owned()
}

pub(super) fn delete(server: &Server, path: &str) -> Reply {
    receive(send(server.addr(), "DELETE", path, &[], ""))
}

#[test]
fn files_are_kept_listed_given_back_and_deleted() {
    let home = tempfile::tempdir().unwrap();
    let (server, generator) = echoing(home.path());
    let texts = ["{}\n", "", "\r\n--X\r\n"];
    let ids: Vec<_> = texts.iter().map(|text| upload(&server, text)).collect();
    for (id, text) in ids.iter().zip(texts) {
        let file = get(&server, &format!("/v1/files/{id}")).json();
        assert_eq!(file["object"], "file");
        assert_eq!(file["bytes"], text.len());
        assert_eq!(file["filename"], "in.jsonl");
        assert_eq!(
            (&file["purpose"], &file["id"]),
            (&json!("batch"), &json!(id))
        );
        let reply = get(&server, &format!("/v1/files/{id}/content"));
        assert_eq!(reply.body, text);
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(
            reply.header("content-type"),
            Some("application/octet-stream")
        );
    }
    let listed = |query: &str| {
        let list = get(&server, &format!("/v1/files{query}")).json();
        let data = list["data"].as_array().unwrap().iter();
        let ids: Vec<_> = data.map(|f| f["id"].as_str().unwrap().to_owned()).collect();
        (ids, list["has_more"].as_bool().unwrap())
    };
    let newest_first: Vec<_> = ids.iter().rev().cloned().collect();
    assert_eq!(listed(""), (newest_first.clone(), false));
    assert_eq!(listed("?order=asc"), (ids.clone(), false));
    assert_eq!(listed("?limit=2"), (newest_first[..2].to_vec(), true));
    let after = format!("?limit=2&after={}", newest_first[1]);
    assert_eq!(listed(&after), (newest_first[2..].to_vec(), false));
    assert_eq!(listed("?purpose=batch_output").0, Vec::<String>::new());
    for (query, param) in [
        ("?limit=0", "limit"),
        ("?order=up", "order"),
        ("?after=x", "after"),
    ] {
        let refused = get(&server, &format!("/v1/files{query}")).json();
        assert_eq!(refused["error"]["param"], param);
    }
    // They outlive the server.
    drop(server);
    let server = serve_at(home.path(), &generator, one_at_a_time());
    let path = format!("/v1/files/{}", ids[0]);
    let gone = delete(&server, &path).json();
    assert_eq!(
        gone,
        json!({ "id": ids[0], "object": "file", "deleted": true })
    );
    for reply in [
        delete(&server, &path),
        get(&server, &path),
        get(&server, &format!("{path}/content")),
    ] {
        assert_eq!(reply.status, 404, "{}", reply.body);
    }
    assert_eq!(get(&server, &format!("/v1/files/{}", ids[1])).status, 200);
    for path in [
        "/v1/files/..%2Ffile",
        "/v1/files/file-",
        "/v1/batches/batch_..",
        "/v1/batches/..",
    ] {
        assert_eq!(get(&server, path).status, 404, "{path}");
    }
}

fn left_of_uploads(home: &Path) -> usize {
    std::fs::read_dir(home.join("files-v1")).unwrap().count()
}

#[test]
fn what_is_no_file_for_a_batch_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let generator = Scripted::new(|_| vec![say("ok")]);
    let options = ServerOptions {
        file_max: 10_000,
        files_max: 15_000,
        ..one_at_a_time()
    };
    let server = serve_at(home.path(), &generator, options);
    let refused = |body: &str, status: u16, code: &str| {
        let reply = send_form(&server, body);
        assert_eq!(reply.status, status, "{}", reply.body);
        assert_eq!(reply.json()["error"]["code"], code);
        assert_eq!(left_of_uploads(home.path()), 0, "{code}");
    };
    refused(&form("assistants", "{}"), 400, "invalid_value");
    refused(
        &form("batch", "x").replace("\"file\"", "\"fill\""),
        400,
        "unsupported_parameter",
    );
    refused(
        &form("batch", "x").replace("\"purpose\"", "\"expires_after[seconds]\""),
        400,
        "unsupported_parameter",
    );
    refused(
        "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XX--\r\n",
        400,
        "missing_required_parameter",
    );
    refused(
        &form("batch", "x").replace("--XX--", "--XY--"),
        400,
        "invalid_multipart",
    );
    refused(
        &form("batch", &"x".repeat(10_001)),
        413,
        "request_too_large",
    );
    let reply = receive(send(
        server.addr(),
        "POST",
        "/v1/files",
        &[],
        &form("batch", "x"),
    ));
    assert_eq!(reply.json()["error"]["code"], "invalid_multipart");
    // Together they may not fill the disk either.
    upload(&server, &"x".repeat(10_000));
    let full = send_form(&server, &form("batch", &"x".repeat(5_001)));
    assert_eq!(full.status, 507);
    upload(&server, &"x".repeat(5_000));
}

#[test]
fn an_upload_that_is_broken_off_or_killed_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let (server, generator) = echoing(home.path());
    let body = form("batch", &"x".repeat(700_000));
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    write!(
        stream,
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\n{}: {}\r\ncontent-length: {}\r\n\r\n{}",
        FORM.0,
        FORM.1,
        body.len(),
        &body[..600_000]
    )
    .unwrap();
    let began = Instant::now();
    let wait = |count: usize| {
        while left_of_uploads(home.path()) != count {
            assert!(began.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait(1);
    assert_eq!(get(&server, "/v1/files").json()["data"], json!([]));
    drop(stream);
    wait(0);
    // As a killed process leaves it.
    drop(server);
    let left = home.path().join("files-v1/.new-1");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("content"), "x").unwrap();
    let _server = serve_at(home.path(), &generator, one_at_a_time());
    assert_eq!(left_of_uploads(home.path()), 0);
}

#[test]
fn a_server_that_keeps_nothing_says_so() {
    let (server, _) = saying(vec![say("ok")]);
    for path in ["/v1/files", "/v1/batches", "/v1/files/file-1/content"] {
        let reply = get(&server, path);
        assert_eq!(reply.status, 501);
        assert_eq!(reply.json()["error"]["code"], "not_kept");
    }
}
