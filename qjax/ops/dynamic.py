"""Products of an activation with a weight on codes whose scales are found at run time, between tensors of reals.

    y = float32(sum_k (x_k - z_x) w_k) * (s_x * s_w)

with s_x and z_x from the range of x as it flows (`numerics.dynamic`), w in symmetric codes with a scale for each output
channel, the sum in int32. The scheme is ONNX's DynamicQuantizeLinear + MatMulInteger (or ConvInteger) + Cast + Mul.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import QSpec, broadcast_to_tensor, choose_qparams, quantize, split_groups
from qjax.numerics.dynamic import dynamic_codes
from qjax.numerics.unfused import unfused
from qjax.ops import accumulate
from qjax.ops.base import Equation
from qjax.ops.channels import weight_to_result
from qjax.ops.conv import Conv, convolved
from qjax.ops.dot import Dot

Per = Literal["tensor", "row"]


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """As an override: the module's products with weights run on codes, whose scales are found at run time.

    Everything else inside stays in reals, as under `FLOAT`; nothing is calibrated or learned.

    weights: symmetric codes of 2 to 8 bits; `axis=-1` is a scale for each output channel, None one for the tensor.
    activations: of 2 to 8 bits, symmetric (signed) or asymmetric (either). per: what shares a scale of them, the whole
    "tensor" (an example's codes then depend on the others of its batch), or a "row": every vector that a dot sums over.
    """

    weights: QSpec = QSpec(bits=8, axis=-1)
    activations: QSpec = QSpec(bits=8)
    per: Per = "tensor"

    def __post_init__(self) -> None:
        for name, spec in (("weights", self.weights), ("activations", self.activations)):
            if type(spec) is not QSpec:
                raise TypeError(f"Dynamic: {name}: expected a QSpec, got {spec!r}.")
            if not 2 <= spec.bits <= 8:
                raise ValueError(f"Dynamic: {name}: expected 2 to 8 bits, which int8 holds, got {spec.bits}.")
            if spec.symmetric and not spec.signed:
                raise ValueError(f"Dynamic: {name}: symmetric codes must be signed, got {spec}. Use symmetric=False.")
        if not self.weights.symmetric:
            raise ValueError(f"Dynamic: weights: expected symmetric codes, got {self.weights}. Use symmetric=True.")
        if self.weights.axis not in (None, -1) or self.weights.group_size is not None:
            raise ValueError(
                "Dynamic: weights: expected axis=-1 (a scale for each output channel of any layer) or axis=None, got "
                f"{self.weights}."
            )
        if not self.activations.per_tensor:
            raise ValueError(
                f"Dynamic: activations: expected a spec without axis and group_size, got {self.activations}. "
                'per="row" gives every row a scale of its own.'
            )
        if self.per not in get_args(Per):
            raise ValueError(f"Dynamic: per: expected one of {', '.join(map(repr, get_args(Per)))}, got {self.per!r}.")

    def __str__(self) -> str:
        return f"w{self.weights.bits} a{self.activations.bits} per {self.per}"


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicProduct:
    """One `dot_general` or `conv_general_dilated` of an activation and a weight.

    eqn: the product of reals. weight: which operand is the weight.

    Raises:
      ValueError: rows of a convolution, or sums that int32 may not hold.
    """

    eqn: Equation
    weight: int
    setting: Dynamic

    def __post_init__(self) -> None:
        if self._is_conv and self.setting.per == "row":
            raise ValueError(
                'Dynamic(per="row") on a convolution, whose windows overlap and share no rows: expected '
                'per="tensor". Override the convolutions of the module on their own.'
            )
        spec = self.setting.activations
        reach = spec.qmax if spec.symmetric else spec.qmax - spec.qmin
        shape = self.eqn.in_shapes[self.weight]
        summed = math.prod(shape[axis] for axis in self._summed)
        most = (2**31 - 1) // (reach * self.setting.weights.qmax)
        if summed > most:
            raise ValueError(
                f"Dynamic on a sum of {summed} products: at most {most} of these bits are sure to fit int32. Use fewer "
                "bits, or leave the module in reals: qjax.FLOAT."
            )

    @property
    def _is_conv(self) -> bool:
        return self.eqn.primitive == "conv_general_dilated"

    @property
    def _op(self) -> Conv | Dot:
        return Conv() if self._is_conv else Dot()

    @property
    def _summed(self) -> tuple[int, ...]:
        """The weight's axes that do not survive."""
        kept = self._op.weight_axes(self.eqn, self.weight)
        return tuple(axis for axis in range(len(self.eqn.in_shapes[self.weight])) if axis not in kept)

    def weight_parts(self, w: jax.Array) -> list[jax.Array]:
        """What depends on the weight alone: its codes int8, their scales float32, their sums int32.

        Scales and sums have the weight's rank, with size 1 where they do not run.
        """
        kept = self._op.weight_axes(self.eqn, self.weight)
        spec = self.setting.weights.replace(axis=None if self.setting.weights.axis is None else kept or None)
        # the derivative is that of the product, not of what this computes
        w = lax.stop_gradient(w).astype(jnp.float32)
        view, axes = split_groups(w, spec)
        qparams = choose_qparams(jnp.min(view, axes), jnp.max(view, axes), spec)
        codes = quantize(w, qparams)
        scale = broadcast_to_tensor(qparams.scale, spec, w.shape)
        return [codes, scale, jnp.sum(codes, axis=self._summed, dtype=jnp.int32, keepdims=True)]

    def __call__(self, x: jax.Array, w: jax.Array, *parts: jax.Array) -> list[jax.Array]:
        """The product in the dtype of the model's own.

        The value reads the weight's parts only; the gradient goes straight through both quantizers, to x and to w, and
        is that of the product of the dequantized tensors. The range covers the data, so there is nothing clipped that
        should stop it.
        """
        return [_product(self, x, w, *parts)]

    def accumulator(
        self, x: jax.Array, codes: jax.Array, sums: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The int32 sums of the result's shape, x's codes less their zero point (int32), scales, zero points."""
        spec, rank = self.setting.activations, x.ndim
        reduced = tuple(range(rank)) if self.setting.per == "tensor" else self._contracted
        x_codes, scale, zero_point = dynamic_codes(x.astype(jnp.float32), spec, reduced)
        # int8 holds unsigned codes less 128, and so the zero point
        offset = np.int32(accumulate.signed_offset(spec.dtype.name))
        narrow, zero = (x_codes - offset).astype(jnp.int8), zero_point - offset
        acc = self._convolved(narrow, codes, zero) if self._is_conv else self._multiplied(narrow, codes)
        kept = tuple(axis for axis in range(rank) if axis not in reduced)
        if not spec.symmetric:
            acc = acc - self._of_x(zero, kept) * self._of_weight(sums)
        return acc, x_codes - lax.broadcast_in_dim(zero_point, x.shape, kept), scale, zero_point

    def forward(
        self, x: jax.Array, codes: jax.Array, scale: jax.Array, sums: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The product in float32, and x and the weight as their codes say, in float32."""
        acc, centered, x_scale, _ = self.accumulator(x, codes, sums)
        kept = () if self.setting.per == "tensor" else tuple(a for a in range(x.ndim) if a not in self._contracted)
        scales = unfused(self._of_x(x_scale, kept) * self._of_weight(scale))
        # rounded before the model's bias is added, under jit too
        y = unfused(acc.astype(jnp.float32) * scales)
        x_real = centered.astype(jnp.float32) * lax.broadcast_in_dim(x_scale, x.shape, kept)
        return y, x_real, codes.astype(jnp.float32) * jnp.broadcast_to(scale, codes.shape)

    # ------------------------------------------------------------------ the two kinds of product

    @property
    def _contracted(self) -> tuple[int, ...]:
        """The axes of x that a dot sums over."""
        return tuple(self.eqn.params["dimension_numbers"][0][1 - self.weight])

    def _multiplied(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        operands = (x, codes) if self.weight == 1 else (codes, x)
        return accumulate.dot(*operands, self.eqn.params["dimension_numbers"])

    def _convolved(self, x: jax.Array, codes: jax.Array, zero_point: jax.Array) -> jax.Array:
        return convolved(x, codes, zero_point, Conv().attributes(self.eqn), direct=False)

    def _of_x(self, value: jax.Array, kept: Sequence[int]) -> jax.Array:
        """Numbers of x, one for every index of the kept axes, in the result's shape."""
        shape = self.eqn.out_shapes[0]
        if not kept:
            return lax.broadcast_in_dim(value, shape, ())
        places = sorted((out, kept.index(axis)) for out, axis in Dot().channels(self.eqn, 1 - self.weight))
        value = lax.transpose(value, [axis for _, axis in places])
        return lax.broadcast_in_dim(value, shape, [out for out, _ in places])

    def _of_weight(self, value: jax.Array) -> jax.Array:
        """Numbers of the weight, in its rank, in the result's shape."""
        shape = self.eqn.out_shapes[0]
        rank = len(shape)
        vector = weight_to_result(value, self._op.channels(self.eqn, self.weight), rank)
        return lax.broadcast_in_dim(vector, shape, range(rank - vector.ndim, rank))


def _value(product: DynamicProduct, x: jax.Array, w: jax.Array, *parts: jax.Array) -> jax.Array:
    return product.forward(x, *parts)[0].astype(product.eqn.out_dtypes[0])


_product = jax.custom_jvp(_value, nondiff_argnums=(0,))


@_product.defjvp
def _(product: DynamicProduct, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:  # pyright: ignore[reportUnusedFunction]
    x, w, *parts = primals
    y, x_real, w_real = product.forward(x, *parts)
    weight = product.weight

    def ordered(a: Any, b: Any) -> tuple[Any, Any]:
        return (a, b) if weight == 1 else (b, a)

    reals = ordered(x_real.astype(x.dtype), w_real.astype(w.dtype))
    _, (slope,) = jax.jvp(product.eqn.bind, reals, ordered(*tangents[:2]))
    return y.astype(product.eqn.out_dtypes[0]), slope
