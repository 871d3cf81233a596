"""Runs in numpy what JAX is asked to compile, for tests that do not ask what XLA makes of a program.

XLA needs 30 milliseconds for one addition of a new shape and seconds for a network, and the suite has tens of
thousands of programs. Integers have the same codes in numpy, to the bit. Floats (what calibration observes, a step of
training) are as good as XLA's, but not the same bits.

JAX has no public place where every program passes, whether it is one operation or a function under `jax.jit`: this
takes the function that compiles and runs one, by its private name. A version of JAX without it compiles everything,
which is slower and tests the same.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.special
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding

from qjax.jaxprs.evaluator import Evaluator, Rule
from qjax.jaxprs.rules import convolve, dot, multiply
from qjax.support.errors import Unsupported
from tests.layers import round_trip

CALLS = 40
"""A program that runs this often is compiled, which costs as much as some dozens of runs in numpy."""
EQUATIONS = 40_000
"""A program with more, each turn of a loop counted, is compiled at once."""


class Switch:
    """Whether numpy computes; conftest turns it for each test."""

    on = False
    put: Callable[..., jax.Array]
    """Makes an array of JAX of one of numpy, in a tenth of the time that `jax.device_put` takes."""


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """For what a test of XLA needs and does not ask about, such as the graph whose program it compiles."""
    before, Switch.on = Switch.on, not round_trip.always_compiled
    try:
        yield
    finally:
        Switch.on = before


def install() -> None:
    """From here on, programs run in numpy while the switch is on."""
    try:
        from jax._src import dispatch, pjit
        from jax._src.interpreters import pxla

        compiled = pjit._pjit_call_impl_python
        compiled_primitive = dispatch.xla_primitive_callable
        Switch.put = staticmethod(pxla.batched_device_put)
    except (ImportError, AttributeError):
        return

    def call(*arguments: Any, jaxpr: Any, **options: Any) -> Any:
        if not Switch.on or not _may_run(jaxpr, arguments, options):
            return compiled(*arguments, jaxpr=jaxpr, **options)
        Switch.on = False
        # JAX must not ask itself for the one operation that it is being asked for
        try:
            results = (_EVALUATOR if len(jaxpr.eqns) > 1 else _WITHOUT_JAX).evaluate(
                jaxpr, *_as_traced(jaxpr, arguments)
            )
        except Unsupported:
            return compiled(*arguments, jaxpr=jaxpr, **options)
        finally:
            Switch.on = True
        # without an executable, a profile and constants, JAX asks again the next time
        return [_as_jax(result, arguments) for result in results], None, None, []

    @functools.cache
    def primitive(prim: Any, **params: Any) -> Callable[..., Any]:
        return _Operation(prim, params, compiled_primitive(prim, **params))

    pjit._pjit_call_impl_python = call
    dispatch.xla_primitive_callable = primitive


def _as_traced(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with the dtypes of the trace: JAX narrows what a caller gives in 64 bits."""
    return [
        x.astype(aval.dtype) if isinstance(x, np.ndarray) and x.dtype != aval.dtype else x
        for x, aval in zip(arguments, jaxpr.in_avals, strict=True)
    ]


class _Operation:
    """One operation outside of `jax.jit`: JAX looks up a program for it, which costs more than most operations."""

    def __init__(self, primitive: Any, params: Mapping[str, Any], compiled: Callable[..., Any]) -> None:
        self.primitive, self.params, self.compiled = primitive, params, compiled
        self._rules: dict[Any, Callable[[Sequence[Any]], Sequence[Any]] | None] = {}
        self._calls: dict[Any, int] = {}

    def __call__(self, *operands: Any) -> Any:
        if not Switch.on:
            return self.compiled(*operands)
        Switch.on = False
        try:
            types = (*map(_type, operands), jax.config.jax_enable_x64)
            calls = self._calls[types] = self._calls.get(types, 0) + 1
            if None not in types and calls <= CALLS and _is_plain():
                if types not in self._rules:
                    self._rules[types] = self._read(operands)
                rule = self._rules[types]
                if rule is not None:
                    arrays = [np.asarray(x) for x in operands]
                    with np.errstate(all="ignore"):
                        results = [_as_jax(np.asarray(y), arrays) for y in rule(arrays)]
                    return results if self.primitive.multiple_results else results[0]
        except Unsupported:
            pass
        finally:
            Switch.on = True
        return self.compiled(*operands)

    def _read(self, operands: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        program = jax.make_jaxpr(lambda *xs: self.primitive.bind(*xs, **self.params))(*operands)
        if len(program.eqns) != 1 or program.effects or program.jaxpr.outvars != program.eqns[0].outvars:
            return None
        if any(
            getattr(aval, "weak_type", False) or getattr(aval, "dtype", None) == jax.dtypes.float0
            for aval in program.out_avals
        ):
            return None
        (equation,) = program.eqns
        # a literal stands in the text, and not among the operands
        return _WITHOUT_JAX.rule(equation) if len(equation.invars) == len(operands) else None


def _type(x: Any) -> Any:
    """What decides of an operand how it is computed with; None for what only XLA takes."""
    if isinstance(x, jax.Array):
        extended = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        return None if extended or not _is_on_first(x.sharding) else (x.shape, x.dtype, x.aval.weak_type)
    return (x.shape, x.dtype, False) if isinstance(x, (np.ndarray, np.generic)) else None


def _is_plain() -> bool:
    config = jax.config
    return not (
        config.jax_debug_nans
        or config.jax_debug_infs
        or config.jax_default_device is not None
        or not jax.sharding.get_abstract_mesh().empty
    )


_runs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How often each program ran."""


def _may_run(jaxpr: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether nothing is asked for that only XLA has: devices, donated memory, effects, weak types, NaNs as errors."""
    shardings = [*options["in_shardings"], *options["out_shardings"]]
    if (
        jaxpr.effects
        or any(options["donated_invars"])
        or not options["ctx_mesh"].empty
        or any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
        or not all(_is_on_first(getattr(x, "sharding", _FIRST)) for x in arguments)
        or any(getattr(aval, "weak_type", False) or aval.dtype == jax.dtypes.float0 for aval in jaxpr.out_avals)
        or jax.config.jax_debug_nans
        or jax.config.jax_debug_infs
    ):
        return False
    runs = _runs.get(jaxpr, 0)
    if runs == 0 and _count_equations(jaxpr) > EQUATIONS:
        runs = CALLS
    _runs[jaxpr] = runs + 1
    return runs < CALLS


_FIRST = SingleDeviceSharding(jax.devices("cpu")[0])


def _is_on_first(sharding: Any) -> bool:
    return isinstance(sharding, SingleDeviceSharding) and sharding.device_set == _FIRST.device_set


def _count_equations(jaxpr: Any) -> float:
    """How many run, each turn of a loop counted; a loop of unknown length counts as twenty turns."""
    count: float = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "shard_map":
            return float("inf")
        turns = eqn.params["length"] if name == "scan" else 20 if name == "while" else 1
        values = [each for value in eqn.params.values() for each in (value if isinstance(value, tuple) else [value])]
        programs = [value for value in values if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        count += turns * max(sum(map(_count_equations, programs)), 1)
    return count


def _as_jax(result: Any, operands: Sequence[Any] = ()) -> Any:
    if isinstance(result, jax.Array):
        return result
    # the array must not change with one of the caller's, and keeps 64 bits also outside of `enable_x64`
    if not result.flags.owndata or any(result is x for x in operands):
        result = result.copy()
    aval = ShapedArray(result.shape, result.dtype)
    return Switch.put(aval, _FIRST, [result], list(_FIRST.device_set), committed=False, enable_x64=True)


# ---------------------------------------------------------------------------- floats


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
        return multiply(a, b, dtype)
    wide = np.result_type(dtype, np.float32)
    return np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)


def _by_jax(eqn: Any, inputs: Any) -> Any:
    """Anything else, by itself, as JAX does it."""
    with jax.enable_x64(True):
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


def _platform(out: ShapedArray, params: Any) -> Any:
    """The CPU's, because a part of the same function may be compiled for it and read what this part keeps."""
    platforms = params["platforms"]
    found = (n for n, names in enumerate(platforms) if names is not None and "cpu" in names)
    return np.int32(next(found, platforms.index(None)))


RULES: dict[str, Rule] = {
    **{name: _function(function) for name, function in _FUNCTIONS.items()},
    "conv_general_dilated": functools.partial(convolve, product=_product),
    "cumsum": _cumsum,
    "dot_general": functools.partial(dot, product=_product),
    "integer_pow": lambda out, params, x: np.power(x, x.dtype.type(params["y"])),
    "qjax_layer": lambda out, params, *inputs: _EVALUATOR.evaluate(
        jax.make_jaxpr(params["layer"].function)(*inputs), *inputs
    ),
    "platform_index": _platform,
    "pure_callback": lambda out, params, *inputs: [np.asarray(y) for y in params["callback"](*inputs)],
    "pvary": lambda out, params, *inputs: list(inputs),
    "reduce_sum": _sum,
}
_EVALUATOR, _WITHOUT_JAX = Evaluator(RULES, _by_jax), Evaluator(RULES)
