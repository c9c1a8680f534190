//! Every kind of damage to every kind of file of a filled store: found before use, never served,
//! reported, made good.
//!
//! `DELTAFIN_LOG_CUTS` sets at how many places the digest log is cut and spoilt.

use std::path::Path;
use std::path::PathBuf;

use deltafin::store::Budget;
use deltafin::store::Lookup;
use deltafin::store::Policy;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::terms::ExpertKey;

use crate::EXPERT;
use crate::EXPERTS;
use crate::FOLDER;
use crate::WHO;
use crate::assert_sound;
use crate::cache;
use crate::copy;
use crate::expert_files;
use crate::fetch;
use crate::filled;
use crate::golden;
use crate::home;
use crate::ids;
use crate::model_folder;
use crate::program;
use crate::program::json;
use crate::with;

type Harm = (&'static str, fn(&Path, &[u8]));

fn rewrite(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Each does something to a file; the bytes are those of another of its kind.
const HARMS: [Harm; 7] = [
    ("a bit flipped", |path, _| {
        rewrite(path, |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x04;
        });
    }),
    ("truncated", |path, _| {
        rewrite(path, |bytes| bytes.truncate(bytes.len() - 1));
    }),
    ("empty", |path, _| std::fs::write(path, b"").unwrap()),
    ("grown", |path, _| rewrite(path, |bytes| bytes.push(0))),
    ("zeroed", |path, _| rewrite(path, |bytes| bytes.fill(0))),
    ("another's", |path, other| {
        std::fs::write(path, other).unwrap()
    }),
    ("a folder", |path, _| {
        std::fs::remove_file(path).unwrap();
        std::fs::create_dir(path).unwrap();
        std::fs::write(path.join("inside"), b"x").unwrap();
    }),
];

/// One file of each kind, and another of that kind.
fn one_of_each(model: &Path) -> Vec<(PathBuf, PathBuf)> {
    let mut headers = program::files(&model.join("headers"));
    headers.sort();
    let pairs = [
        ("experts/001/0003", "experts/001/0004"),
        ("core/001", "core/002"),
        ("core/top", "core/000"),
        ("meta/config.json", "meta/generation_config.json"),
        ("source.json", "meta/config.json"),
    ];
    let pairs = pairs.iter().map(|(a, b)| (model.join(a), model.join(b)));
    let header = (headers[1].clone(), headers[2].clone());
    pairs.chain([header]).collect()
}

#[test]
fn whatever_happens_to_a_file_verify_finds_it_and_the_next_fetch_brings_it_back() {
    for (harm, harm_it) in HARMS {
        let home = home();
        let model = model_folder(home.path());
        let harmed = one_of_each(&model);
        // Read before any is harmed: one's other may be the next to be.
        let read = |(_, other): &(PathBuf, PathBuf)| std::fs::read(other).unwrap();
        let others: Vec<Vec<u8>> = harmed.iter().map(read).collect();
        for ((path, _), other) in harmed.iter().zip(&others) {
            harm_it(path, other);
        }
        let found = cache(&["verify"], home.path());
        assert_eq!(found.code, 6, "{harm}: {}", found.stderr);
        let report = json(&found);
        let damaged = report["models"][0]["damaged"].as_array().unwrap();
        let mut named: Vec<&str> = damaged
            .iter()
            .map(|d| d["file"].as_str().unwrap())
            .collect();
        named.sort_unstable();
        let mut expected: Vec<&str> = harmed.iter().map(|(p, _)| p.to_str().unwrap()).collect();
        // An expert that is no file is put away when the home is opened.
        if harm == "a folder" {
            expected.retain(|path| !path.contains("/experts/"));
        }
        expected.sort_unstable();
        assert_eq!(named, expected, "{harm}");
        let repaired = cache(&["verify", "--repair"], home.path());
        assert_eq!(repaired.code, 6, "{harm}: repaired, and said");
        let removed = json(&repaired)["models"][0]["removed"].clone();
        assert_eq!(removed, expected.len(), "{harm}");
        let again = fetch(home.path(), Path::new(FOLDER));
        assert_eq!(again.code, 0, "{harm}: {}", again.stderr);
        assert_sound(home.path(), harm);
    }
}

#[test]
fn a_fetch_alone_brings_back_what_has_another_length_or_is_no_file() {
    for (harm, harm_it) in HARMS {
        let home = home();
        let harmed = one_of_each(&model_folder(home.path()));
        let read = |(_, other): &(PathBuf, PathBuf)| std::fs::read(other).unwrap();
        let others: Vec<Vec<u8>> = harmed.iter().map(read).collect();
        for ((path, _), other) in harmed.into_iter().zip(others) {
            let same_length = std::fs::metadata(&path).unwrap().len() == other.len() as u64;
            let rot =
                matches!(harm, "a bit flipped" | "zeroed") || harm == "another's" && same_length;
            let small = path.ends_with("source.json")
                || path
                    .components()
                    .any(|c| c.as_os_str() == "meta" || c.as_os_str() == "headers");
            if small || !rot {
                harm_it(&path, &other);
            }
        }
        let again = fetch(home.path(), Path::new(FOLDER));
        assert_eq!(again.code, 0, "{harm}: {}", again.stderr);
        assert_sound(home.path(), harm);
    }
}

#[test]
fn no_damaged_expert_is_ever_used_whatever_stop_lies_between() {
    for (harm, harm_it) in HARMS {
        let damaged = home();
        let files = expert_files(damaged.path());
        assert_eq!(files.len() as u64, EXPERTS);
        let contents: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
        for (n, path) in files.iter().enumerate() {
            harm_it(path, &contents[(n + 1) % contents.len()]);
        }
        let alone = tempfile::tempdir().unwrap();
        copy(damaged.path(), alone.path());
        let run = with("stream", damaged.path(), Path::new(FOLDER), &WHO);
        assert_eq!(run.code, 0, "{harm}: {}", run.stderr);
        let report = json(&run);
        assert_eq!(ids(&report), golden(), "{harm}");
        assert_eq!(
            report["experts"]["disk"], 0,
            "{harm}: {}",
            report["experts"]
        );
        let verified = cache(&["verify", "--repair"], damaged.path());
        let left = json(&verified)["models"][0]["damaged"]
            .as_array()
            .unwrap()
            .len() as u64;
        let used = report["experts"]["hub"].as_u64().unwrap();
        assert!(
            used > 0 && left <= EXPERTS - used,
            "{harm}: {left} left, {used} used"
        );
        // Without a hub it stops, rather than say something else.
        let mut args = vec!["run", "--model", crate::MODEL, "--home"];
        args.extend([alone.path().to_str().unwrap(), "--json"]);
        args.extend(WHO);
        let run = program::deltafin(&args);
        assert_eq!(run.code, 3, "{harm}: {}", run.stderr);
        assert!(run.stderr.contains("expert"), "{harm}: {}", run.stderr);
        assert!(ids(&json(&run)).is_empty(), "{harm}: {}", run.stdout);
    }
}

/// The model's folder of a home that shares its files with [`filled`], with a digest log of its own.
fn with_log(log: &[u8]) -> tempfile::TempDir {
    fn link(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let to = to.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                link(&entry.path(), &to);
            } else {
                std::fs::hard_link(entry.path(), to).unwrap();
            }
        }
    }
    let home = tempfile::tempdir().unwrap();
    let (from, to) = (model_folder(filled()), home.path());
    let to = to.join(from.strip_prefix(filled()).unwrap());
    for area in ["experts", "core", "meta", "headers"] {
        link(&from.join(area), &to.join(area));
    }
    std::fs::copy(from.join("source.json"), to.join("source.json")).unwrap();
    std::fs::write(to.join("digests"), log).unwrap();
    home
}

/// Reads every expert; returns how many were served. Whatever is served is right.
fn served(home: &Path, what: &str) -> u64 {
    let store = Store::open(StoreOptions {
        home: home.to_owned(),
        budget: Budget::Unlimited,
        reserve: 0,
        policy: Policy::Lru,
        keep_heat: true,
    })
    .unwrap();
    let (repo, commit) = store.models().remove(0);
    let model = store.model(&repo, &commit);
    let mut served = 0;
    for file in expert_files(filled()) {
        let number = |path: &Path| path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let key = ExpertKey {
            layer: number(file.parent().unwrap()),
            expert: number(&file),
        };
        if let Lookup::Hit(lease) = model.lookup(key, EXPERT) {
            match lease.read() {
                Ok(bytes) => {
                    assert!(bytes == std::fs::read(&file).unwrap(), "{what}: {key}");
                    served += 1;
                }
                Err(e) => assert!(e.refetch(), "{what}: {key}: {e}"),
            }
        }
    }
    served
}

#[test]
fn a_digest_log_cut_or_spoilt_at_any_place_serves_nothing_wrong_and_a_fetch_makes_it_good() {
    let cuts = std::env::var("DELTAFIN_LOG_CUTS").map_or(24, |n| n.parse().unwrap());
    let log = std::fs::read(model_folder(filled()).join("digests")).unwrap();
    let step = (log.len() / cuts).max(1);
    // Every place that a step meets, and around the ends of lines, where a byte decides.
    let mut places: Vec<usize> = (0..log.len()).step_by(step).collect();
    let ends = log.iter().enumerate().filter(|(_, b)| **b == b'\n');
    let ends = ends.map(|(at, _)| at).step_by(1 + step / 100);
    places.extend(
        ends.flat_map(|end| [end, end + 1])
            .filter(|at| *at < log.len()),
    );
    places.sort_unstable();
    places.dedup();
    for (n, at) in places.iter().enumerate() {
        let what = format!("cut at {at}");
        let home = with_log(&log[..*at]);
        let complete = log[..*at]
            .split(|b| *b == b'\n')
            .filter(|line| line.starts_with(b"{\"file\":\"experts/") && line.ends_with(b"\"}"));
        let complete = complete.count() as u64;
        let sound = served(home.path(), &what);
        assert!(
            sound == complete || sound + 1 == complete,
            "{what}: {sound} of {complete}"
        );
        let what = format!("garbage at {at}");
        let mut spoilt = log.clone();
        spoilt[*at] = if n % 2 == 0 { 0xff } else { b'7' };
        let home = with_log(&spoilt);
        let sound = served(home.path(), &what);
        assert!(sound + 2 >= EXPERTS, "{what}: {sound} served");
        if n % 16 == 0 {
            let again = fetch(home.path(), Path::new(FOLDER));
            assert_eq!(again.code, 0, "{what}: {}", again.stderr);
            assert_sound(home.path(), &what);
        }
    }
}

#[test]
fn what_lost_its_line_in_the_log_is_fetched_again_whatever_it_is() {
    let log = std::fs::read_to_string(model_folder(filled()).join("digests")).unwrap();
    let no_expert = |line: &str| !line.starts_with("{\"file\":\"experts/");
    let lines = log.lines().filter(|line| no_expert(line)).count();
    assert!(lines > 10, "{lines} lines of the core and the headers");
    // All of those are spoilt, and every second: among neighbours that are known.
    for every in [1, 2] {
        let mut nth = 0;
        let lines = log.lines().map(|line| {
            nth += usize::from(no_expert(line));
            match no_expert(line) && nth % every == 0 {
                true => line.replacen("\"file\"", "\"fi1e\"", 1) + "\n",
                false => line.to_owned() + "\n",
            }
        });
        let home = with_log(lines.collect::<String>().as_bytes());
        let what = format!("one line in {every} spoilt");
        let again = fetch(home.path(), Path::new(FOLDER));
        assert_eq!(again.code, 0, "{what}: {}", again.stderr);
        assert_sound(home.path(), &what);
    }
}
