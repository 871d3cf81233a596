"""Products with weights that have one scale per group of the summed axis, as in the int4 weights of language models.

    y[n] = sum over groups g of s[g, n] * (sum over k in g of x[k] w[k, n])

One accumulator cannot hold sums with different scales, so every group has an int32 accumulator. Each is multiplied by
its factor, and the sum is rounded once (`epilogue.finish_sum`). No group is rounded on its own.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics._namespace import host_or_trace, traced
from qjax.numerics.qparams import QParams
from qjax.numerics.softfloat import Real
from qjax.ops import accumulate, accumulator_bounds, products
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Preparation,
    Prepared,
    Quantized,
    Role,
    Shape,
    Site,
    register,
)
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import finish_sum, fold_sum
from qjax.ops.facts import CountsProducts, always
from qjax.ops.fields import Natural, Rounded
from qjax.ops.float_accumulator import Pending

_PRODUCTS = 2**61
"""`fold_sum` expects the sum of all products to be below this."""


def layout(eqn: Equation, weight: int, params: QParams, channels: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The attributes of a product whose weight is split, (k,) -> (k // size, size), along its summed axis.

    Raises:
      ValueError: groups that do not run along the only axis that is summed.
    """
    contracting, batch = eqn.params["dimension_numbers"]
    axis = params.spec.group_axis % len(eqn.in_shapes[weight])
    if tuple(contracting[weight]) != (axis,):
        raise ValueError(
            f"groups of {params.spec.group_size} along axis {axis}, but the product sums over axes "
            f"{list(contracting[weight])}. Set group_axis to the only axis that is summed, or use axis without "
            "group_size"
        )
    return {
        "weight": weight,
        "group_axis": axis,
        "summed": int(contracting[1 - weight][0]),
        "batch": [int(a) for a in batch[1 - weight]],
        "weight_batch": [int(a) + (a > axis) for a in batch[weight]],
        "channels": [[r, w + (w > axis)] for r, w in channels],
        "rank": len(eqn.out_shapes[0]),
        "permutation": None,
    }


def accumulators(attributes: Attributes, x: jax.Array, w: jax.Array, product: Any) -> jax.Array:
    """The products of every group, (groups, *result). w: split along its group axis."""
    at, axis, weight = attributes["summed"], attributes["group_axis"], attributes["weight"]
    groups, size = w.shape[axis : axis + 2]
    x = x.reshape(*x.shape[:at], groups, size, *x.shape[at + 1 :])
    own = (at, *(a + (a > at) for a in attributes["batch"]))
    other = (axis, *attributes["weight_batch"])
    if weight == 1:
        return product(x, w, (((at + 1,), (axis + 1,)), (own, other)))
    return product(w, x, (((axis + 1,), (at + 1,)), (other, own)))


def per_group(attributes: Attributes, vector: Any) -> list[Any]:
    """An array in the split weight's rank (size 1 within a group) as one vector of the result for every group."""
    axis = attributes["group_axis"]
    parts = [vector[(slice(None),) * axis + (slice(i, i + 1),)] for i in range(vector.shape[axis])]
    return [weight_to_result(part, attributes["channels"], attributes["rank"]) for part in parts]


def training(eqn: Equation, x: Quantized, w: Quantized, weight: int, channels: list[list[int]]) -> list[Any]:
    """The training forward: multiply the codes of every group, scale the sums and add them."""
    attributes = layout(eqn, weight, w.qparams, channels)
    axis, size = attributes["group_axis"], w.qparams.spec.group_size
    assert size is not None

    def split(value: jax.Array) -> jax.Array:
        return value.reshape(*value.shape[:axis], value.shape[axis] // size, size, *value.shape[axis + 1 :])

    def product(a: jax.Array, b: jax.Array, numbers: Any) -> jax.Array:
        return products.dot_general(a, b, numbers, jnp.float32)

    acc = accumulators(attributes, x.codes, split(w.codes), product)
    whole = jnp.broadcast_to(lax.stop_gradient(w.scale), _kept(w))
    scales = per_group(attributes, lax.index_in_dim(split(whole), 0, axis + 1, keepdims=True))
    rank = attributes["rank"]
    total = jnp.zeros(acc.shape[1:], jnp.float32)
    for index, scale in enumerate(scales):
        total = total + acc[index] * scale.reshape((1,) * (rank - scale.ndim) + tuple(scale.shape))
    start = Pending.start(total, lax.stop_gradient(x.scale.reshape(())), eqn.out_dtypes[0], rounded=False)
    return [start]


def _kept(w: Quantized) -> tuple[int, ...]:
    """The scale's shape in the weight's rank, expanded to the full size along the groups."""
    axis = w.qparams.spec.group_axis % w.codes.ndim
    return tuple(w.codes.shape[a] if a == axis else n for a, n in enumerate(w.scale.shape))


class Fields(TypedDict):
    """group_axis: the weight's axis that has the groups. summed: the activation's axis. The others are a dot's."""

    weight: Natural
    group_axis: Natural
    summed: Natural
    batch: list[Natural]
    weight_batch: list[Natural]
    channels: list[list[Natural]]
    rank: Natural
    permutation: list[Natural] | None


@register
class GroupedDot(CountsProducts, Op):
    """y = sum over groups of (sum_k x[k] w[k, n]) s[group, n]; a `dot` whose weight has groups becomes this.

    attributes: group_axis is the axis of the weight that is stored as two axes, (group, within). summed is the axis of
    the activation that is summed. batch and weight_batch are paired axes. weight, channels, rank and permutation are
    those of a dot. constants: weights holds the codes; the others are those of the 64-bit sum, with a factor for every
    group.
    """

    name = "grouped_dot"
    fields = Fields
    prepared = Rounded
    role = Role.PRODUCER
    primitives: ClassVar[tuple[str, ...]] = ()
    keeps_batch = always
    takes_steps = True

    def products(self, attributes: Attributes, inputs: Sequence[Sequence[int]], kernel: Sequence[int]) -> int:
        # the weight is stored with its summed axis split in two
        shared = {attributes["group_axis"], attributes["group_axis"] + 1, *attributes["weight_batch"]}
        return math.prod(inputs[0]) * math.prod(size for axis, size in enumerate(kernel) if axis not in shared)

    def prepare(self, given: Preparation) -> Prepared:
        attributes, weights = given.attributes, given.constants["weights"]
        (x,) = given.inputs
        scales = [Real.of(x.scale) * Real.of(s) for s in per_group(attributes, given.constants["weight_scale"])]
        if not traced(weights):
            _check(np.asarray(weights), attributes, (x.qmin or 0) - (x.qmax or 0))
        constants = {"weights": weights, **fold_sum(scales, given.output.scale, given.affine)}
        return Prepared(constants, {"rounding": given.target.rounding.value})

    def restated(self, given: Preparation) -> Prepared | None:
        # only the rounding depends on the target
        return Prepared(given.constants, {"rounding": given.target.rounding.value})

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        """Adds `offset<i>`, the contribution of the zero point to the accumulator of a group."""
        weights = constants["weights"]
        xp = host_or_trace(weights, *constants.values())
        zero_point = xp.asarray(constants["zero_point0"])
        zero_point = zero_point - np.int32(accumulate.signed_offset(attributes["input_dtypes"][0]))
        sums = xp.sum(xp.asarray(weights), axis=attributes["group_axis"] + 1, dtype=np.int32, keepdims=True)
        found = [x * xp.broadcast_to(zero_point, x.shape) for x in per_group(attributes, sums)]
        return {**constants, **{f"offset{index}": value for index, value in enumerate(found)}}

    def accumulator(self, site: Site) -> Bounds | None:
        (x,), weights = site.inputs, site.constants["weights"]
        accumulator_bounds.count(x.shape, [site.attributes["summed"]])
        if traced(weights):
            return None
        sums = np.abs(np.asarray(weights).astype(np.int64)).sum(axis=site.attributes["group_axis"] + 1)
        return accumulator_bounds.within(int(sums.max(initial=0)) * accumulator_bounds.reach(x))

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["summed"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, weights = accumulate.signed(inputs[0]), jnp.asarray(constants["weights"])
        acc = accumulators(attributes, x, weights, accumulate.dot)
        parts: list[jax.Array] = []
        for index in range(acc.shape[0]):
            part = lax.index_in_dim(acc, index, 0, keepdims=False)
            if attributes["permutation"] is not None:
                part = jnp.transpose(part, attributes["permutation"])
            parts.append(part - jnp.broadcast_to(jnp.asarray(constants[f"offset{index}"]), part.shape))
        return finish_sum(parts, constants, attributes)


def _check(weights: np.ndarray, attributes: Attributes, reach: int) -> None:
    axis = attributes["group_axis"]
    size = weights.shape[axis + 1]
    largest = abs(reach) * size * int(np.abs(weights.astype(np.int64)).max(initial=0))
    if largest >= 2**31 or largest * weights.shape[axis] * 2**30 >= _PRODUCTS:
        raise ValueError(
            f"{weights.shape[axis]} groups of {size} products of up to {largest // size} do not fit 64 bits with their "
            f"factors of 30 bits ({math.log2(max(largest, 1)):.0f} bits each). Use fewer bits, or smaller groups"
        )
