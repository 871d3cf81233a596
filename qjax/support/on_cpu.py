"""The CPU computes what is small, although JAX's default device is an accelerator.

A conversion makes thousands of small arrays, one operation at a time. Each operation is compiled first, and for a GPU
that takes far longer than for the CPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.core import Tracer

M = TypeVar("M", bound=nnx.Module)


def cpu_beside() -> Any:
    """A `jax.Device`: the CPU of this process where the default device is none. None elsewhere, and without a CPU."""
    default: Any = jax.config.jax_default_device
    platform = jax.default_backend() if default is None else getattr(default, "platform", default)
    if platform == "cpu":
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator only
        return None


@contextlib.contextmanager
def on_cpu(model: M, args: tuple[Any, ...]) -> Iterator[tuple[M, tuple[Any, ...]]]:
    """Within it JAX computes on the CPU, where it can, and gets a copy of the model and of the arguments there.

    What is traced, and what other processes hold a part of, stays where it is; so does everything then.
    """
    device = cpu_beside()
    graphdef, state = nnx.split(model)
    arrays = [x for x in jax.tree.leaves((state, args)) if isinstance(x, jax.Array)]
    if device is None or any(isinstance(x, Tracer) or not x.is_fully_addressable for x in arrays):
        yield model, args
        return

    def moved(x: Any) -> Any:
        return jax.device_put(x, device) if isinstance(x, jax.Array) else x

    with jax.default_device(device):
        yield nnx.merge(graphdef, jax.tree.map(moved, state)), jax.tree.map(moved, args)
