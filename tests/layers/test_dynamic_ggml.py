"""`Dynamic(arithmetic="ggml_avx2")`: the bits of llama.cpp's kernels for AVX2, recorded.

tests/contrib/test_oracle_ggml.py compares 10^5 products of each format, and `python -m tests.contrib.test_oracle_ggml`
writes the recording.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.gguf.blocks import pack
from qjax.numerics.dynamic_formulas import ggml_codes
from qjax.numerics.weight_formats import decode, encode

RECORDED = Path(__file__).with_suffix(".npz")
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
ROWS, WIDTH, OUTPUTS = 8, 96, 12


def activations(rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """Rows with outliers, a block of zeros, one whose sums cancel, and ties of the codes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, width)) * np.exp(rng.normal(size=(rows, width)))
    x[0, :32], x[1, ::2], x[2, :32] = 0, -x[1, 1::2], np.arange(32) + 0.5
    x[2, 31] = 127
    return x.astype(np.float32)


def kernel(outputs: int = OUTPUTS, width: int = WIDTH) -> np.ndarray:
    """(outputs, inputs)."""
    return np.random.default_rng(1).normal(size=(outputs, width)).astype(np.float32)


def quantized(name: str, w: np.ndarray, x: np.ndarray, **kwargs: Any) -> Any:
    model = nnx.Linear(w.shape[1], w.shape[0], use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(w.T)
    options = {"weights": qjax.WeightFormat(name), "per": "block", "block": 32, "arithmetic": "ggml_avx2", **kwargs}
    return qjax.quantize(model, qjax.Recipe(overrides={".*": qjax.Dynamic(**options)}), x)


def with_blocks(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The codes of rows, and the scales and sums of their blocks."""
    found = ggml_codes(jnp.asarray(x.reshape(len(x), -1, 32)), (2,))
    return tuple(np.asarray(part).reshape(len(x), -1) for part in found)


def test_codes_of_rows_are_those_of_ggml() -> None:
    codes, scales, sums = with_blocks(activations())
    recorded = np.load(RECORDED)
    np.testing.assert_array_equal(pack((codes, scales), "q8_0"), recorded["q8_0 blocks"])
    np.testing.assert_array_equal(sums.astype(np.float16), recorded["sums"])


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_ggml(name: str) -> None:
    x, expected = activations(), np.load(RECORDED)[name]
    qmodel = quantized(name, kernel(), x)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(qmodel, x), expected)
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, x))(qmodel, x), expected)
    np.testing.assert_array_equal(qjax.convert(qmodel, x)(x), expected)
    assert "as ggml_avx2" in str(qmodel.plan.products[0].setting)


@pytest.mark.parametrize("name", ["q4_0", "q4_1"])
def test_gradients_are_those_of_the_numbers_that_the_codes_represent(name: str) -> None:
    x, c = activations(), np.random.default_rng(2).integers(-8, 9, (ROWS, OUTPUTS)).astype(np.float32)
    qmodel = quantized(name, kernel(), x)
    loss = lambda m, x: jnp.sum(m(x) * c)  # noqa: E731
    of_model, of_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(qmodel, jnp.asarray(x))
    codes, scales, _ = with_blocks(x)
    rows = codes.astype(np.float64) * np.repeat(scales, 32, axis=1)
    weights = np.asarray(decode(encode(jnp.asarray(kernel()), qjax.WeightFormat(name)), qjax.WeightFormat(name)))
    # float32 sums of at most 12 terms, in any order
    for found, left, right in ((of_model.model.kernel[...], rows.T, c), (of_x, c, weights)):
        bound = 12 * 2.0**-24 * (np.abs(left).astype(np.float64) @ np.abs(right))
        assert np.all(np.abs(np.asarray(found, np.float64) - left.astype(np.float64) @ right) <= bound)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": qjax.WeightFormat("q4_k")}, r"in a format whose kernels are known, got q4_k: use WeightFormat"),
        ({"weights": qjax.QSpec(bits=8, axis=-1)}, r"in a format whose kernels are known, got QSpec"),
        ({"per": "row", "block": None}, 'as ggml has them: use per="block", block=32'),
        ({"block": 64}, 'as ggml has them: use per="block", block=32'),
        ({"activations": qjax.QSpec(bits=8, symmetric=False)}, "symmetric codes of 8 bits"),
        ({"activations": qjax.QSpec(bits=4)}, "symmetric codes of 8 bits"),
        ({"arithmetic": "avx"}, "arithmetic: expected 'ggml_avx2' or None, got 'avx'"),
    ],
)
def test_what_ggml_has_no_kernel_for_is_refused(change: dict[str, Any], message: str) -> None:
    x = np.ones((2, 256), np.float32)
    with pytest.raises(ValueError, match=message):
        quantized("q8_0", np.ones((4, 256), np.float32), x, **change)


def test_a_profile_is_that_arithmetic_everywhere() -> None:
    x = activations()
    model = nnx.Linear(WIDTH, OUTPUTS, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(kernel().T)
    recipe = qjax.Recipe(profile="llama_cpp_q4_0")
    np.testing.assert_array_equal(
        nnx.jit(lambda m, x: m(x))(qjax.quantize(model, recipe, x), x), np.load(RECORDED)["q4_0"]
    )
    own = qjax.Recipe(profile="llama_cpp_q8_0", overrides={"head": qjax.FLOAT})
    assert list(own.overrides) == [".*", "head"]
    assert own.overrides[".*"].weights == qjax.WeightFormat("q8_0")
    assert dataclasses.replace(own, output_bits=16).overrides == own.overrides
    with pytest.raises(ValueError, match=r"Unknown profile 'llama_cpp_q4'\. Did you mean 'llama_cpp_q4_"):
        qjax.Recipe(profile="llama_cpp_q4")


def test_a_convolution_is_refused() -> None:
    model = nnx.Conv(32, 4, (1, 1), use_bias=False, rngs=nnx.Rngs(0))
    x = np.ones((1, 4, 4, 32), np.float32)
    setting = qjax.Dynamic(weights=qjax.WeightFormat("q8_0"), per="block", block=32, arithmetic="ggml_avx2")
    with pytest.raises(ValueError, match="on a convolution: expected"):
        qjax.quantize(model, qjax.Recipe(overrides={".*": setting}), x)
