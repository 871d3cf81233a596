"""Sums over codes, for mean, global pooling and average pooling. The division is an affine step after the sum.

mean(x) = sum(x) * (1 / n):  the accumulator is sum(q - z), with the scale s / n
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import accumulate, accumulator_bounds
from qjax.ops.averages import Average
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Quantized,
    Role,
    Shape,
    Site,
    centered,
    real,
    register,
)
from qjax.ops.epilogue import finish
from qjax.ops.facts import AverageFacts, always, no_formula, scale_of_input
from qjax.ops.fields import Axes
from qjax.ops.float_accumulator import Pending
from qjax.ops.formulas import get as get_formula
from qjax.ops.windows import MOST_SLICES, Pool, covers, of_pool, reduce_window, slid


def _training(eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
    (x,) = inputs
    if not isinstance(x, Quantized):
        return eqn.bind(real(x))
    acc = eqn.bind(x.codes.astype(jnp.float32))[0]
    scale = lax.stop_gradient(x.scale.reshape(()))
    axes = eqn.params.get("axes")
    average = Average(
        scale,
        lax.stop_gradient(x.qparams.integer_zero_point()).reshape(()),
        op="average_pool" if axes is None else "mean",
        dtype=jnp.dtype(x.qparams.spec.dtype).name,
        elements=math.prod(eqn.params["window_dimensions"] if axes is None else (x.shape[axis] for axis in axes)),
        spatial=axes is not None and len(x.shape) == 4 and sorted(axes) == [1, 2],
        whole=axes is None and covers(of_pool(eqn), x.shape),
    )
    return [dataclasses.replace(Pending.start(acc, scale, eqn.out_dtypes[0], rounded=False), average=average)]


@register
class Sum(AverageFacts, Op):
    """`lax.reduce_sum` over any axes."""

    name = "sum"
    fields = Axes
    role = Role.PRODUCER
    primitives = ("reduce_sum",)
    average = "mean"
    keeps_batch = always
    takes_steps = True
    operation = no_formula
    scales = scale_of_input

    def is_average(self, attributes: Attributes, x: Shape, count: Any) -> bool:
        sizes = [x[axis] for axis in attributes["axes"]]
        # the batch size is not known
        elements = None if None in sizes else math.prod(size for size in sizes if size is not None)
        return np.array_equal(count, np.asarray(elements))

    def is_spatial(self, attributes: Attributes, x: Shape) -> bool:
        return len(x) == 4 and sorted(attributes["axes"]) == [1, 2]

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["axes"])}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        return _training(eqn, inputs)

    def accumulator(self, site: Site) -> Bounds | None:
        (x,) = site.inputs
        return accumulator_bounds.within(
            accumulator_bounds.count(x.shape, site.attributes["axes"]) * accumulator_bounds.reach(x)
        )

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        axes, x = tuple(attributes["axes"]), inputs[0]
        acc = sum_over(centered(x, constants, 0), axes)
        return finish([acc], constants, attributes)


def sum_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """int32 sums over some axes.

    On the CPU, over few positions with channels after them, this adds up slices, because XLA's reduction uses no
    vectors there (`python -m benchmarks kernels`).
    """

    def whole(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=axes, dtype=jnp.int32)

    def in_slices(x: jax.Array) -> jax.Array:
        window = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
        once = [1] * x.ndim
        return jnp.squeeze(functools.reduce(lax.add, accumulate.taps(x, window, once, once)), axes)

    sizes: list[Any] = [x.shape[axis] for axis in axes]
    known = all(isinstance(size, int) for size in sizes)  # an exported batch size is symbolic, not an int
    if x.ndim - 1 in axes or not known or not 1 < math.prod(sizes) <= MOST_SLICES:
        return whole(x)
    return lax.platform_dependent(x, cpu=in_slices, default=whole)


@register
class WindowSum(AverageFacts, Op):
    """`lax.reduce_window` with addition, which is average pooling before its division. Padding adds real zeros."""

    name = "window_sum"
    fields = Pool
    role = Role.PRODUCER
    primitives = ("reduce_window_sum",)
    average = "average_pool"
    keeps_batch = always
    takes_steps = True
    operation = no_formula
    scales = scale_of_input

    def is_average(self, attributes: Attributes, x: Shape, count: Any) -> bool:
        # the count can differ by window, because padding may not count
        return True

    def is_spatial(self, attributes: Attributes, x: Shape) -> bool:
        return False

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return of_pool(eqn)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        return _training(eqn, inputs)

    def accumulator(self, site: Site) -> Bounds | None:
        return accumulator_bounds.within(
            math.prod(site.attributes["window"]) * accumulator_bounds.reach(site.inputs[0])
        )

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [slid(attributes)]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        codes = centered(inputs[0], constants, 0)
        formula = get_formula(attributes["formula"]) if "formula" in attributes else None
        if formula is None or not formula.windows:
            return finish([reduce_window(attributes, codes, np.int32(0), lax.add)], constants, attributes)
        if formula.whole is None or not covers(attributes, codes.shape):
            return finish([_windows(attributes, codes)], constants, attributes)
        axes = tuple(axis for axis, n in enumerate(attributes["window"]) if n > 1)
        total = jnp.expand_dims(sum_over(codes, axes), axes)
        return finish([total], constants, {**attributes, "formula": formula.whole})


def _windows(attributes: Attributes, codes: jax.Array) -> jax.Array:
    """The codes of every window on a new leading axis, in row-major order."""
    padding = [tuple(pair) for pair in attributes["padding"]]
    config = [
        (low, high, dilation - 1) for (low, high), dilation in zip(padding, attributes["base_dilation"], strict=True)
    ]
    padded = lax.pad(codes, np.int32(0), config)
    window = attributes["window"]
    taps = accumulate.taps(padded, window, attributes["strides"], attributes["window_dilation"])
    return jnp.stack(taps)
