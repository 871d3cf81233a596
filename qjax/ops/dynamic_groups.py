"""Sums of a product under `qjax.Dynamic` whose weight has groups, or whose activation has blocks; see `ops.dynamic`.

The terms are added one after the other, so a loop over the groups computes the same bits as one expression. The loop
needs no memory for the sums of all groups, and is two to three times as fast on the CPU. Writers of files read the
expression.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from qjax.numerics.affine import QSpec
from qjax.numerics.dynamic_formulas import LANES, DynamicFormula, Groups, of_groups, of_lanes, terms_of_group
from qjax.numerics.fused import fused_multiply_add
from qjax.numerics.unfused import unfused
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops import accumulate, products
from qjax.ops.base import Equation
from qjax.ops.grouped_dot import accumulators


class Grouped(Protocol):
    """What is read of a `DynamicProduct`."""

    @property
    def eqn(self) -> Equation: ...
    @property
    def weight(self) -> int: ...
    @property
    def formula(self) -> DynamicFormula: ...
    @property
    def summed(self) -> tuple[int, ...]: ...
    @property
    def weights(self) -> QSpec | WeightFormat: ...
    @property
    def activations(self) -> QSpec: ...
    @property
    def has_blocks(self) -> bool: ...
    def of_x(self, value: jax.Array, rank: int) -> jax.Array: ...
    def of_weight(self, value: jax.Array) -> jax.Array: ...


def split_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """An array with one axis split in two: groups, and the `size` elements of each."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def sum_of_groups(
    product: Grouped, unit: int, x: jax.Array, scale: jax.Array, zero: jax.Array, w: jax.Array, *parts: jax.Array
) -> jax.Array:
    """The product from codes of x, their scales and zero points, codes of w, and its scales, minimums and sums.

    unit: how many products one sum of integers has.
    """

    def expression(*coded: jax.Array) -> jax.Array:
        return _expression(product, unit, *coded)

    def loop(*coded: jax.Array) -> jax.Array:
        return _loop(product, unit, *coded)

    coded = (x, scale, zero, w, *parts)
    if product.formula == "ggml_avx2":
        expression, loop = partial(_lanes, product, unit, in_loop=False), partial(_lanes, product, unit, in_loop=True)
    if product.formula == "xnnpack":
        found = expression(*coded)
    else:
        found = lax.platform_dependent(*coded, cpu=loop, cuda=loop, rocm=loop, tpu=loop, default=expression)
    return found.astype(product.eqn.out_dtypes[0])


def _expression(
    product: Grouped, unit: int, x: jax.Array, scale: jax.Array, zero: jax.Array, w: jax.Array, *parts: jax.Array
) -> jax.Array:
    contracting, batch = product.eqn.params["dimension_numbers"]
    at, axis, first = product.summed[0], int(contracting[1 - product.weight][0]), product.weight
    layout = {
        "weight": first,
        "group_axis": at,
        "summed": axis,
        "batch": batch[1 - first],
        "weight_batch": [a + (a > at) for a in batch[first]],
    }
    acc = accumulators(layout, x, split_axis(w, at, unit), accumulate.dot)
    groups = [lax.index_in_dim(acc, index, 0, keepdims=False) for index in range(acc.shape[0])]

    def of_x(value: jax.Array) -> list[jax.Array]:
        if not product.has_blocks:
            return [product.of_x(value, x.ndim)] * len(groups)
        own = [lax.index_in_dim(value, i, axis, keepdims=False) for i in range(value.shape[axis])]
        return _repeated([product.of_x(part, x.ndim) for part in own], len(groups))

    def of_weight(value: jax.Array) -> list[jax.Array]:
        own = [lax.slice_in_dim(value, i, i + 1, axis=at) for i in range(value.shape[at])]
        return _repeated([product.of_weight(part) for part in own], len(groups))

    *floats, sums = parts
    scales, *minimums = (of_weight(part) for part in floats)
    if not minimums:
        return of_groups(Groups(groups, of_weight(sums), scales, of_x(scale), of_x(zero)), product.formula, unit)
    x_sums = _sums(split_axis(x, axis, unit), axis + 1)
    of_units = [product.of_x(lax.index_in_dim(x_sums, i, axis, keepdims=False), x.ndim) for i in range(len(groups))]
    terms = Groups(groups, of_weight(sums), scales, of_x(scale), of_x(zero), minimums[0], of_units)
    return of_groups(terms, product.formula, unit)


def _loop(
    product: Grouped, unit: int, x: jax.Array, scale: jax.Array, zero: jax.Array, w: jax.Array, *parts: jax.Array
) -> jax.Array:
    contracting, _ = product.eqn.params["dimension_numbers"]
    at, axis = product.summed[0], int(contracting[1 - product.weight][0])
    count = w.shape[at] // unit

    def in_front(value: jax.Array, axis: int) -> jax.Array:
        """Numbers of groups with an axis of `count` in front."""
        each = count // value.shape[axis]
        value = jnp.moveaxis(value, axis, 0)
        return value if each == 1 else jnp.repeat(value, each, axis=0)

    of_weight = lambda value: product.of_weight(jnp.expand_dims(value, at))  # noqa: E731
    of_x = lambda value: product.of_x(value, x.ndim)  # noqa: E731
    rows = [in_front(part, axis) for part in (scale, zero)] if product.has_blocks else []
    codes = (jnp.moveaxis(split_axis(x, axis, unit), axis, 0), jnp.moveaxis(split_axis(w, at, unit), at, 0))
    multiply = _product(product, unit)

    def step(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_codes, w_codes, sums, *rest = group
        own = [rest.pop(0) for _ in rows] or [scale, zero]
        scale_of_x, zero_of_x = (of_x(part) for part in own)
        some, *floats = (of_weight(part) for part in (sums, *rest))
        alone = (of_x(_sums(x_codes, axis)), floats[1]) if len(floats) > 1 else ()
        given = (multiply(x_codes, w_codes), some, floats[0], scale_of_x, zero_of_x, *alone)
        for term in terms_of_group(*given, formula=product.formula, size=unit):
            total = total + term
        return total, None

    # -0.0 + t is t for every t, so the sum begins with the first term
    nothing = jnp.full(product.eqn.out_shapes[0], -0.0, jnp.float32)
    *floats, sums = parts
    groups = (*codes, in_front(sums, at), *rows, *(in_front(part, at) for part in floats))
    return unfused(lax.scan(step, nothing, groups)[0])


def _lanes(
    product: Grouped,
    unit: int,
    x: jax.Array,
    scale: jax.Array,
    x_sums: jax.Array,
    w: jax.Array,
    *parts: jax.Array,
    in_loop: bool,
) -> jax.Array:
    """The sum of codes whose blocks have `unit` numbers on both sides, see `of_lanes`. x_sums: see `ggml_codes`."""
    contracting, _ = product.eqn.params["dimension_numbers"]
    at, axis, few = product.summed[0], int(contracting[1 - product.weight][0]), unit // LANES
    multiply = jax.vmap(_product(product, few))

    def of_blocks(codes: jax.Array, axis: int) -> jax.Array:
        """(blocks, 8, ..., 4, ...): the codes of each lane."""
        split = split_axis(split_axis(codes, axis, unit), axis + 1, few)
        return jnp.moveaxis(split, (axis, axis + 1), (0, 1))

    def times(of_x: jax.Array, of_weight: jax.Array) -> jax.Array:
        return unfused(product.of_x(of_x, x.ndim) * product.of_weight(jnp.expand_dims(of_weight, at)))

    def step(totals: tuple[jax.Array, jax.Array], block: tuple[jax.Array, ...]) -> tuple[Any, None]:
        x_codes, w_codes, of_x, of_weight, *rest = block
        lanes, lows = totals
        sums = multiply(x_codes, w_codes).astype(jnp.float32)
        scales = jnp.broadcast_to(times(of_x, of_weight)[None], sums.shape)
        return (fused_multiply_add(scales, sums, lanes), lows + times(rest[0], rest[1]) if rest else lows), None

    shape = product.eqn.out_shapes[0]
    blocks = [of_blocks(x, axis), of_blocks(w, at), jnp.moveaxis(scale, axis, 0), jnp.moveaxis(parts[0], at, 0)]
    if len(parts) > 2:
        blocks += [jnp.moveaxis(x_sums, axis, 0), jnp.moveaxis(parts[1], at, 0)]
    nothing = jnp.zeros((LANES, *shape), jnp.float32), jnp.zeros(shape, jnp.float32)
    if in_loop:
        lanes, lows = lax.scan(step, nothing, tuple(blocks))[0]
    else:
        lanes, lows = nothing
        for index in range(blocks[0].shape[0]):
            own = tuple(lax.index_in_dim(part, index, 0, keepdims=False) for part in blocks)
            lanes, lows = step((lanes, lows), own)[0]
    return of_lanes(lanes) + lows if len(parts) > 2 else of_lanes(lanes)


def _product(product: Grouped, unit: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The int32 sums of one group, from its codes of x and of w."""
    numbers = product.eqn.params["dimension_numbers"]
    spec = product.activations
    reach = max(abs(spec.qmin), abs(spec.qmax)) if spec.symmetric else spec.qmax - spec.qmin
    exact = unit * reach * (product.weights.qmax + 1) < 2**24

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        if exact:  # in float32, whose products are faster on CPUs and whose sums are exact below 2^24
            x, w = (lax.optimization_barrier(codes.astype(jnp.float32)) for codes in (x, w))
        operands = (x, w) if product.weight == 1 else (w, x)
        if exact:
            return products.dot_general(*operands, numbers, jnp.float32, products.FAST).astype(jnp.int32)
        return accumulate.dot(*operands, numbers)

    return multiply


def _repeated(values: list[jax.Array], count: int) -> list[jax.Array]:
    return [value for value in values for _ in range(count // len(values))]


def _sums(codes: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(codes.astype(jnp.int32), axis=axis, dtype=jnp.int32)
