//! `doctor`: what is here, what is wrong with it, and what to do.
//!
//! It changes nothing: no store is made where none is, nothing is repaired.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::Access;
use serde_json::Value;
use serde_json::json;

use super::args::DoctorArgs;
use super::args::ModelArgs;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use crate::residency::CoreChoice;
use crate::residency::Demand;
use crate::residency::InstallObserver;
use crate::residency::MemoryPlan;
use crate::residency::OpenRequest;
use crate::residency::Opened;
use crate::residency::ResidencyError;
use crate::residency::Shape;
use crate::residency::ram;
use crate::store::Store;
use crate::store::VerifyOptions;
use crate::terms::Bytes;

/// Tokens of the sequence that memory is planned for.
const CONTEXT: usize = 8192;
/// Files named one by one; of more only the number is told.
const NAMED_MAX: usize = 5;
/// Seconds a clock may be off before it is worth a word.
const CLOCK_OFF: u64 = 5;
/// Seconds from which on signed addresses and certificates may be refused.
const CLOCK_WRONG: u64 = 300;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Severity {
    /// As it should be.
    Ok,
    /// Good to know.
    Note,
    /// Somebody has to do something.
    Problem,
}

/// One thing that was looked at.
struct Finding {
    severity: Severity,
    subject: &'static str,
    found: String,
    advice: Option<String>,
}

/// Everything that was looked at, in order.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, severity: Severity, subject: &'static str, found: String, advice: &str) {
        let advice = (!advice.is_empty()).then(|| advice.to_owned());
        self.0.push(Finding {
            severity,
            subject,
            found,
            advice,
        });
    }

    fn ok(&mut self, subject: &'static str, found: String) {
        self.add(Severity::Ok, subject, found, "");
    }

    fn note(&mut self, subject: &'static str, found: String, advice: &str) {
        self.add(Severity::Note, subject, found, advice);
    }

    fn problem(&mut self, subject: &'static str, found: String, advice: &str) {
        self.add(Severity::Problem, subject, found, advice);
    }

    fn problems(&self) -> usize {
        let problems = self.0.iter().filter(|f| f.severity == Severity::Problem);
        problems.count()
    }
}

impl Finding {
    fn text(&self) -> String {
        let mark = match self.severity {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Problem => "PROBLEM",
        };
        let advice = self.advice.iter().map(|a| format!("{:18}{a}\n", ""));
        let line = format!("{mark:8}{:10}{}\n", self.subject, self.found);
        line + &advice.collect::<String>()
    }

    fn json(&self) -> Value {
        let severity = match self.severity {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Problem => "problem",
        };
        json!({
            "severity": severity,
            "subject": self.subject,
            "found": self.found,
            "advice": self.advice,
        })
    }
}

pub(super) fn command(args: &DoctorArgs, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let env = Env::read();
    let home = setup::home(&args.store, &env)?;
    let mut findings = Findings::default();
    let usable = folder(&home, &mut findings);
    if usable {
        file_system(&home, &mut findings);
    }
    let shapes = match usable && home.exists() {
        true => stored(args, &interrupt, screen, &mut findings)?,
        false => Vec::new(),
    };
    if usable {
        disk(args, &mut findings)?;
    }
    memory(&shapes, &mut findings);
    hub(args, &env, screen, &mut findings);
    if interrupt.asked() {
        return Ok(exit::INTERRUPTED);
    }
    let problems = findings.problems();
    if screen.json {
        let all: Vec<Value> = findings.0.iter().map(Finding::json).collect();
        screen.object(&json!({
            "home": home.display().to_string(),
            "problems": problems,
            "findings": all,
        }));
    }
    findings.0.iter().for_each(|f| screen.text(&f.text()));
    Ok(if problems == 0 {
        exit::DONE
    } else {
        exit::FINDINGS
    })
}

/// The home: whether it is there, a folder, and one that can be written to.
fn folder(home: &Path, findings: &mut Findings) -> bool {
    let shown = home.display();
    if home.exists() && !home.is_dir() {
        let found = format!("{shown} is not a folder");
        findings.problem(
            "home",
            found,
            "name another one with --home or DELTAFIN_HOME",
        );
        return false;
    }
    let Some(nearest) = home.ancestors().find(|folder| folder.exists()) else {
        findings.problem(
            "home",
            format!("{shown} is on no disk"),
            "name another one with --home",
        );
        return false;
    };
    let all = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    match rustix::fs::access(nearest, all) {
        Ok(()) if nearest == home => findings.ok("home", format!("{shown} can be written to")),
        Ok(()) => findings.note("home", format!("{shown} is made at the first use"), ""),
        Err(error) => {
            let found = format!("{}: {}", nearest.display(), std::io::Error::from(error));
            let advice =
                "give yourself the right to read and write it, or name another home with --home";
            findings.problem("home", found, advice);
            return false;
        }
    }
    true
}

/// What kind of file system the home is on: some are slow, some lose what a stop should keep.
fn file_system(home: &Path, findings: &mut Findings) {
    let Some((name, network)) = kind(home) else {
        return;
    };
    if network {
        let found = format!("{name}, over a network");
        let advice = "locks and renames may not hold there, and every read is a transfer: better a local disk";
        findings.note("files", found, advice);
    } else if name == "tmpfs" {
        findings.note(
            "files",
            "tmpfs: in memory".to_owned(),
            "what is fetched is gone after a restart",
        );
    } else {
        findings.ok("files", format!("on {name}"));
    }
}

/// The file system's name, and whether it is a network's. `None` where the system does not tell.
#[cfg(target_os = "linux")]
fn kind(home: &Path) -> Option<(String, bool)> {
    let found = home.ancestors().find_map(|f| rustix::fs::statfs(f).ok())?;
    // The field is signed on some machines; the number is one of 32 bits.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a magic number of 32 bits"
    )]
    let magic = found.f_type as u32;
    let (name, network) = match magic {
        0xef53 => ("ext4", false),
        0x5846_5342 => ("XFS", false),
        0x9123_683e => ("Btrfs", false),
        0x2fc1_2fc1 => ("ZFS", false),
        0xf2f5_2010 => ("F2FS", false),
        0xca45_1a4e => ("bcachefs", false),
        0x0102_1994 => ("tmpfs", false),
        0x794c_7630 => ("overlay", false),
        0x2011_bab0 => ("exFAT", false),
        0x4d44 => ("FAT", false),
        0x7366_746e | 0x5346_544e => ("NTFS", false),
        0x6573_5546 => ("FUSE", false),
        0x6969 => ("NFS", true),
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => ("SMB", true),
        0x0102_1997 => ("9p", true),
        0x00c3_6400 => ("Ceph", true),
        0x0bd0_0bd0 => ("Lustre", true),
        _ => return Some((format!("a file system of kind {magic:#x}"), false)),
    };
    Some((name.to_owned(), network))
}

#[cfg(not(target_os = "linux"))]
fn kind(_home: &Path) -> Option<(String, bool)> {
    None
}

/// Every model of the store: whole, begun, damaged.
fn stored(
    args: &DoctorArgs,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    findings: &mut Findings,
) -> Result<Vec<(String, Shape)>, CliError> {
    let store = match setup::look(&args.store) {
        Ok(store) => store,
        Err(error) => {
            findings.problem(
                "store",
                error.to_string(),
                "see the message; `cache stats` says the same",
            );
            return Ok(Vec::new());
        }
    };
    let models = store.models();
    if models.is_empty() {
        findings.note(
            "store",
            "no model yet".to_owned(),
            "`deltafin stream` or `deltafin fetch` brings one",
        );
    }
    let distrusted = store.stats().distrusted;
    if distrusted > 0 {
        let found = format!(
            "{distrusted} experts were removed: the last stop was unclean, nothing vouched for them"
        );
        findings.note(
            "store",
            found,
            "nothing: they are fetched again when they are needed",
        );
    }
    let mut shapes = Vec::new();
    for (repo, commit) in models {
        let request = OpenRequest {
            repo: repo.clone(),
            revision: Some(commit.to_string()),
            update: false,
        };
        match Opened::open(&store, None, &request, interrupt.flag(), screen.as_ref()) {
            Ok(opened) => shapes.extend(model(&opened, findings)),
            Err(error) => {
                let found = format!("{repo} at {:.10}: {error}", commit.as_str());
                let advice =
                    format!("`deltafin fetch --core --model {repo}` brings what is missing");
                findings.problem("model", found, &advice);
            }
        }
        if args.deep && !interrupt.asked() {
            deep(&store, &request, interrupt, screen, findings)?;
        }
    }
    Ok(shapes)
}

/// One model, by sizes alone.
fn model(opened: &Opened, findings: &mut Findings) -> Option<(String, Shape)> {
    let (repo, plan) = (&opened.repo, opened.plan(None));
    let here = plan.experts_total - plan.experts_missing;
    let experts = format!("{here} of {} experts", plan.experts_total);
    if plan.core_missing > 0 {
        let (missing, total) = (Bytes(plan.core_missing), Bytes(plan.core_total));
        let found = format!("{repo}: {missing} of {total} of the core are missing; {experts}");
        findings.problem(
            "model",
            found,
            &format!("`deltafin fetch --core --model {repo}` goes on with it"),
        );
    } else if plan.experts_missing > 0 {
        let left = Bytes(plan.experts_missing * plan.expert_len);
        let found = format!(
            "{repo}: the core and {experts}; the others, {left}, come when they are needed"
        );
        findings.ok("model", found);
    } else {
        findings.ok("model", format!("{repo}: all of it, {experts}"));
    }
    let stored = opened.store.experts();
    let odd: Vec<_> = stored
        .iter()
        .filter(|(_, len)| *len != plan.expert_len)
        .collect();
    if let Some((key, len)) = odd.first() {
        let found = format!(
            "{repo}: {} experts have a wrong size, the first expert {} of layer {} with {len} bytes instead of {}",
            odd.len(),
            key.expert,
            key.layer,
            plan.expert_len
        );
        findings.problem(
            "model",
            found,
            "`deltafin cache verify --repair` removes what is damaged",
        );
    }
    match Shape::new(&opened.spec, opened.layout.core()) {
        Ok(shape) => Some((repo.to_string(), shape)),
        Err(error) => {
            let found = format!("{repo}: {}", ResidencyError::from(error));
            findings.problem(
                "model",
                found,
                &format!("`deltafin fetch --core --model {repo}`"),
            );
            None
        }
    }
}

/// Reads all of a model and compares it with its digests.
fn deep(
    store: &Store,
    request: &OpenRequest,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    findings: &mut Findings,
) -> Result<(), CliError> {
    let Some(Ok(commit)) = request.revision.as_deref().map(str::parse) else {
        return Ok(());
    };
    let repo = &request.repo;
    let options = VerifyOptions {
        every: 1,
        repair: false,
    };
    let mut staged = false;
    let found = store.model(repo, &commit).verify(options, &mut |so_far| {
        if !std::mem::replace(&mut staged, true) {
            screen.stage(&format!("reading {repo}"), 0, so_far.of as u64);
        }
        screen.moved(1);
        match interrupt.asked() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    screen.done();
    let advice =
        "`deltafin cache verify --repair` removes it; it is fetched again when it is needed";
    for (path, damage) in found.damaged.iter().take(NAMED_MAX) {
        findings.problem("damage", format!("{}: {damage}", path.display()), advice);
    }
    match found.damaged.len() {
        0 => {
            let read = Bytes(found.bytes);
            findings.ok(
                "damage",
                format!("{repo}: {} files, {read}, are what they were", found.files),
            );
        }
        n if n > NAMED_MAX => {
            findings.problem(
                "damage",
                format!("{repo}: and {} more files", n - NAMED_MAX),
                advice,
            );
        }
        _ => {}
    }
    Ok(())
}

/// Whether there is room to go on.
fn disk(args: &DoctorArgs, findings: &mut Findings) -> Result<(), CliError> {
    let (free, reserve) = setup::space(&args.store)?;
    let (left, kept) = (Bytes(free), Bytes(reserve));
    if free <= reserve {
        let found =
            format!("{left} free, of which {kept} are never touched: no expert can be kept");
        let advice = "free some space, `deltafin cache trim SIZE`, or set a smaller --reserve";
        findings.problem("disk", found, advice);
    } else {
        findings.ok(
            "disk",
            format!("{left} free, of which {kept} are never touched"),
        );
    }
    Ok(())
}

/// Whether what is installed can run in the memory there is.
fn memory(shapes: &[(String, Shape)], findings: &mut Findings) {
    let Some(found) = ram::available() else {
        findings.note(
            "memory",
            "this system does not tell how much there is".to_owned(),
            "say it with --ram",
        );
        return;
    };
    findings.ok(
        "memory",
        format!(
            "{} to work with, limited by {}",
            Bytes(found.budget),
            found.by
        ),
    );
    for (repo, shape) in shapes {
        let demand = Demand {
            budget: Some(found.budget),
            threads: setup::default_threads(),
            context: CONTEXT,
            sequences: 1,
            taking_turns: false,
            core: CoreChoice::Auto,
            lookahead: crate::residency::Lookahead::Off,
        };
        let plan = MemoryPlan::new(shape, &demand);
        if plan.short > 0 {
            let short = Bytes(plan.short);
            let found = format!("{repo}: the least that works needs {short} more");
            let advice =
                "end other programs, or raise the limit; `deltafin plan` says what needs how much";
            findings.problem("memory", found, advice);
        }
    }
}

/// Whether the hub answers, and what it thinks the time is.
fn hub(args: &DoctorArgs, env: &Env, screen: &Arc<Screen>, findings: &mut Findings) {
    if args.offline || env.offline.is_some() {
        findings.note("hub", "not asked: offline".to_owned(), "");
        return;
    }
    let asked = ModelArgs {
        model: args.model.clone(),
        revision: None,
        update: false,
        hub: args.hub.clone(),
        offline: false,
        rate: None,
        max_bytes: None,
        store: args.store.clone(),
    };
    let sources = setup::sources(&asked, env, None);
    let opened = setup::repo(&asked, &sources)
        .and_then(|repo| Ok((repo, setup::hub(&asked, env, sources, false, screen)?)));
    let (repo, hub) = match opened {
        Ok((repo, Some(hub))) => (repo, hub),
        Ok((_, None)) => return,
        Err(error) => {
            findings.problem("hub", error.to_string(), "see the message");
            return;
        }
    };
    let began = Instant::now();
    match hub.commit(&repo, "main") {
        Ok(commit) => {
            let took = began.elapsed().as_millis();
            let found = format!("answers in {took} ms: {repo} is at {:.10}", commit.as_str());
            findings.ok("hub", found);
        }
        Err(error) => {
            let advice = "check the network, HTTPS_PROXY, the hub's address and the token; --offline does without";
            findings.problem("hub", error.to_string(), advice);
        }
    }
    let Some(ahead) = hub.stats().clock_ahead else {
        return;
    };
    let off = ahead.unsigned_abs();
    let way = if ahead > 0 { "behind" } else { "ahead of" };
    let found = format!("this machine's clock is {off} s {way} the hub's");
    let advice = "set the clock: signed addresses and certificates hold for a time";
    match off {
        CLOCK_WRONG.. => findings.problem("clock", found, advice),
        CLOCK_OFF.. => findings.note("clock", found, advice),
        _ => findings.ok("clock", "as the hub's".to_owned()),
    }
}
