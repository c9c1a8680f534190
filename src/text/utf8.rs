//! Bytes to text while they arrive.

/// Turns a stream of bytes into text, holding a character's bytes until it is whole.
///
/// Tokens cut characters: an emoji may arrive over four of them. What the calls return, joined, is
/// what [`String::from_utf8_lossy`] makes of all the bytes at once, whatever the cuts.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// The beginning of a character that may still become whole; at most three bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes, gives the characters that are whole now. Bytes that can no longer become a
    /// character are U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(wrong) = error.error_len() else {
                        break; // cut off, not wrong: the rest may come
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[wrong..];
                }
            }
        }
        self.held = rest.to_vec();
        text
    }

    /// Ends the stream: U+FFFD for a character that never became whole. The stream is empty after.
    pub fn finish(&mut self) -> String {
        if self.held.is_empty() {
            return String::new();
        }
        self.held.clear();
        char::REPLACEMENT_CHARACTER.to_string()
    }
}
