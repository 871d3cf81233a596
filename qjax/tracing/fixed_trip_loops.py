"""Turns while loops whose trip count is known at trace time into scans of that length.

    while i < 5: x = f(x); i = i + 1    ->    scan of f over 5 iterations

These are `lax.while_loop` with a counter, and `lax.fori_loop` with a bound that JAX does not treat as static. The
condition reads only numbers that start as constants and that each iteration computes from constants, so the iterations
can be counted before any input is known. A scan has a gradient and an integer form; a while loop has neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from qjax.numerics.meshes import shape_of

MOST = 4096
"""The trip count is given up beyond this number of iterations."""


def scanned(eqn: Any, constants: Sequence[Any], run: Callable[[Any, Sequence[Any]], list[Any]]) -> Any:
    """The equation of a while loop as a closed jaxpr of the same inputs and outputs, or None if data decide its length.

    Args:
      constants: per input, its value if it is known. run: computes an equation's outputs from its inputs.
    """
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    fixed, first = _counts(eqn)
    given = list(constants[fixed:first])
    count = _iterations(_Part(cond, constants[:fixed]), _Part(body, given), constants[first:], run)
    if count is None:
        return None
    step = jaxpr_as_fun(body)

    def loop(*inputs: Any) -> Any:
        held = inputs[fixed:first]
        if count == 0:
            return inputs[first:]
        return lax.scan(lambda carry, _: (tuple(step(*held, *carry)), None), inputs[first:], None, length=count)[0]

    return jax.make_jaxpr(loop)(*(shape_of(var.aval) for var in eqn.invars))


def _counts(eqn: Any) -> tuple[int, int]:
    """The positions, among the inputs, of the first constant of the body and of the first value of the state."""
    fixed = eqn.params["cond_nconsts"]
    return fixed, fixed + eqn.params["body_nconsts"]


class _Part:
    """The condition or the body: a jaxpr whose first inputs are the same in every iteration."""

    def __init__(self, closed: Any, given: Sequence[Any]) -> None:
        self.jaxpr = closed.jaxpr
        self.given = dict(zip(self.jaxpr.invars, given, strict=False))
        self.given |= dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.state = self.jaxpr.invars[len(given) :]

    def reads(self, outputs: Sequence[int]) -> tuple[set[object], list[Any]]:
        """What some outputs depend on: inputs, and equations in order."""
        needed = {self.jaxpr.outvars[i] for i in outputs if not hasattr(self.jaxpr.outvars[i], "val")}
        kept: list[Any] = []
        for eqn in reversed(self.jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                kept.append(eqn)
                needed |= {var for var in eqn.invars if not hasattr(var, "val")}
        return needed.intersection([*self.jaxpr.invars, *self.jaxpr.constvars]), kept[::-1]

    def known(self, outputs: Sequence[int]) -> bool:
        """Whether some outputs depend only on known numbers and on the state."""
        inputs, eqns = self.reads(outputs)
        return all(var in self.state or _is_number(self.given[var]) for var in inputs) and not any(
            eqn.effects for eqn in eqns
        )

    def run(self, outputs: Sequence[int], state: dict[int, Any], bind: Any) -> list[Any]:
        """Compute some outputs from the numbers of the state that they need."""
        env = {**self.given, **{self.state[i]: value for i, value in state.items()}}

        def value(var: Any) -> Any:
            return var.val if hasattr(var, "val") else env[var]

        for eqn in self.reads(outputs)[1]:
            env.update(zip(eqn.outvars, bind(eqn, [value(var) for var in eqn.invars]), strict=True))
        return [value(self.jaxpr.outvars[i]) for i in outputs]


def _iterations(cond: _Part, body: _Part, initial: Sequence[Any], bind: Any) -> int | None:
    """How often the body runs, or None if that is not known."""
    counters: set[int] = set()
    new = _positions(cond, [0])
    while new - counters:
        counters |= new
        new = _positions(body, sorted(counters))
    order = sorted(counters)
    if not (cond.known([0]) and body.known(order) and all(_is_number(initial[i]) for i in order)):
        return None
    with jax.ensure_compile_time_eval():
        state = {i: initial[i] for i in order}
        for count in range(MOST + 1):
            if not bool(np.asarray(cond.run([0], state, bind)[0])):
                return count
            state = dict(zip(order, body.run(order, state, bind), strict=True))
    return None


def _positions(part: _Part, outputs: Sequence[int]) -> set[int]:
    """The positions in the state on which some outputs depend."""
    inputs, _ = part.reads(outputs)
    return {i for i, var in enumerate(part.state) if var in inputs}


def _is_number(value: Any) -> bool:
    return value is not None and not isinstance(value, Tracer)
