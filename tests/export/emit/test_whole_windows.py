"""Average pooling over a whole image under ONNX Runtime's formulas: a sum, and no window code by code."""

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.export.emit.c import to_files
from qjax.export.emit.onnx import integer
from qjax.ops.windows import covers, pool
from qjax.runtimes.onnx import session_of

X = jax.random.normal(jax.random.key(0), (3, 9, 8, 5))


class Pool(nnx.Module):
    def __init__(self, window, strides):
        self.window, self.strides = window, strides

    def __call__(self, x):
        window, strides = (1, *self.window, 1), (1, *self.strides, 1)
        total = lax.reduce_window(x, np.float32(0), lax.add, window, strides, "VALID")
        return total / np.float32(np.prod(window))


def converted(window, strides) -> qjax.IntegerGraph:
    qmodel = qjax.quantize(Pool(window, strides), qjax.Recipe(), X)
    qmodel.eval()
    return qjax.convert(qmodel, X, target="onnxruntime")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", ["integer", "qdq", "qoperator"])
def test_onnx_runtime_has_the_codes(style, tmp_path):
    graph = converted((9, 8), (9, 8))
    path = tmp_path / "model.onnx"
    options: dict[str, Any] = {} if style == "integer" else {"codes": True}
    graph.emit("onnx", path, style=style, **options)
    session = session_of(str(path), threads=1)
    codes = np.asarray(graph.quantize(X))
    (found,) = session.run(None, {session.get_inputs()[0].name: codes})
    assert np.array_equal(found, np.asarray(graph.run(codes)))


def operators(model: onnx.ModelProto) -> int:
    return sum(len(function.node) for function in model.functions)


@pytest.mark.exhaustive
def test_onnx_has_one_sum_for_the_window():
    whole, moving = (integer.to_model(converted(window, (1, 1)).ir) for window in ((9, 8), (8, 8)))
    assert operators(whole) < operators(moving) / 3


@pytest.mark.exhaustive
def test_c_has_one_loop_for_the_window():
    whole, moving = (
        to_files(converted(window, (1, 1)).ir, name="model", batch=1)["model.c"] for window in ((9, 8), (8, 8))
    )
    assert len(whole) < len(moving) / 4


ONCE, WINDOW = [1, 1, 1, 1], [1, 9, 8, 1]


@pytest.mark.parametrize(
    ("attributes", "whole"),
    [
        (pool(WINDOW, ONCE, [(0, 0)] * 4), True),
        (pool(WINDOW, WINDOW, [(0, 0)] * 4), True),
        (pool([1, 9, 1, 1], ONCE, [(0, 0)] * 4), True),
        (pool([1, 8, 8, 1], ONCE, [(0, 0)] * 4), False),
        (pool([1, 9, 1, 1], [1, 1, 2, 1], [(0, 0)] * 4), False),
        (pool(WINDOW, ONCE, [(0, 0), (1, 0), (0, 0), (0, 0)]), False),
        (pool(WINDOW, ONCE, [(0, 0)] * 4, base_dilation=[1, 2, 1, 1]), False),
        (pool([1, 9, 1, 1], ONCE, [(0, 0)] * 4, window_dilation=[1, 2, 1, 1]), False),
    ],
)
def test_whether_a_window_covers_an_image(attributes, whole):
    assert covers(attributes, (3, 9, 8, 5)) is whole
