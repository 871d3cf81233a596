"""The folding of affine steps into integer constants, against fractions and the double arithmetic of the machine."""

import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.softfloat import Real
from qjax.ops import get
from qjax.ops.epilogue import Affine, fold_sum, fold_weighted, scale_codes
from tests.ops.nodes import INT8, INT16, NARROW, graph_of, run

N = 64


def fractions(values) -> list[Fraction]:
    return [Fraction(float(v)) for v in np.ravel(values)]


def fold(s_x, s_w, s_y, g, b):
    affine = Affine.identity().times(Real.of(g)).plus(Real.of(b))
    return fold_weighted(s_x, s_w, s_y, affine)


def channels(seed: int) -> dict[str, Any]:
    """Scales over sixty powers of two, gammas of both signs, offsets of up to some thousands of output steps."""
    rng = np.random.default_rng(seed)
    s_x, s_y = (np.float32(2.0 ** rng.uniform(-20, 5)) for _ in range(2))
    s_w = (2.0 ** rng.uniform(-30, 0, N)).astype(np.float32)
    g = (2.0 ** rng.uniform(-10, 10, N) * rng.choice([-1, 1], N)).astype(np.float32)
    reach = np.float64(s_x) * s_w * np.abs(g)
    b = (reach * 2.0 ** rng.uniform(-4, 29, N) * rng.choice([-1, 0, 1], N)).astype(np.float32)
    return {"s_x": s_x, "s_w": s_w, "s_y": s_y, "g": g, "b": b}


def quantized(e: float) -> tuple[int, int]:
    """TFLite's QuantizeMultiplier of a double, in C's words."""
    q, shift = math.frexp(e)
    multiplier = math.floor(Fraction(q) * 2**31 + Fraction(1, 2))
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift + 1
    return (0, 0) if shift < -31 or e == 0 else (multiplier, shift)


def part(folded, name):
    """An array by name, the rule's constants among them."""
    return folded.requantize[name] if name in folded.requantize else getattr(folded, name)


@pytest.mark.parametrize("seed", range(4))
def test_regular_channels(seed):
    case = channels(seed)
    folded = fold(**case)
    wide = {name: value.astype(np.float64) for name, value in case.items()}
    assert np.array_equal(folded.factor, np.sign(case["g"]))
    assert np.array_equal(folded.weight_scale, (wide["s_w"] * np.abs(wide["g"])).astype(np.float32))
    e = wide["s_x"] * folded.weight_scale.astype(np.float64) / wide["s_y"]
    expected = np.array([quantized(float(v)) for v in e])
    assert np.array_equal(folded.requantize["multiplier"], expected[:, 0])
    assert np.array_equal(folded.requantize["shift"], expected[:, 1])
    s_x = Fraction(float(case["s_x"]))
    for bias, b, scale in zip(folded.bias.tolist(), fractions(case["b"]), fractions(folded.weight_scale), strict=True):
        exact = b / (s_x * scale)
        assert abs(bias - exact) <= Fraction(1, 2) + abs(exact) / 2**51
        assert abs(bias) <= 2**30


def test_every_array_is_what_the_format_wants():
    folded = fold(**channels(9))
    dtypes = {name: str(part(folded, name).dtype) for name in ("factor", "weight_scale", "bias", "multiplier", "shift")}
    assert dtypes == {
        "factor": "float32",
        "weight_scale": "float32",
        "bias": "int32",
        "multiplier": "int32",
        "shift": "int32",
    }
    assert {np.shape(part(folded, name)) for name in dtypes} == {(N,)}


def test_scale_codes():
    codes = np.array([[-127, -1, 0, 1, 2, 3, 127]], np.int8)
    assert np.array_equal(scale_codes(codes, np.float32(-1)), -codes)
    assert np.array_equal(scale_codes(codes, np.float32(0.5)), [[-64, 0, 0, 0, 1, 2, 64]])
    assert np.array_equal(scale_codes(codes, np.float32(0)), np.zeros((1, 7)))
    assert scale_codes(codes, np.ones((1, 7), np.float32)) is codes
    assert scale_codes(codes, np.float32(0.3)).dtype == np.int8


DEGENERATE = [
    (0.0, 0.0),
    (0.0, 3.25),
    (0.0, -40.0),
    (1e-12, 3.25),
    (-1e-9, 25.0),
    (1e-30, -7.0),
    (3e-8, 1e6),
    (-2e-8, -60.0),
    (1e-38, 1e-38),
    (5e-7, 50.0),
]


@pytest.mark.parametrize("gamma_sign", [1, -1])
def test_degenerate_channels_stay_within_the_documented_bound(gamma_sign):
    """Gammas of zero and nearly zero: the node's output against the real formula in fractions."""
    rng = np.random.default_rng(0)
    features, depth = len(DEGENERATE), 12
    g = np.array([gamma_sign * a for a, _ in DEGENERATE], np.float32)
    b = np.array([c for _, c in DEGENERATE], np.float32)
    s_x, s_y, s_w = np.float32(0.031), np.float32(0.47), np.linspace(0.001, 0.02, features).astype(np.float32)
    folded = fold(s_x, s_w, s_y, g, b)
    assert np.abs(folded.bias).max() <= 2**30
    assert np.abs(folded.factor).max() <= 1
    x, w = INT8.codes(rng, (50, depth)), NARROW.codes(rng, (depth, features))
    constants = {
        "kernel": scale_codes(w, folded.factor),
        "bias": folded.bias,
        "multiplier": folded.requantize["multiplier"],
        "shift": folded.requantize["shift"],
    }
    attributes = {
        "lhs_contracting": [1],
        "rhs_contracting": [0],
        "lhs_batch": [],
        "rhs_batch": [],
        "weight": 1,
        "channels": [[1, 1]],
        "rank": 2,
        "permutation": None,
        "rule": "nearest_even",
    }
    y = run(graph_of("dot", [(x.shape, INT8)], ((50, features), INT8), constants, attributes), x)
    centered = INT8.centered(x)
    acc = centered @ w.astype(object)
    moved = np.abs(centered).sum(axis=1)
    fx, fy, slack = Fraction(float(s_x)), Fraction(float(s_y)), 1 + Fraction(1, 256)
    for column, (fw, fg, fb) in enumerate(zip(fractions(s_w), fractions(g), fractions(b), strict=True)):
        per_unit = slack * max(abs(fb) / fy / 2**31, fx / fy / 2**101)
        for row in range(50):
            real = (acc[row, column] * fx * fw * fg + fb) / fy
            # the multiplier is exact to 2^-31 of the result, the float32 scale of a regular channel to 2^-24
            bound = Fraction(1, 2) + moved[row] * per_unit + abs(real) / 2**23
            low, high = math.ceil(real - bound), math.floor(real + bound)
            got = int(y[row, column])
            assert min(max(low + INT8.zero_point, -128), 127) <= got <= min(max(high + INT8.zero_point, -128), 127)


def test_a_negative_gamma_gives_the_same_output_as_negated_weights():
    case = channels(5)
    flipped = {**case, "g": -case["g"]}
    a, b = fold(**case), fold(**flipped)
    assert np.array_equal(a.factor, -b.factor)
    for name in ("weight_scale", "bias", "multiplier", "shift"):
        assert np.array_equal(part(a, name), part(b, name))


@pytest.mark.exhaustive
def test_weighted_folding_has_the_same_bits_on_the_host_and_in_traces():
    case = channels(0)
    case["g"][:6] = [0, 1e-30, -1e-12, 1e-38, 0, -0.0]
    case["b"][:6] = [3, 1e4, -20, 1e-37, 0, 1]
    host = fold(**case)
    names = ["factor", "weight_scale", "bias", "multiplier", "shift"]

    def constants(g, b, s_w, s_x, s_y):
        folded = fold(s_x, s_w, s_y, g, b)
        return [part(folded, name) for name in names]

    args = [jnp.asarray(case[name]) for name in ("g", "b", "s_w")]
    scalars = (case["s_x"], case["s_y"])
    jitted = jax.jit(constants)(*args, *scalars)
    halves = [a.reshape(2, -1) for a in args]
    mapped = jax.jit(jax.vmap(constants, in_axes=(0, 0, 0, None, None)))(*halves, *scalars)
    for name, one, two in zip(names, jitted, mapped, strict=True):
        assert np.array_equal(part(host, name), one), name
        assert np.array_equal(part(host, name), np.asarray(two).ravel()), name


# ---------------------------------------------------------------------------- sums


def sum_case(seed: int):
    rng = np.random.default_rng(seed)
    s0, s1 = ((2.0 ** rng.uniform(-25, 10, N)).astype(np.float32) for _ in range(2))
    s_y = (2.0 ** rng.uniform(-12, 10, N)).astype(np.float32)
    g = (2.0 ** rng.uniform(-6, 6, N) * rng.choice([-1, 1], N)).astype(np.float32)
    b = (s_y * rng.uniform(-300, 300, N) * rng.choice([0, 1], N)).astype(np.float32)
    return s0, s1, s_y, g, b


def fold_two(s0, s1, s_y, g, b):
    return fold_sum([Real.of(s0), Real.of(s1)], s_y, Affine.identity().times(Real.of(g)).plus(Real.of(b)))


@pytest.mark.parametrize("seed", range(4))
def test_sum_constants_are_the_rounded_reals(seed):
    case = sum_case(seed)
    constants = fold_two(*case)
    assert all(value.dtype == np.int32 for value in constants.values())
    for index in range(N):
        s0, s1, s_y, g, b = (Fraction(float(v[index])) for v in case)
        shift = int(constants["shift"][index])
        largest = 0
        for role, scale in (("factor0", s0), ("factor1", s1)):
            exact, got = scale * g / s_y * 2**shift, int(constants[role][index])
            assert abs(got - exact) <= Fraction(1, 2) + Fraction(1, 2**20)
            largest = max(largest, abs(got))
        assert 2**29 <= largest <= 2**30 or (shift == 44 and largest < 2**29)
        offset = int(constants["offset_high"][index]) * 2**31 + int(constants["offset_low"][index])
        exact = b / s_y * 2**shift
        assert abs(offset - exact) <= Fraction(1, 2) + abs(exact) / 2**51
        assert 0 <= int(constants["offset_low"][index]) < 2**31


@pytest.mark.exhaustive
def test_sum_folding_has_the_same_bits_on_the_host_and_in_traces():
    case = sum_case(11)
    host = fold_two(*case)
    jitted = jax.jit(fold_two)(*case)
    mapped = jax.jit(jax.vmap(fold_two))(*(v.reshape(2, -1) for v in case))
    assert set(host) == set(jitted) == set(mapped)
    for name, value in host.items():
        assert np.array_equal(value, jitted[name]), name
        assert np.array_equal(value, np.asarray(mapped[name]).ravel()), name


@pytest.mark.parametrize("ratio", [0.0, 1e-30, 2.0**-30, 2.0**-15, 2.0**-14, 0.01, 3.0, 1e6])
@pytest.mark.parametrize("offset", [0.0, 0.5, -1.5, 100.25, 9000.0, -30000.0, 65000.0, -2e5, 1e30])
def test_offsets_far_beyond_the_codes(ratio, offset):
    # an offset worth more than the shift's headroom is cut, and the clamp must hide that it was
    constants = {k: np.asarray(v) for k, v in fold_one(np.float32(ratio), np.float32(offset)).items()}
    x = np.array([-32768, -1, 0, 1, 2, 32767], np.int16)
    y = compiled()(x, constants)
    for code, got in zip(x.tolist(), y.tolist(), strict=True):
        real = code * Fraction(float(np.float32(ratio))) + Fraction(float(np.float32(offset)))
        near = (
            {math.floor(real), math.ceil(real)} if abs(real) > 2**20 or ratio in (1e-30, 0.01, 1e6) else {round(real)}
        )
        assert got in {min(max(n, -32768), 32767) for n in near}


def fold_one(ratio, offset):
    return fold_sum([Real.of(ratio)], np.float32(1), Affine.identity().plus(Real.of(offset)))


@functools.cache
def compiled():
    """The rescale of int16 codes, compiled once for all constants."""
    kernel = get("rescale").kernel
    attributes = {"rounding": "nearest_even", "qmin": INT16.qmin, "qmax": INT16.qmax, "dtype": "int16"}
    zero = {"zero_point0": np.int32(0), "y_zero_point": np.int32(0)}
    jitted = jax.jit(lambda x, constants: kernel(attributes, {**constants, **zero}, [x]))
    return lambda x, constants: np.asarray(jitted(x, constants))


def test_an_output_scale_that_is_far_too_small():
    with pytest.raises(ValueError, match="one input step is 1e\\+09 output steps; expected less than 2\\^29"):
        fold_one(np.float32(1e9), np.float32(0))


# ---------------------------------------------------------------------------- steps


def test_batch_norm_is_the_double_expression():
    rng = np.random.default_rng(2)
    arrays = {
        "mean": rng.normal(size=N).astype(np.float32),
        "var": (2.0 ** rng.uniform(-30, 20, N)).astype(np.float32),
        "scale": rng.normal(size=N).astype(np.float32),
        "bias": rng.normal(size=N).astype(np.float32),
    }
    attributes = {"use_running_average": True, "epsilon": 1e-5, "trailing": 0}
    affine = get("batch_norm").compose(attributes, arrays, Affine.identity())
    mean, var, scale, bias = (a.astype(np.float64) for a in arrays.values())
    k = 1.0 / np.sqrt(var + np.float64(np.float32(1e-5))) * scale
    assert np.array_equal(affine.g.to_float64(), k)
    assert np.array_equal(affine.b.to_float64(), -mean * k + bias)


@pytest.mark.parametrize(
    ("attributes", "g", "b"),
    [
        ({"step": "mul"}, 12.0, 20.0),
        ({"step": "div"}, 0.75, 1.25),
        ({"step": "neg"}, -3.0, -5.0),
        ({"step": "add"}, 3.0, 9.0),
        ({"step": "add_any"}, 3.0, 9.0),
        ({"step": "sub"}, 3.0, 1.0),
        ({"step": "sub", "reversed": True}, -3.0, -1.0),
    ],
)
def test_affine_steps(attributes, g, b):
    before = Affine.identity().times(Real.of(np.float32(3))).plus(Real.of(np.float32(5)))
    after = get("affine_step").compose(attributes, {"value": np.full((1, 1), 4, np.float32)}, before)
    assert (float(np.ravel(after.g.to_float64())[0]), float(np.ravel(after.b.to_float64())[0])) == (g, b)


def test_steps_that_only_training_has():
    with pytest.raises(ValueError, match=r"statistics of the batch has no integer form. Convert in evaluation mode"):
        get("batch_norm").compose({"use_running_average": False}, {}, Affine.identity())
    with pytest.raises(ValueError, match=r"Dropout has no integer form. Convert in evaluation mode: call model.eval"):
        get("dropout").compose({}, {}, Affine.identity())


def test_the_registry_names_what_it_knows():
    with pytest.raises(
        ValueError, match=r"Unknown operation 'unknown'\. Known operations: add, affine_step, .*, split"
    ):
        get("unknown")


def test_codes_without_a_factor_are_an_array_of_numpy_in_the_same_memory():
    codes = jnp.arange(-8, 8, dtype=jnp.int8)
    found = scale_codes(codes, np.float32(1))
    assert isinstance(found, np.ndarray)
    assert np.shares_memory(found, np.asarray(codes))
    assert np.array_equal(scale_codes(codes, np.float32(0.5)), np.rint(np.arange(-8, 8) * 0.5))
