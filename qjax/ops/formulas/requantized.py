"""Formulas with one accumulator, requantized by a rule of `numerics.requantize`.

The accumulator is the product of centred codes (multiply), the sum of them (mean, average_pool), the code itself
(rescale) or a product of activations (matmul).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.requantize import requantize
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array, Formula, Setting

Form = Literal["f64", "f32"]

_ONE = np.float32(1)


@functools.cache
def requantized(rule: str, form: Form = "f64") -> Formula:
    """The formula called "rule" or "rule/f32".

    form: how the effective scale is formed, see `numerics.effective_scale`. An average over n elements has
    double(s_x) / (double(s_y) * n); under "f32" it is float32(s_x * float32(1 / n)) / s_y.
    """
    chosen = get_rule(rule)

    def prepare(setting: Setting) -> dict[str, Array]:
        return dict(chosen.prepare(_scale(setting, form))._asdict())

    def kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
        acc = operands[0] * operands[1] if len(operands) == 2 else operands[0]
        fields = {name: constants[name] for name in chosen.fields}
        info = jnp.iinfo(attributes["dtype"])
        return requantize(
            acc,
            chosen.constants(**fields),
            rule=rule,
            zero_point=constants["y_zero_point"],
            qmin=attributes.get("qmin", int(info.min)),
            qmax=attributes.get("qmax", int(info.max)),
        )

    name = rule if form == "f64" else f"{rule}/{form}"
    ops = frozenset({"multiply", "matmul", "rescale", "mean", "average_pool"})
    return Formula(name, ops, prepare, kernel, factors=True, pointwise=chosen.monotone)


def scaled(scale: Any, factor: float) -> Any:
    """The scale of the first operand times the factor after the product, float32; see `Target.scaled_matmul`."""
    return (Real.of(scale) * Real.of(factor)).to_float32()


def _scale(setting: Setting, form: Form) -> Real:
    second: Any = setting.scales[1] if len(setting.scales) == 2 else _ONE
    if setting.op not in ("mean", "average_pool"):
        first = setting.scales[0]
        if setting.factor != 1:
            first = scaled(first, setting.factor)
        return effective_scale(first, second, setting.y_scale, form=form)
    count = Real.of(np.asarray(setting.count).astype(np.float32))
    if form == "f32":
        share = (Real.of(_ONE) / count).to_float32()
        return effective_scale(setting.scales[0], share, setting.y_scale, form=form)
    return Real.of(setting.scales[0]) / (Real.of(setting.y_scale) * count)
