"""The K formats of llama.cpp's GGUF files: integer codes whose scales and minimums are integers, too.

    value = code * (d * scale) - dmin * minimum

256 weights share the float16 numbers d and dmin; each block of 16 or 32 of them has a scale and a minimum.

| format | codes | block | scale | minimum | bits of a weight |
| --- | --- | --- | --- | --- | --- |
| `q2_k` | 0 to 3 | 16 | 0 to 15 | 0 to 15 | 2.625 |
| `q3_k` | -4 to 3 | 16 | -32 to 31 | - | 3.4375 |
| `q4_k` | 0 to 15 | 32 | 0 to 63 | 0 to 63 | 4.5 |
| `q5_k` | 0 to 31 | 32 | 0 to 63 | 0 to 63 | 5.5 |
| `q6_k` | -32 to 31 | 16 | -128 to 127 | - | 6.5625 |

d * scale and dmin * minimum are exact in float32, and so is the product with a code, so a value is rounded once.

Codes are searched as in the functions `quantize_row_*_K_ref` of ggml's `ggml-quants.c` (version 0.3.36 of the package
llama-cpp-python), whose bytes these are where the C compiler fuses no product with a sum and the platform's square root
is rounded correctly (x86-64), for weights whose products of three are normal float32 numbers: XLA rounds smaller ones
to 0. Sums run in the order of the weights. The search takes some hundred operations for each weight.
"""

import functools
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.dynamic import divided
from qjax.numerics.float16 import to_float16_grid
from qjax.numerics.unfused import unfused

WHOLE = 256
"""How many weights share d and dmin."""

_SMALL = np.float32(1e-15)
"""A block of weights below it has the scale 0 (`GROUP_MAX_EPS`)."""
_COLUMNS = 128
_F = np.float32


def encode_affine(view: jax.Array, bits: int) -> list[jax.Array]:
    """The codes of `q2_k` (2 bits), `q4_k` (4) and `q5_k` (5).

    Args:
      view: float32 (..., blocks, size of a block); 256 weights along the last two axes belong together.

    Returns:
      int8 codes of that shape; d float32 (..., blocks of 256) on the grid of float16, int8 scales (..., blocks), and
      dmin and minimums of these shapes.
    """
    x, together = _elements_first(view)
    top, few = 2**bits - 1, bits == 2

    def search(x: jax.Array) -> tuple[jax.Array, ...]:
        if few:
            return _search_affine(x, jnp.abs(x), top, -0.5, 15, absolute=True)
        mean = lax.sqrt(divided(_sum(unfused(x * x)), _F(32)))
        first, steps = (-1.0, 20) if bits == 4 else (-0.5, 15)
        return _search_affine(x, mean + jnp.abs(x), top, first, steps, absolute=False)

    codes, scale, minimum = _some_at_a_time(search, x)
    most = 15 if few else 63
    own_scales, d = _integers(together(scale), most)
    own_minimums, dmin = _integers(together(minimum), most)
    step = unfused(d * own_scales.astype(jnp.float32)).reshape(1, -1)
    low = unfused(dmin * own_minimums.astype(jnp.float32)).reshape(1, -1)
    usable = step != 0
    again = _nearest(divided(x + low, jnp.broadcast_to(jnp.where(usable, step, jnp.ones_like(step)), x.shape)))
    codes = jnp.where(usable, jnp.clip(again, 0, top), codes)
    return _results(view, codes, d, own_scales, dmin, own_minimums)


def encode_symmetric(view: jax.Array, bits: int) -> list[jax.Array]:
    """The codes of `q3_k` (3 bits) and `q6_k` (6); see `encode_affine`, without dmin and minimums."""
    x, together = _elements_first(view)
    low = 2 ** (bits - 1)
    codes, scale = _some_at_a_time(partial(_descend if bits == 3 else _search_symmetric, low=low), x)
    scales = together(scale)
    largest = _of_greatest(scales, 1)
    most, unit = (31, 32) if bits == 3 else (127, 128)
    nothing = (largest == 0) if bits == 3 else (jnp.abs(largest) < _SMALL)
    inverse = _kept(divided(jnp.full_like(largest, -unit), jnp.where(nothing, jnp.ones_like(largest), largest)))
    d = to_float16_grid(jnp.where(nothing, jnp.zeros_like(largest), divided(jnp.ones_like(inverse), inverse)))
    own = jnp.minimum(_nearest(unfused(inverse * scales)), most)
    own = jnp.where(nothing, -unit if bits == 3 else 0, jnp.maximum(own, -unit)).astype(jnp.int8)
    step = unfused(d * own.astype(jnp.float32)).reshape(1, -1)
    usable = step != 0
    again = _nearest(divided(x, jnp.broadcast_to(jnp.where(usable, step, jnp.ones_like(step)), x.shape)))
    codes = jnp.where(usable, jnp.clip(again, -low, low - 1), codes)
    if bits == 6:  # ggml writes zeros, the code -32
        codes = jnp.where(jnp.repeat(nothing, scales.shape[1], 1).reshape(1, -1), -low, codes)
    return _results(view, codes, d, own)


def _elements_first(view: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Blocks as columns, and what turns a number per block into rows of those that share d."""
    size = view.shape[-1]
    return view.reshape(-1, size).T, lambda value: value.reshape(-1, WHOLE // size)


def _some_at_a_time(search: Callable[[jax.Array], tuple[jax.Array, ...]], x: jax.Array) -> list[jax.Array]:
    """The results for all columns, 128 at a time, so that the search stays in the CPU's cache: 20 times as fast."""
    size, count = x.shape
    whole = jnp.pad(x, ((0, 0), (0, -count % _COLUMNS)))
    found = lax.map(search, jnp.moveaxis(whole.reshape(size, -1, _COLUMNS), 1, 0))
    return [jnp.moveaxis(part, 0, 1).reshape(part.shape[1], -1)[:, :count] for part in found]


def _results(view: jax.Array, codes: jax.Array, *stored: jax.Array) -> list[jax.Array]:
    lead, blocks = view.shape[:-2], view.shape[-2]
    sizes = {1: blocks * view.shape[-1] // WHOLE}
    shaped = [part.reshape(*lead, sizes.get(part.shape[1], blocks)) for part in stored]
    return [codes.T.reshape(view.shape).astype(jnp.int8), *shaped]


def _sum(terms: jax.Array) -> jax.Array:
    """The sum along the first axis, which stays with size 1, in order."""
    return functools.reduce(operator.add, list(terms))[None]


def _kept(quotient: jax.Array) -> jax.Array:
    """A quotient by which another number is divided. XLA would make `a / (b / c)` one quotient, `a * c / b`."""
    return unfused(quotient)


def _nearest(x: jax.Array) -> jax.Array:
    """ggml's `nearest_int`: int32, ties to even; the same bits for numbers beyond 2^22 in magnitude, too."""
    bits = lax.bitcast_convert_type(x + _F(12582912), jnp.int32)
    return (bits & np.int32(0x7FFFFF)) - np.int32(0x400000)


def _integers(values: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Integers of 0 to `most` for rows of numbers, int8, and d (rows, 1) for them."""
    largest = jnp.maximum(jnp.max(values, 1, keepdims=True), _F(0))
    positive = largest > 0
    inverse = divided(jnp.full_like(largest, most), jnp.where(positive, largest, jnp.ones_like(largest)))
    inverse = jnp.where(positive, inverse, jnp.zeros_like(inverse))
    own = jnp.minimum(_nearest(unfused(inverse * values)) & np.int32(255), most)
    return own.astype(jnp.int8), to_float16_grid(divided(largest, _F(most)))


def _search_affine(
    x: jax.Array, w: jax.Array, top: int, first: float, steps: int, *, absolute: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, scales and minimums with the least weighted error of those that are tried (`make_qkx2_quants`).

    x: blocks as columns. w: weights of the errors. first, steps: the codes are tried for top + first, and `steps` times
    0.1 more. absolute: whether errors are not squared.
    """
    low, high = jnp.minimum(jnp.min(x, 0, keepdims=True), _F(0)), jnp.max(x, 0, keepdims=True)
    flat = high == low
    sum_w, sum_x = _sum(w), _sum(unfused(w * x))
    one = jnp.ones_like(low)

    def codes_of(inverse: jax.Array, low: jax.Array) -> jax.Array:
        return jnp.clip(_nearest(unfused(inverse * (x - low))), 0, top)

    def error(codes: jax.Array, scale: jax.Array, low: jax.Array) -> jax.Array:
        apart = unfused(scale * codes.astype(jnp.float32)) + low - x
        return _sum(unfused(w * (jnp.abs(apart) if absolute else unfused(apart * apart))))

    def step(best: tuple[jax.Array, ...], reach: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        low, least = best[2:]
        tried = codes_of(divided(jnp.full_like(low, reach), jnp.where(flat, one, high - low)), low)
        number = tried.astype(jnp.float32)
        weighted = unfused(w * number)
        sum_l, sum_l2, sum_xl = _sum(weighted), _sum(unfused(weighted * number)), _sum(unfused(weighted * x))
        size = unfused(sum_w * sum_l2) - unfused(sum_l * sum_l)
        by = jnp.where(size > 0, size, one)
        new = divided(unfused(sum_w * sum_xl) - unfused(sum_x * sum_l), by)
        new_low = divided(unfused(sum_l2 * sum_x) - unfused(sum_l * sum_xl), by)
        above = new_low > 0
        new = jnp.where(above, divided(sum_xl, jnp.where(sum_l2 > 0, sum_l2, one)), new)
        new_low = jnp.where(above, _F(0), new_low)
        new_error = error(tried, new, new_low)
        better = (size > 0) & (new_error < least)
        found = (tried, new, new_low, new_error)
        return tuple(jnp.where(better, a, b) for a, b in zip(found, best, strict=True)), None

    inverse = _kept(divided(jnp.full_like(low, top), jnp.where(flat, one, high - low)))
    scale = divided(one, inverse)
    codes = codes_of(inverse, low)
    reaches = (_F(first) + _F(0.1) * np.arange(steps + 1, dtype=_F)) + _F(top)
    start = (codes, scale, low, error(codes, scale, low))
    codes, scale, found, _ = lax.scan(step, start, jnp.asarray(reaches))[0]
    zero = jnp.zeros_like(low)
    return jnp.where(flat, 0, codes), jnp.where(flat, zero, scale), -jnp.where(flat, low, found)


def _of_greatest(x: jax.Array, axis: int) -> jax.Array:
    """The number of greatest magnitude along an axis, which stays with size 1; the first of equal ones."""
    return jnp.take_along_axis(x, jnp.argmax(jnp.abs(x), axis, keepdims=True), axis)


def _search_symmetric(x: jax.Array, low: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales with the least squared error, weighted by squares, of those tried (`make_qx_quants`)."""
    largest = _of_greatest(x, 0)
    nothing = jnp.abs(largest) < _SMALL
    largest = jnp.where(nothing, jnp.ones_like(largest), largest)
    w = unfused(x * x)
    one = jnp.ones_like(largest)

    def sums(reach: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        inverse = divided(jnp.full_like(largest, -reach), largest)
        codes = jnp.clip(_nearest(unfused(inverse * x)), -low, low - 1)
        number = codes.astype(jnp.float32)
        return codes, _sum(unfused(unfused(w * x) * number)), _sum(unfused(unfused(w * number) * number))

    def step(best: tuple[jax.Array, ...], reach: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        tried, sum_lx, sum_l2 = sums(reach)
        scale = divided(sum_lx, jnp.where(sum_l2 > 0, sum_l2, one))
        better = (sum_l2 > 0) & (unfused(sum_lx * sum_lx) > unfused(best[2] * sum_l2))
        found = (tried, scale, unfused(scale * sum_lx))
        return tuple(jnp.where(better, a, b) for a, b in zip(found, best, strict=True)), None

    codes, sum_lx, sum_l2 = sums(jnp.asarray(_F(low)))
    scale = jnp.where(sum_l2 != 0, divided(sum_lx, jnp.where(sum_l2 != 0, sum_l2, one)), _F(0))
    reaches = _F(low) + _F(0.1) * np.array([n for n in range(-9, 10) if n], _F)
    codes, scale, _ = lax.scan(step, (codes, scale, unfused(scale * sum_lx)), jnp.asarray(reaches))[0]
    return jnp.where(nothing, -low, codes), jnp.where(nothing, _F(0), scale)


def _descend(x: jax.Array, low: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales after five rounds, in each of which one code after the other moves (`make_q3_quants`)."""
    largest = _of_greatest(x, 0)
    nothing = jnp.abs(largest) < _SMALL
    inverse = divided(jnp.full_like(largest, -low), jnp.where(nothing, jnp.ones_like(largest), largest))
    codes = jnp.clip(_nearest(unfused(inverse * x)), -low, low - 1)
    w = unfused(x * x)
    wx = unfused(w * x)
    number = codes.astype(jnp.float32)
    sum_lx, sum_l2 = _sum(unfused(wx * number)), _sum(unfused(unfused(w * number) * number))

    def step(best: tuple[jax.Array, ...], at: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        codes, sum_lx, sum_l2 = best
        one, own_w, own_wx, code = (lax.dynamic_index_in_dim(a, at, 0) for a in (x, w, wx, codes))
        number = code.astype(jnp.float32)
        lx, l2 = sum_lx - unfused(own_wx * number), sum_l2 - unfused(unfused(own_w * number) * number)
        allowed = lx > 0
        moved = _nearest(divided(unfused(one * l2), jnp.where(allowed, lx, jnp.ones_like(lx))))
        moved = jnp.clip(moved, -low, low - 1)
        number = moved.astype(jnp.float32)
        lx, l2 = lx + unfused(own_wx * number), l2 + unfused(unfused(own_w * number) * number)
        gain = unfused(unfused(lx * lx) * sum_l2) > unfused(unfused(sum_lx * sum_lx) * l2)
        better = allowed & (moved != code) & (l2 > 0) & gain
        codes = lax.dynamic_update_index_in_dim(codes, jnp.where(better, moved, code), at, 0)
        return (codes, jnp.where(better, lx, sum_lx), jnp.where(better, l2, sum_l2)), None

    order = jnp.asarray(np.tile(np.arange(x.shape[0], dtype=np.int32), 5))
    codes, sum_lx, sum_l2 = lax.scan(step, (codes, sum_lx, sum_l2), order)[0]
    positive = sum_l2 > 0
    scale = jnp.where(positive, divided(sum_lx, jnp.where(positive, sum_l2, jnp.ones_like(sum_l2))), _F(0))
    return jnp.where(nothing, -low, codes), jnp.where(nothing, _F(0), scale)
