#!/bin/sh
# Runs the kernel's tests as AArch64 code under qemu-user, and type-checks for macOS on Apple silicon.
# Says what it skips where a tool is missing; under CI (variable CI set) a skip is a failure.
set -eu
cd "$(dirname "$0")/.."
linux=aarch64-unknown-linux-gnu
mac=aarch64-apple-darwin

skip() {
    echo "skipped: $1"
    [ -z "${CI:-}" ] || exit 1
}

has_target() {
    rustup target list --installed 2>/dev/null | grep -qx "$1"
}

if ! has_target "$linux"; then
    skip "AArch64 tests: rustup target add $linux"
elif ! command -v aarch64-linux-gnu-gcc >/dev/null; then
    skip "AArch64 tests: no linker; install gcc-aarch64-linux-gnu"
elif [ "$(uname -m)" != aarch64 ] && ! command -v qemu-aarch64 >/dev/null; then
    skip "AArch64 tests: no emulator; install qemu-user"
else
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    if [ "$(uname -m)" != aarch64 ]; then
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
    fi
    # The dependencies are not what is tested here: unoptimised they build in a third of the time.
    cargo test --lib --no-default-features --target "$linux" \
        --config 'profile.dev.package."*".opt-level=0' kernel::
fi

if has_target "$mac"; then
    cargo check --no-default-features --target "$mac"
else
    skip "macOS check: rustup target add $mac"
fi
