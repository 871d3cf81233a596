"""A product of float rows with int8 or int4 weights, as LiteRT's FULLY_CONNECTED computes it with float activations.

The rows are quantized at run time. The target's formula defines how, and how the int32 sums become floats: see
`numerics.dynamic_formulas`.
"""

import abc
import math
from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import dynamic_formulas as formulas
from qjax.numerics._namespace import traced
from qjax.numerics.dynamic import dynamic_codes
from qjax.numerics.fused import fused_multiply_add
from qjax.numerics.qspec import QSpec
from qjax.numerics.unfused import unfused
from qjax.ops import accumulate
from qjax.ops.base import Attributes, Bounds, Constants, Op, Role, Shape, Site, register
from qjax.ops.facts import always
from qjax.ops.fields import Natural


class Fields(TypedDict):
    """symmetric: whether the codes of rows have the zero point 0, which XNNPACK ignores, even if the file states it.

    summed: how many of the last axes of x are summed. features: the last axes of the result.
    """

    symmetric: bool
    summed: Natural
    features: list[Natural]


class OfTarget(TypedDict):
    """dynamic: the name of the formula in `numerics.dynamic_formulas`."""

    dynamic: formulas.DynamicFormula


class RunTimeCodes(Op):
    """A product of floats that are quantized at run time with int8 weights, whose first axis is that of the results."""

    role = Role.INTEGER
    reals = True
    keeps_batch = always

    def accumulator(self, site: Site) -> Bounds | None:
        kernel = site.constants["kernel"]
        if traced(kernel):
            return None
        sums = np.abs(np.asarray(kernel, np.int64)).sum(self.summed(kernel.shape))
        most = 255 * int(sums.max(initial=0))
        return -most, most

    @abc.abstractmethod
    def summed(self, kernel: Shape) -> tuple[int, ...]:
        """The axes of the kernel along which one int32 sum runs."""

    def in_target(self, attributes: Attributes, kernel: Any, formula: formulas.DynamicFormula) -> str | None:
        """Which part of the product a runtime with that formula does not support, or None; kernel: its tensor."""
        low, high = kernel.quantization.qmin, kernel.quantization.qmax
        bits = 4 if low >= -8 and high <= 7 else 8
        size = kernel.shape[2] if len(kernel.shape) == 3 else None
        weights = QSpec(bits=bits, axis=0, group_size=size, narrow_range=low > -(2 ** (bits - 1)))
        return formulas.unsupported(formula, QSpec(bits=8, symmetric=False), weights)


@register
class DynamicDot(RunTimeCodes):
    """y[..., n] = sum_k x[..., k] w[n, k] + bias[n], where the codes of x are computed at run time.

    constants: kernel holds int8 codes (n, k), or (n, groups, size) if each group has its own scale. kernel_scale,
    float32, is a constant of its own in a program. bias, float32 (n,), is present if the product has one.
    """

    name = "dynamic_dot"
    fields = Fields
    prepared = OfTarget

    def summed(self, kernel: Shape) -> tuple[int, ...]:
        return (len(kernel) - 1,)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        rank = len(inputs[0])
        return [range(rank - attributes["summed"], rank)]

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        kernel, scale = jnp.asarray(constants["kernel"]), jnp.asarray(constants["kernel_scale"])
        held = dict(constants)
        if kernel.ndim == 3 and attributes["dynamic"] == "xnnpack":
            scale = formulas.grouped_scales(scale)
        held["kernel_scale"] = jnp.broadcast_to(scale, kernel.shape[:-1])
        held["sums"] = jnp.sum(kernel, -1, dtype=jnp.int32)
        return held

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        formula = attributes["dynamic"]
        x = inputs[0].astype(jnp.float32)
        lead = x.shape[: x.ndim - attributes["summed"]]
        kernel = constants["kernel"]
        n, depth = kernel.shape[0], math.prod(kernel.shape[1:])
        rows = x.reshape(math.prod(lead), depth)
        codes, scale, zero = codes_of(rows, attributes["symmetric"], (1,), formula)
        shape = (rows.shape[0], n)
        of_x, zeros = (jnp.broadcast_to(v[:, None], shape) for v in (scale, zero))
        held = constants["kernel_scale"], constants["sums"]
        if kernel.ndim == 3:
            scales, sums = ([jnp.broadcast_to(v[None, :, g], shape) for g in range(kernel.shape[1])] for v in held)
            split = codes.reshape(rows.shape[0], *kernel.shape[1:])
            accs = [_product(split[:, g], kernel[:, g]) for g in range(kernel.shape[1])]
            same = [of_x] * len(accs), [zeros] * len(accs)
            y = formulas.of_groups(formulas.Groups(accs, sums, scales, *same), formula, kernel.shape[2])
            y = y if "bias" not in constants else y + constants["bias"][None]
        else:
            of_w, sums = (jnp.broadcast_to(v[None], shape) for v in held)
            y = with_bias(_product(codes, kernel) - zeros * sums, of_x, of_w, constants.get("bias"), formula)
        return y.reshape(*lead, *attributes["features"])


def codes_of(
    x: jax.Array, symmetric: bool, shared: tuple[int, ...], formula: formulas.DynamicFormula
) -> tuple[jax.Array, ...]:
    """int8 codes of floats, their scales and zero points; shared: the axes that share one."""
    if formula != "onnx":
        return formulas.row_codes(x, symmetric, shared, formula)
    codes, scale, zero = dynamic_codes(x, QSpec(bits=8, symmetric=symmetric), shared)
    return codes.astype(jnp.int8), scale, zero


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return accumulate.dot(x, w, (((1,), (1,)), ((), ())))


def with_bias(
    acc: jax.Array, of_x: jax.Array, of_weight: jax.Array, bias: Any, formula: formulas.DynamicFormula
) -> jax.Array:
    """Floats from int32 sums. bias: float32, for the last axis. XNNPACK adds it in the last multiplication (FMA)."""
    if bias is None:
        return formulas.of_sums(acc, of_x, of_weight, formula)
    bias = jnp.broadcast_to(jnp.asarray(bias), acc.shape)
    if formula == "xnnpack":
        return fused_multiply_add(unfused(acc.astype(jnp.float32) * of_x), of_weight, bias)
    return formulas.of_sums(acc, of_x, of_weight, formula) + bias
