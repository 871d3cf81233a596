"""Operations without layers: functions of one tensor, pools, moves, and what joins two tensors."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.random_networks.operations import OPERATIONS, Chosen, Operation, Shape, binary, ranks, recent, unary

# ------------------------------------------------------------------ functions of one tensor

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": nnx.relu,
    "relu6": nnx.relu6,
    "leaky_relu": nnx.leaky_relu,
    "gelu": nnx.gelu,
    "silu": nnx.silu,
    "sigmoid": nnx.sigmoid,
    "tanh": jnp.tanh,
    "elu": nnx.elu,
    "selu": nnx.selu,
    "celu": nnx.celu,
    "softplus": nnx.softplus,
    "soft_sign": nnx.soft_sign,
    "hard_swish": nnx.hard_swish,
    "hard_sigmoid": nnx.hard_sigmoid,
    "hard_tanh": nnx.hard_tanh,
    "log_sigmoid": nnx.log_sigmoid,
    "abs": jnp.abs,
    "square": jnp.square,
    "negative": jnp.negative,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.square(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "erf": jax.lax.erf,
    "floor": jnp.floor,
    "sign": jnp.sign,
    "clip": lambda x: jnp.clip(x, -0.7, 1.1),
    "affine": lambda x: x * 0.3 + 0.7,
    "shifted_relu": lambda x: nnx.relu(x + 0.4) - 0.2,
    "chain": lambda x: jnp.tanh(x) * nnx.sigmoid(x) + 0.5 * x,
    "reciprocal": lambda x: 1 / (1.5 + jnp.abs(x)),
    "halves": lambda x: x / 2,
    "where": lambda x: jnp.where(x > 0.1, x, 0.25 * x),
}
for _name, _function in _FUNCTIONS.items():
    unary(_name, lambda layer, o, x, f=_function: f(x), often=4 if _name == "relu" else 0.35)

_any_axis = lambda rng, shape: {"axis": rng.randrange(1, len(shape) + 1)}  # noqa: E731


def _any_axes(rng: random.Random, shape: Shape) -> dict[str, Any]:
    axes = range(1, len(shape) + 1)
    return {"axes": tuple(sorted(rng.sample(axes, rng.randint(1, len(axes))))), "keep": rng.random() < 0.4}


for _name, _function in {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "logsumexp": jax.nn.logsumexp,
}.items():
    unary(
        _name,
        lambda layer, o, x, f=_function: f(x, axis=o["axes"], keepdims=o["keep"]),
        _any_axes,
        often=1.5 if _name == "mean" else 0.4,
    )
unary("cumsum", lambda layer, o, x: jnp.cumsum(x, axis=o["axis"]), _any_axis, often=0.5)
unary("cummax", lambda layer, o, x: jax.lax.cummax(x, axis=o["axis"]), _any_axis, often=0.3)
unary("softmax", lambda layer, o, x: jax.nn.softmax(x, axis=o["axis"]), _any_axis, often=1.5)
unary("log_softmax", lambda layer, o, x: jax.nn.log_softmax(x, axis=o["axis"]), _any_axis, often=0.5)
unary(
    "masked_softmax",
    lambda layer, o, x: jax.nn.softmax(jnp.where(jnp.asarray(o["mask"]), x, -jnp.inf), axis=-1),
    lambda rng, shape: {"mask": (True, *(rng.random() < 0.6 for _ in range(shape[-1] - 1)))},
    often=0.4,
)
unary(
    "unit",
    lambda layer, o, x: x / (jnp.linalg.norm(x, axis=o["axis"], keepdims=True) + 1e-3),
    _any_axis,
    often=0.4,
)
unary("top_k", lambda layer, o, x: jax.lax.top_k(x, 1)[0], often=0.3)

# ------------------------------------------------------------------ pools and moves


def _pool(rng: random.Random, shape: Shape) -> dict[str, Any]:
    spatial = len(shape) - 1
    return {
        "window": tuple(rng.choice([1, 2, 2, 3]) for _ in range(spatial)),
        "strides": tuple(rng.choice([1, 2]) for _ in range(spatial)),
        "padding": rng.choice(["SAME", "VALID"]),
    }


for _name, _function in {"avg_pool": nnx.avg_pool, "max_pool": nnx.max_pool, "min_pool": nnx.min_pool}.items():
    unary(
        _name,
        lambda layer, o, x, f=_function: f(x, o["window"], o["strides"], o["padding"]),
        _pool,
        ranks(2, 3),
        often=0.4 if _name == "min_pool" else 1.2,
    )

unary("flatten", lambda layer, o, x: x.reshape(x.shape[0], -1), fits=ranks(2, 3), often=1.5)
unary(
    "fold",
    lambda layer, o, x: x.reshape(x.shape[0], *o["shape"]),
    lambda rng, shape: {"shape": (2, shape[-1] // 2) if shape[-1] % 2 == 0 else (shape[-1], 1)},
    ranks(1),
)
unary(
    "transpose",
    lambda layer, o, x: jnp.transpose(x, (0, *o["order"])),
    lambda rng, shape: {"order": tuple(rng.sample(range(1, len(shape) + 1), len(shape)))},
    ranks(2, 3),
    often=0.7,
)
unary("flip", lambda layer, o, x: jnp.flip(x, o["axis"]), _any_axis, often=0.3)
unary("roll", lambda layer, o, x: jnp.roll(x, 1, o["axis"]), _any_axis, often=0.3)
unary("repeat", lambda layer, o, x: jnp.repeat(x, 2, o["axis"]), _any_axis, often=0.3)
unary(
    "slice",
    lambda layer, o, x: jax.lax.slice_in_dim(x, o["start"], None, o["stride"], o["axis"]),
    lambda rng, shape: {**_any_axis(rng, shape), "start": rng.randrange(2), "stride": rng.choice([1, 2])},
    often=0.7,
)
unary(
    "take",
    lambda layer, o, x: jnp.take(x, jnp.asarray(o["places"]), axis=o["axis"]),
    lambda rng, shape: {**_any_axis(rng, shape), "places": tuple(rng.randrange(min(shape)) for _ in range(3))},
    often=0.4,
)
unary(
    "pad",
    lambda layer, o, x: jnp.pad(x, ((0, 0), *o["padding"])),
    lambda rng, shape: {"padding": tuple((rng.randrange(2), rng.randrange(2)) for _ in shape)},
    often=0.4,
)
unary(
    "resize",
    lambda layer, o, x: jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), o["method"]),
    lambda rng, shape: {"method": rng.choice(["nearest", "bilinear"])},
    ranks(3),
    often=0.4,
)
unary(
    "parts",
    lambda layer, o, x: x[..., : x.shape[-1] // 2] * nnx.sigmoid(x[..., x.shape[-1] // 2 :]),
    fits=lambda shape: bool(shape) and shape[-1] % 2 == 0,
    often=0.7,
)

# ------------------------------------------------------------------ two tensors

binary("add", lambda layer, o, x, y: x + y, 4)
binary("subtract", lambda layer, o, x, y: x - y)
binary("multiply", lambda layer, o, x, y: x * y, 1.5)
binary("divide", lambda layer, o, x, y: x / (1 + jnp.abs(y)), 0.4)
binary("maximum", lambda layer, o, x, y: jnp.maximum(x, y), 0.5)
binary("minimum", lambda layer, o, x, y: jnp.minimum(x, y), 0.5)
binary("choose", lambda layer, o, x, y: jnp.where(x > y, x, 0.5 * y), 0.4)
binary("add_relu", lambda layer, o, x, y: nnx.relu(x + y), 1.5)
binary("concatenate", lambda layer, o, x, y: jnp.concatenate([x, y], axis=-1), 2, alike=True)
binary("stack", lambda layer, o, x, y: jnp.stack([x, y], axis=1).max(axis=1), 0.4, alike=True)


def _matmul(rng: random.Random, shapes: Sequence[Shape]) -> Chosen:
    first = recent(rng, shapes, ranks(2))
    if first is None:
        return None
    second = recent(rng, shapes, lambda shape: len(shape) == 2 and shape[-1] == shapes[first][-1])
    return [first, second if second is not None else first], {}


OPERATIONS["matmul"] = Operation(_matmul, lambda layer, o, x, y: jnp.einsum("btd,bsd->bts", x, y), None, 1.0)

__all__ = ["OPERATIONS"]
