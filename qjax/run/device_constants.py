"""Keeps a graph's constants on the devices that compute with them: they are moved once, not with every call.

A conversion in a process with an accelerator still computes on the CPU, so the constants are first made there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from qjax.run.shared_constants import SharedConstants


class Near:
    """The constants on each device on which they were needed."""

    def __init__(self, constants: SharedConstants) -> None:
        # Results computed from arrays of one device are committed to it, and jit would then compute there.
        self._first = jax.device_put(jax.tree.map(lambda x: np.asarray(x) if _bound(x) else x, constants))
        self._on: dict[Any, SharedConstants] = {}
        leaves = jax.tree.leaves(self._first)
        self._fixed = any(isinstance(x, Tracer) or not x.is_fully_addressable for x in leaves)

    def to(self, inputs: Sequence[Any]) -> SharedConstants:
        """The constants on the device where `jax.jit` computes with these inputs.

        Inputs on several devices get the constants that were made first, which `jax.jit` then moves itself.
        """
        device = None if self._fixed else device_of(inputs)
        if device is None:
            return self._first
        if device not in self._on:
            self._on[device] = self._move_to(device)
        return self._on[device]

    def _move_to(self, device: Any) -> SharedConstants:
        leaves, structure = jax.tree.flatten(self._first)
        # Evaluate now even inside a trace, because the copies would otherwise be values of that trace only.
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            moved = [x if x.devices() == {device} else jax.device_put(np.asarray(x)) for x in leaves]
        return jax.tree.unflatten(structure, moved)


def device_of(inputs: Sequence[Any]) -> Any:
    """The device on which `jax.jit` computes with these inputs: theirs, or the default one; None for several."""
    for x in jax.tree.leaves(list(inputs)):
        if _bound(x):
            devices = x.devices()
            return next(iter(devices)) if len(devices) == 1 else None
    default: Any = jax.config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default


def _bound(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable and x.committed
