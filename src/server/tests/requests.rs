//! What is honoured, what passes, and what is refused by name.

use serde_json::Value;
use serde_json::json;

use super::scripted::Beat;
use super::scripted::Scripted;
use super::scripted::post;
use super::scripted::receive;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::send;
use super::scripted::serve;
use crate::server::Ask;
use crate::server::Prompt;
use crate::server::Sampling;
use crate::text::Effort;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn with(path: &str, extra: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "hi" }] }),
        _ => json!({ "prompt": "hi" }),
    };
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// What the generator was asked for a request.
fn asked(path: &str, extra: &Value) -> Ask {
    let (server, generator) = saying(vec![say("ok")]);
    let reply = post(&server, path, &with(path, extra));
    assert_eq!(reply.status, 200, "{extra}: {}", reply.body);
    let seen = generator.seen.lock().unwrap();
    seen.last().unwrap().clone()
}

/// How tokens are chosen and the reply is sent: (path, parameters, the one at fault).
fn refused_choosing() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        (CHAT, json!({ "top_p": 1.5 }), "top_p"),
        (CHAT, json!({ "temperature": "hot" }), "temperature"),
        (CHAT, json!({ "temperature": -0.1 }), "temperature"),
        (CHAT, json!({ "n": 0 }), "n"),
        (CHAT, json!({ "max_tokens": 0 }), "max_tokens"),
        (
            CHAT,
            json!({ "max_completion_tokens": -1 }),
            "max_completion_tokens",
        ),
        (CHAT, json!({ "stop": vec!["1"; 17] }), "stop"),
        (CHAT, json!({ "stop": [1] }), "stop"),
        (CHAT, json!({ "seed": 1.5 }), "seed"),
        (CHAT, json!({ "stream": "yes" }), "stream"),
        (
            CHAT,
            json!({ "stream_options": { "include_usage": true } }),
            "stream_options",
        ),
        (
            CHAT,
            json!({ "stream": true, "stream_options": { "colour": 1 } }),
            "stream_options.colour",
        ),
        (CHAT, json!({ "logit_bias": { "99999": 1 } }), "logit_bias"),
        (CHAT, json!({ "logit_bias": { "5": 101 } }), "logit_bias"),
        (CHAT, json!({ "logit_bias": { "five": 1 } }), "logit_bias"),
        (CHAT, json!({ "top_logprobs": 2 }), "top_logprobs"),
        (
            CHAT,
            json!({ "logprobs": true, "top_logprobs": 21 }),
            "top_logprobs",
        ),
        (
            CHAT,
            json!({ "reasoning_effort": "heroic" }),
            "reasoning_effort",
        ),
        (CHAT, json!({ "messages": [] }), "messages"),
        (CHAT, json!({ "messages": "hi" }), "messages"),
    ]
}

/// What is asked in a chat.
fn refused_asking() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        (
            CHAT,
            json!({ "messages": [{ "role": "king", "content": "" }] }),
            "messages[0].role",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url",
                "image_url": { "url": "file:///etc/passwd" } }] }] }),
            "messages[0].content[0]",
        ),
        (CHAT, json!({ "tools": [{ "type": "magic" }] }), "tools[0]"),
        (CHAT, json!({ "tool_choice": "required" }), "tool_choice"),
        (CHAT, json!({ "functions": [{ "name": "f" }] }), "functions"),
        (
            CHAT,
            json!({ "modalities": ["text", "audio"] }),
            "modalities",
        ),
        (CHAT, json!({ "audio": { "voice": "alloy" } }), "audio"),
        (
            CHAT,
            json!({ "parallel_tool_calls": 1 }),
            "parallel_tool_calls",
        ),
        (CHAT, json!({ "prompt": "hi" }), "prompt"),
        (CHAT, json!({ "wibble": 1 }), "wibble"),
    ]
}

/// What is asked in a completion.
fn refused_completing() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        (COMPLETIONS, json!({ "prompt": [] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": { "a": 1 } }), "prompt"),
        (COMPLETIONS, json!({ "prompt": ["a", 1] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [1, 99999] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": "" }), "prompt"),
        (COMPLETIONS, json!({ "suffix": 1 }), "suffix"),
        (
            COMPLETIONS,
            json!({ "suffix": "}", "prompt": [1, 2] }),
            "suffix",
        ),
        (
            COMPLETIONS,
            json!({ "suffix": "}", "echo": true, "logprobs": 1 }),
            "suffix",
        ),
        (COMPLETIONS, json!({ "max_tokens": 0 }), "max_tokens"),
        (COMPLETIONS, json!({ "best_of": 3 }), "best_of"),
        (COMPLETIONS, json!({ "logprobs": 6 }), "logprobs"),
        (COMPLETIONS, json!({ "messages": [] }), "messages"),
    ]
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let (server, generator) = saying(vec![say("ok")]);
    let refused = [refused_choosing(), refused_asking(), refused_completing()].concat();
    for (path, extra, param) in refused {
        for stream in [false, true] {
            let mut body = with(path, &extra);
            if stream && body.get("stream").is_none() && body.get("stream_options").is_none() {
                body["stream"] = true.into();
            }
            let reply = post(&server, path, &body);
            assert_eq!(reply.status, 400, "{extra}: {}", reply.body);
            let error = &reply.json()["error"];
            assert_eq!(error["param"], param, "{error}");
            assert_eq!(error["type"], "invalid_request_error");
            assert!(error["code"].is_string(), "{error}");
            let message = error["message"].as_str().unwrap();
            let name = param.split('[').next().unwrap();
            assert!(message.contains(name) || extra["prompt"] == "", "{message}");
        }
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[test]
fn harmless_defaults_and_services_own_parameters_pass() {
    let harmless = json!({
        "model": "deltafin/scripted", "n": 1, "logprobs": false, "top_logprobs": null,
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": null,
        "user": "me", "metadata": { "a": "b" }, "store": true, "service_tier": "auto",
        "parallel_tool_calls": true, "modalities": ["text"], "response_format": { "type": "text" },
        "tools": [], "tool_choice": "none", "functions": [], "stream_options": null, "audio": null,
        "prediction": null, "safety_identifier": "x", "prompt_cache_key": "y", "verbosity": "medium",
        "reasoning_effort": null, "unheard_of": null,
    });
    assert_eq!(asked(CHAT, &harmless).stop, Vec::<String>::new());
    let harmless = json!({
        "model": "scripted", "best_of": 1, "suffix": null, "echo": false, "logprobs": null,
        "user": "me", "n": 1,
    });
    asked(COMPLETIONS, &harmless);
}

#[test]
fn a_suffix_is_asked_for_as_a_chat_without_thinking_and_marked_so() {
    let (server, generator) = saying(vec![say("a + b")]);
    let body =
        json!({ "prompt": "fn add(a: i32, b: i32) -> i32 {", "suffix": "<|open|>}", "n": 2 });
    let reply = post(&server, COMPLETIONS, &body).json();
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["deltafin"], json!({ "suffix": "chat" }));
    assert_eq!(reply["choices"][1]["text"], "a + b");
    let seen = generator.seen.lock().unwrap();
    let Prompt::Chat(chat) = &seen[0].prompt else {
        panic!("no chat: {:?}", seen[0].prompt);
    };
    assert_eq!(chat.effort, Effort::None);
    let shown = format!("{:?}", chat.messages);
    assert!(shown.contains("fn add(a: i32, b: i32)"), "{shown}");
    // Text of a user is never structure, also by this way.
    let ids = crate::server::Generator::tokens(generator.as_ref(), &seen[0].prompt).unwrap();
    let open = generator.tokenizer().special("<|open|>").unwrap();
    let plain = crate::server::Generator::tokens(generator.as_ref(), &without_suffix(&seen[0]));
    let count = |ids: &[u32]| ids.iter().filter(|&&id| id == open).count();
    assert_eq!(count(&ids), count(&plain.unwrap()));
    drop(seen);
    let events = post(
        &server,
        COMPLETIONS,
        &json!({ "prompt": "a", "suffix": "c", "echo": true, "stream": true }),
    )
    .events();
    assert!(events.iter().all(|e| e["deltafin"]["suffix"] == "chat"));
    let texts = events.iter().map(|e| e["choices"][0]["text"].as_str());
    assert_eq!(texts.map(Option::unwrap).collect::<String>(), "aa + b");
}

/// The same conversation, asking about nothing.
fn without_suffix(ask: &Ask) -> Prompt {
    let Prompt::Chat(chat) = &ask.prompt else {
        panic!("no chat");
    };
    let mut chat = chat.clone();
    let hello = json!({ "role": "user", "content": "hello" });
    *chat.messages.last_mut().unwrap() = crate::text::Message::from_json(&hello).unwrap();
    Prompt::Chat(chat)
}

#[test]
fn an_echo_is_scored_token_by_token_but_for_the_first() {
    let (server, generator) = saying(vec![Beat::Token(7, vec![0.0; 2304]), say("!")]);
    let ids: Vec<u32> = vec![500, 501, 900];
    let ask = |extra: Value| {
        let mut body = json!({ "prompt": ids, "echo": true, "logprobs": 1 });
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        post(&server, COMPLETIONS, &body)
    };
    let reply = ask(json!({ "max_tokens": 0 })).json();
    let logprobs = &reply["choices"][0]["logprobs"];
    let scores = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), 3);
    assert!(scores[0].is_null() && logprobs["top_logprobs"][0].is_null());
    // The script has each token's number follow the last one's.
    assert!(scores[1].as_f64().unwrap() > -1.0 && scores[2].as_f64().unwrap() < -9.0);
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    assert_eq!(
        generator.seen.lock().unwrap().len(),
        0,
        "nothing to generate"
    );
    let whole = ask(json!({ "max_tokens": 1 })).json();
    let scores = &whole["choices"][0]["logprobs"]["token_logprobs"];
    assert_eq!(scores.as_array().unwrap().len(), 4);
    let events = ask(json!({ "max_tokens": 1, "stream": true })).events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["token_logprobs"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(json!(streamed), *scores);
}

#[test]
fn another_model_is_not_found() {
    let (server, _) = saying(vec![say("ok")]);
    let reply = post(&server, CHAT, &with(CHAT, &json!({ "model": "gpt-4o" })));
    assert_eq!(reply.status, 404);
    let error = &reply.json()["error"];
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("model"), &json!("model_not_found"))
    );
}

#[test]
fn what_says_how_to_choose_tokens_reaches_the_generator() {
    let extra = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125, "presence_penalty": -1,
        "frequency_penalty": 1.5, "logit_bias": { "5": -100, "7": 2 }, "seed": -2,
        "stop": "END",
    });
    for path in [CHAT, COMPLETIONS] {
        let ask = asked(path, &extra);
        assert_eq!(
            ask.sampling,
            Sampling {
                temperature: 0.5,
                top_p: 0.25,
                top_k: 40,
                min_p: 0.125,
                presence_penalty: -1.0,
                frequency_penalty: 1.5,
                logit_bias: vec![(5, -100.0), (7, 2.0)],
                seed: u64::MAX - 1,
            }
        );
        assert_eq!(ask.stop, ["END"]);
    }
    let plain = asked(CHAT, &json!({})).sampling;
    assert_eq!((plain.temperature, plain.top_p, plain.top_k), (1.0, 1.0, 0));
    let other = asked(CHAT, &json!({})).sampling;
    assert_ne!(plain.seed, other.seed, "a seed nobody chose is drawn anew");
}

#[test]
fn the_newer_name_of_the_limit_wins_and_completions_have_their_own_default() {
    let limit = |path, extra| asked(path, &extra).max_tokens;
    assert_eq!(limit(CHAT, json!({})), None);
    assert_eq!(limit(CHAT, json!({ "max_tokens": 5 })), Some(5));
    let both = json!({ "max_tokens": 5, "max_completion_tokens": 9 });
    assert_eq!(limit(CHAT, both), Some(9));
    assert_eq!(limit(COMPLETIONS, json!({})), Some(16));
    assert_eq!(limit(COMPLETIONS, json!({ "max_tokens": 3 })), Some(3));
}

#[test]
fn effort_maps_onto_the_models_own_scale_and_is_reported() {
    let generator = Scripted::new(|_| vec![say("ok")]);
    let server = serve(&generator);
    for (name, effort, told) in [
        (json!(null), Effort::Low, "low"),
        (json!("none"), Effort::None, "none"),
        (json!("minimal"), Effort::None, "none"),
        (json!("medium"), Effort::High, "high"),
        (json!("xhigh"), Effort::Max, "max"),
    ] {
        let body = with(CHAT, &json!({ "reasoning_effort": name }));
        let reply = post(&server, CHAT, &body).json();
        assert_eq!(reply["usage"]["deltafin"]["reasoning_effort"], told);
        let seen = generator.seen.lock().unwrap();
        match &seen.last().unwrap().prompt {
            Prompt::Chat(chat) => assert_eq!(chat.effort, effort),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn messages_come_in_every_form_clients_send() {
    let messages = json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "system", "content": [{ "type": "text", "text": "Kind." }] },
        { "role": "user", "content": "" },
        { "role": "user", "name": "Ann", "content": [] },
        { "role": "assistant", "content": null, "refusal": null, "tool_calls": [{
            "id": "call_1", "type": "function",
            "function": { "name": "look", "arguments": "{\"at\": \"sky\"}" },
        }] },
        { "role": "tool", "tool_call_id": "call_1", "content": "blue" },
        { "role": "assistant", "content": "It is blue.", "reasoning_content": "seen", "audio": null },
        { "role": "user", "content": [{ "type": "text", "text": "And " },
                                      { "type": "text", "text": "now?" }] },
    ]);
    let ask = asked(CHAT, &json!({ "messages": messages }));
    match ask.prompt {
        Prompt::Chat(chat) => assert_eq!(chat.messages.len(), 8),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_body_that_is_no_json_object_is_a_400() {
    let (server, _) = saying(vec![say("ok")]);
    let deep = "[".repeat(100_000);
    for body in [
        "", "{", "[]", "\"hi\"", "null", "{\"a\":}", "\u{0}", "{} {}", &deep,
    ] {
        for path in [CHAT, COMPLETIONS] {
            let reply = receive(send(server.addr(), "POST", path, &[], body));
            assert_eq!(reply.status, 400, "{:.40}", body);
            assert_eq!(reply.json()["error"]["code"], "invalid_json");
        }
    }
}

#[test]
fn embeddings_are_refused_by_name() {
    let (server, _) = saying(Vec::new());
    let reply = post(&server, "/v1/embeddings", &json!({ "input": "x" }));
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("embeddings"), "{}", reply.body);
}
