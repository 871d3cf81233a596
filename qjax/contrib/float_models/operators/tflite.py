"""The operators of TFLite, most of them by ONNX's functions. Options are attributes under the names of `tflite_schema`.

https://www.tensorflow.org/mlir/tfl_ops
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import OPERATORS, Call, Node, operator
from qjax.contrib.float_models.operators.moves import ints, pad_with, scaled_for_batch
from qjax.contrib.float_models.operators.products import matmul_of
from qjax.contrib.float_models.operators.recurrent import lstm
from qjax.contrib.float_models.operators.windows import add_bias
from qjax.export.tflite_schema.enums import ACTIVATIONS, PADDINGS, TENSOR_TYPES
from qjax.layers.nnx_layers import look_up_rows
from qjax.ops import products

PREFIX = "tflite."
_VERSION = 22
"""The operator set whose form of an ONNX operator is called here."""


def tflite(*names: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under TFLite's names."""
    return operator(*(f"{PREFIX}{name}" for name in names), **facts)


def onnx(call: Call, op: str, *inputs: Any, **attributes: Any) -> Any:
    """The result of an ONNX operator."""
    node = Node(op, call.node.name, call.node.inputs, call.node.outputs, attributes, _VERSION)
    return OPERATORS[op].function(Call(node, call.xp, exported=call.exported), *inputs)


def activated(call: Call, y: Any) -> Any:
    """The result under the operator's fused activation."""
    name = ACTIVATIONS[call.get("activation", 0)]
    if name == "NONE":
        return y
    if name == "SIGN_BIT":
        raise call.refuse("the activation SIGN_BIT", "Leave it out of the model")
    return {"RELU": _relu, "RELU_N1_TO_1": _relu_n1, "RELU6": _relu6, "TANH": jnp.tanh}[name](y)


def _relu(x: Any) -> Any:
    return jax.nn.relu(x)


def _relu6(x: Any) -> Any:
    return jnp.clip(x, jnp.asarray(0, x.dtype), jnp.asarray(6, x.dtype))


def _relu_n1(x: Any) -> Any:
    return jnp.clip(x, jnp.asarray(-1, x.dtype), jnp.asarray(1, x.dtype))


def as_float(bits: int) -> float:
    """A float32 option, which the parser returns as its bits."""
    return float(np.uint32(bits).view(np.float32))


# ---------------------------------------------------------------------- operators that ONNX has under another name


def _same(name: str, op: str, **attributes: Any) -> None:
    own = OPERATORS[op]

    @operator(f"{PREFIX}{name}", static=own.static, in_numpy=own.in_numpy)
    def apply(call: Call, *inputs: Any) -> Any:
        return onnx(call, op, *inputs, **attributes)


for _name, _op in {
    "ABS": "Abs",
    "ADD_N": "Sum",
    "BROADCAST_TO": "Expand",
    "CEIL": "Ceil",
    "COS": "Cos",
    "ELU": "Elu",
    "EQUAL": "Equal",
    "EXP": "Exp",
    "FLOOR": "Floor",
    "GATHER_ND": "GatherND",
    "GREATER": "Greater",
    "GREATER_EQUAL": "GreaterOrEqual",
    "LESS": "Less",
    "LESS_EQUAL": "LessOrEqual",
    "LOG": "Log",
    "LOGICAL_AND": "And",
    "LOGICAL_NOT": "Not",
    "LOGICAL_OR": "Or",
    "LOGISTIC": "Sigmoid",
    "LOG_SOFTMAX": "LogSoftmax",
    "MAXIMUM": "Max",
    "MINIMUM": "Min",
    "NEG": "Neg",
    "POW": "Pow",
    "PRELU": "PRelu",
    "RANGE": "Range",
    "RELU": "Relu",
    "ROUND": "Round",
    "SELECT_V2": "Where",
    "SHAPE": "Shape",
    "SIGN": "Sign",
    "SIN": "Sin",
    "SQRT": "Sqrt",
    "TANH": "Tanh",
    "TILE": "Tile",
    "TOPK_V2": "TopK",
}.items():
    _same(_name, _op)
_same("FLOOR_MOD", "Mod", fmod=0)


def _arithmetic(name: str, op: str) -> None:
    @operator(f"{PREFIX}{name}", in_numpy=True)
    def apply(call: Call, a: Any, b: Any) -> Any:
        y = onnx(call, op, a, b)
        return activated(call, y) if call.get("activation", 0) else y


for _name, _op in {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div"}.items():
    _arithmetic(_name, _op)


def _function(name: str, function: Callable[[Any], Any]) -> None:
    @operator(f"{PREFIX}{name}")
    def apply(call: Call, x: Any) -> Any:
        return function(x)


_function("RELU6", _relu6)
_function("RELU_N1_TO_1", _relu_n1)
_function("RELU_0_TO_1", lambda x: jnp.clip(x, jnp.asarray(0, x.dtype), jnp.asarray(1, x.dtype)))
_function("RSQRT", lax.rsqrt)
_function("SQUARE", lambda x: x * x)
_function("ZEROS_LIKE", jnp.zeros_like)
_function("HARD_SWISH", lambda x: x * _relu6(x + 3) / 6)


@tflite("DEQUANTIZE", in_numpy=True)
def _dequantize(call: Call, x: Any) -> Any:
    """float16 as float32."""
    return x.astype(np.float32)


@tflite("SELECT", in_numpy=True)
def _select(call: Call, condition: Any, a: Any, b: Any) -> Any:
    """A condition with one axis chooses whole rows."""
    if condition.ndim == 1 and a.ndim > 1:
        condition = call.xp.reshape(condition, (-1, *([1] * (a.ndim - 1))))
    return onnx(call, "Where", condition, a, b)


@tflite("SQUARED_DIFFERENCE")
def _squared_difference(call: Call, a: Any, b: Any) -> Any:
    a, b = call.ranked(a, b)
    return lax.integer_pow(a - b, 2)


@tflite("NOT_EQUAL", in_numpy=True)
def _not_equal(call: Call, a: Any, b: Any) -> Any:
    return call.xp.not_equal(*call.ranked(a, b))


@tflite("FLOOR_DIV", in_numpy=True)
def _floor_div(call: Call, a: Any, b: Any) -> Any:
    return call.xp.floor_divide(*call.ranked(a, b))


@tflite("ATAN2")
def _atan2(call: Call, a: Any, b: Any) -> Any:
    return jnp.arctan2(*call.ranked(a, b))


@tflite("LEAKY_RELU")
def _leaky_relu(call: Call, x: Any) -> Any:
    return onnx(call, "LeakyRelu", x, alpha=as_float(call.get("alpha", 0)))


@tflite("GELU")
def _gelu(call: Call, x: Any) -> Any:
    return jax.nn.gelu(x, approximate=bool(call.get("approximate", 0)))


@tflite("CAST", in_numpy=True)
def _cast(call: Call, x: Any) -> Any:
    from qjax.contrib.float_models.operators.elementwise import cast_to

    return cast_to(call, x, TENSOR_TYPES[call.get("to", 0)])


# ---------------------------------------------------------------------- products


def _padding(call: Call) -> str:
    return PADDINGS[call.get("padding", 0)]


def _strides(call: Call) -> tuple[int, int]:
    return call.get("stride_h", 0), call.get("stride_w", 0)


@tflite("CONV_2D", weights=(1, 2))
def _conv_2d(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    y = products.convolution(
        x,
        w,
        x.dtype,
        window_strides=_strides(call),
        padding=_padding(call),
        rhs_dilation=(call.get("dilation_h", 1), call.get("dilation_w", 1)),
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
        feature_group_count=x.shape[3] // w.shape[3],
    )
    return activated(call, add_bias(call, y, bias))


@tflite("DEPTHWISE_CONV_2D", weights=(1, 2))
def _depthwise_conv_2d(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    y = products.convolution(
        x,
        w,
        x.dtype,
        window_strides=_strides(call),
        padding=_padding(call),
        rhs_dilation=(call.get("dilation_h", 1), call.get("dilation_w", 1)),
        dimension_numbers=("NHWC", "IHWO", "NHWC"),
        feature_group_count=x.shape[3],
    )
    return activated(call, add_bias(call, y, bias))


@tflite("TRANSPOSE_CONV", static=(0,), weights=(1, 3))
def _transpose_conv(call: Call, shape: Any, w: Any, x: Any, bias: Any = None) -> Any:
    """The gradient of a convolution whose input has `shape`; w: (out, height, width, in)."""
    strides, sizes, pads = _strides(call), ints(shape)[1:3], []
    for size, n, k, s in zip(sizes, x.shape[1:3], w.shape[1:3], strides, strict=True):
        total = max((n - 1) * s + k - size, 0) if _padding(call) == "SAME" else 0
        before = total // 2
        pads.append((k - 1 - before, size - ((n - 1) * s + 1) + before))
    y = products.convolution(
        x,
        lax.rev(w, (1, 2)),
        x.dtype,
        window_strides=(1, 1),
        padding=pads,
        lhs_dilation=strides,
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
    )
    return activated(call, add_bias(call, y, bias))


@tflite("FULLY_CONNECTED", weights=(1, 2))
def _fully_connected(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    """w: (out, in). Without keep_dims the input becomes rows of `in` elements."""
    if not call.get("keep_dims", 0) or x.shape[-1] != w.shape[1]:
        x = jnp.reshape(x, (-1, w.shape[1]))
    y = products.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), x.dtype)
    return activated(call, add_bias(call, y, bias))


@tflite("BATCH_MATMUL", weights=(1,))
def _batch_matmul(call: Call, a: Any, b: Any) -> Any:
    a = jnp.swapaxes(a, -1, -2) if call.get("adj_x", 0) else a
    if call.get("adj_y", 0):
        if b.ndim == 2:
            return products.dot_general(a, b, (((a.ndim - 1,), (1,)), ((), ())), a.dtype)
        b = jnp.swapaxes(b, -1, -2)
    return matmul_of(a, b)


@tflite("EMBEDDING_LOOKUP", weights=(1,))
def _embedding_lookup(call: Call, indices: Any, table: Any) -> Any:
    if isinstance(indices, np.ndarray):
        return onnx(call, "Gather", table, indices)
    return look_up_rows(indices, table) if table.ndim == 2 else jnp.take(table, indices, 0)


# ---------------------------------------------------------------------- pooling and norms


def _pool(name: str, op: str) -> None:
    @operator(f"{PREFIX}{name}")
    def apply(call: Call, x: Any) -> Any:
        window = {
            "kernel_shape": [call.get("filter_h", 0), call.get("filter_w", 0)],
            "strides": list(_strides(call)),
            "auto_pad": "SAME_UPPER" if _padding(call) == "SAME" else "VALID",
        }
        return activated(call, onnx(call, op, x, **window))


_pool("AVERAGE_POOL_2D", "AveragePool")
_pool("MAX_POOL_2D", "MaxPool")


@tflite("L2_NORMALIZATION")
def _l2_normalization(call: Call, x: Any) -> Any:
    length = jnp.sum(x * x, -1, keepdims=True)
    return activated(call, x * lax.rsqrt(jnp.maximum(length, call.like(1e-6, x))))


@tflite("LOCAL_RESPONSE_NORMALIZATION")
def _local_response_normalization(call: Call, x: Any) -> Any:
    radius = call.get("radius", 0)
    alpha, beta, bias = (as_float(call.get(key, 0)) for key in ("alpha", "beta", "bias"))
    size = 2 * radius + 1
    return onnx(call, "LRN", x, size=size, alpha=alpha * size, beta=beta, bias=bias)


@tflite("SOFTMAX")
def _softmax(call: Call, x: Any) -> Any:
    beta = as_float(call.get("beta", 0))
    return jax.nn.softmax(x if beta == 1.0 else x * call.like(beta, x), -1)


def _reduction(name: str, op: str) -> None:
    @operator(f"{PREFIX}{name}", static=(1,), in_numpy=True)
    def apply(call: Call, x: Any, axes: Any) -> Any:
        axes = np.reshape(axes, -1)
        return onnx(call, op, x, axes, keepdims=int(call.get("keep_dims", 0))) if axes.size else x


for _name, _op in {
    "MEAN": "ReduceMean",
    "SUM": "ReduceSum",
    "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin",
    "REDUCE_PROD": "ReduceProd",
    "REDUCE_ANY": "ReduceMax",
    "REDUCE_ALL": "ReduceMin",
}.items():
    _reduction(_name, _op)


def _argument(name: str, op: str) -> None:
    @operator(f"{PREFIX}{name}", static=(1,), in_numpy=True)
    def apply(call: Call, x: Any, axis: Any) -> Any:
        return onnx(call, op, x, axis=int(np.reshape(axis, ())), keepdims=0)


_argument("ARG_MAX", "ArgMax")
_argument("ARG_MIN", "ArgMin")


@tflite("CUMSUM", static=(1,))
def _cumsum(call: Call, x: Any, axis: Any) -> Any:
    return onnx(call, "CumSum", x, axis, exclusive=int(call.get("exclusive", 0)), reverse=int(call.get("reverse", 0)))


# ---------------------------------------------------------------------- moves


@tflite("RESHAPE", static=(1,), in_numpy=True)
def _reshape(call: Call, x: Any, shape: Any = None) -> Any:
    wanted = ints(call.get("shape") or [] if shape is None else shape)
    return call.xp.reshape(x, scaled_for_batch(call, x.shape, wanted))


@tflite("SQUEEZE", in_numpy=True)
def _squeeze(call: Call, x: Any) -> Any:
    axes = call.get("axes")
    places = axes or [i for i, n in enumerate(x.shape) if n == 1]
    # The batch of a file is often 1, but that is no axis to drop.
    kept = {0} if not axes and call.exported and call.exported[0][0] != x.shape[0] else set()
    return call.xp.squeeze(x, tuple(axis % x.ndim for axis in places if axis not in kept))


@tflite("EXPAND_DIMS", static=(1,), in_numpy=True)
def _expand_dims(call: Call, x: Any, axis: Any) -> Any:
    return call.xp.expand_dims(x, int(np.reshape(axis, ())))


@tflite("TRANSPOSE", static=(1,), in_numpy=True)
def _transpose(call: Call, x: Any, order: Any) -> Any:
    return call.xp.transpose(x, ints(order))


@tflite("PAD", "PADV2", static=(1, 2), in_numpy=True)
def _pad(call: Call, x: Any, widths: Any, value: Any = None) -> Any:
    filler = np.zeros((), x.dtype) if value is None else np.reshape(value, ()).astype(x.dtype)
    return pad_with(call, x, [(int(a), int(b)) for a, b in widths], filler)


@tflite("MIRROR_PAD", static=(1,), in_numpy=True)
def _mirror_pad(call: Call, x: Any, widths: Any) -> Any:
    mode = "symmetric" if call.get("mode", 0) else "reflect"
    return call.xp.pad(x, [(int(a), int(b)) for a, b in widths], mode=mode)


@tflite("CONCATENATION", in_numpy=True)
def _concatenation(call: Call, *arrays: Any) -> Any:
    y = onnx(call, "Concat", *arrays, axis=call.get("axis", 0))
    return activated(call, y) if call.get("activation", 0) else y


@tflite("PACK", in_numpy=True)
def _pack(call: Call, *arrays: Any) -> Any:
    return call.xp.stack(arrays, call.get("axis", 0))


@tflite("UNPACK", in_numpy=True)
def _unpack(call: Call, x: Any) -> Any:
    axis = call.get("axis", 0)
    return tuple(call.xp.squeeze(part, axis) for part in call.xp.split(x, x.shape[axis], axis))


@tflite("SPLIT", static=(0,), in_numpy=True)
def _split(call: Call, axis: Any, x: Any) -> Any:
    return tuple(call.xp.split(x, call.get("parts", 1), int(np.reshape(axis, ()))))


@tflite("SPLIT_V", static=(1, 2), in_numpy=True)
def _split_v(call: Call, x: Any, sizes: Any, axis: Any) -> Any:
    place, given = int(np.reshape(axis, ())), ints(sizes)
    given = [x.shape[place] - sum(n for n in given if n >= 0) if n < 0 else n for n in given]
    return tuple(call.xp.split(x, np.cumsum(given)[:-1].tolist(), place))


@tflite("SLICE", static=(1, 2), in_numpy=True)
def _slice_(call: Call, x: Any, begin: Any, size: Any) -> Any:
    where = []
    for axis, (start, count) in enumerate(zip(ints(begin), ints(size), strict=True)):
        if axis == 0 and start == 0 and call.exported and count == call.exported[0][0]:
            count = -1  # the whole batch
        where.append(slice(start, None if count < 0 else start + count))
    return x[tuple(where)]


@tflite("STRIDED_SLICE", static=(1, 2, 3), in_numpy=True)
def _strided_slice(call: Call, x: Any, begin: Any, end: Any, step: Any) -> Any:
    """Bits of masks: an open bound, a new axis, an axis that is dropped, an ellipsis."""
    masks = {key: call.get(f"{key}_mask", 0) for key in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    where: list[Any] = []
    for i, (a, b, s) in enumerate(zip(ints(begin), ints(end), ints(step), strict=True)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            where.append(Ellipsis)
        elif masks["new_axis"] & bit:
            where.append(None)
        elif masks["shrink_axis"] & bit:
            where.append(a)
        else:
            opened = masks["end"] & bit
            if i == 0 and a == 0 and s == 1 and call.exported and b == call.exported[0][0]:
                opened = 1  # the whole batch
            last = b + a if call.get("offset", 0) else b
            where.append(slice(None if masks["begin"] & bit else a, None if opened else last, s))
    return x[tuple(where)]


@tflite("REVERSE_V2", static=(1,), in_numpy=True)
def _reverse_v2(call: Call, x: Any, axes: Any) -> Any:
    return call.xp.flip(x, ints(axes))


@tflite("GATHER", in_numpy=True, weights=(0,))
def _gather(call: Call, x: Any, indices: Any) -> Any:
    if call.get("batch_dims", 0):
        raise call.refuse(
            "a GATHER with batch dimensions", "Use tf.gather without batch_dims, or one_hot and a product"
        )
    return onnx(call, "Gather", x, indices, axis=call.get("axis", 0))


@tflite("ONE_HOT", static=(1,))
def _one_hot(call: Call, indices: Any, depth: Any, on: Any, off: Any) -> Any:
    values = jnp.stack([jnp.reshape(off, ()), jnp.reshape(on, ())])
    return onnx(call, "OneHot", indices, depth, values, axis=call.get("axis", -1))


@tflite("FILL", static=(0,), in_numpy=True)
def _fill(call: Call, shape: Any, value: Any) -> Any:
    return call.xp.broadcast_to(call.xp.reshape(value, ()), call.sized(ints(shape)))


@tflite("RANK", in_numpy=True)
def _rank(call: Call, x: Any) -> Any:
    return np.array(x.ndim, np.int32)


@tflite("DEPTH_TO_SPACE")
def _depth_to_space(call: Call, x: Any) -> Any:
    return onnx(call, "DepthToSpace", x, blocksize=call.get("block", 0))


@tflite("SPACE_TO_DEPTH")
def _space_to_depth(call: Call, x: Any) -> Any:
    return onnx(call, "SpaceToDepth", x, blocksize=call.get("block", 0))


@tflite("SPACE_TO_BATCH_ND", static=(1, 2))
def _space_to_batch_nd(call: Call, x: Any, block: Any, pads: Any) -> Any:
    block = ints(block)
    m = len(block)
    rest = x.shape[1 + m :]
    x = pad_with(call, x, [(0, 0), *((int(a), int(b)) for a, b in pads), *[(0, 0)] * len(rest)], np.zeros((), x.dtype))
    sizes = [n // b for n, b in zip(x.shape[1 : 1 + m], block, strict=True)]
    y = jnp.reshape(x, (x.shape[0], *(v for pair in zip(sizes, block, strict=True) for v in pair), *rest))
    order = [*(2 + 2 * i for i in range(m)), 0, *(1 + 2 * i for i in range(m)), *range(1 + 2 * m, y.ndim)]
    return jnp.reshape(jnp.transpose(y, order), (-1, *sizes, *rest))


@tflite("BATCH_TO_SPACE_ND", static=(1, 2))
def _batch_to_space_nd(call: Call, x: Any, block: Any, crops: Any) -> Any:
    block = ints(block)
    m = len(block)
    sizes, rest = x.shape[1 : 1 + m], x.shape[1 + m :]
    count = x.shape[0] // int(np.prod(block))
    y = jnp.reshape(x, (*block, count, *sizes, *rest))
    order = [m, *(v for i in range(m) for v in (m + 1 + i, i)), *range(1 + 2 * m, y.ndim)]
    y = jnp.reshape(jnp.transpose(y, order), (count, *(n * b for n, b in zip(sizes, block, strict=True)), *rest))
    return pad_with(
        call, y, [(0, 0), *((-int(a), -int(b)) for a, b in crops), *[(0, 0)] * len(rest)], np.zeros((), x.dtype)
    )


def _resize(name: str, mode: str) -> None:
    @operator(f"{PREFIX}{name}", static=(1,))
    def apply(call: Call, x: Any, size: Any) -> Any:
        if call.get("align_corners", 0):
            coordinates, nearest = "align_corners", "round_prefer_ceil"
        elif call.get("half_pixel_centers", 0):
            coordinates, nearest = "half_pixel", "round_prefer_ceil"
        else:
            coordinates, nearest = "asymmetric", "floor"
        sizes = np.array(ints(size), np.int64)
        return onnx(
            call,
            "Resize",
            x,
            None,
            None,
            sizes,
            axes=[1, 2],
            mode=mode,
            coordinate_transformation_mode=coordinates,
            nearest_mode=nearest,
        )


_resize("RESIZE_BILINEAR", "linear")
_resize("RESIZE_NEAREST_NEIGHBOR", "nearest")


@tflite("UNIDIRECTIONAL_SEQUENCE_LSTM", weights=tuple(range(1, 18)))
def _unidirectional_sequence_lstm(call: Call, x: Any, *given: Any) -> Any:
    """Gates in the order input, forget, cell, output, without peepholes, projection or normalisation.

    The states start from zeros: they are variables, which hold zeros in a new interpreter.
    """
    w, r, others, b = given[0:4], given[4:8], given[8:11], given[11:15]
    if any(v is not None for v in (*others, *given[15:17], *given[19:])) or any(v is None for v in (*w, *r, *b)):
        raise call.refuse("an LSTM with peepholes, a projection or a norm", "Convert the model without it")
    if ACTIVATIONS[call.get("activation", 0)] != "TANH" or as_float(call.get("cell_clip", 0)):
        raise call.refuse("an LSTM with another activation than tanh, or with a clipped cell", "Convert it without it")
    order = (0, 3, 1, 2)
    weights, states, biases = (jnp.concatenate([parts[i] for i in order])[None] for parts in (w, r, b))
    biases = jnp.concatenate([biases, jnp.zeros_like(biases)], 1)
    major = bool(call.get("time_major", 0))
    node = Node("LSTM", call.node.name, (), (), {"hidden_size": states.shape[2]}, _VERSION)
    y = lstm(Call(node), x if major else jnp.swapaxes(x, 0, 1), weights, states, biases)[0]
    y = jnp.squeeze(y, 1)
    return y if major else jnp.swapaxes(y, 0, 1)
