//! Addresses: how they are built, and how they are shown without their secrets.

use reqwest::Url;

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
