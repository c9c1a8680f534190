//! Bringing single experts from the hub, whatever their pieces.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use bytes::Bytes;
use bytes::BytesMut;
use sha2::Digest as _;
use sha2::Sha256;

use super::ResidencyError;
use super::open::Opened;
use crate::checkpoint::Part;
use crate::hub::Arrived;
use crate::hub::Class;
use crate::hub::HubError;
use crate::hub::Span;
use crate::hub::Ticket;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// Bytes that came from a hub.
#[derive(Clone, Debug)]
pub(super) struct Fetched {
    pub(super) bytes: Bytes,
    pub(super) sha256: Digest,
    /// Whether another machine's share delivered them.
    pub(super) peer: bool,
    /// Who delivered them, for the record.
    pub(super) source: Arc<str>,
}

/// An expert whose parts arrive one by one, in any order.
struct Join<F> {
    parts: Vec<Option<Arrived>>,
    deliver: Option<F>,
}

impl Opened {
    /// Starts fetching one expert; `deliver` is called once, on a thread of the hub.
    ///
    /// # Panics
    ///
    /// If no hub may be asked: the caller knows.
    pub(super) fn fetch_expert<F>(&self, key: ExpertKey, class: Class, deliver: F) -> Vec<Ticket>
    where
        F: FnOnce(Result<Fetched, ResidencyError>) + Send + 'static,
    {
        let hub = self.hub.as_ref().expect("a hub to fetch from");
        let parts = self.layout.expert(key);
        let join = Arc::new(Mutex::new(Join {
            parts: vec![None; parts.len()],
            deliver: Some(deliver),
        }));
        parts
            .iter()
            .enumerate()
            .map(|(n, part)| {
                let join = Arc::clone(&join);
                hub.fetch(&self.snapshot, self.span(part), class, move |outcome| {
                    arrive(&join, n, outcome)
                })
            })
            .collect()
    }

    pub(super) fn span(&self, part: &Part) -> Span {
        let file = self.layout.shards()[usize::from(part.shard)].as_str();
        Span {
            file: Arc::from(file),
            range: part.range,
            digest: None,
        }
    }

    /// # Errors
    ///
    /// [`ResidencyError::Interrupted`] when somebody asked to stop.
    pub(super) fn check_stop(&self) -> Result<(), ResidencyError> {
        if self.stop.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ResidencyError::Interrupted);
        }
        Ok(())
    }
}

fn arrive<F>(join: &Mutex<Join<F>>, n: usize, outcome: Result<Arrived, HubError>)
where
    F: FnOnce(Result<Fetched, ResidencyError>),
{
    let (deliver, outcome) = {
        let mut join = join.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(arrived) => {
                join.parts[n] = Some(arrived);
                if join.parts.iter().any(Option::is_none) {
                    return;
                }
                let parts = std::mem::take(&mut join.parts);
                (
                    join.deliver.take(),
                    Ok(concatenate(parts.into_iter().flatten().collect())),
                )
            }
            Err(error) => (join.deliver.take(), Err(error.into())),
        }
    };
    if let Some(deliver) = deliver {
        deliver(outcome);
    }
}

fn concatenate(mut parts: Vec<Arrived>) -> Fetched {
    let peer = parts.iter().all(|p| p.peer);
    if parts.len() == 1 {
        let only = parts.remove(0);
        return Fetched {
            bytes: only.bytes,
            sha256: only.sha256,
            peer,
            source: only.source,
        };
    }
    let mut bytes = BytesMut::with_capacity(parts.iter().map(|p| p.bytes.len()).sum());
    for part in &parts {
        bytes.extend_from_slice(&part.bytes);
    }
    let bytes = bytes.freeze();
    let sha256 = Digest(Sha256::digest(&bytes).into());
    let source = parts
        .first()
        .map_or_else(|| Arc::from(""), |p| Arc::clone(&p.source));
    Fetched {
        bytes,
        sha256,
        peer,
        source,
    }
}
