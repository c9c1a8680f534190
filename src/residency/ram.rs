//! How much memory this process may use: what the machine has left, and what its control groups allow.

use std::path::Path;
use std::path::PathBuf;

/// Never planned with: other programs, page tables, sockets, and what a kernel charges for files being written.
const RESERVE: u64 = 24_000_000;
/// And this part of the rest.
const RESERVE_PART: u64 = 40;
/// A limit above this is none.
const NO_LIMIT: u64 = 1 << 60;

/// What limits the memory of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ram {
    /// Bytes to plan with.
    pub budget: u64,
    /// Bytes that could be had before the reserve was taken off.
    pub available: u64,
    /// What set the limit: the machine, or a control group's folder.
    pub by: String,
}

/// Finds out how much memory this process may use. `None` where the system does not tell.
pub fn available() -> Option<Ram> {
    available_in(Path::new("/"))
}

/// Whether this machine moves memory to a disk, so that locking it is worth something.
pub(super) fn swaps() -> bool {
    // The first line is a heading.
    read(Path::new("/"), "proc/swaps").is_none_or(|text| text.lines().count() > 1)
}

/// The same, with the files of the system below `root`.
fn available_in(root: &Path) -> Option<Ram> {
    let own = resident(root);
    let machine = read(root, "proc/meminfo").and_then(|text| {
        let available = field(&text, "MemAvailable:")?;
        Some((
            available.saturating_mul(1024) + own,
            "this machine".to_owned(),
        ))
    });
    let groups = groups(root).into_iter().filter_map(|group| {
        let left = group.left(own)?;
        Some((left, group.folder.display().to_string()))
    });
    let (available, by) = machine.into_iter().chain(groups).min()?;
    let reserve = RESERVE + available / RESERVE_PART;
    Some(Ram {
        budget: available.saturating_sub(reserve),
        available,
        by,
    })
}

/// One control group that this process is in, or one above it.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Group {
    /// Bytes that this process may come to, being at `own`: what the others in the group hold is gone, but not what
    /// files hold in the page cache, which goes when it is wanted.
    fn left(&self, own: u64) -> Option<u64> {
        let number = |name: &str| read(&self.folder, name)?.trim().parse::<u64>().ok();
        let limit = number(self.limit).filter(|limit| *limit < NO_LIMIT)?;
        let used = number(self.usage).unwrap_or(0);
        let stat = read(&self.folder, "memory.stat").unwrap_or_default();
        let file = |name| field(&stat, name).unwrap_or(0);
        let total = |v1, v2| file(v1).max(file(v2));
        let cache = total("total_inactive_file", "inactive_file")
            + total("total_active_file", "active_file");
        let others = used.saturating_sub(cache).saturating_sub(own);
        Some(limit.saturating_sub(others))
    }
}

/// All groups from this process's own up to the root, of both versions.
fn groups(root: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    for line in read(root, "proc/self/cgroup").unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (mounts, limit, usage): (&[&str], _, _) = if controllers.is_empty() {
            let mounts = &["sys/fs/cgroup", "sys/fs/cgroup/unified"];
            (mounts, "memory.max", "memory.current")
        } else if controllers.split(',').any(|name| name == "memory") {
            let mounts = &["sys/fs/cgroup/memory"];
            (mounts, "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        for mount in mounts {
            let mount = root.join(mount);
            // In a container the path is the host's, and its own group is mounted as the root.
            let own = mount.join(path.trim_start_matches('/'));
            for folder in own.ancestors().take_while(|f| f.starts_with(&mount)) {
                found.push(Group {
                    folder: folder.to_owned(),
                    limit,
                    usage,
                });
            }
        }
    }
    found
}

fn resident(root: &Path) -> u64 {
    let status = read(root, "proc/self/status").unwrap_or_default();
    field(&status, "RssAnon:").unwrap_or(0) * 1024
}

fn read(root: &Path, name: &str) -> Option<String> {
    std::fs::read_to_string(root.join(name)).ok()
}

/// The number after `name` at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    });
    lines.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system's files: name and content.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MACHINE: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       65000000 kB\nMemFree: 1 kB\nMemAvailable:   60000000 kB\n",
    );
    const V1: &str = "sys/fs/cgroup/memory";

    #[test]
    fn the_machine_alone_decides_where_no_group_does() {
        let ram = available_in(system(&[MACHINE]).path()).unwrap();
        assert_eq!(ram.available, 60_000_000 * 1024);
        assert_eq!(ram.by, "this machine");
        assert!(ram.budget < ram.available - RESERVE);
    }

    #[test]
    fn the_smallest_group_on_the_way_up_decides() {
        let unlimited = u64::MAX.to_string();
        let root = system(&[
            MACHINE,
            ("proc/self/cgroup", "4:memory:/a/b\n0::/\n"),
            (&format!("{V1}/a/b/memory.limit_in_bytes"), &unlimited),
            (&format!("{V1}/a/b/memory.usage_in_bytes"), "1"),
            (&format!("{V1}/a/memory.limit_in_bytes"), "2000000000\n"),
            (&format!("{V1}/a/memory.usage_in_bytes"), "0\n"),
            (&format!("{V1}/memory.limit_in_bytes"), "3000000000\n"),
        ]);
        let ram = available_in(root.path()).unwrap();
        assert_eq!(ram.available, 2_000_000_000);
        assert!(ram.by.ends_with("memory/a"), "{}", ram.by);
    }

    #[test]
    fn the_second_version_counts_and_max_is_no_limit() {
        let root = system(&[
            MACHINE,
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/memory.max", "1000000000\n"),
            ("sys/fs/cgroup/job/memory.current", "300000000\n"),
            (
                "sys/fs/cgroup/job/memory.stat",
                "anon 100000000\nfile 200000000\ninactive_file 150000000\nactive_file 50000000\n",
            ),
            ("sys/fs/cgroup/memory.max", "max\n"),
        ]);
        // 100 MB are held by others; what files hold goes when it is wanted.
        assert_eq!(available_in(root.path()).unwrap().available, 900_000_000);
    }

    #[test]
    fn what_we_hold_ourselves_is_ours_to_use() {
        let root = system(&[
            MACHINE,
            ("proc/self/cgroup", "4:memory:/job\n"),
            ("proc/self/status", "VmRSS: 9 kB\nRssAnon:   100000 kB\n"),
            (&format!("{V1}/job/memory.limit_in_bytes"), "1000000000"),
            (&format!("{V1}/job/memory.usage_in_bytes"), "402400000"),
        ]);
        assert_eq!(available_in(root.path()).unwrap().available, 700_000_000);
    }

    #[test]
    fn a_system_that_tells_nothing_limits_nothing() {
        assert_eq!(available_in(system(&[]).path()), None);
    }

    #[test]
    fn this_machine_tells() {
        if cfg!(target_os = "linux") {
            assert!(available().unwrap().budget > 0);
        }
    }
}
