//! What reply headers say. Pure functions over text from strangers: each answers `None` rather
//! than guess, and none panics.

use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderMap;

use crate::terms::Digest;

/// A header's value as text, if it is there once or more and readable; the first one counts.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// A header that holds one whole number.
pub(super) fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    digits(text(headers, name)?)
}

/// Decimal digits alone: `str::parse` would also take a sign.
fn digits(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// `Content-Range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentRange {
    /// `bytes FIRST-LAST/TOTAL`, both ends included.
    Slice {
        first: u64,
        last: u64,
        total: Option<u64>,
    },
    /// `bytes */TOTAL`: what was asked for lies outside.
    Outside { total: u64 },
}

impl ContentRange {
    pub(super) fn parse(value: &str) -> Option<Self> {
        let (unit, rest) = value.trim().split_once(' ')?;
        if !unit.eq_ignore_ascii_case("bytes") {
            return None;
        }
        let (range, total) = rest.trim().split_once('/')?;
        if range == "*" {
            let total = digits(total)?;
            return Some(ContentRange::Outside { total });
        }
        let (first, last) = range.split_once('-')?;
        let (first, last) = (digits(first)?, digits(last)?);
        let total = match total {
            "*" => None,
            total => Some(digits(total)?),
        };
        let sane = first <= last && total.is_none_or(|t| last < t);
        sane.then_some(ContentRange::Slice { first, last, total })
    }
}

/// An entity tag without its quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ETag {
    pub(super) text: String,
    pub(super) weak: bool,
}

impl ETag {
    pub(super) fn parse(value: &str) -> Option<Self> {
        let value = value.trim();
        let (weak, rest) = match value.strip_prefix("W/") {
            Some(rest) => (true, rest),
            None => (false, value),
        };
        let text = rest.trim_matches('"');
        (!text.is_empty()).then(|| ETag {
            text: text.to_owned(),
            weak,
        })
    }

    /// The content's digest, where the tag is one: 64 hexadecimal digits.
    pub(super) fn sha256(&self) -> Option<Digest> {
        self.text.to_ascii_lowercase().parse().ok()
    }
}

/// One bucket of a `RateLimit` header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RateLimit {
    pub(super) bucket: String,
    pub(super) remaining: u64,
    /// Seconds until the window starts anew.
    pub(super) reset: u64,
}

/// `"resolvers";r=12;t=34`, buckets separated by commas. Buckets that cannot be read are skipped.
pub(super) fn rate_limits(value: &str) -> Vec<RateLimit> {
    value.split(',').filter_map(rate_limit).collect()
}

fn rate_limit(item: &str) -> Option<RateLimit> {
    let mut parts = item.split(';').map(str::trim);
    let bucket = parts.next()?.trim_matches('"').to_owned();
    let (mut remaining, mut reset) = (None, None);
    for part in parts {
        match part.split_once('=') {
            Some(("r", n)) => remaining = digits(n.trim()),
            Some(("t", n)) => reset = digits(n.trim()),
            _ => {}
        }
    }
    Some(RateLimit {
        bucket,
        remaining: remaining?,
        reset: reset?,
    })
}

/// `Retry-After`, as seconds or as a date; `now` in seconds since 1970 by the server's clock.
pub(super) fn retry_after(value: &str, now: u64) -> Option<Duration> {
    let value = value.trim();
    let seconds = digits(value).or_else(|| http_date(value).map(|at| at.saturating_sub(now)))?;
    Some(Duration::from_secs(seconds))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT` in seconds since 1970. The two older forms died with the
/// servers that sent them.
pub(super) fn http_date(value: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let words: Vec<&str> = value.split_ascii_whitespace().collect();
    let [_, day, month, year, clock, "GMT"] = words[..] else {
        return None;
    };
    let month = MONTHS.iter().position(|m| *m == month)? as u64 + 1;
    let (day, year) = (digits(day)?, digits(year)?);
    let mut clock = clock.split(':').map(digits);
    let (h, m, s) = (clock.next()??, clock.next()??, clock.next()??);
    let sane = (1970..10_000).contains(&year) && (1..=31).contains(&day);
    if !sane || h > 23 || m > 59 || s > 60 || clock.next().is_some() {
        return None;
    }
    Some(days_since_1970(year, month, day) * 86_400 + h * 3_600 + m * 60 + s)
}

/// Proleptic Gregorian calendar; March is made the first month, so that leap days come last.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1;
    days - 719_468
}

/// The target of `rel="next"` in a `Link` header, as written.
pub(super) fn link_next(value: &str) -> Option<&str> {
    // Addresses may hold commas and semicolons, so the brackets are found first.
    let mut rest = value;
    while let Some(open) = rest.find('<') {
        let close = open + rest[open..].find('>')?;
        let target = &rest[open + 1..close];
        let after = &rest[close + 1..];
        let params = &after[..after.find('<').unwrap_or(after.len())];
        let next = params.split([';', ',']).any(|p| {
            p.trim().split_once('=').is_some_and(|(key, value)| {
                let words = value.trim().trim_matches('"');
                key.trim().eq_ignore_ascii_case("rel")
                    && words
                        .split_ascii_whitespace()
                        .any(|w| w.eq_ignore_ascii_case("next"))
            })
        });
        if next {
            return Some(target);
        }
        rest = after;
    }
    None
}

/// When a signed address stops working, in seconds since 1970 by the server's clock.
pub(super) fn expiry(url: &Url) -> Option<u64> {
    let find = |name: &str| {
        url.query_pairs()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.into_owned())
    };
    if let Some(at) = find("Expires").as_deref().and_then(digits) {
        return Some(at);
    }
    let made = amz_date(&find("X-Amz-Date")?)?;
    let lasts = digits(&find("X-Amz-Expires")?)?;
    made.checked_add(lasts)
}

/// `20261201T034107Z` in seconds since 1970.
fn amz_date(value: &str) -> Option<u64> {
    if value.len() != 16 || !value.is_ascii() || &value[8..9] != "T" || &value[15..] != "Z" {
        return None;
    }
    let part = |from: usize, to: usize| digits(&value[from..to]);
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let (h, m, s) = (part(9, 11)?, part(11, 13)?, part(13, 15)?);
    let sane = year >= 1970 && (1..=12).contains(&month) && (1..=31).contains(&day);
    (sane && h < 24 && m < 60 && s < 61)
        .then(|| days_since_1970(year, month, day) * 86_400 + h * 3_600 + m * 60 + s)
}

/// Where a redirect leads.
///
/// # Errors
///
/// Names what is wrong: nothing there, not an address, another scheme, or from https to http.
pub(super) fn location(from: &Url, headers: &HeaderMap) -> Result<Url, &'static str> {
    let value = headers
        .get("location")
        .ok_or("a redirect without Location")?;
    let value = value
        .to_str()
        .map_err(|_| "a redirect to an address outside ASCII")?;
    if value.trim().is_empty() {
        return Err("a redirect to an empty Location");
    }
    let to = from
        .join(value.trim())
        .map_err(|_| "a redirect to something that is no address")?;
    match (from.scheme(), to.scheme()) {
        ("https", "http") => Err("a redirect from https down to http"),
        (_, "http" | "https") if to.host().is_some() => Ok(to),
        _ => Err("a redirect to something that is not http"),
    }
}

/// The first identifier a server's support could find a request by, for error texts.
pub(super) fn request_id(headers: &HeaderMap) -> Option<&str> {
    ["x-request-id", "x-amzn-trace-id", "x-amz-cf-id"]
        .iter()
        .find_map(|name| text(headers, name))
}

/// Whether the body comes as it is. Compressed bodies have other lengths than the ranges asked
/// for, so they are refused rather than unpacked.
pub(super) fn plain_encoding(headers: &HeaderMap) -> bool {
    text(headers, "content-encoding").is_none_or(|e| e.is_empty() || e == "identity")
}
