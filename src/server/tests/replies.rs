use serde_json::Value;
use serde_json::json;

use super::scripted::Beat;
use super::scripted::Reply;
use super::scripted::Scripted;
use super::scripted::get;
use super::scripted::post;
use super::scripted::say;
use super::scripted::saying;
use super::scripted::serve;
use super::scripted::think;
use crate::server::Failure;
use crate::server::Finish;
use crate::server::Prompt;
use crate::server::logprobs;
use crate::text::ReplyEvent;

fn chat(extra: &Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Who are you?" }] });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn calls() -> Vec<Beat> {
    let event = |event| Beat::Say(event);
    let arguments = |index, fragment: &str| {
        event(ReplyEvent::ToolArguments {
            index,
            fragment: fragment.to_owned(),
        })
    };
    let start = |index, name: &str| {
        event(ReplyEvent::ToolCallStart {
            index,
            name: name.to_owned(),
        })
    };
    vec![
        think("hm"),
        start(0, "look"),
        arguments(0, "{\"at\":\"the "),
        arguments(0, "sky\"}"),
        event(ReplyEvent::ToolCallEnd { index: 0 }),
        start(1, "rest"),
        arguments(1, "{}"),
        event(ReplyEvent::ToolCallEnd { index: 1 }),
        event(ReplyEvent::End),
        Beat::Finish(Finish::ToolCalls),
    ]
}

#[test]
fn a_chat_is_answered_whole_in_openais_shape() {
    let (server, _) = saying(vec![
        think("Well. "),
        think("I."),
        say("I am "),
        say("here."),
    ]);
    let reply = post(&server, "/v1/chat/completions", &chat(&json!({"seed": 7})));
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let mut body = reply.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    let prompt = body["usage"]["prompt_tokens"].take();
    body["id"].take();
    body["created"].take();
    body["usage"]["total_tokens"].take();
    assert!(prompt.as_u64().unwrap() > 10);
    assert_eq!(
        body,
        json!({
            "id": null, "object": "chat.completion", "created": null,
            "model": "deltafin/scripted", "system_fingerprint": "fp_script",
            "choices": [{
                "index": 0,
                "message": {
                    "role": "assistant", "content": "I am here.", "refusal": null,
                    "reasoning_content": "Well. I.",
                },
                "logprobs": null, "finish_reason": "stop",
            }],
            "usage": {
                "prompt_tokens": null, "completion_tokens": 0, "total_tokens": null,
                "prompt_tokens_details": { "cached_tokens": 0, "cache_write_tokens": 0 },
                "completion_tokens_details": { "reasoning_tokens": 0 },
                "deltafin": {
                    "experts": { "requested": 28, "memory": 1, "disk": 20, "peer": 3, "hub": 4 },
                    "bytes": { "memory": 0, "disk": 0, "peer": 0, "hub": 0 },
                    "seconds": {
                        "prefill": 0.0, "decode": 0.0, "compute": 0.0,
                        "wait_disk": 0.0, "wait_hub": 1.5,
                    },
                    "seed": 7, "reasoning_effort": "low",
                },
            },
        })
    );
}

/// What a client makes of a chat's stream.
fn joined(reply: &Reply) -> Value {
    let mut message = json!({ "content": "", "reasoning_content": "", "tool_calls": [] });
    let mut finish = Value::Null;
    for event in reply.events() {
        assert_eq!(event["object"], "chat.completion.chunk");
        let choice = &event["choices"][0];
        assert!(finish.is_null(), "something after the finish: {event}");
        finish = choice["finish_reason"].clone();
        for key in ["content", "reasoning_content"] {
            if let Some(text) = choice["delta"][key].as_str() {
                message[key] = format!("{}{text}", message[key].as_str().unwrap()).into();
            }
        }
        for call in choice["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let calls = message["tool_calls"].as_array_mut().unwrap();
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            let fragment = call["function"]["arguments"].as_str().unwrap();
            if index == calls.len() {
                assert!(call["id"].as_str().unwrap().starts_with("call_"));
                assert_eq!(call["type"], "function");
                calls.push(json!({ "name": call["function"]["name"], "arguments": "" }));
            }
            let arguments = calls[index]["arguments"].as_str().unwrap();
            calls[index]["arguments"] = format!("{arguments}{fragment}").into();
        }
    }
    message["finish"] = finish;
    message
}

#[test]
fn a_streams_deltas_join_to_the_whole_reply() {
    let scripts = [
        vec![say("one"), say(" two "), say("\u{1f600}\n\ndata: [DONE]")],
        vec![think("a"), think("b"), Beat::Finish(Finish::Length)],
        calls(),
    ];
    for script in scripts {
        let (server, _) = saying(script);
        let whole = post(&server, "/v1/chat/completions", &chat(&json!({}))).json();
        let stream = chat(&json!({ "stream": true }));
        let stream = joined(&post(&server, "/v1/chat/completions", &stream));
        let choice = &whole["choices"][0];
        let message = &choice["message"];
        let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let calls: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
        assert_eq!(
            stream,
            json!({
                "content": text("content"), "reasoning_content": text("reasoning_content"),
                "tool_calls": calls, "finish": choice["finish_reason"],
            })
        );
    }
}

#[test]
fn tool_calls_alone_have_no_content_and_finish_so() {
    let (server, _) = saying(calls());
    let whole = post(&server, "/v1/chat/completions", &chat(&json!({}))).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert_eq!(
        calls[0]["function"],
        json!({ "name": "look", "arguments": "{\"at\":\"the sky\"}" })
    );
}

#[test]
fn usage_comes_last_in_a_stream_that_asks_for_it_and_else_never() {
    let (server, _) = saying(vec![say("x")]);
    let body = chat(&json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let events = post(&server, "/v1/chat/completions", &body).events();
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["deltafin"]["experts"]["requested"], 28);
    assert!(before.iter().all(|e| e.get("usage") == Some(&Value::Null)));
    let events = post(
        &server,
        "/v1/chat/completions",
        &chat(&json!({ "stream": true })),
    )
    .events();
    assert!(events.iter().all(|e| e.get("usage").is_none()));
}

#[test]
fn a_stream_ends_with_done_also_on_error() {
    for (beat, said) in [
        (
            Beat::Fail(Failure::Unavailable {
                message: "the hub is gone".to_owned(),
            }),
            "the hub is gone",
        ),
        (Beat::Panic, "the engine failed"),
    ] {
        let (server, _) = saying(vec![say("so far"), beat]);
        let reply = post(
            &server,
            "/v1/chat/completions",
            &chat(&json!({ "stream": true })),
        );
        let events = reply.events();
        let error = &events.last().unwrap()["error"];
        assert_eq!(error["type"], "server_error");
        assert!(error["message"].as_str().unwrap().contains(said), "{error}");
        assert!(reply.complete);
        // One failed generation is not the end of the server.
        let again = post(
            &server,
            "/v1/chat/completions",
            &chat(&json!({ "stream": true })),
        );
        assert_eq!(again.status, 200);
    }
}

#[test]
fn a_failure_that_comes_soon_has_a_status_of_its_own() {
    let (server, _) = saying(vec![Beat::Fail(Failure::Unavailable {
        message: "offline".to_owned(),
    })]);
    let reply = post(&server, "/v1/chat/completions", &chat(&json!({})));
    assert_eq!(reply.status, 503);
    assert_eq!(reply.header("retry-after"), Some("60"));
    assert_eq!(
        reply.json(),
        json!({ "error": {
            "message": "offline", "type": "server_error", "param": null,
            "code": "weights_unavailable",
        }})
    );
}

#[test]
fn every_prompt_and_every_n_is_a_choice_and_prompts_are_counted_once() {
    let generator = Scripted::new(|ask| match &ask.prompt {
        Prompt::Text(text) => vec![say(&format!("{text}+{}", ask.sampling.seed))],
        _ => vec![say("?")],
    });
    let server = serve(&generator);
    let body = json!({ "prompt": ["aa", "bb"], "n": 2, "seed": 5, "max_tokens": 3 });
    let reply = post(&server, "/v1/completions", &body).json();
    assert_eq!(reply["object"], "text_completion");
    let texts = reply["choices"].as_array().unwrap().iter();
    let texts: Vec<_> = texts
        .map(|c| (c["index"].as_u64().unwrap(), c["text"].as_str().unwrap()))
        .collect();
    assert_eq!(texts, [(0, "aa+5"), (1, "aa+6"), (2, "bb+5"), (3, "bb+6")]);
    let one = |text| {
        let body = json!({ "prompt": text });
        let usage = post(&server, "/v1/completions", &body).json()["usage"].clone();
        usage["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(
        reply["usage"]["prompt_tokens"].as_u64().unwrap(),
        one("aa") + one("bb")
    );
    assert_eq!(reply["usage"]["deltafin"]["experts"]["requested"], 4 * 28);
}

#[test]
fn echo_begins_with_the_prompt_and_ids_are_echoed_as_they_read() {
    let (server, generator) = saying(vec![say(" end")]);
    let ask = |body: Value| post(&server, "/v1/completions", &body);
    let reply = ask(json!({ "prompt": "A début", "echo": true })).json();
    assert_eq!(reply["choices"][0]["text"], "A début end");
    let ids =
        crate::server::Generator::tokens(generator.as_ref(), &Prompt::Text("A début".to_owned()))
            .unwrap();
    let reply = ask(json!({ "prompt": ids, "echo": true })).json();
    assert_eq!(reply["choices"][0]["text"], "A début end");
    let events = ask(json!({ "prompt": [ids], "echo": true, "stream": true })).events();
    let texts = events
        .iter()
        .map(|e| e["choices"][0]["text"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), "A début end");
}

#[test]
fn a_tokens_score_is_the_log_of_its_softmax() {
    let scored = logprobs::score(2, &[0.0, 2.0, 1.0, 2.0], 3);
    let total = 1.0 + 2.0 * 2f64.exp() + 1f64.exp();
    let log = |logit: f64| logit - total.ln();
    assert!((scored.logprob - log(1.0)).abs() < 1e-12);
    let ids: Vec<_> = scored.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, [1, 3, 2], "best first, ties to the lower id");
    assert!((scored.top[1].1 - log(2.0)).abs() < 1e-12);
    assert!(logprobs::score(0, &[0.0, 1.0], 0).top.is_empty());
}

#[test]
fn only_the_answers_tokens_are_scored() {
    let probe = Scripted::new(|_| Vec::new());
    let tokenizer = |text: &str| {
        crate::server::Generator::tokens(probe.as_ref(), &Prompt::Text(text.to_owned())).unwrap()
    };
    // A special token by its name: only a chat's prompt is written with them.
    let special = |name: &str| {
        (0..2304)
            .find(|&id| {
                crate::server::Generator::special(probe.as_ref(), id)
                    && crate::server::Generator::bytes(probe.as_ref(), id) == name.as_bytes()
            })
            .unwrap()
    };
    let token = |id| Beat::Token(id, vec![0.0; 2304]);
    let mut script = vec![
        token(tokenizer("a")[0]),
        think("a"),
        token(special("<|close|>")),
    ];
    script.extend(tokenizer("think").into_iter().map(token));
    script.extend([token(special("<|sep|>")), token(special("<|open|>"))]);
    script.extend(tokenizer("response").into_iter().map(token));
    script.push(token(special("<|sep|>")));
    let answer = tokenizer("Hello there");
    assert!(answer.len() > 1);
    // Held back by a stop text, the answer may come later than its tokens, and in one piece.
    script.extend(answer.iter().copied().map(token));
    script.push(say("Hello there"));
    let (server, _) = saying(script);
    let ask = |stream: bool| {
        let extra = json!({ "logprobs": true, "top_logprobs": 2, "stream": stream });
        post(&server, "/v1/chat/completions", &chat(&extra))
    };
    let content = ask(false).json()["choices"][0]["logprobs"]["content"].clone();
    let tokens = content.as_array().unwrap();
    let texts: String = tokens
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(texts, "Hello there");
    for token in tokens {
        assert!((token["logprob"].as_f64().unwrap() + 2304f64.ln()).abs() < 1e-9);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        let bytes: Vec<_> = token["token"].as_str().unwrap().bytes().collect();
        assert_eq!(token["bytes"], json!(bytes));
    }
    let streamed: Vec<_> = ask(true)
        .events()
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(content, Value::Array(streamed));
}

#[test]
fn a_completions_scores_stand_in_parallel_lists() {
    let probe = Scripted::new(|_| Vec::new());
    let ids = crate::server::Generator::tokens(probe.as_ref(), &Prompt::Text("one two".to_owned()))
        .unwrap();
    let mut script: Vec<_> = ids
        .iter()
        .map(|&id| Beat::Token(id, vec![0.5; 2304]))
        .collect();
    script.push(say("one two"));
    let (server, _) = saying(script);
    let body = json!({ "prompt": "x", "logprobs": 2 });
    let reply = post(&server, "/v1/completions", &body).json();
    let logprobs = &reply["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let lens: Vec<_> = tokens.iter().map(|t| t.as_str().unwrap().len()).collect();
    assert_eq!(tokens.len(), ids.len());
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["text_offset"][1], lens[0]);
    assert_eq!(
        logprobs["token_logprobs"].as_array().unwrap().len(),
        ids.len()
    );
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
}

#[test]
fn the_model_is_listed_and_found_by_either_name() {
    let (server, _) = saying(Vec::new());
    let list = get(&server, "/v1/models").json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "deltafin/scripted");
    for name in ["deltafin/scripted", "scripted"] {
        let model = get(&server, &format!("/v1/models/{name}"));
        assert_eq!(model.json()["id"], "deltafin/scripted");
    }
    let other = get(&server, "/v1/models/gpt-4o");
    assert_eq!(other.status, 404);
    assert_eq!(other.json()["error"]["code"], "model_not_found");
}
