//! JSON as the model was trained to see it: spelled the way Python's `json.dumps` spells it.
//!
//! Written from the source text, not from a parsed number: an id of twenty digits in a tool's
//! arguments must reach the model with all of them, and a value kept as `f64` has lost some.

use std::collections::HashMap;

use serde_json::Value;

/// JSON that was checked before, with its numbers as they were written.
enum Json {
    /// `null`, `true`, `false`, or a number in Python's spelling.
    Bare(String),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

/// Compact, every object's keys in order of their code points: tool declarations and schemas.
pub(super) fn tight_sorted(value: &Value) -> String {
    let mut json = Reader::read(&value.to_string());
    sort(&mut json);
    let mut out = String::new();
    write(&json, ",", ":", &mut out);
    out
}

/// What a tool call's arguments are.
pub(super) enum Arguments {
    /// Name, kind and value of each, in the given order. A string's value is its text, others are
    /// spelled with `", "` and `": "`.
    Members(Vec<(String, &'static str, String)>),
    /// The text is JSON, but not an object.
    NotAnObject,
    /// The text is not JSON.
    NotJson,
}

/// Reads a tool call's arguments.
pub(super) fn arguments(text: &str) -> Arguments {
    if !is_json(text) {
        return Arguments::NotJson;
    }
    let Json::Map(members) = Reader::read(text) else {
        return Arguments::NotAnObject;
    };
    let spelled = members.into_iter().map(|(key, value)| {
        let kind = kind(&value);
        let mut out = String::new();
        match value {
            Json::Text(text) => out = text,
            other => write(&other, ", ", ": ", &mut out),
        }
        (key, kind, out)
    });
    Arguments::Members(spelled.collect())
}

/// Whether the text is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    // Into a `Value`: skipping the value would let escapes through that name no character.
    serde_json::from_str::<Value>(text).is_ok()
}

/// A string in JSON's quotes and escapes, non-ASCII left as it is.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn kind(json: &Json) -> &'static str {
    match json {
        Json::Bare(word) => match word.as_str() {
            "null" => "null",
            "true" | "false" => "boolean",
            _ => "number",
        },
        Json::Text(_) => "string",
        Json::List(_) => "array",
        Json::Map(_) => "object",
    }
}

fn sort(json: &mut Json) {
    match json {
        Json::Bare(_) | Json::Text(_) => {}
        Json::List(items) => items.iter_mut().for_each(sort),
        Json::Map(members) => {
            members.sort_by(|a, b| a.0.cmp(&b.0));
            members.iter_mut().for_each(|member| sort(&mut member.1));
        }
    }
}

fn write(json: &Json, comma: &str, colon: &str, out: &mut String) {
    match json {
        Json::Bare(word) => out.push_str(word),
        Json::Text(text) => out.push_str(&quoted(text)),
        Json::List(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                out.push_str(if n == 0 { "" } else { comma });
                write(item, comma, colon, out);
            }
            out.push(']');
        }
        Json::Map(members) => {
            out.push('{');
            for (n, (key, value)) in members.iter().enumerate() {
                out.push_str(if n == 0 { "" } else { comma });
                out.push_str(&quoted(key));
                out.push_str(colon);
                write(value, comma, colon, out);
            }
            out.push('}');
        }
    }
}

/// Reads text that `serde_json` has accepted, so it need not look for errors, and its depth is
/// bounded by serde_json's limit.
struct Reader<'t>(&'t str);

impl Reader<'_> {
    fn read(valid: &str) -> Json {
        Reader(valid).value()
    }

    /// The next character that is not white space, taken.
    fn take(&mut self) -> Option<char> {
        self.0 = self.0.trim_ascii_start();
        let c = self.0.chars().next()?;
        self.0 = &self.0[c.len_utf8()..];
        Some(c)
    }

    fn peek(&mut self) -> Option<char> {
        self.0 = self.0.trim_ascii_start();
        self.0.chars().next()
    }

    fn value(&mut self) -> Json {
        match self.peek() {
            Some('"') => Json::Text(self.string()),
            Some('[') => {
                let mut items = Vec::new();
                self.members(|reader| items.push(reader.value()));
                Json::List(items)
            }
            Some('{') => {
                let mut members: Vec<(String, Json)> = Vec::new();
                let mut places = HashMap::new();
                self.members(|reader| {
                    let key = reader.string();
                    reader.take(); // the colon
                    let value = reader.value();
                    // Of equal keys the last value counts, at the first one's place.
                    let place = *places.entry(key.clone()).or_insert(members.len());
                    match members.get_mut(place) {
                        Some(member) => member.1 = value,
                        None => members.push((key, value)),
                    }
                });
                Json::Map(members)
            }
            _ => Json::Bare(self.bare()),
        }
    }

    /// Takes the opening bracket, then members between commas, then the closing bracket.
    fn members(&mut self, mut member: impl FnMut(&mut Self)) {
        self.take();
        while let Some(c) = self.peek() {
            match c {
                ']' | '}' => {
                    self.take();
                    return;
                }
                ',' => {
                    self.take();
                }
                _ => member(self),
            }
        }
    }

    fn string(&mut self) -> String {
        self.peek();
        let mut escaped = false;
        let end = self.0.bytes().skip(1).position(|b| {
            let ends = b == b'"' && !escaped;
            escaped = b == b'\\' && !escaped;
            ends
        });
        let (string, rest) = self.0.split_at(end.map_or(self.0.len(), |end| end + 2));
        self.0 = rest;
        serde_json::from_str(string).unwrap_or_default()
    }

    fn bare(&mut self) -> String {
        let end = self.0.find([',', ']', '}', ' ', '\t', '\r', '\n']);
        let (word, rest) = self.0.split_at(end.unwrap_or(self.0.len()).max(1));
        self.0 = rest;
        match word {
            "-0" => "0".to_owned(), // an integer, and those have no negative zero
            "null" | "true" | "false" => word.to_owned(),
            float if float.contains(['.', 'e', 'E']) => match float.parse() {
                Ok(number) => python_float(number),
                Err(_) => float.to_owned(),
            },
            integer => integer.to_owned(),
        }
    }
}

/// A float as Python's `repr` writes it: the shortest digits that name it, an exponent below
/// 10^-4 and from 10^16 on.
fn python_float(number: f64) -> String {
    let shortest = format!("{number:e}");
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number == 0.0 || (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}
