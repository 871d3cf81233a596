"""Functions that remain one call in a trace: traced once for equal arguments, or recognisable by their name.

The layers of a deep network are mostly equal. A function under `jax.jit` is traced, differentiated and lowered once for
equal shapes, dtypes and static arguments. Its later uses cost a call in the program, which XLA inlines.

A writer of files translates a trace operation by operation. It can do better if it knows what a group of operations
computes: a rounded shift, for example, is one rounding of a float64. Inside of `names_kept`, such a function is a call
with a name.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Named:
    """The identity of a named call. function: its name. static: the arguments that are no arrays, in their order."""

    function: str
    static: tuple[Any, ...]


CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""The primitives that only call a program, and the parameter that holds it."""


def called_program(equation: Any) -> ClosedJaxpr | None:
    """The program that an equation of a trace calls; None if it does anything else."""
    if equation.primitive.name not in CALLS:
        return None
    program = equation.params[CALLS[equation.primitive.name]]
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


NAMED_FUNCTIONS: set[str] = set()
"""The names of all functions that `named` decorates."""

_NAMED: dict[str, Named] = {}
_KEPT = contextvars.ContextVar("names_kept", default=False)


@contextlib.contextmanager
def names_kept() -> Generator[None]:
    """A context in which `named` functions of traced arrays are calls in the trace. Their operations are the same."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


def are_names_kept() -> bool:
    """Whether this is inside of `names_kept`."""
    return _KEPT.get()


def named_call(name: str) -> Named | None:
    """The named function that a call in a trace belongs to; None for any other call."""
    return _NAMED.get(name)


def named(*static: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function of pytrees of arrays whose positional arguments `static` are hashable values.

    Outside of `names_kept` the function runs unchanged. Inside, all arguments must be positional.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        NAMED_FUNCTIONS.add(function.__name__)

        @functools.cache
        def as_call(values: tuple[Any, ...]) -> Callable[..., Any]:
            key = f"{function.__name__}#{len(_NAMED)}"
            _NAMED[key] = Named(function.__name__, values)

            def run(*arrays: Any) -> Any:
                given = list(arrays)
                for index, value in zip(static, values, strict=True):
                    given.insert(index, value)
                return function(*given)  # pyright: ignore[reportCallIssue]

            run.__name__ = key
            return jax.jit(run)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _KEPT.get() or kwargs:
                return function(*args, **kwargs)
            arrays = [arg for index, arg in enumerate(args) if index not in static]
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
                return function(*args, **kwargs)
            return as_call(tuple(args[index] for index in static))(*arrays)

        return call

    return decorate


@named(1, 2)
def within(x: Any, low: int, high: int) -> Any:
    """x itself; tells writers of files that it lies in [low, high]."""
    return x


def traced_once(*static: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function of pytrees of arrays whose positional arguments `static` are hashable values.

    Without a tracer among the arguments the function runs unchanged, so that nothing is compiled for concrete arrays.
    All arguments must be positional.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        as_call = jax.jit(function, static_argnums=static)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            arrays = [arg for index, arg in enumerate(args) if index not in static]
            traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))
            return as_call(*args, **kwargs) if traced else function(*args, **kwargs)

        return call

    return decorate
