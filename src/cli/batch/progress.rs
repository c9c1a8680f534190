//! How a batch stands, in one line.

use std::time::Duration;

use crate::cli::screen::duration;
use crate::terms::Bytes;

/// What the line is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Lines of the input.
    pub(super) lines: usize,
    /// Lines that are in the output, or will get an error.
    pub(super) over: usize,
    /// Of those, the ones that this run has answered.
    pub(super) answered: usize,
    /// Tokens of the replies of those.
    pub(super) in_answers: u64,
    /// Tokens that this run has generated, for whatever line.
    pub(super) tokens: u64,
    /// Bytes from the network.
    pub(super) fetched: u64,
    /// Bytes read from the disk.
    pub(super) read: u64,
    /// How long this run takes already.
    pub(super) took: Duration,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "shown with two decimals at most"
)]
impl Progress {
    pub(super) fn line(&self) -> String {
        let mut line = format!(
            "{} of {} lines, {} tokens, {:.2} tokens/s, {} fetched, {} read",
            self.over,
            self.lines,
            self.tokens,
            self.tokens as f64 / self.took.as_secs_f64().max(1e-3),
            Bytes(self.fetched),
            Bytes(self.read),
        );
        if let Some(left) = self.left() {
            line.push_str(&format!(", about {} left", duration(left)));
        }
        line
    }

    /// From the tokens of a line that is answered, on average. The time of one would not do: when the first of sixteen
    /// lines is answered, the others are nearly so.
    fn left(&self) -> Option<Duration> {
        if self.answered == 0 || self.tokens == 0 {
            return None;
        }
        let each = self.in_answers as f64 / self.answered as f64;
        let open = self.lines.saturating_sub(self.over) as f64;
        let begun = self.tokens.saturating_sub(self.in_answers) as f64;
        let tokens = (each * open - begun).max(0.0);
        let seconds = tokens * self.took.as_secs_f64() / self.tokens as f64;
        Some(Duration::from_secs_f64(seconds.min(1e9)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDS: Progress = Progress {
        lines: 40,
        over: 4,
        answered: 2,
        in_answers: 200,
        tokens: 1_000,
        fetched: 25_800_000_000,
        read: 1_200_000,
        took: Duration::from_secs(500),
    };

    #[test]
    fn it_says_lines_tokens_rate_bytes_and_time_left() {
        // 36 lines of 100 tokens, of which 800 are there: 2,800 at 2 a second.
        assert_eq!(
            STANDS.line(),
            "4 of 40 lines, 1000 tokens, 2.00 tokens/s, 25.8 GB fetched, 1.2 MB read, about 23 min 20 s left"
        );
    }

    #[test]
    fn nothing_is_foretold_before_a_line_is_answered_and_nothing_below_zero() {
        let first = Progress {
            answered: 0,
            in_answers: 0,
            ..STANDS
        };
        assert!(first.line().ends_with("1.2 MB read"), "{}", first.line());
        let late = Progress { lines: 5, ..STANDS };
        assert_eq!(late.left(), Some(Duration::ZERO));
    }
}
