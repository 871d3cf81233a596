"""Convolutions in any number of dimensions: strides, dilation, padding, groups, depthwise, transposed."""

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.fence import finished_on_cpu, laid_out_on_cpu
from qjax.numerics.rules import Product as RuleProduct
from qjax.ops import accumulate, accumulator_bounds, convolution, narrow_accumulator, products, windows
from qjax.ops.backward import Half
from qjax.ops.base import Attributes, Bounds, Constants, Equation, Op, Quantized, Role, Shape, Site, real, register
from qjax.ops.channels import turned, weight_to_result
from qjax.ops.epilogue import finish_weighted
from qjax.ops.exact_float import Product, matmul_codes
from qjax.ops.facts import ProductFacts, always, no_formula
from qjax.ops.fields import Product as ProductFields
from qjax.ops.float_accumulator import Pending


class Fields(windows.Convolution, ProductFields):
    """The attributes of a window that moves over the input, with a product at each position."""


@register
class Conv(ProductFacts, Op):
    """`lax.conv_general_dilated` with a constant kernel; the padding is filled with the input's zero point."""

    name = "conv"
    fields = Fields
    role = Role.PRODUCER
    primitives = ("conv_general_dilated",)
    permutable = False
    is_convolution = True
    traced_once = True
    groups_scales = False
    keeps_batch = always
    takes_steps = True
    operation = no_formula

    def kind(self, attributes: Attributes, kernel: Shape) -> Literal["dot", "conv", "depthwise"]:
        groups, per_group = attributes["groups"], kernel[attributes["rhs_layout"][1]]
        return "depthwise" if groups > 1 and per_group == 1 else "conv"

    def channel_axis(self, attributes: Attributes) -> int:
        return attributes["channels"][0][0]

    def transposed(self, attributes: Attributes, order: Sequence[int]) -> dict[str, Any]:
        layout = [order.index(axis) for axis in attributes["out_layout"]]
        return {**attributes, "out_layout": layout, "channels": turned(attributes["channels"], order)}

    def described(self, attributes: Attributes, kernel: Shape, x: Shape) -> RuleProduct:
        sizes = [n or 1 for n in kernel]
        features, _, *window = (sizes[axis] for axis in attributes["rhs_layout"])
        return RuleProduct(
            math.prod(sizes) // features,
            features,
            attributes["groups"],
            tuple(window),
            tuple(attributes["strides"]),
            tuple(attributes["rhs_dilation"]),
            tuple((low, high) for low, high in attributes["padding"]),
            tuple(x[axis] or 1 for axis in attributes["lhs_layout"][2:]),
        )

    def has_integer_backward(self, eqn: Equation) -> bool:
        return eqn.params["feature_group_count"] == 1

    def products(self, attributes: Attributes, inputs: Sequence[Sequence[int]], kernel: Sequence[int]) -> int:
        return convolution.count_products(attributes, inputs[0], kernel)

    def implied(self, inputs: Sequence[str]) -> str | None:
        return f"padding with the zero point of {inputs[0]}"

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and constant[1] and eqn.params["batch_group_count"] == 1

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        return 1

    def weight_axes(self, eqn: Equation, index: int) -> tuple[int, ...]:
        return (eqn.params["dimension_numbers"].rhs_spec[0],)

    def channels(self, eqn: Equation, index: int) -> list[list[int]]:
        numbers = eqn.params["dimension_numbers"]
        return [[numbers.out_spec[1], numbers.rhs_spec[0]]]

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        params = eqn.params
        numbers = params["dimension_numbers"]
        return windows.convolution(
            params["window_strides"],
            params["padding"],
            lhs_dilation=params["lhs_dilation"],
            rhs_dilation=params["rhs_dilation"],
            groups=params["feature_group_count"],
            layouts=(numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec),
        )

    def product(self, eqn: Equation) -> Product:
        """The equation's convolution of two float or int32 arrays, in the form whose derivatives are fast as well."""
        attributes = self.attributes(eqn)
        layout, strides, dilation = layout_of(attributes), attributes["strides"], attributes["rhs_dilation"]
        depthwise = convolution.is_depthwise(eqn.in_shapes[0], eqn.in_shapes[1], attributes["groups"], layout)

        def product(a: jax.Array, b: jax.Array, kind: Any, precision: Any) -> jax.Array:
            if depthwise:
                between = padded(a, jnp.zeros((), a.dtype), attributes)
                return convolution.depthwise(
                    between, b, strides=strides, rhs_dilation=dilation, layout=layout, dtype=kind
                )
            if kind == jnp.int32:
                return convolved(a, b, 0, attributes)  # GPUs have no integer convolution
            return products.conv_general_dilated(a, b, kind, eqn.params, precision)

        return product

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, w = inputs
        if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
            return eqn.bind(real(x), real(w))
        attributes = self.attributes(eqn)

        def integers(a: jax.Array, b: jax.Array, zero_a: Any, zero_b: Any) -> jax.Array:
            acc = convolved(a, b, 0 if zero_a is None else zero_a, attributes)
            if zero_a is None:
                return acc
            sums = accumulate.sums(b, attributes["rhs_layout"][1:])
            return acc - lax.broadcast_in_dim(zero_a * sums, acc.shape, (attributes["out_layout"][1],))

        spec = w.qparams.spec
        whole = attributes["groups"] == 1 and spec.symmetric and spec.qmax <= 127
        axes = attributes["rhs_layout"][1:], ()
        apart = [(attributes["out_layout"][0], attributes["lhs_layout"][0])], ()
        own = integers if whole else None
        halves = halves_of(attributes, x.shape, w.shape) if self.has_integer_backward(eqn) else None
        acc = matmul_codes(x, w, axes, self.product(eqn), eqn, own, apart=apart, transforms=True, halves=halves)
        vector = weight_to_result(w.scale, self.channels(eqn, 1), acc.ndim)
        scale = vector.reshape((1,) * (acc.ndim - vector.ndim) + tuple(vector.shape)) * x.scale.reshape((1,) * acc.ndim)
        return [Pending.start(acc, lax.stop_gradient(scale), eqn.out_dtypes[0])]

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        features = attributes["rhs_layout"][0]
        summed = tuple(axis for axis in range(len(attributes["rhs_layout"])) if axis != features)
        return narrow_accumulator.fold(attributes, constants, summed)

    def accumulator(self, site: Site) -> Bounds | None:
        return accumulator_bounds.weighted(site)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        batch = attributes["lhs_layout"][0]
        return [[axis for axis in range(len(inputs[0])) if axis != batch]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        accumulator = narrow_accumulator.accumulator_of(attributes, constants)
        if accumulator.ordered:
            rows = self.rows(attributes, constants, inputs[0], accumulator)
            acc = narrow_accumulator.sum_rows(accumulator, rows, constants["zero_point0"])
        else:
            offset = accumulate.signed_offset(inputs[0].dtype.name)
            x = accumulate.signed(inputs[0])
            acc = convolved(x, constants["kernel"], constants["zero_point0"] - offset, attributes)
        return finish_weighted(narrow_accumulator.cut(acc, accumulator, constants), constants, attributes)

    def rows(
        self, attributes: Attributes, constants: Constants, x: jax.Array, accumulator: Accumulator = EXACT
    ) -> narrow_accumulator.Rows:
        """The operands with K first, in the accumulator's order; groups are the batch, positions are the rows."""
        groups, layout = attributes["groups"], layout_of(attributes)
        strides, dilation = attributes["strides"], attributes["rhs_dilation"]
        skip = accumulator.padding == "skip"
        fill = jnp.zeros((), x.dtype) if skip else jnp.asarray(constants["zero_point0"]).astype(x.dtype)
        kernel = jnp.asarray(constants["kernel"])
        last, w = convolution.channels_last(padded(x, fill, attributes), kernel, layout)
        window, per_group, features = w.shape[:-2], w.shape[-2], w.shape[-1]
        taps = convolution.spatial_taps(last, window, strides, dilation)
        shape, count = taps[0].shape[:-1], len(taps)
        # columns: (tap, position, group, channel); weights: (tap, group, channel, feature)
        columns = jnp.stack(taps).reshape(count, -1, groups, per_group)
        weights = w.reshape(count, per_group, groups, -1).transpose(0, 2, 1, 3)
        if accumulator.unit == "tap" and per_group % 2:
            columns = jnp.pad(columns, ((0, 0), (0, 0), (0, 0), (0, 1)))
            weights = jnp.pad(weights, ((0, 0), (0, 0), (0, 1), (0, 0)))
        first = (0, 3) if accumulator.order == "hwc" else (3, 0)
        columns = columns.transpose(*first, 2, 1)
        weights = weights.transpose(*(0, 2) if accumulator.order == "hwc" else (2, 0), 1, 3)

        def restore(acc: jax.Array) -> jax.Array:
            return convolution.in_layout(jnp.swapaxes(acc, 0, 1).reshape(*shape, features), layout)

        outside = None
        if skip:
            blank = jnp.zeros([1 if axis in layout[0][:2] else size for axis, size in enumerate(x.shape)], jnp.int8)
            mask, _ = convolution.channels_last(padded(blank, jnp.ones((), jnp.int8), attributes), kernel, layout)
            places = jnp.stack(convolution.spatial_taps(mask, window, strides, dilation), axis=-1)
            sums = jnp.sum(w.reshape(count, per_group, features), axis=1, dtype=jnp.int32)
            met = accumulate.dot(places[..., 0, :], sums, (((places.ndim - 2,), (0,)), ((), ())))
            outside = convolution.in_layout(met, layout)
        return narrow_accumulator.Rows(
            columns.reshape(-1, *columns.shape[2:]), weights.reshape(-1, *weights.shape[2:]), restore, outside
        )


def halves_of(attributes: Attributes, x: Sequence[int], w: Sequence[int]) -> tuple[Half, Half]:
    """The backward pass of a convolution without groups; x and w are shapes."""
    lhs, rhs, out = layout_of(attributes)
    batch_features = (out[0], *out[2:]), (out[1],)
    rank = len(x)
    window = math.prod(w[axis] for axis in rhs[2:])

    def of_input(g: jax.Array, kernel: jax.Array, zero: jax.Array | None) -> jax.Array:
        """The convolution of g, spread out by the strides, with the flipped kernel."""
        kernel = jnp.swapaxes(lax.rev(kernel, tuple(rhs[2:])), rhs[0], rhs[1])
        kernel = laid_out_on_cpu(jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0])))
        config = [(0, 0, 0)] * rank
        for i, (low, _) in enumerate(attributes["padding"]):
            stride, dilation = attributes["strides"][i], attributes["lhs_dilation"][i]
            reach = (w[rhs[2 + i]] - 1) * attributes["rhs_dilation"][i]
            size = (x[lhs[2 + i]] - 1) * dilation + 1
            before = reach - low
            after = size + reach - ((g.shape[out[2 + i]] - 1) * stride + 1) - before
            config[out[2 + i]] = (before, after, stride - 1)
        last = tuple(range(1, rank - 1))
        numbers = (0, rank - 1, *last), (rank - 1, rank - 2, *range(rank - 2)), lhs
        spread_out = jnp.transpose(lax.pad(g, np.int8(0), config), (out[0], *out[2:], out[1]))
        strides, dilation = attributes["lhs_dilation"], attributes["rhs_dilation"]
        return convolution.conv(
            finished_on_cpu(spread_out), kernel, strides=strides, rhs_dilation=dilation, groups=1, layout=numbers
        )

    def of_kernel(g: jax.Array, x: jax.Array, zero: jax.Array | None) -> jax.Array:
        """For each position of the window, the product of the input there, one row for each channel, with g."""
        fill = jnp.zeros((), jnp.int32) if zero is None else zero
        # The batch comes last, because slices of whole runs in memory are fast.
        x = jnp.transpose(padded(x, fill.astype(jnp.int8), attributes), (lhs[1], *lhs[2:], lhs[0]))
        g = laid_out_on_cpu(jnp.transpose(g, (*out[2:], out[0], out[1])))
        sizes = (1, *(w[axis] for axis in rhs[2:]), 1)
        steps = (1, *attributes["strides"], 1), (1, *attributes["rhs_dilation"], 1)
        taps = accumulate.taps(laid_out_on_cpu(x), sizes, *steps)
        rows = finished_on_cpu(jnp.stack(taps))
        numbers = (tuple(range(2, rank + 1)), tuple(range(rank - 1))), ((), ())
        acc = accumulate.corrected(accumulate.dot(rows, g, numbers), rows, g, zero, None, numbers)
        acc = acc.reshape(*(w[axis] for axis in rhs[2:]), *acc.shape[1:])
        order = [0] * rank
        for source, target in enumerate((*rhs[2:], rhs[1], rhs[0])):
            order[target] = source
        return jnp.transpose(acc, order)

    def at(vector: jax.Array, axis: int) -> jax.Array:
        return jax.lax.expand_dims(vector.reshape(-1), [i for i in range(rank) if i != axis])

    def of_input_scales(of_g: jax.Array, of_kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        return at(of_g, lhs[0]), at(of_kernel, lhs[1])

    def of_kernel_scales(of_g: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return at(of_g, rhs[0]), at(of_x, rhs[1])

    return (
        Half(
            of_input,
            ((out[1], *out[2:]), (rhs[0], *rhs[2:])),
            ((out[1], rhs[0]),),
            lambda g, _: g[out[1]] * window,
            of_input_scales,
            takes_zero=False,
        ),
        Half(
            of_kernel,
            ((out[0], *out[2:]), (lhs[0], *lhs[2:])),
            ((out[0], lhs[0]),),
            lambda g, _: math.prod(g[axis] for axis in batch_features[0]),
            of_kernel_scales,
        ),
    )


def layout_of(attributes: Attributes) -> convolution.Layout:
    """The axes of a node's operands and result, in the form that `convolution.conv` takes."""
    return attributes["lhs_layout"], attributes["rhs_layout"], attributes["out_layout"]


def convolved(x: jax.Array, w: jax.Array, zero_point: ArrayLike, attributes: Attributes) -> jax.Array:
    """The int32 convolution of codes whose padding is the code of zero."""
    return convolution.conv(
        padded(x, jnp.asarray(zero_point).astype(x.dtype), attributes),
        w,
        strides=attributes["strides"],
        rhs_dilation=attributes["rhs_dilation"],
        groups=attributes["groups"],
        layout=layout_of(attributes),
    )


def padded(x: jax.Array, fill: jax.Array, attributes: Attributes) -> jax.Array:
    """Apply padding and the input's dilation in one step, because both insert the code of zero."""
    config = [(0, 0, 0)] * x.ndim
    for axis, (low, high), dilation in zip(
        attributes["lhs_layout"][2:], attributes["padding"], attributes["lhs_dilation"], strict=True
    ):
        config[axis] = (low, high, dilation - 1)
    return lax.pad(x, fill, config)
