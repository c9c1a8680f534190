//! The clients people use, each in an environment of its own.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;

use serde_json::json;

use super::Served;
use super::fetch_core;
use super::hub;
use super::limit::Stream;
use super::limit::content;
use super::limit::events;
use super::outlive::request;
use super::serve;
use super::serve_demo;
use super::serve_installed;
use super::setting;
use super::skipped;
use super::together::post;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts/clients")
        .join(name)
}

/// The folder of an environment, made once for all tests; `None` where it cannot be made, which
/// where there is a network and Python and Node does not happen.
fn environment(kind: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("clients-{kind}"));
    let made = Command::new(script("setup.sh"))
        .arg(kind)
        .arg(&folder)
        .output()
        .unwrap();
    if made.status.success() {
        return Some(folder);
    }
    assert_eq!(made.status.code(), Some(3), "setup.sh failed otherwise");
    skipped(&format!(
        "no {kind} packages: {}",
        String::from_utf8_lossy(&made.stderr).trim()
    ));
    None
}

fn ran(command: &mut Command) {
    let ran = command.env("NO_PROXY", "127.0.0.1").output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    assert!(ran.status.success(), "{out}{err}");
}

fn python(name: &str, served: &Served) {
    if let Some(folder) = environment("python") {
        let prompts = setting("DELTAFIN_API_PROMPTS", 8).to_string();
        ran(Command::new(folder.join("bin/python"))
            .arg(script(name))
            .arg(format!("http://{}", served.addr))
            .env("DELTAFIN_API_PROMPTS", prompts));
    }
}

fn node(name: &str, served: &Served, more: &[&Path]) -> Option<PathBuf> {
    let folder = environment("node")?;
    ran(Command::new("node")
        .arg(script(name))
        .arg(format!("http://{}", served.addr))
        .args(more)
        .env("NODE_PATH", folder.join("node_modules")));
    Some(folder)
}

/// OpenAI's Node client; its replies are then held to OpenAI's shapes.
fn openai_node(served: &Served) {
    let replies = tempfile::NamedTempFile::new().unwrap();
    if node("openai_node.mjs", served, &[replies.path()]).is_some()
        && let Some(folder) = environment("python")
    {
        ran(Command::new(folder.join("bin/python"))
            .arg(script("shapes.py"))
            .arg(replies.path()));
    }
}

#[test]
fn openais_python_client_gets_what_it_asks_for_while_streaming() {
    python("openai_python.py", &serve_demo(&[]));
}

#[test]
fn openais_python_client_gets_what_it_asks_for_from_a_full_install() {
    python("openai_python.py", &serve_installed());
}

#[test]
fn openais_node_client_gets_what_it_asks_for_while_streaming() {
    openai_node(&serve_demo(&[]));
}

#[test]
fn openais_node_client_gets_what_it_asks_for_from_a_full_install() {
    openai_node(&serve_installed());
}

#[test]
fn langchain_gets_tools_and_structured_output_in_both_modes() {
    python("langchain_python.py", &serve_demo(&[]));
    python("langchain_python.py", &serve_installed());
}

#[test]
fn an_editors_plugin_completes_and_chats() {
    let Some(folder) = environment("editor") else {
        return;
    };
    let served = serve_demo(&[]);
    ran(Command::new("node")
        .arg(script("continue.mjs"))
        .arg(format!("http://{}", served.addr))
        .env("NODE_PATH", folder.join("node_modules")));
}

/// What Open WebUI sends for a conversation with every setting of its own set, and for a title.
#[test]
fn the_requests_of_open_webui_are_answered() {
    let served = serve_demo(&[]);
    let chat = "/v1/chat/completions";
    let (status, models) = request(&served.addr, "GET", "/v1/models");
    assert_eq!(status, 200);
    let model = &models["data"][0]["id"];
    let messages = json!([
        { "role": "system", "content": "Be kind." },
        { "role": "user", "content": "Who are you?" },
    ]);
    let talk = json!({
        "stream": true, "model": model, "messages": messages, "temperature": 0.8, "top_p": 0.9,
        "min_p": 0.0, "top_k": 40, "max_tokens": 12, "frequency_penalty": 0.1, "presence_penalty": 0.1,
        "seed": 42, "stop": ["</end>"], "logit_bias": { "100": 1 }, "reasoning_effort": "low",
        "stream_options": { "include_usage": true },
    });
    let mut stream = Stream::open(&served.addr, &talk);
    let events = events(&stream.until("data: [DONE]"));
    assert!(!content(&events).is_empty());
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 12);
    let title = json!({
        "model": model, "stream": false, "max_completion_tokens": 8,
        "messages": [{ "role": "user", "content": "### Task:\nGenerate a concise title.\nJSON format: { \"title\": \"...\" }" }],
    });
    let (status, reply) = post(&served.addr, chat, &title);
    assert_eq!(status, 200, "{reply}");
    assert_eq!(reply["object"], "chat.completion");
}

#[test]
fn the_page_is_used_as_a_person_does() {
    let browsers = ["/usr/bin/chromium", "/usr/bin/chromium-browser"];
    let Some(browser) = browsers.map(Path::new).into_iter().find(|b| b.exists()) else {
        return skipped("no Chromium to open the page in");
    };
    let pictures = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    // Experts that come each time from a hub with a way to it: else a reply is over before the page has
    // looked, which it does once a second.
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    let far = hub(Some("2ms"));
    let url = far.url();
    let mut options = vec!["--model", deltafin::share::Embedded::REPO, "--hub", &url];
    options.extend(["--reserve", "0", "--cache", "0", "--ram", "36MB"]);
    let served = serve(home.path(), &options);
    node("page.mjs", &served, &[&pictures, browser]);
}

/// No client is told how long to wait: each keeps its own patience, which silence would exhaust.
#[test]
fn clients_with_their_own_patience_outlast_a_slow_hub() {
    let home = tempfile::tempdir().unwrap();
    fetch_core(&hub(None), home.path());
    // Of every request, and a token needs more than twenty of them, one after the other. A reply that
    // has not begun after 15 s is given up and asked for again: such a hub would never be heard.
    let link = format!("{}s", setting("DELTAFIN_API_SLOW_SECONDS", 1));
    let slow = hub(Some(&link));
    let url = slow.url();
    let model = deltafin::share::Embedded::REPO;
    let served = serve(
        home.path(),
        &["--reserve", "0", "--model", model, "--hub", &url],
    );
    let ask = r#"{"prompt":"It is","max_tokens":1,"temperature":0}"#;
    let whole = Command::new("curl")
        .args(["-sS", "--fail", "-d", ask])
        .arg(format!("http://{}/v1/completions", served.addr))
        .stderr(Stdio::inherit())
        .output();
    match whole {
        Ok(whole) => {
            assert!(whole.status.success());
            let reply: serde_json::Value = serde_json::from_slice(&whole.stdout).unwrap();
            assert_eq!(reply["usage"]["completion_tokens"], 1);
        }
        Err(_) => skipped("no curl"),
    }
    if let Some(folder) = environment("python") {
        ran(Command::new(folder.join("bin/python"))
            .args(["-c", PATIENT])
            .arg(format!("http://{}/v1", served.addr)));
    }
}

const PATIENT: &str = r#"
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
ask = dict(model="austen-k3", prompt="Mr. Darcy", max_tokens=2, temperature=0)
whole = client.completions.create(**ask).choices[0].text
streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **ask))
assert whole and streamed == whole, (whole, streamed)
"#;
