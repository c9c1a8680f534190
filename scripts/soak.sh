#!/usr/bin/env bash
# The full counts of what CI runs with reduced ones. By hand; an hour or more on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export DELTAFIN_CHAOS_SPANS="${DELTAFIN_CHAOS_SPANS:-2000}"
export DELTAFIN_PROMPT_TOKENS="${DELTAFIN_PROMPT_TOKENS:-1024}"
export DELTAFIN_LONG_TOKENS="${DELTAFIN_LONG_TOKENS:-4096}"
export DELTAFIN_API_PROMPTS="${DELTAFIN_API_PROMPTS:-200}"
export DELTAFIN_API_MALFORMED="${DELTAFIN_API_MALFORMED:-100000}"
export DELTAFIN_API_BOMBS="${DELTAFIN_API_BOMBS:-200}"
export DELTAFIN_API_BATCH_LINES="${DELTAFIN_API_BATCH_LINES:-300}"
export DELTAFIN_API_SLOW_SECONDS="${DELTAFIN_API_SLOW_SECONDS:-5}"
export DELTAFIN_API_WATCHED_SECONDS="${DELTAFIN_API_WATCHED_SECONDS:-75}"
export DELTAFIN_JOBS_KILLS="${DELTAFIN_JOBS_KILLS:-100}"
export DELTAFIN_LOG_CUTS="${DELTAFIN_LOG_CUTS:-4000}"
export DELTAFIN_SHAPE_LAYERS="${DELTAFIN_SHAPE_LAYERS:-92}"
export DELTAFIN_KILLS="${DELTAFIN_KILLS:-200}"
cargo test --release -- --nocapture "$@"
cargo test --release --test tokenizer -- --ignored every_character
scripts/check-aarch64.sh
scripts/miri.sh
DELTAFIN_FUZZ_SECONDS=600 cargo test --release --lib fuzz_ -- --nocapture
for seed in 1 2 3 4 5; do
    DELTAFIN_CHAOS_SEED=$seed cargo test --release --test hub chaos -- --nocapture
done
# Eight at once make three times as many tokens as one where the core passes by from the disk.
made="$(mktemp -d)"
trap 'rm -rf "$made"' EXIT
cargo run --release --example synth -- "$made/local/synthetic-k3-4gb"
target/release/deltafin fetch --home "$made/home" --reserve 0 --cache unlimited --hub "$made/local/synthetic-k3-4gb"
scripts/throughput.py target/release/deltafin "$made/home" local/synthetic-k3-4gb --ram 1.27GB
scripts/parity.sh
sweeps_home="$(mktemp -d)"
scripts/sweeps.py target/release/deltafin --home "$sweeps_home" --ways disk,hub --hold
rm -r "$sweeps_home"
cargo bench --bench link
cargo bench --bench fetch -- --full
cargo bench --bench kernels
