"""The block formats of GGUF files: codes, scales and minimums against the package gguf of llama.cpp's authors."""

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import quants

from qjax import WeightFormat
from qjax.contrib.gguf.blocks import pack, unpack
from qjax.numerics.block_formats import BLOCK_FORMATS, to_float16_grid
from qjax.numerics.weight_formats import decode, encode

F32 = np.float32
PLAIN = [name for name, known in BLOCK_FORMATS.items() if not known.has_integer_scales]


def weights() -> np.ndarray:
    """Rows of very different size, with zeros, ties, equal numbers, and scales that are subnormal in float16."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(3000, 64)) * np.exp(rng.uniform(-14, 8, (3000, 1)))).astype(F32)
    w[0], w[1], w[2] = 0, 1, -1e-30
    w[3], w[4] = np.round(w[3]), np.tile([1, -1], 32)
    w[5, :32] = -3
    return w


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_blocks_are_those_of_gguf(name: str, jitted: bool) -> None:
    w, format = weights(), WeightFormat(name)
    kind = gguf.GGMLQuantizationType[name.upper()]
    theirs = quants.quantize(w, kind)
    parts = (jax.jit(encode, static_argnums=1) if jitted else encode)(jnp.asarray(w), format)
    np.testing.assert_array_equal(decode(parts, format), quants.dequantize(theirs, kind))
    np.testing.assert_array_equal(pack(tuple(np.asarray(part) for part in parts), name), theirs)


@pytest.mark.parametrize("name", PLAIN)
def test_any_bytes_are_unpacked_and_packed_again(name: str) -> None:
    known = BLOCK_FORMATS[name]
    kind = gguf.GGMLQuantizationType[name.upper()]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(1).integers(0, 256, (500, 2 * size), dtype=np.uint8)
    halves = np.random.default_rng(2).normal(size=(500, 2, 2)).astype(np.float16)
    blocks = data.reshape(500, 2, size)
    blocks[:, :, : 2 * (1 + known.has_minimum)] = halves.view(np.uint8)[..., : 2 * (1 + known.has_minimum)]
    parts = unpack(data, name)
    np.testing.assert_array_equal(pack(parts, name), data)
    values = decode([jnp.asarray(part) for part in parts], WeightFormat(name))
    np.testing.assert_array_equal(values, quants.dequantize(data, kind))


@pytest.mark.parametrize("run", [to_float16_grid, jax.jit(to_float16_grid)], ids=["eager", "jit"])
def test_the_grid_of_float16_is_that_of_numpy(run: Any) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [
            rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(F32),
            np.arange(2**16, dtype=np.uint16).view(np.float16).astype(F32),
            (rng.normal(size=100_000) * 1e-6).astype(F32),
            np.array([65504, 65519, 65520, -65520, 2.0**-24, 2.0**-25, 3 * 2.0**-25], F32),
        ]
    )
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(x), x.astype(np.float16).astype(F32))


def test_what_a_block_cannot_hold_is_refused() -> None:
    codes, scales = np.zeros((1, 32), np.int8), np.full((1, 1), 0.1, F32)
    with pytest.raises(ValueError, match=r"q4_0: expected scales that float16 represents. Use qjax.WeightFormat"):
        pack((codes, scales), "q4_0")
    with pytest.raises(ValueError, match="q4_0: expected codes of 4 bits, got 0 to 8"):
        pack((np.full((1, 32), np.arange(32) % 9, np.int8), np.ones((1, 1), F32)), "q4_0")
    with pytest.raises(ValueError, match=r"q4_0 has blocks of 32\. Leave group_size out"):
        WeightFormat("q4_0", 64)
    with pytest.raises(ValueError, match=r"q8_0: expected groups that divide the 48 .* Choose another format for this"):
        encode(jnp.ones((2, 48)), WeightFormat("q8_0"))
