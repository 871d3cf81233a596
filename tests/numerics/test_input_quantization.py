"""Each way to make codes of floats against numpy's float32, which rounds every operation by IEEE's rules."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.affine import QParams, QSpec, quantize
from qjax.numerics.fake_quant import fake_quant_codes
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS, emulated_steps

F = np.float32


def fma(x: float, y: float, z: int) -> F:
    """One rounding, through an exact fraction and a double that holds its leading bits."""
    exact = Fraction(x) * Fraction(y) + z
    low = F(float(exact))
    candidates = [low, np.nextafter(low, F(np.inf)), np.nextafter(low, F(-np.inf))]
    distance = [abs(Fraction(float(c)) - exact) for c in candidates]
    best = min(distance)
    tied = [c for c, d in zip(candidates, distance, strict=True) if d == best]
    return next(c for c in tied if len(tied) == 1 or int(c.view(np.int32)) % 2 == 0)


def expected(name: str, x: F, s: F, z: int) -> int:
    inverse, ratio = F(1) / s, x / s
    if name == "reciprocal":
        return int(np.rint(x * inverse)) + z
    if name == "reciprocal_fma":
        return int(np.rint(fma(float(x), float(inverse), z)))
    if name == "reciprocal_inside":
        return int(np.rint(F(x * inverse) + F(z)))
    if name == "division":
        return int(np.rint(ratio)) + z
    if name == "division_away":
        magnitude = (2 * abs(Fraction(float(ratio))) + 1) // 2
        return int(magnitude if ratio >= 0 else -magnitude) + z
    return int(np.rint(F(ratio + F(z))))


def inputs(s: F) -> np.ndarray:
    r = np.random.default_rng(0)
    ties = (np.arange(-140, 140) + F(0.5)).astype(F) * s
    around = [np.nextafter(ties, F(d)) for d in (np.inf, -np.inf)]
    return np.concatenate([ties, *around, r.uniform(-150, 150, 300).astype(F) * s, np.array([0, -0.0, 1e-40], F)])


@pytest.mark.parametrize("name", INPUT_QUANTIZATIONS)
@pytest.mark.parametrize(("scale", "zero_point"), [(0.5, 1), (0.1, -3), (0.0123, 0), (3.7, 7), (0.1, 100)])
@pytest.mark.sampled(10)
def test_codes(name, scale, zero_point):
    s = F(scale)
    x = inputs(s)
    spec = QSpec(bits=8, symmetric=False)
    params = QParams(s, np.int32(zero_point), spec)
    want = [min(max(expected(name, v, s, zero_point), -128), 127) for v in x]
    run = jax.jit(lambda v: quantize(v, params, quantization=name))
    assert np.asarray(run(x)).tolist() == want
    assert np.asarray(quantize(jnp.asarray(x), params, quantization=name)).tolist() == want


@pytest.mark.parametrize("name", INPUT_QUANTIZATIONS)
def test_what_is_not_a_number_or_not_finite(name):
    params = QParams(F(0.1), np.int32(5), QSpec(bits=8, symmetric=False))
    codes = quantize(jnp.asarray([np.nan, np.inf, -np.inf, 3e38, -3e38], jnp.float32), params, quantization=name)
    assert np.asarray(codes).tolist() == [5, 127, -128, 127, -128]


@pytest.mark.parametrize("name", INPUT_QUANTIZATIONS)
def test_the_trained_codes_and_their_gradient(name):
    s, z = F(0.1), np.int32(3)
    x = jnp.asarray(inputs(s))

    def centred(v):
        return fake_quant_codes(v, s, z, -128, 127, quantization=name)

    params = QParams(s, z, QSpec(bits=8, symmetric=False))
    codes = np.asarray(jax.jit(lambda v: quantize(v, params, quantization=name))(x))

    @jax.jit
    def trained(v):
        found, back = jax.vjp(centred, v)
        return found, *back(jnp.ones_like(found))

    found, gradient = trained(x)
    assert np.array_equal(np.asarray(found).astype(np.int32) + 3, codes)
    steps = [expected(name, v, s, 3) for v in np.asarray(x)]
    inside = np.array([-128 <= q <= 127 for q in steps])
    assert np.array_equal(np.asarray(gradient) != 0, inside)


def test_errors():
    x = jnp.ones((3,), jnp.float32)
    params = QParams(F(0.1), np.int32(0), QSpec(bits=8, symmetric=False))
    with pytest.raises(ValueError, match="defines its own rounding"):
        quantize(x, params, rounding="nearest_away", quantization="division")
    with pytest.raises(ValueError, match="expected one of reciprocal_fma, "):
        emulated_steps(x, F(0.1), np.int32(0), "reciprocal")
