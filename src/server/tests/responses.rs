//! `/v1/responses`, the web page, and what watches the server.

use serde_json::Value;
use serde_json::json;

use super::scripted::Beat;
use super::scripted::LONG;
use super::scripted::get;
use super::scripted::post;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::send;
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
        (json!({ "background": true, "store": false }), "background"),
        (json!({ "previous_response_id": 1 }), "previous_response_id"),
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
    let home = tempfile::tempdir().unwrap();
    let (server, _) = super::files::echoing(home.path());
    let description = get(&server, "/openapi.json").json();
    for (path, methods) in description["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "scripted");
        let reply = match methods.get("get") {
            Some(_) => get(&server, &path),
            None => post(&server, &path, &json!({ "wibble": 1 })),
        };
        // No response is called "scripted", and a path that is not served would not say "id".
        let unknown = reply.status == 404 && reply.json()["error"]["param"] == "id";
        assert!(
            reply.status == 200 || reply.status == 400 || unknown,
            "{path}: {}",
            reply.status
        );
    }
}

fn delete(server: &crate::server::Server, path: &str) -> super::scripted::Reply {
    receive(send(server.addr(), "DELETE", path, &[], ""))
}

/// Waits until a kept response is over.
fn over(server: &crate::server::Server, path: &str) -> Value {
    let started = std::time::Instant::now();
    loop {
        let response = get(server, path).json();
        if response["status"] != "queued" && response["status"] != "in_progress" {
            return response;
        }
        assert!(started.elapsed() < LONG, "{response}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn a_background_response_is_made_while_nobody_listens_and_can_be_heard_from_any_point() {
    let (server, _) = saying(vec![
        think("hm"),
        Beat::Work(std::time::Duration::from_millis(300)),
        say("done"),
    ]);
    let body = json!({ "input": "hi", "background": true, "seed": 1 });
    let begun = post(&server, RESPONSES, &body).json();
    assert!(
        begun["status"] == "queued" || begun["status"] == "in_progress",
        "{begun}"
    );
    let path = format!("{RESPONSES}/{}", begun["id"].as_str().unwrap());
    // A stream that joins late hears everything, and one that comes back what it missed.
    let stream = get(&server, &format!("{path}?stream=true"));
    let numbers = |reply: &super::scripted::Reply| -> Vec<u64> {
        let data = reply.body.lines().filter_map(|l| l.strip_prefix("data: "));
        let events = data.map(|d| serde_json::from_str::<Value>(d).unwrap());
        events
            .map(|e| e["sequence_number"].as_u64().unwrap())
            .collect()
    };
    let all = numbers(&stream);
    assert_eq!(all, (0..all.len() as u64).collect::<Vec<_>>());
    assert!(stream.body.contains("response.completed"));
    let rest = get(&server, &format!("{path}?stream=true&starting_after=2"));
    assert_eq!(numbers(&rest), all[3..]);
    let whole = over(&server, &path);
    assert_eq!(whole["status"], "completed");
    assert_eq!(whole["background"], true);
    assert_eq!(whole["output"][1]["content"][0]["text"], "done");
    let items = get(&server, &format!("{path}/input_items")).json();
    assert_eq!(items["data"][0]["content"][0]["text"], "hi");
    // What is over stays what it is.
    let cancelled = post(&server, &format!("{path}/cancel"), &json!({})).json();
    assert_eq!(cancelled["status"], "completed");
    assert_eq!(delete(&server, &path).json()["deleted"], true);
    assert_eq!(get(&server, &path).status, 404);
    assert_eq!(delete(&server, &path).json()["error"]["code"], "not_found");
}

#[test]
fn a_background_response_is_cancelled_at_work_and_in_line() {
    let (server, generator) = saying(vec![think("hm"), Beat::Work(LONG)]);
    let body = json!({ "input": "hi", "background": true });
    let begin = || {
        post(&server, RESPONSES, &body).json()["id"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let (first, second) = (begin(), begin());
    generator.wait_for(|working, _| working == 1);
    for id in [&second, &first] {
        let path = format!("{RESPONSES}/{id}");
        let cancelled = post(&server, &format!("{path}/cancel"), &json!({})).json();
        assert_eq!(cancelled["status"], "cancelled");
        assert_eq!(get(&server, &path).json()["status"], "cancelled");
        // Whoever listens hears the end of it.
        get(&server, &format!("{path}?stream=true"));
    }
    generator.wait_for(|working, stopped| (working, stopped) == (0, 1));
    assert_eq!(generator.seen.lock().unwrap().len(), 1);
}

#[test]
fn a_kept_response_is_gone_on_from() {
    let (server, generator) = saying(vec![think("hm"), say("I am here.")]);
    let first = json!({ "input": "Who are you?", "instructions": "Be brief." });
    let first = post(&server, RESPONSES, &first).json();
    assert_eq!(first["store"], true);
    let id = first["id"].as_str().unwrap();
    let next = json!({ "input": "Where?", "previous_response_id": id });
    let next = post(&server, RESPONSES, &next).json();
    assert_eq!(next["previous_response_id"], id);
    let seen = generator.seen.lock().unwrap().clone();
    let crate::server::Prompt::Chat(chat) = &seen[1].prompt else {
        panic!("no chat");
    };
    let told = format!("{:?}", chat.messages);
    for part in ["Who are you?", "hm", "I am here.", "Where?"] {
        assert!(told.contains(part), "{told}");
    }
    assert!(
        !told.contains("Be brief."),
        "instructions are not inherited"
    );
    let unknown = json!({ "input": "x", "previous_response_id": "resp_0" });
    assert_eq!(post(&server, RESPONSES, &unknown).status, 404);
    // What is not to be stored is not.
    let unstored = post(&server, RESPONSES, &json!({ "input": "x", "store": false })).json();
    let path = format!("{RESPONSES}/{}", unstored["id"].as_str().unwrap());
    assert_eq!(get(&server, &path).status, 404);
    let cancel = post(&server, &format!("{RESPONSES}/{id}/cancel"), &json!({}));
    assert_eq!(cancel.status, 400);
}

#[test]
fn the_live_picture_tells_which_experts_arrived() {
    let (server, _) = saying(vec![]);
    let live = get(&server, "/live?since=1").json();
    assert_eq!(live["arrivals"]["next"], 3);
    assert_eq!(
        live["arrivals"]["experts"],
        json!([[1, 2, "h"], [1, 2, "h"]])
    );
    assert_eq!(live["now"]["layers"], 8);
}
