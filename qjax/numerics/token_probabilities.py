"""Log-probabilities of tokens, and tokens drawn by a key: the same bits in every program.

Weights w_i = rint(2^30 exp(-d_i / T)), with d_i how far logit i lies below the greatest of its row, and their sum W:

    log_probs = -(d_t / T + log(W / 2^30))        sample: the first token t with w_0 + ... + w_t > floor(W r / 2^64)

W is a sum of integers, so neither the batch, nor the mesh, nor the order of the sum can change it. Its logarithm is
that of `integer_logsumexp`, and r are 64 bits of the row's own key. What is computed in floats is a subtraction, a
product and a rounding per logit, and one subtraction per row. They rest on three properties of the platform, which
XLA's compilers for CPUs and GPUs have: float32 subtraction and multiplication round once, to nearest; a maximum with
the lowest finite number keeps them from being fused (see `unfused`); float32 and int32 convert into each other as in
IEEE 754. No exponential, logarithm or division of floats is used.

The error: a weight is off by at most one unit, and a token with a probability below 2^-31 of the greatest one's has the
weight 0. So for n tokens log(W / 2^30) is off by at most 2^-22 + n 2^-30, and it is rounded to float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from qjax.numerics._namespace import wide
from qjax.numerics.division import divide_to_even
from qjax.numerics.integer_logsumexp import LOG_BITS, logarithm, logarithms
from qjax.numerics.integer_softmax import exponentials, leading, looked_up
from qjax.numerics.meshes import WHOLE, automatic, explicit_mesh, typed, untyped
from qjax.numerics.rounding import round_float
from qjax.numerics.unfused import unfused

_STEP = 24
"""Differences are in steps of 2^-24."""
_ENTRY = 10
"""Entries of the table are 2^-10 apart."""
_BELOW = 31.0
"""The weight of a token that lies so far below the greatest logit is 0."""
_LOWEST = np.float32(np.finfo(np.float32).min)
_INFINITE = np.int32(0x7F800000)
_LEAST = np.int32(-(2**31))
_NO_TOKEN = np.int32(-1)
_SALT = np.uint32(0x716A6178)
_PARTS = 30
"""top_p is in steps of 2^-30."""


def log_probs(logits: ArrayLike, tokens: ArrayLike, temperature: float = 1.0) -> jax.Array:
    """The logarithms of tokens' probabilities, softmax(logits / temperature)[token], in every program the same bits.

    Eager, under jit, vmap, scan and remat, for every batch and mesh. The gradient with respect to the logits is that of
    log-softmax, `((i == token) - softmax_i) / temperature`, by a custom rule for reverse mode.

    Args:
      logits: floats of at most 32 bits, [..., tokens of the vocabulary]; -inf is a token of probability 0.
      tokens: integers, [...], from 0 to the size of the vocabulary - 1.
      temperature: a positive Python number; a logit's distance from the greatest one is multiplied by the float32
        nearest to 1 / temperature.

    Returns:
      float32 [...]. A row with NaN, with +inf or with -inf only has no probabilities, and its result is NaN. A
      token outside the vocabulary is an error, and inside a trace, where its number is not known, NaN.

    Raises:
      TypeError: logits that are no such floats, or tokens that are no integers.
      ValueError: other shapes, a token outside the vocabulary, a temperature that is not positive and finite.

    Examples:
      ```python
      logits = np.float32([[1.0, 2.0, 3.0], [0.5, 0.5, -np.inf]])
      print(qjax.log_probs(logits, np.int32([2, 0])))  # [-0.40760598 -0.6931472]
      ```
    """
    logits = _checked(logits, "log_probs")
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"log_probs: expected tokens as integers, got {tokens.dtype}.")
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(
            f"log_probs: expected one token for each row of logits, so tokens of shape {logits.shape[:-1]}, got "
            f"{tokens.shape}. For a text, give the logits of place t the token of place t + 1."
        )
    size = logits.shape[-1]
    if not isinstance(tokens, Tracer) and tokens.size and tokens.is_fully_addressable:
        low, high = int(jnp.min(tokens)), int(jnp.max(tokens))
        if low < 0 or high >= size:
            raise ValueError(
                f"log_probs: expected tokens from 0 to {size - 1}, got {low} to {high}. Mask places without a token "
                "after this call, and give them any token of the vocabulary."
            )
    # an unsigned or wide token beyond int32 must not wrap into the vocabulary
    inside = (tokens >= 0) & (tokens < size) if size <= jnp.iinfo(tokens.dtype).max else tokens >= 0
    chosen = jnp.where(inside, tokens, jnp.zeros_like(tokens)).astype(jnp.int32)
    found = _rows(functools.partial(_log_probs, inverse=_inverse(temperature, "log_probs")), logits, chosen)
    return jnp.where(inside, found, jnp.full_like(found, jnp.nan))


def sample(
    logits: ArrayLike,
    key: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Tokens drawn from softmax(logits / temperature), in every program the same ones.

    The token of a row depends on that row and its key alone. With one key for all, row r has the key `fold_in(key, r)`,
    so that a larger batch begins with the tokens of a smaller one. Give each row a key of its own where rows move, as
    with slots that are refilled: `jax.vmap(jax.random.fold_in)(keys_of_texts, places)`.

    `top_k` first keeps that many tokens of the greatest logits. `top_p` then keeps as few of these as have at least
    that share of their weight, the greatest first. Among equal logits the lowest tokens are kept.

    Args:
      logits: floats of at most 32 bits, [..., tokens of the vocabulary]; a token with -inf is never drawn.
      key: of `jax.random.key` or `jax.random.PRNGKey` with the generator threefry2x32, whose bits do not depend on the
        program: one, or one for each row, [...]. Only a temperature of 0 takes None.
      temperature: a Python number; 0 takes the greatest logit, among equal ones the lowest token.
      top_k: from 1; None, and more than the vocabulary has, keep all.
      top_p: above 0 and at most 1, rounded to a multiple of 2^-30; None keeps all.

    Returns:
      int32 [...]. A row with NaN, with +inf or with -inf only is an error, and inside a trace its token is -1.

    Raises:
      TypeError: logits that are no such floats; a key of another generator, or none.
      ValueError: a row without probabilities; a key, temperature, top_k or top_p that is none of those above.

    Examples:
      ```python
      logits = np.float32([[1.0, 2.0, 3.0], [0.5, 0.5, -np.inf]])
      print(qjax.sample(logits, jax.random.key(0), temperature=0.7, top_p=0.9))
      print(qjax.sample(logits, temperature=0))  # [2 0]
      ```
    """
    logits = _checked(logits, "sample")
    wanted: Any = top_k
    part: Any = top_p
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise ValueError(f"sample: expected top_k as an integer from 1 or None, got {top_k!r}.")
    if part is not None and not (isinstance(part, int | float) and 2.0**-_PARTS <= part <= 1):
        raise ValueError(f"sample: expected top_p as a number above 0 and at most 1, or None, got {top_p!r}.")
    if temperature == 0:
        found = _rows(_greedy, logits)
    else:
        choice = functools.partial(
            _draw, inverse=_inverse(temperature, "sample"), top_k=top_k, part=None if top_p is None else _part(top_p)
        )
        rows = logits.shape[:-1]
        found = _rows(choice, logits, _random_words(_checked_key(key, rows), rows))
    if not isinstance(found, Tracer) and found.is_fully_addressable and bool(jnp.any(found == _NO_TOKEN)):
        row = np.argwhere(np.asarray(found) == _NO_TOKEN)[0]
        raise ValueError(
            f"sample: row {tuple(map(int, row))} of the logits has no probabilities, because it has NaN, +inf or -inf "
            "only. Check the model's output, or the mask that was added to it."
        )
    return found


def _checked(logits: ArrayLike, what: str) -> jax.Array:
    """The logits in float32, which holds every float of 16 bits."""
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or logits.dtype.itemsize > 4:
        raise TypeError(f"{what}: expected logits in float32, float16 or bfloat16, got {logits.dtype}.")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"{what}: expected logits of shape [..., tokens of the vocabulary], got {logits.shape}.")
    return logits.astype(jnp.float32)


def _inverse(temperature: Any, what: str) -> float:
    """The float32 nearest to 1 / temperature."""
    if isinstance(temperature, int | float) and temperature > 0:
        inverse = float(np.float32(min(1 / temperature, 1e39)))
        if 0 < inverse < math.inf:
            return inverse
    raise ValueError(f"{what}: expected the temperature as a positive Python number, got {temperature!r}.")


def _part(top_p: float) -> int:
    return max(1, round(top_p * 2**_PARTS))


def _rows(function: Any, logits: jax.Array, *others: jax.Array) -> jax.Array:
    """A function of rows, computed where explicit axes of a mesh are automatic; the result is split like the logits."""
    mesh = explicit_mesh((logits, others))
    if mesh is None:
        return function(logits, *others)
    with automatic(mesh):
        found = function(*untyped((logits, *others)))
    spec = jax.typeof(logits).sharding.spec
    return typed(found, WHOLE if spec is None else jax.sharding.PartitionSpec(*spec[: found.ndim]), mesh)


# ---------------------------------------------------------------------------- rows


def _keys(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers in the order of the logits, the greatest of each row as a float [..., 1], and rows without weights."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    nan = (bits & np.int32(0x7FFFFFFF)) > _INFINITE
    keys = jnp.where(bits < 0, _LEAST - bits, bits)
    greatest = jnp.max(keys, axis=-1, keepdims=True)
    lost = jnp.any(nan | (keys == _INFINITE), axis=-1) | (greatest[..., 0] == -_INFINITE)
    value = jnp.where(greatest < 0, _LEAST - greatest, greatest)
    return keys, jax.lax.bitcast_convert_type(value, jnp.float32), lost


def _weights(logits: jax.Array, greatest: jax.Array, inverse: float) -> jax.Array:
    """The weights: int32 from 0 to 2^30.

    With d = (1024 k + r) 2^-24 it is t - t g, where t is entry k of the table of exponentials, and g = r - r^2 / 2 is
    1 - exp(-r) up to 2^-32. Their product is computed in steps of 2^-35 by parts that fit into int32.
    """
    table = exponentials(np.float32(2.0**-_ENTRY), int(_BELOW) << _ENTRY)
    distance = unfused((greatest - unfused(logits)) * np.float32(inverse))
    fine = jnp.minimum(distance, np.float32(_BELOW)) * np.float32(2.0**_STEP)
    steps = round_float(fine, "nearest_even").astype(jnp.int32)
    entry = looked_up(jnp, jnp.asarray(table), steps >> np.int32(_STEP - _ENTRY))
    rest = steps & np.int32((1 << (_STEP - _ENTRY)) - 1)
    lost = (rest << np.int32(6)) - ((rest * rest + np.int32(1 << 18)) >> np.int32(19))
    high, low = entry >> np.int32(15), entry & np.int32(0x7FFF)
    upper, lower = lost >> np.int32(10), lost & np.int32(0x3FF)
    product = high * upper + ((((high * lower) << np.int32(5)) + low * upper) >> np.int32(15))
    return entry - ((product + np.int32(16)) >> np.int32(5))


def _total(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of each row as mantissa 2^shift, int64 [...], for a context of `wide`."""
    total = jnp.sum(weights.astype(jnp.int64), axis=-1)
    shift, mantissa = leading(jnp, jnp.maximum(total, np.int64(1 << 30)), weights.shape[-1])
    return shift, mantissa


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_gradient(logits: jax.Array, tokens: jax.Array, inverse: float) -> jax.Array:
    keys, greatest, lost = _keys(logits)
    weights = _weights(logits, greatest, inverse)
    with wide(jnp):
        shift, mantissa = _total(weights)
        logarithm_of_sum = logarithm(jnp, shift, mantissa, jnp.asarray(logarithms()))
    here = _is_token(logits, tokens)
    # a sum of one integer and zeros, because a gather has no rule on some meshes
    chosen = jnp.sum(jnp.where(here, keys, np.int32(0)), axis=-1, dtype=jnp.int32)
    bits = jnp.where(chosen < 0, _LEAST - chosen, chosen)
    own = unfused(jax.lax.bitcast_convert_type(bits, jnp.float32))
    distance = unfused((own - greatest[..., 0]) * np.float32(inverse))
    found = distance - logarithm_of_sum.astype(jnp.float32) * np.float32(2.0**-LOG_BITS)
    none = (chosen == -_INFINITE) | (distance == _LOWEST)
    found = jnp.where(none, np.float32(-np.inf), found)
    return jnp.where(lost, np.float32(np.nan), found)


def _is_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == tokens[..., None]


def _forward(logits: jax.Array, tokens: jax.Array, inverse: float) -> Any:
    return _with_gradient(logits, tokens, inverse), (logits, tokens)


def _backward(inverse: float, saved: Any, cotangent: jax.Array) -> Any:
    """The gradient: ((i == token) - w_i / W) / temperature. The quotient is w_i times the rounded reciprocal of W."""
    logits, tokens = saved
    _, greatest, lost = _keys(logits)
    weights = _weights(logits, greatest, inverse)
    with wide(jnp):
        shift, mantissa = _total(weights)
        reciprocal = divide_to_even(jnp, jnp.full_like(mantissa, np.int64(1 << 61)), mantissa)
        # 2^-(61 + shift), from its bits
        power = jax.lax.bitcast_convert_type(
            (np.int32(127 - 61) - shift.astype(jnp.int32)) << np.int32(23), jnp.float32
        )
        factor = reciprocal.astype(jnp.float32) * power
    shares = unfused(weights.astype(jnp.float32) * factor[..., None])
    slope = (_is_token(logits, tokens).astype(jnp.float32) - shares) * np.float32(inverse)
    slope = jnp.where(lost[..., None], np.float32(np.nan), slope)
    return slope * cotangent[..., None], np.zeros(tokens.shape, jax.dtypes.float0)


_with_gradient.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="inverse")
def _log_probs(logits: jax.Array, tokens: jax.Array, *, inverse: float) -> jax.Array:
    return _with_gradient(logits, tokens, inverse)


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    keys, _, lost = _keys(logits)
    return jnp.where(lost, _NO_TOKEN, jnp.argmax(keys, axis=-1).astype(jnp.int32))


@functools.partial(jax.jit, static_argnames=("inverse", "top_k", "part"))
def _draw(logits: jax.Array, words: jax.Array, *, inverse: float, top_k: int | None, part: int | None) -> jax.Array:
    keys, greatest, lost = _keys(logits)
    weights = _weights(logits, greatest, inverse)
    if top_k is not None and top_k < logits.shape[-1]:
        weights = jnp.where(_first(keys, jnp.full((*keys.shape[:-1], 1), top_k, jnp.int32)), weights, np.int32(0))
    with wide(jnp):
        if part is not None:
            # the greatest first; the order of equal logits does not matter for how many are kept
            _, ordered = jax.lax.sort((-keys, weights), dimension=-1, num_keys=1)
            sums = jnp.cumsum(ordered.astype(jnp.int64), axis=-1)
            total = sums[..., -1:]
            below = (total & np.int64((1 << _PARTS) - 1)) * np.int64(part)
            wanted = (total >> np.int64(_PARTS)) * np.int64(part) + ((below + np.int64((1 << _PARTS) - 1)) >> _PARTS)
            count = jnp.sum(sums - ordered.astype(jnp.int64) < wanted, axis=-1, keepdims=True, dtype=jnp.int32)
            weights = jnp.where(_first(keys, count), weights, np.int32(0))
        sums = jnp.cumsum(weights.astype(jnp.int64), axis=-1)
        drawn = _scaled(sums[..., -1:], words)
        token = jnp.sum(sums <= drawn, axis=-1, dtype=jnp.int32)
    return jnp.where(lost, _NO_TOKEN, token)


def _first(keys: jax.Array, count: jax.Array) -> jax.Array:
    """Where each row has its `count` greatest elements, and of equal ones those that come first."""
    size = keys.shape[-1]
    place = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    last = jnp.sum(
        jnp.where(place == size - count, jnp.sort(keys, axis=-1), 0), axis=-1, keepdims=True, dtype=jnp.int32
    )
    above, equal = keys > last, keys == last
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32), axis=-1, dtype=jnp.int32) <= room))


def _scaled(total: jax.Array, words: jax.Array) -> jax.Array:
    """floor(total r / 2^64) for the 64 bits r of two words: int64 from 0 to total - 1, for a context of `wide`.

    total: int64 [..., 1], below 2^62. words: uint32 [..., 2].
    """
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    r1, r0 = (words[..., i : i + 1].astype(jnp.uint64) for i in (0, 1))
    total = total.astype(jnp.uint64)
    t1, t0 = total >> half, total & mask
    middle = r1 * t0 + ((r0 * t0) >> half)
    other = r0 * t1 + (middle & mask)
    return (r1 * t1 + (middle >> half) + (other >> half)).astype(jnp.int64)


def _checked_key(key: Any, rows: tuple[int, ...]) -> jax.Array:
    """The words of one key, or of one for each row: uint32 [..., 2]."""
    if key is None:
        raise TypeError("sample: expected a key, got None. Give jax.random.key(seed), or temperature=0 for no chance.")
    typed_key = jnp.issubdtype(getattr(key, "dtype", np.float32), jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed_key else key
    if getattr(words, "dtype", None) != jnp.uint32 or not words.ndim:
        raise TypeError(f"sample: expected a key of jax.random.key or jax.random.PRNGKey, got {type(key).__name__}.")
    if words.shape[-1] != 2:
        raise TypeError(
            f"sample: expected a key of the generator threefry2x32, which has 2 words, got one of {words.shape[-1]} "
            "words. The bits of other generators depend on the program. Make it with "
            'jax.random.key(seed, impl="threefry2x32").'
        )
    if words.shape[:-1] not in ((), rows):
        raise ValueError(
            f"sample: expected one key, or keys of shape {rows}, one for each row. Got {tuple(words.shape[:-1])}."
        )
    return jnp.asarray(words)


@functools.partial(jax.jit, static_argnames="rows")
def _random_words(words: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """uint32 [*rows, 2]: the two words of `fold_in(key of the row, a constant)`."""
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    count = math.prod(rows)
    if keys.shape == rows:
        flat = keys.reshape(count)
    else:
        flat = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(count, dtype=jnp.uint32))
    drawn = jax.vmap(lambda own: jax.random.key_data(jax.random.fold_in(own, _SALT)))(flat)
    return drawn.reshape(*rows, 2)
