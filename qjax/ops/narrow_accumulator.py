"""Products with weights whose accumulator is not an exact int32; see the node's attribute "accumulator".

A wrapping register contains the low bits of the exact sum, so it uses the fast integer products of `ops.accumulate`.
For saturating registers and int16 pairs the order of the products matters. The operation arranges its operands as rows
over K (`Rows`), and `numerics.narrow_sums` adds them in that order.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.accumulator import EXACT, Accumulator, wrap
from qjax.numerics.narrow_sums import pair_sum, saturating_sum
from qjax.ops import accumulate
from qjax.ops.base import Array, Attributes, Constants
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import fold_zero_point

REGISTER_OFFSET = "register_offset"
"""Runtime constant: what a wrapping register contains besides the products of `accumulate.signed` codes."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The operands of a product, K first.

    x: (K, batch, M) stored codes. w: (K, batch, N) codes of the weight. restore: (batch, M, N) -> the result's axes,
    before the node's own permutation. outside: int32, broadcastable to the restored result: the sum of the weights that
    meet no code at all, or None.
    """

    x: jax.Array
    w: jax.Array
    restore: Callable[[jax.Array], jax.Array]
    outside: jax.Array | None = None


def accumulator_of(attributes: Attributes, constants: Constants) -> Accumulator:
    """The accumulator of a node with a kernel; also EXACT if int16 pairs do not apply to its operands."""
    accumulator = Accumulator.of_json(attributes.get("accumulator"))
    return accumulator.on(attributes["input_dtypes"][0], str(constants["kernel"].dtype))


def fold(attributes: Attributes, constants: Constants, summed: Sequence[int]) -> Constants:
    """What can be computed before any input: the zero point's contribution to the bias or to the register.

    summed: the weight's axes that the accumulator sums over.
    """
    accumulator = accumulator_of(attributes, constants)
    if accumulator == EXACT:
        return fold_zero_point(attributes, constants, summed)
    xp = host_or_trace(constants["kernel"], *constants.values())
    zero_point = xp.asarray(constants["zero_point0"])
    share = _times_sums(xp, attributes, constants["kernel"], summed, zero_point)
    folded = dict(constants)
    if accumulator.pairs or accumulator.operands == "codes":
        folded["bias"] = _minus(xp, constants["bias"], share)
    if accumulator.overflow == "wrap":
        # the fast products use codes shifted by this offset
        shift = np.int32(accumulate.signed_offset(attributes["input_dtypes"][0]))
        offset = _times_sums(xp, attributes, constants["kernel"], summed, xp.asarray(shift))
        folded[REGISTER_OFFSET] = offset if accumulator.operands == "codes" else _minus(xp, offset, share)
    return folded


def sum_rows(accumulator: Accumulator, rows: Rows, zero_point: ArrayLike) -> jax.Array:
    """The register of a saturating accumulator, or the sum of int16 pairs; int32, before the node's permutation."""
    if not accumulator.pairs:
        subtracted = zero_point if accumulator.operands == "centered" else 0
        return rows.restore(saturating_sum(rows.x, rows.w, subtracted, accumulator.bits))
    total = rows.restore(pair_sum(rows.x, rows.w))
    if rows.outside is None:
        return total
    # the bias subtracts the zero point times every weight, including weights outside of the window
    return total + jnp.broadcast_to(rows.outside * jnp.asarray(zero_point), total.shape)


def cut(acc: jax.Array, accumulator: Accumulator, constants: Constants) -> jax.Array:
    """The final value of a register whose exact sum is `acc`: wrapped if the accumulator wraps."""
    if accumulator.overflow != "wrap":
        return acc
    offset = jnp.asarray(constants[REGISTER_OFFSET])
    return wrap(acc + jnp.broadcast_to(offset, acc.shape), accumulator.bits)


def _times_sums(xp: ModuleType, attributes: Attributes, kernel: Array, summed: Sequence[int], factor: ArrayLike) -> Any:
    """factor * sum of the weights, modulo 2^32, as a vector of the result."""
    with np.errstate(over="ignore"):
        sums = xp.sum(xp.asarray(kernel), axis=tuple(summed), dtype=np.int32, keepdims=True)
        vector = weight_to_result(sums, attributes["channels"], attributes["rank"])
        return vector * xp.broadcast_to(factor, vector.shape)


def _minus(xp: ModuleType, a: Any, b: Any) -> Any:
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    with np.errstate(over="ignore"):
        return xp.broadcast_to(xp.asarray(a), shape) - xp.broadcast_to(xp.asarray(b), shape)
