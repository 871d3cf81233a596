"""Pairs of graphs to compare: the residual network under targets, edited, on other grids."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from qjax import targets
from qjax.assign import assign
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Node
from qjax.graph.kernels import attributes
from qjax.run.accumulators import accumulators
from tests.lower.lowered import residual_network

RNG = np.random.default_rng(0)
# multiples of half a step of x: half of the inputs are exact ties
REALS = (RNG.integers(-120, 120, (48, 6, 6, 4)) / 64).astype(np.float32)


@functools.cache
def built(like: str, **changes: Any) -> IntegerGraph:
    """The residual network as a finished graph under a target, or a changed one."""
    target = dataclasses.replace(targets.get(like), **changes)
    return IntegerGraph(assign(residual_network(), target))


def edited(graph: IntegerGraph, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> IntegerGraph:
    """The same graph with other data in one constant."""
    old = graph.ir.tensors[tensor]
    new = dataclasses.replace(old, value=change(np.array(old.value)))
    return IntegerGraph(graph.ir.replace(tensors={**graph.ir.tensors, tensor: new}))


def regridded(graph: IntegerGraph, tensor: str, **changes: Any) -> IntegerGraph:
    """The same graph with another scale, zero point or range in one tensor."""
    old = graph.ir.tensors[tensor]
    assert old.quantization is not None
    new = dataclasses.replace(old, quantization=dataclasses.replace(old.quantization, **changes))
    return IntegerGraph(graph.ir.replace(tensors={**graph.ir.tensors, tensor: new}))


def before_rounding(graph: IntegerGraph, node: Node, inputs: list[Any]) -> list[jax.Array]:
    return accumulators(node.op, attributes(graph.ir, node), graph.interpreter.constants[node.name], inputs)


def counts(a: Any, b: Any) -> tuple[int, int, int, int, int]:
    steps = np.asarray(b).astype(np.int64) - np.asarray(a).astype(np.int64)
    up, down = int((steps > 0).sum()), int((steps < 0).sum())
    return up + down, up, down, int(np.abs(steps).max()), int(steps.sum())


def counted(difference: Any) -> tuple[int, int, int, int, int]:
    return difference.count, difference.up, difference.down, difference.largest, difference.total
