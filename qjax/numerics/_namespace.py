"""Lets one formula serve two array libraries: numpy on the host, `jax.numpy` inside a trace.

Integer constants are derived from scales on the host at conversion, and inside `jit` in the exact forward, and their
bits must agree. So the integer code of this package is written once, for a namespace `xp` that is either library.
"""

import contextlib
from collections.abc import Generator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def traced(*values: Any) -> bool:
    """Whether any of the values is a tracer."""
    return any(isinstance(v, Tracer) for v in values)


def host_or_trace(*values: Any) -> ModuleType:
    """`jax.numpy` where a value is traced, numpy otherwise: concrete JAX arrays are read to the host."""
    return jnp if traced(*values) else np


def like_inputs(*values: Any) -> ModuleType:
    """`jax.numpy` where a value is a JAX array (concrete or traced), numpy otherwise."""
    return jnp if any(isinstance(v, jax.Array) for v in values) else np


@contextlib.contextmanager
def wide(xp: ModuleType) -> Generator[None]:
    """Allow 64-bit integers of `xp` for the duration of a block, whatever the value of `jax_enable_x64`.

    numpy warns when a *scalar* integer operation wraps (an array operation never does); the wraps in this
    package are intended, so the warning is off inside the block.
    """
    if xp is jnp:
        with jax.enable_x64(True):
            yield
    else:
        with np.errstate(over="ignore"):
            yield
