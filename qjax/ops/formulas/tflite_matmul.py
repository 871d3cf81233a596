"""BATCH_MATMUL of TFLite: a product of two activations, requantized.

| formula | computed by | 8 bits | 16 bits | scale |
| --- | --- | --- | --- | --- |
| `tflite_micro_matmul` | TFLite Micro | `double_round` | `int16x8` | s_0 s_1 / s_y in doubles |
| `tflite_matmul` | LiteRT's own kernels | `double_round` | `int16x8` | float32(s_0 s_1) / s_y |
| `xnnpack_matmul` | LiteRT's default | `float32` or `double_round` | `int16x8` | float32(s_0 s_1) / s_y |

XNNPACK takes such a product only if its second operand is symmetric, and LiteRT's own kernel computes the others.
`xnnpack_matmul` is therefore `float32` where the zero point of x_1 is 0, and `double_round` elsewhere.

Sources: GetQuantizedConvolutionMultipler and batch_matmul.cc of LiteRT and tflite-micro. 0 of 98 accumulators for which
the form of the scale decides the code differ, and 0 of 540,000 others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.numerics._namespace import host_or_trace
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.requantized import Form, requantized
from qjax.ops.formulas.tflite_steps import is_wide
from qjax.ops.formulas.xnnpack_steps import either

_MATMUL = frozenset({"matmul"})
_SINGLE = requantized("float32", "f32")
_OF_SINGLE = "single_"


def _own(name: str, form: Form) -> Formula:
    """The runtime's own kernel, with a scale of that form."""
    narrow, wide = requantized("double_round", form), requantized("int16x8", form)

    def prepare(setting: Setting) -> dict[str, Array]:
        return (wide if setting.dtype == "int16" else narrow).prepare(setting)

    def kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
        return (wide if is_wide(attributes) else narrow).kernel(operands, constants, attributes)

    return register(Formula(name, _MATMUL, prepare, kernel, pointwise=True))


tflite_micro_matmul = _own("tflite_micro_matmul", "f64")
tflite_matmul = _own("tflite_matmul", "f32")


def _prepare(setting: Setting) -> dict[str, Array]:
    found = tflite_matmul.prepare(setting)
    if setting.dtype == "int16":
        return found
    zero_point = setting.zero_points[1]
    symmetric = host_or_trace(zero_point).asarray(zero_point == 0).astype(np.int32)
    single = {f"{_OF_SINGLE}{role}": value for role, value in _SINGLE.prepare(setting).items()}
    return {**found, **single, "delegated": symmetric}


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    def kept() -> jax.Array:
        return tflite_matmul.kernel(operands, constants, attributes)

    def xnnpack() -> jax.Array:
        own = {role.removeprefix(_OF_SINGLE): value for role, value in constants.items() if role.startswith(_OF_SINGLE)}
        return _SINGLE.kernel(operands, {**constants, **own}, attributes)

    return kept() if is_wide(attributes) else either(constants["delegated"], xnnpack, kept)


xnnpack_matmul = register(Formula("xnnpack_matmul", _MATMUL, _prepare, _kernel, pointwise=True))
