"""The op "table": its kernel, its constants on the host and inside jit, and what targets change."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import ops, targets
from qjax.numerics.elementary import Expression, table
from qjax.numerics.tables import function_table
from qjax.ops import Operand, Preparation
from qjax.ops.epilogue import Affine
from tests.ops.nodes import INT4, INT8, INT16, UINT8_MIDDLE, Grid, check, graph_of

OP = ops.get("table")
LOGISTIC = Expression((("logistic", (0,)),))
TANH = Expression((("tanh", (0,)),))
SILU = Expression((("logistic", (0,)), ("mul", (0, 1))))
PRELU = Expression((("ge", (0, "0x0p+0")), ("mul", (0, 1)), ("select", (2, 3, 0))), 1)


def given(
    expression: Expression,
    target: str = "nearest_even",
    x: tuple[Any, Any] = (np.float32(0.047), np.int32(5)),
    y: tuple[Any, Any] = (np.float32(0.031), np.int32(-9)),
    dtypes: tuple[str, str] = ("int8", "int8"),
    **constants: Any,
) -> Preparation:
    def operand(grid: tuple[Any, Any], dtype: str) -> Operand:
        info = np.iinfo(dtype)
        return Operand((None, 3), dtype, *grid, int(info.min), int(info.max))

    attributes = {"expression": expression.to_json()}
    operands = (operand(x, dtypes[0]),), operand(y, dtypes[1])
    return Preparation(attributes, constants, *operands, Affine.identity(), targets.get(target))


@pytest.mark.parametrize(
    ("x", "y"), [(INT8, INT8), (INT16, INT8), (UINT8_MIDDLE, INT16), (INT4, UINT8_MIDDLE)], ids=str
)
def test_kernel(x: Grid, y: Grid):
    rng = np.random.default_rng(0)
    entries = y.codes(rng, (x.qmax - x.qmin + 1,))
    codes = x.codes(rng, (3, 50))
    attributes = {"expression": TANH.to_json(), "range": [x.qmin, x.qmax]}
    graph = graph_of("table", [((3, 50), x)], ((3, 50), y), {"table": entries}, attributes)
    check(graph, [codes], entries[codes.astype(int) - x.qmin])
    low, high = (np.asarray(v, np.int32) for v in (y.zero_point, y.qmax - 1))
    bounded = {"table": entries, "clamp_min": low, "clamp_max": high}
    graph = graph_of("table", [((3, 50), x)], ((3, 50), y), bounded, attributes)
    check(graph, [codes], np.clip(entries[codes.astype(int) - x.qmin], low, high))


@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("int16", "uint8")])
def test_the_same_constants_on_the_host_inside_jit_and_under_vmap(dtypes):
    slope = np.asarray([[0.3]], np.float32)
    y = np.float32(0.031), np.int32(4)

    def made(s_x: Any, z_x: Any, s_y: Any, z_y: Any, slope: Any) -> Any:
        found = OP.prepare(given(PRELU, "nearest_even", (s_x, z_x), (s_y, z_y), dtypes, parameter0=slope))
        return found.constants["table"]

    arguments = (np.float32(0.047), np.int32(5), *y, slope)
    host = made(*arguments)
    assert isinstance(host, np.ndarray)
    assert host.dtype == dtypes[1]
    inside = jax.jit(made)(*arguments)
    assert inside.dtype == host.dtype
    assert np.array_equal(inside, host)
    scales = jnp.asarray([0.047, 0.02], jnp.float32)
    rows = jax.vmap(lambda s: made(s, *arguments[1:]))(scales)
    assert np.array_equal(rows[0], host)
    assert np.array_equal(rows[1], made(scales[1], *arguments[1:]))
    # nothing is differentiated through codes
    gradient = jax.grad(lambda s: made(s, *arguments[1:]).astype(jnp.float32).sum() + s)(scales[0])
    assert gradient == 1.0


def test_a_table_of_reals():
    found = OP.prepare(given(SILU))
    assert found.attributes == {"range": [-128, 127]}
    want = table(SILU, [], np.float32(0.047), 5, (-128, 127), np.float32(0.031), -9, (-128, 127))
    assert np.array_equal(found.constants["table"], want)


UNIT = (np.float32(2.0**-8), np.int32(-128))


@pytest.mark.parametrize("target", targets.names())
def test_bare_functions_are_those_of_the_target(target):
    method = targets.get(target).tables
    for expression, grid in ((LOGISTIC, UNIT), (TANH, (np.float32(2.0**-7), np.int32(0)))):
        name = str(expression.bare)
        found = OP.prepare(given(expression, target, y=grid)).constants["table"]
        want = function_table(method, name, np.float32(0.047), 5, grid[0], int(grid[1]))
        assert np.array_equal(found, want)
    # where no runtime has a kernel: reals
    scale, zero_point = np.float32(0.01), np.int32(-90)
    found = OP.prepare(given(SILU, target, y=(scale, zero_point))).constants["table"]
    assert np.array_equal(found, OP.prepare(given(SILU, y=(scale, zero_point))).constants["table"])
    wide = [OP.prepare(given(TANH, t, dtypes=("int16", "int16"))).constants["table"] for t in (target, "nearest_even")]
    assert np.array_equal(*wide)


def test_gemmlowp_has_one_grid():
    own = OP.prepare(given(LOGISTIC, "tflite_micro", y=(np.float32(0.005), np.int32(-100)))).constants["table"]
    want = table(LOGISTIC, [], np.float32(0.047), 5, (-128, 127), np.float32(0.005), -100, (-128, 127))
    assert np.array_equal(own, want)


def test_restated():
    exact = np.zeros(256, np.int8)
    again = OP.restated(given(LOGISTIC, "tflite_micro", y=UNIT, table=exact))
    assert again is not None
    want = OP.prepare(given(LOGISTIC, "tflite_micro", y=UNIT)).constants["table"]
    assert np.array_equal(again.constants["table"], want)
    # a table of the real function is the same for everybody; one that a reader left out is made
    assert OP.restated(given(SILU, "tflite_micro", table=exact)) is None
    fresh = OP.restated(given(SILU, "tflite_micro"))
    assert fresh is not None
    assert np.array_equal(fresh.constants["table"], OP.prepare(given(SILU)).constants["table"])


def test_units():
    def unit(expression: Expression) -> str | None:
        eqn: Any = SimpleNamespace(params={"expression": expression.to_json()})
        return OP.unit(eqn)

    assert [unit(e) for e in (LOGISTIC, TANH, SILU)] == ["unsigned", "signed", None]


def test_what_has_no_value():
    log = Expression((("log", (0,)),))
    with pytest.raises(ValueError, match=r"no value at .* bound the input"):
        OP.prepare(given(log))
