use proptest::prelude::*;

use super::bytes;
use super::front;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::Dtype;
use crate::checkpoint::HEADER_LEN_MAX;
use crate::checkpoint::Header;
use crate::checkpoint::HeaderFault;
use crate::checkpoint::header_len;
use crate::terms::ByteRange;

/// Reads a header whose shard holds `data` bytes after it.
fn read(json: &str, data: u64) -> Result<Header, HeaderFault> {
    let front = front(json);
    Header::read("a.safetensors", &front, front.len() as u64 + data).map_err(|error| match error {
        CheckpointError::Header { shard, fault } => {
            assert_eq!(shard, "a.safetensors");
            fault
        }
        other => panic!("{other}"),
    })
}

fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn table(tensors: &[String]) -> String {
    format!("{{{}}}", tensors.join(","))
}

#[test]
fn tensors_are_placed_from_the_first_byte_of_the_file() {
    let json = table(&[
        r#""__metadata__":{"format":"pt"}"#.to_owned(),
        tensor("b", "F32", "[2,3]", 8, 32),
        tensor("a", "BF16", "[4]", 0, 8),
        tensor("one", "U8", "[]", 32, 33),
        tensor("none", "F64", "[0,5]", 8, 8),
    ]);
    let header = read(&json, 33).unwrap();
    let start = front(&json).len() as u64;
    let names: Vec<&str> = header.entries().iter().map(|e| &*e.name).collect();
    assert_eq!(names, ["a", "none", "b", "one"]);
    assert_eq!(
        header.get("b").unwrap().range,
        ByteRange::new(start + 8, start + 32)
    );
    assert_eq!(header.get("b").unwrap().dtype, Dtype::F32);
    assert_eq!(*header.get("b").unwrap().shape, [2, 3]);
    assert_eq!(header.data(), ByteRange::new(start, start + 33));
    assert!(header.get("c").is_none());
}

#[test]
fn a_header_that_is_not_what_it_says_is_refused_before_it_is_read() {
    let len =
        |first: &[u8], size| header_len("a.safetensors", first, size).map_err(|e| e.to_string());
    assert_eq!(len(&96u64.to_le_bytes(), 1000), Ok(104));
    assert_eq!(len(&992u64.to_le_bytes(), 1000), Ok(1000));
    assert!(
        len(&993u64.to_le_bytes(), 1000)
            .unwrap_err()
            .contains("a.safetensors: the safetensors header is damaged: it should be 993")
    );
    assert!(
        len(&(HEADER_LEN_MAX + 1).to_le_bytes(), 1 << 40)
            .unwrap_err()
            .contains("at most 100000000")
    );
    assert!(len(&u64::MAX.to_le_bytes(), u64::MAX).is_err());
    assert!(
        len(&[1, 2, 3], 1000)
            .unwrap_err()
            .contains("there are 3 bytes")
    );
    assert!(len(&[0; 8], 7).is_err());
    let mut cut = front(&table(&[tensor("a", "U8", "[8]", 0, 8)]));
    cut.truncate(cut.len() - 1);
    let error = Header::read("a", &cut, 1000).unwrap_err().to_string();
    assert!(error.contains("but only"), "{error}");
}

#[test]
fn each_rule_of_the_format_is_held() {
    let a = tensor("a", "U8", "[8]", 0, 8);
    let b = |begin, end| tensor("b", "U8", &format!("[{}]", end - begin), begin, end);
    assert!(matches!(
        read(&table(&[a.clone(), b(9, 12)]), 12),
        Err(HeaderFault::Tiling {
            expected: 8,
            begin: 9,
            ..
        })
    ));
    assert!(matches!(
        read(&table(&[a.clone(), b(7, 12)]), 12),
        Err(HeaderFault::Tiling {
            expected: 8,
            begin: 7,
            ..
        })
    ));
    assert!(matches!(
        read(&table(&[b(2, 12)]), 12),
        Err(HeaderFault::Tiling { expected: 0, .. })
    ));
    assert!(matches!(
        read(&table(std::slice::from_ref(&a)), 9),
        Err(HeaderFault::FileSize { .. })
    ));
    assert!(matches!(
        read(&table(std::slice::from_ref(&a)), 7),
        Err(HeaderFault::FileSize { .. })
    ));
    assert!(
        matches!(read(&table(&[a.clone(), a.clone()]), 8), Err(HeaderFault::Duplicate { tensor }) if tensor == "a")
    );
    let escaped = a.replace("\"a\"", r#""\u0061""#);
    assert!(matches!(
        read(&table(&[a.clone(), escaped]), 8),
        Err(HeaderFault::Duplicate { .. })
    ));
    for (dtype, shape, end) in [
        ("U8", "[9]", 8),
        ("F32", "[8]", 8),
        ("F4", "[3]", 2),
        ("F4", "[3]", 1),
        ("U8", "[18446744073709551615,2]", 8),
        ("F64", "[18446744073709551615]", 8),
    ] {
        let outcome = read(&table(&[tensor("a", dtype, shape, 0, end)]), end);
        assert!(
            matches!(outcome, Err(HeaderFault::Size { .. })),
            "{dtype} {shape}: {outcome:?}"
        );
    }
    assert!(matches!(
        read(&table(&[tensor("a", "U8", "[1]", 9, 8)]), 8),
        Err(HeaderFault::Size { .. })
    ));
    let far = tensor("a", "U8", "[1]", u64::MAX - 1, u64::MAX);
    assert!(matches!(
        read(&table(&[far]), 8),
        Err(HeaderFault::Size { .. })
    ));
    assert!(
        matches!(read(&table(&[tensor("a", "F33", "[8]", 0, 8)]), 8), Err(HeaderFault::Dtype { dtype, .. }) if dtype == "F33")
    );
    assert!(
        read(&table(&[tensor("a", "F4", "[4]", 0, 2)]), 2).is_ok(),
        "two values a byte"
    );
}

#[test]
fn json_that_is_no_header_is_refused() {
    for json in [
        "",
        " {}",
        "[]",
        "{",
        "{}x",
        r#"{"a":1}"#,
        r#"{"a":{"dtype":"U8","shape":[1]}}"#,
        r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}"#,
        r#"{"__metadata__":{"a":1}}"#,
        r#"{"__metadata__":{},"__metadata__":{}}"#,
        "\u{feff}{}",
    ] {
        assert!(read(json, 0).is_err(), "{json}");
    }
    assert!(read("{}", 0).is_ok(), "no tensors is a header");
}

#[test]
fn a_truncated_fixture_is_refused_wherever_it_is_cut() {
    let file = bytes("tiny-k3", "model-00010-of-000010.safetensors");
    assert!(Header::read("s", &file, file.len() as u64).is_ok());
    for len in 0..file.len() {
        assert!(
            Header::read("s", &file[..len], len as u64).is_err(),
            "cut to {len}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), size in any::<u64>()) {
        let _ = Header::read("s", &bytes, size);
        let _ = header_len("s", &bytes, size);
    }

    #[test]
    fn no_change_of_a_header_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut file = bytes("tiny-k3", "model-00009-of-000010.safetensors");
        let size = file.len() as u64;
        let len = usize::try_from(header_len("s", &file, size).unwrap()).unwrap();
        file.truncate(len);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Ok(header) = Header::read("s", &file, size) {
            prop_assert!(header.entries().iter().all(|e| e.range.end <= size));
        }
    }
}
