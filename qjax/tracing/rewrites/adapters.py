"""Merges adapters such as LoRA into the weight beside them: x W + g(x) becomes x (W + D) for a low-rank, linear g.

g is recognised by what it computes: it begins with a product of the base's own input and a parameter that is an
adapter, has only steps that are linear in x, and ends where its result is added to the base's. D is g applied to the
unit vectors.

Any other adapter (with a dropout before it, another input, a function in between) stays as it is in the model.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.dot import Dot
from qjax.tracing.composite import Computed
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.frozen import ADAPTED, made_of, move_of

_SUMS = ("add", "add_any")
_LINEAR = ("dot_general", "mul", "div", "neg")


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter. branch: its equations, from x to delta. base: the product beside it. join: where both are added.

    between: the equations from the base's product to the join. whole: the operand of the join on the base's side.
    """

    x: Value
    branch: tuple[Equation, ...]
    delta: Value
    base: Equation
    weight: int
    between: tuple[Equation, ...]
    whole: Value
    join: Equation

    @property
    def leaves(self) -> tuple[Value, ...]:
        """The parameters and constants that the branch reads."""
        made = {value for eqn in self.branch for value in eqn.outputs}
        read = (value for eqn in self.branch for value in eqn.inputs)
        return tuple(dict.fromkeys(v for v in read if v not in made and v is not self.x and v.constant is None))

    def matrix(self, *leaves: jax.Array) -> jax.Array:
        """D, in the shape of the base's weight."""
        numbers = self.base.params["dimension_numbers"]
        summed = [int(axis) for axis in numbers[0][1 - self.weight]]
        shape = self.x.shape
        free = [axis for axis in range(len(shape)) if axis not in summed]
        depth, rows = (math.prod(shape[axis] for axis in axes) for axes in (summed, free))
        count = -(-depth // max(rows, 1))
        unit = jnp.eye(count * rows, depth, dtype=self.x.dtype).reshape(count, *(shape[a] for a in (*free, *summed)))
        unit = jnp.moveaxis(unit, range(1, len(shape) + 1), [1 + axis for axis in (*free, *summed)])
        # one unit vector at a time, because each needs as much memory as the adapter itself
        found = lax.map(lambda x: self._response(x, dict(zip(self.leaves, leaves, strict=True))), unit)
        of_x, of_w = (Dot().channels(self.base, index) for index in (1 - self.weight, self.weight))
        order = [out for out, _ in sorted(of_x, key=lambda pair: pair[1])]
        kept = [out for out, _ in sorted(of_w, key=lambda pair: pair[1])]
        found = jnp.transpose(found, (0, *(1 + axis for axis in (*order, *kept))))
        sizes = [self.base.out_shapes[0][axis] for axis in kept]
        found = found.reshape(count * rows, *sizes)[:depth].reshape(*(shape[axis] for axis in summed), *sizes)
        axes = [int(axis) for axis in numbers[0][self.weight]]
        axes += [axis for _, axis in sorted(of_w, key=lambda pair: pair[1])]
        return jnp.moveaxis(found, range(found.ndim), axes)

    def _response(self, x: jax.Array, known: Mapping[Value, Any]) -> jax.Array:
        """The branch applied to x, in the shape of the base's product."""
        env: dict[Value, Any] = {**known, self.x: x}
        for eqn in self.branch:
            given = [v.constant if v.constant is not None else env[v] for v in eqn.inputs]
            env.update(zip(eqn.outputs, eqn.bind(*given), strict=True))
        found = env[self.delta]
        for eqn in reversed(self.between):
            if eqn.primitive == "transpose":
                found = jnp.transpose(found, [int(axis) for axis in np.argsort(eqn.params["permutation"])])
            elif eqn.primitive not in _SUMS:
                found = found.reshape(eqn.in_shapes[0])
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Added:
    """A weight with its adapter added."""

    adapter: Adapter

    def __call__(self, w: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        return [w + self.adapter.matrix(*leaves).astype(w.dtype)]


def adapter_of(eqn: Equation) -> Adapter | None:
    """The adapter that an equation adds to a weight."""
    return eqn.source.function.adapter if eqn.primitive == ADAPTED else None


def find_adapters(program: Program, adapters: Collection[Value]) -> list[Adapter]:
    """The adapters of a program, without those of its bodies. adapters: the parameters that belong to adapters."""
    tainted = made_of(program, adapters)
    made = {value: eqn for eqn in program.equations for value in eqn.outputs}
    readers: dict[Value, int] = {}
    for value in (*(v for eqn in program.equations for v in eqn.inputs), *program.outputs):
        readers[value] = readers.get(value, 0) + 1
    branches: dict[Value, tuple[Value, tuple[Equation, ...]]] = {}
    found: list[Adapter] = []
    for eqn in program.equations:
        data = [v for v in eqn.inputs if not v.fixed and v.constant is None]
        inside = [v for v in data if v in branches and readers[v] == 1]
        if eqn.body is not None or len(eqn.outputs) != 1:
            continue
        if eqn.primitive in _SUMS and len(data) == 2 and len(inside) == 1:
            whole = data[1 - data.index(inside[0])]
            adapter = _beside(made, branches[inside[0]], inside[0], whole, eqn)
            found += [] if adapter is None else [adapter]
        elif len(data) == 1 and inside and (eqn.primitive in _LINEAR or move_of(eqn) is not None):
            x, before = branches[data[0]]
            branches[eqn.outputs[0]] = x, (*before, eqn)
        elif len(data) == 1 and eqn.primitive == "dot_general" and any(v in tainted for v in eqn.inputs):
            branches[eqn.outputs[0]] = data[0], (eqn,)
    return found


def _beside(
    made: Mapping[Value, Equation],
    branch: tuple[Value, tuple[Equation, ...]],
    delta: Value,
    whole: Value,
    join: Equation,
) -> Adapter | None:
    """The adapter, if the other operand of its sum is a product of the same input, up to a bias and moves."""
    between: list[Equation] = []
    value = whole
    while (eqn := made.get(value)) is not None and eqn.primitive != "dot_general":
        data = [v for v in eqn.inputs if not v.fixed and v.constant is None]
        moves = len(eqn.inputs) == 1 and move_of(eqn) is not None
        if len(data) != 1 or not (moves or (eqn.primitive in _SUMS and data[0].shape == eqn.out_shapes[0])):
            return None
        between.append(eqn)
        value = data[0]
    x, equations = branch
    if eqn is None or sum(v.fixed for v in eqn.inputs) != 1 or delta.shape != whole.shape:
        return None
    weight = [v.fixed for v in eqn.inputs].index(True)
    numbers, first = eqn.params["dimension_numbers"], equations[0]
    own = [v.fixed for v in first.inputs].index(False)
    same = _uncast(made, x) is _uncast(made, eqn.inputs[1 - weight]) and x.shape == eqn.inputs[1 - weight].shape
    inner = first.params["dimension_numbers"]
    batched = any((*numbers[1][0], *inner[1][0]))
    if not same or batched or set(inner[0][own]) != set(numbers[0][1 - weight]):
        return None
    return Adapter(x, equations, delta, eqn, weight, tuple(reversed(between)), whole, join)


def _uncast(made: Mapping[Value, Equation], value: Value) -> Value:
    while (eqn := made.get(value)) is not None and (
        eqn.primitive in IDENTITIES
        or (eqn.primitive == "convert_element_type" and eqn.inputs[0].is_float and value.is_float)
    ):
        value = eqn.inputs[0]
    return value


def joined(program: Program, adapters: Collection[Value]) -> dict[Value, Value]:
    """The sums in which adapters end -> what remains without the adapters; bodies are included."""
    found: dict[Value, Value] = {}
    _with_adapters(program, adapters, True, found)
    return found


def with_adapters_within(program: Program, adapters: Collection[Value], *, dropped: bool = False) -> Program:
    """Add adapters to their weights, in bodies too.

    dropped: leave out adapters that are zeros, instead of adding them.
    """
    return _with_adapters(program, adapters, dropped, {})


def _with_adapters(program: Program, adapters: Collection[Value], dropped: bool, ends: dict[Value, Value]) -> Program:
    if not adapters:
        return program
    equations: list[Equation] = []
    tainted = made_of(program, adapters)
    for eqn in program.equations:
        if eqn.body is not None:
            inner = {own for v, own in zip(eqn.inputs, eqn.body.inputs, strict=True) if v in tainted and own.fixed}
            eqn = dataclasses.replace(eqn, body=_with_adapters(eqn.body, inner, dropped, ends))
        equations.append(eqn)
    # an adapter may be cast or scaled after the product of its weight
    equations.sort(key=lambda eqn: not all(eqn.fixed))
    program = dataclasses.replace(program, equations=tuple(equations))
    while found := find_adapters(program, adapters):
        ends[found[0].join.outputs[0]] = found[0].whole
        program = _within(program, found[0], dropped)
    return program


def _within(program: Program, adapter: Adapter, dropped: bool) -> Program:
    base, weight = adapter.base, adapter.weight
    old = base.inputs[weight]
    group = {*adapter.branch, adapter.join}
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn in group:
            continue
        if eqn is base and not dropped:
            new = Value(old.shape, old.dtype, fixed=True)
            inputs = (old, *adapter.leaves)
            computed = Computed((base,), inputs, (new,), _Added(adapter))
            equations.append(
                dataclasses.replace(base, primitive=ADAPTED, inputs=inputs, outputs=(new,), source=computed)
            )
            eqn = dataclasses.replace(base, inputs=tuple(new if v is old else v for v in base.inputs))
        equations.append(eqn)
    return _replace_value(
        dataclasses.replace(program, equations=tuple(equations)), adapter.join.outputs[0], adapter.whole
    )


def _replace_value(program: Program, old: Value, new: Value) -> Program:
    equations = [
        dataclasses.replace(eqn, inputs=tuple(new if v is old else v for v in eqn.inputs)) if old in eqn.inputs else eqn
        for eqn in program.equations
    ]
    outputs: Sequence[Value] = [new if v is old else v for v in program.outputs]
    return dataclasses.replace(program, equations=tuple(equations), outputs=tuple(outputs))
