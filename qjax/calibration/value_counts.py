"""Counts the values that an observer has seen, and those that were not finite."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from qjax.calibration.counter import Counter, add, exceeded, to_host, zero_counter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """Scalar counts over all batches and channels, of shape (3,): values, NaNs among them, infinities among them.

    They share one counter, because a network has an observer for each of its tensors in one program to compile.
    """

    counts: Counter

    @property
    def seen(self) -> Counter:
        """The values."""
        return Counter(self.counts.high[..., 0], self.counts.low[..., 0])


def zero_tally() -> Tally:
    """A tally of no data."""
    return Tally(zero_counter((3,)))


def counted(tally: Tally, counts: Array) -> Tally:
    """The tally after a batch of fewer than 2**32 values; counts: those of the batch, uint32 (3,), as in `Tally`."""
    return Tally(add(tally.counts, counts))


def counts_of(x: Array) -> Array:
    """The counts of a floating batch: values, NaNs and infinities, uint32 (3,)."""
    nan = jnp.sum(jnp.isnan(x), dtype=jnp.uint32)
    inf = jnp.sum(jnp.isinf(x), dtype=jnp.uint32)
    return jnp.stack([jnp.uint32(x.size), nan, inf])


def require_usable(tally: Tally, name: str) -> None:
    """Raise unless the data seen can determine a range.

    Args:
        tally: concrete counts.
        name: the observer's name, for the message.

    Raises:
        ValueError: there were no values, some were NaN or infinite, or the counts reached 2**63.
    """
    seen, nan, inf = (int(count) for count in to_host(tally.counts))
    if seen == 0:
        raise ValueError(
            f"observer {name!r}: expected at least one batch, got no data, so there is no range. "
            "Calibrate with data that reaches this tensor before asking for its scale."
        )
    if nan or inf:
        raise ValueError(
            f"observer {name!r}: expected finite calibration data, got {nan} NaN and {inf} infinite of "
            f"{seen} values. Remove the batches with these, or look for an overflow in the model."
        )
    if exceeded(tally.seen):
        raise ValueError(f"observer {name!r} has seen 2**63 values or more, beyond what it counts exactly.")
