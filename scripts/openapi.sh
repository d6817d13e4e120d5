#!/bin/sh
# Writes openapi/edge.json and openapi/apiserver.json anew; the second contains parts of the first.
set -eu
cd "$(dirname "$0")/.."
for name in edge apiserver; do
    .venv/bin/python -m "opendsec_server.$name.main" --openapi >"openapi/$name.json.new"
    mv "openapi/$name.json.new" "openapi/$name.json"
done
