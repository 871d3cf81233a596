"""The bytes of blocks that llama.cpp's own quantizer writes: those of qjax, for at least 200,000 blocks of each format.

tools/ggml.sh .venv/bin/python; python -m pytest --oracles -m oracle tests/contrib/test_oracle_ggml.py
python -m tests.contrib.test_oracle_ggml writes the recording that `make test` reads.
"""

import ctypes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import WeightFormat
from qjax.contrib.gguf.blocks import block_bytes, pack
from qjax.numerics.block_formats import BLOCK_FORMATS
from qjax.numerics.weight_formats import encode_stored
from tests.numerics.test_block_formats import weights
from tests.numerics.test_k_formats import FORMATS, RECORDED
from tests.numerics.test_k_formats import weights as k_weights

LIBRARY = Path(__file__).parents[2] / ".ggml/build/bin/libggml-base.so"


@pytest.mark.oracle
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_those_of_ggml(name: str) -> None:
    rng = np.random.default_rng(7)
    in_k = BLOCK_FORMATS[name].has_integer_scales
    # products of three weights of a K format underflow below about 1e-6
    w = rng.standard_normal((20_000, 512) if in_k else (100_000, 64)) * np.exp(
        rng.uniform(-8 if in_k else -10, 6, (20_000 if in_k else 100_000, 1))
    )
    w = np.concatenate([w.astype(np.float32), k_weights() if in_k else weights()])
    parts = jax.jit(encode_stored, static_argnums=1)(jnp.asarray(w), WeightFormat(name))
    np.testing.assert_array_equal(pack(tuple(np.asarray(part) for part in parts), name), blocks_of_ggml(w, name))


@pytest.mark.oracle
def test_recorded_blocks_are_those_of_ggml() -> None:
    recorded = np.load(RECORDED)
    assert set(recorded) == set(FORMATS)
    for name in FORMATS:
        np.testing.assert_array_equal(recorded[name], blocks_of_ggml(k_weights(), name))


def blocks_of_ggml(w: np.ndarray, name: str) -> np.ndarray:
    """The bytes that ggml makes of float32 rows."""
    row = w.shape[1] // BLOCK_FORMATS[name].whole * block_bytes(name)
    found = np.zeros((len(w), row), np.uint8)
    quantize = getattr(ctypes.CDLL(str(LIBRARY)), f"quantize_row_{name.replace('_k', '_K')}_ref")
    quantize.restype = None
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (w, found))
    quantize(*pointers, ctypes.c_int64(w.size))
    return found


if __name__ == "__main__":
    found: dict[str, Any] = {name: blocks_of_ggml(k_weights(), name) for name in FORMATS}
    np.savez_compressed(RECORDED, **found)
