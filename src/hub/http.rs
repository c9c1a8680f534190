//! One HTTP source: what is asked of the hub itself, with its rules of redirects, credentials,
//! rate limits and errors. Ranges of bodies are the business of `transfer`.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use reqwest::Response;
use reqwest::StatusCode;
use reqwest::Url;
use tokio::time::timeout;

use super::HubError;
use super::Notice;
use super::PEER_HEADER;
use super::Token;
use super::address;
use super::clients::Ask;
use super::clients::Role;
use super::clients::chain;
use super::headers;
use super::net::Gate;
use super::net::Net;
use super::net::count;
use super::resolve::Resolutions;
use super::resolve::Tags;

/// Redirects followed in a row.
pub(super) const HOPS_MAX: usize = 20;
/// How much of an error's body is read for its message.
const MESSAGE_MAX: usize = 4 << 10;

/// A hub, a mirror, a neighbour or a file server.
pub(super) struct HttpSource {
    pub(super) base: Url,
    pub(super) name: Arc<str>,
    token: Option<Token>,
    /// Whether the token is this source's own, and therefore for no other host.
    own_token: bool,
    /// Holds back what is asked of the hub; transfers already resolved do not pass it.
    pub(super) gate: Gate,
    /// Holds back transfers, where the content's own server asked for a pause.
    pub(super) content: Gate,
    pub(super) resolutions: Resolutions,
    pub(super) tags: Tags,
    pub(super) peer: AtomicBool,
    warned: Mutex<HashSet<String>>,
}

impl HttpSource {
    pub(super) fn open(text: &str, general: Option<&Token>) -> Result<Self, HubError> {
        let (base, own) = address::base(text)?;
        let own_token = own.is_some();
        // In the clear, everybody between here and there could read it.
        let private = base.scheme() == "https" || address::loopback(&base);
        Ok(HttpSource {
            name: address::shown_url(&base).into(),
            token: own.or_else(|| general.filter(|_| private).cloned()),
            own_token,
            base,
            gate: Gate::default(),
            content: Gate::default(),
            resolutions: Resolutions::default(),
            tags: Tags::default(),
            peer: AtomicBool::new(false),
            warned: Mutex::default(),
        })
    }

    pub(super) fn same_origin(&self, url: &Url) -> bool {
        url.origin() == self.base.origin()
    }

    /// Whether `url` is the hub itself, so that a redirect there is the hub's own business.
    pub(super) fn hub_origin(&self, url: &Url) -> bool {
        self.same_origin(url) || address::hugging_face(url)
    }

    /// The token, for the hosts that may see it.
    pub(super) fn token_for(&self, url: &Url) -> Option<&Token> {
        let may = self.same_origin(url) || (!self.own_token && address::hugging_face(url));
        self.token.as_ref().filter(|_| may)
    }

    pub(super) fn anonymous(&self) -> bool {
        self.token.is_none()
    }

    /// One request to the hub, made again while that may help. Any 2xx or 3xx comes back, and
    /// the status that the question spares.
    pub(super) async fn ask(
        &self,
        net: &Net,
        question: Question<'_>,
    ) -> Result<Response, HubError> {
        let Question {
            url,
            head,
            spare,
            patience,
        } = question;
        let mut last = String::new();
        let attempts = net.timing.attempts.max(1);
        for attempt in 1..=attempts {
            let pause = self.gate.remaining(net.clock.as_ref());
            if patience.is_some_and(|patience| pause > patience) {
                let why = format!("it asked for a pause of {} s", pause.as_secs());
                return Err(unreachable(url, attempt, why));
            }
            self.gate.pass(net).await;
            self.count_request(net, url);
            let ask = Ask {
                role: if self.hub_origin(url) {
                    Role::Hub
                } else {
                    Role::Content
                },
                url,
                head,
                token: self.token_for(url),
                range: None,
            };
            let paused = match net.clients.send(ask, &net.timing).await {
                Ok(response) => {
                    self.note(net, &response);
                    let status = response.status();
                    if status.is_success() || status.is_redirection() || Some(status) == spare {
                        return Ok(response);
                    }
                    if !worth_repeating(status) {
                        return Err(self.refusal(net, response).await);
                    }
                    last = status_line(&response);
                    self.pause(net, &response)
                }
                Err(error) => {
                    last = error.why;
                    if error.hopeless {
                        return Err(unreachable(url, attempt, last));
                    }
                    false
                }
            };
            if attempt < attempts {
                count(&net.counters.retries);
                if !paused {
                    net.back_off(attempt).await;
                }
            }
        }
        Err(unreachable(url, attempts, last))
    }

    fn count_request(&self, net: &Net, url: &Url) {
        if url.path().contains("/resolve/") || url.path().contains("/resolve-cache/") {
            count(&net.counters.resolves);
        } else if url.path().contains("/api/") {
            count(&net.counters.api);
        }
    }

    /// Reads what a reply says besides its body.
    pub(super) fn note(&self, net: &Net, response: &Response) {
        let headers = response.headers();
        if let Some(date) = headers::text(headers, "date").and_then(headers::http_date) {
            let ahead = i128::from(date) - i128::from(net.clock.unix_seconds());
            let mut clock = net
                .counters
                .clock
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *clock = i64::try_from(ahead).ok();
        }
        if headers.contains_key(PEER_HEADER) {
            self.peer.store(true, Relaxed);
        }
        if let Some(warning) = headers::text(headers, "x-hf-warning") {
            let topic = warning.split(';').next().unwrap_or_default().to_owned();
            let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.len() < 100 && warned.insert(topic) {
                net.notice(&Notice::Warning {
                    host: self.name.to_string(),
                    message: warning.chars().take(300).collect(),
                });
            }
        }
        // The last request of a window: the next one would be refused.
        let refused = response.status() == StatusCode::TOO_MANY_REQUESTS;
        if let Some(wait) = self.spent(response).filter(|_| !refused) {
            self.close(net, wait);
        }
    }

    /// How long until the bucket this request drew on fills again, if it is empty.
    fn spent(&self, response: &Response) -> Option<Duration> {
        let value = headers::text(response.headers(), "ratelimit")?;
        let empty = headers::rate_limits(value)
            .into_iter()
            .filter(|l| l.remaining == 0);
        let longest = empty.map(|l| l.reset).max()?;
        Some(Duration::from_secs(longest.saturating_add(1)))
    }

    /// How long a refusal asks to wait: until an empty bucket fills again, else `Retry-After`, whose
    /// date is held against the server's own, since this machine's clock may be hours off.
    fn asked_pause(&self, net: &Net, response: &Response) -> Option<Duration> {
        let asked = || {
            let headers = response.headers();
            let now = headers::text(headers, "date")
                .and_then(headers::http_date)
                .unwrap_or_else(|| net.clock.unix_seconds());
            let wait = headers::retry_after(headers::text(headers, "retry-after")?, now)?;
            Some(wait.saturating_add(Duration::from_secs(1)))
        };
        self.spent(response).or_else(asked)
    }

    /// Holds back every request to this hub if the reply asks for it. Otherwise the caller backs off
    /// by itself.
    fn pause(&self, net: &Net, response: &Response) -> bool {
        let wait = self.asked_pause(net, response);
        if let Some(wait) = wait {
            self.close(net, wait);
        }
        wait.is_some()
    }

    /// The same for transfers, on every lane: one lane that waits while the others go on asking is
    /// refused for as long as they do.
    pub(super) fn pause_content(&self, net: &Net, response: &Response) -> bool {
        let wait = self.asked_pause(net, response);
        if let Some(wait) = wait {
            let wait = wait.min(net.timing.pause_max);
            if self.content.close(net.clock.as_ref(), wait) {
                let url = response.url();
                net.notice(&Notice::RateLimited {
                    host: url.origin().ascii_serialization(),
                    seconds: wait.as_secs(),
                    // No token is sent there, so none would help.
                    anonymous: false,
                });
            }
        }
        wait.is_some()
    }

    fn close(&self, net: &Net, wait: Duration) {
        let wait = wait.min(net.timing.pause_max);
        if self.gate.close(net.clock.as_ref(), wait) {
            net.notice(&Notice::RateLimited {
                host: self.name.to_string(),
                seconds: wait.as_secs(),
                anonymous: self.anonymous(),
            });
        }
    }

    /// How long transfers or questions are held back, whichever is longer.
    pub(super) fn held_back(&self, net: &Net) -> Duration {
        let clock = net.clock.as_ref();
        self.gate
            .remaining(clock)
            .max(self.content.remaining(clock))
    }

    /// What a final refusal means to the caller.
    pub(super) async fn refusal(&self, net: &Net, response: Response) -> HubError {
        let status = response.status();
        let url = address::shown_url(response.url());
        let code = headers::text(response.headers(), "x-error-code")
            .unwrap_or("")
            .to_owned();
        let message = self.message(net, response).await;
        match status.as_u16() {
            401 | 403 => {
                let token = self.token.as_ref().map_or_else(
                    || "no token was sent".to_owned(),
                    |t| format!("sent the token from {}", t.origin()),
                );
                let hidden = if status == 401 && code != "GatedRepo" {
                    "; the repository may be private, or not exist"
                } else {
                    ""
                };
                HubError::Denied {
                    url,
                    status: status.as_u16(),
                    message: format!("{message}{hidden} ({token})"),
                }
            }
            404 => HubError::NotFound {
                what: match code.as_str() {
                    "RevisionNotFound" => "this revision (it may be gone from the hub)".to_owned(),
                    "RepoNotFound" => "this repository".to_owned(),
                    "EntryNotFound" => "this file".to_owned(),
                    _ => message,
                },
                place: url,
            },
            status => HubError::Refused {
                url,
                status,
                message,
            },
        }
    }

    /// The server's own words, cut short: its header first, else the start of its body.
    pub(super) async fn message(&self, net: &Net, response: Response) -> String {
        let line = status_line(&response);
        let said = headers::text(response.headers(), "x-error-message").map(str::to_owned);
        let said = match said {
            Some(said) => said,
            None => {
                let body = body_start(net, response).await;
                String::from_utf8_lossy(&body).into_owned()
            }
        };
        let clean: String = said
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(300)
            .collect();
        let clean = without_queries(clean.trim());
        if clean.is_empty() {
            line
        } else {
            format!("{line}: {clean}")
        }
    }
}

/// What is asked of a hub.
#[derive(Clone, Copy)]
pub(super) struct Question<'a> {
    pub(super) url: &'a Url,
    pub(super) head: bool,
    /// A refusal that is an answer.
    pub(super) spare: Option<StatusCode>,
    /// Longest pause to wait for; `None` for any.
    pub(super) patience: Option<Duration>,
}

impl<'a> Question<'a> {
    pub(super) fn get(url: &'a Url) -> Self {
        Question {
            url,
            head: false,
            spare: None,
            patience: None,
        }
    }
}

/// Whether the same request may succeed a little later.
pub(super) fn worth_repeating(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

pub(super) fn unreachable(url: &Url, attempts: u32, last: String) -> HubError {
    HubError::Unreachable {
        url: address::shown_url(url),
        attempts,
        last,
    }
}

/// `503 Service Unavailable (request 01J…)`.
pub(super) fn status_line(response: &Response) -> String {
    match headers::request_id(response.headers()) {
        Some(id) => {
            let id: String = id.chars().take(80).collect();
            format!("{} (request {id})", response.status())
        }
        None => response.status().to_string(),
    }
}

/// An error page may repeat the signed address it was asked for.
fn without_queries(text: &str) -> String {
    let secret = ["Signature=", "Policy=", "X-Amz-", "Key-Pair-Id="];
    text.split_ascii_whitespace()
        .map(|word| match word.find('?') {
            Some(at) if secret.iter().any(|s| word[at..].contains(s)) => &word[..at],
            _ if secret.iter().any(|s| word.contains(s)) => "…",
            _ => word,
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The first few kilobytes of a body; its connection is dropped with the rest.
async fn body_start(net: &Net, mut response: Response) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < MESSAGE_MAX {
        match timeout(net.timing.idle, response.chunk()).await {
            Ok(Ok(Some(chunk))) => body.extend_from_slice(&chunk),
            _ => break,
        }
    }
    body.truncate(MESSAGE_MAX);
    body
}

/// A whole body of at most `limit` bytes. Nothing is allocated by the length a server declares.
///
/// # Errors
///
/// Outer: the limit of fetched bytes. Inner: why the body is not whole.
pub(super) async fn small_body(
    net: &Net,
    mut response: Response,
    limit: u64,
) -> Result<Result<Vec<u8>, String>, HubError> {
    if !headers::plain_encoding(response.headers()) {
        return Ok(Err("a compressed body, though none was allowed".to_owned()));
    }
    let reservation = net.budget.reserve(0)?;
    let mut body = Vec::new();
    loop {
        let chunk = match timeout(net.timing.idle, response.chunk()).await {
            Ok(Ok(Some(chunk))) => chunk,
            Ok(Ok(None)) => return Ok(Ok(body)),
            Ok(Err(error)) => return Ok(Err(chain(error))),
            Err(_) => return Ok(Err("the body stopped half way".to_owned())),
        };
        net.counters
            .meta_bytes
            .fetch_add(chunk.len() as u64, Relaxed);
        reservation.took(chunk.len() as u64).await?;
        if (body.len() + chunk.len()) as u64 > limit {
            return Ok(Err(format!("more than {limit} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
}
