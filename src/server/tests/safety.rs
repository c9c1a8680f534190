//! Who may ask, and how much.

use serde_json::json;

use super::scripted::ANY;
use super::scripted::Reply;
use super::scripted::Scripted;
use super::scripted::get;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::send;
use super::scripted::serve_with;
use crate::server::Server;
use crate::server::ServerError;
use crate::server::ServerOptions;
use crate::share::Secret;

const CHAT: &str = "/v1/chat/completions";

fn chat(server: &Server, headers: &[(&str, &str)]) -> Reply {
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    receive(send(
        server.addr(),
        "POST",
        CHAT,
        headers,
        &body.to_string(),
    ))
}

fn with(options: ServerOptions) -> Server {
    serve_with(&Scripted::new(|_| vec![say("ok")]), options)
}

#[test]
fn beyond_loopback_a_key_is_needed() {
    let everywhere = "0.0.0.0:0".parse().unwrap();
    let refused = Server::start(everywhere, ServerOptions::new());
    assert!(matches!(refused, Err(ServerError::Open(_))));
    let options = ServerOptions {
        api_key: Some(Secret::new("sesame")),
        ..ServerOptions::new()
    };
    Server::start(everywhere, options).unwrap();
}

#[test]
fn the_key_guards_everything_but_health() {
    let server = with(ServerOptions {
        api_key: Some(Secret::new("sesame")),
        ..ServerOptions::new()
    });
    for wrong in [
        "",
        "Bearer ",
        "Bearer sesam",
        "Bearer sesamee",
        "Basic sesame",
        "sesame",
    ] {
        let reply = chat(&server, &[("authorization", wrong)]);
        assert_eq!(reply.status, 401, "{wrong:?}");
        assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
    }
    assert_eq!(get(&server, "/v1/models").status, 401);
    assert_eq!(
        chat(&server, &[("authorization", "Bearer sesame")]).status,
        200
    );
    assert_eq!(
        chat(&server, &[("authorization", "bearer sesame")]).status,
        200
    );
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn a_foreign_host_name_pointed_at_this_machine_is_turned_away() {
    let (server, _) = saying(vec![say("ok")]);
    for host in [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "10.0.0.1",
    ] {
        assert_eq!(chat(&server, &[("host", host)]).status, 403, "{host}");
    }
    for host in [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "127.1.2.3",
    ] {
        assert_eq!(chat(&server, &[("host", host)]).status, 200, "{host}");
    }
}

#[test]
fn only_listed_origins_may_ask_and_read() {
    let server = with(ServerOptions {
        origins: vec!["http://localhost:3000".to_owned()],
        ..ServerOptions::new()
    });
    for origin in ["http://evil.example", "null", "http://localhost:3001"] {
        let reply = chat(&server, &[("origin", origin)]);
        assert_eq!(reply.status, 403, "{origin}");
        assert_eq!(reply.header("access-control-allow-origin"), None);
    }
    let listed = [("origin", "http://localhost:3000")];
    let reply = chat(&server, &listed);
    assert_eq!(reply.status, 200);
    assert_eq!(
        reply.header("access-control-allow-origin"),
        Some("http://localhost:3000")
    );
    let own = format!("http://{}", server.addr());
    assert_eq!(chat(&server, &[("origin", &own)]).status, 200);
    let preflight = [
        listed[0],
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization, x-stainless-os",
        ),
    ];
    let reply = receive(send(server.addr(), "OPTIONS", CHAT, &preflight, ""));
    assert_eq!(reply.status, 204);
    assert_eq!(
        reply.header("access-control-allow-headers"),
        Some("authorization, x-stainless-os")
    );
}

#[test]
fn a_body_beyond_the_limit_is_a_413() {
    let server = with(ServerOptions {
        body_max: 10_000,
        ..ServerOptions::new()
    });
    let body = format!("{{\"prompt\":\"{}\"}}", "a".repeat(20_000));
    let reply = receive(send(server.addr(), "POST", "/v1/completions", &[], &body));
    assert_eq!(reply.status, 413);
    assert_eq!(reply.json()["error"]["code"], "request_too_large");
}

#[test]
fn headers_beyond_the_limit_are_a_431() {
    let (server, _) = saying(Vec::new());
    let bomb = "x".repeat(200_000);
    let reply = receive(send(
        server.addr(),
        "GET",
        "/health",
        &[("x-bomb", &bomb)],
        "",
    ));
    assert_eq!(reply.status, 431);
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn other_paths_and_methods_are_refused_in_openais_shape() {
    let (server, _) = saying(Vec::new());
    assert_eq!(
        get(&server, "/v1/nothing").json()["error"]["code"],
        "not_found"
    );
    assert_eq!(get(&server, CHAT).status, 405);
    assert_eq!(
        get(&server, CHAT).json()["error"]["code"],
        "method_not_allowed"
    );
    for path in ["/../etc/passwd", "/%2e%2e/etc/passwd", "/v1/models/../../x"] {
        assert_eq!(get(&server, path).status, 404, "{path}");
    }
}

#[test]
fn an_address_that_is_taken_is_an_error_that_says_so() {
    let first = Server::start(ANY.parse().unwrap(), ServerOptions::new()).unwrap();
    let second = Server::start(first.addr(), ServerOptions::new());
    let error = second.err().expect("the port is taken");
    assert!(matches!(error, ServerError::Bind { .. }));
    assert!(
        error.to_string().contains(&first.addr().to_string()),
        "{error}"
    );
}
