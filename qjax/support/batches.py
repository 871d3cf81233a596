"""The three forms of batches that every function of qjax accepts.

| form | one batch | the model is called with |
| --- | --- | --- |
| a list of arrays | an array | the array |
| a list of tuples | a tuple | the tuple's items, as the arguments of the call |
| a list of anything, with `inputs` | whatever `inputs` takes | what `inputs(batch)` returns: an array or a tuple |

"List" means any iterable, such as a generator or a data loader. A single array, tuple or dict counts as a list of one.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Inputs = Callable[[Any], Any]
"""A function from a batch to the arguments of the model's call, as an array or a tuple."""

_FORMS = (
    "a list of arrays, a list of tuples of the call's arguments, or a list of anything with inputs= "
    "(a function from a batch to the call's arguments)"
)


WITHOUT_LABELS = "Where a batch also holds labels, inputs=lambda batch: batch[0] leaves them out."
"""The cure for too many arguments."""


class Batches:
    """Yields `(batch, arguments)` for every batch.

    Args:
      batches, inputs: see the module. what: the name of the calling function, for messages.

    Raises:
      TypeError: immediately, if these are not batches. ValueError: at the end of the iteration, if there was no batch.
    """

    def __init__(self, batches: Any, inputs: Inputs | None, what: str) -> None:
        if inputs is not None and not callable(inputs):
            raise TypeError(
                f"{what}: expected inputs= to be a function from a batch to the call's arguments, such as "
                f"lambda batch: batch[0], got {brief(inputs)}."
            )
        if isinstance(batches, (tuple, Mapping)) or hasattr(cast("Any", batches), "shape"):
            batches = [batches]
        if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
            raise TypeError(f"{what}: expected batches ({_FORMS}), got {brief(batches)}.")
        self._batches, self._inputs, self._what = cast("Iterable[Any]", batches), inputs, what

    def __iter__(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        empty = True
        for batch in self._batches:
            empty = False
            yield batch, arguments_of(batch if self._inputs is None else self._inputs(batch), self._what)
        if empty:
            raise ValueError(f"{self._what}: expected at least one batch, got none.")

    def __length_hint__(self) -> int:
        return operator.length_hint(self._batches)

    def arguments(self) -> Iterator[tuple[Any, ...]]:
        """Yield only the arguments of every call."""
        return (args for _, args in self)


def batch_size(args: tuple[Any, ...]) -> int:
    """The length of the first array's first axis."""
    return next((int(arg.shape[0]) for arg in args if getattr(arg, "ndim", 0)), 1)


def arguments_of(batch: Any, what: str = "", *, traced: bool = False) -> tuple[Any, ...]:
    """A batch as the tuple of a call's arguments.

    A tuple holds the arguments; anything else (an array, a dict, a list) is a single argument. An argument is an array,
    a Python value, None, or a dict, list or tuple of these.

    Args:
      what: the name of the calling function, for messages.
      traced: whether arrays of a surrounding `jit` are allowed, which is not the case if their numbers are read.
    """
    name = f"{what}: e" if what else "E"
    args = cast("tuple[Any, ...]", batch) if isinstance(batch, tuple) else (batch,)
    if batch is None:
        raise TypeError(f"{name}xpected a batch to be an array or a tuple of the call's arguments, got None.")
    for leaf in jax.tree.leaves(args):
        if not isinstance(leaf, (jax.Array, np.ndarray, bool, int, float, str)):
            raise TypeError(
                f"{name}xpected a batch to be an array or a tuple of the call's arguments (arrays, or dicts, lists, "
                f"tuples of them), got {brief(leaf)}."
            )
        if isinstance(leaf, Tracer) and what and not traced:
            raise TypeError(traced_message(what, "a traced array as a batch"))
    return jax.tree.map(lambda x: as_array(x) if isinstance(x, np.ndarray) else x, args)


def refuse_trace(what: str) -> None:
    """Raise inside a function that JAX is tracing, where no number can be read."""
    # Inside a trace even constants become traced arrays.
    if isinstance(jnp.zeros(()), Tracer):
        raise TypeError(traced_message(what, "a call within a function that JAX is tracing"))


def traced_message(what: str, came: str) -> str:
    """The error for tracers where numbers are read."""
    return (
        f"{what}: expected arrays with numbers, got {came}. {what} reads numbers in Python, so it cannot run inside "
        "jit, grad, vmap or scan. Call it outside."
    )


def brief(value: Any) -> str:
    """Describe an argument briefly for messages: its type, or the shapes of its arrays."""
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if type(value) in (list, tuple):
        items = cast("list[Any]", value)
        inner = ", ".join(map(brief, items[:4])) + (", ..." if len(items) > 4 else "")
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return "{" + ", ".join(f"{key!r}: {brief(item)}" for key, item in list(mapping.items())[:4]) + "}"
    return type(value).__name__


def as_array(x: Any) -> jax.Array:
    """A JAX array; if JAX has no 64-bit integers, values that need them are an error instead of being truncated."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size:
        kept = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
        low, high = int(x.min()), int(x.max())
        if low < kept.min or high > kept.max:
            raise ValueError(
                f"Expected integers within {kept.dtype}, got {low} to {high}, which JAX would cut to their low bits."
            )
    return jnp.asarray(x)
