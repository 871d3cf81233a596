"""The adapter of ONNX Runtime: layouts, options, and the pairs of products of uint8 by int8."""

from typing import Any

import numpy as np
import pytest

from conformance.case import Case, Grid
from conformance.runtimes.onnx_model import onnx_model
from conformance.runtimes.onnxruntime import OnnxReference, OnnxRuntime

EVERY = [
    OnnxRuntime(),
    OnnxRuntime(precise=True),
    OnnxRuntime(optimized=False),
    OnnxRuntime(form="qdq", fuse_int8=True),
    OnnxRuntime(form="qdq", optimized=False),
    OnnxReference(),
]


def ids(runtime) -> str:
    return runtime.name


def image(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-5, 6, shape).astype(dtype)


def grid(scale: Any, zero_point: int = 0, dtype: str = "int8") -> Grid:
    return Grid(np.asarray(scale, np.float32), zero_point, dtype)


def unit(zero_point: int = 0, dtype: str = "int8") -> Grid:
    return grid(1, zero_point, dtype)


@pytest.mark.parametrize("runtime", EVERY, ids=ids)
def test_a_convolution_keeps_channels_last_and_pads_as_tensorflow_does(runtime):
    x, kernel = image("int8", (2, 5, 4, 3)), image("int8", (3, 3, 3, 2), 1)
    bias = np.array([7, -4], np.int32)
    output = grid(8, 1)
    case = Case("conv2d", (x,), (unit(),), output, kernel, grid([1, 1]), bias, {"strides": (2, 2), "padding": "SAME"})
    padded = np.pad(x.astype(np.int64), ((0, 0), (1, 1), (0, 1), (0, 0)))
    acc = np.zeros((2, 3, 2, 2), np.int64) + bias
    for u in range(3):
        for v in range(3):
            acc += np.einsum("nhwi,io->nhwo", padded[:, u : u + 5 : 2, v : v + 3 : 2], kernel[u, v].astype(np.int64))
    np.testing.assert_array_equal(runtime.run(case), np.rint(acc / 8).astype(np.int64) + 1)


@pytest.mark.parametrize("runtime", EVERY, ids=ids)
def test_depthwise_outputs_of_one_channel_are_neighbours(runtime):
    x = image("int8", (1, 2, 2, 3))
    kernel = np.arange(1, 7, dtype=np.int8).reshape(1, 1, 1, 6)
    case = Case("depthwise_conv2d", (x,), (unit(),), unit(), kernel, unit())
    np.testing.assert_array_equal(runtime.run(case), np.repeat(x, 2, axis=-1) * kernel[0, 0, 0])


@pytest.mark.parametrize("runtime", EVERY, ids=ids)
@pytest.mark.parametrize("bias", [None, np.array([3, -2], np.int32)], ids=["", "bias"])
def test_fully_connected(runtime, bias):
    x, kernel = image("int8", (3, 4)), image("int8", (4, 2), 1)
    case = Case("fully_connected", (x,), (unit(1),), grid(4), kernel, unit(), bias)
    acc = (x.astype(np.int64) - 1) @ kernel.astype(np.int64) + (0 if bias is None else bias)
    np.testing.assert_array_equal(runtime.run(case), np.rint(acc / 4))


@pytest.mark.parametrize("runtime", EVERY, ids=ids)
def test_operations_without_weights(runtime):
    x, y = image("int8", (1, 4, 6, 2)), image("int8", (1, 4, 6, 2), 1)
    two = grid(2, 3)

    def run(op: str, *inputs: np.ndarray, output: Grid = two, **attributes) -> np.ndarray:
        return runtime.run(Case(op, inputs, (unit(),) * len(inputs), output, attributes=attributes)).astype(np.int64)

    wide = x.astype(np.int64)
    np.testing.assert_array_equal(run("add", x, y, output=unit()), wide + y)
    np.testing.assert_array_equal(run("multiply", x, y, output=unit()), wide * y)
    np.testing.assert_array_equal(run("rescale", x), np.rint(x / 2) + 3)
    quarter = grid(0.25)
    mean = run("mean", x, output=quarter, axes=(1, 2))
    np.testing.assert_array_equal(mean, np.rint(x.mean((1, 2), keepdims=True) / 0.25))
    pooled = run("average_pool", x, output=quarter, window=(2, 2), strides=(2, 2))
    np.testing.assert_array_equal(pooled, x.reshape(1, 2, 2, 3, 2, 2).mean((2, 4)) / 0.25)
    np.testing.assert_array_equal(run("tanh", x, output=grid(1 / 128)), tanh(x))
    floats = runtime.run(Case("quantize", (np.array([[0.6, -4.0]], np.float32),), (), quarter))
    np.testing.assert_array_equal(floats, [[2, -16]])


def tanh(x: np.ndarray) -> np.ndarray:
    return np.minimum(np.rint(np.tanh(x.astype(np.float64)) * 128), 127)


def test_a_mean_over_channels_is_reduce_mean():
    x = image("int8", (2, 3, 3, 4))
    case = Case("mean", (x,), (unit(),), grid(0.25), attributes={"axes": (-1,)})
    np.testing.assert_array_equal(OnnxRuntime().run(case), x.mean(-1, keepdims=True) / 0.25)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("features", [6, 7])
def test_uint8_by_int8_saturates_in_pairs_unless_it_is_precise(rows, features):
    """Products 2i and 2i + 1 of the raw codes share an int16, except with VNNI, where sums are exact."""
    rng = np.random.default_rng(features)
    x = rng.integers(180, 256, (rows, features)).astype(np.uint8)
    kernel = rng.choice(np.array([-128, -100, 100, 127]), (features, 9)).astype(np.int8)
    output = grid(512, 128, "uint8")
    case = Case("fully_connected", (x,), (unit(3, "uint8"),), output, kernel, unit())
    a, w = x.astype(np.int64), kernel.astype(np.int64)
    exact = (a - 3) @ w
    products = np.pad(a[:, :, None] * w, ((0, 0), (0, features % 2), (0, 0))).reshape(rows, -1, 2, 9)
    pairs = np.clip(products.sum(2), -(2**15), 2**15 - 1).sum(1) - 3 * w.sum(0)

    def codes(acc: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(acc / 512) + 128, 0, 255)

    assert np.any(codes(exact) != codes(pairs))
    got = OnnxRuntime().run(case)
    assert any(np.array_equal(got, codes(acc)) for acc in (exact, pairs))
    np.testing.assert_array_equal(OnnxRuntime(precise=True).run(case), codes(exact))


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="needs optimized=True"):
        OnnxRuntime(optimized=False, precise=True)
    with pytest.raises(ValueError, match="form must be one of operators, qdq"):
        OnnxRuntime(form="float")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="needs a kernel and its grid"):
        onnx_model(Case("fully_connected", (image("int8", (1, 2)),), (unit(),), unit()))


def test_names_and_versions():
    assert OnnxRuntime().name == "onnxruntime-operators"
    assert OnnxRuntime(precise=True, form="qdq").name == "onnxruntime-qdq-precise"
    assert OnnxRuntime().version().startswith("onnxruntime 1.")
    assert OnnxReference().version().startswith("onnx 1.")
