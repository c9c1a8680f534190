//! A report for people, in Markdown.

use super::report::Arm;
use super::report::Figures;
use super::report::Machine;
use super::report::Report;
use super::report::Spread;
use super::seconds;
use crate::cli::screen::whole_bytes;
use crate::terms::Bytes;

/// The whole report.
pub(super) fn page(report: &Report) -> String {
    let asked = &report.asked;
    let mut page = format!(
        "## {} on {}\n\n",
        report.model.name,
        machine(&report.machine)
    );
    if let Some(note) = &report.note {
        page.push_str(&format!("{}\n\n", cell(note)));
    }
    let rate = |rate: Option<f64>| {
        rate.map_or("not measured".to_owned(), |rate| {
            format!("{}/s", whole_bytes(rate))
        })
    };
    let words = asked
        .prompt
        .as_deref()
        .map_or("ids".to_owned(), |words| format!("\"{}\"", cell(words)));
    for (what, value) in [
        (
            "model",
            format!(
                "{} at {:.10}: {} of core, {} experts of {}",
                report.model.name,
                report.model.revision,
                Bytes(report.model.core_bytes),
                report.model.experts,
                Bytes(report.model.expert_bytes)
            ),
        ),
        (
            "disk",
            format!(
                "{}, {}",
                report.machine.disk.as_deref().unwrap_or("unknown"),
                rate(report.rates.disk)
            ),
        ),
        ("link", rate(report.rates.link)),
        (
            "prompt",
            format!(
                "{words}, {} tokens; reply {} tokens, ids {:.12}",
                asked.prompt_tokens, asked.reply_tokens, asked.reply_sha256
            ),
        ),
        (
            "measured",
            format!(
                "{}, deltafin {}, {} rounds after {} not counted, the first {} tokens of each not counted{}",
                report.date,
                report.deltafin,
                asked.rounds,
                asked.warm_up,
                asked.skip + 1,
                if asked.page_cache_dropped {
                    ", page cache dropped"
                } else {
                    ""
                }
            ),
        ),
    ] {
        page.push_str(&format!("* {what}: {value}\n"));
    }
    page.push_str("\nMedians, and in brackets the tenth below and above.\n\n");
    page.push_str(&rows(&report.arms));
    for arm in &report.arms {
        if let Some(why) = &arm.rejected {
            page.push_str(&format!("\n**{} is rejected: {why}.**\n", cell(&arm.name)));
        }
    }
    page
}

/// The machine in one line.
pub(super) fn machine(machine: &Machine) -> String {
    format!("{}, {}", hardware(machine), cell(&machine.os))
}

/// What it is made of.
pub(super) fn hardware(machine: &Machine) -> String {
    let cpu = machine.cpu.as_deref().unwrap_or(&machine.arch);
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let ram = machine
        .ram
        .map_or(String::new(), |ram| format!(", {}", bytes(ram)));
    let limit = machine.ram_limit.map(bytes);
    let limit = limit.map_or(String::new(), |limit| format!(" (limited to {limit})"));
    let cores = match machine.cores {
        1 => "1 core".to_owned(),
        cores => format!("{cores} cores"),
    };
    cell(&format!("{cpu}, {cores}{ram}{limit}"))
}

/// The arms, one a column.
fn rows(arms: &[Arm]) -> String {
    let mut table = vec![
        row("", arms, |arm| cell(&arm.name)),
        row("---", arms, |_| "---".to_owned()),
        row("flags", arms, |arm| match arm.flags.as_str() {
            "" => "none".to_owned(),
            flags => format!("`{}`", cell(flags)),
        }),
        row("arithmetic", arms, |arm| {
            format!("{}, {} threads", arm.isa, arm.threads)
        }),
        row("memory", arms, |arm| {
            arm.memory
                .budget
                .map_or("no limit".to_owned(), |b| Bytes(b).to_string())
        }),
        row("core in memory", arms, |arm| match arm.memory.mapped {
            true => format!("{} (mapped)", Bytes(arm.memory.core)),
            false => Bytes(arm.memory.core).to_string(),
        }),
        row("experts in memory, at most", arms, |arm| {
            Bytes(arm.memory.experts).to_string()
        }),
        row("most resident", arms, |arm| {
            arm.memory
                .peak
                .map_or("unknown".to_owned(), |p| Bytes(p).to_string())
        }),
        row("disk for experts", arms, |arm| {
            arm.cache
                .map_or("no limit".to_owned(), |c| Bytes(c).to_string())
        }),
    ];
    type Of = fn(&Figures) -> Option<Spread>;
    let times: [(&str, Of); 5] = [
        ("**a token**", |f| Some(f.seconds.all)),
        ("arithmetic", |f| Some(f.seconds.compute)),
        ("waiting for the disk", |f| Some(f.seconds.wait_disk)),
        ("waiting for the link", |f| Some(f.seconds.wait_hub)),
        ("first token", |f| Some(f.first_token)),
    ];
    let bytes: [(&str, Of); 8] = [
        ("core from disk", |f| Some(f.bytes.core_disk)),
        ("experts from memory", |f| Some(f.bytes.experts_memory)),
        ("experts from disk", |f| Some(f.bytes.experts_disk)),
        ("experts from a peer", |f| Some(f.bytes.experts_peer)),
        ("experts from the hub", |f| Some(f.bytes.experts_hub)),
        ("read on a guess", |f| f.lookahead.map(|l| l.read)),
        ("and then asked for", |f| f.lookahead.map(|l| l.used)),
        ("read, says the system", |f| f.bytes.system_read),
    ];
    let spread = |name: &str, of: Of, unit: fn(f64) -> String| {
        row(name, arms, |arm| {
            let found = arm.figures.as_ref().and_then(of);
            found.map_or("".to_owned(), |spread| between(spread, unit))
        })
    };
    table.extend(times.map(|(name, of)| spread(name, of, seconds)));
    let some = |of: Of| {
        let figures = arms.iter().filter_map(|arm| arm.figures.as_ref());
        figures.filter_map(of).any(|spread| spread.p90 > 0.0)
    };
    let bytes = bytes.into_iter().filter(|(_, of)| some(*of));
    table.extend(bytes.map(|(name, of)| spread(name, of, size)));
    let recall = |arm: &Arm| Some(arm.figures.as_ref()?.lookahead?.recall);
    if arms.iter().any(|arm| recall(arm).is_some()) {
        table.push(row("guesses found, of what was asked for", arms, |arm| {
            recall(arm).map_or(String::new(), |recall| format!("{:.0} %", 100.0 * recall))
        }));
    }
    table.concat()
}

fn row(name: &str, arms: &[Arm], value: impl Fn(&Arm) -> String) -> String {
    let values: Vec<String> = arms.iter().map(value).collect();
    format!("| {name} | {} |\n", values.join(" | "))
}

pub(super) fn size(bytes: f64) -> String {
    whole_bytes(bytes).to_string()
}

/// A spread in words of `unit`.
pub(super) fn between(spread: Spread, unit: fn(f64) -> String) -> String {
    if spread.p10 == spread.p90 {
        return unit(spread.median);
    }
    format!(
        "{} ({} to {})",
        unit(spread.median),
        unit(spread.p10),
        unit(spread.p90)
    )
}

/// Text of somebody else's, made fit for a cell of a table.
pub(super) fn cell(text: &str) -> String {
    let mut clean = String::new();
    for c in text.chars() {
        match c {
            '|' | '<' | '>' | '`' | '[' | ']' | '\\' => clean.extend(['\\', c]),
            c if c.is_control() => clean.push(' '),
            c => clean.push(c),
        }
    }
    clean
}
