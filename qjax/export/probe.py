"""What a node's kernel has before it rounds: its int32 accumulators.

They come out of the kernel itself, under a finish that changes nothing: the shift by 0 bits of `power_of_two` for
products with weights, a sum with the factors 1 and 0 for everything else. So there is no second copy of a kernel here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax import ops
from qjax.export.interpreter import attributes
from qjax.export.ir import Graph, Node

_LOW, _HIGH = -(2**31), 2**31 - 1
_FINISH = ("y_zero_point", "clamp_min", "clamp_max")


def accumulators(graph: Graph, node: Node, constants: Mapping[str, Any], inputs: Sequence[Any]) -> list[jax.Array]:
    """The int32 arrays that the node would round; [] where it only moves codes.

    A product with weights has one, its bias included (but for a rule that `takes_bias`). An addition has one per
    operand; a product of activations, an average and a rescaling one. constants: those of `interpreter.prepare`.
    """
    facts = {**attributes(graph, node), "dtype": "int32", "qmin": _LOW, "qmax": _HIGH}
    kept = {role: value for role, value in constants.items() if role not in _FINISH}
    kept["y_zero_point"] = np.int32(0)
    kernel = ops.get(node.op).kernel
    if "rule" in facts:
        return [kernel({**facts, "rule": "power_of_two"}, {**kept, "shift": np.int32(0)}, inputs)]
    if "formula" not in facts and "rounding" not in facts:
        return []
    facts.pop("formula", None)
    facts["rounding"] = "floor"
    count = accumulator_count(node)
    found: list[jax.Array] = []
    for chosen in range(count):
        # (2 * acc) >> 1
        factors = {f"factor{i}": np.int32(2 if i == chosen else 0) for i in range(count)}
        zero = {"offset_high": np.int32(0), "offset_low": np.int32(0), "shift": np.int32(1)}
        found.append(kernel(facts, {**kept, **factors, **zero}, inputs))
    return found


def accumulator_count(node: Node) -> int:
    """How many accumulators a node without weights adds."""
    return len(signed_scales(node, [np.float32(1)] * len(node.inputs)))


def signed_scales(node: Node, scales: Sequence[Any]) -> list[Any]:
    """The scale of each accumulator of a node without weights, from those of its inputs; any type of number."""
    return ops.get(node.op).scales(node.attributes, scales)
