#!/usr/bin/env bash
# Makes a virtual environment that holds exactly what the locks say, and qjax itself, editable.
#
#   tools/make-venv.sh DIR "VERSION ..." LOCK ... [--optional LOCK] [-- EXTRA-REQUIREMENT ...]
#
# An optional lock holds what need not exist for ever (a nightly build) or for every platform: where it cannot be installed the
# environment is made without it, and says so.
#
# The stamp in DIR names the locks' content, this folder and the request. Where it matches, nothing is done (milliseconds);
# otherwise the environment is built from nothing, so an interrupted or outdated one cannot survive. The stamp is written last.
# Packages come through uv, itself installed from a lock with hashes; where uv fails (it does not read pip's configuration of
# mirrors), through pip. QJAX_INSTALLER=pip skips uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dir=$1 versions=$2
shift 2
locks=() extras=() optional=
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    if [ "$1" = "--optional" ]; then
        optional=$2
        shift
    else
        locks+=("$1")
    fi
    shift
done
if [ $# -gt 0 ]; then
    shift
    extras=("$@")
fi

stamp="$dir/.qjax-stamp"
key() {
    echo "folder $PWD"
    echo "python ${PYTHON:-$versions}"
    echo "extras ${extras[*]-}"
    cksum requirements/uv.lock "${locks[@]}" ${optional:+"$optional"} tools/make-venv.sh
}
current() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$dir/bin/python" -c "" 2>/dev/null; }

wanted=$(key)
if current; then exit 0; fi

# Two makes in one folder: the second waits, then finds the work done. (macOS has no flock; there the user must not do that.)
if command -v flock >/dev/null; then
    exec 9>"$dir.lock"
    flock 9
    if current; then exit 0; fi
fi

start=$SECONDS
# shellcheck disable=SC2086  # versions is a list
base=$(tools/find-python $versions)
echo "$dir: $("$base" -c 'import platform; print("Python", platform.python_version())') from $base" >&2
rm -rf "$dir"
"$base" -m venv "$dir"
python="$dir/bin/python"
arguments=()
for lock in "${locks[@]}"; do arguments+=(-r "$lock"); done

with_uv() {
    "$python" -m pip install -qq --require-hashes -r requirements/uv.lock &&
        "$dir/bin/uv" pip install --quiet --python "$python" --require-hashes "${arguments[@]}"
}
with_pip() { "$python" -m pip install -qq --require-hashes "${arguments[@]}"; }

if [ "${QJAX_INSTALLER:-uv}" = pip ]; then
    with_pip
elif ! with_uv; then
    echo "$dir: uv could not install the lock (see above); trying pip, which reads pip.conf and its mirrors" >&2
    with_pip
fi
if [ ${#extras[@]} -gt 0 ]; then
    "$python" -m pip install -qq "${extras[@]}"
fi
if [ -n "$optional" ] && ! "$python" -m pip install -qq --no-deps --require-hashes -r "$optional"; then
    echo "$dir: left out what $optional names, which could not be installed (see above)" >&2
fi
# The build backend stands in the lock, so no isolated build environment is downloaded.
# QJAX_EDITABLE=no leaves qjax out, for tools that only read it.
if [ "${QJAX_EDITABLE:-yes}" = yes ]; then
    "$python" -m pip install -qq --no-deps --no-build-isolation --editable .
fi
"$python" -m pip check >&2
echo "$wanted" >"$stamp"
echo "$dir: ready after $((SECONDS - start)) s" >&2
