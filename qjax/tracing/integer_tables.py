"""Builds the tables for functions of integers, with one row for each possible integer.

    sin(positions[..., None] / timescale)    ->    take(table, positions), where row i of the table is sin(i /
      timescale)

`rewrites.integers` finds the functions. A table needs the range of its integers, which the recipe declares
(`qjax.integers`) or calibration finds; it is not known when a model is traced, so this is not among `REWRITERS`. A
table is a constant of the model and is quantized like a weight. Its rows are read like those of an embedding, so an
integer out of range reads the nearest row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from qjax.numerics.meshes import in_automatic, whole
from qjax.tracing.composite import composite
from qjax.tracing.numpy_evaluator import rows
from qjax.tracing.program import Composite, Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, written
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.integers import NAME
from qjax.tracing.rewrites.literals import numbers

MOST = 2**24
"""Elements of a table, at most."""


@dataclasses.dataclass(frozen=True)
class Integers:
    """The range of the integers that a function reads.

    It is also the range of a mask, whose numbers are 0 and 1 and may be floats.

    name: an argument of the model ("positions"), or a value that the model computes. low, high: the smallest integer,
    and one more than the greatest. declared: whether the recipe declared it; otherwise calibration found it.
    """

    name: str
    low: int
    high: int
    declared: bool = True

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            if type(bound) is not int or not -(2**31) <= bound < 2**31:
                raise ValueError(f"integers: expected bounds within int32, got {bound!r} for {self.name!r}.")
        if self.low >= self.high:
            raise ValueError(
                f"integers: expected low < high for {self.name!r} (high itself is left out, as in range), got "
                f"{self.low} and {self.high}."
            )

    def check(self, name: str, x: Any) -> None:
        """Raise an error if concrete integers lie outside of the range."""
        if isinstance(x, Tracer) or not np.size(x):
            return
        # NumPy does not know bfloat16 as a float
        if jnp.issubdtype(np.asarray(x).dtype, jnp.floating):
            self._check_mask(name, np.asarray(x))
            return
        low, high = int(np.min(np.asarray(x))), int(np.max(np.asarray(x)))
        if low < self.low or high >= self.high:
            raise ValueError(
                f"Input {name!r}: expected integers from {self.low} to {self.high - 1}, got {low} to {high}. A mask "
                "must consist of 0 and 1. A function of integers becomes a table, so declare the range that it needs: "
                f"qjax.Recipe(integers=(qjax.integers({self.name!r}, {min(low, self.low)}, "
                f"{max(high + 1, self.high)}),))."
            )

    def _check_mask(self, name: str, x: np.ndarray) -> None:
        """Raise an error if a float mask holds other numbers than 0 and 1."""
        wrong = x[(x != 0) & (x != 1)]
        if wrong.size:
            raise ValueError(
                f"Input {name!r}: expected a mask of 0 and 1, got {float(wrong[0])} among {wrong.size} other values of "
                f"{x.size}. The model hides elements where the mask is 0: it computes (1 - mask) times -1e4 or less. "
                "Round the mask first. If it weighs elements rather than hiding them, use a factor of -100."
            )


def integer_roots(program: Program, names: Sequence[str]) -> dict[Value, str]:
    """The integers that functions with a table read: inputs by their names, computed values by their module's.

    Part of an input is named by the input and its position: "positions[0]" is the first coordinate.
    """
    inputs = dict(zip(program.inputs, names, strict=True))
    made = {value: eqn for eqn in program.equations for value in eqn.outputs}
    found: dict[Value, str] = {}
    for eqn in program.equations:
        if eqn.primitive == NAME and (root := eqn.inputs[0]) not in found:
            name = inputs.get(root) or _name_slice(root, made, inputs)
            if name is None:
                maker = made[root]
                name = f"{maker.scope}/{maker.primitive}" if maker.scope else maker.primitive
                count = sum(known.partition("#")[0] == name for known in found.values())
                name = f"{name}#{count + 1}" if count else name
            found[root] = name
    return found


def _name_slice(root: Value, made: Mapping[Value, Equation], inputs: Mapping[Value, str]) -> str | None:
    """The name of a slice of an input, such as "positions[0]"."""
    place = ""
    while (maker := made.get(root)) is not None and maker.primitive in ("slice", "squeeze"):
        if maker.primitive == "slice":
            p = maker.params
            steps = p["strides"] or (1,) * len(p["start_indices"])
            cuts = zip(p["start_indices"], p["limit_indices"], steps, maker.in_shapes[0], strict=True)
            own = [
                f"{start}" if stop == start + 1 else f"{start}:{stop}:{step}" if step != 1 else f"{start}:{stop}"
                for start, stop, step, size in cuts
                if (start, stop, step) != (0, size, 1)
            ]
            place = f"[{', '.join(own)}]{place}"
        root = maker.inputs[0]
    return f"{inputs[root]}{place}" if place and root in inputs else None


def whole_of(name: str) -> str:
    """The argument to which such a part belongs."""
    return name.partition("[")[0]


def observed(program: Program, args: Sequence[Any], names: Sequence[str]) -> dict[str, jax.Array]:
    """The smallest and greatest integer of each root in a call: int32 of shape (2,)."""
    roots = integer_roots(program, names)
    return in_automatic(lambda *args: _observed(program, args, roots), tuple(args), whole) if roots else {}


def _observed(program: Program, args: Sequence[Any], roots: Mapping[Value, str]) -> dict[str, jax.Array]:
    flow, known = Flow(program), dict(zip(program.inputs, args, strict=True))
    found: dict[str, jax.Array] = {}
    for root, name in roots.items():
        env = dict(known)
        for eqn in flow.between([root], program.inputs):
            given = [v.constant if v.constant is not None else env[v] for v in eqn.inputs]
            env.update(zip(eqn.outputs, eqn.bind(*given), strict=True))
        x = jnp.asarray(env[root])
        found[name] = jnp.stack([jnp.min(x), jnp.max(x)]).astype(jnp.int32)
    return found


def with_integers(program: Program, names: Sequence[str], ranges: Mapping[str, Integers]) -> Program:
    """Replace each function of integers by a row lookup in its table.

    Raises:
      ValueError: a range is unknown or would make too large a table.
    """
    roots = integer_roots(program, names)
    if not roots:
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.primitive != NAME:
            equations.append(eqn)
            continue
        known = ranges.get(roots[eqn.inputs[0]])
        if known is None:
            raise ValueError(
                f"This call computes a function of integers {roots[eqn.inputs[0]]!r} ({eqn.location}) that did not "
                "occur when the model was quantized. Call qjax.quantize with a sample that takes this path."
            )
        equations += _lookup(eqn, known)
    return dataclasses.replace(program, equations=tuple(equations))


def _lookup(eqn: Equation, known: Integers) -> list[Equation]:
    group = eqn.source
    assert isinstance(group, Composite)
    root, *parameters = eqn.inputs
    (output,) = eqn.outputs
    shape = (known.high - known.low, *output.shape[len(root.shape) :])
    if int(np.prod(shape, dtype=np.int64)) > MOST:
        raise ValueError(
            f"{eqn.location}: the function of the integers {known.name!r} needs a table of {'x'.join(map(str, shape))} "
            f"numbers, more than {MOST}. Declare a smaller range: qjax.Recipe(integers=(qjax.integers({known.name!r}, "
            "0, n),))."
        )
    number = numbers(Program((), (), group.equations))
    literals: dict[Value, np.ndarray] = {}
    for inner in group.equations:
        for value in inner.outputs:
            array = None if value is output else number(value)
            if array is not None:
                literals[value] = array
    integers = np.arange(known.low, known.high)

    def table(*values: Any) -> np.ndarray:
        given = dict(zip(parameters, map(np.asarray, values), strict=True))
        return _finite(rows(group.equations, root, output, {**literals, **given}, integers), eqn, known)

    before: list[Equation] = []
    if parameters:
        whole = Value(shape, np.dtype(np.float32), fixed=True)
        source = _Table(group.equations, tuple(parameters), (whole,), table, eqn, integers)
        before.append(Equation("integer_table", tuple(parameters), (whole,), {}, eqn.scope, eqn.location, source))
    else:
        whole = Value(shape, np.dtype(np.float32), table())
    index, own = root, list(group.equations)
    if known.low != 0:
        low = known.low
        shift, (index,) = inlined(lambda x: x - np.asarray(low, x.dtype), [root], None, eqn)
        before += shift
        own = [written("add", lambda x: x + jnp.asarray(low, x.dtype), index, root, eqn), *own]
    return [*before, composite("embed", own, (index, whole, *parameters), (output,), {"integers": known.name})]


def _finite(table: np.ndarray, eqn: Equation, known: Integers) -> np.ndarray:
    """The table with infinities only at its ends, where its codes will be clamped."""
    missing = np.isnan(table)
    if missing.any():
        first = known.low + int(np.argmax(missing.reshape(len(table), -1).any(axis=1)))
        raise ValueError(
            f"{eqn.location}: the function of the integers {known.name!r} is NaN at {first}, but every integer from "
            f"{known.low} to {known.high - 1} needs a value. Guard the function (jnp.maximum, jnp.where), or declare "
            f"another range: qjax.Recipe(integers=(qjax.integers({known.name!r}, low, high),))."
        )
    finite = table[np.isfinite(table)]
    if not finite.size:
        raise ValueError(
            f"{eqn.location}: the function of the integers {known.name!r} is infinite for each of them, so it has no "
            "table."
        )
    return np.clip(table, finite.min(), finite.max())


@dataclasses.dataclass(frozen=True, eq=False)
class _Table(Composite):
    """A table made of parameters: computed on the host, with the same bits inside jit; differentiated as the function.

    table: parameters -> rows. function: the equation of the function itself. integers: one for each row.
    """

    table: Any = None
    function: Any = None
    integers: Any = None

    def bind(self, args: Sequence[Any]) -> list[Any]:
        if not any(isinstance(x, Tracer) for x in args):
            return [jnp.asarray(self.table(*args))]
        (output,) = self.outputs
        result = jax.ShapeDtypeStruct(output.shape, np.dtype(np.float32))

        @jax.custom_jvp
        def made(*values: Any) -> Any:
            return jax.pure_callback(self.table, result, *values, vmap_method="sequential")

        @made.defjvp
        def tangent(values: Any, tangents: Any) -> Any:
            return made(*values), jax.jvp(self._float, values, tangents)[1]

        return [made(*args)]

    def _float(self, *values: Any) -> Any:
        root = self.function.inputs[0]
        size = max(1, int(np.prod(root.shape)))
        count = -(-len(self.integers) // size)
        filled = np.pad(self.integers, (0, count * size - len(self.integers)), mode="edge")
        chunks = jnp.asarray(filled.reshape(count, *root.shape), root.dtype)
        found = lax.map(lambda chunk: self.function.bind(chunk, *values)[0], chunks)
        return found.reshape(count * size, *self.outputs[0].shape[1:])[: len(self.integers)].astype(jnp.float32)
