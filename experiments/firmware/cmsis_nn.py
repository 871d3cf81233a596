"""The products of a network by the kernels of CMSIS-NN, in the place of those that qjax writes.

Convolutions, dense layers, additions and average pooling of int8 codes call CMSIS-NN; every other layer stays. The
source of CMSIS-NN is at https://github.com/ARM-software/CMSIS-NN; its license is Apache-2.0.
"""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from qjax.export.integer_graph import IntegerGraph

_FOLDERS = (
    "BasicMathFunctions",
    "ConvolutionFunctions",
    "FullyConnectedFunctions",
    "NNSupportFunctions",
    "PoolingFunctions",
    "TransposeFunctions",
)
_SCRATCH = 1 << 15
"""Bytes that a kernel may use for itself."""
_PRELUDE = f"""
#include <stdlib.h>
#include "arm_nnfunctions.h"

static int32_t scratch[{_SCRATCH // 4}];

static void expect(arm_cmsis_nn_status status, int32_t needed)
{{
    if (status != ARM_CMSIS_NN_SUCCESS || needed > {_SCRATCH}) {{
        abort();
    }}
}}
"""


@dataclasses.dataclass(frozen=True)
class _Node:
    """What a call needs of a node. name: of its function. shapes, dtypes, zero_points: of its inputs and output."""

    name: str
    op: str
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    zero_points: list[int]
    values: Mapping[str, np.ndarray]
    attributes: Mapping[str, object]

    def pair(self, attribute: str) -> str:
        """(width, height), as CMSIS-NN orders them."""
        height, width = self.attributes[attribute]  # pyright: ignore
        return f"{{{width}, {height}}}"

    @property
    def bounds(self) -> str:
        low, high = (int(self.values.get(role, end)) for role, end in (("clamp_min", -128), ("clamp_max", 127)))
        return f"{{{low}, {high}}}"


def archive(source: Path, folder: Path, options: Sequence[str], call: Callable[..., str]) -> Path:
    """The kernels as a library; it is built once a folder.

    Raises:
      FileNotFoundError: the source is not CMSIS-NN.
    """
    if not (source / "Include" / "arm_nnfunctions.h").exists():
        raise FileNotFoundError(
            f"firmware: expected a checkout of CMSIS-NN in {source}, with Include/arm_nnfunctions.h. "
            "It is at https://github.com/ARM-software/CMSIS-NN."
        )
    library = folder / "libcmsis_nn.a"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = [path for name in _FOLDERS for path in sorted((source / "Source" / name).glob("*.c"))]
        files = [str(path.resolve()) for path in found if not path.stem.endswith(("_f16", "_f32", "_flt"))]
        # its manual says that this is faster on a Cortex-M4, and slower on others
        own = ["-DCMSIS_NN_USE_REQUANTIZE_INLINE_ASSEMBLY"] if "-mcpu=cortex-m4" in options else []
        include = f"-I{(source / 'Include').resolve()}"
        call("arm-none-eabi-gcc", *options, "-std=c11", *own, include, "-c", *files, folder=folder)
        call("arm-none-eabi-ar", "rcs", library.name, *(f"{Path(file).stem}.o" for file in files), folder=folder)
    return library


def commit(source: Path) -> str:
    """Which commit of CMSIS-NN a checkout is."""
    command = ["git", "-C", str(source), "rev-parse", "--show-prefix", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # a folder within another checkout has a prefix
    prefix, _, found = done.stdout.partition("\n")
    return found.strip()[:12] if done.returncode == 0 and not prefix else "of an unknown commit"


def rewritten(text: str, graph: IntegerGraph) -> str:
    """The C that qjax wrote for a graph, with calls of CMSIS-NN in the layers that it has kernels for.

    Raises:
      ValueError: not one layer was replaced.
    """
    tables: list[str] = []
    count = 0
    for node in graph.ir.nodes:
        head = re.compile(rf"/\* {re.escape(node.name)}: {node.op}\b.*?\*/\nstatic void (\w+)\([^)]*\)\n\{{\n", re.S)
        found = head.search(text)
        if found is None:
            continue
        body = _body(_known(graph, node, found[1]), tables)
        if body is None:
            continue
        end = text.index("\n}\n", found.end() - 1)
        text = text[: found.end()] + "\n".join(f"    {line}" for line in body) + text[end:]
        count += 1
    if not count:
        raise ValueError("firmware: expected a graph with int8 convolutions or dense layers, got none.")
    place = text.index("static void")
    place = text.rindex("/*", 0, place)
    return f"{text[:place]}{_PRELUDE}\n{''.join(tables)}\n{text[place:]}"


def _known(graph: IntegerGraph, node: object, name: str) -> _Node:
    tensors = [graph.ir.tensors[tensor] for tensor in (*node.inputs, node.output)]  # pyright: ignore
    constants = {role: np.asarray(graph.ir.tensors[t].value) for role, t in node.constants.items()}  # pyright: ignore
    zero_points = [0 if t.quantization is None else int(np.asarray(t.quantization.zero_point)) for t in tensors]
    shapes = [tuple(1 if size is None else int(size) for size in t.shape) for t in tensors]
    dtypes = [t.dtype for t in tensors]
    return _Node(name, node.op, shapes, dtypes, zero_points, constants, node.attributes)  # pyright: ignore


def _body(node: _Node, tables: list[str]) -> list[str] | None:
    """The lines of a layer's function; None where it stays."""
    if set(node.dtypes) != {"int8"}:
        return None
    if node.op == "conv":
        layouts = tuple(node.attributes[key] for key in ("lhs_layout", "rhs_layout", "out_layout"))
        plain = layouts == ([0, 3, 1, 2], [3, 2, 0, 1], [0, 3, 1, 2])
        return _convolution(node, tables) if plain and node.attributes["groups"] in (1, node.shapes[0][-1]) else None
    if node.op == "dot" and len(node.shapes[0]) == 2 and node.attributes["rhs_contracting"] == [0]:
        return _dense(node, tables)
    if node.op == "add":
        return _addition(node)
    if node.op == "window_sum" and node.attributes["formula"] == "tflite_average_pool":
        return _pooling(node)
    return None


def _table(tables: list[str], name: str, kind: str, array: np.ndarray) -> str:
    tables.append(f"static const {kind} {name}[] = {{{', '.join(map(str, array.reshape(-1).tolist()))}}};\n")
    return name


def _tables(node: _Node, tables: list[str], kernel: np.ndarray) -> dict[str, str]:
    count = node.shapes[-1][-1]
    found = {"kernel": _table(tables, f"{node.name}_cmsis_kernel", "int8_t", kernel)}
    for role in ("bias", "multiplier", "shift"):
        vector = np.broadcast_to(node.values[role].reshape(-1), (count,))
        found[role] = _table(tables, f"{node.name}_cmsis_{role}", "int32_t", vector)
    return found


def _convolution(node: _Node, tables: list[str]) -> list[str]:
    kernel, (zero_x, zero_y) = node.values["kernel"], node.zero_points
    depthwise = int(node.attributes["groups"]) > 1  # pyright: ignore
    height, width, each, count = kernel.shape
    assert not depthwise or count == node.shapes[0][-1]
    laid = kernel.reshape(height, width, count) if depthwise else kernel.transpose(3, 0, 1, 2)
    names = _tables(node, tables, laid)
    (top, _), (left, _) = node.attributes["padding"]  # pyright: ignore
    kind, name = ("dw_conv", "depthwise_conv") if depthwise else ("conv", "convolve")
    multiple = "1, " if depthwise else ""
    sizes = f"1, {height}, {width}, {count}" if depthwise else f"{count}, {height}, {width}, {each}"
    size = f"arm_{name}_wrapper_s8_get_buffer_size(&params, &x, &filter, &y)"
    return [
        f"static const cmsis_nn_{kind}_params params = {{{-zero_x}, {zero_y}, {multiple}{node.pair('strides')},"
        f" {{{left}, {top}}}, {node.pair('rhs_dilation')}, {node.bounds}}};",
        *_quantized(names),
        f"static const cmsis_nn_dims x = {_dims(node.shapes[0])}, filter = {{{sizes}}}, y = {_dims(node.shapes[1])};",
        f"static const cmsis_nn_dims bias = {{1, 1, 1, {count}}};",
        "const cmsis_nn_context context = {scratch, sizeof scratch};",
        f"expect(arm_{name}_wrapper_s8(&context, &params, &quantized, &x, in, &filter, {names['kernel']}, &bias,"
        f" {names['bias']}, &y, out), {size});",
    ]


def _dense(node: _Node, tables: list[str]) -> list[str]:
    kernel, (zero_x, zero_y) = node.values["kernel"], node.zero_points
    summed, count = kernel.shape
    names = _tables(node, tables, kernel.T)
    return [
        f"static const cmsis_nn_fc_params params = {{{-zero_x}, 0, {zero_y}, {node.bounds}}};",
        *_quantized(names),
        f"static const cmsis_nn_dims x = {{1, 1, 1, {summed}}}, filter = {{{summed}, 1, 1, {count}}};",
        f"static const cmsis_nn_dims bias = {{1, 1, 1, {count}}}, y = {{1, 1, 1, {count}}};",
        # TensorFlow Lite Micro computes these sums once
        f"static int32_t sums[{count}];",
        "static int ready;",
        "const cmsis_nn_context context = {sums, sizeof sums};",
        "if (!ready) {",
        f"    expect(arm_vector_sum_s8(sums, {summed}, {count}, {names['kernel']}, {-zero_x}, 0, {names['bias']}), 0);",
        "    ready = 1;",
        "}",
        f"expect(arm_fully_connected_per_channel_s8(&context, &params, &quantized, &x, in, &filter, {names['kernel']},"
        f" &bias, {names['bias']}, &y, out), 0);",
    ]


def _addition(node: _Node) -> list[str]:
    values = {role: int(value) for role, value in node.values.items()}
    first, second = ([-node.zero_points[i], values[f"multiplier{i}"], values[f"shift{i}"]] for i in (0, 1))
    low, high = node.bounds.strip("{}").split(", ")
    numbers = [*first, *second, 20, "out", node.zero_points[2], values["multiplier"], values["shift"], low, high]
    size = int(np.prod(node.shapes[2]))
    return [f"expect(arm_elementwise_add_s8(in0, in1, {', '.join(map(str, numbers))}, {size}), 0);"]


def _pooling(node: _Node) -> list[str]:
    _, height, width, _ = node.attributes["window"]  # pyright: ignore
    _, *strides, _ = node.attributes["strides"]  # pyright: ignore
    _, (top, _), (left, _), _ = node.attributes["padding"]  # pyright: ignore
    x, y = node.shapes
    numbers = f"{{{{{strides[1]}, {strides[0]}}}, {{{left}, {top}}}, {node.bounds}}}"
    return [
        f"static const cmsis_nn_pool_params params = {numbers};",
        f"static const cmsis_nn_dims x = {_dims(x)}, filter = {{1, {height}, {width}, 1}}, y = {_dims(y)};",
        "const cmsis_nn_context context = {scratch, sizeof scratch};",
        f"expect(arm_avgpool_s8(&context, &params, &x, in, &filter, &y, out), arm_avgpool_s8_get_buffer_size({y[2]},"
        f" {y[3]}));",
    ]


def _quantized(names: Mapping[str, str]) -> list[str]:
    return [
        "static const cmsis_nn_per_channel_quant_params quantized =",
        f"    {{(int32_t *){names['multiplier']}, (int32_t *){names['shift']}}};",
    ]


def _dims(shape: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, shape)) + "}"
