"""Products of integer-valued floats that are exact, and differentiable, on any backend.

The training forward multiplies codes, not dequantized floats. As long as every partial sum is below 2^24, float32
represents the integer accumulator exactly, even with TF32 and bfloat16 passes, because 8-bit codes fit their mantissas.
Beyond that bound the weight's codes are split into digits. If digits do not suffice, the product runs in int32.

| codes | CPU | accelerators |
| --- | --- | --- |
| 8 bits, sums below 2^24 | int8 | bfloat16, twice as fast as TF32 on an H200 |
| 8 bits, larger sums | int8 | int8, as fast as bfloat16 there |
| 8 bits, no form in int8 | float32, in digits | bfloat16, in digits |
| wider | float32, in digits, or int32 | the same; convolutions in int32 |

cuDNN computes float32 convolutions by Winograd's transforms where they are faster: on an H200 one of 28x28x128 had
177,340 wrong sums of 200,704. In bfloat16 the sums of all eight shapes that were tried there are right.

The backward multiplies in float32, and on accelerators in bfloat16 if the model does. Until then it stores 8-bit codes
as int8.

A sum of wide codes can exceed int32. Then the float32 product replaces the wrapped sum, and `convert` rejects such
weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from qjax.numerics.fence import finished_on_cpu
from qjax.numerics.meshes import varying_alike
from qjax.ops import backward, products
from qjax.ops.base import Equation, Quantized
from qjax.ops.recomputed import is_recomputed

ACCUMULATOR = "accumulator"
"""The name by which a policy of `jax.checkpoint` finds the arrays that are most expensive to recompute."""

EXACT = 2**24
"""float32 represents every integer up to this one."""

_BELOW = 2.0**31 * 15 / 16
"""The bound of int32, reduced by what sums of bounds may lose in float32."""

Product = Callable[..., jax.Array]
"""`(a, b, dtype of the accumulator, precision, *groups) -> array`, bilinear in a and b."""

Integers = Callable[..., jax.Array]
"""`(a, b, zero_a, zero_b, *groups)`: int8 codes and the codes of 0.0 among them, int32 scalars (None is 0), to the
int32 sums of `(a - zero_a) (b - zero_b)`."""

_Multiply = Callable[..., jax.Array]


def largest_code(value: Quantized) -> int:
    """An upper bound of |code - zero_point| from the spec alone."""
    spec = value.qparams.spec
    return max(abs(spec.qmin), spec.qmax) if spec.symmetric else spec.qmax - spec.qmin


def precision(*values: Quantized) -> lax.Precision:
    """The precision of a product: codes beyond 8 bits need all of float32's mantissa."""
    return products.FULL if any(largest_code(v) > 256 for v in values) else products.FAST


def matmul_codes(
    x: Quantized,
    w: Quantized,
    axes: Sequence[Sequence[int]],
    product: Product,
    own: Equation,
    integers: Integers | None = None,
    *,
    apart: Sequence[Sequence[Sequence[int]]] = ((), ()),
    transforms: bool = False,
    groups: Sequence[jax.Array] = (),
    halves: tuple[backward.Half, backward.Half] | None = None,
) -> jax.Array:
    """The accumulator of two tensors of codes as float32 (rounded once where it exceeds 2^24).

    Its bits do not depend on the platform, nor on which of the formulations computes it.

    Args:
      axes: the axes of w that one accumulator sums over, and those of x, or () where x meets a window of w's shape.
      product: called with float32, bfloat16 or int32 operands.
      own: the model's product. Its precision and dtype are those of the derivatives of codes up to 8 bits, whose value
        does not depend on them.
      integers: the same in int8, or None. Codes of up to 8 bits use it on the CPU, where XLA multiplies int8 up to 4
        times as fast as float32. A NaN among the codes then makes every accumulator NaN, but see `apart`.
      apart: for x and for w, [axis of the result, axis of the operand] along which a NaN does not spread. Along the
        other axes the search for it is a sum, on several devices over all of them.
      transforms: whether accelerators may transform the operands of float32 products, so that sums are not exact.
      groups: integers that choose which rows meet, which `product` and `integers` take as their last operands.
      halves: the products of the backward pass, for one in integers (`ops.backward`); None if there are none.
    """
    summed = math.prod(w.shape[axis] for axis in axes[0])
    reach = largest_code(x) * summed
    wraps = reach * largest_code(w) >= 2**31
    digits, top = 1, largest_code(w)
    while reach * 8 < EXACT and reach * top >= EXACT and top > 8:
        digits, top = digits + 1, -(-top // 16)
    needed = precision(x, w)
    fits, narrow = reach * top < EXACT, needed is products.FAST
    on_cpu = _in_digits(digits, _in_float32(product, needed)) if fits else _in_int32(product)
    elsewhere = on_cpu
    if fits and narrow:
        elsewhere = _in_digits(digits, _in_bfloat16(product, jnp.float32, needed))
    elif transforms:
        elsewhere = _in_int32(product)
    zeros: tuple[Any, ...] = (None, None)
    in_bytes = _narrow(x) and _narrow(w)
    same = on_cpu is elsewhere
    on_cpu = _without_zeros(on_cpu)
    elsewhere = on_cpu if same else _without_zeros(elsewhere)
    if in_bytes:
        zeros = _code_of_zero(x), _code_of_zero(w)
        if integers is not None:
            on_cpu = _in_int8(integers, apart)
            elsewhere = elsewhere if fits and digits == 1 else on_cpu
    exact = _by_platform(on_cpu, elsewhere)
    if wraps:
        exact = _or_floats(exact, axes, _without_zeros(_in_float32(product, products.FULL)))
    along = _in_float32(product, own.params["precision"] if narrow else needed)
    if narrow and own.in_dtypes[0] == jnp.bfloat16:
        along = _by_platform(along, _in_bfloat16(product, jnp.bfloat16, own.params["precision"]))
    step = backward.current()
    if step is not None and halves is not None:
        of_stored = None if integers is None or not in_bytes else _of_stored(integers, apart)
        return _with_integer_backward(x, w, exact, of_stored, apart, halves, step)
    tangent = _of_bytes(along) if in_bytes and not is_recomputed() else _of_floats(along)

    @jax.custom_jvp
    def multiply(a: jax.Array, b: jax.Array, *rest: Any) -> jax.Array:
        return exact(a, b, *rest).astype(jnp.float32)

    @multiply.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        return multiply(*primals), finished_on_cpu(tangent(*tangents[:2], *primals))

    acc = multiply(x.codes.astype(jnp.float32), w.codes.astype(jnp.float32), *zeros, *groups)
    return checkpoint_name(acc, ACCUMULATOR)


def _with_integer_backward(
    x: Quantized,
    w: Quantized,
    exact: _Multiply,
    bytes_on_cpu: _Multiply | None,
    apart: Sequence[Sequence[Sequence[int]]],
    halves: tuple[backward.Half, backward.Half],
    step: backward.Current,
) -> jax.Array:
    """`matmul_codes` with int8 codes for its backward pass; operands whose codes do not fit are quantized for it.

    bytes_on_cpu: the forward on the CPU, from the int8 codes that the backward pass reads as well.
    """
    zeros = tuple(_code_of_zero(v) if _narrow(v) else None for v in (x, w))
    takes = halves[1].takes_zero, halves[0].takes_zero
    narrow = [_narrow(v) and (zero is None or take) for v, zero, take in zip((x, w), zeros, takes, strict=True)]
    reach = [largest_code(v) if fits else None for v, fits in zip((x, w), narrow, strict=True)]

    def forward(a: jax.Array, b: jax.Array, *zeros: Any) -> tuple[jax.Array, Any]:
        kept = [
            finished_on_cpu(_stored(v, zero) if fits else v)
            for v, zero, fits in zip((a, b), zeros, narrow, strict=True)
        ]

        def elsewhere(a: jax.Array, b: jax.Array, kept: Any, *zeros: Any) -> jax.Array:
            return exact(a, b, *zeros).astype(jnp.float32)

        if bytes_on_cpu is None or not all(narrow):
            acc = elsewhere(a, b, kept, *zeros)
        else:
            acc = lax.platform_dependent(a, b, kept, *zeros, cpu=bytes_on_cpu, default=elsewhere)
        lost = jnp.any(_has_nan(a, apart[0], acc.ndim)) | jnp.any(_has_nan(b, apart[1], acc.ndim))
        return acc, (*kept, lost)

    multiply = backward.differentiable(forward, halves, step.how, (reach[0], reach[1]))
    a, b = varying_alike([x.codes.astype(jnp.float32), w.codes.astype(jnp.float32)])
    return checkpoint_name(multiply(a, b, step.words, *zeros), ACCUMULATOR)


def _or_floats(exact: _Multiply, axes: Sequence[Sequence[int]], floats: _Multiply) -> _Multiply:
    """`exact`, or `floats` if a sum could exceed int32 or a code is NaN; the check costs one pass over each operand."""

    def multiply(a: jax.Array, b: jax.Array, *rest: Any) -> jax.Array:
        large = [jnp.abs(x) for x in (a, b)]
        bound = jnp.max(jnp.sum(large[1], axis=tuple(axes[0]))) * jnp.max(large[0])
        if axes[1]:
            bound = jnp.minimum(bound, jnp.max(jnp.sum(large[0], axis=tuple(axes[1]))) * jnp.max(large[1]))
        return lax.cond(
            bound < np.float32(_BELOW),
            lambda *operands: exact(*operands).astype(jnp.float32),
            lambda *operands: floats(*operands),
            *(a, b, *rest),
        )

    return multiply


def _of_floats(product: _Multiply) -> _Multiply:
    """The product, with its tangent by the product rule."""

    def tangent(
        da: jax.Array, db: jax.Array, a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any, *groups: Any
    ) -> jax.Array:
        return product(da, finished_on_cpu(b), *groups) + product(finished_on_cpu(a), db, *groups)

    return tangent


def _of_bytes(product: _Multiply) -> _Multiply:
    """`_of_floats`, except that it stores a and b as int8 for the backward."""

    # `jax.checkpoint` inserts barriers, without which XLA would store the forward's float32 codes instead of int8
    @jax.checkpoint
    def left(da: jax.Array, b: jax.Array, zero: Any, *groups: Any) -> jax.Array:
        return product(da, finished_on_cpu(_restored(b, zero)), *groups)

    @jax.checkpoint
    def right(a: jax.Array, db: jax.Array, zero: Any, *groups: Any) -> jax.Array:
        return product(finished_on_cpu(_restored(a, zero)), db, *groups)

    def tangent(
        da: jax.Array, db: jax.Array, a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any, *groups: Any
    ) -> jax.Array:
        return left(da, _stored(b, zero_b), zero_b, *groups) + right(_stored(a, zero_a), db, zero_a, *groups)

    return tangent


def _narrow(value: Quantized) -> bool:
    """Whether the codes fit int8 once their range is shifted there, with one zero point for all."""
    spec = value.qparams.spec
    return spec.qmax - spec.qmin <= 255 and (spec.symmetric or spec.per_tensor)


def _without_zeros(exact: _Multiply) -> _Multiply:
    def multiply(a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any, *groups: Any) -> jax.Array:
        return exact(a, b, *groups).astype(jnp.float32)

    return multiply


def _by_platform(on_cpu: _Multiply, elsewhere: _Multiply) -> _Multiply:
    if on_cpu is elsewhere:
        return on_cpu

    def multiply(a: jax.Array, b: jax.Array, *rest: Any) -> jax.Array:
        forms = [lambda *operands, form=form: form(*operands).astype(jnp.float32) for form in (on_cpu, elsewhere)]
        return lax.platform_dependent(a, b, *rest, cpu=forms[0], default=forms[1])

    return multiply


def _in_int8(integers: Integers, apart: Sequence[Sequence[Sequence[int]]]) -> _Multiply:
    multiply = _of_stored(integers, apart)

    def exact(a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any, *groups: Any) -> jax.Array:
        stored = tuple(finished_on_cpu(_stored(x, zero)) for x, zero in ((a, zero_a), (b, zero_b)))
        return multiply(a, b, stored, zero_a, zero_b, *groups)

    return exact


def _of_stored(integers: Integers, apart: Sequence[Sequence[Sequence[int]]]) -> _Multiply:
    """`_in_int8` of codes that are int8 already; the float codes are read for their NaNs."""

    def exact(a: jax.Array, b: jax.Array, stored: Any, zero_a: Any, zero_b: Any, *groups: Any) -> jax.Array:
        acc = integers(*stored, zero_a, zero_b, *groups).astype(jnp.float32)
        # int8 has no NaN, but a training run must see its NaNs
        lost = _has_nan(a, apart[0], acc.ndim) | _has_nan(b, apart[1], acc.ndim)
        return acc + jnp.where(lost, np.float32(np.nan), np.float32(0))

    return exact


def _has_nan(x: jax.Array, apart: Sequence[Sequence[int]], rank: int) -> jax.Array:
    """Whether there is a NaN, along the axes of a result of that rank; a sum is the fastest test."""
    kept = {axis: position for position, axis in apart}
    found = jnp.isnan(jnp.sum(x, axis=[axis for axis in range(x.ndim) if axis not in kept]))
    order = sorted(range(len(kept)), key=lambda index: kept[sorted(kept)[index]])
    others = [position for position in range(rank) if position not in kept.values()]
    return jnp.expand_dims(jnp.transpose(found, order), others)


def _code_of_zero(value: Quantized) -> jax.Array | None:
    """The int8 code of 0.0, int32, or None if it is 0, after the range of the codes is shifted into int8."""
    spec = value.qparams.spec
    moved = 0 if spec.qmin >= -128 and spec.qmax <= 127 else spec.qmin + 128
    if spec.symmetric:
        return None if moved == 0 else jnp.int32(-moved)
    return lax.stop_gradient(value.qparams).integer_zero_point().reshape(()) - np.int32(moved)


def _stored(codes: jax.Array, zero: jax.Array | None) -> jax.Array:
    if zero is not None:
        codes = codes + zero.astype(jnp.float32)
    # the codes are in range, but without the clip XLA may drop the saturation of the cast
    return jnp.clip(codes, np.float32(-128), np.float32(127)).astype(jnp.int8)


def _restored(codes: jax.Array, zero: jax.Array | None) -> jax.Array:
    codes = codes.astype(jnp.float32)
    return codes if zero is None else codes - zero.astype(jnp.float32)


def _in_float32(product: Product, precision: Any) -> _Multiply:
    return lambda a, b, *groups: product(a, b, jnp.float32, precision, *groups)


def _in_bfloat16(product: Product, kind: Any, precision: Any) -> _Multiply:
    """The product in bfloat16 with an accumulator of dtype `kind`; the result is float32."""
    half = jnp.bfloat16
    return lambda a, b, *groups: product(a.astype(half), b.astype(half), kind, precision, *groups).astype(jnp.float32)


def _in_digits(digits: int, product: _Multiply) -> _Multiply:
    if digits == 1:
        return product

    def exact(a: jax.Array, b: jax.Array, *groups: jax.Array) -> jax.Array:
        total, weight = None, 1
        for position in range(digits):
            high = jnp.round(b * (1 / 16)) if position + 1 < digits else jnp.zeros_like(b)
            part = product(a, b - high * 16, *groups).astype(jnp.int32) * weight
            total = part if total is None else total + part
            b, weight = high, weight * 16
        assert total is not None
        return total

    return exact


def _in_int32(product: Product) -> _Multiply:
    def exact(a: jax.Array, b: jax.Array, *groups: jax.Array) -> jax.Array:
        return product(a.astype(jnp.int32), b.astype(jnp.int32), jnp.int32, products.FULL, *groups)

    return exact
