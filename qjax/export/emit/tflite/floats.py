"""Float parts: FULLY_CONNECTED and CONV_2D with float activations, and the steps between such products.

Only steps whose bits are certain are written, see `export.ieee`; LiteRT's float operators compute these with the same
bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import targets
from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.products import surrounded
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.export.ieee import uncertain
from qjax.export.tflite_schema.file import Scales
from qjax.graph.ir import Node
from qjax.ops import float_programs
from qjax.support.errors import Unsupported

_BINARY = {"add": "ADD", "sub": "SUB", "mul": "MUL", "max": "MAXIMUM", "min": "MINIMUM"}
_UNARY = {"neg": "NEG", "abs": "ABS"}
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SAME = ("copy", "copy_p", "convert_element_type")
_ELSEWHERE = 'Use emit("onnx") or emit("c") for this graph'
_ROWS = (
    "Drop qjax.FLOAT. Of qjax.Dynamic, LiteRT has rows with 8-bit codes: use "
    'qjax.Dynamic(per="row", activations=qjax.QSpec(bits=8, symmetric=False)) and a target of LiteRT on x86, see '
    "docs/dynamic.md"
)

_WINDOWS = (
    'Use qjax.Dynamic(per="example", activations=qjax.QSpec(bits=8, symmetric=False)) and the target '
    "'tflite_xnnpack', see docs/dynamic.md"
)


@lowers("dynamic_dot")
def dynamic_dot(writer: Writer, node: Node) -> Value:
    """FULLY_CONNECTED of float rows with int8 or int4 weights."""
    attributes, formula = node.attributes, node.attributes["dynamic"]
    if formula == "onnx":
        raise Unsupported(
            f"a product whose rows are quantized at run time, which was not measured for {writer.graph.target!r}", _ROWS
        )
    x = writer.input(node)
    kernel = writer.graph.tensors[node.constants["kernel"]]
    assert kernel.quantization is not None
    codes, scale = np.asarray(kernel.value), np.asarray(kernel.quantization.scale)
    n, depth = codes.shape[0], math.prod(codes.shape[1:])
    rank = len(x.shape) - attributes["summed"]
    lead = x.shape[:rank]
    flat = writer.reshape(x, (math.prod(lead), depth), frozenset({0} if x.free else ()))
    if codes.ndim == 3:
        scales, packed = _blocks(scale, codes.shape[2]), True
    else:
        scales = Scales(scale)
        # For packed weights the optimised kernels quantize rows differently, and so does XNNPACK's fallback for odd
        # rows.
        known = (formula == "xnnpack" and depth % 2 == 0) or writer.graph.target == "tflite_reference"
        packed = known and writer.packs("FULLY_CONNECTED", kernel, depth)
    inputs: list[Value | int] = [flat, writer.weights("kernel", node, codes.reshape(n, depth), scales, _type(packed))]
    if "bias" in node.constants:
        bias = np.asarray(writer.graph.constant(node, "bias"))
        inputs.append(writer.weights("bias", node, bias, None, "float32"))
    y = writer.apply(
        "FULLY_CONNECTED",
        inputs,
        (flat.shape[0], n),
        flat.free,
        "float32",
        None,
        fusedActivationFunction="NONE",
        asymmetricQuantizeInputs=not attributes["symmetric"],
        keepNumDims=False,
    )
    return writer.reshape(y, (*lead, *attributes["features"]), frozenset(axis for axis in x.free if axis < rank))


@lowers("dynamic_conv")
def dynamic_conv(writer: Writer, node: Node) -> Value:
    """CONV_2D of floats with int8 weights."""
    attributes = node.attributes
    if attributes["dynamic"] != "xnnpack":
        raise Unsupported(
            f"a convolution that is quantized at run time, which was not measured for {writer.graph.target!r}", _WINDOWS
        )
    kernel = writer.graph.tensors[node.constants["kernel"]]
    assert kernel.quantization is not None
    codes, scale = np.asarray(kernel.value), np.asarray(kernel.quantization.scale)
    strides, dilation = list(attributes["strides"]), list(attributes["rhs_dilation"])
    window = codes.shape[1:3]
    # Zeros around floats change no range that contains 0, so the padding may be a separate operator.
    x, padding = surrounded(writer, writer.input(node), attributes["padding"], window, strides, dilation)
    inputs: list[Value | int] = [x, writer.weights("kernel", node, codes, Scales(scale), "int8")]
    # LiteRT's operator must have a bias. Zeros do not change the rounded product.
    if "bias" in node.constants:
        bias = np.asarray(writer.graph.constant(node, "bias"))
        inputs.append(writer.weights("bias", node, bias, None, "float32"))
    else:
        zeros = np.zeros(codes.shape[0], np.float32)
        inputs.append(writer.file.tensor(f"{node.name}/bias", zeros.shape, "float32", None, zeros))
    return writer.apply(
        "CONV_2D",
        inputs,
        (x.shape[0], *writer.shapes[node.output][1:]),
        x.free - {1, 2},
        "float32",
        None,
        fusedActivationFunction="NONE",
        padding=padding,
        strideH=strides[0],
        strideW=strides[1],
        dilationHFactor=dilation[0],
        dilationWFactor=dilation[1],
    )


def _type(packed: bool) -> str:
    return "int4" if packed else "int8"


def _blocks(scale: np.ndarray, size: int) -> Scales:
    """Scales of groups as the file stores them: float16, which must represent what XNNPACK then rounds to bfloat16."""
    kept = np.asarray(jnp.asarray(scale).astype(jnp.bfloat16).astype(jnp.float32))
    if not np.array_equal(kept.astype(np.float16).astype(np.float32), kept):
        worst = kept[kept.astype(np.float16).astype(np.float32) != kept][0]
        raise Unsupported(
            f"a scale of {worst:g}, which float16 does not represent exactly",
            "The file stores scales of groups as float16: leave out group_size, or train with larger weights",
        )
    return Scales(scale.astype(np.float16), block=size)


@lowers("island")
def island(writer: Writer, node: Node) -> Value:
    """DEQUANTIZE, float operators, QUANTIZE, if the part has them."""
    if any(name in _PRODUCTS for name, _, _ in node.attributes["program"]):
        raise Unsupported(f"a product in float, or one that LiteRT does not have under {writer.graph.target!r}", _ROWS)
    why = next(uncertain(writer.graph, node), None)
    if why is not None:
        raise Unsupported(
            f"a float part with {why}, so its bits are not certain",
            f"Quantize it: give qjax.Dynamic to the products alone, and drop qjax.FLOAT. {_ELSEWHERE} otherwise",
        )
    values = _Program(writer, node).run()
    target = targets.get(writer.graph.target)
    dtype, quantization = writer.grid(node)
    if quantization is None:
        if not isinstance(values, Value):
            raise Unsupported("a float part that is constant", "Return it as a constant of the model")
        return values
    if target.quantize != "reciprocal":
        raise Unsupported(
            "a float part whose result becomes codes, which this runtime's QUANTIZE rounds differently from the graph",
            "Use the target 'tflite_xnnpack', or return the float result",
        )
    assert isinstance(values, Value)
    result = writer.apply("QUANTIZE", [values], values.shape, values.free, dtype, quantization)
    return writer.bounded(node, result, None)


class _Program:
    """The steps of an island, one after the other. Constants remain arrays, with size 1 where they repeat."""

    def __init__(self, writer: Writer, node: Node) -> None:
        self.writer, self.node = writer, node
        self.values: list[Any] = [self._input(index) for index in range(len(node.inputs))]

    def run(self) -> Any:
        """Write the steps; returns the result, a value of the file or an array."""
        attributes = self.node.attributes
        batch = 1
        if attributes["batch"] is not None:
            source, axis, multiple = attributes["batch"]
            batch = self.values[source].shape[axis] // multiple
        for name, operands, params in attributes["program"]:
            given = [self._operand(item) for item in operands]
            sizes = dict(params)
            if not any(isinstance(x, Value) for x in given) and name != "broadcast_in_dim":
                fixed = {key: float_programs.sized(value, batch) for key, value in params}
                self.values.append(np.asarray(float_programs.STEPS[name][1](fixed, *given)))
                continue
            self.values.append(self._step(name, given, sizes, batch))
        (result,) = attributes["results"]
        return self.values[result]

    def _input(self, index: int) -> Value:
        x = self.writer.input(self.node, index)
        if x.quantization is None:
            if x.dtype != "float32":
                raise Unsupported(f"a float part that reads {x.dtype}", _ELSEWHERE)
            return x
        target = targets.get(self.writer.graph.target)
        if target.dequantize != "product" and np.any(np.asarray(x.quantization.zero_point)):
            raise Unsupported(
                "codes with a zero point that become floats, which this runtime computes differently from the graph",
                "Use the target 'tflite_xnnpack', or a symmetric quantizer in front of the float part",
            )
        return self.writer.apply("DEQUANTIZE", [x], x.shape, x.free, "float32", None)

    def _operand(self, item: Any) -> Any:
        kind, first, *rest = item
        if kind == "value":
            return self.values[first]
        if kind == "constant":
            return np.asarray(self.writer.graph.constant(self.node, first)).astype(rest[0])
        return np.asarray(first, np.dtype(jnp.dtype(rest[0])))

    def _step(self, name: str, given: list[Any], sizes: dict[str, Any], batch: int) -> Any:
        writer = self.writer
        if name in _SAME:
            if sizes.get("new_dtype", "float32") != "float32":
                raise Unsupported(f"a float part that casts to {sizes['new_dtype']}", _ELSEWHERE)
            return given[0]
        if name in _BINARY:
            return self._binary(_BINARY[name], *given)
        if name in _UNARY:
            return writer.apply(_UNARY[name], given, given[0].shape, given[0].free, "float32", None)
        if name in ("reshape", "squeeze", "expand_dims"):
            shape = self._shape(name, given[0], sizes, batch)
            free = self._free(given[0], shape, sizes.get("new_sizes"))
            return writer.reshape(given[0], shape, free)
        if name == "transpose":
            return writer.transpose(given[0], sizes["permutation"])
        if name == "broadcast_in_dim":
            return self._repeated(given[0], sizes, batch)
        raise Unsupported(f"a float part with the step {name!r}", f"Quantize it, or return its input. {_ELSEWHERE}")

    def _binary(self, operator: str, *given: Any) -> Value:
        held = [x if isinstance(x, Value) else self.writer.constant(x, "float32") for x in given]
        shape = np.broadcast_shapes(*(x.shape for x in held))
        free = frozenset(axis + len(shape) - len(x.shape) for x in held for axis in x.free)
        return self.writer.apply(operator, held, shape, free, "float32", None)

    def _shape(self, name: str, x: Value, sizes: dict[str, Any], batch: int) -> tuple[int, ...]:
        fixed = {key: float_programs.sized(value, batch) for key, value in sizes.items()}
        given = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return tuple(jax.eval_shape(lambda v: float_programs.STEPS[name][1](fixed, v), given).shape)

    def _free(self, x: Value, shape: tuple[int, ...], stated: Any) -> frozenset[int]:
        if not x.free:
            return frozenset()
        if stated is not None:
            return frozenset(axis for axis, size in enumerate(stated) if isinstance(size, (list, tuple)))
        kept = [axis for axis, size in enumerate(x.shape) if size != 1 or axis in x.free]
        places = iter(axis for axis, size in enumerate(shape) if size != 1 or len(kept) == len(shape))
        return frozenset(place for axis, place in zip(kept, places, strict=False) if axis in x.free)

    def _repeated(self, x: Any, sizes: dict[str, Any], batch: int) -> Any:
        shape = [int(n) for n in float_programs.sized(sizes["shape"], batch)]
        narrow = [1] * len(shape)
        for axis, place in enumerate(sizes["broadcast_dimensions"]):
            narrow[place] = x.shape[axis]
        if not isinstance(x, Value):
            return x.reshape(narrow)
        if narrow != shape:
            raise Unsupported("a float part that repeats a tensor", f"Quantize it. {_ELSEWHERE}")
        free = frozenset(sizes["broadcast_dimensions"][axis] for axis in x.free)
        return self.writer.reshape(x, shape, free)
