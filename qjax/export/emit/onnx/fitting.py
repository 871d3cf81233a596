"""Whether ONNX Runtime's 8-bit kernels accept the tensors of a node."""

import numpy as np

from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.graph.ir import Node

CODES = ("int8", "uint8")


def fits(w: CodesWriter, node: Node, *, wide: bool = False) -> bool:
    """Whether all codes are of one dtype, with one scale each; wide: of any, for what is computed in floats."""
    names = [*node.inputs, node.output]
    found = [w.graph.tensors[name] for name in names]
    kinds = {tensor.dtype for tensor in found}
    if any(t.quantization is None or np.size(t.quantization.scale) != 1 for t in found):
        return False
    if any(t.quantization is not None and np.size(t.quantization.zero_point) != 1 for t in found):
        return False
    if any(np.size(w.graph.constant(node, role)) != 1 for role in ("clamp_min", "clamp_max") if role in node.constants):
        return False
    if wide:
        return kinds <= {*CODES, "int16", "uint16"}
    return len(kinds) == 1 and kinds <= set(CODES)
