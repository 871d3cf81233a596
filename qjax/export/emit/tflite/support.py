"""Which graphs a .tflite file can represent: the targets, the types, and the limits of the runtimes."""

from collections.abc import Mapping

import numpy as np

from qjax.assign.retarget import made_by_target
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.support.errors import Problems

RUNTIMES = (
    "tflite_micro",
    "cmsis_nn",
    "tflite_reference",
    "tflite_optimized_x86",
    "tflite_optimized_arm",
    "tflite_xnnpack",
    "tflite_xnnpack_arm",
)
"""The targets that are runtimes of .tflite files."""

MICRO = ("tflite_micro", "cmsis_nn")
"""The targets among them whose runtime is TFLite Micro."""

_INT4: Mapping[str, tuple[str, ...]] = {
    "tflite_micro": ("CONV_2D", "DEPTHWISE_CONV_2D"),
    "tflite_reference": ("FULLY_CONNECTED", "CONV_2D"),
    "tflite_optimized_x86": ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D"),
    "tflite_xnnpack": ("FULLY_CONNECTED",),
}

_CURE_SIGNED = "TFLite's kernels take signed codes: use activations=QSpec(bits=8, symmetric=False), signed by default"


def check_target(graph: Graph) -> None:
    """Raise an error unless the graph's target is a runtime that reads .tflite files."""
    if graph.target not in RUNTIMES:
        raise ValueError(
            f"emit: a .tflite file contains scales but no rounding, so its runtime would not compute the codes of the "
            f"target {graph.target!r}. Convert for the runtime that you ship to (Recipe(target=...)), or use "
            f"graph.retarget(...) and see with qjax.compare what changes; targets with .tflite files are "
            f"{', '.join(RUNTIMES)}. Files that preserve any target's rounding: emit('onnx'), emit('c')."
        )


def problems_of(graph: Graph) -> Problems:
    """What no operator can represent, whatever the operation."""
    found = Problems()
    for name in (*graph.inputs, *(node.output for node in graph.nodes)):
        tensor = graph.tensors[name]
        if tensor.quantization is None:
            # floats are in float parts only, whose lowerings know what the runtime supports
            if tensor.dtype not in ("int32", "bool", "float32"):
                found.add(f"tensor {name!r}", f"integers of {tensor.dtype}", "Give indices as int32, masks as booleans")
        elif tensor.dtype not in ("int8", "int16"):
            found.add(f"tensor {name!r}", f"codes of {tensor.dtype}", _CURE_SIGNED)
        elif tensor.dtype == "int16" and np.any(np.asarray(tensor.quantization.zero_point)):
            found.add(
                f"tensor {name!r}",
                f"codes of 16 bits with the zero point {int(np.asarray(tensor.quantization.zero_point))}",
                "TFLite's kernels for int16 need the zero point 0: use QSpec(bits=16), which is symmetric",
            )
    made = made_by_target(graph)
    needed = {node.name for node in remove_dead(graph).nodes}
    for node in graph.nodes:
        what, where = f"{node.op} {node.name!r}", node.location
        if Accumulator.of_json(node.attributes.get("accumulator")) != EXACT:
            found.add(what, "its accumulator is not the exact one of 32 bits", "Use a target with exact sums", where)
        elif node.name in needed and "rounding" not in node.attributes and node.name not in made:
            found.add(
                what,
                f"its rule or its constants are not those that {graph.target!r} makes of the scales",
                f"graph.retarget({graph.target!r}) computes new ones",
                where,
            )
    return found


def takes_int4(target: str, operator: str, depth: int) -> bool:
    """Whether the target's runtime computes that operator with packed 4-bit weights to the same codes.

    Measured with ai-edge-litert 2.3.0 and tflite-micro 0.dev20261023. The others reject the type (FULLY_CONNECTED of
    TFLite Micro as the package builds it, DEPTHWISE_CONV_2D of the reference kernels) or round differently with it
    (LiteRT does not delegate such convolutions, and products of an odd depth, to XNNPACK); nothing is claimed of
    runtimes on ARM. Their weights take one byte each.

    depth: how many products each sum of a FULLY_CONNECTED has.
    """
    if target == "tflite_xnnpack" and depth % 2:
        return False
    return operator in _INT4.get(target, ())
