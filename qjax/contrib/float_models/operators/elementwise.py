"""Functions of single elements, and arithmetic of two or more arrays."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, operator

# ---------------------------------------------------------------------- functions of one array


def _unary(name: str, function: str) -> None:
    @operator(name, layout="each", in_numpy=True)
    def apply(call: Call, x: Any) -> Any:
        return getattr(call.xp, function)(x)


for _name, _function in {
    "Abs": "abs",
    "Acos": "arccos",
    "Acosh": "arccosh",
    "Asin": "arcsin",
    "Asinh": "arcsinh",
    "Atan": "arctan",
    "Atanh": "arctanh",
    "BitwiseNot": "invert",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "negative",
    "Not": "logical_not",
    "Round": "round",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}.items():
    _unary(_name, _function)


def _activation(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return operator(*names, layout="each")


@_activation("Erf")
def _erf(call: Call, x: Any) -> Any:
    return lax.erf(x)


@operator("Identity", "Dropout", layout="each", in_numpy=True, static=())
def _identity(call: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    """Dropout is the identity outside of training; its second output is a mask of ones."""
    if training is not None and bool(np.asarray(training).any()) and not (ratio is not None and float(ratio) == 0):
        raise call.refuse(
            "a dropout that draws random numbers, because the file was exported in training mode",
            "Export the model in evaluation mode",
        )
    return (x, call.xp.ones_like(x, dtype=bool)) if call.wants(1) else x


@operator("Relu", layout="each")
def _relu(call: Call, x: Any) -> Any:
    return jnp.maximum(x, jnp.zeros((), x.dtype)) if not _is_float(x) else jax.nn.relu(x)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@_activation("Sigmoid")
def _sigmoid(call: Call, x: Any) -> Any:
    return jax.nn.sigmoid(x)


@_activation("LeakyRelu")
def _leaky_relu(call: Call, x: Any) -> Any:
    return jnp.where(x >= 0, x, x * call.like(call.get("alpha", 0.01), x))


@_activation("PRelu")
def _prelu(call: Call, x: Any, slope: Any) -> Any:
    x, slope = call.ranked(x, slope)
    return jnp.where(x >= 0, x, x * slope)


@_activation("ThresholdedRelu")
def _thresholded_relu(call: Call, x: Any) -> Any:
    return jnp.where(x > call.like(call.get("alpha", 1.0), x), x, jnp.zeros_like(x))


@_activation("Elu")
def _elu(call: Call, x: Any) -> Any:
    return jnp.where(x > 0, x, call.like(call.get("alpha", 1.0), x) * jnp.expm1(jnp.minimum(x, call.like(0, x))))


@_activation("Celu")
def _celu(call: Call, x: Any) -> Any:
    alpha = call.like(call.get("alpha", 1.0), x)
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, call.like(0, x)) / alpha))


@_activation("Selu")
def _selu(call: Call, x: Any) -> Any:
    alpha = call.like(call.get("alpha", 1.67326319217681884765625), x)
    gamma = call.like(call.get("gamma", 1.05070102214813232421875), x)
    return gamma * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, call.like(0, x))))


@_activation("Softplus")
def _softplus(call: Call, x: Any) -> Any:
    return jax.nn.softplus(x)


@_activation("Softsign")
def _softsign(call: Call, x: Any) -> Any:
    return x / (call.like(1, x) + jnp.abs(x))


@_activation("HardSigmoid")
def _hard_sigmoid(call: Call, x: Any) -> Any:
    alpha, beta = (call.like(call.get(*pair), x) for pair in (("alpha", 0.2), ("beta", 0.5)))
    return jnp.clip(x * alpha + beta, call.like(0, x), call.like(1, x))


@_activation("HardSwish")
def _hard_swish(call: Call, x: Any) -> Any:
    return x * jnp.clip(x * call.like(1 / 6, x) + call.like(0.5, x), call.like(0, x), call.like(1, x))


@_activation("Mish")
def _mish(call: Call, x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


@_activation("Swish")
def _swish(call: Call, x: Any) -> Any:
    return x * jax.nn.sigmoid(x * call.like(call.get("alpha", 1.0), x))


@_activation("Gelu")
def _gelu(call: Call, x: Any) -> Any:
    return jax.nn.gelu(x, approximate=call.get("approximate", "none") == "tanh")


@_activation("Shrink")
def _shrink(call: Call, x: Any) -> Any:
    bias, lambd = (call.like(call.get(*pair), x) for pair in (("bias", 0.0), ("lambd", 0.5)))
    return jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, jnp.zeros_like(x)))


@operator("Reciprocal", layout="each", in_numpy=True)
def _reciprocal(call: Call, x: Any) -> Any:
    return call.like(1, x) / x


@operator("IsInf", layout="each", in_numpy=True)
def _is_inf(call: Call, x: Any) -> Any:
    xp, negative, positive = call.xp, call.get("detect_negative", 1), call.get("detect_positive", 1)
    signs = (x < 0) & bool(negative) | (x > 0) & bool(positive)
    return xp.isinf(x) & signs


# ---------------------------------------------------------------------- two arrays and more


def _binary(name: str, function: str) -> None:
    @operator(name, layout="each", in_numpy=True)
    def apply(call: Call, a: Any, b: Any) -> Any:
        return getattr(call.xp, function)(*call.ranked(a, b))


for _name, _function in {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
}.items():
    _binary(_name, _function)


@operator("Div", layout="each", in_numpy=True)
def _div(call: Call, a: Any, b: Any) -> Any:
    """Integers are divided towards zero."""
    a, b = call.ranked(a, b)
    if call.xp.issubdtype(a.dtype, np.integer):
        if call.xp is np:
            return (np.abs(a) // np.abs(b) * (np.sign(a) * np.sign(b) if a.dtype.kind == "i" else 1)).astype(a.dtype)
        return lax.div(*jnp.broadcast_arrays(a, b))
    return a / b


@operator("Mod", layout="each", in_numpy=True)
def _mod(call: Call, a: Any, b: Any) -> Any:
    """fmod=1: the sign of the dividend; 0: that of the divisor."""
    a, b = call.ranked(a, b)
    return call.xp.fmod(a, b) if call.get("fmod", 0) else call.xp.mod(a, b)


@operator("Pow", layout="each", in_numpy=True, static=())
def _power(call: Call, x: Any, exponent: Any) -> Any:
    """An exponent that is one whole number becomes a product, which training and tables handle better."""
    if isinstance(exponent, np.ndarray) and exponent.size == 1 and call.xp is jnp and _is_float(x):
        value = float(exponent.reshape(()))
        if value.is_integer() and abs(value) <= 64:
            return lax.integer_pow(x, int(value))
        return jnp.sqrt(x) if value == 0.5 else jnp.power(x, call.like(value, x))
    x, exponent = call.ranked(x, exponent)
    if call.xp is jnp and x.dtype != exponent.dtype:
        if not _is_float(x) and _is_float(exponent):
            return jnp.power(x.astype(exponent.dtype), exponent).astype(x.dtype)
        exponent = exponent.astype(x.dtype)
    return call.xp.power(x, exponent).astype(x.dtype)


@operator("BitShift", in_numpy=True, layout="each")
def _bit_shift(call: Call, a: Any, b: Any) -> Any:
    a, b = call.ranked(a, b)
    return call.xp.left_shift(a, b) if call.get("direction") == "LEFT" else call.xp.right_shift(a, b)


def _fold(name: str, function: Callable[[Call, Any, Any], Any]) -> None:
    @operator(name, layout="each", in_numpy=True)
    def apply(call: Call, *arrays: Any) -> Any:
        return functools.reduce(functools.partial(function, call), call.ranked(*arrays))


_fold("Max", lambda call, a, b: call.xp.maximum(a, b))
_fold("Min", lambda call, a, b: call.xp.minimum(a, b))
_fold("Sum", lambda call, a, b: a + b)


@operator("Mean", layout="each", in_numpy=True)
def _mean(call: Call, *arrays: Any) -> Any:
    total = functools.reduce(lambda a, b: a + b, call.ranked(*arrays))
    return total / call.like(len(arrays), total)


@operator("Clip", layout="each", in_numpy=True)
def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    """Bounds are attributes before the operator set 11, and inputs from then on."""
    low = call.get("min") if low is None else low
    high = call.get("max") if high is None else high
    for bound, choose in ((low, call.xp.maximum), (high, call.xp.minimum)):
        if bound is not None:
            bound = call.like(bound, x) if isinstance(bound, (float, np.ndarray)) else bound
            x = choose(x, call.xp.reshape(bound, ()))
    return x


@operator("Where", layout="each", in_numpy=True)
def _where(call: Call, condition: Any, a: Any, b: Any) -> Any:
    return call.xp.where(*call.ranked(condition, a, b))


# ---------------------------------------------------------------------- types

TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
"""onnx.TensorProto.DataType, as far as JAX computes with the type."""


def cast_to(call: Call, x: Any, name: str) -> Any:
    """The array in another dtype; floats become integers by truncation, as in C."""
    if call.xp is np:
        if name == "bfloat16":
            return np.asarray(x).astype(jnp.bfloat16)
        return np.asarray(x).astype(name)
    if name == "float64" and not jax.config.jax_enable_x64:
        raise call.refuse(
            "float64, which JAX computes only with 64-bit types",
            'Export the model in float32, or set jax.config.update("jax_enable_x64", True)',
        )
    if not jax.config.jax_enable_x64:
        name = {"int64": "int32", "uint64": "uint32"}.get(name, name)
    return x.astype(name)


def type_of(call: Call, number: int) -> str:
    """The dtype for a number of ONNX's types."""
    if number not in TYPES:
        raise call.refuse(f"elements of type number {number}, which JAX does not compute with", "Leave the cast out")
    return TYPES[number]


@operator("Cast", layout="each", in_numpy=True)
def _cast(call: Call, x: Any) -> Any:
    return cast_to(call, x, type_of(call, int(call.get("to"))))


@operator("CastLike", layout="each", in_numpy=True)
def _cast_like(call: Call, x: Any, like: Any) -> Any:
    return cast_to(call, x, like.dtype.name)


@operator("BitCast", in_numpy=True)
def _bit_cast(call: Call, x: Any) -> Any:
    name = type_of(call, int(call.get("to")))
    return x.view(name) if call.xp is np else lax.bitcast_convert_type(x, name)


SQRT_HALF = math.sqrt(0.5)
