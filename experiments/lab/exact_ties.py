"""Exact results of a graph's additions, pools and means on codes, as integers; their ties, and how many to expect."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from experiments.lab.pooling_cases import Case, rounded
from qjax import ops
from qjax.graph.ir import Graph, Node
from qjax.ops.add import Add
from qjax.ops.sums import Sum, WindowSum

_KINDS = {Add: "additions", WindowSum: "pools", Sum: "means"}
_POOL = {"window": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": [[0, 0]] * 4}


def kind_of(node: Node) -> str | None:
    """What a node is called here; None: it is not looked at."""
    return _KINDS.get(type(ops.get(node.op)))


@dataclasses.dataclass(frozen=True, eq=False)
class Exact:
    """A result in steps of the output, before its zero point: numerator / denominator, a fraction in lowest terms.

    numerator: int64, the sum of factors times operands. operands: centred codes int64, the two of an addition or the
    elements of a window.
    """

    numerator: np.ndarray
    denominator: int
    operands: tuple[np.ndarray, ...]
    factors: tuple[int, ...]


def exact(ir: Graph, node: Node, codes: Sequence[np.ndarray]) -> Exact:
    """From the codes that a node reads. Scales are float32, so their ratios are fractions.

    Raises:
      OverflowError: int64 could not hold a numerator.
      ValueError: a difference, a pool that is not 2x2, or a mean over other axes than those of a square map.
    """
    kind, known = kind_of(node), node.attributes
    taken = {
        "additions": not known.get("subtract"),
        "pools": all(known.get(key) == value for key, value in _POOL.items()),
        "means": known.get("axes") == [1, 2] and codes[0].shape[1] == codes[0].shape[2],
    }
    if kind is None or not taken[kind]:
        raise ValueError(f"{node.name}: expected a sum of two tensors, a 2x2 pool or a mean over a square map.")
    step = _scale(ir, node.output)
    operands = [x.astype(np.int64) - zero_point(ir, key) for x, key in zip(codes, node.inputs, strict=True)]
    ratios = [_scale(ir, key) / step for key in node.inputs]
    if kind != "additions":
        (x,), (ratio,) = operands, ratios
        size = x.shape[1] if kind == "means" else 2
        operands = [x[:, i::size, j::size] for i in range(size) for j in range(size)]
        if kind == "means":
            operands = [x[:, 0, 0] for x in operands]
        ratios = [ratio / len(operands)] * len(operands)
    denominator = math.lcm(*(ratio.denominator for ratio in ratios))
    factors = [int(ratio * denominator) for ratio in ratios]
    if max(sum(factors) * 512, 4 * denominator) >= 2**62:
        raise OverflowError(f"{node.name}: numerators beyond int64.")
    numerator = np.zeros_like(operands[0])
    for factor, x in zip(factors, operands, strict=True):
        numerator += factor * x
    return Exact(numerator, denominator, tuple(operands), tuple(factors))


def _scale(ir: Graph, tensor: str) -> Fraction:
    grid = ir.tensors[tensor].quantization
    assert grid is not None
    return Fraction(float(np.asarray(grid.scale)))


def zero_point(ir: Graph, tensor: str) -> int:
    grid = ir.tensors[tensor].quantization
    assert grid is not None
    return int(np.asarray(grid.zero_point))


def ends(ir: Graph, node: Node) -> tuple[int, int]:
    """The least and the greatest code that the node gives."""
    grid = ir.tensors[node.output].quantization
    assert grid is not None
    low = int(np.asarray(ir.constant(node, "clamp_min"))) if "clamp_min" in node.constants else grid.qmin
    return max(low, grid.qmin), grid.qmax


def settled(ir: Graph, node: Node, found: Exact, ties: str) -> np.ndarray:
    """The exact codes, int64, ties as named (see `pooling_cases`)."""
    zero = zero_point(ir, node.output)
    case = Case(node.name, "pool", zero_point=zero)
    return np.clip(rounded(case, found.numerator, found.denominator, ties) + zero, *ends(ir, node))


def inside(ir: Graph, node: Node, found: Exact) -> np.ndarray:
    """Where a result lies between two codes that the node can give, bool."""
    low, high = ends(ir, node)
    below = found.numerator // found.denominator + zero_point(ir, node.output)
    return (below >= low) & (below < high)


def tied(ir: Graph, node: Node, found: Exact) -> np.ndarray:
    """Where a tie decides the code, bool."""
    return inside(ir, node, found) & ((2 * found.numerator) % (2 * found.denominator) == found.denominator)


def uniform(ir: Graph, node: Node, found: Exact) -> float:
    """The number of ties if residues modulo the denominator were alike where an operand with an odd factor is not 0."""
    if found.denominator % 2:
        return 0.0
    moves = np.zeros(found.numerator.shape, bool)
    for x, factor in zip(found.operands, found.factors, strict=True):
        if factor % 2:
            moves |= x != 0
    return float((inside(ir, node, found) & moves).sum() / found.denominator)


def independent(ir: Graph, node: Node, found: Exact) -> float:
    """The number of ties if residues of operands that are not 0 were independent; which ones are 0 is counted.

    Where the denominator is no small power of two, as `uniform`.
    """
    denominator = found.denominator
    if denominator & (denominator - 1) or not 1 < denominator <= 2**10:
        return uniform(ir, node, found)
    where, pattern = inside(ir, node, found), np.zeros(found.numerator.shape, np.int64)
    spectra: list[np.ndarray] = []
    for index, (x, factor) in enumerate(zip(found.operands, found.factors, strict=True)):
        moves = x != 0
        pattern += moves << index
        residues = np.bincount((factor * x[where & moves]) % denominator, minlength=denominator)
        # the distribution of a sum of independent residues is a product of Fourier transforms
        spectra.append(np.fft.fft(residues / max(1, residues.sum())))
    total = 0.0
    for held, count in enumerate(np.bincount(pattern[where], minlength=2 ** len(spectra))):
        product = np.ones(denominator, complex)
        for index, spectrum in enumerate(spectra):
            product *= spectrum if held >> index & 1 else 1
        total += count * float(np.real(np.fft.ifft(product)[denominator // 2]))
    return total
