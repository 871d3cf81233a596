"""The backward pass of a product in integers: both of its products take their operands as codes.

    y = x w,   dx = dy w^T,   dw = x^T dy

`Half` describes one of the two for an operation, and `numerics.gradient_codes` how dy gets its codes. Weights and
activations enter with the codes of the forward; codes of more than 8 bits are quantized again, to those of gradients.
An int32 sum holds at most 2^31, so longer sums are cut into pieces, which are added in float32.

The setting and the random words are those of the context, because a product does not know the step that it is in.
"""

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from qjax.numerics.fence import finished_on_cpu
from qjax.numerics.gradient_codes import Coded, Gradients, encode, fold, key_words

MOST_PIECES = 64
"""A sum in more pieces than this is refused: each of them is a product of its own in the program."""

NO_KEY = (
    'Gradients(rounding="stochastic") rounds with random bits, but this step has no key. Pass a key to the step and '
    "compute the gradient in its context: with qjax.training.gradient_key(key): grads = nnx.grad(loss)(qmodel). Or use "
    'Gradients(rounding="nearest").'
)


@dataclasses.dataclass(frozen=True)
class Half:
    """One product of the backward pass: sums of the cotangent g of the result times the other operand.

    product: (int8 of g's shape, int8 of the other operand's shape, zero point of the other operand or None) -> the
    int32 sums `g (other - zero)`, of the gradient's shape; takes_zero: whether the zero point may be other than None.
    summed: for g and for the other operand, the axes that are summed. pairs: (axis of g, axis of the other operand)
    along which both may be cut into pieces. terms: the number of products in one sum. spread: scales of g and of the
    other operand, in their ranks, with size 1 where they are summed -> both, broadcastable to the result.
    """

    product: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    summed: tuple[tuple[int, ...], tuple[int, ...]]
    pairs: tuple[tuple[int, int], ...]
    terms: Callable[[Sequence[int], Sequence[int]], int]
    spread: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    takes_zero: bool = True


@dataclasses.dataclass(frozen=True)
class Current:
    """The setting and the words of the step; path: the positions of the equation in its program, from the outermost."""

    how: Gradients
    words: jax.Array | None
    path: tuple[int, ...] = ()

    @property
    def own(self) -> jax.Array | None:
        """The words of the equation, which no other equation has."""
        return None if self.words is None else fold(self.words, zlib.crc32(repr(self.path).encode()))


CONSTANT_KEY = (
    "gradient_key: the key is a constant of a program that JAX compiles, so every step would round with the same bits. "
    "Make the key an argument of the function under jit, and enter the context inside of it: "
    "with qjax.training.gradient_key(key). In a loop within the program, fold in the number of the step."
)

_CURRENT = contextvars.ContextVar[Current | None]("integer_backward", default=None)


def current() -> Current | None:
    """The setting of the context; None for a backward pass in floats."""
    return _CURRENT.get()


@contextlib.contextmanager
def integer_backward(how: Gradients | None, words: jax.Array | None) -> Generator[None]:
    """A context in which the products that are traced have an integer backward pass; None: one in floats."""
    token = _CURRENT.set(None if how is None else Current(how, words))
    try:
        yield
    finally:
        _CURRENT.reset(token)


_KEY = contextvars.ContextVar[jax.Array | None]("gradient_key", default=None)


@contextlib.contextmanager
def gradient_key(key: jax.Array) -> Generator[None]:
    """A context whose models round their gradients by this key, if their recipe has stochastic `Gradients`.

    The forward pass belongs into the context: what the key draws is fixed where the model is called. Equal keys give
    equal codes, on any number of devices if the compiler splits the arrays. The layers of a model, and the iterations
    of its scans, draw independently. Under `jax.vmap` examples draw alike, unless each has a key of its own; within
    `jax.shard_map` each device rounds its own part, so fold its index into the key.

    Args:
      key: a key of `jax.random`. Every step needs another one.

    Raises:
      TypeError: not a key.

    Examples:
      ```python
      @nnx.jit
      def step(qmodel, optimizer, key, x, y):
          def loss(qmodel):
              with qjax.training.gradient_key(key):
                  return criterion(qmodel(x), y)

          optimizer.update(qmodel, nnx.grad(loss)(qmodel))
      ```
    """
    kind, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    if not (shape == () if typed else kind == jnp.uint32 and shape in ((2,), (4,))):
        came = type(key).__name__ if kind is None else f"{kind} of shape {shape}"
        raise TypeError(f"gradient_key: expected one key, such as jax.random.key(0), got {came}.")
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


@contextlib.contextmanager
def of_step(how: Gradients | None) -> Generator[None]:
    """The context in which a model with this setting runs, with the words of the key of the context around it."""
    key, words = _KEY.get(), None
    if how is not None and how.stochastic and key is not None:
        words = key_words(key)
        if isinstance(words, Tracer) and not isinstance(key, Tracer):
            raise ValueError(CONSTANT_KEY)
    with integer_backward(how, words):
        yield


@contextlib.contextmanager
def numbered(position: int) -> Generator[None]:
    """A context for the equation at this position of a program."""
    now = _CURRENT.get()
    if now is None:
        yield
        return
    token = _CURRENT.set(dataclasses.replace(now, path=(*now.path, position)))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def words_of_iterations(length: int) -> jax.Array | None:
    """Words for each iteration of a scan, (length, 2); None without words."""
    now = _CURRENT.get()
    return None if now is None or now.own is None else fold(now.own, jnp.arange(length, dtype=jnp.uint32))


@contextlib.contextmanager
def with_words(words: jax.Array | None) -> Generator[None]:
    """A context with these words in place of the present ones, for the body of a scan."""
    now = _CURRENT.get()
    with integer_backward(None if now is None else now.how, words):
        yield


def differentiable(
    forward: Callable[..., tuple[jax.Array, Any]],
    halves: tuple[Half, Half],
    how: Gradients,
    reach: tuple[int | None, int | None],
) -> Callable[..., jax.Array]:
    """The first result of `forward(a, b, *zeros)` as `f(a, b, words, *zeros)`, with an integer backward pass.

    Args:
      forward: its second result are both operands as the backward pass reads them, int8 or float32, and a boolean:
        whether one of them has a NaN.
      halves: those of the gradients of a and of b.
      reach: for a and b, the largest magnitude of an int8 code without its zero point; None for an operand in float32.
    """

    @jax.custom_vjp
    def multiply(a: jax.Array, b: jax.Array, words: Any, *zeros: Any) -> jax.Array:
        return forward(a, b, *zeros)[0]

    def first(a: jax.Array, b: jax.Array, words: Any, *zeros: Any) -> Any:
        if how.stochastic and words is None:
            raise ValueError(NO_KEY)
        y, kept = forward(a, b, *zeros)
        return y, (*kept, words, zeros)

    def second(kept: Any, g: jax.Array) -> Any:
        a, b, lost, words, zeros = kept
        g = finished_on_cpu(g.astype(jnp.float32))
        shared = None
        if how.per == "tensor":
            shared = _finished(encode(g, range(g.ndim), how, _stream(words, 0), lost))
        others = (b, zeros[1], reach[1]), (a, zeros[0], reach[0])
        own = {"row": (True, False), "channel": (False, True)}.get(how.per, (True, True))
        found: list[jax.Array] = []
        for index, (half, other) in enumerate(zip(halves, others, strict=True)):
            numbers = _stream(words, 1 + index)
            found.append(_gradient(half, g, shared, other, how, numbers, lost, own[index]))
        return (*found, None, None, None)

    multiply.defvjp(first, second)
    return multiply


def _gradient(
    half: Half,
    g: jax.Array,
    shared: Coded | None,
    other: tuple[jax.Array, jax.Array | None, int | None],
    how: Gradients,
    words: jax.Array | None,
    lost: jax.Array,
    own: bool,
) -> jax.Array:
    """The gradient of one operand.

    shared: the codes of all of g, if both products use them. own: whether g has scales of its own along what this
    product does not sum.
    """
    x, zero, reach = other
    digit = 128 if how.bits == 16 else how.top
    if reach is None:
        coded = _finished(encode(x, half.summed[1], how, _stream(words, 0)))
        others, of_other, reach = coded.digits, coded.scale, digit
    else:
        others, of_other = (x,), None
    total = None
    for index, (of_g, of_x) in enumerate(pieces_of(half, g.shape, x.shape, how, digit * reach)):
        part = shared
        if part is None:
            axes = half.summed[0] if own else range(g.ndim)
            part = _finished(encode(of_g(g), axes, how, _stream(words, 1 + index), lost))
            digits = part.digits
        else:
            digits = tuple(of_g(one) for one in part.digits)
        acc = None
        for i, left in enumerate(reversed(digits)):
            for j, right in enumerate(reversed(others)):
                sums = half.product(left, of_x(right), zero).astype(jnp.float32) * np.float32(256 ** (i + j))
                acc = sums if acc is None else acc + sums
        assert acc is not None
        scales = half.spread(part.scale, jnp.ones((1,) * x.ndim, jnp.float32) if of_other is None else of_other)
        acc = acc * jnp.broadcast_to(scales[0] if of_other is None else scales[0] * scales[1], acc.shape)
        total = acc if total is None else total + acc
    assert total is not None
    return total


def pieces_of(half: Half, g: Sequence[int], x: Sequence[int], how: Gradients, most: int) -> list[tuple[Any, Any]]:
    """How to cut g and the other operand along one axis; most: the largest product of two codes."""
    sizes: tuple[Any, ...] = (*g, *x)
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"Gradients: the length of a sum must be known, but the shapes are {tuple(g)} and {tuple(x)}. Export the "
            "step with a fixed batch."
        )
    if not half.pairs:
        return [(lambda a: a, lambda a: a)]
    axis, other = max(half.pairs, key=lambda pair: g[pair[0]])
    terms, size = half.terms(g, x), g[axis]
    limit = (2**31 - 1) // most // max(1, terms // max(1, size))
    length = how.block if how.block is not None else size if size <= limit else limit
    count = -(-size // max(1, length))
    if length > limit or limit < 1 or count > MOST_PIECES:
        cure = f"Use a block of {max(limit, 1)} or less" if length > limit else "Use a longer block or a smaller batch"
        raise ValueError(
            f"Gradients: a sum of {terms} products of up to {most} needs {count} pieces of {length} along an axis of "
            f"{size}; expected at most {MOST_PIECES}, of at most {limit}, so that int32 holds each. {cure}."
        )
    if count <= 1:
        return [(lambda a: a, lambda a: a)]

    def cut(index: int, at: int) -> Callable[[jax.Array], jax.Array]:
        if how.block is None:
            # every n-th element, so that devices which hold a part of the axis each have a part of every piece
            return lambda a: lax.slice_in_dim(a, index, None, count, axis=at)
        return lambda a: lax.slice_in_dim(a, index * length, min(size, (index + 1) * length), axis=at)

    return [(cut(index, axis), cut(index, other)) for index in range(count)]


def _finished(coded: Coded) -> Coded:
    """The same codes, computed before anything reads them: a product would compute them without vector instructions."""
    return dataclasses.replace(coded, digits=tuple(finished_on_cpu(one) for one in coded.digits))


def _stream(words: jax.Array | None, number: int) -> jax.Array | None:
    return None if words is None else fold(words, number)
