#!/usr/bin/env python3
"""Token ids of seeded strings by PyPI's tiktoken, for tests/tokenizer.rs to compare with.

    python3 scripts/tokenizer_parity.py --venv DIR --out DIR [--install] [--all-characters]

Runs itself inside the virtual environment DIR; with --install it makes that and installs tiktoken.
Writes to --out, for each vocabulary: NAME.jsonl, a line {"text", "ids"} for each string, and for a
vocabulary that was made here also NAME.model.  Exit code 3: no environment with tiktoken.
"""
import argparse
import base64
import json
import random
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

TIKTOKEN = "tiktoken==0.14.0"
SEED = 20261201
STRINGS = 20_000
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*{CONTRACTION}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


# -- the environment

def python_in(folder):
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def has_tiktoken(python):
    return python.exists() and subprocess.run([python, "-c", "import tiktoken"], capture_output=True).returncode == 0


def prepare(folder, install):
    python = python_in(folder)
    if has_tiktoken(python):
        return python
    if not install:
        print(f"no tiktoken in {folder}; run once with --install", file=sys.stderr)
        sys.exit(3)
    try:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TIKTOKEN], check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"could not install {TIKTOKEN} into {folder}: {e}", file=sys.stderr)
        sys.exit(3)
    return python


# -- strings

ALPHABETS = {
    "ascii": [chr(c) for c in range(32, 127)],
    "lower": list("abcdefghijklmnopqrstuvwxyz"),
    "upper": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "space": list("      \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\ufeff"),
    "line": ["\r\n", "\n", "\r", " \n", "\n ", "\r\n\r\n"],
    "control": [chr(c) for c in range(0, 32)] + ["\x7f"],
    "han": list("中文测试你好世界的一是不了在人有我他这") + list("\u3005\u3007\u3021\u3038\u303b\u2e80\u2f00\u4dbf\U00020000\U0002a6df\U00030000"),
    "kana": list("あいうえおカキクケコーﾊﾝ々ゝ"),
    "hangul": list("한국어글자각"),
    "cyrillic": list("АБВабвгдёЁжЖ"),
    "greek": list("ΑΒΓαβγςΣᾳᾼ"),
    "title": list("ǅǈǋǲᾈᾘ"),
    "modifier": list("ʰʱˠˡⁿªºʼ"),
    "arabic": list("العربيةسلام") + list("\u064b\u0651\u0660\u0661"),
    "indic": list("हिन्दीभाषाகுதமிழ்"),
    "mark": list("\u0300\u0301\u0327\u20dd\u0903\u093e\ufe0f\U0001d165"),
    "number": list("0123456789") + list("½Ⅷⅷ²٣४〇𝟘㊀"),
    "symbol": list("!?.,;:-_/\\()[]{}<>|@#$%^&*+=~`\"'") + list("€©™→∑§¶…—“”‘’、。《》"),
    "emoji": ["🙂", "👍🏽", "👩‍👩‍👧", "🇳🇴", "❤️", "🏴\U000e0067\U000e0062\U000e007f", "☃", "1️⃣"],
    "fold": list("ſKÅıİßẞ"),
}
PHRASES = [
    "don't", "DON'T", "we'll", "I'VE", "they're", "it's", "IT'S", "he'd", "I'm", "'tis 'twas", "x'ſ", "a's's", "'S", "o'clock",
    "'re", "l'eau", "rock'n'roll", "Straße's", "日本's", "1's", " 's", "''s", "a'\u0301s", "'LL'll", "'lL", "a'v", "a'r", "a'l",
    "<|open|>", "<|close|>message<|sep|>", "[BOS]", "[EOS]", "<|end_of_msg|>", "<|media_pad|>", "<|kimi_image_placeholder|>",
    "CamelCase", "HTTPServer", "snake_case", "iPhone", "McDonald", "ÀÉÎõü", "e\u0301", "\u0301", " \u0301\u0302", "1,234,567.89",
    "The quick brown fox", "     indented", "\t\tcode();", "http://example.org/a?b=c#d", "a@b.co", "  \n  \n", "\n\n\n", "...!?\r\n",
    "中文，测试。", "Hello世界", "世界Hello", "２０２６年", "3.14159", "١٢٣٤", "Привет, мир!", "😀😃😄", "a\u200db", "\ufeffBOM",
]


def some(rng, alphabet, longest):
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, longest)))


def scalar(rng):
    while True:
        c = rng.randrange(0x110000 if rng.random() < 0.2 else 0x3400)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def string(rng, novel):
    kind = rng.random()
    if kind < 0.08:
        return some(rng, rng.choice(list(ALPHABETS.values())), 200)
    if kind < 0.16:
        return "".join(scalar(rng) for _ in range(rng.randint(1, 60)))
    if kind < 0.30:
        at = rng.randrange(len(novel))
        return novel[at:at + rng.randint(1, 300)]
    out = []
    for _ in range(rng.randint(1, 12)):
        what = rng.random()
        if what < 0.3:
            out.append(rng.choice(PHRASES))
        elif what < 0.9:
            out.append(some(rng, rng.choice(list(ALPHABETS.values())), 8))
        else:
            out.append(rng.choice(list(ALPHABETS["space"])) * rng.randint(1, 20))
    return "".join(out)


def long_strings(rng, novel):
    """At and around the lengths where the reference cuts."""
    yield from (" " * n for n in (24_999, 25_000, 25_001, 30_000, 50_001))
    yield from (" " * n + "x" for n in (24_999, 25_000, 25_001, 30_000))
    yield "\n" * 30_000
    yield " \n" * 20_000 + "end"
    yield "\x1c" * 30_000                       # white space for the guard, none for the pattern
    yield "a" * 60_000
    yield "中" * 30_000
    yield "\u0301" * 30_000
    yield "x" + "\u0301" * 26_000 + "'s"
    yield "1" * 26_000
    yield "ab1-" * 8_000
    yield "🙂" * 26_000
    yield "A" * 25_000 + "b" + " " * 25_000 + "c" * 25_000
    words = novel[:50_000]
    for cut in (399_990, 399_999, 400_000, 400_001):
        text = (words * 9)[:cut]
        yield text + "  edge'll go  on"
    yield "".join(rng.choice(ALPHABETS["space"] + ALPHABETS["lower"]) for _ in range(410_000))


def strings(novel):
    rng = random.Random(SEED)
    seen = list(long_strings(rng, novel)) + ["", " ", "a\x1cb", "a\r\n\r\nb", "a   \n   b", *PHRASES]
    while len(seen) < STRINGS:
        seen.append(string(rng, novel))
    return seen


def all_characters():
    """Each character of Unicode between others of every kind."""
    chars = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for at in range(0, len(chars), 128):
        yield "".join(f"{c}a{c}B{c}1{c} {c}{c}!中{c}\n" for c in chars[at:at + 128])


# -- the reference

def slices(text):
    """The reference's two length guards."""
    for start in range(0, len(text), 400_000):
        part = text[start:start + 400_000]
        begin, run, space = 0, 0, part[0].isspace()
        for i, c in enumerate(part):
            if c.isspace() != space:
                run, space = 1, not space
            else:
                run += 1
                if run > 25_000:
                    yield part[begin:i]
                    begin, run = i, 1
        yield part[begin:]


def encode(encoding, text):
    return [i for part in slices(text) for i in encoding.encode_ordinary(part)]


def read_ranks(path):
    lines = (line.split() for line in path.read_text().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def make_ranks(pieces, rng, size):
    """A vocabulary of `size` tokens: merges learnt from the pieces, and whole pieces no merge leads to."""
    tokens = [bytes([b]) for b in range(256)]
    known = set(tokens)
    words = [([bytes([b]) for b in piece], count) for piece, count in pieces.items()]
    while len(tokens) < size - 500:
        pairs = Counter()
        for symbols, count in words:
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += count
        new = {}
        for (a, b), _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
            if a + b not in known and len(new) < 256:
                known.add(a + b)
                tokens.append(a + b)
                new[a, b] = a + b
        if not new:
            break
        for symbols, _ in words:
            i = 0
            while i + 1 < len(symbols):
                joined = new.get((symbols[i], symbols[i + 1]))
                if joined:
                    symbols[i:i + 2] = [joined]
                i += 1
    whole = sorted(piece for piece in pieces if 2 < len(piece) < 200 and piece not in known)
    tokens += rng.sample(whole, min(500, len(whole)))
    return {token: rank for rank, token in enumerate(tokens)}


def write(path, encoding, texts):
    with path.open("w", encoding="utf-8") as out:
        for text in texts:
            json.dump({"text": text, "ids": encode(encoding, text)}, out)
            out.write("\n")


def main_inside(options):
    import tiktoken
    root = Path(__file__).resolve().parent.parent
    austen = root / "fixtures/austen-k3"
    cases = json.loads((austen / "goldens/cases.json").read_text(encoding="utf-8"))
    novel = "\n".join(filter(None, (c["prompt"] for c in cases))) + (austen / "MODEL-CARD.md").read_text(encoding="utf-8")
    novel *= 60_000 // len(novel) + 1
    options.out.mkdir(parents=True, exist_ok=True)

    def encoding(name, ranks):
        return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    small = encoding("austen", read_ranks(austen / "model/tiktoken.model"))
    if options.all_characters:                  # the vocabulary has no say in how text is split
        return write(options.out / "austen.jsonl", small, all_characters())
    texts = strings(novel)
    write(options.out / "austen.jsonl", small, texts)

    # Any rank file will do for a comparison; this one has long tokens and some that no merge leads to.
    rng = random.Random(SEED + 1)
    words = Counter(" " + word for text in rng.sample(texts, min(len(texts), 1_500)) for word in text[:2_000].split())
    pieces = Counter({word.encode()[:64]: count for word, count in words.items()})
    ranks = make_ranks(pieces, rng, 24_000)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (options.out / "made.model").write_text("".join(lines))
    write(options.out / "made.jsonl", encoding("made", ranks), texts)
    print(f"{len(texts)} strings, vocabularies of {small.n_vocab} and {len(ranks)} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--install", action="store_true", help="make the environment if it is not there")
    parser.add_argument("--all-characters", action="store_true", help="every character of Unicode instead of the seeded strings")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return main_inside(options)
    python = prepare(options.venv, options.install)
    return subprocess.run([python, *sys.argv, "--inside"]).returncode


if __name__ == "__main__":
    sys.exit(main())
