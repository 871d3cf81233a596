"""Runs what qjax compiles in numpy instead, for tests that do not ask what XLA makes of a program.

Compiling is most of a test's time. Integers have the same codes in numpy, to the bit. Floats (what calibration
observes, a step of training) are as good as XLA's, but not the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import scipy.special
from jax.core import ShapedArray

from qjax import calibrating, compiled_call, model
from qjax.comparison import verify
from qjax.export import integer_graph
from qjax.jaxprs import evaluator
from qjax.run import interpreter, stepwise


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda out, params, *inputs: np.asarray(function(*inputs)).astype(out.dtype)


def _sum(out: ShapedArray, params: Any, x: Any) -> Any:
    return np.add.reduce(x, axis=tuple(params["axes"]), dtype=x.dtype)


def _cumsum(out: ShapedArray, params: Any, x: Any) -> Any:
    axis = params["axis"]
    if params["reverse"]:
        return np.flip(np.add.accumulate(np.flip(x, axis), axis=axis, dtype=x.dtype), axis)
    return np.add.accumulate(x, axis=axis, dtype=x.dtype)


def _product(a: Any, b: Any, dtype: Any) -> Any:
    if a.dtype.kind in "iub":
        return evaluator.multiply(a, b, dtype)
    wide = np.result_type(dtype, np.float32)
    return np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)


def _by_jax(eqn: Any, inputs: Any) -> Any:
    """Anything else, by itself, as JAX does it."""
    results = eqn.primitive.bind(*map(jax.device_put, inputs), **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan2": np.arctan2,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": scipy.special.erf,
    "erf_inv": scipy.special.erfinv,
    "erfc": scipy.special.erfc,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "lgamma": scipy.special.gammaln,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": scipy.special.expit,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "tan": np.tan,
    "tanh": np.tanh,
}
RULES: dict[str, evaluator.Rule] = {
    **{name: _function(function) for name, function in _FUNCTIONS.items()},
    "conv_general_dilated": functools.partial(evaluator.convolve, product=_product),
    "cumsum": _cumsum,
    "dot_general": functools.partial(evaluator.dot, product=_product),
    "integer_pow": lambda out, params, x: np.power(x, x.dtype.type(params["y"])),
    "qjax_layer": lambda out, params, *inputs: evaluator.evaluate(
        jax.make_jaxpr(params["layer"].function)(*inputs), *inputs, rules=RULES, otherwise=_by_jax
    ),
    "pvary": lambda out, params, *inputs: list(inputs),
    "reduce_sum": _sum,
}


class Switch:
    """Whether numpy computes; conftest turns it for each test."""

    on = False


def jit(function: Callable[..., Any], static_argnums: Any = (), **options: Any) -> Callable[..., Any]:
    """`jax.jit`, or the same without a compiler where the switch is on."""
    compiled = jax.jit(function, static_argnums=static_argnums, **options)
    computed = evaluator.run_in_numpy(function, static_argnums, RULES, _by_jax)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return (computed if Switch.on and not jax.config.jax_disable_jit else compiled)(*arguments)

    return call


def install() -> None:
    """Put `jit` in the place of `jax.jit` where qjax runs graphs, calibrates and compares."""
    for module in (interpreter, integer_graph, stepwise, verify, calibrating, model):
        setattr(module, "jit", jit)  # noqa: B010
    calibrating._compiled_step = jit(calibrating._step, (0, 4))
    calibrating._compiled_weights = jit(calibrating._weights, (0, 3, 4))
    compiled_call._compiled = jit(compiled_call._outputs, (0, 3))
    model._compiled_codes = jit(model._codes, (0, 3))
