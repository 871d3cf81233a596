"""Makes a tensor of the graph from a weight, or from another constant that is read as codes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qjax.graph.ir import Quantization, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.numerics.affine import QParams, broadcast_to_tensor, quantize
from qjax.ops import get
from qjax.ops.facts import ProductFacts
from qjax.tracing import Equation, Place


def weight_tensor(name: str, place: Place, value: Any, params: QParams, eqn: Equation) -> Tensor:
    """The codes of `value` under `params`; for a `jax.ShapeDtypeStruct`, a tensor without data.

    With groups, their axis is split in two, (k,) -> (k // size, size), and the scale runs along the first of them.
    Asymmetric weights are stored as centred int16 codes, so that the accumulator needs no sum over the input.

    Raises:
      ConversionError: something other than a matrix product has groups; asymmetric codes have 16 bits; or the shape of
        a weight depends on the batch size.
    """
    spec = params.spec
    if (expected := spec.param_shape(tuple(value.shape))) != tuple(params.scale.shape):
        raise ConversionError(
            f"weight {place.name!r} of {place.op!r} has a scale of shape {tuple(params.scale.shape)}. For another "
            f"batch size the weight is {'x'.join(map(str, value.shape))} and needs a scale of shape {expected}, "
            "because its shape depends on the batch",
            "Compute it for one example, and repeat the result with jnp.broadcast_to.",
            where=eqn.where,
        )
    if spec.group_size is not None and not _takes_groups(place):
        raise ConversionError(
            f"weight {place.name!r} of {place.op!r} has groups of {spec.group_size} with separate scales, which only "
            "matrix products can sum",
            "Use axis=-1 without group_size for what is converted; a table of embeddings takes axis=0 "
            "with group_axis=1.",
            where=eqn.where,
        )
    if place.kind == "weight" and not spec.symmetric and spec.bits == 16:
        raise ConversionError(
            f"weight {place.name!r} has asymmetric codes of 16 bits. They are stored minus their zero point, which "
            "needs 17 bits",
            "Use symmetric=True for it, or at most 15 bits.",
            where=eqn.where,
        )
    structure = isinstance(value, jax.ShapeDtypeStruct)
    codes: Any = None if structure else quantize(value, params)
    zero_point: Any = params.integer_zero_point()
    dtype, low, high = str(spec.dtype), spec.qmin, spec.qmax
    if place.kind == "weight" and not spec.symmetric:
        dtype, low, high = "int16", spec.qmin - spec.qmax, spec.qmax - spec.qmin
        if not structure:
            codes = _center_codes(codes, params)
            zero_point = jnp.zeros_like(zero_point)
    quantization = Quantization(params.scale, zero_point, low, high, spec.param_axes(len(value.shape)))
    shape = tuple(value.shape)
    if spec.group_size is not None:
        at = spec.group_axis % len(shape)
        shape = (*shape[:at], shape[at] // spec.group_size, spec.group_size, *shape[at + 1 :])
        codes = None if codes is None else codes.reshape(shape)
        axes = tuple(axis + (axis > at) for axis in quantization.axes)
        quantization = dataclasses.replace(quantization, axes=axes)
    return Tensor(name, shape, dtype, quantization, codes)


def _takes_groups(place: Place) -> bool:
    if place.kind != "weight":
        return False
    op = get(place.op)
    return op.scales_rows or (isinstance(op, ProductFacts) and op.groups_scales)


def _center_codes(codes: Any, params: QParams) -> Any:
    zero_point = broadcast_to_tensor(params.integer_zero_point(), params.spec, codes.shape)
    return (codes.astype(jnp.int32) - jnp.broadcast_to(zero_point, codes.shape)).astype(jnp.int16)
