#!/bin/sh
# Makes .venv with exactly what requirements.lock names (hashes checked) and our two distributions as editable installs.
# setup_python.sh lock   writes requirements.lock anew from the pyproject files.
set -eu
cd "$(dirname "$0")/.."

# uv from the PATH, else from PyPI into a private environment (Debian does not let pip touch the system's Python).
if ! command -v uv >/dev/null 2>&1 || ! uv --version >/dev/null 2>&1; then
    if [ ! -x .cache/uv/bin/uv ]; then
        rm -rf .cache/uv
        python3 -m venv .cache/uv
        .cache/uv/bin/python -m pip --quiet --disable-pip-version-check install uv
    fi
    PATH="$PWD/.cache/uv/bin:$PATH"
fi
export UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy

if [ "${1:-}" = lock ]; then
    uv lock --quiet
    uv export --quiet --no-header --no-emit-workspace --no-emit-project --all-groups --all-extras -o requirements.lock
    exit 0
fi
# The distribution's Python first: it is built with profile feedback, which self-built ones often are not (1.5 times as
# fast here, docs/decisions/0006-python-of-the-distribution.md).
for python in /usr/bin/python3 "$(command -v python3)" none; do
    if [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then break; fi
done
[ "$python" != none ] || {
    echo "setup: Python 3.11 or later is needed, this is $(python3 --version)" >&2
    exit 1
}
[ -x .venv/bin/python ] || uv venv --quiet --python "$python" .venv
VIRTUAL_ENV="$PWD/.venv"
export VIRTUAL_ENV
uv pip install --quiet --require-hashes --requirement requirements.lock
uv pip install --quiet --no-deps --no-build-isolation --editable sdk --editable server
# Programs start faster from bytecode, and some hosts forbid writing it later (PYTHONDONTWRITEBYTECODE).
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q -j 0 .venv/lib sdk/src server/src >/dev/null 2>&1 || true
