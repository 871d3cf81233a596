"""Tables that are ONNX Runtime's own functions of codes: written as such where the runtime fills the same table."""

import numpy as np
import pytest

from qjax import ops, targets
from qjax.contrib.importers.onnx import written_by_qjax
from qjax.export.emit.onnx import to_model
from qjax.export.emit.onnx.functions import leaky_slope
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.numerics.elementary import Expression
from qjax.ops import Operand, Preparation
from qjax.ops.epilogue import Affine
from qjax.run.interpreter import Interpreter
from tests.export.emit.onnx_runs import checked, differing
from tests.export.emit.test_onnx_qdq import run
from tests.export.graphs import differences

SIGMOID = [0, [["logistic", [0]]]]
TENTH = float(np.float32(0.1)).hex()
LEAKY = [0, [["ge", [0, "0x0.0p+0"]], ["mul", [TENTH, 0]], ["select", [1, 2, 0]]]]
SWISH = [0, [["logistic", [0]], ["mul", [0, 1]]]]


def many(expression, dtype, count, seed):
    """One graph of `count` tables of one input: grids at random, and those on which results are ties."""
    rng, info = np.random.default_rng(seed), np.iinfo(dtype)
    target, nodes, tensors = targets.get("onnxruntime"), [], {}
    x_scale, x_zero = np.float32(rng.choice([2.0**-5, 0.05, 0.1])), np.asarray(rng.integers(info.min, info.max + 1))
    x = Quantization(np.asarray(x_scale), x_zero.astype(np.int32), int(info.min), int(info.max))
    tensors["x"] = Tensor("x", (None, 4), dtype, x)
    for index in range(count):
        scale = np.float32((1 / 256, 2.0**-5, 0.1, 0.05)[index] if index < 4 else np.exp(rng.uniform(-6, -3)))
        zero = np.asarray(info.min if index == 0 else rng.integers(info.min, info.max + 1), np.int32)
        y = Quantization(np.asarray(scale), zero, int(info.min), int(info.max))
        name = f"y{index}"
        operands = [Operand((None, 4), dtype, q.scale, q.zero_point, q.qmin, q.qmax) for q in (x, y)]
        attributes = {"expression": expression}
        given = Preparation(attributes, {}, (operands[0],), operands[1], Affine.identity(), target)
        made = ops.get("table").prepare(given)
        value = np.asarray(made.constants["table"])
        tensors[f"{name}/table"] = Tensor(f"{name}/table", value.shape, value.dtype.name, None, value)
        tensors[name] = Tensor(name, (None, 4), dtype, y)
        constants = {"table": f"{name}/table"}
        nodes.append(Node(name, "table", ("x",), name, constants, {**attributes, **made.attributes}))
    outputs = tuple(node.name for node in nodes)
    return check_integer(Graph(tensors, tuple(nodes), ("x",), outputs, "onnxruntime", quantization="division"))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("expression", "real", "fused"),
    [(SIGMOID, "Sigmoid", "QLinearSigmoid"), (LEAKY, "LeakyRelu", "QLinearLeakyRelu"), (SWISH, "", "")],
    ids=["sigmoid", "leaky_relu", "swish"],
)
def test_every_code_of_many_grids(expression, real, fused, dtype, tmp_path):
    native, count = 0, 12 if real else 2
    graph = many(expression, dtype, count, int(dtype == "int8"))
    codes = np.arange(256).astype(dtype).reshape(64, 4)
    want = [np.asarray(value) for value in Interpreter(graph)(codes)]
    for style in ("qdq", "qoperator"):
        model = checked(to_model(graph, style=style, codes=True))
        got, operators = run(model, {"x": codes}, tmp_path)
        assert differing(got, want) == 0
        written = sum(node.op_type in (real, fused) for node in model.graph.node)
        assert operators.count(fused) == written
        native += written
        again = written_by_qjax.read(model)
        assert again is not None
        assert differences(again, graph) == []
    # the rest are results that float32 might put on the other side of a tie
    assert native > 2 * count * 0.6 if real else native == 0


def test_slopes_are_found_in_either_order_and_nothing_else_is_one():
    assert leaky_slope(Expression.from_json(LEAKY)) == np.float32(0.1)
    other = [0, [["mul", [0, TENTH]], ["gt", [0, "0x0.0p+0"]], ["select", [2, 1, 0]]]]
    assert leaky_slope(Expression.from_json(other)) == np.float32(0.1)
    for steps in (
        SWISH[1],
        [["ge", [0, "0x1.0p+0"]], ["mul", [TENTH, 0]], ["select", [1, 2, 0]]],
        [["ge", [0, "0x0.0p+0"]], ["mul", [TENTH, 0]], ["select", [1, 0, 2]]],
        [["ge", [0, "0x0.0p+0"]], ["mul", [0, 0]], ["select", [1, 2, 0]]],
        [["ge", [0, "0x0.0p+0"]], ["mul", [(0.1).hex(), 0]], ["select", [1, 2, 0]]],
    ):
        assert leaky_slope(Expression.from_json([0, steps])) is None
