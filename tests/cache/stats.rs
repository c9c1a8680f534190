//! `cache stats`: what is held, how well it is proved, how often it was there.

use std::path::Path;

use crate::EXPERT;
use crate::EXPERTS;
use crate::FOLDER;
use crate::WHO;
use crate::cache;
use crate::filled;
use crate::program::json;
use crate::with;

#[test]
fn stats_tell_levels_and_lookups_of_each_layer() {
    let stats = json(&cache(&["stats"], filled()));
    let model = &stats["models"][0];
    assert_eq!(model["experts"], EXPERTS);
    assert_eq!(
        model["levels"]["first_use"], EXPERTS,
        "a plain folder publishes no sha256"
    );
    assert_eq!(
        model["lookups"]["rate"],
        serde_json::Value::Null,
        "an install needs none"
    );
    let home = tempfile::tempdir().unwrap();
    let mut sums = [0; 2];
    for _ in 0..2 {
        let run = with("stream", home.path(), Path::new(FOLDER), &WHO);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let experts = &json(&run)["experts"];
        sums[0] += experts["disk"].as_u64().unwrap();
        sums[1] += experts["hub"].as_u64().unwrap();
    }
    let stats = json(&cache(&["stats"], home.path()));
    let model = &stats["models"][0];
    assert!(sums.iter().all(|sum| *sum > 0), "{sums:?}");
    assert_eq!(model["lookups"]["hits"], sums[0], "{model}");
    assert_eq!(model["lookups"]["misses"], sums[1], "{model}");
    let layers = model["by_layer"].as_array().unwrap();
    let sum = |field: &dyn Fn(&serde_json::Value) -> u64| layers.iter().map(field).sum::<u64>();
    assert_eq!(sum(&|l| l["lookups"]["hits"].as_u64().unwrap()), sums[0]);
    assert_eq!(
        sum(&|l| l["levels"]["first_use"].as_u64().unwrap()),
        sums[1]
    );
    assert_eq!(sum(&|l| l["bytes"].as_u64().unwrap()), sums[1] * EXPERT);
    let text = crate::deltafin(&[
        "cache",
        "stats",
        "--layers",
        "--home",
        home.path().to_str().unwrap(),
    ]);
    let told = text
        .stdout
        .lines()
        .filter(|l| l.contains("layer") && l.contains("first arrivals"));
    assert_eq!(told.count(), layers.len() + 1, "{}", text.stdout);
}
