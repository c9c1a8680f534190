//! Many spans, random faults, one seed: the result is exact, and costs little more than it must.

use std::collections::VecDeque;

use deltafin::hub::Class;
use deltafin::hub::HubOptions;
use deltafin::hub::SourceAddress;

use crate::kit::Client;
use crate::kit::REPO;
use crate::kit::TOKEN;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::proven_span;
use crate::kit::token;
use crate::support::TestHub;

/// One span in twenty meets a fault. `DELTAFIN_CHAOS_SPANS` and `DELTAFIN_CHAOS_SEED` make it
/// longer or another one.
#[test]
fn chaos_ends_with_every_byte_right() {
    let number = |name: &str, default: u64| {
        let text = std::env::var(name).ok();
        text.and_then(|t| t.parse().ok()).unwrap_or(default)
    };
    let spans = number("DELTAFIN_CHAOS_SPANS", 400);
    let seed = number("DELTAFIN_CHAOS_SEED", 20_261_201);
    eprintln!("seed {seed}, {spans} spans");
    let first = TestHub::virtual_file(REPO, 5, 16 << 30);
    let second = TestHub::virtual_file(REPO, 5, 16 << 30);
    let sources: Vec<SourceAddress> = vec![first.source(), second.source()];
    let client = Client::with(HubOptions {
        token: token(),
        ..options(sources, &first)
    });
    first.chaos(seed, 0.05);
    second.chaos(seed + 1, 0.05);
    let mut state = seed;
    let mut under_way = VecDeque::new();
    let mut useful = 0;
    for _ in 0..spans {
        let start = crate::support::testhub::next_random(&mut state) % (15 << 30);
        let length = 1 + crate::support::testhub::next_random(&mut state) % 200_000;
        let class = [Class::Demand, Class::Bulk, Class::Hint][usize::try_from(length % 3).unwrap()];
        let pending = client.start(proven_span(&first, start, start + length), class);
        under_way.push_back((pending, start, start + length));
        useful += length;
        if under_way.len() >= 32 {
            let (pending, start, end) = under_way.pop_front().unwrap();
            assert_right(&first, &pending.wait().unwrap(), start, end);
        }
    }
    for (pending, start, end) in under_way {
        assert_right(&first, &pending.wait().unwrap(), start, end);
    }
    let sent = first.ledger().expert_bytes_sent() + second.ledger().expert_bytes_sent();
    let thousandths = sent * 1_000 / useful;
    eprintln!("{sent} bytes sent for {useful}: {thousandths} thousandths");
    assert!(sent <= useful * 115 / 100, "{sent} bytes for {useful}");
    let faults = first.ledger().0.iter().filter(|e| e.faulted).count();
    assert!(faults > 5, "no chaos at all");
    for server in [&first, &second] {
        server.ledger().assert_polite();
        server.ledger().assert_kept(TOKEN);
    }
    let told = format!("{:?} {:?}", client.heard.all(), client.hub.stats());
    assert!(
        !told.contains(TOKEN) && !told.contains("Signature"),
        "{told}"
    );
    let stats = client.hub.stats();
    assert_eq!((stats.lanes, stats.waiting), (0, 0));
    drop(client);
    eventually("every connection closed", || {
        first.open_connections() + second.open_connections() == 0
    });
}
