"""Evaluates a jaxpr in NumPy, bit for bit as XLA would but without compiling it.

Compiling an integer kernel takes XLA seconds, whereas computing a small tensor with it takes microseconds. NumPy has
the same integers, and IEEE 754 defines the result of a float addition, product, quotient, square root, comparison and
conversion:

    evaluate(jax.make_jaxpr(lambda x: x * x + 1)(np.int8(3)), np.int8(3))  ->  [np.int8(10)]

A primitive whose result depends on the implementation (`exp`, a sum or product of float arrays, random bits, an
unstable order) raises `Unsupported`. XLA may fuse a float product and a sum, which rounds once instead of twice, so its
result may differ from the one here; the kernels of qjax prevent this fusion. Subnormal floats count as zeros here, as
they do where XLA compiles for a CPU.

A program is read once: each equation becomes a function of arrays plus the positions of its operands and results, so a
run is a loop over those.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from qjax.jaxprs.rules import (
    ELEMENTWISE,
    INTEGERS_ONLY,
    LEAST,
    RULES,
    Arrays,
    is_float,
    takes_subnormals_for_zero,
    unsupported,
    without_subnormals,
)
from qjax.numerics.calls import called_program
from qjax.support.errors import Unsupported

Rule = Callable[..., Any]
Otherwise = Callable[[Any, Arrays], Sequence[Any]]
Program = Callable[[ClosedJaxpr, Arrays], list[Any]]
"""Runs a program inside another."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """One equation. run: computes it from its operands. reads: their positions; writes: those of its typed results.

    unread: positions that nothing reads after this step.
    """

    name: str
    run: Callable[[Arrays], Sequence[Any]]
    reads: Sequence[int]
    writes: Sequence[tuple[int, tuple[int, ...], Any]]
    unread: Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """size: number of positions; constants and inputs come first. literals: position and array of each literal."""

    size: int
    literals: Sequence[tuple[int, np.ndarray]]
    steps: Sequence[_Step]
    results: Sequence[int]


class Evaluator:
    """Evaluates programs, and reads each of them only once.

    Args:
      rules: rules for further primitives, or replacements of the default ones: functions of the type of the first
        output,
        the primitive's parameters and the operands.
      otherwise: computes the equations that have no rule.
    """

    def __init__(self, rules: Mapping[str, Rule] | None = None, otherwise: Otherwise | None = None) -> None:
        self.rules, self.otherwise = dict(rules or {}), otherwise
        self._plans: weakref.WeakKeyDictionary[Any, _Plan] = weakref.WeakKeyDictionary()

    def evaluate(self, program: ClosedJaxpr, *arguments: Any) -> list[Any]:
        """The results of a program for these arrays, one array per output.

        Args:
          program: any jaxpr, also with calls, branches and loops.
          arguments: one array for each of its inputs, with its shape and dtype.

        Raises:
          Unsupported: a primitive without a rule, whose result IEEE 754 and integer arithmetic do not define.
        """
        # NumPy need not warn: overflow and division by zero have the same results as in JAX
        with np.errstate(all="ignore"):
            return self._program(program, [_array(x) for x in arguments])

    def equation(self, eqn: Any, operands: Arrays) -> list[np.ndarray]:
        """The results of one equation of a jaxpr for these arrays."""
        with np.errstate(all="ignore"):
            return [np.asarray(result) for result in self.rule(eqn)(operands)]

    def _program(self, program: ClosedJaxpr, arguments: Arrays) -> list[Any]:
        jaxpr = program.jaxpr
        plan = self._plans.get(jaxpr)
        if plan is None:
            plan = self._plans[jaxpr] = self._read(jaxpr)
        values: list[Any] = [None] * plan.size
        values[: len(program.consts)] = [_array(x) for x in program.consts]
        values[len(program.consts) : len(program.consts) + len(arguments)] = arguments
        for place, value in plan.literals:
            values[place] = value
        for step in plan.steps:
            results = step.run([values[place] for place in step.reads])
            for (place, shape, dtype), made in zip(step.writes, results, strict=True):
                result = made if type(made) is np.ndarray else _array(made)
                if result.shape != shape or result.dtype != dtype:
                    # if the evaluator disagrees with JAX about a type, one of its rules is wrong
                    raise AssertionError(
                        f"evaluator: expected {step.name} to have the type {dtype}{list(shape)}, got {result.dtype}"
                        f"{list(result.shape)}."
                    )
                values[place] = result
            # free tensors that nothing reads any more, because those of a network would fill the memory
            for place in step.unread:
                values[place] = None
        return [values[place] for place in plan.results]

    def _read(self, jaxpr: Any) -> _Plan:
        places: dict[Any, int] = {v: n for n, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        literals: list[tuple[int, np.ndarray]] = []
        size = len(places)

        def place_of(atom: Any) -> int:
            nonlocal size
            if not isinstance(atom, Literal):
                return places[atom]
            size += 1
            aval: Any = atom.aval
            literals.append((size - 1, np.asarray(atom.val, aval.dtype)))
            return size - 1

        read: list[tuple[Any, list[int], list[tuple[int, tuple[int, ...], Any]]]] = []
        last: dict[int, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            reads = [place_of(atom) for atom in eqn.invars]
            last.update((place, number) for place in reads)
            writes: list[tuple[int, tuple[int, ...], Any]] = []
            for variable in eqn.outvars:
                places[variable] = size
                writes.append((size, tuple(getattr(variable.aval, "shape", ())), getattr(variable.aval, "dtype", None)))
                size += 1
            read.append((eqn, reads, writes))
        results = [place_of(atom) for atom in jaxpr.outvars]
        unread: list[list[int]] = [[] for _ in read]
        for place, number in last.items():
            if place not in results:
                unread[number].append(place)
        steps = [
            _Step(eqn.primitive.name, self.rule(eqn), reads, writes, dropped)
            for (eqn, reads, writes), dropped in zip(read, unread, strict=True)
        ]
        return _Plan(size, literals, steps, results)

    def rule(self, eqn: Any) -> Callable[[Arrays], Sequence[Any]]:
        """The function that computes an equation from its operands; what can be decided once is decided here."""
        name, params = eqn.primitive.name, eqn.params
        if (inner := called_program(eqn)) is not None:
            return functools.partial(self._program, inner)
        out = eqn.outvars[0].aval if eqn.outvars else None
        if name in self.rules:
            return _called(self.rules[name], out, params)
        if name in _CONTROL:
            control = _CONTROL[name]
            return lambda inputs: control(eqn, inputs, self._program)
        own = _own(eqn, out)
        if own is None:
            if self.otherwise is None:
                raise unsupported(name, [atom.aval for atom in eqn.invars])
            return functools.partial(self.otherwise, eqn)
        otherwise = self.otherwise
        if otherwise is None:
            return own

        def run(inputs: Arrays) -> Sequence[Any]:
            try:
                return own(inputs)
            except Unsupported:
                return otherwise(eqn, inputs)

        return run


def _called(rule: Rule, out: Any, params: Any) -> Callable[[Arrays], Sequence[Any]]:
    def run(inputs: Arrays) -> Sequence[Any]:
        results = rule(out, params, *inputs)
        return results if isinstance(results, list) else [results]

    return run


def _own(eqn: Any, out: Any) -> Callable[[Arrays], Sequence[Any]] | None:
    """The equation's rule in `rules.py`, or None if there is none."""
    name = eqn.primitive.name
    operands = [atom.aval for atom in eqn.invars]
    # NumPy has no random keys and other types of JAX alone, and it stores integers of 2 and 4 bits in whole bytes
    if not all(map(_is_numpy, (*operands, out))):
        return None
    made = None
    if name in ELEMENTWISE and not (name in INTEGERS_ONLY and any(is_float(aval.dtype) for aval in operands)):
        function, dtype = ELEMENTWISE[name], out.dtype
        made = lambda inputs: [np.asarray(function(*inputs)).astype(dtype, copy=False)]  # noqa: E731
    elif name in RULES:
        made = _called(RULES[name], out, eqn.params)
    dtypes = [aval.dtype for aval in (*operands, out) if aval is not None]
    if made is None or not takes_subnormals_for_zero(name, dtypes):
        return made
    return _flushed(made, [aval.dtype.name in LEAST for aval in operands], out.dtype.name in LEAST)


def _flushed(
    made: Callable[[Arrays], Sequence[Any]], inputs_can: Sequence[bool], output_can: bool
) -> Callable[[Arrays], Sequence[Any]]:
    """The function with subnormal floats replaced by zeros in its inputs and its output, if there can be any."""
    if not output_can and not any(inputs_can):
        return made

    def run(inputs: Arrays) -> Sequence[Any]:
        results = made([without_subnormals(x) if can else x for x, can in zip(inputs, inputs_can, strict=True)])
        return [without_subnormals(y) for y in results] if output_can else results

    return run


def _is_numpy(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return aval is None
    return isinstance(dtype, np.dtype) and not ("int" in dtype.name and dtype.kind not in "iu")


def _array(x: Any) -> Any:
    """As a NumPy array, except for random keys."""
    if type(x) is np.ndarray:
        return x
    is_key = jax.dtypes.issubdtype(getattr(x, "dtype", None) or np.float32, jax.dtypes.extended)
    return x if is_key else np.asarray(x)


_exact = Evaluator()
evaluate = _exact.evaluate
evaluate_equation = _exact.equation


def evaluate_elementwise(primitive: str, *operands: np.ndarray) -> np.ndarray:
    """The result of an elementwise primitive without parameters on integers or booleans, which broadcast.

    Raises:
      KeyError: the primitive is not such a function.
    """
    with np.errstate(all="ignore"):
        return np.asarray(ELEMENTWISE[primitive](*operands))


def run_in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `jax.jit` would run it, but computed in NumPy: traced once for each shape, never compiled.

    Its results are NumPy arrays. For tracers, the function itself is called.
    """
    traced: dict[Any, tuple[ClosedJaxpr, Any]] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return function(*arguments)
        types = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        key = structure, types, jax.config.jax_enable_x64
        if key not in traced:
            traced[key] = jax.make_jaxpr(function, return_shape=True)(*arguments)
        program, shapes = traced[key]
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(program, *leaves))

    return call


# ---------------------------------------------------------------------------- control flow


def _cond(eqn: Any, inputs: Arrays, run: Program) -> Sequence[Any]:
    branches = eqn.params["branches"]
    return run(branches[min(max(int(inputs[0]), 0), len(branches) - 1)], inputs[1:])


def _while(eqn: Any, inputs: Arrays, run: Program) -> Sequence[Any]:
    p = eqn.params
    for_test, for_body = inputs[: p["cond_nconsts"]], inputs[p["cond_nconsts"] :][: p["body_nconsts"]]
    carry = list(inputs[p["cond_nconsts"] + p["body_nconsts"] :])
    while run(p["cond_jaxpr"], [*for_test, *carry])[0]:
        carry = run(p["body_jaxpr"], [*for_body, *carry])
    return carry


def _scan(eqn: Any, inputs: Arrays, run: Program) -> Sequence[Any]:
    """Ranks tell constants, carries and slices apart, because jax's parameters for them differ by version."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    inner, outer = body.jaxpr.outvars, eqn.outvars
    carries = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(inner, outer, strict=True))
    sliced = sum(x.ndim != len(v.aval.shape) for x, v in zip(inputs, body.jaxpr.invars, strict=True))
    first = len(inputs) - sliced
    consts, carry, slices = inputs[: first - carries], list(inputs[first - carries : first]), inputs[first:]
    stacked = [np.zeros(v.aval.shape, v.aval.dtype) for v in outer[carries:]]
    turns = range(length)
    for turn in reversed(turns) if eqn.params["reverse"] else turns:
        results = run(body, [*consts, *carry, *(x[turn] for x in slices)])
        carry = results[:carries]
        for whole, part in zip(stacked, results[carries:], strict=True):
            whole[turn] = part
    return [*carry, *stacked]


_CONTROL: Mapping[str, Callable[[Any, Arrays, Program], Sequence[Any]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    # every branch computes the same numbers; the others do so in ways that are fast in XLA
    "platform_index": lambda eqn, inputs, run: [np.int32(eqn.params["platforms"].index(None))],
    "optimization_barrier": lambda eqn, inputs, run: inputs,
}
