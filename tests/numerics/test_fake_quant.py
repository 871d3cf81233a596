"""The values of fake quantization: those of the codes, to the bit, in every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.affine import QParams, QSpec, dequantize, quantize
from qjax.numerics.fake_quant import fake_quant, fake_quant_codes
from tests.numerics import float32

TIES = 524_288


def tie_case(per_channel: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, QSpec]:
    """524,288 exact ties `fl((k + 1/2) s)`, and scale, zero point and spec; half of the ties are clipped."""
    spec = QSpec(bits=8 if per_channel else 16, symmetric=False, axis=-1 if per_channel else None)
    scale = np.random.default_rng(0).uniform(0.001, 0.1, 64 if per_channel else ()).astype(np.float32)
    zero_point = np.full(scale.shape, 3, np.int32)
    return float32.exact_ties(scale, TIES), scale, zero_point, spec


@pytest.mark.parametrize("gradient", ["ste", "lsq", "pact"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.sampled(2)
def test_ties_have_one_value_everywhere(per_channel, gradient):
    x, scale, zero_point, spec = tie_case(per_channel)
    low, high = np.float32(spec.qmin - 3), np.float32(spec.qmax - 3)
    expected = np.clip(np.rint(x * (np.float32(1) / scale)), low, high) * scale
    rows = x.shape[0]

    def run(x, scale):
        return fake_quant(x, QParams(scale, zero_point, spec), gradient=gradient)

    def scanned(x, scale):
        return jax.lax.scan(lambda carry, part: (carry, run(part, scale)), 0, x.reshape(8, rows // 8, -1))[1]

    def differentiated(x, scale):
        def loss(x, scale):
            y = run(x, scale)
            return jnp.sum(y), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, scale)[0][1]

    ways = {
        "eager": run(x, scale),
        "jit": jax.jit(run)(x, scale),
        "jit with a constant scale": jax.jit(lambda x: run(x, scale))(x),
        "vmap": jax.jit(jax.vmap(lambda row, scale: run(row[None], scale)[0], (0, None)))(x, scale),
        "grad": differentiated(x, scale),
        "grad under jit": jax.jit(differentiated)(x, scale),
        "forward mode": jax.jit(lambda x, s: jax.jvp(run, (x, s), (x, s))[0])(x, scale),
        "checkpoint": jax.jit(jax.checkpoint(run))(x, scale),
        "checkpoint under grad": jax.jit(jax.grad(lambda x, s: jnp.sum(jax.checkpoint(run)(x, s))))(x, scale),
        "scan": jax.jit(scanned)(x, scale).reshape(x.shape),
    }
    inside = ways.pop("checkpoint under grad")
    steps = np.rint(x * (np.float32(1) / scale))
    assert np.array_equal(np.asarray(inside), ((steps >= low) & (steps <= high)).astype(np.float32))
    for way, values in ways.items():
        assert np.array_equal(np.asarray(values), expected), way


@pytest.mark.parametrize("per_channel", [False, True])
def test_codes_are_those_of_quantize(per_channel):
    x, scale, zero_point, spec = tie_case(per_channel)
    expected = np.asarray(quantize(x, QParams(scale, zero_point, spec))).astype(np.float32) - 3
    shape = (1, -1)
    for run in (fake_quant_codes, jax.jit(fake_quant_codes, static_argnums=(3, 4))):
        codes = run(x, scale.reshape(shape), zero_point.reshape(shape), spec.qmin, spec.qmax)
        assert codes.dtype == jnp.float32
        assert np.array_equal(np.asarray(codes), expected)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_16_bit_float(dtype):
    """Computed in float32 and rounded once at the end; round(x / s) in bfloat16 gives 7% wrong codes."""
    every = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    every = every[np.isfinite(every.astype(np.float32))]
    qparams = QParams(0.0371, 7, QSpec(symmetric=False))
    expected = np.asarray(dequantize(quantize(every, qparams), qparams)).astype(dtype)
    for run in (fake_quant, jax.jit(fake_quant)):
        values = run(every, qparams)
        assert values.dtype == dtype
        assert np.array_equal(np.asarray(values).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    "spec",
    [
        QSpec(bits=2),
        QSpec(bits=4, signed=False),
        QSpec(bits=3, axis=(0, 2)),
        QSpec(axis=-1, group_size=2, group_axis=1),
        QSpec(bits=16, group_size=3, group_axis=-1),
    ],
)
@pytest.mark.sampled(2)
def test_any_spec_dequantizes_its_codes(spec):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 4, 6)).astype(np.float32)
    qparams = QParams(rng.uniform(0.01, 0.5, spec.param_shape(x.shape)), np.zeros(spec.param_shape(x.shape), int), spec)
    assert np.array_equal(np.asarray(fake_quant(x, qparams)), np.asarray(dequantize(quantize(x, qparams), qparams)))


@pytest.mark.parametrize("gradient", ["ste", "lsq", "pact"])
def test_no_element_reads_the_zero_point_of_a_symmetric_spec(gradient):
    spec = QSpec(bits=8, axis=-1)
    x, scale, zero_point = jnp.linspace(-9, 9, 24).reshape(4, 6), jnp.full(6, 0.05), jnp.zeros(6, jnp.int32)

    def both(x, scale, zero_point):
        value, pull = jax.vjp(lambda x, s: fake_quant(x, QParams(s, zero_point, spec), gradient=gradient), x, scale)
        return value, pull(jnp.ones_like(x))

    jaxpr = jax.make_jaxpr(both)(x, scale, zero_point).jaxpr
    assert not any(jaxpr.invars[2] in eqn.invars for eqn in jaxpr.eqns)
    value, _ = jax.jit(both)(x, scale, zero_point)
    params = QParams(scale, zero_point, spec)
    assert np.array_equal(value, dequantize(quantize(x, params), params))


def test_a_sum_with_the_values_is_not_fused():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 1 << 17)).astype(np.float32)
    qparams = QParams(0.0371, 0, QSpec())
    expected = np.asarray(fake_quant(x, qparams)) + y
    assert np.array_equal(np.asarray(jax.jit(lambda x, y: fake_quant(x, qparams) + y)(x, y)), expected)


def test_nan_is_seen_and_infinities_saturate():
    qparams = QParams(0.5, 3, QSpec(symmetric=False))
    x = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    for run in (fake_quant, jax.jit(fake_quant)):
        assert np.array_equal(np.asarray(run(x, qparams)), [np.nan, 62.0, -65.5, 1.0], equal_nan=True)
    gradient = jax.grad(lambda x: fake_quant(x, qparams).sum())(jnp.asarray(x))
    assert np.asarray(gradient).tolist() == [0, 0, 0, 1]
    # One NaN shows in the scale's gradient; `learned_scale` stops it there.
    loss = lambda s, x: fake_quant(x, qparams.replace(scale=s), gradient="lsq").sum()  # noqa: E731
    assert np.isnan(jax.grad(loss)(qparams.scale, x))
    assert float(jax.grad(loss)(qparams.scale, x[1:])) == 124 - 131


def test_stochastic_rounding_has_the_gradient_of_its_own_draw():
    key = jax.random.key(3)
    x = jnp.full((1000,), 127.5, jnp.float32)  # rounds to 127, inside, or to 128, clipped
    qparams = QParams(1.0, 0, QSpec())

    def loss(x, key):
        return fake_quant(x, qparams, rounding="stochastic", key=key).sum()

    for gradient in (jax.grad(loss)(x, key), jax.jit(jax.grad(loss))(x, key)):
        kept = float(gradient.sum())
        assert set(np.asarray(gradient).tolist()) == {0.0, 1.0}
        assert abs(kept - 500) < 5 * np.sqrt(250)
    y = x * 0.1
    values = fake_quant(y, qparams, rounding="stochastic", key=key)
    assert np.array_equal(
        np.asarray(jax.jit(lambda y, k: fake_quant(y, qparams, rounding="stochastic", key=k))(y, key)),
        np.asarray(values),
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"gradient": "dorefa"}, ValueError, "gradient must be one of ste, lsq, pact. Got 'dorefa'"),
        ({"rounding": "up"}, ValueError, "rounding must be one of"),
        ({"rounding": "stochastic"}, ValueError, "needs a random key"),
    ],
)
def test_wrong_options_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        fake_quant(np.zeros(3, np.float32), QParams(1.0, 0, QSpec()), **arguments)


def test_wrong_inputs_are_named():
    with pytest.raises(TypeError, match=r"Expected a float tensor to quantize\. Got int8"):
        fake_quant(np.zeros(3, np.int8), QParams(1.0, 0, QSpec()))
    x, one, zero = np.zeros((2, 3), np.float32), np.ones((2,), np.float32), np.zeros((), np.int32)
    with pytest.raises(ValueError, match=r"scale must broadcast to x of shape \(2, 3\).* Got shape \(2,\)"):
        fake_quant_codes(x, one, zero, -8, 7)
    with pytest.raises(TypeError, match="gradient_scale must be a Python number"):
        jax.jit(lambda g: fake_quant(x, QParams(1.0, 0, QSpec()), gradient_scale=g))(1.0)
