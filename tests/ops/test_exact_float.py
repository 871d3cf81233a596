"""Products of codes in training: exact accumulators in int8, gradients in float32, NaN stays visible."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qjax import QSpec
from qjax.numerics import QParams
from qjax.ops import Quantized
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.ops.recomputed import recomputed
from qjax.tracing import from_jaxpr

ON_CPU = jax.default_backend() == "cpu"
SPECS = {
    "int8": (QSpec(bits=8), 0),
    "asymmetric": (QSpec(bits=8, symmetric=False), -37),
    "unsigned": (QSpec(bits=8, signed=False, symmetric=False), 201),
    "unsigned, symmetric": (QSpec(bits=8, signed=False), 0),
    "4 bits": (QSpec(bits=4, symmetric=False), 5),
    "16 bits": (QSpec(bits=16), 0),
}


def operand(name: str, seed: int, *shape: int) -> Quantized:
    spec, zero = SPECS[name]
    rng = np.random.default_rng(seed)
    codes = rng.integers(spec.qmin, spec.qmax, shape, endpoint=True) - zero
    scale = jnp.full((1,) * len(shape), 0.5, jnp.float32)
    params = QParams(jnp.float32(0.5), jnp.int32(zero), spec)
    return Quantized(jnp.asarray(codes, jnp.float32), scale, params)


def dot_of(x, w, numbers):
    def function(x, w):
        return lax.dot_general(x, w, numbers)

    program = from_jaxpr(jax.make_jaxpr(function)(jnp.zeros(x.shape), jnp.zeros(w.shape)))
    return Dot().training(program.equations[0], [x, w])[0]


@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("right", ["int8", "asymmetric", "unsigned, symmetric", "4 bits"])
def test_dots_are_exact(left, right):
    x, w = operand(left, 1, 3, 5, 300), operand(right, 2, 300, 7)
    expected = np.asarray(x.codes, np.int64) @ np.asarray(w.codes, np.int64)
    for call in (dot_of, jax.jit(dot_of, static_argnums=2)):
        acc = call(x, w, (((2,), (0,)), ((), ()))).acc
        assert acc.dtype == jnp.float32
        assert np.array_equal(acc, expected.astype(np.float32))


def test_heads():
    x, w = operand("asymmetric", 3, 2, 4, 5, 6), operand("unsigned", 4, 2, 4, 6, 3)
    acc = jax.jit(dot_of, static_argnums=2)(x, w, (((3,), (2,)), ((0, 1), (0, 1)))).acc
    assert np.array_equal(acc, np.asarray(x.codes, np.int64) @ np.asarray(w.codes, np.int64))


@pytest.mark.parametrize("left", ["int8", "asymmetric", "unsigned", "unsigned, symmetric"])
def test_padding_adds_real_zeros(left):
    x, w = operand(left, 5, 2, 6, 6, 9), operand("int8", 6, 3, 3, 9, 20)

    def function(x, w):
        return lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program = from_jaxpr(jax.make_jaxpr(function)(jnp.zeros(x.shape), jnp.zeros(w.shape)))
    acc = jax.jit(lambda x, w: Conv().training(program.equations[0], [x, w])[0].acc)(x, w)
    with jax.enable_x64(True):
        expected = function(np.asarray(x.codes, np.float64), np.asarray(w.codes, np.float64))
    assert np.array_equal(acc, np.asarray(expected))


@pytest.mark.parametrize("left", SPECS)
def test_gradients_are_those_of_the_float_product(left):
    x, w = operand(left, 7, 4, 30), operand("int8", 8, 30, 5)
    numbers = (((1,), (0,)), ((), ()))
    g = np.random.default_rng(9).integers(-3, 4, (4, 5)).astype(np.float32)

    def loss(a, b):
        return jnp.sum(dot_of(x.with_codes(a), w.with_codes(b), numbers).acc * g)

    for recomputing in (False, True):
        with recomputed() if recomputing else contextlib.nullcontext():
            da, db = jax.jit(jax.grad(loss, (0, 1)))(x.codes, w.codes)
        assert np.array_equal(da, g @ np.asarray(w.codes).T)
        assert np.array_equal(db, np.asarray(x.codes).T @ g)
    ones = jnp.ones_like(x.codes), jnp.ones_like(w.codes)
    _, tangent = jax.jit(lambda a, b: jax.jvp(loss, (a, b), ones))(x.codes, w.codes)
    assert tangent == np.sum(g * (np.sum(np.asarray(w.codes), 0) + np.sum(np.asarray(x.codes), 1, keepdims=True)))


@pytest.mark.parametrize("groups", [1, 8], ids=["a product", "depthwise"])
def test_the_backward_keeps_codes_in_bytes(groups):
    x, w = operand("asymmetric", 7, 2, 6, 6, 8), operand("int8", 8, 3, 3, 8 // groups, 8)

    def function(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)

    program = from_jaxpr(jax.make_jaxpr(function)(jnp.zeros(x.shape), jnp.zeros(w.shape)))

    def acc(a, b):
        return Conv().training(program.equations[0], [x.with_codes(a), w.with_codes(b)])[0].acc

    kept = [a for a in jax.tree.leaves(jax.vjp(acc, x.codes, w.codes)[1]) if a.size > 1]
    assert sorted((a.dtype.name, a.shape) for a in kept) == sorted([("int8", x.shape), ("int8", w.shape)])


@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_among_the_codes_is_seen(which):
    operands = [operand("asymmetric", 10, 4, 30), operand("int8", 11, 30, 5)]
    codes = operands[which].codes.at[2, 3].set(jnp.nan)
    operands[which] = operands[which].with_codes(codes)
    acc = jax.jit(dot_of, static_argnums=2)(*operands, (((1,), (0,)), ((), ()))).acc
    seen = np.isnan(acc)
    assert np.all(seen[2] if which == 0 else seen[:, 3])
    # where int8 multiplies, a weight's NaN is in all of them
    assert np.array_equal(seen.any(1), np.arange(4) == 2) if which == 0 else np.all(seen) or not ON_CPU


@pytest.mark.parametrize(
    ("count", "left", "form"),
    [(500, "asymmetric", "bf16"), (600, "asymmetric", "i8"), (30, "16 bits", "f32"), (100, "16 bits", "i32")],
)
@pytest.mark.parametrize("op", ["dot", "conv"])
def test_what_accelerators_multiply(op, count, left, form):
    """Never float32 in a convolution, which cuDNN may transform."""
    x, w = operand(left, 12, 2, 3, 3, count), operand("int8", 13, 1, 1, count, 16)
    if op == "dot":
        x, w = operand(left, 12, 2, 3, 3, count), operand("int8", 13, count, 16)

    def function(x, w):
        if op == "dot":
            return lax.dot_general(x, w, (((3,), (0,)), ((), ())))
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program = from_jaxpr(jax.make_jaxpr(function)(jnp.zeros(x.shape), jnp.zeros(w.shape)))
    kind = Dot() if op == "dot" else Conv()

    def acc(a, b):
        return kind.training(program.equations[0], [x.with_codes(a), w.with_codes(b)])[0].acc

    for platform in ("cuda", "tpu"):
        text = jax.export.export(jax.jit(acc), platforms=[platform])(x.codes, w.codes).mlir_module()
        found = set(re.findall(r"stablehlo\.(dot_general|convolution).*: \(tensor<[^>]*x(\w+)>, ", text))
        wanted = "i32" if op == "conv" and form == "f32" else form
        assert {dtype for _, dtype in found} == {wanted}
        assert not any(name == "convolution" and dtype == "f32" for name, dtype in found)
