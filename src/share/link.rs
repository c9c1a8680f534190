//! A slow link, imitated: one pace for all connections together, and a round trip's delay.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::Instant;

use crate::terms::Malformed;

/// How slow a link is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// What it carries, over all connections; `None` for as fast as it goes.
    pub bytes_per_s: Option<f64>,
    /// From a request to the first byte of its reply.
    pub delay: Duration,
}

impl FromStr for Link {
    type Err = Malformed;

    /// Reads `50mbit,30ms`, `1.5gbit`, `200kbit,1s` or `10ms`.
    fn from_str(text: &str) -> Result<Link, Malformed> {
        let wrong = || Malformed {
            text: text.to_owned(),
            expected: "a link such as 50mbit,30ms",
        };
        let mut link = Link {
            bytes_per_s: None,
            delay: Duration::ZERO,
        };
        let mut delay = None;
        for part in text.split(',') {
            let part = part.trim().to_ascii_lowercase();
            let split = part
                .find(|c: char| !c.is_ascii_digit() && c != '.')
                .ok_or_else(wrong)?;
            let (number, unit) = part.split_at(split);
            let number: f64 = number.parse().map_err(|_| wrong())?;
            let rate = |bits: f64| Some(number * bits / 8.0);
            match (unit, link.bytes_per_s, delay) {
                ("kbit", None, _) => link.bytes_per_s = rate(1e3),
                ("mbit", None, _) => link.bytes_per_s = rate(1e6),
                ("gbit", None, _) => link.bytes_per_s = rate(1e9),
                ("ms", _, None) => delay = Some(number / 1e3),
                ("s", _, None) => delay = Some(number),
                _ => return Err(wrong()),
            }
        }
        // Slower than a byte a second, or later than an hour, is a slip of the hand.
        if link.bytes_per_s.is_some_and(|rate| rate < 1.0) || delay.is_some_and(|d| d > 3600.0) {
            return Err(wrong());
        }
        link.delay = Duration::from_secs_f64(delay.unwrap_or(0.0));
        Ok(link)
    }
}

/// The link's queue: when the last byte promised so far will have passed.
pub(super) struct Pacer {
    link: Link,
    free_at: Mutex<Instant>,
}

impl Pacer {
    /// Pieces this small share the link among connections as packets would.
    const PIECE: usize = 16 << 10;

    pub(super) fn new(link: Link) -> Arc<Pacer> {
        Arc::new(Pacer {
            link,
            free_at: Mutex::new(Instant::now()),
        })
    }

    /// When `len` more bytes will have passed the link, if they queue up now.
    fn passes(&self, len: usize) -> Instant {
        let now = Instant::now();
        let Some(rate) = self.link.bytes_per_s else {
            return now;
        };
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        #[expect(clippy::cast_precision_loss, reason = "a piece is small")]
        let takes = Duration::from_secs_f64(len as f64 / rate);
        *free_at = (*free_at).max(now) + takes;
        *free_at
    }

    /// Middleware that delays a reply and slows its body to the link's pace.
    pub(super) async fn shape(self: Arc<Pacer>, request: Request, next: Next) -> Response {
        let (reply, ()) =
            futures_util::join!(next.run(request), tokio::time::sleep(self.link.delay));
        if self.link.bytes_per_s.is_none() {
            return reply;
        }
        reply.map(|body| {
            let pieces = body.into_data_stream().flat_map(|part| {
                let pieces = match part {
                    Ok(bytes) => cut(bytes).map(Ok).collect(),
                    Err(error) => vec![Err(error)],
                };
                futures_util::stream::iter(pieces)
            });
            Body::from_stream(pieces.then(move |piece| {
                let pacer = Arc::clone(&self);
                async move {
                    if let Ok(bytes) = &piece {
                        tokio::time::sleep_until(pacer.passes(bytes.len())).await;
                    }
                    piece
                }
            }))
        })
    }
}

fn cut(mut bytes: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        (!bytes.is_empty()).then(|| bytes.split_to(bytes.len().min(Pacer::PIECE)))
    })
}
