//! The same spans by other clients.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::process::Stdio;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use super::FILE;
use super::Link;
use super::REPO;
use super::SPAN;
use super::TestHub;
use super::fetch;

/// Reads spans with sixteen threads, each with a file of its own: ENDPOINT REPO FILE SPAN COUNT.
const PYTHON: &str = "
import os, sys
from concurrent.futures import ThreadPoolExecutor
from threading import local
endpoint, repo, file, span, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
os.environ['HF_ENDPOINT'] = endpoint
from huggingface_hub import HfFileSystem
own = local()
def read(i):
    if not hasattr(own, 'file'):
        own.file = HfFileSystem(endpoint=endpoint, skip_instance_cache=True).open(f'{repo}/{file}', 'rb', cache_type='none')
    own.file.seek(i * span)
    return len(own.file.read(span))
with ThreadPoolExecutor(16) as pool:
    assert all(n == span for n in pool.map(read, range(count)))
";

/// Where `scripts/parity.sh python` puts huggingface_hub.
const INTERPRETER: &str = "target/parity-venv/bin/python";

/// A client is stopped when it has used this many times what the link needs: one that waits for a
/// lane at a hundredth of its share would wait for an hour.
const MOST: f64 = 2.0;

/// The table: each link's spans by every client in turn, with `full` three times and the medians;
/// once over a link so slow that nothing but the link is measured.
pub(super) fn compare(full: bool) {
    let (rates, trips, seconds): (&[u64], &[u64], _) = if full {
        (&[2_000, 1_000, 100], &[0, 30, 150], 12)
    } else {
        (&[1_000], &[0, 80], 6)
    };
    println!("Whole runs of the same spans, in per cent of the link:");
    println!();
    println!("| link | round trip | slow lane | spans | this client | curl | huggingface_hub |");
    println!("|---|---|---|---|---|---|---|");
    for &rate in rates {
        for &trip in trips {
            for slow in [false, true] {
                let link = Link {
                    bytes_per_s: rate * 125_000,
                    trip: Duration::from_millis(trip),
                    slow,
                };
                // Enough for every lane to be used twice.
                let count = (link.bytes_per_s * seconds / SPAN).clamp(32, super::SPANS);
                let least = (count * SPAN) as f64 / link.bytes_per_s as f64;
                let most = Duration::from_secs_f64(MOST * least);
                let rounds = if full && rate >= 1_000 { 3 } else { 1 };
                let mut took: [Vec<f64>; 3] = Default::default();
                for _ in 0..rounds {
                    for (client, took) in [own, curl, python].iter().zip(&mut took) {
                        took.extend(client(&link.server(), count, most));
                    }
                }
                let cells = took.map(|mut took| {
                    took.sort_by(f64::total_cmp);
                    match took.get(took.len() / 2) {
                        None => "–".to_owned(),
                        Some(seconds) if seconds.is_infinite() => {
                            format!("below {:.0} %", 100.0 / MOST)
                        }
                        Some(seconds) => format!("{:.1} %", 100.0 * least / seconds),
                    }
                });
                println!("| {} | {count} | {} |", link.cells(), cells.join(" | "));
            }
        }
    }
}

/// Seconds, infinite where it was stopped; `None` if it did not work.
fn own(server: &TestHub, count: u64, most: Duration) -> Option<f64> {
    let began = Instant::now();
    let fetching = fetch(server, count);
    for _ in 0..count {
        match fetching
            .outcomes
            .recv_timeout(most.saturating_sub(began.elapsed()))
        {
            Ok(true) => {}
            Err(RecvTimeoutError::Timeout) => return Some(f64::INFINITY),
            Ok(false) | Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
    Some(began.elapsed().as_secs_f64())
}

fn curl(server: &TestHub, count: u64, most: Duration) -> Option<f64> {
    let url = format!("{}/{REPO}/resolve/main/{FILE}", server.url());
    let one = |i: u64| {
        let (from, to) = (i * SPAN, (i + 1) * SPAN - 1);
        format!(
            "url = \"{url}\"\nrange = \"{from}-{to}\"\noutput = \"/dev/null\"\nlocation\nfail\nsilent\n"
        )
    };
    let spans: Vec<String> = (0..count).map(one).collect();
    let config = tempfile::NamedTempFile::new().ok()?;
    fs::write(config.path(), spans.join("next\n")).ok()?;
    let mut command = Command::new("curl");
    command
        .args([
            "--parallel",
            "--parallel-max",
            "16",
            "--no-progress-meter",
            "--config",
        ])
        .arg(config.path());
    timed(&mut command, most)
}

fn python(server: &TestHub, count: u64, most: Duration) -> Option<f64> {
    let interpreter = Path::new(env!("CARGO_MANIFEST_DIR")).join(INTERPRETER);
    let mut command = Command::new(interpreter);
    let (span, count) = (SPAN.to_string(), count.to_string());
    command
        .args(["-c", PYTHON, &server.url(), REPO, FILE, &span, &count])
        .env("HF_HUB_DISABLE_PROGRESS_BARS", "1");
    timed(&mut command, most)
}

/// Runs a client that says nothing where it works.
fn timed(command: &mut Command, most: Duration) -> Option<f64> {
    command.env("NO_PROXY", "127.0.0.1,127.0.0.2");
    command.stdout(Stdio::null()).stderr(Stdio::inherit());
    let began = Instant::now();
    let mut child = command.spawn().ok()?;
    loop {
        let took = began.elapsed();
        if let Some(status) = child.try_wait().ok()? {
            return status.success().then_some(took.as_secs_f64());
        }
        if took > most {
            child.kill().ok()?;
            child.wait().ok()?;
            return Some(f64::INFINITY);
        }
        thread::sleep(Duration::from_millis(10));
    }
}
