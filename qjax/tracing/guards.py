"""Drops run-time checks of a model, such as `equinox.error_if`: a `cond` that returns its operands or raises.

    cond(bad, raise_error, lambda x: x, x)    ->    x

A graph calls no Python, so the failing branch is left out, as `jax.debug.print` is. A branch counts as failing if it
reads nothing that the other branch returns and calls a pure Python function that raises an error. To find out whether
it raises, the function is called once with zeros. Any other `cond` is rejected later.
"""

from typing import Any

import numpy as np

_CUSTOM = "custom_jvp_call"
"""`equinox` hides its checks from derivatives in calls of this primitive, which add nothing else."""


def returned_operands(eqn: Any) -> list[int] | None:
    """For a run-time check: per result, the index of the operand that it returns. None for any other equation."""
    if eqn.primitive.name == "cond":
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        passing = [found for branch in branches if (found := _passed_on(branch)) is not None]
        if not passing or any(found != passing[0] for found in passing):
            return None
        failing = [branch for branch in branches if _passed_on(branch) is None]
        if not all(_fails(branch, passing[0]) for branch in failing):
            return None
        return [1 + index for index in passing[0]]
    if eqn.primitive.name == _CUSTOM:
        inner = eqn.params["call_jaxpr"].jaxpr
        return _passed_on(inner) if any(returned_operands(own) is not None for own in inner.eqns) else None
    return None


def _passed_on(jaxpr: Any) -> list[int] | None:
    """Per result of a function that returns some of its arguments, checked or not: which argument. None otherwise."""
    places: dict[Any, int] = {var: index for index, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        found = returned_operands(eqn) or []
        for var, index in zip(eqn.outvars, found, strict=False):
            if not hasattr(eqn.invars[index], "val") and eqn.invars[index] in places:
                places[var] = places[eqn.invars[index]]
    if any(hasattr(var, "val") or var not in places for var in jaxpr.outvars):
        return None
    return [places[var] for var in jaxpr.outvars]


def _fails(branch: Any, returned: list[int]) -> bool:
    """Whether a branch raises an error and reads none of the operands in `returned`."""
    operands = {branch.invars[index] for index in returned}
    if any(not hasattr(var, "val") and var in operands for eqn in branch.eqns for var in eqn.invars):
        return False
    if any(not hasattr(var, "val") and var in operands for var in branch.outvars):
        return False
    call = next((eqn for eqn in branch.eqns if eqn.primitive.name == "pure_callback"), None)
    return call is not None and _raises(call)


def _raises(call: Any) -> bool:
    try:
        call.params["callback"](*(np.zeros(var.aval.shape, var.aval.dtype) for var in call.invars))
    except Exception:
        return True
    return False
