#!/usr/bin/env bash
# Installs the packages of a lock into a folder, without what they depend on.
#
#   tools/make-folder.sh DIR PYTHON LOCK
#
# The stamp in DIR names the lock's content. Where it matches, nothing is done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dir=$1 python=$2 lock=$3
stamp="$dir/.qjax-stamp"
wanted=$(cksum "$lock")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

start=$SECONDS
rm -rf "$dir"
"$python" -m pip install -qq --no-deps --no-compile --require-hashes --only-binary :all: --target "$dir" -r "$lock"
echo "$wanted" >"$stamp"
echo "$dir: ready after $((SECONDS - start)) s" >&2
