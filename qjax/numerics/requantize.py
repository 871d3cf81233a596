"""Requantize: from the int32 accumulator to the codes of the output, under a named rule.

acc is a sum of products of codes with the value acc * s_x * s_w; the output code is rounded(acc * e) + zero_point with
the effective scale e = s_x * s_w / s_y. Runtimes round differently, so each way is a rule with a name, see `rules`.
This module checks the arguments, broadcasts the constants to the shape of acc, clamps and adds zero_point; a rule may
clamp and add the zero point itself.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import like_inputs, traced
from qjax.numerics.calls import are_names_kept, named
from qjax.numerics.rounding import check_key
from qjax.numerics.rules import Call, Rule, get_rule
from qjax.numerics.softfloat import Real

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def requantize(
    acc: Any,
    effective_scale: Any,
    *,
    rule: str = "nearest_even",
    zero_point: Any = 0,
    qmin: int = -128,
    qmax: int = 127,
    key: jax.Array | None = None,
) -> jax.Array:
    """clamp(rounded(acc * effective_scale) + zero_point, qmin, qmax), the rounding being the rule's.

    No step overflows, unless the rule states it: products are 64 bits wide, the rounded value saturates to
    int32, and the zero point is added after clamping to [qmin - zero_point, qmax - zero_point], which is the
    same number. A rule that adds the zero point inside its rounding, or that does not clamp, states this in its
    docstring. Given constants, the computation holds integers only, also where the runtime's holds floats.

    Args:
      acc: int32, any shape; int64 for a rule that takes it (`int16x8`).
      effective_scale: a `Real`, a float, a float32 array, or the rule's own constants as
        `get_rule(rule).prepare` gives them (a `Multiplier` for most fixed-point rules, a `float32.Float32`
        for the float32 ones). Its shape broadcasts to that of acc by numpy's rules: (channels,) scales the
        last axis. A bias that is a constant of the rule (`float32_bias`) is given this way only; with a plain
        scale it is 0.
      rule: a name out of `rule_names()`, or one with parameters such as "power_of_two:TRN:WRAP".
      zero_point: int, or an int32 array that broadcasts to the shape of acc.
      qmin: the least code.
      qmax: the greatest code.
      key: a random key, for the rule `stochastic` only.

    Returns:
      int32 codes of the shape of acc. The cast to a narrower type is the caller's.

    Raises:
      TypeError: acc has another dtype, or the constants are those of another rule.
      ValueError: unknown rule, empty or too wide code range, shapes that do not broadcast, missing or unused
        key; and on the host, as values are not checked inside a trace, a scale that is negative, NaN,
        infinite or too great for the rule (2^30 for a `Multiplier`), or constants out of their range.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> sums = np.int32([5, 7, 9000])
      >>> print(numerics.requantize(sums, 0.5, rule="nearest_even"))
      [  2   4 127]
      >>> print(numerics.requantize(sums, 0.5, rule="single_round"))
      [  3   4 127]
    """
    chosen = get_rule(rule)
    check_key(rule, chosen.needs_key, key)
    acc = _as_accumulator(chosen, acc)
    constants = _as_constants(chosen, effective_scale)
    constants = jax.tree.map(lambda c: _expand("effective_scale", c, acc.shape), constants)
    zero_point = _expand("zero_point", _as_zero_point(zero_point, qmin, qmax), acc.shape)
    # an int64 accumulator crosses the boundary of this jit
    with jax.enable_x64(True) if acc.dtype == np.int64 else contextlib.nullcontext():
        # a program that was compiled before has no named calls
        steps = rounded_codes if are_names_kept() else _requantize
        return steps(chosen, qmin, qmax, acc, constants, zero_point, key)


@named(0, 1, 2)
def rounded_codes(
    rule: Rule, qmin: int, qmax: int, acc: Any, constants: Any, zero_point: Any, key: jax.Array | None
) -> jax.Array:
    """`requantize` with arguments that are already checked and broadcast."""
    with jax.enable_x64(True):
        rounded = rule.apply(acc, constants, Call(zero_point, qmin, qmax, key))
        if rule.finishes:
            return rounded
        low, high = np.int32(qmin) - zero_point, np.int32(qmax) - zero_point
        return jnp.minimum(jnp.maximum(rounded, low), high) + zero_point


_requantize = functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)(rounded_codes)


def _as_accumulator(rule: Rule, acc: ArrayLike) -> Any:
    dtype = str(getattr(acc, "dtype", type(acc).__name__))
    if dtype not in rule.accumulators:
        raise TypeError(
            f"acc must be an {' or '.join(rule.accumulators)} array. Got {dtype}; accumulate in "
            f"{rule.accumulators[-1]}."
        )
    # numpy's int64 must not pass through jnp.asarray where 64-bit types are disabled
    return acc if dtype == "int64" else jnp.asarray(acc)


def _as_constants(rule: Rule, scale: ArrayLike) -> Any:
    if isinstance(scale, rule.constants):
        if rule.check is not None and not traced(*jax.tree.leaves(scale)):
            rule.check(scale)
        return scale
    if isinstance(scale, tuple):
        raise TypeError(
            f"rule {rule.name!r} takes a scale or constants of type {rule.constants.__name__}. "
            f"Got {type(scale).__name__}; build them with get_rule({rule.name!r}).prepare(scale)."
        )
    return rule.prepare(Real.of(scale))


def _as_zero_point(zero_point: ArrayLike, qmin: int, qmax: int) -> Any:
    if not _INT32_MIN <= qmin <= qmax <= _INT32_MAX:
        raise ValueError(f"the codes must satisfy -2^31 <= qmin <= qmax < 2^31. Got qmin={qmin}, qmax={qmax}.")
    if isinstance(zero_point, int):
        zero_point = np.int32(zero_point)
    dtype = str(getattr(zero_point, "dtype", type(zero_point).__name__))
    if dtype != "int32":
        raise TypeError(f"zero_point must be an int or an int32 array. Got {dtype}.")
    if traced(zero_point):
        if qmin < -(2**30) or qmax >= 2**30:
            raise ValueError(
                f"a traced zero_point needs codes within [-2^30, 2^30). Got [{qmin}, {qmax}]; pass a concrete one."
            )
    else:
        host = np.asarray(zero_point).astype(np.int64)
        if host.size and (qmin - int(host.max()) < _INT32_MIN or qmax - int(host.min()) > _INT32_MAX):
            raise ValueError(
                f"qmin - zero_point and qmax - zero_point must fit int32. Got codes [{qmin}, {qmax}] and "
                f"zero points from {host.min()} to {host.max()}; a zero point is itself a code."
            )
    return zero_point


def _expand(name: str, value: ArrayLike, shape: tuple[int, ...]) -> Any:
    """`value` with leading axes of 1, so that it broadcasts to `shape` without a promotion of ranks."""
    have = tuple(np.shape(value))
    fits = len(have) <= len(shape)
    for given, wanted in zip(reversed(have), reversed(shape), strict=False):
        fits = fits and (given == 1 or given == wanted)
    if not fits:
        raise ValueError(f"{name} must broadcast to the shape of acc, {shape}. Got shape {have}.")
    xp = like_inputs(value)
    return xp.reshape(xp.asarray(value), (1,) * (len(shape) - len(have)) + have)
