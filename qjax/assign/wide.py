"""Codes of more than 8 bits: many runtimes have them only as int16 with the zero point 0.

TFLite's kernels for int16 refuse another zero point, and TOSA's int16 has none. Neither computes on uint16.
"""

import numpy as np
from jax.core import Tracer

from qjax.graph.ir import Graph
from qjax.graph.unsupported import ConversionError
from qjax.numerics.affine import QSpec
from qjax.targets import Target

_EXPECTED = (
    "expected codes of more than 8 bits to be int16 with the zero point 0, the only ones that the target {!r} is known "
    "to have"
)
_CURE = "Use qjax.QSpec(bits={}, symmetric=True) for it, or at most 8 bits"


def check_spec(what: str, spec: QSpec, target: Target) -> None:
    """Raise a ValueError unless the target's runtime has tensors of such codes."""
    if not target.takes(spec):
        raise ValueError(f"{what}: {_EXPECTED.format(target.name)}. Got {spec}. {_CURE.format(spec.bits)}.")


def check_codes(graph: Graph, target: Target) -> None:
    """The same for every tensor of a quantized graph, its weights too.

    Zero points that are being traced cannot be looked at; `Recipe.quantizer` has checked their specs.
    """
    if target.wide_zero_points:
        return
    made = {tensor: node for node in graph.nodes for tensor in (node.output, *node.constants.values())}
    for name, tensor in graph.tensors.items():
        q = tensor.quantization
        if q is None or tensor.dtype not in ("int16", "uint16"):
            continue
        moved = not isinstance(q.zero_point, Tracer) and bool(np.any(np.asarray(q.zero_point)))
        if tensor.dtype == "int16" and not moved:
            continue
        node = made.get(name)
        zero_point = f", zero point {np.asarray(q.zero_point).ravel()[0]}" if moved else ""
        raise ConversionError(
            f"{_EXPECTED.format(target.name)}. Got {tensor.dtype}{zero_point}",
            f"{_CURE.format(int(q.qmax - q.qmin).bit_length())}, or another target.",
            what=f"the tensor {name!r}" + (f" of {node.op} {node.name!r}" if node is not None else ""),
            where=None if node is None else node.location,
        )
