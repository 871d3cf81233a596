"""How many more bits the operands of a product can get before its sums could exceed int32."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.ops import Role
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.tracing.annotation import Annotation
from qjax.training.weights import codes_of, weights_of

ROOM = 30
"""Sums stay below 2^30, so that the other half of int32 remains for the bias."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sums of one product.

    Attributes:
      names: of its operands' quantizers.
      room: by how many bits these may grow in total.
    """

    names: tuple[str, ...]
    room: int


def sums_of(qmodel: QuantizedModel, args: tuple[Any, ...]) -> list[Sum]:
    """Every product of a model, with its present widths and codes."""
    call = evaluation_copy(qmodel).trace(*args)
    annotation = call.annotation
    codes = codes_of(qmodel, weights_of(qmodel, args).names)
    widths = {name: q.spec.bits for name, q in qmodel.plan.quantizers}
    found: list[Sum] = []
    made = {value: eqn for eqn in call.traced.program.walk() for value in eqn.outputs}
    for eqn in call.traced.program.walk():
        op = annotation.ops.get(eqn, (None,))[0]
        if not isinstance(op, (Conv, Dot)):
            continue
        places = [
            annotation.weights.get((eqn, i)) or place_behind(annotation, made, v) for i, v in enumerate(eqn.inputs)
        ]
        # The greatest sum of one operand's codes along the summed axes, and the widths of the other operands.
        factor, width = 0.0, 0
        for index, place in enumerate(places):
            if place is None:
                continue
            if place.kind == "weight" or (index == len(places) - 1 and not factor):
                summed = tuple(a for a in range(len(eqn.in_shapes[index])) if a not in op.weight_axes(eqn, index))
                terms = float(np.prod([eqn.in_shapes[index][a] for a in summed]))
                factor = terms * 2.0 ** widths[place.name]
                if place.name in codes and np.ndim(codes[place.name]) == len(eqn.in_shapes[index]):
                    factor = float(np.abs(np.asarray(codes[place.name], np.float64)).sum(summed).max())
            else:
                width += widths[place.name]
        names = tuple(place.name for place in places if place is not None)
        found.append(Sum(names, math.ceil(ROOM - width - math.log2(max(factor, 1.0))) - 1))
    return found


def room_of(sums: list[Sum], name: str, grown: Mapping[str, int]) -> int:
    """How many more bits a quantizer can get if the others grow by the bits in `grown`."""
    return min((s.room - sum(grown.get(n, 0) for n in s.names) for s in sums if name in s.names), default=ROOM)


def place_behind(annotation: Annotation, made: Mapping[Any, Any], value: Any) -> Any:
    """The quantizer of a tensor, found through operations that preserve codes: a max pool, a select, scan results."""
    known = annotation.values.get(value) or annotation.grids.get(value)
    if known is not None or value not in made:
        return known
    eqn = made[value]
    op = annotation.ops.get(eqn, (None,))[0]
    if op is None or op.role is not Role.GRID:
        return None
    # All operands that have codes share one quantizer; others, such as the mask of a select, have none.
    found = (place_behind(annotation, made, operand) for operand in eqn.inputs)
    return next((place for place in found if place is not None), None)
