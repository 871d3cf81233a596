"""The formulas of TFLite and XNNPACK against their kernels' C++, transcribed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.ops.formulas import Setting, get
from tests.ops.formulas import tflite
from tests.ops.formulas.onnx import Grids, clamp, evaluate, f32

SEEDS = range(5)
SIZES = (267, 48)
DTYPES = ("int8", "uint8", "int16")


def grids(dtype: str, seed: int, inputs: int = 2, spread: int = 3) -> Grids:
    """Scales that are powers of two, equal or neither; zero points at every place of the range."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    if seed % 3 == 0:
        scales = np.exp2(rng.integers(-spread, spread + 1, inputs + 1)).astype(np.float32)
    else:
        scales = np.exp2(rng.uniform(-spread, spread, inputs + 1)).astype(np.float32)
    if seed % 4 == 1:
        scales[1:] = scales[1]
    zeros = (
        [0] * (inputs + 1) if dtype == "int16" else [int(z) for z in rng.integers(info.min, info.max + 1, inputs + 1)]
    )
    return Grids(tuple(f32(s) for s in scales[1:]), tuple(zeros[1:]), f32(scales[0]), zeros[0], dtype)


def operands(g: Grids, size: int, seed: int) -> list[np.ndarray]:
    """Centred codes, every tenth of them at an end of the range."""
    rng = np.random.default_rng(1000 + seed)
    low, high = g.limits
    found = []
    for zero in g.zero_points:
        codes = rng.integers(low, high + 1, size)
        codes[rng.random(size) < 0.05], codes[rng.random(size) < 0.05] = low, high
        found.append((codes - zero).astype(np.int32))
    return found


def expected(g: Grids, codes: list[np.ndarray], main: Callable[..., int], tail: Callable[..., int]) -> np.ndarray:
    """`main` for whole blocks (of 16, of 8 with uint8 codes), `tail` for the rest, clamped."""
    rows = [tuple(int(v) for v in row) for row in zip(*codes, strict=True)]
    whole = len(rows) - len(rows) % (8 if g.dtype == "uint8" else 16)
    return clamp(np.array([(main if i < whole else tail)(*row) for i, row in enumerate(rows)]), g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["add", "subtract"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(4)
def test_add(dtype, op, seed):
    left, sign = (15 if dtype == "int16" else 20), (1 if op == "add" else -1)
    g = grids(dtype, seed, spread=3 + 3 * (seed % 2))
    codes = operands(g, SIZES[seed % 2], seed)

    def reference(a, b):
        return tflite.add(a, b, sign, g, left)

    def vector(a, b):
        return tflite.add_vector(a, b, g, left)

    np.testing.assert_array_equal(evaluate("tflite_add", op, codes, g), expected(g, codes, reference, reference))
    main = vector if op == "add" else reference
    want = expected(g, codes, main, reference)
    np.testing.assert_array_equal(evaluate("tflite_add_neon", op, codes, g), want)
    if dtype == "int16":
        # XNNPACK takes no codes of 16 bits
        np.testing.assert_array_equal(evaluate("xnnpack_add", op, codes, g), want)


def test_add_in_vectors_wraps_and_shifts_without_rounding():
    g = Grids((f32(1), f32(1)), (-128, -128), f32(2.0**-8), 127, "int8")
    codes = [np.full(17, 255, np.int32)] * 2
    got = evaluate("tflite_add_neon", "add", codes, g)
    # 255 * 512 + 127 has the low 16 bits of -385
    assert got.tolist() == [-128] * 16 + [127]
    # a ratio of 2^-22 leaves nothing of the second operand but its sign, as VSHL rounds down
    g = Grids((f32(1), f32(2.0**-26)), (0, 0), f32(1), 0, "int8")
    codes = operands(g, 64, 0)
    left = 20
    want = expected(g, codes, lambda a, b: tflite.add_vector(a, b, g, left), lambda a, b: 0)
    np.testing.assert_array_equal(evaluate("tflite_add_neon", "add", codes, g), want)


@pytest.mark.parametrize("op", ["add", "subtract"])
@pytest.mark.parametrize("seed", SEEDS)
def test_xnnpack_add(op, seed):
    sign = 1 if op == "add" else -1
    g = grids("int8", seed)
    codes = operands(g, SIZES[seed % 2], seed)

    def exact(a, b):
        return tflite.xnnpack_add(a, b, sign, g)

    np.testing.assert_array_equal(evaluate("xnnpack_add", op, codes, g), expected(g, codes, exact, exact))


@pytest.mark.parametrize(
    ("scales", "inside"),
    [
        ((2.0**-10, 1.0), True),
        ((2.0**-10.01, 1.0), False),
        ((1.0, 255.9), True),
        ((1.0, 256.0), False),
        ((1e-9, 1.0), False),
    ],
)
def test_xnnpack_add_leaves_far_ratios_to_litert(scales, inside):
    g = Grids((f32(scales[0]), f32(scales[1])), (3, -7), f32(1), 5, "int8")
    codes = operands(g, 999, 1)

    def xnnpack(a, b):
        return tflite.xnnpack_add(a, b, 1, g)

    main, tail = (
        (xnnpack, xnnpack)
        if inside
        else (lambda a, b: tflite.add_vector(a, b, g, 20), lambda a, b: tflite.add(a, b, 1, g, 20))
    )
    np.testing.assert_array_equal(evaluate("xnnpack_add", "add", codes, g), expected(g, codes, main, tail))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(3)
def test_multiply(dtype, seed):
    g = grids(dtype, seed, spread=3)
    codes = operands(g, SIZES[seed % 2], seed)

    def reference(a, b):
        return tflite.multiply(a, b, g)

    def vector(a, b):
        return tflite.multiply_vector(a, b, g) if dtype != "int16" else reference(a, b)

    np.testing.assert_array_equal(
        evaluate("tflite_multiply", "multiply", codes, g), expected(g, codes, reference, reference)
    )
    np.testing.assert_array_equal(
        evaluate("tflite_multiply_neon", "multiply", codes, g), expected(g, codes, vector, reference)
    )


def test_multiply_forms_its_scale_in_float32():
    # scales at which the product of some pair is a tie in double, but not in float32, or the other way round
    rng = np.random.default_rng(3)
    found = tried = 0
    while found < 4:
        tried += 1
        first, second = (f32(np.exp2(rng.uniform(-7, 3))) for _ in range(2))
        factors = rng.integers(1, 256, 2)
        y_scale = f32(float(first) * float(second) * float(factors.prod()) / (rng.integers(0, 127) + 0.5))
        g = Grids((first, second), (-128, -128), y_scale, 0, "int8")
        codes = [np.array([v], np.int32) for v in factors]
        a, b = (int(v) for v in factors)
        in_double = tflite.scaled(a * b, tflite.multiplier(float(first) * float(second) / float(y_scale)))
        want = tflite.multiply(a, b, g)
        found += want != in_double
        # the others are products like those of `test_multiply`
        if want == in_double and tried > 10:
            continue
        assert evaluate("tflite_multiply", "multiply", codes, g).tolist() == [want]


@pytest.mark.parametrize("seed", SEEDS)
def test_xnnpack_multiply(seed):
    g = grids("int8", seed, spread=2)
    codes = operands(g, SIZES[seed % 2], seed)

    def exact(a, b):
        return tflite.xnnpack_multiply(a, b, g)

    np.testing.assert_array_equal(evaluate("xnnpack_multiply", "multiply", codes, g), expected(g, codes, exact, exact))


@pytest.mark.parametrize(
    ("y_scale", "inside"), [(1.0, True), (2.0**-8, False), (2.0**-7.9, True), (2.0**16, True), (2.0**16.1, False)]
)
def test_xnnpack_multiply_leaves_far_scales_to_litert(y_scale, inside):
    g = Grids((f32(1), f32(1)), (3, -100), f32(y_scale), 5, "int8")
    codes = operands(g, 999, 1)

    def xnnpack(a, b):
        return tflite.xnnpack_multiply(a, b, g)

    main, tail = (
        (xnnpack, xnnpack)
        if inside
        else (lambda a, b: tflite.multiply_vector(a, b, g), lambda a, b: tflite.multiply(a, b, g))
    )
    np.testing.assert_array_equal(evaluate("xnnpack_multiply", "multiply", codes, g), expected(g, codes, main, tail))


@pytest.mark.parametrize("seed", range(10))
def test_rescale(seed):
    g = grids("int8", seed, inputs=1)
    codes = operands(g, SIZES[seed % 2], seed)
    m = tflite.multiplier(float(g.scales[0]) / float(g.y_scale))

    def vector(a):
        return tflite.scaled_vector(a, m) + g.y_zero_point

    def tail(a):
        return tflite.scaled(a, m) + g.y_zero_point

    def xnnpack(a):
        return tflite.xnnpack_rescale(a, g)

    np.testing.assert_array_equal(
        evaluate("tflite_rescale_neon", "rescale", codes, g), expected(g, codes, vector, tail)
    )
    np.testing.assert_array_equal(
        evaluate("xnnpack_rescale", "rescale", codes, g), expected(g, codes, xnnpack, xnnpack)
    )
    far = Grids((f32(g.scales[0] * f32(2.0**11)),), g.zero_points, g.y_scale, g.y_zero_point, "int8")
    m = tflite.multiplier(float(far.scales[0]) / float(far.y_scale))
    np.testing.assert_array_equal(
        evaluate("xnnpack_rescale", "rescale", codes, far), expected(far, codes, vector, tail)
    )


@pytest.mark.parametrize("ratio", [2.0**-8, 2.0**7])
def test_xnnpack_rescale_takes_both_ends_of_its_range(ratio):
    g = Grids((f32(ratio),), (-128,), f32(1), -128, "int8")
    codes = [np.arange(256, dtype=np.int32)]

    def xnnpack(a):
        return tflite.xnnpack_rescale(a, g)

    np.testing.assert_array_equal(
        evaluate("xnnpack_rescale", "rescale", codes, g), expected(g, codes, xnnpack, xnnpack)
    )


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("count", [1, 3, 16, 49, 12544])
@pytest.mark.parametrize("channels", [5, 37])
@pytest.mark.sampled(5)
def test_mean(dtype, count, channels):
    g = grids(dtype, count + channels, inputs=1, spread=2)
    (zero,) = g.zero_points
    rng = np.random.default_rng(count)
    low, high = g.limits
    totals = np.concatenate(
        [rng.integers(low * count, high * count + 1, (10, channels)), rng.integers(-900, 901, (10, channels))]
    )
    centred = [(totals - count * zero).astype(np.int32)]

    def table(f: Callable[[int, int], int]) -> np.ndarray:
        return clamp(np.array([[f(int(t), c) for c, t in enumerate(row)] for row in totals]), g)

    reference = table(lambda t, c: tflite.mean(t - count * zero, count, g))
    np.testing.assert_array_equal(evaluate("tflite_mean", "mean", centred, g, count), reference)
    if dtype == "int16":
        optimized = xnnpack = reference
    else:
        whole = channels - channels % 16
        optimized = table(lambda t, c: tflite.mean_optimized(t, count, c < whole, g))
        xnnpack = table(lambda t, c: tflite.xnnpack_mean(t, count, g))
    np.testing.assert_array_equal(evaluate("tflite_mean_neon", "mean", centred, g, count), optimized)
    np.testing.assert_array_equal(evaluate("xnnpack_mean", "mean", centred, g, count), xnnpack)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_average_pool_counts_what_lies_inside(dtype):
    zero = {"int8": -3, "uint8": 131, "int16": 0}[dtype]
    g = Grids((f32(0.1),), (zero,), f32(0.1), zero, dtype)
    low, high = g.limits
    rng = np.random.default_rng(5)
    count = rng.integers(1, 10, (40, 1)).astype(np.int32)
    totals = rng.integers(low * count, high * count + 1, (40, 25))
    want = [[tflite.average(int(t), int(n)) for t in row] for row, (n,) in zip(totals, count, strict=True)]
    got = evaluate("tflite_average_pool", "average_pool", [totals - count * zero], g, count)
    np.testing.assert_array_equal(got, np.array(want))


def test_add_refuses_what_litert_aborts_on():
    setting = Setting("add", (f32(1), f32(1)), (0, 0), f32(2.0**-19), 0, "int8")
    with pytest.raises(ValueError, match=r"tflite_add: expected an output scale above 2\^-19 times .* LiteRT aborts"):
        get("tflite_add").prepare(setting)
    assert get("tflite_add").prepare(Setting("add", (f32(1), f32(1)), (0, 0), f32(2.0**-18.9), 0, "int8"))["shift"] == 0


@pytest.mark.parametrize("name", ["tflite_add_neon", "xnnpack_add"])
def test_add_under_vmap_sees_each_example(name):
    g = grids("int8", 1)
    formula = get(name)
    constants = {
        **formula.prepare(Setting("add", g.scales, g.zero_points, g.y_scale, g.y_zero_point, g.dtype)),
        "y_zero_point": np.int32(g.y_zero_point),
    }
    a, b = (jnp.asarray(x).reshape(3, 21) for x in operands(g, 63, 2))

    def one(x, y):
        return formula.kernel([x, y], constants, {"dtype": "int8"})

    want = np.stack([one(x, y) for x, y in zip(a, b, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(a, b), want)
