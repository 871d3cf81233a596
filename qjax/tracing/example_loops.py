"""Reads loops over the examples of a batch, such as `jax.lax.map(f, batch)`, as `jax.vmap` of their body.

    lax.map(f, batch)    ->    vmap(f)(batch)

A scan without a carry computes every row independently. If its length is the batch size, it would need quantizers for
each example and would fit one batch size only, whereas the vmapped body has neither problem. Which lengths follow the
batch size is seen by comparing with a second trace of the call, for a batch of another size.
"""

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from qjax.numerics.meshes import shape_of
from qjax.tracing.loop_params import with_counts


class _Opened(threading.local):
    """The equations that are currently read in this way, by identity."""

    loops: frozenset[int] = frozenset()


_opened = _Opened()


def loops_of(closed: Any) -> list[Any]:
    """The scans without a carry in a jaxpr, in order, including those inside calls and other loops."""
    return [
        eqn for eqn in _walk(closed.jaxpr) if eqn.primitive.name == "scan" and with_counts(eqn.params)["num_carry"] == 0
    ]


def followers(loops: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The loops whose length follows the batch size; others: the same loops, traced for another batch size."""
    if len(loops) != len(others):
        return []
    # JAX has one jaxpr for a function that is called twice, so its loop must follow the batch in both calls.
    steady = {id(a) for a, b in zip(loops, others, strict=True) if a.params["length"] == b.params["length"]}
    return [eqn for eqn in loops if id(eqn) not in steady]


@contextlib.contextmanager
def opened(loops: Sequence[Any]) -> Generator[None]:
    """A context in which a jaxpr with these loops over the examples is read."""
    outer = _opened.loops
    _opened.loops = outer | {id(eqn) for eqn in loops}
    try:
        yield
    finally:
        _opened.loops = outer


def body_of(eqn: Any) -> Any:
    """All iterations of such a loop at once, as a closed jaxpr; None for any other equation."""
    if id(eqn) not in _opened.loops:
        return None
    consts = with_counts(eqn.params)["num_consts"]
    axes = [None] * consts + [0] * (len(eqn.invars) - consts)
    step = jaxpr_as_fun(eqn.params["jaxpr"])
    whole = jax.vmap(step, in_axes=axes, axis_size=eqn.params["length"])
    return jax.make_jaxpr(whole)(*(shape_of(var.aval) for var in eqn.invars))


def _walk(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for part in param if isinstance(param, (tuple, list)) else (param,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner)
