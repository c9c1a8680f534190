//! A generation cut anywhere goes on as if it had never been.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use deltafin::engine::Constraint;
use deltafin::engine::ConstraintSource;
use deltafin::engine::Engine;
use deltafin::engine::Event;
use deltafin::engine::Finish;
use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::Shaping;
use deltafin::engine::Snapshots;
use deltafin::engine::Start;
use deltafin::text::Conversation;
use deltafin::text::Effort;

use crate::kit;
use crate::kit::answer;
use crate::kit::chat;
use crate::kit::greedy;
use crate::kit::run;
use crate::kit::sampled;
use crate::kit::trained;

/// A grammar that lets one text through, and remembers where it is.
struct Only {
    ids: Vec<u32>,
    at: usize,
}

impl Constraint for Only {
    fn mask(&mut self, logits: &mut [f32]) {
        let wanted = self.ids.get(self.at).copied();
        for (id, logit) in (0..).zip(logits) {
            if Some(id) != wanted {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn chose(&mut self, id: u32) {
        assert_eq!(
            self.ids.get(self.at),
            Some(&id),
            "it hears every token once"
        );
        self.at += 1;
    }
}

/// Makes the model say `text`, structure tokens by name, and end its message.
fn says(engine: &Engine, pieces: &[&str]) -> ConstraintSource {
    let tokenizer = engine.tokenizer().unwrap();
    let mut ids = Vec::new();
    for piece in pieces {
        match tokenizer.special(piece) {
            Some(id) => ids.push(id),
            None => ids.extend(tokenizer.encode(piece)),
        }
    }
    ids.push(engine.stop_ids()[0]);
    ConstraintSource::new(move || {
        let ids = ids.clone();
        Box::new(Only { ids, at: 0 })
    })
}

/// Requests that use every part a generation has.
fn cases(engine: &Engine) -> Vec<(&'static str, Request)> {
    let tool = [
        "I look.",
        "<|close|>",
        "think",
        "<|sep|>",
        "<|open|>",
        "tools",
        "<|sep|>",
        "<|open|>",
        "call tool=\"look\" index=\"1\"",
        "<|sep|>",
        "<|open|>",
        "argument key=\"at\" type=\"string\"",
        "<|sep|>",
        "the sea, é",
        "<|close|>",
        "argument",
        "<|sep|>",
        "<|close|>",
        "call",
        "<|sep|>",
        "<|close|>",
        "tools",
        "<|sep|>",
    ];
    let with_tool = Request {
        shaping: Shaping {
            constraint: Some(says(engine, &tool)),
            ..Shaping::default()
        },
        ..Request::new(chat("Look at the sea."), 200, greedy())
    };
    let plain = Prompt::Chat(Conversation {
        effort: Effort::None,
        ..match chat("Tell me a story.") {
            Prompt::Chat(conversation) => conversation,
            _ => unreachable!(),
        }
    });
    let stopped = Request {
        stop: vec!["zzz".to_owned(), " and".to_owned()],
        shaping: Shaping {
            top_k: 40,
            min_p: 0.01,
            presence_penalty: 0.3,
            frequency_penalty: 0.2,
            logit_bias: vec![(40, 1.5)],
            ..Shaping::default()
        },
        ..Request::new(plain, 40, sampled(11))
    };
    vec![
        ("greedy", Request::new(chat("Who are you?"), 14, greedy())),
        ("sampled, shaped, with stop texts", stopped),
        ("a tool call", with_tool),
        (
            "text to the limit",
            Request::new(Prompt::Text("It is a truth".to_owned()), 9, sampled(3)),
        ),
    ]
}

#[test]
fn a_generation_cut_at_any_token_goes_on_to_the_same_end() {
    let kit = trained();
    let engine = &kit.engine;
    for (name, request) in cases(engine) {
        let watched = Request {
            snapshots: Snapshots {
                every_tokens: Some(1),
                ..Snapshots::default()
            },
            ..request.clone()
        };
        let (whole, heard) = run(engine, &watched);
        let (prompt, made) = (whole.prompt_ids.len(), whole.token_ids.len());
        assert!(made > 5, "{name}: {made} tokens are no test");
        assert_eq!(heard.tokens, whole.token_ids);
        let calls = whole.finish == Finish::ToolCalls;
        assert_eq!(calls, name == "a tool call", "{:?}", whole.finish);
        for cut in 0..=made {
            // The state an earlier process would have left: from some tokens back, or none, which
            // costs the whole prompt and is tried at some of the cuts.
            let back = |s: &&Arc<Start>| s.ids.len() < prompt + cut.max(3) - 2;
            let mut starts = vec![heard.states.iter().rev().find(back)];
            if cut % 7 == 3 || cut == made {
                starts.push(None);
            }
            for start in starts {
                let resumed = Request {
                    generated: whole.token_ids[..cut].to_vec(),
                    start: start.cloned(),
                    ..request.clone()
                };
                let (again, rest) = run(engine, &resumed);
                assert_eq!(answer(&again), answer(&whole), "{name}, cut at {cut}");
                assert_eq!(rest.reply, heard.reply, "{name}, cut at {cut}");
                assert_eq!(rest.tokens, whole.token_ids[cut..], "{name}, cut at {cut}");
                assert!(
                    rest.logits == heard.logits[cut..],
                    "{name}, cut at {cut}: bits"
                );
                let rows = again.computed_rows + again.cached_tokens;
                if cut < made {
                    assert_eq!(rows, prompt + cut, "{name}, cut at {cut}");
                }
            }
        }
    }
}

#[test]
fn capture_holds_every_row_of_a_resumed_generation() {
    let kit = trained();
    for (name, request) in cases(&kit.engine) {
        let request = Request {
            capture: true,
            ..request
        };
        let (whole, _) = run(&kit.engine, &request);
        for cut in [1, whole.token_ids.len() / 2, whole.token_ids.len()] {
            let resumed = Request {
                generated: whole.token_ids[..cut].to_vec(),
                ..request.clone()
            };
            let (again, _) = run(&kit.engine, &resumed);
            assert_eq!(answer(&again), answer(&whole), "{name}, cut at {cut}");
        }
    }
}

#[test]
fn a_start_that_does_not_fit_is_not_used() {
    let kit = trained();
    let request = Request {
        snapshots: Snapshots {
            at_prompt_end: true,
            at_end: true,
            ..Snapshots::default()
        },
        ..Request::new(chat("Who are you?"), 8, greedy())
    };
    let (whole, heard) = run(&kit.engine, &request);
    let [prompt, end] = &heard.states[..] else {
        panic!(
            "{} states instead of prompt's and end's",
            heard.states.len()
        );
    };
    assert_eq!(prompt.ids, whole.prompt_ids);
    assert_eq!(end.ids.len(), whole.prompt_ids.len() + 7);
    // The whole prompt is known, so its last distribution is not: nothing is saved.
    for start in [prompt, end] {
        let again = Request {
            start: Some(start.clone()),
            ..request.clone()
        };
        let (made, _) = run(&kit.engine, &again);
        assert_eq!(answer(&made), answer(&whole));
        assert_eq!(
            (made.cached_tokens, made.computed_rows),
            (0, whole.prompt_ids.len())
        );
    }
    // Another text, as long.
    let mut other = Start::clone(prompt);
    other.ids[2] += 1;
    let again = Request {
        start: Some(other.into()),
        generated: whole.token_ids[..4].to_vec(),
        ..request.clone()
    };
    assert_eq!(run(&kit.engine, &again).0.cached_tokens, 0);
    let again = Request {
        start: Some(prompt.clone()),
        ..again
    };
    let (made, _) = run(&kit.engine, &again);
    assert_eq!(made.cached_tokens, whole.prompt_ids.len());
    assert_eq!(answer(&made), answer(&whole));
}

#[test]
fn a_stopped_generation_tells_where_it_stood() {
    let kit = trained();
    let request = Request {
        snapshots: Snapshots {
            every: Some(Duration::from_secs(1_000_000)),
            ..Snapshots::default()
        },
        ..Request::new(chat("Who are you?"), 12, greedy())
    };
    let (whole, heard) = run(&kit.engine, &request);
    assert!(heard.states.is_empty(), "nothing was due");
    let mut heard = kit::Heard::default();
    let stopped = kit.engine.generate(&request, &mut |event| {
        heard.hear(&event);
        match (event, heard.tokens.len()) {
            (Event::Token { .. }, 6) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let stopped = stopped.unwrap();
    assert_eq!(stopped.finish, Finish::Interrupted);
    assert_eq!(stopped.token_ids, whole.token_ids[..6]);
    let [state] = &heard.states[..] else {
        panic!("{} states instead of one", heard.states.len());
    };
    assert_eq!(state.ids.len(), whole.prompt_ids.len() + 5);
    let resumed = Request {
        generated: stopped.token_ids,
        start: Some(state.clone()),
        ..request
    };
    let (again, _) = run(&kit.engine, &resumed);
    assert_eq!(answer(&again), answer(&whole));
    assert_eq!(again.computed_rows, 1);
}

#[test]
fn what_was_generated_is_checked_like_a_prompt() {
    let kit = trained();
    let request = Request {
        generated: vec![5, 1_000_000],
        ..Request::new(Prompt::Ids(vec![1, 2]), 4, greedy())
    };
    let refused = kit
        .engine
        .generate(&request, &mut |_| ControlFlow::Continue(()));
    assert!(refused.unwrap_err().to_string().contains("1000000"));
}
