"""Random networks: a number says which steps, on which shapes, with which parameters."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.random_networks.operations import OPERATIONS, Shape

LARGEST = 400
"""Elements of one example of any tensor."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation. inputs: positions among the network's inputs and the steps before. layer: the attribute that holds
    its layer, which two steps may share."""

    kind: str
    inputs: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    layer: str

    def run(self, layer: Any, values: Sequence[Any]) -> Any:
        return OPERATIONS[self.kind].call(layer, dict(self.options), *(values[i] for i in self.inputs))

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options)
        return f"{self.layer}({', '.join(map(str, self.inputs))}{'; ' * bool(options)}{options})"


@dataclasses.dataclass(frozen=True)
class Program:
    """inputs: shapes without the batch. tokens: of these, which are indices. outputs: positions."""

    inputs: tuple[Shape, ...]
    vocabulary: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{i}: input {shape}" for i, shape in enumerate(self.inputs)]
        lines += [f"{i}: {step}" for i, step in enumerate(self.steps, len(self.inputs))]
        if self.vocabulary:
            lines[0] += f", indices below {self.vocabulary}"
        return "\n".join([*lines, f"outputs {self.outputs}"])


class Network(nnx.Module):
    """A program and its layers."""

    def __init__(self, program: Program, rngs: nnx.Rngs) -> None:
        self.program = program
        for step in program.steps:
            make = OPERATIONS[step.kind].make
            if make is not None and not hasattr(self, step.layer):
                setattr(self, step.layer, make(dict(step.options), rngs))

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        for step in self.program.steps:
            values.append(step.run(getattr(self, step.layer, None), values))
        outputs = [values[i] for i in self.program.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _embed(rng: random.Random, length: int) -> tuple[Shape, int, Step]:
    vocabulary, width = rng.choice([5, 9, 16]), rng.choice([2, 4, 6])
    return (length,), vocabulary, Step("embed", (0,), (("vocabulary", vocabulary), ("width", width)), "embed0")


def shape_of(step: Step, shapes: Sequence[Shape]) -> Shape | None:
    """What a step makes of these shapes; None where it does not go, or grows too large."""
    operation = OPERATIONS[step.kind]

    def call(*xs: Any) -> Any:
        layer = None if operation.make is None else operation.make(dict(step.options), nnx.Rngs(0))
        if layer is not None:
            layer.eval()
        return operation.call(layer, dict(step.options), *xs)

    given = [jax.ShapeDtypeStruct((2, *shapes[i]), jnp.float32) for i in step.inputs]
    try:
        found = nnx.eval_shape(call, *given)
    except (ValueError, TypeError, ZeroDivisionError):
        return None
    shape = tuple(found.shape)
    if shape[:1] != (2,) or not 0 < math.prod(shape) <= 2 * LARGEST or len(shape) > 5:
        return None
    return shape[1:]


def program_of(rng: random.Random, most: int = 10) -> Program:
    """A network of 1 to 10 steps, at most `most`."""
    kinds, weights = list(OPERATIONS), [operation.often for operation in OPERATIONS.values()]
    shapes: list[Shape] = []
    steps: list[Step] = []
    vocabulary = 0
    form = rng.choice(["image", "image", "image", "sequence", "sequence", "tokens", "vector"])
    first = {
        "image": (rng.choice([3, 4, 6]), rng.choice([3, 5, 6]), rng.choice([1, 2, 3, 4])),
        "sequence": (rng.choice([2, 3, 4]), rng.choice([2, 3, 4, 6])),
        "vector": (rng.choice([2, 3, 5, 8]),),
    }
    if form == "tokens":
        length = rng.choice([2, 3, 4])
        inputs, vocabulary, step = _embed(rng, length)
        steps.append(step)
        given: list[Shape] = [inputs]
        # the indices themselves are no tensor that other steps read
        shapes += [(), (length, dict(step.options)["width"])]
    else:
        given = [first[form]] * (2 if rng.random() < 0.2 else 1)
        shapes += given
    wanted = min(rng.choice([1, 1, 2, 2, 3, 3, 4, 5, 6, 10]), most)
    tries = 0
    while len(steps) < wanted and tries < 100:
        tries += 1
        (kind,) = rng.choices(kinds, weights)
        chosen = OPERATIONS[kind].choose(rng, shapes)
        if chosen is None:
            continue
        inputs_, options = chosen
        shared = [s for s in steps if s.kind == kind and OPERATIONS[kind].make is not None]
        twin = rng.choice(shared) if shared and rng.random() < 0.3 else None
        if twin is not None and shapes[twin.inputs[0]][-1] == shapes[inputs_[0]][-1]:
            step = dataclasses.replace(twin, inputs=tuple(inputs_))
        else:
            step = Step(kind, tuple(inputs_), tuple(options.items()), f"{kind}{len(given) + len(steps)}")
        shape = shape_of(step, shapes)
        if shape is None or shape == ():
            continue
        steps.append(step)
        shapes.append(shape)
    last = len(shapes) - 1
    outputs = [last]
    if rng.random() < 0.25 and len(steps) > 2:
        outputs.append(rng.randrange(len(given) + (1 if vocabulary else 0), last))
    return Program(tuple(given), vocabulary, tuple(steps), tuple(outputs))


def network_of(program: Program, rng: np.random.Generator) -> Network:
    """The network with parameters and statistics drawn by numpy: JAX would compile a function for every shape."""
    network = nnx.eval_shape(lambda: Network(program, nnx.Rngs(0)))

    def fill(path: Any, x: Any) -> Any:
        name = str(getattr(path[-2] if len(path) > 1 else path[-1], "key", path))
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), x.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        drawn = rng.normal(size=x.shape)
        if name == "var":
            drawn = 0.3 + drawn**2
        elif name == "scale":
            drawn = 1 + 0.3 * drawn
        elif name in ("bias", "mean", "negative_slope"):
            drawn = 0.3 * drawn
        else:
            drawn = drawn / math.sqrt(max(math.prod(x.shape[:-1]), 1)) * rng.choice([0.5, 1, 1, 2])
            if x.ndim and rng.random() < 0.1:
                drawn[..., 0] = 0
        return jnp.asarray(np.asarray(drawn, np.float32), x.dtype)

    state = jax.tree_util.tree_map_with_path(fill, nnx.state(network))
    nnx.update(network, state)
    return network


def batch_of(program: Program, rng: np.random.Generator, size: int, spread: float = 1.0) -> tuple[Any, ...]:
    """Arguments for one call."""
    found: list[Any] = []
    for index, shape in enumerate(program.inputs):
        if program.vocabulary and index == 0:
            found.append(jnp.asarray(rng.integers(0, program.vocabulary, (size, *shape)), jnp.int32))
        else:
            found.append(jnp.asarray((spread * rng.normal(size=(size, *shape))).astype(np.float32)))
    return tuple(found)
