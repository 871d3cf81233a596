"""Weights that grow in training until an int32 accumulator would wrap: no wrong number without a word."""

# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.ops.base import Quantized
from qjax.ops.exact_float import matmul_codes
from qjax.tracing import from_jaxpr
from tests.layers.round_trip import data

AXES = ((0,), (1,))


class Dense(nnx.Module):
    def __init__(self, k):
        self.a = nnx.Linear(k, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.a(x)


def grown(weights, activations, k=200):
    """A model that converts, and the same after its weights grew beyond int32."""
    x = jnp.abs(data(4, k))
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=weights), activations=qjax.QSpec(bits=activations, symmetric=False))
    with pytest.warns(UserWarning, match="beyond int32"):
        qmodel = qjax.quantize(Dense(k), recipe, x)
    # small codes at first
    qmodel.model.a.kernel[...] = qmodel.model.a.kernel[...] * 2.0**-8
    qmodel.eval()
    after = nnx.clone(qmodel)
    after.model.a.kernel[...] = jnp.ones_like(after.model.a.kernel[...])
    return qmodel, after, x


@pytest.mark.parametrize(("weights", "activations"), [(12, 16), (16, 14)])
@pytest.mark.sampled(1)
def test_fake_quantization_and_exact(weights, activations):
    qmodel, after, x = grown(weights, activations)
    forward = qjax.exact(qmodel, x)
    jitted = nnx.jit(forward)
    graph = qjax.convert(qmodel, x)
    assert np.array_equal(jitted(qmodel, x), graph(x))
    with pytest.raises(ValueError, match=r"accumulator of 'a' .* beyond int32"):
        qjax.convert(after, x)
    with pytest.raises(ValueError, match=r"accumulator of 'a' .* beyond int32"):
        forward(after, x)
    assert np.isnan(np.asarray(jitted(after, x))).all()
    constants = nnx.jit(forward.constants)
    assert np.array_equal(forward(constants(qmodel), x), graph(x))
    assert np.isnan(np.asarray(forward(constants(after), x))).all()
    gradient = nnx.jit(nnx.grad(lambda m, x: jnp.sum(forward(m, x))))(after, x)
    assert np.isfinite(np.asarray(gradient["model"]["a"]["bias"][...])).all()
    # the sums saturate the output's range, as the real ones do
    q = graph.ir.tensors["a"].quantization
    assert q is not None
    top = (q.qmax - int(q.zero_point)) * np.float32(q.scale)
    for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        assert np.array_equal(call(after, x), np.full((4, 3), top, np.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("x_bits", "w_bits", "count"), [(16, 16, 7), (16, 16, 300), (8, 16, 4096), (8, 8, 140_000), (16, 8, 1000)]
)
def test_sums_beyond_int32_are_numbers_and_others_are_the_same_integers(x_bits, w_bits, count):
    rng = np.random.default_rng(0)
    x_spec, w_spec = qjax.QSpec(bits=x_bits), qjax.QSpec(bits=w_bits)

    def quantized(codes, spec):
        one = jnp.ones((), jnp.float32)
        return Quantized(jnp.asarray(codes, jnp.float32), one, qjax.QParams(one, jnp.zeros((), jnp.int32), spec))

    def product(a, b, kind, precision):
        return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=kind, precision=precision)

    def integers(a, b, *_):
        return product(a, b, jnp.int32, jax.lax.Precision.HIGHEST)

    x = rng.integers(-x_spec.qmax, x_spec.qmax + 1, (3, count))
    w = rng.integers(-w_spec.qmax, w_spec.qmax + 1, (count, 2))
    x[1], w[:, 1] = x_spec.qmax, w_spec.qmax
    x[2], w[:, 0] = -x_spec.qmax, np.where(np.arange(count) % 2, w_spec.qmax, -w_spec.qmax)
    true = x.astype(object) @ w.astype(object)
    assert abs(true).max() > 2**31
    small = np.clip(x, -1, 1) * max(1, int(2**30 // abs(w).sum(0).max()))
    size = abs(x).astype(object) @ abs(w).astype(object)
    traced = jax.make_jaxpr(lambda a, b: product(a, b, jnp.float32, None))(jnp.zeros(x.shape), jnp.zeros(w.shape))
    (own,) = from_jaxpr(traced).equations
    for run in (lambda f: f, jax.jit):
        acc = run(lambda a, b: matmul_codes(quantized(a, x_spec), quantized(b, w_spec), AXES, product, own, integers))
        assert np.array_equal(acc(small, w), (small.astype(object) @ w.astype(object)).astype(np.float32))
        # the float32 product: not exact, but the number that was meant
        got = np.asarray(acc(x, w)).astype(np.float64)
        assert (abs(got - true) * 10**4 <= size).all()
        spoiled = x.astype(np.float32)
        spoiled[0, 0] = np.nan
        assert np.isnan(np.asarray(acc(spoiled, w))[0]).all()
