//! `/v1/responses`, the web page, and what watches the server.

use serde_json::Value;
use serde_json::json;

use super::scripted::Beat;
use super::scripted::get;
use super::scripted::post;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::think;
use crate::server::Finish;
use crate::server::Prompt;
use crate::text::ReplyEvent;
use crate::text::Role;

const RESPONSES: &str = "/v1/responses";

fn script() -> Vec<Beat> {
    vec![
        think("hm"),
        say("one "),
        say("two"),
        Beat::Say(ReplyEvent::ToolCallStart {
            index: 0,
            name: "look".to_owned(),
        }),
        Beat::Say(ReplyEvent::ToolArguments {
            index: 0,
            fragment: "{\"a\":".to_owned(),
        }),
        Beat::Say(ReplyEvent::ToolArguments {
            index: 0,
            fragment: "1}".to_owned(),
        }),
        Beat::Say(ReplyEvent::ToolCallEnd { index: 0 }),
        Beat::Finish(Finish::ToolCalls),
    ]
}

/// A response without what differs from one to the next.
fn settled(mut response: Value) -> Value {
    response["id"].take();
    response["created_at"].take();
    response["usage"]["deltafin"]["seed"].take();
    for item in response["output"].as_array_mut().unwrap() {
        item["id"].take();
        if item["type"] == "function_call" {
            item["call_id"].take();
        }
    }
    response
}

#[test]
fn a_responses_events_are_numbered_and_end_in_the_whole_response() {
    let (server, _) = saying(script());
    let whole = post(&server, RESPONSES, &json!({ "input": "hi" })).json();
    assert_eq!(
        (&whole["object"], &whole["status"]),
        (&json!("response"), &json!("completed"))
    );
    let kinds = whole["output"].as_array().unwrap().iter();
    let kinds: Vec<_> = kinds.map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][1]["content"][0]["text"], "one two");
    assert_eq!(whole["output"][2]["arguments"], "{\"a\":1}");

    let reply = post(
        &server,
        RESPONSES,
        &json!({ "input": "hi", "stream": true }),
    );
    let data = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|d| serde_json::from_str(d).unwrap()).collect();
    let names = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("event: "));
    assert!(names.eq(events.iter().map(|e| e["type"].as_str().unwrap())));
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], n);
    }
    assert_eq!(events[0]["type"], "response.created");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(settled(last["response"].clone()), settled(whole));
    let joined = |kind: &str| -> String {
        let deltas = events.iter().filter(|e| e["type"] == kind);
        deltas.map(|e| e["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(joined("response.output_text.delta"), "one two");
    assert_eq!(
        joined("response.function_call_arguments.delta"),
        "{\"a\":1}"
    );
}

#[test]
fn a_response_that_is_cut_off_says_so() {
    let (server, _) = saying(vec![say("so f"), Beat::Finish(Finish::Length)]);
    let whole = post(&server, RESPONSES, &json!({ "input": "hi" })).json();
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["output"][0]["status"], "incomplete");
}

#[test]
fn a_responses_input_becomes_a_conversation() {
    let (server, generator) = saying(vec![say("ok")]);
    let body = json!({
        "instructions": "Be kind.",
        "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "Look." }] },
            { "type": "reasoning", "summary": [] },
            { "type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c1", "output": "blue" },
        ],
        "tools": [{ "type": "function", "name": "look", "parameters": {} }],
        "max_output_tokens": 9,
    });
    assert_eq!(post(&server, RESPONSES, &body).status, 200);
    let seen = generator.seen.lock().unwrap();
    assert_eq!(seen[0].max_tokens, Some(9));
    let Prompt::Chat(chat) = &seen[0].prompt else {
        panic!("no chat");
    };
    let roles: Vec<_> = chat.messages.iter().map(|m| m.role).collect();
    assert_eq!(
        roles,
        [Role::System, Role::User, Role::Assistant, Role::Tool]
    );
    assert_eq!(chat.tools.as_ref().unwrap()[0]["function"]["name"], "look");
    drop(seen);
    for (extra, param) in [
        (json!({ "background": true }), "background"),
        (
            json!({ "previous_response_id": "resp_1" }),
            "previous_response_id",
        ),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0]"),
        (json!({ "wibble": 1 }), "wibble"),
    ] {
        let mut body = extra;
        body["input"] = "hi".into();
        let reply = post(&server, RESPONSES, &body);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param))
        );
    }
}

#[test]
fn metrics_count_what_was_served() {
    let (server, _) = saying(vec![say("ok")]);
    post(&server, "/v1/completions", &json!({ "prompt": "one two" }));
    let metrics = get(&server, "/metrics").body;
    assert!(
        metrics.contains("deltafin_requests_total{end=\"finished\"} 1\n"),
        "{metrics}"
    );
    assert!(metrics.contains("deltafin_ready 1\n"), "{metrics}");
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (_, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }
}

#[test]
fn the_page_loads_nothing_from_elsewhere() {
    let (server, _) = saying(Vec::new());
    let page = get(&server, "/");
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    assert!(!page.body.contains("http://") && !page.body.contains("https://"));
}

#[test]
fn the_description_names_every_path_that_answers() {
    let (server, _) = saying(Vec::new());
    let description = get(&server, "/openapi.json").json();
    for (path, methods) in description["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "scripted");
        let reply = match methods.get("get") {
            Some(_) => get(&server, &path),
            None => post(&server, &path, &json!({ "wibble": 1 })),
        };
        assert!(
            reply.status == 200 || reply.status == 400,
            "{path}: {}",
            reply.status
        );
    }
}
