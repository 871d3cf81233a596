"""gemmlowp's softmax and reciprocal as ONNX: the short forms give the numbers of the kernel."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import ArrayLike

import qjax
from qjax.export.emit.onnx import integer
from qjax.numerics import softmax as runtimes
from qjax.numerics.calls import within
from qjax.numerics.gemmlowp_functions import NEWTON_SLOPE, NEWTON_START, ONE, one_over_one_plus_x
from qjax.numerics.softmax import gemmlowp_reciprocal
from tests.export.emit.onnx_runs import by_onnxruntime, nodes_of
from tests.export.emit.test_onnx_ranges import agree, operators

LARGE = 5000
"""Elements of a tensor whose shifts are no divisions."""


def mantissas(rng: np.random.Generator, count: int) -> np.ndarray:
    """Q0.31 numbers in [0, 1): both ends, and their neighbours."""
    ends = [*range(300), *range(2**31 - 300, 2**31), *(2**k + d for k in range(10, 31) for d in (-1, 0, 1))]
    return np.asarray([*ends, *rng.integers(0, 2**31, count - len(ends)).tolist()], np.int32)


@pytest.mark.parametrize("count", [1000, LARGE])
def test_reciprocals(count):
    a = mantissas(np.random.default_rng(0), count)
    model = agree(lambda a: one_over_one_plus_x(within(a, 0, ONE)), [a])
    assert ("Div" in operators(model)) == (count != LARGE)


def test_a_reciprocal_of_anything_keeps_the_kernel():
    # negative numbers are not what the bounds of the short form are about
    a = np.random.default_rng(0).integers(-(2**31), 2**31, 500).astype(np.int32)
    agree(one_over_one_plus_x, [a])


def test_newton_stays_within_the_bounds():
    """As the short form says: x in (0, 2^30], residues in (-2^29, 2^29); so no step saturates."""
    half = np.append(np.arange(2**30, 2**31, 977, dtype=np.int64), 2**31 - 1)

    def product(x: np.ndarray, y: Any) -> np.ndarray:
        return (x * y + (1 << 30)) >> 31

    x = NEWTON_START + product(half, NEWTON_SLOPE)
    for _ in range(3):
        residue = (1 << 29) - product(half, x)
        assert np.abs(residue).max() < 1 << 29
        x = x + 4 * product(x, residue)
        assert x.min() > 0
        assert x.max() <= 1 << 30


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(900, 1), (LARGE, 1), (30, 7)])
def test_reciprocals_of_sums(bits, shape):
    rng = np.random.default_rng(0)
    least, most = 1 << 19, 4095 << 19
    powers = [2**k + d for k in range(19, 31) for d in (-1, 0, 1) if least <= 2**k + d]
    rest = math.prod(shape) - len(powers) - 2
    total = np.asarray([least, most, *powers, *np.exp(rng.uniform(np.log(least), np.log(most), rest))], np.int64)

    def parts(total: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gemmlowp_reciprocal(within(total, least, most), bits)

    agree(parts, [total.astype(np.int32).reshape(shape)])


SCALES = [2.0**-20, 0.003, 0.05, 0.3, 2.5, 20.0]
"""Of the codes: all differences count, some, and none but the greatest."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(40, 10), (3, 7, 96), (9, 600), (2, 4095), (300, 1)])
@pytest.mark.parametrize("scales", [SCALES[1::2], pytest.param(SCALES[::2], marks=pytest.mark.exhaustive)], ids=str)
def test_softmax(shape, bits, scales):
    rng = np.random.default_rng(0)
    for scale in scales:
        constants = runtimes.prepare("gemmlowp", scale)
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        codes[0] = 127  # the greatest sum of this length
        codes[1] = np.resize([-128, 127], codes[1].shape)

        def softmax(x: ArrayLike, *values: ArrayLike) -> Any:
            return runtimes.softmax(x, runtimes.Gemmlowp(*values), bits)

        known = tuple(np.asarray(value, np.int32) for value in constants)
        model = agree(softmax, [codes], known=known)
        assert np.array_equal(np.asarray(softmax(codes, *map(jnp.asarray, known))), softmax(codes, *known))
        # an element costs few operators: 4 to 5 times as many are in the kernel
        assert len(list(nodes_of(model))) < 110


class Attention(nnx.Module):
    """One layer of attention whose softmax has codes."""

    def __init__(self) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x)


@pytest.fixture(scope="module")
def attention() -> tuple[qjax.IntegerGraph, np.ndarray]:
    x = np.asarray(jax.random.normal(jax.random.key(0), (3, 12, 8)))
    model = qjax.quantize(Attention(), qjax.Recipe(target="tflite_micro"), x)
    qjax.calibrate(model, [x], progress=False)
    model.eval()
    graph = qjax.convert(model, x)
    return graph, np.asarray(graph.quantize(x))


def test_attention_in_a_file(attention, tmp_path):
    graph, codes = attention
    wanted = np.asarray(graph.run(codes))
    model = integer.to_model(graph.ir)
    for level, found in by_onnxruntime(model, {model.graph.input[0].name: codes}):
        assert np.array_equal(found[0], wanted), level
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert np.array_equal(np.asarray(qjax.read(path).run(codes)), wanted)
