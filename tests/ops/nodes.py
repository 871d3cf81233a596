"""One-node graphs, the codes to feed them, and oracles in Python's unbounded integers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.run.interpreter import Interpreter
from tests.numerics.exact import ROUNDINGS, RULES


@dataclasses.dataclass(frozen=True)
class Grid:
    """The codes of one tensor."""

    dtype: str
    qmin: int
    qmax: int
    zero_point: int

    def quantization(self) -> Quantization:
        scale, zero_point = np.asarray(0.5, np.float32), np.asarray(self.zero_point, np.int32)
        return Quantization(scale, zero_point, self.qmin, self.qmax)

    def codes(self, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        """Random codes, a third of them at an edge or at zero."""
        edges = rng.choice([self.qmin, self.qmax, self.zero_point], shape)
        inner = rng.integers(self.qmin, self.qmax + 1, shape)
        return np.where(rng.random(shape) < 1 / 3, edges, inner).astype(self.dtype)

    def centered(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(object) - self.zero_point


INT8 = Grid("int8", -128, 127, -7)
INT8_LOW = Grid("int8", -128, 127, -128)
INT8_HIGH = Grid("int8", -128, 127, 127)
UINT8 = Grid("uint8", 0, 255, 0)
UINT8_MIDDLE = Grid("uint8", 0, 255, 131)
UINT8_HIGH = Grid("uint8", 0, 255, 255)
INT16 = Grid("int16", -32768, 32767, 0)
INT16_ODD = Grid("int16", -32768, 32767, -32768)
UINT16 = Grid("uint16", 0, 65535, 40001)
INT4 = Grid("int8", -8, 7, 3)
UINT4 = Grid("uint8", 0, 15, 15)
NARROW = Grid("int8", -127, 127, 0)
GRIDS = (INT8, INT8_LOW, INT8_HIGH, UINT8, UINT8_MIDDLE, UINT8_HIGH, INT16, INT16_ODD, UINT16, INT4, UINT4, NARROW)


def graph_of(
    op: str,
    inputs: Sequence[tuple[tuple[int, ...], Grid | str]],
    output: tuple[tuple[int, ...], Grid | str],
    constants: Mapping[str, np.ndarray] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Graph:
    """A graph of one node; a grid given as a dtype is a tensor without a scale."""
    tensors: dict[str, Tensor] = {}
    for index, (shape, grid) in enumerate(inputs):
        known = grid if isinstance(grid, Grid) else None
        dtype = known.dtype if known else str(grid)
        tensors[f"x{index}"] = Tensor(f"x{index}", shape, dtype, known and known.quantization())
    for role, value in (constants or {}).items():
        tensors[role] = Tensor(role, value.shape, value.dtype.name, None, value)
    shape, grid = output
    known = grid if isinstance(grid, Grid) else None
    tensors["y"] = Tensor("y", shape, known.dtype if known else str(grid), known and known.quantization())
    names = tuple(f"x{index}" for index in range(len(inputs)))
    node = Node("node", op, names, "y", {role: role for role in constants or {}}, attributes or {})
    return check_integer(Graph(tensors, (node,), names, ("y",), "nearest_even"))


def run(graph: Graph, *codes: np.ndarray) -> np.ndarray:
    """The output codes, checked against the declared type and range."""
    (y,) = Interpreter(graph)(*codes)
    y, declared = np.asarray(y), graph.tensors["y"]
    assert (y.dtype.name, y.shape) == (declared.dtype, declared.shape)
    if declared.quantization is None:
        return y
    assert y.min() >= declared.quantization.qmin
    assert y.max() <= declared.quantization.qmax
    return y


def check(graph: Graph, codes: Sequence[np.ndarray], expected: np.ndarray, *, distinct: int = 3) -> None:
    """Equality with the oracle, on outputs that are not all alike."""
    y = run(graph, *codes)
    assert np.array_equal(y.astype(object), expected)
    assert len(np.unique(y)) >= distinct


# ---------------------------------------------------------------------------- what ends a producer


def _elementwise(function: Callable[..., int], *arrays: np.ndarray) -> np.ndarray:
    aligned = np.broadcast_arrays(*arrays)
    flat = [function(*(int(v) for v in values)) for values in zip(*(a.ravel() for a in aligned), strict=True)]
    return np.array(flat, object).reshape(aligned[0].shape)


def _to_grid(rounded: np.ndarray, out: Grid, bounds: tuple[int, int] | None) -> np.ndarray:
    codes = np.minimum(np.maximum(rounded + out.zero_point, out.qmin), out.qmax)
    return codes if bounds is None else np.minimum(np.maximum(codes, bounds[0]), bounds[1])


def weighted_constants(rng: np.random.Generator, acc: np.ndarray, vector: tuple[int, ...], out: Grid) -> dict[str, Any]:
    """Random bias, multiplier and shift per channel, that spread the accumulators over the output's range."""
    reach = max(int(np.abs(acc).max()), 2)
    bias = rng.integers(-reach // 2, reach // 2 + 1, vector, dtype=np.int32)
    multiplier = rng.integers(2**30, 2**31, vector, dtype=np.int64).astype(np.int32)
    multiplier = np.where(rng.random(vector) < 0.3, np.int32(2**30), multiplier)  # powers of two meet ties
    scale = int(np.log2((out.qmax - out.qmin) / reach))
    shift = np.clip(scale + rng.integers(-1, 2, vector), -31, 30).astype(np.int32)
    return {"bias": np.asarray(bias), "multiplier": multiplier, "shift": np.asarray(shift)}


def finish_weighted(
    acc: np.ndarray, constants: Mapping[str, Any], out: Grid, rule: str, bounds: tuple[int, int] | None = None
) -> np.ndarray:
    total = acc + constants["bias"].astype(object)
    return _to_grid(_elementwise(RULES[rule], total, constants["multiplier"], constants["shift"]), out, bounds)


def sum_constants(
    rng: np.random.Generator, accumulators: Sequence[np.ndarray], vector: tuple[int, ...], out: Grid
) -> dict[str, Any]:
    """Random factors of either sign, one shift and an offset per channel, spread over the output's range."""
    span = out.qmax - out.qmin
    reach = max(*(int(np.abs(acc).max()) for acc in accumulators), 2)
    shift = np.clip(29 - int(np.log2(span / reach)) + rng.integers(-1, 2, vector), 2, 44)
    middle = rng.integers(out.qmin, out.qmax + 1, vector) - out.zero_point
    offset = (np.asarray(middle).astype(object) << shift.astype(object)) + np.asarray(
        rng.integers(0, 2**20, vector) * rng.integers(0, 2, vector)
    )
    constants: dict[str, Any] = {}
    for index, acc in enumerate(accumulators):
        factor = rng.integers(2**28, 2**30, vector)
        power = 2 ** rng.integers(26, 31, vector)  # meets ties
        factor = np.where(rng.random(vector) < 0.3, power, factor) * rng.choice([-1, 1], vector)
        constants[f"factor{index}"] = factor.astype(np.int32)
        offset = offset - (int(acc.sum()) // acc.size) * factor.astype(object)
    offset = np.asarray(offset, object)
    return {
        "shift": np.asarray(shift.astype(np.int32)),
        "offset_high": (offset // 2**31).astype(np.int32),
        "offset_low": (offset % 2**31).astype(np.int32),
        **constants,
    }


def finish_sum(
    accumulators: Sequence[np.ndarray],
    constants: Mapping[str, Any],
    out: Grid,
    rounding: str,
    bounds: tuple[int, int] | None = None,
) -> np.ndarray:
    total = constants["offset_high"].astype(object) * 2**31 + constants["offset_low"].astype(object)
    for index, acc in enumerate(accumulators):
        total = total + acc * constants[f"factor{index}"].astype(object)
    rounded = _elementwise(lambda t, s: ROUNDINGS[rounding](Fraction(t, 2**s)), total, constants["shift"])
    return _to_grid(rounded, out, bounds)


# ---------------------------------------------------------------------------- accumulators


def dot(x: np.ndarray, w: np.ndarray, contracting: Any, batch: Any) -> np.ndarray:
    """`dot_general` of object arrays: batch axes, then those of x, then those of w."""
    (lc, rc), (lb, rb) = contracting, batch
    free_x = [a for a in range(x.ndim) if a not in lc and a not in lb]
    free_w = [a for a in range(w.ndim) if a not in rc and a not in rb]
    x, w = x.transpose([*lb, *free_x, *lc]), w.transpose([*rb, *rc, *free_w])
    sizes, count = x.shape[: len(lb)], len(lc)
    axes = (list(range(len(free_x), len(free_x) + count)), list(range(count)))
    parts = [np.tensordot(x[index], w[index], axes) for index in np.ndindex(*sizes)]
    return np.array(parts, object).reshape((*sizes, *parts[0].shape))


def conv(
    x: np.ndarray, w: np.ndarray, strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, groups: int
) -> np.ndarray:
    """A convolution of object arrays from its definition. x: (n, ..., c); w: (..., c / groups, features)."""
    rank = len(strides)
    spread = [(size - 1) * d + 1 for size, d in zip(x.shape[1:-1], lhs_dilation, strict=True)]
    dilated = np.zeros((x.shape[0], *spread, x.shape[-1]), object)
    dilated[(slice(None), *(slice(None, None, d) for d in lhs_dilation))] = x

    def at(position: tuple[int, ...]) -> np.ndarray:
        index = tuple(p - low for p, (low, _) in zip(position, padding, strict=True))
        inside = all(0 <= i < size for i, size in zip(index, spread, strict=True))
        return dilated[(slice(None), *index)] if inside else np.zeros((x.shape[0], x.shape[-1]), object)

    window = w.shape[:rank]
    sizes = [
        (spread[d] + sum(padding[d]) - rhs_dilation[d] * (window[d] - 1) - 1) // strides[d] + 1 for d in range(rank)
    ]
    width, features = x.shape[-1] // groups, w.shape[-1] // groups
    out = np.zeros((x.shape[0], *sizes, w.shape[-1]), object)
    for position in np.ndindex(*sizes):
        for tap in np.ndindex(*window):
            here = at(tuple(position[d] * strides[d] + tap[d] * rhs_dilation[d] for d in range(rank)))
            for g in range(groups):
                cols = slice(g * features, (g + 1) * features)
                out[(slice(None), *position, cols)] += here[:, g * width : (g + 1) * width] @ w[tap][:, cols]
    return out
