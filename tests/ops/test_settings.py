"""No setting of JAX or XLA decides a bit: every operation is lowered to the same program, or gives the same codes."""

import ast
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import qjax
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.export.emit import nodes
from tests.layers.kinds import made

pytestmark = pytest.mark.compiled
ROOT = Path(__file__).resolve().parent.parent.parent

PRECISIONS = [
    *("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
    *(preset.name for preset in lax.DotAlgorithmPreset if preset is not lax.DotAlgorithmPreset.DEFAULT),
]
OTHERS: dict[str, Any] = {
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_softmax_custom_jvp": True,
    "jax_threefry_partitionable": False,
    "jax_default_matmul_precision": "BF16_BF16_F32",
    "jax_enable_x64": True,
}
FAST_MATH = (
    "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false "
    "--xla_cpu_fast_math_honor_division=false --xla_cpu_fast_math_honor_functions=false "
    "--xla_cpu_enable_fast_min_max=true --xla_allow_excess_precision=true"
)
MULTIPLIERS = ("matmul", "grouped_dot", "dense0", "dense2", "dense3", "dense4", "odd2", "conv0_1_7", "conv3_2_4")
"""Products of every dtype, of activations, in groups, of channels."""

COUNT = 266
"""Of the graphs below. They are made by what runs them: pytest asks every file for its tests in every process."""


@functools.cache
def cases() -> nodes.Named:
    found = {**nodes.of_operations(), **nodes.of_targets()}
    assert len(found) == COUNT
    return found


def case(name: str) -> tuple[Graph, list[np.ndarray]]:
    operations = nodes.of_operations()
    return operations[name] if name in operations else cases()[name]


@contextlib.contextmanager
def setting(**values: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def program(name: str) -> str:
    graph, codes = case(name)
    interpreter = Interpreter(graph)
    return jax.jit(lambda *codes: interpreter(*codes)).lower(*codes).as_text()


def digest(name: str) -> str:
    return nodes.digest(*case(name))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(COUNT))
def test_all_settings_at_once(number: int) -> None:
    name = list(cases())[number]
    plain = program(name)
    with setting(**OTHERS):
        same = program(name) == plain
    if not same:
        # 64-bit numbers: other counters of loops, other indices
        with setting(**OTHERS):
            codes = digest(name)
        assert codes == digest(name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.sampled(3)
def test_products_under_every_precision(precision: str, plain: dict[str, str]) -> None:
    with setting(jax_default_matmul_precision=precision):
        assert {name: program(name) for name in plain} == plain


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    programs = {name: program(name) for name in MULTIPLIERS}
    assert [name for name, text in programs.items() if "stablehlo.dot_general" not in text] == []
    return programs


def test_codes_of_twelve_bits_under_bfloat16() -> None:
    """The codes themselves, where a product that states no precision gives others."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-2047, 2048, (64, 64)), jnp.int32) for _ in range(2))
    numbers = (((1,), (0,)), ((), ()))
    model, x, recipe = made("dense of 12 bits")
    qmodel = qjax.quantize(model, recipe, x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    wanted = np.asarray(graph(x))
    plain = lax.dot_general(a, b, numbers, preferred_element_type=jnp.int32)
    with jax.default_matmul_precision("BF16_BF16_F32"):
        # the setting does what it is feared for
        assert not np.array_equal(lax.dot_general(a, b, numbers, preferred_element_type=jnp.int32), plain)
        assert np.array_equal(graph(x), wanted)


SCRIPT = """
import json
from tests.export.emit import nodes
print(json.dumps([nodes.digest(*nodes.of_operations()[name]) for name in {names!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["dense3", "softmax", "layer_norm", "divide"], id="some"),
        pytest.param(["grouped_dot", "conv0_1_7", "logsumexp"], id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_fast_math(names: list[str]) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST_MATH}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(names=names)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [digest(name) for name in names]


# ---------------------------------------------------------------------------- the only door

MULTIPLY = {
    *(
        "dot",
        "dot_general",
        "dot_general_p",
        "dot_product_attention",
        "batch_matmul",
        "ragged_dot",
        "scaled_dot_general",
    ),
    *("matmul", "matvec", "vecmat", "einsum", "tensordot", "vdot", "vecdot", "inner", "multi_dot", "matrix_power"),
    *("conv", "conv_general_dilated", "conv_general_dilated_p", "conv_general_dilated_local", "conv_transpose"),
    *("conv_with_general_padding", "conv_general_dilated_patches", "convolve", "correlate", "convolve2d", "polyfit"),
}
"""What multiplies and adds with a precision, by its name in `jax.lax`, `jax.numpy` and `jax.nn`."""
COULD_MULTIPLY = re.compile(rf"\b({'|'.join(MULTIPLY)})\b|^(?!\s*@).*@", re.MULTILINE)


def test_products_are_multiplied_in_one_file() -> None:
    """`a @ b`, `lax.dot_general`, `jnp.einsum`, ... elsewhere would take their precision from a setting."""
    found: list[str] = []
    for file in sorted(file for folder in ("qjax", "conformance") for file in (ROOT / folder).rglob("*.py")):
        if file == ROOT / "qjax" / "ops" / "products.py":
            continue
        text = file.read_text(encoding="utf-8")
        # most files have neither a name nor an operator that could be one
        if not COULD_MULTIPLY.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            of_jax = isinstance(node, ast.Attribute) and node.attr in MULTIPLY and _of_jax(node.value)
            named = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax")
            named = named and any(alias.name in MULTIPLY for alias in node.names)  # pyright: ignore[reportAttributeAccessIssue]
            operator = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult)
            if of_jax or named or operator:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")  # pyright: ignore[reportAttributeAccessIssue]
    assert found == []


def _of_jax(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in {"lax", "numpy", "nn", "linalg", "scipy", "signal"}
    return isinstance(node, ast.Name) and node.id in {"lax", "jnp", "xp", "linalg"}
