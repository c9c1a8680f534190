#!/usr/bin/env bash
# The full counts of what CI runs with reduced ones. By hand; an hour or more on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export DELTAFIN_CHAOS_SPANS="${DELTAFIN_CHAOS_SPANS:-2000}"
export DELTAFIN_FUZZ_ROUNDS="${DELTAFIN_FUZZ_ROUNDS:-20000000}"
cargo test --release -- --nocapture "$@"
cargo test --release --test tokenizer -- --ignored every_character
scripts/check-aarch64.sh
scripts/parity.sh
cargo bench --bench link
cargo bench --bench kernels
