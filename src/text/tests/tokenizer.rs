use std::time::Duration;
use std::time::Instant;

use crate::terms::TokenId;
use crate::text::Piece;
use crate::text::TextError;
use crate::text::Tokenizer;
use crate::text::bpe::Ranks;
use crate::text::split::for_each_piece;
use crate::text::split::for_each_slice;
use crate::text::stop_ids;

use super::Seeded;
use super::austen;
use super::fixture;
use super::int_tensor;

fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    for_each_piece(text, |piece| pieces.push(piece));
    pieces
}

#[test]
fn text_splits_as_the_pattern_says() {
    for (text, expected) in [
        ("Hello, world!", &["Hello", ",", " world", "!"][..]),
        ("中文测试：你好", &["中文测试", "：", "你好"]),
        ("日本語のひらがな", &["日本語", "のひらがな"]),
        ("don't DON'T we'll'x", &["don't", " DON'T", " we'll", "'x"]),
        ("it'ſ", &["it'ſ"]),
        ("1234567890", &["123", "456", "789", "0"]),
        ("HTTPServer", &["HTTPServer"]),
        ("camelCase", &["camel", "Case"]),
        ("あAあB", &["あAあ", "B"]),
        ("a   b", &["a", "  ", " b"]),
        ("a   1", &["a", "  ", " ", "1"]),
        ("a   !", &["a", "  ", " !"]),
        ("a  ", &["a", "  "]),
        ("a\r\n\r\nb", &["a", "\r\n\r\n", "b"]),
        ("a  \n  b", &["a", "  \n", " ", " b"]),
        ("!?\r\n\r\n x", &["!?\r\n\r\n", " x"]),
        ("a\u{1c}b", &["a", "\u{1c}b"]),
        ("\u{301}\u{301}", &["\u{301}\u{301}"]),
        ("\u{301}1", &["\u{301}", "1"]),
        ("!\u{2e80}", &["!\u{2e80}"]),
        ("1\u{3007}2", &["1\u{3007}2"]),
        ("\u{3007}1", &["\u{3007}", "1"]),
    ] {
        assert_eq!(pieces(text), expected, "{text:?}");
    }
}

#[test]
fn long_runs_and_long_texts_are_cut_where_the_reference_cuts() {
    let lengths = |text: &str| {
        let mut lengths = Vec::new();
        for_each_slice(text, |slice| lengths.push(slice.chars().count()));
        assert_eq!(lengths.iter().sum::<usize>(), text.chars().count());
        lengths
    };
    assert_eq!(lengths(""), [0; 0]);
    assert_eq!(lengths(&"é".repeat(25_000)), [25_000]);
    assert_eq!(lengths(&"é".repeat(25_001)), [25_000, 1]);
    assert_eq!(lengths(&"\u{1c} ".repeat(25_000)), [25_000, 25_000]);
    // A change of kind restarts the count, a cut of 400,000 too.
    let change = format!("{}{}x", "x".repeat(25_000), " ".repeat(25_000));
    assert_eq!(lengths(&change), [50_001]);
    let words = "ab ".repeat(133_330) + &"c".repeat(30_000);
    assert_eq!(lengths(&words), [400_000, 25_000, 4_990]);
}

#[test]
fn ids_are_those_the_checkpoint_was_trained_with() {
    let tokenizer = austen();
    let cases: serde_json::Value =
        serde_json::from_slice(&fixture("austen-k3/goldens/cases.json")).unwrap();
    let mut compared = 0;
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let file = format!("austen-k3/goldens/{name}.safetensors");
        let greedy = int_tensor(&file, "greedy_ids");
        let text = tokenizer.decode(&greedy);
        assert_eq!(
            String::from_utf8_lossy(&text),
            case["greedy_text"].as_str().unwrap()
        );
        if let Some(prompt) = case["prompt"].as_str() {
            assert_eq!(tokenizer.encode(prompt), int_tensor(&file, "ids"), "{name}");
            compared += 1;
        }
    }
    assert_eq!(compared, 2);
}

#[test]
fn special_tokens_are_known_by_name_and_unlisted_ones_are_reserved() {
    let tokenizer = austen();
    assert_eq!(tokenizer.special("<|open|>"), Some(2051));
    assert_eq!(tokenizer.special("[PAD]"), Some(2303));
    assert_eq!(tokenizer.special("<|reserved_token_2056|>"), Some(2056));
    assert_eq!(tokenizer.special("<|reserved_token_2051|>"), None);
    assert_eq!(tokenizer.vocab_len(), 2304);
    assert!(tokenizer.is_special(2048) && !tokenizer.is_special(2047));
    assert!(!tokenizer.is_special(2304) && !tokenizer.is_special(TokenId::MAX));
    assert_eq!(tokenizer.bytes(2051), b"<|open|>");
    assert_eq!(tokenizer.bytes(0), b"\0");
    assert_eq!(tokenizer.bytes(2304), b"");
}

#[test]
fn only_markup_gives_special_tokens() {
    let tokenizer = austen();
    let text =
        "a <|open|> b [BOS]<|close|>message<|sep|><|end_of_msg|>[EOS]<|reserved_token_2056|>";
    assert!(tokenizer.encode(text).iter().all(|id| *id < 2048));
    let plain = tokenizer.encode_pieces(&[Piece {
        text: text.into(),
        markup: false,
    }]);
    assert_eq!(plain, tokenizer.encode(text));
    let markup = tokenizer.encode_pieces(&[Piece {
        text: text.into(),
        markup: true,
    }]);
    let special: Vec<_> = markup.iter().copied().filter(|id| *id >= 2048).collect();
    assert_eq!(special, [2051, 2048, 2052, 2053, 2050, 2049, 2056]);
    assert_eq!(tokenizer.decode(&markup), text.as_bytes());
    assert_eq!(
        markup[..3],
        [tokenizer.encode("a"), tokenizer.encode(" "), vec![2051]].concat()
    );
}

#[test]
fn pieces_are_encoded_each_on_its_own() {
    let tokenizer = austen();
    let piece = |text: &str| Piece {
        text: text.into(),
        markup: false,
    };
    let apart = tokenizer.encode_pieces(&[piece("th"), piece("e")]);
    assert_eq!(
        apart,
        [tokenizer.encode("th"), tokenizer.encode("e")].concat()
    );
    assert_ne!(apart, tokenizer.encode("the"));
}

#[test]
fn both_ways_of_merging_give_the_same_tokens() {
    let ranks = Ranks::parse(&fixture("austen-k3/model/tiktoken.model")).unwrap();
    let mut seeded = Seeded(5);
    for round in 0..4_000 {
        let letters: &[u8] = seeded.one(&[
            &b"ab"[..],
            b"aaab",
            b"the and",
            b"\xe2\x80\x9c\x94s",
            b"abcdefghilmnorstuvwy ",
        ]);
        let piece: Vec<u8> = (0..=seeded.below(120))
            .map(|_| seeded.one(letters))
            .collect();
        let (mut scan, mut heap) = (Vec::new(), Vec::new());
        ranks.merge_by_scan(&piece, &mut scan);
        ranks.merge_by_heap(&piece, &mut heap);
        assert_eq!(
            scan,
            heap,
            "round {round}: {:?}",
            String::from_utf8_lossy(&piece)
        );
    }
    assert_eq!(ranks.len(), 2048);
}

#[test]
fn equal_ranks_merge_from_the_left_and_a_whole_token_needs_no_merge() {
    let mut file: String = (0..=255u8).map(|b| line(&[b], b.into())).collect();
    file += &line(b"aa", 256);
    file += &line(b"xyz", 257); // no merge leads here: neither xy nor yz is a token
    let tokenizer = Tokenizer::new(file.as_bytes(), b"{}").unwrap();
    assert_eq!(tokenizer.encode("aaa"), [256, 97]);
    assert_eq!(
        tokenizer.encode(&"a".repeat(101)),
        [vec![256; 50], vec![97]].concat()
    );
    assert_eq!(tokenizer.encode("xyz"), [257]);
    assert_eq!(tokenizer.encode("wxyz"), [119, 120, 121, 122]);
}

fn line(token: &[u8], rank: usize) -> String {
    use base64::Engine;
    let token = base64::engine::general_purpose::STANDARD.encode(token);
    format!("{token} {rank}\n")
}

#[test]
fn a_megabyte_of_one_character_ends_in_bounded_time() {
    let tokenizer = austen();
    for c in [
        "a", "A", " ", "\n", "\r\n", " \n", "1", "!", "中", "\u{301}", "あ", "あA", "🙂", "'s",
        "\u{1c}", "\u{3000}", "aA", "'", "é",
    ] {
        let text = c.repeat(1_000_000 / c.len());
        let start = Instant::now();
        let ids = tokenizer.encode(&text);
        let taken = start.elapsed();
        assert!(tokenizer.decode(&ids) == text.as_bytes(), "{c:?}");
        assert!(taken < Duration::from_secs(10), "{c:?} took {taken:?}");
    }
}

#[test]
fn damaged_files_are_refused_with_the_line() {
    let good: String = (0..=255u8).map(|b| line(&[b], b.into())).collect();
    let refusal = |model: &str, config: &str| {
        let error = Tokenizer::new(model.as_bytes(), config.as_bytes())
            .err()
            .unwrap();
        assert!(matches!(error, TextError::Damaged { .. }) && error.hint().is_some());
        error.to_string()
    };
    for (model, says) in [
        (
            String::new(),
            "tiktoken.model: no token for the single byte 0",
        ),
        (
            good[..good.len() - 9].into(),
            "tiktoken.model: no token for the single byte 255",
        ),
        (
            good.clone() + "!!!! 256\n",
            "tiktoken.model line 257: not `base64(bytes) rank`",
        ),
        (good.clone() + "YWE=\n", "line 257: not"),
        (good.clone() + "YWE= x\n", "line 257: not"),
        (good.clone() + " 256\n", "line 257: not"),
        (
            good.clone() + "YWE= 257\n",
            "line 257: rank 257 where 256 is due",
        ),
        (
            good.clone() + "AA== 256\n",
            "line 257: the same bytes as a line before",
        ),
        (
            "version https://git-lfs.github.com/spec/v1\n".into(),
            "line 1: not",
        ),
    ] {
        let said = refusal(&model, "{}");
        assert!(said.contains(says), "{said} | {says}");
    }
    for (config, says) in [
        ("", "tokenizer_config.json: EOF"),
        ("3", "tokenizer_config.json: invalid type"),
        (r#"{"added_tokens_decoder":{"256":{}}}"#, "content"),
        (
            r#"{"added_tokens_decoder":{"255":{"content":"X"}}}"#,
            "id `255` of `X` is not one of 256 to 511",
        ),
        (
            r#"{"added_tokens_decoder":{"512":{"content":"X"}}}"#,
            "id `512` of `X`",
        ),
        (
            r#"{"added_tokens_decoder":{"-1":{"content":"X"}}}"#,
            "id `-1` of `X`",
        ),
        (
            r#"{"added_tokens_decoder":{"256":{"content":""}}}"#,
            "256 has no name",
        ),
        (
            r#"{"added_tokens_decoder":{"256":{"content":"X"},"300":{"content":"X"}}}"#,
            "256 and 300 are both named `X`",
        ),
    ] {
        let said = refusal(&good, config);
        assert!(said.contains(says), "{said} | {says}");
    }
    let windows = good.replace('\n', "\r\n") + "\r\n";
    assert!(Tokenizer::new(windows.as_bytes(), b"{}").is_ok());
}

#[test]
fn stops_come_from_the_files_and_by_name() {
    let tokenizer = austen();
    let stops = |generation: Option<&str>, eos: &[TokenId]| {
        stop_ids(generation.map(str::as_bytes), eos, &tokenizer)
    };
    // [EOS], <|end_of_msg|>, [EOT]; never <|close|>.
    assert_eq!(stops(None, &[]).unwrap(), [2049, 2050, 2057]);
    assert_eq!(
        stops(Some(r#"{"eos_token_id": 2050}"#), &[7]).unwrap(),
        [7, 2049, 2050, 2057]
    );
    assert_eq!(
        stops(Some(r#"{"eos_token_id": [9, 3]}"#), &[3]).unwrap(),
        [3, 9, 2049, 2050, 2057]
    );
    assert_eq!(
        stops(Some(r#"{"eos_token_id": null}"#), &[]).unwrap().len(),
        3
    );
    for wrong in [
        "",
        "3",
        r#"{"eos_token_id": "x"}"#,
        r#"{"eos_token_id": -1}"#,
    ] {
        let said = stops(Some(wrong), &[]).unwrap_err().to_string();
        assert!(said.starts_with("generation_config.json: "), "{said}");
    }
    let linear = r#"{"added_tokens_decoder":{"2050":{"content":"<|im_end|>"}}}"#;
    let linear = Tokenizer::new(
        &fixture("austen-k3/model/tiktoken.model"),
        linear.as_bytes(),
    )
    .unwrap();
    assert_eq!(stop_ids(None, &[], &linear).unwrap(), [2050]);
}

#[test]
fn no_text_panics_and_every_text_comes_back() {
    let tokenizer = austen();
    let mut seeded = Seeded(77);
    for _ in 0..3_000 {
        let text: String = (0..seeded.below(80))
            .filter_map(|_| {
                let bits = seeded.one(&[7, 8, 11, 14, 16, 21]);
                char::from_u32(u32::try_from(seeded.below(1 << bits)).unwrap())
            })
            .collect();
        assert_eq!(pieces(&text).concat(), text);
        let ids = tokenizer.encode(&text);
        assert!(ids.iter().all(|id| *id < 2048), "{text:?}");
        assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{text:?}");
        let markup = tokenizer.encode_pieces(&[Piece {
            text: text.clone(),
            markup: true,
        }]);
        assert_eq!(markup, ids, "{text:?}");
    }
}
