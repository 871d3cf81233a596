"""Products of an activation with a weight, quantized at run time. Inputs and outputs are floats.

    y = float32(sum_k (x_k - z_x) w_k) * (s_x * s_w)

s_x and z_x are computed from the range of x at run time (`numerics.dynamic`). w has symmetric codes with a scale for
each output channel. The sum is int32. The scheme is ONNX's DynamicQuantizeLinear + MatMulInteger (or ConvInteger) +
Cast + Mul.

A weight with groups (`group_size`, as in int4 weights of language models) has a sum and a scale for each group, and so
does an activation with blocks (`per="block"`):

    y = sum over groups g of (float32(sum_(k in g) (x_k - z_g) w_k) * (sx_g * sw_g))

The terms are added in float32, in the order of the groups, so that every machine computes the same bits. A weight
format with minimums m (w_k = code * sw + m) adds `float32(sum_(k in g) (x_k - z_g)) * (sx_g * m_g)` after each term.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import QSpec, broadcast_to_tensor, choose_qparams, quantize, split_groups
from qjax.numerics.block_formats import BLOCK_FORMATS
from qjax.numerics.calls import traced_once
from qjax.numerics.dynamic import dynamic_codes
from qjax.numerics.dynamic_formulas import DynamicFormula, ggml_codes, grouped_scales, of_sums, row_codes
from qjax.numerics.fence import finished_on_cpu
from qjax.numerics.qspec import dividing_group, known_fields
from qjax.numerics.unfused import unfused
from qjax.numerics.weight_formats import INTEGERS, WeightFormat, encode, encode_stored
from qjax.ops import accumulate, dynamic_groups, dynamic_windows
from qjax.ops.base import Equation
from qjax.ops.channels import weight_to_result
from qjax.ops.conv import Conv, convolved
from qjax.ops.dot import Dot
from qjax.ops.recomputed import is_recomputed

Per = Literal["tensor", "example", "row", "block"]

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
        `WeightFormat("ternary")` with `per="row"` is the scheme of BitNet b1.58; "binary" has -1 and 1 alone. The
        formats of GGUF files, such as `WeightFormat("q4_0")`, have scales for blocks of 32.
      activations: codes of 2 to 8 bits, symmetric (then signed) or asymmetric. None takes those of the recipe or its
        profile, with 7 of 8 bits under `reduce_range`; if these state none, `QSpec(bits=8)`.
      per: which activations share a scale: the whole "tensor", so that an example's codes depend on the others in its
        batch; an "example", one index of the first axis, or of a convolution's batch axis; a "row", every vector
        that a product sums over; or a "block", a run of consecutive numbers of a row. Only convolutions with windows
        of one pixel have rows, and none has blocks.
      block: how many numbers a block has; only for `per="block"`. Groups of the weight have as many, or a multiple or a
        part of it.
      arithmetic: "ggml_avx2" quantizes and adds as llama.cpp does on x86-64 with AVX2, with the same bits, for weights
        in the formats q4_0, q4_1, q5_0, q5_1 and q8_0 and blocks of 32: `numerics.dynamic_formulas.of_lanes`. None: as
        the recipe's target does.

    Examples:
      >>> import qjax
      >>> w4a8 = qjax.Dynamic(
      ...     weights=qjax.QSpec(bits=4, axis=-1, group_size=32), per="row"
      ... )  # "8da4w"
      >>> recipe = qjax.Recipe(overrides={"blocks/.*": w4a8})
      >>> blocks = qjax.Dynamic(
      ...     weights=qjax.WeightFormat("q4_0"), per="block", block=32
      ... )  # as llama.cpp
    """

    weights: QSpec | WeightFormat | None = None
    activations: QSpec | None = None
    per: Per = "tensor"
    block: int | None = None
    arithmetic: Literal["ggml_avx2"] | None = None

    def __post_init__(self) -> None:
        if self.arithmetic not in (None, "ggml_avx2"):
            raise ValueError(f"Dynamic: arithmetic: expected 'ggml_avx2' or None, got {self.arithmetic!r}.")
        for name, spec in (("weights", self.weights), ("activations", self.activations)):
            if spec is None or (name == "weights" and isinstance(spec, WeightFormat) and spec.has_integer_codes):
                continue
            if type(spec) is not QSpec:
                if isinstance(spec, WeightFormat):
                    raise TypeError(
                        f"Dynamic: {name}: {spec} has values that are no integers, so they cannot be multiplied with "
                        f"int8 rows in a sum of integers. Use {', '.join((*INTEGERS, *BLOCK_FORMATS))} or a QSpec, or "
                        "qjax.WeightFormat alone as the override."
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
        if self.per != "block" and self.block is not None:
            raise ValueError(f'Dynamic: block={self.block!r} belongs to per="block", got per={self.per!r}.')
        if self.per == "block" and (type(self.block) is not int or self.block < 1):
            raise ValueError(
                f'Dynamic: block: per="block" needs the number of activations that share a scale, a whole number of at '
                f"least 1, got {self.block!r}. Write block=32, for example."
            )

    def __str__(self) -> str:
        weights = str(self.weights)
        if not isinstance(self.weights, WeightFormat):
            own = self.weights or WEIGHTS
            weights = f"w{own.bits}" + (f" in groups of {own.group_size}" if own.group_size is not None else "")
        return f"{weights} a{(self.activations or ACTIVATIONS).bits} per {self._per}{self._as}"

    @property
    def _per(self) -> str:
        return self.per if self.block is None else f"block of {self.block}"

    @property
    def _as(self) -> str:
        return f" as {self.arithmetic}" if self.arithmetic else ""

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


def spread(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of groups, repeated for each element of an array of this shape and of their rank."""
    for axis, (size, count) in enumerate(zip(shape, value.shape, strict=True)):
        if count not in (1, size):
            value = jnp.repeat(value, size // count, axis=axis)
    return jnp.broadcast_to(value, shape)


@dataclasses.dataclass(frozen=True)
class DynamicCodes:
    """Computes an activation's codes.

    reduced: its axes that share a scale. formula: see `dynamic_formulas`. block: how many consecutive numbers of the
    only axis in `reduced` share one; None means all.
    """

    spec: QSpec
    reduced: tuple[int, ...]
    formula: DynamicFormula = "onnx"
    block: int | None = None

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """int8 codes (unsigned ones minus 128), float32 scales, and int32 zero points of those int8 codes.

        Scales and zero points are scalars, or have the shape of the axes that a dot does not sum over. With blocks they
        have x's shape, but the number of blocks along the axis that is summed. Under "ggml_avx2" the third are the sums
        of `ggml_codes`.
        """
        if self.block is not None:
            (axis,) = self.reduced
            split = dataclasses.replace(self, reduced=(axis + 1,), block=None)
            codes, *parts = split(dynamic_groups.split_axis(x, axis, self.block))
            return [codes.reshape(x.shape), *parts]
        # the product defines its own derivative, so nothing is differentiated through the quantizer
        x = lax.stop_gradient(x).astype(jnp.float32)
        if self.formula == "ggml_avx2":
            codes, scale, sums = ggml_codes(x, self.reduced)
            return [finished_on_cpu(codes), scale, sums]
        if self.formula != "onnx":
            codes, scale, zero_point = row_codes(x, self.spec.symmetric, self.reduced, self.formula)
            return [finished_on_cpu(codes), scale, zero_point]
        codes, scale, zero_point = dynamic_codes(x, self.spec, self.reduced)
        offset = np.int32(accumulate.signed_offset(self.spec.dtype.name))
        return [finished_on_cpu((codes - offset).astype(jnp.int8)), scale, zero_point - offset]


@dataclasses.dataclass(frozen=True)
class DynamicProduct:
    """One `dot_general` or `conv_general_dilated` of an activation and a weight.

    Products of equal equations (see `tracing.shared_traces.Form`) are equal, and are traced once.

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
        if self.is_convolution and self.setting.per == "block":
            raise ValueError(
                'Dynamic(per="block") on a convolution: expected per="row", "example" or "tensor". Override the '
                "convolutions separately."
            )
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
        self._check_blocks()
        spec = self.activations
        reach = spec.qmax if spec.symmetric else spec.qmax - spec.qmin
        shape = self.eqn.in_shapes[self.weight]
        summed = self.unit or math.prod(shape[axis] for axis in self.summed)
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

    @property
    def group(self) -> int | None:
        """How many weights along the summed axis have a scale; None: all of them."""
        return self.weights.group_size if isinstance(self.weights, QSpec) else self.weights.group

    @property
    def has_blocks(self) -> bool:
        """Whether runs of consecutive activations have scales of their own."""
        return self.setting.block is not None

    @property
    def unit(self) -> int | None:
        """How many products one sum of integers has, if groups or blocks divide it."""
        sizes = [size for size in (self.group, self.setting.block) if size is not None]
        return min(sizes) if sizes else None

    def _check_groups(self) -> None:
        size = self.weights.whole if isinstance(self.weights, WeightFormat) else self.group
        if size is not None and dividing(size, self.eqn, self.weight) != size:
            cure = "Leave out group_size." if isinstance(self.weights, QSpec) else "Override this module separately."
            raise ValueError(
                f"Dynamic with groups of {size} weights: expected a product that sums over one axis, whose size "
                f"is a multiple of that, got a weight of shape {self.eqn.in_shapes[self.weight]}. {cure}"
            )

    def _check_blocks(self) -> None:
        block, group = self.setting.block, self.group
        if block is None:
            return
        if dividing(block, self.eqn, self.weight) != block:
            raise ValueError(
                f"Dynamic with blocks of {block} activations: expected a product that sums over one axis, whose size "
                f"is a multiple of that, got a weight of shape {self.eqn.in_shapes[self.weight]}. Override this module "
                'separately, with another block or per="row".'
            )
        if group is not None and max(block, group) % min(block, group):
            raise ValueError(
                f"Dynamic with blocks of {block} activations and groups of {group} weights: expected that one divides "
                "the other. Choose an equal block."
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

        A format with minimums has these float32 after the scales. All have the weight's rank, with size 1 along axes on
        which they do not vary, and the number of groups along the axis that is summed; sums are those of `unit`
        products.
        """
        return _traced_weight_parts(self, w)

    def stored_parts(self, w: jax.Array) -> list[jax.Array]:
        """The codes and what a packed weight stores beside them; see `weight_formats.encode_stored`."""
        return self._encoded(w, encode_stored) if isinstance(self.weights, WeightFormat) else self.weight_parts(w)[:-1]

    def _encoded(self, w: jax.Array, encode: Callable[[jax.Array, WeightFormat], list[jax.Array]]) -> list[jax.Array]:
        assert isinstance(self.weights, WeightFormat)
        w = lax.stop_gradient(w).astype(jnp.float32)
        at = self.summed[0] if self.group is not None else w.ndim - 1
        return [jnp.moveaxis(part, -1, at) for part in encode(jnp.moveaxis(w, at, -1), self.weights)]

    def _weight_parts(self, w: jax.Array) -> list[jax.Array]:
        if isinstance(self.weights, WeightFormat):
            parts = self._encoded(w, encode)
            parts = [finished_on_cpu(part) for part in parts] if self.group is not None else parts
            return [*parts, self.sums(parts[0])]
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
        """The sums of a weight's codes, one for each `unit` of them."""
        if self.unit is not None:
            return jnp.sum(
                dynamic_groups.split_axis(codes, self.summed[0], self.unit), axis=self.summed[0] + 1, dtype=jnp.int32
            )
        return jnp.sum(codes, axis=self.summed, dtype=jnp.int32, keepdims=True)

    def _grouped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape with the number of groups along the axis that is summed."""
        size, at = self.weights.group_size, self.summed[0]
        assert size is not None
        return (*shape[:at], shape[at] // size, *shape[at + 1 :])

    @property
    def coding(self) -> "DynamicCodes":
        """What computes the codes of the activation; products with equal `coding` and activation share the codes."""
        sharing = self._sharing(len(self.eqn.in_shapes[1 - self.weight]))
        return DynamicCodes(self.activations, sharing, self.formula, self.setting.block)

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
            zeros = None if self.activations.symmetric else self.of_x(zero, x_codes.ndim)
            return dynamic_windows.centred_sums(Conv().attributes(self.eqn), x_codes, w_codes, zeros)
        if self.is_convolution:
            acc = convolved(x_codes, w_codes, zero, Conv().attributes(self.eqn))
        else:
            operands = (x_codes, w_codes) if self.weight == 1 else (w_codes, x_codes)
            acc = accumulate.dot(*operands, self.eqn.params["dimension_numbers"])
        if self.activations.symmetric:
            return acc
        return acc - self.of_x(zero, x_codes.ndim) * self.of_weight(sums)

    # ------------------------------------------------------------------ value and derivative

    def value(self, *coded: jax.Array) -> jax.Array:
        """The product, from the results of `coding` and `weight_parts`."""
        return _traced_value(self, *coded)

    def _value(self, *coded: jax.Array) -> jax.Array:
        if self.unit is not None:
            return dynamic_groups.sum_of_groups(self, self.unit, *coded)
        x_codes, scale, zero, w_codes, w_scale, sums = coded
        acc = self.accumulator(x_codes, zero, w_codes, sums)
        if self.setting.per != "tensor":
            of_x, of_weight = self.of_x(scale, x_codes.ndim), self.of_weight(w_scale)
            return of_sums(acc, of_x, of_weight, self.formula).astype(self.eqn.out_dtypes[0])
        # compute this small array once; if it is fused, each element of the result would multiply the two scales again
        scales = self.of_weight(finished_on_cpu(unfused(scale * w_scale)))
        # round the product before the model's bias is added; otherwise jit could fuse both into one rounding
        return unfused(acc.astype(jnp.float32) * scales).astype(self.eqn.out_dtypes[0])

    def along_x(self, dx: jax.Array, w_codes: jax.Array, *parts: jax.Array) -> jax.Array:
        """The product of dx and the dequantized weight. parts: scales and, if any, minimums."""
        scale, *minimums = (spread(part, w_codes.shape) for part in parts)
        w = w_codes.astype(jnp.float32) * scale
        w = w + minimums[0] if minimums else w
        return self._real(dx, finished_on_cpu(w.astype(self.eqn.in_dtypes[self.weight])))

    def along_w(self, dw: jax.Array, x_codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """The product of the dequantized x and dw."""
        if self.setting.block is not None:
            scale, zero = (spread(part, x_codes.shape) for part in (scale, zero))
        else:
            kept = self._kept(x_codes.ndim)
            scale, zero = (lax.broadcast_in_dim(part, x_codes.shape, kept) for part in (scale, zero))
        if not self.activations.symmetric:
            x_codes = x_codes.astype(jnp.int32) - zero
        x = x_codes.astype(jnp.float32) * scale
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

    def of_x(self, value: jax.Array, rank: int) -> jax.Array:
        """Numbers that belong to x, one per index of the axes along which scales differ, in the result's shape."""
        shape, kept = self.eqn.out_shapes[0], self._kept(rank)
        if not kept:
            return lax.broadcast_in_dim(value, shape, ())
        places = sorted((out, kept.index(axis)) for out, axis in self._through() if axis in kept)
        value = lax.transpose(value, [axis for _, axis in places])
        return lax.broadcast_in_dim(value, shape, [out for out, _ in places])

    def of_weight(self, value: jax.Array) -> jax.Array:
        """Numbers that belong to the weight, given in its rank, in the result's shape."""
        shape = self.eqn.out_shapes[0]
        rank = len(shape)
        vector = weight_to_result(value, self._op.channels(self.eqn, self.weight), rank)
        return lax.broadcast_in_dim(vector, shape, range(rank - vector.ndim, rank))


@traced_once(0)
def _traced_value(product: DynamicProduct, *coded: jax.Array) -> jax.Array:
    return product._value(*coded)  # pyright: ignore[reportPrivateUsage]


@traced_once(0)
def _traced_weight_parts(product: DynamicProduct, w: jax.Array) -> list[jax.Array]:
    return product._weight_parts(w)  # pyright: ignore[reportPrivateUsage]


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
    return product.value(*coded), along_x(dx, *coded[3:-1]) + along_w(dw, *coded[:3])
