#!/bin/sh
# Installs the Debian packages that building and running need. Without apt or root it lists what is missing and fails.
set -eu

# command or file | Debian package | what for
needs() {
    # Debian 12 calls its up-to-date Rust "-web"; other releases have it under the plain names.
    web=$(apt-cache show cargo-web >/dev/null 2>&1 && echo -web || true)
    cat <<EOF
cargo|cargo$web|builds the Rust parts
rustc|rustc$web|builds the Rust parts
rustfmt|rustfmt$web|checks the Rust parts
runc|runc|starts the containers
mkfs.erofs|erofs-utils|packs image layers
mkfs.btrfs|btrfs-progs|writable side of the sandboxes
mmdebstrap|mmdebstrap|builds Debian images
/usr/share/keyrings/debian-archive-keyring.gpg|debian-archive-keyring|verifies Debian packages
/bin/busybox|busybox-static|test images
/bin/bash-static|bash-static|bash inside the sandboxes
musl-gcc|musl-tools|static programs
gcc|gcc|static programs, Rust linker
/usr/include/stdlib.h|libc6-dev|static programs
make|make|builds
dpkg-source|dpkg-dev|unpacks the source of dash
patch|patch|unpacks the source of dash
xz|xz-utils|unpacks the source of dash
autoreconf|autoconf|builds dash
automake|automake|builds dash
mount|mount|mounts
losetup|mount|the scratch image
unshare|util-linux|tests
git|git|version of the checkout
python3|python3|everything
python3-venv|python3-venv|private environment of uv
/etc/ssl/certs/ca-certificates.crt|ca-certificates|downloads
EOF
}

have() {
    case "$1" in
    /*) [ -e "$1" ] ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    *) command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] ;;
    esac
}

missing() {
    needs | while IFS='|' read -r what package purpose; do
        have "$what" || printf '%s|%s|%s\n' "$what" "$package" "$purpose"
    done
}

lacking=$(missing)
[ -n "$lacking" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get -qq update >/dev/null
    lacking=$(missing)
fi
packages=$(printf '%s\n' "$lacking" | cut -d'|' -f2 | sort -u | tr '\n' ' ')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086  # a list of words
    apt-get -qq install -y --no-install-recommends $packages >/dev/null
    lacking=$(missing)
    [ -n "$lacking" ] || exit 0
fi
echo "setup: this machine lacks (and it cannot be installed from here: that takes root and apt-get):" >&2
printf '%s\n' "$lacking" | while IFS='|' read -r what package purpose; do
    printf '  %-50s %-24s %s\n' "$what" "(package $package)" "$purpose" >&2
done
exit 1
