//! A reply on the wire, alive however long the arithmetic takes.
//!
//! A stream says something at least every heartbeat: a comment, which clients skip and people can
//! read. A whole reply does the same with white space before its JSON. Both come from a timer of the
//! serving threads, which the arithmetic does not share.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use bytes::Bytes;
use serde_json::Value;
use tokio::time::Instant;

use super::error::ApiError;
use super::generator::Generator;
use super::generator::Limit;
use super::generator::Now;
use super::queue::News;
use super::queue::Place;
use super::reply::Frame;
use super::reply::Shape;
use super::shelf::Record;

/// A whole reply that is done by then, or has failed, gets a status of its own; later it is too late
/// for anything but 200.
const PATIENCE: Duration = Duration::from_millis(800);

/// A request in line, and what will be said of it.
pub(super) struct Sending {
    pub(super) place: Place,
    pub(super) shape: Box<dyn Shape>,
    pub(super) generator: Arc<dyn Generator>,
    /// The longest silence.
    pub(super) heartbeat: Duration,
}

impl Sending {
    /// What is awaited, for people.
    fn awaited(&self) -> String {
        match self.place.before() {
            0 => describe(&self.generator.now(), &self.generator.limit()),
            1 => "waiting in line behind 1 request".to_owned(),
            n => format!("waiting in line behind {n} requests"),
        }
    }
}

pub(super) fn stopping() -> ApiError {
    ApiError::busy("server_stopping", "The server is stopping.", 60)
}

pub(super) fn lost() -> ApiError {
    ApiError::plain(
        axum::http::StatusCode::INTERNAL_SERVER_ERROR,
        "internal_error",
        "The generating thread is gone; restart the server.",
    )
}

/// What a generator is doing, in a line.
fn describe(now: &Now, limit: &Limit) -> String {
    use std::fmt::Write as _;
    if !now.busy {
        return "about to begin".to_owned();
    }
    if now.paused {
        let max = crate::terms::Bytes(limit.max_bytes.unwrap_or(limit.fetched_bytes));
        return format!(
            "paused: the limit of {max} fetched bytes is reached; the state is kept, {} of {} tokens of the prompt \
             read, {} generated; it goes on from there with a higher max_bytes, POST /limits",
            now.read, now.prompt, now.generated
        );
    }
    let mut line = if now.generated == 0 {
        format!("reading the prompt, {} of {} tokens", now.read, now.prompt)
    } else {
        format!("generating token {}", now.generated + 1)
    };
    let write = write!(
        line,
        ", layer {} of {}, {:.0} s; experts from memory {} disk {} peer {} hub {}, {} from the hub, {}/s",
        now.layer + 1,
        now.layers,
        now.elapsed,
        now.experts.memory,
        now.experts.disk,
        now.experts.peer,
        now.experts.hub,
        crate::terms::Bytes(now.bytes.hub),
        crate::terms::Bytes(now.bytes_per_s),
    );
    write.expect("a String takes all");
    if let Some(last) = now.last_token {
        write!(line, "; a token takes {last:.1} s").expect("a String takes all");
        let left = now.max_tokens.saturating_sub(now.generated);
        if let (Ok(left), true) = (u32::try_from(left), now.generated > 0) {
            let most = f64::from(left) * last;
            write!(line, ", at most {most:.0} s to go").expect("a String takes all");
        }
    }
    line
}

/// Server-sent events, from now on.
pub(super) fn stream(sending: Sending) -> Response {
    let first = Bytes::from(comment(&sending.awaited()));
    let state = StreamState {
        sending,
        said: Instant::now(),
        over: false,
    };
    let rest = futures_util::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok::<_, io::Error>(bytes), state))
    });
    // The first bytes do not wait for anything: whoever sits between must see life at once.
    let first = futures_util::stream::iter([Ok(first)]);
    event_stream(Body::from_stream(futures_util::StreamExt::chain(
        first, rest,
    )))
}

/// The same, of a response that is made in the background: what was said from this frame on, then
/// what is being said. Whoever leaves can come back.
pub(super) fn follow(
    record: Arc<Record>,
    from: usize,
    heartbeat: Duration,
    generator: Option<Arc<dyn Generator>>,
) -> Response {
    let watch = record.watch();
    let first = futures_util::stream::iter([Ok::<_, io::Error>(Bytes::from(comment(
        "in the background",
    )))]);
    let state = Some((record, watch, from, generator));
    let rest = futures_util::stream::unfold(state, move |state| async move {
        let (record, mut watch, from, generator) = state?;
        let grown = async {
            let grown = watch.wait_for(|(length, last)| *length > from || *last);
            grown.await.map(|grown| *grown)
        };
        let waited = tokio::time::timeout(heartbeat, grown).await;
        let (said, last) = match waited {
            Err(_) => {
                let at_work = generator.as_ref().map_or_else(
                    || "still at work".to_owned(),
                    |generator| describe(&generator.now(), &generator.limit()),
                );
                let text = Bytes::from(comment(&at_work));
                return Some((Ok(text), Some((record, watch, from, generator))));
            }
            // The record holds the other side, so this cannot be; if it were, nothing more comes.
            Ok(Err(_)) => (from, true),
            Ok(Ok(grown)) => grown,
        };
        // There may be more, which is not yet on the disk.
        let mut frames = record.frames(from);
        frames.truncate(said.saturating_sub(from));
        let next = from + frames.len();
        let state = (!last).then_some((record, watch, next, generator));
        Some((Ok(Bytes::from(events(&frames))), state))
    });
    event_stream(Body::from_stream(futures_util::StreamExt::chain(
        first, rest,
    )))
}

fn event_stream(body: Body) -> Response {
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
    put(header::CONTENT_TYPE, "text/event-stream; charset=utf-8");
    put(header::CACHE_CONTROL, "no-cache");
    // Proxies that collect replies would defeat the comments.
    put(header::HeaderName::from_static("x-accel-buffering"), "no");
    reply
}

struct StreamState {
    sending: Sending,
    said: Instant,
    over: bool,
}

impl StreamState {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        loop {
            let silence_ends = self.said + self.sending.heartbeat;
            let news = tokio::time::timeout_at(silence_ends, self.sending.place.next()).await;
            let text = match news {
                Err(_) => comment(&self.sending.awaited()),
                Ok(Some(News::Choice { choice, step })) => {
                    events(&self.sending.shape.take(choice, step))
                }
                Ok(Some(News::Done)) => self.end(None),
                Ok(Some(News::Failed(failure))) => self.end(Some(failure.into())),
                Ok(Some(News::Interrupted)) => self.end(Some(stopping())),
                Ok(None) => self.end(Some(lost())),
            };
            if !text.is_empty() {
                self.said = Instant::now();
                return Some(text.into());
            }
        }
    }

    /// A stream ends with its last words also after an error: clients wait for them.
    fn end(&mut self, error: Option<ApiError>) -> String {
        self.over = true;
        let shape = &mut self.sending.shape;
        let mut text = match error {
            Some(error) => events(&shape.fail(error.body())),
            None => events(&shape.end()),
        };
        if let Some(farewell) = shape.farewell() {
            text.push_str(&format!("data: {farewell}\n\n"));
        }
        text
    }
}

fn comment(text: &str) -> String {
    format!(": {text}\n\n")
}

fn events(frames: &[Frame]) -> String {
    let mut text = String::new();
    for frame in frames {
        if let Some(name) = &frame.event {
            text.push_str(&format!("event: {name}\n"));
        }
        // JSON holds no line break outside its strings, and inside they are escaped.
        text.push_str(&format!("data: {}\n\n", frame.data));
    }
    text
}

/// One JSON object: with its length when it is soon done, else in chunks, kept alive by white space.
pub(super) async fn whole(mut sending: Sending) -> Response {
    let patience = Instant::now() + PATIENCE;
    match tokio::time::timeout_at(patience, collect(&mut sending)).await {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(error)) => error.into_response(),
        Err(_) => {
            let body = futures_util::stream::unfold(Some(sending), |sending| async move {
                let mut sending = sending?;
                let beat = Instant::now() + sending.heartbeat;
                match tokio::time::timeout_at(beat, collect(&mut sending)).await {
                    Err(_) => Some((Ok(Bytes::from_static(b" ")), Some(sending))),
                    Ok(Ok(value)) => Some((Ok(value.to_string().into()), None)),
                    // The 200 is out. Cutting the connection before the last chunk is the only way
                    // left to say that this is no reply: nothing after it parses as one.
                    Ok(Err(_)) => Some((Err(io::Error::other("the generation failed")), None)),
                }
            });
            let first = futures_util::stream::iter([Ok(Bytes::from_static(b" "))]);
            let body = Body::from_stream(futures_util::StreamExt::chain(first, body));
            let json = HeaderValue::from_static("application/json");
            ([(header::CONTENT_TYPE, json)], body).into_response()
        }
    }
}

/// Takes news until the last. May be dropped between any two and called again.
async fn collect(sending: &mut Sending) -> Result<Value, ApiError> {
    loop {
        match sending.place.next().await {
            Some(News::Choice { choice, step }) => {
                sending.shape.take(choice, step);
            }
            Some(News::Done) => return Ok(sending.shape.whole()),
            Some(News::Failed(failure)) => return Err(failure.into()),
            Some(News::Interrupted) => return Err(stopping()),
            None => return Err(lost()),
        }
    }
}
