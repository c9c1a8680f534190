//! How near a full install comes to what the machine can do: `cargo bench --bench fetch [-- OPTIONS]`.
//!
//! A random checkpoint of K3's layer shapes is shared over loopback by `deltafin share` and installed by
//! `deltafin fetch`, both as they are shipped. Beside it, in the same run and with two threads each, what
//! bounds it is measured: writing as many bytes to the same disk, past the page cache, synced; hashing,
//! of which each byte needs two, one for its span and one for its shard; and reading the same shards
//! from the same share and doing nothing with them. An install should reach 80 % of the slowest.
//!
//! ```text
//! --layers N     layers of the checkpoint, half a gigabyte each [10]
//! --home FOLDER  where checkpoint and store are put [target/fetch-bench]
//! --rounds N     installs, by turns with what bounds them; the medians count [3]
//! --program FILE what is measured [the `deltafin` that is built with the bench]
//! --full         ends in exit code 1 below 80 %, or if a byte was written twice
//! ```
//!
//! Server and client share this machine's cores: only on an idle one does the figure say anything.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a program for a person at a terminal"
)]

use std::fs;
use std::fs::File;
use std::io::BufRead;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::ExitCode;
use std::process::Stdio;
use std::time::Instant;

use memmap2::MmapMut;
use rustix::fs::OFlags;
use rustix::process::Pid;
use rustix::process::WaitId;
use rustix::process::WaitIdOptions;
use serde_json::Value;
use sha2::Digest as _;
use sha2::Sha256;

const MODEL: &str = "bench/synthetic";
const THREADS: usize = 2;
/// Hashed and read at once.
const PIECE: usize = 8 << 20;
/// Written at once.
const WRITTEN_AT_ONCE: usize = 1 << 20;
/// Hashed by each thread.
const HASHED: usize = 1 << 30;
/// Least part of the slowest bound.
const LEAST: f64 = 0.80;
/// Most bytes written for each that is kept: digests, metadata and the ends of pages come on top.
const WRITTEN: f64 = 1.02;

fn main() -> ExitCode {
    let options = Options::read();
    let model = checkpoint(&options);
    let shards = shards(&model);
    let bytes: u64 = shards.iter().map(|(_, len)| len).sum();
    println!(
        "{} shards, {:.2} GB; load before: {}",
        shards.len(),
        bytes as f64 / 1e9,
        load()
    );
    let share = Share::start(&options.program, &model);
    let mut rounds: Vec<Round> = Vec::new();
    println!(
        "| round | disk write | half of sha256 | loopback | fetch | of the slowest | written | load |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for n in 1..=options.rounds {
        let round = Round {
            disk: rate(bytes, || write(&options.home, &shards)),
            hash: rate((THREADS * HASHED) as u64, hash) / 2.0,
            link: rate(bytes, || read(&share.addr, &shards)),
            fetch: install(&options, &share, bytes),
        };
        println!("| {n} | {} | {} |", round.line(), load());
        rounds.push(round);
    }
    let middle = Round::median(&rounds);
    println!("| median | {} | |", middle.line());
    let reached = middle.reached() >= LEAST && middle.fetch.written <= WRITTEN;
    ExitCode::from(u8::from(options.full && !reached))
}

struct Options {
    layers: String,
    home: PathBuf,
    rounds: usize,
    program: PathBuf,
    full: bool,
}

impl Options {
    fn read() -> Options {
        let args: Vec<String> = std::env::args().collect();
        let value = |name: &str| {
            let at = args.iter().position(|arg| arg == name)?;
            args.get(at + 1).cloned()
        };
        Options {
            layers: value("--layers").unwrap_or_else(|| "10".to_owned()),
            home: value("--home").map_or_else(|| "target/fetch-bench".into(), PathBuf::from),
            rounds: value("--rounds").map_or(3, |n| n.parse().unwrap()),
            program: value("--program")
                .map_or_else(|| env!("CARGO_BIN_EXE_deltafin").into(), PathBuf::from),
            full: args.iter().any(|arg| arg == "--full"),
        }
    }
}

/// What was measured once: bytes a second each.
struct Round {
    disk: f64,
    hash: f64,
    link: f64,
    fetch: Fetched,
}

struct Fetched {
    rate: f64,
    /// Bytes written for each byte of the shards.
    written: f64,
}

impl Round {
    fn reached(&self) -> f64 {
        self.fetch.rate / self.disk.min(self.hash).min(self.link)
    }

    fn line(&self) -> String {
        let rates = [self.disk, self.hash, self.link, self.fetch.rate];
        let rates = rates
            .map(|rate| format!("{:.2} GB/s", rate / 1e9))
            .join(" | ");
        let (reached, written) = (100.0 * self.reached(), self.fetch.written);
        format!("{rates} | {reached:.0} % | {written:.3} times")
    }

    fn median(rounds: &[Round]) -> Round {
        let middle = |of: &dyn Fn(&Round) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        Round {
            disk: middle(&|r| r.disk),
            hash: middle(&|r| r.hash),
            link: middle(&|r| r.link),
            fetch: Fetched {
                rate: middle(&|r| r.fetch.rate),
                written: middle(&|r| r.fetch.written),
            },
        }
    }
}

fn rate(bytes: u64, work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    bytes as f64 / began.elapsed().as_secs_f64()
}

/// How busy the machine was in the last minute: on a busy one the figures mean little.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

/// The checkpoint, made once for each number of layers.
fn checkpoint(options: &Options) -> PathBuf {
    let model = options.home.join(format!("model-{}", options.layers));
    if model.join("config.json").is_file() {
        return model;
    }
    fs::create_dir_all(&options.home).unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut synth = Command::new(cargo);
    synth.args(["run", "--release", "--quiet", "--example", "synth", "--"]);
    synth.arg(&model).args(["--layers", &options.layers]);
    assert!(synth.status().unwrap().success(), "no checkpoint");
    model
}

fn shards(model: &Path) -> Vec<(PathBuf, u64)> {
    let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap());
    let shards = files.filter(|file| file.path().extension().is_some_and(|e| e == "safetensors"));
    let mut shards: Vec<_> = shards
        .map(|file| (file.path(), file.metadata().unwrap().len()))
        .collect();
    shards.sort();
    shards
}

/// Divides the shards among threads that each do something with one after the other.
fn by_threads(shards: &[(PathBuf, u64)], work: impl Fn(&Path) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let own = shards.iter().skip(thread).step_by(THREADS);
            let work = &work;
            scope.spawn(move || own.for_each(|(path, _)| work(path)));
        }
    });
}

/// Writes files as large as the shards, past the page cache, and has them synced.
fn write(home: &Path, shards: &[(PathBuf, u64)]) {
    let folder = home.join("written");
    fs::create_dir_all(&folder).unwrap();
    by_threads(shards, |path| {
        let mut piece = MmapMut::map_anon(WRITTEN_AT_ONCE).unwrap();
        for (i, byte) in piece.iter_mut().enumerate() {
            *byte = (i * 131 % 251) as u8;
        }
        let mut left = path.metadata().unwrap().len();
        let name = folder.join(path.file_name().unwrap());
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        let direct = OFlags::DIRECT.bits().cast_signed();
        let mut to = options.clone().custom_flags(direct).open(&name).unwrap();
        while left >= piece.len() as u64 {
            to.write_all(&piece).unwrap();
            left -= piece.len() as u64;
        }
        let mut to = options.truncate(false).append(true).open(&name).unwrap();
        to.write_all(&piece[..usize::try_from(left).unwrap()])
            .unwrap();
        to.sync_all().unwrap();
    });
    fs::remove_dir_all(folder).unwrap();
}

fn hash() {
    let bytes: Vec<u8> = (0..PIECE).map(|i| (i * 131 % 251) as u8).collect();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut sum = Sha256::new();
                (0..HASHED / PIECE).for_each(|_| sum.update(&bytes));
                std::hint::black_box(sum.finalize());
            });
        }
    });
}

/// Reads the shards from the share by bare sockets.
fn read(addr: &str, shards: &[(PathBuf, u64)]) {
    by_threads(shards, |path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let asked = format!("/{MODEL}/resolve/main/{name}");
        let (headers, _) = get(addr, &asked);
        let found = headers.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("location")
                .then(|| value.to_owned())
        });
        // The bytes stand at the end of a redirect, as on the hub.
        let found = found.expect(&headers);
        let path = found.split_once("://").map_or(found.as_str(), |(_, rest)| {
            rest.find('/').map_or("/", |at| &rest[at..])
        });
        let (headers, mut body) = get(addr, path);
        assert!(headers.contains(" 200 "), "{headers}");
        let mut piece = vec![0; PIECE];
        while body.read(&mut piece).unwrap() > 0 {}
    });
}

/// A reply's headers, and a reader that stands at its body.
fn get(addr: &str, path: &str) -> (String, BufReader<TcpStream>) {
    let mut stream = TcpStream::connect(addr).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut reader = BufReader::with_capacity(PIECE, stream);
    let mut headers = String::new();
    while !headers.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut headers).unwrap() > 0, "{headers}");
    }
    (headers, reader)
}

/// `deltafin share` of the checkpoint, ended with the bench.
struct Share {
    child: Child,
    addr: String,
}

fn deltafin(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    command
}

impl Share {
    fn start(program: &Path, model: &Path) -> Share {
        let mut command = deltafin(program);
        command
            .args(["share", "--port", "0", "--model", MODEL])
            .arg(model);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut lines = lines.by_ref().map(Result::unwrap);
        let line = lines.find(|line| line.contains("is shared at")).unwrap();
        let addr = line.split("http://").nth(1).unwrap();
        let addr = addr.split(';').next().unwrap().to_owned();
        Share { child, addr }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One whole install into a new store, proofs and the last sync included.
fn install(options: &Options, share: &Share, bytes: u64) -> Fetched {
    let store = options.home.join("store");
    let _ = fs::remove_dir_all(&store);
    let mut command = deltafin(&options.program);
    command.args(["fetch", "--json", "--model", MODEL, "--reserve", "0"]);
    command.args(["--hub", &format!("http://{}", share.addr), "--home"]);
    command
        .arg(&store)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let began = Instant::now();
    let child = command.spawn().unwrap();
    // Its counts stay readable until it is waited for.
    let pid = Pid::from_child(&child);
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let _ = rustix::process::waitid(WaitId::Pid(pid), ended).unwrap();
    let seconds = began.elapsed().as_secs_f64();
    let io = fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap_or_default();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let whole = report["shards"]["whole"].as_u64().unwrap();
    assert!(
        whole > 0 && report["shards"]["unpublished"] == 0,
        "{report}"
    );
    fs::remove_dir_all(&store).unwrap();
    let count = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.map_or(f64::NAN, |n| n.trim().parse::<f64>().unwrap())
    };
    // What was written and removed before it got to the disk was written all the same.
    let written = count("write_bytes:");
    Fetched {
        rate: bytes as f64 / seconds,
        written: written / bytes as f64,
    }
}
