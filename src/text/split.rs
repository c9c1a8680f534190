//! Text into the pieces that are encoded each on its own.
//!
//! The vendor splits with a regular expression; this is that expression, written out. A matcher by
//! hand because the expression needs a look-ahead, for which the general engines backtrack: on a
//! long run of one kind of character they give up or take quadratic time. Here every alternative is
//! one scan, and a character is looked at a bounded number of times.

use super::class::HAN;
use super::class::LETTER;
use super::class::LOWER;
use super::class::NEWLINE;
use super::class::NUMBER;
use super::class::SPACE;
use super::class::UPPER;
use super::class::class_of;

/// Text is cut into slices of this many characters before anything else.
const SLICE_CHARS_MAX: usize = 400_000;
/// Within a slice, no run of only white space or only anything else is longer than this.
const RUN_CHARS_MAX: usize = 25_000;

/// White space as Python's `str.isspace` sees it; the length guards count with it.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Calls `found` with each stretch of `text` that the length guards leave whole, in order.
///
/// The guards change ids, on huge inputs: a piece never reaches over a cut, and a run of spaces that
/// ends at one ends like the text.
pub(super) fn for_each_slice<'t>(text: &'t str, mut found: impl FnMut(&'t str)) {
    let (mut start, mut chars) = (0, 0);
    let (mut run, mut run_is_space) = (0, false);
    for (at, c) in text.char_indices() {
        let space = is_python_space(c);
        if chars == SLICE_CHARS_MAX {
            found(&text[start..at]);
            (start, chars, run) = (at, 0, 0);
        }
        if run > 0 && space == run_is_space {
            run += 1;
        } else {
            (run, run_is_space) = (1, space);
        }
        if run > RUN_CHARS_MAX {
            found(&text[start..at]);
            (start, run) = (at, 1);
        }
        chars += 1;
    }
    if start < text.len() {
        found(&text[start..]);
    }
}

/// Calls `found` with each piece of `text`, in order; joined they are `text`.
pub(super) fn for_each_piece<'t>(text: &'t str, mut found: impl FnMut(&'t str)) {
    let splitter = Splitter::new(text);
    let mut at = 0;
    while at < splitter.class.len() {
        let end = splitter.piece_end(at);
        debug_assert!(end > at, "a piece holds at least one character");
        found(&text[splitter.offset(at)..splitter.offset(end)]);
        at = end;
    }
}

/// One stretch of text with the class of each character; positions count characters.
struct Splitter<'t> {
    text: &'t str,
    class: Vec<u8>,
    offsets: Vec<usize>,
}

impl<'t> Splitter<'t> {
    fn new(text: &'t str) -> Self {
        let mut class = Vec::with_capacity(text.len());
        let mut offsets = Vec::with_capacity(text.len());
        for (offset, c) in text.char_indices() {
            class.push(class_of(c));
            offsets.push(offset);
        }
        Splitter {
            text,
            class,
            offsets,
        }
    }

    fn offset(&self, at: usize) -> usize {
        self.offsets.get(at).copied().unwrap_or(self.text.len())
    }

    fn is(&self, at: usize, flags: u8) -> bool {
        self.class.get(at).is_some_and(|class| class & flags != 0)
    }

    /// The first position from `at` whose character has none of `flags`.
    fn run_end(&self, at: usize, flags: u8) -> usize {
        let run = self.class[at..].iter().take_while(|c| *c & flags != 0);
        at + run.count()
    }

    /// The alternatives of the pattern, tried in order.
    fn piece_end(&self, at: usize) -> usize {
        if self.is(at, HAN) {
            return self.run_end(at, HAN);
        }
        if let Some(end) = self
            .word(at, Self::lower_word)
            .or_else(|| self.word(at, Self::upper_word))
        {
            return self.contraction_end(end);
        }
        if self.is(at, NUMBER) {
            // Not the whole run, cut to three: a long number would be scanned for each of its pieces.
            let more = (at + 1..at + 3).take_while(|next| self.is(*next, NUMBER));
            return at + 1 + more.count();
        }
        if let Some(end) = self.symbols(at) {
            return end;
        }
        self.space_end(at)
    }

    /// `[^\r\n\p{L}\p{N}]?` before a word: with the character where the rest then matches, else without.
    fn word(&self, at: usize, rest: fn(&Self, usize) -> Option<usize>) -> Option<usize> {
        let lead = !self.is(at, NEWLINE | LETTER | NUMBER);
        let after_lead = if lead { rest(self, at + 1) } else { None };
        after_lead.or_else(|| rest(self, at))
    }

    /// Upper`*` Lower`+`. Where no lower-only character follows the run of upper ones, the run gives
    /// back characters until one of them can be the lower part: the last that is both.
    fn lower_word(&self, at: usize) -> Option<usize> {
        let upper_end = self.run_end(at, UPPER);
        if self.is(upper_end, LOWER) {
            return Some(self.run_end(upper_end, LOWER));
        }
        let both = self.class[at..upper_end]
            .iter()
            .rposition(|class| class & LOWER != 0)?;
        Some(at + both + 1)
    }

    /// Upper`+` Lower`*`.
    fn upper_word(&self, at: usize) -> Option<usize> {
        if !self.is(at, UPPER) {
            return None;
        }
        let upper_end = self.run_end(at, UPPER);
        Some(self.run_end(upper_end, LOWER))
    }

    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`; without regard to case, the long s is an s.
    fn contraction_end(&self, at: usize) -> usize {
        let mut chars = self.text[self.offset(at)..].chars();
        if chars.next() != Some('\'') {
            return at;
        }
        let mut letter = || chars.next().map(|c| c.to_ascii_lowercase());
        match letter() {
            Some('s' | 'ſ' | 't' | 'm' | 'd') => at + 2,
            Some('r' | 'v') if letter() == Some('e') => at + 3,
            Some('l') if letter() == Some('l') => at + 3,
            _ => at,
        }
    }

    /// ` ?[^\s\p{L}\p{N}]+[\r\n]*`
    fn symbols(&self, at: usize) -> Option<usize> {
        let blank = self.text.as_bytes()[self.offset(at)] == b' ';
        let start = at + usize::from(blank);
        let others = self.class.get(start..)?.iter();
        let length = others
            .take_while(|class| *class & (SPACE | LETTER | NUMBER) == 0)
            .count();
        (length > 0).then(|| self.run_end(start + length, NEWLINE))
    }

    /// `\s*[\r\n]+`, then `\s+(?!\S)`, then `\s+`: up to the last line end of the run; else all of the
    /// run where the text ends with it; else all but its last character, unless that is all there is.
    fn space_end(&self, at: usize) -> usize {
        let end = self.run_end(at, SPACE);
        let newline = self.class[at..end]
            .iter()
            .rposition(|class| class & NEWLINE != 0);
        match newline {
            Some(last) => at + last + 1,
            None if end == self.class.len() || end == at + 1 => end,
            None => end - 1,
        }
    }
}
