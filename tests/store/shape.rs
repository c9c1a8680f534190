//! A store in K3's true shape: 92 layers of 896 experts, each of a few bytes instead of 17 MB. What is
//! slow with the number of experts, rather than with their size, shows here.
//!
//! `DELTAFIN_SHAPE_LAYERS` sets the number of layers: all 92 in scripts/soak.sh, fewer by default.

use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use deltafin::store::Budget;
use deltafin::store::Filled;
use deltafin::store::Lookup;
use deltafin::store::Policy;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::terms::Digest;
use deltafin::terms::ExpertKey;
use sha2::Digest as _;
use sha2::Sha256;

use crate::model;

/// Of a layer.
const EXPERTS: u16 = 896;
/// Used by a token in each layer.
const USED: u16 = 16;
const LEN: u64 = 64;
/// How long a warm opening may take, with the slack that a busy machine needs.
const OPENING: Duration = Duration::from_secs(10);

fn content(key: ExpertKey) -> Bytes {
    let seed = [key.layer.to_le_bytes(), key.expert.to_le_bytes()].concat();
    seed.iter().copied().cycle().take(LEN as usize).collect()
}

fn keys(layers: u16) -> impl Iterator<Item = ExpertKey> {
    (1..=layers).flat_map(|layer| (0..EXPERTS).map(move |expert| ExpertKey { layer, expert }))
}

/// Does something and says how long it took.
#[expect(
    clippy::print_stdout,
    reason = "its figures are what the test is run for"
)]
fn timed<T>(what: &str, work: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    let done = work();
    let took = began.elapsed();
    println!("{what}: {:.3} s", took.as_secs_f64());
    (done, took)
}

#[test]
#[expect(clippy::too_many_lines, reason = "one store, one story")]
fn a_store_in_the_shape_of_k3_opens_lists_checks_and_trims() {
    let layers = std::env::var("DELTAFIN_SHAPE_LAYERS").map_or(4, |n| n.parse().unwrap());
    let all = usize::from(layers) * usize::from(EXPERTS);
    let home = tempfile::tempdir().unwrap();
    let open = |what: &str| {
        let options = StoreOptions {
            home: home.path().to_owned(),
            budget: Budget::Unlimited,
            reserve: 0,
            policy: Policy::Lru,
            keep_heat: true,
        };
        let (store, took) = timed(what, || Store::open(options).unwrap());
        assert!(took < OPENING, "{what}: {took:?}");
        store
    };
    let store = open("open, empty");
    let made = model(&store);
    timed(&format!("fill {all}"), || {
        for key in keys(layers) {
            let Lookup::Miss(slot) = made.lookup(key, LEN) else {
                panic!("{key}: there before it came");
            };
            let bytes = content(key);
            let digest = Digest(Sha256::digest(&bytes).into());
            assert_eq!(slot.fill(bytes, digest, "test"), Filled::Kept);
        }
    });
    drop(made);
    timed("close, with all that is to be synced", || drop(store));
    let store = open("open, warm");
    let made = model(&store);
    let (listed, _) = timed("list", || made.experts());
    assert_eq!(listed.len(), all);
    assert!(listed.iter().map(|(key, _)| *key).eq(keys(layers)));
    let (known, _) = timed("the first digest, and with it the log", || {
        made.known(keys(layers).next().unwrap())
    });
    assert!(known.is_some());
    let (held, _) = timed("levels by layer", || made.held().unwrap());
    assert_eq!(held.len(), usize::from(layers));
    assert!(
        held.values()
            .all(|held| held.first_use == usize::from(EXPERTS))
    );
    let token: Vec<ExpertKey> = keys(layers).step_by(usize::from(EXPERTS / USED)).collect();
    timed("read a token's, each compared at its first use", || {
        for key in &token {
            let Lookup::Hit(lease) = made.lookup(*key, LEN) else {
                panic!("{key}: gone");
            };
            assert_eq!(lease.read().unwrap(), content(*key));
        }
    });
    timed("touch a token's", || made.touch(&token));
    let (trimmed, _) = timed("trim to half", || store.trim(all as u64 / 2 * LEN).unwrap());
    assert_eq!(trimmed.experts, all as u64 / 2);
    assert!(
        token.iter().all(|key| made.contains(*key, LEN)),
        "used last"
    );
    drop(made);
    timed("close", || drop(store));
    let log = |store: &Store| {
        let file = model(store).folder().join("digests");
        std::fs::metadata(file).unwrap().len()
    };
    let store = open("open, half of it evicted");
    let before = log(&store);
    timed("trim to a tenth", || {
        store.trim(all as u64 / 10 * LEN).unwrap()
    });
    drop(store);
    let store = open("open, and the log rewritten");
    let after = log(&store);
    println!("digest log: {before} bytes, then {after}");
    assert!(after * 4 < before, "{before} bytes, then {after}");
    let made = model(&store);
    assert_eq!(made.experts().len(), all / 10);
    for (key, _) in made.experts() {
        let lease = made.lease(key, LEN).unwrap();
        assert_eq!(lease.read().unwrap(), content(key));
    }
}
