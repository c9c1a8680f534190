//! Runs the real binary and looks at what it leaves behind.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Output;

use serde_json::Value;

/// What a run of the binary gave.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Run {
    fn from(out: Output) -> Run {
        Run {
            code: out.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }
}

/// The binary with an environment of its own: no token, no endpoint, no home of the user.
pub fn command() -> Command {
    clean(Command::new(env!("CARGO_BIN_EXE_deltafin")))
}

fn clean(mut command: Command) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("home");
    command
        .env_clear()
        .env("PATH", path)
        .env("HOME", home)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

pub fn deltafin(args: &[&str]) -> Run {
    command().args(args).output().unwrap().into()
}

/// The one object on stdout.
///
/// # Panics
///
/// If stdout holds anything else.
pub fn json(run: &Run) -> Value {
    assert_eq!(
        run.stdout.lines().count(),
        1,
        "stdout: {}\nstderr: {}",
        run.stdout,
        run.stderr
    );
    serde_json::from_str(&run.stdout).unwrap()
}

/// Runs in a network namespace with no interface up; `None` where that is not allowed.
pub fn without_network(args: &[&str]) -> Option<Run> {
    let mut probe = Command::new("unshare");
    if !probe
        .args(["-n", "true"])
        .status()
        .is_ok_and(|s| s.success())
    {
        return None;
    }
    let mut command = clean(Command::new("unshare"));
    command
        .args(["-n", env!("CARGO_BIN_EXE_deltafin")])
        .args(args);
    Some(command.output().unwrap().into())
}

/// The `socket` calls for the internet that a run makes; `None` where strace is missing.
pub fn sockets(args: &[&str]) -> Option<Vec<String>> {
    if !Command::new("strace")
        .arg("-V")
        .output()
        .is_ok_and(|o| o.status.success())
    {
        return None;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = clean(Command::new("strace"));
    command
        .args(["-f", "-e", "trace=socket", "-o"])
        .arg(log.path());
    command.arg(env!("CARGO_BIN_EXE_deltafin")).args(args);
    let run = Run::from(command.output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let calls = std::fs::read_to_string(log.path()).unwrap();
    Some(
        calls
            .lines()
            .filter(|l| l.contains("AF_INET"))
            .map(str::to_owned)
            .collect(),
    )
}

/// Sends a signal by name.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill")
        .args([&format!("-{name}"), &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Every file under a folder, as far as it can be read while others change it.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(_) => found.push(entry.path()),
                Err(_) => {}
            }
        }
    }
    found
}

pub fn len(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |m| m.len())
}

/// Published and temporary bytes of experts under a home.
pub fn expert_bytes(home: &Path) -> u64 {
    let in_experts = |f: &PathBuf| f.components().any(|c| c.as_os_str() == "experts");
    files(home)
        .iter()
        .filter(|f| in_experts(f))
        .map(|f| len(f))
        .sum()
}

/// A tensor of i32 in a safetensors file.
pub fn i32s(file: &[u8], name: &str) -> Vec<i64> {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let at = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    let data = &file[8 + n + at(0)..8 + n + at(1)];
    data.chunks_exact(4)
        .map(|b| i64::from(i32::from_le_bytes(b.try_into().unwrap())))
        .collect()
}

/// A small file system of its own, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

/// Mounts one over `folder`; `None` where that is not allowed.
pub fn small_disk(folder: &Path, size: &str) -> Option<SmallDisk> {
    let options = format!("size={size}");
    let mut mount = Command::new("mount");
    mount
        .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
        .arg(folder);
    mount
        .output()
        .is_ok_and(|o| o.status.success())
        .then(|| SmallDisk(folder.to_owned()))
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
