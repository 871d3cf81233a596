"""`lax.ragged_dot` in a graph: the products of all rows with all experts, and a choice among their codes.

    dot      (rows, k), (experts, k, n) -> (rows, experts, n), a quantizer with scales of every expert and channel
    take     the codes of each row's own expert
    select   the code of 0 for rows behind the last group

Every code is that of the one product that training computes, because a quantizer treats each element by itself. The
price is that a graph multiplies every row by every expert.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from qjax.graph.ir import Node
from qjax.graph.unsupported import ConversionError
from qjax.lower.builder import Builder
from qjax.lower.values import Accumulator, Codes, Found, Step, tensor_of, value_of
from qjax.ops.dot import Dot
from qjax.ops.select import Select
from qjax.ops.take import TakeAlong
from qjax.tracing import Equation, Place, Value

_PRODUCT = {
    "lhs_contracting": [1],
    "rhs_contracting": [1],
    "lhs_batch": [],
    "rhs_batch": [],
    "weight": 1,
    "channels": [[1, 0], [2, 2]],
    "rank": 3,
    "permutation": None,
}


def products(builder: Builder, eqn: Equation, found: Sequence[Found], step: Step) -> Accumulator:
    """The sums of all rows and experts."""
    x, w, _, expert, member = found
    (rows, _), (experts, _, features) = eqn.in_shapes[:2]
    kernel = builder.kernel(eqn, 1, value_of(w), step)
    shape = (rows, experts, features)
    acc = builder.accumulator(Dot.name, eqn, [tensor_of(x)], {"kernel": kernel}, dict(_PRODUCT), step, shape)
    names: list[str] = []
    for role, value in (("expert", expert), ("member", member)):
        constant = None if isinstance(value, Codes) else value_of(value)
        name = f"{builder.name(eqn, step)}/{role}"
        names.append(tensor_of(value) if constant is None else builder.integer_constant(name, constant))
    return Accumulator(acc.tensor, ((1, 0), (2, 2)), (names[0], names[1]))


def shape_behind(
    builder: Builder, found: Accumulator, eqn: Equation, constants: Mapping[str, str]
) -> tuple[int, ...] | None:
    """The shape of sums after one more step; None: that of the equation's output."""
    if found.routes is None:
        return None
    for name in constants.values():
        shape = builder.tensors[name].shape
        if len(shape) > 1 and shape[0] != 1:
            raise ConversionError(
                f"{eqn.primitive!r} behind a product of experts has a bound for each row ({shape})",
                "Give it one bound, or one for each channel.",
                where=eqn.where,
            )
    shape = builder.tensors[found.tensor].shape
    return tuple(n or 1 for n in shape)


def chosen(
    builder: Builder,
    found: Accumulator,
    routes: tuple[str, str],
    label: str,
    place: Place,
    value: Value,
    eqn: Equation,
    step: Step,
) -> Codes:
    """The codes of the rows' own experts, in a tensor of that label."""
    shape = builder.tensors[found.tensor].shape
    every = builder.quantize(f"{label}/experts", found.tensor, tuple(n or 1 for n in shape), place, eqn, step)
    own, expert, member = f"{label}/own", *routes
    axes = {"axis": 1, "operand": [0], "indices": [0], "places": [0], "fills": False}
    builder.on_grid(own, value.shape, place, step)
    builder.nodes.append(Node(own, TakeAlong.name, (every, expert), own, {}, axes, eqn.location))
    zero = builder.constant(f"{label}/off", np.zeros((), np.float32))
    builder.on_grid(label, value.shape, place, step)
    builder.nodes.append(Node(label, Select.name, (member, own), label, {"off": zero}, {}, eqn.location))
    return Codes(label)
