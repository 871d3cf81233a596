"""Computes a node's int32 accumulators: the values before its kernel rounds them.

They come from the kernel itself, with a last step that changes nothing: the shift by 0 bits of `power_of_two` for
products with weights, and a sum with the factors 1 and 0 for everything else. No kernel is therefore written twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax import ops

_LOW, _HIGH = -(2**31), 2**31 - 1
_FINISH = ("y_zero_point", "clamp_min", "clamp_max")


def accumulators(
    op: str, attributes: Mapping[str, Any], constants: Mapping[str, Any], inputs: Sequence[Any]
) -> list[jax.Array]:
    """The int32 arrays that a node would round; [] if it only moves codes, or does not round sums.

    A product with weights has one, including its bias (except with a rule that `takes_bias`). An addition has one per
    operand; a product of activations, an average and a rescaling have one.

    Args:
      op: the node's operation.
      attributes: the result of `kernels.attributes`.
      constants: the result of `kernels.prepare`.
      inputs: codes.
    """
    facts = {**attributes, "dtype": "int32", "qmin": _LOW, "qmax": _HIGH}
    kept = {role: value for role, value in constants.items() if role not in _FINISH}
    kept["y_zero_point"] = np.int32(0)
    kernel = ops.get(op).kernel
    if "rule" in facts:
        return [kernel({**facts, "rule": "power_of_two"}, {**kept, "shift": np.int32(0)}, inputs)]
    # An operation that prepares its own constants, such as a softmax, has steps of its own, and no sum that is rounded.
    if ("formula" not in facts and "rounding" not in facts) or ops.get(op).prepares:
        return []
    facts.pop("formula", None)
    facts["rounding"] = "floor"
    count = len(signed_scales(op, attributes, [np.float32(1)] * len(inputs)))
    found: list[jax.Array] = []
    for chosen in range(count):
        # The result is (2 * acc) >> 1.
        factors = {f"factor{i}": np.int32(2 if i == chosen else 0) for i in range(count)}
        zero = {"offset_high": np.int32(0), "offset_low": np.int32(0), "shift": np.int32(1)}
        found.append(kernel(facts, {**kept, **factors, **zero}, inputs))
    return found


def signed_scales(op: str, attributes: Mapping[str, Any], scales: Sequence[Any]) -> list[Any]:
    """The scale of each accumulator of a node without weights, from its inputs' scales; any type of number."""
    return ops.get(op).scales(attributes, scales)
