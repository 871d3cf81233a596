"""The bytes of blocks that llama.cpp's own quantizer writes: those of qjax, for 200,000 blocks of each format.

tools/ggml.sh .venv/bin/python; python -m pytest --oracles -m oracle tests/contrib/test_oracle_ggml.py
"""

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import WeightFormat
from qjax.contrib.gguf.blocks import block_bytes, pack
from qjax.numerics.block_formats import BLOCK_FORMATS
from qjax.numerics.weight_formats import encode
from tests.numerics.test_block_formats import weights

LIBRARY = Path(__file__).parents[2] / ".ggml/build/bin/libggml-base.so"


@pytest.mark.oracle
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_those_of_ggml(name: str) -> None:
    rng = np.random.default_rng(7)
    w = (rng.standard_normal((100_000, 64)) * np.exp(rng.uniform(-10, 6, (100_000, 1)))).astype(np.float32)
    w = np.concatenate([w, weights()])
    theirs = np.zeros((len(w), 2 * block_bytes(name)), np.uint8)
    quantize = getattr(ctypes.CDLL(str(LIBRARY)), f"quantize_row_{name}_ref")
    quantize.restype = None
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (w, theirs))
    quantize(*pointers, ctypes.c_int64(w.size))
    parts = jax.jit(encode, static_argnums=1)(jnp.asarray(w), WeightFormat(name))
    np.testing.assert_array_equal(pack(tuple(np.asarray(part) for part in parts), name), theirs)
