"""Computes small things on the CPU, although JAX's default device is an accelerator.

A conversion makes thousands of small arrays, one operation at a time. Each operation is compiled first, which takes far
longer for a GPU than for the CPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.core import Tracer

M = TypeVar("M", bound=nnx.Module)


def cpu_beside() -> Any:
    """The CPU of this process as a `jax.Device`, if the default device is another one; None otherwise."""
    default: Any = jax.config.jax_default_device
    platform = jax.default_backend() if default is None else getattr(default, "platform", default)
    if platform == "cpu":
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS lists the accelerator only
        return None


@contextlib.contextmanager
def on_cpu(model: M, args: tuple[Any, ...]) -> Iterator[tuple[M, tuple[Any, ...]]]:
    """A context in which JAX computes on the CPU if possible, with a copy of the model and the arguments there.

    Traced arrays, and arrays that other processes hold in part, cannot be move; then nothing is move.
    """
    device = cpu_beside()
    graphdef, state = nnx.split(model)
    arrays = [x for x in jax.tree.leaves((state, args)) if isinstance(x, jax.Array)]
    if device is None or any(isinstance(x, Tracer) or not x.is_fully_addressable for x in arrays):
        yield model, args
        return

    def move(x: Any) -> Any:
        return jax.device_put(x, device) if isinstance(x, jax.Array) else x

    with jax.default_device(device):
        yield nnx.merge(graphdef, jax.tree.map(move, state)), jax.tree.map(move, args)
