"""ADD, SUB, MUL, QUANTIZE, DEQUANTIZE, MEAN and the pools."""

import dataclasses
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.chains import Source
from qjax.contrib.importers.tflite.clamps import clamped, clamps
from qjax.contrib.importers.tflite.float_chains import hold
from qjax.contrib.importers.tflite.products import strides_of, windows
from qjax.contrib.importers.tflite.values import CODES, FLOATS, WHOLE_NUMBERS, Codes, axes_of, bad, grid_of
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.ops.windows import inside, pool, product_of_axes
from qjax.support.errors import Unsupported

_LARGEST = 2**30 - 1
"""The highest number of 32-bit codes."""


@reads("ADD", "SUB", "MUL")
def binary(walk: Walk, operator: Operator) -> None:
    """Two tensors of codes, each on its grid; one may be a constant, and sizes of 1 are broadcast."""
    first, second = (walk.codes_of(operator, place) for place in (0, 1))
    output = walk.output(operator)
    if not first.dtype == second.dtype == output.dtype:
        raise Unsupported(
            f"codes of {first.dtype} and {second.dtype} become {output.dtype}",
            "Use the same number of bits for inputs and output",
        )
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        raise bad(operator, f"shapes {first.shape} and {second.shape}") from None
    name, grid = walk.result(operator, shape)
    first, second = (walk.ranked(x, len(shape), name) for x in (first, second))
    constants = clamps(walk, operator, name, grid)
    if operator.name == "MUL":
        walk.node("multiply", [first, second], name, {}, constants)
        return
    powers_of_two = operator.options["powers_of_two"]
    if powers_of_two and first.dtype == "int16":
        steps = [x.quantization.scale for x in (first, second)] + [grid.scale]
        if all(np.frexp(np.float32(step))[0] == 0.5 for step in steps):
            raise Unsupported(
                "its scales are powers of two, for which old kernels shift instead of multiplying",
                "Convert the model again with pot_scale_int16 = false",
            )
    walk.node("add", [first, second], name, {"subtract": operator.name == "SUB"}, constants)


@reads("SQUARED_DIFFERENCE")
def squared_difference(walk: Walk, operator: Operator) -> None:
    """The square of a difference, as in a variance."""
    first, second = (walk.codes_of(operator, place) for place in (0, 1))
    if not first.dtype == second.dtype == walk.output(operator).dtype == "int8":
        raise Unsupported(f"codes of {first.dtype} and {second.dtype}", "LiteRT's kernel of codes has int8 only")
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        raise bad(operator, f"shapes {first.shape} and {second.shape}") from None
    name, _ = walk.result(operator, shape)
    walk.node("squared_difference", [walk.ranked(x, len(shape), name) for x in (first, second)], name)


@reads("QUANTIZE")
def quantize(walk: Walk, operator: Operator) -> None:
    """Codes of the model's float input, or codes requantized to another grid."""
    source = walk.operand(operator, 0)
    if source.index in walk.floats:
        output = walk.output(operator)
        if output.dtype not in CODES:
            raise Unsupported(f"it quantizes floats to {output.dtype}", FLOATS)
        walk.quantized_input(operator, source)
        return
    if source.dtype in WHOLE_NUMBERS:
        raise Unsupported(
            f"it makes codes of {source.dtype}, which qjax reads as indices; codes are {', '.join(CODES)}",
            "Leave it out of the model, and compute it outside",
        )
    x = walk.codes_of(operator, 0)
    name = _of_32_bits(walk, operator, x) or walk.result(operator, x.shape)[0]
    walk.node("rescale", [x], name)


def _of_32_bits(walk: Walk, operator: Operator, x: Codes) -> str | None:
    """The model's output as int32 with a scale; None if the output is codes."""
    stated = walk.output(operator)
    if stated.dtype != "int32" or not stated.scale.size:
        return None
    grid, q = grid_of(stated), x.quantization
    most = max(q.qmax - x.zero_point, x.zero_point - q.qmin) * float(q.scale) / float(grid.scale)
    if int(grid.zero_point) or most >= _LARGEST or any(stated.index in other.inputs for other in walk.model.operators):
        raise Unsupported(
            f"it makes int32 of {x.dtype}",
            "qjax reads int32 with a scale as the model's output only, with the zero point 0 and numbers within 2^30",
        )
    # requantization is known to be exact for codes within 2^30, and none exceeds that
    return walk.add(stated, x.shape, dataclasses.replace(grid, qmin=-_LARGEST, qmax=_LARGEST))


@reads("DEQUANTIZE")
def dequantize(walk: Walk, operator: Operator) -> None:
    """The end of the integer part, or floats between codes."""
    x, output = walk.codes_of(operator, 0), walk.output(operator)
    walk.reals[output.index] = x
    hold(walk, output, x, Source(x.dtype, x.quantization, x.quantization.qmin, x.quantization.qmax))


@reads("MEAN")
def mean(walk: Walk, operator: Operator) -> None:
    """A sum whose division belongs to its rounding."""
    x = walk.codes_of(operator, 0)
    axes = axes_of(walk.numbers(operator, 1), len(x.shape), operator)
    sizes = [x.shape[axis] for axis in axes]
    count = int(np.prod(sizes, dtype=np.int64))
    if not axes or not 1 <= count < 2**31:
        raise Unsupported(f"a mean over {axes} of {x.shape}", "Take the mean over axes with elements")
    rest = [size for axis, size in enumerate(x.shape) if axis not in axes]
    keep = bool(operator.options["keep_dims"])
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)] if keep else rest
    name, _ = walk.result(operator, shape)
    if walk.output(operator).dtype != x.dtype:
        raise Unsupported(
            f"codes of {x.dtype} become {walk.output(operator).dtype}",
            "Use the same number of bits for input and output",
        )
    constants = {"count": walk.constant(f"{name}/count", np.asarray(count, np.int32))}
    if not keep and len(x.shape) == 4 and axes == [1, 2]:
        # The optimised kernels have a separate loop for height and width if the axes are kept. Here they are dropped,
        # so merge them.
        x = walk.reshaped(x, (x.shape[0], x.shape[1] * x.shape[2], x.shape[3]), f"{name}/input")
        axes = [1]
    if not keep:
        walk.node("sum", [x], name, {"axes": axes}, constants)
        return
    inner = walk.inner(name, rest)
    walk.node("sum", [x], inner.name, {"axes": axes}, constants)
    walk.node("reshape", [inner], name, {"shape": shape})


@reads("AVERAGE_POOL_2D")
def average_pool(walk: Walk, operator: Operator) -> None:
    """A sum over windows, and how many elements that are no padding each window has."""
    x = walk.codes_of(operator, 0)
    attributes, shape, padding, window, strides = _pool(operator, x.shape)
    name, grid = walk.result(operator, shape)
    walk.same_grid(operator, x, grid)
    if window[0] * window[1] >= 2**31:
        raise Unsupported(f"a window of {window}", "Use a window that fits the image")
    count = np.asarray(window[0] * window[1], np.int32)
    if any(map(any, padding)):
        sides = zip(x.shape[1:3], shape[1:3], window, strides, padding, strict=True)
        counts = product_of_axes(
            inside(size, places, window=n, stride=stride, low=low) for size, places, n, stride, (low, _) in sides
        )
        count = counts[:, :, None].astype(np.int32)
        if (count == count.reshape(-1)[0]).all():
            count = count.reshape(-1)[0].reshape(())
    constants = {"count": walk.constant(f"{name}/count", count)} | clamps(walk, operator, name, grid)
    walk.node("window_sum", [x], name, attributes, constants)


@reads("MAX_POOL_2D")
def max_pool(walk: Walk, operator: Operator) -> None:
    """The greatest code of each window."""
    x = walk.codes_of(operator, 0)
    attributes, shape, _, _, _ = _pool(operator, x.shape)
    name, grid = walk.result(operator, shape)
    walk.same_grid(operator, x, grid)
    constants = clamps(walk, operator, name, grid)
    if not constants:
        walk.node("max_pool", [x], name, attributes)
        return
    inner = walk.between(f"{name}/pool", shape, x)
    walk.node("max_pool", [x], inner.name, attributes)
    clamped(walk, operator, inner, constants)


def _pool(
    operator: Operator, shape: tuple[int, ...]
) -> tuple[dict[str, Any], list[int], list[list[int]], list[int], list[int]]:
    """The attributes of a pool and the shape of its result; padding, window and strides of height and width."""
    if len(shape) != 4:
        raise bad(operator, f"an input of {shape}")
    window = [operator.options["filter_h"], operator.options["filter_w"]]
    if min(window) < 1:
        raise bad(operator, f"a window of {window}")
    strides = strides_of(operator)
    padding, sizes = windows(operator, shape[1:3], window, strides, [1, 1])
    attributes = pool([1, *window, 1], [1, *strides, 1], [[0, 0], *padding, [0, 0]])
    return attributes, [shape[0], *sizes, shape[3]], padding, window, strides
