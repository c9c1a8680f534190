//! The command line's contract: flags, defaults, JSON fields, exit codes, and what bad input is told.
//!
//! What people and scripts rely on is kept in `fixtures/cli/`; run with `DELTAFIN_BLESS=1` to accept a
//! change, and look at the difference before committing it.

#![allow(
    clippy::unwrap_used,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "a test fails by panicking, and its tables are long"
)]

mod program;

use std::path::Path;

use program::Run;
use program::deltafin;
use program::json;
use serde_json::Value;
use serde_json::json;

/// Compares with `fixtures/cli/NAME.txt`.
fn snapshot(name: &str, text: &str) {
    let file = Path::new("fixtures/cli").join(format!("{name}.txt"));
    if std::env::var_os("DELTAFIN_BLESS").is_some() {
        std::fs::create_dir_all("fixtures/cli").unwrap();
        std::fs::write(&file, text).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        text,
        kept,
        "{} differs; see the top of this test",
        file.display()
    );
}

#[test]
fn help_and_its_defaults_are_as_agreed() {
    let mut all = String::new();
    for command in [
        "",
        "demo",
        "stream",
        "run",
        "fetch",
        "batch",
        "sessions",
        "sessions show",
        "prefix",
        "prefix make",
        "prefix import",
        "serve",
        "share",
        "bench",
        "bench compare",
        "bench table",
        "cache",
        "doctor",
        "cache stats",
        "cache warm",
        "cache import",
        "cache manifest",
    ] {
        let mut args: Vec<&str> = command.split_whitespace().collect();
        args.push("--help");
        let run = deltafin(&args);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        all.push_str(&format!("$ deltafin {}\n{}\n", args.join(" "), run.stdout));
    }
    snapshot("help", &all);
}

/// The names and nesting of an object's fields, in order.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields.iter().map(|(k, v)| json!({ k: shape(v) })).collect(),
        Value::Array(_) => "list".into(),
        Value::String(_) => "text".into(),
        Value::Number(_) => "number".into(),
        Value::Bool(_) => "yes or no".into(),
        Value::Null => "null".into(),
    }
}

fn run_tiny(model: &Path, home: &Path, more: &[&str]) -> Run {
    let mut args = vec![
        "run",
        "--hub",
        model.to_str().unwrap(),
        "--home",
        home.to_str().unwrap(),
        "--reserve",
        "0",
    ];
    args.extend(more);
    deltafin(&args)
}

#[test]
fn the_json_object_has_the_agreed_fields_and_carries_failures_too() {
    let home = tempfile::tempdir().unwrap();
    let done = run_tiny(
        Path::new("fixtures/tiny-k3"),
        home.path(),
        &["--ids", "5,9,12", "--max-tokens", "3", "--json"],
    );
    assert_eq!(done.code, 0, "{}", done.stderr);
    snapshot("json-fields", &format!("{:#}\n", shape(&json(&done))));
    let report = json(&done);
    assert_eq!(report["prompt_ids"], json!([5, 9, 12]));
    assert_eq!(report["finish_reason"], "length");
    let empty = run_tiny(
        Path::new("fixtures/tiny-k3"),
        home.path(),
        &["  ", "--json"],
    );
    assert_eq!(empty.code, 2);
    assert_eq!(json(&empty)["error"], "the prompt is empty");
    let failed = run_tiny(
        Path::new("fixtures/tiny-k3"),
        home.path(),
        &["--ids", "5,999999", "--json"],
    );
    assert_eq!(failed.code, 2);
    let report = json(&failed);
    assert!(
        report["error"].as_str().unwrap().contains("999999"),
        "{report}"
    );
    assert_eq!(report["token_ids"], json!([]));
}

#[test]
fn a_seed_is_always_said() {
    let home = tempfile::tempdir().unwrap();
    let args = [
        "--ids",
        "5,9,12",
        "--max-tokens",
        "4",
        "--temperature",
        "1",
        "--json",
    ];
    let first = json(&run_tiny(Path::new("fixtures/tiny-k3"), home.path(), &args));
    let seed = first["seed"].to_string();
    let mut again = args.to_vec();
    again.extend(["--seed", &seed]);
    let second = json(&run_tiny(
        Path::new("fixtures/tiny-k3"),
        home.path(),
        &again,
    ));
    assert_eq!(first["token_ids"], second["token_ids"]);
}

/// A copy of a small checkpoint with one thing wrong.
fn damaged(from: &str, damage: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(Path::new("fixtures").join(from)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    damage(&model);
    folder
}

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(file, value.to_string()).unwrap();
}

fn config(change: impl FnOnce(&mut Value)) -> impl FnOnce(&Path) {
    move |model| edit(&model.join("config.json"), change)
}

fn index(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> impl FnOnce(&Path) {
    move |model| {
        edit(&model.join("model.safetensors.index.json"), |index| {
            change(index["weight_map"].as_object_mut().unwrap());
        });
    }
}

/// What a person is told, with places of this machine taken out.
fn told(run: &Run, folder: &Path) -> String {
    let text = run.stderr.replace(&folder.display().to_string(), "$TMP");
    format!("exit {}\n{text}", run.code)
}

#[test]
fn damaged_checkpoints_are_refused_by_name_before_any_weight_is_fetched() {
    type Damage = Box<dyn FnOnce(&Path)>;
    let text = |v: &mut Value| v["text_config"].take();
    let cases: Vec<(&str, Damage)> = vec![
        (
            "unsupported-model-type",
            Box::new(config(|c| c["model_type"] = json!("llama"))),
        ),
        (
            "missing-key",
            Box::new(config(move |c| {
                let mut t = text(c);
                t.as_object_mut().unwrap().shift_remove("kv_lora_rank");
                c["text_config"] = t;
            })),
        ),
        (
            "zero-heads",
            Box::new(config(|c| {
                c["text_config"]["num_attention_heads"] = json!(0)
            })),
        ),
        (
            "group-size",
            Box::new(config(|c| {
                c["text_config"]["moe_intermediate_size"] = json!(90)
            })),
        ),
        (
            "config-is-no-json",
            Box::new(|m| std::fs::write(m.join("config.json"), "{\"model_type\": ").unwrap()),
        ),
        (
            "index-names-a-missing-shard",
            Box::new(index(|map| {
                let first = map.keys().next().unwrap().clone();
                map[&first] = json!("model-00099-of-000010.safetensors");
            })),
        ),
        (
            "index-names-a-missing-tensor",
            Box::new(index(|map| {
                map.insert(
                    "language_model.model.layers.0.nonsense.weight".to_owned(),
                    json!("model-00001-of-000010.safetensors"),
                );
            })),
        ),
        (
            "index-lacks-a-tensor",
            Box::new(index(|map| {
                map.shift_remove("language_model.model.layers.3.self_attn.o_proj.weight")
                    .unwrap();
            })),
        ),
        (
            "truncated-header",
            Box::new(|m| {
                let shard = m.join("model-00002-of-000010.safetensors");
                let bytes = std::fs::read(&shard).unwrap();
                std::fs::write(shard, &bytes[..2000]).unwrap();
            }),
        ),
        (
            "header-is-no-json",
            Box::new(|m| {
                let shard = m.join("model-00002-of-000010.safetensors");
                let mut bytes = std::fs::read(&shard).unwrap();
                bytes[8] = b'x';
                std::fs::write(shard, bytes).unwrap();
            }),
        ),
        (
            "shard-is-missing",
            Box::new(|m| {
                std::fs::remove_file(m.join("model-00005-of-000010.safetensors")).unwrap()
            }),
        ),
    ];
    let mut all = String::new();
    for (name, damage) in cases {
        let folder = damaged("tiny-k3", damage);
        let home = folder.path().join("home");
        let run = run_tiny(&folder.path().join("model"), &home, &["--ids", "1,2,3"]);
        assert!(
            run.code == 6 || run.code == 3,
            "{name}: exit {}\n{}",
            run.code,
            run.stderr
        );
        assert!(!run.stderr.contains("panicked"), "{name}: {}", run.stderr);
        let weights = program::files(&home)
            .into_iter()
            .filter(|f| program::len(f) > 200_000)
            .count();
        assert_eq!(weights, 0, "{name}: weights were fetched");
        all.push_str(&format!("## {name}\n{}\n", told(&run, folder.path())));
    }
    snapshot("damaged", &all);
}

#[test]
fn mistakes_are_told_what_where_and_what_next() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    let at = home.to_str().unwrap().to_owned();
    let austen = "fixtures/austen-k3/model";
    let long = "word ".repeat(9_000);
    let cases: &[(&str, Vec<&str>, i32)] = &[
        ("no prompt", vec!["run", "--hub", austen, "--home", &at], 2),
        (
            "empty prompt",
            vec!["run", "--hub", austen, "--home", &at, "  "],
            2,
        ),
        (
            "prompt and ids",
            vec!["run", "--hub", austen, "--home", &at, "hello", "--ids", "1"],
            2,
        ),
        (
            "prompt longer than the context",
            vec![
                "run",
                "--hub",
                austen,
                "--home",
                &at,
                "--reserve",
                "0",
                "--raw",
                &long,
            ],
            2,
        ),
        (
            "no such size",
            vec![
                "run",
                "--hub",
                austen,
                "--home",
                &at,
                "--cache",
                "12parsecs",
                "hello",
            ],
            2,
        ),
        (
            "no such temperature",
            vec!["run", "--temperature", "-1", "hello"],
            2,
        ),
        (
            "no such model name",
            vec!["run", "--model", "K3", "--home", &at, "hello"],
            2,
        ),
        (
            "unknown model in a folder",
            vec![
                "run",
                "--hub",
                "fixtures",
                "--model",
                "nobody/nothing",
                "--home",
                &at,
                "hello",
            ],
            3,
        ),
        (
            "not installed and offline",
            vec!["run", "--model", "nobody/nothing", "--home", &at, "hello"],
            3,
        ),
        (
            "no such folder",
            vec![
                "stream",
                "--hub",
                "fixtures/nowhere",
                "--home",
                &at,
                "hello",
            ],
            2,
        ),
        (
            "home not writable",
            vec!["run", "--hub", austen, "--home", "/proc/deltafin", "hello"],
            5,
        ),
        (
            "no tokenizer",
            vec![
                "run",
                "--hub",
                "fixtures/tiny-k3",
                "--home",
                &at,
                "--reserve",
                "0",
                "hello",
            ],
            2,
        ),
        (
            "open to the world without a key",
            vec![
                "serve", "--model", "demo", "--home", &at, "--host", "0.0.0.0",
            ],
            2,
        ),
    ];
    let mut all = String::new();
    for (name, args, code) in cases {
        let run = deltafin(args);
        assert_eq!(run.code, *code, "{name}: {}", run.stderr);
        assert!(!run.stderr.contains("panicked"), "{name}: {}", run.stderr);
        all.push_str(&format!("## {name}\n{}\n", told(&run, folder.path())));
    }
    snapshot("mistakes", &all);
}

#[test]
fn an_instruction_set_that_is_not_there_is_told_with_those_that_are() {
    let home = tempfile::tempdir().unwrap();
    let args = ["--ids", "5", "--isa", "sse9"];
    let run = run_tiny(Path::new("fixtures/tiny-k3"), home.path(), &args);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("sse9") && run.stderr.contains("scalar"),
        "{}",
        run.stderr
    );
}

#[test]
fn an_unreachable_hub_is_a_network_failure() {
    let home = tempfile::tempdir().unwrap();
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", nowhere.local_addr().unwrap());
    drop(nowhere);
    let run = deltafin(&[
        "stream",
        "--model",
        "nobody/nothing",
        "--hub",
        &url,
        "--home",
        home.path().to_str().unwrap(),
        "hello",
    ]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("hint:"), "{}", run.stderr);
}

#[test]
fn a_full_disk_slows_a_run_and_does_not_stop_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_mount) = program::small_disk(folder.path(), "3800k") else {
        println!("skipped: a small file system cannot be mounted here");
        return;
    };
    let home = folder.path().join("home");
    let args = [
        "--ids",
        "5,9,12,40,7,300",
        "--max-tokens",
        "8",
        "--json",
        "--cache",
        "unlimited",
    ];
    let full = run_tiny(Path::new("fixtures/tiny-k3"), &home, &args);
    assert_eq!(full.code, 0, "{}", full.stderr);
    let roomy = tempfile::tempdir().unwrap();
    let other = run_tiny(Path::new("fixtures/tiny-k3"), roomy.path(), &args);
    assert_eq!(json(&full)["token_ids"], json(&other)["token_ids"]);
    let expert = 10_000;
    let partial: Vec<_> = program::files(&home)
        .into_iter()
        .filter(|f| f.components().any(|c| c.as_os_str() == "experts") && program::len(f) < expert)
        .filter(|f| f.extension().is_some() || program::len(f) == 0)
        .collect();
    assert!(partial.is_empty(), "{partial:?}");
}

#[test]
fn a_disk_too_small_for_the_core_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_mount) = program::small_disk(folder.path(), "1m") else {
        println!("skipped: a small file system cannot be mounted here");
        return;
    };
    let home = folder.path().join("home");
    let run = run_tiny(Path::new("fixtures/tiny-k3"), &home, &["--ids", "5,9,12"]);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert!(run.stderr.contains("hint:"), "{}", run.stderr);
}
