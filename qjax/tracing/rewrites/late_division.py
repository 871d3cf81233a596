"""Moves the division of a softmax before the product with the values; memory-efficient attention divides after it.

    (exp(x - m) @ v) / sum(exp(x - m))   ->   (exp(x - m) / sum(exp(x - m))) @ v

Both are the same function of real numbers, and `find_softmax` reads the second form. Axes may be moved and merged on
the way to the division, differently for its two operands. The product may omit some of the exponentials, such as that
of an attention sink. See Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, pruned
from qjax.tracing.rewrites.inline import inlined

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})

Part = tuple[str, tuple[int, ...], int]
"""A factor of an axis: which tensor it comes from, which of its axes, and its size.

"e": the exponentials, "s": those that are summed, "v": the values, "": elements that repeat.
"""

Splits = dict[Part, tuple[int, int]]
"""Factors that a reshape splits: the sizes of the outer and of the inner part."""

Axis = tuple[Part, ...]
"""The factors of one axis, the slowest first; an axis of one element has none."""


def divide_first(program: Program) -> Program:
    """Divide such softmaxes before the product."""
    if not any(eqn.primitive == "exp" for eqn in program.equations):
        return program
    flow = Flow(program)
    found = {eqn: new for eqn in program.equations if (new := _replace_division(flow, eqn)) is not None}
    if not found:
        return program
    equations = tuple(new for eqn in program.equations for new in found.get(eqn, (eqn,)))
    behind = flow.between([value for eqn in found for value in eqn.inputs], ())
    return pruned(dataclasses.replace(program, equations=equations), set(behind))


def _replace_division(flow: Flow, eqn: Equation) -> list[Equation] | None:
    """The replacement of a division, or of a product with a reciprocal."""
    if eqn.primitive not in ("div", "mul"):
        return None
    for whole, by in (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive == "mul" else (eqn.inputs,):
        after, product = _chain(flow, whole)
        if product is None or product.primitive != "dot_general" or not _read_once(flow, [product, *after]):
            continue
        moves, total = _chain(flow, by)
        if eqn.primitive == "mul":
            if total is None or total.primitive != "div" or flow.number(total.inputs[0]) != 1:
                continue
            more, total = _chain(flow, total.inputs[1])
            moves = [*more, *moves]
        if total is None or total.primitive != "reduce_sum":
            continue
        for side in (0, 1):
            before, power = _chain(flow, product.inputs[side])
            if power is None or power.primitive != "exp" or any(0 in shape for shape in product.in_shapes):
                continue
            if not flow.same(total.inputs[0], power.outputs[0]):
                continue
            if _same_rows(power, total, moves, product, side, before, after):
                return _divide_before_product(eqn, power, total, product, side, before, after)
    return None


def _read_once(flow: Flow, equations: Sequence[Equation]) -> bool:
    values = [eqn.outputs[0] for eqn in equations]
    return all(len(flow.readers.get(value, ())) == 1 and value not in flow.program.outputs for value in values)


def _chain(flow: Flow, value: Value) -> tuple[list[Equation], Equation | None]:
    """The moves and casts that end in a value, in order, and the equation before them."""
    chain: list[Equation] = []
    while (eqn := flow.made.get(value)) is not None and _is_move(eqn):
        chain.insert(0, eqn)
        value = eqn.inputs[0]
    return chain, eqn


def _is_move(eqn: Equation) -> bool:
    if eqn.primitive == "convert_element_type":
        return eqn.inputs[0].is_float and eqn.outputs[0].is_float
    moves = eqn.primitive in _RESHAPES or eqn.primitive in ("transpose", "broadcast_in_dim", "slice", "copy")
    return len(eqn.inputs) == 1 and (moves or eqn.primitive in IDENTITIES)


def _same_rows(
    power: Equation,
    total: Equation,
    moves: Sequence[Equation],
    product: Equation,
    side: int,
    before: Sequence[Equation],
    after: Sequence[Equation],
) -> bool:
    """Whether each element of the product is divided by the sum of exactly the exponentials that it sums."""
    splits: Splits = {}

    def compared() -> bool:
        summed = {int(axis) for axis in total.params["axes"]}
        rank = len(power.out_shapes[0])
        own = _name_factors(["s" if axis in summed else "e" for axis in range(rank)], power.out_shapes[0], splits)
        divisor = _move_axes([axis for place, axis in enumerate(own) if place not in summed], moves)
        operand = _move_axes(own, before)
        contracting, batch = (tuple(part[side]) for part in product.params["dimension_numbers"])
        if any(part[0] != "s" for axis in contracting for part in operand[axis]):
            return False
        shape = product.in_shapes[1 - side]
        other = _name_factors(["v"] * len(shape), shape, splits)
        taken, shared = (tuple(part[1 - side]) for part in product.params["dimension_numbers"])
        free = [axis for place, axis in enumerate(operand) if place not in (*contracting, *batch)]
        rest = [axis for place, axis in enumerate(other) if place not in (*taken, *shared)]
        dividend = _move_axes([*(operand[axis] for axis in batch), *(free + rest if side == 0 else rest + free)], after)
        return len(dividend) == len(divisor) and all(map(_fits, dividend, divisor))

    while True:
        try:
            return compared()
        except _Split as split:
            if split.sizes is None:
                return False
            splits[split.part] = split.sizes


class _Split(Exception):
    """A reshape splits a factor. sizes: of the outer and the inner part; None if the factor cannot be followed."""

    def __init__(self, part: Part, outer: int) -> None:
        super().__init__()
        self.part = part
        # a factor without an axis belongs to none of the original axes: repeated elements, or a slice
        whole = bool(part[1]) and outer > 1 and part[2] % outer == 0
        self.sizes = (outer, part[2] // outer) if whole else None


def _fits(dividend: Axis, divisor: Axis) -> bool:
    """Whether the two axes run over the same rows; the divisor may be repeated along the values."""
    if not divisor:
        return all(part[0] == "v" for part in dividend)
    if len(dividend) != len(divisor):
        return False
    return all(a == b or (a[0] == "v" and b[0] == "" and a[2] == b[2]) for a, b in zip(dividend, divisor, strict=True))


def _name_factors(names: Sequence[str], shape: Sequence[int], splits: Splits) -> list[Axis]:
    def parts(part: Part) -> Axis:
        if part not in splits:
            return (part,)
        name, place, _ = part
        return tuple(inner for i, size in enumerate(splits[part]) for inner in parts((name, (*place, i), size)))

    axes = enumerate(zip(names, shape, strict=True))
    return [parts((name, (place,), size)) if size != 1 else () for place, (name, size) in axes]


def _move_axes(axes: Sequence[Axis], moves: Sequence[Equation]) -> list[Axis]:
    """The axes after some moves."""
    found = list(axes)
    for eqn in moves:
        (before,), (shape,) = eqn.in_shapes, eqn.out_shapes
        if eqn.primitive == "transpose":
            found = [found[axis] for axis in eqn.params["permutation"]]
        elif eqn.primitive == "broadcast_in_dim":
            new: list[Axis] = [(("", (), size),) if size != 1 else () for size in shape]
            for axis, place in zip(found, eqn.params["broadcast_dimensions"], strict=True):
                new[place] = axis or new[place]
            found = new
        elif eqn.primitive == "slice":
            found = [axis if a == b else _cut_axis(axis, b) for axis, a, b in zip(found, before, shape, strict=True)]
        elif eqn.primitive in _RESHAPES:
            found = _group_factors([part for axis in found for part in axis], shape)
    return found


def _cut_axis(axis: Axis, size: int) -> Axis:
    """Some of the elements along an axis, possibly any of those that are summed."""
    if any(part[0] != "s" for part in axis):
        raise _Split(("", (), 1), 1)
    return (("s", (), size),) if size != 1 else ()


def _group_factors(parts: list[Part], shape: Sequence[int]) -> list[Axis]:
    """Factors in order, grouped into the axes of a shape."""
    axes: list[Axis] = []
    for size in shape:
        count, product = 0, 1
        while product < size:
            part = parts[count]
            if size % (product * part[2]):
                raise _Split(part, math.gcd(part[2], size // product))
            count, product = count + 1, product * part[2]
        axes.append(tuple(parts[:count]))
        parts = parts[count:]
    return axes


def _divide_before_product(
    eqn: Equation,
    power: Equation,
    total: Equation,
    product: Equation,
    side: int,
    before: Sequence[Equation],
    after: Sequence[Equation],
) -> list[Equation]:
    axes = tuple(int(axis) for axis in total.params["axes"])

    def divide(e: jax.Array, s: jax.Array) -> jax.Array:
        return e / jnp.expand_dims(s, axes).astype(e.dtype)

    equations, (value,) = inlined(divide, [power.outputs[0], total.outputs[0]], None, eqn)
    for move in before:
        equations.append(_repeat_equation(move, (value,)))
        value = equations[-1].outputs[0]
    inputs = (value, product.inputs[1]) if side == 0 else (product.inputs[0], value)
    equations.append(_repeat_equation(product, inputs))
    for move in after:
        equations.append(_repeat_equation(move, (equations[-1].outputs[0],)))
    equations[-1] = dataclasses.replace(equations[-1], outputs=eqn.outputs)
    return equations


def _repeat_equation(eqn: Equation, inputs: tuple[Value, ...]) -> Equation:
    """The same equation on other inputs."""
    (output,) = eqn.outputs
    return dataclasses.replace(eqn, inputs=inputs, outputs=(Value(output.shape, output.dtype),), function=None)
