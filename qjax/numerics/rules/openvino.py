"""OpenVINO's CPU plugin on files that qjax writes: a float32 bias that includes the zero point, and no fused step.

The files (`contrib/onnx_styles/openvino`) contain a product in steps of its output: the weights' scale is the effective
scale e, and the bias is float32(float32(b / s_y) + z_y). oneDNN then multiplies, adds and rounds, every operation in
float32:

    y = rint(float(acc) * e + bias).

OpenVINO computes in this way for convolutions (brgconv and the jit kernels of SSE4.1, AVX2 and AVX-512) and for matrix
products of three axes. With two axes it may fuse several products into one subgraph, which has a multiply-add.
"""

import jax
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.float32 import Float32
from qjax.numerics.rules.floating import clamped, float32_scale, part_of
from qjax.numerics.rules.registry import Call, registered
from qjax.numerics.rules.torch import Onednn, check_steps, fields_of, onednn, onednn_bias, reciprocal


def _of_scales(s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, bias: ArrayLike, per_channel: bool) -> Onednn:
    e = float32_scale(effective_scale(s_x, s_w, s_y))
    return Onednn(*fields_of(e, float32.of(bias), reciprocal(float32.of(s_y))))


def step_bias(c: Onednn, zero_point: ArrayLike) -> Float32:
    """The bias in steps of the output, with the zero point: float32(float32(b * (1 / s_y)) + z_y)."""
    return float32.add(float32.multiply(part_of(c, "addend"), part_of(c, "share")), float32.from_int32(zero_point))


@registered(
    "openvino",
    prepare=onednn,
    of_scales=_of_scales,
    constants=Onednn,
    check=check_steps,
    bias="real",
    real_bias=onednn_bias,
    finishes=True,
    monotone=True,
)
def openvino(acc: jax.Array, c: Onednn, call: Call) -> jax.Array:
    """Compute rint(float(acc) * e + float(float(b / s_y) + zero_point)), with every operation rounded to float32.

    Source: openvino 2026.4.1, `DnnlPostOpsComposer` and LPT's convolution and mat_mul; oneDNN's post operations.
    """
    product = float32.multiply(float32.from_int32(acc), Float32(c.mantissa, c.exponent))
    return clamped(float32.to_int32(float32.add(product, step_bias(c, call.zero_point))), call)
