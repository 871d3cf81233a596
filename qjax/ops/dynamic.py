"""Products of an activation with a weight, quantized at run time. Inputs and outputs are floats.

    y = float32(sum_k (x_k - z_x) w_k) * (s_x * s_w)

s_x and z_x are computed from the range of x at run time (`numerics.dynamic`). w has symmetric codes with a scale for
each output channel. The sum is int32. The scheme is ONNX's DynamicQuantizeLinear + MatMulInteger (or ConvInteger) +
Cast + Mul.

A weight with groups (`group_size`, as in int4 weights of language models) has a sum and a scale for each group. The
products of sums and scales are added in float32, in the order of the groups, so that every machine computes the same
bits.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import QSpec, broadcast_to_tensor, choose_qparams, quantize, split_groups
from qjax.numerics.dynamic import dynamic_codes
from qjax.numerics.dynamic_formulas import DynamicFormula, grouped_scales, of_groups, of_sums, row_codes
from qjax.numerics.fence import finished_on_cpu
from qjax.numerics.qspec import dividing_group, known_fields
from qjax.numerics.unfused import unfused
from qjax.numerics.weight_formats import INTEGERS, WeightFormat, encode
from qjax.ops import accumulate, dynamic_windows
from qjax.ops.base import Equation
from qjax.ops.channels import weight_to_result
from qjax.ops.conv import Conv, convolved
from qjax.ops.dot import Dot
from qjax.ops.grouped_dot import accumulators
from qjax.ops.recomputed import is_recomputed

Per = Literal["tensor", "example", "row"]

WEIGHTS, ACTIVATIONS = QSpec(bits=8, axis=-1), QSpec(bits=8)
"""The codes if neither a `Dynamic` nor its recipe states any."""


@known_fields({"bits": "Set bits for weights or for activations: Dynamic(weights=QSpec(bits=4, axis=-1))."})
@dataclasses.dataclass(frozen=True)
class Dynamic:
    """An override with activation scales that are computed at run time, so nothing is calibrated or learned.

    The module's products with weights run on codes. Everything else in the module is float, as under `FLOAT`.

    Args:
      weights: symmetric codes of 2 to 8 bits; None takes the recipe's. `axis=-1` is a scale for each output channel,
        `axis=None` one for the tensor. With `group_size`, each group of weights along the summed axis has its own
        scale; `QSpec` documents what happens to products without such groups, such as convolutions.
        `WeightFormat("ternary")` with `per="row"` is the scheme of BitNet b1.58; "binary" has -1 and 1 alone.
      activations: codes of 2 to 8 bits, symmetric (then signed) or asymmetric. None takes those of the recipe or its
        profile, with 7 of 8 bits under `reduce_range`; if these state none, `QSpec(bits=8)`.
      per: which activations share a scale: the whole "tensor", so that an example's codes depend on the others in its
        batch; an "example", one index of the first axis, or of a convolution's batch axis; or a "row", every vector
        that a product sums over. Only convolutions with windows of one pixel have rows.

    Examples:
      >>> import qjax
      >>> w4a8 = qjax.Dynamic(
      ...     weights=qjax.QSpec(bits=4, axis=-1, group_size=32), per="row"
      ... )  # "8da4w"
      >>> recipe = qjax.Recipe(overrides={"blocks/.*": w4a8})
    """

    weights: QSpec | WeightFormat | None = None
    activations: QSpec | None = None
    per: Per = "tensor"

    def __post_init__(self) -> None:
        for name, spec in (("weights", self.weights), ("activations", self.activations)):
            if spec is None or (name == "weights" and isinstance(spec, WeightFormat) and spec.is_integer):
                continue
            if type(spec) is not QSpec:
                if isinstance(spec, WeightFormat):
                    raise TypeError(
                        f"Dynamic: {name}: {spec} has values that are no integers, so they cannot be multiplied with "
                        f"int8 rows in a sum of integers. Use {', '.join(INTEGERS)} or a QSpec, or qjax.WeightFormat "
                        "alone as the override."
                    )
                raise TypeError(f"Dynamic: {name}: expected a QSpec, got {spec!r}.")
            if not 2 <= spec.bits <= 8:
                raise ValueError(f"Dynamic: {name}: expected 2 to 8 bits, which int8 holds, got {spec.bits}.")
            if spec.symmetric and not spec.signed:
                raise ValueError(f"Dynamic: {name}: symmetric codes must be signed, got {spec}. Use symmetric=False.")
        if isinstance(self.weights, QSpec) and not self.weights.symmetric:
            raise ValueError(f"Dynamic: weights: expected symmetric codes, got {self.weights}. Use symmetric=True.")
        if isinstance(self.weights, QSpec) and (self.weights.axis not in (None, -1) or self.weights.group_axis != 0):
            raise ValueError(
                "Dynamic: weights: expected axis=-1 (a scale for each output channel of any layer) or axis=None, and "
                f"no group_axis (groups always run along the summed axis), got {self.weights}."
            )
        if self.activations is not None and not self.activations.per_tensor:
            raise ValueError(
                f"Dynamic: activations: expected a spec without axis and group_size, got {self.activations}. "
                'With per="row" every row has its own scale.'
            )
        if self.per not in get_args(Per):
            raise ValueError(f"Dynamic: per: expected one of {', '.join(map(repr, get_args(Per)))}, got {self.per!r}.")

    def __str__(self) -> str:
        weights = str(self.weights)
        if not isinstance(self.weights, WeightFormat):
            own = self.weights or WEIGHTS
            weights = f"w{own.bits}" + (f" in groups of {own.group_size}" if own.group_size is not None else "")
        return f"{weights} a{(self.activations or ACTIVATIONS).bits} per {self.per}"

    def over(self, weights: QSpec, activations: QSpec) -> "Dynamic":
        """The setting completed by these codes where it states none itself.

        Raises:
          ValueError: codes that `Dynamic` does not accept.
        """
        return dataclasses.replace(self, weights=self.weights or weights, activations=self.activations or activations)


def with_fitting_groups(setting: Dynamic, eqn: Equation, weight: int) -> Dynamic:
    """The setting, with groups that fit the product's weight, operand `weight`; see `QSpec`."""
    spec = setting.weights
    if not isinstance(spec, QSpec) or spec.group_size is None:
        return setting
    size = dividing(spec.group_size, eqn, weight)
    if size == spec.group_size:
        return setting
    return dataclasses.replace(setting, weights=spec.replace(group_size=size, axis=-1 if size is None else spec.axis))


def dividing(size: int, eqn: Equation, weight: int) -> int | None:
    """The size of the groups that a product's weight can have, see `dividing_group`; None if it can have none."""
    op = Conv() if eqn.primitive == "conv_general_dilated" else Dot()
    summed = [axis for axis in range(len(eqn.in_shapes[weight])) if axis not in op.weight_axes(eqn, weight)]
    grouped = op.groups_scales and len(summed) == 1
    return dividing_group(size, eqn.in_shapes[weight][summed[0]]) if grouped else None


@dataclasses.dataclass(frozen=True)
class DynamicCodes:
    """Computes an activation's codes; reduced: its axes that share a scale. formula: see `dynamic_formulas`."""

    spec: QSpec
    reduced: tuple[int, ...]
    formula: DynamicFormula = "onnx"

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """int8 codes (unsigned ones minus 128), float32 scales, and int32 zero points of those int8 codes.

        Scales and zero points are scalars, or have the shape of the axes that a dot does not sum over.
        """
        # the product defines its own derivative, so nothing is differentiated through the quantizer
        x = lax.stop_gradient(x).astype(jnp.float32)
        if self.formula != "onnx":
            codes, scale, zero_point = row_codes(x, self.spec.symmetric, self.reduced, self.formula)
            return [finished_on_cpu(codes), scale, zero_point]
        codes, scale, zero_point = dynamic_codes(x, self.spec, self.reduced)
        offset = np.int32(accumulate.signed_offset(self.spec.dtype.name))
        return [finished_on_cpu((codes - offset).astype(jnp.int8)), scale, zero_point - offset]


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicProduct:
    """One `dot_general` or `conv_general_dilated` of an activation and a weight.

    eqn: the float product. weight: which operand is the weight. formula: see `numerics.dynamic_formulas`; those other
    than "onnx" only support the products that `ops.dynamic_rows` accepts.

    Raises:
      ValueError: rows or groups of a convolution, groups that do not fit, or sums that may exceed int32.
    """

    eqn: Equation
    weight: int
    setting: Dynamic
    formula: DynamicFormula = "onnx"

    def __post_init__(self) -> None:
        if self.is_convolution and self.setting.per == "row" and len(self._through()) == 1:
            raise ValueError(
                'Dynamic(per="row") on a convolution whose windows overlap or skip pixels, so that no row belongs to '
                'one window: expected per="example" or per="tensor". Override these convolutions separately.'
            )
        if self.setting.per == "example" and not self._kept(len(self.eqn.in_shapes[1 - self.weight])):
            raise ValueError(
                'Dynamic(per="example") on a product that sums over the first axis of its activations, '
                'so its examples share a sum: expected per="row" or per="tensor".'
            )
        self._check_groups()
        spec = self.activations
        reach = spec.qmax if spec.symmetric else spec.qmax - spec.qmin
        shape = self.eqn.in_shapes[self.weight]
        summed = self.weights.group_size or math.prod(shape[axis] for axis in self.summed)
        most = (2**31 - 1) // (reach * self.weights.qmax)
        if summed > most:
            raise ValueError(
                f"Dynamic on a sum of {summed} products: with these bits only {most} are sure to fit int32. Use fewer "
                "bits, or keep the module in float: qjax.FLOAT."
            )

    @property
    def weights(self) -> QSpec | WeightFormat:
        """The codes of the weight."""
        return self.setting.weights or WEIGHTS

    @property
    def activations(self) -> QSpec:
        """The codes of the activation."""
        return self.setting.activations or ACTIVATIONS

    def _check_groups(self) -> None:
        size = self.weights.group_size
        if size is not None and dividing(size, self.eqn, self.weight) != size:
            raise ValueError(
                f"Dynamic with groups of {size} weights: expected a product that sums over one axis, whose size "
                f"is a multiple of that, got a weight of shape {self.eqn.in_shapes[self.weight]}. Leave out group_size."
            )

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution."""
        return self.eqn.primitive == "conv_general_dilated"

    @property
    def _op(self) -> Conv | Dot:
        return Conv() if self.is_convolution else Dot()

    @property
    def kept(self) -> tuple[int, ...]:
        """The weight's axes that are axes of the result."""
        return tuple(self._op.weight_axes(self.eqn, self.weight))

    @property
    def summed(self) -> tuple[int, ...]:
        """The weight's axes that are summed."""
        return tuple(axis for axis in range(len(self.eqn.in_shapes[self.weight])) if axis not in self.kept)

    def weight_parts(self, w: jax.Array) -> list[jax.Array]:
        """What depends on the weight alone: its codes int8, their scales float32, their sums int32.

        Scales and sums have the weight's rank, with size 1 along axes on which they do not vary, and the number of
        groups along the axis that is summed.
        """
        if isinstance(self.weights, WeightFormat):
            codes, scale = encode(lax.stop_gradient(w).astype(jnp.float32), self.weights)
            return [codes, scale, self.sums(codes)]
        kept = self._op.weight_axes(self.eqn, self.weight)
        spec = self.weights.replace(axis=None if self.weights.axis is None else kept or None)
        if spec.group_size is not None:
            spec = spec.replace(group_axis=self.summed[0])
        # the product defines its own derivative, so nothing is differentiated through the quantizer
        w = lax.stop_gradient(w).astype(jnp.float32)
        view, axes = split_groups(w, spec)
        largest = jnp.max(jnp.abs(view), axes)
        qparams = choose_qparams(-largest, largest, spec)
        if self.formula == "xnnpack" and spec.group_size is not None:
            qparams = dataclasses.replace(qparams, scale=grouped_scales(qparams.scale))
        codes = finished_on_cpu(quantize(w, qparams))
        if spec.group_size is not None:
            at, axes = self.summed[0], (*range(w.ndim),)
            keeps = axes if spec.axis is not None else (at,)
            scale = jnp.reshape(qparams.scale, [n if a in keeps else 1 for a, n in enumerate(self._grouped(w.shape))])
            return [codes, finished_on_cpu(scale), self.sums(codes)]
        scale = finished_on_cpu(broadcast_to_tensor(qparams.scale, spec, w.shape))
        return [codes, scale, self.sums(codes)]

    def sums(self, codes: jax.Array) -> jax.Array:
        """The sums of a weight's codes, one for each group if it has groups."""
        if self.weights.group_size is not None:
            return jnp.sum(self._split(codes), axis=self.summed[0] + 1, dtype=jnp.int32)
        return jnp.sum(codes, axis=self.summed, dtype=jnp.int32, keepdims=True)

    def _grouped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape with the number of groups along the axis that is summed."""
        size, at = self.weights.group_size, self.summed[0]
        assert size is not None
        return (*shape[:at], shape[at] // size, *shape[at + 1 :])

    def _split(self, w: jax.Array) -> jax.Array:
        """The weight with the summed axis split in two: groups, and the elements of a group."""
        shape, at = self._grouped(w.shape), self.summed[0]
        return w.reshape(*shape[: at + 1], w.shape[at] // shape[at], *shape[at + 1 :])

    @property
    def coding(self) -> "DynamicCodes":
        """What computes the codes of the activation; products with equal `coding` and activation share the codes."""
        sharing = self._sharing(len(self.eqn.in_shapes[1 - self.weight]))
        return DynamicCodes(self.activations, sharing, self.formula)

    def __call__(self, x: jax.Array, w: jax.Array, *coded: jax.Array) -> list[jax.Array]:
        """The product in the model's dtype; coded: the results of `coding` for x, and of `weight_parts` for w.

        The value reads the codes only. The gradient passes straight through both quantizers, to x and to w, and is that
        of the product of the dequantized tensors. Nothing is clipped that should stop it, because the range covers the
        data.
        """
        return [_product(self, is_recomputed(), x, w, *coded)]

    def accumulator(self, x_codes: jax.Array, zero: jax.Array, w_codes: jax.Array, sums: jax.Array) -> jax.Array:
        """The int32 sums in the result's shape, with zero points subtracted."""
        if self.is_convolution and self.setting.per != "tensor":
            zeros = None if self.activations.symmetric else self._of_x(zero, x_codes.ndim)
            return dynamic_windows.centred_sums(Conv().attributes(self.eqn), x_codes, w_codes, zeros)
        if self.is_convolution:
            acc = convolved(x_codes, w_codes, zero, Conv().attributes(self.eqn))
        else:
            operands = (x_codes, w_codes) if self.weight == 1 else (w_codes, x_codes)
            acc = accumulate.dot(*operands, self.eqn.params["dimension_numbers"])
        if self.activations.symmetric:
            return acc
        return acc - self._of_x(zero, x_codes.ndim) * self._of_weight(sums)

    # ------------------------------------------------------------------ value and derivative

    def value(self, *coded: jax.Array) -> jax.Array:
        """The product, from the results of `coding` and `weight_parts`."""
        x_codes, scale, zero, w_codes, w_scale, sums = coded
        if self.weights.group_size is not None:
            return self._sum_of_groups(x_codes, scale, zero, w_codes, w_scale, sums)
        acc = self.accumulator(x_codes, zero, w_codes, sums)
        if self.setting.per != "tensor":
            of_x, of_weight = self._of_x(scale, x_codes.ndim), self._of_weight(w_scale)
            return of_sums(acc, of_x, of_weight, self.formula).astype(self.eqn.out_dtypes[0])
        # compute this small array once; if it is fused, each element of the result would multiply the two scales again
        scales = self._of_weight(finished_on_cpu(unfused(scale * w_scale)))
        # round the product before the model's bias is added; otherwise jit could fuse both into one rounding
        return unfused(acc.astype(jnp.float32) * scales).astype(self.eqn.out_dtypes[0])

    def _sum_of_groups(self, x: jax.Array, scale: jax.Array, zero: jax.Array, w: jax.Array, *parts: jax.Array) -> Any:
        contracting, batch = self.eqn.params["dimension_numbers"]
        at, axis, first = self.summed[0], int(contracting[1 - self.weight][0]), self.weight
        layout = {
            "weight": first,
            "group_axis": at,
            "summed": axis,
            "batch": batch[1 - first],
            "weight_batch": [a + (a > at) for a in batch[first]],
        }
        acc = accumulators(layout, x, self._split(w), accumulate.dot)
        of_x, zero_of_x = self._of_x(scale, x.ndim), self._of_x(zero, x.ndim)
        groups = [lax.index_in_dim(acc, index, 0, keepdims=False) for index in range(acc.shape[0])]
        own, sums = (
            [self._of_weight(lax.slice_in_dim(part, index, index + 1, axis=at)) for index in range(len(groups))]
            for part in parts
        )
        size = self.weights.group_size
        assert size is not None
        total = of_groups(groups, sums, own, of_x, zero_of_x, self.formula, size)
        return total.astype(self.eqn.out_dtypes[0])

    def along_x(self, dx: jax.Array, w_codes: jax.Array, w_scale: jax.Array) -> jax.Array:
        """The product of dx and the dequantized weight."""
        if self.weights.group_size is not None:
            w_scale = jnp.repeat(w_scale, self.weights.group_size, axis=self.summed[0])
        w = w_codes.astype(jnp.float32) * jnp.broadcast_to(w_scale, w_codes.shape)
        return self._real(dx, finished_on_cpu(w.astype(self.eqn.in_dtypes[self.weight])))

    def along_w(self, dw: jax.Array, x_codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """The product of the dequantized x and dw."""
        kept = self._kept(x_codes.ndim)
        if not self.activations.symmetric:
            x_codes = x_codes.astype(jnp.int32) - lax.broadcast_in_dim(zero, x_codes.shape, kept)
        x = x_codes.astype(jnp.float32) * lax.broadcast_in_dim(scale, x_codes.shape, kept)
        return self._real(finished_on_cpu(x.astype(self.eqn.in_dtypes[1 - self.weight])), dw)

    def _real(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The float product of the model."""
        operands = (x, w) if self.weight == 1 else (w, x)
        if self.eqn.out_dtypes[0] != jnp.float32:
            return self.eqn.bind(*operands)[0]
        return self._op.product(self.eqn)(*operands, jnp.float32, self.eqn.params["precision"])

    # ------------------------------------------------------------------ axes

    def _sharing(self, rank: int) -> tuple[int, ...]:
        """The axes of x that share a scale."""
        if self.setting.per == "tensor":
            return tuple(range(rank))
        axes = [axis for _, axis in self._through()]
        if self.setting.per == "example":
            axes = [axis for axis in axes if axis == (axes[0] if self.is_convolution else 0)]
        return tuple(axis for axis in range(rank) if axis not in axes)

    def _through(self) -> list[tuple[int, int]]:
        """The axes of x that are not summed: (the result's, x's)."""
        if self.is_convolution:
            return dynamic_windows.through(self.eqn)
        return [(int(out), int(axis)) for out, axis in Dot().channels(self.eqn, 1 - self.weight)]

    def _kept(self, rank: int) -> tuple[int, ...]:
        """The axes of x along which scales differ."""
        sharing = self._sharing(rank)
        return tuple(axis for axis in range(rank) if axis not in sharing)

    def _of_x(self, value: jax.Array, rank: int) -> jax.Array:
        """Numbers that belong to x, one per index of the axes along which scales differ, in the result's shape."""
        shape, kept = self.eqn.out_shapes[0], self._kept(rank)
        if not kept:
            return lax.broadcast_in_dim(value, shape, ())
        places = sorted((out, kept.index(axis)) for out, axis in self._through() if axis in kept)
        value = lax.transpose(value, [axis for _, axis in places])
        return lax.broadcast_in_dim(value, shape, [out for out, _ in places])

    def _of_weight(self, value: jax.Array) -> jax.Array:
        """Numbers that belong to the weight, given in its rank, in the result's shape."""
        shape = self.eqn.out_shapes[0]
        rank = len(shape)
        vector = weight_to_result(value, self._op.channels(self.eqn, self.weight), rank)
        return lax.broadcast_in_dim(vector, shape, range(rank - vector.ndim, rank))


def _value(product: DynamicProduct, again: bool, x: jax.Array, w: jax.Array, *coded: jax.Array) -> jax.Array:
    return product.value(*coded)


_product = jax.custom_jvp(_value, nondiff_argnums=(0, 1))


@_product.defjvp
def _(product: DynamicProduct, again: bool, primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    _, _, *coded = primals
    dx, dw, *_ = tangents
    along_x, along_w = product.along_x, product.along_w
    if not again:  # store int8 codes for the backward, not their dequantized values
        along_x, along_w = jax.checkpoint(along_x), jax.checkpoint(along_w)
    return product.value(*coded), along_x(dx, *coded[3:5]) + along_w(dw, *coded[:3])
