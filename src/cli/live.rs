//! Text as it is made and, under it, one live line.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use indicatif::MultiProgress;
use indicatif::ProgressBar;
use indicatif::ProgressStyle;

use super::screen::PLAIN_EVERY;
use super::screen::Screen;
use super::screen::duration;
use super::screen::limits;
use crate::engine::Engine;
use crate::engine::Phase;
use crate::hub::Hub;
use crate::terms::Bytes;

/// How often the live line moves on a terminal.
const TICK: Duration = Duration::from_millis(200);

/// Shows a generation at work until it is dropped.
pub(super) struct Live {
    screen: Arc<Screen>,
    typed: Option<Typed>,
    over: Arc<AtomicBool>,
    teller: Option<JoinHandle<()>>,
    thinking: bool,
    wrote: bool,
}

/// The bars of a terminal: the line of text that is not yet full, and the live line under it.
struct Typed {
    bars: MultiProgress,
    text: ProgressBar,
    live: ProgressBar,
    line: String,
}

impl Live {
    pub(super) fn begin(
        screen: &Arc<Screen>,
        engine: &Arc<Engine>,
        hub: Option<&Arc<Hub>>,
    ) -> Live {
        let typed = screen.moving().then(Typed::new);
        let over = Arc::new(AtomicBool::new(false));
        let teller = {
            let bar = typed.as_ref().map(|t| t.live.clone());
            let (screen, engine) = (Arc::clone(screen), Arc::clone(engine));
            let (hub, over) = (hub.cloned(), Arc::clone(&over));
            std::thread::spawn(move || tell(&screen, &engine, hub.as_deref(), bar.as_ref(), &over))
        };
        Live {
            screen: Arc::clone(screen),
            typed,
            over,
            teller: Some(teller),
            thinking: false,
            wrote: false,
        }
    }

    /// More of what the model thinks: shown to a person at a terminal, not to a pipe.
    pub(super) fn reasoning(&mut self, text: &str) {
        if self.typed.is_some() {
            if !self.thinking {
                self.thinking = true;
                self.write("(thinking) ");
            }
            self.write(text);
        }
    }

    /// More of the answer.
    pub(super) fn answer(&mut self, text: &str) {
        if self.thinking {
            self.thinking = false;
            self.write("\n\n");
        }
        self.write(text);
    }

    fn write(&mut self, text: &str) {
        self.wrote = true;
        match &mut self.typed {
            Some(typed) => typed.push(text),
            None => self.screen.text(text),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(teller) = self.teller.take() {
            teller.thread().unpark();
            let _ = teller.join();
        }
        if let Some(typed) = &mut self.typed {
            typed.text.finish_and_clear();
            typed.live.finish_and_clear();
            let line = std::mem::take(&mut typed.line);
            self.screen.text(&line);
        }
        if self.wrote {
            self.screen.text("\n");
        }
    }
}

impl Typed {
    fn new() -> Typed {
        let bars = MultiProgress::new();
        let style = |template| {
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
        };
        let text = bars.add(ProgressBar::new_spinner().with_style(style("{msg}")));
        let live = bars.add(ProgressBar::new_spinner().with_style(style("{wide_msg}")));
        Typed {
            bars,
            text,
            live,
            line: String::new(),
        }
    }

    /// Full lines move up for good; the last, unfinished one stays in its bar.
    fn push(&mut self, text: &str) {
        self.line.push_str(text);
        while let Some(at) = self.line.find('\n') {
            let rest = self.line.split_off(at + 1);
            let line = std::mem::replace(&mut self.line, rest);
            let _ = self.bars.println(line.trim_end_matches('\n'));
        }
        let width = usize::from(console_width()).saturating_sub(1).max(20);
        while self.line.chars().count() > width {
            let cut = self
                .line
                .char_indices()
                .nth(width)
                .map_or(self.line.len(), |(at, _)| at);
            let at = self.line[..cut].rfind(' ').map_or(cut, |space| space + 1);
            let rest = self.line.split_off(at);
            let line = std::mem::replace(&mut self.line, rest);
            let _ = self.bars.println(line.trim_end_matches(' '));
        }
        self.text.set_message(self.line.clone());
        self.text.tick();
    }
}

fn console_width() -> u16 {
    rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| size.ws_col.max(20))
}

/// Tells what is happening until `over`.
fn tell(
    screen: &Screen,
    engine: &Engine,
    hub: Option<&Hub>,
    bar: Option<&ProgressBar>,
    over: &AtomicBool,
) {
    let before = engine.counts();
    let mut said = Instant::now();
    while !over.load(Ordering::Relaxed) {
        std::thread::park_timeout(TICK);
        let progress = engine.progress();
        if progress.phase == Phase::Idle {
            continue;
        }
        if bar.is_none() && said.elapsed() < PLAIN_EVERY {
            continue;
        }
        said = Instant::now();
        let counts = engine.counts().since(&before);
        let what = match progress.phase {
            Phase::Prefill => format!("prompt {}/{}", progress.read, progress.prompt),
            _ => format!("token {}", progress.generated + 1),
        };
        let stats = hub.map(Hub::stats).unwrap_or_default();
        let mut line = format!(
            "{what}, layer {}/{}, experts {} ({} memory, {} disk, {} hub), {} fetched, {}/s",
            progress.layer + 1,
            progress.layers,
            counts.experts.total(),
            counts.experts.memory,
            counts.experts.disk,
            counts.experts.hub + counts.experts.peer,
            Bytes(counts.bytes.hub + counts.bytes.peer),
            Bytes(stats.bytes_per_s),
        );
        line.push_str(&limits(&stats));
        if let Some(sweep) = progress.last_sweep {
            line.push_str(&format!(", {} a token", duration(sweep)));
        }
        if let Some(left) = progress.estimate() {
            line.push_str(&format!(", at most {} left", duration(left)));
        }
        match bar {
            Some(bar) => {
                bar.set_message(line);
                bar.tick();
            }
            None => screen.note(&line),
        }
    }
}
