"""The meaning of indices that are negative or out of range.

An integer kernel clips an index that is out of range, because no code represents the NaN of JAX. Two attributes of a
node record what JAX does:

| attribute | true | false, or absent |
| --- | --- | --- |
| wraps | a negative index counts from the end | equations before the node wrap it, or it is clipped |
| fills | JAX returns NaN, or an integer instead; `graph(x)` rejects such an index | JAX clips, like the kernel |
"""

import math
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from qjax.ops.base import Attributes


class Lookup(TypedDict):
    """The meaning of indices out of range, see the table above."""

    fills: NotRequired[bool]
    wraps: NotRequired[bool]


def fills(params: Any) -> bool:
    """Whether a gather with these parameters returns NaN out of range."""
    return "FILL" in str(params.get("mode", "fill")).upper()


def has_number(params: Any, dtype: DTypeLike) -> bool:
    """Whether a gather returns the user's own number for an index out of range, for which a kernel would need a code.

    JAX's defaults do not count: NaN, the lowest signed integer, the highest unsigned integer or boolean.
    """
    value = params.get("fill_value")
    if not fills(params) or value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if dtype == np.bool_:
        return not value
    if jnp.issubdtype(dtype, jnp.integer):
        known = jnp.iinfo(dtype)
        return int(value) != (known.min if jnp.issubdtype(dtype, jnp.signedinteger) else known.max)
    return not math.isnan(value)


def wrapped(attributes: Attributes, indices: jax.Array, size: int) -> jax.Array:
    """The indices, with negative ones counted from the end of an axis if the node asks for it."""
    if not attributes.get("wraps", False) or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        return indices
    wide = indices.astype(jnp.int32)
    return jnp.where(wide < np.int32(0), wide + np.int32(size), wide)


def outside(attributes: Attributes, indices: jax.Array, size: int) -> jax.Array | None:
    """How many indices result in NaN in JAX, int32; None if there can be none."""
    if not attributes.get("fills", False):
        return None
    wide = indices.astype(jnp.int32)
    lowest = np.int32(-size if attributes.get("wraps", False) else 0)
    return jnp.sum((wide < lowest) | (wide >= np.int32(size)), dtype=jnp.int32)
