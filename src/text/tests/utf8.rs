use crate::text::Utf8Stream;

use super::Seeded;

#[test]
fn a_character_split_over_tokens_is_held_until_it_is_whole() {
    let mut stream = Utf8Stream::new();
    let face = "🙂".as_bytes();
    assert_eq!(stream.push(&face[..1]), "");
    assert_eq!(stream.push(&face[1..3]), "");
    assert_eq!(stream.push(&[face[3], b'!', 0xc3]), "🙂!");
    assert_eq!(stream.push(&[0xa9]), "é");
    assert_eq!(stream.finish(), "");
}

#[test]
fn a_character_that_never_becomes_whole_is_one_replacement() {
    let mut stream = Utf8Stream::new();
    assert_eq!(stream.push(&"🙂".as_bytes()[..3]), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
    assert_eq!(stream.push(b"\xe4\xb8"), "");
    assert_eq!(stream.push(b"a"), "\u{fffd}a");
}

#[test]
fn any_bytes_in_any_cuts_give_what_they_give_at_once() {
    let mut seeded = Seeded(11);
    let bits: [&[u8]; 12] = [
        b"a",
        "é".as_bytes(),
        "中".as_bytes(),
        "🙂".as_bytes(),
        b"\xff",
        b"\xc3",
        b"\xe4\xb8",
        b"\xf0\x9f\x99",
        b"\x80",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90",
    ];
    for _ in 0..20_000 {
        let mut bytes = Vec::new();
        for _ in 0..seeded.below(8) {
            bytes.extend_from_slice(seeded.one(&bits));
        }
        let mut stream = Utf8Stream::new();
        let (mut text, mut rest) = (String::new(), bytes.as_slice());
        while !rest.is_empty() {
            let (now, later) = rest.split_at(1 + seeded.below(rest.len()));
            text += &stream.push(now);
            rest = later;
        }
        text += &stream.finish();
        assert_eq!(text, String::from_utf8_lossy(&bytes), "{bytes:x?}");
    }
}
