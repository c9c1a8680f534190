//! A folder of reports in one table.

use std::path::PathBuf;
use std::sync::Arc;

use super::page;
use super::report::Report;
use super::seconds;
use crate::cli::args::bench::BenchTable;
use crate::cli::exit;
use crate::cli::exit::CliError;
use crate::cli::screen::Screen;
use crate::cli::screen::whole_bytes;
use crate::terms::Bytes;

const BEGIN: &str = "<!-- bench:begin -->";
const END: &str = "<!-- bench:end -->";
/// In the folder of reports, and none.
const SCHEMA: &str = "schema.json";

pub(super) fn command(args: &BenchTable, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let table = table(args)?;
    let Some(file) = &args.into else {
        screen.text(&table);
        return Ok(exit::DONE);
    };
    let failed = |source| CliError::File {
        path: file.display().to_string(),
        source,
    };
    let text = std::fs::read_to_string(file).map_err(failed)?;
    let cut = text.find(BEGIN).map(|at| at + BEGIN.len());
    let place = cut.and_then(|cut| Some((cut, cut + text[cut..].find(END)?)));
    let Some((from, to)) = place else {
        return Err(CliError::Usage(
            format!("{} has no place for the table", file.display()),
            Some(format!("put the lines {BEGIN} and {END} where it is to be")),
        ));
    };
    let text = format!("{}\n{table}{}", &text[..from], &text[to..]);
    std::fs::write(file, text).map_err(failed)?;
    Ok(exit::DONE)
}

/// One line an arm, sorted by model and then by what a token took.
fn table(args: &BenchTable) -> Result<String, CliError> {
    let folder = &args.folder;
    let failed = |source| CliError::File {
        path: folder.display().to_string(),
        source,
    };
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let json = path.extension().is_some_and(|ending| ending == "json");
        if json && !path.ends_with(SCHEMA) {
            files.push(path);
        }
    }
    files.sort();
    let mut lines: Vec<((String, f64), String)> = Vec::new();
    for file in files {
        let report = Report::read(&file)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        for arm in &report.arms {
            let Some(figures) = &arm.figures else {
                continue;
            };
            let sum = |parts: &[f64]| whole_bytes(parts.iter().sum()).to_string();
            let bytes = &figures.bytes;
            let memory = arm
                .memory
                .budget
                .map_or("no limit".to_owned(), |b| Bytes(b).to_string());
            let rate = |rate: Option<f64>| {
                rate.map_or(String::new(), |rate| format!("{}/s", whole_bytes(rate)))
            };
            let cells = [
                page::cell(&report.model.name),
                page::hardware(&report.machine),
                memory,
                rate(report.rates.disk),
                match arm.flags.as_str() {
                    "" => page::cell(&arm.name),
                    flags => format!("{}: `{}`", page::cell(&arm.name), page::cell(flags)),
                },
                page::between(figures.seconds.all, seconds),
                sum(&[bytes.core_disk.median, bytes.experts_disk.median]),
                sum(&[bytes.experts_hub.median, bytes.experts_peer.median]),
                seconds(figures.first_token.median),
                format!("[{}]({}/{name}.md)", report.date, folder.display()),
            ];
            let key = (report.model.name.clone(), figures.seconds.all.median);
            lines.push((key, format!("| {} |\n", cells.join(" | "))));
        }
    }
    lines.sort_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut table = "| model | machine | memory | disk | arm | seconds a token | from disk | from the hub | first token | report |\n\
        |---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    table.extend(lines.into_iter().map(|(_, line)| line));
    Ok(table)
}
