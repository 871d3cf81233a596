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
from flax import nnx

from qjax import WeightFormat
from qjax.contrib.gguf.blocks import block_bytes, pack
from qjax.numerics.block_formats import BLOCK_FORMATS
from qjax.numerics.weight_formats import encode_stored
from tests.layers import test_dynamic_ggml as products
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


@pytest.mark.oracle
@pytest.mark.parametrize("name", products.FORMATS)
def test_products_are_those_of_ggml(name: str) -> None:
    x, w = products.activations(300, 576), products.kernel(400, 576)
    expected = products_of_ggml(x, w, name)
    assert expected.size > 100_000
    qmodel = products.quantized(name, w, x)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(qmodel, x), expected)


@pytest.mark.oracle
def test_recorded_products_are_those_of_ggml() -> None:
    recorded = np.load(products.RECORDED)
    for name, expected in recorded_products().items():
        np.testing.assert_array_equal(recorded[name], expected)


def recorded_products() -> dict[str, np.ndarray]:
    x, w = products.activations(), products.kernel()
    found = {name: products_of_ggml(x, w, name) for name in products.FORMATS}
    with_sums = rows_of_ggml(x, "q8_1").reshape(len(x), -1, 36)
    return {
        **found,
        "q8_0 blocks": rows_of_ggml(x, "q8_0"),
        "sums": with_sums[..., 2:4].copy().view(np.float16)[..., 0],
    }


def cpu_of_ggml() -> ctypes.CDLL:
    """The kernels for AVX2, with their tables of float16 numbers."""
    library = ctypes.CDLL(str(LIBRARY.with_name("libggml-cpu.so")))
    library.ggml_cpu_init()
    return library


def rows_of_ggml(x: np.ndarray, name: str) -> np.ndarray:
    """The bytes of float32 rows, quantized as activations to q8_0 or q8_1."""
    found = np.zeros((len(x), x.shape[1] // 32 * {"q8_0": 34, "q8_1": 36}[name]), np.uint8)
    quantize = getattr(cpu_of_ggml(), f"quantize_row_{name}")
    quantize.restype = None
    for row, into in zip(x, found, strict=True):
        quantize(*(part.ctypes.data_as(ctypes.c_void_p) for part in (row, into)), ctypes.c_int64(row.size))
    return found


def products_of_ggml(x: np.ndarray, w: np.ndarray, name: str) -> np.ndarray:
    """float32 (rows of x, rows of w)."""
    rows = rows_of_ggml(x, other := "q8_1" if name.endswith("1") else "q8_0")
    blocks = np.ascontiguousarray(blocks_of_ggml(w, name))
    dot = getattr(cpu_of_ggml(), f"ggml_vec_dot_{name}_{other}")
    dot.restype = None
    found = np.zeros((len(x), len(w)), np.float32)
    size, none, one = ctypes.c_int(x.shape[1]), ctypes.c_size_t(0), ctypes.c_int(1)
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    for i, row in enumerate(rows):
        for j, block in enumerate(blocks):
            dot(size, pointer(found[i, j:]), none, pointer(block), none, pointer(row), none, one)
    return found


if __name__ == "__main__":
    found: dict[str, Any] = {name: blocks_of_ggml(k_weights(), name) for name in FORMATS}
    np.savez_compressed(RECORDED, **found)
    of_products: dict[str, Any] = recorded_products()
    np.savez_compressed(products.RECORDED, **of_products)
