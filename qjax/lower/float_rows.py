"""Lowers products under `qjax.Dynamic` that a runtime has as one operator to a node between float parts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from qjax.graph import float_parts
from qjax.graph.ir import Node, Quantization, Tensor
from qjax.graph.unsupported import unsupported
from qjax.lower.builder import Builder
from qjax.lower.quantizers import island_output
from qjax.lower.values import Codes, Real
from qjax.ops import dynamic_rows
from qjax.ops.dynamic import DynamicProduct
from qjax.tracing import Equation


def rows_product(builder: Builder, eqn: Equation, product: DynamicProduct, found: Sequence[Any]) -> float_parts.Float:
    """Make a node for a float product that a runtime has as one operator; returns its result in float."""
    op, attributes = dynamic_rows.operator(product)
    name = f"{eqn.scope}/{op}" if eqn.scope else op
    x = _float_tensor(builder, found[0], eqn)
    codes, scale = (found[index].value for index in (-3, -2))
    if isinstance(codes, jax.ShapeDtypeStruct):
        kernel, scale = jax.eval_shape(partial(dynamic_rows.kernel, product), codes, scale)
        data = None
    else:
        kernel, scale = dynamic_rows.kernel(product, codes, scale)
        data = kernel
    low, high = dynamic_rows.quantization_range(product)
    axes = tuple(range(len(scale.shape)))
    zero_point = np.zeros((), np.int32)
    held = builder.fresh(f"{name}/kernel")
    if data is None:
        # Only the structure is needed here, so any scale will do.
        scale = np.ones(scale.shape, np.float32)
    builder.add(Tensor(held, tuple(kernel.shape), "int8", Quantization(scale, zero_point, low, high, axes), data))
    output = builder.unlabelled(name)
    builder.add(Tensor(output, eqn.out_shapes[0], "float32"))
    builder.nodes.append(Node(output, op, (x,), output, {"kernel": held}, attributes, eqn.location))
    return float_parts.passed(eqn, eqn.outputs[0], Codes(output))


def _float_tensor(builder: Builder, found: Any, eqn: Equation) -> str:
    """The float tensor that a product reads; codes are dequantized."""
    value = eqn.inputs[0]
    if isinstance(found, Real):
        if found.name not in builder.tensors:
            builder.add(Tensor(found.name, value.shape, "float32"))
        return found.name
    if isinstance(found, Codes):
        if builder.tensors[found.tensor].dtype == "float32":
            return found.tensor
        if found.tensor not in builder.floats:
            builder.floats[found.tensor] = island_output(builder, float_parts.passed(eqn, value, found), value).tensor
        return builder.floats[found.tensor]
    if not isinstance(found, float_parts.Float):
        raise unsupported(eqn)
    key = found.call, found.index
    if key not in builder.floats:
        builder.floats[key] = island_output(builder, found, value).tensor
    return builder.floats[key]
