"""How far two roundings drift apart along a real network, from its weights and one run of the reference.

Every node is first run by itself, on the reference's codes: what differs then arises in the node. This theory carries
what arises through the rest of the network. For every code it has the probability p that it differs, and in steps the
mean absolute difference a = E|d| and the mean square v = E[d^2]. It takes the differences of a node's inputs as
independent of each other.

A product has d = sum of w_k d_k, and v = sum of w_k^2 v_k. While at most one input differs, a is the sum of |w_k| a_k,
and p is at most the sum of p_k. With many, d is normal: a = sqrt(2 v / pi). The lesser of both is taken. It is a fifth
too small where one input surely differs, and too great by as much where two may.

With u uniform and d fixed, the integer round(u + d) - round(u) is one of the two integers beside d, and d in the mean.
So rounding keeps a and adds E[f (1 - f)] to v, f being the fraction of d. A code at an end of its range (a closed relu)
does not move.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.lab.chains import Codes
from qjax.comparison.compared_node import Side
from qjax.graph.ir import Graph, Node

_NORMAL = np.linspace(-5, 5, 401)
_DENSITY = np.exp(-(_NORMAL**2) / 2) / np.sum(np.exp(-(_NORMAL**2) / 2))
_DEVIATIONS = np.concatenate([np.linspace(0, 2, 201), [4, 1e9]])


def _expected(of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """E[of(d)] for d normal with each of `_DEVIATIONS`."""
    near = np.array([np.dot(_DENSITY, of(_NORMAL * deviation)) for deviation in _DEVIATIONS[:-1]])
    return np.append(near, near[-1]).astype(np.float32)


_CUT = _expected(lambda d: np.abs(d) % 1 * (1 - np.abs(d) % 1))
_DIFFERS = _expected(lambda d: np.minimum(1, np.abs(d)))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of every code of a tensor, float32 arrays of its shape: the probability to differ, E|d| and E[d^2], in steps."""

    differs: np.ndarray
    absolute: np.ndarray
    square: np.ndarray

    @property
    def share(self) -> float:
        """Of the codes, that differ."""
        return float(np.mean(self.differs))


def exactly(differences: np.ndarray) -> Spread:
    """What is known of differences that were measured."""
    d = np.abs(differences.astype(np.float32))
    return Spread(np.minimum(d, 1), d, d * d)


@dataclasses.dataclass(frozen=True)
class Carried:
    """shares: output tensor of each node -> the share of its codes that differ. last: of the last node's output."""

    shares: Mapping[str, float]
    last: Spread


def carried(ir: Graph, reference: Codes, arising: Mapping[str, np.ndarray]) -> Carried:
    """How codes differ when both graphs start from the same input codes.

    Args:
      ir: the graph of `nearest_even`, whose multipliers are stated as `multiplier` and `shift`.
      reference: its codes.
      arising: output tensor of each node -> the differences that arise in the node on the reference's inputs.

    Raises:
      ValueError: the theory says nothing about an operation.
    """
    found = {name: exactly(np.zeros(reference[name].shape, np.int8)) for name in ir.inputs}
    left = Counter(name for node in ir.nodes for name in node.inputs)
    shares: dict[str, float] = {}
    for node in ir.nodes:
        if node.op not in _REALS:
            raise ValueError(f"expected operations of {', '.join(_REALS)}; got {node.op!r} in {node.name!r}.")
        reals = _REALS[node.op](ir, node, [found[name] for name in node.inputs])
        moved = Spread(*map(np.asarray, _rounded(reals, _open(ir, node, reference).astype(np.float32))))
        own = exactly(arising[node.output])
        differs = 1 - (1 - moved.differs) * (1 - own.differs)
        found[node.output] = Spread(differs, moved.absolute + own.absolute, moved.square + own.square)
        shares[node.output] = found[node.output].share
        left.subtract(node.inputs)
        for name in set(node.inputs):  # maps of a large network are gigabytes
            if not left[name]:
                del found[name]
    return Carried(shares, found[ir.nodes[-1].output])


@jax.jit
def _rounded(reals: "Reals", is_open: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """p, a and v of the codes behind real differences."""
    some, few, square = reals
    deviation = jnp.sqrt(square)

    def normal(table: np.ndarray) -> jax.Array:
        return jnp.interp(deviation, _DEVIATIONS.astype(np.float32), table)

    absolute = jnp.minimum(few, deviation * np.float32((2 / np.pi) ** 0.5))
    differs = jnp.minimum(jnp.minimum(few, some), normal(_DIFFERS))
    cut = jnp.minimum(jnp.maximum(few - square, 0), normal(_CUT))
    return is_open * differs, is_open * absolute, is_open * (square + cut)


def _open(ir: Graph, node: Node, reference: Codes) -> np.ndarray:
    """Which codes are strictly within the node's range."""
    low, high = Side(ir, node, "").ends()
    codes = reference[node.output]
    return (codes > low) & (codes < high)


def two_roundings(ir: Graph, node: Node, reference: Codes) -> float:
    """The share of a product's codes in which two roundings differ from one: the mean of 2^-(r+1) where it is open.

    r: the right shift behind the product's high word (gemmlowp, NEON).
    """
    shift = np.maximum(-np.asarray(ir.constant(node, "shift"), np.int64), 0)
    return float(np.mean(_open(ir, node, reference) * 2.0 ** -(shift + 1.0)))


def decisions(codes: np.ndarray, spread: Spread, rng: np.random.Generator, draws: int = 64) -> float:
    """The share of examples whose greatest of codes [n, classes] changes.

    Differences are drawn as normal, independent and then rounded; this is the mean over all draws.
    """
    before, deviation = codes.argmax(-1), np.sqrt(spread.square)
    changed = 0
    for _ in range(draws):
        d = rng.standard_normal(codes.shape) * deviation
        d = np.floor(d + rng.random(codes.shape))
        changed += int(np.sum((codes + d).argmax(-1) != before))
    return changed / (draws * len(codes))


# ----------------------------------------------------------------------------------- before rounding


class Reals(NamedTuple):
    """some: the sum of the inputs' p. few: a, if at most one input differs. square: v. Arrays of the output's shape."""

    some: np.ndarray
    few: np.ndarray
    square: np.ndarray


def _conv(ir: Graph, node: Node, inputs: Sequence[Spread]) -> Reals:
    facts = node.attributes
    numbers = lax.ConvDimensionNumbers(*(tuple(facts[k]) for k in ("lhs_layout", "rhs_layout", "out_layout")))
    shapes = {key: facts[key] for key in ("padding", "lhs_dilation", "rhs_dilation")}

    def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = lax.conv_general_dilated(
            jnp.asarray(x),
            jnp.asarray(w),
            facts["strides"],
            **shapes,
            dimension_numbers=numbers,
            feature_group_count=facts["groups"],
        )
        return np.asarray(y)

    return _products(product, _kernel(ir, node), inputs[0])


def _dot(ir: Graph, node: Node, inputs: Sequence[Spread]) -> Reals:
    return _products(np.matmul, _kernel(ir, node), inputs[0])


def _products(product: Callable[..., np.ndarray], kernel: np.ndarray, x: Spread) -> Reals:
    some = product(x.differs, (kernel != 0).astype(np.float32))
    return Reals(some, product(x.absolute, np.abs(kernel)), product(x.square, kernel**2))


def _kernel(ir: Graph, node: Node) -> np.ndarray:
    """Weights in steps of the output for a step of the input, float32."""
    shift = np.asarray(ir.constant(node, "shift"), np.float64)
    scale = np.asarray(ir.constant(node, "multiplier"), np.float64) * 2.0 ** (shift - 31)
    return (np.asarray(ir.constant(node, "kernel"), np.float64) * scale).astype(np.float32)


def _add(ir: Graph, node: Node, inputs: Sequence[Spread]) -> Reals:
    factors = [_factor(ir, node, index) for index in range(len(inputs))]
    terms = [(x.differs, f * x.absolute, f**2 * x.square) for f, x in zip(factors, inputs, strict=True)]
    return Reals(*(np.sum(column, axis=0) for column in zip(*terms, strict=True)))


def _sum(ir: Graph, node: Node, inputs: Sequence[Spread]) -> Reals:
    (x,), factor, axes = inputs, _factor(ir, node, 0), tuple(node.attributes["axes"])
    return Reals(x.differs.sum(axes), factor * x.absolute.sum(axes), factor**2 * x.square.sum(axes))


def _factor(ir: Graph, node: Node, index: int) -> np.float32:
    """What a sum multiplies an input by."""
    factor = np.asarray(ir.constant(node, f"factor{index}"), np.float64)
    return np.float32(np.abs(factor) * 2.0 ** -np.asarray(ir.constant(node, "shift"), np.float64))


def _reshape(ir: Graph, node: Node, inputs: Sequence[Spread]) -> Reals:
    (x,), sizes = inputs, ir.tensors[node.output].shape[1:]
    return Reals(*(array.reshape(len(array), *sizes) for array in (x.differs, x.absolute, x.square)))


_REALS: dict[str, Callable[[Graph, Node, Sequence[Spread]], Reals]] = {
    "conv": _conv,
    "dot": _dot,
    "add": _add,
    "sum": _sum,
    "reshape": _reshape,
}
