"""Refuses a model whose shapes follow the batch only up to some size, such as `x[:100]` traced with fewer examples.

The conversion compares two small batches. A slice that is longer than both does not change them, and a graph made from
them would return rows that the model drops. Tracing the shapes of a large batch detects this. A batch of one detects
`squeeze()` and `if x.shape[0] > 1`. The author may not know of these, so they cause a warning instead of an error.
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
"""A batch longer than the slices that models contain, and a prime, so that no other axis has this size by chance."""

_SHAPES = frozenset({"broadcast_in_dim", "slice"})
"""Besides moves, primitives that JAX omits if an axis of size 1 has the right shape already, as in `ids[0]`."""

_RANDOM = ("random_bits", "threefry2x32", "random_gamma", "rng_bit_generator")


def check_nothing_drawn(programs: Sequence[Program]) -> None:
    """Raise where a model draws random numbers for each example.

    Args:
      programs: its calls with batches of two sizes. If there is one, because the batch is fixed, any draw is refused.

    Raises:
      TraceError: the model draws such numbers; the message names the line.
    """
    one, *others = (needed(program) for program in programs)
    for first, *seconds in zip(one, *others, strict=False):
        follows = not seconds or first.out_shapes != seconds[0].out_shapes
        if first.primitive in _RANDOM and follows:
            raise TraceError(
                f"{first.primitive!r} draws random numbers for each example, which a graph cannot do",
                "Draw them outside of the model and pass them in, or convert the parts of the model around the draw "
                "(from_linen takes a method; return the values that parametrise the draw).",
                where=first.where,
            )


def check_any_batch(model: nnx.Module, args: Sequence[Any], programs: Sequence[Program], sizes: Sequence[int]) -> None:
    """Raise where an axis follows the batch in the programs of two `sizes`, but not in one of a large batch.

    Raises:
      TraceError: an operation's result has such an axis; the message names its line.
    """
    # Keep the batch divisible by the parts into which explicit axes of a mesh split it.
    many = LARGE * math.lcm(*(parts_of_batch(x) for x in jax.tree.leaves(args) if isinstance(x, jax.Array)))
    try:
        large = program_of_shapes(model, args, many)
    except TraceError as error:
        raise TraceError(f"A graph accepts any batch, but the model fails on one of {many:,}. {error}") from error
    equations = [needed(program) for program in (*programs, large)]
    if len({len(found) for found in equations}) > 1:
        # The model loops over the examples or slices the batch, so find the first operation that differs.
        here = next((c for a, c in zip(equations[0], equations[2], strict=False) if a.primitive != c.primitive), None)
        if equations[0] and len(equations[0]) == len(equations[1]):
            few = f"batches of {sizes[0]} and {sizes[1]}"
            raise _trace_error(here or equations[2][-1], f"a batch of {many:,} runs other operations than {few}")
        return
    for first, second, third in zip(*equations, strict=True):
        shapes = zip(first.out_shapes, second.out_shapes, third.out_shapes, strict=True)
        for a, b, c in shapes:
            if len(a) == len(b) == len(c) and any(map(lambda *axis: _breaks_proportion(axis, (*sizes, many)), a, b, c)):
                few = f"{a} and {b} on batches of {sizes[0]} and {sizes[1]}"
                raise _trace_error(third, f"{few} become {c} on one of {many:,}")


def describe_batch_of_one(model: nnx.Module, args: Sequence[Any], program: Program, size: int) -> str | None:
    """Describe how the model treats a batch of one differently from one of `size` (`program`); None if it does not.

    A model that fails on a batch of one returns None, because there is no result that a graph could contradict.
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
    """The equations that compute; moves are left out, because JAX moves an axis of size 1 differently."""
    found = (eqn for eqn in needed(program) if eqn.primitive not in _SHAPES)
    return [eqn for eqn in found if len(eqn.inputs) != 1 or eqn.body is not None or move_of(eqn) is None]


def _breaks_proportion(axis: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether an axis that is fixed or a multiple of the batch at two sizes breaks that rule at the large one."""
    (a, b, c), (n, m, many) = axis, sizes
    if a == b:
        return c != a
    return a * m == b * n and a * many != c * n


def _trace_error(eqn: Equation, what: str) -> TraceError:
    return TraceError(
        f"{eqn.primitive!r}: {what}",
        "A graph accepts any batch, so no operation may slice it or depend on an example's position in it. Slice the "
        "batch before the model, or slice its outputs.",
        where=eqn.where,
    )
