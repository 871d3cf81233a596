"""Float outputs: DEQUANTIZE of LiteRT's three sets of kernels and of TFLite Micro, to the bit."""

from typing import Any

import jax
import numpy as np
import pytest

import qjax
from qjax import targets
from qjax.contrib.importers import tflite
from qjax.contrib.importers.onnx import written_by_qjax
from qjax.export import artifact
from qjax.export.emit import stablehlo
from qjax.export.emit.onnx import to_model
from qjax.export.integer_graph import IntegerGraph
from qjax.numerics.affine import dequantize
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit import tflite_runtimes

SIZES = (1, 7, 8, 9, 640, 2999, 3013)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


def model(dtype: str, shape, grid: Grid) -> bytes:
    """Codes that a RELU leaves as they are where they are not below the zero point, then DEQUANTIZE."""
    file = File()
    x, y = file.tensor(dtype, shape, grid), file.tensor("float32", shape)
    file.operator("DEQUANTIZE", [x], [y])
    return file.to_bytes([x], [y])


def of_runtime(target: str, data: bytes, codes: np.ndarray) -> np.ndarray:
    if target == "tflite_micro":
        return tflite_runtimes.micro(data, [codes], ["t1"])["t1"]
    return tflite_runtimes.litert(data, tflite_runtimes.MODES[target], [codes], every=False)["t1"]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("target", tflite_runtimes.TARGETS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_every_kernel_to_the_bit(target, dtype, times):
    """More than 6,000 codes of each scale for each kernel and type; sizes with every kind of tail."""
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    spec = qjax.QSpec(bits=info.bits, signed=info.min < 0, symmetric=False, narrow_range=False)
    formula = targets.get(target).dequantize
    count = wrong = other = 0
    for size in SIZES * times:
        scale = np.float32(np.exp(rng.uniform(-12, 3)))
        # LiteRT refuses int16 with another zero point
        zero_point = 0 if dtype == "int16" else int(rng.integers(info.min, info.max + 1))
        codes = rng.integers(info.min, info.max + 1, (1, size)).astype(dtype)
        got = of_runtime(target, model(dtype, codes.shape, Grid(scale, zero_point)), codes)
        params = qjax.QParams(scale, np.int32(zero_point), spec)
        count += size
        wrong += int((bits(dequantize(codes, params, dequantization=formula)) != bits(got)).sum())
        other += int((bits(dequantize(codes, params)) != bits(got)).sum())
    assert count > 6_250 * times
    assert wrong == 0
    # the formulas differ, where they do, in a third of the values
    assert (other > count / 4) == (target == "tflite_optimized_x86" and dtype != "int16")


@pytest.mark.parametrize("size", [5, 8, 21])
def test_eager_and_jit_agree(size):
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (3, size)).astype(np.int8)
    spec = qjax.QSpec(bits=8, symmetric=False)
    params = qjax.QParams(np.float32(0.0123), np.int32(-77), spec)

    def call(codes):
        return dequantize(codes, params, dequantization="product_sum")

    with jax.disable_jit():
        eager = call(codes)
    assert np.array_equal(bits(call(codes)), bits(eager))
    assert np.array_equal(bits(jax.jit(call)(codes)), bits(eager))


def floats(batch: int, size: int) -> bytes:
    """Float input, QUANTIZE, a sum that saturates, DEQUANTIZE: as converters write it."""
    file, grid, wide = File(), Grid(0.037, -3), Grid(0.0413, 11)
    x, out = file.tensor("float32", (batch, size), name="x"), file.tensor("float32", (batch, size), name="y")
    q, s = file.tensor("int8", (batch, size), grid, name="q"), file.tensor("int8", (batch, size), wide, name="s")
    file.operator("QUANTIZE", [x], [q])
    file.operator("ADD", [q, q], [s], "Add")
    file.operator("DEQUANTIZE", [s], [out])
    return file.to_bytes([x], [out])


@pytest.mark.parametrize("target", tflite_runtimes.TARGETS)
@pytest.mark.parametrize("shape", [(1, 13), (3, 640), (5, 21)])
@pytest.mark.sampled(6)
def test_a_graph_with_float_outputs_is_its_runtime(target, shape):
    data = floats(*shape)
    graph = IntegerGraph(tflite.read(data, target=target))
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32) * 2
    if target == "tflite_micro":
        got = tflite_runtimes.micro(data, [x], ["y"])["y"]
    else:
        got = tflite_runtimes.litert(data, tflite_runtimes.MODES[target], [x], every=False)["y"]
    assert np.array_equal(bits(graph(x)), bits(got))


def test_a_file_keeps_the_formula():
    """Artifact, ONNX of style integer, StableHLO with a free batch; a graph under another target has its own."""
    graph = tflite.read(floats(1, 13), target="tflite_optimized_x86")
    assert graph.dequantization == "product_sum"
    assert artifact.from_bytes(artifact.to_bytes(graph)).dequantization == "product_sum"
    assert written_by_qjax.read(to_model(graph, style="integer", batch=1)).dequantization == "product_sum"
    assert IntegerGraph(graph).retarget("tflite_xnnpack").ir.dequantization == "product"
    exported = jax.export.deserialize(bytearray(stablehlo.to_bytes(graph, reals=True)))
    for batch in (1, 5):
        x = np.random.default_rng(3).normal(size=(batch, 13)).astype(np.float32)
        assert np.array_equal(bits(exported.call(x)), bits(IntegerGraph(graph)(x)))


def test_a_target_names_a_known_formula():
    unknown: Any = "sum"
    with pytest.raises(ValueError, match="dequantize must be one of product, product_sum"):
        targets.Target("mine", dequantize=unknown)
    with pytest.raises(ValueError, match="expected one of product, product_sum"):
        dequantize(np.zeros(3, np.int8), qjax.QParams(np.float32(1), np.int32(0), qjax.QSpec()), dequantization=unknown)
