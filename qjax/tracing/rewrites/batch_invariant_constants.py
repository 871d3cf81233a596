"""Computes constants that are equal for every example only once, and broadcasts them where they are read.

    s = zeros((batch, d)); t = tanh(s + 1)    ->    s = zeros((1, d)); t = broadcast(tanh(s + 1), (batch, d))

Many models have constants with the batch's size: `jnp.zeros((batch, d))` as the state of a loop, a causal mask combined
by `&`, positions from `jnp.broadcast_to`, a probe repeated by `jnp.tile` and passed through a layer. But a graph takes
any batch size, so its constants must not have the batch's size. This rewriter finds the axes along which a constant
repeats, runs its equations with size 1 along those axes, and broadcasts the result. `unbroadcast_operands` then removes
these broadcasts from the readers.

The rules below define for each primitive how a repeated axis of an operand appears in the result. A primitive without a
rule gets operands of full size, and its result counts as not repeated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import ATOMIC, Equation, Program, Value
from qjax.tracing.rewrites.dataflow import moved_axes
from qjax.tracing.rewrites.inline import inlined

Shape = tuple[int, ...]

_ROWS = frozenset({"softmax", "log_softmax", "logsumexp", "standardize"})
"""Functions of `jax.nn` along an axis, which do not act on each element by itself."""

_ELEMENTWISE = (
    frozenset(
        """abs add add_any and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor ge gt integer_pow
        is_finite le log log1p logistic lt max min mul ne neg not or pow relu relu6 rem round rsqrt select_n sign sin
        sqrt square sub tan tanh xor""".split()  # noqa: SIM905
    )
    | IDENTITIES
    | (ATOMIC - _ROWS)
)
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


@dataclasses.dataclass(frozen=True, eq=False)
class _Rule:
    """How an equation is computed on operands with size 1 along repeated axes.

    result: the shape of its result. function: the result from the operands in the shapes of `operands`.
    """

    result: Shape
    operands: tuple[Shape, ...]
    function: Callable[..., Any]


def share_rows(program: Program) -> Program:
    """Compute such constants with size 1 along the axes on which they repeat."""
    sharing = _Sharing()
    for eqn in program.equations:
        sharing.add(eqn)
    return dataclasses.replace(program, equations=tuple(sharing.equations)) if sharing.changed else program


class _Sharing:
    """small: of constants, their shape with size 1 along repeated axes. rows: those that exist in that shape."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.small: dict[Value, Shape] = {}
        self.rows: dict[Value, Value] = {}
        self.made: dict[Value, Equation] = {}
        self.changed = False

    def add(self, eqn: Equation) -> None:
        rule = self._rule(eqn)
        if rule is not None and rule.result != eqn.out_shapes[0]:
            self.small[eqn.outputs[0]] = rule.result
            self.made[eqn.outputs[0]] = eqn
            if not _moves(eqn):
                row = self._row(eqn.outputs[0])
                repeated = _repeated(eqn.out_shapes[0])
                self.equations += inlined(repeated, [row], eqn.outputs, eqn)[0]
                self.changed = True
                return
        self.equations.append(eqn)

    def _shape(self, value: Value) -> Shape:
        return self.small.get(value, value.shape)

    def _rule(self, eqn: Equation) -> _Rule | None:
        if eqn.body is not None or len(eqn.outputs) != 1 or not all(_is_fixed(value) for value in eqn.inputs):
            return None
        rule = _rule_of(eqn)
        return None if rule is None else rule(eqn, [self._shape(value) for value in eqn.inputs])

    def _row(self, value: Value) -> Value:
        """The constant in its small shape; the equations that compute it are added where they are missing."""
        if value not in self.small:
            return value
        if value not in self.rows:
            eqn = self.made[value]
            rule = self._rule(eqn)
            assert rule is not None
            rows = [self._row(v) for v in eqn.inputs]

            def function(*operands: Any) -> Any:
                pairs = zip(operands, rule.operands, strict=True)
                return rule.function(*(x if x.shape == shape else jnp.broadcast_to(x, shape) for x, shape in pairs))

            found, (row,) = inlined(function, rows, None, eqn)
            self.equations += found
            self.rows[value] = row
        return self.rows[value]


def _moves(eqn: Equation) -> bool:
    """Whether `unbroadcast_operands` looks through the equation by itself."""
    if eqn.primitive in _RESHAPES:
        # a reshape that splits or joins axes, as for attention's heads, stops it
        return moved_axes(eqn) is not None
    return eqn.primitive in ("broadcast_in_dim", "iota")


def _is_fixed(value: Value) -> bool:
    return value.fixed or value.constant is not None


def _repeated(shape: Shape) -> Callable[[Any], Any]:
    return lambda row: lax.broadcast_in_dim(row, shape, range(len(shape)))


# ---------------------------------------------------------------------------- rules


def _rule_of(eqn: Equation) -> Callable[[Equation, Sequence[Shape]], _Rule | None] | None:
    if eqn.primitive in _ELEMENTWISE:
        return _elementwise
    if eqn.primitive in _REDUCTIONS:
        return _reduction
    return _RULES.get(eqn.primitive)


def _bound(eqn: Equation) -> Callable[..., Any]:
    return lambda *operands: eqn.bind(*operands)[0]


def _elementwise(eqn: Equation, shapes: Sequence[Shape]) -> _Rule | None:
    (out,) = eqn.out_shapes
    if any(shape and len(shape) != len(out) for shape in shapes):
        return None
    ranked = [shape for shape in shapes if shape]
    if not ranked:
        return None
    result = tuple(max(sizes) for sizes in zip(*ranked, strict=True))
    return _Rule(result, tuple(result if shape else shape for shape in shapes), _bound(eqn))


def _reduction(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    ((whole,), (small,), axes) = eqn.in_shapes, shapes, eqn.params["axes"]
    operand = tuple(n if axis in axes else own for axis, (n, own) in enumerate(zip(whole, small, strict=True)))
    return _Rule(tuple(n for axis, n in enumerate(operand) if axis not in axes), (operand,), _bound(eqn))


def _move(eqn: Equation, shapes: Sequence[Shape]) -> _Rule | None:
    (out,), whole, small = eqn.out_shapes, eqn.in_shapes[0], shapes[0]
    axes = moved_axes(eqn)
    if axes is None:
        # a reshape that keeps the first axis
        same = bool(whole) and bool(out) and whole[0] == out[0] and small == (1, *whole[1:])
        return _Rule((1, *out[1:]), (small,), lambda x: x.reshape((1, *out[1:]))) if same else None
    result = tuple(1 if axis is None else small[axis] for axis in axes)
    kept = [axis for axis in axes if axis is not None]
    order = (*kept, *(axis for axis in range(len(small)) if axis not in kept))
    return _Rule(result, (small,), lambda x: lax.reshape(lax.transpose(x, order), result))


def _iota(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    (out,), axis, dtype = eqn.out_shapes, int(eqn.params["dimension"]), eqn.params["dtype"]
    result = tuple(n if a == axis else 1 for a, n in enumerate(out))
    return _Rule(result, (), lambda: lax.broadcasted_iota(dtype, result, axis))


def _dot(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    contracting, batch = eqn.params["dimension_numbers"]
    wanted = [list(shape) for shape in shapes]
    for side in (0, 1):
        for axis in contracting[side]:
            wanted[side][axis] = eqn.in_shapes[side][axis]
    for pair in zip(*batch, strict=True):
        size = max(wanted[side][axis] for side, axis in enumerate(pair))
        for side, axis in enumerate(pair):
            wanted[side][axis] = size
    free = [
        [n for axis, n in enumerate(wanted[side]) if axis not in contracting[side] and axis not in batch[side]]
        for side in (0, 1)
    ]
    result = (*(wanted[0][axis] for axis in batch[0]), *free[0], *free[1])
    return _Rule(result, (tuple(wanted[0]), tuple(wanted[1])), _bound(eqn))


def _embed(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    indices, table = shapes[0], eqn.in_shapes[1]
    return _Rule((*indices, *table[1:]), (indices, table), _bound(eqn))


def _gather(eqn: Equation, shapes: Sequence[Shape]) -> _Rule | None:
    numbers, (table, indices) = eqn.params["dimension_numbers"], eqn.in_shapes
    small = (*shapes[1][:-1], indices[-1])
    if tuple(getattr(numbers, "operand_batching_dims", ())):
        return None
    rows = iter(small[:-1])
    result = tuple(n if axis in numbers.offset_dims else next(rows) for axis, n in enumerate(eqn.out_shapes[0]))
    return _Rule(result, (table, small), _bound(eqn))


def _slice(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    (whole,), (small,) = eqn.in_shapes, shapes
    start, limit = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = list(eqn.params["strides"] or (1,) * len(whole))
    result = list(eqn.out_shapes[0])
    for axis, (n, own) in enumerate(zip(whole, small, strict=True)):
        if n != own:
            # one of several equal rows, or none
            result[axis] = min(result[axis], 1)
            start[axis], limit[axis], strides[axis] = 0, result[axis], 1
    return _Rule(tuple(result), (small,), lambda x: lax.slice(x, start, limit, strides))


def _concatenate(eqn: Equation, shapes: Sequence[Shape]) -> _Rule:
    joined = int(eqn.params["dimension"])
    rest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    operands = tuple(
        tuple(whole[axis] if axis == joined else n for axis, n in enumerate(rest)) for whole in eqn.in_shapes
    )
    rest[joined] = eqn.out_shapes[0][joined]
    return _Rule(tuple(rest), operands, lambda *parts: lax.concatenate(parts, joined))


def _normalized(eqn: Equation, shapes: Sequence[Shape]) -> _Rule | None:
    if "layer" not in eqn.params:
        # its rule is that of the equations inside the function
        return None
    known = dict(eqn.params["layer"].attributes)
    whole = {*known["axes"], *known["feature_axes"]}
    operand = tuple(eqn.in_shapes[0][axis] if axis in whole else n for axis, n in enumerate(shapes[0]))
    return _Rule(operand, (operand, *eqn.in_shapes[1:]), _bound(eqn))


_RULES: dict[str, Callable[[Equation, Sequence[Shape]], _Rule | None]] = {
    "broadcast_in_dim": _move,
    "concatenate": _concatenate,
    "dot_general": _dot,
    "embed": _embed,
    "expand_dims": _move,
    "gather": _gather,
    "group_norm": _normalized,
    "instance_norm": _normalized,
    "iota": _iota,
    "layer_norm": _normalized,
    "reshape": _move,
    "rms_norm": _normalized,
    "slice": _slice,
    "squeeze": _move,
    "transpose": _move,
}
"""Primitive -> its rule, for those that do not act on each element by itself."""
