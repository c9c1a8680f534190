//! Addresses: how they are built, and how they are shown without their secrets.

use std::fmt::Write as _;

use reqwest::Url;

use super::HubError;
use super::Token;

/// An address fit for eyes and logs: no user name, no query, no fragment.
pub(super) fn shown(url: &str) -> String {
    match Url::parse(url) {
        Ok(url) => shown_url(&url),
        // What cannot be parsed may hold a secret anywhere after the scheme.
        Err(_) => {
            let end = url.find(['?', '#']).unwrap_or(url.len());
            let rest = &url[..end];
            match (rest.find("://"), rest.rfind('@')) {
                (Some(scheme), Some(at)) if at > scheme => {
                    format!("{}{}", &rest[..scheme + 3], &rest[at + 1..])
                }
                _ => rest.to_owned(),
            }
        }
    }
}

/// [`shown`] for an address already parsed.
pub(super) fn shown_url(url: &Url) -> String {
    let mut clean = url.clone();
    clean.set_query(None);
    clean.set_fragment(None);
    let _ = clean.set_username("");
    let _ = clean.set_password(None);
    let text = clean.to_string();
    text.trim_end_matches('/').to_owned()
}

/// A source's base address, and the secret that stood in it (`http://:SECRET@nas:8090`).
pub(super) fn base(address: &str) -> Result<(Url, Option<Token>), HubError> {
    let wrong = |why: &str| HubError::Address {
        address: shown(address),
        why: why.to_owned(),
    };
    let mut url = Url::parse(address.trim()).map_err(|e| wrong(&e.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err(wrong("only http and https addresses are read"));
    }
    let secret = url.password().or(Some(url.username()));
    let token = secret.and_then(|s| Token::new(s, "the address of the source"));
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    url.set_fragment(None);
    let path = url.path().trim_end_matches('/').to_owned();
    url.set_path(&path);
    Ok((url, token))
}

/// `base` with more path. Every segment of `tail` must be encoded already.
pub(super) fn under(base: &Url, tail: &str) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/{tail}", base.path().trim_end_matches('/')));
    url
}

/// One path segment: all but the unreserved characters is percent-encoded, `/` included.
pub(super) fn segment(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, b| {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(b));
            }
            _ => {
                let _ = write!(out, "%{b:02X}");
            }
        }
        out
    })
}

/// A path inside a repository, encoded segment by segment.
pub(super) fn path(text: &str) -> String {
    text.split('/').map(segment).collect::<Vec<_>>().join("/")
}

/// Whether a path from a listing stays inside its repository. Anything else is an attack or a
/// damaged listing, and is never joined to a folder or an address.
pub(super) fn stays_inside(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= 4_096
        && !path.contains(['\\', '\0'])
        && path
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Whether the address is this machine's own: no proxy stands between, and nobody listens in.
pub(super) fn loopback(url: &Url) -> bool {
    url.host_str().is_some_and(|host| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost"
            || host
                .parse::<std::net::IpAddr>()
                .is_ok_and(|ip| ip.is_loopback())
    })
}

/// Hosts that are the hub itself, so that a mirror's redirect to them is followed with the hub's
/// own credentials.
pub(super) fn hugging_face(url: &Url) -> bool {
    url.scheme() == "https"
        && url.port().is_none()
        && matches!(url.host_str(), Some("huggingface.co" | "hf.co"))
}
