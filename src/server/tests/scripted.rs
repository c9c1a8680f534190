//! A generator that says what a test wrote down, when the test wants it, and a client that shows
//! every byte of a reply.

use std::io::Read;
use std::io::Write;
use std::net::SocketAddr;
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;

use crate::server::Arrived;
use crate::server::Ask;
use crate::server::BySource;
use crate::server::Cancel;
use crate::server::Failure;
use crate::server::Finish;
use crate::server::Generator;
use crate::server::Happening;
use crate::server::Ledger;
use crate::server::Now;
use crate::server::Outcome;
use crate::server::Prompt;
use crate::server::Server;
use crate::server::ServerOptions;
use crate::terms::TokenId;
use crate::text::ReplyEvent;
use crate::text::Tokenizer;

/// Longer than anything here takes on the slowest machine.
pub(super) const LONG: Duration = Duration::from_secs(30);

/// A step of a script.
#[derive(Clone, Debug)]
pub(crate) enum Beat {
    Token(TokenId, Vec<f32>),
    Say(ReplyEvent),
    /// Arithmetic that takes its time, unless stopped.
    Work(Duration),
    Fail(Failure),
    Panic,
    Finish(Finish),
}

pub(super) fn say(text: &str) -> Beat {
    Beat::Say(ReplyEvent::Answer(text.to_owned()))
}

pub(super) fn think(text: &str) -> Beat {
    Beat::Say(ReplyEvent::Reasoning(text.to_owned()))
}

type Script = dyn Fn(&Ask) -> Vec<Beat> + Send + Sync;

pub(crate) struct Scripted {
    tokenizer: Tokenizer,
    script: Box<Script>,
    pub(super) seen: Mutex<Vec<Ask>>,
    /// (nothing, generations at work, generations that were stopped)
    state: Mutex<((), usize, usize)>,
    bell: Arc<Condvar>,
}

impl Scripted {
    pub(crate) fn new(script: impl Fn(&Ask) -> Vec<Beat> + Send + Sync + 'static) -> Arc<Scripted> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/austen-k3/model");
        let read = |name| std::fs::read(folder.join(name)).unwrap();
        let tokenizer =
            Tokenizer::new(&read("tiktoken.model"), &read("tokenizer_config.json")).unwrap();
        Arc::new(Scripted {
            tokenizer,
            script: Box::new(script),
            seen: Mutex::default(),
            state: Mutex::default(),
            bell: Arc::default(),
        })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Tokens of a text in which special tokens stand by their names.
    pub(crate) fn with_markup(&self, text: &str) -> Vec<TokenId> {
        let mut ids = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.find("<|") {
            let (plain, from) = rest.split_at(at);
            let end = from.find("|>").map_or(from.len(), |end| end + 2);
            ids.extend(self.tokenizer.encode(plain));
            match self.tokenizer.special(&from[..end]) {
                Some(id) => ids.push(id),
                None => ids.extend(self.tokenizer.encode(&from[..end])),
            }
            rest = &from[end..];
        }
        ids.extend(self.tokenizer.encode(rest));
        ids
    }

    /// Waits until `holds` of (generations at work, generations that were stopped).
    pub(super) fn wait_for(&self, holds: impl Fn(usize, usize) -> bool) {
        let state = self.state.lock().unwrap();
        let (state, timeout) = self
            .bell
            .wait_timeout_while(state, LONG, |s| !holds(s.1, s.2))
            .unwrap();
        assert!(!timeout.timed_out(), "never came to it: {:?}", *state);
    }

    /// Works for a while; `false` when stopped.
    fn work(&self, duration: Duration, cancel: &Cancel) -> bool {
        let until = Instant::now() + duration;
        let mut state = self.state.lock().unwrap();
        while !cancel.asked() {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return true;
            };
            // A shout between the look and the wait is caught by the next look.
            let nap = left.min(Duration::from_millis(20));
            state = self.bell.wait_timeout(state, nap).unwrap().0;
        }
        false
    }

    fn play(
        &self,
        ask: &Ask,
        ids: &[TokenId],
        on: &mut dyn FnMut(Happening<'_>) -> ControlFlow<()>,
    ) -> Result<Outcome, Failure> {
        let mut completion_tokens = 0;
        let mut finish = Finish::Stop;
        let mut flow = on(Happening::Prompt(ids));
        for beat in (self.script)(ask) {
            if flow.is_break() {
                finish = Finish::Interrupted;
                break;
            }
            flow = match beat {
                Beat::Token(id, logits) => {
                    completion_tokens += 1;
                    on(Happening::Token {
                        id,
                        logits: &logits,
                    })
                }
                Beat::Say(event) => on(Happening::Reply(&event)),
                Beat::Work(duration) if self.work(duration, &ask.cancel) => {
                    ControlFlow::Continue(())
                }
                Beat::Work(_) => ControlFlow::Break(()),
                Beat::Fail(failure) => return Err(failure),
                Beat::Panic => panic!("written in the script"),
                Beat::Finish(how) => {
                    finish = how;
                    ControlFlow::Continue(())
                }
            };
        }
        if flow.is_break() {
            finish = Finish::Interrupted;
        }
        Ok(Outcome {
            finish,
            prompt_tokens: ids.len(),
            cached_tokens: 0,
            completion_tokens,
            reasoning_tokens: None,
            ledger: Ledger {
                requested: 28,
                experts: BySource {
                    memory: 1,
                    disk: 20,
                    peer: 3,
                    hub: 4,
                },
                wait_hub: Duration::from_millis(1500),
                ..Ledger::default()
            },
        })
    }
}

impl Generator for Scripted {
    fn model(&self) -> &str {
        "deltafin/scripted"
    }

    fn fingerprint(&self) -> String {
        "fp_script".to_owned()
    }

    fn context(&self) -> usize {
        8192
    }

    fn vocab(&self) -> usize {
        self.tokenizer.vocab_len()
    }

    fn tokens(&self, prompt: &Prompt) -> Result<Vec<TokenId>, Failure> {
        let ids = match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => self.tokenizer.encode(text),
            Prompt::Chat(chat) => {
                let pieces = crate::text::render(chat)?;
                self.tokenizer.encode_pieces(&pieces)
            }
        };
        if ids.is_empty() {
            return Err(Failure::Refused {
                param: Some("prompt".to_owned()),
                code: "empty_prompt",
                message: "the prompt is empty".to_owned(),
            });
        }
        Ok(ids)
    }

    fn bytes(&self, id: TokenId) -> Vec<u8> {
        self.tokenizer.bytes(id).to_vec()
    }

    fn special(&self, id: TokenId) -> bool {
        self.tokenizer.is_special(id)
    }

    fn generate(
        &self,
        ask: &Ask,
        on: &mut dyn FnMut(Happening<'_>) -> ControlFlow<()>,
    ) -> Result<Outcome, Failure> {
        self.seen.lock().unwrap().push(ask.clone());
        let bell = Arc::clone(&self.bell);
        let _hearing = ask.cancel.hear(move || bell.notify_all());
        let ids = self.tokens(&ask.prompt)?;
        {
            let mut state = self.state.lock().unwrap();
            state.1 += 1;
            self.bell.notify_all();
        }
        let played =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.play(ask, &ids, on)));
        let mut state = self.state.lock().unwrap();
        state.1 -= 1;
        let interrupted = |o: &Outcome| o.finish == Finish::Interrupted;
        if matches!(&played, Ok(Ok(outcome)) if interrupted(outcome)) {
            state.2 += 1;
        }
        self.bell.notify_all();
        drop(state);
        played.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn read(
        &self,
        ids: &[TokenId],
        _: &Cancel,
        on: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Outcome, Failure> {
        // After each token, its successor's number is likeliest by far.
        for (row, id) in ids.iter().enumerate() {
            let mut logits = vec![0.0; self.vocab()];
            logits[(*id as usize + 1) % self.vocab()] = 9.0;
            on(row, &logits);
        }
        Ok(Outcome {
            finish: Finish::Length,
            prompt_tokens: ids.len(),
            cached_tokens: 0,
            completion_tokens: 0,
            reasoning_tokens: None,
            ledger: Ledger::default(),
        })
    }

    fn arrivals(&self, since: u64) -> (u64, Vec<Arrived>) {
        let one = Arrived {
            layer: 1,
            expert: 2,
            source: "hub",
        };
        (3, vec![one; usize::try_from(3 - since.min(3)).unwrap()])
    }

    fn now(&self) -> Now {
        Now {
            busy: self.state.lock().unwrap().1 > 0,
            layers: 8,
            ..Now::default()
        }
    }
}

pub(super) const ANY: &str = "127.0.0.1:0";

/// A server that is ready, with a heartbeat short enough for tests.
pub(super) fn serve(generator: &Arc<Scripted>) -> Server {
    let options = ServerOptions {
        heartbeat: Duration::from_millis(100),
        // One at a time, so that a test can tell who waits for whom.
        running_max: 1,
        ..ServerOptions::new()
    };
    serve_with(generator, options)
}

pub(super) fn serve_with(generator: &Arc<Scripted>, options: ServerOptions) -> Server {
    let server = Server::start(ANY.parse().unwrap(), options).unwrap();
    server
        .ready(Arc::clone(generator) as Arc<dyn Generator>)
        .unwrap();
    server
}

/// A server whose generator always says the same.
pub(super) fn saying(beats: Vec<Beat>) -> (Server, Arc<Scripted>) {
    let generator = Scripted::new(move |_| beats.clone());
    (serve(&generator), generator)
}

pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    /// Without the framing of chunks.
    pub(super) body: String,
    /// Whether the body came to its proper end.
    pub(super) complete: bool,
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The JSON of every event; the last words must be there, and last.
    pub(super) fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self
            .body
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.iter()
            .map(|d| serde_json::from_str(d).unwrap())
            .collect()
    }
}

pub(super) fn send(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head.push_str(&format!("host: {addr}\r\n"));
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    stream.write_all(head.as_bytes()).unwrap();
    // Who is turned away early may find the connection closed.
    let _ = stream.write_all(body.as_bytes());
    stream
}

pub(super) fn receive(mut stream: TcpStream) -> Reply {
    let mut raw = Vec::new();
    // A connection that is cut is what some tests look for.
    let _ = stream.read_to_end(&mut raw);
    let raw = String::from_utf8_lossy(&raw).into_owned();
    let (head, rest) = raw.split_once("\r\n\r\n").expect("a head");
    let mut lines = head.lines();
    let status = lines.next().unwrap()[9..12].parse().unwrap();
    let headers: Vec<_> = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let chunked = headers
        .iter()
        .any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let (body, complete) = if chunked {
        unchunk(rest)
    } else {
        (rest.to_owned(), true)
    };
    Reply {
        status,
        headers,
        body,
        complete,
    }
}

fn unchunk(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = after.get(..size) else {
            break;
        };
        body.push_str(chunk);
        rest = &after[size + 2..];
    }
    (body, false)
}

pub(super) fn post(server: &Server, path: &str, body: &Value) -> Reply {
    receive(send(server.addr(), "POST", path, &[], &body.to_string()))
}

pub(super) fn get(server: &Server, path: &str) -> Reply {
    receive(send(server.addr(), "GET", path, &[], ""))
}

/// Reads until `text` has come; gives everything read, and how long it took.
pub(super) fn read_until(stream: &mut TcpStream, text: &str) -> (String, Duration) {
    let started = Instant::now();
    let mut seen = String::new();
    let mut buffer = [0; 1024];
    while !seen.contains(text) {
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0, "ended before {text:?}: {seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    (seen, started.elapsed())
}
