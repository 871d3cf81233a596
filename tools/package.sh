#!/usr/bin/env bash
# Builds sdist and wheel into dist/, checks them, installs the wheel into an empty environment and uses it there.
#
#   tools/package.sh            PYTHON= chooses the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$(tools/find-python)}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/build"
"$scratch/build/bin/python" -m pip install -qq build twine
rm -rf dist
"$scratch/build/bin/python" -m build --outdir dist >"$scratch/log" || { cat "$scratch/log" >&2; exit 1; }
"$scratch/build/bin/python" -m twine check --strict dist/*

listed=$("$python" -m zipfile -l dist/*.whl)
if grep -E "(^|/)(conformance|tests)/|node_modules" <<<"$listed"; then
    echo "package.sh: the wheel holds what it should not" >&2
    exit 1
fi
grep -q "qjax/reporting/assets/report.js" <<<"$listed" || { echo "package.sh: the wheel lacks the report's script" >&2; exit 1; }

"$python" -m venv "$scratch/use"
"$scratch/use/bin/python" -m pip install -qq dist/*.whl
cd "$scratch"
use/bin/qjax --version
use/bin/qjax doctor
use/bin/python - <<'PYTHON'
import jax
from flax import nnx

import qjax

x = jax.random.normal(jax.random.key(0), (8, 4))
qmodel = qjax.quantize(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), qjax.Recipe(), x)
graph = qjax.convert(qmodel, x)
assert qjax.verify(graph, qmodel, [x]).exact
print("report:", qjax.report(graph, [x], "report.html").stat().st_size, "bytes")
PYTHON
ls -l "$OLDPWD"/dist
