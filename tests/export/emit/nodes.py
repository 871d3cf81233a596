"""One-node graphs with codes to feed them: every operation, and every rule and formula of every target."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

import collections
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from conformance import cases
from conformance.case import Case
from conformance.single import graph_of as case_graph
from qjax import ops, targets
from qjax.assign import assign
from qjax.graph.ir import Graph
from qjax.graph.kernels import attributes, constants_of
from qjax.numerics.accumulator import Accumulator
from qjax.ops import Operand, Preparation, formulas
from qjax.ops.epilogue import Affine
from qjax.run.interpreter import Interpreter
from tests.ops.nodes import INT4, INT8, INT16, NARROW, UINT8_MIDDLE, UINT16, Grid, graph_of

Named = dict[str, tuple[Graph, list[np.ndarray]]]

_SCALED = ("dense_channels", "conv", "conv_channels", "depthwise_channels", "multiply", "multiply_rows")
REFUSED = {("fpga", "int8", name) for name in _SCALED}
"""Target, dtype and case that cannot be: one shift has no constants for these scales. All others must be."""
TARGETS = targets.names()
"""Those of qjax: a tutorial that ran in this process may have registered its own."""
CASES = 390
"""Targets x dtypes x cases of `of_targets`."""


@functools.cache
def of_targets() -> Named:
    """Per target, operation and dtype: one graph for each arithmetic that no target before it had."""
    found: Named = {}
    seen: set[str] = set()
    count = 0
    for name in TARGETS:
        target = targets.get(name)
        unsigned = name.startswith(("torch", "onnx", "openvino"))
        for dtype in ("uint8",) if unsigned else ("int8", "int16") if name.startswith("tflite") else ("int8",):
            same_grid = tuple(op in target.same_grid for op in ("mean", "average_pool"))
            for label, case in labelled(dtype, *same_grid):
                count += 1
                if (name, dtype, label) in REFUSED:
                    with pytest.raises(ValueError, match="power_of_two needs effective scales"):
                        case_graph(case, target)
                    continue
                graph = case_graph(case, target)
                (node,) = graph.nodes
                known = {key: node.attributes.get(key) for key in ("rule", "formula", "rounding", "accumulator")}
                # a rule of products is the same function behind a dense layer and a convolution
                own = node.op if "kernel" not in node.constants or known["accumulator"] else "weighted"
                key = f"{own} {dtype} {known}"
                if label.endswith("_rows"):
                    formula, facts = known["formula"], (attributes(graph, node), constants_of(graph, node))
                    if formula is None or formulas.get(formula).is_pointwise(*facts):
                        continue  # the same function of the same pairs of codes
                    key += " rows"
                if key not in seen:
                    seen.add(key)
                    found[f"{name}_{label}_{dtype}"] = graph, list(case.inputs)
    assert count == CASES
    return found


@functools.cache
def of_arithmetics() -> Named:
    """Of these, one for each rule, formula and accumulator; its dtype is the one that had the fewest turns."""
    families: dict[str, list[str]] = {}
    for name, (graph, _) in of_targets().items():
        (node,) = graph.nodes
        known = [node.attributes.get(key) for key in ("rule", "formula", "rounding", "accumulator")]
        own = node.op if "kernel" not in node.constants or known[-1] else "weighted"
        rows = "_rows_" in name
        families.setdefault(f"{own} {known} {rows}", []).append(name)
    turns: collections.Counter[str] = collections.Counter()
    found: Named = {}
    for names in families.values():
        name = min(names, key=lambda name: turns[name.rpartition("_")[2]])
        turns[name.rpartition("_")[2]] += 1
        found[name] = of_targets()[name]
    assert set(turns) == {"int8", "int16", "uint8"}
    return found


@functools.cache
def of_kinds() -> Named:
    """Of the operations in shapes that no runtime has, all but convolutions and products that differ in two things.

    Every dtype and accumulator is here, every form of a window and of a product, and each other operation.
    """
    found: Named = {}
    windows: collections.Counter[str] = collections.Counter()
    for name, each in of_operations().items():
        kind = re.fullmatch(r"(conv|odd|other)(\d+)(?:_.*)?", name)
        if kind and kind[1] == "conv":
            # the n-th kind of codes with the n-th form of a window
            windows[kind[2]] += 1
            several = sum(other.startswith(f"conv{kind[2]}_") for other in of_operations())
            if windows[kind[2]] != int(kind[2]) % several + 1:
                continue
        elif kind and kind[2] not in ("0", "2", "7"):
            continue
        found[name] = each
    return found


def digest(graph: Graph, codes: Sequence[np.ndarray]) -> str:
    """Of all codes that the interpreter gives."""
    parts = [np.asarray(y) for y in Interpreter(graph)(*codes)]
    return hashlib.sha256(b"".join(str(y.dtype).encode() + y.tobytes() for y in parts)).hexdigest()


def one_of_each(named: Named) -> Named:
    """The first graph of each operation, with and without weights."""
    found: dict[tuple[str, bool], str] = {}
    for name, (graph, _) in named.items():
        (node,) = graph.nodes
        found.setdefault((node.op, "kernel" in node.constants), name)
    return {name: named[name] for name in found.values()}


@functools.cache
def labelled(dtype: str, mean: bool, pool: bool) -> list[tuple[str, Case]]:
    """mean and pool: whether the average of a mean and that of a pool keep the grid of their input."""
    return list(_labelled(dtype, mean, pool))


def _labelled(dtype: str, mean: bool, pool: bool) -> Iterator[tuple[str, Case]]:
    # extreme accumulators first: what comes first is kept
    for per_channel in (True, False):
        suffix = "_channels" if per_channel else ""
        yield "dense" + suffix, cases.fully_connected(dtype, per_channel=per_channel)[-1]
        yield "conv" + suffix, cases.conv2d(dtype, per_channel=per_channel)[-1]
        yield "depthwise" + suffix, cases.depthwise_conv2d(dtype, per_channel=per_channel)[3]
    for op in ("add", "multiply"):
        case = cases.elementwise(op, dtype)[2]
        yield op, case
        # each of 33 rows has 61 elements of the one operand and a single element of the other
        a, b = case.inputs
        yield f"{op}_rows", dataclasses.replace(case, inputs=(a[:33, :61], b[:33, :1]))
    yield "rescale", cases.rescale(dtype, dtype)[0]
    yield "mean", cases.mean(dtype, same_grid=mean)[1]
    yield "pool", cases.average_pool(dtype, same_grid=pool)[1]


@functools.cache
def of_operations() -> Named:
    """Every operation in shapes that no runtime has: ranks, axes, layouts, dilations, edges."""
    rng = np.random.default_rng(0)
    found: Named = {}

    def add(
        name: str, op: str, inputs: Sequence[Any], output: Any, attributes: dict[str, Any], **constants: Any
    ) -> None:
        described = [(codes.shape, grid) for codes, grid in inputs]
        found[name] = graph_of(op, described, output, constants, attributes), [codes for codes, _ in inputs]

    def codes(grid: Any, *shape: int) -> tuple[np.ndarray, Any]:
        return grid.codes(rng, shape), grid

    x = codes(INT8, 3, 4, 5)
    add("reshape", "reshape", [x], ((6, 10), INT8), {"shape": [6, 10]})
    add("cast", "cast", [x], ((3, 4, 5), INT8), {})
    add("transpose", "transpose", [x], ((5, 3, 4), INT8), {"permutation": [2, 0, 1]})
    add("reverse", "reverse", [x], ((3, 4, 5), INT8), {"axes": [0, 2]})
    add("broadcast", "broadcast", [x], ((3, 2, 4, 5), INT8), {"shape": [3, 2, 4, 5], "dimensions": [0, 2, 3]})
    bounds = {"start": [1, 0, 0], "limit": [3, None, 5], "strides": [1, 2, 3]}
    add("slice", "slice", [x], ((2, 2, 2), INT8), bounds)
    add("split", "split", [x], ((3, 4, 2), INT8), {"sizes": [1, 2, 2], "axis": 2, "index": 1})
    add("max", "max", [x], ((3, 5), INT8), {"axes": [1]})
    add("max_all", "max", [x], ((), INT8), {"axes": [0, 1, 2]})
    padding = {"padding": [[1, 0, 0], [0, -1, 2], [-1, 2, 1]], "lowest": False}
    add("pad", "pad", [x], ((4, 9, 10), INT8), padding)
    add(
        "pad_lowest",
        "pad",
        [codes(UINT16, 2, 3)],
        ((3, 5), UINT16),
        {"padding": [[0, 1, 0], [1, 1, 0]], "lowest": True},
    )
    parts = [codes(UINT8_MIDDLE, 3, n, 2) for n in (1, 4, 2)]
    add("concatenate", "concatenate", parts, ((3, 7, 2), UINT8_MIDDLE), {"axis": 1})
    add("join", "concatenate", parts[:1] * 2, ((6, 1, 2), UINT8_MIDDLE), {"axis": 0})
    clamp = {"clamp_min": np.asarray(-20, np.int32), "clamp_max": np.asarray(31, np.int32)}
    add("clamp", "clamp", [x], ((3, 4, 5), INT8), {}, **clamp)
    table = NARROW.codes(rng, (10, 4))
    indices = np.array([[0, 9, 3], [-1, 10, 2**31 - 1]], np.int32)
    add("embed", "embed", [(indices, "int32")], ((2, 3, 4), NARROW), {}, kernel=table)
    negative = np.array([[0, 9, -10], [-1, 10, -11], [2**31 - 1, -(2**31), -3]], np.int32)
    add("embed_wraps", "embed", [(negative, "int32")], ((3, 3, 4), NARROW), {"wraps": True}, kernel=table)
    small = np.array([250, 0, 9], np.uint8)
    add("embed_bytes", "embed", [(small, "uint8")], ((3, 4), INT4), {}, kernel=INT4.codes(rng, (10, 4)))
    each = {"weights": NARROW.codes(rng, (10, 4)), **_row_factors(rng, 10, 1)}
    known = {"table": [10, 4], "rounding": "nearest_even"}
    add("embed_rows", "embed_rows", [(indices, "int32")], ((2, 3, 4), INT8), {**known, "wraps": True}, **each)
    runs = {"weights": INT4.codes(rng, (10, 2, 2)), **_row_factors(rng, 10, 2)}
    add("embed_rows_columns", "embed_rows", [(indices, "int32")], ((2, 3, 4), INT16), known, **runs)
    some = {"weights": INT4.codes(rng, (5, 2, 4)), **_row_factors(rng, 5, 1)}
    add("embed_rows_groups", "embed_rows", [(negative, "int32")], ((3, 3, 4), UINT8_MIDDLE), known, **some)
    for name, grid, out in (("table", INT8, INT8), ("table_wide", INT16, INT8), ("table_bits", INT4, UINT8_MIDDLE)):
        attributes = {"expression": [0, [["exp", [0]]]], "range": [grid.qmin, grid.qmax]}
        own = np.random.default_rng(1)
        entries = out.codes(own, (grid.qmax - grid.qmin + 1,))
        add(name, "table", [(grid.codes(own, (3, 4, 5)), grid)], ((3, 4, 5), out), attributes, table=entries)
    own = np.random.default_rng(11)
    pair = [(INT4.codes(own, (3, 4, 5)), INT4), (INT8.codes(own, (4, 1)), INT8)]
    entries = own.integers(-128, 128, 16 * 256).astype(np.int8)
    ranges = {"ranges": [[-8, 7], [-128, 127]]}
    add("pair_table", "pair_table", pair, ((3, 4, 5), INT8), ranges, table=entries)
    window = {
        "window": [1, 2, 3],
        "strides": [1, 2, 1],
        "padding": [[0, 0], [2, 1], [1, 0]],
        "base_dilation": [1, 1, 2],
        "window_dilation": [1, 2, 1],
    }
    add("max_pool", "max_pool", [x], ((3, 3, 8), INT8), window)
    total = {"shift": 20, "factor0": 2**20 // 3, "offset_high": 0, "offset_low": 12345}
    total = {role: np.asarray(value, np.int32) for role, value in total.items()}
    add("window_sum", "window_sum", [x], ((3, 3, 8), INT8), {**window, "rounding": "nearest_away"}, **total)
    add("sum", "sum", [x], ((4,), INT8), {"axes": [0, 2], "rounding": "nearest_even"}, **total)
    add("rescale", "rescale", [x], ((3, 4, 5), INT16), {"rounding": "floor"}, **total)
    both = {**total, "factor1": np.asarray(-(2**19), np.int32)}
    wide = codes(INT16, 1, 4, 1)
    add("add", "add", [x, wide], ((3, 4, 5), INT8), {"subtract": True, "rounding": "nearest_up"}, **both)
    add("multiply", "multiply", [x, wide], ((3, 4, 5), INT8), {"rounding": "toward_zero"}, **total)
    product = {"lhs_contracting": [2], "rhs_contracting": [1], "lhs_batch": [0], "rhs_batch": [0]}
    second = codes(UINT8_MIDDLE, 3, 5, 2)
    add(
        "matmul",
        "dot",
        [x, second],
        ((3, 2, 4), INT8),
        {**product, "weight": None, "channels": [], "rank": 3, "permutation": [0, 2, 1], "rounding": "nearest_even"},
        **total,
    )
    _choices(add)
    _rows(add)
    _weighted(add, codes, rng)
    add("argsort", "argsort", [codes(INT8, 3, 4, 5)], ((3, 4, 5), "int32"), {"axis": 1})
    return found


def _choices(add: Any) -> None:
    """Masks, comparisons, indices: booleans and integers that come in, go out, and stand among the constants."""
    rng = np.random.default_rng(3)
    mask = rng.integers(0, 2, (3, 4, 5)).astype(bool), "bool"
    row = mask[0][:, :1], "bool"
    ids = rng.integers(-9, 10, (3, 4)).astype(np.int32), "int32"
    x, y = ((INT8.codes(rng, (3, 4, 5)), INT8) for _ in range(2))
    wide, low = (INT16.codes(rng, (3, 4, 5)), INT16), (UINT8_MIDDLE.codes(rng, (3, 4, 5)), UINT8_MIDDLE)
    same = ((3, 4, 5), INT8)
    five = np.arange(-50, 50, 20, dtype=np.int32)
    add("select", "select", [mask, x, y], same, {})
    add("select_rows", "select", [row, x], same, {}, on=np.asarray(-128, np.int32))
    add("select_wide", "select", [row, wide], ((3, 4, 5), INT16), {}, off=five)
    add("select_integers", "select", [(ids[0] > 0, "bool"), ids, ids], ((3, 4), "int32"), {})
    add("select_masks", "select", [mask, mask, row], ((3, 4, 5), "bool"), {})
    add("choose", "choose", [mask], same, {}, off=np.asarray(-7, np.int32), on=np.asarray(120, np.int32))
    add("compare", "compare", [x, y], ((3, 4, 5), "bool"), {"function": "ge"})
    add("compare_left", "compare", [low], ((3, 4, 5), "bool"), {"function": "gt"}, left=five + 120)
    add("compare_never", "compare", [wide], ((3, 4, 5), "bool"), {"function": "eq"}, right=np.asarray(2**20, np.int32))
    add("compare_integers", "compare", [ids, (ids[0][:, :1], "int32")], ((3, 4), "bool"), {"function": "ne"})
    add("and", "logic", [mask, row], ((3, 4, 5), "bool"), {"function": "and"})
    add("not", "logic", [mask], ((3, 4, 5), "bool"), {"function": "not"})
    add("all", "logic", [mask], ((3, 5), "bool"), {"function": "reduce_and", "axes": [1]})
    add("any", "logic", [mask], ((3,), "bool"), {"function": "reduce_or", "axes": [1, 2]})
    add("count", "logic", [ids], ((4,), "int32"), {"function": "reduce_sum", "axes": [0]})
    add("products", "logic", [ids, ids], ((3, 4), "int32"), {"function": "mul"})
    for function in ("abs", "sign"):
        add(f"integer_{function}", "logic", [ids], ((3, 4), "int32"), {"function": function})
    attributes = {"function": "sum", "axis": 1, "reverse": False}
    add("integer_cumsum", "cumulative_integer", [ids], ((3, 4), "int32"), attributes)
    add("integer_pad", "pad_value", [ids], ((3, 6), "int32"), {"padding": [[0, 0, 0], [1, 1, 0]], "number": 4})
    add("as_integers", "logic", [mask], ((3, 4, 5), "int32"), {"function": "convert_element_type"})
    add("as_mask", "logic", [ids], ((3, 4), "bool"), {"function": "convert_element_type"})
    add("turned_mask", "transpose", [mask], ((5, 3, 4), "bool"), {"permutation": [2, 0, 1]})
    add("joined_masks", "concatenate", [mask, row], ((3, 4, 10), "bool"), {"axis": 2})
    add("repeated_part", "concatenate", [x, (y[0][:1], INT8)], ((3, 8, 5), INT8), {"axis": 1})
    total = {"shift": 20, "factor0": 2**20 // 3, "offset_high": 0, "offset_low": 12345}
    total = {role: np.asarray(value, np.int32) for role, value in total.items()}
    add("number", "number", [ids], ((3, 4), INT8), {"rounding": "nearest_even"}, **total)
    add(
        "prod",
        "prod",
        [(INT8.codes(np.random.default_rng(3), (3, 3, 5)), INT8)],
        ((3, 5), INT8),
        {"axes": [1], "factors": 3, "rounding": "floor"},
        **total,
    )
    add("cumulative_sum", "cumulative_sum", [x], same, {"axis": 1, "reverse": False, "rounding": "floor"}, **total)
    add("cummax", "cumulative_extremum", [wide], ((3, 4, 5), INT16), {"function": "max", "axis": 2, "reverse": True})
    add(
        "cummin",
        "cumulative_extremum",
        [low],
        ((3, 4, 5), UINT8_MIDDLE),
        {"function": "min", "axis": 1, "reverse": False},
    )
    add("argmax", "argument", [x], ((3, 4), "int32"), {"function": "argmax", "axis": 2})
    add("argmin", "argument", [low], ((3, 5), "int32"), {"function": "argmin", "axis": 1})
    add("sort", "sort", [x], ((3, 4, 5), INT8), {"axis": 1})
    add("top_values", "top_k", [x], ((3, 4, 3), INT8), {"k": 3, "axis": 2, "index": 0})
    add("top_places", "top_k", [x], ((3, 2, 5), "int32"), {"k": 2, "axis": 1, "index": 1})
    add("maximum", "extremum", [x, (y[0][:, :1], INT8)], same, {"function": "max"})
    add("minimum", "extremum", [wide], ((3, 4, 5), INT16), {"function": "min"}, value=five)
    add("min", "min", [x], ((3, 5), INT8), {"axes": [1]})
    padding = [[1, 0, 0], [0, -1, 2], [0, 2, 0]]
    add("pad_value", "pad_value", [x], ((4, 9, 7), INT8), {"padding": padding}, value=np.asarray(99, np.int32))
    at = np.array([[[0], [7]], [[-3], [2]]], np.int32), "int32"
    add("take", "take", [x, at], ((3, 2, 2, 5), INT8), {"axis": 1, "places": [1, 2]})
    add("take_wraps", "take", [x, at], ((3, 2, 2, 5), INT8), {"axis": 1, "places": [1, 2], "wraps": True})
    each = np.array([[[4], [0]], [[-3], [2]], [[1], [1]]], np.int32), "int32"
    along = {"axis": 1, "operand": [0], "indices": [0], "places": [0, 1]}
    add("take_along", "take_along", [x, each], ((3, 2, 5), INT8), along)
    add("take_along_wraps", "take_along", [x, each], ((3, 2, 5), INT8), {**along, "wraps": True})
    grouped = {"weight": 1, "group_axis": 0, "summed": 1, "batch": [], "weight_batch": [], "channels": [[0, 2]]}
    grouped |= {"rank": 2, "permutation": [1, 0], "rounding": "nearest_even"}
    factors = {f"factor{i}": rng.integers(2**13, 2**15, (5, 1)).astype(np.int32) for i in range(3)}
    weights = {"weights": rng.integers(-8, 8, (3, 4, 5)).astype(np.int8), **total, **factors}
    add("grouped_dot", "grouped_dot", [(INT8.codes(rng, (6, 12)), INT8)], ((5, 6), INT8), grouped, **weights)
    value = {"value": INT8.codes(rng, (1, 2, 5))}
    add("fill", "fill", [x], ((6, 2, 5), INT8), {"shape": [None, 2, 5], "times": 2}, **value)


def _row_factors(rng: np.random.Generator, rows: int, columns: int) -> dict[str, np.ndarray]:
    shift = rng.integers(26, 30, (rows, columns))
    factor = rng.integers(2**29, 2**30, (rows, columns)) - 1
    return {"shift": shift.astype(np.int32), "factor0": factor.astype(np.int32)}


def _rows(add: Any) -> None:
    """Functions of whole rows of codes, whose constants the operations make themselves."""
    rng = np.random.default_rng(3)

    def made(
        name: str, op: str, inputs: Sequence[Any], output: Any, attributes: dict[str, Any], **held: np.ndarray
    ) -> None:
        operands = []
        for codes, grid in inputs:
            q = grid.quantization() if isinstance(grid, Grid) else None
            known = () if q is None else (q.scale, q.zero_point, q.qmin, q.qmax)
            operands.append(Operand(codes.shape, codes.dtype.name, *known))
        q = output[1].quantization()
        out = Operand(output[0], output[1].dtype, np.float32(2.0**-6), q.zero_point, q.qmin, q.qmax)
        given = Preparation(attributes, held, tuple(operands), out, Affine.identity(), targets.get("nearest_even"))
        prepared = ops.get(op).prepare(given)
        add(name, op, inputs, output, {**attributes, **prepared.attributes}, **prepared.constants)

    x, wide = INT8.codes(rng, (2, 3, 6)), INT16.codes(rng, (2, 3, 6))
    made("softmax", "softmax", [(x, INT8)], ((2, 3, 6), INT8), {"axes": [2]})
    made("softmax_wide", "softmax", [(wide // 999, INT16)], ((2, 3, 6), INT16), {"axes": [0, 1]})
    masks = [(rng.random((3, 6)) < 0.6, "bool"), (rng.random((2, 1, 6)) < 0.3, "bool")]
    masked = {"axes": [2], "mask_axes": [[None, 0, 1], [0, 1, 2]], "mask_inverted": [False, True]}
    for empty in ("uniform", "zero"):
        known = {**masked, "empty": empty}
        made(f"softmax_{empty}", "softmax", [(x, INT8), *masks], ((2, 3, 6), INT8), known)
    made("log_softmax", "log_softmax", [(x, INT8)], ((2, 3, 6), INT8), {"axes": [2]})
    made("log_softmax_wide", "log_softmax", [(wide // 99, INT16)], ((2, 3, 6), INT16), {"axes": [0, 1]})
    made("log_softmax_masked", "log_softmax", [(x, INT8), *masks], ((2, 3, 6), INT8), masked)
    made("logsumexp", "logsumexp", [(x, INT8)], ((2, 6), INT8), {"axes": [1], "keep": False})
    made("logsumexp_masked", "logsumexp", [(x, INT8), *masks], ((2, 3), INT8), {**masked, "keep": False})
    made("logsumexp_kept", "logsumexp", [(wide // 99, INT16)], ((2, 1, 1), INT16), {"axes": [1, 2], "keep": True})
    layer = {"axes": [2], "center": True, "divisor": 0, "epsilon": 1e-3, "feature_axes": [2], "groups": 1}
    layer["joined"] = "add"
    scale, bias = (rng.normal(size=6).astype(np.float32) for _ in range(2))
    made("layer_norm", "normalize", [(x, INT8)], ((2, 3, 6), INT8), layer, scale=scale, bias=bias)
    norm = {**layer, "axes": [1], "center": False, "divisor": 1, "joined": "max"}
    made("norm", "normalize", [(wide, INT16)], ((2, 3, 6), INT16), norm, scale=scale)
    made("group_norm", "normalize", [(x, INT8)], ((2, 3, 6), INT16), {**layer, "axes": [1, 2], "groups": 3}, bias=bias)
    other = INT8.codes(rng, (3, 1)), INT8
    made("squared_difference", "squared_difference", [(x, INT8), other], ((2, 3, 6), INT8), {})
    second = UINT8_MIDDLE.codes(rng, (3, 1))
    image, wide_image = INT8.codes(rng, (2, 5, 4, 3)), INT16.codes(rng, (1, 3, 3, 2))
    resize = {"axes": [1, 2], "size": [7, 9], "align_corners": False, "half_pixel_centers": True}
    made("resize_bilinear", "resize_bilinear", [(image, INT8)], ((2, 7, 9, 3), INT8), resize)
    made("resize_bilinear_grid", "resize_bilinear", [(image, INT8)], ((2, 7, 9, 3), INT16), resize)
    turned = {**resize, "axes": [2, 1]}
    made("resize_bilinear_wide", "resize_bilinear", [(wide_image, INT16)], ((1, 9, 7, 2), INT16), turned)
    twice = {**resize, "size": [10, 2]}
    unsigned = UINT8_MIDDLE.codes(rng, (2, 5, 4, 3))
    made("resize_bilinear_bytes", "resize_bilinear", [(unsigned, UINT8_MIDDLE)], ((2, 10, 2, 3), UINT8_MIDDLE), twice)
    made("divide", "divide", [(x, INT8), (second, UINT8_MIDDLE)], ((2, 3, 6), INT8), {})


def _weighted(add: Any, codes: Any, rng: np.random.Generator) -> None:
    """Products with weights in every dtype, layout and accumulator."""
    kinds: list[tuple[Grid, str, dict[str, Any] | None]] = [
        (INT8, "int8", None),
        (UINT8_MIDDLE, "int8", None),
        (UINT8_MIDDLE, "int16", None),
        (INT16, "int8", None),
        (UINT16, "int8", None),
        (INT8, "int4", None),
        (UINT8_MIDDLE, "int2", None),
        (UINT16, "int16", {"bits": 20, "overflow": "wrap"}),
        (UINT8_MIDDLE, "int8", {"bits": 12, "overflow": "wrap", "operands": "codes"}),
        (INT8, "int8", {"bits": 14, "overflow": "saturate"}),
        (INT16, "int8", {"bits": 32, "overflow": "saturate", "operands": "codes", "order": "chw"}),
        (UINT8_MIDDLE, "int8", {"pairs": True}),
        (UINT8_MIDDLE, "int8", {"pairs": True, "unit": "tap", "padding": "skip"}),
    ]
    for index, (x_grid, w_dtype, accumulator) in enumerate(kinds):
        known = {} if accumulator is None else {"accumulator": Accumulator(**accumulator).to_json()}
        reach = {"int16": 300, "int8": 100, "int4": 7, "int2": 1}[w_dtype]
        w_dtype = w_dtype if reach > 7 else "int8"
        shift = -6 if reach <= 7 else -9 if x_grid in (INT8, UINT8_MIDDLE) else -16
        rule = {"rule": "double_round", "permutation": None, **known}
        out = (INT8, UINT8_MIDDLE)[index % 2]

        def constants(kernel: np.ndarray, features: int, shift: int = shift) -> dict[str, np.ndarray]:
            return {
                "kernel": kernel,
                "bias": rng.integers(-3000, 3000, features).astype(np.int32),
                "multiplier": rng.integers(2**30, 2**31, features).astype(np.int32),
                "shift": (shift - rng.integers(0, 3, features)).astype(np.int32),
            }

        def kernel(*shape: int, reach: int = reach, dtype: str = w_dtype) -> np.ndarray:
            return rng.integers(-reach - 1, reach + 1, shape).astype(dtype)

        dense = {"lhs_contracting": [1], "rhs_contracting": [0], "lhs_batch": [], "rhs_batch": []}
        dense |= {"weight": 1, "channels": [[1, 1]], "rank": 2, **rule}
        w = constants(kernel(37, 6), 6)
        add(f"dense{index}", "dot", [codes(x_grid, 3, 37)], ((3, 6), out), dense, **w)
        if accumulator is None or index == 7:
            # the weight on the left, two summed axes, a permutation
            odd = {"lhs_contracting": [2, 0], "rhs_contracting": [1, 2], "lhs_batch": [], "rhs_batch": []}
            odd |= {"weight": 0, "channels": [[1, 1]], "rank": 2, **rule, "permutation": [1, 0]}
            w = constants(kernel(3, 6, 5), 6)
            add(f"odd{index}", "dot", [codes(x_grid, 4, 5, 3)], ((4, 6), out), odd, **w)
        conv = {"strides": [2, 1], "padding": [[1, 2], [0, 1]], "lhs_dilation": [1, 1], "rhs_dilation": [1, 2]}
        conv |= {"lhs_layout": [0, 3, 1, 2], "rhs_layout": [3, 2, 0, 1], "out_layout": [0, 3, 1, 2], "weight": 1}
        conv |= {"channels": [[3, 3]], "rank": 4, **rule}
        # one group, a few, a feature or more for each channel
        shapes = ((1, 5, 7), (2, 3, 4), (6, 1, 6), (3, 1, 6))
        chosen = shapes if index < 2 else shapes[index % 2 :: 2] if accumulator is None else shapes[1:3]
        for groups, per_group, features in chosen:
            w = constants(kernel(3, 2, per_group, features), features)
            x = codes(x_grid, 2, 6, 5, groups * per_group)
            name = f"conv{index}_{groups}_{features}"
            add(name, "conv", [x], ((2, 4, 4, features), out), {**conv, "groups": groups}, **w)
        if accumulator is None:
            # channels in the middle, features in front, a dilated input: the general form
            other = {**conv, "groups": 1, "lhs_layout": [0, 2, 1, 3], "out_layout": [1, 0, 2, 3]}
            other |= {"lhs_dilation": [2, 1], "strides": [1, 1], "channels": [[0, 3]]}
            w = constants(kernel(3, 2, 2, 4), 4)
            w = {role: value if role == "kernel" else value.reshape(4, 1, 1, 1) for role, value in w.items()}
            add(f"other{index}", "conv", [codes(x_grid, 2, 3, 2, 5)], ((4, 2, 6, 4), out), other, **w)


def finished(lowered: Graph, name: str) -> Graph:
    """A graph that the lowering left, under a target."""
    return assign(lowered, targets.get(name))
