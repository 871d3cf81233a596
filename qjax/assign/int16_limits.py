"""Refuses codes of more than 8 bits that a runtime lacks; many have such codes only as int16 with zero point 0.

TFLite's kernels for int16 refuse any other zero point, and TOSA's int16 has none. Neither computes with uint16.
PyTorch's engines, OpenVINO's CPU plugin and XNNPACK multiply codes of 8 bits only.
"""

import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.numerics.affine import QSpec
from qjax.targets import Target

_EXPECTED = (
    "expected codes of more than 8 bits to be int16 with the zero point 0, the only ones that the target {!r} is known "
    "to have"
)
_CURE = "Use qjax.QSpec(bits={}, symmetric=True) for it, or at most 8 bits"


_NONE = "expected {} of at most 8 bits, the only ones that the target {!r} is known to have"


def check_spec(what: str, spec: QSpec, target: Target, *, weight: bool) -> None:
    """Raise a ValueError unless the target's runtime supports such codes."""
    if spec.bits > 8 and not (target.wide_weights if weight else target.wide_activations):
        none = _NONE.format("weights" if weight else "activations", target.name)
        both = " Recipe(first_last_bits=...) is the width of weights, too." if weight else ""
        raise ValueError(f"{what}: {none}. Got {spec}. Use at most 8 bits, or another target.{both}")
    if not target.takes(spec):
        raise ValueError(f"{what}: {_EXPECTED.format(target.name)}. Got {spec}. {_CURE.format(spec.bits)}.")


def check_codes(graph: Graph, target: Target) -> None:
    """Check every tensor of a quantized graph, including weights.

    Zero points that are being traced cannot be checked here; `Recipe.quantizer` has checked their specs.
    """
    if target.wide_activations and target.wide_zero_points:
        return
    made = {tensor: node for node in graph.nodes for tensor in (node.output, *node.constants.values())}
    for name, tensor in graph.tensors.items():
        q = tensor.quantization
        if q is None or tensor.dtype not in ("int16", "uint16"):
            continue
        node = made.get(name)
        if not target.wide_activations and tensor.value is None:
            raise ConversionError(
                f"{_NONE.format('activations', target.name)}. Got {tensor.dtype}",
                "Use at most 8 bits for it, or another target.",
                what=_describe_tensor(name, node),
                where=None if node is None else node.location,
            )
        moved = not isinstance(q.zero_point, Tracer) and bool(np.any(np.asarray(q.zero_point)))
        if target.wide_zero_points or (tensor.dtype == "int16" and (not moved or _is_own(graph, tensor, node))):
            continue
        zero_point = f", zero point {np.asarray(q.zero_point).ravel()[0]}" if moved else ""
        raise ConversionError(
            f"{_EXPECTED.format(target.name)}. Got {tensor.dtype}{zero_point}",
            f"{_CURE.format(int(q.qmax - q.qmin).bit_length())}, or another target.",
            what=_describe_tensor(name, node),
            where=None if node is None else node.location,
        )


def _is_own(graph: Graph, tensor: Tensor, node: Node | None) -> bool:
    """Whether a runtime's own kernel produces these codes, and its other kernels read them unchanged."""
    if node is None or tensor.quantization is None or tensor.name != node.output:
        return False
    own = ops.get(node.op).wide_zero_point
    readers = [ops.get(reader.op) for reader in graph.consumers(tensor.name)]
    return own == int(np.asarray(tensor.quantization.zero_point)) and all(op.any_zero_point for op in readers)


def _describe_tensor(name: str, node: Node | None) -> str:
    return f"the tensor {name!r}" + (f" of {node.op} {node.name!r}" if node is not None else "")
