"""Observers: statistics of constant size about a tensor, from which quantization parameters follow."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jax import Array

from qjax.numerics.affine import QParams, QSpec, choose_qparams
from qjax.numerics.qparams import SCALE_MIN

State: TypeAlias = Any
"""A pytree of arrays of fixed shapes and dtypes."""

Bounds: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(lo, hi), float32 of the parameters' shape: one entry per scale."""


@runtime_checkable
class Observer(Protocol):
    """Statistics of one tensor over any number of batches, and the quantization parameters that follow.

    An observer is an immutable value without data; the state holds the data. qjax accepts any object with these three
    methods and a name as an observer.

    Examples:
      ```python
      observer, spec = qjax.calibration.MinMax(), qjax.QSpec(bits=8)
      state = observer.init(spec, x.shape)
      for batch in batches:
          state = observer.update(state, batch, spec)
      print(observer.qparams(state, spec).scale)
      ```
    """

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def init(self, spec: QSpec, shape: tuple[int, ...]) -> State:
        """A state without data; `shape` is that of one batch's tensor."""
        ...

    def update(self, state: State, x: Array, spec: QSpec) -> State:
        """The state after one more batch: pure JAX, same structure, shapes and dtypes as `state`."""
        ...

    def qparams(self, state: State, spec: QSpec) -> QParams:
        """Scale and zero point for `spec`; on the host, from a concrete state."""
        ...


class BoundsObserver:
    """An observer whose statistics determine a range per scale; the protocol itself is `Observer`."""

    name: str

    def bounds(self, state: State, spec: QSpec) -> Bounds:
        """The range to represent, before it is extended to contain zero."""
        raise NotImplementedError

    def qparams(self, state: State, spec: QSpec) -> QParams:
        """Apply `choose_qparams` to the bounds.

        Raises:
            ValueError: there were no data, or some of them were NaN or infinite.
        """
        lo, hi = self.bounds(state, spec)
        refuse_tiny(lo, hi, spec)
        return choose_qparams(lo, hi, spec)


def refuse_tiny(lo: np.ndarray, hi: np.ndarray, spec: QSpec) -> None:
    """Raise if a tensor is not zero, but too small for the smallest scale, so that its codes would all be zero.

    A channel of such numbers next to channels with greater numbers counts as zero.
    """
    low, high = float(np.min(lo, initial=0)), float(np.max(hi, initial=0))
    if max(-low, high) > 0 and (high - low) / spec.levels < SCALE_MIN:
        raise ValueError(
            f"expected numbers that {spec.bits} bits can distinguish from zero, got a tensor in [{low:.3g}, "
            f"{high:.3g}], whose scale would be below 2^-100. Multiply the data or the parameters by a constant, or "
            "set them to 0."
        )
