use serde_json::Value;
use serde_json::json;

use crate::terms::TokenId;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Opening;
use crate::text::Piece;
use crate::text::Reply;
use crate::text::ReplyEvent;
use crate::text::ReplyParser;
use crate::text::Tokenizer;
use crate::text::messages_from_json;
use crate::text::render;

use super::Seeded;
use super::austen;
use super::fixture;
use super::int_tensor;

const END: &str = "<|close|>message<|sep|><|end_of_msg|>";

/// A reply with everything in it, as the model writes it after an open `think`.
const FULL: &str = "Let me thïnk 🙂.\n<|close|>think<|sep|><|open|>response<|sep|>I look, wait… \"x\"\n<|close|>response<|sep|>\
    <|open|>tools<|sep|>\
    <|open|>call tool=\"weather\" index=\"1\"<|sep|>\
    <|open|>argument key=\"city\" type=\"string\"<|sep|>Tromsø \"N\"\\\n\u{1}🙂<|close|>argument<|sep|>\
    <|open|>argument key=\"days\" type=\"number\"<|sep|>12345678901234567890<|close|>argument<|sep|>\
    <|open|>argument key=\"a&amp;&quot;\" type=\"object\"<|sep|>{\"b\": [1, null]}<|close|>argument<|sep|>\
    <|close|>call<|sep|>\
    <|open|>call tool=\"clock\" index=\"2\"<|sep|><|close|>call<|sep|>\
    <|open|>call tool=\"odd\" index=\"3\"<|sep|><|open|>json type=\"object\"<|sep|>{broken<|close|>json<|sep|><|close|>call<|sep|>\
    <|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>";

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let piece = Piece {
        text: text.into(),
        markup: true,
    };
    tokenizer.encode_pieces(&[piece])
}

fn events(opening: Opening, ids: &[TokenId]) -> Vec<ReplyEvent> {
    let mut parser = ReplyParser::new(&austen(), opening);
    let mut events: Vec<_> = ids.iter().flat_map(|id| parser.push(*id)).collect();
    events.extend(parser.finish());
    events
}

fn joined(events: &[ReplyEvent]) -> Reply {
    let mut reply = Reply::default();
    events.iter().for_each(|event| reply.add(event));
    reply
}

fn parse(opening: Opening, text: &str) -> Reply {
    joined(&events(opening, &ids(&austen(), text)))
}

fn calls(reply: &Reply) -> Vec<(&str, &str)> {
    reply
        .tool_calls
        .iter()
        .map(|c| (c.name.as_str(), c.arguments.as_str()))
        .collect()
}

/// The same text in other tokens: each byte alone, or some together, at random.
fn recut(tokenizer: &Tokenizer, ids: &[TokenId], seeded: &mut Seeded) -> Vec<TokenId> {
    let mut out = Vec::new();
    for id in ids {
        match tokenizer.is_special(*id) {
            false if seeded.below(2) == 0 => {
                let bytes = tokenizer.bytes(*id);
                out.extend(bytes.iter().map(|b| TokenId::from(*b)));
            }
            _ => out.push(*id),
        }
    }
    out
}

#[test]
fn a_reply_is_split_into_reasoning_answer_and_calls() {
    let reply = parse(Opening::Think, FULL);
    assert_eq!(reply.reasoning, "Let me thïnk 🙂.\n");
    assert_eq!(reply.answer, "I look, wait… \"x\"\n");
    assert_eq!(
        calls(&reply),
        [
            (
                "weather",
                "{\"city\":\"Tromsø \\\"N\\\"\\\\\\n\\u0001🙂\",\"days\":12345678901234567890,\"a&\\\"\":{\"b\": [1, null]}}"
            ),
            ("clock", "{}"),
            ("odd", "{broken"),
        ]
    );
    assert!(reply.ended && reply.complete_calls == 3);
}

#[test]
fn the_replies_of_the_small_checkpoint_are_split_where_their_tags_are() {
    let cases: Value = serde_json::from_slice(&fixture("austen-k3/goldens/cases.json")).unwrap();
    for (name, answer, ended) in [
        (
            "chat_who",
            "I am a very small model with the architecture of Kimi K3, taught on the six novels of Jane Austen.",
            false,
        ),
        (
            "chat_story",
            "\"I am afraid you are very much mistaken.",
            true,
        ),
    ] {
        let case = cases
            .as_array()
            .unwrap()
            .iter()
            .find(|c| c["name"] == name)
            .unwrap();
        assert_eq!(case["stopped"], ended);
        let greedy = int_tensor(
            &format!("austen-k3/goldens/{name}.safetensors"),
            "greedy_ids",
        );
        let reply = joined(&events(Opening::Think, &greedy));
        assert_eq!(
            (reply.reasoning.as_str(), reply.answer.as_str(), reply.ended),
            ("", answer, ended)
        );
    }
}

#[test]
fn every_cut_into_tokens_gives_the_same_reply() {
    let tokenizer = austen();
    let whole = ids(&tokenizer, FULL);
    let expected = joined(&events(Opening::Think, &whole));
    let mut seeded = Seeded(8);
    for round in 0..300 {
        let other = recut(&tokenizer, &whole, &mut seeded);
        assert_eq!(
            joined(&events(Opening::Think, &other)),
            expected,
            "round {round}"
        );
    }
    let bytes: Vec<TokenId> = whole
        .iter()
        .flat_map(|id| match tokenizer.is_special(*id) {
            true => vec![*id],
            false => tokenizer
                .bytes(*id)
                .iter()
                .map(|b| TokenId::from(*b))
                .collect(),
        })
        .collect();
    assert_eq!(joined(&events(Opening::Think, &bytes)), expected);
}

#[test]
fn a_reply_cut_off_anywhere_is_a_beginning_of_the_whole() {
    let tokenizer = austen();
    let mut seeded = Seeded(9);
    let whole = recut(&tokenizer, &ids(&tokenizer, FULL), &mut seeded);
    let full = joined(&events(Opening::Think, &whole));
    let begins = |whole: &str, part: &str| whole.starts_with(part.trim_end_matches('\u{fffd}'));
    let mut in_reasoning = 0;
    for end in 0..whole.len() {
        let cut = events(Opening::Think, &whole[..end]);
        let reply = joined(&cut);
        assert!(begins(&full.reasoning, &reply.reasoning) && begins(&full.answer, &reply.answer));
        for (part, whole) in reply.tool_calls.iter().zip(&full.tool_calls) {
            assert!(
                part.name == whole.name && begins(&whole.arguments, &part.arguments),
                "{part:?}"
            );
        }
        assert!(!reply.ended && !cut.contains(&ReplyEvent::End));
        let shown = format!("{cut:?}");
        assert!(
            !shown.contains("<|") && !shown.contains("index=\\\""),
            "{shown}"
        );
        if reply.answer.is_empty() && reply.tool_calls.is_empty() {
            in_reasoning += 1; // cut off while thinking: no word of it is an answer
        } else {
            assert_eq!(reply.reasoning, full.reasoning);
        }
    }
    assert!(in_reasoning > 10);
}

#[test]
fn arguments_stream_one_by_one_and_text_as_it_comes() {
    let tokenizer = austen();
    let mut parser = ReplyParser::new(&tokenizer, Opening::Response);
    let mut steps = Vec::new();
    for stretch in [
        "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|>",
        "<|open|>argument key=\"s\" type=\"string\"<|sep|>ab",
        "c\"",
        "<|close|>argument<|sep|>",
        "<|open|>argument key=\"n\" type=\"array\"<|sep|>[1,",
        "2]",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ] {
        let events: Vec<_> = ids(&tokenizer, stretch)
            .into_iter()
            .flat_map(|id| parser.push(id))
            .collect();
        let fragments: String = events
            .iter()
            .map(|event| match event {
                ReplyEvent::ToolCallStart { index, name } => format!("({index} {name}"),
                ReplyEvent::ToolArguments { index: 0, fragment } => fragment.clone(),
                ReplyEvent::ToolCallEnd { index } => format!("{index})"),
                other => panic!("{other:?}"),
            })
            .collect();
        steps.push(fragments);
    }
    assert_eq!(
        steps,
        [
            "(0 f",
            "{\"s\":\"ab",
            "c\\\"",
            "\"",
            ",\"n\":",
            "",
            "[1,2]",
            "}0)"
        ]
    );
}

#[test]
fn arguments_that_are_not_of_their_type_still_make_json() {
    let argument = |kind: &str, value: &str| {
        let text = format!(
            "<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"k\"{kind}<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|>"
        );
        let reply = parse(Opening::Response, &text);
        let arguments = &reply.tool_calls[0].arguments;
        serde_json::from_str::<Value>(arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"))["k"]
            .clone()
    };
    assert_eq!(argument(" type=\"number\"", " 5 "), json!(5));
    assert_eq!(argument(" type=\"number\"", "five"), json!("five"));
    assert_eq!(argument(" type=\"number\"", ""), json!(""));
    assert_eq!(argument(" type=\"boolean\"", "True"), json!("True"));
    assert_eq!(argument(" type=\"object\"", "{\"a\":"), json!("{\"a\":"));
    assert_eq!(
        argument(" type=\"array\"", "[\"\\ud800\"]"),
        json!("[\"\\ud800\"]")
    );
    assert_eq!(argument(" type=\"string\"", "5"), json!("5"));
    assert_eq!(argument("", "5"), json!("5"));
    assert_eq!(argument(" type=\"null\"", "null"), json!(null));
}

#[test]
fn what_the_model_gets_wrong_never_shows_as_markup_and_loses_no_answer() {
    let answer = |opening, text: &str| {
        let reply = parse(opening, text);
        (
            reply.reasoning.clone(),
            reply.answer.clone(),
            calls(&reply)
                .iter()
                .map(|(n, a)| format!("{n}{a}"))
                .collect::<String>(),
        )
    };
    let is = |r: &str, a: &str, c: &str| (r.to_owned(), a.to_owned(), c.to_owned());
    use Opening::{Response, Think};
    for (opening, text, expected) in [
        // Thinking never closed, closed twice, or closed by the answer's beginning.
        (Think, "why".to_owned(), is("why", "", "")),
        (Think, format!("why{END}"), is("why", "", "")),
        (Think, "why<|open|>response<|sep|>a<|close|>response<|sep|>b".into(), is("why", "ab", "")),
        (Think, "w<|close|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>a".into(), is("w", "a", "")),
        // Text between elements: white space is layout, words are an answer.
        (Think, "w<|close|>think<|sep|>\n <|open|>response<|sep|> a ".into(), is("w", " a ", "")),
        (Think, "w<|close|>think<|sep|>\n bare answer \n".into(), is("w", "bare answer \n", "")),
        // Unknown elements are as if they were not there.
        (Response, "a<|open|>b c=\"d\"<|sep|>e<|close|>b<|sep|>f".into(), is("", "aef", "")),
        (Response, "a<|close|>nothing<|sep|>b<|sep|>c".into(), is("", "abc", "")),
        (Response, "a<|open|><|sep|>b<|close|><|sep|>c".into(), is("", "abc", "")),
        // A tag that begins inside a tag; one that never ends.
        (Response, "a<|open|>thi<|open|>think<|sep|>w<|close|>think<|sep|>b".into(), is("w", "ab", "")),
        (Response, "a<|open|>tools".into(), is("", "a", "")),
        // Other special tokens are no text.
        (Response, "a[BOS]b<|media_pad|>c<|reserved_token_2056|>d".into(), is("", "abcd", "")),
        // Calls inside the answer, with no tools around them, never closed, or closed by the end.
        (Response, "a<|open|>call tool=\"f\"<|sep|><|close|>call<|sep|>b".into(), is("", "ab", "f{}")),
        (Response, format!("<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"k\" type=\"string\"<|sep|>v{END}"), is("", "", "f{\"k\":\"v\"}")),
        (Response, "<|open|>call tool=\"f\"<|sep|><|open|>call tool=\"g\"<|sep|><|end_of_msg|>".into(), is("", "", "f{}g{}")),
        (Response, "<|open|>call tool=\"f\"<|sep|><|open|>argument key=\"a\"<|sep|>1<|open|>argument key=\"b\"<|sep|>2<|close|>call<|sep|>".into(), is("", "", "f{\"a\":\"1\",\"b\":\"2\"}")),
        // Stray text in a call, arguments beside one text, and arguments outside any call.
        (Response, "<|open|>tools<|sep|> x <|open|>call tool=\"f\"<|sep|> y <|close|>call<|sep|> z <|close|>tools<|sep|>".into(), is("", "", "f{}")),
        (Response, "<|open|>call tool=\"f\"<|sep|><|open|>json type=\"object\"<|sep|>{}<|close|>json<|sep|><|open|>argument key=\"k\"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|>a".into(), is("", "a", "f{}")),
        (Response, "a<|open|>argument key=\"k\"<|sep|>v<|close|>argument<|sep|>b".into(), is("", "ab", "")),
        (Response, "a<|open|>call index=\"1\"<|sep|><|open|>argument key=\"k\"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|>b".into(), is("", "ab", "")),
        // What follows the message is not of it.
        (Response, "a<|close|>response<|sep|><|close|>message<|sep|>b<|open|>message role=\"user\"<|sep|>c<|open|>response<|sep|>d".into(), is("", "a", "")),
        // Text that spells a tag is text.
        (Response, "a< |close|>".into(), is("", "a< |close|>", "")),
    ] {
        assert_eq!(answer(opening, &text), expected, "{text}");
    }
    let tokenizer = austen();
    let spelled = tokenizer.encode("<|close|>response<|sep|>");
    assert_eq!(
        joined(&events(Response, &spelled)).answer,
        "<|close|>response<|sep|>"
    );
}

#[test]
fn a_tag_without_end_is_shown_rather_than_swallowed_for_hours() {
    let long = "word ".repeat(2_000);
    let reply = parse(Opening::Response, &format!("a<|open|>{long}"));
    assert_eq!(reply.answer, format!("a{long}"));
    let reply = parse(Opening::Response, &format!("a<|open|>{}", "b".repeat(100)));
    assert_eq!(reply.answer, "a");
}

#[test]
fn the_end_comes_by_any_of_its_names_and_nothing_after_it() {
    for end in ["<|end_of_msg|>", "[EOS]", "[EOT]"] {
        for opening in [Opening::Think, Opening::Response, Opening::Raw] {
            let events = events(opening, &ids(&austen(), &format!("a{end}b{end}")));
            assert_eq!(events.len(), 2, "{events:?}");
            assert_eq!(events[1], ReplyEvent::End);
        }
    }
}

#[test]
fn a_raw_reply_shows_all_there_is() {
    let text = "x<|close|>think<|sep|><|open|>response<|sep|>é[BOS]";
    let reply = parse(Opening::Raw, text);
    assert_eq!(
        (reply.answer.as_str(), reply.reasoning.as_str()),
        (text, "")
    );
}

#[test]
fn a_character_cut_off_by_a_tag_does_not_reach_over_it() {
    let tokenizer = austen();
    let mut stream: Vec<TokenId> = vec![0xf0, 0x9f];
    stream.extend(ids(
        &tokenizer,
        "<|close|>think<|sep|><|open|>response<|sep|>",
    ));
    stream.extend([0x99, 0x82]);
    let reply = joined(&events(Opening::Think, &stream));
    assert_eq!(
        (reply.reasoning.as_str(), reply.answer.as_str()),
        ("\u{fffd}", "\u{fffd}\u{fffd}")
    );
}

#[test]
fn what_was_rendered_as_history_is_parsed_back() {
    let tokenizer = austen();
    let messages = json!([{"role": "assistant", "content": "a\n", "reasoning_content": " why 🙂", "tool_calls": [
        {"function": {"name": "f\"&", "arguments": "{\"z\":\"é\\\"\\n\",\"a\":[1,{\"k\":null}],\"n\":-0.5,\"t\":true,\"&quot;\":{}}"}},
        {"function": {"name": "g", "arguments": ""}},
        {"function": {"name": "h", "arguments": "{no"}}]}]);
    let messages = messages_from_json(&messages).unwrap();
    let conversation = Conversation {
        messages: messages.clone(),
        effort: Effort::Max,
        ..Default::default()
    };
    let pieces = render(&conversation).unwrap();
    // From after the assistant's first open `think` to the end of its message.
    let text = |p: &Piece| p.text.clone();
    let start = pieces.iter().position(|p| p.text == "think").unwrap() + 2;
    let end = start
        + pieces[start..]
            .iter()
            .position(|p| p.text == "<|end_of_msg|>")
            .unwrap()
        + 1;
    assert_eq!(text(&pieces[start]), " why 🙂");
    let reply = joined(&events(
        Opening::Think,
        &tokenizer.encode_pieces(&pieces[start..end]),
    ));
    assert_eq!(
        (reply.reasoning.as_str(), reply.answer.as_str()),
        (" why 🙂", "a\n")
    );
    assert!(reply.ended);
    let expected = [&messages[0].tool_calls[0].arguments, "{}", "{no"];
    for ((ours, call), expected) in reply
        .tool_calls
        .iter()
        .zip(&messages[0].tool_calls)
        .zip(expected)
    {
        assert_eq!(ours.name, call.name);
        let value = |text: &str| serde_json::from_str::<Value>(text).map_err(|_| text.to_owned());
        assert_eq!(value(&ours.arguments), value(expected));
    }
    assert_eq!(reply.tool_calls.len(), 3);
}

#[test]
fn no_row_of_tokens_panics_or_leaks_markup() {
    let tokenizer = austen();
    let mut seeded = Seeded(21);
    let words = [
        "think",
        "response",
        "tools",
        "message",
        "call tool=\"f\" index=\"1\"",
        "argument key=\"k\" type=\"number\"",
        "argument key=\"k\" type=\"string\"",
        "json",
        "x",
        "é🙂",
        "\"",
    ];
    let marks = ["<|open|>", "<|close|>", "<|sep|>", "[BOS]"];
    let (mut called, mut answered) = (0, 0);
    for round in 0..10_000 {
        let mut row = Vec::new();
        for _ in 0..seeded.below(30) {
            match seeded.below(8) {
                0 => row.push(u32::try_from(seeded.below(2400)).unwrap()),
                1 | 2 => row.extend(ids(&tokenizer, seeded.one(&marks))),
                3 => row.extend(tokenizer.encode(seeded.one(&words))),
                _ => {
                    row.extend(ids(&tokenizer, seeded.one(&marks[..2])));
                    row.extend(tokenizer.encode(seeded.one(&words)));
                    row.extend(ids(&tokenizer, "<|sep|>"));
                }
            }
        }
        let row = recut(&tokenizer, &row, &mut seeded);
        let opening = seeded.one(&[Opening::Think, Opening::Response]);
        let events = events(opening, &row);
        let reply = joined(&events);
        let shown = format!("{}{}", reply.reasoning, reply.answer);
        assert!(
            !shown.contains("<|") && !shown.contains("[BOS]"),
            "round {round}: {shown}"
        );
        let ends = events
            .iter()
            .filter(|e| matches!(e, ReplyEvent::ToolCallEnd { .. }))
            .count();
        assert!(ends <= reply.tool_calls.len());
        if ends == reply.tool_calls.len() {
            for call in &reply.tool_calls {
                let whole = call.arguments.starts_with('{') && call.arguments.ends_with('}');
                assert!(
                    !whole || serde_json::from_str::<Value>(&call.arguments).is_ok(),
                    "{call:?}"
                );
            }
        }
        called += usize::from(!reply.tool_calls.is_empty());
        answered += usize::from(!reply.answer.is_empty());
    }
    assert!(called > 100 && answered > 100, "{called} {answered}");
}
