"""BATCH_MATMUL of two tensors of codes beside the runtimes, and next to ties, where the form of the scale matters."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.requantize import requantize
from qjax.numerics.rules import get_rule
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid
from tests.export.emit.tflite_runtimes import MODES, TARGETS, litert, micro

DEPTH = 200


def model(x: Any, w: Any, grids: tuple[Grid, Grid, Grid]) -> bytes:
    file = File()
    y = file.tensor(str(x.dtype), (*x.shape[:-1], w.shape[-1]), grids[2], name="y")
    inputs = [file.tensor(str(a.dtype), a.shape, grid) for a, grid in zip((x, w), grids[:2], strict=True)]
    file.operator("BATCH_MATMUL", inputs, [y], "BatchMatMul")
    return file.to_bytes(inputs, [y])


def assert_runtime(target: str, x: Any, w: Any, grids: tuple[Grid, Grid, Grid]) -> None:
    data = model(x, w, grids)
    found = micro(data, [x, w], ["y"]) if target == "tflite_micro" else litert(data, MODES[target], [x, w], every=False)
    (ours,) = Interpreter(reader.read(data, target=target))(x, w)
    assert np.array_equal(np.asarray(ours), found["y"])


@functools.cache
def between(s_x: np.float32, s_w: np.float32, s_y: np.float32) -> np.ndarray:
    """Accumulators whose code depends on whether s_x s_w is rounded to float32, at most 40."""
    most = 127 * 127 * (DEPTH - 2)
    accumulators = np.arange(-most, most, dtype=np.int64)
    rule, bounds = get_rule("double_round"), {"zero_point": np.int32(0), "qmin": -128, "qmax": 127}
    codes = [
        np.asarray(
            requantize(
                accumulators.astype(np.int32),
                rule.prepare(effective_scale(s_x, s_w, s_y, form=form)),
                rule="double_round",
                **bounds,
            )
        )
        for form in ("f64", "f32")
    ]
    return accumulators[codes[0] != codes[1]][:40]


def rows(accumulators: np.ndarray) -> np.ndarray:
    """Codes whose product with a column of 127, ..., 127, 1 is an accumulator each."""
    found = np.zeros((len(accumulators), DEPTH), np.int8)
    for row, accumulator in zip(found, accumulators, strict=True):
        left = int(np.rint(accumulator / 127))
        row[-1] = accumulator - 127 * left
        for index in range(DEPTH - 1):
            row[index] = np.clip(left, -127, 127)
            left -= int(row[index])
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("zero_point", [0, -3])
@pytest.mark.parametrize("seeds", [(4, 5), pytest.param((0, 1, 2, 3, 6, 7), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.sampled(3)
def test_next_to_ties(target, zero_point, seeds):
    count = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        s_x, s_w = np.float32(rng.uniform(0.01, 0.1)), np.float32(rng.uniform(0.001, 0.05))
        s_y = np.float32(s_x * s_w * 2.0 ** rng.uniform(10, 14.3))
        found = between(s_x, s_w, s_y)
        if not len(found):
            continue
        count += len(found)
        column = np.full((DEPTH, 1), 127, np.int64)
        column[-1] = 1
        w = (column + zero_point).astype(np.int8)
        assert_runtime(target, rows(found), w, (Grid(s_x), Grid(s_w, zero_point), Grid(s_y)))
    assert count


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("zero_point", [0, 7])
def test_random_codes(target, zero_point):
    """90,000 codes: XNNPACK rounds once where the second operand is symmetric."""
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((1, 300, 64), (1, 64, 300)))
    assert_runtime(target, x, w, (Grid(0.031, 5), Grid(0.0177, zero_point), Grid(0.031 * 0.0177 * 700, -9)))


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("ratio", [1.1, 30.0, 700.0, 40000.0])
@pytest.mark.sampled(4)
def test_int16_with_int8(target, ratio):
    rng = np.random.default_rng(2)
    x = rng.integers(-(2**15), 2**15, (2, 100, 64)).astype(np.int16)
    w = rng.integers(-127, 128, (2, 64, 100)).astype(np.int8)
    assert_runtime(target, x, w, (Grid(2.0**-12), Grid(0.0177), Grid(2.0**-12 * 0.0177 * ratio)))


class Product(nnx.Module):
    """A product of the two inputs."""

    def __call__(self, x, y):
        return jnp.einsum("btc,bsc->bts", x, y)


@pytest.mark.parametrize("target", ["tflite_micro", "cmsis_nn"])
def test_int16_with_int8_is_refused_where_the_runtime_refuses_it(target, tmp_path):
    x, w = np.ones((1, 3, 4), np.int16), np.ones((1, 4, 3), np.int8)
    data = model(x, w, (Grid(0.01), Grid(0.01), Grid(0.01)))
    wanted = f"'{target}' has no BATCH_MATMUL of int16 by int8. Read it with target='tflite_reference'"
    with pytest.raises(ReadError, match=wanted):
        reader.read(data, target=target)
    with pytest.raises(RuntimeError):
        micro(data, [x, w], ["y"])
    numbers = np.random.default_rng(4).normal(size=(2, 3, 4)).astype(np.float32)
    wide: dict[str | type, Any] = {"input/0": qjax.Override(activations=qjax.QSpec(bits=16))}
    recipe = qjax.Recipe(target=target, activations=qjax.QSpec(bits=8), output_bits=16, overrides=wide)
    qmodel = qjax.quantize(Product(), recipe, (numbers, numbers))
    qmodel.eval()
    graph = qjax.convert(qmodel, (numbers, numbers))
    with pytest.raises(ValueError, match=f"activations of int16 and int8, which '{target}' refuses"):
        graph.emit("tflite", tmp_path / "model.tflite")


@pytest.mark.parametrize("target", TARGETS)
def test_int16_with_int16(target):
    """Deeper ones may exceed int32."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-(2**15), 2**15, shape).astype(np.int16) for shape in ((60, 1), (1, 60)))
    assert_runtime(target, x, w, (Grid(2.0**-12), Grid(0.0177), Grid(2.0**-12 * 0.0177 * 20000)))
