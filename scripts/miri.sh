#!/usr/bin/env bash
# Runs the kernel's tests under Miri: every `unsafe` of the instruction sets, scalar, AVX2 and AVX-512,
# whatever this CPU has. Says what it skips where Miri is missing; under CI (variable CI set) a skip is
# a failure while the component can be had.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! rustup component list --toolchain nightly --installed 2>/dev/null | grep -q '^miri'; then
    echo "skipped: rustup toolchain install nightly --component miri,rust-src"
    exit 0
fi

# The kernel alone: the whole crate's dependencies would take Miri longer to build than the tests run.
crate=target/miri-kernel
mkdir -p "$crate/src"
ln -sfn ../../../src/kernel "$crate/src/kernel"
ln -sfn ../../fixtures "$crate/fixtures"
cp Cargo.lock "$crate/"
echo 'pub mod kernel;' >"$crate/src/lib.rs"
cat >"$crate/Cargo.toml" <<'TOML'
[package]
name = "kernel-under-miri"
version = "0.0.0"
edition = "2024"

[dependencies]
half = { version = "2", default-features = false, features = ["std"] }
rayon = "1"

[dev-dependencies]
proptest = { version = "1", default-features = false, features = ["std"] }
serde_json = "1"

[workspace]
TOML
cd "$crate"
# The thread pool turns integers into pointers, keeps its threads to the end, and breaks the older of
# Miri's two models of aliasing.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-permissive-provenance"
export RUSTFLAGS="-Ctarget-feature=+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"
tests=(small_products every_twin)
rustup run nightly cargo miri test --lib -- "${tests[@]}" 2>&1 | tee miri.log
for isa in scalar avx2 avx512; do
    grep -q "small_products_agree_on_$isa ... ok" miri.log || { echo "no test ran on $isa"; exit 1; }
done
