//! `sessions`: looking after conversations that were kept.

use serde_json::Value;
use serde_json::json;

use super::args::Sessions;
use super::args::SessionsNamed;
use super::args::StoreArgs;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::screen::Screen;
use super::session::KIND;
use super::session::Talk;
use super::setup;
use crate::jobs::JobError;
use crate::jobs::Journal;
use crate::jobs::Listed;
use crate::terms::Bytes;

/// Whether one object is wanted.
pub(super) fn json(args: &Sessions) -> bool {
    match args {
        Sessions::List(args) => args.json,
        Sessions::Show(args) | Sessions::Rm(args) => args.json,
        // It is JSON either way.
        Sessions::Export(_) => true,
    }
}

pub(super) fn command(args: &Sessions, screen: &Screen) -> Result<u8, CliError> {
    match args {
        Sessions::List(args) => list(&args.store, screen),
        Sessions::Show(args) => show(args, screen),
        Sessions::Rm(args) => remove(args, screen),
        Sessions::Export(args) => export(args, screen),
    }
}

fn journal(args: &StoreArgs) -> Result<Journal, CliError> {
    Ok(Journal::sessions(&setup::home(args, &Env::read())?)?)
}

fn talk(session: &Listed) -> Talk {
    serde_json::from_value(session.request.clone()).unwrap_or_default()
}

fn summary(session: &Listed) -> Value {
    let talk = talk(session);
    json!({
        "name": session.id, "model": session.identity.model,
        "revision": session.identity.revision, "arithmetic": session.identity.arithmetic,
        "created": session.created, "updated": session.updated,
        "messages": talk.messages.len(), "unfinished": talk.pending.is_some(),
        "unfinished_tokens": session.ids.len(), "running": session.running,
        "bytes": session.bytes,
    })
}

fn list(args: &StoreArgs, screen: &Screen) -> Result<u8, CliError> {
    let sessions = journal(args)?.list(KIND);
    if screen.json {
        let sessions: Vec<Value> = sessions.iter().map(summary).collect();
        screen.object(&json!({ "sessions": sessions }));
        return Ok(exit::DONE);
    }
    if sessions.is_empty() {
        screen.note("no sessions; deltafin stream --session NAME begins one");
    }
    for session in &sessions {
        let talk = talk(session);
        let unfinished = match (session.running, talk.pending.is_some()) {
            (true, _) => ", in use",
            (false, true) => ", a reply is unfinished",
            _ => "",
        };
        screen.text(&format!(
            "{}: {} messages with {}, {}{unfinished}\n",
            session.id,
            talk.messages.len(),
            session.identity.model,
            Bytes(session.bytes)
        ));
    }
    Ok(exit::DONE)
}

fn look(args: &SessionsNamed) -> Result<Listed, CliError> {
    let found = journal(&args.store)?.look(&args.name);
    Ok(found.map_err(|error| match error {
        JobError::NotFound { id } => JobError::NotFound {
            id: format!("session {id}"),
        },
        error => error,
    })?)
}

fn show(args: &SessionsNamed, screen: &Screen) -> Result<u8, CliError> {
    let session = look(args)?;
    let talk = talk(&session);
    if screen.json {
        let mut object = summary(&session);
        object["system"] = json!(talk.system);
        object["reasoning_effort"] = talk.effort.into();
        object["messages"] = talk.messages.into();
        object["token_ids"] = json!(session.ids);
        screen.object(&object);
        return Ok(exit::DONE);
    }
    if let Some(system) = &talk.system {
        screen.text(&format!("system: {system}\n\n"));
    }
    for message in &talk.messages {
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        screen.text(&format!("{}: {}\n\n", text("role"), text("content")));
    }
    if talk.pending.is_some() {
        screen.note(&format!(
            "a reply of {} tokens so far is unfinished; deltafin stream --session {} goes on",
            session.ids.len(),
            session.id
        ));
    }
    Ok(exit::DONE)
}

fn remove(args: &SessionsNamed, screen: &Screen) -> Result<u8, CliError> {
    let session = look(args)?;
    journal(&args.store)?.remove(&args.name)?;
    if screen.json {
        screen.object(&json!({ "removed": session.id, "bytes": session.bytes }));
    } else {
        screen.note(&format!("removed {}, {}", session.id, Bytes(session.bytes)));
    }
    Ok(exit::DONE)
}

fn export(args: &SessionsNamed, screen: &Screen) -> Result<u8, CliError> {
    let session = look(args)?;
    screen.object(&talk(&session).export(&session.identity.model));
    Ok(exit::DONE)
}
