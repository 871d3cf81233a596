"""ONNX Runtime's softmax of codes: against float32 of numpy, fractions, and the runtime itself."""

import functools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from qjax.numerics import float32, positive_sums, qlinear_softmax, softmax


def number(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


def key_sums(values: np.ndarray) -> np.ndarray:
    return float32.to_array(positive_sums.numbers(positive_sums.total(positive_sums.keys(float32.of(values)))))


@pytest.mark.parametrize(("low", "high"), [(-149, -120), (-149, 115), (-12, 0), (100, 115)])
def test_a_sum_rounds_after_each_number(low, high):
    """Subnormal numbers and zeros included, and orders in which the sum is small for long."""
    rng = np.random.default_rng(high - low)
    values = (rng.random((60, 3000)) * np.exp2(rng.uniform(low, high, (60, 3000)))).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    values[:, :500] = np.sort(values[:, :500], axis=0)
    want = np.cumsum(values, axis=0, dtype=np.float32)[-1]
    assert (want > 0).all()
    assert np.array_equal(key_sums(values), want)


def test_ties_go_to_the_even_sum():
    one, half = np.float32(2.0**24), np.float32(1)
    found = key_sums(np.array([[one, one + 2, one], [half, half, 3 * half]], np.float32))
    assert np.array_equal(found, np.array([one, one + 4, one + 4], np.float32))


def quotients(p: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """qjax's and numpy's rint(float32(p / s))."""
    (keys, sums) = (positive_sums.keys(float32.of(x)) for x in (p, s))
    found = qlinear_softmax._quotient(np, keys, *positive_sums.fields(sums))
    return found, np.rint(p / s)


def test_a_quotient_is_the_rounded_float32():
    """Close to the middle between two integers, where float32 rounds up to it or down to it."""
    rng = np.random.default_rng(0)
    s = (rng.random(200_000) + 1).astype(np.float32) * np.exp2(rng.integers(-3, 4, 200_000)).astype(np.float32)
    near = (rng.integers(0, 400, s.size) + 0.5) * (1 + rng.integers(-3, 4, s.size) * 2.0**-24)
    for p in ((s * near).astype(np.float32), (s * rng.uniform(0, 400, s.size)).astype(np.float32)):
        found, want = quotients(p, s)
        assert np.array_equal(found, want)
    exact = np.arange(800, dtype=np.float32) / 2
    found, want = quotients(exact[1:] * 3, np.full(799, 3, np.float32))
    assert np.array_equal(found, want)
    assert (quotients(np.exp2(np.arange(10, 60)).astype(np.float32), np.ones(50, np.float32))[0] > 255).all()


def test_the_exponentials_are_rounded_once():
    """l of the formula from fractions of the greatest float32, by the definition line by line."""
    scale, length = np.float32(0.1), 10
    room = np.float32(np.log(float(Fraction(float(np.finfo(np.float32).max)) / length)))
    lift = (float(room) - 5.0) / float(scale)
    want = np.exp((lift - np.arange(256)) * float(scale)).astype(np.float32)
    found = qlinear_softmax.prepare(scale, length, np.float32(1 / 256), 0)
    assert np.array_equal(float32.to_array(float32.Float32(found.mantissa, found.exponent)), want)


@functools.cache
def session(dtype: str, length: int, x_scale: float, y_scale: float, zero_point: int) -> onnxruntime.InferenceSession:
    kind = TensorProto.INT8 if dtype == "int8" else TensorProto.UINT8
    grids = {"xs": number(x_scale), "xz": np.asarray(3, dtype), "ys": number(y_scale)}
    grids["yz"] = np.asarray(zero_point, dtype)
    node = helper.make_node("QLinearSoftmax", ["x", *grids], ["y"], domain="com.microsoft", opset=13, axis=-1)
    ports = [helper.make_tensor_value_info(name, kind, ["N", length]) for name in "xy"]
    constants = [numpy_helper.from_array(value, name) for name, value in grids.items()]
    graph = helper.make_graph([node], "softmax", ports[:1], ports[1:], constants)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString())


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.sampled_from(["int8", "uint8"]),
    st.integers(1, 300),
    st.floats(-14, 5),
    st.floats(-14, -6),
    st.integers(0, 255),
    st.integers(0, 2**31),
)
def test_equals_onnx_runtime(dtype, length, x_power, y_power, above, seed):
    info = np.iinfo(dtype)
    x_scale, y_scale = np.float32(2.0**x_power), np.float32(2.0**y_power)
    if qlinear_softmax.overflows(x_scale, length, y_scale):
        return
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.uniform(0, 7))
    x = np.clip(np.rint(rng.normal(rng.integers(info.min, info.max), spread, (40, length))), info.min, info.max)
    x = x.astype(dtype)
    zero_point = info.min + above
    (want,) = session(dtype, length, float(x_scale), float(y_scale), zero_point).run(None, {"x": x})
    known = softmax.prepare("onnx", x_scale, length=length, y_scale=y_scale, y_zero_point=zero_point)
    assert np.array_equal(softmax.softmax(x, known), want)


def test_the_bits_are_those_of_a_trace():
    x = np.random.default_rng(1).integers(0, 256, (6, 5, 33)).astype(np.uint8)
    known = softmax.prepare("onnx", 0.1, length=33, y_scale=1 / 255, y_zero_point=0)
    want = softmax.softmax(x, known)
    assert len(np.unique(want)) > 30
    lowered = jax.jit(softmax.softmax).lower(x, known)
    assert np.array_equal(lowered.compile()(x, known), want)
    assert np.array_equal(jax.vmap(softmax.softmax, (1, None), 1)(x, known), want)
    assert "f32" not in lowered.as_text()


def test_where_the_runtime_overflows():
    """A share of one element is e c: beyond float32. ONNX Runtime then gives the zero point, here the share is 1."""
    fine, over = (np.float32(0.1), 2, np.float32(1 / 256)), (np.float32(0.1), 1, np.float32(1 / 256))
    assert not qlinear_softmax.overflows(*fine)
    assert qlinear_softmax.overflows(*over)
    x = np.array([[7]], np.uint8)
    (found,) = session("uint8", 1, 0.1, 1 / 256, 0).run(None, {"x": x})
    assert np.array_equal(found, [[0]])
    assert np.array_equal(softmax.softmax(x, softmax.prepare("onnx", 0.1, length=1, y_zero_point=0)), [[255]])


def test_clear_errors():
    with pytest.raises(ValueError, match="needs the length of a row"):
        softmax.prepare("onnx", 0.1)
    with pytest.raises(ValueError, match="output's scale must be positive and at most 1"):
        softmax.prepare("onnx", 0.1, length=3, y_scale=1.5)
    with pytest.raises(ValueError, match="input's scale must be finite and positive"):
        softmax.prepare("onnx", -0.1, length=3)
