"""Normalisation over axes by the tensor's own statistics: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, L2."""

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.calls import named
from qjax.numerics.normalize import Setup, factor, normalized, prepare
from qjax.numerics.softfloat import Real
from qjax.ops import normalize_parts
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
    centered,
    real,
    register,
)
from qjax.ops.channels import trailing
from qjax.ops.composed import Part, Steps
from qjax.ops.epilogue import Affine, finish_sum, fold_sum, greatest_shift
from qjax.ops.fields import Natural, Rounded
from qjax.ops.float_accumulator import Pending


class PreparedFields(Rounded):
    """span: the greatest difference between two codes."""

    span: int


class Fields(TypedDict):
    """See the class."""

    axes: list[Natural]
    center: bool
    divisor: int | None
    epsilon: float
    joined: Literal["add", "max"]
    groups: Natural
    feature_axes: list[Natural]


@register
class Normalize(Op):
    """y = (x - mean) / sqrt(sum((x - mean)^2) / divisor + epsilon) * scale + bias, over some axes.

    attributes: axes are those over which the statistics run. center tells whether the mean is subtracted; otherwise it
    counts as 0. divisor divides the sum of squares: the number of elements for a variance, which 0 stands for, and 1
    for a norm. joined is "add" if epsilon is added under the root, and "max" if the root is at least epsilon. groups is
    the number of groups of the last axis, each with its own statistics (1: no groups). feature_axes are the axes of
    scale and bias.

    The result is within `1/2 + 2^-15 + |y| 2^-28 + sqrt(n) G 2^-30` steps of the real function of the codes, where |y|
    is the number of steps from beta, and a normalised number of 1 is G steps; see `numerics.normalize`.
    """

    name = "normalize"
    rescales = True
    fields = Fields
    prepared = PreparedFields
    role = Role.PRODUCER
    primitives = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize")
    takes_steps = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and all(constant[1:])

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {name: i for i, name in enumerate(_operands(eqn)) if i > 0}

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        known = dict(eqn.params["layer"].attributes) if "layer" in eqn.params else dict(eqn.params)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x = inputs[0]
        if not isinstance(x, Quantized):
            return eqn.bind(*(real(x) for x in inputs))
        attributes, values = self.attributes(eqn), x.real32()
        rows, axes = _grouped(values, attributes)
        if attributes["center"]:
            rows = rows - jnp.mean(rows, axis=axes, keepdims=True)
        count = _count(rows.shape, axes)
        power = jnp.sum(rows * rows, axis=axes, keepdims=True) * np.float32(1 / (attributes["divisor"] or count))
        epsilon = np.float32(attributes["epsilon"])
        if attributes["joined"] == "max":
            inverse = 1 / jnp.sqrt(jnp.maximum(power, epsilon * epsilon))
        else:
            inverse = jax.lax.rsqrt(power + epsilon)
        y = Pending.of_real((rows * inverse).reshape(values.shape), eqn.out_dtypes[0])
        named = dict(zip(_operands(eqn)[1:], inputs[1:], strict=True))
        if "scale" in named:
            y = y.times(_features(real(named["scale"]), attributes, values.ndim))
        return [y.plus(_features(real(named["bias"]), attributes, values.ndim)) if "bias" in named else y]

    def keeps_batch(self, attributes: Attributes, inputs: Sequence[Sequence[int | None]]) -> bool:
        _sizes(attributes, inputs[0])
        return True

    def prepare(self, given: Preparation) -> Prepared:
        attributes, x = given.attributes, given.inputs[0]
        setup = _setup(attributes, x.shape, x.qmin, x.qmax)
        divisor = attributes["divisor"] or setup.count
        constants = prepare(setup, divisor, attributes["epsilon"], x.scale, attributes["joined"])
        affine = _affine(given)
        step = factor(setup, divisor).scale_by_power_of_two(np.int32(-setup.places))
        y = given.output
        folded = fold_sum([step], y.scale, affine, greatest_shift(y.qmin, y.qmax))
        return Prepared(
            {**constants, **folded}, {"rounding": given.target.rounding.value, "span": _span(x.qmin, x.qmax)}
        )

    def composed(self, given: Preparation, steps: Steps) -> list[Part] | None:
        return normalize_parts.parts(given, _affine(given))

    def restated(self, given: Preparation) -> Prepared | None:
        if "factor0" not in given.constants:
            return self.prepare(given)
        # the target only decides the rounding
        return Prepared(given.constants, {"rounding": given.target.rounding.value})

    def arithmetic(self, attributes: Attributes) -> str:
        return f"int64 sums and root, one rounding ({attributes['rounding']})"

    def accumulator(self, site: Site) -> Bounds | None:
        # the sums are int64, and `Setup.of` bounds them
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        axes, groups = tuple(attributes["axes"]), attributes["groups"]
        count = _count(x.shape, axes) // groups
        setup = Setup.of(count, attributes["span"], centered=attributes["center"])
        own = {name: jnp.asarray(constants[name]) for name in ("energy_high", "energy_low", "right", "half")}
        t = normalized_codes(x, constants["zero_point0"], own, axes, setup, attributes["joined"], groups)
        return finish_sum([t], constants, attributes)


@named(3, 4, 5, 6)
def normalized_codes(
    x: jax.Array,
    zero_point: Any,
    constants: Constants,
    axes: tuple[int, ...],
    setup: Setup,
    joined: Literal["add", "max"],
    groups: int,
) -> jax.Array:
    """The normalised numbers of codes, int32 of their shape; see `numerics.normalize.normalized`."""
    codes = centered(x, {"zero_point0": zero_point}, 0)
    rows, axes = _grouped(codes, {"axes": axes, "groups": groups})
    return normalized(rows, axes, setup, dict(constants), joined).reshape(codes.shape)


def _affine(given: Preparation) -> Affine:
    """Gamma and beta combined with the affine steps after the layer."""
    attributes, rank = given.attributes, len(given.inputs[0].shape)
    affine = Affine.identity()
    if "scale" in given.constants:
        affine = affine.times(_real(given.constants["scale"], attributes, rank))
    if "bias" in given.constants:
        affine = affine.plus(_real(given.constants["bias"], attributes, rank))
    return Affine(affine.g * given.affine.g, affine.b * given.affine.g + given.affine.b)


def _operands(eqn: Equation) -> tuple[str, ...]:
    return eqn.params["layer"].operands if "layer" in eqn.params else ("x",)


def _grouped(x: jax.Array, attributes: Attributes) -> tuple[jax.Array, tuple[int, ...]]:
    """The tensor with its last axis split into groups, and the axes of one row."""
    axes, groups = tuple(attributes["axes"]), attributes["groups"]
    if groups == 1:
        return x, axes
    last = x.ndim - 1
    split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return split, tuple(axis + 1 if axis == last else axis for axis in axes)


def _count(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _span(qmin: int | None, qmax: int | None) -> int:
    assert qmin is not None
    assert qmax is not None
    return qmax - qmin


def _sizes(attributes: Attributes, shape: Sequence[int | None]) -> list[int]:
    """The sizes of the axes over which the statistics are taken."""
    sizes = [size for axis in attributes["axes"] if (size := shape[axis]) is not None]
    if len(sizes) < len(attributes["axes"]):
        raise ValueError(
            f"takes statistics over the axes {list(attributes['axes'])}, which mix the examples of a batch, but a "
            "graph takes any batch size. Normalise over axes of one example"
        )
    return sizes


def _setup(attributes: Attributes, shape: Sequence[int | None], qmin: int | None, qmax: int | None) -> Setup:
    count = math.prod(_sizes(attributes, shape)) // attributes["groups"]
    return Setup.of(count, _span(qmin, qmax), centered=attributes["center"])


def _features(value: Any, attributes: Attributes, rank: int) -> jax.Array:
    """A vector over the feature axes, in the result's rank."""
    value = jnp.asarray(value).astype(jnp.float32)
    return value.reshape(_feature_shape(value.shape, attributes, rank))


def _real(value: Any, attributes: Attributes, rank: int) -> Real:
    return Real.of(trailing(value.reshape(_feature_shape(value.shape, attributes, rank))))


def _feature_shape(shape: Sequence[int], attributes: Attributes, rank: int) -> list[int]:
    wanted = [1] * rank
    for axis, size in zip(attributes["feature_axes"], shape, strict=True):
        wanted[axis] = size
    return wanted
