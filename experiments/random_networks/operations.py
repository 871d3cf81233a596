"""What a random network is made of: each operation chooses its inputs and options, makes its layer, and runs.

An operation is one entry of `OPERATIONS`. `choose` gets a source of chance and the shapes that are there (without the
batch) and returns which of them it reads and its options, or None where nothing fits. `make` is the layer, None where
there is none. Options are plain data, so that a network can be printed, compared and made again.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

Shape = tuple[int, ...]
Options = Mapping[str, Any]
Chosen = tuple[list[int], dict[str, Any]] | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kind of step; often: how likely it is against the others."""

    choose: Callable[[random.Random, Sequence[Shape]], Chosen]
    call: Callable[..., Any]
    make: Callable[[Options, nnx.Rngs], Any] | None = None
    often: float = 1.0


OPERATIONS: dict[str, Operation] = {}


def recent(rng: random.Random, shapes: Sequence[Shape], fits: Callable[[Shape], bool] = bool) -> int | None:
    """One of the tensors that fit, the newest more likely."""
    found = [i for i, shape in enumerate(shapes) if fits(shape)]
    return found[-1 - min(int(rng.expovariate(0.9)), len(found) - 1)] if found else None


def unary(
    name: str,
    call: Callable[..., Any],
    options: Callable[[random.Random, Shape], dict[str, Any]] = lambda rng, shape: {},
    fits: Callable[[Shape], bool] = bool,
    make: Callable[[Options, nnx.Rngs], Any] | None = None,
    often: float = 1.0,
) -> None:
    """Register an operation of one tensor."""

    def choose(rng: random.Random, shapes: Sequence[Shape]) -> Chosen:
        at = recent(rng, shapes, fits)
        return None if at is None else ([at], options(rng, shapes[at]))

    OPERATIONS[name] = Operation(choose, call, make, often)


def binary(name: str, call: Callable[..., Any], often: float = 1.0, *, alike: bool = False) -> None:
    """Register an operation of two tensors that broadcast; alike: whose shapes are the same."""

    def choose(rng: random.Random, shapes: Sequence[Shape]) -> Chosen:
        first = recent(rng, shapes)
        if first is None:
            return None
        second = recent(rng, shapes, lambda shape: _meet(shape, shapes[first], alike))
        assert second is not None
        pair = [first, second]
        rng.shuffle(pair)
        return pair, {}

    OPERATIONS[name] = Operation(choose, call, None, often)


def _meet(one: Shape, other: Shape, alike: bool) -> bool:
    if alike:
        return one == other
    return len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))


def ranks(*allowed: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) in allowed


# ------------------------------------------------------------------ layers


def _padding(rng: random.Random, spatial: int) -> Any:
    kinds: list[Any] = ["SAME", "VALID", tuple((rng.randrange(3), rng.randrange(3)) for _ in range(spatial))]
    kinds += ["CAUSAL"] if spatial == 1 else []
    return rng.choice(kinds)


def _conv(rng: random.Random, shape: Shape) -> dict[str, Any]:
    spatial, channels = len(shape) - 1, shape[-1]
    groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    many = lambda *choices: tuple(rng.choice(choices) for _ in range(spatial))  # noqa: E731
    return {
        "inputs": channels,
        "features": groups * rng.choice([1, 1, 2, 3]),
        "kernel": many(1, 2, 3),
        "strides": many(1, 1, 2),
        "dilation": many(1, 1, 2),
        "input_dilation": many(*[1] * 9, 2),
        "padding": _padding(rng, spatial),
        "groups": groups,
        "bias": rng.random() < 0.7,
    }


def _make_conv(o: Options, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Conv(
        o["inputs"],
        o["features"],
        o["kernel"],
        strides=o["strides"],
        padding=o["padding"],
        input_dilation=o["input_dilation"],
        kernel_dilation=o["dilation"],
        feature_group_count=o["groups"],
        use_bias=o["bias"],
        rngs=rngs,
    )


def _transposed(rng: random.Random, shape: Shape) -> dict[str, Any]:
    made = _conv(rng, shape)
    padding = rng.choice(["SAME", "VALID"])
    return {**made, "padding": padding, "features": rng.choice([1, 2, 4]), "turned": rng.random() < 0.3}


def _make_transposed(o: Options, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.ConvTranspose(
        o["inputs"],
        o["features"],
        o["kernel"],
        strides=o["strides"],
        padding=o["padding"],
        kernel_dilation=o["dilation"],
        use_bias=o["bias"],
        transpose_kernel=o["turned"],
        rngs=rngs,
    )


def _dense(rng: random.Random, shape: Shape) -> dict[str, Any]:
    return {"inputs": shape[-1], "features": rng.choice([1, 2, 3, 4, 6, 8]), "bias": rng.random() < 0.7}


def _apply(layer: Any, o: Options, x: Any) -> Any:
    return layer(x)


unary(
    "dense",
    _apply,
    _dense,
    make=lambda o, rngs: nnx.Linear(o["inputs"], o["features"], use_bias=o["bias"], rngs=rngs),
    often=6,
)
unary("conv", _apply, _conv, ranks(2, 3), _make_conv, often=8)
unary("conv_transpose", _apply, _transposed, ranks(2, 3), _make_transposed, often=1.5)
unary(
    "all_axes",
    _apply,
    lambda rng, shape: {"shape": shape, "features": (rng.choice([1, 2]), rng.choice([2, 3]))},
    ranks(2, 3),
    lambda o, rngs: nnx.LinearGeneral(o["shape"], o["features"], axis=tuple(range(1, len(o["shape"]) + 1)), rngs=rngs),
)
unary(
    "einsum",
    _apply,
    lambda rng, shape: {"shape": (shape[-1], rng.choice([1, 2]), rng.choice([2, 4])), "bias": rng.random() < 0.5},
    make=lambda o, rngs: nnx.Einsum("...d,dhk->...hk", o["shape"], o["shape"][1:] if o["bias"] else None, rngs=rngs),
)
unary(
    "mix_positions",
    lambda layer, o, x: jnp.swapaxes(layer(jnp.swapaxes(x, 1, 2)), 1, 2),
    lambda rng, shape: {"inputs": shape[-2], "features": rng.choice([2, 3, 4])},
    ranks(2),
    lambda o, rngs: nnx.Linear(o["inputs"], o["features"], rngs=rngs),
)
_width = lambda rng, shape: {"width": shape[-1], "epsilon": rng.choice([1e-6, 1e-5, 1e-2])}  # noqa: E731
unary(
    "batch_norm",
    _apply,
    lambda rng, shape: {**_width(rng, shape), "scale": rng.random() < 0.8, "bias": rng.random() < 0.8},
    make=lambda o, rngs: nnx.BatchNorm(
        o["width"], epsilon=o["epsilon"], use_scale=o["scale"], use_bias=o["bias"], rngs=rngs
    ),
    often=5,
)
unary(
    "layer_norm",
    _apply,
    lambda rng, shape: {**_width(rng, shape), "scale": rng.random() < 0.8, "bias": rng.random() < 0.8},
    make=lambda o, rngs: nnx.LayerNorm(
        o["width"], epsilon=o["epsilon"], use_scale=o["scale"], use_bias=o["bias"], rngs=rngs
    ),
    often=2,
)
unary(
    "rms_norm",
    _apply,
    _width,
    make=lambda o, rngs: nnx.RMSNorm(o["width"], epsilon=o["epsilon"], rngs=rngs),
    often=1.5,
)
unary(
    "group_norm",
    _apply,
    lambda rng, shape: {
        **_width(rng, shape),
        "groups": rng.choice([g for g in range(1, shape[-1] + 1) if shape[-1] % g == 0]),
    },
    make=lambda o, rngs: nnx.GroupNorm(o["width"], o["groups"], epsilon=o["epsilon"], rngs=rngs),
)
unary(
    "instance_norm",
    _apply,
    _width,
    ranks(2, 3),
    lambda o, rngs: nnx.InstanceNorm(o["width"], epsilon=o["epsilon"], rngs=rngs),
    often=0.5,
)
unary("prelu", _apply, make=lambda o, rngs: nnx.PReLU(0.2), often=0.5)
unary("dropout", _apply, make=lambda o, rngs: nnx.Dropout(0.5, rngs=rngs), often=0.5)


def _attention(rng: random.Random, shape: Shape) -> dict[str, Any]:
    return {
        "width": shape[-1],
        "heads": rng.choice([1, 2]),
        "features": rng.choice([2, 4]),
        "causal": rng.random() < 0.5,
        "normalized": rng.random() < 0.2,
    }


def _attend(layer: Any, o: Options, x: Any) -> Any:
    mask = nnx.make_causal_mask(jnp.ones(x.shape[:2])) if o["causal"] else None
    return layer(x, mask=mask)


unary(
    "attention",
    _attend,
    _attention,
    ranks(2),
    lambda o, rngs: nnx.MultiHeadAttention(
        o["heads"],
        o["width"],
        o["features"],
        o["width"],
        normalize_qk=o["normalized"],
        decode=False,
        rngs=rngs,
    ),
    often=1.5,
)


def _recurrent(o: Options, rngs: nnx.Rngs) -> nnx.Module:
    cell = getattr(nnx, o["cell"])(o["inputs"], o["features"], rngs=rngs)
    return nnx.RNN(cell, reverse=o["reverse"], rngs=rngs)


unary(
    "recurrent",
    lambda layer, o, x: layer(x) if o["sequence"] else layer(x)[:, -1],
    lambda rng, shape: {
        "inputs": shape[-1],
        "features": rng.choice([2, 3]),
        "cell": rng.choice(["LSTMCell", "GRUCell", "SimpleCell", "OptimizedLSTMCell"]),
        "sequence": rng.random() < 0.6,
        "reverse": rng.random() < 0.2,
    },
    lambda shape: len(shape) == 2 and shape[0] <= 4,
    _recurrent,
    often=1.0,
)


def _embed(o: Options, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Embed(o["vocabulary"], o["width"], rngs=rngs)


# only at the front: `grammar` puts it there
OPERATIONS["embed"] = Operation(lambda rng, shapes: None, _apply, _embed, 0.0)
