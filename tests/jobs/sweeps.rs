//! What company saves: bytes a token from the disk and from the hub, for 1 to 32 sequences at once.

use serde_json::Value;
use serde_json::json;

use crate::batch::Place;
use crate::batch::summary;
use crate::program::Run;

/// `scripts/sweeps.py` goes through more of them, on larger models too.
const COUNTS: [u64; 3] = [1, 8, 32];
/// Less than the small model's core.
const LITTLE: &str = "36MB";

fn requests(sequences: u64) -> String {
    let line = |n: u64| {
        let prompt: Vec<u64> = (0..4).map(|i| (n * 131 + i * 37) % 1000).collect();
        let line = json!({
            "custom_id": n.to_string(), "method": "POST", "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 12, "temperature": 1, "seed": n},
        });
        format!("{line}\n")
    };
    (0..sequences).map(line).collect()
}

/// Rows that were computed: nobody needs the one after the last token of a reply.
fn rows(told: &Value, sequences: u64) -> u64 {
    let of = |what: &str| told["tokens"][what].as_u64().unwrap();
    of("prompt") + of("generated") - sequences
}

fn bytes(told: &Value, from: &[&str]) -> u64 {
    let of = |from: &&str| told["bytes"][*from].as_u64().unwrap();
    from.iter().map(of).sum()
}

fn ran(place: &Place, sequences: u64, more: &[&str]) -> Value {
    let _ = std::fs::remove_file(place.path("out.jsonl"));
    let sequences = sequences.to_string();
    let flags = [&["--sequences", &sequences, "--ram", LITTLE][..], more].concat();
    let run: Run = place.run(&flags);
    summary(&run)
}

#[test]
fn the_hub_gives_the_union_of_the_recorded_routes_and_nothing_twice() {
    let mut before = f64::INFINITY;
    for sequences in COUNTS {
        let place = Place::new(&requests(sequences));
        let file = place.path("routes");
        let file = file.to_str().unwrap();
        let told = ran(&place, sequences, &["--cache", "0", "--trace", file]);
        let trace = std::fs::read_to_string(file).unwrap();
        let mut lines = trace
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let expert = lines.next().unwrap()["expert_bytes"].as_u64().unwrap();
        let used = |sweep: Value| -> u64 {
            let layers = sweep["sweep"].as_array().unwrap().iter();
            layers.map(|l| l[1].as_array().unwrap().len() as u64).sum()
        };
        let union: u64 = lines.map(used).sum();
        assert_eq!(told["experts"]["requested"], union, "{sequences}");
        // The few that memory had room for need no hub; the disk keeps none.
        let hub = bytes(&told, &["hub"]);
        let memory = bytes(&told, &["memory"]);
        assert_eq!(hub + memory, union * expert, "{sequences}: {told}");
        assert!(memory * 20 < hub, "{sequences}: the cache is cold: {told}");
        assert_eq!(bytes(&told, &["disk", "peer"]), 0, "{sequences}");
        let each = hub as f64 / rows(&told, sequences) as f64;
        println!("{sequences} sequences: {each:.0} bytes from the hub a row");
        assert!(each < before, "{sequences}: company must save something");
        before = each;
    }
}

#[test]
fn a_core_larger_than_memory_is_read_once_for_all() {
    let mut first = 0.0;
    for sequences in COUNTS {
        let place = Place::new(&requests(sequences));
        // Once for what is installed, and once with everything on the disk.
        ran(&place, sequences, &["--cache", "unlimited"]);
        let told = ran(&place, sequences, &["--cache", "unlimited"]);
        assert_eq!(bytes(&told, &["hub", "core_hub"]), 0, "{told}");
        let disk = bytes(&told, &["disk", "core_disk"]);
        let each = disk as f64 / rows(&told, sequences) as f64;
        if sequences == 1 {
            first = each;
        }
        println!(
            "{sequences} sequences: {each:.0} bytes from the disk a row, {:.3} of one's",
            each / first
        );
        assert!(sequences < 32 || each <= 0.35 * first, "{each} of {first}");
    }
}
