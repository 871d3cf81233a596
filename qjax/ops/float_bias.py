"""Adds a bias in float in the training forward if the target's runtime adds it as a float."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.numerics.rules import get_rule
from qjax.ops.base import Equation, Op, Quantized
from qjax.ops.facts import ProductFacts
from qjax.ops.float_accumulator import Pending
from qjax.targets import Target


def with_bias_of(target: Target, op: Op, eqn: Equation, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """The results of a product; the bias after it is not rounded if the target's rule adds it as a real number.

    Args:
      inputs: of the equation. outputs: of `op.training`.
    """
    if not isinstance(op, ProductFacts) or not any(isinstance(y, Pending) and y.rounded for y in outputs):
        return outputs
    index = 1 if eqn.fixed[1] else 0
    x, w = inputs[1 - index], inputs[index]
    if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
        return outputs
    kind = op.kind(op.attributes(eqn), eqn.in_shapes[index])
    weighted = target.weighted(kind, per_channel=np.size(w.scale) > 1, wide=x.qparams.spec.bits > 8)
    if get_rule(weighted.rule).bias != "real":
        return outputs
    return [dataclasses.replace(y, rounded=False) if isinstance(y, Pending) else y for y in outputs]
