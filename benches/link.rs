//! How much of a link the hub client uses, beside others:
//! `cargo bench --bench link [-- --full] [--only rates|peers]`.
//!
//! Loopback links are shaped in user space: a shared rate, a round trip before each reply and each
//! new connection, and, if wished, one connection in sixteen at 1 % of its share. Spans of
//! 17,547,264 bytes are queued; the first ten seconds are not counted. TCP's own slow start over a
//! long way is not modelled, so the figures for long round trips are upper bounds; the client, the
//! server and whatever else runs share this machine's cores.
//!
//! A second table sets whole runs side by side: the same spans over the same links by this client, by
//! curl (16 transfers at once) and by Python's huggingface_hub (16 threads; from the environment that
//! `scripts/parity.sh python` makes); who needs more than twice what the link needs is stopped. With
//! `--full` a figure outside its limit ends in exit code 1.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a program for a person at a terminal"
)]

#[path = "../tests/support/mod.rs"]
mod support;

#[path = "link/peers.rs"]
mod peers;

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::hub::HubOptions;
use deltafin::hub::Span;
use deltafin::hub::Ticket;
use deltafin::terms::ByteRange;
use deltafin::terms::RepoId;

use support::TestHub;
use support::Throttle;

const SPAN: u64 = 17_547_264;
const SPANS: u64 = 200;
const REPO: &str = "bench/data";
const FILE: &str = "data.safetensors";

/// Least part of the link, and with one lane in sixteen slowed.
const LEAST: [f64; 2] = [0.90, 0.85];
/// Most memory beside the lanes' spans: buffers of sockets and of TLS, the server's own.
const BESIDE: u64 = 64 << 20;
/// The client's lanes.
const LANES: u64 = 16;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let full = args.iter().any(|a| a == "--full");
    let only = args.windows(2).find(|two| two[0] == "--only");
    let wanted = |table| only.is_none_or(|two| two[1] == table);
    let mut missed = Vec::new();
    if wanted("rates") {
        missed = measure_links(full);
    }
    if wanted("peers") {
        peers::compare(full);
    }
    for what in &missed {
        println!("outside its limit: {what}");
    }
    ExitCode::from(u8::from(full && !missed.is_empty()))
}

/// The first table; the figures outside their limits.
fn measure_links(full: bool) -> Vec<String> {
    let (rates, trips): (&[u64], &[u64]) = if full {
        (&[100, 1_000, 2_000], &[0, 30, 150])
    } else {
        (&[200, 1_000], &[0, 80])
    };
    let (warm, counted) = if full { (10.0, 10.0) } else { (5.0, 5.0) };
    println!(
        "| link | round trip | slow lane | MB/s | of the link | cores | hedges | extra bytes | memory at most |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut missed = Vec::new();
    // Once: later rows use again what earlier ones have left, and would seem to need nothing.
    let before = memory("VmRSS:");
    for rate in rates {
        for trip in trips {
            for slow in [false, true] {
                let link = Link {
                    bytes_per_s: rate * 125_000,
                    trip: Duration::from_millis(*trip),
                    slow,
                };
                let row = link.measure(warm, counted, before);
                println!("{}", row.line(&link));
                missed.extend(row.missed(&link));
            }
        }
    }
    println!();
    missed
}

/// What was measured over one link.
struct Row {
    bytes_per_s: f64,
    cores: f64,
    hedges: u64,
    extra: f64,
    memory: u64,
}

impl Row {
    fn line(&self, link: &Link) -> String {
        format!(
            "| {} | {:.1} | {:.1} % | {:.2} | {} | {:.1} % | {} MB |",
            link.cells(),
            self.bytes_per_s / 1e6,
            100.0 * self.bytes_per_s / link.bytes_per_s as f64,
            self.cores,
            self.hedges,
            100.0 * self.extra,
            self.memory / 1_000_000,
        )
    }

    fn missed(&self, link: &Link) -> Vec<String> {
        let least = LEAST[usize::from(link.slow)];
        let gigabit = link.bytes_per_s <= 125_000_000;
        let limits = [
            (self.bytes_per_s >= least * link.bytes_per_s as f64, "rate"),
            (!gigabit || self.cores < 1.0, "cores"),
            (self.memory <= LANES * SPAN + BESIDE, "memory"),
        ];
        let missed = limits.iter().filter(|(kept, _)| !kept);
        missed
            .map(|(_, what)| format!("{what} at {}", link.cells()))
            .collect()
    }
}

struct Link {
    bytes_per_s: u64,
    trip: Duration,
    slow: bool,
}

/// Spans on their way.
struct Fetching {
    hub: Hub,
    outcomes: mpsc::Receiver<bool>,
    _tickets: Vec<Ticket>,
}

/// Queues the first `count` spans of a server's file.
fn fetch(server: &TestHub, count: u64) -> Fetching {
    let hub = Hub::open(HubOptions {
        sources: vec![server.source()],
        ..HubOptions::default()
    })
    .unwrap();
    let repo: RepoId = REPO.parse().unwrap();
    let commit = hub.commit(&repo, "main").unwrap();
    let snapshot = Arc::new(hub.list(&repo, &commit).unwrap());
    let (sender, outcomes) = mpsc::channel();
    let tickets = (0..count)
        .map(|i| {
            let span = Span {
                file: FILE.into(),
                range: ByteRange::new(i * SPAN, (i + 1) * SPAN),
                digest: None,
            };
            let sender = sender.clone();
            hub.fetch(&snapshot, span, Class::Bulk, move |outcome| {
                // The measurement may be over.
                let _ = sender.send(outcome.is_ok_and(|a| a.bytes.len() as u64 == SPAN));
            })
        })
        .collect();
    Fetching {
        hub,
        outcomes,
        _tickets: tickets,
    }
}

impl Link {
    fn cells(&self) -> String {
        format!(
            "{} Mbit/s | {} ms | {}",
            self.bytes_per_s / 125_000,
            self.trip.as_millis(),
            if self.slow { "yes" } else { "no" },
        )
    }

    fn server(&self) -> TestHub {
        let server = TestHub::virtual_file(REPO, 1, SPAN * SPANS);
        server.latency(self.trip);
        server.slow(Throttle {
            total: Some(self.bytes_per_s),
            slow_lane: self.slow.then_some((16, self.bytes_per_s / 16 / 100)),
            ..Throttle::default()
        });
        server
    }

    /// One row of the table; its memory is beyond `before`.
    fn measure(&self, warm: f64, counted: f64, before: u64) -> Row {
        let server = self.server();
        forget_peak();
        let fetching = fetch(&server, SPANS);
        let (hub, receiver) = (&fetching.hub, &fetching.outcomes);
        let mut done = 0;
        let started = Instant::now();
        let mut at_warm = None;
        let (mut moved, mut seconds, mut cpu) = (0, 0.0, 0.0);
        while done < SPANS && started.elapsed().as_secs_f64() < warm + counted {
            if receiver
                .recv_timeout(Duration::from_millis(50))
                .unwrap_or(false)
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
        let stats = hub.stats();
        Row {
            bytes_per_s: moved as f64 / f64::max(seconds, 0.001),
            cores: cpu / f64::max(seconds, 0.001),
            hedges: stats.hedges,
            extra: stats.wasted_bytes as f64 / stats.body_bytes as f64,
            memory: memory("VmHWM:").saturating_sub(before),
        }
    }
}

/// Bytes that a line of this process's status tells; 0 where there is none.
fn memory(line: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let told = status.lines().find_map(|l| l.strip_prefix(line));
    let kib = told.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Begins a new peak of memory, where the system allows it; else it is that of all rows so far.
fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
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
