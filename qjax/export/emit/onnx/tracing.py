"""Traces kernels, and checks that they treat each example in the same way for every batch size.

JAX traces a kernel with fixed shapes. The traced batch size is therefore a prime number that divides no other size, so
that every multiple of it is a size that depends on the batch. Two checks prove this. A trace with another prime must
differ only in these sizes, and traces with batches of 1 and 2 must have the same arithmetic. Kernels that depend on an
element's position in the tensor, or that treat a single row differently, fail.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from qjax.export.emit.onnx.views import NeedsBatch, Shape
from qjax.numerics.calls import names_kept

PRIME = 1009
_OTHERS = (1, 2, 2003)
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "slice", "pjit", "jit")

Argument = tuple[Shape, str]
"""Shape and dtype; sizes that are multiples of `PRIME` depend on the batch."""


def trace(function: Callable[..., Any], arguments: Sequence[Argument]) -> ClosedJaxpr:
    """The closed jaxpr of a function of arrays; some functions remain calls, see `numerics.calls`.

    Raises:
      NeedsBatch: its arithmetic depends on the size of the batch.
    """
    traced = _trace(function, arguments, PRIME)
    if any(size % PRIME == 0 for shape, _ in arguments for size in shape if size):
        sized = list(_signature(traced.jaxpr, traced.consts, PRIME))
        for batch in _OTHERS:
            other = _trace(function, arguments, batch)
            if batch > 2:
                same = list(_signature(other.jaxpr, other.consts, batch)) == sized
            else:
                same = list(_signature(other.jaxpr, other.consts)) == list(_signature(traced.jaxpr, traced.consts))
            if not same:
                raise NeedsBatch
    return traced


def _trace(function: Callable[..., Any], arguments: Sequence[Argument], batch: int) -> ClosedJaxpr:
    def size(n: int) -> int:
        return n // PRIME * batch if n and n % PRIME == 0 else n

    given = [jax.ShapeDtypeStruct(tuple(map(size, shape)), np.dtype(dtype)) for shape, dtype in arguments]
    try:
        with names_kept():
            # a new function, because JAX caches the trace of one that it has seen, with or without named calls
            return jax.make_jaxpr(lambda *arrays: function(*arrays))(*given)
    except OverflowError:
        # the kernel computes positions in the tensor, which exceed int32 for such a large batch
        raise NeedsBatch from None


def _signature(jaxpr: Jaxpr, consts: Sequence[Any], batch: int | None = None) -> Iterator[Any]:
    """The content of a program. batch: with all sizes, those that depend on it as ("batch", multiple)."""

    def sizes(shape: Shape) -> list[Any]:
        return [("batch", n // batch) if batch and n and n % batch == 0 else n for n in shape]

    for value in consts:
        array = np.asarray(value)
        yield array.dtype.name, array.tobytes()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        literals = [np.asarray(atom.val).tolist() for atom in equation.invars if isinstance(atom, Literal)]
        if batch:
            yield [sizes(variable.aval.shape) for variable in equation.outvars]  # pyright: ignore[reportAttributeAccessIssue]
        if name not in _SHAPES:
            yield name, literals, equation.params.get("length")
        elif literals:
            yield literals
        for inner in _inner(equation.params.values()):
            if isinstance(inner, ClosedJaxpr):
                yield from _signature(inner.jaxpr, inner.consts, batch)
            else:
                yield from _signature(inner, (), batch)


def _inner(values: Any) -> Iterator[Any]:
    """The programs among an equation's parameters."""
    for value in values:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)
