//! Two reports side by side.

use std::sync::Arc;

use serde_json::Value;
use serde_json::json;

use super::page;
use super::report::Arm;
use super::report::Figures;
use super::report::Report;
use super::report::Spread;
use super::seconds;
use crate::cli::args::bench::BenchCompare;
use crate::cli::exit;
use crate::cli::exit::CliError;
use crate::cli::screen::Screen;

pub(super) fn command(args: &BenchCompare, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let (a, b) = (Report::read(&args.a)?, Report::read(&args.b)?);
    let differ = differences(&a, &b);
    if !differ.is_empty() && !args.anyway {
        return Err(CliError::Usage(
            format!(
                "these reports are of different things: {}",
                differ.join(", ")
            ),
            Some("--anyway compares them nevertheless".to_owned()),
        ));
    }
    let pairs = pairs(&a, &b)?;
    if screen.json {
        let pairs: Vec<Value> = pairs.iter().map(|pair| object(pair)).collect();
        screen.object(&json!({"different": differ, "arms": pairs}));
        return Ok(exit::DONE);
    }
    if !differ.is_empty() {
        screen.note(&format!(
            "different things are compared: {}",
            differ.join(", ")
        ));
    }
    let mut text = format!(
        "A: {}, {}\nB: {}, {}\n",
        page::machine(&a.machine),
        a.date,
        page::machine(&b.machine),
        b.date
    );
    for pair in &pairs {
        text.push_str(&table(pair));
    }
    screen.text(&text);
    Ok(exit::DONE)
}

/// What keeps two reports from being about the same thing. How fast a machine was is no such thing, nor is how often
/// it was measured.
fn differences(a: &Report, b: &Report) -> Vec<String> {
    let mut found = Vec::new();
    let mut differ = |what: &str, a: &str, b: &str| {
        if a != b {
            found.push(format!("{what} ({a:.24} and {b:.24})"));
        }
    };
    differ("model", &a.model.name, &b.model.name);
    differ("revision", &a.model.revision, &b.model.revision);
    differ("prompt", &a.asked.prompt_sha256, &b.asked.prompt_sha256);
    differ("reply", &a.asked.reply_sha256, &b.asked.reply_sha256);
    let text = |n: u32| n.to_string();
    differ("tokens", &text(a.asked.tokens), &text(b.asked.tokens));
    differ(
        "tokens not counted",
        &text(a.asked.skip),
        &text(b.asked.skip),
    );
    found
}

struct Pair<'a> {
    a: (&'a Arm, &'a Figures),
    b: (&'a Arm, &'a Figures),
}

/// Arms of one name; where each report has one arm, those.
fn pairs<'a>(a: &'a Report, b: &'a Report) -> Result<Vec<Pair<'a>>, CliError> {
    let measured = |report: &'a Report| -> Vec<(&'a Arm, &'a Figures)> {
        let arms = report.arms.iter();
        arms.filter_map(|arm| Some((arm, arm.figures.as_ref()?)))
            .collect()
    };
    let (of_a, of_b) = (measured(a), measured(b));
    if let ([a], [b]) = (&of_a[..], &of_b[..]) {
        return Ok(vec![Pair { a: *a, b: *b }]);
    }
    let pairs: Vec<Pair<'a>> = of_a
        .iter()
        .filter_map(|a| {
            let b = of_b.iter().find(|b| b.0.name == a.0.name)?;
            Some(Pair { a: *a, b: *b })
        })
        .collect();
    if pairs.is_empty() {
        let names = |arms: &[(&Arm, &Figures)]| {
            let names: Vec<String> = arms.iter().map(|arm| format!("`{}`", arm.0.name)).collect();
            names.join(", ")
        };
        return Err(CliError::Usage(
            format!(
                "no arm of the one is in the other: {} and {}",
                names(&of_a),
                names(&of_b)
            ),
            Some("measure both with arms of the same names".to_owned()),
        ));
    }
    Ok(pairs)
}

/// What is compared: a name, its spread, and its unit.
type Line = (&'static str, fn(&Figures) -> Spread, fn(f64) -> String);

const LINES: [Line; 10] = [
    ("a token", |f| f.seconds.all, seconds),
    ("arithmetic", |f| f.seconds.compute, seconds),
    ("waiting for the disk", |f| f.seconds.wait_disk, seconds),
    ("waiting for the link", |f| f.seconds.wait_hub, seconds),
    ("first token", |f| f.first_token, seconds),
    ("core from disk", |f| f.bytes.core_disk, page::size),
    (
        "experts from memory",
        |f| f.bytes.experts_memory,
        page::size,
    ),
    ("experts from disk", |f| f.bytes.experts_disk, page::size),
    ("experts from a peer", |f| f.bytes.experts_peer, page::size),
    ("experts from the hub", |f| f.bytes.experts_hub, page::size),
];

fn table(pair: &Pair<'_>) -> String {
    let (name_a, name_b) = (page::cell(&pair.a.0.name), page::cell(&pair.b.0.name));
    let mut text =
        format!("\n|  | A: {name_a} | B: {name_b} | B / A |\n| --- | --- | --- | --- |\n");
    for (name, of, unit) in LINES {
        let (a, b) = (of(pair.a.1), of(pair.b.1));
        if a.p90 == 0.0 && b.p90 == 0.0 {
            continue;
        }
        let ratio = ratio(a, b).map_or(String::new(), |ratio| format!("{ratio:.3}"));
        // Where the spreads touch, either may be the faster.
        let sure = if a.p90 < b.p10 || b.p90 < a.p10 {
            ""
        } else {
            " (spreads overlap)"
        };
        let (a, b) = (page::between(a, unit), page::between(b, unit));
        text.push_str(&format!("| {name} | {a} | {b} | {ratio}{sure} |\n"));
    }
    text
}

fn ratio(a: Spread, b: Spread) -> Option<f64> {
    (a.median > 0.0).then(|| b.median / a.median)
}

fn object(pair: &Pair<'_>) -> Value {
    let lines = LINES.iter().map(|(name, of, _)| {
        let (a, b) = (of(pair.a.1), of(pair.b.1));
        json!({"what": name, "a": a, "b": b, "ratio": ratio(a, b)})
    });
    json!({"a": pair.a.0.name, "b": pair.b.0.name, "lines": lines.collect::<Vec<_>>()})
}
