//! A store in K3's true shape: 92 layers of 896 experts, each of a few bytes instead of 17 MB. What is
//! slow with the number of experts, rather than with their size, shows here.

use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use deltafin::store::Budget;
use deltafin::store::Filled;
use deltafin::store::Lookup;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::terms::Digest;
use deltafin::terms::ExpertKey;
use sha2::Digest as _;
use sha2::Sha256;

use crate::model;

const LAYERS: u16 = 92;
const EXPERTS: u16 = 896;
const ALL: usize = LAYERS as usize * EXPERTS as usize;
const LEN: u64 = 64;
/// What a token of K3 uses.
const TOKEN: usize = 1_472;
/// How long a warm opening may take, with the slack that a busy machine needs.
const OPENING: Duration = Duration::from_secs(10);

fn content(key: ExpertKey) -> Bytes {
    let seed = [key.layer.to_le_bytes(), key.expert.to_le_bytes()].concat();
    seed.iter().copied().cycle().take(LEN as usize).collect()
}

fn keys() -> impl Iterator<Item = ExpertKey> {
    let layers = 1..=LAYERS;
    layers.flat_map(|layer| (0..EXPERTS).map(move |expert| ExpertKey { layer, expert }))
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
#[ignore = "82,432 files: by hand, or in scripts/soak.sh"]
fn a_store_in_the_shape_of_k3_opens_lists_checks_and_trims() {
    let home = tempfile::tempdir().unwrap();
    let open = |what: &str| {
        let options = StoreOptions {
            home: home.path().to_owned(),
            budget: Budget::Unlimited,
            reserve: 0,
        };
        let (store, took) = timed(what, || Store::open(options).unwrap());
        assert!(took < OPENING, "{what}: {took:?}");
        store
    };
    let store = open("open, empty");
    let made = model(&store);
    timed("fill 82,432", || {
        for key in keys() {
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
    assert_eq!(listed.len(), ALL);
    assert!(listed.iter().map(|(key, _)| *key).eq(keys()));
    let (known, _) = timed("the first digest, and with it the log", || {
        made.known(keys().next().unwrap())
    });
    assert!(known.is_some());
    let (held, _) = timed("levels by layer", || made.held().unwrap());
    assert_eq!(held.len(), usize::from(LAYERS));
    assert!(
        held.values()
            .all(|held| held.first_use == usize::from(EXPERTS))
    );
    let token: Vec<ExpertKey> = keys().step_by(ALL / TOKEN).take(TOKEN).collect();
    timed("read 1,472, each compared at its first use", || {
        for key in &token {
            let Lookup::Hit(lease) = made.lookup(*key, LEN) else {
                panic!("{key}: gone");
            };
            assert_eq!(lease.read().unwrap(), content(*key));
        }
    });
    timed("touch 1,472", || made.touch(&token));
    let (trimmed, _) = timed("trim to half", || store.trim(ALL as u64 / 2 * LEN).unwrap());
    assert_eq!(trimmed.experts, ALL as u64 / 2);
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
        store.trim(ALL as u64 / 10 * LEN).unwrap()
    });
    drop(store);
    let store = open("open, and the log rewritten");
    let after = log(&store);
    println!("digest log: {before} bytes, then {after}");
    assert!(after * 4 < before, "{before} bytes, then {after}");
    let made = model(&store);
    assert_eq!(made.experts().len(), ALL / 10);
    for (key, _) in made.experts() {
        let lease = made.lease(key, LEN).unwrap();
        assert_eq!(lease.read().unwrap(), content(key));
    }
}
