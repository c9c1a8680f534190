//! `deltafin bench`: what it reports, what it refuses, and that it leaves nothing behind.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, and says where"
)]

mod program;

use std::io::BufRead;
use std::io::BufReader;
use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::OnceLock;

use program::deltafin;
use program::json;
use serde_json::Value;

const REPORTS: &str = "docs/benchmarks";

/// What JSON Schema calls a value.
fn kinds(value: &Value) -> &'static [&'static str] {
    match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(n) if n.is_f64() => &["number"],
        Value::Number(_) => &["integer", "number"],
        Value::String(_) => &["string"],
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    }
}

/// Holds `value` to a part of the schema; knows what ours says, and refuses what it does not know.
fn hold(schema: &Value, root: &Value, value: &Value, at: &str, wrong: &mut Vec<String>) {
    let mut own = Vec::new();
    let mut say = |what: &str| own.push(format!("{at}: {what}: {value}"));
    let fields = value.as_object();
    for (word, rule) in schema.as_object().unwrap() {
        match word.as_str() {
            "$schema" | "title" | "description" | "$defs" => {}
            "type" => {
                let one = std::slice::from_ref(rule);
                let allowed = rule.as_array().map_or(one, Vec::as_slice);
                let fits = |kind: &&str| allowed.iter().any(|a| a == kind);
                if !kinds(value).iter().any(fits) {
                    say("of another type");
                }
            }
            "const" if value != rule => say("not the constant"),
            "enum" if !rule.as_array().unwrap().contains(value) => say("not in the list"),
            "const" | "enum" => {}
            "minimum" if value.as_f64().is_some_and(|n| n < rule.as_f64().unwrap()) => {
                say("too small");
            }
            "minItems" if value.as_array().is_some_and(|list| list.is_empty()) => say("empty"),
            "minimum" | "minItems" => {}
            "pattern" => {
                if let Some(text) = value.as_str()
                    && !matches(rule.as_str().unwrap(), text)
                {
                    say("of another form");
                }
            }
            "required" => {
                let missing =
                    |name: &&Value| !fields.is_some_and(|f| f.contains_key(name.as_str().unwrap()));
                for name in rule.as_array().unwrap().iter().filter(missing) {
                    say(&format!("without {name}"));
                }
            }
            "additionalProperties" => {
                assert_eq!(rule, false);
                let known = schema["properties"].as_object().unwrap();
                for name in fields.into_iter().flat_map(|f| f.keys()) {
                    if !known.contains_key(name) {
                        say(&format!("with {name}"));
                    }
                }
            }
            "properties" => {
                for (name, rule) in rule.as_object().unwrap() {
                    if let Some(value) = value.get(name) {
                        hold(rule, root, value, &format!("{at}.{name}"), wrong);
                    }
                }
            }
            "items" => {
                for (n, value) in value.as_array().into_iter().flatten().enumerate() {
                    hold(rule, root, value, &format!("{at}[{n}]"), wrong);
                }
            }
            "$ref" => {
                let rule = root.pointer(rule.as_str().unwrap().trim_start_matches('#'));
                hold(rule.unwrap(), root, value, at, wrong);
            }
            "anyOf" => {
                let fits = |rule: &Value| {
                    let mut wrong = Vec::new();
                    hold(rule, root, value, at, &mut wrong);
                    wrong.is_empty()
                };
                if !rule.as_array().unwrap().iter().any(fits) {
                    say("fits none");
                }
            }
            word => panic!("{at}: this test does not know `{word}`"),
        }
    }
    wrong.extend(own);
}

/// The three forms of the schema.
fn matches(pattern: &str, text: &str) -> bool {
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    match pattern {
        "^[0-9]{4}-[0-9]{2}-[0-9]{2}$" => {
            let form: String = text
                .chars()
                .map(|c| if c.is_ascii_digit() { '0' } else { c })
                .collect();
            form == "0000-00-00"
        }
        "^[0-9a-f]{40}$" => text.len() == 40 && hex(text),
        "^[0-9a-f]{64}$" => text.len() == 64 && hex(text),
        other => panic!("this test does not know the form `{other}`"),
    }
}

fn read(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// What a report does wrong.
fn faults(report: &Value) -> Vec<String> {
    let schema = read(Path::new("docs/benchmarks/schema.json"));
    let mut wrong = Vec::new();
    hold(&schema, &schema, report, "report", &mut wrong);
    wrong
}

/// A report of the demo with three arms, one of which says something else.
fn report() -> &'static (tempfile::TempDir, PathBuf, program::Run) {
    static REPORT: OnceLock<(tempfile::TempDir, PathBuf, program::Run)> = OnceLock::new();
    REPORT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("here.json");
        let run = deltafin(&[
            "bench",
            "--rounds",
            "2",
            "--tokens",
            "12",
            "--arm",
            "plain:",
            "--arm",
            "tight: --ram 34MB --cache 3MB --threads 1",
            "--arm",
            "hot: --temperature 50 --seed 3",
            "--json",
            "--out",
            file.to_str().unwrap(),
        ]);
        (folder, file, run)
    })
}

#[test]
fn an_arm_with_other_ids_is_rejected_by_name_and_the_others_are_reported() {
    let (_, file, run) = report();
    assert_eq!(run.code, 6, "{}", run.stderr);
    assert!(
        run.stderr.contains("arm `hot` is rejected"),
        "{}",
        run.stderr
    );
    let report = json(run);
    assert_eq!(faults(&report), Vec::<String>::new());
    assert_eq!(report, read(file));
    let arms = report["arms"].as_array().unwrap();
    let names: Vec<&str> = arms
        .iter()
        .map(|arm| arm["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["plain", "tight", "hot"]);
    let (plain, tight, hot) = (&arms[0], &arms[1], &arms[2]);
    assert!(hot["figures"].is_null() && hot["rejected"].is_string());
    for arm in [plain, tight] {
        // Two runs of twelve tokens, less the first and two more of each.
        assert_eq!(arm["figures"]["tokens"], 18);
        assert!(arm["rejected"].is_null());
        assert!(arm["figures"]["seconds"]["all"]["median"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(
        (&plain["cache"], &tight["cache"]),
        (&Value::Null, &3_000_000.into())
    );
    assert_eq!(tight["threads"], 1);
    assert_eq!(tight["memory"]["budget"], 34_000_000);
    let core = |arm: &Value| {
        arm["figures"]["bytes"]["core_disk"]["median"]
            .as_f64()
            .unwrap()
    };
    assert_eq!(core(plain), 0.0);
    // A token does not read the whole of the table of words, and a piece may be counted with its neighbour's token.
    let streamed = tight["memory"]["core_streamed"].as_f64().unwrap();
    assert!(streamed > 0.0 && core(tight) > 0.5 * streamed, "{tight}");
    let page = std::fs::read_to_string(file.with_extension("md")).unwrap();
    assert!(
        page.contains("hot is rejected") && page.contains("`--ram 34MB --cache 3MB --threads 1`"),
        "{page}"
    );
}

#[test]
fn the_check_of_the_schema_sees_what_is_wrong() {
    let good = json(&report().2);
    type Damage = fn(&mut Value);
    let damages: [(&str, Damage); 7] = [
        ("report.date", |r| r["date"] = "yesterday".into()),
        ("report: without", |r| {
            drop(r.as_object_mut().unwrap().remove("rates"))
        }),
        ("report.machine: with", |r| {
            r["machine"]["owner"] = "me".into()
        }),
        ("report.arms: empty", |r| {
            r["arms"] = Value::Array(Vec::new())
        }),
        ("report.arms[0].threads: too small", |r| {
            r["arms"][0]["threads"] = 0.into()
        }),
        ("report.arms[0].figures: fits none", |r| {
            r["arms"][0]["figures"]["tokens"] = 0.into()
        }),
        ("report.asked.reply_sha256", |r| {
            r["asked"]["reply_sha256"] = "0".into()
        }),
    ];
    for (expected, damage) in damages {
        let mut report = good.clone();
        damage(&mut report);
        let found = faults(&report).join("\n");
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

#[test]
fn reports_are_compared_only_if_they_are_of_the_same_thing() {
    let (folder, file, _) = report();
    let change = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut report = read(file);
        change(&mut report);
        let path = folder.path().join(name);
        std::fs::write(&path, report.to_string()).unwrap();
        path
    };
    let compare = |other: &Path, more: &[&str]| {
        let mut args = vec![
            "bench",
            "compare",
            file.to_str().unwrap(),
            other.to_str().unwrap(),
        ];
        args.extend(more);
        deltafin(&args)
    };
    let double = change("double.json", &|r| {
        let all = &mut r["arms"][1]["figures"]["seconds"]["all"];
        for part in ["median", "p10", "p90"] {
            all[part] = (all[part].as_f64().unwrap() * 2.0).into();
        }
    });
    let run = compare(&double, &["--json"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let arms = json(&run)["arms"].clone();
    assert_eq!(arms.as_array().unwrap().len(), 2, "{arms}");
    assert_eq!(arms[0]["lines"][0]["ratio"], 1.0);
    let ratio = arms[1]["lines"][0]["ratio"].as_f64().unwrap();
    assert!((ratio - 2.0).abs() < 1e-9, "{ratio}");
    assert!(compare(&double, &[]).stdout.contains("2.000"));

    let prompt = change("prompt.json", &|r| {
        r["asked"]["prompt_sha256"] = "0".repeat(64).into()
    });
    let run = compare(&prompt, &[]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("prompt ("), "{}", run.stderr);
    let run = compare(&prompt, &["--anyway"]);
    assert_eq!(run.code, 0, "{}", run.stderr);

    let newer = change("newer.json", &|r| r["format"] = "deltafin-bench/9".into());
    let run = compare(&newer, &[]);
    assert_eq!(run.code, 6);
    assert!(run.stderr.contains("deltafin-bench/9"), "{}", run.stderr);
    let strangers = change("strangers.json", &|r| {
        r["arms"][0]["name"] = "a".into();
        r["arms"][1]["name"] = "b".into();
    });
    assert_eq!(compare(&strangers, &[]).code, 2);
}

#[test]
fn a_measurement_changes_no_setting_and_removes_no_expert() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().to_str().unwrap();
    let model = "fixtures/tiny-k3";
    let mut stream = vec!["stream", "--hub", model, "--home", path, "--reserve", "0"];
    stream.extend(["--cache", "900MB", "--ids", "5,9,12", "--max-tokens", "8"]);
    assert_eq!(deltafin(&stream).code, 0);
    let settings = std::fs::read(home.path().join("store.json")).unwrap();
    let held = program::expert_bytes(home.path());
    assert!(held > 0);
    let bench = |more: &[&str]| {
        let mut args = vec![
            "bench", "--model", model, "--home", path, "--rounds", "1", "--tokens", "6", "--json",
        ];
        args.extend(more);
        deltafin(&args)
    };
    let run = bench(&["--cache", "10kB"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("may not remove"), "{}", run.stderr);
    let run = bench(&["--arm", "a:", "--arm", "b: --cache 10kB"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    let run = bench(&["--cache", "700MB", "--drop-page-cache"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(faults(&report), Vec::<String>::new());
    // No tokenizer: ids are asked. No network: no link.
    assert!(report["asked"]["prompt"].is_null() && report["rates"]["link"].is_null());
    assert_eq!(
        std::fs::read(home.path().join("store.json")).unwrap(),
        settings
    );
    assert!(program::expert_bytes(home.path()) >= held);
}

#[test]
fn what_cannot_be_meant_is_refused() {
    // A file where a folder is wanted.
    let file = tempfile::NamedTempFile::new().unwrap();
    let file = file.path();
    for (args, told) in [
        (&["--arm", "a: --nonsense"][..], "--nonsense"),
        (&["--arm", "a: --threads 0"], "arm `a`"),
        (&["--arm", ": --threads 1"], "not an arm"),
        (
            &["--arm", "a:", "--arm", "a: --threads 1"],
            "two are called `a`",
        ),
        (&["--tokens", "3"], "--tokens 4"),
        (&["--disk", "--arm", "a:"], "cannot be used with"),
        (
            &[
                "--model",
                "local/none",
                "--offline",
                "--home",
                file.to_str().unwrap(),
            ],
            "error",
        ),
        (
            &["--model", "some/model", "--arm", "a: --shape 1mbit"],
            "--shape",
        ),
        (&["--isa", "abacus"], "abacus"),
    ] {
        let mut all = vec!["bench"];
        all.extend(args);
        let run = deltafin(&all);
        assert!(
            run.code == 2 || run.code == 3 || run.code == 5,
            "{args:?}: {}",
            run.code
        );
        assert!(run.stderr.contains(told), "{args:?}: {}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    let out = file.join("report").display().to_string();
    let run = deltafin(&[
        "bench",
        "--rounds",
        "1",
        "--warm-up",
        "0",
        "--tokens",
        "4",
        "--json",
        "--out",
        &out,
    ]);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert_eq!(
        faults(&json(&run)),
        Vec::<String>::new(),
        "what was measured is told nevertheless"
    );
}

#[test]
fn the_machine_is_measured_alone() {
    let run = deltafin(&["bench", "--disk", "--link", "--shape", "8mbit", "--json"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let found = json(&run);
    assert!(found["rates"]["disk"].as_f64().unwrap() > 0.0);
    // A megabyte a second is what the link carries; never much more.
    let link = found["rates"]["link"].as_f64().unwrap();
    assert!(link > 0.1e6 && link < 1.5e6, "{found}");
}

#[test]
fn an_interrupted_measurement_reports_the_rounds_that_were_whole() {
    let mut command = program::command();
    command.args([
        "bench",
        "--rounds",
        "10000",
        "--warm-up",
        "0",
        "--tokens",
        "6",
        "--json",
    ]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("round 2") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended by itself");
    }
    program::signal(&child, "INT");
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut said, &mut rest).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{rest}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(faults(&report), Vec::<String>::new());
    assert!(report["asked"]["rounds"].as_u64().unwrap() >= 2);
    assert!(rest.contains("interrupted after"), "{rest}");
}

#[test]
fn every_report_that_was_contributed_is_one_and_the_table_is_of_them() {
    let mut reports = 0;
    for entry in std::fs::read_dir(REPORTS).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|e| e != "json") || file.ends_with("schema.json") {
            continue;
        }
        reports += 1;
        assert_eq!(
            faults(&read(&file)),
            Vec::<String>::new(),
            "{}",
            file.display()
        );
        assert!(file.with_extension("md").is_file(), "{}", file.display());
    }
    assert!(reports > 0);
    let table = deltafin(&["bench", "table"]);
    assert_eq!(table.code, 0, "{}", table.stderr);
    let readme = std::fs::read_to_string("README.md").unwrap();
    let (begin, end) = ("<!-- bench:begin -->", "<!-- bench:end -->");
    let from = readme.find(begin).unwrap() + begin.len();
    let to = from + readme[from..].find(end).unwrap();
    let there = readme[from..to].trim();
    assert_eq!(
        there,
        table.stdout.trim(),
        "deltafin bench table --into README.md"
    );
    // And the way to put it there does that, and nothing else.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("README.md");
    std::fs::write(&copy, readme.replace(there, "old")).unwrap();
    let into = deltafin(&["bench", "table", "--into", copy.to_str().unwrap()]);
    assert_eq!(into.code, 0, "{}", into.stderr);
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), readme);
    std::fs::write(&copy, "nothing").unwrap();
    assert_eq!(
        deltafin(&["bench", "table", "--into", copy.to_str().unwrap()]).code,
        2
    );
}
