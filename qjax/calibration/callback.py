"""An observer that calls a user's own function for each batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from qjax.calibration.channels import check_batch
from qjax.calibration.observer import Bounds, BoundsObserver, State
from qjax.calibration.value_counts import Tally, counted, counts_of, require_usable, zero_tally
from qjax.numerics.affine import QSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CallbackState:
    """The user's state, a pytree of arrays, and counts of the data."""

    value: State
    tally: Tally


@dataclass(frozen=True)
class Callback(BoundsObserver):
    """Calls your numpy function on the host for each batch.

    The functions must depend on their arguments only, because inside jit they run through `jax.pure_callback`. To
    compute a statistic in JAX, write an `Observer` instead.

    Args:
      fn: `fn(batch) -> (lo, hi)`; the ranges of all batches are merged by minimum and maximum. Or, together with the
        two others, `fn(state, batch) -> state`. A batch is a float32 numpy array.
      start: `start(spec, shape) -> state`: a pytree of arrays whose shapes and dtypes do not change.
      finish: `finish(state, spec) -> (lo, hi)`, in the shape of the parameters (scalars per tensor).

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> three_sigma = qjax.calibration.Callback(
      ...     lambda x: (x.mean() - 3 * x.std(), x.mean() + 3 * x.std())
      ... )
      >>> recipe = qjax.Recipe(observer=three_sigma)
    """

    fn: Callable[..., Any]
    start: Callable[[QSpec, tuple[int, ...]], State] | None = None
    finish: Callable[[State, QSpec], tuple[Any, Any]] | None = None
    name = "callback"

    def __post_init__(self) -> None:
        if (self.start is None) != (self.finish is None):
            raise ValueError(
                "Callback: expected both start and finish, or neither; got only "
                f"{'finish' if self.start is None else 'start'}. Write Callback(fn) with "
                "fn(batch) -> (lo, hi), or Callback(fn, start, finish) with fn(state, batch) -> state."
            )

    def init(self, spec: QSpec, shape: tuple[int, ...]) -> CallbackState:
        """A state without data; `shape` is that of one batch's tensor."""
        if self.start is not None:
            return CallbackState(jax.tree.map(jnp.asarray, self.start(spec, shape)), zero_tally())
        params = spec.param_shape(shape)
        lo, hi = jnp.full(params, jnp.inf, jnp.float32), jnp.full(params, -jnp.inf, jnp.float32)
        return CallbackState((lo, hi), zero_tally())

    def update(self, state: CallbackState, x: Array, spec: QSpec) -> CallbackState:
        """The state after one more batch; the function runs on the host, inside jit too."""
        check_batch(x)
        old = state.value
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), old)
        x = x.astype(jnp.float32)
        tally = counted(state.tally, counts_of(x))

        def on_host(value: State, batch: Any) -> State:
            value, batch = jax.tree.map(np.asarray, value), np.asarray(batch)
            if self.start is not None:
                new = self.fn(value, batch)
            else:
                # Check before merging, because merging would broadcast a scalar to every channel.
                lo, hi = _check_state(tuple(self.fn(batch)), like)
                new = np.minimum(value[0], lo), np.maximum(value[1], hi)
            return _check_state(new, like)

        leaves = jax.tree.leaves((old, x))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            new = jax.pure_callback(on_host, like, old, x, vmap_method="sequential")
        else:
            new = jax.tree.map(jnp.asarray, on_host(old, x))
        return CallbackState(new, tally)

    def bounds(self, state: CallbackState, spec: QSpec) -> Bounds:
        """The merged range, or the range that `finish` derives from the state."""
        require_usable(state.tally, self.name)
        value = jax.tree.map(np.asarray, state.value)
        lo, hi = value if self.finish is None else self.finish(value, spec)
        lo, hi = np.asarray(lo, np.float32), np.asarray(hi, np.float32)
        if np.isnan(lo).any() or np.isnan(hi).any() or (lo > hi).any():
            raise ValueError(f"callback expected bounds with lo <= hi. Got lo={lo}, hi={hi}.")
        return lo, hi


def _check_state(new: State, like: State) -> State:
    """The callback's new state in the old one's dtypes; raises if structure or shapes differ."""
    if jax.tree.structure(new) != jax.tree.structure(like):
        raise TypeError(
            f"callback expected a state of structure {jax.tree.structure(like)}. Got {jax.tree.structure(new)}."
        )

    def leaf(array: Any, expected: jax.ShapeDtypeStruct) -> np.ndarray:
        array = np.asarray(array)
        if array.shape != expected.shape:
            raise ValueError(f"callback expected an array of shape {expected.shape}. Got {array.shape}.")
        if not np.can_cast(array.dtype, expected.dtype, casting="same_kind"):
            raise TypeError(f"callback expected an array of dtype {expected.dtype}. Got {array.dtype}.")
        return array.astype(expected.dtype)

    return jax.tree.map(leaf, new, like)
