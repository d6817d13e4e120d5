#!/bin/sh
# Builds chronus as a static program: build_chronus.sh OUTPUT
set -eu

output=$1
target=x86_64-unknown-linux-musl
installed() { [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; }

if ! installed && command -v rustup >/dev/null 2>&1; then
    rustup -q target add "$target" >/dev/null 2>&1 || true
fi
if ! installed; then
    echo "build_chronus: no musl target for this Rust; linking statically with glibc instead (larger, same behaviour)" >&2
    target=x86_64-unknown-linux-gnu
    export RUSTFLAGS="-C target-feature=+crt-static"
fi
cargo build --quiet --locked --release --package chronus --target "$target"
mkdir -p "$(dirname "$output")"
install -m 755 "target/$target/release/chronus" "$output"
