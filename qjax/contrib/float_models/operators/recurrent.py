"""LSTM, GRU and RNN, with the steps in a `lax.scan`. Inputs have the shape (time, batch, features)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.contrib.float_models.graph import Call, operator
from qjax.ops import products

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sigmoid": lambda x, a, b: jax.nn.sigmoid(x),
    "tanh": lambda x, a, b: jnp.tanh(x),
    "relu": lambda x, a, b: jax.nn.relu(x),
    "affine": lambda x, a, b: x * jnp.asarray(a, x.dtype) + jnp.asarray(b, x.dtype),
    "leakyrelu": lambda x, a, b: jnp.where(x >= 0, x, x * jnp.asarray(0.01 if a is None else a, x.dtype)),
    "hardsigmoid": lambda x, a, b: jnp.clip(
        x * jnp.asarray(0.2 if a is None else a, x.dtype) + jnp.asarray(0.5 if b is None else b, x.dtype), 0.0, 1.0
    ),
    "softsign": lambda x, a, b: x / (1 + jnp.abs(x)),
    "softplus": lambda x, a, b: jax.nn.softplus(x),
    "elu": lambda x, a, b: jnp.where(x > 0, x, jnp.asarray(1.0 if a is None else a, x.dtype) * jnp.expm1(x)),
}


def _functions(call: Call, defaults: Sequence[str], directions: int) -> list[list[Callable[[Any], Any]]]:
    """The activations of each direction."""
    names = call.get("activations") or list(defaults) * directions
    alphas, betas = iter(call.get("activation_alpha") or ()), iter(call.get("activation_beta") or ())
    found: list[Callable[[Any], Any]] = []
    for name in names:
        key = name.lower()
        if key not in _FUNCTIONS:
            raise call.refuse(f"the activation {name!r}", f"Use one of {', '.join(_FUNCTIONS)}")
        a = next(alphas, None) if key in ("affine", "leakyrelu", "hardsigmoid", "elu") else None
        b = next(betas, None) if key in ("affine", "hardsigmoid") else None
        found.append(lambda x, f=_FUNCTIONS[key], a=a, b=b: f(x, a, b))
    each = len(defaults)
    return [found[i * each : (i + 1) * each] for i in range(directions)]


def _product(x: Any, w: Any) -> Any:
    """x @ w.T."""
    return products.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), x.dtype)


def _run(
    call: Call,
    x: Any,
    lengths: Any,
    states: Sequence[Any],
    step: Callable[..., Sequence[Any]],
    reverse: bool,
) -> tuple[Any, Sequence[Any]]:
    """All outputs (time, batch, hidden) and the last states. step: (x of one time, states) -> new states."""
    time = x.shape[0]

    def body(carried: Any, given: Any) -> Any:
        now, index = given
        new = step(now, carried)
        if lengths is None:
            return tuple(new), new[0]
        inside = jnp.reshape(index < lengths, (-1, 1))
        kept = tuple(jnp.where(inside, a, b) for a, b in zip(new, carried, strict=True))
        return kept, jnp.where(inside, new[0], jnp.zeros_like(new[0]))

    last, outputs = lax.scan(body, tuple(states), (x, jnp.arange(time)), reverse=reverse)
    return outputs, last


def _recurrent(
    call: Call,
    x: Any,
    w: Any,
    lengths: Any,
    starts: Sequence[Any],
    defaults: Sequence[str],
    cell: Callable[[int, Sequence[Callable[[Any], Any]]], tuple[Callable[[Any], Any], Callable[..., Any]]],
) -> tuple[Any, list[Any]]:
    """Both directions of a recurrent layer: (time, directions, batch, hidden), and the last states.

    cell: (direction, activations) -> what is computed for all times at once, and the step.
    """
    if call.get("layout", 0):
        x = jnp.swapaxes(x, 0, 1)
    directions, hidden = w.shape[0], call.get("hidden_size")
    way = call.get("direction", "forward")
    functions = _functions(call, defaults, directions)
    outputs, finals = [], []
    for index in range(directions):
        states = []
        for start in starts:
            if start is None:
                states.append(jnp.zeros((x.shape[1], hidden), x.dtype))
            else:
                start = jnp.swapaxes(start, 0, 1) if call.get("layout", 0) else start
                # A state with a batch of 1 that the file fixes is that of every example.
                states.append(jnp.broadcast_to(start[index], (x.shape[1], hidden)))
        ahead, step = cell(index, functions[index])
        found, last = _run(call, ahead(x), lengths, states, step, way == "reverse" or index == 1)
        outputs.append(found)
        finals.append(last)
    y = jnp.stack(outputs, 1) if directions > 1 else jnp.expand_dims(outputs[0], 1)
    ends = [jnp.stack([f[i] for f in finals]) for i in range(len(starts))]
    if call.get("layout", 0):
        y, ends = jnp.transpose(y, (2, 0, 1, 3)), [jnp.swapaxes(e, 0, 1) for e in ends]
    return y, ends


def _clipped(call: Call, x: Any) -> Any:
    limit = call.get("clip")
    return x if limit is None else jnp.clip(x, call.like(-limit, x), call.like(limit, x))


def _bias(b: Any, index: int, parts: int, which: int) -> Any:
    """Of the biases of the input (0) or the state (1): those of one direction, as a row."""
    size = b.shape[1] // 2
    return jnp.reshape(b[index, which * size : (which + 1) * size], (1, -1))


@operator("LSTM", static=(), weights=(1, 2, 3))
def lstm(
    call: Call,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    c: Any = None,
    peepholes: Any = None,
) -> Any:
    """Gates in the order input, output, forget, cell."""
    if call.get("input_forget", 0):
        raise call.refuse("a forget gate that is coupled with the input gate", "Export the model without input_forget")

    def cell(index: int, functions: Sequence[Any]) -> Any:
        f, g, hh = functions

        def ahead(x: Any) -> Any:
            y = _product(x, w[index])
            return y if b is None else y + jnp.expand_dims(_bias(b, index, 4, 0) + _bias(b, index, 4, 1), 0)

        def step(now: Any, states: Any) -> Any:
            h, c = states
            i, o, forget, new = jnp.split(now + _product(h, r[index]), 4, -1)
            p = [0.0] * 3 if peepholes is None else jnp.split(peepholes[index][None], 3, -1)
            i, forget = i + p[0] * c, forget + p[2] * c
            i, forget, new = f(_clipped(call, i)), f(_clipped(call, forget)), g(_clipped(call, new))
            c = forget * c + i * new
            o = f(_clipped(call, o + p[1] * c))
            return o * hh(c), c

        return ahead, step

    y, (h_end, c_end) = _recurrent(call, x, w, lengths, (h, c), ("Sigmoid", "Tanh", "Tanh"), cell)
    return y, h_end, c_end


@operator("GRU", weights=(1, 2, 3))
def _gru(call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    """Gates in the order update, reset, hidden."""
    size = call.get("hidden_size")

    def cell(index: int, functions: Sequence[Any]) -> Any:
        f, g = functions

        def ahead(x: Any) -> Any:
            y = _product(x, w[index])
            return y if b is None else y + jnp.expand_dims(_bias(b, index, 3, 0), 0)

        def step(now: Any, states: Any) -> Any:
            (h,) = states
            own = r[index]
            behind = None if b is None else _bias(b, index, 3, 1)
            if call.get("linear_before_reset", 0):
                past = _product(h, own)
                past = past if behind is None else past + behind
                z, t = (
                    f(_clipped(call, a + p))
                    for a, p in zip(*(jnp.split(v, 3, -1)[:2] for v in (now, past)), strict=True)
                )
                new = g(_clipped(call, now[:, 2 * size :] + t * past[:, 2 * size :]))
            else:
                past = _product(h, own[: 2 * size])
                past = past if behind is None else past + behind[:, : 2 * size]
                z, t = (f(_clipped(call, a)) for a in jnp.split(now[:, : 2 * size] + past, 2, -1))
                inner = _product(t * h, own[2 * size :])
                inner = inner if behind is None else inner + behind[:, 2 * size :]
                new = g(_clipped(call, now[:, 2 * size :] + inner))
            return ((1 - z) * new + z * h,)

        return ahead, step

    y, (h_end,) = _recurrent(call, x, w, lengths, (h,), ("Sigmoid", "Tanh"), cell)
    return y, h_end


@operator("RNN", weights=(1, 2, 3))
def _rnn(call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    def cell(index: int, functions: Sequence[Any]) -> Any:
        (f,) = functions

        def ahead(x: Any) -> Any:
            y = _product(x, w[index])
            return y if b is None else y + jnp.expand_dims(_bias(b, index, 1, 0) + _bias(b, index, 1, 1), 0)

        def step(now: Any, states: Any) -> Any:
            return (f(_clipped(call, now + _product(states[0], r[index]))),)

        return ahead, step

    y, (h_end,) = _recurrent(call, x, w, lengths, (h,), ("Tanh",), cell)
    return y, h_end
