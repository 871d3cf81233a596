"""The two ends of a graph: quantizes the model's inputs to codes, and dequantizes the output codes."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from qjax.graph.ir import REAL_DTYPE, Array, Graph, Tensor
from qjax.graph.structure import flatten_arguments, is_leaf, is_static, plain, rebuild
from qjax.numerics.affine import QParams, QSpec, dequantize, quantize
from qjax.numerics.output_dequantization import OutputDequantization
from qjax.numerics.unfused import unfused
from qjax.run.interpreter import check_count
from qjax.tracing import Integers


def inputs_of(ir: Graph, args: tuple[Any, ...]) -> list[Any]:
    """The arrays of a call in the order of `ir.inputs`.

    Args:
      args: in the form that the model takes, or one array per input.
    """
    structure = ir.metadata.get("input_structure")
    plain = len(args) == len(ir.inputs) and all(is_leaf(x) and not is_static(x) for x in args)
    flat = structure is not None and all(isinstance(item, int) for item in structure[1])
    if structure is None or plain or (flat and len(args) != len(ir.inputs)):
        check_count(ir, args)
        return list(args)
    return flatten_arguments(structure, args if ir.call is None else ir.call.without_classes(args), len(ir.inputs))


def integers_checked(ir: Graph, inputs: Sequence[Array]) -> list[Any]:
    """The inputs; raises for concrete integers that the graph's type cannot hold, because JAX would truncate them."""
    for name, x in zip(ir.inputs, inputs, strict=True):
        if isinstance(x, Tracer) or not np.issubdtype(getattr(x, "dtype", np.float32), np.integer):
            continue
        tensor = ir.tensors[name]
        plain = tensor.quantization is None and np.issubdtype(tensor.dtype, np.integer)
        dtype = np.dtype(tensor.dtype if plain else np.int32)
        if jnp.can_cast(x.dtype, dtype):
            continue
        known, limits = np.asarray(x), np.iinfo(dtype)
        if known.size and (known.min() < limits.min or known.max() > limits.max):
            raise ValueError(
                f"Input {name!r}: expected integers within {dtype.name}, got {known.min()} to {known.max()}. Check "
                "where they come from; the graph holds them in this type."
            )
    return list(inputs)


def check_integers(ir: Graph, arrays: Sequence[Any]) -> None:
    """Raise for integers outside the range of a table of a function of them."""
    ranges: list[Any] = ir.metadata.get("integers") or []
    for name, x, known in zip(ir.inputs, arrays, ranges, strict=False):
        if known is not None:
            Integers(name, int(known[0]), int(known[1])).check(name, x)


def quantize_inputs(ir: Graph, inputs: Sequence[Array], kept: Collection[str] = ()) -> list[jax.Array]:
    """Codes of float inputs, in the order of `ir.inputs`; index inputs stay integers. kept: inputs that are codes."""
    pairs = zip(ir.inputs, inputs, strict=True)
    return [jnp.asarray(x) if name in kept else quantize_input(ir, ir.tensors[name], x) for name, x in pairs]


def quantize_input(ir: Graph, tensor: Tensor, x: Any) -> jax.Array:
    """The codes of one float input."""
    x = jnp.asarray(x)
    if tensor.quantization is not None:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"Input {tensor.name!r}: expected the floats that the model takes, got {x.dtype}. Convert it as for "
                "training (for images, x.astype(np.float32) / 255). Pass codes to graph.run(codes)."
            )
        return quantize(x, qparams_of(tensor), quantization=ir.quantization).astype(tensor.dtype)
    if tensor.dtype == REAL_DTYPE and jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(tensor.dtype)  # a float part of the model reads it unquantized
    if jnp.issubdtype(x.dtype, jnp.bool_ if tensor.dtype == "bool" else jnp.integer):
        return x if tensor.dtype == "bool" else _within(x, tensor.dtype)
    kind = "booleans" if tensor.dtype == "bool" else "integers"
    raise TypeError(f"Input {tensor.name!r}: expected {kind}, got {x.dtype}.")


def _within(x: jax.Array, dtype: str) -> jax.Array:
    """Cast integers to another dtype; values that do not fit become its greatest or least, not their low bits."""
    own, wanted = np.iinfo(x.dtype), np.iinfo(dtype)
    low, high = max(own.min, wanted.min), min(own.max, wanted.max)
    if (low, high) != (own.min, own.max):
        x = jnp.clip(x, np.asarray(low, x.dtype), np.asarray(high, x.dtype))
    return x.astype(dtype)


def dequantize_outputs(ir: Graph, codes: Sequence[Any]) -> Any:
    """The dequantized outputs, in the structure of the model's own output."""
    return result_of(ir, [dequantize_output(ir, name, c) for name, c in zip(ir.outputs, codes, strict=True)])


def dequantize_output(ir: Graph, name: str, codes: ArrayLike) -> Any:
    """The codes of one tensor as floats; integers and booleans without a scale are unchanged."""
    return _reals(ir.tensors[name], codes, ir.dequantization)


def result_of(ir: Graph, leaves: Sequence[Any]) -> Any:
    """The result of the model, with `leaves` as the graph's outputs."""
    if ir.call is not None:
        return ir.call.result(leaves)
    structure = ir.metadata.get("output_structure")
    return rebuild(structure, leaves) if structure is not None else leaves[0] if len(leaves) == 1 else tuple(leaves)


def outputs_of(ir: Graph, returned: Any) -> list[Any]:
    """The arrays of a model's result that the graph computes, in the order of `ir.outputs`."""
    places = jax.tree.leaves(plain(result_of(ir, range(len(ir.outputs)))))
    leaves = jax.tree.leaves(plain(returned))
    found = {place: leaf for place, leaf in zip(places, leaves, strict=True) if isinstance(place, int)}
    return [found[index] for index in range(len(ir.outputs))]


def _reals(tensor: Tensor, codes: ArrayLike, dequantization: OutputDequantization) -> Any:
    q = tensor.quantization
    if q is None:
        return codes  # plain integers, not codes
    if np.dtype(tensor.dtype).itemsize <= 2:
        return dequantize(codes, qparams_of(tensor), dequantization=dequantization)
    # The output may be an accumulator, whose codes are wider than any spec allows.
    steps = jnp.asarray(codes).astype(jnp.int32) - jnp.asarray(q.zero_point)
    return unfused(steps.astype(jnp.float32) * jnp.asarray(q.scale))


def qparams_of(tensor: Tensor) -> QParams:
    """A tensor's quantization as `QParams`."""
    q = tensor.quantization
    assert q is not None
    signed = q.qmin < 0
    bits = (q.qmax + 1).bit_length() if signed else q.qmax.bit_length()
    spec = QSpec(bits=bits, signed=signed, symmetric=False, narrow_range=signed and q.qmin == -q.qmax)
    return QParams(jnp.asarray(q.scale), jnp.asarray(q.zero_point), spec)
