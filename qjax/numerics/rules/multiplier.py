"""What the fixed-point rules share: constants that are a `Multiplier`, and the conversion back to int32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import MAX_SHIFT, MIN_SHIFT, Multiplier, quantize_multiplier
from qjax.numerics.rules.registry import Apply, Product, registered

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def fixed_point(
    name: str,
    *,
    prepare: Callable[..., Multiplier] = quantize_multiplier,
    highest_shift: int = MAX_SHIFT,
    needs_key: bool = False,
    accumulators: tuple[str, ...] = ("int32",),
    variant: Callable[[Product], str] | None = None,
    monotone: bool = False,
) -> Callable[[Apply], Apply]:
    """Register a kernel whose constants are a `Multiplier`."""

    def check(m: Multiplier) -> None:
        check_multiplier(m, highest_shift)

    return registered(
        name,
        prepare=prepare,
        constants=Multiplier,
        needs_key=needs_key,
        accumulators=accumulators,
        check=check,
        variant=variant,
        monotone=monotone,
    )


def check_multiplier(m: Multiplier, highest_shift: int = MAX_SHIFT) -> None:
    """Raise TypeError or ValueError unless m is what `quantize_multiplier` makes."""
    multiplier, shift = np.asarray(m.multiplier), np.asarray(m.shift)
    check_int32(m)
    good = (multiplier == 0) | (multiplier >= 2**30)
    if not np.all(good & (shift >= MIN_SHIFT) & (shift <= highest_shift)):
        raise ValueError(
            f"a multiplier must be 0 or in [2^30, 2^31), and its shift in [{MIN_SHIFT}, {highest_shift}]. "
            f"Got {multiplier.ravel()[~good.ravel()][:4]} and shifts from {shift.min()} to {shift.max()}; "
            "use quantize_multiplier."
        )


def check_int32(constants: Any) -> None:
    """Raise TypeError unless every field of a NamedTuple is an int32 array."""
    for name, value in constants._asdict().items():
        dtype = np.asarray(value).dtype
        if dtype != np.int32:
            raise TypeError(f"{name} must be int32. Got {dtype}.")


def saturated(y: jax.Array) -> jax.Array:
    """The int32 nearest to an int64."""
    return jnp.minimum(jnp.maximum(y, np.int64(INT32_MIN)), np.int64(INT32_MAX)).astype(jnp.int32)


def wrapped(y: jax.Array) -> jax.Array:
    """An int64 modulo 2^32: C's cast to int32 (implementation-defined there, and this on every machine)."""
    return y.astype(jnp.int32)
