"""Refuses a model whose shapes follow the batch only up to some size: `x[:100]` traced with fewer examples.

The conversion compares two small batches. A slice that is longer than both does not change them, and a graph made from
them would return what the model drops. Tracing the shapes of a large batch detects this. A batch of one detects
`squeeze()` and `if x.shape[0] > 1`, of which the model may know nothing, so it is said, not refused.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
from flax import nnx

from qjax.layers.trace import TraceError, program_of_shapes
from qjax.numerics.meshes import parts_of_batch
from qjax.tracing import Equation, Program, move_of, needed

LARGE = 10_007
"""A batch that is longer than the cuts that models make, and a prime: no other axis of a model has it by chance."""

_SHAPES = frozenset({"broadcast_in_dim", "slice"})
"""Beside moves: what JAX leaves out where an axis of size 1 has that shape already, as for `ids[0]`."""

_RANDOM = ("random_bits", "threefry2x32", "random_gamma", "rng_bit_generator")


def check_nothing_drawn(programs: Sequence[Program]) -> None:
    """Raise where a model draws random numbers for each example.

    Args:
      programs: its calls with batches of two sizes. Of one alone, where the batch is fixed, every draw is refused.

    Raises:
      TraceError: it does; the message names the line.
    """
    one, *others = (needed(program) for program in programs)
    for first, *seconds in zip(one, *others, strict=False):
        follows = not seconds or first.out_shapes != seconds[0].out_shapes
        if first.primitive in _RANDOM and follows:
            raise TraceError(
                f"{first.primitive!r} draws random numbers for each example, which a graph cannot",
                "Draw them outside of the model and pass them in, or convert the parts of the model around the draw "
                "(from_linen takes a method; return what the numbers are drawn from).",
                where=first.where,
            )


def check_any_batch(model: nnx.Module, args: Sequence[Any], programs: Sequence[Program], sizes: Sequence[int]) -> None:
    """Raise where an axis follows the batch at two `sizes`, whose programs these are, and not at a large one.

    Raises:
      TraceError: an operation's result does so; the message names its line.
    """
    # what explicit axes of a mesh split stays split
    many = LARGE * math.lcm(*(parts_of_batch(x) for x in jax.tree.leaves(args) if isinstance(x, jax.Array)))
    try:
        large = program_of_shapes(model, args, many)
    except TraceError as error:
        raise TraceError(f"A graph takes any batch, but the model fails on one of {many:,}. {error}") from error
    equations = [needed(program) for program in (*programs, large)]
    if len({len(found) for found in equations}) > 1:
        # A loop over the examples, or a slice of the batch: find the first operation that is not the same.
        here = next((c for a, c in zip(equations[0], equations[2], strict=False) if a.primitive != c.primitive), None)
        if equations[0] and len(equations[0]) == len(equations[1]):
            few = f"batches of {sizes[0]} and {sizes[1]}"
            raise _refused(here or equations[2][-1], f"a batch of {many:,} takes other operations than {few}")
        return
    for first, second, third in zip(*equations, strict=True):
        shapes = zip(first.out_shapes, second.out_shapes, third.out_shapes, strict=True)
        for a, b, c in shapes:
            if len(a) == len(b) == len(c) and any(map(lambda *axis: _stops(axis, (*sizes, many)), a, b, c)):
                few = f"{a} and {b} on batches of {sizes[0]} and {sizes[1]}"
                raise _refused(third, f"{few} become {c} on one of {many:,}")


def said_of_one(model: nnx.Module, args: Sequence[Any], program: Program, size: int) -> str | None:
    """What the model does on a batch of one and not on one of `size`, whose program this is; None where it is nothing.

    A model that fails on a batch of one does nothing there that a graph could contradict.
    """
    try:
        single = program_of_shapes(model, args, 1)
    except TraceError:
        return None
    computes = zip_longest(_computing(single), _computing(program))
    for one, more in computes:
        if one is None or more is None or one.primitive != more.primitive:
            kinds = " and ".join(repr(eqn.primitive) if eqn else "nothing" for eqn in (one, more))
            place = next(eqn for eqn in (one, more) if eqn is not None).where
            return f"On a batch of 1 the model computes other things than on one of {size} ({kinds}, at {place})"
    shapes, others = ([x.shape for x in found.outputs] for found in (single, program))
    for a, b in zip_longest(shapes, others):
        if (
            a is None
            or b is None
            or len(a) != len(b)
            or any(x != y and x * size != y for x, y in zip(a, b, strict=True))
        ):
            return f"On a batch of 1 the model returns the shape {a}, and on one of {size} {b}"
    return None


def _computing(program: Program) -> list[Equation]:
    """What computes something: JAX repeats and moves elements otherwise where an axis has size 1."""
    found = (eqn for eqn in needed(program) if eqn.primitive not in _SHAPES)
    return [eqn for eqn in found if len(eqn.inputs) != 1 or eqn.body is not None or move_of(eqn) is None]


def _stops(axis: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether an axis that is a multiple of the batch, or fixed, at two sizes is not so at the large one."""
    (a, b, c), (n, m, many) = axis, sizes
    if a == b:
        return c != a
    return a * m == b * n and a * many != c * n


def _refused(eqn: Equation, what: str) -> TraceError:
    return TraceError(
        f"{eqn.primitive!r}: {what}",
        "A graph takes any batch: no operation may slice it, or depend on an example's position in it. Slice the batch "
        "before the model, or slice its outputs.",
        where=eqn.where,
    )
