#!/usr/bin/env bash
# Sees every fault's test fail once with its guard removed: a test that passes without the guard proves
# nothing. By hand; a quarter of an hour on two cores after a build.
#
# usage: scripts/mutants.sh [NAME]...     all guards of fixtures/mutants/guards.txt, or those whose
#                                         names begin so: `scripts/mutants.sh 15 48 proxy`
#
# Every guard is removed in one scratch copy, each behind a switch that an environment variable turns,
# so that the copy is built once. With no switch turned every test must pass; then each is run with its
# own, and must fail. A guard whose text is no longer found is an error: the table follows the code.
# Ends with 1 if a test still passes, with 2 if nothing can be said.
set -euo pipefail
cd "$(dirname "$0")/.."
table=fixtures/mutants/guards.txt
# Longer than any test waits for one thing, so that what hangs is told from what is slow.
limit=100
# Most of the time is spent in waiting for what never comes.
jobs="${DELTAFIN_MUTANTS_JOBS:-3}"
export CARGO_TARGET_DIR="${DELTAFIN_MUTANTS_TARGET:-$PWD/target/mutants}"
unset DELTAFIN_MUTANT

# Always the same place, so that a second build knows of the first.
work="$CARGO_TARGET_DIR/scratch"
clear_up() {
    git worktree remove --force "$work/tree" >/dev/null 2>&1 || true
    rm -rf "$work"
}
clear_up
mkdir -p "$work"
trap clear_up EXIT
# What is changed and not yet committed counts, too.
state=$(git stash create)
git worktree add --quiet --detach "$work/tree" "${state:-HEAD}"

python3 - "$table" "$work" "$@" <<'PY'
import re, sys

table, work, *only = sys.argv[1:]
rows, edits, switch, path, old, new = [], [], None, None, [], []

def flush():
    global old, new
    if old:
        edits.append((switch, path, "\n".join(old), "\n".join(new)))
    old, new = [], []

for line in open(table, encoding="utf-8").read().split("\n\n# ", 1)[1].splitlines():
    line = line.removeprefix("# ") if not rows or line.startswith("# ") else line
    if re.match(r"[\w-]+( = [\w-]+)? \| ", line):
        flush()
        name, target, test, guard = (part.strip() for part in line.split(" | ", 3))
        name, _, alias = name.partition(" = ")
        switch = alias or name
        rows.append((name, switch, target, test, guard))
    elif line.startswith("@ "):
        flush()
        path = line[2:]
    elif line.startswith("- "):
        if new:
            flush()
        old.append(line[2:])
    elif line.startswith("+ ") or line == "+":
        new.append(line[2:])
    elif line:
        sys.exit(f"{table}: what is {line!r}?")
flush()

names = [row[0] for row in rows]
assert len(set(names)) == len(names), "a name stands twice"
for name, switch, *_ in rows:
    assert switch in names, f"{name} = {switch}: no such guard"
wrong = 0
for switch, path, before, after in edits:
    file = f"{work}/tree/{path}"
    text = open(file, encoding="utf-8").read()
    found = text.count(before)
    if found != 1:
        print(f"{switch}: found {found} times in {path}: {before!r}", file=sys.stderr)
        wrong += 1
        continue
    after = re.sub(r"\bON\b", f'crate::mutant("{switch}")', after)
    open(file, "w", encoding="utf-8").write(text.replace(before, after))
if wrong:
    sys.exit(2)

with open(f"{work}/tree/src/lib.rs", "a", encoding="utf-8") as lib:
    lib.write('''
/// Whether the guard of this name is removed.
#[allow(dead_code)]
fn mutant(name: &str) -> bool {
    static ON: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let on = ON.get_or_init(|| std::env::var("DELTAFIN_MUTANT").ok());
    on.as_deref() == Some(name)
}
''')
# The program that tests start has an environment of its own, and must hear of it, too.
file = f"{work}/tree/tests/program/mod.rs"
text = open(file, encoding="utf-8").read()
before = '.env("HOME", home)'
assert text.count(before) == 1, file
after = before + '\n        .envs(std::env::var("DELTAFIN_MUTANT").map(|m| ("DELTAFIN_MUTANT", m)))'
open(file, "w", encoding="utf-8").write(text.replace(before, after))

chosen = [r for r in rows if not only or any(r[0].startswith(o) for o in only)]
if not chosen:
    sys.exit("no guard of that name")
with open(f"{work}/rows", "w", encoding="utf-8") as out:
    for row in chosen:
        out.write("\t".join(row) + "\n")
PY

mapfile -t targets < <(cut -f3 "$work/rows" | sort -u)
build=()
for target in "${targets[@]}"; do
    [[ $target == lib ]] && build+=(--lib) || build+=(--test "$target")
done
cd "$work/tree"
echo "building ${targets[*]} with $(wc -l <"$work/rows") switches"
cargo test --no-run --message-format=json "${build[@]}" >"$work/built" 2>"$work/log" || {
    tail -40 "$work/log" >&2
    exit 2
}

# The test binary of a target.
binary() {
    python3 - "$work/built" "$1" <<'PY'
import json, sys

for line in open(sys.argv[1]):
    if not line.startswith("{"):
        continue
    built = json.loads(line)
    kind = built.get("target", {})
    lib = sys.argv[2] == "lib" and "lib" in kind.get("kind", [])
    test = "test" in kind.get("kind", []) and kind.get("name") == sys.argv[2]
    if built.get("executable") and built.get("profile", {}).get("test") and (lib or test):
        print(built["executable"])
PY
}

declare -A binaries
for target in "${targets[@]}"; do
    binaries[$target]=$(binary "$target")
done

# Runs one test and leaves its output in the third; 0 passed, 1 failed, 3 hung, 2 was not run.
run() {
    local code=0
    timeout "$limit" "${binaries[$1]}" --exact "$2" >"$3" 2>&1 || code=$?
    [[ $code == 124 ]] && return 3
    grep -q '^running 1 test$' "$3" || return 2
    [[ $code == 0 ]] || return 1
}

broken=0
while IFS=$'\t' read -r target test; do
    code=0
    run "$target" "$test" "$work/out" || code=$?
    if [[ $code != 0 ]]; then
        echo "with every guard in place: $test does not pass ($code)" >&2
        tail -20 "$work/out" >&2
        broken=1
    fi
done < <(cut -f3,4 "$work/rows" | sort -u)
[[ $broken == 0 ]] || exit 2

# Leaves the verdict of one row in a file of its name.
judge() {
    local code=0
    DELTAFIN_MUTANT=$2 run "$3" "$4" "$work/out.$1" || code=$?
    case $code in
    0) echo "STILL PASSES" ;;
    1) echo "seen failing" ;;
    3) echo "seen failing (it hangs)" ;;
    *) echo "NOT RUN" ;;
    esac >"$work/said.$1"
}

while IFS=$'\t' read -r name switch target test guard; do
    while (($(jobs -rp | wc -l) >= jobs)); do
        wait -n || true
    done
    judge "$name" "$switch" "$target" "$test" &
done <"$work/rows"
wait

printf '| fault | guard | test | without it |\n|---|---|---|---|\n'
passed=0
while IFS=$'\t' read -r name switch target test guard; do
    said=$(<"$work/said.$name")
    [[ $said == seen* ]] || passed=$((passed + 1))
    printf '| %s | %s | `%s` | %s |\n' "$name" "$guard" "$test" "$said"
done <"$work/rows"
echo
echo "$(wc -l <"$work/rows") guards, $passed whose test was not seen failing"
[[ $passed == 0 ]]
