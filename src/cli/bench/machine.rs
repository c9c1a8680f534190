//! What a machine says of itself.

use std::path::Path;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use super::report::Machine;
use crate::residency::ram;

/// This machine, with the disk that `folder` lies on.
pub(super) fn this(folder: &Path) -> Machine {
    let ram = field("/proc/meminfo", "MemTotal:").map(|kib| kib << 10);
    let limit = ram::available().filter(|limit| limit.by != "this machine");
    Machine {
        os: system(),
        arch: std::env::consts::ARCH.to_owned(),
        cpu: cpu(),
        cores: num_cpus::get_physical(),
        threads: num_cpus::get(),
        ram: ram.or_else(|| sysctl("hw.memsize")?.parse().ok()),
        ram_limit: limit.map(|limit| limit.available),
        disk: disk(folder),
    }
}

fn system() -> String {
    let name = std::env::consts::OS;
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    match release.or_else(|| sysctl("kern.osproductversion")) {
        Some(release) => format!("{name} {}", release.trim()),
        None => name.to_owned(),
    }
}

fn cpu() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = info.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    });
    named.or_else(|| sysctl("machdep.cpu.brand_string"))
}

/// What macOS answers; `None` elsewhere.
fn sysctl(name: &str) -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let mut command = std::process::Command::new("/usr/sbin/sysctl");
    let out = command.args(["-n", name]).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The number after `name` at the beginning of a line.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The model of the disk below a folder, where the system tells; a partition's is that of its whole disk.
fn disk(folder: &Path) -> Option<String> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let device = rustix::fs::stat(folder).ok()?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let block = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let model = block
        .ancestors()
        .take(2)
        .find_map(|place| std::fs::read_to_string(place.join("device/model")).ok());
    let model = model.map(|text| text.trim().to_owned());
    model.filter(|text| !text.is_empty()).or_else(|| {
        // Of a virtual disk the driver is all there is to know.
        let driver = block
            .ancestors()
            .take(2)
            .find_map(|place| std::fs::canonicalize(place.join("device/driver")).ok())?;
        Some(driver.file_name()?.to_string_lossy().into_owned())
    })
}

/// Today, as 2026-12-01.
pub(super) fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    date(now.map_or(0, |now| now.as_secs() / 86_400))
}

/// The day so many days after 1970-01-01.
fn date(days: u64) -> String {
    // Years begin in March here, so that the odd day comes last: 400 of them have 146,097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (400 * era + year, month + 3),
        _ => (400 * era + year + 1, month - 9),
    };
    format!("{year:04}-{month:02}-{day:02}")
}

/// Makes the system begin anew with its note of the most memory this process had; false where it does not.
pub(super) fn forget_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The most memory that was resident since then, in bytes.
pub(super) fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:").map(|kib| kib << 10)
}

/// Bytes that this process has read from disk, as the system counts them.
pub(super) fn system_read() -> Option<u64> {
    field("/proc/self/io", "read_bytes:")
}

/// Asks the system to let go of what it holds of every file below a folder.
#[cfg(target_os = "linux")]
pub(super) fn drop_page_cache(folder: &Path) {
    use rustix::fs::Advice;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => drop_page_cache(&path),
            Ok(kind) if kind.is_file() => {
                if let Ok(file) = std::fs::File::open(&path) {
                    // Pages that are still to be written would stay.
                    let _ = file.sync_all();
                    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
                }
            }
            _ => {}
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn drop_page_cache(_: &Path) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_their_dates() {
        let days = [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_788, "2026-12-01"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ];
        for (days, expected) in days {
            assert_eq!(date(days), expected);
        }
    }
}
