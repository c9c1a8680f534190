//! What you see: the one place that writes to the terminal.
//!
//! Text goes to stdout; everything else goes to stderr, as moving bars on a terminal and as plain
//! lines elsewhere. With `--json`, stdout carries one object and nothing else.

use std::io::IsTerminal;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::Weak;
use std::time::Duration;
use std::time::Instant;

use indicatif::ProgressBar;
use indicatif::ProgressStyle;

use super::exit::CliError;
use super::setup;
use crate::hub::Hub;
use crate::hub::HubObserver;
use crate::hub::HubStats;
use crate::hub::Notice;
use crate::residency::InstallObserver;
use crate::terms::Bytes;

/// How often a plain line tells of progress where no terminal can show it moving.
pub(super) const PLAIN_EVERY: Duration = Duration::from_secs(10);
/// How often a disk is asked how much is left of it.
const ROOM_EVERY: Duration = Duration::from_secs(1);

/// Where words go.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) json: bool,
    verbose: u8,
    terminal: bool,
    text_terminal: bool,
    stage: Mutex<Option<Stage>>,
    /// Whose limits the progress lines tell.
    hub: Mutex<Weak<Hub>>,
    /// Whose free space they tell.
    disk: Mutex<Option<PathBuf>>,
}

#[derive(Debug)]
struct Stage {
    what: String,
    done: u64,
    total: u64,
    moved: u64,
    began: Instant,
    said: Instant,
    bar: Option<ProgressBar>,
    room: Room,
}

/// What is free on the disk that fills up, asked for once a second at most.
#[derive(Debug)]
struct Room {
    folder: Option<PathBuf>,
    asked: Option<Instant>,
    told: String,
}

impl Room {
    fn of(folder: Option<PathBuf>) -> Room {
        Room {
            folder,
            asked: None,
            told: String::new(),
        }
    }

    /// The end of a progress line: nothing, if no disk was named or it does not tell.
    fn left(&mut self) -> &str {
        let due = self.asked.is_none_or(|asked| asked.elapsed() >= ROOM_EVERY);
        if let Some(folder) = self.folder.as_ref().filter(|_| due) {
            self.asked = Some(Instant::now());
            self.told = setup::free(folder).map_or_else(String::new, |free| {
                format!(", {} of disk left", Bytes(free))
            });
        }
        &self.told
    }
}

impl Screen {
    pub(super) fn new(json: bool, verbose: u8) -> Screen {
        Screen {
            json,
            verbose,
            terminal: std::io::stderr().is_terminal(),
            text_terminal: std::io::stdout().is_terminal(),
            stage: Mutex::new(None),
            hub: Mutex::new(Weak::new()),
            disk: Mutex::new(None),
        }
    }

    /// Tells what is free on the disk that holds `folder` in progress lines from now on.
    pub(super) fn tell_disk_of(&self, folder: &Path) {
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        *disk = Some(folder.to_owned());
    }

    /// Tells the limits of `hub` in progress lines from now on.
    pub(super) fn tell_limits_of(&self, hub: &Arc<Hub>) {
        *self.hub.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(hub);
    }

    fn limits(&self) -> String {
        let hub = self.hub.lock().unwrap_or_else(PoisonError::into_inner);
        hub.upgrade()
            .map_or_else(String::new, |hub| limits(&hub.stats()))
    }

    /// Whether a line can move: people look at both outputs on one terminal.
    pub(super) fn moving(&self) -> bool {
        self.terminal && self.text_terminal && !self.json
    }

    /// Text on stdout, at once. A reader that went away is not our failure.
    pub(super) fn text(&self, text: &str) {
        if !self.json {
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }

    /// The one object of `--json`.
    pub(super) fn object(&self, value: &serde_json::Value) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{value}").and_then(|()| out.flush());
    }

    /// A line for the person, on stderr.
    pub(super) fn note(&self, text: &str) {
        let stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || {
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        };
        match stage.as_ref().and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// A line for whoever asked for more with `-v`.
    pub(super) fn detail(&self, text: &str) {
        if self.verbose > 0 {
            self.note(text);
        }
    }

    /// What was stopped on somebody's wish, and how to go on.
    pub(super) fn paused(&self, error: &CliError) {
        self.note(&format!("paused: {}", chain(error)));
        if let Some(hint) = error.hint() {
            self.note(&format!("hint: {hint}"));
        }
    }

    /// What failed, and what to do next.
    pub(super) fn error(&self, error: &CliError) {
        self.note(&format!("error: {}", chain(error)));
        if let Some(hint) = error.hint() {
            self.note(&format!("\nhint: {hint}"));
        }
    }
}

/// The error and its causes in one sentence.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

impl InstallObserver for Screen {
    fn stage(&self, what: &str, done: u64, total: u64) {
        let bar = self.terminal.then(|| {
            let bar = ProgressBar::new(total).with_position(done).with_message(what.to_owned());
            let template = if total > 10_000 {
                "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}, {eta} left"
            } else {
                "{msg} {wide_bar} {pos}/{len}"
            };
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() && total > 10_000 {
            self.note(&format!(
                "{what}: {} of {} are here",
                Bytes(done),
                Bytes(total)
            ));
        }
        let now = Instant::now();
        let stage = Stage {
            what: what.to_owned(),
            done,
            total,
            moved: 0,
            began: now,
            said: now,
            bar,
            room: Room::of(
                self.disk
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone(),
            ),
        };
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = Some(stage);
    }

    fn moved(&self, bytes: u64) {
        let mut guard = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stage) = guard.as_mut() else { return };
        stage.done += bytes;
        stage.moved += bytes;
        match &stage.bar {
            Some(bar) => {
                bar.set_position(stage.done);
                let left = stage.room.left();
                bar.set_message(format!("{}{left}{}", stage.what, self.limits()));
            }
            None if stage.said.elapsed() >= PLAIN_EVERY => {
                stage.said = Instant::now();
                let line = stage.line();
                let line = format!("{line}{}{}", stage.room.left(), self.limits());
                drop(guard);
                self.note(&line);
            }
            None => {}
        }
    }

    fn done(&self) {
        let stage = self
            .stage
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(bar) = stage.and_then(|s| s.bar) {
            bar.finish_and_clear();
        }
    }

    fn notice(&self, text: &str) {
        self.note(text);
    }
}

impl Stage {
    fn line(&self) -> String {
        let seconds = self.began.elapsed().as_secs_f64().max(0.001);
        #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
        let rate = self.moved as f64 / seconds;
        #[expect(clippy::cast_precision_loss, reason = "shown in whole seconds")]
        let left = self.total.saturating_sub(self.done) as f64 / rate.max(1.0);
        format!(
            "{}: {} of {}, {}/s, about {} left",
            self.what,
            Bytes(self.done),
            Bytes(self.total),
            whole_bytes(rate),
            duration(Duration::from_secs_f64(left.min(1e9)))
        )
    }
}

impl HubObserver for Screen {
    fn notice(&self, notice: &Notice) {
        self.note(&notice.to_string());
    }
}

/// What a person has limited, as the end of a progress line: nothing, if nothing is.
pub(super) fn limits(stats: &HubStats) -> String {
    let mut text = String::new();
    if let Some(rate) = stats.rate_max {
        text.push_str(&format!(", at most {}/s", Bytes(rate)));
    }
    if let Some(max) = stats.bytes_max {
        let used = Bytes(stats.counted_bytes);
        text.push_str(&format!(", {used} of at most {}", Bytes(max)));
    }
    text
}

/// A rate or size that came out of a division.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are positive and far below 2^63"
)]
pub(super) fn whole_bytes(bytes: f64) -> Bytes {
    Bytes(bytes.max(0.0) as u64)
}

/// A time for people: `4.2 s`, `3 min 20 s`, `5 h 12 min`, `3 days 4 h`.
pub(super) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..172_800 => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} days {} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_line_tells_what_is_left_of_the_disk_that_was_named() {
        assert_eq!(Room::of(None).left(), "");
        let folder = tempfile::tempdir().unwrap();
        // A store that is not there yet will lie on the disk that holds what is above it.
        let mut room = Room::of(Some(folder.path().join("not/yet")));
        let free = room.left().strip_prefix(", ").unwrap();
        let free = free.strip_suffix(" of disk left").unwrap();
        let free: Bytes = free.replace(' ', "").parse().unwrap();
        let real = setup::free(folder.path()).unwrap();
        assert!(free.0.abs_diff(real) < real / 10, "{free} of {real}");
        let (asked, told) = (room.asked, room.told.clone());
        assert_eq!(room.left(), told);
        assert!(room.asked == asked || asked.unwrap().elapsed() >= ROOM_EVERY);
    }
}
