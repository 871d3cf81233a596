"""Graphs of one operation as .tflite files, for the profile `ethos_u` and for Vela."""

import functools

from qjax.assign.retarget import retarget
from qjax.export.emit.tflite import attempt
from tests.export.emit.nodes import of_operations


@functools.cache
def files() -> dict[str, bytes]:
    """Every operation that TFLite Micro has an operator for; batch 1."""
    found: dict[str, bytes] = {}
    for name, (graph, _) in of_operations().items():
        kernels = [graph.tensors[node.constants["kernel"]] for node in graph.nodes if "kernel" in node.constants]
        if any(kernel.quantization is None for kernel in kernels):
            # rounding cannot be made anew without scales
            continue
        try:
            data, problems = attempt(retarget(graph, "tflite_micro"), batch=1, int4=False)
        except ValueError:
            # no such operation under this target, or no form in the file
            continue
        if data and not problems.found:
            found[name] = data
    return found
