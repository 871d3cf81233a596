"""ConvTranspose, which ONNX Runtime computes in float even on codes, and Softmax, which has a kernel on codes."""

import numpy as np

from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.moves import axis_of, first
from qjax.contrib.importers.onnx.values import Known, Pending, Value, Weight
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.export.read_errors import ReadError
from qjax.numerics.positive_sums import MOST_TERMS
from qjax.numerics.qlinear_softmax import overflows
from qjax.ops.windows import convolution, with_kernel
from qjax.support.errors import Unsupported

Inputs = list[Value | None]


@handles("ConvTranspose")
def _conv_transpose(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    """Read it as a convolution of the input with zeros between its elements, by the reversed kernel."""
    if not 2 <= len(inputs) <= 3 or inputs[0] is None or inputs[1] is None:
        raise ReadError(f"{node.title}: expected two or three inputs.")
    x, w = walk.real(inputs[0]), inputs[1]
    if not isinstance(w, Weight):
        raise Unsupported("its kernel is not a constant of codes behind DequantizeLinear")
    bias = inputs[2] if len(inputs) == 3 else None
    if bias is not None and not isinstance(bias, (Known, Weight)):
        raise Unsupported("its bias is not a constant")
    shape, rank, groups = walk.shape(x), w.codes.ndim, node.get("group", 1)
    if rank < 3 or len(shape) != rank or groups < 1 or shape[1] != w.codes.shape[0] or shape[1] % groups:
        raise ReadError(f"{node.title}: a kernel of {list(w.codes.shape)} does not fit an input of {list(shape)}.")
    if w.axis not in (None, 1) or (w.axis == 1 and groups > 1):
        raise Unsupported("its kernel has scales along another axis than its output channels")
    count = rank - 2
    strides, dilations = (node.ints(key) or [1] * count for key in ("strides", "dilations"))
    window = list(w.codes.shape[2:])
    extra = node.ints("output_padding") or [0] * count
    pads = _pads(node, shape, strides, dilations, window, extra)
    if any(len(row) != count for row in (strides, dilations, extra)) or len(pads) != 2 * count:
        raise ReadError(f"{node.title}: its window does not fit {count} axes.")
    if min(*strides, *dilations) < 1 or min(pads) < 0 or min(extra) < 0 or max(*strides, *dilations, *pads) > 2**16:
        raise ReadError(f"{node.title}: expected strides and dilations from 1, and pads from 0.")
    spans = [d * (k - 1) for d, k in zip(dilations, window, strict=True)]
    padding = [[spans[i] - pads[i], spans[i] - pads[i + count] + extra[i]] for i in range(count)]
    sizes = [
        (n - 1) * s + 1 + sum(pair) - span for n, s, pair, span in zip(shape[2:], strides, padding, spans, strict=True)
    ]
    if any(size < 1 for size in sizes):
        raise ReadError(f"{node.title}: nothing is left of its result: {sizes}.")
    # (in, out of a group, ...) -> (out, in of a group, ...), with the kernel reversed along its window.
    each, features = w.codes.shape[0] // groups, w.codes.shape[1]
    turned = w.codes[(slice(None), slice(None), *(slice(None, None, -1) for _ in window))]
    kernel = turned.reshape(groups, each, features, *window).swapaxes(1, 2).reshape(groups * features, each, *window)
    weight = Weight(
        w.name, np.ascontiguousarray(kernel), w.stored, w.scale, w.zero_point, None if w.axis is None else 0
    )
    axes = list(range(rank))
    layouts = (x.permutation or axes, axes, axes)
    dilation = {"lhs_dilation": strides, "rhs_dilation": dilations}
    attributes = with_kernel(convolution([1] * count, padding, **dilation, groups=groups, layouts=layouts))
    result = (shape[0], groups * features, *sizes)
    why = ("ConvTranspose has no kernel of codes",)
    return [Pending("conv", node.outputs[0], result, (x.tensor,), attributes, weight, bias, floats=why)]


def _pads(
    node: OnnxNode,
    shape: tuple[int, ...],
    strides: list[int],
    dilations: list[int],
    window: list[int],
    extra: list[int],
) -> list[int]:
    """Padding as the specification of ConvTranspose derives it from the size of the result, or as it is stated."""
    count = len(window)
    wanted, auto = node.ints("output_shape"), node.get("auto_pad", "NOTSET", str)
    if wanted is None and auto in ("NOTSET", "VALID"):
        return node.ints("pads") or [0] * (2 * count)
    if wanted is None:
        wanted = [n * s for n, s in zip(shape[2:], strides, strict=False)]
    lows: list[int] = []
    highs: list[int] = []
    for i, size in enumerate(wanted[-count:]):
        total = strides[i] * (shape[2 + i] - 1) + extra[i] + dilations[i] * (window[i] - 1) + 1 - size
        less, more = max(total, 0) // 2, max(total, 0) - max(total, 0) // 2
        lows.append(less if auto == "SAME_UPPER" else more)
        highs.append(more if auto == "SAME_UPPER" else less)
    return [*lows, *highs]


@handles("Softmax")
def _softmax(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = walk.plain(walk.real(first(node, inputs)))
    shape = walk.draft.shape(x)
    newest = node.get("opset", walk.model.opset) >= 13
    axis = axis_of(node, node.get("axis", -1 if newest else 1), len(shape))
    axes = [axis] if newest else list(range(axis, len(shape)))
    why = [] if axes == [len(shape) - 1] else [f"it is over the axes {axes} of {len(shape)}, not over the last alone"]
    if shape[axes[-1]] >= MOST_TERMS:
        why.append(f"rows have {shape[axes[-1]]} codes, the formula of QLinearSoftmax is for less than {MOST_TERMS}")
    value = Pending("softmax", node.outputs[0], shape, (x,), {"axes": axes}, floats=tuple(why))
    return [value.replace(write=_write_softmax, fails=_overflows)]


def _overflows(walk: Walk, value: Pending, grid: Grid) -> list[str]:
    """Why QLinearSoftmax has no result."""
    scales = [np.float32(each.quantization.scale) for each in (walk.draft.grid(value.inputs[0]), grid)]
    length = value.shape[value.attributes["axes"][-1]]
    if not length or not overflows(scales[0], length, scales[1]):
        return []
    return [f"QLinearSoftmax overflows in rows of {length} with the output scale {scales[1]:.3g}"]


def _write_softmax(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    walk.draft.tensor(name, value.shape, grid)
    return walk.draft.node("softmax", value.inputs, name, dict(value.attributes), clamps)
