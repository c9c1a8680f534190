//! A proxy as companies have them: it forwards plain requests, tunnels what it is asked to connect,
//! speaks SOCKS5, may want a password, resolves names of its own, and notes who asked for what.

use std::collections::HashMap;
use std::io;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::net::Shutdown;
use std::net::SocketAddr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::Mutex;

use base64::Engine as _;

/// One request to the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// `GET`, `HEAD`, `CONNECT`, or `SOCKS`.
    pub method: String,
    /// Host and port that were to be reached.
    pub target: String,
    /// `Proxy-Authorization`, decoded; name and password with a colon between.
    pub credentials: Option<String>,
    /// Whether it was let through.
    pub served: bool,
}

/// A running proxy. It ends with the process.
#[derive(Debug)]
pub struct TestProxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Where hosts are that only the proxy knows.
    names: HashMap<String, SocketAddr>,
    wanted: Option<String>,
    seen: Mutex<Vec<Seen>>,
}

impl TestProxy {
    /// One that lets everybody through and knows these names.
    pub fn start(names: &[(&str, SocketAddr)]) -> Self {
        TestProxy::serve(names, None)
    }

    /// One that wants these credentials, `NAME:PASSWORD`.
    pub fn wanting(credentials: &str, names: &[(&str, SocketAddr)]) -> Self {
        TestProxy::serve(names, Some(credentials.to_owned()))
    }

    fn serve(names: &[(&str, SocketAddr)], wanted: Option<String>) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let state = Arc::new(State {
            names: names.iter().map(|(n, a)| ((*n).to_owned(), *a)).collect(),
            wanted,
            seen: Mutex::default(),
        });
        let own = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                let state = Arc::clone(&own);
                // Whoever goes away in the middle ends his own connection alone.
                std::thread::spawn(move || drop(state.talk(stream)));
            }
        });
        TestProxy { address, state }
    }

    /// `127.0.0.1:PORT`, to be put behind a scheme.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// How often a target was let through.
    pub fn served(&self, target: &str) -> usize {
        let seen = self.seen();
        seen.iter()
            .filter(|s| s.served && s.target == target)
            .count()
    }
}

impl State {
    fn talk(&self, client: TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        if reader.fill_buf()?.first() == Some(&5) {
            return self.socks(reader, client);
        }
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line == "\r\n" {
                break;
            }
            head.push(line.trim_end().to_owned());
        }
        self.http(&head, reader, client)
    }

    fn http(
        &self,
        head: &[String],
        reader: BufReader<TcpStream>,
        mut client: TcpStream,
    ) -> io::Result<()> {
        let mut words = head[0].split(' ');
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (host, path) = match target.strip_prefix("http://") {
            Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
            None => (target, ""),
        };
        let named = |line: &&String| {
            let (name, _) = line.split_once(':').unwrap_or((line, ""));
            name.eq_ignore_ascii_case("proxy-authorization")
        };
        let credentials = head[1..].iter().find(named).and_then(|line| {
            let word = line.split(' ').next_back()?;
            let plain = base64::engine::general_purpose::STANDARD.decode(word);
            String::from_utf8(plain.ok()?).ok()
        });
        let welcome = self.wanted.is_none() || credentials == self.wanted;
        let port = if host.contains(':') { "" } else { ":80" };
        let target = format!("{host}{port}");
        self.note(method, &target, credentials, welcome);
        if !welcome {
            let reply = "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\
                Content-Length: 0\r\nConnection: close\r\n\r\n";
            return client.write_all(reply.as_bytes());
        }
        let Ok(mut upstream) = self.reach(&target) else {
            let reply =
                "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            return client.write_all(reply.as_bytes());
        };
        if method == "CONNECT" {
            client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
            return tunnel(reader, client, upstream);
        }
        let mut request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        let hop = ["proxy-authorization", "proxy-connection", "connection"];
        for line in &head[1..] {
            let (name, _) = line.split_once(':').unwrap_or((line, ""));
            if !hop.contains(&name.to_ascii_lowercase().as_str()) {
                request.push_str(&format!("{line}\r\n"));
            }
        }
        request.push_str("\r\n");
        upstream.write_all(request.as_bytes())?;
        io::copy(&mut upstream, &mut client)?;
        client.shutdown(Shutdown::Both)
    }

    /// RFC 1928: a greeting, a request, a tunnel. Without passwords.
    fn socks(&self, mut reader: BufReader<TcpStream>, mut client: TcpStream) -> io::Result<()> {
        let mut two = [0; 2];
        reader.read_exact(&mut two)?;
        reader.read_exact(&mut vec![0; usize::from(two[1])])?;
        client.write_all(&[5, 0])?;
        let mut four = [0; 4];
        reader.read_exact(&mut four)?;
        let host = match four[3] {
            1 => {
                let mut ip = [0; 4];
                reader.read_exact(&mut ip)?;
                std::net::Ipv4Addr::from(ip).to_string()
            }
            3 => {
                let mut length = [0; 1];
                reader.read_exact(&mut length)?;
                let mut name = vec![0; usize::from(length[0])];
                reader.read_exact(&mut name)?;
                String::from_utf8_lossy(&name).into_owned()
            }
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        reader.read_exact(&mut two)?;
        let target = format!("{host}:{}", u16::from_be_bytes(two));
        self.note("SOCKS", &target, None, true);
        match self.reach(&target) {
            Ok(upstream) => {
                client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])?;
                tunnel(reader, client, upstream)
            }
            Err(_) => client.write_all(&[5, 4, 0, 1, 0, 0, 0, 0, 0, 0]),
        }
    }

    fn reach(&self, target: &str) -> io::Result<TcpStream> {
        let host = target.rsplit_once(':').map_or(target, |(host, _)| host);
        match self.names.get(host) {
            Some(address) => TcpStream::connect(address),
            None => TcpStream::connect(target),
        }
    }

    fn note(&self, method: &str, target: &str, credentials: Option<String>, served: bool) {
        self.seen.lock().unwrap().push(Seen {
            method: method.to_owned(),
            target: target.to_owned(),
            credentials,
            served,
        });
    }
}

/// Copies both ways until one side has said all.
fn tunnel(
    mut from: BufReader<TcpStream>,
    mut client: TcpStream,
    mut upstream: TcpStream,
) -> io::Result<()> {
    let mut up = upstream.try_clone()?;
    let there = std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut up);
        let _ = up.shutdown(Shutdown::Write);
    });
    let back = io::copy(&mut upstream, &mut client);
    let _ = client.shutdown(Shutdown::Both);
    let _ = there.join();
    back.map(drop)
}
