"""Every elementwise primitive as ONNX, on numbers at the edges of its type: ONNX Runtime's kernels have bugs there."""

import numpy as np
import onnx
import pytest
from onnx import helper

from qjax.export.emit.onnx.builder import IR_VERSION, Builder, Library, element_type, opset_imports
from qjax.export.emit.onnx.elementwise import ELEMENTWISE
from qjax.export.emit.onnx.structure import STRUCTURE
from qjax.export.emit.onnx.views import View, Views
from tests.export.emit.onnx_runs import by_onnxruntime

UNARY = ("neg", "abs", "sign", "not", "square")
BINARY = ("add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge")
FLOATS = {"floor", "ceil", "round", "is_finite"}
"""Functions of floats alone; `test_float_islands` runs them."""
ELSEWHERE = {"shift_left", "shift_right_arithmetic", "shift_right_logical", "clz", "select_n", "integer_pow"}
"""Not functions of one kind of number; the tests of the operations run them."""
NUMPY = {
    **{name: getattr(np, name) for name in ("abs", "sign", "square", "add")},
    "neg": np.negative,
    "not": np.invert,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "rem": np.fmod,
}


def test_every_primitive_is_here():
    assert {*UNARY, *BINARY, *ELSEWHERE, *FLOATS} == set(ELEMENTWISE)
    assert set(NUMPY) | {"div"} == {*UNARY, *BINARY}


def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Towards zero."""
    found = [abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(x, y, strict=True)]
    return np.asarray(found, x.dtype)


def numbers(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Around every power of two, both signs, and random ones of every width."""
    powers = [1 << k for k in range(np.iinfo(dtype).bits - 2)]
    found = [n + d for n in powers for d in (-1, 0, 1)] + [int(rng.integers(0, n + 1)) for n in powers]
    return np.asarray(found + [-n for n in found], dtype)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_numbers_of_every_width(dtype):
    rng = np.random.default_rng(0)
    x = numbers(dtype, rng)
    y = rng.permutation(x)
    # alike in their high halves, and not
    y[::3] = x[::3] ^ rng.integers(0, 2**31, x[::3].size).astype(dtype)
    library, inputs = Library(), ("x", "y", "divisor")
    b = Builder(library, inputs)
    feeds = {"x": x, "y": y, "divisor": np.where(y == 0, np.asarray(1, dtype), y)}
    wanted: dict[str, np.ndarray] = {}
    outputs: dict[str, str] = {}
    for name in (*UNARY, *BINARY):
        second = "divisor" if name in ("div", "rem") else "y"
        operands = ("x",) if name in UNARY else ("x", second)
        outputs[name] = ELEMENTWISE[name](b, dtype, {}, operands)
        function = NUMPY.get(name, quotient)
        with np.errstate(over="ignore"):
            wanted[name] = function(*(feeds[operand] for operand in operands))
    described = [helper.make_tensor_value_info(name, element_type(dtype), x.shape) for name in inputs]
    results = [helper.make_tensor_value_info(outputs[n], element_type(w.dtype), w.shape) for n, w in wanted.items()]
    graph = helper.make_graph(b.nodes, "g", described, results)
    assert not library.functions
    model = helper.make_model(graph, opset_imports=opset_imports(), ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    for _, found in by_onnxruntime(model, feeds):
        wrong = {n: int(np.sum(a != w)) for a, (n, w) in zip(found, wanted.items(), strict=True) if np.any(a != w)}
        assert wrong == {}


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_extremes_over_axes_in_int64_are_refused(name):
    builder = Builder(Library(), ("x",))
    with pytest.raises(ValueError, match="computes wrongly"):
        STRUCTURE[name](Views(builder), {"axes": (1,)}, [View.full("x", "int64", (2, 3))])
