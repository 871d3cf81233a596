"""The K formats of GGUF files: codes as ggml's quantizer writes them, and numbers as the package gguf reads them."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import quants

from qjax import WeightFormat
from qjax.contrib.gguf.blocks import block_bytes, pack, unpack
from qjax.contrib.gguf.k_blocks import LAYOUTS
from qjax.numerics.block_formats import BLOCK_FORMATS, scales_and_minimums
from qjax.numerics.weight_formats import decode, encode, encode_stored

FORMATS = tuple(LAYOUTS)
RECORDED = Path(__file__).with_suffix(".npz")
"""The bytes of `weights` from ggml's quantizer; tests/contrib/test_oracle_ggml.py writes and compares them."""


def weights() -> np.ndarray:
    """Rows of very different size, with zeros, equal numbers, one sign only, long tails, and blocks of other sizes."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(24, 512)) * np.exp(rng.uniform(-8, 6, (24, 1)))
    w[0], w[1, :256], w[2] = 0, 1, -1e-30
    w[3], w[4], w[5] = np.round(w[3]), np.abs(w[4]), -np.abs(w[5])
    w[6, :32], w[7, 16:48], w[8] = 0, 3, np.tile([1, -1], 256)
    w[9] = rng.standard_t(1.1, 512)
    w[10] *= np.repeat(np.exp(rng.uniform(-3, 0, 32)), 16)
    return w.astype(np.float32)


def random_bytes(name: str, rows: int, seed: int = 1) -> np.ndarray:
    """Blocks of random codes and scales, two in a row."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, 2 * block_bytes(name)), dtype=np.uint8)
    fields = data.reshape(-1, block_bytes(name)).view(LAYOUTS[name])
    for half in set(LAYOUTS[name].names or ()) & {"d", "dmin"}:
        fields[half] = rng.normal(size=fields.shape) / 300
    return data


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_ggml(name: str) -> None:
    w, format = jnp.asarray(weights()), WeightFormat(name)
    for run in (encode_stored, jax.jit(encode_stored, static_argnums=1)):
        stored = tuple(np.asarray(part) for part in run(w, format))
        np.testing.assert_array_equal(pack(stored, name), np.load(RECORDED)[name])
    parts = encode(w, format)
    values = decode(parts, format)
    data = np.load(RECORDED)[name]
    np.testing.assert_array_equal(values, quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]))
    assert [part.shape for part in parts[1:]] == [(24, 512 // BLOCK_FORMATS[name].block)] * (len(parts) - 1)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_are_unpacked_and_packed_again(name: str) -> None:
    data, known = random_bytes(name, 200), BLOCK_FORMATS[name]
    codes, *stored = unpack(data, name)
    np.testing.assert_array_equal(pack((codes, *stored), name), data)
    parts = [jnp.asarray(codes), *scales_and_minimums([jnp.asarray(part) for part in stored], known)]
    expected = quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(decode(parts, WeightFormat(name)), expected)
    assert (codes.min(), codes.max()) == (known.lowest, known.lowest + 2**known.bits - 1)


def test_what_a_k_format_cannot_hold_is_refused() -> None:
    codes, d, scales, dmin, minimums = unpack(random_bytes("q4_k", 1), "q4_k")
    with pytest.raises(ValueError, match="q4_k: expected scales of 0 to 63, got 0 to 64"):
        pack((codes, d, np.arange(16, dtype=np.int8)[None] // 15 * 64, dmin, minimums), "q4_k")
    with pytest.raises(ValueError, match="q4_k: expected minimums of 0 to 63, got -1 to -1"):
        pack((codes, d, scales, dmin, np.full_like(minimums, -1)), "q4_k")
    with pytest.raises(ValueError, match=r"q4_k: expected scales that float16 represents"):
        pack((codes, np.full_like(d, 0.1), scales, dmin, minimums), "q4_k")
    with pytest.raises(
        ValueError, match="q6_k: expected groups that divide the 128 weights of a sum, got groups of 256"
    ):
        encode(jnp.ones((2, 128)), WeightFormat("q6_k"))
    with pytest.raises(ValueError, match=r"q6_k has blocks of 16\. Leave group_size out"):
        WeightFormat("q6_k", 16)
