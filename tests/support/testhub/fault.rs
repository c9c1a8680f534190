//! What can go wrong, and when it should.

use super::ledger::Listener;
use super::wire::Request;

/// One way to misbehave. Byte counts are counts of body bytes.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub enum Fault {
    /// Take the request and never answer.
    Hang,
    /// Take the request and close the connection without a word, as one that was kept too long.
    Vanish,
    /// Answer with these bytes, which need not be HTTP, and close.
    Garbage(Vec<u8>),
    /// Answer after this many milliseconds.
    DelayMs(u64),
    /// Send so many bytes, then hold the connection open in silence.
    StallAfter(u64),
    /// Send so many bytes, then reset the connection.
    ResetAfter(u64),
    /// Send so many bytes of the declared length, then close in an orderly way.
    CutAfter(u64),
    /// The same without having declared a length.
    CutUndeclared(u64),
    /// The same inside a chunked body.
    CutChunked(u64),
    /// The whole body, chunked, with no length declared.
    Chunked,
    /// The whole body, ended by closing, with no length declared.
    Undeclared,
    /// Declare and send so many bytes more than asked for.
    ExtraDeclared(u64),
    /// Send so many bytes more than asked for, with no length declared.
    ExtraUndeclared(u64),
    /// Flip one bit of the byte at this place of the body.
    FlipBit(u64),
    /// 4 KiB of zeros from this place of the body on.
    Zeros(u64),
    /// The right headers, and the bytes from so much further on.
    Shift(i64),
    /// Ignore Range: 200 and the whole file.
    WholeFile,
    /// 200 with the slice and its Content-Range.
    SliceAs200,
    /// Another Content-Range; empty for none.
    ContentRange(String),
    /// Another status, with headers and a body.
    Status(u16, Vec<(String, String)>, String),
    /// A redirect.
    Redirect(u16, String),
    /// Set a header; an empty value removes it.
    Header(String, String),
    /// So many bytes, then a pause of so many milliseconds, over and over.
    Drip(usize, u64),
    /// Bytes a second on this one reply.
    Rate(u64),
    /// Close the connection after an otherwise good reply, without saying so.
    CloseAfter,
    /// So many headers of so many bytes each.
    HeaderBomb(usize, usize),
    /// Say gzip, whatever was allowed.
    Gzip,
}

/// A fault and the requests it is played on.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Rule {
    pub listener: Option<Listener>,
    pub method: Option<String>,
    /// Part of the path.
    pub path: Option<String>,
    /// First byte asked for by Range.
    pub first_byte: Option<u64>,
    /// Let so many matching requests pass first.
    #[serde(default)]
    pub skip: u32,
    /// How often; `None` for ever.
    pub times: Option<u32>,
    pub fault: Fault,
}

impl Rule {
    pub fn on(listener: Listener) -> Self {
        Rule {
            listener: Some(listener),
            method: None,
            path: None,
            first_byte: None,
            skip: 0,
            times: None,
            fault: Fault::Hang,
        }
    }

    pub fn fault(mut self, fault: Fault) -> Self {
        self.fault = fault;
        self
    }

    pub fn path(mut self, part: &str) -> Self {
        self.path = Some(part.to_owned());
        self
    }

    pub fn method(mut self, method: &str) -> Self {
        self.method = Some(method.to_owned());
        self
    }

    pub fn first_byte(mut self, first: u64) -> Self {
        self.first_byte = Some(first);
        self
    }

    pub fn skip(mut self, requests: u32) -> Self {
        self.skip = requests;
        self
    }

    pub fn times(mut self, times: u32) -> Self {
        self.times = Some(times);
        self
    }

    /// Whether the rule plays on this request; counts.
    pub fn plays(&mut self, listener: Listener, request: &Request) -> bool {
        let fits = self.listener.is_none_or(|l| l == listener)
            && self.method.as_ref().is_none_or(|m| *m == request.method)
            && self
                .path
                .as_ref()
                .is_none_or(|p| request.path.contains(p.as_str()))
            && self
                .first_byte
                .is_none_or(|b| request.range().is_some_and(|r| r.first == Some(b)));
        if !fits || self.times == Some(0) {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        if let Some(times) = &mut self.times {
            *times -= 1;
        }
        true
    }
}

/// One of the faults a client must survive, by a random number; sizes by the length asked for.
pub fn random(n: u64, length: u64) -> Fault {
    let at = n / 97 % length.max(1);
    match n % 15 {
        0 => Fault::StallAfter(at),
        1 => Fault::ResetAfter(at),
        2 => Fault::CutAfter(at),
        3 => Fault::CutUndeclared(at),
        4 => Fault::CutChunked(at),
        5 => Fault::FlipBit(at),
        6 => Fault::Zeros(at),
        7 => Fault::Shift(1),
        8 => Fault::ContentRange("bytes 0-9/10".to_owned()),
        9 => Fault::Status(503, Vec::new(), "busy".to_owned()),
        10 => Fault::Status(500, Vec::new(), "oops".to_owned()),
        11 => Fault::CloseAfter,
        12 => Fault::Hang,
        13 => Fault::ExtraUndeclared(10),
        _ => Fault::Status(504, Vec::new(), "slow".to_owned()),
    }
}
