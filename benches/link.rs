//! How much of a link the hub client uses: `cargo bench --bench link [-- --full]`.
//!
//! Loopback links are shaped in user space: a shared rate, a round trip before each reply and each
//! new connection, and, if wished, one connection in sixteen at 1 % of its share. Spans of
//! 17,547,264 bytes are queued; the first ten seconds are not counted. TCP's own slow start over a
//! long way is not modelled, so the figures for long round trips are upper bounds; the client, the
//! server and whatever else runs share this machine's cores.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a program for a person at a terminal"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::fs;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::hub::HubOptions;
use deltafin::hub::Span;
use deltafin::terms::ByteRange;
use deltafin::terms::RepoId;

use support::TestHub;
use support::Throttle;

const SPAN: u64 = 17_547_264;
const SPANS: u64 = 200;
const REPO: &str = "bench/data";
const FILE: &str = "data.safetensors";

fn main() {
    let full = std::env::args().any(|a| a == "--full");
    let (rates, trips): (&[u64], &[u64]) = if full {
        (&[100, 1_000, 2_000], &[0, 30, 150])
    } else {
        (&[200, 1_000], &[0, 80])
    };
    let (warm, counted) = if full { (10.0, 10.0) } else { (5.0, 5.0) };
    println!(
        "| link | round trip | slow lane | MB/s | of the link | cores | hedges | extra bytes |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for rate in rates {
        for trip in trips {
            for slow in [false, true] {
                let link = Link {
                    bytes_per_s: rate * 125_000,
                    trip: Duration::from_millis(*trip),
                    slow,
                };
                println!("{}", link.measure(warm, counted));
            }
        }
    }
}

struct Link {
    bytes_per_s: u64,
    trip: Duration,
    slow: bool,
}

impl Link {
    /// One row of the table.
    fn measure(&self, warm: f64, counted: f64) -> String {
        let server = TestHub::virtual_file(REPO, 1, SPAN * SPANS);
        server.latency(self.trip);
        server.slow(Throttle {
            total: Some(self.bytes_per_s),
            slow_lane: self.slow.then_some((16, self.bytes_per_s / 16 / 100)),
            ..Throttle::default()
        });
        let hub = Hub::open(HubOptions {
            sources: vec![server.source()],
            ..HubOptions::default()
        })
        .unwrap();
        let repo: RepoId = REPO.parse().unwrap();
        let commit = hub.commit(&repo, "main").unwrap();
        let snapshot = Arc::new(hub.list(&repo, &commit).unwrap());
        let (sender, receiver) = std::sync::mpsc::channel();
        let tickets: Vec<_> = (0..SPANS)
            .map(|i| {
                let span = Span {
                    file: FILE.into(),
                    range: ByteRange::new(i * SPAN, (i + 1) * SPAN),
                    digest: None,
                };
                let sender = sender.clone();
                hub.fetch(&snapshot, span, Class::Bulk, move |outcome| {
                    // The measurement may be over.
                    let _ = sender.send(outcome.map(|arrived| arrived.bytes.len()));
                })
            })
            .collect();
        let mut done = 0;
        let started = Instant::now();
        let mut at_warm = None;
        let (mut moved, mut seconds, mut cpu) = (0, 0.0, 0.0);
        while done < SPANS && started.elapsed().as_secs_f64() < warm + counted {
            if receiver
                .recv_timeout(Duration::from_millis(50))
                .is_ok_and(|o| o.is_ok())
            {
                done += 1;
            }
            let now = (Instant::now(), hub.stats(), cpu_seconds());
            if started.elapsed().as_secs_f64() < warm {
                continue;
            }
            let (from, stats, before) = at_warm.get_or_insert_with(|| now.clone());
            // The last spans cannot fill every lane.
            if done + 20 < SPANS {
                moved = now.1.body_bytes - stats.body_bytes;
                seconds = (now.0 - *from).as_secs_f64();
                cpu = now.2 - *before;
            }
        }
        drop(tickets);
        let stats = hub.stats();
        let speed = moved as f64 / f64::max(seconds, 0.001);
        format!(
            "| {} Mbit/s | {} ms | {} | {:.1} | {:.1} % | {:.2} | {} | {:.1} % |",
            self.bytes_per_s / 125_000,
            self.trip.as_millis(),
            if self.slow { "yes" } else { "no" },
            speed / 1e6,
            100.0 * speed / self.bytes_per_s as f64,
            cpu / f64::max(seconds, 0.001),
            stats.hedges,
            100.0 * stats.wasted_bytes as f64 / stats.body_bytes as f64,
        )
    }
}

/// Processor time of the client's own threads, where the system tells it thread by thread.
fn cpu_seconds() -> f64 {
    let threads = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let ticks = threads.filter_map(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        let (name, rest) = stat.split_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let own = name.ends_with("(hub");
        own.then(|| fields[11].parse::<u64>().unwrap_or(0) + fields[12].parse::<u64>().unwrap_or(0))
    });
    ticks.sum::<u64>() as f64 / 100.0
}
