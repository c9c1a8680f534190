//! A limit that the system keeps: control groups of either version, and what a process in one held.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;

/// A group with a limit of memory; removed when dropped.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    v1: bool,
}

/// What a process was and held.
#[derive(Debug)]
pub struct Held {
    pub output: Output,
    /// The most that was resident, or locked, in bytes.
    pub most: u64,
    /// Whether the system killed anything in the group.
    pub killed: bool,
}

impl Group {
    /// `None` where this process may make none.
    pub fn new(limit: u64) -> Option<Group> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let v1 = Path::new("/sys/fs/cgroup/memory").is_dir();
        let path = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let memory = controllers.split(',').any(|name| name == "memory");
            (if v1 { memory } else { controllers.is_empty() }).then(|| path.to_owned())
        })?;
        let root = Path::new(if v1 {
            "/sys/fs/cgroup/memory"
        } else {
            "/sys/fs/cgroup"
        });
        let parent = root.join(path.trim_start_matches('/'));
        // In a container the path is the host's, and its own group is mounted as the root.
        let parent = if parent.is_dir() {
            parent
        } else {
            root.to_owned()
        };
        let folder = parent.join(format!("deltafin-test-{}-{limit}", std::process::id()));
        std::fs::create_dir(&folder).ok()?;
        let group = Group { folder, v1 };
        let name = if v1 {
            "memory.limit_in_bytes"
        } else {
            "memory.max"
        };
        std::fs::write(group.folder.join(name), limit.to_string()).ok()?;
        Some(group)
    }

    /// Runs `command` in the group and looks every 50 ms at what it holds.
    pub fn run(&self, command: &mut Command) -> Held {
        let mut inside = Command::new("sh");
        inside.args(["-c", r#"echo $$ > "$0" && exec "$@""#]);
        inside.arg(self.folder.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        inside.current_dir(env!("CARGO_MANIFEST_DIR"));
        let err = tempfile::NamedTempFile::new().unwrap();
        inside.stdout(Stdio::piped()).stderr(err.reopen().unwrap());
        let mut child = inside.spawn().unwrap();
        let status = format!("/proc/{}/status", child.id());
        let mut most = 0;
        while child.try_wait().unwrap().is_none() {
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            most = most.max(field(&text, "VmRSS:")).max(field(&text, "VmLck:"));
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut output = child.wait_with_output().unwrap();
        output.stderr = std::fs::read(err.path()).unwrap();
        Held {
            output,
            most,
            killed: self.killed(),
        }
    }

    fn killed(&self) -> bool {
        let name = if self.v1 {
            "memory.oom_control"
        } else {
            "memory.events"
        };
        let text = std::fs::read_to_string(self.folder.join(name)).unwrap_or_default();
        let mut lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("oom_kill "));
        lines.any(|count| count.trim() != "0")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Bytes of a line of kilobytes.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
