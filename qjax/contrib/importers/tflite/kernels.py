"""Operators whose kernel rounds differently from their runtime's other operators of the same kind.

A walk marks such nodes; this file defines what a mark means under a target. It was found by comparing every rule that
qjax knows with ai-edge-litert 2.3.0 (x86-64) and tflite-micro: 0 mismatches for the rule that is named, and some for
every other.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax import targets
from qjax.assign import assign
from qjax.contrib.importers.tflite.chains import Chain, exact_codes
from qjax.contrib.importers.tflite.run_kernel import RUNTIMES, Function, codes_of
from qjax.export.read_errors import ReadError
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph, Node, Tensor
from qjax.numerics.tables import GEMMLOWP_GRIDS
from qjax.support.errors import Unsupported
from qjax.support.names import lengthened
from qjax.targets.base import Weighted

RELU = "RELU onto another grid"
RELU6 = "RELU6 onto another grid"
TRANSPOSED = "TRANSPOSE_CONV of int8"
DEPTHWISE = "DEPTHWISE_CONV_2D of uint8"
GROUPED = "CONV_2D of several groups"
SINGLE = "DEPTHWISE_CONV_2D of one channel"
SVDF8 = "SVDF with a state of int8"
CONV = "CONV_2D or TRANSPOSE_CONV of uint8"
MIXED = "BATCH_MATMUL of int16 by int8"
ROWS = "FULLY_CONNECTED of floats with int8 weights"
INT4_ROWS = "FULLY_CONNECTED of floats with int4 weights"
ODD_INT4_ROWS = "FULLY_CONNECTED of floats with rows of an odd number of int4 weights"
WINDOWS = "CONV_2D of floats with int8 weights"
BLOCKS = "FULLY_CONNECTED of floats with blockwise weights"
ROWS_32 = "FULLY_CONNECTED of int16 with sums of 32 bits"
ROWS_UNSTATED = "FULLY_CONNECTED of int16 with a bias of int32 that its quantized_bias_type does not state"
ROWS_BARE = "FULLY_CONNECTED of int16 without a bias"
CONV_32 = "CONV_2D of int16 with sums of 32 bits"
GROUPED_32 = "CONV_2D of int16 in several groups with sums of 32 bits"
CONV_UNSTATED = "CONV_2D of int16 with a bias of int32 that its quantized_bias_type does not state"
TRANSPOSED_32 = "TRANSPOSE_CONV of int16 with a bias of int32"
TRANSPOSED_UNSTATED = "TRANSPOSE_CONV of int16 with a bias of int32 that its quantized_bias_type does not state"
TRANSPOSED_BARE = "TRANSPOSE_CONV of int16 with sums of 32 bits and without a bias"
LOG_SOFTMAX = "LOG_SOFTMAX of int8"
DEPTHWISE_32 = "DEPTHWISE_CONV_2D of int16 with a bias of int32"

_OF_BIAS: Mapping[tuple[str, str, str], str | None] = {
    **{
        (operator, *types): None
        for operator in ("FULLY_CONNECTED", "CONV_2D", "TRANSPOSE_CONV")
        for types in (("int64", ""), ("int64", "int64"), ("", "int64"))
    },
    ("FULLY_CONNECTED", "int32", "int32"): ROWS_32,
    ("FULLY_CONNECTED", "", "int32"): ROWS_32,
    ("FULLY_CONNECTED", "int32", ""): ROWS_UNSTATED,
    ("FULLY_CONNECTED", "", ""): ROWS_BARE,
    ("CONV_2D", "int32", "int32"): CONV_32,
    ("CONV_2D", "", "int32"): CONV_32,
    ("CONV_2D", "int32", ""): CONV_UNSTATED,
    ("CONV_2D", "", ""): None,
    ("TRANSPOSE_CONV", "int32", "int32"): TRANSPOSED_32,
    ("TRANSPOSE_CONV", "", "int32"): TRANSPOSED_BARE,
    ("TRANSPOSE_CONV", "int32", ""): TRANSPOSED_UNSTATED,
    ("TRANSPOSE_CONV", "", ""): None,
    ("DEPTHWISE_CONV_2D", "int64", ""): None,
    ("DEPTHWISE_CONV_2D", "", ""): None,
    ("DEPTHWISE_CONV_2D", "int32", ""): DEPTHWISE_32,
}
"""Operator of int16, type of its bias ("": it has none) and quantized_bias_type ("": not stated) -> mark.

LiteRT takes the width of the sums from quantized_bias_type, TFLite Micro from the bias. A kernel that assumes another
width than the bias has reads the memory behind it.
"""


def mark_of_bias(operator: str, bias: str, stated: str, groups: int) -> str | None:
    """The mark of a product of int16 by int8; None for the kernel with sums of 64 bits, which all targets have.

    Raises:
      Unsupported: no kernel supports such a bias.
    """
    if (operator, bias, stated) not in _OF_BIAS:
        raise Unsupported(
            f"it has {f'a bias of {bias}' if bias else 'no bias'}, and its quantized_bias_type is {stated or 'unset'}",
            "Convert the model again with biases of int64 and no quantized_bias_type",
        )
    mark = _OF_BIAS[operator, bias, stated]
    return GROUPED_32 if mark == CONV_32 and groups > 1 else mark


_UINT8 = Weighted("double_round", "f32")
# With one input channel there is only one group, so to a target it looks like any other convolution.
_UINT8_DEPTHWISE = {"depthwise": _UINT8, "conv": _UINT8}
# LiteRT's own kernels requantize 32-bit sums of int16 like those of int8, because XNNPACK has none of int16.
_AS_INT8: Mapping[str, str | Weighted | None] = {"wide": None, "wide_dot": None}
_AS_INT8_X86 = {**_AS_INT8, "dot": Weighted("neon", "f32"), "dot_per_channel": Weighted("neon"), "conv": "neon"}
_X86_32: Mapping[str, Mapping[str, str | Weighted | None]] = {
    ROWS_32: _AS_INT8_X86,
    ROWS_UNSTATED: _AS_INT8_X86,
    ROWS_BARE: _AS_INT8_X86,
    CONV_32: _AS_INT8_X86,
    GROUPED_32: {"wide": "double_round"},
    TRANSPOSED_32: {"wide": "tflite_depthwise_neon"},
    TRANSPOSED_BARE: {"wide": "tflite_depthwise_neon"},
}
_RULES: Mapping[str, Mapping[str, Mapping[str, str | Weighted | None]]] = {
    "tflite_micro": dict.fromkeys((ROWS_32, ROWS_UNSTATED, CONV_32, GROUPED_32, CONV_UNSTATED), _AS_INT8),
    "tflite_reference": {
        CONV: {"conv": _UINT8},
        DEPTHWISE: _UINT8_DEPTHWISE,
        **dict.fromkeys((ROWS_32, CONV_32, GROUPED_32, TRANSPOSED_32, TRANSPOSED_BARE), _AS_INT8),
    },
    "tflite_optimized_x86": {
        RELU: {"rescale": "double_round"},
        RELU6: {"rescale": "double_round"},
        TRANSPOSED: {"conv": "tflite_depthwise_neon"},
        CONV: {"conv": Weighted("neon", "f32")},
        DEPTHWISE: _UINT8_DEPTHWISE,
        GROUPED: {"conv": "double_round"},
        SINGLE: {"conv": "tflite_depthwise_neon"},
        **_X86_32,
    },
    "tflite_xnnpack": {RELU: {"rescale": "double_round"}, RELU6: {"rescale": "double_round"}, **_X86_32},
}
"""target -> mark -> the fields of the target that differ. Kernels of uint8 form the scale in float32."""

_FLOATS = (ROWS, INT4_ROWS, ODD_INT4_ROWS, BLOCKS, WINDOWS)
_NARROW = (ROWS_32, ROWS_UNSTATED, ROWS_BARE, CONV_32, GROUPED_32, TRANSPOSED_32, TRANSPOSED_BARE)

_UNKNOWN: Mapping[str, frozenset[str]] = {
    # LiteRT's optimised LOG_SOFTMAX computes with the C library's float logarithm.
    # Micro's RELU6 kernel compares codes on the input's grid with bounds on the output's grid.
    "tflite_micro": frozenset({RELU6, *_FLOATS}),
    "cmsis_nn": frozenset(
        {LOG_SOFTMAX, RELU6, *_FLOATS, *(set(_NARROW) - {ROWS_BARE, TRANSPOSED_BARE}), CONV_UNSTATED}
    ),
    "tflite_reference": frozenset({BLOCKS, WINDOWS, SVDF8}),
    "tflite_optimized_x86": frozenset({LOG_SOFTMAX, INT4_ROWS, ODD_INT4_ROWS, BLOCKS, WINDOWS, SVDF8}),
    "tflite_optimized_arm": frozenset(
        {LOG_SOFTMAX, RELU, RELU6, TRANSPOSED, CONV, DEPTHWISE, SINGLE, GROUPED, SVDF8, *_FLOATS, *_NARROW}
    ),
    "tflite_xnnpack": frozenset({LOG_SOFTMAX, ODD_INT4_ROWS, SVDF8}),
    "tflite_xnnpack_arm": frozenset({LOG_SOFTMAX, RELU, RELU6, SVDF8, *_FLOATS, *_NARROW}),
}
"""target -> marks whose bits qjax does not reproduce."""

_MICRO_ABSENT = frozenset({MIXED, DEPTHWISE_32, TRANSPOSED_32, TRANSPOSED_UNSTATED})
_LITERT_ABSENT = frozenset({DEPTHWISE_32, CONV_UNSTATED, TRANSPOSED_UNSTATED})
_ABSENT: Mapping[str, frozenset[str]] = {
    "tflite_micro": _MICRO_ABSENT,
    "cmsis_nn": _MICRO_ABSENT,
    "tflite_reference": _LITERT_ABSENT | {ROWS_UNSTATED},
    **dict.fromkeys(
        ("tflite_optimized_x86", "tflite_optimized_arm", "tflite_xnnpack", "tflite_xnnpack_arm"), _LITERT_ABSENT
    ),
}
"""target -> marks that its runtime refuses when it prepares a model, or whose bias it reads with another width."""


def refused(marks: Mapping[str, str], target: targets.Target) -> list[str]:
    """A line per node that the target's runtime does not compute, or computes in a way that qjax does not know."""
    unknown, absent = (table.get(target.name, frozenset[str]()) for table in (_UNKNOWN, _ABSENT))
    found: list[str] = []
    for name, mark in marks.items():
        if mark in absent:
            found.append(f"{name!r}: {target.name!r} has no {mark}. {_known(mark)}")
        elif mark in unknown:
            found.append(
                f"{name!r}: {mark} has a kernel of its own under {target.name!r}, which qjax does not reproduce. "
                f"{_known(mark)}"
            )
    return found


def _known(mark: str) -> str:
    """The cure: a target whose runtime computes a marked node in the same way as qjax."""
    for name in ("tflite_reference", "tflite_xnnpack", "tflite_micro"):
        if mark not in _UNKNOWN[name] | _ABSENT[name]:
            return f"Read it with target={name!r}"
    return "Convert the model again with biases of int64, which every runtime takes"


def with_tables(graph: Graph, tables: Mapping[str, Mapping[str, Function]], target: targets.Target) -> Graph:
    """The graph with the functions for which a runtime has its own tables; tables: by node and role."""
    if target.lstm != "tflite_micro" or not tables:
        return graph
    tensors, known = dict(graph.tensors), dict[tuple[str, float], str]()

    def held(function: Function) -> str:
        key = function.operator, float(function.x.scale)
        if key not in known:
            known[key] = lengthened(f"{function.operator.lower()} of {key[1]}", tensors, "'")
            codes = codes_of(function, target.name)
            tensors[known[key]] = Tensor(known[key], codes.shape, str(codes.dtype), None, codes)
        return known[key]

    def added(node: Node) -> Node:
        roles = {role: held(function) for role, function in tables.get(node.name, {}).items()}
        return dataclasses.replace(node, constants={**node.constants, **roles})

    return graph.replace(nodes=tuple(added(node) for node in graph.nodes), tensors=tensors)


def targeted(
    graph: Graph, marks: Mapping[str, str], functions: Mapping[str, Function | Chain], target: targets.Target
) -> Graph:
    """The graph under a target, its marked nodes under the rules of their kernels, functions with their tables.

    Raises:
      ReadError: the kernel of a function, or of a softmax, is not known.
    """
    asked = target.name in RUNTIMES
    unknown = {name: function for name, function in functions.items() if asked and not _has_formula(function)}
    tables = {name: codes_of(function, target.name) for name, function in unknown.items()}
    if not asked:
        tables = {name: exact_codes(c) for name, c in functions.items() if isinstance(c, Chain) and not c.is_function}
    quantized = _put_tables(graph, functions, tables)
    made = assign(quantized, target)
    # For some functions a target computes its own tables for all codes, so put the file's tables back.
    made = _put_tables(made, functions, tables)
    _check_softmax(made, target)
    rules = _RULES.get(target.name, {})
    for mark in sorted({mark for mark in marks.values() if mark in rules}):
        names = {name for name, own in marks.items() if own == mark}
        other = assign(graph, dataclasses.replace(target, **rules[mark]))  # pyright: ignore[reportArgumentType]
        nodes = tuple(b if a.name in names else a for a, b in zip(made.nodes, other.nodes, strict=True))
        own = {n.name: n for n in other.nodes if n.name in names}
        tensors = {name: other.tensors[name] for n in own.values() for name in n.constants.values()}
        made = remove_dead(made.replace(nodes=nodes, tensors={**made.tensors, **tensors}))
    return made.replace(quantized=quantized)


def _put_tables(graph: Graph, functions: Mapping[str, Function | Chain], tables: Mapping[str, np.ndarray]) -> Graph:
    """The graph with these tables, by node."""
    nodes, tensors = list(graph.nodes), dict(graph.tensors)
    for index, node in enumerate(nodes):
        if node.name not in tables:
            continue
        function, codes = functions[node.name], tables[node.name]
        name = f"{node.output}/table"
        role, attributes = _place(function)
        grid = function.y if role == "kernel" else None
        tensors[name] = Tensor(name, codes.shape, str(codes.dtype), grid, codes)
        nodes[index] = dataclasses.replace(
            node, constants={**node.constants, role: name}, attributes={**node.attributes, **attributes}
        )
    return graph.replace(nodes=tuple(nodes), tensors=tensors)


def _place(function: Function | Chain) -> tuple[str, dict[str, Any]]:
    """The role of the table in its node, and the attributes that describe it."""
    if isinstance(function, Function):
        return "table", {"range": [function.x.qmin, function.x.qmax]}
    if function.is_function:
        return "table", {"range": [function.sources[0].low, function.sources[0].high]}
    if len(function.sources) == 1:
        return "kernel", {}
    return "table", {"ranges": [[source.low, source.high] for source in function.sources]}


def _has_formula(function: Function | Chain) -> bool:
    if isinstance(function, Chain):
        return False
    name = function.operator.lower()
    grid = float(np.asarray(function.y.scale)), int(np.asarray(function.y.zero_point))
    return function.dtype == "int8" and GEMMLOWP_GRIDS.get(name) == grid


def _check_softmax(graph: Graph, target: targets.Target) -> None:
    # Among all operations, only softmax has a method as an attribute.
    wrong = [node for node in graph.nodes if node.attributes.get("method") == "exact"]
    if wrong and target.name in RUNTIMES:
        listed = ", ".join(repr(node.name) for node in wrong)
        before = [name for node in wrong for name in node.inputs if name not in graph.inputs]
        part = f"Read the part before it, with outputs={before}" if before else "Leave it out of the model"
        kinds = "int8" if target.softmax == "uint16" else "int8 and uint8"
        raise ReadError(
            f"SOFTMAX {listed}: qjax has the bits of {target.name!r} for {kinds} codes, an output scale of 1/256 with "
            f"the least code as zero point, and at most 4095 of them. {part}, or read it with "
            "target='nearest_even', whose softmax is rounded once."
        )
