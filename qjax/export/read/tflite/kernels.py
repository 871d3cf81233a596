"""Operators whose kernel rounds otherwise than their runtime does for operations of their kind.

A walk marks the nodes; here stands what a mark means under a target. Found by comparing every rule that qjax knows with
ai-edge-litert 2.3.0 (x86-64) and tflite-micro: 0 mismatches for the one that is named, some for each other.
"""

import dataclasses
from collections.abc import Mapping

from qjax import targets
from qjax.export.ir import Graph
from qjax.export.passes import remove_dead
from qjax.export.retarget import retarget
from qjax.targets.base import Weighted

RELU = "RELU onto another grid"
RELU6 = "RELU6 onto another grid"
TRANSPOSED = "TRANSPOSE_CONV of int8"
DEPTHWISE = "DEPTHWISE_CONV_2D of uint8"
GROUPED = "CONV_2D of several groups"
SINGLE = "DEPTHWISE_CONV_2D of one channel"
CONV = "CONV_2D or TRANSPOSE_CONV of uint8"

_UINT8 = Weighted("double_round", "f32")
# with one input channel it is one group, which a target takes for any other convolution
_UINT8_DEPTHWISE = {"depthwise": _UINT8, "conv": _UINT8}
_RULES: Mapping[str, Mapping[str, Mapping[str, str | Weighted]]] = {
    "tflite_reference": {CONV: {"conv": _UINT8}, DEPTHWISE: _UINT8_DEPTHWISE},
    "tflite_optimized_x86": {
        RELU: {"rescale": "double_round"},
        RELU6: {"rescale": "double_round"},
        TRANSPOSED: {"conv": "tflite_depthwise_neon"},
        CONV: {"conv": Weighted("neon", "f32")},
        DEPTHWISE: _UINT8_DEPTHWISE,
        GROUPED: {"conv": "double_round"},
        SINGLE: {"conv": "tflite_depthwise_neon"},
    },
    "tflite_xnnpack": {RELU: {"rescale": "double_round"}, RELU6: {"rescale": "double_round"}},
}
"""target -> mark -> the fields of the target that differ. Kernels of uint8 form the scale in float32."""

_UNKNOWN: Mapping[str, frozenset[str]] = {
    # its kernel compares codes of the input's grid with bounds of the output's
    "tflite_micro": frozenset({RELU6}),
    "cmsis_nn": frozenset({RELU6}),
    "tflite_optimized_arm": frozenset({RELU, RELU6, TRANSPOSED, CONV, DEPTHWISE, SINGLE, GROUPED}),
    "tflite_xnnpack_arm": frozenset({RELU, RELU6}),
}
"""target -> marks whose bits qjax does not have."""


def refused(marks: Mapping[str, str], target: targets.Target) -> list[str]:
    """A line per node that the target's runtime computes in a way that qjax does not know."""
    unknown = _UNKNOWN.get(target.name, frozenset())
    return [
        f"{name!r}: {mark} has a kernel of its own under {target.name!r}, whose bits qjax does not have. "
        "Read it with target='tflite_reference'"
        for name, mark in marks.items()
        if mark in unknown
    ]


def targeted(graph: Graph, marks: Mapping[str, str], target: targets.Target) -> Graph:
    """The graph under a target, its marked nodes under the rules of their kernels."""
    made = retarget(graph, target)
    rules = _RULES.get(target.name, {})
    for mark in sorted({mark for mark in marks.values() if mark in rules}):
        names = {name for name, own in marks.items() if own == mark}
        other = retarget(graph, dataclasses.replace(target, **rules[mark]))  # pyright: ignore[reportArgumentType]
        nodes = tuple(b if a.name in names else a for a, b in zip(made.nodes, other.nodes, strict=True))
        own = {n.name: n for n in other.nodes if n.name in names}
        tensors = {name: other.tensors[name] for n in own.values() for name in n.constants.values()}
        made = remove_dead(made.replace(nodes=nodes, tensors={**made.tensors, **tensors}))
    return made
