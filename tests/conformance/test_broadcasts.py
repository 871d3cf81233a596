"""Operands of different shapes: the codes of the runtimes' own loops, whose last elements round otherwise."""

import dataclasses
import itertools
import math
import platform

import numpy as np
import pytest

from conformance import single
from conformance.case import Case, Grid
from conformance.runtimes.litert import LiteRT
from conformance.runtimes.litert_arm import LiteRTArm
from conformance.runtimes.tflite_micro import TFLiteMicro
from conformance.runtimes.torch_cpu import TorchCpu
from qjax import targets
from qjax.ops.formulas.tflite_loops import Loop, loop_of

SHAPES = [
    ((4, 7, 33), (33,)),
    ((1,), (4, 7, 33)),
    ((4, 7, 33), (4, 7, 1)),
    ((4, 7, 1), (4, 7, 33)),
    ((4, 7, 33), (4, 1, 33)),
    ((4, 1, 33), (1, 7, 1)),
    ((4, 7, 33), (1, 7, 1)),
    ((2, 3, 5, 17), (2, 1, 5, 1)),
    ((3, 20, 1), (3, 1, 1)),
    ((2, 1, 19), (1, 5, 1)),
    ((5, 64), (5, 1)),
    ((5, 100), (100,)),
    ((3, 1, 130), (3, 2, 1)),
]
DEEP = [((2, 3, 2, 5, 17), (2, 1, 1, 5, 1)), ((2, 3, 1, 1, 9), (1, 3, 4, 1, 1)), ((2, 9, 2, 10, 1), (2, 9, 1, 10, 13))]


@pytest.mark.parametrize(
    ("first", "second", "loop"),
    [
        ((3, 4), (3, 4), Loop("rows", 2)),
        ((3, 4), (1, 3, 4), Loop("rows", 3)),
        ((), (1, 1), Loop("rows", 2)),
        ((3, 4), (4,), Loop("rows", 1)),
        ((5, 3, 4), (5, 1, 4), Loop("rows", 1)),
        ((2, 5, 3, 4), (2, 1, 3, 4), Loop("rows", 2)),
        ((3, 4), (3, 1), Loop("scalar", 1)),
        ((3, 4), (1,), Loop("scalar", 2)),
        ((5, 3, 1), (5, 1, 1), Loop("scalar", 2)),
        ((7, 1), (1, 33), Loop("scalar", 1)),
        ((4, 1, 33), (1, 7, 1), Loop("portable", 0)),
        ((2, 3, 5, 17), (2, 1, 5, 1), Loop("portable", 0)),
    ],
)
def test_loops(first, second, loop):
    assert loop_of(first, second) == loop == loop_of(second, first)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled(10)
def test_neighbours_that_are_walked_alike_are_one_axis(seed):
    rng = np.random.default_rng(seed)
    groups = [(rng.integers(2, 4, rng.integers(1, 4)), rng.integers(3)) for _ in range(rng.integers(1, 4))]
    kinds = [kind for _, kind in groups]
    if any(a == b for a, b in itertools.pairwise(kinds)):
        groups = groups[:1]

    def shapes(joined: bool) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[], []]
        for sizes, kind in groups:
            listed = [math.prod(sizes.tolist())] if joined else sizes.tolist()
            for index, shape in enumerate(found):
                shape += [1] * len(listed) if kind == index + 1 else listed
        return [tuple(shape) for shape in found]

    apart, joined = shapes(False), shapes(True)
    one, other = loop_of(*apart), loop_of(*joined)
    assert one.kind == other.kind
    whole = [np.broadcast_shapes(*pair) for pair in (apart, joined)]
    runs = [math.prod(shape[len(shape) - loop.axes :]) for shape, loop in zip(whole, (one, other), strict=True)]
    assert runs[0] == runs[1]


def cases(op: str, dtype: str, seed: int, shapes: list) -> list[Case]:
    """Scales at random or far apart, where sums wrap around in 16 bits."""
    rng, info = np.random.default_rng(seed), np.iinfo(dtype)
    found: list[Case] = []
    for index, pair in enumerate(shapes):
        wide = 9 if index % 2 else 1
        zeros = [0] * 3 if dtype == "int16" else [int(z) for z in rng.integers(info.min, info.max + 1, 3)]
        first = np.exp(rng.uniform(-6, -1))
        second = first * np.exp(rng.uniform(-wide, wide))
        if op == "multiply":
            last = first * second * np.exp(rng.uniform(-3, 8))
        else:
            last = max(first, second) * np.exp(rng.uniform(-wide / 3, 2))
        grids = [Grid(np.asarray(s, np.float32), z, dtype) for s, z in zip((first, second, last), zeros, strict=True)]
        codes = tuple(rng.integers(info.min, info.max + 1, shape).astype(dtype) for shape in pair)
        found.append(Case(op, codes, (grids[0], grids[1]), grids[2]))
    return found


def ranked(case: Case) -> Case:
    """The operands with one rank, as nodes have them."""
    rank = max(x.ndim for x in case.inputs)
    return dataclasses.replace(case, inputs=tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) for x in case.inputs))


def differing(runtime, target: str, op: str, dtype: str, seed: int, shapes: list) -> list:
    """The pairs of shapes for which a code differs."""
    found = []
    for case in cases(op, dtype, seed, shapes):
        want = np.asarray(single.run(ranked(case), targets.get(target)))
        got = np.asarray(runtime.run(case)).reshape(want.shape)
        if not np.array_equal(got, want):
            found.append(tuple(x.shape for x in case.inputs))
    return found


ON_ARM = platform.machine() in ("aarch64", "arm64")
LITERT = [
    ("tflite_reference", "reference"),
    ("tflite_optimized_arm" if ON_ARM else "tflite_optimized_x86", "optimized"),
    ("tflite_xnnpack_arm" if ON_ARM else "tflite_xnnpack", "xnnpack"),
]
"""The targets of this machine's LiteRT."""


@pytest.mark.parametrize(("target", "mode"), LITERT)
@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(6)
def test_litert(target, mode, op, dtype, seed):
    assert differing(LiteRT(mode), target, op, dtype, seed, SHAPES + DEEP) == []


@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_tflite_micro(op, dtype):
    assert differing(TFLiteMicro(), "tflite_micro", op, dtype, 0, SHAPES[::3]) == []


def test_the_loops_matter():
    """Under the optimised kernels some code is otherwise than with the operand repeated beforehand."""
    target = targets.get("tflite_optimized_x86")

    def differs(case: Case) -> bool:
        shape = np.broadcast_shapes(*(x.shape for x in case.inputs))
        a, b = (np.broadcast_to(x, shape) for x in case.inputs)
        repeated = Case(case.op, (a, b), case.grids, case.output)
        both = [np.asarray(single.run(one, target)) for one in (ranked(case), repeated)]
        return bool(np.any(both[0] != both[1]))

    tried = (case for op in ("add", "multiply") for seed in range(3) for case in cases(op, "int8", seed, SHAPES))
    assert any(differs(case) for case in tried)


@pytest.mark.oracle
@pytest.mark.parametrize(("target", "mode"), [("tflite_optimized_arm", "optimized"), ("tflite_xnnpack_arm", "xnnpack")])
@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_litert_on_arm(target, mode, op, dtype):
    assert differing(LiteRTArm(mode), target, op, dtype, 0, SHAPES + DEEP) == []


@pytest.mark.oracle
@pytest.mark.parametrize("engine", ["fbgemm", "onednn", "qnnpack"])
@pytest.mark.parametrize("op", ["add", "multiply"])
@pytest.mark.parametrize("seed", range(3))
def test_torch(engine, op, seed):
    assert differing(TorchCpu(engine), f"torch_{engine}", op, "uint8", seed, SHAPES) == []
