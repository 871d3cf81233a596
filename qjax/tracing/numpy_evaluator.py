"""Evaluates equations in NumPy's float64, so that tables of integer functions have the same bits on every machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Composite, Equation, Value

OUTER = "dot_general"
"""With no summed axes, this multiplies every element of one tensor with every element of the other."""

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.logical_and,
    "atan2": np.arctan2,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "cos": np.cos,
    "cosh": np.cosh,
    "div": np.divide,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "pow": np.power,
    "relu": lambda x: np.maximum(x, 0),
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    **dict.fromkeys(IDENTITIES, lambda x: x),
}
"""Elementwise primitives, on float64 and truth values."""


def _broadcast(eqn: Equation, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(eqn.out_shapes[0])
    for axis, place in enumerate(eqn.params["broadcast_dimensions"]):
        shape[place] = x.shape[1 + axis]
    return np.broadcast_to(x.reshape(x.shape[0], *shape), (x.shape[0], *eqn.out_shapes[0]))


def _slice(eqn: Equation, x: np.ndarray) -> np.ndarray:
    p = eqn.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    return x[(slice(None), *map(slice, p["start_indices"], p["limit_indices"], steps))]


def _concatenate(eqn: Equation, *parts: np.ndarray) -> np.ndarray:
    count = max(x.shape[0] for x in parts)
    wide = [np.broadcast_to(x, (count, *x.shape[1:])) for x in parts]
    return np.concatenate(wide, 1 + eqn.params["dimension"])


def _outer(eqn: Equation, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape, *(1,) * (y.ndim - 1)) * y.reshape(y.shape[0], *(1,) * (x.ndim - 1), *y.shape[1:])


def _reshape(eqn: Equation, x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], *eqn.out_shapes[0])


_MOVES: Mapping[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "convert_element_type": lambda eqn, x: x.astype(bool if eqn.out_dtypes[0] == np.bool_ else np.float64),
    "expand_dims": _reshape,
    "integer_pow": lambda eqn, x: x ** float(eqn.params["y"]),
    OUTER: _outer,
    "reshape": _reshape,
    "rev": lambda eqn, x: np.flip(x, tuple(1 + int(axis) for axis in eqn.params["dimensions"])),
    "slice": _slice,
    "squeeze": _reshape,
    "transpose": lambda eqn, x: x.transpose(0, *(1 + axis for axis in eqn.params["permutation"])),
}
"""Primitives with parameters; their arrays have one more axis in front, that of the integers."""


def knows(eqn: Equation) -> bool:
    """Whether an equation can be evaluated here."""
    if isinstance(eqn.source, Composite):
        return False
    if eqn.primitive == OUTER:
        (contracted, batch) = eqn.params["dimension_numbers"]
        return not any((*contracted, *batch))
    return eqn.primitive in _FUNCTIONS or eqn.primitive in _MOVES


def rows(
    equations: Sequence[Equation], root: Value, output: Value, known: Mapping[Value, np.ndarray], integers: np.ndarray
) -> np.ndarray:
    """A table with the equations' result for each integer; float32 [integers, the output's other axes].

    Args:
      root: the value in the equations that the integers replace. output: its first axes are the root's.
      known: constants that the equations read, other than literals.
    """
    size, rank = max(1, int(np.prod(root.shape))), len(root.shape)
    chunks = -(-len(integers) // size)
    filled = np.pad(integers, (0, chunks * size - len(integers)), mode="edge")
    env: dict[Value, np.ndarray] = {value: np.asarray(x)[None] for value, x in known.items()}
    env[root] = filled.reshape(chunks, *root.shape)

    needed, waiting = set[Equation](), {output}
    for eqn in reversed(equations):
        # skip equations whose results are known
        if waiting.intersection(eqn.outputs) and eqn.outputs[0] not in env:
            needed.add(eqn)
            waiting.update(eqn.inputs)

    def get(value: Value) -> np.ndarray:
        if value in env:
            return _wide(env[value])
        assert not isinstance(value.constant, Tracer)
        return _wide(np.asarray(value.constant)[None])

    with np.errstate(all="ignore"):
        for eqn in equations:
            if eqn not in needed:
                continue
            given = [get(value) for value in eqn.inputs]
            if eqn.primitive in _FUNCTIONS:
                # a scalar has only the axis of the integers, so give it the rank of the others
                most = max(x.ndim for x in given)
                given = [x.reshape(*x.shape, *(1,) * (most - x.ndim)) if x.ndim == 1 else x for x in given]
                env[eqn.outputs[0]] = _FUNCTIONS[eqn.primitive](*given)
            else:
                env[eqn.outputs[0]] = _MOVES[eqn.primitive](eqn, *given)
    shape = output.shape[rank:]
    found = np.broadcast_to(env[output], (chunks, *output.shape)).reshape(chunks * size, *shape)[: len(integers)]
    return found.astype(np.float32)


def _wide(x: np.ndarray) -> np.ndarray:
    floats = jax.dtypes.issubdtype(x.dtype, np.floating) or np.issubdtype(x.dtype, np.integer)
    return x.astype(np.float64) if floats else x
