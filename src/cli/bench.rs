//! `bench`: what a token costs here, in a report fit to share.
//!
//! ```text
//! place.rs    where models come from and stores lie
//! run.rs      one run of one arm, token by token
//! report.rs   what is kept; docs/benchmarks/schema.json
//! page.rs     what people read
//! compare.rs  two reports side by side
//! table.rs    a folder of reports in one table
//! ```
//!
//! A measurement changes nothing that later runs decide by: no setting is remembered, and no expert of a store makes
//! room for one of an arm's.

mod compare;
mod machine;
mod page;
mod place;
mod report;
mod run;
mod table;

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;

use self::place::Place;
use self::report::Report;
use self::run::Ready;
use self::run::Run;
use super::args::Bench;
use super::args::bench::BenchThen;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::screen::duration;
use super::setup;
use crate::residency::rates;
use crate::terms::Digest;
use crate::terms::TokenId;

pub(super) fn command(args: &Bench, screen: &Arc<Screen>) -> Result<u8, CliError> {
    match &args.then {
        Some(BenchThen::Compare(args)) => compare::command(args, screen),
        Some(BenchThen::Table(args)) => table::command(args, screen),
        None => measure(args, screen),
    }
}

/// What `--json` says of the command.
pub(super) fn json(args: &Bench) -> bool {
    match &args.then {
        Some(BenchThen::Compare(args)) => args.json,
        Some(BenchThen::Table(_)) => false,
        None => args.flags.run.json,
    }
}

fn measure(args: &Bench, screen: &Arc<Screen>) -> Result<u8, CliError> {
    if args.tokens < args.skip.saturating_add(2) {
        return Err(CliError::Usage(
            format!("of {} tokens none would be counted", args.tokens),
            Some(format!(
                "give --tokens {} or more",
                args.skip.saturating_add(2)
            )),
        ));
    }
    let interrupt = Interrupt::listen();
    let place = Place::new(args)?;
    let arms = place.arms(args)?;
    if args.disk || args.link {
        return alone(args, &arms[0], &interrupt, screen);
    }
    let mut bench = Measured::new(args, arms, screen);
    let outcome = bench.all(&interrupt);
    let interrupted = match outcome {
        Ok(interrupted) => interrupted,
        Err(error) if error.code() == exit::INTERRUPTED => true,
        Err(error) => return Err(error),
    };
    let Some(report) = bench.report()? else {
        screen.note("interrupted before a round was whole: there is nothing to report");
        return Ok(exit::INTERRUPTED);
    };
    tell(args, &report, screen)?;
    if interrupted {
        screen.note(&format!(
            "interrupted after {} whole rounds of {}",
            report.asked.rounds, args.rounds
        ));
        return Ok(exit::INTERRUPTED);
    }
    match bench.rejected() {
        None => Ok(exit::DONE),
        Some(what) => Err(CliError::Damaged(
            what,
            "no way to run may change a reply: leave out what does (a temperature, another prompt), or report this as a bug".to_owned(),
        )),
    }
}

fn tell(args: &Bench, report: &Report, screen: &Screen) -> Result<(), CliError> {
    let page = page::page(report);
    let object = serde_json::to_value(report).unwrap_or_default();
    // First, so that a file that cannot be written costs no measurement.
    if screen.json {
        screen.object(&object);
    } else {
        screen.text(&page);
    }
    if let Some(file) = &args.out {
        let name = file.display().to_string();
        let base = name
            .strip_suffix(".json")
            .or_else(|| name.strip_suffix(".md"));
        let base = base.unwrap_or(&name);
        for (ending, text) in [("json", format!("{object:#}\n")), ("md", page.clone())] {
            let path = format!("{base}.{ending}");
            std::fs::write(&path, text).map_err(|source| CliError::File { path, source })?;
        }
    }
    Ok(())
}

/// Disk or link, and nothing else.
fn alone(
    args: &Bench,
    arm: &Ready,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
) -> Result<u8, CliError> {
    let disk = args.disk.then(|| disk(arm, None)).transpose()?;
    let link = match args.link {
        false => None,
        true => {
            let setup = arm.open(interrupt, screen)?;
            Some(rates::link(&setup.opened, rates::LINK_TIME)?)
        }
    };
    if screen.json {
        let machine = machine::this(&arm.home);
        screen.object(&json!({"machine": machine, "rates": report::Rates { disk, link }}));
        return Ok(exit::DONE);
    }
    for (what, rate) in [("disk", disk), ("link", link)] {
        if let Some(rate) = rate {
            screen.text(&format!("{what} {}/s\n", super::screen::whole_bytes(rate)));
        }
    }
    Ok(exit::DONE)
}

fn disk(arm: &Ready, opened: Option<&crate::residency::Opened>) -> Result<f64, CliError> {
    let files: Vec<PathBuf> = opened.map_or_else(Vec::new, |opened| {
        let core = opened.layout.core().iter();
        core.filter_map(|file| opened.store.core_ready(file.part, file.len))
            .collect()
    });
    let folder = arm.home.ancestors().find(|folder| folder.is_dir());
    let folder = folder.unwrap_or(&arm.home);
    rates::disk(&files, folder, rates::READS).map_err(|source| CliError::File {
        path: folder.display().to_string(),
        source,
    })
}

/// All that is measured.
struct Measured<'a> {
    args: &'a Bench,
    screen: &'a Arc<Screen>,
    arms: Vec<Ready>,
    /// Of each arm.
    runs: Vec<Vec<Run>>,
    rejected: Vec<Option<String>>,
    /// Of each arm, from any run.
    seen: Vec<Option<Run>>,
    rates: report::Rates,
    model: Option<report::Model>,
    words: Option<String>,
    /// What every reply has to be.
    ids: Option<Vec<TokenId>>,
}

impl<'a> Measured<'a> {
    fn new(args: &'a Bench, arms: Vec<Ready>, screen: &'a Arc<Screen>) -> Measured<'a> {
        Measured {
            args,
            screen,
            runs: arms.iter().map(|_| Vec::new()).collect(),
            rejected: arms.iter().map(|_| None).collect(),
            seen: arms.iter().map(|_| None).collect(),
            rates: report::Rates {
                disk: None,
                link: None,
            },
            model: None,
            words: None,
            ids: None,
            arms,
        }
    }

    /// Runs every arm in every round; true if somebody ended it. What is left then are whole rounds.
    fn all(&mut self, interrupt: &Interrupt) -> Result<bool, CliError> {
        self.begin(interrupt)?;
        for round in 0..self.args.warm_up + self.args.rounds {
            let counted = round >= self.args.warm_up;
            let mut order: Vec<usize> = (0..self.arms.len()).collect();
            // Whoever goes second finds the machine as the first has left it: by turns.
            if round % 2 == 1 {
                order.reverse();
            }
            let mut whole = Vec::new();
            for arm in order {
                if self.rejected[arm].is_some() {
                    continue;
                }
                let run = self.arms[arm].run(self.args, interrupt, self.screen)?;
                if run.interrupted {
                    return Ok(true);
                }
                self.note(arm, round, &run);
                self.check(arm, &run);
                whole.push((arm, run));
            }
            for (arm, run) in whole {
                let keep = counted && self.rejected[arm].is_none();
                match keep {
                    true => self.runs[arm].push(run),
                    false => self.seen[arm] = Some(run),
                }
            }
        }
        Ok(false)
    }

    /// What is the same for all arms.
    fn begin(&mut self, interrupt: &Interrupt) -> Result<(), CliError> {
        let arm = &self.arms[0];
        let setup = arm.open(interrupt, self.screen)?;
        setup.opened.install_core(self.screen.as_ref())?;
        self.rates.disk = disk(arm, Some(&setup.opened)).ok();
        if setup.over_network() {
            self.rates.link = Some(rates::link(&setup.opened, rates::LINK_TIME / 2)?);
        }
        let installed = setup.opened.plan(None);
        self.model = Some(report::Model {
            name: setup.opened.repo.to_string(),
            revision: setup.opened.snapshot.commit.to_string(),
            core_bytes: installed.core_total,
            experts: installed.experts_total,
            expert_bytes: installed.expert_len,
        });
        let engine = setup::engine(setup.opened, &arm.meant.run, self.screen)?;
        self.words = run::words(self.args, &engine);
        Ok(())
    }

    fn note(&self, arm: usize, round: u16, run: &Run) {
        let args = self.args;
        let what = match round.checked_sub(args.warm_up) {
            None => format!("warm-up {} of {}", round + 1, args.warm_up),
            Some(round) => format!("round {} of {}", round + 1, args.rounds),
        };
        let skip = usize::try_from(args.skip).unwrap_or(usize::MAX);
        self.screen.note(&format!(
            "{what}, {}: {} a token",
            self.arms[arm].name,
            seconds(run.median(skip))
        ));
    }

    /// Rejects an arm whose reply is another than the first that was given.
    fn check(&mut self, arm: usize, run: &Run) {
        let expected = self.ids.get_or_insert_with(|| run.ids.clone());
        if *expected != run.ids {
            let same = expected.iter().zip(&run.ids).take_while(|(a, b)| a == b);
            let at = same.count() + 1;
            self.rejected[arm] = Some(format!("its ids differ from token {at} on"));
            self.runs[arm].clear();
        }
    }

    fn rejected(&self) -> Option<String> {
        let arms = self.arms.iter().zip(&self.rejected);
        let found: Vec<String> = arms
            .filter_map(|(arm, why)| {
                Some(format!("arm `{}` is rejected: {}", arm.name, why.as_ref()?))
            })
            .collect();
        (!found.is_empty()).then(|| found.join("; "))
    }

    /// What was measured; `None` if no round was whole, or no token counted.
    fn report(&self) -> Result<Option<Report>, CliError> {
        let args = self.args;
        let rounds = self.runs.iter().map(Vec::len).max().unwrap_or(0);
        let (Some(model), Some(ids), true) = (&self.model, &self.ids, rounds > 0) else {
            return Ok(None);
        };
        let skip = usize::try_from(args.skip).unwrap_or(usize::MAX);
        let mut arms = Vec::new();
        let mut prompt = None;
        for (n, ready) in self.arms.iter().enumerate() {
            let Some(any) = self.runs[n].last().or(self.seen[n].as_ref()) else {
                continue;
            };
            if self.rejected[n].is_none() {
                prompt.get_or_insert(&any.prompt_ids);
            }
            let peaks = self.runs[n].iter().filter_map(|run| run.memory.peak).max();
            arms.push(report::Arm {
                name: ready.name.clone(),
                flags: ready.flags.clone(),
                isa: any.isa.to_owned(),
                threads: any.threads,
                memory: report::Memory {
                    peak: peaks.or(any.memory.peak),
                    ..any.memory
                },
                cache: any.cache,
                figures: run::figures(&self.runs[n], skip),
                rejected: self.rejected[n].clone(),
            });
        }
        if arms.iter().all(|arm| arm.figures.is_none()) {
            return Err(CliError::Usage(
                format!(
                    "the reply ended after {} tokens, before any was counted",
                    ids.len()
                ),
                Some("ask for something longer, or give a smaller --skip".to_owned()),
            ));
        }
        let prompt = prompt.map_or(&[][..], Vec::as_slice);
        Ok(Some(Report {
            format: report::FORMAT.to_owned(),
            deltafin: env!("CARGO_PKG_VERSION").to_owned(),
            date: machine::today(),
            note: args.note.clone(),
            machine: machine::this(&self.arms[0].home),
            rates: self.rates,
            model: model.clone(),
            asked: report::Asked {
                prompt: self.words.clone(),
                prompt_tokens: prompt.len(),
                prompt_sha256: digest(prompt),
                tokens: args.tokens,
                skip: args.skip,
                rounds: u16::try_from(rounds).unwrap_or(u16::MAX),
                warm_up: args.warm_up,
                page_cache_dropped: args.drop_page_cache,
                reply_tokens: ids.len(),
                reply_sha256: digest(ids),
            },
            arms,
        }))
    }
}

/// Of ids, four bytes each.
fn digest(ids: &[TokenId]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Digest(Sha256::digest(bytes).into()).to_string()
}

/// Seconds with three digits that count.
fn seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        s if s < 0.1 => format!("{:.3} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.3} s"),
        s => duration(std::time::Duration::try_from_secs_f64(s).unwrap_or_default()),
    }
}
