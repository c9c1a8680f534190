//! `multipart/form-data`, as it arrives: a part's content is passed on piece by piece, and nothing
//! that a client leaves open (a head, a preamble) is collected without end.

use std::time::Duration;

use axum::body::Body;
use axum::body::BodyDataStream;
use axum::http::HeaderMap;
use axum::http::StatusCode;
use axum::http::header;
use bytes::Buf;
use bytes::Bytes;
use bytes::BytesMut;
use futures_util::StreamExt;

use crate::server::error::ApiError;

/// Bytes of one part's head.
const HEAD_MAX: usize = 8 << 10;
/// Bytes of a boundary, as the standard has it.
const BOUNDARY_MAX: usize = 70;
/// Whoever sends nothing for so long is not sending any more.
const PATIENCE: Duration = Duration::from_secs(60);

/// A form's body, read part by part.
pub(super) struct Form {
    body: BodyDataStream,
    /// What has come and was not read.
    buffer: BytesMut,
    /// What ends a part's content: a line's end, two dashes and the boundary.
    delimiter: Vec<u8>,
    /// Bytes that may still come.
    left: u64,
    /// The same at the beginning.
    most: u64,
    at: At,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the first delimiter, which has no line before it.
    Begin,
    /// In a part's content.
    Content,
    /// After a delimiter.
    Delimiter,
    /// After the last.
    End,
}

/// A part: what it is named, and what its file is, if it is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) filename: Option<String>,
}

impl Form {
    /// A form of at most so many bytes.
    ///
    /// # Errors
    ///
    /// 400 where the request is no form.
    pub(super) fn new(headers: &HeaderMap, body: Body, most: u64) -> Result<Form, ApiError> {
        let kind = headers.get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let boundary = boundary(kind)
            .ok_or_else(|| wrong("The body must be multipart/form-data with a boundary."))?;
        Ok(Form {
            body: body.into_data_stream(),
            // So that the first delimiter looks like the others.
            buffer: BytesMut::from(&b"\r\n"[..]),
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            left: most,
            most,
            at: At::Begin,
        })
    }

    /// The next part; what is left of the one before is passed over. `None` after the last.
    ///
    /// # Errors
    ///
    /// Where the body is cut, too long, too slow or no form.
    pub(super) async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        match self.at {
            At::End => return Ok(None),
            At::Begin => {
                self.fill(self.delimiter.len()).await?;
                if !self.buffer.starts_with(&self.delimiter) {
                    return Err(wrong("The body does not begin with its boundary."));
                }
                self.buffer.advance(self.delimiter.len());
                self.at = At::Delimiter;
            }
            At::Content => while self.chunk().await?.is_some() {},
            At::Delimiter => {}
        }
        self.fill(2).await?;
        if self.buffer.starts_with(b"--") {
            self.at = At::End;
            return Ok(None);
        }
        let head = self.head().await?;
        self.at = At::Content;
        part(&head).map(Some)
    }

    /// More of the part's content; `None` at its end.
    ///
    /// # Errors
    ///
    /// Where the body is cut, too long or too slow.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            if self.at != At::Content {
                return Ok(None);
            }
            match find(&self.buffer, &self.delimiter) {
                Some(0) => {
                    self.buffer.advance(self.delimiter.len());
                    self.at = At::Delimiter;
                }
                Some(end) => return Ok(Some(self.buffer.split_to(end).freeze())),
                None => {
                    // The delimiter may have begun.
                    let sure = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
                    if sure > 0 {
                        return Ok(Some(self.buffer.split_to(sure).freeze()));
                    }
                    self.more().await?;
                }
            }
        }
    }

    /// A short part's content, as text.
    ///
    /// # Errors
    ///
    /// Where it is longer than `most` bytes, or no text.
    pub(super) async fn text(&mut self, part: &Part, most: usize) -> Result<String, ApiError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > most {
                let message = format!("'{}' is longer than {most} bytes.", part.name);
                return Err(ApiError::invalid(&part.name, "invalid_value", message));
            }
        }
        String::from_utf8(bytes).map_err(|_| {
            let message = format!("'{}' is not text.", part.name);
            ApiError::invalid(&part.name, "invalid_value", message)
        })
    }

    /// A part's head: the lines before the empty one. The line that the delimiter stands in is read
    /// with it, as its end may be the head's beginning.
    async fn head(&mut self) -> Result<String, ApiError> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let head = self.buffer.split_to(end + 4);
                let (padding, lines) = match find(&head, b"\r\n") {
                    Some(at) => (&head[..at], &head[at..]),
                    None => (&head[..0], &head[..]),
                };
                if padding.iter().any(|b| !matches!(b, b' ' | b'\t')) {
                    return Err(wrong("A boundary is followed by something else."));
                }
                return Ok(String::from_utf8_lossy(lines).into_owned());
            }
            if self.buffer.len() > HEAD_MAX {
                return Err(wrong("A part's head is too long."));
            }
            self.more().await?;
        }
    }

    /// Waits until so many bytes are there.
    async fn fill(&mut self, len: usize) -> Result<(), ApiError> {
        while self.buffer.len() < len {
            self.more().await?;
        }
        Ok(())
    }

    async fn more(&mut self) -> Result<(), ApiError> {
        let came = tokio::time::timeout(PATIENCE, self.body.next()).await;
        let bytes = match came {
            Err(_) => {
                return Err(ApiError::plain(
                    StatusCode::REQUEST_TIMEOUT,
                    "request_timeout",
                    "The request's body did not come in time.",
                ));
            }
            Ok(None | Some(Err(_))) => return Err(wrong("The body ends before its boundary.")),
            Ok(Some(Ok(bytes))) => bytes,
        };
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Err(too_large(self.most));
        };
        self.left = left;
        self.buffer.extend_from_slice(&bytes);
        Ok(())
    }
}

/// 413, for what is longer than so many bytes.
pub(super) fn too_large(most: u64) -> ApiError {
    ApiError::plain(
        StatusCode::PAYLOAD_TOO_LARGE,
        "request_too_large",
        format!("The file is longer than {}.", crate::terms::Bytes(most)),
    )
}

fn wrong(message: &str) -> ApiError {
    ApiError::plain(StatusCode::BAD_REQUEST, "invalid_multipart", message)
}

/// Where `needle` begins first.
fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let (&first, rest) = needle.split_first()?;
    let mut from = 0;
    loop {
        let at = from + hay.get(from..)?.iter().position(|&b| b == first)?;
        if hay[at + 1..].starts_with(rest) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// The boundary that a content type names.
fn boundary(kind: &str) -> Option<String> {
    let (what, parameters) = kind.split_once(';')?;
    if !what.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let fits = (1..=BOUNDARY_MAX).contains(&boundary.len()) && boundary.is_ascii();
    fits.then_some(boundary)
}

fn part(head: &str) -> Result<Part, ApiError> {
    let disposition = head.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is = name.trim().eq_ignore_ascii_case("content-disposition");
        is.then_some(value)
    });
    let nameless = || wrong("A part has no name.");
    let (_, parameters) = disposition
        .and_then(|value| value.split_once(';'))
        .ok_or_else(nameless)?;
    Ok(Part {
        name: parameter(parameters, "name").ok_or_else(nameless)?,
        filename: extended(parameters).or_else(|| parameter(parameters, "filename")),
    })
}

/// A parameter of a header, quoted or not. A backslash before anything but a quote or another stays:
/// some clients send paths of Windows as they are.
fn parameter(parameters: &str, wanted: &str) -> Option<String> {
    let mut rest = parameters;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after;
    }
}

/// What stands before the closing quote, and what comes after it.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => value.push(escaped),
                None => value.push('\\'),
            },
            c => value.push(c),
        }
    }
    None
}

/// `filename*=UTF-8''…`, which some clients send for names beyond ASCII.
fn extended(parameters: &str) -> Option<String> {
    let value = parameter(parameters, "filename*")?;
    let mut pieces = value.splitn(3, '\'');
    let charset = pieces.next()?;
    let coded = pieces.nth(1)?;
    if !charset.eq_ignore_ascii_case("utf-8") {
        return None;
    }
    let mut bytes = Vec::new();
    let mut rest = coded.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        match (first, byte) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    type Parts = Vec<(Part, Vec<u8>)>;

    fn read(kind: &str, pieces: Vec<Vec<u8>>, most: u64) -> Result<Parts, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
        let pieces = pieces.into_iter().map(Ok::<_, std::io::Error>);
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        runtime.block_on(async {
            let mut form = Form::new(&headers, body, most)?;
            let mut parts = Vec::new();
            while let Some(part) = form.next().await? {
                let mut content = Vec::new();
                while let Some(chunk) = form.chunk().await? {
                    content.extend_from_slice(&chunk);
                }
                parts.push((part, content));
            }
            Ok(parts)
        })
    }

    const KIND: &str = "multipart/form-data; charset=x; boundary=\"a b\"";

    fn whole() -> Vec<u8> {
        let mut body =
            b"--a b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
            --a b \t\r\ncontent-type: text/plain\r\ncontent-disposition: form-data; \
            filename=\"C:\\in \\\"1\\\".jsonl\"; name=file\r\n\r\n"
                .to_vec();
        body.extend(b"\r\n--a\r\n--a \xff\r\r\n-- --a b\n\r\n--a c");
        body.extend(b"\r\n--a b\r\nContent-Disposition: form-data; name=\"empty\"\r\n\r\n");
        body.extend(b"\r\n--a b--\r\nafter");
        body
    }

    #[test]
    fn parts_come_out_however_the_body_is_cut_into_pieces() {
        let whole = whole();
        for size in 1..whole.len() {
            let pieces = whole.chunks(size).map(<[u8]>::to_vec).collect();
            let parts = read(KIND, pieces, 4096).unwrap();
            let names: Vec<_> = parts.iter().map(|(part, _)| part.name.as_str()).collect();
            assert_eq!(names, ["purpose", "file", "empty"]);
            assert_eq!(parts[0].1, b"batch");
            assert_eq!(parts[1].1, b"\r\n--a\r\n--a \xff\r\r\n-- --a b\n\r\n--a c");
            assert_eq!(parts[2].1, b"");
            let named = parts[1].0.filename.as_deref();
            assert_eq!(named, Some("C:\\in \"1\".jsonl"));
        }
    }

    #[test]
    fn what_is_cut_or_no_form_is_refused_wherever_it_stops() {
        let whole = whole();
        let end = whole.len() - b"\r\nafter".len();
        for cut in 0..end {
            let refused = read(KIND, vec![whole[..cut].to_vec()], 4096);
            assert_eq!(
                refused.unwrap_err().status,
                StatusCode::BAD_REQUEST,
                "{cut}"
            );
        }
        for kind in [
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=",
        ] {
            assert!(read(kind, vec![whole.clone()], 4096).is_err(), "{kind}");
        }
        let heads: [&[u8]; 4] = [
            b"--a b\r\nx: y\r\n\r\n\r\n--a b--",
            b"--a bc\r\nContent-Disposition: form-data; name=x\r\n\r\n\r\n--a b--",
            b"preamble\r\n--a b--",
            b"--a b\r\nContent-Disposition: form-data; name=\"x\r\n\r\n\r\n--a b--",
        ];
        for head in heads {
            assert!(read(KIND, vec![head.to_vec()], 4096).is_err());
        }
    }

    #[test]
    fn nothing_is_collected_without_end() {
        let endless = |begin: &[u8]| {
            let mut pieces = vec![begin.to_vec()];
            pieces.extend(vec![vec![b'x'; 1 << 12]; 64]);
            pieces
        };
        let refused = read(KIND, endless(b"--a b\r\nx: "), 1 << 30).unwrap_err();
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(read(KIND, endless(b""), 1 << 30).is_err());
        let content = b"--a b\r\nContent-Disposition: form-data; name=x\r\n\r\n";
        let refused = read(KIND, endless(content), 1 << 14).unwrap_err();
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[test]
    fn names_beyond_ascii_are_read_in_either_form() {
        let head = |more: &str| format!("\r\ncontent-disposition: form-data; name=f; {more}");
        let named = |more: &str| part(&head(more)).unwrap().filename.unwrap();
        assert_eq!(named("filename=\"zwölf.jsonl\""), "zwölf.jsonl");
        assert_eq!(
            named("filename=\"x\"; filename*=UTF-8''zw%C3%B6lf%.jsonl"),
            "zwölf%.jsonl"
        );
    }
}
