//! Byte-pair encoding by rank, as tiktoken defines it.
//!
//! The maintained crates were weighed: `tiktoken-rs` brings several megabytes of other models'
//! vocabularies and a backtracking pattern engine; `bpe` is exact only for vocabularies in which
//! merging can reach every token, which a rank file does not promise.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::terms::TokenId;

use super::error::TextError;

/// Pieces up to this many bytes are merged by scanning: less work than a heap for the usual word.
/// Longer ones would make that quadratic.
const SCAN_BYTES_MAX: usize = 64;

/// No rank: the pair does not merge.
const NONE: TokenId = TokenId::MAX;

/// The ordinary tokens: byte strings with their rank, which is also their id.
pub(super) struct Ranks {
    ids: HashMap<Box<[u8]>, TokenId>,
    bytes: Vec<u8>,
    ends: Vec<usize>,
    longest: usize,
}

impl Ranks {
    /// Reads `tiktoken.model`: a token a line, `base64(bytes) SPACE rank`.
    pub(super) fn parse(file: &[u8]) -> Result<Ranks, TextError> {
        let mut by_rank: Vec<(usize, Vec<u8>)> = Vec::new();
        for (n, line) in file.split(|b| *b == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let (token, rank) = parse_line(line).ok_or_else(|| {
                damaged(n + 1, "not `base64(bytes) rank`, as every line should be")
            })?;
            if rank != by_rank.len() {
                let due = by_rank.len();
                return Err(damaged(
                    n + 1,
                    format!("rank {rank} where {due} is due: ranks count from 0 without a gap"),
                ));
            }
            by_rank.push((n + 1, token));
        }
        let mut ranks = Ranks {
            ids: HashMap::with_capacity(by_rank.len()),
            bytes: Vec::new(),
            ends: Vec::with_capacity(by_rank.len()),
            longest: 0,
        };
        for (id, (line, token)) in by_rank.into_iter().enumerate() {
            let id = TokenId::try_from(id).map_err(|_| damaged(line, "too many tokens"))?;
            ranks.longest = ranks.longest.max(token.len());
            ranks.bytes.extend_from_slice(&token);
            ranks.ends.push(ranks.bytes.len());
            if ranks.ids.insert(token.into_boxed_slice(), id).is_some() {
                return Err(damaged(line, "the same bytes as a line before"));
            }
        }
        // Without each single byte some text would have no tokens at all.
        if let Some(byte) = (0..=u8::MAX).find(|b| !ranks.ids.contains_key(&[*b][..])) {
            return Err(damaged(0, format!("no token for the single byte {byte}")));
        }
        Ok(ranks)
    }

    /// How many ordinary tokens there are; their ids are `0..len`.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// A token's bytes; none for ids that are not ordinary.
    pub(super) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start..end])
    }

    fn rank(&self, bytes: &[u8]) -> TokenId {
        if bytes.len() > self.longest {
            return NONE; // not worth hashing
        }
        self.ids.get(bytes).copied().unwrap_or(NONE)
    }

    /// Appends the ids of one piece.
    pub(super) fn encode(&self, piece: &[u8], out: &mut Vec<TokenId>) {
        match self.rank(piece) {
            NONE if piece.len() <= SCAN_BYTES_MAX => self.merge_by_scan(piece, out),
            NONE => self.merge_by_heap(piece, out),
            whole => out.push(whole),
        }
    }

    /// Merges the adjacent pair of lowest rank, leftmost first, until none merges; looks through all
    /// pairs for each merge.
    pub(super) fn merge_by_scan(&self, piece: &[u8], out: &mut Vec<TokenId>) {
        // (start of the part, rank of it joined with the next); the last is the end alone.
        let mut parts: Vec<(usize, TokenId)> = (0..=piece.len())
            .map(|at| (at, piece.get(at..at + 2).map_or(NONE, |two| self.rank(two))))
            .collect();
        let joined = |parts: &[(usize, TokenId)], at: usize| match parts.get(at + 2) {
            Some(end) => self.rank(&piece[parts[at].0..end.0]),
            None => NONE,
        };
        while let Some((at, best)) = parts
            .iter()
            .enumerate()
            .map(|(at, part)| (at, part.1))
            .min_by_key(|(_, rank)| *rank) // the first of equal ones
            && best != NONE
        {
            parts.remove(at + 1);
            parts[at].1 = joined(&parts, at);
            if at > 0 {
                parts[at - 1].1 = joined(&parts, at - 1);
            }
        }
        out.extend(
            parts
                .windows(2)
                .map(|pair| self.rank(&piece[pair[0].0..pair[1].0])),
        );
    }

    /// The same merges in the same order, in n log n.
    pub(super) fn merge_by_heap(&self, piece: &[u8], out: &mut Vec<TokenId>) {
        let length = piece.len();
        // Parts form a linked list over the positions where they start; `rank[at]` is the rank of
        // the part at `at` joined with the next, and NONE where no part starts any more.
        let mut next: Vec<usize> = (1..=length).collect();
        let mut before: Vec<usize> = (0..length).map(|at| at.saturating_sub(1)).collect();
        let mut rank = vec![NONE; length];
        let mut heap = BinaryHeap::new();
        for at in 0..length.saturating_sub(1) {
            rank[at] = self.rank(&piece[at..at + 2]);
            if rank[at] != NONE {
                heap.push(Reverse((rank[at], at)));
            }
        }
        while let Some(Reverse((found, at))) = heap.pop() {
            if rank[at] != found {
                continue; // a neighbour has merged since
            }
            let middle = next[at];
            let end = next[middle];
            next[at] = end;
            rank[middle] = NONE;
            if end < length {
                before[end] = at;
            }
            let mut renew = |at: usize, rank: &mut [TokenId]| {
                rank[at] = match next[at] {
                    middle if middle < length => self.rank(&piece[at..next[middle]]),
                    _ => NONE,
                };
                if rank[at] != NONE {
                    heap.push(Reverse((rank[at], at)));
                }
            };
            renew(at, &mut rank);
            if at > 0 {
                renew(before[at], &mut rank);
            }
        }
        let mut at = 0;
        while at < length {
            out.push(self.rank(&piece[at..next[at]]));
            at = next[at];
        }
    }
}

fn parse_line(line: &[u8]) -> Option<(Vec<u8>, usize)> {
    let space = line.iter().position(|b| *b == b' ')?;
    let token = STANDARD.decode(&line[..space]).ok()?;
    let rank = std::str::from_utf8(&line[space + 1..]).ok()?.parse().ok()?;
    (!token.is_empty()).then_some((token, rank))
}

fn damaged(line: usize, what: impl Into<String>) -> TextError {
    TextError::Damaged {
        file: "tiktoken.model",
        line,
        what: what.into(),
    }
}
