//! The input of a batch, looked through before anything is answered.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::io::BufRead;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use serde_json::json;

use crate::server::BatchReader;
use crate::server::Wrong;
use crate::server::batch;

/// Requests of one batch, at most, as OpenAI has it.
const LINES_MAX: usize = 50_000;
/// Errors that a batch which failed names.
const ERRORS_MAX: usize = 100;
/// What some editors begin a file with.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Where a line stands in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Counted from 1, blank lines too: as an editor shows it.
    pub(super) number: usize,
    at: u64,
    len: usize,
}

impl Span {
    /// The line's bytes.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub(super) fn read(&self, input: &File) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        input.read_exact_at(&mut bytes, self.at)?;
        Ok(bytes)
    }
}

/// What an input holds.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Lines that ask for something.
    pub(super) requests: Vec<Span>,
    /// Lines of the error file, by number, for those that do not.
    pub(super) wrong: Vec<(usize, Value)>,
}

impl Input {
    /// Looks through a file of requests to one path, each of at most so many bytes.
    ///
    /// # Errors
    ///
    /// What keeps it from being a batch at all, each in OpenAI's shape; a disk that says no is one
    /// of them.
    pub(super) fn read(path: &Path, endpoint: &str, line_max: usize) -> Result<Input, Vec<Value>> {
        let input = look_through(path, endpoint, line_max).map_err(|error| match error {
            Trouble::Disk(error) => {
                let message = format!("The input file cannot be read: {error}.");
                vec![fault("invalid_file", &message, None)]
            }
            Trouble::Long => {
                let message = format!("The input file has more than {LINES_MAX} requests.");
                vec![fault("too_many_requests", &message, None)]
            }
        })?;
        if !input.requests.is_empty() {
            return Ok(input);
        }
        if input.wrong.is_empty() {
            let message = "The input file has no request in it.";
            return Err(vec![fault("empty_file", message, None)]);
        }
        // Not one line is a request: this is some other file.
        let faults = input.wrong.iter().take(ERRORS_MAX).map(|(number, line)| {
            let text = |name: &str| line["error"][name].as_str().unwrap_or_default();
            fault(text("code"), text("message"), Some(*number))
        });
        Err(faults.collect())
    }

    /// Requests, answered or not.
    pub(super) fn total(&self) -> usize {
        self.requests.len() + self.wrong.len()
    }
}

enum Trouble {
    Disk(io::Error),
    Long,
}

fn look_through(path: &Path, endpoint: &str, line_max: usize) -> Result<Input, Trouble> {
    let mut reader = BufReader::new(File::open(path).map_err(Trouble::Disk)?);
    let mut input = Input::default();
    let mut firsts: HashMap<String, usize> = HashMap::new();
    let mut bytes = Vec::new();
    let mut at = 0;
    for number in 1.. {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes);
        if read.map_err(Trouble::Disk)? == 0 {
            break;
        }
        let begins = match number {
            1 if bytes.starts_with(MARK) => MARK.len(),
            _ => 0,
        };
        let line = bytes[begins..].trim_ascii();
        let span = Span {
            number,
            at: at + begins as u64,
            len: bytes.len() - begins,
        };
        at += bytes.len() as u64;
        if line.is_empty() {
            continue;
        }
        if input.total() == LINES_MAX {
            return Err(Trouble::Long);
        }
        let read = match line.len() <= line_max {
            true => request(line, number, endpoint, &mut firsts),
            // A request of its own would not be taken in either.
            false => Err(batch::long_line(number, line_max)),
        };
        match read {
            Ok(()) => input.requests.push(span),
            Err(wrong) => input.wrong.push((number, wrong.line)),
        }
    }
    Ok(input)
}

fn request(
    line: &[u8],
    number: usize,
    endpoint: &str,
    firsts: &mut HashMap<String, usize>,
) -> Result<(), Wrong> {
    let said = batch::parse(line, number);
    let custom_id = match &said {
        Ok(said) => Some(said.custom_id.clone()),
        Err(wrong) => wrong.custom_id.clone(),
    };
    if let Some(id) = custom_id {
        // Whatever else is wrong with a second one: nobody could tell its answer from the first's.
        if let Some(&first) = firsts.get(&id) {
            return Err(BatchReader::duplicate(&id, number, first));
        }
        firsts.insert(id, number);
    }
    let said = said?;
    if said.url != endpoint {
        let message = format!(
            "The URL '{}' is not the batch's endpoint, {endpoint}.",
            said.url
        );
        return Err(batch::wrong_line(
            &said.custom_id,
            number,
            "invalid_url",
            &message,
        ));
    }
    Ok(())
}

/// One of a batch's errors.
fn fault(code: &str, message: &str, line: Option<usize>) -> Value {
    json!({ "code": code, "message": message, "param": null, "line": line })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Input, Vec<Value>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Input::read(file.path(), "/v1/completions", 200)
    }

    fn line(id: &str, url: &str) -> String {
        json!({ "custom_id": id, "method": "POST", "url": url, "body": { "prompt": "é" } })
            .to_string()
    }

    #[test]
    fn lines_are_found_where_they_stand_and_numbered_as_an_editor_does() {
        let one = line("one", "/v1/completions");
        let two = line("two", "/v1/completions");
        let text = format!("\u{feff}{one}\r\n\n  \nno\n{two}");
        let input = read(&text).unwrap();
        let numbers: Vec<_> = input.requests.iter().map(|span| span.number).collect();
        assert_eq!(numbers, [1, 5]);
        assert_eq!((input.wrong[0].0, input.wrong.len()), (4, 1));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &text).unwrap();
        let open = File::open(file.path()).unwrap();
        for (span, said) in input.requests.iter().zip([&one, &two]) {
            let bytes = span.read(&open).unwrap();
            assert_eq!(bytes.trim_ascii(), said.as_bytes());
        }
    }

    #[test]
    fn names_twice_and_other_paths_are_wrong_and_say_where() {
        let text = [
            line("a", "/v1/completions"),
            line("a", "/v1/completions"),
            line("b", "/v1/chat/completions"),
            line("b", "/v1/completions"),
            line("c", "/v1/embeddings"),
        ];
        let input = read(&text.join("\n")).unwrap();
        assert_eq!(input.requests.len(), 1);
        let codes: Vec<_> = input
            .wrong
            .iter()
            .map(|(number, line)| (*number, line["error"]["code"].as_str().unwrap()))
            .collect();
        assert_eq!(
            codes,
            [
                (2, "duplicate_custom_id"),
                (3, "invalid_url"),
                (4, "duplicate_custom_id"),
                (5, "invalid_url")
            ]
        );
    }

    #[test]
    fn what_holds_no_request_is_no_batch() {
        for (text, code, at) in [
            ("", "empty_file", Value::Null),
            ("\n \n", "empty_file", Value::Null),
            ("a,b\n1,2\n", "invalid_json_line", json!(1)),
            (
                &format!("{{\"a\":\"{}\"}}", "x".repeat(200)),
                "line_too_long",
                json!(1),
            ),
        ] {
            let faults = read(text).unwrap_err();
            assert_eq!(
                (&faults[0]["code"], &faults[0]["line"]),
                (&json!(code), &at)
            );
        }
        let many = format!("{}\n", "x\n".repeat(LINES_MAX + 1));
        assert_eq!(read(&many).unwrap_err()[0]["code"], "too_many_requests");
    }
}
