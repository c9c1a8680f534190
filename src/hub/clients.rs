//! HTTP clients, and one request with its waits.

use std::error::Error as _;
use std::sync::OnceLock;
use std::time::Duration;

use reqwest::Client;
use reqwest::ClientBuilder;
use reqwest::Response;
use reqwest::Url;
use reqwest::header::ACCEPT_ENCODING;
use reqwest::header::AUTHORIZATION;
use reqwest::header::RANGE;
use reqwest::redirect::Policy;
use tokio::time::timeout;

use super::HubError;
use super::HubOptions;
use super::Proxy;
use super::Timing;
use super::Token;
use super::address::loopback;

/// How proxies can be spoken to.
const PROXY_SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// Who a request goes to. Each has connections of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The hub: API and `/resolve/`. The only one that ever sees a token.
    Hub,
    /// Wherever the bytes lie.
    Content,
    /// The same over a connection nobody used before, since the last one was slow or lied.
    Fresh,
}

/// One client a role, twice: for other machines, and for this one, where no proxy stands between
/// and no system certificates are needed. Built when first used.
pub(super) struct Clients {
    proxy: Proxy,
    user_agent: String,
    connect: Duration,
    lanes_max: usize,
    #[cfg(feature = "tls")]
    certificates: Vec<reqwest::Certificate>,
    built: [OnceLock<Result<Client, String>>; 6],
}

impl Clients {
    pub(super) fn new(options: &HubOptions) -> Result<Self, HubError> {
        if let Proxy::Url(url) = &options.proxy {
            let wrong = |why: String| HubError::Address {
                address: super::address::shown(url),
                why: format!("not a proxy: {why}"),
            };
            reqwest::Proxy::all(url).map_err(|e| wrong(chain(e)))?;
            // The HTTP library takes any, and then asks directly what was to go through a proxy.
            let scheme = url.split_once("://").map_or("http", |(scheme, _)| scheme);
            if !PROXY_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()) {
                return Err(wrong(format!("it is none of {}", PROXY_SCHEMES.join(", "))));
            }
        }
        #[cfg(feature = "tls")]
        {
            // Fails if a provider is there already, which is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Ok(Clients {
            proxy: options.proxy.clone(),
            user_agent: options.user_agent.clone(),
            connect: options.timing.connect,
            lanes_max: options.lanes_max.max(1),
            #[cfg(feature = "tls")]
            certificates: certificates(&options.extra_ca_pem)?,
            built: Default::default(),
        })
    }

    fn client(&self, role: Role, url: &Url) -> Result<&Client, String> {
        let near = loopback(url);
        let slot = usize::from(near) * 3 + role as usize;
        self.built[slot]
            .get_or_init(|| self.build(role, near).map_err(chain))
            .as_ref()
            .map_err(Clone::clone)
    }

    fn build(&self, role: Role, near: bool) -> reqwest::Result<Client> {
        let idle = match role {
            Role::Hub => 4,
            Role::Content => self.lanes_max,
            Role::Fresh => 0,
        };
        // Redirects are followed by hand: each hop decides anew who may see the token. A
        // `Referer` would tell the CDN what was asked of the hub. Automatic retries would hide
        // requests from the counts.
        let builder = Client::builder()
            .user_agent(&self.user_agent)
            .redirect(Policy::none())
            .referer(false)
            .retry(reqwest::retry::never())
            .http1_only()
            .connect_timeout(self.connect)
            .pool_max_idle_per_host(idle)
            .pool_idle_timeout(Duration::from_secs(40));
        let builder = match &self.proxy {
            Proxy::Url(url) => builder.proxy(reqwest::Proxy::all(url)?),
            Proxy::Direct => builder.no_proxy(),
            Proxy::System if near => builder.no_proxy(),
            Proxy::System => builder,
        };
        self.trust(builder, near).build()
    }

    #[cfg(feature = "tls")]
    fn trust(&self, builder: ClientBuilder, near: bool) -> ClientBuilder {
        let builder = builder.tls_backend_rustls();
        if near {
            builder.tls_certs_only(self.certificates.clone())
        } else {
            builder.tls_certs_merge(self.certificates.clone())
        }
    }

    #[cfg(not(feature = "tls"))]
    #[expect(clippy::unused_self, reason = "the same face with and without TLS")]
    fn trust(&self, builder: ClientBuilder, _near: bool) -> ClientBuilder {
        builder
    }

    /// Sends one request and waits for its headers.
    pub(super) async fn send(&self, ask: Ask<'_>, timing: &Timing) -> Result<Response, SendError> {
        let client = self
            .client(ask.role, ask.url)
            .map_err(|why| SendError::hopeless(format!("no HTTP client: {why}")))?;
        let method = if ask.head {
            reqwest::Method::HEAD
        } else {
            reqwest::Method::GET
        };
        // With compression allowed a CDN may drop the range and answer with the whole file.
        let mut request = client
            .request(method, ask.url.clone())
            .header(ACCEPT_ENCODING, "identity");
        if let Some(token) = ask.token {
            let mut value =
                reqwest::header::HeaderValue::try_from(format!("Bearer {}", token.secret()))
                    .map_err(|_| {
                        SendError::hopeless(format!(
                            "the token from {} holds characters no header can carry",
                            token.origin()
                        ))
                    })?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        if let Some((first, last)) = ask.range {
            request = request.header(RANGE, format!("bytes={first}-{last}"));
        }
        match timeout(timing.headers + timing.connect, request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(SendError::classify(error)),
            Err(_) => Err(SendError {
                why: format!("no answer within {} s", timing.headers.as_secs_f32()),
                hopeless: false,
                stale: false,
            }),
        }
    }
}

/// One request.
pub(super) struct Ask<'a> {
    pub(super) role: Role,
    pub(super) url: &'a Url,
    pub(super) head: bool,
    pub(super) token: Option<&'a Token>,
    /// First and last byte, both included.
    pub(super) range: Option<(u64, u64)>,
}

/// A request that got no reply.
#[derive(Debug)]
pub(super) struct SendError {
    /// What went wrong, without any address.
    pub(super) why: String,
    /// Trying again changes nothing.
    pub(super) hopeless: bool,
    /// A pooled connection turned out to be closed: no fault of anybody's.
    pub(super) stale: bool,
}

impl SendError {
    fn hopeless(why: String) -> Self {
        SendError {
            why,
            hopeless: true,
            stale: false,
        }
    }

    fn classify(error: reqwest::Error) -> Self {
        let connect = error.is_connect();
        let timeout = error.is_timeout();
        let why = chain(error);
        // The HTTP library gives no better handle on these than their words.
        let lower = why.to_ascii_lowercase();
        let certificate = ["certificate", "unknownissuer", "notvalidforname"];
        let untrusted = connect && certificate.iter().any(|word| lower.contains(word));
        let garbled = lower.contains("message head is too large");
        let unsupported = lower.contains("scheme is not http");
        let unknown = connect && lower.contains("proxy authorization required");
        let why = if untrusted {
            format!("{why} (a company's own certificate can be named in SSL_CERT_FILE)")
        } else if unknown {
            format!("{why} (its name and password go into HTTPS_PROXY=http://NAME:PASSWORD@host)")
        } else {
            why
        };
        SendError {
            stale: !connect && !timeout && !garbled,
            hopeless: untrusted || garbled || unsupported || unknown,
            why,
        }
    }
}

/// An error and its causes in one line, without the address, whose query may be a signature.
pub(super) fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(feature = "tls")]
fn certificates(pems: &[Vec<u8>]) -> Result<Vec<reqwest::Certificate>, HubError> {
    let mut all = Vec::new();
    for pem in pems {
        let read = reqwest::Certificate::from_pem_bundle(pem).map_err(|e| HubError::Damaged {
            what: "a certificate".to_owned(),
            place: "the options".to_owned(),
            why: chain(e),
        })?;
        all.extend(read);
    }
    Ok(all)
}
