//! Spans handed over piece by piece, for ranges too large to hold.
//!
//! A piece is passed on when it arrives, in order, and only after the headers of its reply were held
//! against the question. Nothing here is hashed: who streams a range splits it into parts that have
//! digests of their own. Therefore what was passed on cannot be taken back, and a stream that could
//! only go on from its beginning ends with [`HubError::Discontinued`] instead.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use super::Arrived;
use super::Class;
use super::Hub;
use super::HubError;
use super::Snapshot;
use super::Span;
use super::Ticket;

/// Bytes that may wait for a slow reader before the socket is left unread. A kill loses them.
const WAITING_MAX: usize = 2 << 20;

/// A span on its way, piece by piece. Dropping it cancels the fetch.
pub struct Stream {
    pipe: Arc<Pipe>,
    _ticket: Ticket,
}

/// What a look at a [`Stream`] has found.
#[derive(Debug)]
pub enum Streamed {
    /// The next bytes of the span.
    Piece {
        /// At least one.
        bytes: Bytes,
        /// Name of the source they came from.
        source: Arc<str>,
    },
    /// Nothing came in the time given.
    Quiet,
    /// All of the span was handed over.
    End,
}

/// Between the hub's threads and the reader.
#[derive(Default)]
pub(super) struct Pipe {
    state: Mutex<State>,
    arrived: Condvar,
    room: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Bytes, Arc<str>)>,
    bytes: usize,
    end: Option<Result<(), HubError>>,
}

impl Pipe {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a piece over; waits while too much waits. Cancelled, it has handed over nothing.
    pub(super) async fn push(&self, piece: Bytes, source: &Arc<str>) {
        if piece.is_empty() {
            return;
        }
        loop {
            {
                let mut state = self.state();
                if state.bytes < WAITING_MAX {
                    state.bytes += piece.len();
                    state.waiting.push_back((piece, Arc::clone(source)));
                    self.arrived.notify_one();
                    return;
                }
            }
            self.room.notified().await;
        }
    }

    fn end(&self, outcome: Result<Arrived, HubError>) {
        self.state().end = Some(outcome.map(drop));
        self.arrived.notify_one();
    }
}

impl Hub {
    /// Asks for a span that is handed over as it comes. Its digest, if it has one, is not compared.
    pub fn stream(&self, snapshot: &Arc<Snapshot>, span: Span, class: Class) -> Stream {
        let pipe = Arc::<Pipe>::default();
        let end = Arc::clone(&pipe);
        let ticket = self.begin(
            snapshot,
            span,
            class,
            Some(Arc::clone(&pipe)),
            move |outcome| end.end(outcome),
        );
        Stream {
            pipe,
            _ticket: ticket,
        }
    }
}

impl Stream {
    /// Waits for more, at most `limit`.
    ///
    /// # Errors
    ///
    /// What ended the fetch, once every piece that came before has been handed over.
    pub fn next(&mut self, limit: Duration) -> Result<Streamed, HubError> {
        let state = self.pipe.state();
        let nothing = |state: &mut State| state.waiting.is_empty() && state.end.is_none();
        let waited = self.pipe.arrived.wait_timeout_while(state, limit, nothing);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if let Some((bytes, source)) = state.waiting.pop_front() {
            state.bytes -= bytes.len();
            self.pipe.room.notify_one();
            return Ok(Streamed::Piece { bytes, source });
        }
        match state.end.take() {
            None => Ok(Streamed::Quiet),
            Some(Ok(())) => Ok(Streamed::End),
            Some(Err(error)) => Err(error),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}
