//! `stream` and `run`: text from a model.

use std::io::Read;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::args::EffortArg;
use super::args::Generate;
use super::args::SamplingArgs;
use super::chat;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::live::Live;
use super::logits;
use super::prefix;
use super::report::Report;
use super::screen::Screen;
use super::screen::chain;
use super::session;
use super::setup;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::engine::Event;
use crate::engine::Finish;
use crate::engine::Generation;
use crate::engine::Prompt;
use crate::engine::Request;
use crate::engine::Sampling;
use crate::hub::Hub;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Message;
use crate::text::Role;

/// Runs the command; `network` is what tells `stream` from `run`.
pub(super) fn command(
    args: &Generate,
    network: bool,
    screen: &Arc<Screen>,
) -> Result<u8, CliError> {
    if chat::wanted(args, screen) {
        return chat::command(args, network, screen);
    }
    if let Some(name) = &args.session {
        return session::command(args, name, network, screen);
    }
    let interrupt = Interrupt::listen();
    let piped = match (&args.prompt, args.sampling.ids.is_empty()) {
        (None, true) => chat::piped()?,
        _ => None,
    };
    let prompt = args.prompt.as_deref().or(piped.as_deref());
    let request = match request(&args.sampling, prompt) {
        Ok(request) => request,
        Err(error) => return conclude(Err(error), &None, Report::default(), screen),
    };
    let mut report = Report {
        seed: request.sampling.seed,
        ..Report::default()
    };
    let outcome = whole(args, network, &request, &interrupt, screen, &mut report);
    conclude(outcome, &report_file(&args.sampling), report, screen)
}

fn report_file(sampling: &SamplingArgs) -> Option<std::path::PathBuf> {
    sampling.logits.clone()
}

fn whole(
    args: &Generate,
    network: bool,
    request: &Request,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    report: &mut Report,
) -> Result<Option<crate::engine::Capture>, CliError> {
    let setup = setup::open(&args.model, network, &interrupt.flag(), screen)?;
    let engine = setup::engine(setup.opened, &args.run, screen)?;
    generate(
        &engine,
        setup.hub.as_ref(),
        request,
        interrupt,
        screen,
        report,
    )
}

/// Generates, showing text as it is made, and fills in the report whatever happens.
pub(super) fn generate(
    engine: &Arc<Engine>,
    hub: Option<&Arc<Hub>>,
    request: &Request,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    report: &mut Report,
) -> Result<Option<crate::engine::Capture>, CliError> {
    let ids = engine.prompt_ids(&request.prompt)?;
    let mut request = request.clone();
    if !request.capture {
        request.start = prefix::start_for(engine, &ids, screen);
    }
    let mut run = |on: Observer<'_>| engine.generate(&request, on);
    watched(engine, hub, interrupt, screen, report, &mut run)
}

/// Who hears of a generation.
pub(super) type Observer<'a> = &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>;

/// Runs a generation, showing text as it is made, and fills in the report whatever happens.
pub(super) fn watched(
    engine: &Arc<Engine>,
    hub: Option<&Arc<Hub>>,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
    report: &mut Report,
    run: &mut dyn FnMut(Observer<'_>) -> Result<Generation, EngineError>,
) -> Result<Option<crate::engine::Capture>, CliError> {
    engine.opened().install_core(screen.as_ref())?;
    report.model = engine.name().to_owned();
    report.revision = Some(engine.opened().snapshot.commit.to_string());
    screen.detail(&format!(
        "{} at {:.10}, {} with {} threads, store {}",
        engine.name(),
        engine.opened().snapshot.commit.as_str(),
        engine.kernel().isa().name(),
        engine.kernel().threads(),
        engine.opened().store.store().home().display()
    ));
    interrupt.stops(engine.stopper());
    let mut live = Live::begin(screen, engine, hub);
    let outcome = run(&mut |event| {
        match event {
            Event::Prompt(ids) => report.prompt_ids = ids.to_vec(),
            Event::Token { id, .. } => report.token_ids.push(id),
            Event::Reasoning(text) => {
                report.reasoning.push_str(text);
                live.reasoning(text);
            }
            Event::Answer(text) => {
                report.text.push_str(text);
                live.answer(text);
            }
            _ => {}
        }
        if interrupt.flag().load(Ordering::Relaxed) || interrupt.asked() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    drop(live);
    engine.flush();
    report.measure(engine, hub.map(AsRef::as_ref));
    let generation = outcome?;
    report.finish(&generation);
    Ok(generation.capture)
}

/// Writes what was asked for, says how it went, and names the exit code.
pub(super) fn conclude(
    outcome: Result<Option<crate::engine::Capture>, CliError>,
    logits_file: &Option<std::path::PathBuf>,
    mut report: Report,
    screen: &Screen,
) -> Result<u8, CliError> {
    let written = outcome.and_then(|capture| match (capture, logits_file) {
        (Some(capture), Some(file)) => {
            logits::write(file, &capture).map_err(|source| CliError::File {
                path: file.display().to_string(),
                source,
            })
        }
        _ => Ok(()),
    });
    let code = match &written {
        Ok(()) if report.finish == Some(Finish::Interrupted) => exit::INTERRUPTED,
        Ok(()) => exit::DONE,
        Err(error) => {
            report.error = Some(chain(error));
            error.code()
        }
    };
    if screen.json {
        screen.object(&report.json());
    }
    match written {
        Ok(()) => {
            screen.note(&report.line());
            if code == exit::INTERRUPTED {
                screen.note("interrupted: every expert fetched so far is kept; run the same command again to go on from them");
            }
        }
        // A limit that somebody set is no failure.
        Err(error) if code == exit::INTERRUPTED => screen.paused(&error),
        Err(error) => screen.error(&error),
    }
    Ok(code)
}

/// What the flags ask for.
pub(super) fn request(args: &SamplingArgs, prompt: Option<&str>) -> Result<Request, CliError> {
    let prompt = match (prompt, args.ids.is_empty()) {
        (Some(_), false) => {
            return Err(CliError::Usage(
                "a prompt and --ids were both given".to_owned(),
                Some("give one of them".to_owned()),
            ));
        }
        (None, false) => Prompt::Ids(args.ids.clone()),
        (None, true) => {
            return Err(CliError::Usage(
                "there is no prompt".to_owned(),
                Some("say something: deltafin stream \"Who are you?\"".to_owned()),
            ));
        }
        (Some("-"), true) => words(args, standard_input()?)?,
        (Some(text), true) => words(args, text.to_owned())?,
    };
    let seed = args.seed.unwrap_or_else(random_seed);
    let sampling = Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        seed,
    };
    Ok(Request {
        stop: args.stop.clone(),
        capture: args.logits.is_some(),
        ..Request::new(prompt, args.max_tokens, sampling)
    })
}

fn words(args: &SamplingArgs, text: String) -> Result<Prompt, CliError> {
    if text.trim().is_empty() {
        return Err(CliError::Usage(
            "the prompt is empty".to_owned(),
            Some("say something, or give --ids".to_owned()),
        ));
    }
    if args.raw {
        return Ok(Prompt::Text(text));
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::text(Role::System, system));
    }
    messages.push(Message::text(Role::User, text));
    let effort = effort(args.reasoning_effort.unwrap_or(EffortArg::Low));
    Ok(Prompt::Chat(Conversation {
        messages,
        effort,
        ..Conversation::default()
    }))
}

/// The effort as the model knows it.
pub(super) fn effort(effort: EffortArg) -> Effort {
    match effort {
        EffortArg::None => Effort::None,
        EffortArg::Low => Effort::Low,
        EffortArg::High => Effort::High,
        EffortArg::Max => Effort::Max,
    }
}

pub(super) fn standard_input() -> Result<String, CliError> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|source| CliError::File {
            path: "standard input".to_owned(),
            source,
        })?;
    Ok(text)
}

/// A seed nobody chose. It is always reported, so that the run can be had again.
pub(super) fn random_seed() -> u64 {
    use std::hash::BuildHasher;
    // Short enough to be typed again without a slip.
    std::collections::hash_map::RandomState::new().hash_one(std::process::id()) % 1_000_000_000
}
