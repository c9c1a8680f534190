#!/usr/bin/env bash
# The full counts of what CI runs with reduced ones. By hand; an hour or more on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export DELTAFIN_SOAK=1
cargo test --release -- --nocapture "$@"
