#!/usr/bin/env bash
# Holds the test hub against the clients other people use: the Python package huggingface_hub and
# the crate hf-hub, both unmodified, download from it, and every file must be equal. `share` holds
# `deltafin share` of a complete store against huggingface_hub: every file it gives must have the
# sha256 of the original.
#
# usage: scripts/parity.sh [python|share|rust]...   (all, if none is named)
set -euo pipefail
cd "$(dirname "$0")/.."
clients=("${@:-python}")
[[ $# -eq 0 ]] && clients=(python share rust)
folder=fixtures/tiny-k3
org=test
name=tiny-k3
work=$(mktemp -d)
hub=
trap '[[ -n $hub ]] && kill "$hub" 2>/dev/null; rm -rf "$work"' EXIT

cargo build --quiet --release --example testhub

# Xet is another protocol; its headers are left out for the client that cannot be told to ignore it.
serve() {
    target/release/examples/testhub "$folder" "$org/$name" "$@" >"$work/hub" &
    hub=$!
    for _ in $(seq 100); do
        [[ -s $work/hub ]] && break
        sleep 0.1
    done
    endpoint=$(head -1 "$work/hub")
}

# Where the share just started answers.
shared() {
    hub=$!
    for _ in $(seq 100); do
        endpoint=$(sed -n 's/.*is shared at \(http[^;]*\);.*/\1/p' "$work/hub")
        [[ -n $endpoint ]] && break
        sleep 0.1
    done
}

python_client() {
    python3 -m venv target/parity-venv
    target/parity-venv/bin/pip install --quiet --disable-pip-version-check "huggingface_hub>=1"
}

for client in "${clients[@]}"; do
    case $client in
    python)
        serve
        python_client
        env -u HF_TOKEN HF_ENDPOINT="$endpoint" HF_HOME="$work/home" HF_HUB_DISABLE_XET=1 \
            HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_PROGRESS_BARS=1 \
            target/parity-venv/bin/python - "$org/$name" "$folder" <<'PY'
import filecmp, os, sys
import huggingface_hub as hub

repo, folder = sys.argv[1:]
got = hub.snapshot_download(repo)
names = sorted(os.listdir(folder))
_, wrong, errors = filecmp.cmpfiles(folder, got, names, shallow=False)
assert not wrong and not errors, (wrong, errors)
info = hub.HfApi().model_info(repo)
assert os.path.basename(got) == info.sha, (got, info.sha)
tree = {f.path: f for f in hub.HfApi().list_repo_tree(repo, recursive=True)}
paths = hub.HfApi().get_paths_info(repo, names)
assert {p.path for p in paths} == set(names) <= set(tree)
with hub.HfFileSystem().open(f"{repo}/{names[-1] if names[-1].endswith('.safetensors') else names[1]}", "rb") as f:
    f.seek(5)
    part = f.read(100)
name = names[-1] if names[-1].endswith(".safetensors") else names[1]
assert part == open(os.path.join(folder, name), "rb").read()[5:105]
print(f"huggingface_hub {hub.__version__}: {len(names)} files are equal")
PY
        ;;
    share)
        python_client
        cargo build --quiet --release
        model=fixtures/austen-k3/model
        # Without a function: what is killed in the end must be the program, not a shell around it.
        deltafin=(env -u HF_TOKEN -u HF_ENDPOINT target/release/deltafin)
        # From a share of the folder, which publishes digests, into a store; then a share of the store.
        "${deltafin[@]}" share "$model" --port 0 2>"$work/hub" &
        shared
        "${deltafin[@]}" fetch --hub "$endpoint" --model local/model --home "$work/store" --reserve 0 --cache unlimited
        kill "$hub"
        "${deltafin[@]}" share --model local/model --home "$work/store" --port 0 2>"$work/hub" &
        shared
        env -u HF_TOKEN HF_ENDPOINT="$endpoint" HF_HOME="$work/home-share" HF_HUB_DISABLE_XET=1 \
            HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_PROGRESS_BARS=1 \
            target/parity-venv/bin/python - local/model "$model" <<'PY'
import hashlib, os, sys
import huggingface_hub as hub

repo, folder = sys.argv[1:]
got = hub.snapshot_download(repo)
digest = lambda *path: hashlib.sha256(open(os.path.join(*path), "rb").read()).hexdigest()
listed = {f.path: f.lfs.sha256 for f in hub.HfApi().list_repo_tree(repo, recursive=True)}
original = {n for n in os.listdir(folder) if os.path.isfile(os.path.join(folder, n))}
weights = {n for n in original if n.endswith(".safetensors")}
assert weights and weights <= set(listed), weights - set(listed)
for name, sha256 in listed.items():
    assert digest(got, name) == digest(folder, name) == sha256, name
print(f"share to huggingface_hub {hub.__version__}: {len(listed)} files, {len(weights)} of weights, have the original sha256")
left = sorted(original - set(listed))
print("not shared, for no command needs them:", ", ".join(left) or "none")
PY
        ;;
    rust)
        serve plain
        cargo build --quiet --manifest-path tests/parity/Cargo.toml --target-dir target/parity
        env -u HF_TOKEN HF_HOME="$work/home" target/parity/debug/parity "$endpoint" "$org" "$name" "$folder"
        ;;
    *)
        echo "no such client: $client" >&2
        exit 2
        ;;
    esac
    kill "$hub"
    wait "$hub" 2>/dev/null || true
    hub=
    rm -f "$work/hub"
done
