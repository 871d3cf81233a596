"""Normalisation in ONNX: its short form has the kernel's integers, and stands where float64 holds every product."""

import numpy as np
import pytest

from qjax.numerics.normalize import Joined, Setup, prepare
from qjax.ops.normalize import normalized_codes
from tests.export.emit.onnx_runs import nodes_of
from tests.export.emit.test_onnx_ranges import agree, model_of


def rows(shape, axes, dtype, seed=0):
    """Random codes of several widths of distribution, with rows of one code and rows of both ends."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    rest = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    spread, middle = rng.choice([0.4, 3, 30, 300], rest), rng.uniform(info.min, info.max, rest)
    x = np.clip(np.rint(rng.normal(middle, spread, shape)), info.min, info.max).astype(dtype)
    ends = rng.choice([info.min, info.max], shape)
    return np.where(rng.random(rest) < 0.2, ends, x).astype(dtype)


def function(setup, axes, joined: Joined = "add", groups=1):
    def run(x, zero_point, high, low, half, right):
        own = {"energy_high": high, "energy_low": low, "half": half, "right": right}
        return normalized_codes(x, zero_point, own, axes, setup, joined, groups)

    return run


def constants(setup, divisor, epsilon, scale, joined: Joined = "add"):
    found = prepare(setup, divisor, epsilon, np.float32(scale), joined)
    return [np.asarray(found[name], np.int32) for name in ("energy_high", "energy_low", "half", "right")]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((40, 384), (1,)), ((6, 9, 32), (2,)), ((6, 9, 32), (1, 2)), ((32, 50), (0,)), ((30, 1), (1,)), ((8, 4096), (1,))],
)
@pytest.mark.parametrize(("dtype", "zero"), [("int8", -5), ("uint8", 130)])
@pytest.mark.sampled(2)
def test_codes(centered, shape, axes, dtype, zero):
    count = int(np.prod([shape[axis] for axis in axes]))
    setup = Setup.of(count, 255, centered=centered)
    x = rows(shape, axes, dtype)
    for scale, epsilon in ((0.02, 1e-6), (3.0, 1e-5), (0.0007, 1e-2)):
        known = [np.asarray(zero, np.int32), *constants(setup, count, epsilon, scale)]
        model = agree(function(setup, axes), [x], known=known)
        # the short form; the kernel's own operations are 46 with the mean and 37 without
        assert count_of(model) <= (37 if centered else 31)


@pytest.mark.parametrize(
    ("count", "epsilon", "scale", "joined", "groups"),
    [
        # no root of a row of equal codes; the greater of root and epsilon; groups; epsilon beyond 61 bits
        (32, 0.0, 0.1, "add", 1),
        (32, 1e-3, 0.1, "max", 1),
        (8, 1e-3, 0.1, "add", 4),
        (32, 1e8, 1e-7, "add", 1),
    ],
)
def test_where_it_does_not_stand_the_kernel_does(count, epsilon, scale, joined, groups):
    setup = Setup.of(count, 255, centered=True)
    known = [np.asarray(-5, np.int32), *constants(setup, count, epsilon, scale, joined)]
    x = rows((20, count * groups), (1,), "int8", seed=1)
    wide = count_of(agree(function(setup, (1,), joined, groups), [x], known=known))
    short = [np.asarray(-5, np.int32), *constants(setup, count, 1e-3, 0.1)]
    assert wide > count_of(model_of(function(setup, (1,)), [x[:, :count]], known=short, for_runtime=True))


def count_of(model):
    return len([node for node in nodes_of(model) if node.op_type != "Constant"])


def test_products_that_float64_does_not_hold_stay_integers():
    x = rows((3, 1 << 16), (1,), "int8")
    found = {}
    for count in (1 << 15, 1 << 16):
        setup = Setup.of(count, 255, centered=True)
        known = [np.asarray(0, np.int32), *constants(setup, count, 1e-5, 0.1)]
        found[count] = count_of(agree(function(setup, (1,)), [x[:, :count]], known=known))
    assert found[1 << 15] < found[1 << 16]
