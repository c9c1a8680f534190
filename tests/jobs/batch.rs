//! `deltafin batch` with the real program, streaming the small model from a loopback hub.

use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use crate::program;
use crate::program::Run;
use crate::program::deltafin;

/// Requests, and what comes of them.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    /// The output file, within the folder.
    pub(crate) output: &'static str,
}

impl Place {
    pub(crate) fn new(input: &str) -> Place {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("in.jsonl"), input).unwrap();
        Place {
            folder,
            output: "out.jsonl",
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn args(&self, more: &[&str]) -> Vec<String> {
        let path = |name: &str| self.path(name).to_str().unwrap().to_owned();
        let mut args = vec!["batch".to_owned(), path("in.jsonl"), path(self.output)];
        let home = path("home");
        let flags = [
            "--model",
            "demo",
            "--reserve",
            "0",
            "--token-ids",
            "--json",
            "--home",
            &home,
        ];
        args.extend(flags.iter().chain(more).map(|a| (*a).to_owned()));
        args
    }

    pub(crate) fn run(&self, more: &[&str]) -> Run {
        let args = self.args(more);
        deltafin(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Runs, and kills without a word after a while; whether it was still there.
    fn killed_after(&self, more: &[&str], wait: Duration) -> bool {
        let mut child = program::command()
            .args(self.args(more))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(wait);
        let alive = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        alive
    }

    pub(crate) fn lines(&self, name: &str) -> Vec<Value> {
        lines(&self.path(name))
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = |line: &str| serde_json::from_str(line).unwrap();
    text.lines().map(line).collect()
}

/// Of each line: its name, its text and ids, and how it ended.
pub(crate) fn answers(lines: &[Value]) -> Vec<Value> {
    let answer = |line: &Value| {
        let body = &line["response"]["body"];
        let usage = &body["usage"];
        json!([
            line["id"],
            line["custom_id"],
            line["response"]["status_code"],
            body["choices"],
            usage["deltafin"]["token_ids"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["completion_tokens_details"],
            usage["deltafin"]["seed"],
        ])
    };
    lines.iter().map(answer).collect()
}

pub(crate) fn chat(n: usize, said: &str, more: Value) -> String {
    let mut body = json!({
        "model": "deltafin/austen-k3", "max_tokens": 6 + n % 9,
        "reasoning_effort": if n.is_multiple_of(3) { "none" } else { "max" },
        "temperature": if n.is_multiple_of(2) { 0.0 } else { 0.8 },
        "messages": [{"role": "user", "content": said}],
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    let line = json!({
        "custom_id": format!("request-{n}"), "method": "POST", "url": "/v1/chat/completions",
        "body": body,
    });
    line.to_string()
}

fn forty() -> String {
    let said = [
        "Who are you?",
        "Tell me a story.",
        "What is a sweep?",
        "Hello!",
    ];
    let line = |n: usize| chat(n, said[n % 4], json!({})) + "\n";
    (0..40).map(line).collect()
}

pub(crate) fn summary(run: &Run) -> Value {
    assert_eq!(run.code, 0, "{}", run.stderr);
    program::json(run)
}

/// A small generator of waits; the seed is told so that a failure can be had again.
fn dice(state: &mut u64) -> f64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as f64 / (1u64 << 31) as f64
}

#[test]
fn a_batch_killed_anywhere_goes_on_and_gives_what_an_undisturbed_one_by_one_run_gives() {
    let kills: usize = std::env::var("DELTAFIN_JOBS_KILLS").map_or(5, |n| n.parse().unwrap());
    let undisturbed = Place::new(&forty());
    let whole = summary(&undisturbed.run(&["--sequences", "1"]));
    let wanted = answers(&undisturbed.lines("out.jsonl"));
    assert_eq!(wanted.len(), 40);
    assert_eq!(whole["tokens"]["recomputed"], 0);
    let tokens = |of: &Value| {
        of["tokens"]["prompt"].as_u64().unwrap() + of["tokens"]["generated"].as_u64().unwrap()
    };
    let seconds = whole["seconds"].as_f64().unwrap();
    let (mut recomputed, mut computed, mut hits) = (0, 0, 0);
    let mut state = 20_261_201;
    for round in 0..kills {
        let place = Place::new(&forty());
        let wait = Duration::from_secs_f64(0.2 + seconds * 0.9 * dice(&mut state));
        hits += usize::from(place.killed_after(&["--sequences", "4"], wait));
        let rest = summary(&place.run(&["--sequences", "4"]));
        let lines = place.lines("out.jsonl");
        assert_eq!(
            answers(&lines),
            wanted,
            "round {round}, killed after {wait:?}"
        );
        recomputed += rest["tokens"]["recomputed"].as_u64().unwrap();
        computed += tokens(&whole);
        let left = std::fs::read_dir(place.path("home/jobs-v1"))
            .unwrap()
            .count();
        assert_eq!(left, 0, "jobs that are over leave nothing behind");
    }
    println!(
        "{hits} of {kills} kills met a running batch; {recomputed} of {computed} rows computed again"
    );
    assert!(hits > 0, "nothing was killed");
    assert!(
        recomputed * 100 < computed * 3,
        "{recomputed} of {computed}"
    );
}

/// A way to spoil line `n`, and what the error says of it.
type Spoiled<'a> = (Box<dyn Fn(usize) -> Vec<u8> + 'a>, &'static str);

#[test]
#[expect(clippy::too_many_lines, reason = "a list of faults and one story")]
fn a_thousand_lines_of_which_fifty_are_malformed_give_950_answers_and_50_errors() {
    let good = |n: usize| {
        json!({
            "custom_id": format!("request-{n}"), "method": "POST", "url": "/v1/completions",
            "body": {"prompt": "It is a truth", "max_tokens": 1, "temperature": 0, "seed": n},
        })
    };
    let edit = |n: usize, edit: &dyn Fn(&mut Value)| {
        let mut line = good(n);
        edit(&mut line);
        line.to_string().into_bytes()
    };
    let kinds: Vec<Spoiled<'_>> = vec![
        (Box::new(|_| b"not json".to_vec()), "invalid_json_line"),
        (
            Box::new(|_| b"{\"custom_id\": \"cut".to_vec()),
            "invalid_json_line",
        ),
        (Box::new(|_| b"[1, 2]".to_vec()), "invalid_json_line"),
        (Box::new(|_| b"\xff\xfe\xfd".to_vec()), "invalid_json_line"),
        (Box::new(|_| b"null".to_vec()), "invalid_json_line"),
        (
            Box::new(move |n| edit(n, &|l| l["custom_id"] = json!(7))),
            "invalid_custom_id",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["custom_id"] = json!(""))),
            "invalid_custom_id",
        ),
        (
            Box::new(move |n| edit(n, &|l| drop(l.as_object_mut().unwrap().remove("custom_id")))),
            "missing_required_parameter",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["custom_id"] = json!("request-0"))),
            "duplicate_custom_id",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["method"] = json!("GET"))),
            "invalid_method",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["url"] = json!("/v1/embeddings"))),
            "invalid_url",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["url"] = json!(3))),
            "invalid_url",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"] = json!("prompt"))),
            "invalid_body",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["stream"] = json!(true))),
            "invalid_value",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["temperature"] = json!(9))),
            "invalid_value",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["max_tokens"] = json!("x"))),
            "invalid_value",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["prompt"] = json!(""))),
            "empty_prompt",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["prompt"] = json!([999_999]))),
            "invalid_value",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["colour"] = json!("red"))),
            "unknown_parameter",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["model"] = json!("gpt-9"))),
            "model_not_found",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["url"] = json!("/v1/chat/completions"))),
            "missing_required_parameter",
        ),
        (
            Box::new(move |n| edit(n, &|l| l["body"]["prompt"] = json!("word ".repeat(50_000)))),
            "context_length_exceeded",
        ),
    ];
    let mut input = Vec::new();
    let mut codes = Vec::new();
    for n in 0..1000 {
        if n % 20 == 7 {
            let (make, code) = &kinds[codes.len() % kinds.len()];
            input.extend(make(n));
            codes.push(*code);
        } else {
            input.extend(good(n).to_string().into_bytes());
        }
        input.extend(if n % 100 == 50 {
            &b"\r\n\n"[..]
        } else {
            &b"\n"[..]
        });
    }
    let place = Place::new("");
    std::fs::write(place.path("in.jsonl"), &input).unwrap();
    let run = place.run(&["--sequences", "8"]);
    let told = summary(&run);
    assert_eq!(told["lines"], 1000);
    assert_eq!(told["answered"], 950);
    assert_eq!(told["errors"], 50);
    assert!(run.stderr.contains("50 with errors"), "{}", run.stderr);
    let names: Vec<String> = place
        .lines("out.jsonl")
        .iter()
        .map(|line| line["custom_id"].as_str().unwrap().to_owned())
        .collect();
    let wanted: Vec<String> = (0..1000)
        .filter(|n| n % 20 != 7)
        .map(|n| format!("request-{n}"))
        .collect();
    assert_eq!(names, wanted);
    let errors = place.lines("out.errors.jsonl");
    let code = |line: &Value| {
        let at_line = &line["error"];
        let in_body = &line["response"]["body"]["error"];
        let error = if at_line.is_null() { in_body } else { at_line };
        assert!(
            error["message"].as_str().is_some_and(|m| m.len() > 10),
            "{line}"
        );
        assert_eq!(at_line.is_null(), !line["response"].is_null(), "{line}");
        if at_line.is_null() {
            let status = line["response"]["status_code"].as_u64().unwrap();
            assert!((400..500).contains(&status), "{line}");
            assert!(error["type"] == "invalid_request_error", "{line}");
        }
        error["code"].as_str().unwrap().to_owned()
    };
    assert_eq!(errors.iter().map(code).collect::<Vec<_>>(), codes);

    // Run again, nothing is computed, and the files are as they were.
    let before = std::fs::read(place.path("out.jsonl")).unwrap();
    let again = summary(&place.run(&[]));
    assert_eq!(
        (&again["kept"], &again["tokens"]["generated"]),
        (&json!(950), &json!(0))
    );
    assert_eq!(std::fs::read(place.path("out.jsonl")).unwrap(), before);
}

#[test]
fn an_input_that_changed_and_an_output_that_cannot_be_are_met_with_care() {
    let place = Place::new(
        &(chat(1, "Hello!", json!({})) + "\n" + &chat(2, "Hello!", json!({"n": 2})) + "\n"),
    );
    let first = summary(&place.run(&[]));
    assert_eq!(first["answered"], 2);
    let old = place.lines("out.jsonl");
    assert_eq!(
        old[1]["response"]["body"]["choices"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    // Line 2 changes, and one comes before it.
    let input = [
        chat(1, "Hello!", json!({})),
        chat(3, "Hello!", json!({})),
        chat(2, "Who?", json!({})),
    ];
    std::fs::write(place.path("in.jsonl"), input.join("\n")).unwrap();
    let run = place.run(&[]);
    let second = summary(&run);
    assert_eq!(
        (&second["kept"], &second["answered"]),
        (&json!(1), &json!(3))
    );
    assert!(run.stderr.contains("out.jsonl.1.old"), "{}", run.stderr);
    let new = place.lines("out.jsonl");
    let names: Vec<&str> = new
        .iter()
        .map(|l| l["custom_id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["request-1", "request-3", "request-2"]);
    assert_eq!(new[0], old[0]);
    assert_eq!(lines(&place.path("out.jsonl.1.old")), old);

    // A cut last line is answered anew; somebody else's file is left alone.
    let whole = std::fs::read(place.path("out.jsonl")).unwrap();
    std::fs::write(place.path("out.jsonl"), &whole[..whole.len() - 20]).unwrap();
    let third = summary(&place.run(&[]));
    assert_eq!((&third["kept"], &third["answered"]), (&json!(2), &json!(3)));
    assert_eq!(answers(&place.lines("out.jsonl")), answers(&new));
    std::fs::write(place.path("out.jsonl"), "my own notes\n").unwrap();
    let refused = place.run(&[]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert_eq!(
        std::fs::read(place.path("out.jsonl")).unwrap(),
        b"my own notes\n"
    );
    std::fs::remove_file(place.path("out.jsonl")).unwrap();
    std::fs::create_dir(place.path("out.jsonl")).unwrap();
    let refused = place.run(&[]);
    assert_eq!(refused.code, 5, "{}", refused.stderr);
    assert!(refused.stderr.contains("out.jsonl"), "{}", refused.stderr);
    let input = place.path("in.jsonl").to_str().unwrap().to_owned();
    let onto_itself = deltafin(&["batch", &input, &input]);
    assert_eq!(onto_itself.code, 2, "{}", onto_itself.stderr);
}
