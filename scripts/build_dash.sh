#!/bin/sh
# Builds a static dash with musl from Debian's source package: build_dash.sh OUTPUT
#
# Start-up time of the shell is on the path of every command: static with musl it starts about twice as fast as
# busybox and four times as fast as bash. The source comes through apt, which verifies it, from the sources that this
# host is configured with.
set -eu

output=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Turns the host's Debian archives into source entries, in a private apt configuration.
private_apt() {
    mkdir -p "$work/parts" "$work/lists/partial" "$work/cache/archives/partial"
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] && grep -qE '^URIs:.*/debian(-security)?/?( |$)' "$file" || continue
        sed -E 's/^Types:.*/Types: deb-src/' "$file" >"$work/parts/$(basename "$file")"
    done
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
        sed -nE 's@^deb(-src)? (.*/debian(-security)?/? .*)@deb-src \2@p' | sort -u >"$work/parts/host.list"
    printf '%s\n' 'APT::Sandbox::User "root";' "Dir::Etc::SourceList \"/dev/null\";" \
        "Dir::Etc::SourceParts \"$work/parts\";" "Dir::State::Lists \"$work/lists\";" \
        "Dir::Cache \"$work/cache\";" >"$work/apt.conf"
    export APT_CONFIG="$work/apt.conf"
}

build() {
    private_apt
    cd "$work"
    apt-get -qq update
    apt-get -qq source --download-only dash
    dpkg-source -q --no-check --extract dash_*.dsc source
    cd source
    autoreconf -fi
    CC=musl-gcc CFLAGS=-O2 LDFLAGS=-static ./configure -q --enable-static --without-libedit \
        --host=x86_64-linux-musl --build=x86_64-linux-gnu
    make -s
    strip src/dash
    [ "$(./src/dash -c 'echo $((6 * 7))')" = 42 ]
}

# Not in a condition: there "set -e" would not hold inside the function.
set +e
(set -e; build) >"$work/log" 2>&1
status=$?
set -e
mkdir -p "$(dirname "$output")"
if [ $status = 0 ]; then
    install -m 755 "$work/source/src/dash" "$output"
    exit 0
fi
tail -n 15 "$work/log" >&2
echo "build_dash: WARNING: no static dash could be built (see above)." >&2
echo "build_dash: WARNING: busybox serves as /.opendsec/sh instead; every command starts about 0.5 ms later." >&2
install -m 755 /bin/busybox "$output"
