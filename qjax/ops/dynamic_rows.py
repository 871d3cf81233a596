"""Which products of `qjax.Dynamic` LiteRT supports: rows times a matrix as FULLY_CONNECTED, windows as CONV_2D."""

import math

import jax
import jax.numpy as jnp

from qjax.numerics.block_formats import BLOCK
from qjax.numerics.dynamic_formulas import DynamicFormula, unsupported
from qjax.numerics.qspec import QSpec
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops import dynamic_windows
from qjax.ops.dynamic import DynamicProduct
from qjax.ops.dynamic_conv import DynamicConv
from qjax.ops.dynamic_dot import DynamicDot


def problem(product: DynamicProduct, formula: DynamicFormula) -> str | None:
    """Why a formula does not support a product, with a cure; None if it does."""
    setting, eqn = product.setting, product.eqn
    if formula == "onnx":
        return None
    if formula == "ggml_avx2":
        return _problem_of_ggml(product)
    if not isinstance(product.weights, QSpec):
        return f"weights in the format {product.weights}: use a QSpec"
    if {str(dtype) for dtype in (*eqn.in_dtypes, *eqn.out_dtypes)} != {"float32"}:
        return f"numbers of {eqn.in_dtypes[0]}: use float32"
    if product.is_convolution:
        if formula != "xnnpack":
            return (
                "a convolution, whose arithmetic in LiteRT's own kernels is not known: use the target 'tflite_xnnpack'"
            )
        return dynamic_windows.problem(eqn, setting.per) or unsupported(formula, product.activations, product.weights)
    if setting.per != "row":
        return f'one scale for each {setting.per}, but LiteRT computes one for each row: use per="row"'
    contracting, batch = eqn.params["dimension_numbers"]
    summed = contracting[1 - product.weight]
    rank = len(eqn.in_shapes[1 - product.weight])
    if product.weight != 1 or batch[0] or sorted(summed) != list(range(rank - len(summed), rank)):
        return "a product of another form than x[..., k] @ w[k, n]: move the summed axes of x to its end"
    return unsupported(formula, product.activations, product.weights)


def _problem_of_ggml(product: DynamicProduct) -> str | None:
    formats = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
    if product.is_convolution or {str(d) for d in (*product.eqn.in_dtypes, *product.eqn.out_dtypes)} != {"float32"}:
        return "expected a matrix product of float32 numbers: override this module with qjax.FLOAT"
    if not isinstance(product.weights, WeightFormat) or product.weights.name not in formats:
        known = ", ".join(f"WeightFormat({name!r})" for name in formats)
        return f"expected weights in a format whose kernels are known, got {product.weights}: use {known}"
    spec = product.activations
    if product.setting.block != BLOCK or spec.bits != 8 or not spec.symmetric:
        return f'expected activations as ggml has them: use per="block", block={BLOCK} and symmetric codes of 8 bits'
    return None


def is_operator(product: DynamicProduct) -> bool:
    """Whether the product is one operator of LiteRT."""
    return product.formula in ("tflite", "xnnpack")


def operator(product: DynamicProduct) -> tuple[str, dict[str, object]]:
    """The operation of the product's node, and the node's attributes."""
    symmetric = product.activations.symmetric
    if product.is_convolution:
        return DynamicConv.name, dynamic_windows.attributes_of(product.eqn, symmetric=symmetric)
    summed = len(product.summed)
    features = list(product.eqn.out_shapes[0][len(product.eqn.in_shapes[0]) - summed :])
    return DynamicDot.name, {"symmetric": symmetric, "summed": summed, "features": features}


def kernel(product: DynamicProduct, codes: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight's codes in the layout of its node, and their scales."""
    if product.is_convolution:
        return dynamic_windows.kernel(product.eqn, codes, scale)
    return _matrix(product, codes, scale)


def _matrix(product: DynamicProduct, codes: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight's codes as (n, k), or (n, groups, size), and its scales as (), (n,) or (n, groups)."""
    contracting, _ = product.eqn.params["dimension_numbers"]
    # the order of the summed axes in x
    order = [w for _, w in sorted(zip(contracting[0], contracting[1], strict=True))]
    axes = [*product.kept, *order]
    n = math.prod(codes.shape[axis] for axis in product.kept)
    kernel = jnp.transpose(codes, axes).reshape(n, -1)
    size = product.weights.group_size
    if size is not None:
        groups = kernel.shape[1] // size
        whole = jnp.transpose(scale, axes)
        whole = jnp.broadcast_to(whole, (*(codes.shape[axis] for axis in product.kept), groups))
        return kernel.reshape(n, groups, size), whole.reshape(n, groups)
    if scale.size == 1:
        return kernel, scale.reshape(())
    whole = jnp.transpose(scale, axes)
    whole = jnp.broadcast_to(whole, (*(codes.shape[axis] for axis in product.kept), *(1 for _ in order)))
    return kernel, whole.reshape(n)


def quantization_range(product: DynamicProduct) -> tuple[int, int]:
    """The lowest and the highest code of the weight."""
    spec = product.weights
    assert isinstance(spec, QSpec)
    return spec.qmin, spec.qmax
