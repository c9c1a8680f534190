use serde_json::Value;
use serde_json::json;

use crate::text::Message;
use crate::text::Part;
use crate::text::Role;
use crate::text::TextError;
use crate::text::messages_from_json;

use super::Seeded;

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

#[test]
fn content_may_be_text_parts_empty_null_or_absent() {
    for (content, expected) in [
        (json!("hi"), vec![text("hi")]),
        (json!(""), vec![text("")]),
        (json!(null), vec![]),
        (json!([]), vec![]),
        (
            json!([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]),
            vec![text("a"), text("b"), text("c")],
        ),
        (
            json!([{"type": "refusal", "refusal": "no"}, {"text": "x"}]),
            vec![text("no"), text("x")],
        ),
        (
            json!([{"type": "image_url", "image_url": {"url": "data:"}}]),
            vec![Part::Image(None)],
        ),
    ] {
        let message = Message::from_json(&json!({"role": "user", "content": content})).unwrap();
        assert_eq!(message.content, expected, "{content}");
    }
    assert_eq!(
        Message::from_json(&json!({"role": "user"}))
            .unwrap()
            .content,
        []
    );
}

#[test]
fn roles_are_read_and_unknown_ones_refused_by_name() {
    for (name, role) in [
        ("system", Role::System),
        ("developer", Role::System),
        ("user", Role::User),
        ("assistant", Role::Assistant),
        ("tool", Role::Tool),
    ] {
        let message: Message =
            serde_json::from_value(json!({"role": name, "content": "x"})).unwrap();
        assert_eq!(
            message,
            Message {
                role,
                ..Message::text(Role::User, "x")
            }
        );
    }
    for (role, says) in [
        (
            json!("function"),
            "messages[1].role: unknown role `function`; known are system, developer, user, assistant and tool",
        ),
        (json!("User"), "messages[1].role: unknown role `User`"),
        (json!(3), "messages[1].role: must be a string"),
        (json!(null), "messages[1].role: must be a string"),
    ] {
        let json = json!([{"role": "user", "content": "x"}, {"role": role, "content": "x"}]);
        let said = messages_from_json(&json).unwrap_err().to_string();
        assert!(said.starts_with(says), "{said}");
    }
    let said = serde_json::from_str::<Message>(r#"{"role":"narrator"}"#)
        .unwrap_err()
        .to_string();
    assert!(said.contains("unknown role `narrator`"), "{said}");
}

#[test]
fn fields_of_clients_pass_and_wrong_ones_are_refused_by_path() {
    let message = Message::from_json(&json!({
        "role": "assistant", "content": null, "refusal": null, "audio": null, "annotations": [], "function_call": null,
        "name": null, "reasoning_content": null, "tool_calls": null, "cache_control": {"type": "x"},
    }));
    let empty = Message {
        content: vec![],
        ..Message::text(Role::Assistant, "")
    };
    assert_eq!(message.unwrap(), empty);
    for (fields, says) in [
        (
            json!({"content": 3}),
            "content: must be a string, a list of parts, or null",
        ),
        (json!({"content": {"text": "x"}}), "content: must be"),
        (
            json!({"content": ["a", {"type": "input_audio"}]}),
            "content[1].type: unsupported content part `input_audio`",
        ),
        (
            json!({"content": [{"type": "text"}]}),
            "content[0].text: must be a string",
        ),
        (
            json!({"content": [7]}),
            "content[0].part: must be an object",
        ),
        (json!({"name": 3}), "name: must be a string"),
        (
            json!({"function_call": {"name": "f"}}),
            "function_call: is the retired form; use `tool_calls`",
        ),
        (json!({"tool_calls": {}}), "tool_calls: must be a list"),
        (
            json!({"tool_calls": [{"type": "custom"}]}),
            "tool_calls[0].type: unsupported kind of call `custom`",
        ),
        (
            json!({"tool_calls": [{"function": {"name": ""}}]}),
            "tool_calls[0].function.name: must be a string, not empty",
        ),
        (
            json!({"tool_calls": [3]}),
            "tool_calls[0].call: must be an object",
        ),
    ] {
        let mut json = fields.as_object().unwrap().clone();
        json.insert("role".into(), "assistant".into());
        let said = Message::from_json(&Value::Object(json))
            .unwrap_err()
            .to_string();
        assert!(said.starts_with(says), "{said} | {says}");
    }
    let said = messages_from_json(&json!({"role": "user"}))
        .unwrap_err()
        .to_string();
    assert_eq!(said, "messages: must be a list");
}

#[test]
fn calls_are_read_in_both_layouts() {
    let message = Message::from_json(&json!({"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"name": "g", "arguments": {"z": 1, "a": 2}},
        {"function": {"name": "h"}},
    ]}));
    let calls = message.unwrap().tool_calls;
    let brief: Vec<_> = calls
        .iter()
        .map(|c| (c.id.as_deref(), c.name.as_str(), c.arguments.as_str()))
        .collect();
    assert_eq!(
        brief,
        [
            (Some("a"), "f", "{}"),
            (None, "g", r#"{"z":1,"a":2}"#),
            (None, "h", "")
        ]
    );
}

#[test]
fn no_json_panics() {
    fn value(seeded: &mut Seeded, depth: usize) -> Value {
        let keys = [
            "role",
            "content",
            "type",
            "text",
            "tool_calls",
            "function",
            "name",
            "arguments",
            "id",
            "tools",
            "reasoning",
            "tool",
            "tool_call_id",
        ];
        let words = [
            "user",
            "assistant",
            "tool",
            "system",
            "text",
            "function",
            "{\"a\":[1.5e300,{\"b\":null}]}",
            "{",
            "",
            "image_url",
            "\"",
            "[1]",
            "-",
        ];
        match seeded.below(if depth == 0 { 4 } else { 9 }) {
            0 => Value::Null,
            1 => json!(seeded.below(3)),
            2 | 3 => json!(seeded.one(&words)),
            4 | 5 => (0..seeded.below(4))
                .map(|_| value(seeded, depth - 1))
                .collect(),
            _ => {
                let mut map = serde_json::Map::new();
                for _ in 0..seeded.below(6) {
                    map.insert(seeded.one(&keys).to_owned(), value(seeded, depth - 1));
                }
                if seeded.below(3) > 0 {
                    map.insert("role".into(), json!(seeded.one(&words[..4])));
                }
                map.into()
            }
        }
    }
    let mut seeded = Seeded(3);
    let mut rendered = 0;
    for _ in 0..30_000 {
        let messages: Value = (0..seeded.below(4))
            .map(|_| value(&mut seeded, 4))
            .collect();
        match messages_from_json(&messages) {
            Ok(messages) => {
                let tools = Some(value(&mut seeded, 3));
                let conversation = crate::text::Conversation {
                    messages,
                    tools,
                    ..Default::default()
                };
                rendered += usize::from(crate::text::render(&conversation).is_ok());
            }
            Err(TextError::Invalid { param, what }) => {
                assert!(param.starts_with("messages[") && !what.is_empty())
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(
        rendered > 1_000,
        "only {rendered} were good enough to render"
    );
}
