"""Loops over the examples of a batch, as `jax.lax.map(f, batch)` writes them, are read as `jax.vmap` of their body.

A scan that carries nothing computes every row on its own. Where its length follows the size of the batch it would have
quantizers for each example, and no form for another batch. All rows at once have both. What follows the batch shows in
a second trace of the call, for a batch of another size.
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
    """The equations that are read so right now, by identity."""

    loops: frozenset[int] = frozenset()


_opened = _Opened()


def loops_of(closed: Any) -> list[Any]:
    """The scans of a jaxpr that carry nothing, in order, those inside of calls and of other loops included."""
    return [
        eqn for eqn in _walk(closed.jaxpr) if eqn.primitive.name == "scan" and with_counts(eqn.params)["num_carry"] == 0
    ]


def followers(loops: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Those of `loops` whose length follows the batch; others: the same loops for a batch of another size."""
    if len(loops) != len(others):
        return []
    # JAX keeps one jaxpr of a function that is called twice: its loop has to follow the batch in both calls
    steady = {id(a) for a, b in zip(loops, others, strict=True) if a.params["length"] == b.params["length"]}
    return [eqn for eqn in loops if id(eqn) not in steady]


@contextlib.contextmanager
def opened(loops: Sequence[Any]) -> Generator[None]:
    """While a jaxpr is read that has these loops over the examples."""
    outer = _opened.loops
    _opened.loops = outer | {id(eqn) for eqn in loops}
    try:
        yield
    finally:
        _opened.loops = outer


def body_of(eqn: Any) -> Any:
    """All iterations of such a loop at once, as a closed jaxpr; None for other equations."""
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
