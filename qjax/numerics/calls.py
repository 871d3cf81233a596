"""Functions that JAX traces once for equal arguments.

The layers of a deep network are mostly equal. A function under `jax.jit` is traced, differentiated and lowered once for
equal shapes, dtypes and static arguments. Its later uses cost a call in the program, which XLA inlines.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer

_P = ParamSpec("_P")
_R = TypeVar("_R")


def traced_once(*static: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function of pytrees of arrays whose positional arguments `static` are hashable values.

    Without a tracer among the arguments, the function runs as it is: on concrete arrays nothing is compiled. All
    arguments must be positional.
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
