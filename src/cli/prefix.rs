//! `prefix`: the state after a beginning that many prompts share, read once and shared.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use serde_json::json;

use super::args::EffortArg;
use super::args::Prefix;
use super::args::PrefixExport;
use super::args::PrefixImport;
use super::args::PrefixMake;
use super::args::SessionsNamed;
use super::args::StoreArgs;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::generate;
use super::interrupt::Interrupt;
use super::live::Live;
use super::screen::Screen;
use super::screen::chain;
use super::setup;
use crate::engine::Engine;
use crate::engine::Event;
use crate::engine::Generation;
use crate::engine::Prompt;
use crate::engine::Request;
use crate::engine::Sampling;
use crate::engine::Start;
use crate::jobs;
use crate::jobs::Identity;
use crate::jobs::Journal;
use crate::jobs::Keep;
use crate::jobs::Notice;
use crate::jobs::Prefixes;
use crate::kernel::Isa;
use crate::terms::Bytes;
use crate::terms::TokenId;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Message;
use crate::text::Role;

/// Whether one object is wanted, and how much is said.
pub(super) fn output(args: &Prefix) -> (bool, u8) {
    match args {
        Prefix::Make(args) => (args.run.json, args.run.verbose),
        Prefix::List(args) => (args.json, 0),
        Prefix::Export(args) => (args.json, 0),
        Prefix::Import(args) => (args.json, 0),
        Prefix::Rm(args) => (args.json, 0),
    }
}

pub(super) fn command(args: &Prefix, screen: &Arc<Screen>) -> Result<u8, CliError> {
    match args {
        Prefix::Make(args) => make(args, screen),
        Prefix::List(args) => list(&args.store, screen),
        Prefix::Export(args) => export(args, screen),
        Prefix::Import(args) => import(args, screen),
        Prefix::Rm(args) => remove(args, screen),
    }
}

fn prefixes(args: &StoreArgs) -> Result<Prefixes, CliError> {
    Ok(Prefixes::open(&setup::home(args, &Env::read())?))
}

/// The longest prefix of the engine's store that a prompt begins with.
pub(super) fn start_for(
    engine: &Engine,
    prompt: &[TokenId],
    screen: &Screen,
) -> Option<Arc<Start>> {
    let prefixes = Prefixes::open(engine.opened().store.store().home());
    let loaded = prefixes.start_for(prompt, &Identity::of(engine), engine.spec());
    for (path, refusal) in &loaded.refused {
        screen.note(&format!(
            "{} is not used: {refusal}; the whole prompt is read",
            path.display()
        ));
    }
    let start = loaded.start?;
    screen.detail(&format!(
        "{} tokens of the prompt are read",
        start.ids.len()
    ));
    Some(Arc::new(start))
}

fn make(args: &PrefixMake, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let tools = args.tools.as_deref().map(read_tools).transpose()?;
    if args.system.is_none() && tools.is_none() {
        return Err(CliError::Usage(
            "there is nothing to read".to_owned(),
            Some("give --system, --tools or both".to_owned()),
        ));
    }
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let engine = setup::engine(setup.opened, &args.run, screen)?;
    let effort = generate::effort(args.reasoning_effort.unwrap_or(EffortArg::Low));
    let about = json!({
        "system": args.system, "tools": tools, "reasoning_effort": effort.as_str(),
    });
    let ids = beginning(&engine, args.system.as_deref(), tools.as_ref(), effort)?;
    engine.opened().install_core(screen.as_ref())?;
    interrupt.gently();
    interrupt.stops(engine.stopper());
    let live = Live::begin(screen, &engine, setup.hub.as_ref());
    let made = read(&engine, &args.name, &ids, &about, &interrupt, screen);
    drop(live);
    engine.flush();
    let Some((bytes, made)) = made? else {
        screen.note("interrupted: run the same command again to go on");
        return Ok(exit::INTERRUPTED);
    };
    let identity = Identity::of(&engine);
    if screen.json {
        screen.object(&json!({
            "name": args.name, "tokens": ids.len(), "bytes": bytes,
            "rows": { "computed": made.computed_rows, "cached": made.cached_tokens },
            "model": identity.model, "revision": identity.revision,
            "arithmetic": identity.arithmetic,
        }));
    } else {
        screen.note(&format!(
            "{}: {} tokens, {}; prompts that begin with them are read from there",
            args.name,
            ids.len(),
            Bytes(bytes)
        ));
    }
    Ok(exit::DONE)
}

/// The tokens that every first prompt with these has: what two have in common that differ from the
/// first character a person says.
fn beginning(
    engine: &Engine,
    system: Option<&str>,
    tools: Option<&Value>,
    effort: Effort,
) -> Result<Vec<TokenId>, CliError> {
    let prompt = |said: &str| {
        let system = system.map(|text| Message::text(Role::System, text));
        let said = Message::text(Role::User, said);
        engine.prompt_ids(&Prompt::Chat(Conversation {
            messages: system.into_iter().chain([said]).collect(),
            tools: tools.cloned(),
            effort,
            ..Conversation::default()
        }))
    };
    let (one, other) = (prompt("A")?, prompt("B")?);
    let same = one.iter().zip(&other).take_while(|(a, b)| a == b);
    Ok(same.map(|(id, _)| *id).collect())
}

/// Reads the tokens, in a job that goes on after a stop, and keeps the state after them; `None` where
/// somebody stopped it.
fn read(
    engine: &Engine,
    name: &str,
    ids: &[TokenId],
    about: &Value,
    interrupt: &Interrupt,
    screen: &Screen,
) -> Result<Option<(u64, Generation)>, CliError> {
    let identity = Identity::of(engine);
    let home = engine.opened().store.store().home();
    let prefixes = Prefixes::open(home);
    let job = format!("prefix-{name}");
    let mut job = Journal::open(home)?.create_as(&job, "prefix", about.clone(), &identity)?;
    let sampling = Sampling {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    };
    let request = Request::new(Prompt::Ids(ids.to_vec()), 0, sampling);
    let keep = Keep {
        every: None,
        for_next_turn: true,
    };
    let mut kept = None;
    let mut on = |event: Event<'_>| {
        if let Event::State {
            ids: read,
            sequence,
        } = event
            && read.len() == ids.len()
        {
            kept = Some(prefixes.keep(name, &identity, about.clone(), read, sequence));
        }
        match interrupt.asked() && kept.is_none() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let mut notice = |notice: Notice| {
        if let Notice::Trouble(error) = notice {
            let error = chain(&error);
            screen.note(&format!("a stop now would cost more than usual: {error}"));
        }
    };
    let known = start_for(engine, ids, screen);
    let ran = jobs::generate(
        engine,
        &mut job,
        &request,
        keep,
        known,
        &mut on,
        &mut notice,
    )?;
    let Some(bytes) = kept.transpose()? else {
        return Ok(None);
    };
    job.remove()?;
    Ok(Some((bytes, ran.generation)))
}

fn read_tools(path: &Path) -> Result<Value, CliError> {
    let bytes = std::fs::read(path).map_err(|source| CliError::File {
        path: path.display().to_string(),
        source,
    })?;
    let tools: Value = serde_json::from_slice(&bytes)
        .map_err(|error| CliError::Usage(format!("--tools: {}: {error}", path.display()), None))?;
    let hint = "it is a JSON list, as `tools` of a chat request".to_owned();
    match tools {
        Value::Array(_) => Ok(tools),
        _ => Err(CliError::Usage(
            format!("--tools: {} holds no list", path.display()),
            Some(hint),
        )),
    }
}

fn list(args: &StoreArgs, screen: &Screen) -> Result<u8, CliError> {
    let found = prefixes(args)?.list();
    if screen.json {
        let one = |prefix: &jobs::Prefix| match &prefix.head {
            Ok(head) => json!({
                "name": prefix.name, "bytes": prefix.bytes, "tokens": head.ids.len(),
                "model": head.identity.model, "revision": head.identity.revision,
                "arithmetic": head.identity.arithmetic, "about": head.about,
            }),
            Err(refusal) => json!({
                "name": prefix.name, "bytes": prefix.bytes, "error": refusal.to_string(),
            }),
        };
        let list: Vec<Value> = found.iter().map(one).collect();
        screen.object(&json!({ "prefixes": list }));
        return Ok(exit::DONE);
    }
    if found.is_empty() {
        screen.note("no prefixes; deltafin prefix make makes one");
    }
    for prefix in &found {
        let what = match &prefix.head {
            Ok(head) => format!(
                "{} tokens of {} at {:.10}, {}",
                head.ids.len(),
                head.identity.model,
                head.identity.revision,
                head.identity.arithmetic
            ),
            Err(refusal) => refusal.to_string(),
        };
        screen.text(&format!(
            "{}: {what}, {}\n",
            prefix.name,
            Bytes(prefix.bytes)
        ));
    }
    Ok(exit::DONE)
}

fn export(args: &PrefixExport, screen: &Screen) -> Result<u8, CliError> {
    let head = prefixes(&args.store)?.export(&args.name, &args.file)?;
    told(&args.name, &head, &args.file, screen);
    Ok(exit::DONE)
}

fn import(args: &PrefixImport, screen: &Screen) -> Result<u8, CliError> {
    let stem = || args.file.file_stem()?.to_str().map(str::to_owned);
    let name = args.name.clone().or_else(stem).unwrap_or_default();
    let refused = |why: String| {
        let what = format!("{}: {why}", args.file.display());
        CliError::Job(jobs::JobError::Damaged {
            path: args.file.clone(),
            reason: what,
        })
    };
    let head = jobs::read_snapshot_head(&args.file).map_err(|r| refused(r.to_string()))?;
    let here: Vec<String> = Isa::available().into_iter().map(jobs::arithmetic).collect();
    let of = &head.identity;
    if !here.contains(&of.arithmetic) {
        let here = here.join(", ");
        return Err(refused(format!(
            "its arithmetic is {}, this machine's {here}",
            of.arithmetic
        )));
    }
    let store = setup::look(&args.store)?;
    let models = store.models();
    let mut commits = models
        .iter()
        .filter(|(repo, _)| repo.as_str() == of.model)
        .map(|(_, commit)| commit.as_str())
        .peekable();
    if let Some(first) = commits.peek().copied()
        && !commits.any(|commit| commit == of.revision)
    {
        return Err(refused(format!(
            "it is of {} at {:.10}, and the store has {first:.10}",
            of.model, of.revision
        )));
    }
    let head = prefixes(&args.store)?.import(&name, &args.file)?;
    told(&name, &head, &args.file, screen);
    Ok(exit::DONE)
}

fn told(name: &str, head: &jobs::Head, file: &Path, screen: &Screen) {
    if screen.json {
        screen.object(&json!({
            "name": name, "tokens": head.ids.len(), "file": file.display().to_string(),
            "model": head.identity.model, "revision": head.identity.revision,
            "arithmetic": head.identity.arithmetic,
        }));
    } else {
        screen.note(&format!(
            "{name}: {} tokens of {} at {:.10}",
            head.ids.len(),
            head.identity.model,
            head.identity.revision
        ));
    }
}

fn remove(args: &SessionsNamed, screen: &Screen) -> Result<u8, CliError> {
    prefixes(&args.store)?.remove(&args.name)?;
    if screen.json {
        screen.object(&json!({ "removed": args.name }));
    } else {
        screen.note(&format!("removed {}", args.name));
    }
    Ok(exit::DONE)
}
