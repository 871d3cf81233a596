"""The codes of an average in the training forward, by the formula of the target's runtime.

If input and output share their quantization parameters, at least a quarter of all averages are ties. Each runtime
rounds ties, counts and zero points differently, so training calls the formula's own kernel for the codes. The gradient
is that of the fake-quantized average.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import QParams
from qjax.numerics.surrogate import with_gradient_of
from qjax.ops import formulas
from qjax.targets import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """What a formula needs to know of a sum of codes that may become an average.

    scale, zero_point: of the codes. count: how many codes one output averages; None before the division. op: "mean" or
    "average_pool". dtype: of the codes. elements: how many codes one sum has. spatial: whether it runs over height and
    width of an NHWC tensor. whole: whether it is a pool whose window is the whole image.
    """

    scale: jax.Array
    zero_point: jax.Array
    op: str = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    elements: int = dataclasses.field(metadata={"static": True})
    spatial: bool = dataclasses.field(metadata={"static": True})
    whole: bool = dataclasses.field(metadata={"static": True})
    count: Any = None

    def divided(self, step: str, value: Any) -> "Average | None":
        """The average after the step x * value ("mul") or x / value ("div"); None if that is no average."""
        count = formulas.count_of(step, value) if self.count is None else None
        if count is None or (self.op == "mean" and not np.array_equal(count, self.elements)):
            return None
        return dataclasses.replace(self, count=np.asarray(count, np.int32))

    def codes(self, target: Target, acc: jax.Array, nearest: jax.Array, y: QParams, *, same_grid: bool) -> jax.Array:
        """Centred codes of the average, as floats: the target's with the derivative of `nearest`, or `nearest` itself.

        Args:
          acc: the sums of centred codes. nearest: the centred codes of the float average, rounded to nearest.
          y: the output's quantization. same_grid: whether the output shares the input's quantizer.
        """
        if self.count is None:
            return nearest
        wide, varying = self.dtype == "int16", bool(np.ndim(self.count))
        formula = formulas.average(
            target, self.op, spatial=self.spatial, wide=wide, same_grid=same_grid, varying=varying
        )
        if formula is not None and formula.whole is not None and self.whole:
            formula = formulas.get(formula.whole)
        # a formula over windows reads each of their codes, but only the sum is known here
        if formula is None or formula.windows:
            return nearest
        y_scale, y_zero_point = lax.stop_gradient(y.scale).reshape(()), y.integer_zero_point().reshape(())
        dtype, low, high = jnp.dtype(y.spec.dtype).name, np.int32(y.spec.qmin), np.int32(y.spec.qmax)
        setting = formulas.Setting(self.op, (self.scale,), (self.zero_point,), y_scale, y_zero_point, dtype, self.count)
        constants = {
            **formula.prepare(setting),
            "zero_point0": self.zero_point,
            "y_zero_point": y_zero_point,
            "count": self.count,
        }
        attributes = {"dtype": dtype, "qmin": int(low), "qmax": int(high)}
        sums = lax.stop_gradient(acc).astype(jnp.int32)
        codes = jnp.clip(formula.kernel([sums], constants, attributes), low, high) - y_zero_point
        # int32 sums have no NaN, but training must see it
        value = jnp.where(jnp.isnan(nearest), nearest, codes.astype(nearest.dtype))
        return with_gradient_of(nearest, lax.stop_gradient(value))
