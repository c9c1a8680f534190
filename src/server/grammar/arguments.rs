//! A call's arguments: each an element with its type, a string as it stands, all else as JSON.

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::NoGrammar;
use super::lark::Rules;
use super::lark::TEXT;
use super::lark::attribute;
use super::lark::json as json_of;
use super::lark::literal;

/// References inside references, at most.
const DEPTH_MAX: usize = 16;

/// The names K3 has for the kinds of JSON values.
const KINDS: [&str; 6] = ["string", "number", "boolean", "null", "object", "array"];

/// What stands inside a call of a function with these parameters: its properties in their order,
/// those that are required in any case, the others or not.
pub(super) fn body(
    rules: &mut Rules,
    prefix: &str,
    parameters: &Value,
) -> Result<String, NoGrammar> {
    let root = resolve(parameters, parameters)?;
    let none = Map::new();
    let properties = root["properties"].as_object().unwrap_or(&none);
    let required: Vec<&str> = root["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut body = Vec::new();
    for (n, (key, schema)) in properties.iter().enumerate() {
        let rule = format!("{prefix}_{n}");
        let argument = argument(rules, &rule, key, schema, parameters)?;
        rules.rule(&rule, &argument);
        if required.contains(&key.as_str()) {
            body.push(rule);
        } else {
            body.push(format!("({rule})?"));
        }
    }
    Ok(body.join(" "))
}

/// One argument, in every kind its schema allows.
fn argument(
    rules: &mut Rules,
    prefix: &str,
    key: &str,
    schema: &Value,
    root: &Value,
) -> Result<String, NoGrammar> {
    let schema = resolve(schema, root)?;
    let mut forms = Vec::new();
    for kind in kinds(schema, root)? {
        let value = if kind == "string" {
            string(schema, root)?
        } else {
            let rule = format!("{prefix}_{kind}");
            rules.rule(&rule, &json_of(&only(schema, kind, root))?);
            rule
        };
        let attributes = format!("{}{}", attribute("key", key), attribute("type", kind));
        forms.push(rules.element("argument", &attributes, &value));
    }
    Ok(forms.join(" | "))
}

/// A schema that stands for another, followed.
fn resolve<'v>(schema: &'v Value, root: &'v Value) -> Result<&'v Value, NoGrammar> {
    let mut schema = schema;
    for _ in 0..DEPTH_MAX {
        let Some(to) = schema["$ref"].as_str() else {
            return Ok(schema);
        };
        let found = to.strip_prefix('#').and_then(|path| root.pointer(path));
        schema =
            found.ok_or_else(|| NoGrammar(format!("'{to}' refers to nothing in the schema")))?;
    }
    Err(NoGrammar(
        "references in the schema go round in circles".to_owned(),
    ))
}

/// The kinds of values a schema allows.
fn kinds(schema: &Value, root: &Value) -> Result<Vec<&'static str>, NoGrammar> {
    let mut found: Vec<&'static str> = Vec::new();
    let mut add = |kind: &'static str| {
        if !found.contains(&kind) {
            found.push(kind);
        }
    };
    let named = |name: &str| {
        let name = if name == "integer" { "number" } else { name };
        KINDS.into_iter().find(|kind| *kind == name)
    };
    let mut known = true;
    if let Some(values) = schema["enum"].as_array() {
        values.iter().for_each(|value| add(kind_of(value)));
    } else if let Some(value) = schema.get("const") {
        add(kind_of(value));
    } else if let Some(name) = schema["type"].as_str() {
        let kind = named(name);
        add(kind.ok_or_else(|| NoGrammar(format!("'{name}' is no type of JSON schema")))?);
    } else if let Some(names) = schema["type"].as_array() {
        let names = names.iter().filter_map(Value::as_str);
        names.filter_map(named).for_each(&mut add);
    } else if let Some(any) = choices(schema) {
        for choice in any {
            kinds(resolve(choice, root)?, root)?
                .into_iter()
                .for_each(&mut add);
        }
    } else {
        known = false;
    }
    if known && !found.is_empty() {
        Ok(found)
    } else {
        Ok(KINDS.to_vec())
    }
}

fn choices(schema: &Value) -> Option<&Vec<Value>> {
    schema["anyOf"].as_array().or(schema["oneOf"].as_array())
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// A schema cut down to one kind of value, with the definitions it may refer to.
fn only(schema: &Value, kind: &str, root: &Value) -> Value {
    let mut cut = match schema {
        Value::Object(_) => schema.clone(),
        _ => json!({}),
    };
    let integer = |value: &Value| value == "integer";
    let whole = match &schema["type"] {
        Value::Array(names) => names.iter().any(integer) && !names.iter().any(|n| n == "number"),
        name => integer(name),
    };
    if choices(schema).is_none() {
        cut["type"] = if kind == "number" && whole {
            "integer"
        } else {
            kind
        }
        .into();
    }
    if let Some(values) = schema["enum"].as_array() {
        let of_kind = values.iter().filter(|value| kind_of(value) == kind);
        cut["enum"] = of_kind.cloned().collect();
    } else if let Some(any) = choices(schema) {
        // Definitions have been followed for their kinds alone; here they stay references.
        let of_kind = any.iter().filter(|choice| {
            resolve(choice, root)
                .and_then(|choice| kinds(choice, root))
                .is_ok_and(|kinds| kinds.contains(&kind))
        });
        let of_kind: Vec<_> = of_kind.cloned().collect();
        let key = if schema["anyOf"].is_array() {
            "anyOf"
        } else {
            "oneOf"
        };
        cut[key] = of_kind.into();
    }
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(key) {
            cut[key] = definitions.clone();
        }
    }
    cut
}

/// A string as it stands, without quotes: one of a list, of a length, or any.
fn string(schema: &Value, root: &Value) -> Result<String, NoGrammar> {
    let of_strings = |values: &mut dyn Iterator<Item = &Value>| {
        let texts = values.filter_map(Value::as_str);
        let texts: Vec<_> = texts
            .map(|text| {
                if text.is_empty() {
                    "\"\"".to_owned()
                } else {
                    literal(text)
                }
            })
            .collect();
        format!("({})", texts.join(" | "))
    };
    if let Some(values) = schema["enum"].as_array() {
        return Ok(of_strings(&mut values.iter()));
    }
    if let Some(value) = schema.get("const") {
        return Ok(of_strings(&mut std::iter::once(value)));
    }
    if let Some(any) = choices(schema) {
        let mut forms = Vec::new();
        for choice in any {
            let choice = resolve(choice, root)?;
            if kinds(choice, root)?.contains(&"string") {
                forms.push(string(choice, root)?);
            }
        }
        return Ok(format!("({})", forms.join(" | ")));
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        // The pattern of a schema may match anywhere; that of a grammar matches the whole.
        let start = if pattern.starts_with('^') {
            ""
        } else {
            "(.|\\n)*"
        };
        let end = if pattern.ends_with('$') {
            ""
        } else {
            "(.|\\n)*"
        };
        let inner = pattern.trim_start_matches('^').trim_end_matches('$');
        return Ok(format!("/{start}({}){end}/", inner.replace('/', "\\/")));
    }
    let least = schema["minLength"].as_u64().unwrap_or(0);
    match schema["maxLength"].as_u64() {
        Some(most) => Ok(format!("/(.|\\n){{{least},{most}}}/")),
        None if least > 0 => Ok(format!("/(.|\\n){{{least},}}/")),
        None => Ok(TEXT.to_owned()),
    }
}
