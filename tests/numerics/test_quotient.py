"""The quotient that is corrected by its exact remainder, from estimates that are off; the platform's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qjax.numerics.quotient import corrected, quotient, reciprocal

RNG = np.random.default_rng(0)


def floats(count: int) -> np.ndarray:
    """Normal numbers of either sign, of all magnitudes whose quotients are normal."""
    bits = RNG.integers(1, 2**23, count) + (RNG.integers(70, 185, count) << 23) + (RNG.integers(0, 2, count) << 31)
    return bits.astype(np.uint32).view(np.float32)


A, B = floats(200_000), floats(200_000)
A[:4096] = B[:4096]
A[4096:8192] = np.nextafter(B[4096:8192], np.float32(np.inf))
A[8192:12288] = np.nextafter(B[8192:12288], np.float32(-np.inf))
B[12288:16384] = np.ldexp(np.float32(1), RNG.integers(-50, 50, 4096)).astype(np.float32)
A[16384:20480] = 1


def off_by(units: int):
    """Division that is off by so many units in the last place."""

    def divide(a: jax.Array, b: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(a / b, jnp.int32) + np.int32(units)
        return lax.bitcast_convert_type(bits, jnp.float32)

    return divide


# a GPU's own estimate is off by two already
@pytest.mark.parametrize("units", [-4, -3, -1, 0, 1, 2, 4])
@pytest.mark.usefixtures("on_cpu")
def test_an_estimate_that_is_off_is_corrected(units: int) -> None:
    found = jax.jit(lambda a, b: corrected(a, b, off_by(units)))(A, B)
    assert np.array_equal(np.asarray(found).view(np.int32), (A / B).view(np.int32))


def test_what_is_not_normal_is_the_platforms_own() -> None:
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 3e38, 1e-3], np.float32)
    a, b = (x.ravel() for x in np.meshgrid(special, special))
    with np.errstate(all="ignore"):
        expected = a / b
    # XLA may flush subnormal numbers to zero
    kept = (expected == 0) | ~(np.abs(expected) < np.finfo(np.float32).tiny)
    found, expected = np.asarray(jax.jit(corrected)(a, b))[kept], expected[kept]
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


def test_the_quotient_of_this_platform_is_rounded_once() -> None:
    assert np.array_equal(np.asarray(jax.jit(quotient)(A, B)), A / B)
    scales = np.abs(B)
    for way in (reciprocal, jax.jit(reciprocal), jax.jit(jax.vmap(reciprocal))):
        assert np.array_equal(np.asarray(way(jnp.asarray(scales))), np.float32(1) / scales)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_correct_their_quotient(platform: str) -> None:
    """What is lowered for them holds the remainder; the CPU's program is one division."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    names = ("cpu", platform)
    texts = [jax.export.export(jax.jit(quotient), platforms=[name])(shape, shape).mlir_module() for name in names]
    assert "stablehlo.subtract" not in texts[0]
    assert "stablehlo.subtract" in texts[1]


@pytest.mark.parametrize(("size", "barriers"), [(4, 3), (2**16 + 1, 0)])
def test_a_gpu_inverts_a_few_numbers_apart_from_their_readers(size: int, barriers: int) -> None:
    """Of large arrays it writes nothing but the result; a CPU divides."""
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    found = {}
    for platform in ("cpu", "cuda"):
        # jax shares traces between equal functions
        text = jax.export.export(jax.jit(lambda a, b: quotient(a, b)), platforms=[platform])(x, x).mlir_module()
        found[platform] = text.count("stablehlo.optimization_barrier"), text.count("stablehlo.shift_left") > 0
    assert found == {"cpu": (0, False), "cuda": (barriers, True)}


def test_an_exported_function_inverts_any_number_of_them() -> None:
    (size,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    exported = jax.export.export(jax.jit(lambda a, b: quotient(a, b)), platforms=["cpu", "cuda"])(x, x)
    assert np.array_equal(exported.call(A, B), A / B)
