//! What flags take besides words and numbers, read from what was typed.

use super::Ram;
use super::Sequences;
use crate::store::Budget;
use crate::terms::Bytes;

pub(super) fn budget(text: &str) -> Result<Budget, String> {
    if text == "unlimited" {
        return Ok(Budget::Unlimited);
    }
    text.parse::<Bytes>()
        .map(|b| Budget::Limit(b.0))
        .map_err(|e| format!("{e}, or `unlimited`"))
}

pub(super) fn sequences(text: &str) -> Result<Sequences, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(Sequences::Auto),
        (_, Ok(n)) if n > 0 => Ok(Sequences::Some(n)),
        _ => Err("a number of sequences from 1 to 65535, or `auto`".to_owned()),
    }
}

/// A time such as `90s`, `10m` or `2h`.
pub(super) fn span(text: &str) -> Result<std::time::Duration, String> {
    let wrong = || format!("`{text}` is not a time such as 90s, 10m or 2h");
    let at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..at].parse().map_err(|_| wrong())?;
    let unit = match &text[at..] {
        "s" | "" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let seconds = number.checked_mul(unit).ok_or_else(wrong)?;
    Ok(std::time::Duration::from_secs(seconds))
}

pub(super) fn ram(text: &str) -> Result<Ram, String> {
    if text == "auto" {
        return Ok(Ram::Auto);
    }
    text.parse::<Bytes>()
        .map(|b| Ram::Size(b.0))
        .map_err(|e| format!("{e}, or `auto`"))
}

pub(super) fn rate(text: &str) -> Result<u64, String> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    match size.parse::<Bytes>() {
        Ok(Bytes(0)) => Err("a rate of zero would never finish".to_owned()),
        Ok(Bytes(rate)) => Ok(rate),
        Err(_) => Err(format!("`{text}` is not a rate such as 40MB/s")),
    }
}

/// What a browser sends as `Origin`: a scheme and an authority, nothing after it.
pub(super) fn origin(text: &str) -> Result<String, String> {
    let text = text.strip_suffix('/').unwrap_or(text);
    match text.split_once("://") {
        Some((_, authority)) if !authority.is_empty() && !authority.contains('/') => {
            Ok(text.to_ascii_lowercase())
        }
        _ => Err(format!(
            "`{text}` is not an origin such as http://localhost:3000"
        )),
    }
}

pub(super) fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(t) if (0.0..=100.0).contains(&t) => Ok(t),
        _ => Err("a temperature lies between 0 and 100".to_owned()),
    }
}

pub(super) fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a probability lies above 0 and up to 1".to_owned()),
    }
}

pub(super) fn layers(text: &str) -> Result<(u16, u16), String> {
    let wrong = || format!("`{text}` is not a range of layers such as 1-20");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first: u16 = first.trim().parse().map_err(|_| wrong())?;
    let last: u16 = last.trim().parse().map_err(|_| wrong())?;
    if first <= last {
        Ok((first, last))
    } else {
        Err(wrong())
    }
}
