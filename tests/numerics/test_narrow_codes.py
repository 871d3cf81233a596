"""Packed codes: every size comes back, in as few bytes as its bits need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.narrow_codes import from_bytes, to_bytes


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("shape", [(5, 7), (16, 8), (1,)])
def test_codes_come_back(bits: int, shape: tuple[int, ...]) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape)
    packed = to_bytes(jnp.asarray(codes, jnp.int32), bits)
    again = jax.jit(from_bytes, static_argnums=(1, 2))(packed, bits, shape)
    np.testing.assert_array_equal(again, codes)
    assert packed.dtype == (jnp.uint8 if bits <= 8 else jnp.uint16)
    if codes.size % 8 == 0:
        assert packed.nbytes == codes.size * (bits if bits <= 8 else 16) // 8


def test_the_first_code_is_in_the_lowest_bits() -> None:
    np.testing.assert_array_equal(to_bytes(jnp.asarray([1, 2, 3, 0]), 2), [0b00111001])
    np.testing.assert_array_equal(to_bytes(jnp.asarray([0b10_0001, 0b01_1111]), 6), [0b1111_0001, 0b0000_0110])
