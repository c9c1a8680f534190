//! Secrets: comparing them, and signing URLs with them.

use std::fmt;
use std::io::Read;

use sha2::Digest as _;
use sha2::Sha256;

/// A token or key. It is kept as a digest, compared in constant time, and shows as `…`.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Remembers `text`, which is not kept.
    pub fn new(text: &str) -> Secret {
        Secret(Sha256::digest(text.as_bytes()).into())
    }

    /// A new secret from the system's randomness.
    pub(crate) fn random() -> std::io::Result<Secret> {
        let mut seed = [0; 32];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut seed)?;
        Ok(Secret(seed))
    }

    /// Whether `text` is the secret. Digests are compared, all their bytes in any case, so the
    /// time taken tells nothing about how much of a guess was right.
    pub fn is(&self, text: &str) -> bool {
        same(&self.0, &Sha256::digest(text.as_bytes()).into())
    }

    /// Whether a request's `Authorization` header carries the secret as a bearer token.
    pub(crate) fn admits(&self, headers: &axum::http::HeaderMap) -> bool {
        headers
            .get(axum::http::header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .is_some_and(|(scheme, token)| {
                scheme.eq_ignore_ascii_case("bearer") && self.is(token.trim())
            })
    }

    /// HMAC-SHA256 of `text` under this secret, in hexadecimal.
    pub(crate) fn sign(&self, text: &str) -> String {
        let pad = |with: u8| {
            let mut block = [with; 64];
            for (byte, key) in block.iter_mut().zip(self.0) {
                *byte ^= key;
            }
            block
        };
        let inner = Sha256::new()
            .chain_update(pad(0x36))
            .chain_update(text)
            .finalize();
        let outer = Sha256::new()
            .chain_update(pad(0x5c))
            .chain_update(inner)
            .finalize();
        crate::terms::Digest(outer.into()).to_string()
    }

    /// Whether `signature` is that of `text`; in constant time.
    pub(crate) fn signed(&self, text: &str, signature: &str) -> bool {
        signature
            .parse::<crate::terms::Digest>()
            .is_ok_and(|given| {
                let right: crate::terms::Digest = self
                    .sign(text)
                    .parse()
                    .expect("a signature is 64 hexadecimal digits");
                same(&given.0, &right.0)
            })
    }
}

fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}
