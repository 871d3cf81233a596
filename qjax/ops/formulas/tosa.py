"""TOSA's average pool and addition, expressed by its RESCALE (apply_scale_32, single rounding).

AVG_POOL2D (TOSA 1.0, section 2.3.2) multiplies the sum of centred codes by a reciprocal of n, the count of elements
that are no padding. With k = 32 - clz(n - 1):

    y = apply_scale_32(sum, floor((((1 << 30) + 1) << k) / n), 30 + k) + z.

TOSA has no quantized ADD, so a converter rescales both operands to int32 with the scale 2 max(s_0, s_1) / 2^20, adds,
and rescales the sum. The constants are those of TensorFlow Lite's lowering (convertAddOp,
tosa/transforms/legalize_common).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.requantize import requantize
from qjax.numerics.rules import TosaScale, get_rule
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import ONE_BYTE, Array, Formula, Setting, register

_RULE = "tosa_single"
_BITS = 20


def _scaled(x: jax.Array, constants: Mapping[str, Any], suffix: str, zero_point: Any = 0) -> jax.Array:
    scale = TosaScale(constants[f"multiplier{suffix}"], constants[f"shift{suffix}"])
    return requantize(x, scale, rule=_RULE, qmin=-(2**31), qmax=2**31 - 1) + zero_point


def _named(scale: TosaScale, suffix: str) -> dict[str, Array]:
    return {f"multiplier{suffix}": scale.multiplier, f"shift{suffix}": scale.shift}


def _add_roles(setting: Setting) -> dict[str, Array]:
    first, second = (Real.of(scale) for scale in setting.scales)
    twice = first.maximum(second) * Real.of(np.float32(2))
    prepare = get_rule(_RULE).prepare
    signs = Real.of(np.float32(2.0**_BITS))
    return {
        **_named(prepare(first / twice), "0"),
        **_named(prepare(second / twice), "1"),
        **_named(prepare(twice / (Real.of(setting.y_scale) * signs)), ""),
        "sign": np.asarray(-1 if setting.op == "subtract" else 1, np.int32),
    }


def _add(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    first, second = (_scaled(x << np.int32(_BITS), constants, str(i)) for i, x in enumerate(operands))
    total = first + second * jnp.asarray(constants["sign"])
    return _scaled(total, constants, "", jnp.asarray(constants["y_zero_point"]))


def _pool_roles(setting: Setting) -> dict[str, Array]:
    n = np.asarray(setting.count).astype(np.int64)
    k = np.ceil(np.log2(n)).astype(np.int64)  # exact below 2^31: 32 - clz(n - 1)
    multiplier = (((1 << 30) + 1) << k) // n
    return {"multiplier": multiplier.astype(np.int32), "shift": (30 + k).astype(np.int32)}


def _pool(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return _scaled(operands[0], constants, "", jnp.asarray(constants["y_zero_point"]))


register(Formula("tosa_add", frozenset({"add", "subtract"}), _add_roles, _add, widths=ONE_BYTE, pointwise=True))
register(Formula("tosa_average_pool", frozenset({"average_pool"}), _pool_roles, _pool, same_grid=True))
