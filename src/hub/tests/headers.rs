//! What header values mean.

use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderMap;
use reqwest::header::HeaderValue;

use crate::hub::address;
use crate::hub::headers::ContentRange;
use crate::hub::headers::ETag;
use crate::hub::headers::expiry;
use crate::hub::headers::http_date;
use crate::hub::headers::link_next;
use crate::hub::headers::location;
use crate::hub::headers::rate_limits;
use crate::hub::headers::retry_after;

fn url(text: &str) -> Url {
    text.parse().unwrap()
}

fn slice(first: u64, last: u64, total: Option<u64>) -> Option<ContentRange> {
    Some(ContentRange::Slice { first, last, total })
}

#[test]
fn a_content_range_is_read_exactly_or_not_at_all() {
    let parse = ContentRange::parse;
    assert_eq!(parse("bytes 0-9/10"), slice(0, 9, Some(10)));
    assert_eq!(parse("Bytes 5-5/*"), slice(5, 5, None));
    assert_eq!(
        parse("bytes */177"),
        Some(ContentRange::Outside { total: 177 })
    );
    for wrong in [
        "",
        "bytes",
        "bytes 0-9",
        "bytes 9-0/10",
        "bytes 0-10/10",
        "bytes -9/10",
        "bytes 0-/10",
        "bytes 0-9/",
        "bytes +0-9/10",
        "bytes 0-9/-1",
        "items 0-9/10",
        "bytes */*",
        "bytes */",
        "bytes 0-99999999999999999999/*",
        "bytes 0 - 9/10",
        "0-9/10",
    ] {
        assert_eq!(parse(wrong), None, "{wrong:?}");
    }
}

#[test]
fn a_tag_is_a_digest_only_if_it_looks_like_one() {
    let digest = "a".repeat(64);
    let tag = ETag::parse(&format!("W/\"{digest}\"")).unwrap();
    assert!(tag.weak && tag.sha256().is_some());
    assert!(ETag::parse("\"abc\"").unwrap().sha256().is_none());
    assert!(
        ETag::parse(&format!("\"{}\"", "A".repeat(64)))
            .unwrap()
            .sha256()
            .is_some()
    );
    assert_eq!(ETag::parse("\"\""), None);
}

#[test]
fn dates_are_read_as_seconds() {
    assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
    assert_eq!(
        http_date("Sun, 06 Nov 1994 08:49:37 GMT"),
        Some(784_111_777)
    );
    assert_eq!(
        http_date("Thu, 29 Feb 2024 12:00:00 GMT"),
        Some(1_709_208_000)
    );
    for wrong in [
        "",
        "Sun, 06 Nov 1994 08:49:37",
        "Sun, 06 Nov 1994 24:00:00 GMT",
        "Sun, 00 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nix 1994 08:49:37 GMT",
        "Sun, 06 Nov 0000 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49 GMT",
        "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
    ] {
        assert_eq!(http_date(wrong), None, "{wrong:?}");
    }
}

#[test]
fn waits_are_read_as_seconds_or_dates() {
    assert_eq!(retry_after(" 42 ", 0), Some(Duration::from_secs(42)));
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    assert_eq!(
        retry_after(date, 784_111_700),
        Some(Duration::from_secs(77))
    );
    assert_eq!(retry_after(date, 784_111_800), Some(Duration::ZERO));
    assert_eq!(retry_after("soon", 0), None);
    assert_eq!(retry_after("-1", 0), None);
}

#[test]
fn rate_limits_are_read_bucket_by_bucket() {
    let limits = rate_limits("\"api\";r=3;t=200, nonsense, \"resolvers\"; r=0 ;t=7");
    let read: Vec<_> = limits
        .iter()
        .map(|l| (l.bucket.as_str(), l.remaining, l.reset))
        .collect();
    assert_eq!(read, [("api", 3, 200), ("resolvers", 0, 7)]);
    assert!(rate_limits("\"api\";r=3").is_empty());
}

#[test]
fn the_next_page_is_found_among_links() {
    let both = "<https://h/a?x=1,2;3>; rel=\"prev\", <https://h/b?cursor=a%3D%2C>; rel=\"next\"";
    assert_eq!(link_next(both), Some("https://h/b?cursor=a%3D%2C"));
    assert_eq!(link_next("<u>; title=\"x\"; rel=next"), Some("u"));
    assert_eq!(link_next("<u>; rel=\"last next\""), Some("u"));
    assert_eq!(link_next("<u>; rel=\"xet-auth\""), None);
    assert_eq!(link_next("<u; rel=next"), None);
}

#[test]
fn signatures_say_when_they_expire() {
    assert_eq!(
        expiry(&url("https://c/x?Expires=1700000000&Signature=s")),
        Some(1_700_000_000)
    );
    let amazon = "https://c/x?X-Amz-Date=20261201T034107Z&X-Amz-Expires=3600";
    assert_eq!(expiry(&url(amazon)), Some(1_796_096_467 + 3_600));
    assert_eq!(expiry(&url("https://c/x")), None);
    assert_eq!(expiry(&url("https://c/x?Expires=never")), None);
}

#[test]
fn redirects_lead_nowhere_they_should_not() {
    let to = |from: &str, to: &[u8]| {
        let mut headers = HeaderMap::new();
        headers.insert("location", HeaderValue::from_bytes(to).unwrap());
        location(&url(from), &headers)
    };
    assert_eq!(
        to("https://h/a/b", b"/c?d").unwrap().as_str(),
        "https://h/c?d"
    );
    assert_eq!(
        to("https://h/a", b"//other/c").unwrap().as_str(),
        "https://other/c"
    );
    assert!(to("http://h/a", b"https://h/a").is_ok());
    for wrong in [
        &b"http://h/a"[..],
        b"file:///x",
        b"data:,x",
        b"",
        b"https://",
        b"/\xe4",
    ] {
        assert!(to("https://h/a", wrong).is_err(), "{wrong:?}");
    }
    assert!(location(&url("https://h/"), &HeaderMap::new()).is_err());
}

#[test]
fn addresses_are_shown_without_secrets() {
    let secret = "https://user:word@h/p/q?Signature=abc#frag";
    assert_eq!(address::shown(secret), "https://h/p/q");
    assert_eq!(
        address::shown("http://user:word@bad host/?Signature=abc"),
        "http://bad host/"
    );
    assert_eq!(address::segment("refs/pr/4"), "refs%2Fpr%2F4");
    assert_eq!(address::path("a b/ä"), "a%20b/%C3%A4");
    assert!(
        address::loopback(&url("http://[::1]:1/")) && address::loopback(&url("http://127.9.9.9/"))
    );
    assert!(!address::loopback(&url("http://127.example.org/")));
}
