"""A graph's constants on the device that computes: they are moved there once, not with every call.

A conversion beside an accelerator computes on the CPU, so that is where the constants are made.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from qjax.run.shared_constants import SharedConstants


class Near:
    """The constants on each device that asked for them."""

    def __init__(self, constants: SharedConstants) -> None:
        # what was computed from arrays of one device is bound to it, and jit then computes there
        self._first = jax.device_put(jax.tree.map(lambda x: np.asarray(x) if _bound(x) else x, constants))
        self._on: dict[Any, SharedConstants] = {}
        leaves = jax.tree.leaves(self._first)
        self._fixed = any(isinstance(x, Tracer) or not x.is_fully_addressable for x in leaves)

    def to(self, inputs: Sequence[Any]) -> SharedConstants:
        """Those where `jax.jit` computes with these inputs.

        Inputs over several devices get those that were made first, which `jax.jit` then moves itself.
        """
        device = None if self._fixed else device_of(inputs)
        if device is None:
            return self._first
        if device not in self._on:
            self._on[device] = self._moved(device)
        return self._on[device]

    def _moved(self, device: Any) -> SharedConstants:
        leaves, structure = jax.tree.flatten(self._first)
        # also within a trace, where they would be values of that trace only
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            moved = [x if x.devices() == {device} else jax.device_put(np.asarray(x)) for x in leaves]
        return jax.tree.unflatten(structure, moved)


def device_of(inputs: Sequence[Any]) -> Any:
    """The one device on which `jax.jit` computes with these inputs: theirs, or the default one. None: several."""
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
