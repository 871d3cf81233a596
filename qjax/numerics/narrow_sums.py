"""Sums of products whose partial sums are visible: registers that saturate, and int16 pairs.

Operands are rows: x is (K, batch, M) and w is (K, batch, N), and the result is (batch, M, N). A loop runs over K in
blocks and stores only the accumulators, never the (K, M, N) products. The functions are plain JAX, so jit, vmap and
scan work.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qjax.numerics.accumulator import PAIR_MAX, PAIR_MIN

BLOCK = 8
"""Products per iteration of the loop, which XLA fuses into one pass over the accumulators. 16 and 32 were no faster."""

State = tuple[jax.Array, ...]


def saturating_sum(x: jax.Array, w: jax.Array, zero_point: ArrayLike, bits: int) -> jax.Array:
    """sum_k (x_k - zero_point) w_k, clamped to `bits` after every addition, k ascending.

    Args:
      x, w: (K, batch, M) and (K, batch, N), integers of at most 16 bits. zero_point: int32, a scalar.

    Returns:
      int32 (batch, M, N).
    """
    return _saturating(x, w, zero_point, bits, events=False)[0]


def saturating_sum_events(x: jax.Array, w: jax.Array, zero_point: ArrayLike, bits: int) -> State:
    """`saturating_sum`, and how many of the K additions saturated: int32 (batch, M, N) each."""
    return _saturating(x, w, zero_point, bits, events=True)


def pair_sum(x: jax.Array, w: jax.Array, zero_point: ArrayLike = 0) -> jax.Array:
    """sum_i clamp_int16(p_2i + p_2i+1) with p_k = (x_k - zero_point) w_k: vpmaddubsw, then exact additions.

    Args:
      x, w: (K, batch, M) and (K, batch, N), int8 or uint8. zero_point: 0 for unsigned codes; their least code shifts
        signed ones into unsigned ones.

    Returns:
      int32 (batch, M, N), the sum modulo 2^32.
    """
    return _paired(x, w, zero_point, events=False)[0]


def pair_sum_events(x: jax.Array, w: jax.Array, zero_point: ArrayLike = 0) -> State:
    """`pair_sum`, and how many of its pairs saturated: int32 (batch, M, N) each.

    Args:
      x, w: (K, batch, M) and (K, batch, N), int8 or uint8.
      zero_point: as in `pair_sum`.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> x, w = np.full((2, 1, 1), 255, np.uint8), np.full((2, 1, 1), 127, np.int8)
      >>> total, saturated = numerics.pair_sum_events(x, w)
      >>> print(total, saturated)
      [[[32767]]] [[[1]]]
    """
    return _paired(x, w, zero_point, events=True)


def running_sums(x: jax.Array, w: jax.Array, zero_point: ArrayLike, dtype: DTypeLike = jnp.int32) -> State:
    """The sum in unbounded integers (as far as `dtype` holds them), and the least and greatest of its partial sums.

    Partial sums are those after 0, 1, ..., K products. int64 needs `jax.enable_x64`.
    """
    zero = _zeros(x, w, dtype)

    def step(state: State, products: Sequence[jax.Array]) -> State:
        total, low, high = state
        total = total + products[0].astype(dtype)
        return total, jnp.minimum(low, total), jnp.maximum(high, total)

    return _loop(x, w, zero_point, 1, step, (zero, zero, zero))


def _saturating(x: jax.Array, w: jax.Array, zero_point: ArrayLike, bits: int, *, events: bool) -> State:
    low, high = np.int32(-(2 ** (bits - 1))), np.int32(2 ** (bits - 1) - 1)
    # |(x - z) w| < 2^width. Does its sum with a register of up to 2^(bits - 1) fit int32?
    width = 8 * (x.dtype.itemsize + w.dtype.itemsize) - 1
    roomy = width <= 30 and bits <= 31

    def step(state: State, products: Sequence[jax.Array]) -> State:
        acc, (product,) = state[0], products
        total = acc + product
        if not roomy:
            # int32 itself overflowed if both operands have one sign and the sum the other
            wrapped = ((acc ^ total) & (product ^ total)) < 0
            total = jnp.where(wrapped, jnp.where(acc < 0, np.int32(-(2**31)), np.int32(2**31 - 1)), total)
        clamped = jnp.minimum(jnp.maximum(total, low), high)
        if not events:
            return (clamped,)
        beyond = (total < low) | (total > high)
        if not roomy:
            beyond = beyond | wrapped  # pyright: ignore[reportPossiblyUnboundVariable]
        return clamped, state[1] + beyond.astype(jnp.int32)

    zero = _zeros(x, w, jnp.int32)
    return _loop(x, w, zero_point, 1, step, (zero, zero) if events else (zero,))


def _paired(x: jax.Array, w: jax.Array, zero_point: ArrayLike, *, events: bool) -> State:
    def step(state: State, products: Sequence[jax.Array]) -> State:
        pair = products[0] + products[1]
        clamped = jnp.minimum(jnp.maximum(pair, np.int32(PAIR_MIN)), np.int32(PAIR_MAX))
        if not events:
            return (state[0] + clamped,)
        return state[0] + clamped, state[1] + (pair != clamped).astype(jnp.int32)

    zero = _zeros(x, w, jnp.int32)
    return _loop(x, w, zero_point, 2, step, (zero, zero) if events else (zero,))


def _zeros(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.zeros((x.shape[1], x.shape[2], w.shape[2]), dtype)


def _loop(
    x: jax.Array,
    w: jax.Array,
    zero_point: ArrayLike,
    together: int,
    step: Callable[[State, Sequence[jax.Array]], State],
    state: State,
) -> State:
    """Carry `state` over K; each step gets `together` consecutive products, int32 (batch, M, N)."""
    if x.shape[0] == 0:
        return state
    # Put the longer axis last, where the vector units work. Multiplication commutes.
    swapped = x.shape[2] > w.shape[2]
    block = min(BLOCK, together * math.ceil(x.shape[0] / together))
    blocks = math.ceil(x.shape[0] / block)
    rows = [_blocks(operand, blocks, block) for operand in (x, w)]
    zero_point = jnp.asarray(zero_point, jnp.int32)

    def turn(state: State, rows: Sequence[jax.Array]) -> tuple[State, None]:
        xs = rows[0].astype(jnp.int32) - zero_point
        ws = rows[1].astype(jnp.int32)
        first, second = (ws, xs) if swapped else (xs, ws)
        for start in range(0, block, together):
            products = [first[k][:, :, None] * second[k][:, None, :] for k in range(start, start + together)]
            state = step(state, products)
        return state, None

    if swapped:
        state = tuple(jnp.swapaxes(leaf, 1, 2) for leaf in state)
    state, _ = lax.scan(turn, state, rows)
    return tuple(jnp.swapaxes(leaf, 1, 2) for leaf in state) if swapped else state


def _blocks(rows: jax.Array, blocks: int, block: int) -> jax.Array:
    """(K, batch, size) -> (blocks, block, batch, size), padded with zeros: weights of 0 change no sum and no event."""
    rows = jnp.pad(rows, ((0, blocks * block - rows.shape[0]), (0, 0), (0, 0)))
    return rows.reshape((blocks, block, *rows.shape[1:]))
