"""The steps of an expression in float32 under JAX, which training uses for a model of lower precision."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qjax.numerics.elementary.expression import Expression, number


def float32(expression: Expression, x: jax.Array, parameters: Sequence[Any] = ()) -> jax.Array:
    """The function of a float32 array, element by element; differentiable.

    parameters: arrays of one element, of any float dtype or of truth values.
    """
    values: list[Any] = [x, *(_parameter(p) for p in parameters)]
    for primitive, operands in expression.steps:
        if primitive == "integer_pow":
            assert isinstance(operands[0], int)
            assert isinstance(operands[1], str)
            values.append(lax.integer_pow(values[operands[0]], int(number(operands[1]))))
            continue
        given = [values[o] if type(o) is int else _literal(o) for o in operands]
        shape = jnp.broadcast_shapes(*(np.shape(v) for v in given))
        function = _OTHER.get(primitive) or getattr(lax, primitive)
        values.append(function(*(jnp.broadcast_to(v, shape) for v in given)))
    return jnp.broadcast_to(values[-1], x.shape)


def _parameter(value: ArrayLike) -> jax.Array:
    array = jnp.asarray(value).reshape(())
    return array if array.dtype == jnp.bool_ else array.astype(jnp.float32)


def _literal(value: Any) -> jax.Array:
    return jnp.asarray(number(value), jnp.float32) if type(value) is str else jnp.asarray(value, jnp.bool_)


_OTHER: Mapping[str, Callable[..., jax.Array]] = {
    "and": lax.bitwise_and,
    "not": lax.bitwise_not,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "round_away": lambda a: lax.round(a, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_even": lambda a: lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN),
    "select": lambda which, a, b: lax.select_n(which, a, b),
}
