"""PyTorch's averages of codes: five formulas, because the memory layout and the called function decide.

With S the sum of the centred codes of n elements and m = float32(1 / n), on the input's own grid:

| name | function | layout | y |
| --- | --- | --- | --- |
| `torch_average_pool` | avg_pool2d | channels last | rint(float32(S m)) + z, in whole blocks of 8 channels |
| `torch_average_pool_contiguous` | avg_pool2d | NCHW | rint(float32(float32(S m) + z)) |
| `torch_adaptive_mean` | adaptive_avg_pool2d(1) | channels last | rint(fma(S, m', z)), in whole blocks of 8 channels |
| `torch_mean` | mean over the last axes | contiguous | rint(float32(float32(S + n z) / n)) |
| `torch_qnnpack_average` | all of them, uint8 | any | rint(float32(S float32(s / float32(s n)))) + z |

The factor m' = float32(1 / float32(1 / m)) equals m except for the last bit. The channels (the last axis) after the
last block of 8 compute rint(float32(float32(S m') + z)). PyTorch's quantized convolutions return channels last, so most
models run the first and the third formula. `mean` of a tensor in channels last dequantizes every element and adds
floats in an order of its own. Its result is not a function of the sum, so it has no formula here; let the model call
adaptive_avg_pool2d instead.

qnnpack always counts padding, because it ignores count_include_pad.

Sources: PyTorch's AveragePool2d.cpp, AdaptiveAveragePooling.cpp, ReduceOps.cpp and QuantizedOpKernels.cpp, QNNPACK's
q8avgpool and q8gavgpool. Compared with torch 2.13.0 on sums next to ties, none of at least 100,000 averages per formula
differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics import float32
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import dequantize, integer, number, roles, round_inside, round_outside, whole
from qjax.ops.formulas.torch_steps import in_channel_blocks, reciprocal


def _shares(setting: Setting) -> dict[str, Array]:
    share = reciprocal(float32.from_int32(integer(setting.count)))
    return roles(share=share, rest_share=reciprocal(reciprocal(share)))


def _counted(setting: Setting) -> dict[str, Array]:
    """No constants, because the kernel gets the count anyway."""
    return {}


def _qnnpack_shares(setting: Setting) -> dict[str, Array]:
    scale, count = float32.of(setting.scales[0]), float32.from_int32(integer(setting.count))
    return roles(share=float32.divide(scale, float32.multiply(scale, count)))


def _outside(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return round_outside(dequantize(operands[0], number(constants, "share")), constants)


def _inside(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return round_inside(dequantize(operands[0], number(constants, "share")), constants)


def _rest(operands: Sequence[jax.Array], constants: Mapping[str, Any]) -> jax.Array:
    return round_inside(dequantize(operands[0], number(constants, "rest_share")), constants)


def _pool(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return in_channel_blocks(
        operands[0].shape, lambda: _outside(operands, constants, attributes), lambda: _rest(operands, constants)
    )


def _adaptive(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    def fused() -> jax.Array:
        acc = float32.from_int32(operands[0])
        return float32.to_int32(float32.fma(acc, number(constants, "rest_share"), whole(constants, "y_zero_point")))

    return in_channel_blocks(operands[0].shape, fused, lambda: _rest(operands, constants))


def _mean(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    count = jnp.asarray(constants["count"])
    stored = operands[0] + count * jnp.asarray(constants["zero_point0"])
    return float32.to_int32(float32.divide(float32.from_int32(stored), float32.from_int32(count)))


_POOL = frozenset({"average_pool"})
_BOTH = frozenset({"average_pool", "mean"})

torch_average_pool = register(Formula("torch_average_pool", _POOL, _shares, _pool, same_grid=True))

torch_average_pool_contiguous = register(
    Formula("torch_average_pool_contiguous", _POOL, _shares, _inside, same_grid=True)
)

torch_adaptive_mean = register(Formula("torch_adaptive_mean", _BOTH, _shares, _adaptive, same_grid=True))

torch_mean = register(Formula("torch_mean", frozenset({"mean"}), _counted, _mean, same_grid=True))

torch_qnnpack_average = register(Formula("torch_qnnpack_average", _BOTH, _qnnpack_shares, _outside, same_grid=True))
