"""`import qjax` loads no optional dependency, leaves JAX's settings alone and stays on JAX's public API."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = {
    "ai_edge_litert",
    "click",
    "equinox",
    "flatbuffers",
    "haiku",
    "keras",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "sklearn",
    "tensorflow",
    "tflite_micro",
    "torch",
}

# Every flag of jax.config that a library could flip under its user's feet.
FLAGS = [
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
]

SCRIPT = """
import json, sys
import jax, flax.nnx
others = set(sys.modules)
flags = {flags!r}
before = [getattr(jax.config, flag) for flag in flags]
import qjax
# every public name is loaded here, when it is asked for
missing = [name for name in getattr(qjax, "__all__", []) if not hasattr(qjax, name)]
after = [getattr(jax.config, flag) for flag in flags]
top = sorted({{name.partition(".")[0] for name in set(sys.modules) - others}})
seen = {{"file": qjax.__file__, "before": before, "after": after, "missing": missing, "modules": top}}
print(json.dumps(seen))
"""


def import_in_a_fresh_process() -> dict:
    """Imports qjax, warnings as errors, in a process of its own and returns what it saw.

    "modules" are those that qjax loads over and above jax and flax (jax itself loads flatbuffers where it
    is installed).
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(flags=FLAGS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light_and_leaves_jax_alone():
    seen = import_in_a_fresh_process()
    assert seen["file"] is not None, "qjax/__init__.py is missing"
    assert Path(seen["file"]).parent == ROOT / "qjax"
    assert OPTIONAL.intersection(seen["modules"]) == set()
    assert "qjax" in seen["modules"]
    assert seen["after"] == seen["before"]
    assert seen["missing"] == []


def test_no_file_of_the_library_imports_private_jax():
    files = sorted(file for folder in ("qjax", "conformance") for file in (ROOT / folder).rglob("*.py"))
    assert files
    private = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        # parsing all takes seconds
        for node in ast.walk(ast.parse(text)) if "_src" in text else ():
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            private += [f"{where}: {name}" for name in names if name.startswith("jax._src")]
    assert private == []


def test_nothing_tells_a_user_to_install_qjax_from_a_registry():
    """The package of that name on PyPI is another project's."""
    names = ("qjax", "conformance", "docs", "tests", "tools", "benchmarks", "experiments", "requirements")
    folders = [ROOT / name for name in names]
    files = [*ROOT.iterdir(), *(file for folder in folders for file in folder.rglob("*"))]
    texts = [file for file in files if file.suffix in (".py", ".md", ".sh", ".toml") or file.name == "Makefile"]
    assert len(texts) > 100
    told = re.compile(r"\b(install|uv add|uvx|pipx run)\b[^\n.;]*[\s'\"`]qjax(\[|==|['\"`]|\s*$)", re.M)
    assert told.search("run `pip install -U qjax` first")
    assert told.search("pip install 'qjax[onnx]'")
    assert [str(p) for p in texts if p.name != "test_import.py" and told.search(p.read_text(encoding="utf-8"))] == []
