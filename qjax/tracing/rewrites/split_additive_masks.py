"""Splits additive masks that are combined with a bias: T5's relative positions, ALiBi, a causal mask in a float table.

    scores + (bias + where(m, 0, -1e9))   ->   where(m, scores + bias, finfo.min)

A softmax hides numbers of -1e4 or less. If a tensor mixes such numbers with ordinary ones, it is split here into its
ordinary numbers and a boolean mask of their places. `find_softmax` reads the second form, so quantizers and observers
see only the ordinary numbers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Composite, Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, pruned
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.softmax import HIDDEN, added_mask, unmasked

_MOVES = IDENTITIES | frozenset(
    """broadcast_in_dim reshape squeeze expand_dims transpose slice rev convert_element_type concatenate gather
    dynamic_slice""".split()  # noqa: SIM905
)
"""Primitives that move elements; a mask moves with its numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """A tensor split into ordinary numbers and a mask.

    ordinary: its ordinary numbers, and anything where the mask hides them; None means zero everywhere. mask: bool, True
    at ordinary numbers; a plain True or False is a mask that is the same everywhere.
    """

    ordinary: Value | None
    mask: Value | bool


def part_masks(program: Program) -> Program:
    """Turn masks that were combined with a bias into choices before each softmax."""
    if not any(eqn.primitive == "exp" for eqn in program.equations):
        return program
    found = _Masks(program)
    for eqn in program.equations:
        if eqn.primitive == "exp":
            found.visit(eqn)
    return found.rewritten()


class _Masks:
    """The splits found so far.

    parts: of values that were examined. made: equation -> the new ones after it. chosen: value -> the equations that
    compute it as a choice and replace its own.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.number = numbers(program)
        self.parts: dict[Value, _Parts] = {}
        self.made: dict[Equation | None, list[Equation]] = {}
        self.chosen: dict[Value, list[Equation]] = {}

    def visit(self, eqn: Equation) -> None:
        exponent = self.flow.plain(eqn.inputs[0])
        if exponent.equation is not None and exponent.equation.primitive == "sub":
            exponent = self.flow.plain(exponent.equation.inputs[0])
        # the last mask needs no splitting, because `softmax` reads it directly
        value, _ = unmasked(self.flow, exponent.value)
        source = self.flow.made.get(value)
        if source is None or value in self.chosen or not value.is_float or len(source.outputs) != 1:
            return
        parts = self.of(value)
        if not isinstance(parts.mask, Value) or parts.ordinary is None:
            return

        def choose(mask: Any, ordinary: Any) -> Any:
            return lax.select(mask, ordinary, jnp.full(ordinary.shape, jnp.finfo(ordinary.dtype).min, ordinary.dtype))

        operands = [self.spread(part, value.shape, source) for part in (parts.mask, parts.ordinary)]
        self.chosen[value] = inlined(choose, operands, [value], source)[0]

    def rewritten(self) -> Program:
        if not self.chosen:
            return self.program
        equations = list(self.made.get(None, ()))
        for eqn in self.program.equations:
            choice = self.chosen.get(eqn.outputs[0]) if eqn.outputs else None
            equations += [*(() if choice else (eqn,)), *self.made.get(eqn, ()), *(choice or ())]
        behind = set(self.flow.between(list(self.chosen), ()))
        added = {new for news in self.made.values() for new in news}
        return pruned(dataclasses.replace(self.program, equations=tuple(equations)), behind | added)

    # ------------------------------------------------------------------ taking apart

    def of(self, value: Value) -> _Parts:
        """The parts of a value; a value that hides nothing is its own ordinary part."""
        if value not in self.parts:
            self.parts[value] = self._of(value)
        return self.parts[value]

    def _of(self, value: Value) -> _Parts:
        whole, eqn = _Parts(value, True), self.flow.made.get(value)
        if not value.is_float:
            return whole
        number = self.flow.number(value)
        if number is not None:
            return _Parts(None, number > HIDDEN) if number == 0 or number <= HIDDEN else whole
        rule = None if eqn is None or isinstance(eqn.source, Composite) else _RULES.get(eqn.primitive)
        parts = whole if eqn is None or rule is None else rule(self, eqn)
        if parts.mask is not True or not self.flow.closed(value):
            return parts if parts.mask is not True or parts.ordinary is None else whole
        return self._literal(value, eqn)

    def _literal(self, value: Value, eqn: Equation | None) -> _Parts:
        """A table of numbers that is a literal or computed from literals only."""
        array = self.number(value)
        if array is None or not (hidden := array <= HIDDEN).any():
            return _Parts(value, True)
        ordinary = Value(value.shape, value.dtype, np.where(hidden, np.zeros_like(array), array))
        return _Parts(ordinary, Value(value.shape, np.dtype(bool), ~hidden))

    def spread(self, value: Value, shape: tuple[int, ...], like: Equation) -> Value:
        """A part broadcast to the shape of its tensor, as late as possible: combined parts keep axes of one element.

        A constant that is repeated for every example is not allowed in a graph for any batch size.
        """
        return value if value.shape == shape else self.new(lambda x: jnp.broadcast_to(x, shape), [value], like)

    def new(self, function: Callable[..., Any], inputs: Sequence[Value], like: Equation) -> Value:
        """The result of a function, computed directly after the equation `like`."""
        equations, (result,) = inlined(function, inputs, None, like)
        self.made.setdefault(like, []).extend(equations)
        return result

    def both(self, function: Callable[..., Any], a: Value | bool, b: Value | bool, like: Equation) -> Value | bool:
        """Two masks combined; masks that are the same everywhere need no equation."""
        if isinstance(a, Value) and isinstance(b, Value):
            return self.new(function, [a, b], like)
        known, other = (a, b) if isinstance(a, bool) else (b, a)
        deciding = function is jnp.logical_or
        return deciding if known is deciding else other

    def whole(self, parts: _Parts, value: Value, like: Equation) -> Value:
        """The ordinary part as a value."""
        if parts.ordinary is not None:
            return parts.ordinary
        return self.new(lambda: jnp.zeros((1,) * len(value.shape), value.dtype), [], like)

    def mask(self, parts: _Parts, value: Value, like: Equation) -> Value:
        """The mask as a value."""
        if isinstance(parts.mask, Value):
            return parts.mask
        everywhere = parts.mask
        return self.new(lambda: jnp.full((1,) * len(value.shape), everywhere), [], like)

    # ------------------------------------------------------------------ one rule for each kind of equation

    def added(self, eqn: Equation) -> _Parts:
        a, b = (self.of(v) for v in eqn.inputs)
        mask = self.both(jnp.logical_and, a.mask, b.mask, eqn)
        kept = [part.ordinary for part in (a, b) if part.ordinary is not None]
        return _Parts(self.new(jnp.add, kept, eqn) if len(kept) == 2 and mask is not True else (*kept, None)[0], mask)

    def subtracted(self, eqn: Equation) -> _Parts:
        """x - (1 - m) * 1e9, and x - y where x is hidden."""
        x, y = eqn.inputs
        a = self.of(x)
        found = self.hiding(eqn, y, -1)
        if found is not None:
            ordinary = None if a.ordinary is None else self.spread(a.ordinary, eqn.out_shapes[0], eqn)
            return _Parts(ordinary, self.both(jnp.logical_and, a.mask, found, eqn))
        if a.mask is True:
            return _Parts(eqn.outputs[0], True)
        return _Parts(self.new(jnp.subtract, [self.whole(a, x, eqn), y], eqn), a.mask)

    def least(self, eqn: Equation) -> _Parts:
        a, b = (self.of(v) for v in eqn.inputs)
        mask = self.both(jnp.logical_and, a.mask, b.mask, eqn)
        if mask is True:
            return _Parts(eqn.outputs[0], True)
        operands = [self.whole(part, value, eqn) for part, value in zip((a, b), eqn.inputs, strict=True)]
        return _Parts(self.new(jnp.minimum, operands, eqn), mask)

    def greatest(self, eqn: Equation) -> _Parts:
        a, b = (self.of(v) for v in eqn.inputs)
        if a.mask is True and b.mask is True:
            return _Parts(eqn.outputs[0], True)
        if a.mask is False or b.mask is False:
            # one operand is hidden everywhere, so the result is the other one
            return b if a.mask is False else a
        ordinary = [self.whole(part, value, eqn) for part, value in zip((a, b), eqn.inputs, strict=True)]
        masks = [self.mask(part, value, eqn) for part, value in zip((a, b), eqn.inputs, strict=True)]

        def choose(x: Any, y: Any, m: Any, n: Any) -> Any:
            return jnp.where(m, jnp.where(n, jnp.maximum(x, y), x), y)

        mask = self.both(jnp.logical_or, a.mask, b.mask, eqn)
        return _Parts(self.new(choose, [*ordinary, *masks], eqn), mask)

    def selected(self, eqn: Equation) -> _Parts:
        which, *cases = eqn.inputs
        if len(cases) != 2 or which.dtype != np.bool_ or which.shape != eqn.out_shapes[0]:
            return _Parts(eqn.outputs[0], True)
        no, yes = (self.of(v) for v in cases)
        if no.mask is True and yes.mask is True:
            return _Parts(eqn.outputs[0], True)
        if no.mask is False:
            return _Parts(yes.ordinary, self.both(jnp.logical_and, which, yes.mask, eqn))
        if yes.mask is False:
            return _Parts(
                no.ordinary, self.both(jnp.logical_and, self.new(lax.bitwise_not, [which], eqn), no.mask, eqn)
            )
        if no.mask is True:
            mask = self.both(jnp.logical_or, self.new(lax.bitwise_not, [which], eqn), yes.mask, eqn)
        elif yes.mask is True:
            mask = self.both(jnp.logical_or, which, no.mask, eqn)
        else:
            masks = [self.mask(part, value, eqn) for part, value in zip((no, yes), cases, strict=True)]
            mask = self.new(lambda w, no, yes: jnp.where(w, yes, no), [which, *masks], eqn)
        if no.ordinary is None and yes.ordinary is None:
            return _Parts(None, mask)
        ordinary = [self.whole(part, value, eqn) for part, value in zip((no, yes), cases, strict=True)]
        return _Parts(self.new(lambda w, x, y: jnp.where(w, y, x), [which, *ordinary], eqn), mask)

    def scaled(self, eqn: Equation) -> _Parts:
        """(1 - m) * -1e9, and m * -1e9 where m hides."""
        found = self.hiding(eqn, eqn.outputs[0], 1)
        return _Parts(eqn.outputs[0], True) if found is None else _Parts(None, found)

    def hiding(self, eqn: Equation, value: Value, sign: int) -> Value | None:
        """The mask that an added tensor of zeros and large numbers represents, in that tensor's shape."""
        found = added_mask(self.flow, value, len(value.shape), sign)
        if found is None:
            return None
        axes, shape = found.axes, value.shape

        def spread(mask: Any) -> Any:
            kept = sorted(axis for axis in axes if axis is not None)
            mask = lax.squeeze(mask, [axis for axis in range(mask.ndim) if axis not in kept])
            mask = lax.transpose(mask, [kept.index(axis) for axis in axes if axis is not None])
            mask = lax.broadcast_in_dim(mask, shape, [place for place, axis in enumerate(axes) if axis is not None])
            return jnp.logical_not(mask) if found.inverted else mask

        return self.new(spread, [found.value], eqn)

    def moved(self, eqn: Equation) -> _Parts:
        count = len(eqn.inputs) if eqn.primitive == "concatenate" else 1
        data, rest = eqn.inputs[:count], eqn.inputs[count:]
        parts = [self.of(v) for v in data]
        if len(eqn.outputs) != 1 or all(part.mask is True for part in parts):
            return _Parts(eqn.outputs[0], True)
        ordinary, mask = None, False
        if any(part.ordinary is not None for part in parts):
            operands = [self.spread(self.whole(p, v, eqn), v.shape, eqn) for p, v in zip(parts, data, strict=True)]
            ordinary = self._repeat_move(eqn, (*operands, *rest), eqn.outputs[0].dtype)
        if any(part.mask is not False for part in parts):
            masks = [self.spread(self.mask(p, v, eqn), v.shape, eqn) for p, v in zip(parts, data, strict=True)]
            # a cast between floats keeps the mask
            cast = eqn.primitive == "convert_element_type" or eqn.primitive in IDENTITIES
            mask = masks[0] if cast else self._repeat_move(eqn, (*masks, *rest), np.dtype(bool))
        return _Parts(ordinary, mask)

    def _repeat_move(self, eqn: Equation, inputs: tuple[Value, ...], dtype: Any) -> Value:
        """The same move applied to other tensors."""
        result = Value(eqn.out_shapes[0], dtype, fixed=all(v.fixed or v.constant is not None for v in inputs))
        self.made.setdefault(eqn, []).append(dataclasses.replace(eqn, inputs=inputs, outputs=(result,), function=None))
        return result


_RULES: dict[str, Callable[[_Masks, Equation], _Parts]] = {
    "add": _Masks.added,
    "add_any": _Masks.added,
    "sub": _Masks.subtracted,
    "min": _Masks.least,
    "max": _Masks.greatest,
    "select_n": _Masks.selected,
    "mul": _Masks.scaled,
    **dict.fromkeys(_MOVES, _Masks.moved),
}
