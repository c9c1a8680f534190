//! The hub's API: which commit, which files, and small files whole.

use std::collections::BTreeMap;
use std::collections::HashSet;

use bytes::Bytes;
use reqwest::Url;
use serde::Deserialize;
use sha1::Digest as _;
use sha1::Sha1;
use sha2::Sha256;

use super::FileFacts;
use super::HubError;
use super::Snapshot;
use super::address;
use super::headers;
use super::http::HttpSource;
use super::http::Question;
use super::http::small_body;
use super::net::Net;
use super::net::count;
use super::resolve::broken;
use crate::terms::Digest;
use crate::terms::RepoId;
use crate::terms::Revision;

/// Longest reply of the API that is read, and most pages of one listing.
const REPLY_MAX: u64 = 64 << 20;
const PAGES_MAX: usize = 1_000;
/// Most files one repository may list.
const FILES_MAX: usize = 1_000_000;
/// How often a small file that came damaged is asked for again.
const SMALL_ATTEMPTS: u32 = 3;

impl HttpSource {
    /// The commit a revision stands for: one request, or none if it is a commit already.
    pub(super) async fn commit(
        &self,
        net: &Net,
        repo: &RepoId,
        revision: &str,
    ) -> Result<Revision, HubError> {
        #[derive(Deserialize)]
        struct Info {
            sha: Revision,
        }
        if let Ok(commit) = revision.parse() {
            return Ok(commit);
        }
        let tail = format!("api/models/{repo}/revision/{}", address::segment(revision));
        let url = address::under(&self.base, &tail);
        let (text, _) = self.api(net, url.clone()).await?;
        let info: Info = serde_json::from_slice(&text).map_err(|e| HubError::NotAHub {
            url: address::shown_url(&url),
            why: format!("its answer names no commit ({e})"),
        })?;
        Ok(info.sha)
    }

    /// Every file of a commit, page by page.
    pub(super) async fn list(
        &self,
        net: &Net,
        repo: &RepoId,
        commit: &Revision,
    ) -> Result<Snapshot, HubError> {
        let tail = format!("api/models/{repo}/tree/{commit}");
        let mut url = address::under(&self.base, &tail);
        url.set_query(Some("recursive=true&expand=false"));
        let place = address::shown_url(&url);
        let mut files = BTreeMap::new();
        let mut seen = HashSet::new();
        loop {
            if !seen.insert(url.to_string()) || seen.len() > PAGES_MAX {
                return Err(damaged(&place, "its pages go round in circles".to_owned()));
            }
            let (text, next) = self.api(net, url.clone()).await?;
            for (path, facts) in tree_page(&text).map_err(|why| damaged(&place, why))? {
                files.insert(path, facts);
            }
            if files.len() > FILES_MAX {
                return Err(damaged(
                    &place,
                    "it names more than a million files".to_owned(),
                ));
            }
            match next {
                Some(next) => url = next,
                None => break,
            }
        }
        Ok(Snapshot {
            repo: repo.clone(),
            commit: commit.clone(),
            files,
        })
    }

    /// One page of the API and the address of the next.
    async fn api(&self, net: &Net, mut url: Url) -> Result<(Vec<u8>, Option<Url>), HubError> {
        let asked = url.clone();
        for _ in 0..super::http::HOPS_MAX {
            let response = self.ask(net, Question::get(&url)).await?;
            if response.status().is_redirection() {
                url = headers::location(&url, response.headers())
                    .map_err(|why| broken(&asked, why))?;
                continue;
            }
            let next = headers::text(response.headers(), "link")
                .and_then(headers::link_next)
                .map(|next| self.next_page(&url, next))
                .transpose()?;
            return match small_body(net, response, REPLY_MAX).await? {
                Ok(text) => Ok((text, next)),
                Err(why) => Err(damaged(&address::shown_url(&asked), why)),
            };
        }
        Err(broken(&asked, "more than 20 redirects in a row"))
    }

    fn next_page(&self, from: &Url, next: &str) -> Result<Url, HubError> {
        let mut to = from
            .join(next)
            .map_err(|_| broken(from, "the next page's address cannot be read"))?;
        if to.scheme() == "http" && from.scheme() == "https" {
            return Err(broken(from, "the next page leads from https down to http"));
        }
        // A mirror passes the hub's own address on; the mirror was asked, so it is asked again.
        if address::hugging_face(&to) && !address::hugging_face(&self.base) {
            let mut own = address::under(&self.base, to.path().trim_start_matches('/'));
            own.set_query(to.query());
            to = own;
        }
        Ok(to)
    }

    /// A small file, whole and checked.
    pub(super) async fn get(
        &self,
        net: &Net,
        snapshot: &Snapshot,
        path: &str,
        facts: &FileFacts,
    ) -> Result<Bytes, HubError> {
        let url = self.resolve_url(snapshot, path);
        let mut last = String::new();
        for attempt in 1..=SMALL_ATTEMPTS {
            if attempt > 1 {
                count(&net.counters.retries);
                net.back_off(attempt - 1).await;
            }
            let response = self.get_once(net, snapshot, path).await?;
            // One byte more than there should be is enough to see that it is too long.
            match small_body(net, response, facts.size.saturating_add(1)).await? {
                Ok(body) => match check_whole(&body, facts) {
                    Ok(()) => return Ok(body.into()),
                    Err(why) => last = why,
                },
                Err(why) => last = why,
            }
        }
        Err(HubError::Damaged {
            what: path.to_owned(),
            place: address::shown_url(&url),
            why: last,
        })
    }
}

fn damaged(place: &str, why: String) -> HubError {
    HubError::Damaged {
        what: "the listing".to_owned(),
        place: place.to_owned(),
        why,
    }
}

/// Whether a whole file is the one the listing means.
pub(super) fn check_whole(body: &[u8], facts: &FileFacts) -> Result<(), String> {
    if body.len() as u64 != facts.size {
        return Err(format!("{} bytes instead of {}", body.len(), facts.size));
    }
    if let Some(expected) = facts.sha256 {
        let actual = Digest(Sha256::digest(body).into());
        if actual != expected {
            return Err(format!("sha256 {actual} instead of {expected}"));
        }
    }
    if let Some(expected) = &facts.git_sha1 {
        let mut sum = Sha1::new();
        sum.update(format!("blob {}\0", body.len()));
        sum.update(body);
        let actual: String = sum.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if actual != *expected {
            return Err(format!("git object {actual} instead of {expected}"));
        }
    }
    Ok(())
}

/// The files of one page of a tree.
pub(super) fn tree_page(text: &[u8]) -> Result<Vec<(String, FileFacts)>, String> {
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "type")]
        kind: String,
        path: String,
        #[serde(default)]
        size: u64,
        oid: Option<String>,
        lfs: Option<Lfs>,
    }
    #[derive(Deserialize)]
    struct Lfs {
        oid: Digest,
        size: u64,
    }
    let entries: Vec<Entry> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let mut files = Vec::new();
    for entry in entries.into_iter().filter(|e| e.kind == "file") {
        if !address::stays_inside(&entry.path) {
            let path: String = entry.path.chars().take(100).collect();
            return Err(format!("it names the path {path:?}"));
        }
        let git = entry
            .oid
            .filter(|oid| entry.lfs.is_none() && oid.parse::<Revision>().is_ok());
        let facts = FileFacts {
            size: entry.lfs.as_ref().map_or(entry.size, |lfs| lfs.size),
            sha256: entry.lfs.map(|lfs| lfs.oid),
            git_sha1: git,
        };
        files.push((entry.path, facts));
    }
    Ok(files)
}
