//! Header values and listings from strangers: seeded nonsense must never panic, and what is read
//! must hold what its type promises. Inputs are made from a corpus by random edits rather than
//! under a guide of coverage, so that stable Rust runs them with every change;
//! `DELTAFIN_FUZZ_SECONDS` gives each target that long instead of a moment, and
//! `DELTAFIN_FUZZ_SEED` another beginning.

use std::time::Duration;
use std::time::Instant;

use reqwest::Url;
use reqwest::header::HeaderMap;
use reqwest::header::HeaderValue;

use crate::hub::address::stays_inside;
use crate::hub::api::tree_page;
use crate::hub::headers::ContentRange;
use crate::hub::headers::ETag;
use crate::hub::headers::expiry;
use crate::hub::headers::http_date;
use crate::hub::headers::link_next;
use crate::hub::headers::location;
use crate::hub::headers::rate_limits;
use crate::hub::headers::retry_after;
use crate::hub::net::Chance;

const SEEDS: &[&str] = &[
    "bytes 0-9/10",
    "bytes */177",
    "\"resolvers\";r=0;t=7, \"api\";r=1;t=2",
    "Sun, 06 Nov 1994 08:49:37 GMT",
    "18446744073709551615",
    "<https://h/b?cursor=1>; rel=\"next\"",
    "W/\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"",
    "//host/path",
    "https://h/x?Expires=1700000000",
    "https://h/x?X-Amz-Date=20261201T034107Z&X-Amz-Expires=3600",
    "../../x",
    "\u{e4}\u{1f600}",
];

const LISTING: &str = r#"[{"type":"file","path":"a/b.safetensors","size":123,"oid":"0123456789abcdef0123456789abcdef01234567",
"lfs":{"oid":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":123,"pointerSize":1}},
{"type":"directory","path":"a"}]"#;

struct Fuzz(Chance);

impl Fuzz {
    fn below(&self, n: usize) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "small numbers"
        )]
        let n = (self.0.fraction() * n as f64) as usize;
        n
    }

    /// A few bytes of `text` replaced, removed, doubled or cut off.
    fn spoil(&self, text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..self.below(4) {
            let at = self.below(bytes.len().max(1)).min(bytes.len());
            match self.below(5) {
                0 if at < bytes.len() => {
                    bytes[at] = b"0129 ;,=-/<>\"*+\\.%:TZ{}[]\xff\0"[self.below(27)]
                }
                1 if at < bytes.len() => drop(bytes.remove(at)),
                2 => bytes.truncate(at),
                3 => bytes.insert(at, b"0129 ;,=-/<>\"*+\\.%:TZ{}[]\xff\0"[self.below(27)]),
                _ => {
                    let tail = bytes[at..].to_vec();
                    bytes.extend(tail);
                }
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs a target on spoiled texts of a corpus, for as long as the environment says.
fn target(name: &str, corpus: &[&str], mut check: impl FnMut(&str)) {
    let seed = number("DELTAFIN_FUZZ_SEED").unwrap_or(20_261_201);
    let fuzz = Fuzz(Chance::new(seed));
    let limit = number("DELTAFIN_FUZZ_SECONDS").map(Duration::from_secs);
    let (began, mut rounds) = (Instant::now(), 0_usize);
    let more = |rounds| match limit {
        Some(limit) => began.elapsed() < limit,
        None => rounds < 20_000,
    };
    while more(rounds) {
        // What an input was is told by the panic of the check itself.
        for text in corpus {
            check(&fuzz.spoil(text));
        }
        rounds += corpus.len();
    }
    eprintln!("{name}: seed {seed}, {rounds} inputs");
}

#[test]
fn fuzz_content_range_is_read_exactly_or_refused() {
    let corpus = [SEEDS, &["bytes 5-18446744073709551615/*", "bytes 0-0/1"]].concat();
    target("Content-Range", &corpus, |value| {
        if let Some(ContentRange::Slice { first, last, total }) = ContentRange::parse(value) {
            assert!(first <= last && total.is_none_or(|t| last < t), "{value:?}");
            // What is read means the same when it is written again.
            let total = total.map_or("*".to_owned(), |t| t.to_string());
            let again = format!("bytes {first}-{last}/{total}");
            assert_eq!(
                ContentRange::parse(&again),
                ContentRange::parse(value),
                "{value:?}"
            );
        }
    });
}

#[test]
fn fuzz_waits_and_tags_are_read_or_refused() {
    target("RateLimit, Retry-After, ETag, Date", SEEDS, |value| {
        for limit in rate_limits(value) {
            assert!(value.contains(limit.bucket.as_str()), "{value:?}");
        }
        if let Some(tag) = ETag::parse(value) {
            assert!(!tag.text.is_empty());
            tag.sha256();
        }
        http_date(value);
        retry_after(value, 1_700_000_000);
    });
}

#[test]
fn fuzz_links_name_what_stands_in_them() {
    target("Link", SEEDS, |value| {
        if let Some(next) = link_next(value) {
            assert!(value.contains(next), "{value:?}");
        }
    });
}

#[test]
fn fuzz_locations_never_leave_https() {
    let base: Url = "https://hub.example/a/b".parse().unwrap();
    target("Location", SEEDS, |value| {
        if let Ok(url) = value.parse() {
            expiry(&url);
        }
        if let Ok(header) = HeaderValue::from_bytes(value.as_bytes()) {
            let headers = HeaderMap::from_iter([(reqwest::header::LOCATION, header)]);
            if let Ok(to) = location(&base, &headers) {
                assert_eq!(to.scheme(), "https", "{value:?} left https");
            }
        }
    });
}

#[test]
fn fuzz_listings_never_lead_outside() {
    let mut read = 0;
    target("listings", &[LISTING], |text| {
        if let Ok(files) = tree_page(text.as_bytes()) {
            read += files.len();
            for (path, _) in files {
                assert!(stays_inside(&path), "{path:?}");
                assert!(!path.starts_with('/') && !path.split('/').any(|p| p == ".."));
            }
        }
    });
    assert!(
        read > 0,
        "nothing was ever read: the test would pass by refusing everything"
    );
    assert_eq!(tree_page(LISTING.as_bytes()).unwrap().len(), 1);
    assert!(tree_page(&[b'['; 100_000]).is_err(), "deep nesting");
}
