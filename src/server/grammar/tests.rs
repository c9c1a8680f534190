use serde_json::Value;
use serde_json::json;

use super::*;
use crate::server::tests::scripted::Scripted;
use crate::text::Effort;
use crate::text::Message;
use crate::text::Opening;
use crate::text::Reply;
use crate::text::ReplyParser;
use crate::text::Role;

const END: &str = "<|close|>message<|sep|>";

fn chat(tools: &Value, effort: Effort) -> Conversation {
    Conversation {
        messages: vec![Message::text(Role::User, "hi")],
        tools: Some(tools.clone()),
        effort,
        ..Conversation::default()
    }
}

fn tool(name: &str, parameters: &Value) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

/// Tries replies, written with their markup, against a demand.
struct Judge {
    generator: Arc<Scripted>,
    source: ConstraintSource,
}

impl Judge {
    fn new(tools: &Value, effort: Effort, demand: &Demand) -> Result<Judge, NoGrammar> {
        let generator = Scripted::new(|_| Vec::new());
        let grammars = Grammars::new(generator.as_ref()).unwrap();
        let source = grammars.constraint(&chat(tools, effort), demand)?;
        Ok(Judge { generator, source })
    }

    /// Whether every token of `reply` may come, and then the end.
    fn admits(&self, reply: &str) -> bool {
        let mut constraint = self.source.make();
        let mut ids = self.generator.with_markup(reply);
        ids.extend(self.generator.with_markup("<|end_of_msg|>"));
        ids.into_iter().all(|id| {
            let mut logits = vec![0.0; self.generator.vocab()];
            constraint.mask(&mut logits);
            constraint.chose(id);
            logits[id as usize] == 0.0
        })
    }
}

fn any_text() -> Demand {
    Demand {
        calls: Calls::None,
        tool: None,
        schema: None,
    }
}

#[test]
fn without_calls_a_reply_is_any_text_and_nothing_else() {
    let tools = json!([tool("look", &json!({}))]);
    let judge = Judge::new(&tools, Effort::Low, &any_text()).unwrap();
    let reply = |thought: &str, answer: &str| {
        format!(
            "{thought}<|close|>think<|sep|><|open|>response<|sep|>{answer}\
             <|close|>response<|sep|>{END}"
        )
    };
    assert!(judge.admits(&reply("", "")));
    assert!(judge.admits(&reply("Well.\n\nYes.", "A début \u{1f600} {\"a\": 1}\n")));
    assert!(!judge.admits("said without thinking"));
    let calls = "<|open|>tools<|sep|><|open|>call tool=\"look\" index=\"1\"<|sep|>\
                 <|close|>call<|sep|><|close|>tools<|sep|>";
    assert!(!judge.admits(&reply("", "x").replace(END, &format!("{calls}{END}"))));
}

fn argument(key: &str, kind: &str, value: &str) -> String {
    format!("<|open|>argument key=\"{key}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
}

fn call(name: &str, index: u32, arguments: &str) -> String {
    format!("<|open|>call tool=\"{name}\" index=\"{index}\"<|sep|>{arguments}<|close|>call<|sep|>")
}

/// A reply that says nothing and makes these calls.
fn calling(calls: &str) -> String {
    format!("<|close|>response<|sep|><|open|>tools<|sep|>{calls}<|close|>tools<|sep|>{END}")
}

/// A tool with arguments of many kinds, and one without.
fn weather_and_say() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string" },
            "days": { "$ref": "#/$defs/days" },
            "wind": { "type": ["boolean", "null"] },
            "unit": { "enum": ["C", "F"] },
        },
        "required": ["city", "days"],
        "$defs": { "days": { "type": "integer", "minimum": 1, "maximum": 7 } },
    });
    json!([tool("weather", &parameters), tool("say \"&\"", &json!({}))])
}

#[test]
fn calls_that_are_demanded_come_numbered_and_with_typed_arguments() {
    let tools = weather_and_say();
    let demand = Demand {
        calls: Calls::Some(2),
        tool: None,
        schema: None,
    };
    let judge = Judge::new(&tools, Effort::None, &demand).unwrap();
    let city = argument("city", "string", "Bath, \"the\" <spa>");
    let days = argument("days", "number", "3");
    let both = format!("{city}{days}");
    let weather = call("weather", 1, &both);
    let right = [
        weather.clone(),
        call("say &quot;&amp;&quot;", 1, ""),
        format!("{weather}{}", call("say &quot;&amp;&quot;", 2, "")),
        call(
            "weather",
            1,
            &format!("{both}{}", argument("wind", "null", "null")),
        ),
        call(
            "weather",
            1,
            &format!("{both}{}", argument("wind", "boolean", "true")),
        ),
        call(
            "weather",
            1,
            &format!("{both}{}", argument("unit", "string", "F")),
        ),
    ];
    for calls in right {
        assert!(judge.admits(&calling(&calls)), "{calls}");
    }
    let wrong = [
        String::new(),
        call("weather", 2, &both),
        call("other", 1, &both),
        call("weather", 1, &city),
        call("weather", 1, &format!("{days}{city}")),
        call(
            "weather",
            1,
            &format!("{city}{}", argument("days", "number", "8")),
        ),
        call(
            "weather",
            1,
            &format!("{city}{}", argument("days", "number", "1.5")),
        ),
        call(
            "weather",
            1,
            &format!("{city}{}", argument("days", "string", "3")),
        ),
        call(
            "weather",
            1,
            &format!("{both}{}", argument("unit", "string", "K")),
        ),
        format!("{weather}{}", weather.replace("index=\"1\"", "index=\"2\""))
            + &call("weather", 3, &both),
    ];
    for calls in wrong {
        assert!(!judge.admits(&calling(&calls)), "{calls}");
    }
    assert!(!judge.admits(&format!("text{}", calling(&weather))));
}

#[test]
fn what_the_grammar_admits_the_parser_reads_back_as_it_was_meant() {
    let schema = json!({ "type": "string", "maxLength": 4 });
    let parameters = json!({ "properties": { "a": schema }, "required": ["a"] });
    let demand = Demand {
        calls: Calls::Some(1),
        tool: Some("f".to_owned()),
        schema: None,
    };
    let tools = json!([tool("f", &parameters), tool("g", &json!({}))]);
    let judge = Judge::new(&tools, Effort::None, &demand).unwrap();
    let reply = |tool: &str, value: &str| {
        format!(
            "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"{tool}\" index=\"1\"\
             <|sep|><|open|>argument key=\"a\" type=\"string\"<|sep|>{value}\
             <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{END}"
        )
    };
    assert!(judge.admits(&reply("f", "\"\\\n")));
    assert!(judge.admits(&reply("f", "")));
    assert!(!judge.admits(&reply("f", "12345")));
    assert!(!judge.admits(&reply("g", "")));
    let mut parser = ReplyParser::new(judge.generator.tokenizer(), Opening::Response);
    let mut read = Reply::default();
    for id in judge.generator.with_markup(&reply("f", "\"\\\n")) {
        parser.push(id).iter().for_each(|event| read.add(event));
    }
    assert_eq!(read.tool_calls[0].name, "f");
    let arguments: Value = serde_json::from_str(&read.tool_calls[0].arguments).unwrap();
    assert_eq!(arguments, json!({ "a": "\"\\\n" }));
}

#[test]
fn an_answer_of_a_schema_is_that_json_and_with_tools_either() {
    let schema = json!({
        "type": "object", "properties": { "ok": { "type": "boolean" } },
        "required": ["ok"], "additionalProperties": false,
    });
    let tools = json!([tool("look", &json!({}))]);
    let demand = |calls| Demand {
        calls,
        tool: None,
        schema: Some(schema.clone()),
    };
    let judge = Judge::new(&tools, Effort::None, &demand(Calls::None)).unwrap();
    let answer = |text: &str| format!("{text}<|close|>response<|sep|>{END}");
    assert!(judge.admits(&answer("{\"ok\":true}")));
    for wrong in [
        "",
        "yes",
        "{\"ok\":1}",
        "{}",
        "{\"ok\":true",
        "{\"ok\":true,\"a\":1}",
    ] {
        assert!(!judge.admits(&answer(wrong)), "{wrong}");
    }
    let calls = format!(
        "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"look\" index=\"1\"<|sep|>\
         <|close|>call<|sep|><|close|>tools<|sep|>{END}"
    );
    assert!(!judge.admits(&calls));
    let judge = Judge::new(&tools, Effort::None, &demand(Calls::AtMost(1))).unwrap();
    assert!(judge.admits(&calls));
    assert!(judge.admits(&answer("{\"ok\":false}")));
    assert!(!judge.admits(&answer("yes")));
}

#[test]
fn schemas_that_no_grammar_can_say_are_refused_with_the_reason() {
    let refused = |parameters: Value| {
        let demand = Demand {
            calls: Calls::Some(1),
            tool: None,
            schema: None,
        };
        let tools = json!([tool("f", &parameters)]);
        match Judge::new(&tools, Effort::None, &demand) {
            Ok(_) => panic!("{parameters} was accepted"),
            Err(error) => error.0,
        }
    };
    let circle = json!({
        "properties": { "a": { "$ref": "#/$defs/a" } },
        "$defs": { "a": { "$ref": "#/$defs/a" } },
    });
    assert!(refused(circle).contains("circles"));
    let nothing = json!({ "properties": { "a": { "$ref": "#/$defs/b" } } });
    assert!(refused(nothing).contains("#/$defs/b"));
    assert!(refused(json!({ "properties": { "a": { "type": "colour" } } })).contains("colour"));
}
